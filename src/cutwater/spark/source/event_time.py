"""Computes the watermark at every position of a range, by the rule of ``core.read.watermark``, for whole columns at
once.

The planner walks the headers of all log streams of a query (``advance``). It gives each task four numbers for each
batch of its log stream (``SeenWatermarks``): the watermark before the batch, a lower bound of the watermark inside the
batch, the least watermark of the other log streams and topics, and the log stream's own watermark before the batch.
From these and the event times of its records, a task computes the watermark that each record saw (``seen_by``). Each
topic is a source, and the query is an operator that reads all of them.

The influence of the far past on a watermark is one number per source, and one more because watermarks never go back. So
a planner that starts in the middle need not walk from the beginning. It goes back to a mark of the log's clock that is
early enough: what was said after the mark outweighs everything before it (``is_settled``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cutwater.client.read.range_reader import Heads
from cutwater.core.read.time_marks import TimeMark
from cutwater.core.read.watermark import MAX_WATERMARK, NO_WATERMARK, RULE, Punctuated, Strategy
from cutwater.core.requests import StreamInfo
from cutwater.protocol.scan_api import NOTHING
from cutwater.types import GLSN, MILLISECOND, LogStreamId, TopicId

Numbers: TypeAlias = NDArray[np.int64]

FIRST_LLSN, FIRST_GLSN, COUNT, TIME, TIME_MAX, DECLARED = range(6)
"""The columns of ``Heads``."""


class StreamState(Struct, frozen=True):
    """State of one log stream after a position: its own watermark, the time of its last entry (of its creation if it
    has none), and whether that entry declares idleness."""

    watermark: int
    last_commit: int
    idle: bool = False


class TrimmedPast(Struct, frozen=True):
    """State of a trimmed log stream where its topic now begins, at ``first``. Its state before that position is not
    known. Up to ``first``, the log stream counts with no more than the walk knows of it, and turns idle no earlier than
    its last entry allows. So the computed watermark is never above the true one."""

    first: GLSN
    state: StreamState


class SourceState(Struct, frozen=True):
    """State of one topic after a position: its watermark, whether it was idle when it was last evaluated, and where
    that was."""

    watermark: int = NO_WATERMARK
    idle: bool = True
    evaluated: int = -1


class ClockState(Struct, frozen=True):
    """The watermark after position ``glsn``, and the state that it depends on. A log stream that is not named has had
    no entry: the time of its creation counts. A topic that is not named has not been evaluated."""

    glsn: GLSN
    watermark: int
    streams: dict[LogStreamId, StreamState]
    sources: dict[TopicId, SourceState] = {}


class SeenWatermarks(Struct, frozen=True):
    """Numbers for each batch of one log stream, found by its first GLSN: the watermark before the batch, a lower bound
    of the watermark after its first record, the least watermark of other log streams and topics while it was committed,
    and the log stream's own watermark before it."""

    first_glsn: Numbers
    before: Numbers
    floor: Numbers
    others: Numbers
    own: Numbers

    def between(self, first: GLSN, last: GLSN) -> SeenWatermarks:
        """Return the batches with positions in a range. The first one may begin before the range."""
        start = max(0, int(np.searchsorted(self.first_glsn, first, side="right")) - 1)
        stop = int(np.searchsorted(self.first_glsn, last, side="right"))
        columns = (self.first_glsn, self.before, self.floor, self.others, self.own)
        return SeenWatermarks(*(column[start:stop] for column in columns))


class Walked(Struct, frozen=True):
    """Result of a walk that begins at ``start``. ``state`` is the state after the last batch that ends at or below the
    requested position, and after all marks up to there."""

    start: ClockState
    state: ClockState
    seen: dict[LogStreamId, SeenWatermarks]


def state_before(info: StreamInfo, heads: Heads, strategy: Strategy) -> StreamState:
    """Return the state of one log stream before the first of these heads."""
    before = heads.before
    said = before.declared if isinstance(strategy, Punctuated) else before.time_max
    watermark = NO_WATERMARK if said is None else int(said) - _lag_us(strategy)
    return StreamState(watermark, info.created_time if before.committed is None else before.committed, before.idle)


def is_settled(walked: Walked, streams: Sequence[StreamInfo]) -> bool:
    """Report whether nothing before the start can still matter. No watermark was ever above the highest of its streams,
    so a watermark that has reached the highest one at the start does not depend on anything earlier."""
    begun, now = walked.start.streams, walked.state
    highest = max((begun[info.stream].watermark for info in streams if info.stream in begun), default=NO_WATERMARK)
    if now.watermark < highest:
        return False
    return all(
        state.watermark >= begun[info.stream].watermark
        for topic, state in now.sources.items()
        for info in streams
        if info.topic == topic and info.stream in begun
    )


class _Topic(Struct, eq=False):
    """State of one source at every row."""

    rows: NDArray[np.bool_]
    """Selects the rows of its own log streams."""
    begun: int
    """Its watermark before the first row."""
    watermark: Numbers
    idle: NDArray[np.bool_]
    others: Numbers
    """For a row of one of its log streams: the least watermark of its other log streams that are not idle."""
    states: Callable[[int], SourceState]


