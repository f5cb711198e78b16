"""The format ``cutwater`` on a real Spark, as a PySpark user reads it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader

import cutwater
import cutwater.spark
from cutwater.admin import local_cluster
from cutwater.runtime import processes
from tests.integration.log_cluster import seeded
from tests.spark.planner_kit import columns, rows_of, stream

BEYOND_FLOATS = 2**53 + 1


def reading(spark: SparkSession, log: cutwater.Client, topics: str, **options: str) -> DataFrame:
    return spark.read.format("cutwater").options(servers=log.servers, subscribe=topics, **options).load()


def streaming(spark: SparkSession, log: cutwater.Client, topics: str, **options: str) -> DataStreamReader:
    return spark.readStream.format("cutwater").options(servers=log.servers, subscribe=topics, **options)


def as_the_log_has_it(log: cutwater.Client, topic: str) -> list[tuple[Any, ...]]:
    return [(r.stream, r.glsn, r.llsn, r.key, r.value) for r in log.subscribe(topic, follow=False)]


def as_spark_has_it(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(
        zip(*(table[name].to_pylist() for name in ("stream", "glsn", "llsn", "key", "value")), strict=True),
        key=lambda row: row[1],
    )


def test_a_topic_of_keys_and_values(spark: SparkSession, log: cutwater.Client) -> None:
    log.create_topic("kv", streams=3)
    for i in range(30):
        log.append("kv", [b"%d" % i, b""], key=[b"k", None], headers=[{"from": b"web"}, None])
    frame = reading(spark, log, "kv")
    assert frame.columns == ["topic", "stream", "glsn", "llsn", "timestamp", "key", "value", "ingested_at", "watermark"]
    assert as_spark_has_it(frame.toArrow()) == as_the_log_has_it(log, "kv")
    chosen = reading(spark, log, "kv", columns="glsn,headers", includeHeaders="true", minPartitions="5")
    assert chosen.rdd.getNumPartitions() >= 3
    rows = chosen.orderBy("glsn").collect()
    assert [row.headers for row in rows[:2]] == [{"from": bytearray(b"web")}, None]
    assert chosen.columns == ["glsn", "headers"]
    assert frame.where("glsn < 0").count() == 0
    assert reading(spark, log, "kv", endingOffsets="1").count() == 0


EVERY_TYPE: dict[str, tuple[pa.DataType, Any]] = {
    "boolean": (pa.bool_(), True),
    "tiny": (pa.int8(), -128),
    "small": (pa.int16(), 32_767),
    "plain": (pa.int32(), -(2**31)),
    "big": (pa.int64(), BEYOND_FLOATS),
    "u8": (pa.uint8(), 255),
    "u16": (pa.uint16(), 65_535),
    "u32": (pa.uint32(), 2**32 - 1),
    "u64": (pa.uint64(), Decimal(2**64 - 1)),
    "half": (pa.float16(), 0.5),
    "single": (pa.float32(), 0.25),
    "double": (pa.float64(), 0.1),
    "money": (pa.decimal128(38, 4), Decimal("1234567890.1234")),
    "text": (pa.string(), "grüß"),
    "long_text": (pa.large_string(), "x"),
    "bytes": (pa.binary(), b"\x00"),
    "fixed": (pa.binary(2), b"ab"),
    "day": (pa.date32(), date(2026, 1, 31)),
    "day64": (pa.date64(), date(2026, 1, 31)),
    "instant": (pa.timestamp("us", "UTC"), datetime(2026, 1, 31, 12, 0, 0, 1, tzinfo=UTC)),
    "instant_ms": (pa.timestamp("ms", "Europe/Berlin"), datetime(2026, 1, 31, 12, tzinfo=UTC)),
    "local": (pa.timestamp("us"), datetime(2026, 1, 31, 12)),
    "pause": (pa.duration("ms"), timedelta(seconds=90)),
    "list": (pa.list_(pa.int64()), [BEYOND_FLOATS, None]),
    "map": (pa.map_(pa.string(), pa.int64()), [("a", BEYOND_FLOATS)]),
    "struct": (pa.struct({"n": pa.int64(), "u": pa.uint8()}), {"n": BEYOND_FLOATS, "u": 255}),
}


def test_typed_topics_keep_every_value(spark: SparkSession, log: cutwater.Client) -> None:
    """Nullable 64-bit integers in particular, which would lose digits on the way through floats."""
    schema = pa.schema({name: kind for name, (kind, _) in EVERY_TYPE.items()})
    log.create_topic("typed", schema=schema, event_time="instant")
    given = {name: int(value) if name == "u64" else value for name, (_, value) in EVERY_TYPE.items()}
    nothing = {name: value if name == "instant" else None for name, value in given.items()}
    table = pa.table({name: pa.array([given[name], nothing[name]], kind) for name, (kind, _) in EVERY_TYPE.items()})
    log.append("typed", table)
    frame = reading(spark, log, "typed")
    assert "key" not in frame.columns
    # Through Spark's own rows once, not only as Arrow on both ends.
    full, empty = frame.repartition(2).toArrow().sort_by("glsn").to_pylist()
    for name, (_, value) in EVERY_TYPE.items():
        assert full[name] == value, name
        assert empty[name] == nothing[name], name
    assert full["timestamp"] == given["instant"]
    assert frame.where(f"big = {BEYOND_FLOATS} and instant = timestamp'2026-01-31 12:00:00.000001Z'").count() == 1
    log.change_topic("typed", schema=schema.append(pa.field("added", pa.int64())))
    log.append("typed", {"instant": given["instant"], "added": BEYOND_FLOATS})
    rows = reading(spark, log, "typed", columns="added,glsn").orderBy("glsn").collect()
    assert [row.added for row in rows] == [None, None, BEYOND_FLOATS]


def test_what_is_wrong_is_said(spark: SparkSession, log: cutwater.Client) -> None:
    log.create_topic("said")
    for options, words in (
        ({"subscribe": "sad"}, ("there is no topic 'sad'", "said")),
        ({"subscribe": "said", "startOffsets": "1"}, ("no option 'startoffsets'", "startingOffsets")),
        ({"subscribe": "said", "startingOffsets": "1", "startingTimestamp": "1"}, ("exclude each other",)),
    ):
        with pytest.raises(PySparkException) as raised:
            spark.read.format("cutwater").options(servers=log.servers, **options).load()
        assert all(word in str(raised.value) for word in words), str(raised.value)
        # Of our own stack, one frame; the message is the last thing that is told.
        assert str(raised.value).count("  File ") == 1, str(raised.value)


class Copy:
    """Takes the batches of a query, as they come."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, pa.Table]] = []

    def __call__(self, frame: DataFrame, number: int) -> None:
        self.batches.append((number, frame.toArrow()))

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return as_spark_has_it(pa.concat_tables([table for _, table in self.batches]))


