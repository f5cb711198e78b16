"""Watermarks for whole columns, of one topic or several, against the oracle of rule 2, from every start."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable
from typing import cast

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pyspark.sql.types import StructField, StructType, TimestampType

from cutwater.client.cluster.catalog_cache import CatalogView
from cutwater.client.read.range_reader import Heads, Ranges
from cutwater.core.read.time_marks import TimeMark
from cutwater.core.read.watermark import NO_WATERMARK, RULE, BoundedOutOfOrderness, Punctuated, Strategy
from cutwater.core.requests import Catalog, StreamInfo, TopicInfo
from cutwater.pipeline.clocks import clock
from cutwater.protocol.scan_api import COLUMNS, NOTHING, EventTimeBefore
from cutwater.spark.options import read_options
from cutwater.spark.source import log_walk
from cutwater.spark.source.event_time import seen_by
from cutwater.spark.source.planning import Planner
from cutwater.types import GLSN, LLSN, CutTime, Epoch, EventTime, LogStreamId, Revision, TopicId
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


class LogOfOracle:
    """What a planner asks of the cluster, answered from a log of the oracle."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def heads(self, info: StreamInfo, first: GLSN, end: GLSN, timeout: float) -> Heads:
        return heads_of([e for e in self._log.entries if e.stream == info.stream], first - 1, end)

    async def marks(self, after: GLSN, through: GLSN, timeout: float) -> list[TimeMark]:
        return [TimeMark(GLSN(glsn), CutTime(time)) for glsn, time in self._log.marks if after < glsn <= through]


def view_of(log: Log) -> CatalogView:
    topics = tuple(TopicInfo(TopicId(i), source.name, GLSN(1)) for i, source in enumerate(log.sources, 1))
    streams = tuple(info_of(log, stream) for stream in log.streams)
    return CatalogView(Catalog(Revision(1), GLSN(10**6), CutTime(10**9), topics, streams))


def planner_of(log: Log) -> Planner:
    given = {"servers": "cutwater://localhost:1", "subscribe": ",".join(source.name for source in log.sources)}
    options = replace(read_options(given, streaming=True), strategy=strategy_of(log))
    return Planner(options, cast(Ranges, LogOfOracle(log)), StructType([StructField("watermark", TimestampType())]))


def compare(log: Log, data: st.DataObject) -> None:
    asyncio.run(_compare(log, data))


async def _compare(log: Log, data: st.DataObject) -> None:
    oracle, names = Oracle(log), frozenset(source.name for source in log.sources)
    ends = sorted({entry.last for entry in log.entries} | {glsn for glsn, _ in log.marks})
    if not ends:
        return
    planner, view = planner_of(log), view_of(log)
    start, end = GLSN(data.draw(st.sampled_from([0, *ends]), "start")), GLSN(ends[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_walk, "LOOK_BACK", 10**6)
        state = await planner._clock_at(start, view, RULE)
        # From the nearest mark at which the clock is settled, if there is one, instead of from the beginning.
        patch.setattr(log_walk, "LOOK_BACK", 1)
        patch.setattr(log_walk, "LOOK_BACK_FACTOR", 2)
        near = await planner._clock_at(start, view, RULE)
        assert near.watermark == state.watermark
        assert [s.clock.watermark for s in near.clock.sources] == [s.clock.watermark for s in state.clock.sources]
    if start:
        assert state.watermark == oracle.watermark(names, start)
    expected = dict(oracle.seen(names))
    for begin in (state, near):
        walked = await planner._walked(begin, end, view)
        assert walked.state.watermark == oracle.watermark(names, end)
        for stream in log.streams:
            own = [e for e in log.entries if e.stream == stream.number and e.times and e.first > start]
            if own:
                firsts, counts = np.array([e.first for e in own]), np.array([e.count for e in own])
                times = np.array([time for e in own for time in e.times])
                seen = walked.seen[LogStreamId(stream.number)]
                found, is_none = seen_by(times, firsts, counts, seen, strategy_of(log))
                right = [expected[glsn] for e in own for glsn in range(e.first, e.last + 1)]
                assert found.tolist() == right
                assert is_none.tolist() == [watermark == NO_WATERMARK for watermark in right]


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
    def one_minimum(sources: Iterable[tuple[int, bool]]) -> int:
        return min((watermark for watermark, _ in sources), default=NO_WATERMARK)

    monkeypatch.setattr(clock, "combined", one_minimum)
    first = settings(max_examples=300, deadline=None, phases=[Phase.generate], database=None)
    with pytest.raises(AssertionError):
        first(given(logs(same_strategy=True), st.data())(compare))()
