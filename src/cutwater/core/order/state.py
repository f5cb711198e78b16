"""The state of the cluster, folded from the sequence of decisions. Every reader of the sequence gets the same state.

``apply`` checks that a decision fits the state before it changes anything. Nothing here depends on reports, on time or
on the current leader. A leader's own memory is in ``leader.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import UNSET, Struct, UnsetType, field, structs

from cutwater.core.access.access_decisions import AccessDecision, AccessMode
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.access.access_state import AccessState
from cutwater.core.audit.audit_record import AuditRecord
from cutwater.core.audit.audit_state import AuditSnapshot, AuditState
from cutwater.core.audit.change_records import audit_record
from cutwater.core.internal_topics import PROGRAMS
from cutwater.core.jobs.job_decisions import JobDecision
from cutwater.core.jobs.job_records import PROGRAM_RUN_PREFIX, ProgramPlace
from cutwater.core.jobs.job_registry import JobRegistry, JobsSnapshot
from cutwater.core.jobs.job_spec import is_sha256
from cutwater.core.order import decisions as d
from cutwater.core.order.event_log import EVENTS_MAX, event_of
from cutwater.core.order.history import CommitHistory
from cutwater.core.publish.finished_runs import FinishedRun
from cutwater.core.publish.runs import Output, RunRegistry, RunState
from cutwater.core.read.time_marks import Clock, MarkBlock, TimeMark
from cutwater.core.recent_history import Journal
from cutwater.core.replica.deduplication import Departure
from cutwater.core.requests import Event
from cutwater.errors import ContradictoryCommand
from cutwater.types import (
    GLSN,
    LLSN,
    ClusterId,
    CommitContext,
    CutTime,
    DecisionIndex,
    Epoch,
    JobNumber,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    Retention,
    Revision,
    RunId,
    Sequence,
    StorageNodeId,
    TopicId,
)

_ON_STREAMS = (
    d.Seal | d.Unseal | d.Release | d.DropSurvivor | d.AddSurvivor | d.AssignReplicas | d.OpenProducer | d.MoveProducer
)
"""Decisions that name a log stream which must exist."""


class Node(Struct, frozen=True):
    """A storage node of the cluster: its address, its keys, and the volumes that it reported. ``key`` tells its data
    from another node's and proves nothing. ``server_key`` is the public key with which the node proves its identity."""

    node: StorageNodeId
    address: str = ""
    key: str = ""
    volumes: tuple[str, ...] = ()
    server_key: str = ""


class TopicState(Struct):
    """A topic. ``streams`` is the number of log streams that shall be open, ``replication`` the number of copies that
    each shall have."""

    topic: TopicId
    name: str
    replication: int
    streams: int = 1
    schemas: tuple[bytes, ...] = ()
    event_time: str = ""
    retention: Retention = Retention()
    trimmed_before: GLSN = GLSN(1)
    event_time_ahead_us: int = 0
    internal: bool | UnsetType = UNSET
    """As ``is_internal``. It is stored only if it is so, as the field is younger than the format."""

    @property
    def is_internal(self) -> bool:
        """Whether the cluster made the topic for itself."""
        return self.internal is True


class LogStream(Struct):
    """A log stream. ``replicas`` are the nodes that shall hold it. ``members`` are the nodes that do hold it: the chain
    while it is open, and the survivors that hold everything up to ``committed_end`` while it is sealed."""

    stream: LogStreamId
    topic: TopicId
    replicas: tuple[StorageNodeId, ...]
    members: tuple[StorageNodeId, ...]
    created_at: GLSN
    created_time: CutTime
    epoch: Epoch = Epoch(0)
    is_open: bool = False
    final: bool = False
    final_at: GLSN = GLSN(0)
    """The high watermark when the stream was sealed permanently. Event time does not wait for the stream above it."""
    held: bool = False
    """Whether an operator sealed the stream. It stays sealed until it is released."""
    start: LLSN = LLSN(0)
    """LLSN after which the current epoch began."""
    committed_end: LLSN = LLSN(0)
    last_glsn: GLSN = GLSN(0)
    reason: str = "new"
    since: CutTime = CutTime(0)
    """When the stream was last sealed or opened."""
    departed: tuple[Departure, ...] = ()
    """Producers that were moved away, each with the epoch under which it went on. An older session of such a producer
    may still send to this stream. The list is not needed once the stream is finished."""
    replaced: tuple[StorageNodeId, ...] | UnsetType = field(default=UNSET, name="leaving")
    """As ``leaving``. It is stored only if there are any, as the field is younger than the format."""

    @property
    def leaving(self) -> tuple[StorageNodeId, ...]:
        """Replicas that were replaced and stay until their successors hold every record. They come last in
        ``replicas``."""
        return () if isinstance(self.replaced, UnsetType) else self.replaced

    @property
    def staying(self) -> tuple[StorageNodeId, ...]:
        """The members that were not replaced."""
        return tuple(node for node in self.members if node not in self.leaving)


