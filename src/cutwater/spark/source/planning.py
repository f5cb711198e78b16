"""What the planner of a query knows: from where to where, and which task reads what.

An offset is one number n: everything of the query's topics at or below GLSN n has been read (what else it may say is in
``offsets``). It moves when these topics have new records, or when the watermark, if it is among the columns, has moved;
not for what happens to other topics.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from pyspark.sql.types import StructType

from cutwater.client.cluster.catalog_cache import View
from cutwater.client.read.range_reader import Ranges
from cutwater.client.subscribe.stream_readers import Feed
from cutwater.core.read.time_marks import Mark
from cutwater.core.read.watermark import NO_WATERMARK, RULE, RULE_BEFORE
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.errors import CutwaterError, InvalidArgument, NotFound, Refused, Trimmed
from cutwater.protocol.scan_api import POSITIONS_MAX, UNKNOWN
from cutwater.spark.options import Point, ReadOptions
from cutwater.spark.source.event_time import ClockState, Past, Seen, Walked, advance, is_settled, state_before
from cutwater.spark.source.offsets import Offset, began_above, began_of, since_after, start_of
from cutwater.spark.source.read_task import Part, Scan, lost, report_loss
from cutwater.spark.source.schema import arrow_schema, check_schema
from cutwater.types import GLSN, LLSN, BatchKind, CutTime, LogStreamId, TopicId

_log = logging.getLogger(__name__)

WAIT_SECONDS = 0.1
"""How long a query that has nothing to do waits for something new: as long as another source of it may have to wait."""
MARKS_SECONDS = 1.0
"""How often it looks whether time alone has moved the watermark."""
SEARCH_POSITIONS = 64
SPLIT_POSITIONS = 16
"""Per part that a range is cut into: how exactly the parts have the same size."""
TRIMS_MAX = 3
"""How often a range is planned anew because it was trimmed meanwhile."""
LOOK_BACK = 4_096
LOOK_BACK_FACTOR = 16


class Piece(Struct, frozen=True):
    """A range of one log stream, both ends included."""

    topic: TopicInfo
    info: StreamInfo
    first: GLSN
    last: GLSN


class Idle(Struct, frozen=True):
    """Since an offset there has been nothing new: the watermark there, and the clock when it was last looked at."""

    start: GLSN
    watermark: int
    clock: ClockState


class Planner:
    """All of it runs on one event loop. ``schema`` is what Spark expects of the rows."""

    def __init__(self, options: ReadOptions, ranges: Ranges, schema: StructType) -> None:
        self._options, self._ranges, self._schema = options, ranges, schema
        columns = arrow_schema(schema)
        self._scan = Scan(
            options.where,
            columns,
            options.columns is not None,
            options.strategy,
            options.fail_on_data_loss,
            options.skips_malformed,
        )
        self._timeout = options.where.timeout
        self._selection = options.selection()
        self._wants_watermark = "watermark" in columns.names
        self._rule = RULE if self._wants_watermark else None
        self._feed: Feed | None = None
        self._looked_at = -math.inf
        self._clock: ClockState | None = None
        self._idle: Idle | None = None
        self._began: dict[TopicId, GLSN] = {}
        """Where each topic began when the query did, if it began with the earliest: what lies before is not missed."""
        self._read: dict[LogStreamId, LLSN] = {}
        """How far each log stream has been planned to be read."""
        self._lost: dict[str, GLSN] = {}
        self._known: dict[TopicId, str] = {}
        """The topics that were found last."""
        self._deleted: dict[TopicId, str] = {}
        self._missed_at = -math.inf
        self._view: View | None = None

    async def close(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.close()

    async def _fresh(self) -> View:
        view = self._view = await self._ranges.view(self._timeout)
        self._miss_deleted(self._known)
        return view

    def _streams(self, view: View) -> list[tuple[TopicInfo, StreamInfo]]:
        return [(topic, info) for topic in self._selection.topics(view) for info in view.streams_of(topic.topic)]

    # What Spark keeps.

    async def first(self) -> Offset:
        """The offset of a query that has read nothing yet."""
        glsn = await self.start()
        return Offset(glsn, glsn, began_above(self._began, glsn), self._found(), self._rule)

    async def following(self, start: Offset, through: GLSN | None = None, *, limited: bool = True) -> Offset:
        """Where the micro-batch after this offset ends; the same offset if there is nothing new."""
        end = await self.latest(start.glsn, through, limited=limited)
        await self._look_for_deleted(start)
        if end == start.glsn:
            return start
        # An end has what its micro-batch needs to know, because the first one has no other offset to say it.
        return Offset(end, since_after(start), began_above(start.began, start.glsn), self._found(), self._rule)

    async def between(self, start: Offset, end: Offset) -> list[Part]:
        """Who reads what in the micro-batch between two offsets."""
        self._began = began_of(start, end)
        # What was planned under another rule of the watermark is read again under that.
        parts = await self.parts(start_of(start, end), end.glsn, end.rule or RULE_BEFORE)
        self._miss_deleted({**start.topics, **end.topics})
        return parts

    # Topics by number. One that is created again under its name is another one.

    def _found(self) -> dict[TopicId, str]:
        if self._view is not None:
            self._known = {topic.topic: topic.name for topic in self._selection.topics(self._view)}
        return self._known

    async def _look_for_deleted(self, start: Offset) -> None:
        """Also while nothing is new, every now and then. Of topics that are named the feed tells."""
        now = asyncio.get_running_loop().time()
        if self._options.pattern and start.topics and now - self._missed_at >= MARKS_SECONDS:
            self._missed_at = now
            await self._fresh()
        self._miss_deleted(start.topics)

    def _miss_deleted(self, known: Mapping[TopicId, str]) -> None:
        """Nobody can tell any more whether all of a topic that is gone was read. Topics that the query read before, and
        that its options do not name any more, may be deleted."""
        if self._view is None:
            return
        exist = {topic.topic for topic in self._view.topics.values()} | self._deleted.keys()
        gone = {topic: name for topic, name in known.items() if topic not in exist and self._options.selects(name)}
        if not gone:
            return
        names = ", ".join(repr(name) for name in gone.values())
        if self._options.fail_on_data_loss:
            again = {name: topic for topic, name in gone.items() if name in self._view.topics}
            for name, before in again.items():
                raise Refused(
                    f"the topic {name!r} was deleted and created again: it was topic number {before} when this query "
                    f"read it, and is number {self._view.topics[name].topic} now. Records of the old one may be gone "
                    "that this query has not read. To read the new one, start the query with a new checkpoint; or set "
                    "the option failOnDataLoss=false, with which it goes on with the new one and reports it"
                )
            if not self._options.pattern:
                raise NotFound(
                    f"topics that this query reads were deleted: {names}; records may be gone that it has not read. "
                    "Create them again and start the query with a new checkpoint, or with option failOnDataLoss=false"
                )
            raise NotFound(
                f"topics of the pattern {self._options.pattern!r} were deleted: {names}; records may be gone that this "
                "query has not read. With option failOnDataLoss=false it goes on without them and reports it"
            )
        self._deleted |= gone
        # A selection keeps to the topics that it has found by their names.
        self._selection = self._options.selection()
        _log.error("DATA LOSS: topics that this query reads were deleted: %s (failOnDataLoss=false)", names)

    # Where to begin and to end.

    async def start(self) -> GLSN:
        """The offset to begin with."""
        view = await self._fresh()
        if self._options.start.end == "earliest":
            self._began = {topic.topic: topic.trimmed_before for topic in self._selection.topics(view)}
            return GLSN(min(self._began.values(), default=GLSN(1)) - 1)
        return await self._resolve(self._options.start, view)

    async def stop(self) -> GLSN:
        """The offset at which a batch ends."""
        return await self._resolve(self._options.stop, await self._fresh())

    async def _resolve(self, point: Point, view: View) -> GLSN:
        end = view.catalog.high_watermark
        if point.offset is not None:
            if point.offset > end:
                raise InvalidArgument(
                    f"option {point.option!r} lies above the end of the log: the highest GLSN given out is {end}"
                )
            return point.offset
        if point.time is not None:
            streams = [info for _, info in self._streams(view)]
            return GLSN(await self._ranges.find(point.time, streams, view, self._timeout) - 1)
        return end

    def _newest(self, view: View) -> GLSN:
        """The last position that a log stream of the query has."""
        return max((info.last_glsn for _, info in self._streams(view)), default=GLSN(0))

    async def newest(self) -> GLSN:
        return self._newest(await self._fresh())

    async def latest(self, start: GLSN, through: GLSN | None = None, *, limited: bool = True) -> GLSN:
        """Up to where the next micro-batch may go: as far as the log has come, at most to ``through``, and no further
        than the limits say. If there is nothing new, it waits a moment for it."""
        if through is not None and start >= through:
            # What is as new as the offset will do: this is asked again and again.
            if self._view is None or self._view.catalog.high_watermark < start:
                _require_within(start, await self._fresh())
            return start
        view = await self._fresh() if self._feed is None else await self._awaited(self._feed)
        if view is None:
            return await self._moved_by_time(start)
        _require_within(start, view)
        newest = self._newest(view)
        if newest <= start:
            if through is not None:
                return start
            self._feed = self._ranges.feed(self._selection, GLSN(view.catalog.high_watermark + 1), view)
            view = await self._awaited(self._feed)
            if view is None:
                return await self._moved_by_time(start)
            newest = self._newest(view)
        end = max(start, newest if through is None else min(newest, through))
        return await self._limited(start, end, view) if limited else end

    async def _awaited(self, feed: Feed) -> View | None:
        """Wait for a record, or for a declaration, which may move the watermark; None if none came."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not any(run.batch.kind is not BatchKind.FENCE for run in await feed.take()):
                    pass
        except TimeoutError:
            return None
        except CutwaterError:
            # The catalog says better what is wrong, if anything is.
            pass
        await self.close()
        return await self._fresh()

    async def _moved_by_time(self, start: GLSN) -> GLSN:
        """A log stream that has turned idle holds the watermark back no more, at the next mark of the log's clock."""
        now = asyncio.get_running_loop().time()
        if not self._wants_watermark or now - self._looked_at < MARKS_SECONDS:
            return start
        self._looked_at = now
        view = await self._fresh()
        if self._newest(view) > start:
            return start
        idle = self._idle
        if idle is None or idle.start != start:
            here = (await self._walk(start, start, view)).state
            idle = Idle(start, here.watermark, here)
        # From where it looked last, or a long silence would be walked through every second.
        clock = (await self._walked(idle.clock, view.catalog.high_watermark, view)).state
        self._idle = Idle(start, idle.watermark, clock)
        return clock.glsn if clock.watermark > idle.watermark else start

    async def progress(self) -> dict[str, object]:
        """How far the topics go, how many records of them lie before that, and what was lost. Spark shows it before the
        next range is planned, so records that are just about to be read count as well."""
        view = self._view or await self._fresh()
        streams = self._streams(view)
        behind = [info.committed_end - self._read.get(info.stream, LLSN(0)) for _, info in streams]
        told: dict[str, object] = {"glsn": self._newest(view), "recordsBehind": sum(max(0, n) for n in behind)}
        if self._lost:
            told["lostBefore"] = dict(self._lost)
        if self._deleted:
            told["deleted"] = sorted(self._deleted.values())
        return told

    # How much.

    async def _limited(self, start: GLSN, end: GLSN, view: View) -> GLSN:
        rows_max, bytes_max = self._options.rows_max, self._options.bytes_max
        streams = [info for _, info in self._streams(view) if info.last_glsn > start]
        if rows_max is not None:
            end = await self._row_limit(start, end, streams, rows_max)
        if bytes_max is not None:
            fits = await self._search(start, end, streams, lambda _, size: size <= bytes_max)
            if fits < end:
                # At least one record, or the query would stand still.
                end = max(fits, await self._row_limit(start, end, streams, 1))
        return end

    async def _row_limit(self, start: GLSN, end: GLSN, streams: Sequence[StreamInfo], rows_max: int) -> GLSN:
        """Where so many records since ``start`` are reached, or ``end``. So many positions hold no more than that."""
        low = min(end, GLSN(start + rows_max))
        return await self._search(start, end, streams, lambda rows, _: rows <= rows_max, low, rows_max)

    async def _search(
        self,
        start: GLSN,
        end: GLSN,
        streams: Sequence[StreamInfo],
        fits: Callable[[int, int], bool],
        low: GLSN | None = None,
        rows_enough: int | None = None,
    ) -> GLSN:
        """The highest position up to which the records since ``start``, or their bytes, still fit; or one with just
        enough of them. Up to ``low`` they do."""
        low, high = start if low is None else low, GLSN(end + 1)
        while high - low > 1:
            step = max(1, (high - low) // SEARCH_POSITIONS)
            positions = [start, *(GLSN(glsn) for glsn in range(max(low, start + 1), high, step))]
            if high == end + 1 and positions[-1] != end:
                positions.append(end)
            totals = await self._totals(positions, streams)
            for glsn, (rows, size) in zip(positions[1:], totals[1:], strict=True):
                if not fits(rows, size):
                    high = glsn
                    break
                low = glsn
                if rows == rows_enough:
                    return low
            else:
                if low == end:
                    return end
        return low

    async def _totals(self, positions: Sequence[GLSN], streams: Sequence[StreamInfo]) -> list[tuple[int, int]]:
        """Records and bytes since the first of these positions, over all log streams."""
        found = await asyncio.gather(*(self._ranges.measure(info, positions, self._timeout) for info in streams))
        return [
            (
                sum(max(0, answer.llsns[i]) - max(0, answer.llsns[0]) for answer in found),
                sum(answer.bytes[i] - answer.bytes[0] for answer in found),
            )
            for i in range(len(positions))
        ]

    # Who reads what.

    async def parts(self, start: GLSN, end: GLSN, rule: int = RULE) -> list[Part]:
        """One part per log stream with records above ``start`` up to ``end``, or several if there is much of it."""
        if start > end:
            raise InvalidArgument(
                f"the range begins after GLSN {start} and ends before that, at {end}: do the two belong to one "
                "query, and did this version plan its first micro-batch?"
            )
        if start == end:
            return []
        view = self._view
        if view is None or view.catalog.high_watermark < end:
            view = await self._fresh()
        if view.catalog.high_watermark < end:
            raise InvalidArgument(
                f"GLSN {end} lies above the end of the log, {view.catalog.high_watermark}: does this checkpoint belong "
                "to another log?"
            )
        for _ in range(TRIMS_MAX):
            try:
                return await self._parts(start, end, view, rule)
            except Trimmed:
                # Either it is told to fail, or the catalog was older than the trim, and a newer one tells what is left.
                if self._options.fail_on_data_loss:
                    raise
                view = await self._fresh()
        return await self._parts(start, end, view, rule)

    async def _parts(self, start: GLSN, end: GLSN, view: View, rule: int) -> list[Part]:
        found = await asyncio.gather(
            *(self._piece(topic, info, view, start, end) for topic, info in self._streams(view))
        )
        pieces = [piece for piece in found if piece is not None]
        seen: Mapping[LogStreamId, Seen] = {}
        if self._wants_watermark:
            split, walked = await asyncio.gather(self._split(pieces), self._walk(start, end, view, rule))
            self._clock, seen = walked.state if rule == RULE else None, walked.seen
        else:
            split = await self._split(pieces)
        return [
            Part(
                self._scan,
                piece.topic,
                piece.info.stream,
                piece.first,
                piece.last,
                seen[piece.info.stream].between(piece.first, piece.last) if self._wants_watermark else None,
            )
            for piece in split
        ]

    async def _piece(self, topic: TopicInfo, info: StreamInfo, view: View, start: GLSN, end: GLSN) -> Piece | None:
        """What of a log stream lies in the range, as far as the catalog knows: it has nothing above ``last_glsn``."""
        first, last = GLSN(max(start, info.created_at) + 1), min(end, info.last_glsn)
        if first > last:
            return None
        check_schema(self._schema, view.schema(topic), self._options)
        # If the query began with the earliest, nothing is missed that was gone by then.
        first = max(first, self._began.get(topic.topic, first))
        if first < topic.trimmed_before:
            await self.miss(topic, info, first)
            first = topic.trimmed_before
        return Piece(topic, info, first, last) if first <= last else None

    async def miss(self, topic: TopicInfo, info: StreamInfo, first: GLSN) -> None:
        """A topic is trimmed above a position that the query wants next: were there records in between?"""
        positions = (GLSN(first - 1), GLSN(topic.trimmed_before - 1))
        before, gone = (await self._ranges.measure(info, positions, self._timeout)).llsns
        if before == gone != UNKNOWN:
            return
        error = Trimmed(first, topic.trimmed_before)
        if self._options.fail_on_data_loss:
            raise lost(error, topic.name)
        if self._lost.get(topic.name) != topic.trimmed_before:
            self._lost[topic.name] = topic.trimmed_before
            report_loss(error, topic.name)

    async def _split(self, pieces: Sequence[Piece]) -> list[Piece]:
        ends = await asyncio.gather(*(self._measured(piece) for piece in pieces))
        total = sum(ends)
        target = min(self._options.partition_bytes, max(1, total // self._options.partitions_min))
        found = await asyncio.gather(
            *(self._cut(piece, math.ceil(size / target)) for piece, size in zip(pieces, ends, strict=True))
        )
        return [piece for cut in found for piece in cut]

    async def _measured(self, piece: Piece) -> int:
        answer = await self._ranges.measure(piece.info, (GLSN(piece.first - 1), piece.last), self._timeout)
        self._read[piece.info.stream] = answer.llsns[1]
        return answer.bytes[1] - answer.bytes[0]

    async def _cut(self, piece: Piece, count: int) -> list[Piece]:
        """A piece as several with about as many bytes each."""
        if count <= 1 or piece.first == piece.last:
            return [piece]
        steps = min(count * SPLIT_POSITIONS, POSITIONS_MAX - 1, piece.last - piece.first + 1)
        width = piece.last - piece.first + 1
        positions = [GLSN(piece.first - 1 + width * i // steps) for i in range(steps + 1)]
        sizes = (await self._ranges.measure(piece.info, positions, self._timeout)).bytes
        each = (sizes[-1] - sizes[0]) / count
        found, first, due = [], piece.first, sizes[0] + each
        for glsn, size in zip(positions[1:-1], sizes[1:-1], strict=True):
            if size >= due:
                found.append(Piece(piece.topic, piece.info, first, glsn))
                first = GLSN(glsn + 1)
                due = max(due + each, size + each / 2)
        return [*found, Piece(piece.topic, piece.info, first, piece.last)]

    # The watermark.

    async def _walk(self, start: GLSN, end: GLSN, view: View, rule: int = RULE) -> Walked:
        """Lead the clock through a range, from where it is if that is near."""
        clock = self._clock if rule == RULE else None
        if clock is None or clock.glsn > start:
            clock = await self._clock_at(start, view, rule)
        return await self._walked(clock, end, view, rule=rule)

    async def _walked(
        self, clock: ClockState, end: GLSN, view: View, begin: Mark | None = None, rule: int = RULE
    ) -> Walked:
        """``begin``: every source is evaluated where the walk begins."""
        streams = [info for _, info in self._streams(view) if info.created_at < end]
        firsts = {t.topic: max(GLSN(clock.glsn + 1), t.trimmed_before) for t in self._selection.topics(view)}
        marks, heads = await asyncio.gather(
            self._ranges.marks(clock.glsn, end, self._timeout),
            asyncio.gather(*(self._ranges.heads(info, firsts[info.topic], end, self._timeout) for info in streams)),
        )
        known, pasts = dict(clock.streams), {}
        begins = {t.topic: self._began.get(t.topic, t.trimmed_before) for t in self._selection.topics(view)}
        for info, found in zip(streams, heads, strict=True):
            said = state_before(info, found, self._options.strategy)
            if begins[info.topic] > clock.glsn + 1 and rule > 1:
                pasts[info.stream] = Past(begins[info.topic], said)
            elif begins[info.topic] == clock.glsn + 1 and rule > 1:
                # The walk before ended where the topic begins, and could not know what was said by then.
                known[info.stream] = said
            else:
                known.setdefault(info.stream, said)
        clock = ClockState(clock.glsn, clock.watermark, known, clock.sources)
        by_stream = {info.stream: found for info, found in zip(streams, heads, strict=True)}
        all_marks = marks if begin is None else [begin, *marks]
        return advance(clock, end, streams, by_stream, all_marks, self._options.strategy, rule, pasts)

    async def _clock_at(self, glsn: GLSN, view: View, rule: int = RULE) -> ClockState:
        """The clock after a position: looks back as far as it must, to a mark of the log's clock."""
        begins = [topic.trimmed_before for topic in self._selection.topics(view)]
        earliest = min(begins, default=GLSN(1))
        streams = [info for _, info in self._streams(view)]
        for place in walk_begins(glsn, begins, rule):
            mark: Mark | None = None
            if place >= earliest:
                marks = await self._ranges.marks(GLSN(place - 1), glsn, self._timeout)
                mark = min(marks, key=lambda found: found.glsn, default=None)
                if mark is None:
                    continue
            elif place > 0 and rule > 1:
                mark = Mark(place, await self._last_commit(place, view))
            begin = ClockState(place if mark is None else mark.glsn, NO_WATERMARK, {})
            walked = await self._walked(begin, glsn, view, mark, rule)
            if place < earliest or is_settled(walked, streams):
                return walked.state
        raise AssertionError("a walk from the first position that is left is always enough")

    async def _last_commit(self, glsn: GLSN, view: View) -> CutTime:
        """When something was last committed at or before a position, trimmed or not, of the topics that begin by then:
        of the others it is known for a later position only."""
        first = GLSN(glsn + 1)
        streams = [info for t, info in self._streams(view) if info.created_at < glsn and t.trimmed_before <= first]
        found = await asyncio.gather(*(self._ranges.heads(info, first, first, self._timeout) for info in streams))
        return max((heads.before.committed or CutTime(0) for heads in found), default=CutTime(0))


def _require_within(start: GLSN, view: View) -> None:
    end_of_log = view.catalog.high_watermark
    if start > end_of_log:
        raise Refused(
            f"this checkpoint has read up to GLSN {start}, and the log ends at {end_of_log}: it is an old copy of "
            "the log that the checkpoint was made with, and input would be skipped. Go on with the log of before, "
            "or start with a new checkpoint"
        )


def walk_begins(glsn: int, begins: Sequence[GLSN], rule: int) -> Iterator[GLSN]:
    """From where on a clock may be led to a position, the nearest place first; at the last one nothing is left before.
    ``begins``: where each topic does.

    What was said before a trim is known where the topic begins, and not before (see ``Past``). So a walk begins where
    all topics have begun; if that does not settle the clock, with the first of them.
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
