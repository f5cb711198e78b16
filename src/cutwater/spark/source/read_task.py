"""Runs in a task: reads its part of one log stream and gives it to Spark as Arrow batches, whole columns at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct
from numpy.typing import NDArray
from pyspark.sql.datasource import InputPartition

from cutwater.client.convert.schemas import TIMESTAMP, TopicSchema
from cutwater.client.read.range_reader import COUNT, FIRST_GLSN, SCHEMA, Scanned
from cutwater.client.read.records import ColumnLayout
from cutwater.core.read.watermark import Strategy
from cutwater.core.requests import TopicInfo
from cutwater.errors import Malformed, Trimmed
from cutwater.protocol.scan_api import NOTHING
from cutwater.spark.options import Where
from cutwater.spark.session.worker_connections import WorkerConnection, link_to
from cutwater.spark.source.event_time import Numbers, SeenWatermarks, seen_by
from cutwater.types import GLSN, LogStreamId
from cutwater.wire.options import MIB

BATCH_BYTES_MAX = 32 * MIB
"""A batch for Spark has at most this many bytes plus one block."""

_log = logging.getLogger(__name__)


class Scan(Struct, frozen=True):
    """Settings that all tasks of a range share. ``columns`` are the columns that Spark wants. ``projects`` says whether
    storage nodes leave out the other columns."""

    where: Where
    columns: pa.Schema
    projects: bool
    strategy: Strategy
    fail_on_data_loss: bool
    skips_malformed: bool = False


class ReadPartition(InputPartition):
    """The positions from ``first`` to ``last`` of one log stream. ``seen`` is set if the query wants the watermark."""

    def __init__(
        self, scan: Scan, topic: TopicInfo, stream: LogStreamId, first: GLSN, last: GLSN, seen: SeenWatermarks | None
    ) -> None:
        self.scan, self.topic, self.stream = scan, topic, stream
        self.first, self.last, self.seen = first, last, seen

    def __repr__(self) -> str:
        return f"Part({self.topic.name}, log stream {self.stream}, GLSN {self.first} to {self.last})"


def read_part(part: ReadPartition) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a part. The next rows are fetched while Spark processes the current ones."""
    scan, link = part.scan, link_to(part.scan.where)
    made = Batches(part)
    first = part.first
    while first <= part.last:
        try:
            begin = first
            for found in _pieces(link, part, begin, made):
                # The records of the last run are yielded even if the ones after them have been trimmed.
                first = GLSN(found.last_glsn + 1)
                yield from made.batches(found, begin)
            return
        except Trimmed as error:
            if scan.fail_on_data_loss:
                raise lost(error, part.topic.name) from error
            report_loss(error, part.topic.name)
            first = max(error.first_left, first)


def lost(error: Trimmed, topic: str) -> Trimmed:
    """Return the same error with the way out."""
    named = Trimmed(error.asked, error.first_left, topic)
    return named.with_way_out(
        f"The query has not read these records of topic {topic!r}, and they are gone. The first GLSN left is "
        f"{error.first_left}. With option failOnDataLoss=false it goes on there and reports what is lost"
    )


def report_loss(error: Trimmed, topic: str) -> None:
    _log.error(
        "DATA LOSS: topic %r was trimmed before this query read it: GLSN %s to %s are skipped (failOnDataLoss=false)",
        topic,
        error.asked,
        error.first_left - 1,
    )


def report_malformed(topic: str, first: int, last: int) -> None:
    _log.error(
        "MALFORMED: GLSN %s to %s of topic %r hold no records of the topic and are skipped (onMalformed=skip)",
        first,
        last,
        topic,
    )


def _pieces(link: WorkerConnection, part: ReadPartition, first: GLSN, made: Batches) -> Iterator[Scanned]:
    pieces = link.ranges.pieces(
        part.stream,
        first,
        part.last,
        made.projection,
        patience=part.scan.where.timeout,
        skips_malformed=part.scan.skips_malformed,
    )

    async def following() -> Scanned | None:
        return await anext(pieces, None)

    ahead = link.loop.begin(following())
    try:
        while (found := link.loop.wait(ahead)) is not None:
            ahead = link.loop.begin(following())
            yield found
    finally:
        ahead.cancel()


