"""Drives an ``OrderLayer`` in tests: plays the store and the clock, and speaks for storage nodes.

``Leader.raw`` hands over one event and gives back exactly what the layer wants done. ``Leader.run`` also stores every
write at once. ``FakeNodes`` are storage nodes that do what they are told, at once and durably, and otherwise only
report; they insist on one rule: a commit applies at the first uncommitted LLSN, to records that are there.
"""

from __future__ import annotations

from collections.abc import Iterable

from cutwater.core import messages as m
from cutwater.core.order import decisions as d
from cutwater.core.order.cut import Candidate, make_cut
from cutwater.core.order.events import (
    Alarm,
    Asked,
    OrderEffect,
    OrderEvent,
    Reply,
    ReportArrived,
    Send,
    Store,
    Stored,
    Wake,
)
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.core.requests import Answer, Request
from cutwater.errors import CutwaterError
from cutwater.types import (
    GLSN,
    LLSN,
    MILLISECOND,
    SECOND,
    CommitContext,
    CutTime,
    DecisionIndex,
    Epoch,
    Incarnation,
    Instant,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    ReplicaState,
    Report,
    StorageNodeId,
    TopicId,
    UncommitReport,
)

N1, N2, N3, N4 = (StorageNodeId(n) for n in (1, 2, 3, 4))
LS1, LS2, LS3 = (LogStreamId(n) for n in (1, 2, 3))
T1 = TopicId(1)
E0, E1, E2 = Epoch(0), Epoch(1), Epoch(2)
ORDERS = "orders"
LEADER = LeaderEpoch(7)

SEALING, SEALED = ReplicaState.SEALING, ReplicaState.SEALED
RUNNING, LEARNING = ReplicaState.RUNNING, ReplicaState.LEARNING

START = Instant(monotonic=1_000 * SECOND, wall=1_700_000_000 * SECOND)
"""Where a leader's clocks stand when a test begins."""
LAST_CUT_TIME = CutTime(START.wall - SECOND)
"""The time of the last cut of ``cluster_of``, a second before."""
CREATED_TIME = CutTime(START.wall - 3_600 * SECOND)
"""When the streams of ``cluster_of`` were created."""


def ur(
    stream: LogStreamId,
    *,
    end: int,
    committed: int = 0,
    hwm: int = 0,
    epoch: int = 1,
    state: ReplicaState = RUNNING,
    trimmed: int = 1,
) -> UncommitReport:
    """What a replica says that has applied up to LLSN ``committed`` and is durable up to ``end``."""
    return UncommitReport(stream, Epoch(epoch), state, GLSN(hwm), LLSN(committed + 1), end - committed, GLSN(trimmed))


def cluster_of(
    streams: dict[LogStreamId, Iterable[StorageNodeId]],
    *,
    cuts: Iterable[dict[LogStreamId, int]] = (),
    high_watermark: int | None = None,
    nodes: Iterable[StorageNodeId] = (N1, N2, N3),
) -> list[d.Decision]:
    """The decisions that made a cluster with one topic, whose streams are open in epoch 1 on these nodes. Each of
    ``cuts`` commits so many records per stream; ticks fill up to ``high_watermark`` first."""
    chains = {lsid: tuple(chain) for lsid, chain in streams.items()}
    decisions: list[d.Decision] = [d.AddNode(node) for node in nodes]
    # A topic that wants no streams gets no replacements for those that a test seals.
    decisions.append(d.CreateTopic(T1, ORDERS, max((len(chain) for chain in chains.values()), default=1), streams=0))
    decisions += [d.CreateStream(lsid, T1, chain, GLSN(0), CREATED_TIME) for lsid, chain in chains.items()]
    decisions += [d.Unseal(lsid, E1, LLSN(0), chain) for lsid, chain in chains.items()]
    state = OrderState(None, decisions)
    counts = list(cuts)
    ticks = 0 if high_watermark is None else high_watermark - sum(sum(cut.values()) for cut in counts)
    steps = [dict[LogStreamId, int]()] * ticks + counts
    for i, step in enumerate(steps):
        time = CutTime(LAST_CUT_TIME - (len(steps) - 1 - i) * SECOND)
        ends = {lsid: state.streams[lsid].committed_end for lsid in step}
        commits = make_cut(
            state.high_watermark,
            time,
            [Candidate(lsid, E1, ends[lsid], (LLSN(ends[lsid] + count),)) for lsid, count in step.items()],
        )
        following = commits[0].context.high_watermark if commits else GLSN(state.high_watermark + 1)
        decision = d.Cut(following, state.high_watermark, time, state.revision, commits)
        state.apply(decision)
        decisions.append(decision)
    return decisions


