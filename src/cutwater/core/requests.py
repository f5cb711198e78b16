"""Requests of operators and clients to the metadata repository, and its answers.

A request becomes one or more decisions, or an error. The answer is sent only after the decisions are stored.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from cutwater.core.access.access_requests import AccessAnswer, AccessRequest, AccessSummary
from cutwater.core.audit.audit_requests import AuditRequest
from cutwater.core.internal_topics import InternalTopic
from cutwater.core.jobs.job_requests import JobAnswer, JobRequest
from cutwater.core.names import is_reserved
from cutwater.core.read.time_marks import TimeMark
from cutwater.types import (
    GLSN,
    LLSN,
    BatchNumber,
    ClusterId,
    CutTime,
    DecisionIndex,
    Epoch,
    InputRange,
    JobEpoch,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    Part,
    ProducerEpoch,
    ProducerId,
    Retention,
    Revision,
    RunId,
    Sequence,
    StorageNodeId,
    TopicId,
)


class FoundClusterRequest(Struct, frozen=True, tag=True):
    """Give the cluster its key, unless it has one."""

    cluster: ClusterId
    key: str


class AddNodeRequest(Struct, frozen=True, tag=True):
    """Add the storage node that listens at this address to the cluster.

    ``server_key`` is its public key, if the caller has it from the node itself; it is ignored over the wire.
    ``renews``: a node with this ``key``, and so with its data, has lost its ``server_key`` and has a new one. Only an
    embedded log, which is both servers, can say so.
    """

    node: StorageNodeId
    address: str = ""
    key: str = ""
    volumes: tuple[str, ...] = ()
    server_key: str = ""
    renews: bool = False


class JoinRequest(Struct, frozen=True, tag=True):
    """A storage node gives its number and address. If it belongs to the cluster, changes are stored.

    The node has proved to hold the private key of ``server_key``. ``asked_at`` is the address at which the leader asked
    for that key, if none was stored for the node when it joined; it is empty if the leader did not ask.
    """

    node: StorageNodeId
    address: str
    key: str
    volumes: tuple[str, ...]
    server_key: str = ""
    asked_at: str = ""


class RemoveNodeRequest(Struct, frozen=True, tag=True):
    node: StorageNodeId


class CreateTopicRequest(Struct, frozen=True, tag=True):
    name: str
    streams: int
    replication: int
    schema: bytes = b""
    event_time: str = ""
    retention: Retention = Retention()
    event_time_ahead_us: int = 0
    """How far event times may be ahead of cut time; 0 means without bound."""
    is_replication_usual: bool | UnsetType = UNSET
    """The leader chooses the replication: ``REPLICATION_DEFAULT``, or the number of live storage nodes if there are
    fewer. Not every client may see the storage nodes. A leader of an earlier version uses ``replication``."""


class ChangeTopicRequest(Struct, frozen=True, tag=True):
    """Change the settings that are given. Readers of the earlier schemas must be able to read with the new one; the
    caller has checked that against schema ``schema_after``."""

    name: str
    streams: int | None = None
    retention: Retention | None = None
    schema: bytes = b""
    schema_after: int = 0
    event_time_ahead_us: int | None = None
    replication: int | UnsetType = UNSET
    """How many copies of its records are wanted. More than there are storage nodes is allowed."""


class DeleteTopicRequest(Struct, frozen=True, tag=True):
    name: str


class AddStreamRequest(Struct, frozen=True, tag=True):
    topic: str


class SealRequest(Struct, frozen=True, tag=True):
    """Seal the stream until a request unseals it or, if ``final``, permanently."""

    stream: LogStreamId
    final: bool = False


class UnsealRequest(Struct, frozen=True, tag=True):
    stream: LogStreamId


class ReplaceRequest(Struct, frozen=True, tag=True):
    """Let ``new`` hold the stream instead of ``old``."""

    stream: LogStreamId
    old: StorageNodeId
    new: StorageNodeId


class LearnRequest(Struct, frozen=True, tag=True):
    """Let a replica that does not count learn from a peer now, not at the next round of repair."""

    stream: LogStreamId
    node: StorageNodeId


class TrimRequest(Struct, frozen=True, tag=True):
    topic: str
    before: GLSN


class OpenProducerRequest(Struct, frozen=True, tag=True):
    """Open a producer's name. ``session`` is a number that no other opening has, so that a repeated request does not
    open it again."""

    producer: ProducerId
    topic: str
    session: int


class MoveProducerRequest(Struct, frozen=True, tag=True):
    """Ask for another stream than the one that was granted to this ``session`` with ``epoch``. ``last_sequence`` comes
    from a replica that is sealed in ``stream_epoch``."""

    producer: ProducerId
    session: int
    epoch: ProducerEpoch
    stream_epoch: Epoch
    last_sequence: Sequence


class RenewProducerRequest(Struct, frozen=True, tag=True):
    """Ask for the next epoch in the same stream, for the ``session`` that has the name with ``epoch``."""

    producer: ProducerId
    session: int
    epoch: ProducerEpoch


class CommitCursorRequest(Struct, frozen=True, tag=True):
    cursor: str
    glsn: GLSN


class ReadCursorRequest(Struct, frozen=True, tag=True):
    cursor: str


class DropCursorRequest(Struct, frozen=True, tag=True):
    cursor: str


class CatalogRequest(Struct, frozen=True, tag=True):
    """Ask for the current catalog."""


class ClockRequest(Struct, frozen=True, tag=True):
    """Ask for the marks of the log's clock above a position: see ``core.read.time_marks``."""

    after: GLSN
    limit: int = 10_000


