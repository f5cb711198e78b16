"""A streaming query that is killed at a certain point; ``test_sink_kill`` runs it as a process of its own.

It is imported and ``start`` called, so that Spark's Python processes can import it too. The points are hit in
subclasses of the product's own reader and writer: whoever comes there kills the driver's JVM and its Python, or an
executor, with SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
from msgspec import Struct
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, InputPartition

import cutwater.spark
from cutwater.admin.operations import Admin
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.spark.sink import sink
from cutwater.spark.sink.sink import BATCH_ID, Staged, StreamWriter
from cutwater.spark.source.source import CutwaterSource, StreamReader, source_class

OFFSET, READ, WRITE = "after latestOffset", "in the middle of reading", "in the middle of write"
BEFORE, INSIDE, AFTER = "before commit", "inside commit", "after commit"
DRIVER_POINTS = (OFFSET, READ, WRITE, BEFORE, INSIDE, AFTER)
EXECUTOR_POINTS = (READ, WRITE)
ROWS = "topic string, n long, batch long, round long, token string"
TOPICS = ("out-a", "out-b")
ROWS_PER_BATCH = 40


class Plan(Struct):
    """``round`` is in the rows, so that one can see which life of the driver has made them. The driver is killed at
    ``point`` of batch ``batch`` or the first one after it, executors at ``points`` of as many batches from there on."""

    servers: str
    checkpoint: str
    round: int
    marker: str
    master: str = "local[2]"
    java: str = ""
    batch: int = 0
    point: str = ""
    executor_points: tuple[str, ...] = ()
    storage_nodes: tuple[int, ...] = ()
    driver: tuple[int, ...] = ()


class Killer:
    """Travels to all processes of the query."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def driver(self, point: str, batch: int | None = None) -> None:
        if self.wants(point, batch):
            self.kill_driver()

    def wants(self, point: str, batch: int | None) -> bool:
        return self.plan.point == point and (batch is None or batch >= self.plan.batch)

    def kill_driver(self) -> None:
        Path(self.plan.marker).write_text(self.plan.point)
        for process in self.plan.driver:
            os.kill(process, signal.SIGKILL)
        os._exit(1)

    def executor(self, point: str, batch: int) -> None:
        for number, wanted in enumerate(self.plan.executor_points):
            if wanted == point and batch == self.plan.batch + number and self._is_first(number):
                # This is a worker of the executor's daemon.
                executor = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
                os.kill(executor, signal.SIGKILL)
                os._exit(1)

    def _is_first(self, number: int) -> bool:
        try:
            Path(f"{self.plan.marker}.{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def task(self, point: str) -> None:
        batch = batch_of_task()
        self.driver(point, batch)
        self.executor(point, batch)


def batch_of_task() -> int:
    context = TaskContext.get()
    assert context is not None
    return int(context.getLocalProperty(BATCH_ID) or -1)


class KilledReader(StreamReader):
    killer: Killer

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        end = super().latestOffset(start, limit)
        if end != start:
            self.killer.driver(OFFSET)
        return end

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in super().read(partition):
            yield batch.slice(0, 1)
            self.killer.task(READ)
            yield batch.slice(1)


class KilledWriter(StreamWriter):
    killer: Killer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        # Each batch is a part: so something is staged already when the process dies.
        sink.PIECE_BYTES = 1

        def noticed() -> Iterator[pa.RecordBatch]:
            for number, batch in enumerate(iterator):
                if number == 2:
                    self.killer.task(WRITE)
                yield batch

        return super().write(noticed())

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        self.killer.driver(BEFORE, batchId)
        if self.killer.wants(INSIDE, batchId) and any(message.parts for message in messages):
            self._die_inside(messages, batchId)
        super().commit(messages, batchId)
        self.killer.driver(AFTER, batchId)

    def _die_inside(self, messages: list[Any], batch: int) -> None:
        """The batch is decided on, but no storage node can publish it before the driver is dead."""
        plan, run = self.killer.plan, messages[0].run.run
        for process in plan.storage_nodes:
            os.kill(process, signal.SIGSTOP)
        try:
            threading.Thread(target=super().commit, args=(messages, batch), daemon=True).start()
            while not asyncio.run(_is_decided_and_unpublished(plan.servers, run, batch)):
                time.sleep(0.01)
            for process in plan.driver:
                os.kill(process, signal.SIGKILL)
        finally:
            for process in plan.storage_nodes:
                os.kill(process, signal.SIGCONT)
        self.killer.kill_driver()


async def _is_decided_and_unpublished(servers: str, run: int, batch: int) -> bool:
    async with Admin(parse_servers(servers)) as admin:
        runs = (await admin.describe()).runs
    return any(known.run == run and known.last_batch == batch and known.unpublished for known in runs)


def killed_source(plan: Plan) -> type[DataSource]:
    """The data source of the product, with readers and writers that kill. It is pickled with all that it refers to."""
    base = source_class(os.getpid())

    class KilledSource(base):  # type: ignore[misc, valid-type]
        killer: ClassVar[Killer] = Killer(plan)

        def streamReader(self, schema: Any) -> StreamReader:  # noqa: N802
            reader = super().streamReader(schema)
            reader.__class__, reader.killer = KilledReader, self.killer
            return reader  # type: ignore[no-any-return]

        def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:  # noqa: N802
            writer = super().streamWriter(schema, overwrite)
            writer.__class__, writer.killer = KilledWriter, self.killer
            return writer  # type: ignore[no-any-return]

    assert issubclass(KilledSource, CutwaterSource)
    return KilledSource


def marked(round_: int) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Every row for two topics, with what no two attempts have in common."""

    def mark(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        number, token = batch_of_task(), secrets.token_hex(8)
        for batch in batches:
            for topic in TOPICS:
                count = batch.num_rows
                columns = {"topic": topic, "batch": number, "round": round_, "token": token}
                constant = {name: [value] * count for name, value in columns.items()}
                yield pa.record_batch({"topic": constant.pop("topic"), "n": batch["n"], **constant})

    return mark


def start() -> None:
    """The plan is the only argument, as JSON."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    fast = {
        "spark.driver.extraJavaOptions": plan.java,
        "spark.executor.extraJavaOptions": plan.java,
        "spark.sql.shuffle.partitions": "1",
        # So that a task gets more than one.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "5",
    }
    spark = cutwater.spark.session("killed", master=plan.master, config=fast)
    spark.sparkContext.setLogLevel("ERROR")
    plan.driver = (spark.sparkContext._gateway.proc.pid, os.getpid())
    spark.dataSource.register(killed_source(plan))
    rows = (
        spark.readStream.format("cutwater")
        .options(servers=plan.servers, subscribe="in", columns="n", startingOffsets="earliest")
        .option("maxOffsetsPerTrigger", ROWS_PER_BATCH)
        .load()
        .mapInArrow(marked(plan.round), ROWS)
    )
    writer = (
        rows.writeStream.format("cutwater")
        .options(servers=plan.servers, name="copies", checkpointLocation=plan.checkpoint)
        .trigger(**({"processingTime": "0 seconds"} if plan.point else {"availableNow": True}))
    )
    cutwater.spark.start(writer).awaitTermination()
    gateway = spark.sparkContext._gateway
    spark.stop()
    # The JVM may have something to write before it ends.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
