"""Plans a pipeline: which range of the log comes next, and where the clocks rise in it.

An offset is a position and the state of the pipeline's clocks there (``offsets``). Spark stores it in the checkpoint,
so a restart goes on with exactly the same clocks. The planner walks the headers of all batches of a range in the order
of their positions. The tasks compute where the watermark rises *inside* a batch, because they read the records anyway:
for each batch they get the three numbers that this needs (``StreamRange.seen``). The planner reads the records
themselves only if a user's function computes event time or the watermark from them.

A range ends inside a batch only if the run ends there. So a micro-batch may have a few records more or less than its
limit.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from pyspark.sql.types import LongType, StructField, StructType

from cutwater.client.cluster.catalog_cache import CatalogView
from cutwater.core.read.watermark import RULE
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.errors import Refused, Trimmed
from cutwater.pipeline.clocks.clock import Seen
from cutwater.pipeline.clocks.clock_steps import Ticks
from cutwater.pipeline.clocks.rule_one import AnyClock, RuleOneSnapshot, current
from cutwater.pipeline.graph import SourceNode
from cutwater.spark.options import Where, read_options
from cutwater.spark.pipeline.offsets import PipelineOffset, require_same_clocks, require_same_topics
from cutwater.spark.pipeline.program import Program
from cutwater.spark.pipeline.records import SourceRows
from cutwater.spark.session.worker_connections import link_to
from cutwater.spark.source.event_time import Numbers
from cutwater.spark.source.log_walk import HeadBatch, LogWalk
from cutwater.spark.source.offsets import began_above
from cutwater.spark.source.planning import MARKS_SECONDS, Planner
from cutwater.spark.source.read_task import ReadPartition, read_part
from cutwater.types import GLSN, MILLISECOND, LogStreamId

PART_RECORDS_MIN = 5_000
"""A task reads at least this many records, unless there are fewer."""
BYTES_MAX = 256 << 20
"""A micro-batch has at most this many bytes of the log, or one batch. All of it is in memory, in several forms."""
WALK_POSITIONS = 200_000
"""How many positions one step walks while the clocks advance to the beginning of a run."""


class StreamRange(Struct, frozen=True):
    """Records of one log stream for one task: whole batches, and for each clock the watermarks seen before each
    batch."""

    topic: str
    stream: int
    first: GLSN
    last: GLSN
    seen: dict[tuple[str, ...], list[tuple[int, int, int, int]]]
    """For each batch: its first GLSN, the watermark before it, the least watermark of the others, and that of its own
    stream."""


class Walk(Struct, frozen=True):
    """Result of walking a range (start, end] of the log."""

    start: GLSN
    end: GLSN
    clock: AnyClock
    ticks: Ticks
    ranges: list[StreamRange]
    rule: int


class PipelinePlanner:
    """Plans micro-batches. It lives in the planner's process as long as the query."""

    def __init__(self, where: Where, program: Program, start: str, rows_max: int) -> None:
        self._where, self._program = where, program
        self._link = link_to(where)
        self._sources = {node.topic: node for node in program.plan.graph.of_type(SourceNode)}
        self._rows = {topic: SourceRows(program, topic) for topic in self._sources}
        self._hidden = [topic for topic, own in self._rows.items() if own.has_own_column or own.has_function]
        """Topics whose event time storage nodes do not know."""
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

    def numbered(self, offset: PipelineOffset) -> PipelineOffset:
        """Return the same offset with the numbers of the topics that were read up to there."""
        topics = self._view().topics
        return msgspec.structs.replace(offset, topics={name: int(topics[name].topic) for name in self._sources})

    def require_same_topics(self, offset: PipelineOffset) -> None:
        """Refuse to go on with other topics under the same names. Older offsets do not name their topics."""
        topics = self._view().topics
        require_same_topics(self._program.name, offset, {name: int(topic.topic) for name, topic in topics.items()})

    def first(self) -> PipelineOffset:
        glsn = self._link.loop.run(self._planner.start())
        begins = {name: int(self._view().topics[name].trimmed_before) for name in self._sources}
        return PipelineOffset(
            glsn, self._program.slices, self.clock_at(glsn), is_new=True, trimmed=began_above(begins, glsn)
        )

    def clock_at(self, glsn: int, rule: int = RULE) -> Any:
        """Return the clocks after a position, as if they had walked all the way from the beginning of the log. Returns
        None for the beginning.

        If event time is not the topic's own, storage nodes do not know it, and the walk reads all records that are
        left. If the watermarks depend on what came before the beginning of a trimmed topic, the walk reads all headers
        that are left, because the log streams of that topic hold the watermarks back up to there (see ``log_walk``).
        """
        if glsn <= 0:
            return None
        walk = self._log_walk(self._view(), rule)
        for place in walk.begins(glsn):
            begun = self._link.loop.run(walk.begun(place, glsn))
            if begun is not None:
                begin, clock = begun.glsn, begun.snapshot()
                for end in (*range(begin + WALK_POSITIONS, glsn, WALK_POSITIONS), glsn):
                    offset = PipelineOffset(begin, self._program.slices, clock, is_new=True)
                    begin, clock = end, self._walk(offset, GLSN(end), GLSN(end), rule).clock
                if walk.is_enough(begun, clock, glsn):
                    return clock
        raise AssertionError("a walk from the first position that is left is always enough")

    def _log_walk(self, view: CatalogView, rule: int = RULE) -> LogWalk:
        watermarks = {topic: node.watermark for topic, node in self._sources.items()}
        sets, timeout = self._program.plan.source_sets, self._where.timeout
        return LogWalk(self._link.ranges, timeout, view, watermarks, sets, rule=rule, hidden=self._hidden)

    def newest(self) -> GLSN:
        """Return the current end of the log."""
        return self._view().catalog.high_watermark

    def next(
        self, start: PipelineOffset, through: GLSN | None, *, drain: bool, limited: bool, is_first: bool = False
    ) -> PipelineOffset:
        """Return the end of the next micro-batch: at most ``through``, which is the end of the input if ``drain`` is
        set. ``is_first``: there is one, even without input."""
        if start.slices != self._program.slices:
            raise Refused(
                f"pipeline {self._program.name!r}: state in this checkpoint is cut into {start.slices} slices, not "
                f"{self._program.slices}: run it with slices={start.slices}, or with a new checkpoint"
            )
        if start.clock is not None and not start.is_new and not self._has_same_clocks:
            require_same_clocks(self._program.plan, self._sources, start.clock)
            self._has_same_clocks = True
        if start.ended:
            return start
        given = start
        if start.rule != RULE or isinstance(start.clock, RuleOneSnapshot):
            # What was planned under another rule is done; what follows is planned under the current rule. A note of an
            # older version has the clocks of a savepoint and no rule.
            start = msgspec.structs.replace(start, clock=current(start.clock), rule=RULE)
        end = int(self._link.loop.run(self._planner.latest(GLSN(start.glsn), through, limited=limited)))
        if end == start.glsn:
            end = self._moved_by_time(start) if through is None else max(end, through)
        if through is not None and start.glsn < end == self._last_record(through):
            # Between the last record and the end, only time passes.
            end = through
        since, began = (start.glsn, start.clock) if start.is_new else (start.glsn if is_first else None, None)
        assert not isinstance(began, RuleOneSnapshot), "a run that begins has the clocks of the present rule"
        reached, clock = start.glsn, start.clock
        if end > start.glsn:
            self._walked = walk = self._walk(start, GLSN(end), through)
            reached, clock = walk.end, walk.clock
        ended = drain and through is not None and reached >= through
        if end == start.glsn and not ended and not is_first:
            return given
        trimmed = began_above(start.trimmed, start.glsn)
        return PipelineOffset(reached, start.slices, clock, ended=ended, since=since, began=began, trimmed=trimmed)

    def _last_record(self, through: GLSN) -> int:
        infos = (info for _, info in self._streams(self._view()))
        return max((min(info.last_glsn, through) for info in infos), default=through)

    def _moved_by_time(self, start: PipelineOffset) -> int:
        """Return the last mark of the log's clock after an offset. Time passes at marks even without records of the
        sources. Looks only every ``MARKS_SECONDS``."""
        if time.monotonic() - self._looked_at < MARKS_SECONDS:
            return start.glsn
        self._looked_at = time.monotonic()
        ranges = self._link.ranges
        end = self.newest()
        marks = (
            self._link.loop.run(ranges.marks(GLSN(start.glsn), end, self._where.timeout)) if end > start.glsn else []
        )
        return max((mark.glsn for mark in marks), default=start.glsn)

    def _view(self) -> CatalogView:
        return self._link.loop.run(self._link.ranges.view(self._where.timeout))

    def _streams(self, view: CatalogView) -> Iterator[tuple[TopicInfo, StreamInfo]]:
        for name in self._sources:
            topic = view.topics[name]
            yield from ((topic, info) for info in view.streams_of(topic.topic))

    def part(self, found: StreamRange) -> ReadPartition:
        """Return the part of the log that a task reads for a range."""
        view = self._view()
        topic = view.topics[found.topic]
        info = view.streams[LogStreamId(found.stream)]
        return self._rows[found.topic].part(self._where, topic, info, found.first, found.last)

    # -------------------------------------------------------------------------------------------------------- walking

    def walk(self, start: PipelineOffset, end: PipelineOffset) -> Walk:
        """Return the walk between two offsets. It is already done, except after a restart."""
        glsn = end.since if start.is_new and end.since is not None else start.glsn
        walked = self._walked
        if walked is not None and (walked.start, walked.end, walked.rule) == (glsn, end.glsn, end.rule):
            return walked
        return self._walk(self._begun(start, end, glsn), GLSN(end.glsn), GLSN(end.glsn), end.rule)

    def _begun(self, start: PipelineOffset, end: PipelineOffset, glsn: int) -> PipelineOffset:
        """Return the start of a planned micro-batch, with the clocks that it was planned with.

        Spark asks again where the first micro-batch begins, and the log may have grown or been trimmed since. Records
        that were gone when it was planned do not count as lost (``trimmed``); records that were trimmed since do. The
        ends of rule 1 do not say what was gone.
        """
        clock: AnyClock | None
        if end.rule == 1:
            clock = start.clock if isinstance(start.clock, RuleOneSnapshot) else self.clock_at(glsn, 1)
        elif end.since is not None and start.is_new:
            clock = end.began
        else:
            clock = current(start.clock)
        is_new = start.is_new and (end.since is None or end.rule == 1)
        return msgspec.structs.replace(start, glsn=glsn, clock=clock, is_new=is_new, rule=end.rule, trimmed=end.trimmed)

    def _walk(self, start: PipelineOffset, end: GLSN, through: GLSN | None, rule: int = RULE) -> Walk:
        """Walk approximately to ``end``, which moves to the end of a batch, but exactly to ``through`` if it is
        reached."""
        view = self._view()
        walk = self._log_walk(view, rule)
        batches, end = self._batches(walk, start, end, through, view)
        marks = self._link.loop.run(walk.marks(start.glsn, end))
        pasts = self._link.loop.run(walk.pasts(start.glsn, start.trimmed))
        clock = walk.clock(start.clock)
        told = {topic for topic, own in self._rows.items() if own.has_function}
        records = {topic: self._records(topic, batches) for topic in told}
        seen: dict[tuple[str, int], list[tuple[HeadBatch, dict[frozenset[str], Seen]]]] = {}
        for batch, is_mark in walk.turns(clock, batches, marks, pasts, end):
            topic, stream = batch.topic.name, int(batch.info.stream)
            found: dict[frozenset[str], Seen] = {}
            listed = records[topic].get((stream, batch.first), []) if topic in told else []
            for glsn, row, time_ms in listed:
                is_last = glsn == batch.last
                call = partial(
                    clock.record,
                    *(topic, stream, glsn, batch.cut_us, row, time_ms, batch.declared_us if is_last else None),
                    idle=batch.idle and is_last,
                    is_mark=is_mark and is_last,
                )
                self._rows[topic].call(glsn, row, call)
            if not listed:
                found = clock.batch(
                    *(topic, stream, batch.first, batch.count, batch.cut_us),
                    # If functions compute event time, a batch that is skipped says nothing about it.
                    None if topic in told else batch.most_us,
                    batch.declared_us,
                    idle=batch.idle,
                    is_mark=is_mark,
                    is_noted=self._sources[topic].skips_malformed,
                )
            if batch.most_us is not None:
                seen.setdefault((topic, stream), []).append((batch, found))
        ranges = [_range(place, own) for place, whole in seen.items() for own in self._divided(whole)]
        return Walk(GLSN(start.glsn), end, clock.snapshot(), clock.ticks(), ranges, rule)

    def _batches(
        self, walk: LogWalk, start: PipelineOffset, end: GLSN, through: GLSN | None, view: CatalogView
    ) -> tuple[list[HeadBatch], GLSN]:
        """Return all batches of a range in order, and its end: the end of a batch, or ``through``."""
        firsts: dict[str, int] = {}
        for name in self._sources:
            topic = view.topics[name]
            first = GLSN(max(start.glsn + 1, start.trimmed.get(name, 0)))
            if first < topic.trimmed_before and not start.is_new:
                for info in view.streams_of(topic.topic):
                    if first <= info.last_glsn:
                        self._require_nothing_lost(topic, info, max(first, GLSN(info.created_at + 1)))
            firsts[name] = max(first, topic.trimmed_before)
        found = self._link.loop.run(walk.batches(firsts, end))
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
            if rows.has_own_column:
                self._read_most(name, found)
        return found, end

    def _cut_off(self, batch: HeadBatch, last: GLSN) -> None:
        """Shorten a batch so that it ends at a position. Its declarations take effect at its true end, which comes
        later."""
        batch.count, batch.declared_us, batch.idle = last + 1 - batch.first, None, False
        if not self._rows[batch.topic.name].has_function:
            self._read_most(batch.topic.name, [batch])

    def _require_nothing_lost(self, topic: TopicInfo, info: StreamInfo, first: GLSN) -> None:
        """Refuse to go on if records between the next position and the beginning of a trimmed topic are gone."""
        try:
            self._link.loop.run(self._planner.miss(topic, info, first))
        except Trimmed as error:
            raise lost(topic.name, first, topic.trimmed_before) from error

    def _read_most(self, topic: str, batches: Sequence[HeadBatch]) -> None:
        """Read the largest event time of each batch, if event time is another column that headers do not cover."""
        for batch, _, times, _ in self._read(topic, batches, times_only=True):
            batch.most_us = int(times.max()) * MILLISECOND if len(times) else None

    def _records(self, topic: str, batches: Sequence[HeadBatch]) -> dict[tuple[int, int], list[tuple[int, Any, int]]]:
        """Return the records of a source whose functions must see them: GLSN, row and event time, by batch."""
        return {
            (int(batch.info.stream), batch.first): list(zip(glsns.tolist(), rows, times.tolist(), strict=True))
            for batch, glsns, times, rows in self._read(topic, batches)
        }

    def _read(
        self, topic: str, batches: Sequence[HeadBatch], *, times_only: bool = False
    ) -> Iterator[tuple[HeadBatch, Numbers, Numbers, list[Any]]]:
        """Yield the batches of a topic that have records, with GLSNs, event times and rows."""
        rows = self._rows[topic]
        by_stream: defaultdict[LogStreamId, list[HeadBatch]] = defaultdict(list)
        for batch in batches:
            if batch.topic.name == topic and batch.most_us is not None:
                by_stream[batch.info.stream].append(batch)
        for own in by_stream.values():
            ends = (own[0].first, own[-1].last)
            glsns, times, made = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
            for read in read_part(rows.part(self._where, own[0].topic, own[0].info, *ends, times_only=times_only)):
                new = None if times_only else rows.rows.from_columns([read.column(name) for name in rows.rows.names])
                glsns.append(read.column("glsn").to_numpy())
                times.append(rows.event_times(read, new))
                made += new or []
            all_glsns, all_times = np.concatenate(glsns), np.concatenate(times)
            for batch in own:
                within = slice(*np.searchsorted(all_glsns, (batch.first, batch.last + 1)).tolist())
                yield batch, all_glsns[within], all_times[within], made[within]

    def _divided(self, whole: list[Any]) -> Iterator[list[Any]]:
        """Divide the batches of one log stream among several tasks if there are many records."""
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


def _range(place: tuple[str, int], own: list[tuple[HeadBatch, dict[frozenset[str], Seen]]]) -> StreamRange:
    seen: dict[tuple[str, ...], list[tuple[int, int, int, int]]] = {}
    for batch, found in own:
        for topics, numbers in found.items():
            seen.setdefault(tuple(sorted(topics)), []).append((batch.first, *numbers))
    return StreamRange(*place, GLSN(own[0][0].first), GLSN(own[-1][0].last), seen)


def lost(topic: str, first: GLSN, first_left: GLSN) -> Trimmed:
    """Return the error for records that were trimmed before the pipeline read them."""
    return Trimmed(first, first_left, topic).with_way_out(
        f"The pipeline has not read GLSN {first} to {first_left - 1} of topic {topic!r}, and these records are gone. "
        "Start from a newer savepoint (--from-savepoint), or with a new checkpoint (--checkpoint) at --start "
        f"{first_left}, without what they would have given; and give the topic a longer retention"
    )