class EventsRequest(Struct, frozen=True, tag=True):
    """Ask for recent decisions and their reasons: events after this one, the oldest first."""

    after: DecisionIndex = DecisionIndex(0)


class DescribeRequest(Struct, frozen=True, tag=True):
    """Ask for the state of nodes and log streams, as the leader sees them."""


class RunStart(Struct, frozen=True):
    """Where a new run begins, for a name that has published already.

    ``position``: the run reads its input after this position. ``key`` and ``batch``: the run starts from a savepoint of
    another run and goes on after this batch of it. ``replay``: the caller wants existing output again. ``what`` names
    the beginning in an error.
    """

    position: GLSN | None = None
    key: str = ""
    batch: BatchNumber = BatchNumber(-1)
    replay: bool = False
    what: str = ""


class OpenRunRequest(Struct, frozen=True, tag=True):
    """Open the run with this key: the existing one, or a new one, which takes over the name from any other key.

    A run without a name fences no other. ``once``: the run is for a single batch and is forgotten some time after.

    A new run whose output exists already, as far as ``start`` tells, is refused, and no run is fenced. ``is_question``:
    nothing is opened; the answer has run 0 if the run would be a new one.

    ``job_epoch``: the driver belongs to this assignment of the job with the run's name. Drivers of earlier assignments
    are refused from then on, also with the same key, and what they have staged can no longer be decided on.
    """

    name: str
    key: str
    once: bool = False
    start: RunStart = RunStart()
    is_question: bool = False
    job_epoch: JobEpoch | UnsetType = UNSET


class PublishRequest(Struct, frozen=True, tag=True):
    """Publish a micro-batch that consists of these parts. If the batch was decided before, that decision stands, even
    if its parts differ. The answer comes when the whole batch is in the log."""

    run: RunId
    batch: BatchNumber
    parts: tuple[Part, ...]
    position: GLSN | None = None
    """The GLSN up to which the input of the run was read for this batch, if the input is this log."""
    job_epoch: JobEpoch | UnsetType = UNSET
    """The epoch under which the run was opened."""
    input: InputRange | UnsetType = UNSET
    """The range of this log that was read for this batch. A decided batch has one range, permanently."""


class ForgetOutputRequest(Struct, frozen=True, tag=True):
    """Let a new run publish under this name as if nothing had been published under it."""

    name: str


class DropRunRequest(Struct, frozen=True, tag=True):
    """Give up the groups that were decided for this run and are not in the log. This is for parts that are lost
    permanently."""

    run: RunId


class StagedBatch(Struct, frozen=True, array_like=True):
    """The staged rows of one batch in one generation of a run on a storage node. ``age_us`` says how long they have
    been there."""

    run: RunId
    batch: BatchNumber
    generation: int
    age_us: int = 0


class StagedRequest(Struct, frozen=True, tag=True):
    """Ask which of these batches are no longer needed."""

    node: StorageNodeId
    batches: tuple[StagedBatch, ...]


class MakeInternalTopicsRequest(Struct, frozen=True, tag=True):
    """Make those of these internal topics that do not exist. Only the leader itself asks for it. Nothing is made if a
    user's topic has one of the names."""

    topics: tuple[InternalTopic, ...]


class MakeJobTopicRequest(Struct, frozen=True, tag=True):
    """Make one of the internal topics of jobs, if it does not exist: the first client that needs it asks for it."""

    topic: str


