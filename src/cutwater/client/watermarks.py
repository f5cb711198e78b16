"""The watermark of a topic at a position, computed from the log by the rule of ``core.watermark``.

The whole topic up to the position is read once, event times only; what was computed is kept, so the next question about
a later position reads only what lies between.

Two things that the rule speaks of are not stored where a reader could find them: the times of cuts that have no record
of the topic, and what was trimmed. A log stream therefore turns idle, as far as can be told here, at the next record of
the topic; and a topic that was trimmed is read as if it began there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.catalogs import Catalogs, View
from cutwater.client.deadlines import Deadline
from cutwater.client.feeds import Feed, Selection
from cutwater.client.nodes import Nodes
from cutwater.client.records import Layout
from cutwater.core.requests import TopicInfo
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
from cutwater.types import GLSN, BatchKind, EventTime, LogStreamId, TopicId
from cutwater.wire.storage_api import Columns

KEPT_MAX = 64
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Watermarks:
    """``_kept``: the clock of a topic and a strategy, after the last position that was asked for."""

    def __init__(self, catalogs: Catalogs, nodes: Nodes) -> None:
        self._catalogs, self._nodes = catalogs, nodes
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
        added = {snapshot.log_stream_id for snapshot in clock.snapshot().streams}
        if start > glsn:
            return clock.watermark
        stop = GLSN(glsn + 1)
        selection = Selection(topic.name)
        feed = Feed(self._catalogs, self._nodes, selection, self._projection, start, {}, stop, fences=True)
        try:
            feed.begin(view)
            while feed.next_glsn <= glsn:
                deadline.check(f"the log was read up to GLSN {feed.next_glsn} only")
                for run in await _in_time(feed, deadline):
                    if run.first_glsn > glsn:
                        continue
                    self._add_streams(clock, topic, strategy, run, added)
                    if run.last_glsn > glsn:
                        # The clock stays before this batch, for the next question.
                        return self._inside(WatermarkClock.restore(clock.snapshot()), topic, run, glsn)
                    is_data = run.batch.kind is BatchKind.DATA
                    time_max = run.batch.time_max if is_data else None
                    clock.header(run.stream, run.first_glsn, run.batch.count, run.time, time_max, run.batch.declared)
        finally:
            await feed.close()
        return clock.watermark

    def _add_streams(
        self, clock: WatermarkClock, topic: TopicInfo, strategy: Strategy, run: Run, added: set[LogStreamId]
    ) -> None:
        """Those that existed before this run was committed."""
        for info in self._catalogs.view.streams_of(topic.topic):
            if info.stream not in added and info.created_at < run.first_glsn:
                added.add(info.stream)
                clock.add_stream(info.stream, strategy, info.created_time)

    def _inside(self, clock: WatermarkClock, topic: TopicInfo, run: Run, glsn: GLSN) -> int:
        """After some of the records of a batch. What it declares takes effect only at its end."""
        times = self._layout(topic).batch(run, 0, glsn - run.first_glsn + 1).column(0).view(pa.int64()).to_pylist()
        clock.batch(run.stream, run.first_glsn, run.time, [EventTime(time) for time in times])
        return clock.watermark

    def _layout(self, topic: TopicInfo) -> Layout:
        return Layout(self._catalogs.view.schema(topic), ["timestamp"])

    def _projection(self, topic: TopicInfo) -> Mapping[int, Columns]:
        return self._layout(topic).projection


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
