"""Pipelines on Spark next to Spark's own operators, in one run: rows per second of whole micro-batches.

All of them read the same Arrow files through a Python data source, on two cores. Figures are of a whole minute of event
time, six micro-batches, after all keys are known and the first timers have fired; each key that had a record fires once
in it. Run it alone: ``python -m benchmarks.pipeline_spark``, optionally with numbers of keys as arguments:
``… 10000000``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

import cutwater.spark
from cutwater.pipeline import Pipeline, ProcessFunction, Tumbling, ValueState, Watermark
from cutwater.pipeline.clocks.clock_steps import Steps, Ticks, watermark_step
from cutwater.pipeline.rows import RESERVED_COLUMN, RowType
from cutwater.spark.pipeline.envelope import COLUMNS, TICK, by_slice, envelope_batch, packed, packed_ticks, positions
from cutwater.spark.pipeline.operator import LevelProcessor
from cutwater.spark.pipeline.program import Program, pickled, unpickled
from cutwater.spark.pipeline.state import forget

# Only ``cutwater.spark`` may import PySpark; benchmarks look its modules up at run time.
sources: Any = import_module("pyspark.sql.datasource")
limits: Any = import_module("pyspark.sql.streaming.datasource")
processors: Any = import_module("pyspark.sql.streaming.stateful_processor")
spark_sql: Any = import_module("pyspark.sql")

ROWS = RowType.of("user string, at bigint, amount double")
TOPIC = frozenset({"in"})
PARTITIONS = 2
PER_MS = 20
BATCH = 200_000
BATCHES = 6
"""A minute of event time."""
WARM = 7
"""Micro-batches until timers fire."""
BATCH_PER_KEY = 10_000
"""Rows per micro-batch for the operator that asks the state store for each key."""
KEYS = (1_000, 100_000, 1_000_000, 10_000_000)
KEYS_FOR_ALL = 1_000_000
"""With more keys than this only the first case is measured: making them all known takes the longest."""


class Count(ProcessFunction):
    n = ValueState("bigint", default=0)

    def process(self, record: Any, ctx: Any) -> None:
        self.n.set(self.n.get() + 1)


class CountWithTimer(Count):
    """A count per key, and a timer that emits it at the end of the minute."""

    def process(self, record: Any, ctx: Any) -> None:
        self.n.set(self.n.get() + 1)
        ctx.timers.at(ctx.timestamp // 60_000 * 60_000 + 60_000)

    def on_timer(self, time: int, ctx: Any) -> Iterator[Any]:
        yield {"user": ctx.key, "n": self.n.get()}


def write_files(directory: Path, keys: int, rows: int, batches: int) -> None:
    """Write one file of plain rows per micro-batch and partition."""
    for number in range(batches):
        for part in range(PARTITIONS):
            glsns = np.arange(number * rows + part, (number + 1) * rows, PARTITIONS, dtype=np.int64)
            users = pa.array([f"user-{i}" for i in (glsns * 7919 % keys).tolist()])
            batch = pa.RecordBatch.from_arrays(
                [users, pa.array(glsns // PER_MS), pa.array(np.full(len(glsns), 1.5)), pa.array(glsns + 1)],
                names=["user", "at", "amount", "glsn"],
            )
            (directory / f"{number}-{part}").write_bytes(packed(batch))


class FilesReader(sources.DataSourceStreamReader, limits.SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reads one micro-batch after the other."""

    def __init__(self, options: dict[str, str]) -> None:
        self._directory = Path(options["directory"])
        self._batches = int(options["batches"])
        self._program = options.get("program")
        self._rows = int(options["rows"])

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        return limits.ReadAllAvailable()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"n": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        return {"n": min(start["n"] + 1, self._batches)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Any]:
        if end["n"] <= start["n"]:
            return []
        return [sources.InputPartition((start["n"], part)) for part in range(PARTITIONS)]

    def commit(self, end: dict[str, int]) -> None:
        pass

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        number, part = partition.value
        with pa.ipc.open_stream(pa.memory_map(str(self._directory / f"{number}-{part}"))) as stream:
            batch = stream.read_next_batch()
        if self._program is None:
            at = pc.multiply(batch.column("at"), 1000).cast(pa.timestamp("us", "UTC"))
            yield pa.RecordBatch.from_arrays(
                [batch.column("user"), at, batch.column("amount")], names=["user", "at", "amount"]
            )
            return
        (program,) = unpickled(self._program)
        spec = program.plan.levels[0][0]
        column = positions(batch.column("glsn").to_numpy(), batch.column("at").to_numpy())
        made = pa.RecordBatch.from_arrays([*batch.columns[:3], column], names=[*ROWS.names, RESERVED_COLUMN])
        rows: list[tuple[int, int, int, bytes]] = [
            (program.keys[index], spec.order, 0, packed(own)) for index, own in by_slice(made, spec, 0, program.slices)
        ]
        if part == 0:
            tick = packed_ticks(ticks_of(number, self._rows))
            rows += [(key, TICK, 0, tick) for key in program.keys]
        yield envelope_batch(rows)


