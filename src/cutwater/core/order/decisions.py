"""The decisions of the metadata repository: one sequence of cuts, seals, unseals and catalog changes.

A decision is complete in itself: it says what was decided, not how. ``OrderState.apply`` folds the sequence into the
state of the cluster, so a process that reads the sequence from the store knows all that its author knew. Each decision
is stored, fenced by the leader's epoch, before any other process learns of it. Decisions that follow from a request of
a known principal carry its name, so that an audit can be derived from the sequence.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, structs

from cutwater.core.access.access_decisions import AccessDecision
from cutwater.core.jobs.job_decisions import JobDecision
from cutwater.core.order.cut import StreamCommit
from cutwater.core.order.origin import Attributed, Dated, RequestOrigin
from cutwater.types import (
    GLSN,
    LLSN,
    BatchNumber,
    ClusterId,
    CutTime,
    Epoch,
    InputRange,
    JobEpoch,
    LogStreamId,
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


class Cut(Struct, frozen=True, tag=True):
    """Commits more records of these log streams. Without commits it is a tick, which takes one GLSN."""

    high_watermark: GLSN
    prev_high_watermark: GLSN
    time: CutTime
    revision: Revision
    commits: tuple[StreamCommit, ...]

    @property
    def is_tick(self) -> bool:
        return not self.commits


class Seal(Dated, frozen=True, tag=True):
    """Ends the epoch of the stream at this LLSN. ``survivors`` are the members that hold everything up to there."""

    stream: LogStreamId
    epoch: Epoch
    sealed_at: LLSN
    survivors: tuple[StorageNodeId, ...]
    reason: str
    final: bool = False
    """Whether the stream is sealed permanently and never opened again."""
    held: bool = False
    """Whether an operator sealed the stream. It is not opened again before it is released."""


class Unseal(Dated, frozen=True, tag=True):
    """Opens the stream under a new epoch, with these replicas in chain order."""

    stream: LogStreamId
    epoch: Epoch
    start: LLSN
    chain: tuple[StorageNodeId, ...]
    reason: str = ""


class Release(Dated, frozen=True, tag=True):
    """Lifts an operator's seal: the stream may be opened again."""

    stream: LogStreamId


class DropSurvivor(Dated, frozen=True, tag=True):
    """A replica of a sealed stream does not hold what it should. It has to learn before it counts again."""

    stream: LogStreamId
    node: StorageNodeId
    reason: str


class AddSurvivor(Dated, frozen=True, tag=True):
    """A replica of a sealed stream has learned everything up to the sealed position. It counts again."""

    stream: LogStreamId
    node: StorageNodeId


class FoundCluster(Dated, frozen=True, tag=True):
    """The first decision of a cluster. The key is random and made once, since two clusters may easily share a
    number."""

    cluster: ClusterId
    key: str


class AddNode(Dated, frozen=True, tag=True):
    """The storage node belongs to the cluster and listens at this address. The decision is repeated when the node moves
    or gets volumes.

    ``server_key`` is the public key with which the node proves its identity; it is empty until the leader has asked for
    it. ``renews``: this ``server_key`` replaces the previous one, see ``AddNodeRequest``.
    """

    node: StorageNodeId
    address: str = ""
    key: str = ""
    volumes: tuple[str, ...] = ()
    server_key: str = ""
    renews: bool = False


class RemoveNode(Dated, frozen=True, tag=True):
    node: StorageNodeId


class CreateTopic(Dated, frozen=True, tag=True):
    """Creates a topic with ``streams`` open log streams. ``schema`` is a serialised Arrow schema, or empty."""

    topic: TopicId
    name: str
    replication: int
    streams: int = 1
    schema: bytes = b""
    event_time: str = ""
    retention: Retention = Retention()
    event_time_ahead_us: int = 0
    is_internal: bool | UnsetType = UNSET
    """Whether the cluster made the topic for itself, see ``core.internal_topics``. It is stored only if it is so, as
    the field is younger than the format."""


class ChangeTopic(Dated, frozen=True, tag=True):
    """Sets the number of open streams and the retention, and adds ``schema`` as the next schema unless it is empty.
    ``event_time_ahead_us``, the limit on how far event times may be ahead, stays unchanged if it is None, and
    ``replication`` if it is not set; the latter is younger than the format."""

    topic: TopicId
    streams: int
    retention: Retention
    schema: bytes = b""
    event_time_ahead_us: int | None = None
    replication: int | UnsetType = UNSET


class DeleteTopic(Dated, frozen=True, tag=True):
    """Deletes the topic and frees its name. Its streams must be sealed permanently before."""

    topic: TopicId


class CreateStream(Attributed, frozen=True, tag=True):
    """Creates a log stream, sealed at 0 in epoch 0. It starts at the high watermark of its creation. Its idle time
    counts from ``time``."""

    stream: LogStreamId
    topic: TopicId
    replicas: tuple[StorageNodeId, ...]
    high_watermark: GLSN
    time: CutTime
    reason: str = ""


