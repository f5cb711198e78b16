"""Implements the source of a pipeline for Spark: its tasks read ranges of log streams, run the row functions that come
before the first operators, and send the resulting records to slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct, structs
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from cutwater.core.read.watermark import NO_WATERMARK, lag_us
from cutwater.errors import NotFound, Trimmed
from cutwater.pipeline.clocks.clock_steps import DRAIN_FIRINGS
from cutwater.pipeline.graph import OperatorNode, Port, SourceNode
from cutwater.pipeline.plan import Destination
from cutwater.pipeline.position import EVENT_TIME, RECORD, moment, number
from cutwater.pipeline.records import Records
from cutwater.pipeline.rows import RESERVED_COLUMN
from cutwater.spark.options import Where, where_of
from cutwater.spark.pipeline.envelope import (
    COLUMNS,
    RANGE,
    TICK,
    Envelope,
    by_slice,
    envelope_batch,
    envelopes,
    in_envelopes,
    key_columns,
    packed_range,
    packed_steps,
    packed_ticks,
    positions,
)
from cutwater.spark.pipeline.error_translation import told
from cutwater.spark.pipeline.offsets import PipelineOffset
from cutwater.spark.pipeline.planning import PipelinePlanner, StreamRange, lost
from cutwater.spark.pipeline.program import Program, unpickled
from cutwater.spark.pipeline.records import SourceRows
from cutwater.spark.source.read_task import ReadPartition, read_part
from cutwater.types import GLSN, MILLISECOND, InputRange

FORMAT = "cutwater-pipeline"
RECORDS_MAX = 1_000_000
"""Default limit of records in a micro-batch. More is hardly faster, and workers hold many of them as objects of a
kilobyte each."""


class SourceRunOptions(Struct, frozen=True):
    """Options of a run that its source needs. ``until`` is the last position, if there is one. ``begin`` is the end of
    a savepoint, in place of ``start``. ``drain_firings`` is how many timers that are registered while the input drains
    fire, per key and operator. ``begins_empty``: there is a first micro-batch even if there is no input."""

    start: str = "earliest"
    rows_max: int = RECORDS_MAX
    until: int | None = None
    drain: bool = False
    begin: PipelineOffset | None = None
    drain_firings: int = DRAIN_FIRINGS
    begins_empty: bool = False


class TickPart(InputPartition):
    """The steps of the clocks that the planner knows, for all slices, and the range of the micro-batch."""

    def __init__(self, data: bytes, read: InputRange) -> None:
        self.data, self.read = data, read


class RangePart(InputPartition):
    """Some records of one log stream."""

    def __init__(self, part: ReadPartition, found: StreamRange) -> None:
        self.part, self.found = part, found


class PipelineSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return COLUMNS

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
        program, options = unpickled(self.options["given"])
        return PipelineReader(program, where_of(self.options), options)


class PipelineReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the sources of a pipeline. In the planner's process it lives as long as the query. Spark sends it to tasks,
    so it holds no connection."""

    def __init__(self, program: Program, where: Where, options: SourceRunOptions) -> None:
        self._program, self._where, self._options = program, where, options
        self._planner: PipelinePlanner | None = None
        self._first: PipelineOffset | None = None
        self._through: GLSN | None = None

    def _planning(self) -> PipelinePlanner:
        if self._planner is None:
            options = self._options
            self._planner = PipelinePlanner(self._where, self._program, options.start, options.rows_max)
        return self._planner

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the beginning of the run. Spark asks more than once, and the answer must stay the same."""
        with told():
            if self._first is None:
                begin = self._beginning()
                self._planning().require_same_topics(begin)
                self._first = self._planning().numbered(begin)
            return self._first.plain()

    def _beginning(self) -> PipelineOffset:
        begin = self._options.begin
        if begin is None:
            return self._planning().first()
        if begin.clock is None:
            # A savepoint that was made from tables has a position and no clocks: the clocks are those of the log at
            # that position.
            return structs.replace(begin, clock=self._planning().clock_at(begin.glsn))
        return begin

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.rows_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with told():
            until = self._options.until
            self._through = self._planning().newest() if until is None else GLSN(until)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        with told():
            limited = not isinstance(limit, ReadAllAvailable)
            planner, offset = self._planning(), PipelineOffset.of(start)
            is_first = self._options.begins_empty and offset == self._first
            try:
                found = planner.next(
                    offset, self._through, drain=self._options.drain, limited=limited, is_first=is_first
                )
            except NotFound:
                # The offset distinguishes a topic that was created again from one that is gone.
                planner.require_same_topics(offset)
                raise
            if found is offset:
                # Return the offset as it was given: Spark compares texts, and an older version may have written this
                # one.
                return start
            if found.ended and not offset.ended:
                # Stored in the checkpoint, so that a repeated micro-batch fires as many timers, independent of the
                # options of its run.
                found = structs.replace(found, firings=self._options.drain_firings)
            if found != offset:
                planner.require_same_topics(offset)
                found = planner.numbered(found)
            return found.plain()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with told():
            planner, last = self._planning(), PipelineOffset.of(end)
            planner.require_same_topics(last)
            walk = planner.walk(PipelineOffset.of(start), last)
            if last.ended:
                walk.ticks.end(last.glsn, last.firings)
            ranges = (RangePart(planner.part(found), found) for found in walk.ranges)
            read = InputRange(walk.start, GLSN(last.glsn))
            return [TickPart(packed_ticks(walk.ticks), read), *ranges]

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the checkpoint stores how far the pipeline has come."""

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with told():
            if isinstance(partition, TickPart):
                ticks = [(key, TICK, 0, partition.data) for key in self._program.keys]
                yield envelope_batch([*ticks, (self._program.keys[0], RANGE, 0, packed_range(partition.read))])
            elif isinstance(partition, RangePart):
                yield from SourceTask(self._program, partition).batches()


