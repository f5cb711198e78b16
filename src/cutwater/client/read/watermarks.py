"""Computes the watermark of a topic at a position from the log, by the rule of ``core.read.watermark``.

A clock is advanced along the headers of the topic's batches, and along the marks of the log's clock, which say how time
went on while the topic was silent. The walk need not begin where the log begins. Storage nodes know how far the event
time of each log stream had come at any position, so a clock can be set up at the end of any cut. Only the watermark
itself is not known there, because it depends on what was idle before. However, it is not above the highest log stream
at that cut; as soon as the clock arrives there, it shows the true watermark. So the walk begins a little before the
position, and further and further back as long as that was not enough. In a topic whose event time advances, the walk
reads about as much as its log streams lie apart, however long the log is.

Computed clocks are kept, so the next question about a later position begins there. Trimmed event times still count.
What was idle before a trim is no longer known, so after a trim the clock begins with the event times and declarations
of its log streams up to then.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct
from msgspec.structs import replace

from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.read.point_reads import PointReads
from cutwater.client.read.records import ColumnLayout
from cutwater.client.subscribe.stream_readers import Feed, Selection
from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.core.read.time_marks import TimeMark
from cutwater.core.read.watermark import (
    NO_WATERMARK,
    BoundedOutOfOrderness,
    Punctuated,
    Strategy,
    StreamSnapshot,
    WatermarkClock,
    WatermarkSnapshot,
    own_watermark,
)
from cutwater.core.requests import ClockMarks, ClockRequest, StreamInfo, TopicInfo
from cutwater.durations import Duration, milliseconds
from cutwater.errors import DeadlineExceeded, NotYetCommitted, Trimmed
from cutwater.protocol.storage_api import EventTimeAnswer
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, MILLISECOND, BatchKind, CutTime, TopicId

KEPT_MAX = 64
SPAN_MIN = 4_096
"""How many positions before the last one of the topic the first walk covers."""
SPAN_GROWTH = 8
"""Factor by which the span grows if it was not enough."""
MARKS_AT_ONCE = 1_024
WAIT_SECONDS_MIN = 0.005
WAIT_SECONDS_MAX = 0.5
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Question(Struct, frozen=True):
    topic: TopicInfo
    strategy: Strategy
    view: CatalogView
    glsn: GLSN
    deadline: Deadline


class Watermarks:
    """Answers questions about watermarks. ``_kept`` holds the clock of a topic and a strategy after the last position
    that was asked for."""

    def __init__(self, catalogs: Catalogs, nodes: Nodes, repository: Repository, reading: PointReads) -> None:
        self._catalogs, self._nodes, self._repository, self._reading = catalogs, nodes, repository, reading
        self._kept: OrderedDict[tuple[TopicId, Strategy], WatermarkSnapshot] = OrderedDict()

    async def at(self, name: str, glsn: GLSN, strategy: Strategy, deadline: Deadline) -> datetime | None:
        view = await self._catalogs.fresh(deadline)
        topic = await self._catalogs.topic(name, deadline)
        if not glsn:
            # Nothing comes before the first position, whatever was trimmed.
            return None
        if glsn < topic.trimmed_before:
            raise Trimmed(glsn, topic.trimmed_before, topic.name)
        if glsn > view.catalog.high_watermark:
            raise NotYetCommitted(f"GLSN {glsn} is not given out yet: the log ends at {view.catalog.high_watermark}")
        question = _Question(topic, strategy, view, glsn, deadline)
        key = (topic.topic, strategy)
        known = self._kept.get(key)
        if known is not None and known.glsn > glsn:
            known = None
        clock, watermark = await self._answer(question, known)
        if clock is not None:
            self._kept[key] = clock.snapshot()
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        return None if watermark == NO_WATERMARK else _EPOCH + timedelta(microseconds=watermark)

    async def _answer(self, question: _Question, known: WatermarkSnapshot | None) -> tuple[WatermarkClock | None, int]:
        """Return the watermark, and a clock that can continue from there."""
        floor = max(known.glsn if known is not None else GLSN(0), GLSN(question.topic.trimmed_before - 1))
        last = await self._last(question, question.glsn)
        span = SPAN_MIN
        while last - span > floor:
            begin = await self._begin(question, last, GLSN(last - span))
            if begin is not None and begin.glsn > floor:
                highest = max((stream.watermark for stream in begin.streams), default=NO_WATERMARK)
                clock = WatermarkClock.restore(begin)
                watermark = await self._walk(clock, question, last)
                if watermark >= highest:
                    # The true watermark where the walk began was not above the highest of all streams there.
                    return (clock if clock.watermark >= highest else None), watermark
            span *= SPAN_GROWTH
        clock = WatermarkClock.restore(await self._earliest(question, known))
        return clock, await self._walk(clock, question, last)

    async def _earliest(self, question: _Question, known: WatermarkSnapshot | None) -> WatermarkSnapshot:
        """Return the clock at the position that was asked for last, or else at the beginning of what is left."""
        if known is None:
            return await self._first(question)
        if known.glsn >= question.topic.trimmed_before - 1:
            return known
        # A trim since then took entries that this clock has not seen. Only what it had come to still holds.
        first = await self._first(question)
        return replace(first, watermark=max(first.watermark, known.watermark))

    async def _last(self, question: _Question, glsn: GLSN) -> GLSN:
        """Return the last position, up to this one, at which an entry of the topic was committed."""
        streams = question.view.streams_of(question.topic.topic)
        asked = [info for info in streams if info.created_at < glsn and info.last_glsn]
        if all(info.last_glsn <= glsn for info in asked):
            return max((info.last_glsn for info in asked), default=GLSN(0))
        found = await self._event_times(asked, glsn, question.deadline)
        return max((min(answer.commit.last_glsn, glsn) for answer in found if answer.commit), default=GLSN(0))

    async def _begin(self, question: _Question, last: GLSN, at: GLSN) -> WatermarkSnapshot | None:
        """Return what is known of all log streams at the end of a cut near this position, without the watermark
        itself."""
        streams = question.view.streams_of(question.topic.topic)
        asked = [info for info in streams if info.created_at < at and info.last_glsn]
        commits = [a.commit for a in await self._event_times(asked, at, question.deadline) if a.commit is not None]
        if not commits:
            return None
        cut = max(commits, key=lambda commit: commit.high_watermark)
        if cut.high_watermark >= last:
            return None
        return (await self._snapshot(question, cut.high_watermark, cut.high_watermark, cut.time))[0]

    async def _first(self, question: _Question) -> WatermarkSnapshot:
        """Return the clock at the beginning of the topic, or of what is left of it: trimmed event times still count."""
        trimmed_before = question.topic.trimmed_before
        if trimmed_before <= 1:
            return WatermarkClock().snapshot()
        at = GLSN(trimmed_before - 1)
        begun, spoke = await self._snapshot(question, at, GLSN(0), CutTime(0))
        clock = WatermarkClock.restore(begun)
        for info in question.view.streams_of(question.topic.topic):
            if info.final and info.final_at < at and clock.knows(info.stream):
                clock.remove_stream(info.stream)
        clock.tick(at, spoke)
        # The trim may have split a batch, and storage nodes still report that batch as a whole.
        return replace(clock.snapshot(), glsn=GLSN(0), time=CutTime(0))

    async def _snapshot(
        self, question: _Question, at: GLSN, glsn: GLSN, time: CutTime
    ) -> tuple[WatermarkSnapshot, CutTime]:
        """Return the event times of all log streams at a position, and the time of the last commit among them."""
        streams = [info for info in question.view.streams_of(question.topic.topic) if info.created_at <= at]
        found = await self._event_times(streams, at, question.deadline)
        known = tuple(
            StreamSnapshot(
                info.stream,
                question.strategy,
                answer.commit.time if answer.commit is not None else info.created_time,
                own_watermark(question.strategy, answer.time_max, answer.declared),
                answer.idle,
            )
            for info, answer in sorted(zip(streams, found, strict=True), key=lambda pair: pair[0].stream)
        )
        spoke = max((answer.commit.time for answer in found if answer.commit is not None), default=CutTime(0))
        return WatermarkSnapshot(glsn, time, NO_WATERMARK, False, known, idle=False), spoke

    async def _event_times(self, streams: Sequence[StreamInfo], at: GLSN, deadline: Deadline) -> list[EventTimeAnswer]:
        return await asyncio.gather(*(self._reading.event_time(info, at, deadline) for info in streams))

    async def _walk(self, clock: WatermarkClock, question: _Question, last: GLSN) -> int:
        """Advance the clock to the last batch that ends at or below the position, and return the watermark after it.
        ``last``: the topic has no entries after it, up to the position."""
        topic, glsn, deadline = question.topic, question.glsn, question.deadline
        start = max(GLSN(clock.glsn + 1), topic.trimmed_before)
        if start > glsn:
            return clock.watermark
        walk = _Walk(clock, self._catalogs, topic, question.strategy)
        if start <= last:
            walk.marks.extend(await marks_between(self._repository, GLSN(start - 1), last, deadline))
            selection, stop = Selection(topic.name), GLSN(last + 1)
            catalogs, nodes = self._catalogs, self._nodes
            feed = Feed(catalogs, nodes, selection, ["timestamp"], question.view, start, stop=stop, fences=True)
            try:
                while feed.next_glsn <= last:
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
        await self._idle_on(walk, clock, GLSN(max(start - 1, last)), glsn, deadline)
        return clock.watermark

    async def _idle_on(self, walk: _Walk, clock: WatermarkClock, after: GLSN, glsn: GLSN, deadline: Deadline) -> None:
        """Advance the time up to the position, while the topic is silent, until all its log streams are idle."""
        while after < glsn:
            answer = await _more_marks(self._repository, ClockRequest(after, MARKS_AT_ONCE), deadline)
            walk.marks.extend(mark for mark in answer.marks if mark.glsn <= glsn)
            after = answer.complete_through
            walk.before(GLSN(min(after, glsn) + 1))
            if clock.is_idle and walk.has_all_streams(glsn):
                return
        walk.before(GLSN(glsn + 1))

    def _inside(self, clock: WatermarkClock, topic: TopicInfo, run: CommittedBatch, glsn: GLSN) -> int:
        """Return the watermark after some of the records of a batch. A declaration takes effect only at the end of its
        batch."""
        layout = ColumnLayout(self._catalogs.view.schema(topic), ["timestamp"])
        times = layout.batch(run, 0, glsn - run.first_glsn + 1).column(0).view(pa.int64()).to_pylist()
        clock.seen(run.stream, run.first_glsn, len(times), run.time, max(times))
        return clock.watermark


class _Walk:
    """Advances a clock along the runs of a topic and the marks between them."""

    def __init__(self, clock: WatermarkClock, catalogs: Catalogs, topic: TopicInfo, strategy: Strategy) -> None:
        self._clock, self._catalogs, self._topic, self._strategy = clock, catalogs, topic, strategy
        self.marks: deque[TimeMark] = deque()
        """The marks that are yet to come, in order."""
        self._added = {known.log_stream_id for known in clock.snapshot().streams}

    def before(self, glsn: GLSN) -> None:
        """Apply all marks below a position, and add all log streams that existed before it."""
        while self.marks and self.marks[0].glsn < glsn:
            mark = self.marks.popleft()
            if mark.glsn > self._clock.glsn:
                self._add_streams(mark.glsn)
                self._clock.tick(mark.glsn, mark.time)
        self._add_streams(glsn)

    def run(self, run: CommittedBatch) -> None:
        batch = run.batch
        time_max = batch.time_max if batch.kind is BatchKind.DATA else None
        place = (run.stream, run.first_glsn, batch.count, run.time)
        self._clock.seen(*place, time_max, batch.declared, idle=batch.idle)

    def has_all_streams(self, glsn: GLSN) -> bool:
        """Return whether no log stream is created between here and the position."""
        streams = self._catalogs.view.streams_of(self._topic.topic)
        return all(
            info.stream in self._added or info.created_at >= glsn or (info.final and info.final_at < glsn)
            for info in streams
        )

    def _add_streams(self, glsn: GLSN) -> None:
        """Add the log streams that exist at this position. One that was sealed permanently before it is removed."""
        for info in self._catalogs.view.streams_of(self._topic.topic):
            exists = info.created_at < glsn and not (info.final and info.final_at < glsn)
            if exists and info.stream not in self._added:
                self._added.add(info.stream)
                self._clock.add_stream(info.stream, self._strategy, info.created_time)
            elif not exists and info.stream in self._added:
                self._added.discard(info.stream)
                self._clock.remove_stream(info.stream)


async def marks_between(repository: Repository, after: GLSN, through: GLSN, deadline: Deadline) -> list[TimeMark]:
    """Return the marks of the log's clock above one position, up to another."""
    found: list[TimeMark] = []
    while after < through:
        answer = await _more_marks(repository, ClockRequest(after), deadline)
        found += answer.marks
        after = answer.complete_through
    return [mark for mark in found if mark.glsn <= through]


