"""Finds the clocks of a query or a pipeline at any position, and advances them along headers and marks.

Storage nodes know how far event time had come in each log stream at any position. So a walk begins at a mark of the
log's clock a little before the wanted position, where every source is evaluated. It begins further back as long as the
watermarks still depend on earlier records (``is_settled`` of the clock). Nothing is left before the last beginning.

Topics may be trimmed at different positions, and a walk begins where the first of them begins. If the topic of a log
stream begins later, the log knows what the log stream had said by *that* position, but not what it had said earlier. Up
to that position the log stream counts as silent, and turns idle no earlier than its last entry allows. So the watermark
is never above the true one, and from that position on the log stream has its true state.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec import Struct

from cutwater.client.cluster.catalog_cache import CatalogView
from cutwater.client.read.range_reader import Heads, Ranges
from cutwater.core.read.time_marks import TimeMark
from cutwater.core.read.watermark import RULE
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.pipeline.clocks.clock import KnownStream, LogClock, Sources
from cutwater.pipeline.clocks.rule_one import AnyClock, AnyLogClock, RuleOneLogClock, RuleOneSnapshot
from cutwater.protocol.scan_api import NOTHING
from cutwater.types import GLSN, MILLISECOND

LOOK_BACK = 4_096
LOOK_BACK_FACTOR = 16
_FIRST_GLSN = 1
"""Index of a column of ``Heads``."""


class HeadBatch(Struct, gc=False):
    """A batch of one of the topics, as far as its header tells. Fences and declarations say nothing about event time
    (``most_us``). Records do, even if the header does not know their times."""

    topic: TopicInfo
    info: StreamInfo
    first: int
    count: int
    cut_us: int
    most_us: int | None
    declared_us: int | None
    idle: bool

    @property
    def last(self) -> int:
        return self.first + self.count - 1


class StreamPast(Struct, frozen=True):
    """What a log stream had said before ``first``, where its topic begins."""

    first: GLSN
    said: KnownStream


class LogWalk:
    """Walks through the log as one view of the catalog shows it."""

    def __init__(
        self,
        ranges: Ranges,
        timeout: float,
        view: CatalogView,
        sources: Sources,
        sets: Iterable[frozenset[str]] = (),
        *,
        rule: int = RULE,
        hidden: Collection[str] = (),
        unit_us: int = MILLISECOND,
    ) -> None:
        """``hidden`` are topics whose event time the log does not know. ``unit_us`` is that of ``RuleOneLogClock``."""
        self._ranges, self._timeout, self._sources, self._sets = ranges, timeout, sources, tuple(sets)
        self._rule, self._hidden, self._unit_us = rule, hidden, unit_us
        topics = [view.topics[name] for name in sources]
        self._streams = [(topic, info) for topic in topics for info in view.streams_of(topic.topic)]
        self._begins = [topic.trimmed_before for topic in topics]

    def clock(self, snapshot: AnyClock | None) -> AnyLogClock:
        """Return clocks that go on from a snapshot, or those at the beginning of the log."""
        given = (self._sources, self._sets)
        if snapshot is None:
            return LogClock(*given) if self._rule > 1 else RuleOneLogClock(*given, self._unit_us)
        if isinstance(snapshot, RuleOneSnapshot):
            assert self._rule == 1, "clocks of rule 1 are converted before they go on under another"
            return RuleOneLogClock.restore(*given, snapshot, self._unit_us)
        return LogClock.restore(*given, snapshot)

    # Beginnings.

    def floor(self, glsn: int) -> int:
        """Return the first beginning of a walk to a position. Nothing is left before it."""
        return min([glsn, *(first - 1 for first in self._begins)])

    def begins(self, glsn: int) -> Iterator[int]:
        """Return positions from which the clocks can be advanced to a position, nearest first."""
        floor = self.floor(glsn)
        places = (floor,) if self._hidden else walk_begins(glsn, self._begins, self._rule)
        return (max(floor, min(place, glsn)) for place in places)

    async def begun(self, place: int, glsn: int) -> AnyLogClock | None:
        """Return clocks at a position from ``place`` on that is not inside a batch, with the state of each log stream,
        whether trimmed or not. Returns None if there is no such position up to ``glsn``."""
        if place <= 0:
            return self.clock(None)
        time_us: int | None = None
        if place > self.floor(glsn) and self._rule > 1:
            mark = min(await self.marks(place - 1, glsn), key=attrgetter("glsn"), default=None)
            if mark is None:
                return None
            place, time_us = int(mark.glsn), int(mark.time)
        known, spoke_us = [], 0
        asked = [
            (topic, info, max(GLSN(place + 1), topic.trimmed_before))
            for topic, info in self._streams
            if info.created_at < place and (self._rule > 1 or topic.name not in self._hidden)
        ]
        for (topic, info, first), heads in zip(asked, await self._heads(asked), strict=True):
            firsts = heads.columns[_FIRST_GLSN]
            if firsts and topic.trimmed_before < firsts[0] <= place:
                return await self.begun(firsts[0] - 1, glsn)
            said = self._said(topic, info, heads, place)
            if first > place + 1 and self._rule > 1:
                # What it had said by ``place`` is not known.
                said = KnownStream(said.topic, said.stream, said.last_commit_us, None, None, ended=said.ended)
            else:
                spoke_us = max(spoke_us, heads.before.committed or 0)
            known.append(said)
        if self._rule == 1:
            return RuleOneLogClock.resumed(self._sources, self._sets, place, known, self._unit_us)
        return LogClock.resumed(self._sources, self._sets, place, known, spoke_us if time_us is None else time_us)

    def is_enough(self, begun: AnyLogClock, now: Any, glsn: int) -> bool:
        """Report whether a walk that began like this shows the true clocks at a position. ``now`` are its clocks
        there."""
        return begun.glsn <= self.floor(glsn) or begun.is_settled(now)

    async def pasts(self, after: int, begins: Mapping[str, int]) -> list[StreamPast]:
        """Return what the log streams had said whose topics begin above a position. ``begins`` has the beginnings of
        topics that have been trimmed again since."""
        if self._rule == 1:
            return []
        places = [(topic, info, GLSN(begins.get(topic.name, topic.trimmed_before))) for topic, info in self._streams]
        places = [place for place in places if after < place[2] and place[1].created_at + 1 < place[2]]
        found = await self._heads([(topic, info, max(first, topic.trimmed_before)) for topic, info, first in places])
        return [
            StreamPast(first, self._said(topic, info, heads, first))
            for (topic, info, first), heads in zip(places, found, strict=True)
        ]

    async def _heads(self, places: Iterable[tuple[TopicInfo, StreamInfo, GLSN]]) -> list[Heads]:
        return await asyncio.gather(*(self._ranges.heads(info, glsn, glsn, self._timeout) for _, info, glsn in places))

    def _said(self, topic: TopicInfo, info: StreamInfo, heads: Heads, glsn: int) -> KnownStream:
        """Return what a log stream had said before the first of these heads, as far as the log knows it."""
        before = heads.before
        spoke = info.created_time if before.committed is None else before.committed
        most, declared = (None, None) if topic.name in self._hidden else (before.time_max, before.declared)
        ended = info.final and info.final_at < glsn
        return KnownStream(topic.name, int(info.stream), spoke, most, declared, before.idle, ended)

    # Walking.

    async def marks(self, after: int, through: int) -> list[TimeMark]:
        return await self._ranges.marks(GLSN(after), GLSN(through), self._timeout)

    async def batches(self, firsts: Mapping[str, int], end: int) -> list[HeadBatch]:
        """Return the batches of all topics, each from its first position on, in order. The last one may end after
        ``end``. Of a batch that begins before the first position, the clock already knows the first part."""
        asked = [
            (topic, info, firsts[topic.name])
            for topic, info in self._streams
            if info.created_at < end and firsts[topic.name] <= min(end, info.last_glsn)
        ]
        found = await asyncio.gather(
            *(self._ranges.heads(info, GLSN(first), GLSN(end), self._timeout) for _, info, first in asked)
        )
        batches: list[HeadBatch] = []
        for (topic, info, first), heads in zip(asked, found, strict=True):
            for _, glsn, count, cut, most, declared, idle in zip(*heads.columns, heads.idle, strict=True):
                skipped = max(0, first - glsn)
                most_us = None if most == NOTHING else most
                declared_us = None if declared == NOTHING else declared
                batches.append(
                    HeadBatch(topic, info, glsn + skipped, count - skipped, cut, most_us, declared_us, bool(idle))
                )
        batches.sort(key=attrgetter("first"))
        return batches

    def turns(
        self,
        clock: AnyLogClock,
        batches: Iterable[HeadBatch],
        marks: Iterable[TimeMark],
        pasts: Iterable[StreamPast],
        end: int,
    ) -> Iterator[tuple[HeadBatch, bool]]:
        """Advance a clock up to each batch in turn, and yield the batch, which the caller reports to the clock, and
        whether its last position is a mark."""
        streams = _Streams(clock, self._streams, pasts)
        coming = deque(sorted(marks, key=attrgetter("glsn")))
        for batch in batches:
            while coming and coming[0].glsn < batch.first:
                mark = coming.popleft()
                streams.place(mark.glsn)
                clock.tick(mark.glsn, mark.time)
            streams.place(batch.first)
            is_mark = bool(coming) and coming[0].glsn == batch.last
            if is_mark:
                coming.popleft()
            yield batch, is_mark
        for mark in coming:
            streams.place(mark.glsn)
            clock.tick(mark.glsn, mark.time)
        streams.finish(end)


class _Streams:
    """Tells a clock about log streams that are created, sealed permanently, or recalled where their topic begins."""

    def __init__(
        self, clock: AnyLogClock, streams: Sequence[tuple[TopicInfo, StreamInfo]], pasts: Iterable[StreamPast]
    ) -> None:
        self._clock = clock
        self._pasts = sorted(pasts, key=attrgetter("first"), reverse=True)
        self._spoke = {past.said.stream: past.said.last_commit_us for past in self._pasts}
        self._created = sorted(streams, key=lambda pair: pair[1].created_at, reverse=True)
        self._final = sorted(
            (pair for pair in streams if pair[1].final), key=lambda pair: pair[1].final_at, reverse=True
        )

    def place(self, glsn: int) -> None:
        """Tell the clock what happened before a position. A log stream that was sealed permanently by then no longer
        counts."""
        clock = self._clock
        while self._created and self._created[-1][1].created_at < glsn:
            topic, info = self._created.pop()
            is_over = info.final and info.final_at < glsn
            if not is_over and not clock.knows(topic.name, int(info.stream)):
                spoke = self._spoke.get(int(info.stream), info.created_time)
                clock.add_stream(topic.name, int(info.stream), spoke)
        while self._final and self._final[-1][1].final_at < glsn:
            topic, info = self._final.pop()
            if clock.knows(topic.name, int(info.stream)):
                clock.end_stream(topic.name, int(info.stream))
        while self._pasts and self._pasts[-1].first <= glsn:
            assert isinstance(clock, LogClock), "rule 1 does not wait for trimmed topics"
            clock.recall(self._pasts.pop().said)

    def finish(self, end: int) -> None:
        """End the walk at a position: apply what is known by then, so that the next walk need not look it up."""
        if self._pasts and self._pasts[-1].first <= end + 1:
            self.place(end + 1)


def walk_begins(glsn: int, begins: Sequence[GLSN], rule: int) -> Iterator[GLSN]:
    """Yield the positions from which the clock can be advanced to a position, nearest first. Nothing is left before the
    last one. ``begins`` has the first position of each topic.

    What was said before a trim is known only where the topic begins. So a walk first begins where all topics have
    begun, and if that does not settle the clock, where the first of them begins.
    """
    first, settled = (GLSN(found - 1) for found in (min(begins, default=GLSN(1)), max(begins, default=GLSN(1))))
    nearest = settled if rule > 1 else first
    back = LOOK_BACK
    while glsn - back > nearest:
        yield GLSN(glsn - back)
        back *= LOOK_BACK_FACTOR
    if first < nearest < glsn:
        yield nearest
    yield first
