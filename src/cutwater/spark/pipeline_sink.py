"""The sink of a pipeline as Spark sees it: tasks stage the rows of all topics, with their positions; the driver
publishes them, exactly once and as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from cutwater.client.runs import Run
from cutwater.client.schemas import TIMESTAMP
from cutwater.pipeline.graph import SinkNode
from cutwater.pipeline.rows import RESERVED_COLUMN, RowType
from cutwater.spark.links import link_to
from cutwater.spark.options import Where, where_of
from cutwater.spark.output_guard import OutputGuard
from cutwater.spark.pipeline_envelope import TICK, unpacked
from cutwater.spark.pipeline_errors import told
from cutwater.spark.pipeline_program import Program, unpickled
from cutwater.spark.pipeline_records import LOG_TIME
from cutwater.spark.sink import Staged, publish_staged, stage_once
from cutwater.spark.staging import Staging
from cutwater.types import MILLISECOND

FORMAT = "cutwater-pipeline-sink"


class PipelineSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        program, plain, guard = unpickled(self.options["given"])
        return PipelineWriter(program, where_of(self.options), plain, guard)


class PipelineWriter(DataSourceStreamArrowWriter):
    """Its methods are called in different processes, each on a copy."""

    def __init__(self, program: Program, where: Where, plain: frozenset[str], guard: OutputGuard | None = None) -> None:
        """``plain``: the topics without a schema. ``guard``: what the first micro-batch must not repeat."""
        self._program, self._where, self._plain, self._guard = program, where, plain, guard

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        with told():
            return stage_once(self._where, self._program.name, iterator, self.staged, self.check)

    def check(self, run: Run) -> None:
        """Whether a run that was opened may publish its first micro-batch."""
        if self._guard is not None and run.last_batch < 0:
            link = link_to(self._where)
            self._guard.require_nothing_beyond(link.loop.run(link.client().find_runs(run.name)), run.key)

    def staged(self, iterator: Iterator[pa.RecordBatch], run: Run, batch: int) -> Staged:
        """Stage what one task has of a micro-batch."""
        topics = {node.order: node.topic for node in self._program.plan.graph.of_type(SinkNode)}
        with Staging(link_to(self._where), run, batch) as staging:
            for rows in iterator:
                for node, data in zip(rows.column("node").to_pylist(), rows.column("data"), strict=True):
                    if node != TICK:
                        for part in unpacked(data.as_buffer()).to_batches():
                            self._add(staging, topics[node], part)
            return Staged(run, batch, staging.finish())

    def _add(self, staging: Staging, topic: str, batch: pa.RecordBatch) -> None:
        position = batch.column(RESERVED_COLUMN)
        rows = batch.drop_columns([RESERVED_COLUMN])
        if topic in self._plain and LOG_TIME not in rows.schema.names:
            # What has no column of event time gets that of the record, the timer or the window it comes from.
            times = pc.multiply(position.field("time"), MILLISECOND).cast(TIMESTAMP)
            rows = rows.append_column(LOG_TIME, times)
        staging.add(topic, rows, _ordered_bytes(position))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        with told():
            publish_staged(self._where, messages, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What is staged is not seen by anyone, and expires."""


def _ordered_bytes(position: pa.StructArray) -> pa.Array:
    """Positions as bytes that sort as they do: the moment, big-endian, then the path."""
    moments, paths = position.flatten()[:2]
    numbers = moments.to_numpy().astype(">u8")
    ends = np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(8)
    whole = pa.Array.from_buffers(
        pa.binary(), len(numbers), [None, pa.py_buffer(ends), pa.py_buffer(numbers.tobytes())]
    )
    return pc.binary_join_element_wise(whole, paths, b"")


def check_sink(topic: str, declared: pa.Schema, rows: RowType) -> str:
    """What is wrong with writing such rows to a topic with this schema; an empty text if nothing is."""
    given = (*rows.names, LOG_TIME)
    missing = [field.name for field in declared if field.name not in given and not field.nullable]
    unknown = [name for name in rows.names if name not in declared.names]
    if unknown:
        return f"the topic {topic!r} has no column {unknown[0]!r}: it has {', '.join(declared.names)}"
    if missing:
        return f"the topic {topic!r} needs the column {missing[0]!r}, which the rows do not have: {rows}"
    return ""
