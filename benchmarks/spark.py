"""Measures reading through Spark, next to a Python data source that provides the same Arrow batches from memory and
next to Parquet; the shortest micro-batch; and writing, next to a Python sink that discards its rows and next to
Parquet. Run it alone: ``python -m benchmarks.spark``.

Rows that are read go into Spark's noop sink, and rows that are written come from memory. The log is embedded in this
process, so its storage node, Spark's Python workers and the JVM share the machine, which limits all of these figures.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

import cutwater
import cutwater.spark
from cutwater.client.publish.runs import Run
from cutwater.spark.sink.sink import BatchWriter, Staged
from cutwater.spark.source.read_task import ReadPartition, read_part
from cutwater.spark.source.source import BatchReader, CutwaterSource, StreamReader
from cutwater.types import RunId

ROWS, ROWS_PER_BATCH, VALUE_BYTES = 4_000_000, 1_000, 100
STREAMS = 2
ROUNDS, READ_ROUNDS = 5, 15
"""Reads are near their target, and the results of five rounds ranged from 0.70 to 0.85 within an hour."""
TRIGGERS, ROWS_PER_TRIGGER = 30, 10
BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
TOPIC, SMALL_TOPIC, COPY_TOPIC = "rows", "few", "copies"
NARROW = "glsn,value"


@cache
def _batches(path: str) -> list[pa.RecordBatch]:
    """Load the batches; they stay in memory after the first call in a worker."""
    with pa.memory_map(path) as source, pa.ipc.open_stream(source) as reader:
        return list(reader)


class MemoryPart(ReadPartition):
    def __init__(self, path: str) -> None:
        self.path = path


class MemoryReader(BatchReader):
    """Reads from memory what the real reader reads, without any request."""

    def partitions(self) -> Sequence[Any]:
        topic, columns = self.options.topics[0], self.options.columns
        found = Path(tempfile.gettempdir()).glob(f"{_name(topic, columns)}-*")
        return [MemoryPart(str(path)) for path in sorted(found)]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return iter(_batches(partition.path))


class MemoryStreamReader(StreamReader):
    """Provides the same few rows at every trigger."""

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        return {"glsn": start["glsn"] + 1}

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"glsn": 0}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[Any]:
        return MemoryReader(self.options, self._schema).partitions()

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return iter(_batches(partition.path))


class MemorySource(CutwaterSource):
    @classmethod
    def name(cls) -> str:
        return "memory_of_cutwater"

    def reader(self, schema: Any) -> Any:
        real = super().reader(schema)
        assert isinstance(real, BatchReader)
        return MemoryReader(real.options, schema)

    def streamReader(self, schema: Any) -> Any:  # noqa: N802
        real = super().streamReader(schema)
        assert isinstance(real, StreamReader)
        return MemoryStreamReader(real.options, schema)


class ForgettingWriter(BatchWriter):
    """Takes the rows that Spark provides, and discards them."""

    def __init__(self) -> None:
        pass

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        for _ in iterator:
            pass
        return Staged(Run(RunId(0), 0, -1, "", ""), 0, ())

    def commit(self, messages: list[Any]) -> None:
        pass


class ForgettingSink(CutwaterSource):
    @classmethod
    def name(cls) -> str:
        return "forgetting"

    def writer(self, schema: Any, overwrite: bool) -> ForgettingWriter:
        return ForgettingWriter()


def _name(topic: str, columns: Sequence[str] | None) -> str:
    return f"cutwater-bench-{topic}-{'-'.join(columns or ['all'])}"


def _keep(options: dict[str, str], spark: Any) -> list[Path]:
    """Write the output of the tasks of a read where ``MemoryReader`` finds it."""
    schema = spark.read.format("cutwater").options(**options).load().schema
    reader = CutwaterSource(options).reader(schema)
    paths = []
    columns = options.get("columns")
    name = _name(options["subscribe"], columns.split(",") if columns else None)
    for number, part in enumerate(reader.partitions()):
        assert isinstance(part, ReadPartition)
        path = Path(tempfile.gettempdir()) / f"{name}-{number}"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, part.scan.columns) as writer:
            for batch in read_part(part):
                writer.write_batch(batch)
        paths.append(path)
    return paths


def _rate(frame: Any) -> float:
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return ROWS / (time.perf_counter() - started)


def _fill(log: cutwater.Client) -> None:
    streams = log.create_topic(TOPIC, streams=STREAMS).streams
    for i in range(ROWS // ROWS_PER_BATCH):
        values = pa.repeat(pa.scalar(b"%0*d" % (VALUE_BYTES, i), pa.binary()), ROWS_PER_BATCH)
        log.append(TOPIC, values, stream=streams[i % STREAMS], timestamp=BEGIN + timedelta(milliseconds=i))
    log.create_topic(SMALL_TOPIC)
    for i in range(TRIGGERS):
        log.append(SMALL_TOPIC, [b"x" * VALUE_BYTES] * ROWS_PER_TRIGGER, timestamp=BEGIN + timedelta(microseconds=i))


def _rates(spark: Any, options: dict[str, str], directory: Path, kept: list[Path]) -> dict[str, list[float]]:
    """Return rows per second. Rounds alternate, so that a disturbance affects all alike."""
    kept += _keep(options, spark)
    real = spark.read.format("cutwater").options(**options).load()
    parquet = str(directory / f"parquet-{len(real.columns)}")
    real.write.parquet(parquet)
    frames = {
        "cutwater": real,
        "memory": spark.read.format(MemorySource.name()).options(**options).load(),
        "parquet": spark.read.parquet(parquet),
    }
    rates: dict[str, list[float]] = {name: [] for name in frames}
    for number in range(READ_ROUNDS + 1):
        for name, frame in frames.items():
            rate = _rate(frame)
            if number:
                rates[name].append(rate)
    return rates


def _sink_rates(spark: Any, options: dict[str, str], directory: Path) -> dict[str, list[float]]:
    """Return rows per second of writing rows from the workers' memory. Rounds alternate."""
    rows = spark.read.format(MemorySource.name()).options(**options).load().select("value")
    sinks: dict[str, Callable[[], None]] = {
        "memory": lambda: rows.write.format(ForgettingSink.name()).mode("append").save(),
        "cutwater": lambda: (
            rows.write.format("cutwater").mode("append").options(servers=options["servers"], topic=COPY_TOPIC).save()
        ),
        "parquet": lambda: rows.write.mode("overwrite").parquet(str(directory / "written")),
    }
    rates: dict[str, list[float]] = {name: [] for name in sinks}
    for number in range(ROUNDS + 1):
        for name, write in sinks.items():
            started = time.perf_counter()
            write()
            if number:
                rates[name].append(ROWS / (time.perf_counter() - started))
    return rates


