"""The watermark at every position of a range, by the rule of ``core.watermark``, for whole columns at once.

The planner walks the headers of all log streams of a query (``advance``) and gives each task, per batch of its log
stream, three numbers: the watermark before the batch, the least of the other log streams, and how far its own had
come (``Seen``). From these and the event times of its records a task knows what each record saw (``seen_by``).

What a position's watermark owes to the far past is one number only, because the watermark never goes back. So a
planner that starts in the middle need not walk from the beginning: it looks back until something after that place
outweighs everything before it (``is_settled``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cutwater.client.ranges import Heads
from cutwater.core.clock import Mark
from cutwater.core.requests import StreamInfo
from cutwater.core.watermark import MAX_WATERMARK, NO_WATERMARK, Punctuated, Strategy
from cutwater.types import GLSN, MILLISECOND, LogStreamId
from cutwater.wire.scan_api import NOTHING

Numbers: TypeAlias = NDArray[np.int64]

FIRST_LLSN, FIRST_GLSN, COUNT, TIME, TIME_MAX, DECLARED = range(6)
"""The columns of ``Heads``."""


class StreamState(Struct, frozen=True):
    """One log stream after a position: its own watermark, and its last commit, or its creation before the first."""

    watermark: int
    last_commit: int


class ClockState(Struct, frozen=True):
    """The watermark after position ``glsn``, and what it depends on there. Log streams that are not named have not been
    heard of: their creation counts."""

    glsn: GLSN
    watermark: int
    streams: dict[LogStreamId, StreamState]


class Seen(Struct, frozen=True):
    """Per batch of one log stream, by its first GLSN: the watermark before it, the least of the others while it was
    committed, and the stream's own before it."""

    first_glsn: Numbers
    before: Numbers
    others: Numbers
    own: Numbers

    def between(self, first: GLSN, last: GLSN) -> Seen:
        """Those that have positions in a range; the first may begin before it."""
        start = max(0, int(np.searchsorted(self.first_glsn, first, side="right")) - 1)
        stop = int(np.searchsorted(self.first_glsn, last, side="right"))
        return Seen(*(column[start:stop] for column in (self.first_glsn, self.before, self.others, self.own)))


class Walked(Struct, frozen=True):
    """From ``start`` on. ``state`` is after the last batch that ends at or below the position asked for, and all marks
    up to there."""

    start: ClockState
    state: ClockState
    seen: dict[LogStreamId, Seen]
    highest: int
    """The highest minimum met on the way: what the watermark would be if it had nothing to remember."""


def state_before(info: StreamInfo, heads: Heads, strategy: Strategy) -> StreamState:
    """Of one log stream, before the first of these heads."""
    before = heads.before
    said = before.declared if isinstance(strategy, Punctuated) else before.time_max
    watermark = NO_WATERMARK if said is None else int(said) - _lag_us(strategy)
    return StreamState(watermark, info.created_time if before.committed is None else before.committed)


def is_settled(walked: Walked) -> bool:
    """Whether nothing that happened before the start can still matter: a minimum is never above the highest of its
    streams, so all minima before lie at or below the highest of the streams at the start."""
    return walked.highest >= max((state.watermark for state in walked.start.streams.values()), default=NO_WATERMARK)


def advance(
    start: ClockState,
    through: GLSN,
    streams: Sequence[StreamInfo],
    heads: Mapping[LogStreamId, Heads],
    marks: Sequence[Mark],
    strategy: Strategy,
) -> Walked:
    """Lead the clock from one position to another. ``heads`` and ``marks`` are those above ``start``."""
    owner, first, last, time, said = _merged(streams, heads, marks, strategy)
    kept = int(np.searchsorted(last, through, side="right"))
    size = len(owner)
    lowest, everyone = np.full(size, MAX_WATERMARK), np.zeros(size, bool)
    others = np.full(size, MAX_WATERMARK)
    own_before, own_after, last_commit = np.full(size, NO_WATERMARK), {}, {}
    for place, info in enumerate(streams):
        known = start.streams.get(info.stream, StreamState(NO_WATERMARK, info.created_time))
        mine = owner == place
        own = _running(np.where(mine, said, NO_WATERMARK), known.watermark)
        spoke = _running(np.where(mine, time, NO_WATERMARK), NO_WATERMARK)
        commit = np.where(spoke == NO_WATERMARK, known.last_commit, spoke)
        # In this form because a sum with a time that is far off would not fit into 64 bits.
        exists = (info.created_at < first) & ((first <= info.final_at) | (not info.final))
        counts = exists & (time - strategy.idle_after_us <= commit)
        everyone |= counts
        level = np.where(counts, own, MAX_WATERMARK)
        lowest = np.minimum(lowest, level)
        others = np.where(mine, others, np.minimum(others, level))
        own_before = np.where(mine, _shifted(own, known.watermark), own_before)
        own_after[info.stream], last_commit[info.stream] = own, commit
    minimum = np.where(everyone, lowest, NO_WATERMARK)
    watermark = _running(minimum, start.watermark)
    before = _shifted(watermark, start.watermark)
    seen = {
        info.stream: Seen(*(column[owner == place] for column in (first, before, others, own_before)))
        for place, info in enumerate(streams)
    }
    state = start
    if kept:
        at = kept - 1
        state = ClockState(
            GLSN(int(last[at])),
            int(watermark[at]),
            {lsid: StreamState(int(own_after[lsid][at]), int(last_commit[lsid][at])) for lsid in own_after},
        )
    return Walked(start, state, seen, int(minimum[:kept].max(initial=NO_WATERMARK)))


