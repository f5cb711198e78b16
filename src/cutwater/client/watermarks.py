"""The watermark of a topic at a position, computed from the log by the rule of ``core.watermark``.

The whole topic up to the position is read once, event times only, together with the marks of the log's clock, which say
how time went on while the topic was silent. What was computed is kept, so the next question about a later position
reads only what lies between. A topic that was trimmed is read as if it began there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.catalogs import Catalogs, View
from cutwater.client.deadlines import Deadline
from cutwater.client.feeds import Feed, Selection
from cutwater.client.nodes import Nodes
from cutwater.client.records import Layout
from cutwater.client.repository import Repository
from cutwater.core.clock import Mark
from cutwater.core.requests import ClockMarks, ClockRequest, TopicInfo
from cutwater.core.subscription import Run
from cutwater.core.watermark import (
    NO_WATERMARK,
    BoundedOutOfOrderness,
    Punctuated,
    Strategy,
    WatermarkClock,
    WatermarkSnapshot,
)
from cutwater.errors import DeadlineExceeded, InvalidArgument, NotYetCommitted, Trimmed
from cutwater.types import GLSN, BatchKind, EventTime, TopicId
from cutwater.wire.storage_api import Columns

KEPT_MAX = 64
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Watermarks:
    """``_kept``: the clock of a topic and a strategy, after the last position that was asked for."""

    def __init__(self, catalogs: Catalogs, nodes: Nodes, repository: Repository) -> None:
        self._catalogs, self._nodes, self._repository = catalogs, nodes, repository
        self._kept: OrderedDict[tuple[TopicId, Strategy], WatermarkSnapshot] = OrderedDict()

    async def at(self, name: str, glsn: GLSN, strategy: Strategy, deadline: Deadline) -> datetime | None:
        view = await self._catalogs.fresh(deadline)
        topic = await self._catalogs.topic(name, deadline)
        if 0 < glsn < topic.trimmed_before:
            raise Trimmed(glsn, topic.trimmed_before)
        if glsn > view.catalog.high_watermark:
            raise NotYetCommitted(f"GLSN {glsn} is not given out yet: the log ends at {view.catalog.high_watermark}")
        known = self._kept.get((topic.topic, strategy))
        if known is None or known.glsn > glsn:
            known = WatermarkClock().snapshot()
        clock = WatermarkClock.restore(known)
        watermark = await self._walk(clock, topic, strategy, view, glsn, deadline)
        self._kept[topic.topic, strategy] = clock.snapshot()
        self._kept.move_to_end((topic.topic, strategy))
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return None if watermark == NO_WATERMARK else _EPOCH + timedelta(microseconds=watermark)

    async def _walk(
        self, clock: WatermarkClock, topic: TopicInfo, strategy: Strategy, view: View, glsn: GLSN, deadline: Deadline
    ) -> int:
        """Lead the clock to the last batch that ends at or below the position, and tell the watermark after it."""
        start = max(GLSN(clock.glsn + 1), topic.trimmed_before)
        if start > glsn:
            return clock.watermark
        marks = await marks_between(self._repository, GLSN(start - 1), glsn, deadline)
        walk = _Walk(clock, self._catalogs, topic, strategy, marks)
        stop = GLSN(glsn + 1)
        selection = Selection(topic.name)
        feed = Feed(self._catalogs, self._nodes, selection, self._projection, start, {}, stop, fences=True)
        try:
            feed.begin(view)
            while feed.next_glsn <= glsn:
                for run in await _in_time(feed, deadline):
                    if run.first_glsn > glsn:
                        continue
                    walk.before(run.first_glsn)
                    if run.last_glsn > glsn:
                        # The clock stays before this batch, for the next question.
                        return self._inside(WatermarkClock.restore(clock.snapshot()), topic, run, glsn)
                    walk.run(run)
        finally:
            await feed.close()
        walk.before(stop)
        return clock.watermark

    def _inside(self, clock: WatermarkClock, topic: TopicInfo, run: Run, glsn: GLSN) -> int:
        """After some of the records of a batch. What it declares takes effect only at its end."""
        times = self._layout(topic).batch(run, 0, glsn - run.first_glsn + 1).column(0).view(pa.int64()).to_pylist()
        clock.batch(run.stream, run.first_glsn, run.time, [EventTime(time) for time in times])
        return clock.watermark

    def _layout(self, topic: TopicInfo) -> Layout:
        return Layout(self._catalogs.view.schema(topic), ["timestamp"])

    def _projection(self, topic: TopicInfo) -> Mapping[int, Columns]:
        return self._layout(topic).projection


class _Walk:
    """Leads a clock along the runs of a topic and the marks between them."""

    def __init__(
        self, clock: WatermarkClock, catalogs: Catalogs, topic: TopicInfo, strategy: Strategy, marks: list[Mark]
    ) -> None:
        self._clock, self._catalogs, self._topic, self._strategy = clock, catalogs, topic, strategy
        self._marks = deque(marks)
        self._added = {known.log_stream_id for known in clock.snapshot().streams}

    def before(self, glsn: GLSN) -> None:
        """All marks below a position, and all log streams that existed before it."""
        while self._marks and self._marks[0].glsn < glsn:
            mark = self._marks.popleft()
            if mark.glsn > self._clock.glsn:
                self._add_streams(mark.glsn)
                self._clock.tick(mark.glsn, mark.time)
        self._add_streams(glsn)

    def run(self, run: Run) -> None:
        batch = run.batch
        time_max = batch.time_max if batch.kind is BatchKind.DATA else None
        self._clock.header(run.stream, run.first_glsn, batch.count, run.time, time_max, batch.declared)

    def _add_streams(self, glsn: GLSN) -> None:
        """Those that exist at this position. One that was sealed for good before it counts no more."""
        for info in self._catalogs.view.streams_of(self._topic.topic):
            exists = info.created_at < glsn and not (info.final and info.final_at < glsn)
            if exists and info.stream not in self._added:
                self._added.add(info.stream)
                self._clock.add_stream(info.stream, self._strategy, info.created_time)
            elif not exists and info.stream in self._added:
                self._added.discard(info.stream)
                self._clock.remove_stream(info.stream)


async def marks_between(repository: Repository, after: GLSN, through: GLSN, deadline: Deadline) -> list[Mark]:
    """The marks of the log's clock above one position, up to another."""
    found: list[Mark] = []
    while after < through:
        answer = await repository.ask(ClockRequest(after), ClockMarks, timeout_ms=deadline.left_ms())
        found += answer.marks
        after = answer.complete_through
    return [mark for mark in found if mark.glsn <= through]


async def _in_time(feed: Feed, deadline: Deadline) -> list[Run]:
    try:
        async with asyncio.timeout_at(deadline.at):
            return await feed.take()
    except TimeoutError:
        raise DeadlineExceeded(f"the log was read up to GLSN {feed.next_glsn} only, {feed.trouble}") from None


def strategy_of(bound: timedelta, punctuated: bool, idle_after: timedelta) -> Strategy:
    if bound < timedelta(0) or idle_after < timedelta(0):
        raise InvalidArgument("neither bound= nor idle_after= may be negative")
    idle_after_us = idle_after // timedelta(microseconds=1)
    if punctuated:
        return Punctuated(idle_after_us)
    return BoundedOutOfOrderness(bound // timedelta(microseconds=1), idle_after_us)
