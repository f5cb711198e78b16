"""Messages between the parts of a cluster about ordering. Plain data, independent of transport."""

from __future__ import annotations

import enum

from msgspec import UNSET, Struct, UnsetType

from cutwater.core.order.cut import StreamCommit
from cutwater.core.replica.deduplication import DedupCheckpoint, Departure
from cutwater.core.replica.sync_ranges import Extent, MissingEntries, SyncPlan
from cutwater.types import (
    GLSN,
    LLSN,
    BatchNumber,
    CommitContext,
    DecisionIndex,
    Entry,
    Epoch,
    GroupTag,
    Incarnation,
    JobEpoch,
    LeaderEpoch,
    LogStreamId,
    MemberList,
    Part,
    Revision,
    RunId,
    StorageNodeId,
    TopicId,
)

# From the leader of the metadata repository to storage nodes.


class LeaderHello(Struct, frozen=True, tag=True):
    """The sender leads now; reports must name its epoch.

    ``holds`` is the newest whole report of the node that this leader has taken in, by incarnation and number; number 0
    means none. The node may build later reports on it (``Report.base``). Leaders of earlier versions never say so.
    """

    leader_epoch: LeaderEpoch
    holds: tuple[Incarnation, int] | UnsetType = UNSET


class CreateReplica(Struct, frozen=True, tag=True):
    """Begin to store a log stream. A new stream starts at the high watermark of its creation; a new replica of an
    existing stream starts at 0 and has to learn.

    The order is valid only while the node is as it was in the report with this ``incarnation`` and number: a node that
    has removed the replica since then must not get it back.
    """

    stream: LogStreamId
    topic: TopicId
    high_watermark: GLSN
    incarnation: Incarnation
    report: int


class CommitMessage(Struct, frozen=True, tag=True, rename={"commits": "commit_results"}):
    """The part of one cut that concerns one storage node.

    ``commits`` are for some of its replicas. ``quiet`` lists the open log streams of which the node is a member and
    that got nothing. They are thereby known to be complete up to the new high watermark.

    ``names``: the streams in ``commits`` and ``quiet`` are exactly the streams of this list; the node keeps it.
    ``others_of``: ``quiet`` is empty and stands for all streams of this list without commits here. A leader says so
    only to a node that has reported that it holds the list (ADR 0049).
    """

    prev_high_watermark: GLSN
    high_watermark: GLSN
    revision: Revision
    commits: tuple[StreamCommit, ...]
    quiet: tuple[LogStreamId, ...]
    names: MemberList | UnsetType = UNSET
    others_of: MemberList | UnsetType = UNSET


class CatchUp(Struct, frozen=True, tag=True):
    """Answer to a report: every later range of the stream, and the stream's committed end at the high watermark."""

    stream: LogStreamId
    contexts: tuple[CommitContext, ...]
    committed_end: LLSN
    high_watermark: GLSN
    revision: Revision


class SealReplica(Struct, frozen=True, tag=True):
    """The stream is sealed for this epoch at this LLSN, and that is stored."""

    stream: LogStreamId
    leader_epoch: LeaderEpoch
    epoch: Epoch
    sealed_at: LLSN


class UnsealReplica(Struct, frozen=True, tag=True):
    """The stream is open under a new epoch with these replicas in chain order, head first. ``departed`` are all
    producers that were moved away from it: the stream takes none of their batches from before the departure."""

    stream: LogStreamId
    leader_epoch: LeaderEpoch
    epoch: Epoch
    start: LLSN
    chain: tuple[StorageNodeId, ...]
    departed: tuple[Departure, ...] = ()


class ExcludeReplica(Struct, frozen=True, tag=True):
    """The newest epoch of the stream goes on without this replica. ``replaced``: so will all later ones, because other
    nodes hold the stream now."""

    stream: LogStreamId
    leader_epoch: LeaderEpoch
    epoch: Epoch
    replaced: bool = False


class LearnFrom(Struct, frozen=True, tag=True):
    """Copy the missing committed records from this peer. The order is valid for this epoch only: in a later one this
    replica may be the one that has everything."""

    stream: LogStreamId
    leader_epoch: LeaderEpoch
    epoch: Epoch
    source: StorageNodeId


class TrimReplica(Struct, frozen=True, tag=True):
    """Everything below this GLSN is trimmed, and that is stored."""

    stream: LogStreamId
    before: GLSN


