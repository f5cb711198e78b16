"""Drivers that are paused in the middle of a micro-batch; ``test_paused_drivers`` runs this as a process of its own.

It is imported and ``start`` called, so that Spark's Python processes can import it too. The points are hit in
subclasses of the product's own source and sink, which wait there until they are released. Each pipeline has a point of
its own, so that one process with one JVM is paused at all of them at once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import Struct, structs
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

import cutwater.spark
from cutwater.errors import CutwaterError
from cutwater.pipeline import Pipeline
from cutwater.spark.pipeline import runner
from cutwater.spark.pipeline.operator import LevelProcessor
from cutwater.spark.pipeline.sink import PipelineSink, PipelineWriter
from cutwater.spark.pipeline.source import PipelineReader, PipelineSource
from cutwater.spark.sink.sink import BATCH_ID
from tests.spark import programs

PLANNED, READING = "planned", "reading"
STATE, STAGED, DECIDED = "state-half-committed", "staged", "decided"
POINTS = (PLANNED, READING, STATE, STAGED, DECIDED)
"""After the offsets were written and before any task; while tasks read; when one of two state stores has committed and
the other has not; when all rows are staged and nothing is decided; when the batch is decided and Spark has not noted
it as done."""
FIRST = 3
"""The assignment whose drivers are paused."""
BATCH = 2
"""The micro-batch in which a driver is paused."""
ROWS_PER_BATCH = 40
PARALLELISM, SLICES = 2, 4
PAUSES = "CUTWATER_TEST_PAUSES"
"""Environment variable: the directory in which paused drivers leave a file per point, and wait for the file ``go``."""
WAIT_SECONDS_MAX = 600


class Plan(Struct):
    """Pipelines by point; each has the checkpoint ``<directory>/<point>/epoch-<epoch>``."""

    servers: str
    topic: str
    prefix: str
    directory: str
    points: tuple[str, ...]
    epoch: int
    succeeds: int = 0
    trigger: str | None = None

    def pipeline(self, point: str) -> Pipeline:
        return programs.pipeline(f"{self.prefix}-{point}", self.servers, self.topic)

    def checkpoint(self, point: str, epoch: int = 0) -> str:
        return f"{self.directory}/{point}/epoch-{epoch or self.epoch}"

    def ended(self, point: str) -> Path:
        """The file with the code of the error that ended the run, empty if there was none."""
        return Path(self.directory) / f"{point}.ended-{self.epoch}"

    def run(self, point: str, **more: Any) -> Any:
        """Run the pipeline of a point, in small micro-batches if they are to be many."""
        return self.pipeline(point).run(
            checkpoint=self.checkpoint(point),
            parallelism=PARALLELISM,
            slices=SLICES,
            max_records_per_trigger=None if "until" in more else ROWS_PER_BATCH,
            trigger=self.trigger,
            job_epoch=self.epoch,
            succeeds=self.checkpoint(point, self.succeeds) if self.succeeds else None,
            **more,
        )


def reached(name: str, point: str) -> bool:
    """Pause here if this pipeline has this point. Returns whether it does."""
    if not name.endswith(f"-{point}"):
        return False
    directory = Path(os.environ[PAUSES])
    if not (directory / "go").exists():
        (directory / f"{point}.reached").touch()
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not (directory / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    return True


def batch_of_task() -> int:
    context = TaskContext.get()
    assert context is not None
    return int(context.getLocalProperty(BATCH_ID) or -1)


def partition_of_task() -> int:
    context = TaskContext.get()
    assert context is not None
    return int(context.partitionId())


class PausedReader(PipelineReader):
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        found = super().partitions(start, end)
        # The driver has no other way to know its micro-batch.
        point = self._program.name.partition("-")[2]
        if (Path(os.environ[PAUSES]) / point / f"epoch-{FIRST}" / "offsets" / str(BATCH)).exists():
            reached(self._program.name, PLANNED)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in super().read(partition):
            yield batch
            if batch_of_task() == BATCH:
                reached(self._program.name, READING)


class PausedSource(PipelineSource):
    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
        reader: Any = super().streamReader(schema)
        reader.__class__ = PausedReader
        return reader  # type: ignore[no-any-return]


class PausedProcessor(LevelProcessor):
    """One task of the last level stops before its input; the other one goes on, and its store commits."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        is_last = self._level + 1 == len(self._program.plan.levels)
        if is_last and batch_of_task() == BATCH and partition_of_task() == 0:
            reached(self._program.name, STATE)
        yield from super().handleInputRows(key, rows, timerValues)


class PausedWriter(PipelineWriter):
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        if batchId == BATCH:
            reached(self._program.name, STAGED)
        super().commit(messages, batchId)
        if batchId == BATCH:
            reached(self._program.name, DECIDED)


class PausedSink(PipelineSink):
    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        writer: Any = super().streamWriter(schema, overwrite)
        writer.__class__ = PausedWriter
        return writer  # type: ignore[no-any-return]


def wait(run: Any, ended: Path) -> None:
    code = ""
    try:
        run.wait()
    except CutwaterError as error:
        code = error.code
    unfinished = ended.with_suffix(".unfinished")
    unfinished.write_text(code)
    unfinished.rename(ended)


def start() -> None:
    """The plan is the only argument, as JSON. Drivers of the first assignment are paused, others are not."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    if PAUSES in os.environ:
        runner.PipelineSource, runner.PipelineSink = PausedSource, PausedSink  # type: ignore[misc]
        runner.LevelProcessor = PausedProcessor  # type: ignore[misc]
    spark = cutwater.spark.session("paused", master=f"local[{PARALLELISM * len(plan.points)}]")
    spark.sparkContext.setLogLevel("ERROR")
    waiting = []
    for point in plan.points:
        run = plan.run(point, spark=spark, wait=False)
        waiting.append(threading.Thread(target=wait, args=(run, plan.ended(point))))
        waiting[-1].start()
    for thread in waiting:
        thread.join()
    # It lives on until it is killed.
    time.sleep(WAIT_SECONDS_MAX)


def of_epoch(plan: Plan, epoch: int, succeeds: int = 0, **more: Any) -> Plan:
    return structs.replace(plan, epoch=epoch, succeeds=succeeds, **more)
