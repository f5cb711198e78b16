"""Watermarks for whole columns against the clock that takes one position after the other."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cutwater.client.ranges import Heads
from cutwater.core.clock import Mark
from cutwater.core.requests import StreamInfo
from cutwater.core.watermark import NO_WATERMARK, BoundedOutOfOrderness, Punctuated, WatermarkClock
from cutwater.spark.event_time import ClockState, advance, is_settled, seen_by, state_before
from cutwater.types import GLSN, LLSN, CutTime, Epoch, EventTime, LogStreamId, TopicId
from cutwater.wire.scan_api import COLUMNS, NOTHING, EventTimeBefore

STREAMS = 3
times = st.integers(-50, 5_000)
batches = st.tuples(st.integers(0, STREAMS - 1), st.lists(times, min_size=1, max_size=4), st.none() | times)
ticks = st.none()
steps = st.lists(st.tuples(st.integers(0, 40), batches | ticks), max_size=25)
strategies = st.builds(BoundedOutOfOrderness, st.integers(0, 300), st.integers(0, 90)) | st.builds(
    Punctuated, st.integers(0, 90)
)


def info(number: int, created_at: int, created: int, final_at: int) -> StreamInfo:
    return StreamInfo(
        LogStreamId(number),
        TopicId(1),
        Epoch(1),
        not final_at,
        bool(final_at),
        (),
        (),
        LLSN(0),
        GLSN(10**6),
        GLSN(created_at),
        CutTime(created),
        GLSN(final_at),
    )


def heads_of(rows: list[tuple[int, ...]], start: int, strategy: Any) -> tuple[Heads, list[tuple[int, ...]]]:
    """What a storage node tells of a stream from a position on, and which batches that are."""
    before = [row for row in rows if row[1] + row[2] - 1 < start]
    left = [row for row in rows if row[1] + row[2] - 1 >= start]
    said = [row[4] for row in before if row[4] != NOTHING]
    declared = [row[5] for row in before if row[5] != NOTHING]
    running = EventTimeBefore(
        EventTime(max(said)) if said else None,
        EventTime(max(declared)) if declared else None,
        CutTime(before[-1][3]) if before else None,
    )
    return Heads(running, tuple(array("q", [row[i] for row in left]) for i in range(len(COLUMNS)))), left


@given(steps, strategies, st.lists(st.integers(0, 30), min_size=STREAMS, max_size=STREAMS), st.data())
def test_as_the_clock_of_the_core(log: Any, strategy: Any, lives: list[int], data: st.DataObject) -> None:
    created = [0, 0, lives[2]]
    finals = [0, lives[1], 0]
    clock, added = WatermarkClock(), set()
    rows: dict[int, list[tuple[int, ...]]] = {number: [] for number in range(STREAMS)}
    marks: list[Mark] = []
    seen: dict[int, int] = {}
    after: dict[int, int] = {}
    events: dict[int, list[int]] = {}
    glsn, time = 1, 100
    infos = [info(number, created[number], 90, finals[number]) for number in range(STREAMS)]
    for pause, step in log:
        time += pause
        for one in infos:
            exists = one.created_at < glsn and not (one.final and one.final_at < glsn)
            if exists and one.stream not in added:
                added.add(one.stream)
                clock.add_stream(one.stream, strategy, one.created_time)
            elif not exists and one.stream in added:
                added.discard(one.stream)
                clock.remove_stream(one.stream)
        if step is None or LogStreamId(step[0]) not in added:
            marks.append(Mark(GLSN(glsn), CutTime(time)))
            clock.tick(GLSN(glsn), CutTime(time))
            after[glsn] = clock.watermark
            glsn += 1
            continue
        number, values, declared = step
        found = clock.batch(LogStreamId(number), GLSN(glsn), CutTime(time), [EventTime(t) for t in values], declared)
        seen |= {glsn + i: watermark for i, watermark in enumerate(found)}
        rows[number].append(
            (len(seen), glsn, len(values), time, max(values), NOTHING if declared is None else declared)
        )
        events[glsn] = values
        glsn += len(values)
        after[glsn - 1] = clock.watermark
    # From any place between two positions on, however far back it has to look.
    ends = [0, *sorted(after)]
    start = ends[data.draw(st.integers(0, len(ends) - 1), "start")]
    state = None
    for back in range(ends.index(start), -1, -1):
        walked = walk(ClockState(GLSN(ends[back]), NO_WATERMARK, {}), start, infos, rows, marks, strategy)[0]
        if back == 0 or is_settled(walked):
            state = walked.state
            break
    assert state is not None
    if start:
        assert state.watermark == after[start]
    walked, left = walk(state, glsn - 1, infos, rows, marks, strategy)
    assert walked.state.watermark == (after[glsn - 1] if glsn > 1 else NO_WATERMARK)
    for number, kept in left.items():
        if not kept:
            continue
        firsts, counts = (np.array([row[i] for row in kept], np.int64) for i in (1, 2))
        values = np.array([t for row in kept for t in events[row[1]]], np.int64)
        found, is_none = seen_by(values, firsts, counts, walked.seen[LogStreamId(number)], strategy)
        expected = [seen[row[1] + i] for row in kept for i in range(row[2])]
        assert found.tolist() == expected
        assert is_none.tolist() == [watermark == NO_WATERMARK for watermark in expected]


def walk(
    state: ClockState, end: int, infos: list[StreamInfo], rows: dict[int, Any], marks: list[Mark], strategy: Any
) -> Any:
    heads, left = {}, {}
    for number, one in enumerate(infos):
        upto = [row for row in rows[number] if row[1] <= end]
        heads[one.stream], left[number] = heads_of(upto, state.glsn + 1, strategy)
    known = {
        one.stream: state.streams.get(one.stream) or state_before(one, heads[one.stream], strategy) for one in infos
    }
    start = ClockState(state.glsn, state.watermark, known)
    chosen = [mark for mark in marks if state.glsn < mark.glsn <= end]
    return advance(start, GLSN(end), infos, heads, chosen, strategy), left