class AssignReplicas(Dated, frozen=True, tag=True):
    """Sets the nodes that shall hold the stream from now on. ``leaving`` are those of them that leave as soon as enough
    others hold every record."""

    stream: LogStreamId
    replicas: tuple[StorageNodeId, ...]
    reason: str = ""
    leaving: tuple[StorageNodeId, ...] = ()


class Trim(Dated, frozen=True, tag=True):
    topic: TopicId
    before: GLSN


class OpenProducer(Attributed, frozen=True, tag=True):
    """Gives the producer's name to this epoch; the producer's batches go to this stream."""

    producer: ProducerId
    epoch: ProducerEpoch
    stream: LogStreamId
    session: int


class MoveProducer(Dated, frozen=True, tag=True):
    """Moves the producer to another stream, with its next epoch. The previous stream is sealed, and the producer's last
    sequence there is known."""

    producer: ProducerId
    epoch: ProducerEpoch
    stream: LogStreamId
    last_sequence: Sequence


class CommitCursor(Attributed, frozen=True, tag=True):
    """A consumer has processed everything up to this position."""

    cursor: str
    glsn: GLSN


class DropCursor(Dated, frozen=True, tag=True):
    cursor: str


class OpenRun(Dated, frozen=True, tag=True):
    """Opens a run and ends an earlier run of the same name. ``once``: the run publishes a single batch. ``job_epoch``:
    an assignment of a job opens it."""

    run: RunId
    name: str
    key: str
    once: bool = False
    job_epoch: JobEpoch | UnsetType = UNSET


class RaiseRunEpoch(Dated, frozen=True, tag=True):
    """A later assignment of the job has opened the run. Earlier ones are over, and so is what they have staged: the
    run's next generation begins. The run gets its name back, if others took it over and decided nothing."""

    run: RunId
    job_epoch: JobEpoch


class GroupPlan(Struct, frozen=True):
    """The rows of a batch for one topic: these parts, in this order, go to this stream."""

    topic: TopicId
    stream: LogStreamId
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


class DecideBatch(Attributed, frozen=True, tag=True):
    """Fixes the contents of a batch permanently. Each topic's rows become one group; all groups will be published."""

    run: RunId
    batch: BatchNumber
    groups: tuple[GroupPlan, ...]
    position: GLSN | None = None
    """The input of the run was read up to this GLSN for this batch. None: the publisher did not say."""
    input: InputRange | UnsetType = UNSET
    """The range of the input for which the batch is decided, if the publisher said it."""


class GroupPublished(Struct, frozen=True, tag=True):
    """The rows of a decided batch for this topic are in the log."""

    run: RunId
    batch: BatchNumber
    topic: TopicId
    glsn: GLSN
    count: int


class MoveGroup(Dated, frozen=True, tag=True):
    """Moves a decided group to another stream. Its original stream is sealed and does not hold the group."""

    run: RunId
    batch: BatchNumber
    topic: TopicId
    stream: LogStreamId
    reason: str = ""


class ExpireStaged(Dated, frozen=True, tag=True):
    """Begins the run's next generation: rows that were staged before can no longer be decided on."""

    run: RunId
    reason: str = ""


class DropRun(Dated, frozen=True, tag=True):
    """Ends the run. Groups that were decided for it and are not in the log will never be published."""

    run: RunId
    reason: str = ""


class ForgetOutput(Dated, frozen=True, tag=True):
    """Allows new runs to publish under the name although there is output under it. This fences no run."""

    name: str


class NoteAudited(Struct, frozen=True, tag=True):
    """The audit records up to this number are in the log, see ``core.audit.audit_state``."""

    through: int


RunDecision = OpenRun | RaiseRunEpoch | DecideBatch | GroupPublished | MoveGroup | ExpireStaged | DropRun | ForgetOutput

OrderDecision = (
    Cut
    | Seal
    | Unseal
    | Release
    | DropSurvivor
    | AddSurvivor
    | FoundCluster
    | AddNode
    | RemoveNode
    | CreateTopic
    | ChangeTopic
    | DeleteTopic
    | CreateStream
    | AssignReplicas
    | Trim
    | OpenProducer
    | MoveProducer
    | CommitCursor
    | DropCursor
    | NoteAudited
    | RunDecision
)

Decision = OrderDecision | AccessDecision | JobDecision

CATALOG_DECISIONS = (
    AddNode,
    RemoveNode,
    CreateTopic,
    ChangeTopic,
    DeleteTopic,
    CreateStream,
    Seal,
    Unseal,
    Release,
    DropSurvivor,
    AddSurvivor,
    AssignReplicas,
    Trim,
)
"""Decisions that change what readers and writers see of the catalog, and so its revision."""


def attributed(decision: Decision, origin: RequestOrigin | None) -> Decision:
    """Return the decision as one that follows from a request of this principal, if there is one."""
    if origin is None or not isinstance(decision, Attributed):
        return decision
    return structs.replace(decision, by=origin)
