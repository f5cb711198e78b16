"""Plans a query: the range of each micro-batch, and the part that each task reads.

An offset is one number n: everything of the query's topics at or below GLSN n has been read. (Module ``offsets``
describes its other fields.) It moves when these topics have new records, or when the watermark has moved and is among
the columns. Other topics do not move it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace
from pyspark.sql.types import StructType

from cutwater.client.cluster.catalog_cache import CatalogView
from cutwater.client.read.range_reader import Ranges
from cutwater.client.subscribe.stream_readers import Feed
from cutwater.core.read.watermark import RULE, RULE_BEFORE
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.errors import CutwaterError, InvalidArgument, NotFound, Refused, Trimmed
from cutwater.pipeline.clocks.rule_one import AnyClock, RuleOneSnapshot
from cutwater.protocol.scan_api import POSITIONS_MAX, UNKNOWN
from cutwater.spark.options import LogPoint, ReadOptions
from cutwater.spark.source.event_time import SeenWatermarks, between, seen_watermarks
from cutwater.spark.source.log_walk import LogWalk
from cutwater.spark.source.offsets import SourceOffset, began_above, begin_of
from cutwater.spark.source.read_task import ReadPartition, Scan, lost, report_loss
from cutwater.spark.source.schema import arrow_schema, check_schema
from cutwater.types import GLSN, LLSN, BatchKind, LogStreamId, TopicId

_log = logging.getLogger(__name__)

WAIT_SECONDS = 0.1
"""How long a query with nothing to do waits for new records. Another source of the query may have to wait this long."""
MARKS_SECONDS = 1.0
"""How often the planner checks whether time alone has moved the watermark."""
SEARCH_POSITIONS = 64
SPLIT_POSITIONS = 16
"""Positions to measure per part that a range is cut into. More positions make the sizes of the parts more equal."""
TURN_BATCHES = 2_000
"""Batches that a walk takes in before other work of the event loop has its turn."""
TRIMS_MAX = 3
"""How often a range is planned again because it was trimmed meanwhile."""


class Piece(Struct, frozen=True):
    """A range of one log stream, including both ends."""

    topic: TopicInfo
    info: StreamInfo
    first: GLSN
    last: GLSN


class ClockState(Struct, frozen=True):
    """The clock after position ``glsn``, and the numbers of the topics that it was made of."""

    glsn: GLSN
    clock: AnyClock
    topics: dict[str, TopicId]

    @property
    def watermark(self) -> int:
        return self.clock.operators[0].watermark

    def of_topics(self, topics: Mapping[str, TopicId]) -> AnyClock:
        """Return the clock of other topics that goes on with this one. A topic that was created again begins anew."""
        if isinstance(self.clock, RuleOneSnapshot) or topics == self.topics:
            return self.clock
        kept = tuple(own for own in self.clock.sources if topics.get(own.topic) == self.topics[own.topic])
        operator = replace(self.clock.operators[0], topics=tuple(sorted(topics)))
        return replace(self.clock, sources=kept, operators=(operator,))


class Walked(Struct, frozen=True):
    """Result of a walk. ``state`` is the clock after the last batch that ends at or below the requested position, and
    after all marks up to there. ``seen`` covers one more batch if that one begins by then."""

    state: ClockState
    seen: dict[LogStreamId, SeenWatermarks]


class Planner:
    """Plans the micro-batches of one query, on one event loop. ``schema`` is the schema of rows that Spark expects."""

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
        self._idle: tuple[GLSN, int, ClockState] | None = None
        """While nothing new follows an offset: the offset, the watermark there, and the clock at the last check."""
        self._began: dict[TopicId, GLSN] = {}
        """The first position of each topic when the query began, if it began with the earliest record. Records before
        it do not count as lost."""
        self._read: dict[LogStreamId, LLSN] = {}
        """How far each log stream is planned to be read."""
        self._lost: dict[str, GLSN] = {}
        self._known: dict[TopicId, str] = {}
        """The topics found by the last look at the catalog."""
        self._deleted: dict[TopicId, str] = {}
        self._missed_at = -math.inf
        self._view: CatalogView | None = None

    async def close(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.close()

    async def _fresh(self) -> CatalogView:
        view = self._view = await self._ranges.view(self._timeout)
        self._miss_deleted(self._known)
        return view

    def _streams(self, view: CatalogView) -> list[tuple[TopicInfo, StreamInfo]]:
        return [(topic, info) for topic in self._selection.topics(view) for info in view.streams_of(topic.topic)]

    # Offsets, as Spark stores them.

    async def first(self) -> SourceOffset:
        """Return the offset of a query that has read nothing yet."""
        glsn = await self.start()
        return SourceOffset(glsn, glsn, began_above(self._began, glsn), self._found(), self._rule)

    async def following(
        self, start: SourceOffset, through: GLSN | None = None, *, limited: bool = True
    ) -> SourceOffset:
        """Return the end of the micro-batch after this offset, or the same offset if there is nothing new."""
        end = await self.latest(start.glsn, through, limited=limited)
        await self._look_for_deleted(start)
        if end == start.glsn:
            return start
        # The end stores what its micro-batch needs to know, because no other offset stores it for the first one.
        since = start.glsn if start.is_first else None
        return SourceOffset(end, since, began_above(start.began, start.glsn), self._found(), self._rule)

    async def between(self, start: SourceOffset, end: SourceOffset) -> list[ReadPartition]:
        """Return the parts that the tasks read in the micro-batch between two offsets."""
        begin, self._began = begin_of(start, end)
        # A micro-batch that was planned under another watermark rule is read again under that rule.
        parts = await self.parts(begin, end.glsn, end.rule or RULE_BEFORE)
        self._miss_deleted({**start.topics, **end.topics})
        return parts

    # Topics by number. A topic that is created again under its name has another number.

    def _found(self) -> dict[TopicId, str]:
        if self._view is not None:
            self._known = {topic.topic: topic.name for topic in self._selection.topics(self._view)}
        return self._known

    async def _look_for_deleted(self, start: SourceOffset) -> None:
        """Look for deleted topics from time to time, also while nothing is new. The feed reports deleted topics that
        the options name."""
        now = asyncio.get_running_loop().time()
        if self._options.pattern and start.topics and now - self._missed_at >= MARKS_SECONDS:
            self._missed_at = now
            await self._fresh()
        self._miss_deleted(start.topics)

    def _miss_deleted(self, known: Mapping[TopicId, str]) -> None:
        """Report topics that are gone, because records of them may not have been read. Topics that the query read
        before and that its options no longer select may be deleted."""
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
        # A selection keeps the topics that it has found by their names.
        self._selection = self._options.selection()
        _log.error("DATA LOSS: topics that this query reads were deleted: %s (failOnDataLoss=false)", names)

    # Beginning and end.

    async def start(self) -> GLSN:
        """Return the offset to begin with."""
        view = await self._fresh()
        if self._options.start.end == "earliest":
            self._began = {topic.topic: topic.trimmed_before for topic in self._selection.topics(view)}
            return GLSN(min(self._began.values(), default=GLSN(1)) - 1)
        return await self._resolve(self._options.start, view)

    async def stop(self) -> GLSN:
        """Return the offset at which a batch ends."""
        return await self._resolve(self._options.stop, await self._fresh())

    async def _resolve(self, point: LogPoint, view: CatalogView) -> GLSN:
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

    def _newest(self, view: CatalogView) -> GLSN:
        """Return the last position of any log stream of the query."""
        return max((info.last_glsn for _, info in self._streams(view)), default=GLSN(0))

    async def newest(self) -> GLSN:
        return self._newest(await self._fresh())

    async def latest(self, start: GLSN, through: GLSN | None = None, *, limited: bool = True) -> GLSN:
        """Return the end of the next micro-batch: the end of the log, at most ``through``, and within the limits. If
        there is nothing new, wait a moment for it."""
        if through is not None and start >= through:
            # A view as new as the offset is enough: Spark asks this again and again.
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

    async def _awaited(self, feed: Feed) -> CatalogView | None:
        """Wait for a record, or for a declaration, which may move the watermark. Returns None if none came."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not any(run.batch.kind is not BatchKind.FENCE for run in await feed.take()):
                    pass
        except TimeoutError:
            return None
        except CutwaterError:
            # The catalog gives the better error, if anything is wrong.
            pass
        await self.close()
        return await self._fresh()

    async def _moved_by_time(self, start: GLSN) -> GLSN:
        """Return the position to which time alone has moved the watermark, or ``start``. At the next mark of the log's
        clock, a log stream that has turned idle no longer holds the watermark back."""
        now = asyncio.get_running_loop().time()
        if not self._wants_watermark or now - self._looked_at < MARKS_SECONDS:
            return start
        self._looked_at = now
        view = await self._fresh()
        if self._newest(view) > start:
            return start
        if self._idle is None or self._idle[0] != start:
            here = (await self._walk(start, start, view)).state
            self._idle = (start, here.watermark, here)
        _, before, clock = self._idle
        # Walk from the last check on; otherwise every second would walk through the whole of a long silence.
        clock = (await self._walked(clock, view.catalog.high_watermark, view)).state
        self._idle = (start, before, clock)
        return clock.glsn if clock.watermark > before else start

    async def progress(self) -> dict[str, object]:
        """Return the end of the topics, the number of unread records before it, and what was lost. Spark shows this
        before it plans the next range, so records that are about to be read count as unread."""
        view = self._view or await self._fresh()
        streams = self._streams(view)
        behind = [info.committed_end - self._read.get(info.stream, LLSN(0)) for _, info in streams]
        told: dict[str, object] = {"glsn": self._newest(view), "recordsBehind": sum(max(0, n) for n in behind)}
        if self._lost:
            told["lostBefore"] = dict(self._lost)
        if self._deleted:
            told["deleted"] = sorted(self._deleted.values())
        return told

    # Limits.

    async def _limited(self, start: GLSN, end: GLSN, view: CatalogView) -> GLSN:
        rows_max, bytes_max = self._options.rows_max, self._options.bytes_max
        streams = [info for _, info in self._streams(view) if info.last_glsn > start]
        if rows_max is not None:
            end = await self._row_limit(start, end, streams, rows_max)
        if bytes_max is not None:
            fits = await self._search(start, end, streams, lambda _, size: size <= bytes_max)
            if fits < end:
                # At least one record must fit; otherwise the query would stand still.
                end = max(fits, await self._row_limit(start, end, streams, 1))
        return end

    async def _row_limit(self, start: GLSN, end: GLSN, streams: Sequence[StreamInfo], rows_max: int) -> GLSN:
        """Return the position at which ``rows_max`` records since ``start`` are reached, or ``end``. The next
        ``rows_max`` positions hold at most ``rows_max`` records."""
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
        """Return the highest position up to which the records since ``start``, or their bytes, fit, or a position with
        exactly ``rows_enough`` records. They are known to fit up to ``low``."""
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
        """Return the records and bytes since the first of these positions, over all log streams."""
        found = await asyncio.gather(*(self._ranges.measure(info, positions, self._timeout) for info in streams))
        return [
            (
                sum(max(0, answer.llsns[i]) - max(0, answer.llsns[0]) for answer in found),
                sum(answer.bytes[i] - answer.bytes[0] for answer in found),
            )
            for i in range(len(positions))
        ]

    # Parts, which the tasks read.

    async def parts(self, start: GLSN, end: GLSN, rule: int = RULE) -> list[ReadPartition]:
        """Return one part per log stream with records above ``start`` up to ``end``, or several parts if there are many
        bytes."""
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
                # Either the query must fail, or the catalog was older than the trim and a newer one shows what is left.
                if self._options.fail_on_data_loss:
                    raise
                view = await self._fresh()
        return await self._parts(start, end, view, rule)

    async def _parts(self, start: GLSN, end: GLSN, view: CatalogView, rule: int) -> list[ReadPartition]:
        found = await asyncio.gather(
            *(self._piece(topic, info, view, start, end) for topic, info in self._streams(view))
        )
        pieces = [piece for piece in found if piece is not None]
        seen: Mapping[LogStreamId, SeenWatermarks] = {}
        if self._wants_watermark:
            split, walked = await asyncio.gather(self._split(pieces), self._walk(start, end, view, rule))
            self._clock, seen = walked.state if rule == RULE else None, walked.seen
        else:
            split = await self._split(pieces)
        return [
            ReadPartition(
                self._scan,
                piece.topic,
                piece.info.stream,
                piece.first,
                piece.last,
                between(seen[piece.info.stream], piece.first, piece.last) if self._wants_watermark else None,
            )
            for piece in split
        ]

    async def _piece(
        self, topic: TopicInfo, info: StreamInfo, view: CatalogView, start: GLSN, end: GLSN
    ) -> Piece | None:
        """Return the part of a log stream that lies in the range, as far as the catalog knows. The log stream has
        nothing above ``last_glsn``."""
        first, last = GLSN(max(start, info.created_at) + 1), min(end, info.last_glsn)
        if first > last:
            return None
        check_schema(self._schema, view.schema(topic), self._options)
        # If the query began with the earliest record, records that were gone by then do not count as lost.
        first = max(first, self._began.get(topic.topic, first))
        if first < topic.trimmed_before:
            await self.miss(topic, info, first)
            first = topic.trimmed_before
        return Piece(topic, info, first, last) if first <= last else None

    async def miss(self, topic: TopicInfo, info: StreamInfo, first: GLSN) -> None:
        """Report a loss if a topic is trimmed above the next position of the query and there were records in
        between."""
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
        """Cut a piece into several with about the same number of bytes."""
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

    async def _walk(self, start: GLSN, end: GLSN, view: CatalogView, rule: int = RULE) -> Walked:
        """Advance the clock through a range, from where it stands if that is not after the start."""
        clock = self._clock if rule == RULE else None
        if clock is None or clock.glsn > start:
            clock = await self._clock_at(start, view, rule)
        return await self._walked(clock, end, view, rule)

    async def _clock_at(self, glsn: GLSN, view: CatalogView, rule: int) -> ClockState:
        """Return the clock after a position. Looks back as far as necessary, to a mark of the log's clock."""
        walk = self._log_walk(view, rule)
        for place in walk.begins(glsn):
            begun = await walk.begun(place, glsn)
            if begun is not None:
                clock = ClockState(GLSN(begun.glsn), begun.snapshot(), self._numbers(view))
                now = (await self._walked(clock, glsn, view, rule)).state
                if walk.is_enough(begun, now.clock, glsn):
                    return now
        raise AssertionError("a walk from the first position that is left is always enough")

    async def _walked(self, start: ClockState, end: GLSN, view: CatalogView, rule: int = RULE) -> Walked:
        """Walk from a clock to ``end``."""
        walk, numbers = self._log_walk(view, rule), self._numbers(view)
        topics = {name: view.topics[name] for name in numbers}
        firsts = {name: max(GLSN(start.glsn + 1), topic.trimmed_before) for name, topic in topics.items()}
        begins = {name: self._began.get(topic.topic, topic.trimmed_before) for name, topic in topics.items()}
        marks, batches, pasts = await asyncio.gather(
            walk.marks(start.glsn, end), walk.batches(firsts, end), walk.pasts(start.glsn, begins)
        )
        clock = walk.clock(start.of_topics(numbers))
        seen: defaultdict[LogStreamId, list[tuple[int, int, int, int, int]]] = defaultdict(list)
        snapshot: AnyClock | None = None
        glsn = start.glsn
        for number, (batch, is_mark) in enumerate(walk.turns(clock, batches, marks, pasts, end)):
            if not number % TURN_BATCHES:
                # Other calls of this event loop have deadlines.
                await asyncio.sleep(0)
            if batch.last > end:
                # The clock stays before a batch of which a part is left.
                glsn, snapshot = GLSN(max(start.glsn, clock.glsn)), clock.snapshot()
            before = clock.watermark_us
            first, stream = batch.first, batch.info.stream
            (found,) = clock.seen(
                batch.topic.name, stream, first, batch.count, batch.cut_us, batch.most_us, batch.declared_us,
                idle=batch.idle, is_mark=is_mark,
            ).values()  # fmt: skip
            seen[stream].append((first, before, *found))
        if snapshot is None:
            glsn, snapshot = GLSN(max(start.glsn, clock.glsn)), clock.snapshot()
        state = ClockState(glsn, snapshot, numbers)
        return Walked(state, {info.stream: seen_watermarks(seen[info.stream]) for _, info in self._streams(view)})

    def _log_walk(self, view: CatalogView, rule: int) -> LogWalk:
        sources = dict.fromkeys(self._numbers(view), self._options.strategy)
        return LogWalk(self._ranges, self._timeout, view, sources, rule=rule, unit_us=1)

    def _numbers(self, view: CatalogView) -> dict[str, TopicId]:
        return {topic.name: topic.topic for topic in self._selection.topics(view)}


def _require_within(start: GLSN, view: CatalogView) -> None:
    end_of_log = view.catalog.high_watermark
    if start > end_of_log:
        raise Refused(
            f"this checkpoint has read up to GLSN {start}, and the log ends at {end_of_log}: it is an old copy of "
            "the log that the checkpoint was made with, and input would be skipped. Go on with the original log, "
            "or start with a new checkpoint"
        )
