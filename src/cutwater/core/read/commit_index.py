"""From GLSN to LLSN and back, and from time to GLSN: binary searches over commit contexts.

There is no index per record anywhere. A replica with a hundred million records in ten thousand commits searches ten
thousand entries.
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
    """The commit that covers this LLSN, if one does."""
    i = bisect_right(contexts, llsn, key=_first_llsn) - 1
    return contexts[i] if i >= 0 and llsn <= contexts[i].last_llsn else None


def glsn_of_llsn(contexts: Sequence[CommitContext], llsn: LLSN) -> GLSN | None:
    context = context_of_llsn(contexts, llsn)
    return None if context is None else context.glsn_of(llsn)


def first_llsn_at_or_after(contexts: Sequence[CommitContext], glsn: GLSN) -> LLSN | None:
    """Where a reader that starts at this GLSN finds its first record in this log stream, if there is one yet."""
    i = bisect_right(contexts, glsn, key=_first_glsn) - 1
    if i >= 0 and glsn <= contexts[i].last_glsn:
        return LLSN(contexts[i].first_llsn + (glsn - contexts[i].first_glsn))
    return contexts[i + 1].first_llsn if i + 1 < len(contexts) else None


def last_context_at(contexts: Sequence[CommitContext], glsn: GLSN) -> CommitContext | None:
    """The last commit of this log stream that begins at or below this GLSN, if one does."""
    i = bisect_right(contexts, glsn, key=_first_glsn) - 1
    return contexts[i] if i >= 0 else None


def first_glsn_at_or_after_time(contexts: Sequence[CommitContext], time: CutTime) -> GLSN | None:
    """The first record of this log stream that was ingested at or after ``time``."""
    i = bisect_left(contexts, time, key=_time)
    return contexts[i].first_glsn if i < len(contexts) else None