def advance(
    start: ClockState,
    through: GLSN,
    streams: Sequence[StreamInfo],
    heads: Mapping[LogStreamId, Heads],
    marks: Sequence[TimeMark],
    strategy: Strategy,
    rule: int = RULE,
    pasts: Mapping[LogStreamId, TrimmedPast] = MappingProxyType({}),
) -> Walked:
    """Advance the clock from one position to another. ``heads`` and ``marks`` are those above ``start``. Under rule 1
    all topics are one source, every row evaluates it, and it stands still while all its log streams are idle."""
    rows = _merged(streams, heads, marks, strategy)
    owner, first, last = rows.owner, rows.first, rows.last
    kept = int(np.searchsorted(last, through, side="right"))
    size = len(owner)
    own_before, own_after, last_commit, said_idle = np.full(size, NO_WATERMARK), {}, {}, {}
    topics: dict[TopicId, _Topic] = {}
    for topic in dict.fromkeys(info.topic if rule > 1 else TopicId(0) for info in streams):
        places = [place for place, info in enumerate(streams) if rule == 1 or info.topic == topic]
        own_rows = np.isin(owner, places)
        evaluates = own_rows | (owner < 0) if rule > 1 else np.ones(size, bool)
        begun = start.sources.get(topic, SourceState(watermark=start.watermark if rule == 1 else NO_WATERMARK))
        at = _latest(evaluates)
        evaluated = np.where(at < 0, begun.evaluated, last[at])
        lowest, highest, others = (
            np.full(size, MAX_WATERMARK),
            np.full(size, NO_WATERMARK),
            np.full(size, MAX_WATERMARK),
        )
        is_active, is_new = np.zeros(size, bool), np.zeros(size, bool)
        for place in places:
            info = streams[place]
            known = start.streams.get(info.stream, StreamState(NO_WATERMARK, info.created_time))
            past = pasts.get(info.stream, TrimmedPast(GLSN(0), known))
            recalled = np.where(first >= past.first, past.state.watermark, NO_WATERMARK)
            mine = owner == place
            spoke = _latest(mine)
            own = np.maximum(_running(np.where(mine, rows.said, NO_WATERMARK), known.watermark), recalled)
            commit = np.where(spoke < 0, max(known.last_commit, past.state.last_commit), rows.time[spoke])
            said_last = np.where(first >= past.first, past.state.idle, known.idle)
            idle = np.where(spoke < 0, said_last, rows.idle[spoke]) & (rule > 1)
            exists = (info.created_at < first) & ((first <= info.final_at) | (not info.final))
            # Written as a subtraction, because the sum with a distant time would overflow 64 bits.
            counts = exists & ~idle & (rows.time - strategy.idle_after_us <= commit)
            is_active |= counts
            is_new |= exists & (info.created_at >= evaluated)
            level = np.where(counts, own, MAX_WATERMARK)
            lowest = np.minimum(lowest, level)
            highest = np.maximum(highest, np.where(exists, own, NO_WATERMARK))
            others = np.where(mine, others, np.minimum(others, level))
            own_before = np.where(mine, np.maximum(_shifted(own, known.watermark), recalled), own_before)
            own_after[info.stream], last_commit[info.stream], said_idle[info.stream] = own, commit, idle
        value = np.where(is_active, lowest, highest if rule > 1 else NO_WATERMARK)
        watermark = _running(np.where(evaluates, value, NO_WATERMARK), begun.watermark)
        was_idle = np.where(at < 0, begun.idle, ~is_active[at])

        def state_at(
            row: int, watermark: Numbers = watermark, idle: Any = was_idle, evaluated: Numbers = evaluated
        ) -> SourceState:
            return SourceState(int(watermark[row]), bool(idle[row]), int(evaluated[row]))

        topics[topic] = _Topic(own_rows, begun.watermark, watermark, was_idle & ~is_new, others, state_at)
    # A mark at the last position of a batch comes after the batch: the watermark is known when both are applied.
    is_last = np.append(last[1:] != last[:-1], True)[:size]
    watermark = _running(np.where(is_last, _combined(topics, size), NO_WATERMARK), start.watermark)
    before = _shifted(watermark, start.watermark)
    others, floor = np.full(size, MAX_WATERMARK), before
    for topic, own_topic in topics.items():
        least = np.full(size, MAX_WATERMARK)
        for other, found in topics.items():
            if other != topic:
                least = np.minimum(least, np.where(found.idle, MAX_WATERMARK, found.watermark))
        others = np.where(own_topic.rows, np.minimum(own_topic.others, least), others)
        # A topic that held the others back may have turned idle, because a log stream that was new in it is gone again.
        reached = np.minimum(_shifted(own_topic.watermark, own_topic.begun), least)
        floor = np.where(own_topic.rows, np.maximum(floor, reached), floor)
    seen = {
        info.stream: SeenWatermarks(*(column[owner == place] for column in (first, before, floor, others, own_before)))
        for place, info in enumerate(streams)
    }
    state = start
    if kept:
        row = kept - 1
        state = ClockState(
            GLSN(int(last[row])),
            int(watermark[row]),
            {
                lsid: StreamState(int(own[row]), int(last_commit[lsid][row]), bool(said_idle[lsid][row]))
                for lsid, own in own_after.items()
            },
            {topic: found.states(row) for topic, found in topics.items()},
        )
    return Walked(start, state, seen)