class DropReplica(Struct, frozen=True, tag=True):
    """The topic of the stream is deleted, and that is stored: remove the replica and its data permanently. Numbers of
    streams are never given out twice, so the message is valid whenever it arrives."""

    stream: LogStreamId


class PublishGroup(Struct, frozen=True, tag=True):
    """Append these parts to the stream as one group, unless it already holds them, and answer with their position. If
    the stream is sealed in this epoch, answer whether it holds them.

    The group is decided, so the message does no harm from any sender and at any repetition. See ``GroupTag`` for
    ``decided`` and ``oldest``; the last entry of the group carries the tag. ``publisher`` is the principal that asked
    for it, if access control was on: parts that another one has staged are refused, but for ``opener``. That is the
    principal to which a run without a name belongs: who publishes for it may act as that one. ``job_epoch`` is that of
    the run: the node takes no more parts of earlier ones.
    """

    stream: LogStreamId
    epoch: Epoch
    run: RunId
    batch: BatchNumber
    topic: TopicId
    parts: tuple[Part, ...]
    rows: int
    decided: DecisionIndex
    oldest: DecisionIndex
    publisher: str | UnsetType = UNSET
    job_epoch: JobEpoch | UnsetType = UNSET
    opener: str | UnsetType = UNSET

    @property
    def tag(self) -> GroupTag:
        return GroupTag(self.run, self.batch, self.rows, self.decided, self.oldest)


LeaderMessage = (
    LeaderHello
    | CreateReplica
    | CommitMessage
    | CatchUp
    | SealReplica
    | UnsealReplica
    | ExcludeReplica
    | LearnFrom
    | TrimReplica
    | DropReplica
    | PublishGroup
)

# From storage nodes to the leader, besides reports.


class GroupState(enum.IntEnum):
    """What became of a group."""

    PUBLISHED = 0
    """The group is in the log, at the position in the message."""
    ABSENT = 1
    """The group is not in the stream, which is sealed in this epoch. So it never will be, in this epoch."""
    PROBLEM = 2
    """The group could not be appended; trying again may help."""


class GroupOutcome(Struct, frozen=True, tag=True):
    """A storage node's answer about a group that it was told to publish. The metadata repository repeats its question
    until it has an answer, so this message may get lost and may be repeated."""

    node: StorageNodeId
    stream: LogStreamId
    epoch: Epoch
    run: RunId
    batch: BatchNumber
    state: GroupState
    first_llsn: LLSN = LLSN(0)
    count: int = 0
    glsn: GLSN = GLSN(0)
    problem: str = ""


# Between storage nodes.


class Replicate(Struct, frozen=True, tag=True, omit_defaults=True):
    """An entry on its way down the chain, exactly as the head has it. ``sender`` is the storage node from which the
    receiver got the entry; the receiver sets it, and it is not sent."""

    stream: LogStreamId
    entry: Entry
    sender: StorageNodeId | None = None


class SyncRequest(Struct, frozen=True, tag=True):
    """A learner asks a source for what it lacks. ``attempt`` tells the messages of one sync from those of another."""

    stream: LogStreamId
    attempt: int
    extent: Extent


class SyncBegin(Struct, frozen=True, tag=True):
    """The source's plan. ``base_glsn`` is the position before its first entry, used if the destination starts anew."""

    stream: LogStreamId
    attempt: int
    plan: SyncPlan
    base_glsn: GLSN


class SyncEntries(Struct, frozen=True, tag=True):
    """Committed entries of the plan's range, in LLSN order. ``missing`` follow them: they are committed as well, but
    the source cannot read them."""

    stream: LogStreamId
    attempt: int
    entries: tuple[Entry, ...]
    missing: tuple[MissingEntries, ...] = ()


class SyncEnd(Struct, frozen=True, tag=True):
    """The commit contexts of the entries, the deduplication state at their end, and the trim position."""

    stream: LogStreamId
    attempt: int
    contexts: tuple[CommitContext, ...]
    dedup: DedupCheckpoint
    trimmed_before: GLSN
    more: bool = False
    """Whether the source has committed more than this round brought."""


class SyncFailed(Struct, frozen=True, tag=True):
    """The source cannot serve this sync."""

    stream: LogStreamId
    attempt: int
    reason: str


SyncMessage = SyncBegin | SyncEntries | SyncEnd | SyncFailed
