"""Rows of a query on their way to topics, against the log itself, without a JVM."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec.structs import replace
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

import cutwater
from cutwater.client.errors import InvalidRecord
from cutwater.errors import InvalidArgument, NotFound, StagedExpired
from cutwater.spark.options import write_options
from cutwater.spark.session.worker_connections import link_to
from cutwater.spark.sink import sink
from cutwater.spark.sink.row_router import headers_of, positions_of
from cutwater.spark.sink.sink import BatchWriter
from tests.integration.log_cluster import seeded


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[cutwater.Client]:
    with cutwater.open(tmp_path / "data") as client:
        yield client


def writer(log: cutwater.Client, schema: StructType | pa.Schema, **options: str) -> BatchWriter:
    spark = from_arrow_schema(schema) if isinstance(schema, pa.Schema) else schema
    return BatchWriter(write_options({"servers": log.servers, **options}), spark, overwrite=False)


def write(log: cutwater.Client, *tasks: pa.Table, **options: str) -> None:
    """As Spark would: one task for each of these."""
    made = writer(log, tasks[0].schema, **options)
    made.commit([made.write(iter(task.to_batches())) for task in tasks])


def values(log: cutwater.Client, topic: str) -> list[Any]:
    return log.table(topic)["value"].to_pylist()


def test_rows_for_several_topics(fresh: cutwater.Client) -> None:
    """Each topic gets its own columns; a column that it does not have must be empty there."""
    fresh.create_topic("plain")
    fresh.create_topic("typed", schema={"n": pa.uint8(), "text": pa.string()})
    rows = pa.table(
        {
            "topic": ["plain", "typed", "plain", "typed"],
            "glsn": [1, 2, 3, 4],
            "key": [b"k", None, None, None],
            "value": ["a", None, "b", None],
            "n": pa.array([None, 7, None, 255], pa.int16()),
        }
    )
    write(fresh, rows, rows.slice(0, 1), compression="zstd")
    assert values(fresh, "plain") == [b"a", b"b", b"a"]
    assert fresh.table("plain")["key"].to_pylist() == [b"k", None, b"k"]
    assert fresh.table("typed").select(["n", "text"]).to_pylist() == [
        {"n": 7, "text": None},
        {"n": 255, "text": None},
    ]
    with pytest.raises(
        InvalidArgument, match=r"(?s)column 'n' does not exist in topic 'plain'.*query: topic, value, n"
    ):
        write(fresh, pa.table({"topic": ["plain"], "value": ["a"], "n": [1]}))
    with pytest.raises(InvalidArgument, match="'topic' is null"):
        write(fresh, pa.table({"topic": pa.array([None], pa.string()), "value": ["a"]}))
    with pytest.raises(NotFound, match="there is no topic 'other'; topics: plain, typed"):
        write(fresh, pa.table({"topic": ["plain", "other"], "value": ["a", "b"]}))
    assert len(values(fresh, "plain")) == 3


def test_rows_in_the_order_of_a_column(fresh: cutwater.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all tasks, also if a task stages more than one piece."""
    monkeypatch.setattr(sink, "PIECE_BYTES", 4_000)
    random = seeded()
    numbers = [random.randrange(-(2**63), 2**63) for _ in range(3_000)]
    fresh.create_topic("sorted", schema={"text": pa.string()})
    fresh.create_topic("kept", schema={"n": pa.int64()})
    tasks = [numbers[:1_500], numbers[1_500:1_501], numbers[1_501:]]
    tables = [pa.table({"n": task, "text": [str(n) for n in task]}) for task in tasks]
    cut = [pa.Table.from_batches(table.to_batches(max_chunksize=100)) for table in tables]
    write(fresh, *cut, topic="sorted", positionColumn="n")
    assert [int(text) for text in fresh.table("sorted")["text"].to_pylist()] == sorted(numbers)
    write(fresh, *(table.select(["n"]) for table in cut), topic="kept", positionColumn="n")
    assert fresh.table("kept")["n"].to_pylist() == sorted(numbers)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([3, -1, 2**62, -(2**63), 0]),
        pa.array([5, -1, 3], pa.int8())[1:],
        pa.array([datetime(1960, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")),
        pa.array([date(2026, 1, 1), date(1960, 1, 1)]),
        pa.array(["b", "", "ab", "a", "ü"]),
        pa.array([b"\xff", b"", b"\x00", b"\x00\x00"])[1:],
    ],
    ids=lambda column: str(column.type),
)
def test_positions_are_in_the_order_of_the_values(column: pa.Array) -> None:
    positions = positions_of("c", column)
    assert positions.type == pa.binary()
    assert pc.array_sort_indices(positions).equals(pc.array_sort_indices(column))


def test_headers_as_kafka_has_them() -> None:
    pairs = pa.struct({"key": pa.string(), "value": pa.binary()})
    rows = [[{"key": "a", "value": b"1"}, {"key": "b", "value": None}], None, [], [{"key": "a", "value": b""}]]
    expected = [[("a", b"1"), ("b", None)], None, [], [("a", b"")]]
    for start in range(4):
        assert headers_of(pa.array(rows, pa.list_(pairs))[start:]).to_pylist() == expected[start:]


BAD: tuple[tuple[dict[str, Any], dict[str, str], str], ...] = (
    ({"value": pa.binary()}, {}, "no topic to write to was given: give option 'topic', or a column 'topic'"),
    ({"topic": pa.int32()}, {}, "column 'topic' is int32: names of topics are strings"),
    ({"value": pa.binary()}, {"topic": "none"}, "there is no topic 'none'; topics: plain, typed"),
    ({"key": pa.binary()}, {"topic": "plain"}, "no column 'value', and topic 'plain' demands it"),
    ({"value": pa.int64()}, {"topic": "plain"}, "'value' of the query is int64, and topic 'plain' has binary there"),
    (
        {"value": pa.binary(), "part": pa.int32()},
        {"topic": "plain"},
        "column 'part' does not exist in topic 'plain': drop it",
    ),
    ({"value": pa.binary(), "headers": pa.int32()}, {"topic": "plain"}, "has map<string, binary> or array<struct<key"),
    ({"text": pa.string()}, {"topic": "typed"}, "no column 'n', and topic 'typed' demands it"),
    ({"value": pa.binary()}, {"topic": "plain", "positionColumn": "p"}, "'positionColumn' is 'p', which is no column"),
    ({"value": pa.binary(), "p": pa.float64()}, {"topic": "plain", "positionColumn": "p"}, "'p' is double, and rows"),
    ({"value": pa.binary()}, {"topic": "plain", "compression": "gzip"}, "'compression' is 'gzip': lz4, zstd or none"),
    ({"value": pa.binary()}, {"topic": "plain", "subscribe": "x"}, "no option 'subscribe'; options are"),
    ({"value": pa.binary()}, {"topic": "", "name": "x"}, "option 'topic' is '': a name is wanted"),
)


def test_what_cannot_be_written_is_said_before_anything_is(fresh: cutwater.Client) -> None:
    fresh.create_topic("plain")
    fresh.create_topic("typed", schema=[pa.field("n", pa.int64(), nullable=False), pa.field("text", pa.string())])
    for schema, options, words in BAD:
        with pytest.raises((InvalidArgument, NotFound)) as raised:
            writer(fresh, pa.schema(schema), **options)
        assert words in str(raised.value)
    with pytest.raises(InvalidArgument, match="a log only grows"):
        BatchWriter(write_options({"servers": fresh.servers, "topic": "plain"}), StructType(), overwrite=True)
    with pytest.raises(InvalidRecord, match=r"column 'n', row 1: the column may not be null: give every row a value"):
        write(fresh, pa.table({"n": pa.array([1, None], pa.int64())}), topic="typed")
    with pytest.raises(
        InvalidRecord, match=r"column 'n', row 1: the type is int64, so a whole number is wanted, not 'x'"
    ):
        write(fresh, pa.table({"n": ["1", "x"]}), topic="typed")
    with pytest.raises(InvalidArgument, match="'p' is null in a row"):
        write(fresh, pa.table({"n": [1], "p": pa.array([None], pa.string())}), topic="typed", positionColumn="p")
    assert fresh.table("typed").num_rows == 0


def test_what_a_task_leaves_behind_is_not_seen(fresh: cutwater.Client) -> None:
    """An attempt that failed in the middle, one that was repeated, and a write that was never committed."""
    fresh.create_topic("plain")
    table = pa.table({"value": ["a", "b"]})
    made = writer(fresh, table.schema, topic="plain")

    def failing() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches()
        raise OSError("the executor is gone")

    with pytest.raises(OSError, match="the executor is gone"):
        made.write(failing())
    made.write(iter(table.to_batches()))
    message = made.write(iter(table.to_batches()))
    assert values(fresh, "plain") == []
    made.commit([message])
    made.commit([made.write(iter(pa.table({"value": ["c"]}).to_batches()))])
    assert values(fresh, "plain") == [b"a", b"b"]
    never = writer(fresh, table.schema, topic="plain")
    never.abort([never.write(iter(table.to_batches())), None])
    assert values(fresh, "plain") == [b"a", b"b"]


def test_runs_in_the_hands_of_others(fresh: cutwater.Client) -> None:
    """Staging and publishing without any of Spark's classes."""
    fresh.create_topic("plain")
    link = link_to(write_options({"servers": fresh.servers}).where)
    client = link.client()
    run = link.loop.run(client.open_run("name", "key"))
    with sink.TaskStaging(link, run, 4) as task:
        task.add("plain", pa.record_batch({"value": [b"b"]}), pa.array([b"2"]))
        task.add("plain", pa.record_batch({"value": [b"a"]}), pa.array([b"1"]))
        parts = task.finish()
    assert [part.rows for part in parts] == [2]
    (published,) = link.loop.run(client.publish(run, 4, parts))
    assert (published.topic, published.count) == ("plain", 2)
    assert link.loop.run(client.open_run("name", "key")).last_batch == 4
    assert values(fresh, "plain") == [b"a", b"b"]
    with pytest.raises(InvalidArgument, match="was staged for batch 4 of run 1, not for batch 5"):
        link.loop.run(client.publish(run, 5, parts))
    stale = [replace(part, generation=part.generation - 1, batch=5) for part in parts]
    with pytest.raises(StagedExpired):
        link.loop.run(client.publish(run, 5, stale))
