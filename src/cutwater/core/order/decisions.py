"""The decisions of the metadata repository: one sequence of cuts, seals, unseals and catalog changes.

A decision is complete in itself: it says what was decided, not how. ``OrderState.apply`` folds the sequence into the
state of the cluster, so whoever reads the sequence from the store knows all that its author knew. Each is stored,
fenced by the leader's epoch, before anyone outside learns of it.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.core.order.cut import StreamCommit
from cutwater.types import (
    GLSN,
    LLSN,
    BatchNumber,
    ClusterId,
    CutTime,
    Epoch,
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


class Dated(Struct, frozen=True, kw_only=True):
    """A decision that operators read of. ``at``: when it was made, by the leader's clock; never before the last cut."""

    at: CutTime = CutTime(0)


class Cut(Struct, frozen=True, tag=True):
    """So many more records of these log streams are committed. Without commits it is a tick, which takes one GLSN."""

    high_watermark: GLSN
    prev_high_watermark: GLSN
    time: CutTime
    revision: Revision
    commits: tuple[StreamCommit, ...]

    @property
    def is_tick(self) -> bool:
        return not self.commits


class Seal(Dated, frozen=True, tag=True):
    """The epoch of the stream ends at this LLSN. ``survivors`` are the members that hold everything up to there."""

    stream: LogStreamId
    epoch: Epoch
    sealed_at: LLSN
    survivors: tuple[StorageNodeId, ...]
    reason: str
    final: bool = False
    """Sealed for good: never opened again."""
    held: bool = False
    """Sealed by an operator: not opened again before it is released."""


class Unseal(Dated, frozen=True, tag=True):
    """The stream is open under a new epoch, with these replicas in chain order."""

    stream: LogStreamId
    epoch: Epoch
    start: LLSN
    chain: tuple[StorageNodeId, ...]
    reason: str = ""


class Release(Dated, frozen=True, tag=True):
    """An operator's seal is lifted: the stream may be opened again."""

    stream: LogStreamId


class DropSurvivor(Dated, frozen=True, tag=True):
    """A replica of a sealed stream turned out not to hold what it should: it has to learn before it counts again."""

    stream: LogStreamId
    node: StorageNodeId
    reason: str


class AddSurvivor(Dated, frozen=True, tag=True):
    """A replica of a sealed stream has learned everything up to the sealed position: it counts again."""

    stream: LogStreamId
    node: StorageNodeId


class FoundCluster(Dated, frozen=True, tag=True):
    """The first decision of all. The key is random and made once: a number is easily given to two clusters."""

    cluster: ClusterId
    key: str


class AddNode(Dated, frozen=True, tag=True):
    """The storage node belongs to the cluster and listens there; decided again when it moves or gets volumes.
    ``server_key`` is the public key with which it proves that it is this node; empty until the leader has asked it.
    ``renews``: it takes the place of the one before, see ``AddNodeRequest``."""

    node: StorageNodeId
    address: str = ""
    key: str = ""
    volumes: tuple[str, ...] = ()
    server_key: str = ""
    renews: bool = False


class RemoveNode(Dated, frozen=True, tag=True):
    node: StorageNodeId


class CreateTopic(Dated, frozen=True, tag=True):
    """A name for log streams: as many as ``streams`` shall be open. ``schema`` is Arrow's, serialised, or empty."""

    topic: TopicId
    name: str
    replication: int
    streams: int = 1
    schema: bytes = b""
    event_time: str = ""
    retention: Retention = Retention()
    event_time_ahead_us: int = 0


class ChangeTopic(Dated, frozen=True, tag=True):
    """How many streams shall be open, how long records are kept, and a schema that follows the last one, if any. How
    far event times may be ahead stays as it is if it is not said."""

    topic: TopicId
    streams: int
    retention: Retention
    schema: bytes = b""
    event_time_ahead_us: int | None = None


class DeleteTopic(Dated, frozen=True, tag=True):
    """The topic's name is free again. Its streams must be sealed for good before."""

    topic: TopicId


class CreateStream(Struct, frozen=True, tag=True):
    """A new log stream, sealed at 0 in epoch 0; it starts at the high watermark of its creation. Its silence counts
    from ``time``."""

    stream: LogStreamId
    topic: TopicId
    replicas: tuple[StorageNodeId, ...]
    high_watermark: GLSN
    time: CutTime
    reason: str = ""


class AssignReplicas(Dated, frozen=True, tag=True):
    """Which nodes shall hold the stream from now on."""

    stream: LogStreamId
    replicas: tuple[StorageNodeId, ...]
    reason: str = ""


class Trim(Dated, frozen=True, tag=True):
    topic: TopicId
    before: GLSN


class OpenProducer(Struct, frozen=True, tag=True):
    """The producer's name belongs to this epoch now; its batches go to this stream."""

    producer: ProducerId
    epoch: ProducerEpoch
    stream: LogStreamId
    session: int


class MoveProducer(Dated, frozen=True, tag=True):
    """The producer goes on in another stream, with its next epoch. The first stream is sealed and the producer's last
    sequence there is known."""

    producer: ProducerId
    epoch: ProducerEpoch
    stream: LogStreamId
    last_sequence: Sequence


class CommitCursor(Struct, frozen=True, tag=True):
    """A consumer has dealt with everything up to this position."""

    cursor: str
    glsn: GLSN


class DropCursor(Dated, frozen=True, tag=True):
    cursor: str


class OpenRun(Dated, frozen=True, tag=True):
    """A new run. One of the same name, if it has one, is over. ``once``: it publishes a single batch."""

    run: RunId
    name: str
    key: str
    once: bool = False


class GroupPlan(Struct, frozen=True):
    """The rows of a batch for one topic: these parts, in this order, go to this stream."""

    topic: TopicId
    stream: LogStreamId
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


class DecideBatch(Struct, frozen=True, tag=True):
    """What the batch consists of, for ever. Each topic's rows become one group; all of them will be published."""

    run: RunId
    batch: BatchNumber
    groups: tuple[GroupPlan, ...]
    position: GLSN | None = None
    """The input of the run was read up to here for this batch. None: the publisher did not say."""


class GroupPublished(Struct, frozen=True, tag=True):
    """The rows of a decided batch for this topic are in the log."""

    run: RunId
    batch: BatchNumber
    topic: TopicId
    glsn: GLSN
    count: int


class MoveGroup(Dated, frozen=True, tag=True):
    """A decided group goes to another stream: the one it was meant for is sealed and does not have it."""

    run: RunId
    batch: BatchNumber
    topic: TopicId
    stream: LogStreamId
    reason: str = ""


class ExpireStaged(Dated, frozen=True, tag=True):
    """The run's next generation begins: nothing that was staged before can be decided on any more."""

    run: RunId
    reason: str = ""


class DropRun(Dated, frozen=True, tag=True):
    """The run is over, and what was decided for it and is not in the log will not be."""

    run: RunId
    reason: str = ""


class ForgetOutput(Dated, frozen=True, tag=True):
    """New runs may publish under the name although there is output under it. This fences no run."""

    name: str


RunDecision = OpenRun | DecideBatch | GroupPublished | MoveGroup | ExpireStaged | DropRun | ForgetOutput

Decision = (
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
    | OpenRun
    | DecideBatch
    | GroupPublished
    | MoveGroup
    | ExpireStaged
    | DropRun
    | ForgetOutput
)

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
"""Those that change what readers and writers see of the catalog, and so its revision."""
