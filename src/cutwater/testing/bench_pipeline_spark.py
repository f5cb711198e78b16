"""Pipelines on Spark next to Spark's own operators, in one run: rows per second of whole micro-batches.

All of them read the same Arrow files through a Python data source. Figures are medians over the micro-batches after all
keys are known. Run it alone: ``python -m cutwater.testing.bench_pipeline_spark``.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from cutwater.pipeline import Pipeline, ProcessFunction, Tumbling, ValueState, Watermark
from cutwater.pipeline.rows import RESERVED_COLUMN, RowType
from cutwater.pipeline.steps import Steps, Ticks, watermark_step
from cutwater.spark.pipeline_envelope import COLUMNS, SCHEMA, TICK, packed, packed_ticks
from cutwater.spark.pipeline_operator import LevelProcessor
from cutwater.spark.pipeline_program import Program
from cutwater.spark.pipeline_routing import by_slice, positions

ROWS = RowType.of("user string, at bigint, amount double")
TOPIC = frozenset({"in"})
SLICES = 16
PARTITIONS = 2
PER_MS = 20


class Count(ProcessFunction):
    n = ValueState("bigint", default=0)

    def process(self, record: Any, ctx: Any) -> None:
        self.n.set(self.n.get() + 1)


class CountWithTimer(Count):
    """A count per key, and a timer that gives it out once the watermark is a minute past the record."""

    def process(self, record: Any, ctx: Any) -> None:
        self.n.set(self.n.get() + 1)
        ctx.timers.at(ctx.timestamp // 10_000 * 10_000 + 60_000)

    def on_timer(self, time: int, ctx: Any) -> Iterator[Any]:
        yield {"user": ctx.key, "n": self.n.get()}


def write_files(directory: Path, keys: int, rows: int, batches: int) -> None:
    """Per micro-batch and partition one file of plain rows."""
    for number in range(batches):
        for part in range(PARTITIONS):
            glsns = np.arange(number * rows + part, (number + 1) * rows, PARTITIONS, dtype=np.int64)
            users = pa.array([f"user-{i}" for i in (glsns * 7919 % keys).tolist()])
            batch = pa.RecordBatch.from_arrays(
                [users, pa.array(glsns // PER_MS), pa.array(np.full(len(glsns), 1.5)), pa.array(glsns + 1)],
                names=["user", "at", "amount", "glsn"],
            )
            (directory / f"{number}-{part}").write_bytes(packed(batch))


class FilesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One micro-batch after the other."""

    def __init__(self, options: dict[str, str]) -> None:
        self._directory = Path(options["directory"])
        self._batches = int(options["batches"])
        self._program = options.get("program")
        self._rows = int(options["rows"])

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"n": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        return {"n": min(start["n"] + 1, self._batches)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        if end["n"] <= start["n"]:
            return []
        return [InputPartition((start["n"], part)) for part in range(PARTITIONS)]

    def commit(self, end: dict[str, int]) -> None:
        pass

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        number, part = partition.value
        with pa.ipc.open_stream(pa.memory_map(str(self._directory / f"{number}-{part}"))) as stream:
            batch = stream.read_next_batch()
        if self._program is None:
            at = pa.compute.multiply(batch.column("at"), 1000).cast(pa.timestamp("us", "UTC"))
            yield pa.RecordBatch.from_arrays(
                [batch.column("user"), at, batch.column("amount")], names=["user", "at", "amount"]
            )
            return
        program: Program = _load(self._program)
        spec = program.plan.levels[0][0]
        column = positions(batch.column("glsn").to_numpy(), batch.column("at").to_numpy())
        made = pa.RecordBatch.from_arrays([*batch.columns[:3], column], names=[*ROWS.names, RESERVED_COLUMN])
        rows: list[tuple[int, int, int, bytes]] = [
            (program.keys[index], spec.order, 0, packed(own)) for index, own in by_slice(made, spec, 0, SLICES)
        ]
        if part == 0:
            tick = packed_ticks(ticks_of(number, self._rows))
            rows += [(key, TICK, 0, tick) for key in program.keys]
        columns = [list(column) for column in zip(*rows, strict=True)]
        yield pa.RecordBatch.from_arrays(
            [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
        )


def ticks_of(number: int, rows: int) -> Ticks:
    """The watermark rises with every new event time."""
    first = number * rows
    steps = Steps(first // PER_MS - 1)
    for i in range(PER_MS, rows + 1, PER_MS):
        steps.add(watermark_step(first + i), (first + i) // PER_MS - 1)
    return Ticks({TOPIC: steps}, Steps(0))


def _load(path: str) -> Any:
    from pyspark import cloudpickle

    return cloudpickle.loads(Path(path).read_bytes())


class PlainFiles(DataSource):
    @classmethod
    def name(cls) -> str:
        return "plain-files"

    def schema(self) -> str:
        return "user string, at timestamp, amount double"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
        return FilesReader(dict(self.options))


class EnvelopeFiles(PlainFiles):
    @classmethod
    def name(cls) -> str:
        return "envelope-files"

    def schema(self) -> str:
        return COLUMNS


class PerKeyCount(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._n = handle.getValueState("n", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        from pyspark.sql import Row

        count = self._n.get()[0] if self._n.exists() else 0
        count += sum(1 for _ in rows)
        self._n.update((count,))
        yield Row(user=key[0], n=count)

    def close(self) -> None:
        pass


Build = Callable[[Any], Any]


def process(function: ProcessFunction) -> Build:
    return lambda s: s.process(key="user", function=function, uid="x", schema="user string, n bigint")


def window(s: Any) -> Any:
    return s.window(key="user", window=Tumbling("10s"), aggregate={"n": "count(*)"}, uid="x")


def program_of(build: Build) -> Program:
    p = Pipeline("bench")
    build(p.source("in", schema=ROWS, event_time="at", watermark=Watermark.ascending())).sink("out", uid="out")
    return Program("bench", p.graph, {"in": ROWS}, parallelism=PARTITIONS)


class Bench:
    def __init__(self, spark: SparkSession, keys: int, rows: int, batches: int) -> None:
        self._spark, self._rows, self._batches = spark, rows, batches
        self._warm = max(2, -(-keys // rows))
        self._directory = Path(tempfile.mkdtemp())
        write_files(self._directory, keys, rows, self._warm + batches)

    def close(self) -> None:
        shutil.rmtree(self._directory)

    def source(self, kind: str, **options: str) -> DataFrame:
        return (
            self._spark.readStream.format(kind)
            .options(directory=str(self._directory), batches=str(self._warm + self._batches), rows=str(self._rows))
            .options(**options)
            .load()
        )

    def ours(self, build: Build) -> float:
        from pyspark import cloudpickle

        program = program_of(build)
        path = self._directory / "program"
        path.write_bytes(cloudpickle.dumps(program))
        made = (
            self.source("envelope-files", program=str(path))
            .groupBy("slice")
            .transformWithState(LevelProcessor(program, 0), COLUMNS, "Append", "None")
        )
        return self.rate(made, "append")

    def rate(self, made: DataFrame, mode: str) -> float:
        checkpoint = self._directory / "checkpoint"
        query = (
            made.writeStream.format("noop")
            .outputMode(mode)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        progress = query.recentProgress
        shutil.rmtree(checkpoint)
        timed = [
            own for own in progress if own["batchId"] >= self._warm and own["batchId"] < self._warm + self._batches
        ]
        seconds = [own["durationMs"]["triggerExecution"] / 1000 for own in timed]
        return self._rows / statistics.median(seconds)


def main() -> None:
    from cutwater.spark.session import session

    rows, batches = int(sys.argv[2]), int(sys.argv[3])
    spark = session("bench", master="local[2]", config={"spark.sql.shuffle.partitions": str(PARTITIONS)})
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(PlainFiles)
    spark.dataSource.register(EnvelopeFiles)
    for keys in map(int, sys.argv[1].split(",")):
        bench = Bench(spark, keys, rows, batches)
        cases: dict[str, Callable[[], float]] = {
            "count": lambda bench=bench: bench.ours(process(Count())),
            "timer": lambda bench=bench: bench.ours(process(CountWithTimer())),
            "window": lambda bench=bench: bench.ours(window),
            "native": lambda bench=bench: bench.rate(bench.source("plain-files").groupBy("user").count(), "update"),
            "native window": lambda bench=bench: bench.rate(
                bench.source("plain-files")
                .withWatermark("at", "0 seconds")
                .groupBy(f.window("at", "10 seconds"), "user")
                .count(),
                "append",
            ),
            "per key": lambda bench=bench: bench.rate(
                bench.source("plain-files")
                .groupBy("user")
                .transformWithState(PerKeyCount(), "user string, n bigint", "Update", "None"),
                "update",
            ),
        }
        for name in sys.argv[4].split(","):
            started = time.perf_counter()
            rate = cases[name]()
            sys.stdout.write(f"{keys:>9,} {name:14} {rate / 1000:8.1f}k/s  ({time.perf_counter() - started:.0f} s)\n")
            sys.stdout.flush()
        bench.close()


if __name__ == "__main__":
    main()