def _combined(topics: Mapping[TopicId, _Topic], size: int) -> Numbers:
    """Compute ``combined`` of ``core.read.watermark`` at every row."""
    least, highest, is_active = np.full(size, MAX_WATERMARK), np.full(size, NO_WATERMARK), np.zeros(size, bool)
    for found in topics.values():
        least = np.minimum(least, np.where(found.idle, MAX_WATERMARK, found.watermark))
        highest = np.maximum(highest, found.watermark)
        is_active |= ~found.idle
    joined: Numbers = np.where(is_active, least, highest)
    return joined


def seen_by(
    times: Numbers, first_glsn: Numbers, counts: Numbers, seen: SeenWatermarks, strategy: Strategy
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the watermark that each record of consecutive batches of one log stream saw, and a mask of the records
    that saw none. ``times`` are the event times of all their records."""
    at = np.searchsorted(seen.first_glsn, first_glsn)
    assert np.array_equal(seen.first_glsn[at], first_glsn), "the planner has walked over every batch that a task reads"
    floor, others = (np.repeat(column[at], counts) for column in (seen.floor, seen.others))
    if isinstance(strategy, Punctuated):
        own = np.repeat(seen.own[at], counts)
    else:
        # A log stream never falls behind its own past, so one running maximum serves all batches.
        own = _running(_less(times, _lag_us(strategy)), int(seen.own[at[0]]))
    # A record sees the watermark after the record before it. The first record of a batch sees the one before the batch.
    found = others
    np.minimum(own[:-1], others[1:], out=found[1:])
    np.maximum(found, floor, out=found)
    found[np.cumsum(counts) - counts] = seen.before[at]
    return found, found == NO_WATERMARK


class _Rows(Struct, eq=False):
    """All batches and marks in the order of their positions, as columns: the index of the log stream (-1 for a mark),
    first and last GLSN, time of the cut, the watermark that it implies, and whether it declares idleness."""

    owner: Numbers
    first: Numbers
    last: Numbers
    time: Numbers
    said: Numbers
    idle: NDArray[np.bool_]


def _merged(
    streams: Sequence[StreamInfo], heads: Mapping[LogStreamId, Heads], marks: Sequence[TimeMark], strategy: Strategy
) -> _Rows:
    glsns, count = _numbers([mark.glsn for mark in marks]), len(marks)
    nothing, never = np.full(count, NO_WATERMARK), np.zeros(count, bool)
    parts: list[tuple[Any, ...]] = [
        (np.full(count, -1), glsns, glsns, _numbers([mark.time for mark in marks]), nothing, never)
    ]
    for place, info in enumerate(streams):
        if info.stream not in heads:
            continue
        table = [np.frombuffer(column, np.int64) for column in heads[info.stream].columns]
        idle = np.frombuffer(heads[info.stream].idle, np.int64).astype(bool)
        said = table[DECLARED if isinstance(strategy, Punctuated) else TIME_MAX]
        said = np.where(said == NOTHING, NO_WATERMARK, _less(said, _lag_us(strategy)))
        last = table[FIRST_GLSN] + table[COUNT] - 1
        parts.append((np.full(len(last), place), table[FIRST_GLSN], last, table[TIME], said, idle))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    # A mark is the end of a cut. If a batch ends at the same position, the batch comes first.
    order = np.lexsort((columns[0] < 0, columns[2]))
    return _Rows(*(column[order] for column in columns))


def _latest(rows: NDArray[np.bool_]) -> Numbers:
    """Return for each row the last selected row up to it, or -1."""
    found: Numbers = np.maximum.accumulate(np.where(rows, np.arange(len(rows)), -1)) if len(rows) else np.arange(0)
    return found


def _numbers(values: Sequence[int]) -> Numbers:
    return np.array(values, np.int64)


def _less(times: Numbers, lag_us: int) -> Numbers:
    """Subtract the lag. Distant times do not overflow 64 bits."""
    found: Numbers = np.maximum(times, NO_WATERMARK + lag_us)
    found -= lag_us
    return found


def _lag_us(strategy: Strategy) -> int:
    return 0 if isinstance(strategy, Punctuated) else strategy.bound_us + MILLISECOND


def _running(values: Numbers, initial: int) -> Numbers:
    """Return the running maximum."""
    # Times mostly rise already. Checking this takes a tenth of the time that it saves.
    is_rising = bool((values[1:] >= values[:-1]).all())
    found: Numbers = np.maximum(values if is_rising else np.maximum.accumulate(values), initial)
    return found


def _shifted(values: Numbers, first: int) -> Numbers:
    """Shift the values by one place; ``first`` becomes the first value."""
    found = np.empty_like(values)
    found[:1], found[1:] = first, values[:-1]
    return found