def run(
    reader: DataStreamReader, copy: Callable[[DataFrame, int], None], checkpoint: Path, **trigger: Any
) -> StreamingQuery:
    writer = reader.load().writeStream.foreachBatch(copy).option("checkpointLocation", str(checkpoint))
    return cutwater.spark.start(writer.trigger(**trigger))


def offsets(query: StreamingQuery) -> list[tuple[int, int]]:
    """Where each micro-batch began and ended."""
    found = []
    for progress in query.recentProgress:
        source = progress["sources"][0]
        start = 0 if source["startOffset"] in (None, "null") else json.loads(source["startOffset"])["glsn"]
        found.append((start, json.loads(source["endOffset"])["glsn"]))
    return [(start, end) for start, end in found if end > start]


def test_a_micro_batch_is_a_range_of_the_log(spark: SparkSession, log: cutwater.Client, tmp_path: Path) -> None:
    """Three log streams, writers at the same time, a stop and a start from the checkpoint: every record once."""
    random = seeded()
    streams = log.create_topic("copied", streams=3).streams
    copy, over = Copy(), threading.Event()

    def write(number: int) -> None:
        for i in range(150):
            log.append("copied", [b"%d-%d-%d" % (number, i, j) for j in range(random.choice((1, 5)))])
            over.wait(0.01)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    ranges: list[tuple[int, int]] = []
    try:
        reader = streaming(spark, log, "copied", startingOffsets="earliest", maxOffsetsPerTrigger="200")
        query = run(reader, copy, tmp_path, processingTime="0 seconds")
        while len(copy.batches) < 3:
            assert query.isActive, query.exception()
        query.stop()
        ranges += offsets(query)
    finally:
        over.set()
        for writer in writers:
            writer.join()
    query = run(reader, copy, tmp_path, availableNow=True)
    query.awaitTermination()
    ranges += offsets(query)
    # A batch that the stop interrupted comes again, with the same number and the same rows.
    again = dict(copy.batches)
    assert all(table.sort_by("glsn").equals(again[number].sort_by("glsn")) for number, table in copy.batches)
    # One without rows has moved with the watermark, at a tick.
    copy.batches = [(number, again[number]) for number in sorted(again) if again[number].num_rows]
    assert copy.rows == as_the_log_has_it(log, "copied")
    assert len({row[0] for row in copy.rows}) == len(streams)
    for (_, table), (_, following) in zip(copy.batches, copy.batches[1:], strict=False):
        assert max(table["glsn"].to_pylist()) < min(following["glsn"].to_pylist())
    assert max(table.num_rows for _, table in copy.batches) == 200
    assert ranges[-1][1] >= max(row[1] for row in copy.rows)


