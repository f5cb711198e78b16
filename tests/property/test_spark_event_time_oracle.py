"""Watermarks for whole columns, of one topic or several, against the oracle of rule 2, from every start."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cutwater.client.read.range_reader import Heads
from cutwater.core.read.time_marks import TimeMark
from cutwater.core.read.watermark import NO_WATERMARK, BoundedOutOfOrderness, Punctuated, Strategy
from cutwater.core.requests import StreamInfo
from cutwater.protocol.scan_api import COLUMNS, NOTHING, EventTimeBefore
from cutwater.spark.source import event_time
from cutwater.spark.source.event_time import ClockState, Walked, advance, is_settled, seen_by, state_before
from cutwater.types import GLSN, LLSN, CutTime, Epoch, EventTime, LogStreamId, TopicId
from tests.property.watermark_oracle import Entry, Log, Oracle, Source, Stream, logs

EXAMPLES = settings(max_examples=120, deadline=None)


def info_of(log: Log, stream: Stream) -> StreamInfo:
    topic = 1 + [source.name for source in log.sources].index(stream.source)
    is_final = stream.final_at is not None
    return StreamInfo(
        LogStreamId(stream.number), TopicId(topic), Epoch(1), not is_final, is_final, (), (), LLSN(0), GLSN(10**6),
        GLSN(stream.created_at), CutTime(stream.created), GLSN(stream.final_at or 0),
    )  # fmt: skip


def heads_of(own: list[Entry], after: int, end: int) -> Heads:
    """What a storage node tells of a stream's batches above a position, and of what lay before."""
    before, left = [e for e in own if e.last <= after], [e for e in own if after < e.last and e.first <= end]
    times = [time for entry in before for time in entry.times]
    declared = [entry.declared for entry in before if entry.declared is not None]
    known = EventTimeBefore(
        EventTime(max(times)) if times else None,
        EventTime(max(declared)) if declared else None,
        CutTime(before[-1].cut) if before else None,
        bool(before) and before[-1].idle,
    )
    rows = [
        (e.first, e.first, e.count, e.cut, max(e.times, default=NOTHING), NOTHING if e.declared is None else e.declared)
        for e in left
    ]
    columns = tuple(array("q", [row[i] for row in rows]) for i in range(len(COLUMNS)))
    return Heads(known, columns, array("q", [entry.idle for entry in left]))


def strategy_of(log: Log) -> Strategy:
    bound, idle_after = log.sources[0].bound, log.sources[0].idle_after
    return Punctuated(idle_after) if bound is None else BoundedOutOfOrderness(bound, idle_after)


def walk(log: Log, state: ClockState, end: int, begin: TimeMark | None = None) -> Walked:
    """As the planner of a query does."""
    infos = [info_of(log, stream) for stream in log.streams if stream.created_at < end]
    heads = {
        info.stream: heads_of([e for e in log.entries if e.stream == info.stream], state.glsn, end) for info in infos
    }
    known = {
        info.stream: state.streams.get(info.stream) or state_before(info, heads[info.stream], strategy_of(log))
        for info in infos
    }
    start = ClockState(state.glsn, state.watermark, known, state.sources)
    marks = [TimeMark(GLSN(glsn), CutTime(time)) for glsn, time in log.marks if state.glsn < glsn <= end]
    return advance(start, GLSN(end), infos, heads, [begin, *marks] if begin else marks, strategy_of(log))


def compare(log: Log, data: st.DataObject) -> None:
    oracle, names = Oracle(log), frozenset(source.name for source in log.sources)
    ends = sorted({entry.last for entry in log.entries} | {glsn for glsn, _ in log.marks})
    if not ends:
        return
    infos = [info_of(log, stream) for stream in log.streams]
    fresh = ClockState(GLSN(0), NO_WATERMARK, {})
    start = data.draw(st.sampled_from([0, *ends]), "start")
    state = walk(log, fresh, start).state if start else fresh
    # From the nearest mark at which the clock is settled, if there is one, instead of from the beginning.
    for glsn, time in reversed([mark for mark in log.marks if mark[0] <= start]):
        mark = TimeMark(GLSN(glsn), CutTime(time))
        found = walk(log, ClockState(mark.glsn, NO_WATERMARK, {}), start, mark)
        if is_settled(found, infos):
            assert found.state == state
            break
    if start:
        assert state.watermark == oracle.watermark(names, start)
    walked = walk(log, state, ends[-1])
    assert walked.state.watermark == oracle.watermark(names, ends[-1])
    expected = dict(oracle.seen(names))
    for stream in log.streams:
        own = [e for e in log.entries if e.stream == stream.number and e.times and e.first > start]
        if own:
            firsts, counts = np.array([e.first for e in own]), np.array([e.count for e in own])
            times = np.array([time for e in own for time in e.times])
            found, is_none = seen_by(times, firsts, counts, walked.seen[LogStreamId(stream.number)], strategy_of(log))
            seen = [expected[glsn] for e in own for glsn in range(e.first, e.last + 1)]
            assert found.tolist() == seen
            assert is_none.tolist() == [watermark == NO_WATERMARK for watermark in seen]


@EXAMPLES
@given(logs(same_strategy=True), st.data())
def test_every_record_sees_the_watermark_of_the_oracle(log: Log, data: st.DataObject) -> None:
    compare(log, data)


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_a_topic_whose_new_stream_is_gone_again_holds_nothing_back(data: st.DataObject) -> None:
    """Topic b is idle but for a stream that comes and goes; in a, a stream returns far behind its topic."""
    log = Log(
        (Source("a", 0, 1_000), Source("b", 0, 1_000)),
        (Stream("a", 1, 0, 100), Stream("a", 2, 0, 100), Stream("b", 3, 0, 100), Stream("b", 4, 4, 110, final_at=6)),
        (
            Entry("a", 1, 1, 100, (50_000,)),
            Entry("a", 2, 2, 100, (20_000,), idle=True),
            Entry("b", 3, 3, 101, (10_000,), idle=True),
            Entry("a", 1, 5, 111, (90_000,)),
            Entry("a", 2, 7, 113, (1, 2, 3)),
        ),
        (),
    )
    compare(log, data)


def test_the_oracle_finds_an_idle_topic_that_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_minimum(topics: dict[TopicId, event_time._Topic], size: int) -> event_time.Numbers:
        return np.min([np.full(size, 2**62), *(found.watermark for found in topics.values())], axis=0)

    monkeypatch.setattr(event_time, "_combined", one_minimum)
    first = settings(max_examples=300, deadline=None, phases=[Phase.generate], database=None)
    with pytest.raises(AssertionError):
        first(given(logs(same_strategy=True), st.data())(compare))()