def seen_by(
    times: Numbers, first_glsn: Numbers, counts: Numbers, seen: Seen, strategy: Strategy
) -> tuple[Numbers, NDArray[np.bool_]]:
    """The watermark that each record of consecutive batches of one log stream saw, and where there was none. ``times``
    are the event times of all their records."""
    at = np.searchsorted(seen.first_glsn, first_glsn)
    assert np.array_equal(seen.first_glsn[at], first_glsn), "the planner has walked over every batch that a task reads"
    before, others = (np.repeat(column[at], counts) for column in (seen.before, seen.others))
    if isinstance(strategy, Punctuated):
        own = np.repeat(seen.own[at], counts)
    else:
        # A log stream never falls behind its own past, so one running maximum serves all batches.
        own = _running(_less(times, _lag_us(strategy)), int(seen.own[at[0]]))
    # A record sees what was said up to the one before it; the first of a batch, what there was before the batch.
    found = others
    np.minimum(own[:-1], others[1:], out=found[1:])
    np.maximum(found, before, out=found)
    found[np.cumsum(counts) - counts] = seen.before[at]
    return found, found == NO_WATERMARK


def _merged(
    streams: Sequence[StreamInfo], heads: Mapping[LogStreamId, Heads], marks: Sequence[Mark], strategy: Strategy
) -> tuple[Numbers, ...]:
    """All batches and marks in the order of their positions: whose they are (-1 for a mark), first and last GLSN, time
    of the cut, what they say of event time."""
    mark_glsns = _numbers([mark.glsn for mark in marks])
    nothing = np.full(len(marks), NO_WATERMARK)
    parts = [(np.full(len(marks), -1), mark_glsns, mark_glsns, _numbers([mark.time for mark in marks]), nothing)]
    for place, info in enumerate(streams):
        if info.stream not in heads:
            continue
        table = [np.frombuffer(column, np.int64) for column in heads[info.stream].columns]
        said = table[DECLARED if isinstance(strategy, Punctuated) else TIME_MAX]
        said = np.where(said == NOTHING, NO_WATERMARK, _less(said, _lag_us(strategy)))
        last = table[FIRST_GLSN] + table[COUNT] - 1
        parts.append((np.full(len(last), place), table[FIRST_GLSN], last, table[TIME], said))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    # A mark is the end of a cut. If that is a record as well, its batch tells the time and comes first.
    order = np.lexsort((columns[0] < 0, columns[2]))
    return tuple(column[order] for column in columns)


def _numbers(values: Sequence[int]) -> Numbers:
    return np.array(values, np.int64)


def _less(times: Numbers, lag_us: int) -> Numbers:
    """Times that are far off stay in 64 bits."""
    found: Numbers = np.maximum(times, NO_WATERMARK + lag_us)
    found -= lag_us
    return found


def _lag_us(strategy: Strategy) -> int:
    return 0 if isinstance(strategy, Punctuated) else strategy.bound_us + MILLISECOND


def _running(values: Numbers, initial: int) -> Numbers:
    """The largest so far."""
    # To look whether times rise by themselves, as they mostly do, takes a tenth of what it saves.
    is_rising = bool((values[1:] >= values[:-1]).all())
    found: Numbers = np.maximum(values if is_rising else np.maximum.accumulate(values), initial)
    return found


def _shifted(values: Numbers, first: int) -> Numbers:
    """One place later."""
    found = np.empty_like(values)
    found[:1], found[1:] = first, values[:-1]
    return found
