"""Maps GLSN to LLSN and back, and time to GLSN, by binary search over commit contexts.

There is no index per record anywhere. A replica with a hundred million records in ten thousand commits searches ten
thousand contexts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter

from cutwater.types import GLSN, LLSN, CommitContext, CutTime

_first_glsn = attrgetter("first_glsn")
_first_llsn = attrgetter("first_llsn")
_time = attrgetter("time")


def context_of_llsn(contexts: Sequence[CommitContext], llsn: LLSN) -> CommitContext | None:
    """Return the commit that covers this LLSN, or None."""
    i = bisect_right(contexts, llsn, key=_first_llsn) - 1
    return contexts[i] if i >= 0 and llsn <= contexts[i].last_llsn else None


def glsn_of_llsn(contexts: Sequence[CommitContext], llsn: LLSN) -> GLSN | None:
    context = context_of_llsn(contexts, llsn)
    return None if context is None else context.glsn_of(llsn)


def first_llsn_at_or_after(contexts: Sequence[CommitContext], glsn: GLSN) -> LLSN | None:
    """Return the LLSN of the first record of this log stream at or after this GLSN, or None if there is none yet."""
    i = bisect_right(contexts, glsn, key=_first_glsn) - 1
    if i >= 0 and glsn <= contexts[i].last_glsn:
        return LLSN(contexts[i].first_llsn + (glsn - contexts[i].first_glsn))
    return contexts[i + 1].first_llsn if i + 1 < len(contexts) else None


def last_context_at(contexts: Sequence[CommitContext], glsn: GLSN) -> CommitContext | None:
    """Return the last commit of this log stream that begins at or below this GLSN, or None."""
    i = bisect_right(contexts, glsn, key=_first_glsn) - 1
    return contexts[i] if i >= 0 else None


def first_glsn_at_or_after_time(contexts: Sequence[CommitContext], time: CutTime) -> GLSN | None:
    """Return the GLSN of the first record of this log stream that was ingested at or after ``time``, or None."""
    i = bisect_left(contexts, time, key=_time)
    return contexts[i].first_glsn if i < len(contexts) else None
