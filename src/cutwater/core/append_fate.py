"""Derives from a catalog what became of an append without an answer, and whether a catalog is out of date.

1. An append gets an LLSN above every LLSN of its log stream that was committed before the append was sent.
2. An epoch ends at a stored position. Afterwards nothing beyond it is committed in that epoch, on any replica.

So if the epoch in which an append was sent has ended, the append is in the log at or below the end of that epoch, or it
never will be. If that end is not above what was committed before the append was sent, it never will be.
"""

from __future__ import annotations

import enum

from cutwater.core.requests import StreamInfo
from cutwater.types import LLSN, Epoch, Revision


class AppendFate(enum.Enum):
    PENDING = "its epoch goes on, so it may still be committed"
    ABSENT = "it is not in the log and never will be"
    UNDECIDED = "its epoch has ended, and the catalog does not tell whether it was committed before"


def fate_of(info: StreamInfo | None, epoch: Epoch, known_end: LLSN) -> AppendFate:
    """Return the fate of an append that was sent to a log stream in ``epoch``. ``info`` is the log stream in a catalog,
    None if it was deleted. ``known_end`` is an LLSN that was known to be committed when the append was sent."""
    if info is None:
        return AppendFate.UNDECIDED
    if info.epoch < epoch or (info.epoch == epoch and info.is_open):
        return AppendFate.PENDING
    return AppendFate.ABSENT if _end_of(info, epoch) <= known_end else AppendFate.UNDECIDED


def _end_of(info: StreamInfo, epoch: Epoch) -> LLSN:
    """Return the position where an epoch that is over ended, or a later position."""
    if info.epoch > epoch and info.start is not None:
        return info.start
    return info.committed_end


def is_out_of_date(known: Revision, heard: Revision) -> bool:
    """Whether a catalog of the revision ``known`` should be fetched again, because a commit was made under the revision
    ``heard``: log streams may have been opened, closed or added since."""
    return heard > known