def test_a_query_that_was_overtaken_by_a_trim(spark: SparkSession, log: cutwater.Client, tmp_path: Path) -> None:
    log.create_topic("trimmed", streams=2)
    log.append("trimmed", [b"a", b"b"])
    copy = Copy()
    query = run(streaming(spark, log, "trimmed", startingOffsets="earliest"), copy, tmp_path, availableNow=True)
    query.awaitTermination()
    log.append("trimmed", [b"lost"])
    kept = log.append("trimmed", [b"kept"])
    log.trim("trimmed", before=kept.glsn)
    with pytest.raises(StreamingQueryException, match=f"the first one left is {kept.glsn}"):
        run(streaming(spark, log, "trimmed"), copy, tmp_path, availableNow=True).awaitTermination()
    query = run(streaming(spark, log, "trimmed", failOnDataLoss="false"), copy, tmp_path, processingTime="0 seconds")
    query.processAllAvailable()
    log.append("trimmed", [b"more"])
    query.processAllAvailable()
    query.stop()
    assert [row[-1] for row in copy.rows] == [b"a", b"b", b"kept", b"more"]
    told = [progress["sources"][0]["latestOffset"] for progress in query.recentProgress]
    assert any(f'"lostBefore": {{"trimmed": {kept.glsn}}}' in offset for offset in told), told


def test_the_records_after_the_start_while_others_write(
    spark: SparkSession, log: cutwater.Client, tmp_path: Path
) -> None:
    """``startingOffsets=latest`` with a writer that never rests: the first micro-batch fails and comes again after a
    restart, with the very same records, and nothing is missing after it."""
    log.create_topic("live")
    log.append("live", b"old")
    over, fails = threading.Event(), threading.Event()
    attempts: list[tuple[int, list[int]]] = []
    fails.set()

    def write() -> None:
        while not over.is_set():
            log.append("live", b"x")

    def take(frame: DataFrame, number: int) -> None:
        attempts.append((number, sorted(frame.toArrow()["glsn"].to_pylist())))
        if fails.is_set() and attempts[-1][1]:
            raise RuntimeError("a batch that fails")

    reader = streaming(spark, log, "live", columns="glsn,value")
    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(StreamingQueryException, match="a batch that fails"):
            run(reader, take, tmp_path, processingTime="0 seconds").awaitTermination(120)
        number, failed = attempts[-1]
        fails.clear()
        query = run(reader, take, tmp_path, processingTime="0 seconds")
        while len(attempts) < 5:
            assert query.isActive, query.exception()
        query.stop()
    finally:
        over.set()
        writer.join()
    last = run(reader, take, tmp_path, availableNow=True)
    last.awaitTermination()
    done = dict(attempts)
    assert done[number] == failed
    found = [glsn for number in sorted(done) for glsn in done[number]]
    first = json.loads((tmp_path / "offsets" / "0").read_text().splitlines()[-1])["from"]
    assert found == [record.glsn for record in log.subscribe("live", follow=False) if record.glsn > first]


def test_a_storage_node_dies_during_a_scan(spark: SparkSession, tmp_path: Path) -> None:
    """Once in the middle of one task, and once in the middle of a job: the rows are those of the log."""
    cluster = local_cluster.start(tmp_path / "cluster", storage_nodes=3)
    try:
        with cutwater.connect("cutwater://" + ",".join(cluster.addresses)) as log:
            log.create_topic("t", streams=3)
            for i in range(120):
                log.append("t", [b"%06d" % i + os.urandom(994)] * 250)
            options = {"servers": log.servers, "subscribe": "t", "startingOffsets": "earliest"}
            glsns = log.table("t", columns=["glsn"])["glsn"].to_pylist()
            with stream(**options) as reader:
                parts = reader.partitions({"glsn": 0}, {"glsn": glsns[-1]})
                found = []
                for number, part in enumerate(parts):
                    for batch in reader.read(part):
                        if not found:
                            # The one that is asked first.
                            os.kill(cluster.storage_nodes[2].pid, signal.SIGKILL)
                        found += batch["glsn"].to_pylist()
                    assert number < 3
                assert sorted(found) == glsns
                assert rows_of(reader, parts, columns(options)).num_rows == len(glsns)
            frame = spark.read.format("cutwater").options(**options, maxPartitionBytes="500k", columns="glsn").load()
            jobs = spark.sparkContext.statusTracker()

            def kill() -> None:
                while not any(
                    (stage := jobs.getStageInfo(number)) is not None and stage.numCompletedTasks > 1
                    for number in jobs.getActiveStageIds()
                ):
                    time.sleep(0.002)
                os.kill(cluster.storage_nodes[1].pid, signal.SIGKILL)

            killer = threading.Thread(target=kill, daemon=True)
            killer.start()
            assert sorted(frame.toArrow()["glsn"].to_pylist()) == glsns
            killer.join(timeout=10)
            assert not killer.is_alive()
    finally:
        processes.stop([member.pid for member in cluster.processes() if member.pid], 5.0)
