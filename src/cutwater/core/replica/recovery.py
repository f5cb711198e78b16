"""Recovery: decides what the files of a replica mean when it is opened.

The matrix, from the files on disk to a verdict:

=============================  =======================================  ==============================================
commit contexts                entries                                  verdict
=============================  =======================================  ==============================================
none                           none, but there is a hard state          valid: nothing yet
none                           none, and no hard state                  invalid: an empty mount is not a new replica
some, or entries                but the hard state is lost               invalid: what is committed is kept
none                           some                                     valid: nothing committed yet
some                           none, all of them trimmed                valid
some                           reach the end of the last commit         valid
anything else                                                           invalid: never reports, waits for sync
=============================  =======================================  ==============================================

Durable but uncommitted entries of the current epoch are kept and reported again: discarding them would lose data if all
replicas stop between a cut and its application. An entry can never be committed if it lies beyond the sealed position,
belongs to another epoch than the current one, or belongs to an incomplete group. Recovery cuts off these entries.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from cutwater.core.replica.deduplication import Departure
from cutwater.types import GLSN, LLSN, CommitContext, Entry, Epoch, LeaderEpoch, StorageNodeId


class HardState(Struct, frozen=True):
    """State that a replica must remember besides its records. It is saved atomically, before anything that follows from
    it.

    ``sealed_at`` is the position of the last seal of ``epoch``, None while the epoch is open. ``chain`` lists the
    members of ``epoch``; it is empty if this replica was not a member. ``learning`` is set before the first byte of a
    sync is written and cleared after the last. ``base_llsn`` and ``base_glsn`` say where the entries begin if
    everything before was trimmed or never copied: entries start at ``base_llsn + 1``.
    """

    epoch: Epoch = Epoch(0)
    leader_epoch: LeaderEpoch = LeaderEpoch(0)
    sealed_at: LLSN | None = None
    chain: tuple[StorageNodeId, ...] = ()
    learning: bool = False
    base_llsn: LLSN = LLSN(0)
    base_glsn: GLSN = GLSN(0)
    trimmed_before: GLSN = GLSN(1)
    """Every GLSN below this one was trimmed, on request and permanently."""
    departed: tuple[Departure, ...] = ()
    """Producers that had moved to another log stream when the epoch opened."""


class FoundFiles(Struct, frozen=True):
    """Contents of a replica's files when they were opened, all of it synced.

    ``tail`` holds the intact entries above the last commit. They come without their bodies, which may be more than
    memory holds. ``entries_end`` is the last LLSN of the contiguous entries. ``damaged`` is the first LLSN at or below
    the last durable mark whose checksum is wrong. A torn tail above the mark is not damage, since the storage has
    already cut it.
    """

    hard_state: HardState | None
    last_commit: CommitContext | None
    first_llsn: LLSN
    entries_end: LLSN
    tail: tuple[Entry, ...]
    damaged: LLSN | None = None
    lost: str = ""
    """Describes the small file that cannot be read: hard state, deduplication or commits. Empty if all can be read."""
    lacks_dedup: bool = False
    """Whether the first entries are missing and there is no deduplication checkpoint."""


class Valid(Struct, frozen=True):
    """The replica may report. It is committed to ``committed_end``, and entries up to ``keep_end`` are kept; the rest
    is cut. ``lacks_commits``: it stores no commit at all."""

    committed_end: LLSN
    high_watermark: GLSN
    keep_end: LLSN
    lacks_commits: bool = False


class Invalid(Struct, frozen=True):
    """The replica's data may be incomplete: it reports nothing until it has been synced.

    ``kept`` is the intact committed prefix, which need not be copied again; None if there is none. ``forgot_epochs`` is
    True if the hard state is lost.
    """

    reason: str
    kept: Valid | None = None
    forgot_epochs: bool = False


def judge(found: FoundFiles) -> Valid | Invalid:
    """Apply the matrix."""
    hard = found.hard_state
    nothing = found.last_commit is None and found.entries_end < found.first_llsn
    if hard is None and nothing and not found.lost:
        return Invalid("no data where a replica used to be: an empty mount?")
    is_lost = hard is None
    hard = hard or without_hard_state(found)
    committed_end = found.last_commit.last_llsn if found.last_commit else hard.base_llsn
    high_watermark = found.last_commit.high_watermark if found.last_commit else hard.base_glsn
    if found.entries_end < committed_end:
        return Invalid(f"committed to LLSN {committed_end}, but entries end at {found.entries_end}")
    if found.tail and found.tail[0].first_llsn <= committed_end:
        return Invalid(f"the last commit ends at LLSN {committed_end}, inside a batch")
    if found.first_llsn > committed_end + 1 or (found.last_commit is None and found.first_llsn <= committed_end):
        return Invalid(f"committed to LLSN {committed_end}, but entries begin at {found.first_llsn}")
    has_none = found.first_llsn == committed_end + 1 and committed_end > hard.base_llsn
    if has_none and not is_lost and not _all_trimmed(found, hard):
        return Invalid(f"committed to LLSN {committed_end}, but there are no entries, and no trim removed them")
    lacks_commits = found.last_commit is None
    kept = Valid(committed_end, high_watermark, committed_end, lacks_commits)
    if found.damaged is not None and found.damaged <= committed_end:
        return Invalid(f"the entry at LLSN {found.damaged} fails its checksum")
    if is_lost or found.lost:
        return Invalid(found.lost or "its hard state, the file state, is missing", kept, forgot_epochs=is_lost)
    if hard.chain and found.tail and found.tail[0].epoch < hard.epoch:
        # A member of an epoch has committed everything of the earlier epochs, on disk.
        return Invalid(f"the commits from LLSN {committed_end + 1} on are missing", kept)
    if hard.learning:
        # Commit contexts are copied last, so the entries that they cover are complete.
        return Invalid("an interrupted sync", kept)
    if found.damaged is not None:
        return Invalid(f"the entry at LLSN {found.damaged} fails its checksum", kept)
    if found.lacks_dedup and committed_end > 0:
        # A replica saves its deduplication state before it trims, and before it learns from a replica that has trimmed.
        return Invalid("its deduplication state is missing, and the entries that it came from are trimmed", kept)
    return Valid(committed_end, high_watermark, _keep_end(found.tail, hard, committed_end), lacks_commits)


def without_hard_state(found: FoundFiles) -> HardState:
    """Return the replacement for a lost hard state. The replica must learn in any case, and gets its epochs from the
    leader."""
    return HardState(learning=True, base_llsn=LLSN(found.first_llsn - 1))


def _all_trimmed(found: FoundFiles, hard: HardState) -> bool:
    return found.last_commit is not None and found.last_commit.last_glsn < hard.trimmed_before


def _keep_end(tail: Sequence[Entry], hard: HardState, committed_end: LLSN) -> LLSN:
    """Return the LLSN of the last uncommitted entry that may still be committed."""
    end = committed_end
    for entry in tail:
        if entry.epoch != hard.epoch:
            break
        if hard.sealed_at is not None and entry.last_llsn > hard.sealed_at:
            break
        if not entry.batch.more:
            end = entry.last_llsn
    return end