class Batches:
    """Makes batches with the columns that Spark wants from runs of one log stream."""

    def __init__(self, part: ReadPartition) -> None:
        self._part, self._columns = part, part.scan.columns
        self._topic = TopicSchema.of(part.topic)
        names = [name for name in self._columns.names if name != "watermark"]
        if part.seen is not None and "timestamp" not in names:
            names.append("timestamp")
        self._layout = ColumnLayout(self._topic, names if part.scan.projects else None)
        self.projection = {
            number: wanted
            for number, wanted in self._layout.projection.items()
            if len(wanted.columns) < len(self._topic.numbered(number) or ())
        }
        """Schemas of which not all columns are wanted. Storage nodes need not decode batches of the others."""

        self._constants = {
            "topic": pa.scalar(part.topic.name, pa.string()),
            "stream": pa.scalar(part.stream, pa.int64()),
        }
        self._repeated: dict[str, pa.Array] = {}

    def batches(self, found: Scanned, first: GLSN) -> Iterator[pa.RecordBatch]:
        """Yield the rows from a position on. Adjacent blocks of one schema become one batch until it gets too large:
        compressed data may grow a hundredfold."""
        runs = [np.frombuffer(column, np.int64) for column in found.runs]
        # The number of rows before each run, counted once for all blocks. A fence has no rows.
        before = np.cumsum(np.append(0, np.where(runs[SCHEMA] != NOTHING, runs[COUNT], 0))).tolist()
        blocks = found.blocks
        for malformed in found.malformed:
            report_malformed(self._part.topic.name, *malformed)
        together: list[_Rows] = []
        size = 0
        for i, block in enumerate(blocks):
            end = blocks[i + 1].first_run if i + 1 < len(blocks) else len(found)
            count, glsn = before[end] - before[block.first_run], found.runs[FIRST_GLSN][block.first_run]
            try:
                stored = self._layout.rows(
                    block.schema, block.body, count, glsn, is_stored=found.is_stored, checked=block.checked
                )
            except Malformed as error:
                if not self._part.scan.skips_malformed:
                    raise
                report_malformed(error.topic, error.first_glsn, error.last_glsn)
                if together:
                    yield self._batch(_Table(runs, together), first)
                    together, size = [], 0
                continue
            rows = _Rows(block.schema, block.first_run, end, stored)
            if together and (together[0].schema != rows.schema or size > BATCH_BYTES_MAX):
                yield self._batch(_Table(runs, together), first)
                together, size = [], 0
            together.append(rows)
            size += stored.get_total_buffer_size()
        if together:
            yield self._batch(_Table(runs, together), first)

    def _batch(self, table: _Table, first: GLSN) -> pa.RecordBatch:
        arrays = [self._column(field, table) for field in self._columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._columns)
        skipped = max(0, first - int(table.first_glsn[0]))
        left = table.rows - skipped - max(0, table.last_glsn - self._part.last)
        return batch if left == table.rows else batch.slice(skipped, left)

    def _column(self, field: pa.Field, table: _Table) -> pa.Array:
        match field.name:
            case "topic" | "stream":
                return self._constant(field.name, table.rows)
            case "glsn":
                return pa.array(table.rising(table.first_glsn))
            case "llsn":
                return pa.array(table.rising(table.first_llsn))
            case "ingested_at":
                return _times(table.repeated(table.times))
            case "timestamp":
                return self._event_times(table)
            case "watermark":
                return self._watermark(table)
        column = table.stored(field.name)
        if column is None:
            # A batch of an older schema lacks columns that were added since.
            column = pa.nulls(table.rows, field.type)
        return column if column.type.equals(field.type) else column.cast(field.type, safe=False)

    def _constant(self, name: str, rows: int) -> pa.Array:
        """Return a slice of the longest array made so far."""
        made = self._repeated.get(name)
        if made is None or len(made) < rows:
            made = self._repeated[name] = pa.repeat(self._constants[name], rows)
        return made.slice(0, rows)

    def _event_times(self, table: _Table) -> pa.Array:
        if self._topic.event_time:
            column = table.stored(self._topic.event_time)
            assert column is not None, "every schema of a topic has its event time"
            return column if column.type.equals(TIMESTAMP) else column.cast(TIMESTAMP, safe=False)
        return _times(table.repeated(table.times_min))

    def _watermark(self, table: _Table) -> pa.Array:
        seen = self._part.seen
        assert seen is not None, "the planner walks over headers if the watermark is wanted"
        times = self._event_times(table).view(pa.int64()).to_numpy(zero_copy_only=False)
        found, is_none = seen_by(times, table.first_glsn, table.counts, seen, self._part.scan.strategy)
        return _times(found, is_none if is_none.any() else None)


class _Rows(NamedTuple):
    """A decoded block and the runs whose rows it holds."""

    schema: int
    first_run: int
    end_run: int
    rows: pa.RecordBatch


class _Table:
    """Some runs of one schema and their rows."""

    def __init__(self, runs: Sequence[Numbers], blocks: Sequence[_Rows]) -> None:
        within = slice(blocks[0].first_run, blocks[-1].end_run)
        is_data = runs[SCHEMA][within] != NOTHING
        own = [column[within][is_data] for column in runs[:SCHEMA]]
        self.first_llsn, self.first_glsn, self.counts, self.times, self.times_min = own
        self.rows = int(self.counts.sum())
        self.last_glsn = int(self.first_glsn[-1] + self.counts[-1] - 1)
        self._blocks = [block.rows for block in blocks]
        self._stored: dict[str, pa.Array] = {}

    def stored(self, name: str) -> pa.Array | None:
        """Return a column as it was appended, or None if this schema does not have it."""
        index = self._blocks[0].schema.get_field_index(name)
        if index < 0:
            return None
        made = self._stored.get(name)
        if made is None:
            # Concatenated only once, because the watermark needs the event times too.
            found = [block.column(index) for block in self._blocks]
            made = self._stored[name] = found[0] if len(found) == 1 else pa.concat_arrays(found)
        return made

    def repeated(self, values: Numbers) -> Numbers:
        """Repeat the value of each run for all its rows."""
        found: Numbers = np.repeat(values, self.counts)
        return found

    def rising(self, firsts: Numbers) -> Numbers:
        """Number the rows of each run, from the run's value on."""
        found = self.repeated(firsts - (np.cumsum(self.counts) - self.counts))
        found += np.arange(self.rows)
        return found


def _times(values: Numbers, is_none: NDArray[np.bool_] | None = None) -> pa.Array:
    return pa.array(values, pa.int64(), mask=is_none).view(TIMESTAMP)