class Leader:
    """An order layer, its store and its clock."""

    def __init__(
        self,
        decisions: Iterable[d.Decision] = (),
        *,
        options: OrderOptions | None = None,
        snapshot: Snapshot | None = None,
        now: Instant = START,
        is_new: bool = False,
    ) -> None:
        """One that ``is_new`` has heard of no replica yet, so it answers nobody."""
        self.stored: list[d.Decision] = list(decisions)
        self.now = now
        self.layer = OrderLayer(LEADER, OrderState(snapshot, self.stored), now, options or OrderOptions())
        for stream in () if is_new else self.layer.first_reports.missing:
            self.layer.first_reports.hear(stream)
        self._sequences: dict[StorageNodeId, int] = {}
        self._requests = 0

    @property
    def state(self) -> OrderState:
        return self.layer.state

    def raw(self, event: OrderEvent) -> list[OrderEffect]:
        return self.layer.handle(event, self.now)

    def run(self, event: OrderEvent) -> list[OrderEffect]:
        """Handle the event and store all that the layer wants stored; every effect, in order."""
        effects = todo = self.raw(event)
        while any(isinstance(effect, Store) for effect in todo):
            store = todo[-1]
            assert isinstance(store, Store), "a write comes last: nothing leaves while it is in flight"
            todo = self.confirm(store)
            effects = effects + todo
        return effects

    def confirm(self, store: Store) -> list[OrderEffect]:
        """The write is durable."""
        self.stored += store.decisions
        return self.raw(Stored(DecisionIndex(store.after + len(store.decisions))))

    def report(
        self,
        node: StorageNodeId,
        *reports: UncommitReport,
        incarnation: int = 1,
        sequence: int | None = None,
        node_state: NodeState = NodeState.READY,
        applied: int | None = None,
        invalid: tuple[LogStreamId, ...] = (),
        leader_epoch: int = LEADER,
        is_followed: bool = False,
    ) -> ReportArrived:
        """The node's next report. Unless told otherwise it has heard of this leader and of every cut."""
        if sequence is None:
            sequence = self._sequences[node] = self._sequences.get(node, 0) + 1
        heard = self.state.high_watermark if applied is None else GLSN(applied)
        report = Report(
            storage_node_id=node,
            incarnation=Incarnation(incarnation),
            sequence=sequence,
            leader_epoch=LeaderEpoch(leader_epoch),
            node_state=node_state,
            uncommit_reports=reports,
            applied_high_watermark=heard,
            invalid=invalid,
            is_followed=is_followed,
        )
        return ReportArrived(report)

    def ask(self, request: Request) -> Asked:
        self._requests += 1
        return Asked(self._requests, request)

    def answer(self, request: Request) -> Answer | CutwaterError:
        """Ask, store what is decided, and give back the one answer."""
        asked = self.ask(request)
        replies = [e for e in self.run(asked) if isinstance(e, Reply) and e.request_id == asked.request_id]
        assert len(replies) == 1, replies
        return replies[0].outcome

    def pass_time(self, us: int) -> None:
        self.now = Instant(self.now.monotonic + us, self.now.wall + us)

    def wake_after(self, us: int) -> list[OrderEffect]:
        """Time passes without a sign of it, then the leader wakes. After long enough it knows that it slept."""
        self.pass_time(us)
        return self.run(Wake())

    def wake_during(self, us: int, every_us: int = 20 * MILLISECOND) -> list[OrderEffect]:
        """Time passes, and the leader wakes all the while, as it should."""
        effects: list[OrderEffect] = []
        for at in range(0, us, every_us):
            effects += self.wake_after(min(every_us, us - at))
        return effects


def stores(effects: Iterable[OrderEffect]) -> list[d.Decision]:
    """The decisions among the effects."""
    return [decision for effect in effects if isinstance(effect, Store) for decision in effect.decisions]


def sends(effects: Iterable[OrderEffect], kind: type | None = None) -> list[Send]:
    """The messages among the effects, or those of one kind."""
    return [e for e in effects if isinstance(e, Send) and (kind is None or isinstance(e.message, kind))]


def plain(effects: Iterable[OrderEffect]) -> list[object]:
    """The effects with errors replaced by their classes, so that whole lists can be compared."""
    found: list[object] = []
    for effect in effects:
        match effect:
            case Alarm():
                found.append((Alarm, type(effect.error)))
            case Reply(outcome=CutwaterError()):
                found.append((Reply, effect.request_id, type(effect.outcome)))
            case _:
                found.append(effect)
    return found


