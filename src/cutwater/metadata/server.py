"""A node of the metadata repository on the network: it leads, or follows the node that leads.

A follower relays reports of storage nodes, answers of the leader and requests of clients, so clients and storage nodes
may talk to any node. When the leader's connection breaks or its heartbeats stop, a follower takes over by
compare-and-swap in the store. The store lets only one node succeed and refuses the writes of all others from then on.
Nothing here prevents two nodes from believing that they lead; the store alone decides, and clocks decide nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct, structs

from cutwater.access.access_control import Caller
from cutwater.access.client_credentials import ClientCredentials
from cutwater.core.messages import GroupOutcome, LeaderHello
from cutwater.core.order.events import GroupOutcomeArrived, PeerComplaint, ReportArrived
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.state import OrderState
from cutwater.core.requests import AddNodeRequest, FoundClusterRequest
from cutwater.errors import (
    CutwaterError,
    Damaged,
    DeadlineExceeded,
    Fenced,
    NotLeader,
    PermissionDenied,
    WrongIdentity,
)
from cutwater.metadata.counters import MetadataCounters
from cutwater.metadata.internal.topic_answers import InternalTopicAnswers
from cutwater.metadata.joining import Joining
from cutwater.metadata.node_access import NodeAccess
from cutwater.metadata.node_channels import Ways
from cutwater.metadata.pulse import Pulse
from cutwater.metadata.request_desk import relayed
from cutwater.metadata.retention import RetentionTrimmer
from cutwater.metadata.server_trust import ServerTrust
from cutwater.metadata.stores.store_interface import LeaderInfo, LoadedState, MetadataStore
from cutwater.metadata.term import NodeEvent, Term
from cutwater.metadata.volume_changes import VolumeChanges
from cutwater.protocol import metadata_api as api
from cutwater.protocol import storage_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.access_copy import AccessAsk, AccessNews
from cutwater.protocol.errors import Unproven
from cutwater.protocol.method_access import METADATA_ACCESS
from cutwater.runtime import system
from cutwater.types import ClusterId, LeaderEpoch, MetadataNodeId, Report, Revision, StorageNodeId
from cutwater.wire.addresses import format_address
from cutwater.wire.calls.handlers import Methods, ReplyWithBody
from cutwater.wire.calls.incoming_calls import Call, Notification
from cutwater.wire.connection import Connection
from cutwater.wire.identity.auth import Authenticator
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ServerKey
from cutwater.wire.identity.tls import Tls
from cutwater.wire.listen.gate import GateSnapshot
from cutwater.wire.listen.server import Listener, listen
from cutwater.wire.options import ListenerOptions

_log = logging.getLogger(__name__)

MEET_MS_MAX = 2_000
EXCUSED_MAX = 4
"""How often in turn a follower waits longer for a heartbeat, because it was itself held up."""


class MetadataOptions(Struct, frozen=True):
    """Options of a metadata node. ``advertise`` is the address at which others reach it, if not ``host``."""

    cluster: ClusterId
    node: MetadataNodeId
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    insecure: bool = False
    tls: Tls | None = None
    order: OrderOptions = OrderOptions()
    heartbeat_seconds: float = 0.05
    takeover_seconds: float = 0.4
    """How long heartbeats may be missing before a follower takes over; a broken connection is noticed at once."""
    takeover_jitter_seconds: float = 0.03
    store_patience_seconds: float = 1.0
    """A leader whose store has not answered for this long stops its heartbeats, so that a node with a better connection
    to the store takes over."""
    retry_seconds: float = 0.2
    retention_seconds: float = 10.0
    """How often retention is enforced."""
    is_nearby: bool = False
    """Servers and clients on the same event loop connect without a socket."""
    listener: ListenerOptions = ListenerOptions()
    key: ServerKey | None = None
    """The key that proves which node this is. Without one, a key is generated, which is lost when the node ends."""
    authenticate: Authenticator | None = None
    """For a server without TLS. Connections from the same event loop need no credential."""
    access_lease_seconds: float = 10.0
    """How long servers without contact to the leader may act by the rules of access control that they know."""
    spool: Path | None = None
    """The file for denials that wait for the audit. Without one, they wait in memory."""


class MetadataServer:
    """A node of the metadata repository. ``start`` returns when it listens; ``leads`` tells whether it leads now.
    ``threads`` runs long computations; by default those of the event loop."""

    def __init__(self, options: MetadataOptions, store: MetadataStore, *, threads: Executor | None = None) -> None:
        self.options = options
        self._threads = threads
        self.counters = MetadataCounters()
        self.term: Term | None = None
        self._store = store
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[CutwaterError] = self._loop.create_future()
        """Done when this node cannot go on: its owner should stop it and show the reason."""
        key = options.key or ServerKey.generate()
        tls = options.tls.client if options.tls is not None else None
        self.trust = ServerTrust(options.cluster, options.node, key, store, tls)
        self._ways = Ways(self._loop, self.trust.book)
        self.access = NodeAccess(
            options.node,
            store,
            self.trust.book,
            self._ways,
            self,
            options.access_lease_seconds,
            term=lambda: self.term,
            upstream=lambda: self._upstream,
            followers=lambda: self._pulse.followers,
            connections=lambda: self._listener.gate.connections if self._listener is not None else (),
            spool=options.spool,
            threads=threads,
        )
        self.control, self._desk = self.access.control, self.access.desk
        self._volumes = VolumeChanges(self.trust, lambda: self._ways.servers)
        self._joining = Joining(options.cluster, self, self.trust, self._ways)
        self._claimed: LeaderEpoch | None = None
        """The epoch in which this node leads, or will lead once it has loaded what is stored."""
        self._leader = LeaderInfo(LeaderEpoch(0), MetadataNodeId(0), "")
        self._upstream: Connection | None = None
        """The connection to the leader, while this node follows."""
        self._heartbeat_at = 0.0
        self._leader_changed = asyncio.Event()
        self._reachable = asyncio.Event()
        """Set while requests can be handled: by the term here, by the leader upstream, or by raising ``failed``."""
        self._pulse = Pulse(self._loop, options.heartbeat_seconds, self._ways, self._announced)
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._endpoint = Endpoint(
            options.cluster,
            METADATA_NODE,
            str(options.node),
            self._methods(),
            key=key,
            advertised=options.advertise or "",
        )

    @property
    def address(self) -> str:
        assert self._listener is not None
        return self.options.advertise or format_address(self.options.host, self._listener.port)

    @property
    def gate(self) -> GateSnapshot | None:
        """The connections to this node, counted by kind."""
        return self._listener.gate.snapshot() if self._listener is not None else None

    @property
    def leads(self) -> bool:
        return self.term is not None

    async def start(self) -> None:
        options = self.options
        judged_as_ever = options.tls.authenticate if options.tls is not None else options.authenticate
        self._listener = await listen(
            self._endpoint,
            options.host,
            options.port,
            tls=options.tls.server if options.tls is not None else None,
            authenticate=ClientCredentials(self.access.copy, judged_as_ever, self.access.use.note),
            trusts_process=True,
            insecure=options.insecure,
            options=options.listener,
            on_open=self._connected,
            is_server=self.trust.book.knows,
            is_nearby=options.is_nearby,
        )
        for work in (self._live(), self._watch_store(), self._pulse.beat_for_ever(), *self.access.works()):
            self._spawn(work)

    async def stop(self, *, timeout_ms: int = 5_000) -> None:
        """Stop this node. The others see its connections close, and one of them takes over."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.term is not None:
            await self.term.end("this node stops")
            self.term = None
        if self._upstream is not None:
            self._upstream.abort()
        if self._listener is not None:
            await self._listener.close(timeout_ms=timeout_ms)
        self.control.quotas.stop()
        await self._store.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("metadata node %s cannot go on", self.options.node, exc_info=error)
            self._fail(CutwaterError(f"a bug: {error!r}"))

    def _fail(self, error: CutwaterError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
            self._reachable.set()

    def _methods(self) -> Methods:
        methods = Methods(METADATA_ACCESS, self.trust.book, self.control)
        self._desk.register(methods)
        InternalTopicAnswers(self._desk.ask_as_this_node, self._connect_node).register(methods)
        methods.answers(api.MEET)(self._meet)
        methods.answers(api.ACCESS)(self._answer_access)
        methods.answers(api.ACCESS_LEADER)(self._answer_access_leader)
        methods.answers(api.WHO_LEADS)(self._who_leads)
        methods.answers(storage_api.JOIN)(self._joining.join)
        methods.answers(api.JOIN_LEADER)(self._joining.join_leader)
        methods.hears(storage_api.REPORT)(self._report)
        methods.hears(storage_api.COMPLAINT)(self._complaint)
        methods.hears(api.REPORT_UP)(self._report_up)
        methods.hears(api.COMPLAINT_UP)(self._complaint_up)
        methods.hears(api.COMPLAINT_OF)(self._complaint_of)
        methods.hears(storage_api.GROUP_OUTCOME)(self._group_outcome)
        methods.hears(api.GROUP_OUTCOME_UP)(self._group_outcome_up)
        methods.hears(api.SUSPECT_UP)(self._suspect_up)
        methods.hears(api.FOLLOW)(self._follow)
        methods.hears(api.HEARTBEAT)(self._heartbeat)
        methods.hears(api.RELAY_DOWN)(self._relay_down)
        return methods

    def _connected(self, connection: Connection) -> None:
        self.control.quotas.join(connection)
        connection.closed.add_done_callback(lambda _: self._disconnected(connection))

    def _disconnected(self, connection: Connection) -> None:
        self._pulse.followers.pop(connection, None)
        for node in self._ways.lose(connection):
            self._suspect(node)

    # Storage nodes that may be dead.

    def _suspect(self, node: StorageNodeId) -> None:
        """Note that a storage node may be dead: a leader probes it at once, a follower tells the leader."""
        if self.term is not None:
            self.term.probe(node)
        else:
            self._pass_up(api.SUSPECT_UP, api.Suspect(node))

    def _suspect_up(self, notification: Notification[api.Suspect]) -> None:
        self._suspect(notification.argument.node)

    # Leading and following.

    async def _live(self) -> None:
        is_checked = False
        while True:
            try:
                if not is_checked:
                    self._check_cluster(await self._store.load())
                    await self.trust.announce()
                    is_checked = True
                leader = await self._store.leader()
                self._leader = leader
                self._leader_changed.clear()
                if leader.epoch > 0 and leader.node != self.options.node:
                    await self._stay_with(leader)
                    # Several followers notice at the same time; those that come later find a new leader.
                    await asyncio.sleep(system.random().random() * self.options.takeover_jitter_seconds)
                    if (await self._store.leader()).epoch != leader.epoch:
                        continue
                await self._lead(leader.epoch)
                # The cause that ended the term may occur again at once.
                await asyncio.sleep(self.options.retry_seconds)
            except Fenced:
                # Another node was faster.
                continue
            except CutwaterError as error:
                if not error.retriable or isinstance(error, Damaged):
                    self._fail(error)
                    return
                _log.warning("metadata node %s: %s", self.options.node, error)
                await asyncio.sleep(self.options.retry_seconds)

    def _check_cluster(self, loaded: LoadedState) -> None:
        """Check that the store belongs to this cluster, before this node deposes a leader."""
        state = OrderState(loaded.snapshot, loaded.decisions)
        if state.cluster_key and state.cluster != self.options.cluster:
            raise WrongIdentity(
                f"the store belongs to cluster {state.cluster}, not {self.options.cluster}: "
                "check --store and --cluster-id"
            )
        self.access.copy.take(state.access.snapshot())

    async def _stay_with(self, leader: LeaderInfo) -> None:
        """Follow the leader until it dies or another node leads."""
        try:
            upstream = await self._met(leader)
        except CutwaterError as error:
            _log.info("metadata node %s cannot reach the leader: %s", self.options.node, error)
            return
        try:
            upstream.notify(api.FOLLOW, api.Follow(self.options.node))
            self._heartbeat_at = self._loop.time()
            self._upstream = upstream
            self._reachable.set()
            self.access.copy.ask_soon()
            closed, patience = upstream.closed, self.options.takeover_seconds
            excused = 0
            while not closed.done() and not self._leader_changed.is_set():
                now = self._loop.time()
                quiet = now - self._heartbeat_at
                if quiet < patience:
                    excused = 0
                    await self._either(closed, patience - quiet)
                elif excused < EXCUSED_MAX and self._pulse.held_up_at > now - patience / 2:
                    # Heartbeats may have arrived while this node itself could not take them in.
                    excused += 1
                    await self._either(closed, patience / 2)
                else:
                    _log.info("metadata node %s has heard nothing of the leader for %.2f s", self.options.node, quiet)
                    return
        finally:
            self._upstream = None
            self._reachable.clear()
            upstream.abort()

    async def _met(self, leader: LeaderInfo) -> Connection:
        """Connect to the leader, and return when both sides know each other's keys."""
        await self.trust.refresh()
        expect = self.trust.expect_metadata(leader.node)
        upstream = await self.trust.connect(self._endpoint, leader.address, expect)
        try:
            await upstream.call(api.MEET, api.Follow(self.options.node), timeout_ms=MEET_MS_MAX)
        except BaseException:
            upstream.abort()
            raise
        return upstream

    async def _meet(self, call: Call[api.Follow]) -> None:
        server = call.connection.peer.server if call.connection.peer is not None else None
        assert server is not None
        if not await self.trust.is_member(server):
            raise Unproven(f"the key of {server} is not the one in the store: only one node may have this id")
        self._tell_members()

    def _tell_members(self) -> None:
        """Tell storage nodes and followers the keys by which they recognize metadata nodes."""
        if self._claimed is not None:
            keys = {MetadataNodeId(node): key for node, key in self.trust.book.keys(METADATA_NODE).items()}
            self._ways.learn(structs.replace(self._ways.servers, metadata_keys=keys))

    async def _connect_node(self, node: StorageNodeId, address: str) -> Connection:
        return await self.trust.connect(self._endpoint, address, self.trust.expect_storage(node))

    async def _either(self, closed: asyncio.Future[Any], seconds: float) -> None:
        """Wait until the connection closes, the leader changes, or the time is up."""
        changed = self._loop.create_task(self._leader_changed.wait())
        try:
            await asyncio.wait({closed, changed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    async def _watch_store(self) -> None:
        """Watch the store for a new leader too: two live nodes may be cut off from each other."""
        while True:
            try:
                async for leader in self._store.watch_leader():
                    if leader.epoch != self._leader.epoch:
                        self._leader_changed.set()
                    if self.term is not None and leader.epoch > self.term.epoch:
                        # The store would refuse the next write; this way the term ends without one.
                        self.term.finish(f"metadata node {leader.node} leads in epoch {leader.epoch}")
            except CutwaterError as error:
                _log.info("metadata node %s cannot watch the store: %s", self.options.node, error)
            await asyncio.sleep(self.options.retry_seconds)

    async def _lead(self, seen: LeaderEpoch) -> None:
        epoch = await self._store.acquire(self.options.node, self.address, seen)
        # From now on this node sends heartbeats, also while it still loads what is stored.
        self._claimed = epoch
        try:
            await self._lead_in(epoch)
        finally:
            self._claimed = None

    async def _lead_in(self, epoch: LeaderEpoch) -> None:
        loaded = await self._store.load()
        if loaded.leader.epoch != epoch:
            return
        self._leader = loaded.leader
        state = await self._loop.run_in_executor(self._threads, OrderState, loaded.snapshot, loaded.decisions)
        self.counters.terms += 1
        self.access.begin_term(epoch, state)
        self._pulse.beat()
        term = Term(
            epoch,
            state,
            self._store,
            self._ways,
            self.options.order,
            self.counters,
            self._connect_node,
            self.access.changed,
        )
        self.term = term
        try:
            _log.info("metadata node %s leads in epoch %s from %s on", self.options.node, epoch, state.index)
            term.publish_addresses()
            self._tell_members()
            self._introduce(term)
            await self._found(term)
            await self.access.confirm()
            self._reachable.set()
            retention = RetentionTrimmer(state, self._connect_node, term.programs.decide)
            works = (retention.enforce_for_ever(self.options.retention_seconds), *term.works())
            tasks = [self._loop.create_task(work) for work in works]
            try:
                reason = await term.over
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            _log.info("metadata node %s leads no more: %s", self.options.node, reason)
        finally:
            self._reachable.clear()
            self.term = None
            await term.end("this node leads no more")

    def _introduce(self, term: Term) -> None:
        """Tell storage nodes that are connected to this node that it leads, before their next report."""
        for node in term.layer.state.nodes:
            self._ways.send(node, LeaderHello(term.epoch))

    async def _found(self, term: Term) -> None:
        """Store the cluster's key. The first leader generates it, and does not reveal it before it is stored."""
        key = term.layer.state.cluster_key or system.token_hex(16)
        await term.decide(FoundClusterRequest(self.options.cluster, key))
        self._joining.cluster_key = term.layer.state.cluster_key

    # Heartbeats.

    def _announced(self) -> api.Heartbeat | None:
        """Return what followers are told if this node leads, unless it waits too long for its store."""
        term, epoch = self.term, self._claimed
        if epoch is None or (term is not None and term.store_delay > self.options.store_patience_seconds):
            return None
        return api.Heartbeat(epoch, self.options.node, None, self.access.copy.view.revision or UNSET)

    def _follow(self, notification: Notification[api.Follow]) -> None:
        self._pulse.followers[notification.connection] = None

    def _heartbeat(self, notification: Notification[api.Heartbeat]) -> None:
        if notification.connection is not self._upstream:
            return
        self._heartbeat_at = self._loop.time()
        servers = notification.argument.servers
        if servers is not None:
            self._ways.learn(servers)
        self.access.heard(notification.argument.access or Revision(0))

    # Storage nodes.

    def _report(self, notification: Notification[Report]) -> None:
        report = notification.argument
        self._ways.hear(report.storage_node_id, notification.connection, is_relay=False)
        self._take(ReportArrived(report), api.REPORT_UP, report)

    def _report_up(self, notification: Notification[Report]) -> None:
        report = notification.argument
        self._ways.hear(report.storage_node_id, notification.connection, is_relay=True)
        self._take(ReportArrived(report))

    def _complaint(self, notification: Notification[storage_api.Complaint]) -> None:
        complaint, peer = notification.argument, notification.connection.peer
        if self.control.is_on and complaint.complainer == storage_api.A_CLIENT:
            caller, origin = self._desk.caller(peer)
            if self.term is None:
                self._pass_up(api.COMPLAINT_OF, api.ComplaintOf(complaint, origin, caller.address))
            else:
                self._hear_client(complaint, caller)
            return
        self._take(_complained(complaint), api.COMPLAINT_UP, complaint)

    def _complaint_of(self, notification: Notification[api.ComplaintOf]) -> None:
        told = notification.argument
        self._hear_client(told.complaint, relayed(told.origin, told.address))

    def _hear_client(self, complaint: storage_api.Complaint, caller: Caller) -> None:
        try:
            self._desk.judge(caller, storage_api.COMPLAINT.name, METADATA_ACCESS[storage_api.COMPLAINT.name], complaint)
        except PermissionDenied:
            # It has been counted, and a notice has no answer.
            return
        self._take(_complained(complaint))

    def _complaint_up(self, notification: Notification[storage_api.Complaint]) -> None:
        self._take(_complained(notification.argument))

    def _group_outcome(self, notification: Notification[GroupOutcome]) -> None:
        self._take(GroupOutcomeArrived(notification.argument), api.GROUP_OUTCOME_UP, notification.argument)

    def _group_outcome_up(self, notification: Notification[GroupOutcome]) -> None:
        self._take(GroupOutcomeArrived(notification.argument))

    def _take(self, event: NodeEvent, notice: Any = None, argument: Any = None) -> None:
        """Take in a message of a storage node. A follower passes it on as ``notice``, unless a follower passed it on
        already."""
        if self.term is None:
            if notice is not None:
                self._pass_up(notice, argument)
            return
        if isinstance(event, PeerComplaint):
            self._suspect(event.peer)
        self.term.hear(event)
        self._pulse.beat_if_due()

    def _pass_up(self, notice: Any, argument: Any) -> None:
        """Pass a message on to the leader. A message that cannot be sent now is reported again later."""
        if self._upstream is not None:
            try:
                self._upstream.notify(notice, argument)
                self.counters.relayed += 1
            except CutwaterError:
                return

    def _relay_down(self, notification: Notification[api.RelayDown]) -> None:
        if notification.connection is self._upstream:
            self._ways.pass_on(notification.argument.node, notification.argument.message)

    # Joining.

    async def adopt(self, node: AddNodeRequest, deadline: float) -> None:
        """Add a storage node of the same process to the cluster. It needs no proof of its identity."""
        term = await self.leader_within(deadline)
        if term is None:
            raise NotLeader("another metadata node leads: a storage node of this process cannot be added here")
        await term.decide(node)

    async def change_volumes(self, change: api.ChangeVolumes, deadline: float) -> storage_api.NodeSelfDescription:
        return await self._volumes.make(self._endpoint, change, deadline)

    # The leader, for requests (``request_desk.LeaderSearch``).

    async def _answer_access(self, call: Call[AccessAsk]) -> ReplyWithBody[AccessNews]:
        # Only storage nodes ask this way: metadata nodes ask the leader.
        answer = await self.access.news(structs.replace(call.argument, kind=STORAGE_NODE), call.body)
        return ReplyWithBody(answer.value, answer.body)

    async def _answer_access_leader(self, call: Call[AccessAsk]) -> ReplyWithBody[AccessNews]:
        answer = await self.access.news_of_leader(call.argument, call.body)
        return ReplyWithBody(answer.value, answer.body)

    def _who_leads(self, call: Call[None]) -> api.MetadataNode:
        leader = self._leader
        return api.MetadataNode(self.options.node, leader.node, leader.epoch, leader.address)

    async def leader_within(self, deadline: float) -> Term | None:
        """Wait for a leader, here or upstream. Raises the error that keeps this node from going on, if there is one."""
        if not self._reachable.is_set():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._reachable.wait()
            except TimeoutError:
                raise DeadlineExceeded("the metadata repository has no leader now: try again") from None
        if self.failed.done():
            raise self.failed.result()
        return self.term

    def require_term(self) -> Term:
        if self.term is None:
            raise NotLeader(f"metadata node {self.options.node} does not lead: ask {self._leader.address or 'another'}")
        return self.term

    def require_upstream(self, deadline: float) -> tuple[Connection, int]:
        if self._upstream is None:
            raise NotLeader("the leader of the metadata repository has just been lost: try again")
        return self._upstream, max(1, int((deadline - self._loop.time()) * 1_000))


def _complained(complaint: storage_api.Complaint) -> PeerComplaint:
    return PeerComplaint(complaint.stream, complaint.complainer, complaint.peer)
