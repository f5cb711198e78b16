"""Events that a log stream replica handles, and effects that it returns.

The driver carries out effects in the order in which they are returned. A *barrier* must be durable on disk before the
next effect of the list is carried out and before the replica handles another event. If a barrier fails, the rest of the
list is dropped and the replica gets ``StorageFailed``. Entries and commit contexts are written in the background, in
order, and an event tells the replica when they are durable.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.core import messages as m
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import HardState
from cutwater.errors import CutwaterError
from cutwater.types import (
    GLSN,
    LLSN,
    Ack,
    Batch,
    CommitContext,
    Entry,
    Epoch,
    GroupTag,
    Revision,
    Sequence,
    StorageNodeId,
)

Waiter = int
"""Identifies a call that waits for the outcome of an append. Chosen by the driver, never interpreted here."""


# Events


class Append(Struct, frozen=True):
    """A client's batch for the head. ``if_llsn``: take it only if its first record gets exactly this LLSN."""

    waiter: Waiter
    epoch: Epoch
    batch: Batch
    if_llsn: LLSN | None = None


class GroupEntry(Struct, frozen=True):
    """The next entry of the group that ``FeedGroup`` asked for. Its batch has neither ``more`` nor ``group``; the head
    sets both from ``last``."""

    tag: GroupTag
    batch: Batch
    last: bool


class GroupFailed(Struct, frozen=True):
    """The driver cannot provide the rest of the group that ``FeedGroup`` asked for."""

    tag: GroupTag
    reason: str


class EntriesDurable(Struct, frozen=True):
    """Everything written up to ``end`` in this generation of the files is on disk."""

    generation: int
    end: LLSN


class CommitDurable(Struct, frozen=True):
    """The commit contexts up to this one, of this generation, are on disk."""

    generation: int
    context: CommitContext


class Commit(Struct, frozen=True):
    """The replica's part of a cut. ``context`` is None if the cut has nothing for this replica."""

    prev_high_watermark: GLSN
    high_watermark: GLSN
    revision: Revision
    context: CommitContext | None


class ReplicateFailed(Struct, frozen=True):
    """The next replica of the chain did not take an entry, or cannot be reached."""

    peer: StorageNodeId
    epoch: Epoch
    reason: str


class StorageFailed(Struct, frozen=True):
    """A write or an fsync failed. Everything that was not yet durable counts as lost, permanently."""

    reason: str


class Tidy(Struct, frozen=True):
    """Some time has passed since the files were opened: finish work that was interrupted before.

    This does not happen at once. Otherwise a disk that fails at this work would be opened again and again without
    pause.
    """


class Dropped(Struct, frozen=True):
    """Trim has removed segments; the entries now begin at ``first_llsn``."""

    first_llsn: LLSN


ReplicaEvent = (
    Append
    | m.PublishGroup
    | GroupEntry
    | GroupFailed
    | m.Replicate
    | EntriesDurable
    | CommitDurable
    | Commit
    | m.CatchUp
    | m.SealReplica
    | m.UnsealReplica
    | m.ExcludeReplica
    | m.LearnFrom
    | m.SyncMessage
    | m.TrimReplica
    | m.DropReplica
    | Tidy
    | Dropped
    | ReplicateFailed
    | StorageFailed
)


# Effects


class SaveHardState(Struct, frozen=True):
    """Barrier: save the hard state."""

    hard_state: HardState


class SaveDedup(Struct, frozen=True):
    """Barrier: save the deduplication checkpoint."""

    checkpoint: DedupCheckpoint


class Truncate(Struct, frozen=True):
    """Barrier: remove the entries above ``end``; later writes belong to the next generation."""

    end: LLSN
    generation: int


class Restart(Struct, frozen=True):
    """Barrier: remove all commit contexts, and all entries except those from ``first_llsn`` to ``keep_end``. If no
    entry remains, the next entry written is ``first_llsn``."""

    first_llsn: LLSN
    generation: int
    keep_end: LLSN = LLSN(0)


class FillEntry(Struct, frozen=True):
    """Barrier: write the entry in the place of an unreadable one. If it does not fit there, remove everything from that
    place on, and fail."""

    entry: Entry


class WriteEntry(Struct, frozen=True):
    entry: Entry
    generation: int


class WriteCommit(Struct, frozen=True):
    context: CommitContext
    generation: int


class DropBefore(Struct, frozen=True):
    """Remove whole segments below this GLSN, and nothing above ``upto``."""

    before: GLSN
    upto: LLSN


class Forward(Struct, frozen=True):
    peer: StorageNodeId
    message: m.Replicate


class RefuseEntry(Struct, frozen=True):
    """Tell the sender of an entry that it was not taken."""

    reason: str


class Acked(Struct, frozen=True):
    """The append is committed. ``last_sequence`` is the producer's last sequence in the stream at that place."""

    waiter: Waiter
    ack: Ack
    last_sequence: Sequence


class AppendFailed(Struct, frozen=True):
    """The append is definitely not in the log and never will be."""

    waiter: Waiter
    error: CutwaterError


class Unsettled(Struct, frozen=True):
    """This replica can no longer tell the outcome of the append."""

    waiter: Waiter


class FeedGroup(Struct, frozen=True):
    """Hand over the entries of this group as ``GroupEntry`` events, one after the other. The feed ends when the last
    entry is taken, with ``GroupFailed``, or when the replica refuses an entry because the group is no longer wanted."""

    group: m.PublishGroup


class TellGroup(Struct, frozen=True):
    """Tell the metadata repository what became of a group."""

    outcome: m.GroupOutcome


class ReportNow(Struct, frozen=True):
    """Send a report at once: something changed that the metadata repository should know."""


class Complain(Struct, frozen=True):
    """Tell the metadata repository that this peer could not be reached."""

    peer: StorageNodeId


class AskSync(Struct, frozen=True):
    source: StorageNodeId
    request: m.SyncRequest


class Remove(Struct, frozen=True):
    """Close the files and delete them permanently: the replica no longer exists. Always the last effect."""


class Reopen(Struct, frozen=True):
    """Cut the files back to what is known to be durable, or leave them unchanged where that is None. Then recover the
    replica from disk as after a restart."""

    durable_end: LLSN | None
    durable_committed_end: LLSN | None
    reason: str


Barrier = SaveHardState | SaveDedup | Truncate | Restart | FillEntry

ReplicaEffect = (
    Barrier
    | WriteEntry
    | WriteCommit
    | DropBefore
    | Forward
    | RefuseEntry
    | Acked
    | AppendFailed
    | Unsettled
    | FeedGroup
    | TellGroup
    | ReportNow
    | Complain
    | AskSync
    | Reopen
    | Remove
)

Effects = list[ReplicaEffect]