class SourceTask:
    """Takes the records of one range from the log to the slices."""

    def __init__(self, program: Program, given: RangePart) -> None:
        self._program, self._plan, self._given = program, program.plan, given
        self._source = SourceRows(program, given.found.topic)
        self._node = self._source.node
        self._steps = _StepsInside(given.found, self._node)
        # Sinks of sources take their rows in a slice chosen by the number of the log stream, so that rows spread over
        # slices.
        self._home = given.found.stream % program.slices

    def batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in read_part(self._given.part):
                yield envelope_batch(list(self._envelopes(batch)))
        except Trimmed as error:
            raise lost(self._given.found.topic, error.asked, error.first_left) from error
        steps = self._steps.packed()
        yield envelope_batch([(key, TICK, 0, steps) for key in self._program.keys])

    def _envelopes(self, batch: pa.RecordBatch) -> Iterator[Envelope]:
        glsns = batch.column("glsn")
        columns = [batch.column(name) for name in self._source.rows.names]
        rows = self._source.rows.from_columns(columns) if callable(self._node.event_time) else None
        times = self._source.event_times(batch, rows)
        numbers = glsns.to_numpy()
        self._steps.add(numbers, times)
        readers = self._plan.consumers.get(Port(self._node.order), [])
        arrived: dict[Destination, list[Records]] = {}
        whole: Records | None = None
        for index, (node, number_of_input) in enumerate(readers):
            path = b"" if len(readers) == 1 else number(index)
            if self._is_direct(node, number_of_input):
                made = pa.RecordBatch.from_arrays(
                    [*columns, positions(numbers, times, path)], names=[*self._source.rows.names, RESERVED_COLUMN]
                )
                yield from self._direct(node, number_of_input, made)
                continue
            if whole is None:
                rows = rows if rows is not None else self._source.rows.from_columns(columns)
                moments = [moment(glsn, RECORD) for glsn in glsns.to_pylist()]
                whole = Records(moments, [b""] * len(moments), times.tolist(), rows)
            self._plan.deliver(node, number_of_input, whole.branch(index) if path else whole, arrived)
        yield from envelopes(self._program, arrived, self._home)

    def _is_direct(self, node: Any, number_of_input: int) -> bool:
        """Report whether records go on without a function that must see them."""
        if isinstance(node, OperatorNode):
            key = self._plan.specs[node.order].keys[number_of_input]
            return key is None or key_columns(self._plan.specs[node.order], number_of_input) is not None
        return self._plan.waits(node)

    def _direct(self, node: Any, number_of_input: int, batch: pa.RecordBatch) -> Iterator[Envelope]:
        keys, destination = self._program.keys, (node.order, number_of_input)
        if node.order not in self._plan.specs:
            yield from in_envelopes(keys[self._home], destination, batch)
            return
        for index, own in by_slice(batch, self._plan.specs[node.order], number_of_input, self._program.slices):
            yield from in_envelopes(keys[index], destination, own)


class _StepsInside:
    """Computes where the watermarks rise inside the batches of one range, from the event times of the records and from
    what the planner has seen of all others."""

    def __init__(self, found: StreamRange, node: SourceNode) -> None:
        self._lag_us = 0 if node.watermark is None else lag_us(node.watermark.strategy)
        self._seen = {topics: np.array(rows, np.int64).T for topics, rows in found.seen.items()}
        self._most: dict[tuple[str, ...], int] = {topics: int(rows[3][0]) for topics, rows in self._seen.items()}
        self._found: dict[tuple[str, ...], tuple[list[int], list[int]]] = {topics: ([], []) for topics in self._seen}

    def add(self, glsns: Any, times_ms: Any) -> None:
        for topics, (firsts, before, others, reached) in self._seen.items():
            at = np.searchsorted(firsts, glsns, side="right") - 1
            # Headers of skipped batches in between count as well.
            said = np.maximum(times_ms * MILLISECOND - self._lag_us, reached[at])
            own = np.maximum(np.maximum.accumulate(said), self._most[topics])
            self._most[topics] = int(own[-1])
            after = np.maximum(before[at], np.minimum(own, others[at]))
            rises = np.concatenate(([True], after[1:] > after[:-1])) & (after > NO_WATERMARK)
            moments, values = self._found[topics]
            moments += (glsns[rises] * moment(1, RECORD) + EVENT_TIME).tolist()
            values += (after[rises] // MILLISECOND).tolist()

    def packed(self) -> bytes:
        return packed_steps((frozenset(topics), None, *steps) for topics, steps in self._found.items())
