"""Virtual storage nodes for ``benchmarks.scale``: they speak to real metadata nodes as shipped storage nodes do, and
have no disk.

Real are the connections (sockets, handshake with keys, joining), the messages, their codec, and the writing of reports
(``ReportWriter``, ``MemberLists``, ``Cadence``) with its times: a report when something has changed, and every 100 ms,
or less often if there are many nodes. A virtual
replica is a few numbers. What is appended is durable on all replicas of its chain at once, and nothing is stored.
Between storage nodes nothing is sent.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable, Sequence

from msgspec import UnsetType

from cutwater.core import messages as m
from cutwater.errors import CutwaterError
from cutwater.protocol import storage_api as api
from cutwater.protocol.access import STORAGE_NODE
from cutwater.storagenode.metadata_links import JOIN_AGAIN_SECONDS
from cutwater.storagenode.node import REPORT_EVERY_SECONDS
from cutwater.storagenode.report_writer import Cadence, MemberLists, NodeCondition, ReportWriter
from cutwater.types import (
    GLSN,
    LLSN,
    ClusterId,
    CommitContext,
    Epoch,
    Incarnation,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    ReplicaState,
    StorageNodeId,
    UncommitReport,
)
from cutwater.wire.addresses import parse_address
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.calls.incoming_calls import Notification
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ServerKey

CLUSTER = ClusterId(1)
CONNECT_MS_MAX = 20_000
CONNECTING_MAX = 32
"""Number of nodes that connect at the same time."""
TCP_INFO_BYTES = struct.Struct("=120xQQ")
"""Bytes acknowledged and received, in the kernel's ``tcp_info``."""


class VirtualReplica:
    __slots__ = ("committed", "end", "epoch", "high_watermark", "report", "state", "stream", "trimmed")

    def __init__(self, stream: LogStreamId, epoch: Epoch, state: ReplicaState) -> None:
        self.stream, self.epoch, self.state = stream, epoch, state
        self.committed = self.end = 0
        self.high_watermark, self.trimmed = GLSN(0), GLSN(1)
        self.report = self._report()

    def _report(self) -> UncommitReport:
        return UncommitReport(
            self.stream,
            self.epoch,
            self.state,
            self.high_watermark,
            LLSN(self.committed + 1),
            self.end - self.committed,
            self.trimmed,
        )

    def changed(self) -> None:
        self.report = self._report()

    def apply(self, context: CommitContext) -> bool:
        """Apply a commit if it is the next one."""
        is_next = context.first_llsn == self.committed + 1 and context.epoch == self.epoch
        if not is_next or context.last_llsn > self.end:
            return False
        self.committed, self.high_watermark = context.last_llsn, context.high_watermark
        self.changed()
        return True

    def seal(self, message: m.SealReplica) -> None:
        self.epoch, self.end = message.epoch, min(self.end, max(message.sealed_at, self.committed))
        self.state = ReplicaState.SEALED if self.committed == self.end == message.sealed_at else ReplicaState.SEALING
        self.changed()

    def unseal(self, message: m.UnsealReplica) -> None:
        if message.epoch > self.epoch and message.start == self.committed:
            self.epoch, self.state = message.epoch, ReplicaState.RUNNING
            self.changed()

    def exclude(self, message: m.ExcludeReplica) -> None:
        if message.epoch > self.epoch:
            self.epoch, self.state, self.end = message.epoch, ReplicaState.SEALING, self.committed
            self.changed()

    def learn(self, source: VirtualReplica) -> None:
        self.committed = self.end = source.committed
        self.high_watermark = source.high_watermark
        self.changed()


