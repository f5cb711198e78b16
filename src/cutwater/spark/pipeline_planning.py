"""What the planner of a pipeline knows: which range of the log comes next, and where the clocks rise in it.

An offset is a position, and the state of the pipeline's clocks there. Spark keeps it in the checkpoint, so a restart
goes on with exactly the clocks that it had. The planner walks the headers of all batches of a range in the order of
their positions. Where the watermark rises *inside* a batch is left to the tasks, which see the records anyway: for each
batch they get the three numbers that it takes (``Seen``). Only where a function of the user says what a record means
for event time does the planner read the records themselves.

A range ends inside a batch only where the run shall end there, so a micro-batch may have a few records more or less
than its limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from pyspark.sql.types import LongType, StructField, StructType

from cutwater.client.catalogs import View
from cutwater.client.ranges import Heads
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.core.watermark import Punctuated, Strategy
from cutwater.durations import shown
from cutwater.errors import InvalidArgument, Refused, Trimmed
from cutwater.pipeline.clock import ClockSnapshot, KnownStream, LogClock, is_settled
from cutwater.pipeline.graph import SourceNode
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.steps import Ticks
from cutwater.spark.event_time import FIRST_GLSN
from cutwater.spark.links import link_to
from cutwater.spark.options import Where, read_options
from cutwater.spark.pipeline_program import Program
from cutwater.spark.pipeline_records import SourceRows, run_function
from cutwater.spark.planning import LOOK_BACK, LOOK_BACK_FACTOR, MARKS_SECONDS, Planner
from cutwater.spark.tasks import Part, read_part
from cutwater.types import GLSN, MILLISECOND, LogStreamId
from cutwater.wire.scan_api import NOTHING

PART_RECORDS_MIN = 5_000
"""A task reads at least so many, unless there are fewer."""
BYTES_MAX = 256 << 20
"""A micro-batch has at most so many bytes of the log, or one batch: all of it is in memory, in several forms."""
WALK_POSITIONS = 200_000
"""How much is walked at a time where clocks come to the beginning of a run."""


class Range(Struct, frozen=True):
    """Records of one log stream for one task: whole batches, and what was seen before each of them, by clock."""

    topic: str
    stream: int
    first: GLSN
    last: GLSN
    seen: dict[tuple[str, ...], list[tuple[int, int, int, int]]]
    """First GLSN of the batch; watermark before it, least of the others, its own stream's."""


class Walk(Struct, frozen=True):
    """A range (start, end] of the log, walked."""

    start: GLSN
    end: GLSN
    clock: ClockSnapshot
    ticks: Ticks
    ranges: list[Range]


class Offset(Struct, frozen=True, omit_defaults=True):
    """Everything at or below ``glsn`` is done. ``slices``: how many state is cut into. ``is_new``: nothing was done, so
    what was trimmed before is not missed. ``ended``: the input ended there. ``since``, of the first micro-batch's end:
    where that begins, as in ``offsets``.
    """

    glsn: int
    slices: int
    clock: ClockSnapshot | None = None
    is_new: bool = False
    ended: bool = False
    since: int | None = None

    def plain(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Offset:
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"{given} is no offset of a pipeline: does this checkpoint belong to one?") from error


class _Batch(Struct):
    """A batch of one of the sources, as far as it lies in the range."""

    topic: TopicInfo
    info: StreamInfo
    first: int
    count: int
    cut_ms: int
    most_ms: int | None
    declared_ms: int | None

    @property
    def last(self) -> int:
        return self.first + self.count - 1


