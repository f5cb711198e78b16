"""The leader of the metadata repository: reports and requests in; cuts, seals, unseals and messages out.

The leader works in *turns*. While a store write is in flight, it only takes in events. When the write is done, the
leader announces the decisions and tells replicas that reported meanwhile what they lack. Then everything that has
accumulated becomes the next write: one cut of all log streams, then requests, seals and unseals. So a slow store lowers
the rate of cuts, not the throughput.

Invariants:

1. No other process learns of a decision before it is stored under this leader's epoch; the herald speaks after it.
2. ``state`` may be ahead of the store by the write in flight. If that write is refused, the leader's term is over.
3. A decision depends only on the state, on reports that count, and, for time-outs, on time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

from msgspec import UNSET, structs

from cutwater.core.jobs.leading.job_desk import WAITING, JobDesk
from cutwater.core.messages import LeaderHello
from cutwater.core.order import decisions as d
from cutwater.core.order import events as e
from cutwater.core.order.announcements import Herald
from cutwater.core.order.cutting import Cutter
from cutwater.core.order.description import describe, lost_memory
from cutwater.core.order.options import (
    FINISHED_STREAMS_EVERY_WAKES,
    LARGE_BATCH_PARTS,
    REPAIRS_PER_TURN_MAX,
    OrderOptions,
    settling_wakes,
)
from cutwater.core.order.origin import Dated
from cutwater.core.order.planning.cluster_view import Outlook, trim_histories
from cutwater.core.order.planning.first_reports import FirstReports
from cutwater.core.order.planning.liveness import Backoff, Liveness
from cutwater.core.order.planning.membership_index import Roster
from cutwater.core.order.planning.placement import ReplicaCounts, loads, reassign, replacements, survivors
from cutwater.core.order.planning.repair import is_ready
from cutwater.core.order.planning.repair_queue import RepairQueue
from cutwater.core.order.planning.reports import ReportBook, can_be
from cutwater.core.order.planning.stall_detector import Trouble, TroubleKind, Watch
from cutwater.core.order.request_handling import Surroundings, decide
from cutwater.core.order.state import LogStream, OrderState, TopicState
from cutwater.core.publish.publishing import Publisher
from cutwater.core.requests import ABOUT_THE_CLUSTER, Answer, LearnRequest, PublishRequest
from cutwater.errors import (
    CutwaterError,
    ImpossibleReport,
    LeaderFenced,
    NotFound,
    NotLeader,
    OrderLayerLostMemory,
    ResourceExhausted,
    Unavailable,
)
from cutwater.types import (
    CutTime,
    Epoch,
    Incarnation,
    Instant,
    LeaderEpoch,
    LogStreamId,
    ReplicaState,
    Report,
    StorageNodeId,
    UncommitReport,
)

Effects = list[e.OrderEffect]


class OrderLayer:
    """One term of one leader. Only ``handle``, or ``take`` and ``turn``, change it."""

    def __init__(self, leader_epoch: LeaderEpoch, state: OrderState, now: Instant, options: OrderOptions) -> None:
        self.leader_epoch = leader_epoch
        self.state = state
        self.options = options
        self.halted: OrderLayerLostMemory | None = None
        self.over = False
        self.explanations: dict[LogStreamId, str] = {}
        self._book = ReportBook()
        self._roster = Roster(state)
        self._herald = Herald(leader_epoch, state, self._book, self._roster, list_min=options.member_list_min)
        self.publisher = Publisher(state, self._book, options)
        self.jobs = JobDesk(state.jobs, state.access, leader_epoch, options.agent_lease_us)
        self._liveness = Liveness(
            state.nodes,
            now,
            dead_after_us=options.node_dead_after_us,
            links=Backoff(options.retry_us_min, options.retry_us_max),
        )
        self._watch = Watch(state, self._book, self._liveness, self._roster)
        self._with_history = {lsid: None for lsid, history in state.histories.items() if history}
        self._outlook = Outlook(state, self._book, self._liveness, options, now)
        self.first_reports = FirstReports(state, options.first_reports_wait_us)
        self._cutter = Cutter(state, self._book, options, now)
        self._requests: deque[e.Asked] = deque()
        self._in_flight: tuple[d.Decision, ...] | None = None
        self._alarms: Effects = []
        self._confirm = False
        """Whether to ask the store, with an empty write, if this leader still leads."""
        self._held: Effects = []
        """Effects that wait for the write in flight: answers to requests, and messages that depend on the write."""
        self._unheard_due = True
        """Whether a stream may be left without a member that can report, as time has passed or a node was lost."""
        self.has_news = True
        """Whether a turn may be needed: events came since the last turn, or groups are being published."""
        self._spoke: dict[StorageNodeId, set[LogStreamId]] = {}
        """Nodes whose reports since the last turn may need an answer, each with the streams concerned."""
        self._attention = RepairQueue()
        self._seals: dict[LogStreamId, str] = {}
        self._distrusted: dict[LogStreamId, set[StorageNodeId]] = {}
        self._load: ReplicaCounts | None = None
        self._short_topics: list[TopicState] = []
        """Topics that may have fewer open streams than they should."""
        self._admissions = Backoff(options.retry_us_min, options.retry_us_max)
        self._wakes = 0
        self._compacted_at = state.snapshot_index
        self._settled_high_watermark = self._high_watermark_at_wake = state.high_watermark
        """A node that has not applied the cuts up to ``_settled_high_watermark`` by now has lost a message."""

    def handle(self, event: e.OrderEvent, now: Instant) -> Effects:
        """Take in an event, and have a turn."""
        return [*self.take(event, now), *self.turn(now)]

    def take(self, event: e.OrderEvent, now: Instant) -> Iterable[e.OrderEffect]:
        """Take in an event and return the effects to carry out at once. If ``has_news``, a ``turn`` has to follow;
        several events may share one."""
        if self.over:
            raise LeaderFenced(f"leader epoch {self.leader_epoch} is over")
        slept = self._liveness.notice_sleep(now)
        if slept:
            self._outlook.note_sleep(slept)
            self.jobs.leases.grant_all(now)
        if isinstance(event, e.ReportArrived):
            return self._take_report(event.report, now)
        self.has_news = True
        match event:
            case e.Stored():
                return self._stored(event)
            case e.Asked():
                return self._take_request(event, now)
            case e.StoreRefused():
                return self._step_down(event.reason)
            case e.PeerComplaint():
                stream = self.state.streams.get(event.stream)
                if stream is not None and {event.complainer, event.peer} <= set(stream.members):
                    self._liveness.accuse(event.stream, event.complainer, event.peer, now)
            case e.GroupOutcomeArrived():
                self.publisher.take(event.outcome)
            case e.NodeGone():
                self._liveness.lose(event.node, now)
                self._leave_out(
                    event.node, f"no process listens at the address of storage node {event.node} any more", now
                )
            case e.NodeUnreachable():
                self._leave_out(event.node, f"storage node {event.node} cannot be reached", now)
            case e.Wake():
                self._wake(now)
        return ()

    # Events.

    def _take_request(self, asked: e.Asked, now: Instant) -> Sequence[e.OrderEffect]:
        self.jobs.hear(asked, now)
        waiting = len(self._requests) + len(self.first_reports.waiting)
        if waiting >= self.options.requests_max:
            error = ResourceExhausted(f"{waiting} requests wait already", retry_ms=100)
            return (e.Reply(asked.request_id, error),)
        self._requests.append(asked)
        return ()

    def heard_of(self, node: StorageNodeId) -> Incarnation | None:
        """Return the newest incarnation of a node that has reported to this leader."""
        report = self._book.newest(node)
        return report.incarnation if report is not None else None

    def _take_report(self, report: Report, now: Instant) -> Iterable[e.OrderEffect]:
        node = report.storage_node_id
        if node not in self.state.nodes:
            raise NotFound(f"storage node {node} does not belong to this cluster: add it first")
        if report.leader_epoch != self.leader_epoch:
            return self._introduce(report)
        admitted = self._book.admit(report)
        if admitted is None:
            return self._herald.hold(report, is_admitted=False) if self._book.is_new(report) else ()
        self._liveness.hear(node, now)
        if admitted.is_other:
            self._herald.look_again(node)
        if admitted.is_restart:
            for held in self.state.streams_on(node):
                self._liveness.pardon(held.stream, node)
        if report.applied_high_watermark > self.state.high_watermark:
            self._halt(f"storage node {node} has heard of the cut {report.applied_high_watermark}")
        # The rest of the report was examined before, and its consequences are decided.
        unusual = []
        moving, streams = self._watch.moving, self.state.streams
        for ur in admitted.changed:
            moving[ur.log_stream_id] = None
            stream = streams.get(ur.log_stream_id)
            if stream is None or not self._herald.is_settled(stream, node, ur):
                unusual.append(ur)
            elif self._cutter.note_report(stream):
                self.has_news = True
        if unusual or not self._herald.is_content(report, self._settled_high_watermark):
            self.has_news = True
            self._spoke.setdefault(node, set()).update([ur.log_stream_id for ur in unusual])
            for ur in (*unusual, *self._herald.unsettled(node)):
                self._examine(node, ur)
        for lsid in report.invalid:
            if lsid in self.state.streams:
                self._distrust(self.state.streams[lsid], node, "its stored data is damaged or incomplete")
        if self.first_reports.are_missing and self.halted is None:
            self._hear_first(node, admitted.changed)
        return () if report.base is UNSET else self._herald.hold(report, is_admitted=True)

    def _hear_first(self, node: StorageNodeId, reports: Iterable[UncommitReport]) -> None:
        """Note members whose reports are not newer than the state that the store gave to this leader."""
        for ur in reports:
            stream = self.state.streams.get(ur.log_stream_id)
            if stream is None or node not in stream.members or node in self._distrusted.get(stream.stream, ()):
                continue
            if can_be(self.state, stream, ur):
                self.first_reports.hear(stream.stream)
        self.has_news = self.has_news or not self.first_reports.are_missing

    def _introduce(self, report: Report) -> Sequence[e.OrderEffect]:
        """Ask the node for a new report. One that does not name this leader may be older than the leader's state."""
        if report.leader_epoch > self.leader_epoch:
            self._halt(f"storage node {report.storage_node_id} knows leader epoch {report.leader_epoch}")
        return (e.Send(report.storage_node_id, LeaderHello(self.leader_epoch)),)

    def _examine(self, node: StorageNodeId, ur: UncommitReport) -> None:
        """Check one replica's report against what was decided."""
        if self.state.was_deleted(ur.log_stream_id):
            # The herald tells the node that the stream was deleted.
            return
        stream = self.state.streams.get(ur.log_stream_id)
        if stream is None or not can_be(self.state, stream, ur):
            self._halt(f"storage node {node} reports {ur}, of which the order layer knows nothing")
            return
        if node not in stream.replicas:
            return
        if node in stream.members:
            floor = stream.committed_end
            if ur.state is ReplicaState.LEARNING:
                self._distrust(stream, node, "it is learning")
                return
            if ur.durable_end < floor:
                what = f"log stream {stream.stream} on storage node {node} ends at LLSN {ur.durable_end}, below {floor}"
                if node not in self._distrusted.get(stream.stream, ()):
                    self._alarm(ImpossibleReport(f"{what}: it has lost what it had on disk and is quarantined"))
                self._distrust(stream, node, f"it ends at LLSN {ur.durable_end}, below {floor}")
                return
        if not stream.is_open:
            if not stream.final or not is_ready(stream, ur):
                self._attention.add(stream.stream)
        elif node in stream.members:
            self._examine_member(stream, node, ur)

    def _examine_member(self, stream: LogStream, node: StorageNodeId, ur: UncommitReport) -> None:
        if ur.state is ReplicaState.SEALING:
            # The replica restarted, or something failed there.
            self._want_seal(
                stream,
                f"the replica on storage node {node} stopped: it was restarted, or a write or a link failed there",
            )
        elif ur.epoch == stream.epoch and ur.state is ReplicaState.SEALED:
            self._halt(f"storage node {node} reports {ur}, but the stream is open")
        if ur.epoch == stream.epoch:
            self._cutter.note_report(stream)

    def _distrust(self, stream: LogStream, node: StorageNodeId, why: str) -> None:
        """Quarantine a replica that counts but can no longer be trusted: it has to learn from a peer."""
        if node not in stream.members:
            return
        self._distrusted.setdefault(stream.stream, set()).add(node)
        self._want_seal(stream, f"the replica on storage node {node} is quarantined: {why}")

    def _alarm(self, error: CutwaterError) -> None:
        """Raise an alarm once the store has confirmed that this leader leads. Otherwise a deposed leader would raise
        alarms about its own outdated state."""
        self._alarms.append(e.Alarm(error))
        self._confirm = self.has_news = True

    def _want_seal(self, stream: LogStream, reason: str) -> None:
        self._seals.setdefault(stream.stream, reason)
        self.has_news = self._unheard_due = True

    def _halt(self, what: str) -> None:
        """Stop making cuts: the order layer has lost its memory, or this leader was deposed without noticing."""
        if self.halted is None:
            self.halted = lost_memory(self.state, what)
            self._alarm(self.halted)

    def _wake(self, now: Instant) -> None:
        self._liveness.wake(now)
        self._unheard_due = True
        for asked, why in self.publisher.take_overdue(now):
            self._held.append(e.Reply(asked.request_id, Unavailable(f"{why}: ask again")))
        for asked in self.first_reports.take_overdue(now):
            self._held.append(e.Reply(asked.request_id, self.first_reports.error()))
        self._wakes += 1
        if self._wakes % FINISHED_STREAMS_EVERY_WAKES == 0:
            self._short_topics = list(self.state.topics.values())
            self._attention.add_patient(self._roster.patient)
        if self._wakes % settling_wakes(len(self.state.nodes)) == 0:
            self._settled_high_watermark = self._high_watermark_at_wake
            self._high_watermark_at_wake = self.state.high_watermark
        if self._with_history:
            trim_histories(self.state, self._outlook, self._with_history, REPAIRS_PER_TURN_MAX, now)
        for trouble in self._watch.troubles(now):
            self._meet(trouble, now)
        if self._roster.unwell:
            self._attention.add_all(self._roster.unwell)

    def _leave_out(self, node: StorageNodeId, why: str, now: Instant) -> None:
        """Leave out the node for a while, even if it reports. After a restart it may join at once."""
        for stream in self.state.streams_on(node):
            self._liveness.avoid(stream.stream, node, now)
            if stream.is_open and node in stream.members:
                self._want_seal(stream, why)

    def _meet(self, trouble: Trouble, now: Instant) -> None:
        stream, node = self.state.streams[trouble.stream], trouble.node
        match trouble.kind:
            case TroubleKind.SILENT:
                self._want_seal(stream, f"storage node {node} is silent")
            case TroubleKind.LEFT_OUT:
                self._distrust(stream, node, "the node reports without it")
            case TroubleKind.STUCK:
                self._liveness.avoid(stream.stream, node, now)
                self._want_seal(stream, f"the replica on storage node {node} makes no progress")
            case TroubleKind.FULL if self._outlook.can_spare(stream, node, now):
                self._want_seal(stream, f"storage node {node} has no room left")

    # Turns.

    def turn(self, now: Instant) -> Effects:
        if not self.has_news or self._in_flight is not None:
            return []
        is_publishing = self.has_news = self.publisher.is_busy
        effects = self._release() if self._held else []
        if self.state.index - self._compacted_at >= self.options.compact_every_decisions:
            self._compacted_at = self.state.index
            effects.append(e.Compact(self.state.snapshot()))
        after = self.state.index
        decided: tuple[d.Decision, ...] = ()
        if self.halted is not None:
            self._answer_questions(self.halted, now)
        else:
            if is_publishing and not self.first_reports.are_missing:
                effects += self.publisher.messages(now, self._outlook)
            if self._spoke:
                effects += self._answers()
            decided = tuple(self._decide(now, is_publishing=is_publishing))
        if decided or self._confirm or (self._held and any(isinstance(held, e.Reply) for held in self._held)):
            # An answer that needed no decision waits for the store, too. Only the store tells a leader that it was
            # deposed, and a deposed leader must not present the past as the present.
            self._in_flight, self._confirm = decided, False
            self._held += self._alarms
            self._alarms = []
            effects.append(e.Store(self.leader_epoch, after, decided))
        elif self._held:
            effects += self._release()
        return effects

    def _answers(self) -> Effects:
        """Return the answers to the reports since the last turn."""
        spoke, self._spoke = self._spoke, {}
        answers: Effects = []
        for node, changed in sorted(spoke.items()):
            report = self._book.newest(node)
            if report is not None:
                answers += self._herald.answer(report, changed, self._settled_high_watermark)
        return answers

    def _release(self) -> Effects:
        held, self._held = self._held, []
        return held

    def _decide(self, now: Instant, *, is_publishing: bool) -> list[d.Decision]:
        """Decide everything that is due, as one write. The cut comes first, since it is the last one before a seal."""
        decided: list[d.Decision] = []
        self._load = None
        first_reports = self.first_reports
        if first_reports.are_missing:
            first_reports.look()
            if first_reports.are_missing:
                self._decide_unheard(now, decided)
                return decided
        if first_reports.waiting:
            self._requests.extendleft(reversed(first_reports.take_waiting()))
        cut = self._cutter.due(self._distrusted, now)
        if cut is not None:
            self._apply(cut, decided, now)
        if is_publishing:
            for decision in self.publisher.decide(now, self._outlook):
                self._apply(decision, decided, now)
        if self.jobs.has_questions:
            self._requests.extendleft(reversed(self.jobs.take_ready(now)))
        if self._requests:
            self._decide_requests(now, decided)
        if self.state.jobs.revision:
            for job_decision in self.jobs.due(now):
                self._apply(job_decision, decided, now)
        if self._seals:
            for lsid in list(islice(self._seals, REPAIRS_PER_TURN_MAX)):
                self._decide_seal(self.state.streams[lsid], self._seals.pop(lsid), decided, now)
        if self._attention.urgent or self._attention.patient:
            for lsid in self._attention.take(REPAIRS_PER_TURN_MAX):
                self._decide_repair(self.state.streams[lsid], now, decided)
        if self._seals or self._attention.urgent or self._attention.patient:
            self.has_news = True
        if self._short_topics:
            for topic in self._short_topics:
                self._decide_replacements(topic, now, decided)
            self._short_topics = []
        return decided

    def _decide_unheard(self, now: Instant, decided: list[d.Decision]) -> None:
        """Decide what is possible before every open stream has reported.

        A store that was rolled back may have given out the next GLSNs and epochs before. So everything that follows
        from reports waits. The exception is to seal streams of which no member can report any more: that ends the wait.
        """
        if self._requests:
            self._decide_requests(now, decided)
        if self._unheard_due:
            self._unheard_due = False
            alive = {node for node in self.state.nodes if self._liveness.is_alive(node, now)}
            for lsid in self.first_reports.hopeless(alive, self._distrusted):
                why = self._seals.pop(lsid, "no member of it has reported")
                self._decide_seal(self.state.streams[lsid], why, decided, now)

    def _apply(self, decision: d.Decision, decided: list[d.Decision], now: Instant) -> None:
        if isinstance(decision, d.Cut):
            self.state.apply(decision)
            decided.append(decision)
            for commit in decision.commits:
                self._watch.moving[commit.stream] = None
                self._with_history[commit.stream] = None
            return
        if isinstance(decision, Dated):
            decision = structs.replace(decision, at=max(self.state.cut_time, CutTime(now.wall)))
        self.state.apply(decision)
        self._roster.note(decision)
        decided.append(decision)
        if isinstance(decision, (d.Seal, d.Unseal)):
            self._book.void(decision.stream)
            self._watch.moving[decision.stream] = None
        if isinstance(decision, (d.Seal, d.CreateStream)):
            self._outlook.note_sealed(decision.stream, now)
        if isinstance(decision, d.DeleteTopic):
            self._forget_streams()
        self.jobs.note(decision, now)
        # Requests that wait for a batch may have waited for this decision.
        self._requests.extendleft(reversed(self.publisher.take_ready(decision)))

    def _forget_streams(self) -> None:
        known = self.state.streams
        self._cutter.forget_streams()
        self._attention.keep(known)
        self._with_history = {lsid: None for lsid in self._with_history if lsid in known}
        self._seals = {lsid: reason for lsid, reason in self._seals.items() if lsid in known}
        self._distrusted = {lsid: nodes for lsid, nodes in self._distrusted.items() if lsid in known}
        self._outlook.forget_streams()
        self._liveness.forget_streams(known)
        self.explanations = {lsid: why for lsid, why in self.explanations.items() if lsid in known}

    def _decide_requests(self, now: Instant, decided: list[d.Decision]) -> None:
        around = self._surroundings(now)
        taken = 0
        while self._requests and taken < self.options.requests_per_turn_max:
            asked = self._requests.popleft()
            if self.first_reports.holds(asked, now):
                continue
            taken += 1
            if asked.judged_at is not None and asked.judged_at < self.state.access.narrowed_at:
                self._held.append(e.Reply(asked.request_id, e.RightsChanged()))
                continue
            try:
                decisions, answer = decide(asked.request, self.state, structs.replace(around, origin=asked.origin))
            except CutwaterError as error:
                self._held.append(e.Reply(asked.request_id, error))
                continue
            for decision in decisions:
                self._apply(d.attributed(decision, asked.origin), decided, now)
                if isinstance(decision, (d.CreateStream, d.Release, d.AssignReplicas)):
                    self._attention.add(decision.stream)
                if isinstance(decision, d.ChangeTopic) and decision.replication is not UNSET:
                    self._attention.add_all(s.stream for s in self.state.streams_of(decision.topic))
                if isinstance(decision, d.AddNode):
                    self._liveness.hear(decision.node, now)
            if isinstance(asked.request, LearnRequest):
                self._attention.add(asked.request.stream)
            waits = self.jobs.wait if isinstance(asked.request, WAITING) else self.publisher.wait
            if answer is not None:
                self._held.append(e.Reply(asked.request_id, self.jobs.settled(answer)))
            elif not waits(asked, now):
                self._held.append(
                    e.Reply(asked.request_id, ResourceExhausted("too many requests wait", retry_ms=1_000))
                )
            elif not decisions:
                # A request that only waits causes no write, so no further turn would come for the requests behind it.
                taken -= 1
            if isinstance(asked.request, PublishRequest) and len(asked.request.parts) > LARGE_BATCH_PARTS:
                # This request almost fills a write by itself.
                break

    def _surroundings(self, now: Instant) -> Surroundings:
        return Surroundings(
            usable=lambda node: self._outlook.is_usable(node, now),
            ready=lambda stream, node: self._outlook.is_ready(stream, node, now),
            describe=lambda: describe(self, self._book, self._liveness, now),
            time=self._cutter.time(now),
            staged_expire_after_us=self.options.staged_expire_after_us,
            jobs=partial(self.jobs.decide, now),
        )

    def _answer_questions(self, halted: CutwaterError, now: Instant) -> None:
        """Answer requests after a halt, when nothing is decided any more. Operators still get the state of the cluster.
        Requests for catalog, cursors and clock are refused, since newer ones exist."""
        for asked in self._take_waiting():
            outcome: Answer | CutwaterError | None = halted
            if isinstance(asked.request, ABOUT_THE_CLUSTER):
                _, outcome = decide(asked.request, self.state, self._surroundings(now))
            assert outcome is not None
            self._held.append(e.Reply(asked.request_id, outcome))

    def _take_waiting(self) -> tuple[e.Asked, ...]:
        asked = (*self.publisher.take_waiting(), *self.first_reports.take_waiting(), *self.jobs.take_waiting())
        asked, self._requests = (*asked, *self._requests), deque()
        return asked

    def _decide_seal(self, stream: LogStream, reason: str, decided: list[d.Decision], now: Instant) -> None:
        distrusted = self._distrusted.pop(stream.stream, set())
        if stream.is_open:
            survivors = tuple(node for node in stream.members if node not in distrusted)
            self._apply(d.Seal(stream.stream, stream.epoch, stream.committed_end, survivors, reason), decided, now)
            return
        for node in sorted(distrusted & set(stream.members)):
            self._apply(d.DropSurvivor(stream.stream, node, reason), decided, now)
            self._attention.add(stream.stream)

    def _decide_repair(self, stream: LogStream, now: Instant, decided: list[d.Decision]) -> None:
        wanted = self.state.wanted(stream.topic)
        assign = reassign(stream, wanted, self._outlook, now, lambda: self._loads(now))
        if assign is not None:
            gone = [node for node in stream.replicas if node not in assign.replicas]
            self._apply(assign, decided, now)
            self._load = None
            if stream.is_open:
                # In a sealed stream the node may still run in the present epoch, if it missed the seal.
                self._held += [self._herald.release(stream, node) for node in gone]
        for survivor in survivors(stream, self._outlook, now):
            self._apply(survivor, decided, now)
        plan = self._outlook.plan(stream, now, admit=not self._admissions.waits(stream.stream, now))
        self.explanations[stream.stream] = plan.why
        for node, source in plan.learners:
            self._held.append(self._herald.learn(stream, node, source))
        if plan.chain:
            unseal = d.Unseal(stream.stream, Epoch(stream.epoch + 1), stream.committed_end, plan.chain, plan.why)
            self._apply(unseal, decided, now)
            if stream.members == stream.replicas:
                self._admissions.clear(stream.stream)
        elif plan.admit or plan.leave is not None:
            self._admissions.fail(stream.stream, now)
            self._decide_seal(stream, plan.why, decided, now)

    def _decide_replacements(self, topic: TopicState, now: Instant, decided: list[d.Decision]) -> None:
        if topic.topic not in self.state.topics:
            return
        time, least = self._cutter.time(now), max(1, self.options.min_replication)
        load = partial(self._loads, now)
        for create in replacements(self.state, topic, self._outlook, now, load, time, min_replication=least):
            self._apply(create, decided, now)
            self._attention.add(create.stream)

    def _loads(self, now: Instant) -> ReplicaCounts:
        """Return the load of all nodes. It is computed once per turn, since many streams may ask for it."""
        if self._load is None:
            self._load = loads(self.state, lambda node: self._outlook.is_usable(node, now))
        return self._load

    # After the store.

    def _stored(self, event: e.Stored) -> Effects:
        if event.index != self.state.index:
            raise OrderLayerLostMemory(f"the store is at decision {event.index}, the leader at {self.state.index}")
        decisions, self._in_flight = self._in_flight, None
        announcements: Effects = []
        for decision in decisions or ():
            announcements += self._herald.announce(decision)
            if isinstance(decision, d.RemoveNode):
                self._book.forget(decision.node)
                self._liveness.forget(decision.node)
        return announcements

    def _step_down(self, reason: str) -> Effects:
        self.over, self.has_news = True, False
        effects: Effects = [e.StepDown(reason)]
        for asked in self._take_waiting():
            effects.append(e.Reply(asked.request_id, NotLeader("another node leads now: ask it")))
        for held in self._held:
            if isinstance(held, e.Reply):
                unknown = Unavailable("the leader changed: it may or may not have been done")
                effects.append(e.Reply(held.request_id, unknown))
        return effects