def _floor(spark: Any, form: str, options: dict[str, str], checkpoint: Path) -> float:
    """Return the median milliseconds of a micro-batch with a few rows."""
    stream = spark.readStream.format(form).options(**options, startingOffsets="earliest")
    writer = stream.option("maxOffsetsPerTrigger", ROWS_PER_TRIGGER).load().writeStream.format("noop")
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(processingTime="0 seconds")
    query = cutwater.spark.start(writer)
    try:
        while sum(progress["numInputRows"] > 0 for progress in query.recentProgress) < TRIGGERS:
            if query.exception() is not None:
                raise RuntimeError(str(query.exception()))
            time.sleep(0.1)
    finally:
        query.stop()
    times = [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"] > 0]
    return float(median(times[TRIGGERS // 3 :]))


def measure() -> dict[str, Any]:
    kept: list[Path] = []
    with tempfile.TemporaryDirectory() as directory, cutwater.open(Path(directory) / "log") as log:
        _fill(log)
        spark = cutwater.spark.session("bench", master=f"local[{STREAMS}]")
        try:
            spark.sparkContext.setLogLevel("ERROR")
            spark.dataSource.register(MemorySource)
            spark.dataSource.register(ForgettingSink)
            where = {"servers": log.servers, "subscribe": TOPIC}
            wide = _rates(spark, where, Path(directory), kept)
            narrow = _rates(spark, {**where, "columns": NARROW}, Path(directory), kept)
            log.create_topic(COPY_TOPIC, streams=STREAMS)
            sinks = _sink_rates(spark, {**where, "columns": NARROW}, Path(directory))
            few = {"servers": log.servers, "subscribe": SMALL_TOPIC}
            kept += _keep({**few, "endingOffsets": f'{{"glsn": {_first_of(log)}}}'}, spark)
            floors = {
                "cutwater": _floor(spark, "cutwater", few, Path(directory) / "checkpoint-1"),
                "memory": _floor(spark, MemorySource.name(), few, Path(directory) / "checkpoint-2"),
            }
        finally:
            spark.stop()
            for path in kept:
                path.unlink(missing_ok=True)
    return {"all columns": wide, NARROW: narrow, "sinks": sinks, "floor": floors}


def _first_of(log: cutwater.Client) -> int:
    return next(iter(log.subscribe(SMALL_TOPIC, follow=False))).glsn


def lines() -> Iterator[str]:
    found = measure()
    yield from (
        "## Spark",
        "",
        f"{ROWS:,} rows with values of {VALUE_BYTES} bytes, {STREAMS} log streams, appended {ROWS_PER_BATCH:,} at a "
        f"time, into the noop sink; Spark with {STREAMS} cores. Ratios are medians of {READ_ROUNDS} rounds for reads "
        f"and of {ROUNDS} for writes.",
        "",
        "| read | thousand rows/s | ratio | limit |",
        "| --- | ---: | ---: | --- |",
    )
    for name in ("all columns", NARROW):
        rates = found[name]
        for source, what in (
            ("memory", "Python data source, the same Arrow batches from memory (reference)"),
            ("cutwater", "`cutwater`"),
            ("parquet", "Parquet, read by Spark itself"),
        ):
            ratio = median(mine / theirs for mine, theirs in zip(rates[source], rates["memory"], strict=True))
            yield f"| {name}: {what} | {median(rates[source]) / 1_000:,.0f} | {ratio:.2f} | CPU |"
    yield from ("", "| write, values only | thousand rows/s | ratio | limit |", "| --- | ---: | ---: | --- |")
    rates = found["sinks"]
    for sink, what in (
        ("memory", "Python data sink that forgets its Arrow batches (reference)"),
        ("cutwater", "`cutwater`: staged, synced, decided, published and synced"),
        ("parquet", "Parquet, written by Spark itself, not synced"),
    ):
        ratio = median(mine / theirs for mine, theirs in zip(rates[sink], rates["memory"], strict=True))
        yield f"| {what} | {median(rates[sink]) / 1_000:,.0f} | {ratio:.2f} | CPU |"
    floors = found["floor"]
    yield from (
        "",
        "| micro-batch with ten rows | ms | ratio | limit |",
        "| --- | ---: | ---: | --- |",
        f"| Python source with one task, rows in memory (reference) | {floors['memory']:.0f} | 1 | CPU |",
        f"| `cutwater` | {floors['cutwater']:.0f} | {floors['cutwater'] / floors['memory']:.2f} | CPU |",
        "",
    )


if __name__ == "__main__":
    # Spark's workers know this module by its import name only, which differs from ``__main__``.
    print("\n".join(import_module("benchmarks.spark").lines()))