async def _more_marks(repository: Repository, request: ClockRequest, deadline: Deadline) -> ClockMarks:
    """Return marks at least up to the next position; wait for that position if the log has not reached it."""
    wait = WAIT_SECONDS_MIN
    while True:
        answer = await repository.ask(request, ClockMarks, timeout_ms=deadline.left_ms())
        if answer.complete_through > request.after:
            return answer
        if deadline.left <= wait:
            raise NotYetCommitted(
                f"GLSN {request.after + 1} is not given out yet, after {deadline.seconds:g} s: the log ends at "
                f"{answer.complete_through}"
            )
        await deadline.pause(wait)
        wait = min(wait * 2, WAIT_SECONDS_MAX)


async def _in_time(feed: Feed, deadline: Deadline) -> list[CommittedBatch]:
    try:
        async with asyncio.timeout_at(deadline.at):
            return await feed.take()
    except TimeoutError:
        raise DeadlineExceeded(f"the log was read up to GLSN {feed.next_glsn} only, {feed.trouble}") from None


def strategy_of(bound: Duration, punctuated: bool, idle_after: Duration) -> Strategy:
    bound_us, idle_after_us = _microseconds(bound, "bound="), _microseconds(idle_after, "idle_after=")
    return Punctuated(idle_after_us) if punctuated else BoundedOutOfOrderness(bound_us, idle_after_us)


def _microseconds(given: Duration, what: str) -> int:
    if isinstance(given, timedelta) and given >= timedelta(0):
        return given // timedelta(microseconds=1)
    return milliseconds(given, what) * MILLISECOND
