"""Implements the sink of a pipeline for Spark: tasks stage the rows of all topics, with their positions; the driver
publishes them together, exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from cutwater.client.convert.schemas import TIMESTAMP
from cutwater.client.publish.runs import Run, RunStart
from cutwater.pipeline.graph import SinkNode
from cutwater.pipeline.position import glsn_of
from cutwater.pipeline.rows import LOG_TIME, RESERVED_COLUMN
from cutwater.spark.options import Where, where_of
from cutwater.spark.pipeline.envelope import RANGE, TICK, unpacked, unpacked_range
from cutwater.spark.pipeline.error_translation import told
from cutwater.spark.pipeline.program import Program, unpickled
from cutwater.spark.session.worker_connections import link_to
from cutwater.spark.sink.sink import Staged, TaskStaging, publish_staged, stage_once
from cutwater.types import MILLISECOND, InputRange

FORMAT = "cutwater-pipeline-sink"


class PipelineSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        program, plain, start, job_epoch = unpickled(self.options["given"])
        return PipelineWriter(program, where_of(self.options), plain, start, job_epoch)


class PipelineWriter(DataSourceStreamArrowWriter):
    """Writes the output of a pipeline. Spark calls its methods in different processes, each on a copy."""

    def __init__(
        self, program: Program, where: Where, plain: frozenset[str], start: RunStart, job_epoch: int = 0
    ) -> None:
        """``plain`` are the topics without a schema. ``start`` is where the first micro-batch begins. ``job_epoch`` is
        the assignment of the job that runs the pipeline, 0 if it runs without one."""
        self._program, self._where, self._plain, self._start = program, where, plain, start
        self._job_epoch = job_epoch
        self._last_moment = -1

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        with told():
            name, stage = self._program.name, self.staged
            return stage_once(self._where, name, iterator, stage, self._start, passed_by, self._job_epoch)

    def staged(self, iterator: Iterator[pa.RecordBatch], run: Run, batch: int) -> Staged:
        """Stage the rows that one task has of a micro-batch."""
        self._last_moment = -1
        topics = {node.order: node.topic for node in self._program.plan.graph.of_type(SinkNode)}
        read: InputRange | None = None
        with TaskStaging(link_to(self._where), run, batch) as staging:
            for rows in iterator:
                for node, data in zip(rows.column("node").to_pylist(), rows.column("data"), strict=True):
                    if node == RANGE:
                        read = unpacked_range(data.as_buffer())
                    elif node != TICK:
                        for part in unpacked(data.as_buffer()).to_batches():
                            self._add(staging, topics[node], part)
            position = None if self._last_moment < 0 else int(glsn_of(self._last_moment))
            return Staged(run, batch, staging.finish(), position, tuple(sorted(staging.topics)), read)

    def _add(self, staging: TaskStaging, topic: str, batch: pa.RecordBatch) -> None:
        position = batch.column(RESERVED_COLUMN)
        if batch.num_rows:
            self._last_moment = max(self._last_moment, pc.max(position.field("moment")).as_py())
        rows = batch.drop_columns([RESERVED_COLUMN])
        if topic in self._plain and LOG_TIME not in rows.schema.names:
            # Rows without an event-time column get the time of the record, the timer or the window that they come from.
            times = pc.multiply(position.field("time"), MILLISECOND).cast(TIMESTAMP)
            rows = rows.append_column(LOG_TIME, times)
        staging.add(topic, rows, _ordered_bytes(position))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        with told():
            publish_staged(self._where, messages, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: staged rows are invisible and expire."""


def passed_by(iterator: Iterator[pa.RecordBatch], run: Run, batch: int) -> Staged:
    """Compute the rows of a decided micro-batch once more and drop them. Its range must be the decided one."""
    read: InputRange | None = None
    for rows in iterator:
        for node, data in zip(rows.column("node").to_pylist(), rows.column("data"), strict=True):
            if node == RANGE:
                read = unpacked_range(data.as_buffer())
    return Staged(run, batch, (), read=read)


def _ordered_bytes(position: pa.StructArray) -> pa.Array:
    """Return positions as bytes that sort like the positions: the moment, big-endian, then the path."""
    moments, paths = position.flatten()[:2]
    numbers = moments.to_numpy().astype(">u8")
    ends = np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(8)
    whole = pa.Array.from_buffers(
        pa.binary(), len(numbers), [None, pa.py_buffer(ends), pa.py_buffer(numbers.tobytes())]
    )
    return pc.binary_join_element_wise(whole, paths, b"")
