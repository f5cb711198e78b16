"""Sync: how a replica that lacks committed records gets them from a peer.

Only *committed* entries are copied, in LLSN order. Their commit contexts come last, so a destination that stops
half-way never claims a commit whose entries it lacks. The plan is arithmetic on four numbers and covers every possible
relation between two ranges of LLSNs.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from msgspec import Struct

from cutwater.errors import Refused
from cutwater.types import LLSN, CommitContext, Epoch


class Extent(Struct, frozen=True):
    """The committed entries that a replica holds: ``first`` to ``end``; ``first == end + 1`` when all are trimmed."""

    first: LLSN
    end: LLSN

    @property
    def empty(self) -> bool:
        return self.first > self.end


class SyncCase(enum.Enum):
    EQUAL = "already equal: nothing to copy"
    EMPTY = "destination holds nothing: copy all"
    BEHIND = "destination is behind: copy what it lacks"
    BELOW = "destination ends below the source's first entry: drop its entries, copy all"
    TRIMMED_FURTHER = "destination trimmed further than the source: copy what it lacks, never what it trimmed"
    SOURCE_TRIMMED = "source holds no entries, all are trimmed: drop the entries, take over the position"


class SyncPlan(Struct, frozen=True):
    """Plan of one sync. If ``restart_at`` is set, the destination drops everything first, and ``restart_at`` becomes
    the first LLSN that it holds. Then it copies the entries ``copy.first`` to ``copy.end``; ``copy`` is empty when
    there are none."""

    case: SyncCase
    restart_at: LLSN | None
    copy: Extent


class MissingEntries(Struct, frozen=True, array_like=True):
    """Committed entries that a source cannot read, all of one epoch."""

    first_llsn: LLSN
    last_llsn: LLSN
    epoch: Epoch


def missing_entries(contexts: Sequence[CommitContext], first_llsn: LLSN, last_llsn: LLSN) -> tuple[MissingEntries, ...]:
    """Return the committed ranges from one LLSN to another, one for each commit, with its epoch."""
    found = []
    for context in contexts[bisect_left(contexts, first_llsn, key=attrgetter("last_llsn")) :]:
        if context.first_llsn > last_llsn:
            break
        first, last = max(context.first_llsn, first_llsn), min(context.last_llsn, last_llsn)
        found.append(MissingEntries(first, last, context.epoch))
    return tuple(found)


def plan_sync(source: Extent, destination: Extent) -> SyncPlan:
    """Plan how to bring ``destination`` to exactly the committed end of ``source``.

    1. Afterwards the destination ends where the source ends.
    2. It holds every entry that the source holds, except those below its own trim position.
    3. Nothing that it already holds is copied again, unless there would be a hole between the two.
    """
    if destination.end > source.end:
        raise Refused(
            f"the source is committed to LLSN {source.end} and the destination already to {destination.end}: "
            "choose another source, or wait until this one has caught up"
        )
    nothing = Extent(LLSN(source.end + 1), source.end)
    if destination.end == source.end:
        return SyncPlan(SyncCase.EQUAL, None, nothing)
    if source.empty:
        return SyncPlan(SyncCase.SOURCE_TRIMMED, source.first, nothing)
    if destination.end + 1 < source.first:
        # There would be a hole between the entries of the destination and those that the source can send.
        case = SyncCase.EMPTY if destination.empty else SyncCase.BELOW
        return SyncPlan(case, source.first, source)
    missing = Extent(LLSN(destination.end + 1), source.end)
    if destination.empty:
        case = SyncCase.TRIMMED_FURTHER if destination.end >= source.first else SyncCase.EMPTY
        return SyncPlan(case, None, missing)
    case = SyncCase.TRIMMED_FURTHER if destination.first > source.first else SyncCase.BEHIND
    return SyncPlan(case, None, missing)
