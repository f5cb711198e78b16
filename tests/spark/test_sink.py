"""The format ``cutwater`` on a real Spark, as a PySpark user writes it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import cutwater
import cutwater.spark
from tests.spark.test_source import EVERY_TYPE, reading, streaming

DOCS = Path(__file__).resolve().parents[2] / "docs"


def writing(frame: DataFrame, log: cutwater.Client, **options: str) -> None:
    frame.write.format("cutwater").mode("append").options(servers=log.servers, **options).save()


def copy(frame: DataFrame, log: cutwater.Client, checkpoint: Path, **options: str) -> None:
    """Run a query until it has done all that there is to do."""
    writer = frame.writeStream.format("cutwater").options(servers=log.servers, **options)
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    cutwater.spark.start(writer).awaitTermination()


def values(log: cutwater.Client, topic: str) -> list[Any]:
    return log.table(topic)["value"].to_pylist()


def test_a_batch_is_written_as_a_whole_or_not_at_all(spark: SparkSession, log: cutwater.Client) -> None:
    log.create_topic("whole", streams=2)
    frame = spark.range(0, 1_000, numPartitions=4).selectExpr(
        "cast(id % 3 as string) as key",
        "cast(id as string) as value",
        "timestamp_millis(id) as timestamp",
        "array(struct('from' as key, cast('web' as binary) as value)) as headers",
    )
    writing(frame, log, topic="whole")
    table = log.table("whole")
    # Partition after partition, one append, in one log stream.
    assert [int(value) for value in table["value"].to_pylist()] == list(range(1_000))
    assert table["glsn"].to_pylist() == list(range(table["glsn"][0].as_py(), table["glsn"][0].as_py() + 1_000))
    assert len(set(table["stream"].to_pylist())) == 1
    last = log.read(table["glsn"][-1].as_py())
    assert (last.key, last.timestamp_us, last.headers) == (b"0", 999_000, {"from": b"web"})

    def failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if b"999" in batch["value"].to_pylist():
                raise ValueError("the last task fails")

    broken = frame.selectExpr("cast(value as binary) as value").mapInArrow(failing, "value binary")
    with pytest.raises(PySparkException, match="the last task fails"):
        writing(broken, log, topic="whole")
    assert log.table("whole").num_rows == 1_000
    writing(frame.where("value < 0"), log, topic="whole", name="of nothing")
    assert log.table("whole").num_rows == 1_000


def test_what_was_read_can_be_written(spark: SparkSession, log: cutwater.Client) -> None:
    """Every type, with and without a value, and the columns that the log itself gives need not be dropped."""
    schema = pa.schema({name: kind for name, (kind, _) in EVERY_TYPE.items()})
    given = {name: int(value) if name == "u64" else value for name, (_, value) in EVERY_TYPE.items()}
    nothing = {name: value if name == "instant" else None for name, value in given.items()}
    for topic in ("read-typed", "written-typed"):
        log.create_topic(topic, schema=schema, event_time="instant")
    rows = {name: pa.array([given[name], nothing[name]], kind) for name, (kind, _) in EVERY_TYPE.items()}
    log.append("read-typed", pa.table(rows))
    writing(reading(spark, log, "read-typed").repartition(1), log, topic="written-typed", compression="lz4")
    read, written = (log.table(topic).select(schema.names) for topic in ("read-typed", "written-typed"))
    assert written.equals(read)


def test_what_is_wrong_is_said(spark: SparkSession, log: cutwater.Client, tmp_path: Path) -> None:
    log.create_topic("taken")
    frame = spark.range(1).selectExpr("cast(id as string) as value")
    for options, words in (
        ({"topic": "take"}, ("there is no topic 'take'", "taken")),
        ({"topic": "taken", "acks": "all"}, ("no option 'acks'", "positionColumn")),
        ({}, ("give option 'topic', or a column 'topic'",)),
    ):
        with pytest.raises(PySparkException) as raised:
            writing(frame, log, **options)
        assert all(word in str(raised.value) for word in words), str(raised.value)
        # Of our own stack, one frame; the message is the last thing that is told.
        assert str(raised.value).count("  File ") == 1, str(raised.value)
    with pytest.raises(PySparkException, match="a log only grows"):
        frame.write.format("cutwater").mode("overwrite").options(servers=log.servers, topic="taken").save()
    # Without a mode nothing of ours is asked; the documentation quotes what Spark says then.
    with pytest.raises(PySparkException) as raised:
        frame.write.format("cutwater").options(servers=log.servers, topic="taken").save()
    quoted = re.search(r"`(cannot be written in the .*)`", (DOCS / "spark.md").read_text().replace("\n", " "))
    assert quoted is not None
    assert quoted[1].partition("`")[0] in str(raised.value)
    log.append("taken", b"1")
    stream = streaming(spark, log, "taken", startingOffsets="earliest").load().selectExpr("'nowhere' as topic", "value")
    with pytest.raises(StreamingQueryException, match=r"there is no topic 'nowhere'; topics:.*taken"):
        copy(stream, log, tmp_path / "missing")


def test_a_copy_in_the_order_of_the_log(spark: SparkSession, log: cutwater.Client, tmp_path: Path) -> None:
    """Three log streams are read by as many tasks, and yet the copy of each topic has the order of the log."""
    streams = log.create_topic("ordered", streams=3).streams
    for topic in ("even", "odd"):
        log.create_topic(topic, streams=2)
    for i in range(120):
        log.append("ordered", b"%d" % i, stream=streams[i * 7 % 3])
    rows = streaming(spark, log, "ordered", startingOffsets="earliest", maxOffsetsPerTrigger="50").load()
    split = rows.selectExpr(
        "if(int(string(value)) % 2 = 0, 'even', 'odd') as topic", "glsn", "key", "value", "timestamp"
    )
    copy(split, log, tmp_path / "split", positionColumn="glsn")
    assert values(log, "even") == [b"%d" % i for i in range(0, 120, 2)]
    assert values(log, "odd") == [b"%d" % i for i in range(1, 120, 2)]
    assert sorted(set(log.table("even")["timestamp"].to_pylist())) == sorted(
        row.timestamp for row in log.subscribe("ordered", follow=False) if int(row.value) % 2 == 0
    )


def test_a_batch_that_spark_does_not_remember(spark: SparkSession, log: cutwater.Client, tmp_path: Path) -> None:
    """The entry in Spark's own log is missing: the batch is computed again, its state too, and nothing is published
    twice. A checkpoint that is older than that is refused, because its batches have other rows."""
    for topic in ("numbers", "distinct"):
        log.create_topic(topic)
    rows = streaming(spark, log, "numbers", startingOffsets="earliest", columns="value").load()
    distinct = rows.dropDuplicates(["value"])
    checkpoint, old = tmp_path / "checkpoint", tmp_path / "old"
    for number, batch in enumerate(([b"1", b"2", b"2"], [b"2", b"3"])):
        log.append("numbers", batch)
        copy(distinct, log, checkpoint, topic="distinct")
        if number == 0:
            shutil.copytree(checkpoint, old)
    assert sorted(values(log, "distinct")) == [b"1", b"2", b"3"]
    (checkpoint / "commits" / "1").unlink()
    log.append("numbers", [b"3", b"1", b"4"])
    copy(distinct, log, checkpoint, topic="distinct")
    assert sorted(values(log, "distinct")) == [b"1", b"2", b"3", b"4"]
    with pytest.raises(StreamingQueryException, match="the checkpoint is an old copy"):
        copy(distinct, log, old, topic="distinct")


def test_a_new_checkpoint_takes_the_name_over(spark: SparkSession, log: cutwater.Client, tmp_path: Path) -> None:
    for topic in ("source", "sink"):
        log.create_topic(topic)
    rows = streaming(spark, log, "source", startingOffsets="earliest", columns="value").load()
    log.append("source", b"a")
    copy(rows, log, tmp_path / "first", topic="sink", name="owner")
    # Its checkpoint is lost, say: the same rows would be there twice.
    with pytest.raises(StreamingQueryException, match=r"'owner' has published 1 row.*option replayOutput"):
        copy(rows, log, tmp_path / "lost", topic="sink", name="owner")
    copy(rows, log, tmp_path / "first", topic="sink", name="owner")
    assert values(log, "sink") == [b"a"]
    # Its batches begin with 0 again, and are others.
    copy(rows, log, tmp_path / "second", topic="sink", name="owner", replayOutput="true")
    assert values(log, "sink") == [b"a", b"a"]
    log.append("source", b"b")
    with pytest.raises(StreamingQueryException, match="publishes under the name 'owner' now"):
        copy(rows, log, tmp_path / "first", topic="sink", name="owner")
    copy(rows, log, tmp_path / "second", topic="sink", name="owner")
    assert values(log, "sink") == [b"a", b"a", b"b"]
    copy(rows, log, tmp_path / "third", topic="sink")
    copy(rows, log, tmp_path / "second", topic="sink", name="owner")
    assert values(log, "sink") == [b"a", b"a", b"b", b"a", b"b"]