class ProducerState(Struct):
    """A producer. ``session`` identifies the opening that holds the name. ``last_sequence`` is the producer's last
    sequence in its previous stream."""

    epoch: ProducerEpoch
    stream: LogStreamId
    session: int
    last_sequence: Sequence = Sequence(0)


class StoredStream(Struct, frozen=True):
    """A log stream and its commit history in a snapshot."""

    stream: LogStream
    history: tuple[CommitContext, ...]


class Snapshot(Struct, frozen=True):
    """``OrderState`` after decision ``index``, as stored. Loading it equals replaying all decisions up to there."""

    index: DecisionIndex = DecisionIndex(0)
    revision: Revision = Revision(0)
    high_watermark: GLSN = GLSN(0)
    cut_time: CutTime = CutTime(0)
    last_topic: TopicId = TopicId(0)
    last_stream: LogStreamId = LogStreamId(0)
    cluster: ClusterId = ClusterId(0)
    cluster_key: str = ""
    nodes: tuple[Node, ...] = ()
    topics: tuple[TopicState, ...] = ()
    streams: tuple[StoredStream, ...] = ()
    producers: dict[ProducerId, ProducerState] = field(default_factory=dict)
    cursors: dict[str, GLSN] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    clock_blocks: tuple[MarkBlock, ...] = ()
    clock_recent: tuple[TimeMark, ...] = ()
    last_run: RunId = RunId(0)
    runs: tuple[RunState, ...] = ()
    outputs: tuple[Output, ...] | None = None
    """Outputs by name. None in snapshots from before outputs were stored; they are then derived from the runs."""
    access: AccessRules | UnsetType = UNSET
    """Access control. It is stored only once something about it was decided, as the field is younger than the
    format."""
    audit: AuditSnapshot | UnsetType = UNSET
    """The audit. It is stored only once something was recorded."""
    jobs: JobsSnapshot | UnsetType = UNSET
    """Jobs and agents. They are stored only once there were any."""
    finished_runs: tuple[FinishedRun, ...] | UnsetType = UNSET
    """Runs for a single batch that were published and forgotten. They are stored only once there were any."""