class VirtualNode:
    """One storage node. It reports to all metadata nodes, of which there are two."""

    def __init__(self, fleet: Fleet, node: StorageNodeId, key: ServerKey) -> None:
        self.node, self._fleet = node, fleet
        self.replicas: dict[LogStreamId, VirtualReplica] = {}
        self.leader_epoch = LeaderEpoch(0)
        self._loop = asyncio.get_running_loop()
        self._writer = ReportWriter(node, Incarnation(1))
        self._members = MemberLists()
        self._applied = GLSN(0)
        self._cadence = Cadence()
        self._is_due = self._only_ticked = False
        self._joined: dict[Connection, None] = {}
        self.connections: list[Connection] = []
        methods = Methods()
        methods.hears(api.LEADER_SAYS)(self._leader_says)
        methods.hears(api.ADDRESSES)(self._learn_addresses)
        self._endpoint = Endpoint(CLUSTER, STORAGE_NODE, str(node), methods, key=key)

    async def join(self, addresses: Sequence[str]) -> None:
        """Connect to the metadata nodes and introduce this node, until each knows it."""
        for address in addresses:
            connection = await self._connect(address)
            self.connections.append(connection)
            while connection not in self._joined:
                own = api.JoinArguments(self.node, node_key(self.node), None, address_of(self.node), Incarnation(1), ())
                try:
                    answer: api.JoinAnswer = (await connection.call(api.JOIN, own, timeout_ms=CONNECT_MS_MAX)).value
                    if answer.known:
                        self._joined[connection] = None
                        self.report_soon()
                except CutwaterError:
                    await asyncio.sleep(JOIN_AGAIN_SECONDS)
        self._tick()

    async def _connect(self, address: str) -> Connection:
        host, port = parse_address(address)
        while True:
            try:
                return await connect(self._endpoint, host, port, timeout_ms=CONNECT_MS_MAX, expect=lambda server: None)
            except CutwaterError:
                await asyncio.sleep(JOIN_AGAIN_SECONDS)

    def _learn_addresses(self, notification: Notification[api.Addresses]) -> None:
        self._cadence.nodes = len(notification.argument.storage_nodes)

    def _tick(self) -> None:
        if not self._is_due:
            self.report_soon()
            self._only_ticked = True
        if not self._fleet.is_over:
            self._loop.call_later(REPORT_EVERY_SECONDS, self._tick)

    def report_soon(self) -> None:
        self._only_ticked = False
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._is_due = False
        reports = [replica.report for replica in self.replicas.values()]
        condition = NodeCondition(self.leader_epoch, NodeState.READY, self._applied, members=self._members.name)
        if self._only_ticked and not self._writer.is_waiting and not self._cadence.is_due(reports, condition):
            return
        self._cadence.note(reports, condition)
        report = self._writer.write(reports, condition)
        for connection in self._joined:
            try:
                connection.notify(api.REPORT, report)
            except CutwaterError:
                continue
        self._fleet.reports += 1

    def _leader_says(self, notification: Notification[m.LeaderMessage]) -> None:
        message = notification.argument
        match message:
            case m.CommitMessage():
                self._commit(message)
                return
            case m.LeaderHello():
                self._writer.hear(message)
                self._hear(message.leader_epoch)
                return
            case m.CreateReplica():
                if message.stream not in self.replicas:
                    self.replicas[message.stream] = VirtualReplica(message.stream, Epoch(0), ReplicaState.SEALING)
            case m.SealReplica():
                self._hear(message.leader_epoch)
                self._replica(message.stream).seal(message)
            case m.UnsealReplica():
                self._hear(message.leader_epoch)
                self._replica(message.stream).unseal(message)
                if message.chain[0] == self.node:
                    self._fleet.resume(message.stream)
            case m.ExcludeReplica():
                self._hear(message.leader_epoch)
                self._replica(message.stream).exclude(message)
            case m.CatchUp():
                replica = self._replica(message.stream)
                for context in message.contexts:
                    replica.apply(context)
                if replica.committed == message.committed_end:
                    self._applied = max(self._applied, message.high_watermark)
            case m.LearnFrom():
                self._replica(message.stream).learn(self._fleet.nodes[message.source].replicas[message.stream])
            case _:
                return
        self.report_soon()

    def _replica(self, stream: LogStreamId) -> VirtualReplica:
        return self.replicas[stream]

    def _hear(self, leader_epoch: LeaderEpoch) -> None:
        if leader_epoch > self.leader_epoch:
            self.leader_epoch = leader_epoch
            self.report_soon()

    def _commit(self, message: m.CommitMessage) -> None:
        committed = [commit.stream for commit in message.commits]
        is_told = True
        if not isinstance(message.names, UnsetType):
            self._members.learn(message.names, (*committed, *message.quiet))
        elif not isinstance(message.others_of, UnsetType):
            is_told = message.others_of == self._members.name
        for commit in message.commits:
            replica = self.replicas.get(commit.stream)
            if replica is not None and replica.apply(commit.context):
                self._fleet.committed(self.node, commit.stream)
                self.report_soon()
        if is_told and message.prev_high_watermark <= self._applied < message.high_watermark:
            self._applied = message.high_watermark
        self._fleet.hear_cut(message.high_watermark)