Request = (
    FoundClusterRequest
    | AddNodeRequest
    | JoinRequest
    | RemoveNodeRequest
    | CreateTopicRequest
    | ChangeTopicRequest
    | DeleteTopicRequest
    | AddStreamRequest
    | SealRequest
    | UnsealRequest
    | ReplaceRequest
    | LearnRequest
    | TrimRequest
    | OpenProducerRequest
    | MoveProducerRequest
    | RenewProducerRequest
    | CommitCursorRequest
    | ReadCursorRequest
    | DropCursorRequest
    | OpenRunRequest
    | PublishRequest
    | DropRunRequest
    | ForgetOutputRequest
    | StagedRequest
    | CatalogRequest
    | ClockRequest
    | EventsRequest
    | DescribeRequest
    | MakeInternalTopicsRequest
    | MakeJobTopicRequest
    | AuditRequest
    | AccessRequest
    | JobRequest
)


ABOUT_THE_CLUSTER = (EventsRequest, DescribeRequest)
"""Requests of operators that change nothing. A leader that has halted answers them, too."""


class Joined(Struct, frozen=True, tag=True):
    """Answer to a join. ``known``: the storage node belongs to the cluster."""

    known: bool


class Done(Struct, frozen=True, tag=True):
    """The request is decided and stored."""


class Created(Struct, frozen=True, tag=True):
    topic: TopicId
    streams: tuple[LogStreamId, ...]


class InternalTopics(Struct, frozen=True, tag=True):
    """The internal topics exist, with these numbers. ``reserved`` are the topics of users whose names are reserved."""

    topics: tuple[TopicId, ...]
    reserved: tuple[str, ...] = ()


class SealedAt(Struct, frozen=True, tag=True):
    epoch: Epoch
    llsn: LLSN
    glsn: GLSN


class ProducerGrant(Struct, frozen=True, tag=True):
    """The stream to which a producer appends, its epoch, and its last sequence in its previous stream. Each epoch
    belongs to one stream."""

    epoch: ProducerEpoch
    stream: LogStreamId
    last_sequence: Sequence


class RunAnswer(Struct, frozen=True, tag=True):
    """An open run. Rows that are staged for it belong to this generation. ``last_batch`` is the last decided batch, or
    -1, and ``input`` is its range of the input, if known. ``job_epoch`` is the epoch under which it was opened, if any;
    a server of an older version knows none."""

    run: RunId
    generation: int
    last_batch: BatchNumber
    job_epoch: JobEpoch | UnsetType = UNSET
    input: InputRange | UnsetType = UNSET


class PublishedGroup(Struct, frozen=True):
    """The rows of a batch for one topic: ``count`` records from ``glsn`` on."""

    topic: TopicId
    stream: LogStreamId
    glsn: GLSN
    count: int


class PublishAnswer(Struct, frozen=True, tag=True):
    """The whole batch is in the log. The positions are known only for the run's last batch, and only for topics that
    still exist."""

    topics: tuple[PublishedGroup, ...] = ()


class StagedAnswer(Struct, frozen=True, tag=True):
    """Batches that may be dropped, permanently. ``epochs``: of the runs that were asked about, those that belong to a
    job, with the epoch of its present assignment."""

    drop: tuple[StagedBatch, ...]
    epochs: dict[RunId, JobEpoch] | UnsetType = UNSET


class StreamInfo(Struct, frozen=True):
    """A log stream as clients need it. Everything up to ``committed_end`` lies at or below the catalog's HWM."""

    stream: LogStreamId
    topic: TopicId
    epoch: Epoch
    is_open: bool
    final: bool
    chain: tuple[StorageNodeId, ...]
    replicas: tuple[StorageNodeId, ...]
    committed_end: LLSN
    last_glsn: GLSN
    created_at: GLSN
    created_time: CutTime
    final_at: GLSN = GLSN(0)
    """The GLSN at which the stream was sealed permanently. Event time does not wait for the stream above it."""
    start: LLSN | None = None
    """The last LLSN before the current epoch. None if the server does not tell."""


class TopicInfo(Struct, frozen=True):
    """A topic as clients need it. ``schemas`` are in the order in which they were given; a batch names its schema by
    its place, from 1."""

    topic: TopicId
    name: str
    trimmed_before: GLSN
    replication: int = 1
    streams: int = 1
    schemas: tuple[bytes, ...] = ()
    event_time: str = ""
    retention: Retention = Retention()
    event_time_ahead_us: int = 0
    internal: bool | UnsetType = UNSET
    """As ``is_internal``. It is sent only if it is so, as the field is younger than the protocol."""

    @property
    def is_internal(self) -> bool:
        """Whether the cluster itself made the topic."""
        return self.internal is True

    @property
    def is_reserved(self) -> bool:
        """Whether the topic is a user's and has a name that is reserved for internal topics now."""
        return is_reserved(self.name) and not self.is_internal


class NodeInfo(Struct, frozen=True):
    """The address of a storage node."""

    node: StorageNodeId
    address: str