def ticks_of(number: int, rows: int) -> Ticks:
    """Return the watermark steps of a batch: it rises with every new event time."""
    first = number * rows
    steps = Steps(first // PER_MS - 1)
    for i in range(PER_MS, rows + 1, PER_MS):
        steps.add(watermark_step(first + i), (first + i) // PER_MS - 1)
    return Ticks({TOPIC: steps}, Steps(0))


class PlainFiles(sources.DataSource):  # type: ignore[misc]
    @classmethod
    def name(cls) -> str:
        return "plain-files"

    def schema(self) -> str:
        return "user string, at timestamp, amount double"

    def streamReader(self, schema: Any) -> Any:  # noqa: N802
        return FilesReader(dict(self.options))


class EnvelopeFiles(PlainFiles):
    @classmethod
    def name(cls) -> str:
        return "envelope-files"

    def schema(self) -> str:
        return COLUMNS


class PerKeyCount(processors.StatefulProcessor):  # type: ignore[misc]
    def init(self, handle: Any) -> None:
        self._n = handle.getValueState("n", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        count = self._n.get()[0] if self._n.exists() else 0
        count += sum(1 for _ in rows)
        self._n.update((count,))
        yield spark_sql.Row(user=key[0], n=count)

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
    """The files for one number of keys, and the queries that process them."""

    def __init__(self, spark: Any, keys: int, rows: int = BATCH, warm: int | None = None) -> None:
        """``warm``: number of micro-batches that are not measured; by default until all keys are known."""
        self._spark, self._rows = spark, rows
        self._warm = warm if warm is not None else max(WARM, -(-keys // rows))
        self._directory = Path(tempfile.mkdtemp(prefix="cutwater-bench-"))
        write_files(self._directory, keys, rows, self._warm + BATCHES)

    def close(self) -> None:
        shutil.rmtree(self._directory)

    def _source(self, kind: str, **options: str) -> Any:
        own = {"directory": str(self._directory), "batches": str(self._warm + BATCHES), "rows": str(self._rows)}
        return self._spark.readStream.format(kind).options(**own, **options).load()

    def ours(self, build: Build) -> float:
        program = program_of(build)
        processor = LevelProcessor(program, 0)
        grouped = self._source("envelope-files", program=pickled(program)).groupBy("slice")
        return self._rate(grouped.transformWithState(processor, COLUMNS, "Append", "None"), "append")

    def native_count(self) -> float:
        return self._rate(self._source("plain-files").groupBy("user").count(), "update")

    def native_window(self) -> float:
        late = self._source("plain-files").withWatermark("at", "0 seconds")
        window = spark_sql.functions.window("at", "10 seconds")
        return self._rate(late.groupBy(window, "user").count(), "append")

    def per_key(self) -> float:
        grouped = self._source("plain-files").groupBy("user")
        return self._rate(
            grouped.transformWithState(PerKeyCount(), "user string, n bigint", "Update", "None"), "update"
        )

    def _rate(self, made: Any, mode: str) -> float:
        """Return rows per second over all measured micro-batches."""
        # A new place each time: Spark may still write snapshots to the place of the query before.
        checkpoint = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=self._directory))
        options = {"checkpointLocation": str(checkpoint)}
        writer = made.writeStream.format("noop").outputMode(mode).options(**options).trigger(availableNow=True)
        query = writer.start()
        query.awaitTermination()
        timed = [own for own in query.recentProgress if self._warm <= own["batchId"] < self._warm + BATCHES]
        forget(str(query.id))
        assert len(timed) == BATCHES, f"{len(timed)} of {BATCHES} micro-batches were seen"
        return self._rows * BATCHES / sum(float(own["durationMs"]["triggerExecution"]) / 1000 for own in timed)


def lines(all_keys: Sequence[int] = KEYS) -> Iterator[str]:
    """Yield the figures as rows of a table."""
    config = {"spark.sql.shuffle.partitions": str(PARTITIONS)}
    spark = cutwater.spark.session("bench", master=f"local[{PARTITIONS}]", config=config)
    spark.sparkContext.setLogLevel("ERROR")
    for kind in (PlainFiles, EnvelopeFiles):
        spark.dataSource.register(kind)
    cases: dict[str, Callable[[Bench], float]] = {
        "process: count, Python per record": lambda bench: bench.ours(process(Count())),
        "process: count and timer, Python per record": lambda bench: bench.ours(process(CountWithTimer())),
        "Spark's own count": Bench.native_count,
        "window: count": lambda bench: bench.ours(window),
        "Spark's own count by window": Bench.native_window,
    }
    rates: dict[str, list[str]] = {name: [] for name in cases}
    # A new session is several times as slow.
    cold = Bench(spark, KEYS[0])
    cold.ours(process(Count()))
    cold.close()
    per_key = "-"
    memory: dict[str, list[int]] = {}
    for keys in all_keys:
        bench = Bench(spark, keys)
        try:
            for number, (name, measure) in enumerate(cases.items()):
                if number and keys > KEYS_FOR_ALL:
                    rates[name].append("")
                    continue
                rates[name].append(f"{measure(bench) / 1_000:,.0f}")
                for program, size in _most_memory(os.getpid()):
                    memory.setdefault(program, []).append(size)
                sys.stderr.write(f"{keys:,} keys, {name}: {rates[name][-1]}k rows/s\n")
        finally:
            bench.close()
        if keys == KEYS[1]:
            per_key = f"{_per_key(spark, keys) / 1_000:,.1f}"
    java, python = (max(memory.get(kind, [0])) / 1024 for kind in ("java", "python"))
    yield from ("", "## Pipelines on Spark", "")
    yield f"A minute of event time, {BATCHES} micro-batches of {BATCH:,} rows; a timer fires once for each key in it."
    yield ""
    yield f"| thousand rows/s on {PARTITIONS} cores, at keys | {' | '.join(f'{keys:,}' for keys in all_keys)} |"
    yield f"| --- |{' ---: |' * len(all_keys)}"
    for name, found in rates.items():
        yield f"| {name} | {' | '.join(found)} |"
    own = [per_key if keys == KEYS[1] else "" for keys in all_keys]
    yield f"| Spark's `transformWithState`, count per key | {' | '.join(own)} |"
    yield ""
    yield f"Most memory that one process had: {java:,.0f} MiB in Java, {python:,.0f} MiB in a Python worker."


def _most_memory(process: int) -> Iterator[tuple[str, int]]:
    """Yield, for all live processes below this one, the kind of program and its peak memory in KiB."""
    for child in Path(f"/proc/{process}/task").glob("*/children"):
        for number in map(int, child.read_text().split()):
            with suppress(OSError):
                status = dict(line.split(":", 1) for line in Path(f"/proc/{number}/status").read_text().splitlines())
                kind = "java" if "java" in status["Name"] else "python"
                yield kind, int(status.get("VmHWM", "0 kB").split()[0])
                yield from _most_memory(number)


def _per_key(spark: Any, keys: int) -> float:
    """Measure with small micro-batches, each row with a key of its own: they take long enough."""
    bench = Bench(spark, keys, BATCH_PER_KEY, warm=1)
    try:
        return bench.per_key()
    finally:
        bench.close()


def main() -> None:
    for text in lines([int(given) for given in sys.argv[1:]] or KEYS):
        print(text, flush=True)


if __name__ == "__main__":
    # Spark's workers look the classes up by the module's name.
    import_module("benchmarks.pipeline_spark").main()