class Fleet:
    """All virtual nodes, and the appends to some of their streams: each goes on when the one before is committed."""

    def __init__(self, chains: dict[LogStreamId, tuple[StorageNodeId, ...]], keys: dict[StorageNodeId, ServerKey]):
        self.chains = chains
        self.nodes = {node: VirtualNode(self, node, key) for node, key in keys.items()}
        self.is_over = False
        self.reports = 0
        self.cuts: list[float] = []
        """When each cut was first heard of."""
        self.active: set[LogStreamId] = set()
        self.waits: list[float] = []
        """Seconds from the report that a record is durable to the head's hearing of its commit."""
        self._appended: dict[LogStreamId, float] = {}
        self._high_watermark = GLSN(0)
        self._loop = asyncio.get_running_loop()
        for stream, chain in chains.items():
            for node in chain:
                self.nodes[node].replicas[stream] = VirtualReplica(stream, Epoch(1), ReplicaState.RUNNING)

    async def join(self, addresses: Sequence[str]) -> None:
        gate = asyncio.Semaphore(CONNECTING_MAX)

        async def one(node: VirtualNode) -> None:
            async with gate:
                await node.join(addresses)

        await asyncio.gather(*map(one, self.nodes.values()))

    def begin(self, streams: Iterable[LogStreamId]) -> None:
        self.active = set(streams)
        for stream in self.active:
            self._append(stream)

    def resume(self, stream: LogStreamId) -> None:
        if stream in self.active:
            self._loop.call_soon(self._append, stream)

    def _append(self, stream: LogStreamId) -> None:
        replicas = [self.nodes[node].replicas[stream] for node in self.chains[stream]]
        if stream not in self.active or any(r.state is not ReplicaState.RUNNING for r in replicas):
            return
        if any(replica.end > replica.committed for replica in replicas):
            # The one before is not committed everywhere yet.
            self._loop.call_later(0.001, self._append, stream)
            return
        self._appended[stream] = self._loop.time()
        for node, replica in zip(self.chains[stream], replicas, strict=True):
            replica.end += 1
            replica.changed()
            self.nodes[node].report_soon()

    def committed(self, node: StorageNodeId, stream: LogStreamId) -> None:
        if node == self.chains[stream][0]:
            at = self._appended.pop(stream, None)
            if at is not None:
                self.waits.append(self._loop.time() - at)
            self._loop.call_soon(self._append, stream)

    def hear_cut(self, high_watermark: GLSN) -> None:
        if high_watermark > self._high_watermark:
            self._high_watermark = high_watermark
            self.cuts.append(self._loop.time())

    @property
    def running(self) -> int:
        """The number of streams whose replicas all run."""
        return sum(
            all(self.nodes[node].replicas[stream].state is ReplicaState.RUNNING for node in chain)
            for stream, chain in self.chains.items()
        )

    def bytes(self) -> int:
        """Bytes on all connections to metadata nodes, in both directions, as the kernel counts them."""
        total = 0
        for node in self.nodes.values():
            for connection in node.connections:
                transport = connection._transport
                found = transport.get_extra_info("socket") if transport is not None else None
                if found is None:
                    continue
                told = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES.size)
                total += sum(TCP_INFO_BYTES.unpack(told)) if len(told) == TCP_INFO_BYTES.size else 0
        return total

    def close(self) -> None:
        self.is_over = True
        for node in self.nodes.values():
            for connection in node.connections:
                connection.abort()


def node_key(node: StorageNodeId) -> str:
    return f"virtual {node}"


def address_of(node: StorageNodeId) -> str:
    """Nothing listens there: the repository connects only to nodes that it suspects."""
    return f"127.0.0.1:{1_024 + node}"
