"""Clients of a simulated cluster that are not what they say: they send messages that only servers may send."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cutwater.client.async_client import AsyncClient
from cutwater.core.messages import Replicate, SealReplica
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.state import LogStream
from cutwater.errors import CutwaterError
from cutwater.format.checksum import crc32c
from cutwater.protocol import metadata_api, storage_api
from cutwater.protocol.access import STORAGE_NODE
from cutwater.testing.virtual.cluster import CLUSTER, NODE_PORT
from cutwater.testing.virtual.workload import VirtualClient
from cutwater.types import (
    LLSN,
    Batch,
    Entry,
    EventTime,
    Incarnation,
    LeaderEpoch,
    NodeState,
    ReplicaState,
    Report,
    StorageNodeId,
    UncommitReport,
)
from cutwater.wire.addresses import format_address, parse_address
from cutwater.wire.client import connect
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ServerKey

CONNECT_MS = 1_000
LISTEN_SECONDS = 0.05
NEVER_WRITTEN = 3
"""How many records that never existed are claimed."""

Forged = tuple[str, StorageNodeId, Any, object, bytes]
"""An address, the storage node in whose name to speak, a notice, its argument and its body."""


class Forger(VirtualClient):
    """Speaks as a storage node or as the leader: as a client, as a node without a key, or with a key of its own."""

    async def run(self, log: AsyncClient) -> None:
        self._key = ServerKey(Ed25519PrivateKey.from_private_bytes(self.random.randbytes(32)))
        while not self.world.is_stopping:
            await self.pause(self.world.options.forge_every)
            leader = self.world.cluster.leader()
            streams = [stream for stream in leader.state.streams.values() if stream.is_open] if leader else []
            if leader is not None and streams:
                stream = self.random.choice(streams)
                act = self.random.choice((self._reports, self._later_leader, self._entry, self._order))
                await asyncio.gather(*(self._tell(*forged) for forged in list(act(leader, stream))))

    async def _tell(self, address: str, node: StorageNodeId, notice: Any, argument: object, body: bytes) -> None:
        role, key = self.random.choice((("client", None), (STORAGE_NODE, None), (STORAGE_NODE, self._key)))
        host, port = parse_address(address)
        with suppress(CutwaterError):
            connection = await connect(
                Endpoint(CLUSTER, role, str(node), key=key),
                host,
                port,
                timeout_ms=CONNECT_MS,
                expect=lambda server: None,
            )
            connection.notify(notice, argument, body)
            self.world.note(f"{self.name} sends {notice.name} as {role} {node}")
            await asyncio.sleep(LISTEN_SECONDS)
            connection.abort()

    def _to_metadata(self, node: StorageNodeId, report: Report) -> Forged:
        notice = self.random.choice((storage_api.REPORT, metadata_api.REPORT_UP))
        return self.random.choice(self.world.cluster.addresses), node, notice, report, b""

    def _to_node(
        self, node: StorageNodeId, sender: StorageNodeId, notice: Any, argument: object, body: bytes
    ) -> Forged:
        return format_address(self.world.cluster.nodes[node - 1].host, NODE_PORT), sender, notice, argument, body

    def _reports(self, leader: OrderLayer, stream: LogStream) -> Iterator[Forged]:
        """All members of a log stream have records that never existed."""
        for node in stream.members:
            claimed = UncommitReport(
                stream.stream,
                stream.epoch,
                ReplicaState.RUNNING,
                leader.state.high_watermark,
                LLSN(stream.committed_end + 1),
                NEVER_WRITTEN,
            )
            incarnation = Incarnation(1 << 40)
            yield self._to_metadata(
                node, Report(node, incarnation, 1 << 40, leader.leader_epoch, NodeState.READY, (claimed,))
            )

    def _later_leader(self, leader: OrderLayer, stream: LogStream) -> Iterator[Forged]:
        """A storage node knows a leader that does not exist."""
        node, epoch = stream.members[0], LeaderEpoch(leader.leader_epoch + 5)
        yield self._to_metadata(node, Report(node, Incarnation(1 << 40), 1 << 40, epoch, NodeState.READY, ()))

    def _entry(self, leader: OrderLayer, stream: LogStream) -> Iterator[Forged]:
        """An entry that no client has sent."""
        node = stream.members[-1]
        replica = self.world.replica(node, stream.stream)
        if replica is not None:
            body = b"forged"
            batch = Batch(1, b"", crc32c(body), EventTime(1), EventTime(1))
            entry = Entry(LLSN(replica.written_end + 1), replica.hard_state.epoch, batch)
            replicate = Replicate(stream.stream, entry)
            yield self._to_node(node, stream.members[0], storage_api.REPLICATE, replicate, body)

    def _order(self, leader: OrderLayer, stream: LogStream) -> Iterator[Forged]:
        """A seal that was never decided, of a leader that does not exist."""
        epoch = LeaderEpoch(leader.leader_epoch + 5)
        for node in stream.members:
            seal = SealReplica(stream.stream, epoch, stream.epoch, stream.committed_end)
            yield self._to_node(node, stream.members[0], storage_api.LEADER_SAYS, seal, b"")