class Catalog(Struct, frozen=True, tag=True):
    """The catalog at one decision: which topics and streams exist, and how far each is committed."""

    revision: Revision
    high_watermark: GLSN
    cut_time: CutTime
    topics: tuple[TopicInfo, ...]
    streams: tuple[StreamInfo, ...]
    nodes: tuple[NodeInfo, ...] = ()
    is_limited: bool | UnsetType = UNSET
    """The caller lacks the right ``cluster-operate``: topics that it may not describe are left out."""


class ClockMarks(Struct, frozen=True, tag=True):
    """All marks above the requested position, up to ``complete_through``."""

    marks: tuple[TimeMark, ...]
    complete_through: GLSN


class CursorAt(Struct, frozen=True, tag=True):
    """The position of a cursor; None if there is no such cursor."""

    glsn: GLSN | None


class Event(Struct, frozen=True):
    """A decision that is not a cut, in words. ``time`` is when it was made, by the leader's clock."""

    index: DecisionIndex
    time: CutTime
    kind: str
    what: str
    reason: str = ""


class Events(Struct, frozen=True, tag=True):
    """Recent events. ``oldest`` is the first event that is still known; older ones have been forgotten."""

    events: tuple[Event, ...]
    oldest: DecisionIndex
    is_limited: bool | UnsetType = UNSET
    """The caller lacks the right to see all events."""


class NodeDescription(Struct, frozen=True):
    """A storage node as the leader sees it. ``silent_us`` is how long the leader has not heard of the node; None if it
    never has. ``is_gone``: the node is dead because no process listens at its address, however short its silence is."""

    node: StorageNodeId
    address: str
    volumes: tuple[str, ...]
    is_alive: bool
    state: NodeState | None
    silent_us: int | None
    replicas: int
    is_gone: bool = False


class StreamDescription(Struct, frozen=True):
    """A log stream: what is wrong with it, since when, and what happens next. The texts are empty if all is well."""

    stream: LogStreamId
    topic: str
    epoch: Epoch
    is_open: bool
    final: bool
    held: bool
    members: tuple[StorageNodeId, ...]
    replicas: tuple[StorageNodeId, ...]
    missing: tuple[StorageNodeId, ...]
    committed_end: LLSN
    last_glsn: GLSN
    history: int
    reason: str
    since: CutTime
    next_step: str
    wanted: int = 0
    """Number of copies that the topic asks for."""


class GroupDescription(Struct, frozen=True):
    """A decided group that is not in the log yet, and what it waits for."""

    topic: str
    stream: LogStreamId
    rows: int
    parts: int
    why: str


class RunDescription(Struct, frozen=True):
    """A run. ``fenced_by`` is the run that took over the name: 0 if none did, the run itself if it was dropped.
    ``decided`` is the decision about the last batch, ``published`` the groups of that batch that are in the log, and
    ``input`` the range of the input for which it was decided. ``job_epoch`` is the epoch under which a job has opened
    the run last."""

    run: RunId
    name: str
    key: str
    generation: int
    last_batch: BatchNumber
    fenced_by: RunId
    unpublished: tuple[GroupDescription, ...]
    decided: DecisionIndex = DecisionIndex(0)
    published: tuple[PublishedGroup, ...] = ()
    job_epoch: JobEpoch | UnsetType = UNSET
    input: InputRange | UnsetType = UNSET


class OutputDescription(Struct, frozen=True):
    """The output of all runs of a name. ``rows`` and the input ``position`` are None if unknown."""

    name: str
    run: RunId
    batch: BatchNumber
    glsn: GLSN
    rows: int | None
    position: GLSN | None


class Description(Struct, frozen=True, tag=True):
    cluster: ClusterId
    cluster_key: str
    leader_epoch: LeaderEpoch
    high_watermark: GLSN
    cut_time: CutTime
    halted: str
    nodes: tuple[NodeDescription, ...]
    streams: tuple[StreamDescription, ...]
    runs: tuple[RunDescription, ...] = ()
    last_run: RunId = RunId(0)
    """The highest number that a run has had."""
    unheard: tuple[LogStreamId, ...] = ()
    """Open log streams without a report to this leader yet. The leader answers no client while there are any."""
    outputs: tuple[OutputDescription, ...] = ()
    access: AccessSummary | UnsetType = UNSET
    """Access control, if anything about it was ever decided."""
    is_limited: bool | UnsetType = UNSET
    """The caller lacks the right ``cluster-operate``: what it may not describe is left out."""


Answer = (
    Done
    | Joined
    | Created
    | SealedAt
    | ProducerGrant
    | RunAnswer
    | PublishAnswer
    | StagedAnswer
    | Catalog
    | ClockMarks
    | CursorAt
    | Events
    | Description
    | InternalTopics
    | AccessAnswer
    | JobAnswer
)
