"""A metadata repository for tests of storage nodes: the real order layer with a store in memory, over the real wire."""

from __future__ import annotations

import asyncio
import time

from cutwater.core.order.decisions import Cut, Decision
from cutwater.core.order.events import (
    Asked,
    Compact,
    OrderEvent,
    PeerComplaint,
    Reply,
    ReportArrived,
    Send,
    Store,
    Stored,
    Wake,
)
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.state import OrderState
from cutwater.core.requests import Answer, Request
from cutwater.errors import CutwaterError, WrongIdentity
from cutwater.protocol import storage_api as api
from cutwater.protocol.access import METADATA_NODE
from cutwater.protocol.metadata_api import ASK
from cutwater.types import (
    ClusterId,
    DecisionIndex,
    Incarnation,
    Instant,
    LeaderEpoch,
    MetadataNodeId,
    Report,
    StorageNodeId,
)
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.calls.incoming_calls import Call, Notification
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ServerKey
from cutwater.wire.listen.server import Listener, listen

OPTIONS = OrderOptions(node_dead_after_us=1_500_000, reopen_patience_us=500_000, retry_us_min=100_000)


class OrderDouble:
    """Leads for ever. ``addresses`` are those that nodes gave when they joined; all nodes are told."""

    def __init__(self, cluster: ClusterId, key: ServerKey | None = None) -> None:
        self.decisions: list[Decision] = []
        self.reports: dict[StorageNodeId, Report] = {}
        self.first_reports: dict[tuple[StorageNodeId, Incarnation], Report] = {}
        """The first report of each start of each node."""
        self.addresses: dict[StorageNodeId, str] = {}
        self.node_keys: dict[StorageNodeId, str] = {}
        self.cluster_key = "the key of the double"
        self.is_store_held = False
        """While it is, nothing but time is stored; ``release_store`` makes up for it. A tick that waited for the store
        would keep the leader from deciding anything else."""
        self.held: list[Stored] = []
        self.alarms: list[object] = []
        self.layer = OrderLayer(LeaderEpoch(1), OrderState(), self._now(), OPTIONS)
        self._connections: dict[StorageNodeId, Connection] = {}
        self._told: dict[Connection, dict[StorageNodeId, str]] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._next = 0
        self.key = key or ServerKey.generate()
        self.server_keys: dict[StorageNodeId, str] = {}
        """What nodes proved when they joined. It believes all that those say who join."""
        methods = Methods()
        methods.answers(api.JOIN)(self._join)
        methods.answers(ASK)(self._asked)
        methods.hears(api.REPORT)(self._report)
        methods.hears(api.COMPLAINT)(self._complaint)
        self._endpoint = Endpoint(cluster, METADATA_NODE, "1", methods, key=self.key)
        self._listener: Listener | None = None
        self._ticking: asyncio.Task[None] | None = None

    @property
    def state(self) -> OrderState:
        return self.layer.state

    async def start(self) -> str:
        self._listener = await listen(self._endpoint, "127.0.0.1", 0)
        self._ticking = asyncio.create_task(self._tick())
        return f"127.0.0.1:{self._listener.port}"

    async def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._listener is not None:
            await self._listener.close(timeout_ms=500)

    async def ask(self, request: Request) -> Answer:
        self._next += 1
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[self._next] = future
        self._feed(Asked(self._next, request))
        async with asyncio.timeout(10):
            return await future

    async def _asked(self, call: Call[Request]) -> Answer:
        return await self.ask(call.argument)

    def _now(self) -> Instant:
        return Instant(time.monotonic_ns() // 1_000, time.time_ns() // 1_000)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            self._feed(Wake())

    def _join(self, call: Call[api.JoinArguments]) -> api.JoinAnswer:
        joining = call.argument
        key = self.node_keys.setdefault(joining.node, joining.node_key)
        if joining.cluster_key not in (None, self.cluster_key) or joining.node_key != key:
            raise WrongIdentity(f"storage node {joining.node} is not the one that was added: check its volumes")
        server = call.connection.peer.server if call.connection.peer else None
        assert server is not None
        if self.server_keys.setdefault(joining.node, server.key) != server.key:
            raise WrongIdentity(f"storage node {joining.node} has another key: check its volumes")
        self.addresses[joining.node] = joining.address
        return api.JoinAnswer(self.cluster_key, joining.node in self.state.nodes, self.metadata_keys)

    @property
    def metadata_keys(self) -> dict[MetadataNodeId, str]:
        return {MetadataNodeId(1): self.key.public}

    def release_store(self) -> None:
        self.is_store_held = False
        held, self.held = self.held, []
        for stored in held:
            self._feed(stored)

    def _report(self, notification: Notification[Report]) -> None:
        report = notification.argument
        node = report.storage_node_id
        self._connections[node] = notification.connection
        self.reports[node] = report
        self.first_reports.setdefault((node, report.incarnation), report)
        if self._told.get(notification.connection) != self.addresses:
            self._told[notification.connection] = dict(self.addresses)
            servers = api.Addresses(dict(self.addresses), dict(self.server_keys), self.metadata_keys)
            notification.connection.notify(api.ADDRESSES, servers)
        if node in self.state.nodes:
            self._feed(ReportArrived(report))

    def _complaint(self, notification: Notification[api.Complaint]) -> None:
        complaint = notification.argument
        self._feed(PeerComplaint(complaint.stream, complaint.complainer, complaint.peer))

    def _feed(self, event: OrderEvent) -> None:
        for effect in self.layer.handle(event, self._now()):
            match effect:
                case Store():
                    self.decisions.extend(effect.decisions)
                    stored = Stored(DecisionIndex(effect.after + len(effect.decisions)))
                    is_time = all(isinstance(one, Cut) and not one.commits for one in effect.decisions)
                    if self.is_store_held and not is_time:
                        self.held.append(stored)
                    else:
                        asyncio.get_running_loop().call_soon(self._feed, stored)
                case Send():
                    connection = self._connections.get(effect.node)
                    if connection is not None:
                        try:
                            connection.notify(api.LEADER_SAYS, effect.message)
                        except CutwaterError:
                            del self._connections[effect.node]
                case Reply():
                    future = self._answers.pop(effect.request_id)
                    if isinstance(effect.outcome, CutwaterError):
                        future.set_exception(effect.outcome)
                    else:
                        future.set_result(effect.outcome)
                case Compact():
                    pass
                case _:
                    self.alarms.append(effect)