class PipelinePlanner:
    """Plans micro-batches. It lives in the planner's process as long as the query."""

    def __init__(self, where: Where, program: Program, start: str, rows_max: int) -> None:
        self._where, self._program = where, program
        self._link = link_to(where)
        self._sources = {node.topic: node for node in program.plan.graph.of_type(SourceNode)}
        self._rows = {topic: SourceRows(program, topic) for topic in self._sources}
        options = {
            "servers": where.servers,
            "subscribe": ",".join(self._sources),
            "startingOffsets": start,
            "maxOffsetsPerTrigger": str(rows_max),
            "maxBytesPerTrigger": str(BYTES_MAX),
        }
        made = msgspec.structs.replace(read_options(options, streaming=True), where=where)
        self._planner = Planner(made, self._link.ranges, StructType([StructField("glsn", LongType())]))
        self._walked: Walk | None = None
        self._looked_at = 0.0
        self._has_same_clocks = False

    def close(self) -> None:
        self._link.loop.run(self._planner.close())

    # ------------------------------------------------------------------------------------------------------ offsets

    def first(self) -> Offset:
        glsn = self._link.loop.run(self._planner.start())
        return Offset(glsn, self._program.slices, self.clock_at(glsn), is_new=True)

    def clock_at(self, glsn: int) -> ClockSnapshot | None:
        """The clocks after a position, as if they had come all the way from the beginning of the log.

        Storage nodes know how far event time had come in each log stream at any position, so a walk begins a little
        before this one, and further back as long as the watermarks still owe something to what came before. Where event
        time is not the topic's own, they do not know, and all records that are left are looked at.
        """
        view = self._view()
        floor = min(glsn, *(view.topics[name].trimmed_before - 1 for name in self._sources))
        if glsn <= 0:
            return None
        back = LOOK_BACK if all(map(self._is_known_to_the_log, self._sources)) else glsn
        while True:
            begin, begun = self._clock_before(max(floor, glsn - back, 0), view)
            clock = begun
            for end in (*range(begin + WALK_POSITIONS, glsn, WALK_POSITIONS), glsn):
                clock = self._walk(Offset(begin, self._program.slices, clock, is_new=True), GLSN(end), GLSN(end)).clock
                begin = end
            if glsn - back <= floor or is_settled(begun, clock):
                return clock
            back *= LOOK_BACK_FACTOR

    def _is_known_to_the_log(self, topic: str) -> bool:
        return not self._rows[topic].event_times.is_column and not _has_function(self._sources[topic])

    def _clock_before(self, begin: int, view: View) -> tuple[int, ClockSnapshot]:
        """A place near ``begin``, not inside a batch, and how far each log stream has come there, trimmed or not."""
        known = []
        for topic, info in self._streams(view):
            if begin > 0 and info.created_at <= begin and self._is_known_to_the_log(topic.name):
                first = max(GLSN(begin + 1), topic.trimmed_before)
                heads = self._link.loop.run(self._link.ranges.heads(info, first, first, self._where.timeout))
                firsts = heads.columns[FIRST_GLSN]
                if firsts and topic.trimmed_before < firsts[0] <= begin:
                    return self._clock_before(firsts[0] - 1, view)
                before = heads.before
                spoke = info.created_time if before.committed is None else before.committed
                most, declared = _milliseconds(before.time_max), _milliseconds(before.declared)
                known.append(KnownStream(topic.name, int(info.stream), spoke // MILLISECOND, most, declared))
        watermarks = {topic: node.watermark for topic, node in self._sources.items()}
        return begin, LogClock.resumed(watermarks, self._program.plan.source_sets, begin, known).snapshot()

    def newest(self) -> GLSN:
        """The end of the log as of now."""
        return self._view().catalog.high_watermark

    def next(self, start: Offset, through: GLSN | None, *, drain: bool, limited: bool) -> Offset:
        """Where the next micro-batch ends: at most at ``through``, which with ``drain`` is the end of the input."""
        if start.slices != self._program.slices:
            raise Refused(
                f"pipeline {self._program.name!r}: state in this checkpoint is cut into {start.slices} slices, not "
                f"{self._program.slices}: run it with slices={start.slices}, or with a new checkpoint"
            )
        if start.clock is not None and not start.is_new:
            self._require_same_clocks(start.clock)
        if start.ended:
            return start
        end = int(self._link.loop.run(self._planner.latest(GLSN(start.glsn), through, limited=limited)))
        if end == start.glsn:
            end = self._moved_by_time(start) if through is None else max(end, through)
        if through is not None and start.glsn < end == self._last_record(through):
            # Nothing but the passing of time lies between the last record and the end.
            end = through
        since = start.glsn if start.is_new else None
        if end == start.glsn:
            ended = self._is_end(start.glsn, through, drain)
            return Offset(start.glsn, start.slices, start.clock, ended=True, since=since) if ended else start
        self._walked = walk = self._walk(start, GLSN(end), through)
        return Offset(walk.end, start.slices, walk.clock, ended=self._is_end(walk.end, through, drain), since=since)

    def _require_same_clocks(self, clock: ClockSnapshot) -> None:
        """State in a checkpoint has come about under its watermarks; under others it would be neither one thing nor the
        other.
        """
        if self._has_same_clocks:
            return
        name = self._program.name
        way_out = (
            "run the program as it was, or start from a savepoint (--from-savepoint), or name a new checkpoint "
            "(--checkpoint)"
        )
        for topics, own in clock.clocks:
            for known in own.streams:
                topic = clock.streams[known.log_stream_id][0]
                now = self._sources[topic].watermark.strategy if topic in self._sources else None
                if now != known.strategy:
                    raise Refused(
                        f"pipeline {name!r}: the watermark of the source {topic!r} was {_shown(known.strategy)} when "
                        f"this checkpoint was made, and is {_shown(now)} now: {way_out}"
                    )
            if frozenset(topics) not in {*self._program.plan.source_sets, frozenset(self._sources)}:
                raise Refused(
                    f"pipeline {name!r}: no operator is fed from exactly {', '.join(topics)} any more, as one was when "
                    f"this checkpoint was made: {way_out}"
                )
        self._has_same_clocks = True

    def _is_end(self, glsn: int, through: GLSN | None, drain: bool) -> bool:
        return drain and through is not None and glsn >= through

    def _last_record(self, through: GLSN) -> int:
        infos = (info for _, info in self._streams(self._view()))
        return max((min(info.last_glsn, through) for info in infos), default=through)

    def _moved_by_time(self, start: Offset) -> int:
        """Time passes without records of ours at the marks of the log's clock: looked for every now and then."""
        if time.monotonic() - self._looked_at < MARKS_SECONDS:
            return start.glsn
        self._looked_at = time.monotonic()
        ranges = self._link.ranges
        end = self.newest()
        marks = (
            self._link.loop.run(ranges.marks(GLSN(start.glsn), end, self._where.timeout)) if end > start.glsn else []
        )
        return max((mark.glsn for mark in marks), default=start.glsn)

    def _view(self) -> View:
        return self._link.loop.run(self._link.ranges.view(self._where.timeout))

    def _streams(self, view: View) -> Iterator[tuple[TopicInfo, StreamInfo]]:
        for name in self._sources:
            topic = view.topics[name]
            yield from ((topic, info) for info in view.streams_of(topic.topic))

    def part(self, found: Range) -> Part:
        """What a task reads of the log for a range."""
        view = self._view()
        topic = view.topics[found.topic]
        info = view.streams[LogStreamId(found.stream)]
        return self._rows[found.topic].part(self._where, topic, info, found.first, found.last)

    # -------------------------------------------------------------------------------------------------------- walking

    def walk(self, start: Offset, end: Offset) -> Walk:
        """The range between two offsets; walked already, unless this is a restart."""
        if start.is_new and end.since is not None and end.since != start.glsn:
            # Spark asks anew where the first micro-batch begins, and the log may have grown since.
            start = msgspec.structs.replace(start, glsn=end.since, clock=self.clock_at(end.since))
        walked = self._walked
        if walked is None or (walked.start, walked.end) != (start.glsn, end.glsn):
            walked = self._walk(start, GLSN(end.glsn), GLSN(end.glsn))
        return walked

    def _walk(self, start: Offset, end: GLSN, through: GLSN | None) -> Walk:
        """About to ``end``, which becomes the end of a batch; but exactly to ``through`` if that is there."""
        plan, view = self._program.plan, self._view()
        batches, end = self._batches(start, end, through, view)
        marks = self._link.loop.run(self._link.ranges.marks(GLSN(start.glsn), end, self._where.timeout))
        clock = _clock(plan, self._sources, start.clock)
        told = {topic for topic, node in self._sources.items() if _has_function(node)}
        records = {topic: self._records(topic, batches) for topic in told}
        seen: dict[tuple[str, int], list[tuple[_Batch, dict[frozenset[str], tuple[int, int, int]]]]] = {}
        coming = iter(sorted(marks, key=lambda mark: mark.glsn))
        mark = next(coming, None)
        streams = sorted(self._streams(view), key=lambda pair: pair[1].created_at)
        for batch in (*batches, None):
            upto = end + 1 if batch is None else batch.first
            while mark is not None and mark.glsn < upto:
                if mark.glsn > max(start.glsn, clock.glsn):
                    _add_streams(clock, streams, mark.glsn)
                    clock.tick(mark.glsn, mark.time // MILLISECOND)
                mark = next(coming, None)
            if batch is None:
                break
            _add_streams(clock, streams, batch.first)
            topic, stream = batch.topic.name, int(batch.info.stream)
            found: dict[frozenset[str], tuple[int, int, int]] = {}
            if topic in told and batch.most_ms is not None:
                for glsn, row, time_ms in records[topic][stream, batch.first]:
                    last = batch.declared_ms if glsn == batch.last else None
                    place = (topic, stream, glsn, batch.cut_ms)
                    run_function(
                        plan.name, self._sources[topic], glsn, row, partial(clock.record, *place, row, time_ms, last)
                    )
            else:
                found = clock.batch(
                    topic, stream, batch.first, batch.count, batch.cut_ms, batch.most_ms, batch.declared_ms
                )
            if batch.most_ms is not None:
                seen.setdefault((topic, stream), []).append((batch, found))
        ranges = [_range(place, own) for place, whole in seen.items() for own in self._divided(whole)]
        return Walk(GLSN(start.glsn), end, clock.snapshot(), clock.ticks(), ranges)

    def _batches(self, start: Offset, end: GLSN, through: GLSN | None, view: View) -> tuple[list[_Batch], GLSN]:
        """All batches of a range in order, and its end, which is that of a batch unless it is ``through``."""
        found: list[_Batch] = []
        for topic, info in self._streams(view):
            first = GLSN(start.glsn + 1)
            if first < topic.trimmed_before:
                if not start.is_new and first <= info.last_glsn:
                    self._require_nothing_lost(topic, info, max(first, GLSN(info.created_at + 1)))
                first = topic.trimmed_before
            if info.created_at >= end or first > min(end, info.last_glsn):
                continue
            heads = self._link.loop.run(self._link.ranges.heads(info, first, end, self._where.timeout))
            found += _batches(topic, info, heads, int(first))
        found.sort(key=lambda batch: batch.first)
        if found and found[-1].last > end:
            straddling = found[-1]
            if end != through and straddling.first - 1 > start.glsn:
                found.pop()
                end = GLSN(straddling.first - 1)
            elif through is None or straddling.last <= through:
                end = GLSN(straddling.last)
            else:
                end = through
                self._cut_off(straddling, through)
        for name, rows in self._rows.items():
            if rows.event_times.is_column:
                self._read_most(name, [batch for batch in found if batch.topic.name == name])
        return found, end

    def _cut_off(self, batch: _Batch, last: GLSN) -> None:
        """A batch as if it ended at a position; what it declares takes effect at its end, which comes later."""
        batch.count, batch.declared_ms = last + 1 - batch.first, None
        if not _has_function(self._sources[batch.topic.name]):
            self._read_most(batch.topic.name, [batch])

    def _require_nothing_lost(self, topic: TopicInfo, info: StreamInfo, first: GLSN) -> None:
        """A topic was trimmed above what the pipeline wants next. That matters only if there were records."""
        try:
            self._link.loop.run(self._planner.miss(topic, info, first))
        except Trimmed as error:
            raise _lost(topic, first) from error

    def _read_most(self, topic: str, batches: list[_Batch]) -> None:
        """The largest event time of each batch, where headers do not know because it is another column's."""
        rows = self._rows[topic]
        for own in _by_stream(batches).values():
            part = rows.part(self._where, own[0].topic, own[0].info, own[0].first, own[-1].last, times_only=True)
            glsns, times = [], []
            for batch in read_part(part):
                glsns.append(batch.column("glsn").to_numpy())
                times.append(rows.event_times.of_batch(batch, batch.column("glsn")))
            if not glsns:
                continue
            all_glsns, all_times = np.concatenate(glsns), np.concatenate(times)
            for batch in own:
                first, last = np.searchsorted(all_glsns, (batch.first, batch.last + 1)).tolist()
                batch.most_ms = int(all_times[first:last].max()) if last > first else None

    def _records(self, topic: str, batches: Sequence[_Batch]) -> dict[tuple[int, int], list[tuple[int, Any, int]]]:
        """The records of a source whose functions have to see them: GLSN, row and event time, by batch."""
        rows, found = self._rows[topic], {}
        own_batches = [batch for batch in batches if batch.topic.name == topic]
        for stream, own in _by_stream(own_batches).items():
            part = rows.part(self._where, own[0].topic, own[0].info, own[0].first, own[-1].last)
            listed: list[tuple[int, Any, int]] = []
            for batch in read_part(part):
                glsns = batch.column("glsn").to_pylist()
                made = rows.rows.from_columns([batch.column(name) for name in rows.rows.names])
                times = rows.event_times.of_batch(batch, batch.column("glsn"), made).tolist()
                listed += zip(glsns, made, times, strict=True)
            at = 0
            for own_batch in own:
                until = at
                while until < len(listed) and listed[until][0] <= own_batch.last:
                    until += 1
                found[stream, own_batch.first] = listed[at:until]
                at = until
        return found

    def _divided(self, whole: list[Any]) -> Iterator[list[Any]]:
        """The batches of one log stream, for several tasks if there are many records."""
        total = sum(batch.count for batch, _ in whole)
        size = max(PART_RECORDS_MIN, -(-total // self._program.parallelism))
        part: list[Any] = []
        count = 0
        for pair in whole:
            part.append(pair)
            count += pair[0].count
            if count >= size:
                yield part
                part, count = [], 0
        if part:
            yield part


def _clock(plan: Plan, sources: Mapping[str, SourceNode], snapshot: ClockSnapshot | None) -> LogClock:
    watermarks = {topic: node.watermark for topic, node in sources.items()}
    if snapshot is None:
        return LogClock(watermarks, plan.source_sets)
    return LogClock.restore(watermarks, plan.source_sets, snapshot)


def _shown(strategy: Strategy | None) -> str:
    if strategy is None:
        return "not read"
    kind = "punctuated" if isinstance(strategy, Punctuated) else f"bounded {shown(strategy.bound_us // MILLISECOND)}"
    return f"{kind}, idle after {shown(strategy.idle_after_us // MILLISECOND)}"


def _milliseconds(time_us: int | None) -> int | None:
    return None if time_us is None else time_us // MILLISECOND


def _has_function(node: SourceNode) -> bool:
    return callable(node.event_time) or node.watermark.function is not None


def _add_streams(clock: LogClock, streams: Sequence[tuple[TopicInfo, StreamInfo]], glsn: int) -> None:
    """Those that existed before a position. One that was sealed for good before it counts no more."""
    for topic, info in streams:
        if info.created_at >= glsn:
            break
        is_known = clock.knows(topic.name, int(info.stream))
        if info.final and info.final_at < glsn:
            if is_known:
                clock.end_stream(topic.name, int(info.stream))
        elif not is_known:
            clock.add_stream(topic.name, int(info.stream), info.created_time // MILLISECOND)


def _batches(topic: TopicInfo, info: StreamInfo, heads: Heads, first: int) -> Iterator[_Batch]:
    for _, glsn, count, cut, most, declared in zip(*heads.columns, strict=True):
        # What lies before the range is cut off: the clock knows it already.
        skipped = max(0, first - glsn)
        # A fence says nothing of event time; records do, though the header need not know which.
        most_ms = None if most == NOTHING else most // MILLISECOND
        yield _Batch(
            topic,
            info,
            glsn + skipped,
            count - skipped,
            cut // MILLISECOND,
            most_ms,
            None if declared == NOTHING else declared // MILLISECOND,
        )


def _by_stream(batches: Sequence[_Batch]) -> dict[int, list[_Batch]]:
    """Batches with records, by log stream."""
    found: dict[int, list[_Batch]] = {}
    for batch in batches:
        if batch.most_ms is not None:
            found.setdefault(int(batch.info.stream), []).append(batch)
    return found


def _range(place: tuple[str, int], own: list[tuple[_Batch, dict[frozenset[str], tuple[int, int, int]]]]) -> Range:
    seen: dict[tuple[str, ...], list[tuple[int, int, int, int]]] = {}
    for batch, found in own:
        for topics, numbers in found.items():
            seen.setdefault(tuple(sorted(topics)), []).append((batch.first, *numbers))
    return Range(*place, GLSN(own[0][0].first), GLSN(own[-1][0].last), seen)


def _lost(topic: TopicInfo, first: GLSN) -> Trimmed:
    error = Trimmed(first, topic.trimmed_before)
    error.add_note(
        f"The pipeline has not read these records of topic {topic.name!r}, and they are gone: start it with a new "
        "checkpoint, or from a savepoint that is newer, and keep records longer"
    )
    return error
