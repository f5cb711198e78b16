"""What a task does: reads its part of one log stream and hands it to Spark as Arrow batches, whole columns at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct
from pyspark.sql.datasource import InputPartition

from cutwater.client.records import Layout
from cutwater.client.schemas import TIMESTAMP, TopicSchema
from cutwater.core.requests import TopicInfo
from cutwater.core.subscription import Run
from cutwater.core.watermark import Strategy
from cutwater.errors import Trimmed
from cutwater.spark.event_time import Numbers, Seen, seen_by
from cutwater.spark.links import Link, link_to
from cutwater.spark.options import Where
from cutwater.storage.projection import timestamps
from cutwater.types import GLSN, BatchKind, LogStreamId

_log = logging.getLogger(__name__)


class Scan(Struct, frozen=True):
    """What all tasks of a range have in common. ``columns`` is what Spark wants, ``projects`` whether storage nodes
    should leave out what is not in it."""

    where: Where
    columns: pa.Schema
    projects: bool
    strategy: Strategy
    fail_on_data_loss: bool


class Part(InputPartition):
    """The positions from ``first`` to ``last`` of one log stream. ``seen`` is there if the watermark is wanted."""

    def __init__(
        self, scan: Scan, topic: TopicInfo, stream: LogStreamId, first: GLSN, last: GLSN, seen: Seen | None
    ) -> None:
        self.scan, self.topic, self.stream = scan, topic, stream
        self.first, self.last, self.seen = first, last, seen

    def __repr__(self) -> str:
        return f"Part({self.topic.name}, log stream {self.stream}, GLSN {self.first} to {self.last})"


def read_part(part: Part) -> Iterator[pa.RecordBatch]:
    """All rows of a part. While Spark takes some, the next ones are already on their way."""
    scan, link = part.scan, link_to(part.scan.where)
    made = Batches(part)
    first = part.first
    while first <= part.last:
        try:
            begin = first
            for runs in _pieces(link, part, begin, made):
                # The records of the last run come, whether or not what follows them is still there.
                first = GLSN(runs[-1].last_glsn + 1)
                yield from made.batches([run for run in runs if run.batch.kind is BatchKind.DATA], begin)
            return
        except Trimmed as error:
            if scan.fail_on_data_loss:
                raise lost(error, part.topic.name) from error
            report_loss(error, part.topic.name)
            first = max(error.first_left, first)


def lost(error: Trimmed, topic: str) -> Trimmed:
    """The same, with what can be done about it."""
    error.add_note(
        f"The query has not read these records of topic {topic!r}, and they are gone. The first GLSN left is "
        f"{error.first_left}. With option failOnDataLoss=false it goes on there and reports what is lost."
    )
    return error


def report_loss(error: Trimmed, topic: str) -> None:
    _log.error(
        "DATA LOSS: topic %r was trimmed before this query read it: GLSN %s to %s are skipped (failOnDataLoss=false)",
        topic,
        error.asked,
        error.first_left - 1,
    )


def _pieces(link: Link, part: Part, first: GLSN, made: Batches) -> Iterator[Sequence[Run]]:
    pieces = link.ranges.pieces(part.stream, first, part.last, made.projection, patience=part.scan.where.timeout)

    async def following() -> list[Run] | None:
        return await anext(pieces, None)

    ahead = link.loop.begin(following())
    try:
        while (runs := link.loop.wait(ahead)) is not None:
            ahead = link.loop.begin(following())
            yield runs
    finally:
        ahead.cancel()


class Batches:
    """Makes batches of the columns that Spark wants from runs of one log stream."""

    def __init__(self, part: Part) -> None:
        self._part, self._columns = part, part.scan.columns
        self._topic = TopicSchema.of(part.topic)
        names = [name for name in self._columns.names if name != "watermark"]
        if part.seen is not None and "timestamp" not in names:
            names.append("timestamp")
        self._layout = Layout(self._topic, names if part.scan.projects else None)
        self.projection = {
            number: wanted
            for number, wanted in self._layout.projection.items()
            if len(wanted.columns) < len(self._topic.numbered(number) or ())
        }
        """Where everything is wanted, storage nodes need not look into batches."""

    def batches(self, runs: Sequence[Run], first: GLSN) -> Iterator[pa.RecordBatch]:
        """The rows from a position on. Neighbours of one schema become one batch."""
        start = 0
        for i in range(1, len(runs) + 1):
            if i == len(runs) or runs[i].batch.schema != runs[start].batch.schema:
                yield self._batch(runs[start:i], first)
                start = i

    def _batch(self, runs: Sequence[Run], first: GLSN) -> pa.RecordBatch:
        stored = [self._layout.stored(run) for run in runs]
        table = _Table(runs, stored[0] if len(stored) == 1 else pa.concat_batches(stored))
        arrays = [self._column(field, table) for field in self._columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._columns)
        skipped = max(0, first - runs[0].first_glsn)
        left = table.rows - skipped - max(0, runs[-1].last_glsn - self._part.last)
        return batch if left == table.rows else batch.slice(skipped, left)

    def _column(self, field: pa.Field, table: _Table) -> pa.Array:
        match field.name:
            case "topic":
                return pa.repeat(pa.scalar(self._topic.topic, pa.string()), table.rows)
            case "stream":
                return pa.repeat(pa.scalar(self._part.stream, pa.int64()), table.rows)
            case "glsn":
                return pa.array(table.rising([run.first_glsn for run in table.runs]))
            case "llsn":
                return pa.array(table.rising([run.first_llsn for run in table.runs]))
            case "ingested_at":
                return _times(table.repeated([run.time for run in table.runs]))
            case "timestamp":
                return self._event_times(table)
            case "watermark":
                return self._watermark(table)
        index = table.stored.schema.get_field_index(field.name)
        # A batch of an older schema lacks what was added since.
        column = table.stored.column(index) if index >= 0 else pa.nulls(table.rows, field.type)
        return column if column.type.equals(field.type) else column.cast(field.type, safe=False)

    def _event_times(self, table: _Table) -> pa.Array:
        if self._topic.event_time:
            return timestamps(table.stored, self._topic.event_time)
        return _times(table.repeated([run.batch.time_min for run in table.runs]))

    def _watermark(self, table: _Table) -> pa.Array:
        seen = self._part.seen
        assert seen is not None, "the planner walks over headers if the watermark is wanted"
        times = self._event_times(table).view(pa.int64()).to_numpy(zero_copy_only=False)
        firsts = np.array([run.first_glsn for run in table.runs], np.int64)
        found, is_none = seen_by(times, firsts, table.counts, seen, self._part.scan.strategy)
        return pa.array(found, pa.int64(), mask=is_none).cast(TIMESTAMP)


class _Table:
    """Some runs, and the rows that were stored with them."""

    def __init__(self, runs: Sequence[Run], stored: pa.RecordBatch) -> None:
        self.runs, self.stored = runs, stored
        self.counts: Numbers = np.array([run.batch.count for run in runs], np.int64)
        self.rows = stored.num_rows

    def repeated(self, values: Sequence[int]) -> Numbers:
        """One value per run, for each of its rows."""
        found: Numbers = np.repeat(np.array(values, np.int64), self.counts)
        return found

    def rising(self, firsts: Sequence[int]) -> Numbers:
        """One value per run for its first row, and one more for each after it."""
        starts = np.cumsum(self.counts) - self.counts
        return self.repeated(list(np.array(firsts, np.int64) - starts)) + np.arange(self.rows)


def _times(values: Numbers) -> pa.Array:
    return pa.array(values, pa.int64()).cast(TIMESTAMP)