class FakeReplica:
    """A replica that is durable at once."""

    def __init__(self, hwm: int) -> None:
        self.state, self.epoch, self.hwm = SEALING, 0, hwm
        self.committed = self.end = 0
        self.trimmed = 1
        self.sealed_at: int | None = None

    def apply(self, context: CommitContext) -> None:
        if context.last_llsn <= self.committed or context.first_llsn > self.committed + 1:
            return
        if context.epoch != self.epoch or self.state is LEARNING:
            return
        assert context.last_llsn <= self.end, f"told to commit {context}, but it ends at {self.end}"
        assert self.state is not SEALED
        self.committed, self.hwm = context.last_llsn, context.high_watermark

    def settle(self) -> None:
        if self.state is SEALING and self.sealed_at == self.committed == self.end:
            self.state = SEALED


class FakeNodes:
    """Storage nodes on a reliable network without delay. ``silent`` ones are dead."""

    def __init__(self, leader: Leader, nodes: Iterable[StorageNodeId] = (N1, N2, N3)) -> None:
        self.leader = leader
        self.replicas: dict[tuple[StorageNodeId, LogStreamId], FakeReplica] = {}
        self.nodes = list(nodes)
        self.silent: set[StorageNodeId] = set()
        self.damaged: set[tuple[StorageNodeId, LogStreamId]] = set()
        """Replicas that cannot be trusted, and do not come right by themselves."""
        self.seen: list[OrderEffect] = []

    def append(self, stream: LogStreamId, count: int) -> None:
        """Records that are durable on every replica of the chain that is alive."""
        for node in self.leader.state.streams[stream].members:
            if node not in self.silent:
                assert self.replicas[node, stream].state is RUNNING
                self.replicas[node, stream].end += count

    def round(self, ms: int = 20) -> None:
        """Time passes, everyone alive reports, and what the leader sends is done."""
        self.take(self.leader.wake_after(ms * MILLISECOND))
        for node in self.nodes:
            if node not in self.silent:
                invalid = tuple(lsid for at, lsid in sorted(self.damaged) if at == node)
                self.take(self.leader.run(self.leader.report(node, *self._reports(node), invalid=invalid)))

    def rounds(self, count: int, ms: int = 20) -> None:
        for _ in range(count):
            self.round(ms)

    def _reports(self, node: StorageNodeId) -> list[UncommitReport]:
        return [
            ur(lsid, end=r.end, committed=r.committed, hwm=r.hwm, epoch=r.epoch, state=r.state, trimmed=r.trimmed)
            for (at, lsid), r in sorted(self.replicas.items())
            if at == node and (at, lsid) not in self.damaged
        ]

    def take(self, effects: Iterable[OrderEffect]) -> None:
        for effect in effects:
            self.seen.append(effect)
            if not isinstance(effect, Send) or effect.node in self.silent:
                continue
            if (effect.node, getattr(effect.message, "stream", None)) not in self.damaged:
                self._deliver(effect.node, effect.message)

    def _deliver(self, node: StorageNodeId, message: m.LeaderMessage) -> None:
        if isinstance(message, m.CommitMessage):
            for commit in message.commits:
                self.replicas[node, commit.stream].apply(commit.context)
            return
        if isinstance(message, m.CreateReplica):
            self.replicas.setdefault((node, message.stream), FakeReplica(message.high_watermark))
            return
        if isinstance(message, m.LeaderHello):
            return
        replica = self.replicas.get((node, message.stream))
        if replica is None:
            # As a storage node that has not heard yet that it shall have the replica.
            return
        match message:
            case m.CatchUp():
                for context in message.contexts:
                    replica.apply(context)
            case m.SealReplica() if replica.state is not LEARNING:
                assert message.sealed_at >= replica.committed
                replica.end = min(
                    replica.end, message.sealed_at if message.epoch == replica.epoch else replica.committed
                )
                if replica.state is not SEALED or message.epoch > replica.epoch:
                    replica.state, replica.epoch, replica.sealed_at = SEALING, message.epoch, message.sealed_at
            case m.UnsealReplica() if replica.state is SEALED and message.epoch == replica.epoch + 1:
                assert message.start == replica.committed
                replica.state, replica.epoch, replica.sealed_at = RUNNING, message.epoch, None
            case m.ExcludeReplica() if message.epoch > replica.epoch:
                replica.state, replica.epoch, replica.sealed_at = SEALING, message.epoch, None
                replica.end = replica.committed
            case m.LearnFrom() if replica.state is SEALING:
                source = self.replicas[message.source, message.stream]
                replica.committed = replica.end = source.committed
                replica.hwm = source.hwm
            case m.TrimReplica():
                replica.trimmed = max(replica.trimmed, message.before)
        replica.settle()
