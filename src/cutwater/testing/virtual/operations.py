"""Operators of a simulated cluster: they trim, change topics and log streams, and add, replace and remove storage
nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cutwater.admin.operations import Admin
from cutwater.client.async_client import AsyncClient
from cutwater.core.requests import StreamDescription
from cutwater.errors import CutwaterError
from cutwater.testing.checkers.record import TrimOp
from cutwater.testing.virtual.cluster import NODE_PORT
from cutwater.testing.virtual.workload import PLAIN, TYPED, AppendingClient, VirtualClient
from cutwater.types import GLSN, LogStreamId, StorageNodeId
from cutwater.wire.addresses import format_address

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

ADMIN_TIMEOUT_MS = 2_000
NODES_ADDED_MAX = 2
FINISHED_TO_DRAIN = 0.3
REMOVALS_MAX = 10
"""How often an operator tries to remove a storage node that still holds something."""
STREAMS_MAX = 4
COPIES_MAX = 4
SEALED_LONGER = 0.2
"""Share of seals that last for a while."""
SEALED_SECONDS_MAX = 1.0
"""Producers leave a log stream that is sealed for half a second."""


class VirtualTrimmer(VirtualClient):
    """Trims the beginning of a topic, at the beginning of an append."""

    async def run(self, log: AsyncClient) -> None:
        history = self.world.history
        while not self.world.is_stopping:
            await self.pause(self.world.options.trim_every)
            acks = [op.ack.glsn for op in history.appends if op.ack is not None and history.topic_of(op) == PLAIN]
            if not acks:
                continue
            before = self.random.choice(sorted(acks)[: max(1, len(acks) // 2)])
            with suppress(CutwaterError):
                await log.trim(PLAIN, before=before)
                history.trims.append(TrimOp(GLSN(before), PLAIN))
                self.world.note(f"topic {PLAIN} is trimmed before {before}")


class TopicChanger(AppendingClient):
    """Changes how many log streams a topic has, and makes and deletes topics of its own, with records in them."""

    made = 0

    async def run(self, log: AsyncClient) -> None:
        while not self.world.is_healed:
            await self.pause(self.world.options.change_topics_every)
            with suppress(CutwaterError):
                if self.random.random() < 0.5:
                    await log.change_topic(PLAIN, streams=self.random.randint(1, STREAMS_MAX))
                else:
                    await self._make_and_delete(log)

    async def _make_and_delete(self, log: AsyncClient) -> None:
        self.made += 1
        name = f"x{self.made}"
        await log.create_topic(name, streams=self.random.randint(1, 2), replication=self.world.options.replication)
        self.world.note(f"topic {name} is there")
        for _ in range(self.random.randint(0, 5)):
            await self.append_plain(log, name)
        await log.delete_topic(name)
        self.world.note(f"topic {name} is deleted")


class ReplicationChanger(VirtualClient):
    """Changes how many copies the topics of the workload have; also to more than there are storage nodes."""

    async def run(self, log: AsyncClient) -> None:
        # Where a disk rots, two copies are needed: one of them is intact.
        least = self.world.options.min_replication
        while not self.world.is_healed:
            await self.pause(self.world.options.change_replication_every)
            topic = self.random.choice((PLAIN, TYPED) if self.world.options.typed_topic else (PLAIN,))
            replication = self.random.randint(least, max(least, COPIES_MAX))
            with suppress(CutwaterError):
                await log.change_topic(topic, replication=replication)
                self.world.note(f"topic {topic} shall have {replication} copies")


class VirtualOperator(VirtualClient):
    """Seals, unseals and finishes log streams, adds and removes storage nodes, and moves replicas between them."""

    def __init__(self, world: ShippedSimulation, name: str, host: str) -> None:
        super().__init__(world, name, host)
        self._added = 0

    async def run(self, log: AsyncClient) -> None:
        work: list[Callable[[Admin], Coroutine[Any, Any, None]]] = [
            self._seal,
            self._finish,
            self._replace,
            self._add,
            self._remove,
        ]
        async with self.world.cluster.admin(ADMIN_TIMEOUT_MS) as admin:
            while not self.world.is_healed:
                await self.pause(self.world.options.operate_every)
                with suppress(CutwaterError):
                    await self.random.choice(work)(admin)

    async def _stream(self, admin: Admin) -> StreamDescription | None:
        streams = [stream for stream in (await admin.describe()).streams if not stream.final]
        return self.random.choice(streams) if streams else None

    async def _seal(self, admin: Admin) -> None:
        stream = await self._stream(admin)
        if stream is not None:
            self.world.note(f"the operator seals log stream {stream.stream}")
            await admin.seal(stream.stream)
            await asyncio.sleep(self.random.uniform(0.0, 0.3))
            await admin.unseal(stream.stream)

    async def _finish(self, admin: Admin) -> None:
        stream = await self._stream(admin)
        if stream is not None and self.random.random() < 0.3 and not stream.topic.startswith("_"):
            self.world.note(f"the operator finishes log stream {stream.stream}")
            await admin.finalize(stream.stream)

    async def _replace(self, admin: Admin) -> None:
        stream = await self._stream(admin)
        nodes = [node.node for node in (await admin.describe()).nodes]
        others = [node for node in nodes if stream is not None and node not in stream.replicas]
        if stream is None or not others:
            return
        await self._move(admin, stream.stream, self.random.choice(stream.replicas), self.random.choice(others))

    async def _move(self, admin: Admin, stream: LogStreamId, old: StorageNodeId, new: StorageNodeId) -> None:
        self.world.note(f"the operator moves log stream {stream} from {old} to {new}")
        await admin.seal(stream)
        try:
            await asyncio.sleep(self.random.uniform(0.0, 0.3))
            await admin.replace_replica(stream, old, new)
        finally:
            await admin.unseal(stream)

    async def _remove(self, admin: Admin) -> None:
        """Remove a storage node: one that is lost, or any other, whose replicas are moved away first."""
        cluster = self.world.cluster
        described = await admin.describe()
        lost = [node.node for node in described.nodes if cluster.nodes[node.node - 1].is_retired]
        usable = [node.node for node in described.nodes if node.node not in lost]
        if not lost and len(usable) <= self.world.nodes_needed:
            return
        node = self.random.choice(lost or usable)
        rotting = self.world.nemesis.rotting
        if not lost and rotting is not None:
            # Finished log streams have one copy less for a while. It must not be the damaged one that is left.
            node = StorageNodeId(cluster.nodes.index(rotting) + 1)
        if node in usable:
            for stream in described.streams:
                if node in stream.replicas and not stream.final:
                    with suppress(CutwaterError):
                        await self._drain(admin, stream, node, usable)
        self.world.note(f"the operator removes storage node {node}")
        for _ in range(REMOVALS_MAX):
            with suppress(CutwaterError):
                await admin.remove_storage_node(node)
                break
            await asyncio.sleep(0.2)
        else:
            return
        self.world.removed += 1
        self.world.note(f"storage node {node} is removed")
        if self.random.random() < 0.7:
            self.world.loop.call_as(None, self.world.nemesis.retire, cluster.nodes[node - 1])

    async def _drain(
        self, admin: Admin, stream: StreamDescription, node: StorageNodeId, usable: Sequence[StorageNodeId]
    ) -> None:
        """Let a log stream leave a node: move its replica, or finish it, so that another one opens elsewhere."""
        others = [other for other in usable if other not in stream.replicas]
        if not others or self.random.random() < FINISHED_TO_DRAIN:
            self.world.note(f"the operator finishes log stream {stream.stream}")
            await admin.finalize(stream.stream)
        else:
            await self._move(admin, stream.stream, node, self.random.choice(others))

    async def _add(self, admin: Admin) -> None:
        cluster = self.world.cluster
        if self._added >= NODES_ADDED_MAX:
            return
        self._added += 1
        machine = cluster.new_node()
        self.world.loop.call_as(None, self.world.begin, machine)
        address = format_address(machine.host, NODE_PORT)
        for _ in range(20):
            with suppress(CutwaterError):
                await admin.add_storage_node(address)
                self.world.note(f"the operator has added {machine.name}")
                return
            await asyncio.sleep(0.2)


class VirtualSealer(VirtualClient):
    """Seals log streams and opens them again soon, so that what was under way meets another epoch."""

    async def run(self, log: AsyncClient) -> None:
        async with self.world.cluster.admin(ADMIN_TIMEOUT_MS) as admin:
            while not self.world.is_healed:
                await self.pause(self.world.options.seal_every)
                with suppress(CutwaterError):
                    streams = [s.stream for s in (await admin.describe()).streams if not s.final and s.is_open]
                    if streams:
                        stream = self.random.choice(streams)
                        self.world.note(f"the operator seals and opens log stream {stream}")
                        await admin.seal(stream)
                        await asyncio.sleep(self.world.options.sealed_seconds_min)
                        if self.random.random() < SEALED_LONGER:
                            await asyncio.sleep(self.random.uniform(0.0, SEALED_SECONDS_MAX))
                        await admin.unseal(stream)