class OrderState:
    """The state of the cluster, see the module. Read it freely; change it with ``apply`` and ``trim_history`` only."""

    def __init__(self, snapshot: Snapshot | None = None, decisions: Iterable[d.Decision] = ()) -> None:
        start = snapshot or Snapshot()
        self.index = self.snapshot_index = start.index
        self.revision = start.revision
        self.high_watermark = start.high_watermark
        self.cut_time = start.cut_time
        self.last_topic, self.last_stream = start.last_topic, start.last_stream
        self.cluster, self.cluster_key = start.cluster, start.cluster_key
        self.nodes: dict[StorageNodeId, Node] = {node.node: node for node in start.nodes}
        self.topics: dict[TopicId, TopicState] = {topic.topic: structs.replace(topic) for topic in start.topics}
        self.streams: dict[LogStreamId, LogStream] = {s.stream.stream: structs.replace(s.stream) for s in start.streams}
        self._of_topic: dict[TopicId, dict[LogStreamId, LogStream]] = {topic: {} for topic in self.topics}
        for stream in self.streams.values():
            self._of_topic[stream.topic][stream.stream] = stream
        self.histories = {s.stream.stream: CommitHistory(s.history, s.stream.committed_end) for s in start.streams}
        self.producers = {name: structs.replace(producer) for name, producer in start.producers.items()}
        self.cursors = dict(start.cursors)
        self.events = deque(start.events, EVENTS_MAX)
        self.clock = Clock(start.clock_blocks, start.clock_recent)
        self.runs = RunRegistry(start.last_run, start.runs, start.outputs, start.finished_runs or ())
        self.access = AccessState(start.access or None)
        self.audit = AuditState(start.audit or AuditSnapshot(is_on=self.access.mode is not AccessMode.OFF))
        self.jobs = JobRegistry(start.jobs or None)
        self._journal = Journal("order layer")
        for decision in decisions:
            self.apply(decision)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            index=self.index,
            revision=self.revision,
            high_watermark=self.high_watermark,
            cut_time=self.cut_time,
            last_topic=self.last_topic,
            last_stream=self.last_stream,
            cluster=self.cluster,
            cluster_key=self.cluster_key,
            nodes=tuple(self.nodes[node] for node in sorted(self.nodes)),
            topics=tuple(structs.replace(topic) for topic in self.topics.values()),
            streams=tuple(
                StoredStream(structs.replace(stream), self.histories[lsid].contexts())
                for lsid, stream in self.streams.items()
            ),
            producers={name: structs.replace(producer) for name, producer in self.producers.items()},
            cursors=dict(self.cursors),
            events=tuple(self.events),
            clock_blocks=self.clock.blocks,
            clock_recent=self.clock.recent,
            last_run=self.runs.last,
            runs=self.runs.snapshot(),
            outputs=self.runs.outputs_snapshot(),
            access=UNSET if self.access.is_untouched else self.access.snapshot(),
            audit=UNSET if self.audit.is_untouched else self.audit.snapshot(),
            jobs=UNSET if self.jobs.is_untouched else self.jobs.snapshot(),
            finished_runs=self.runs.finished.snapshot() or UNSET,
        )

    def topic_named(self, name: str) -> TopicState | None:
        return next((t for t in self.topics.values() if t.name == name), None)

    def wanted(self, topic: TopicId) -> int:
        """Return the number of copies that the topic asks for now. An internal topic asks for no more than there are
        storage nodes, so nothing is missing in a small cluster."""
        found = self.topics[topic]
        return min(found.replication, max(1, len(self.nodes))) if found.is_internal else found.replication

    def streams_of(self, topic: TopicId) -> list[LogStream]:
        return list(self._of_topic.get(topic, {}).values())

    # See ``core.audit.change_records.AuditNames``.

    def topic_name(self, topic: TopicId) -> str:
        return self.topics[topic].name if topic in self.topics else ""

    def stream_topic_name(self, stream: LogStreamId) -> str:
        return self.topic_name(self.streams[stream].topic) if stream in self.streams else ""

    def run_name(self, run: RunId) -> str:
        found = self.runs.get(run)
        return found.name if found is not None else ""

    def job_name(self, job: JobNumber) -> str:
        return self.jobs.jobs[job].name if job in self.jobs.jobs else ""

    def knows_agent(self, name: str) -> bool:
        return name in self.jobs.agents

    def audit_record(self, decision: d.Decision) -> AuditRecord | None:
        """Return the audit record of the next decision, if there is one."""
        if not self.audit.wants(decision):
            return None
        return audit_record(DecisionIndex(self.index + 1), decision, self, self.cut_time)

    def streams_on(self, node: StorageNodeId) -> list[LogStream]:
        return [stream for stream in self.streams.values() if node in stream.replicas]

    def trim_history(self, stream: LogStreamId, applied_end: LLSN) -> int:
        """Forget the ranges that replicas have on disk, and return their number. This is not a decision: it is harmless
        to forget late, or again after a leader change, so the store may keep more than the leader does."""
        return self.histories[stream].trim(applied_end)

    def apply(self, decision: d.Decision) -> None:
        """Fold the next decision into the state. Raise, and change nothing, if it contradicts the earlier ones."""
        if isinstance(decision, d.Cut):
            self._cut(decision)
            self.index = DecisionIndex(self.index + 1)
            self._journal.note(self.index, decision)
            return
        if isinstance(decision, _ON_STREAMS):
            self._require(decision.stream in self.streams, decision, "the log stream is unknown")
        if isinstance(decision, (d.ChangeTopic, d.DeleteTopic, d.Trim, d.CreateStream)):
            self._require(decision.topic in self.topics, decision, "the topic is unknown")
        # A name that the decision removes is known only before.
        record = self.audit_record(decision)
        match decision:
            case d.Seal():
                self._seal(decision)
            case d.Unseal():
                self._unseal(decision)
            case d.DropSurvivor():
                self._drop_survivor(decision)
            case d.AddSurvivor():
                stream = self.streams[decision.stream]
                fits = not stream.is_open and decision.node in stream.replicas and decision.node not in stream.members
                self._require(fits, decision, "it counts already, or cannot")
                stream.members = (*stream.members, decision.node)
            case d.FoundCluster():
                self._require(not self.cluster_key, decision, "the cluster has a key already")
                self.cluster, self.cluster_key = decision.cluster, decision.key
            case d.AddNode():
                known = self.nodes.get(decision.node)
                self._require(known is None or known.key in ("", decision.key), decision, "its key is another one")
                is_same = known is None or decision.renews or known.server_key in ("", decision.server_key)
                self._require(is_same, decision, "its public key is another one")
                self.nodes[decision.node] = Node(
                    decision.node, decision.address, decision.key, decision.volumes, decision.server_key
                )
            case d.RemoveNode():
                self._require(not self.streams_on(decision.node), decision, "the node still has replicas")
                self.nodes.pop(decision.node, None)
            case d.CreateTopic():
                self._require(decision.topic == self.last_topic + 1, decision, "its number is out of turn")
                self.last_topic = decision.topic
                self.topics[decision.topic] = TopicState(
                    decision.topic,
                    decision.name,
                    decision.replication,
                    decision.streams,
                    (decision.schema,) if decision.schema else (),
                    decision.event_time,
                    decision.retention,
                    event_time_ahead_us=decision.event_time_ahead_us,
                    internal=decision.is_internal or UNSET,
                )
            case d.ChangeTopic():
                topic = self.topics[decision.topic]
                topic.streams, topic.retention = decision.streams, decision.retention
                if decision.event_time_ahead_us is not None:
                    topic.event_time_ahead_us = decision.event_time_ahead_us
                if not isinstance(decision.replication, UnsetType):
                    topic.replication = decision.replication
                if decision.schema:
                    topic.schemas = (*topic.schemas, decision.schema)
            case d.DeleteTopic():
                live = [s.stream for s in self.streams_of(decision.topic) if not s.final]
                self._require(not live, decision, f"log streams {live} are not finished")
                self._delete_topic(decision.topic)
                self._trim_clock()
            case d.CreateStream():
                self._create_stream(decision)
                if len(self._of_topic[decision.topic]) == 1:
                    # Another stream of the same topic needs no marks that the first one does not need.
                    self._trim_clock()
            case d.Release():
                self.streams[decision.stream].held = False
            case d.AssignReplicas():
                stream = self.streams[decision.stream]
                stays = set(stream.members) <= set(decision.replicas)
                self._require(not stream.is_open or stays, decision, "the log stream is open on a node that would go")
                stream.replicas, stream.replaced = decision.replicas, decision.leaving or UNSET
                stream.members = tuple(node for node in stream.members if node in decision.replicas)
            case d.Trim():
                topic = self.topics[decision.topic]
                self._require(decision.before > topic.trimmed_before, decision, "trim never goes back")
                topic.trimmed_before = decision.before
                if topic.name == PROGRAMS.name and self.jobs.programs_stored:
                    self.jobs.note_trim_of_programs(decision.before)
                self._trim_clock()
            case d.OpenProducer():
                self._open_producer(decision)
            case d.MoveProducer():
                self._move_producer(decision)
            case d.CommitCursor():
                self.cursors[decision.cursor] = decision.glsn
            case d.DropCursor():
                self.cursors.pop(decision.cursor, None)
            case d.NoteAudited():
                self._require(decision.through > self.audit.written, decision, "the audit never goes back")
            case _ if isinstance(decision, AccessDecision):
                problem = self.access.problem(decision)
                self._require(not problem, decision, problem)
                self.access.apply(decision, self.cut_time)
            case _ if isinstance(decision, JobDecision):
                problem = self.jobs.problem(decision)
                self._require(not problem, decision, problem)
                self.jobs.apply(decision, self.cut_time)
                self.access.end_job_tokens(self.jobs.epochs)
            case _:
                problem = self.runs.problem(decision, self._takes_appends)
                self._require(not problem, decision, problem)
                self._apply_to_runs(decision)
        self.audit.apply(decision, record)
        self.index = DecisionIndex(self.index + 1)
        if isinstance(decision, d.CATALOG_DECISIONS):
            self.revision = Revision(self.revision + 1)
        self._journal.note(self.index, decision)
        event = event_of(self.index, decision, self.cut_time)
        if event is not None:
            self.events.append(event)

    def _apply_to_runs(self, decision: d.RunDecision) -> None:
        """Fold a decision about a run, and note what it means for jobs: a program was stored, or a batch decided."""
        program = self._program_of(decision) if isinstance(decision, d.GroupPublished) else None
        self.runs.apply(decision, DecisionIndex(self.index + 1))
        if program is not None:
            self.jobs.note_program(*program)
        if isinstance(decision, d.DecideBatch):
            run = self.runs.get(decision.run)
            if run is not None and run.job_epoch is not UNSET:
                self.jobs.note_batch(run.name, run.job_epoch, decision.batch, self.cut_time)

    def _program_of(self, decision: d.GroupPublished) -> tuple[str, ProgramPlace] | None:
        """Return the program that the group stores, by the name of its run, and where; None if it stores none."""
        run, topic = self.runs.get(decision.run), self.topics.get(decision.topic)
        group = run.group(decision.topic) if run is not None else None
        if run is None or group is None or topic is None or not (topic.is_internal and topic.name == PROGRAMS.name):
            return None
        sha256 = run.name.removeprefix(PROGRAM_RUN_PREFIX)
        if sha256 == run.name or not is_sha256(sha256):
            return None
        return sha256, ProgramPlace(decision.glsn, decision.count, sum(part.bytes for part in group.parts))

    def _takes_appends(self, lsid: LogStreamId) -> TopicId | None:
        """Return the topic of an open stream, or None if the stream takes no appends."""
        stream = self.streams.get(lsid)
        return stream.topic if stream is not None and stream.is_open else None

    def _trim_clock(self) -> None:
        """Forget marks that no topic needs. A topic needs the marks from its first remaining record on, or from its
        creation, whichever is later."""
        # Streams are created in order, so the first one of a topic is its oldest.
        created = {
            topic: next(iter(streams.values())).created_at for topic, streams in self._of_topic.items() if streams
        }
        needed = [max(self.topics[topic].trimmed_before, GLSN(at + 1)) for topic, at in created.items()]
        self.clock.trim(min(needed, default=GLSN(self.high_watermark + 1)))

    def _problem_of_cut(self, cut: d.Cut) -> str:
        """Return why the cut is not valid, or an empty string."""
        if cut.prev_high_watermark != self.high_watermark:
            return "it does not follow the last cut"
        if cut.time <= self.cut_time:
            return "cut time never goes back"
        next_glsn = cut.prev_high_watermark + (1 if cut.commits else 2)
        last_stream = 0
        for commit in cut.commits:
            context, stream = commit.context, self.streams.get(commit.stream)
            if commit.stream <= last_stream:
                return "its log streams are not in order"
            if stream is None or not stream.is_open:
                return "a log stream in it is not open"
            if context.epoch != stream.epoch:
                return "a log stream in it is in another epoch"
            if context.first_llsn != stream.committed_end + 1:
                return "it leaves a hole in a log stream"
            if context.first_glsn != next_glsn or context.count <= 0:
                return "its GLSNs are not dense"
            same = (context.high_watermark, context.prev_high_watermark, context.time)
            if same != (cut.high_watermark, cut.prev_high_watermark, cut.time):
                return "a commit in it is of another cut"
            next_glsn += context.count
            last_stream = commit.stream
        return "" if next_glsn == cut.high_watermark + 1 else "its GLSNs do not end at its high watermark"

    def _cut(self, cut: d.Cut) -> None:
        problem = self._problem_of_cut(cut)
        self._require(not problem, cut, problem)
        for commit in cut.commits:
            stream, context = self.streams[commit.stream], commit.context
            stream.committed_end, stream.last_glsn = context.last_llsn, context.last_glsn
            self.histories[commit.stream].append(context)
        self.high_watermark, self.cut_time = cut.high_watermark, cut.time
        self.clock.note(cut.high_watermark, cut.time, is_tick=not cut.commits)

    def _seal(self, seal: d.Seal) -> None:
        stream = self.streams[seal.stream]
        self._require(
            stream.is_open or (not stream.final and (seal.final or seal.held)), seal, "the log stream is sealed"
        )
        self._require(seal.epoch == stream.epoch, seal, "the log stream is in another epoch")
        self._require(seal.sealed_at == stream.committed_end, seal, "the committed end is elsewhere")
        self._require(set(seal.survivors) <= set(stream.members), seal, "a survivor was not a member")
        stream.is_open, stream.final, stream.held = False, seal.final, seal.held
        if seal.final:
            stream.final_at = self.high_watermark
        stream.members, stream.reason, stream.since = seal.survivors, seal.reason, seal.at or self.cut_time
        if seal.final:
            stream.departed = ()

    def _unseal(self, unseal: d.Unseal) -> None:
        stream = self.streams[unseal.stream]
        self._require(not stream.is_open and not stream.final, unseal, "the log stream is open or finished")
        self._require(unseal.epoch == stream.epoch + 1, unseal, "the epoch does not follow")
        self._require(unseal.start == stream.committed_end, unseal, "the committed end is elsewhere")
        self._require(
            bool(unseal.chain) and set(unseal.chain) <= set(stream.replicas), unseal, "a member is not a replica"
        )
        stream.is_open, stream.epoch, stream.start = True, unseal.epoch, unseal.start
        stream.members, stream.reason, stream.since = unseal.chain, unseal.reason, unseal.at or self.cut_time

    def _drop_survivor(self, drop: d.DropSurvivor) -> None:
        stream = self.streams[drop.stream]
        self._require(not stream.is_open and drop.node in stream.members, drop, "it does not count anyway")
        stream.members = tuple(node for node in stream.members if node != drop.node)
        stream.reason = drop.reason

    def _create_stream(self, create: d.CreateStream) -> None:
        self._require(create.stream == self.last_stream + 1, create, "its number is out of turn")
        self._require(create.high_watermark == self.high_watermark, create, "it does not start at the present")
        self.last_stream = create.stream
        self.streams[create.stream] = self._of_topic.setdefault(create.topic, {})[create.stream] = LogStream(
            create.stream,
            create.topic,
            create.replicas,
            create.replicas,
            created_at=create.high_watermark,
            created_time=create.time,
            since=create.time,
        )
        self.histories[create.stream] = CommitHistory()

    def _delete_topic(self, topic: TopicId) -> None:
        """Forget everything about the topic, including its producers, whose names become free. Numbers are never given
        out twice, so a stream that is unknown here but not new was deleted."""
        gone = {stream.stream for stream in self.streams_of(topic)}
        del self.topics[topic]
        self._of_topic.pop(topic, None)
        for lsid in gone:
            del self.streams[lsid], self.histories[lsid]
        self.producers = {name: p for name, p in self.producers.items() if p.stream not in gone}
        self.runs.delete_topic(topic)

    def was_deleted(self, stream: LogStreamId) -> bool:
        return stream not in self.streams and stream <= self.last_stream

    def _open_producer(self, decision: d.OpenProducer) -> None:
        producer = self.producers.get(decision.producer)
        last_epoch = producer.epoch if producer else 0
        self._require(decision.epoch == last_epoch + 1, decision, "the epoch does not follow")
        if producer is None:
            self.producers[decision.producer] = ProducerState(decision.epoch, decision.stream, decision.session)
        else:
            self._require(decision.stream == producer.stream, decision, "it moves the producer")
            producer.epoch, producer.session = decision.epoch, decision.session

    def _move_producer(self, decision: d.MoveProducer) -> None:
        producer = self.producers.get(decision.producer)
        last_epoch = producer.epoch if producer else 0
        self._require(producer is not None, decision, "the producer is unknown")
        self._require(decision.epoch == last_epoch + 1, decision, "the epoch does not follow")
        assert producer is not None
        left = self.streams[producer.stream]
        self._require(not left.is_open, decision, "the log stream it leaves is open")
        if not left.final:
            departure = Departure(decision.producer, decision.epoch)
            left.departed = (*(old for old in left.departed if old.producer != decision.producer), departure)
        producer.epoch, producer.stream = decision.epoch, decision.stream
        producer.last_sequence = decision.last_sequence

    def _require(self, holds: bool, decision: d.Decision, otherwise: str) -> None:
        if not holds:
            raise ContradictoryCommand(
                f"after decision {self.index}, {decision} is not possible: {otherwise}", history=self._journal.lines()
            )
