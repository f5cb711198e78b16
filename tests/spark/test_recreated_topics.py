"""A topic that a query reads is deleted, or created again under its name: the query fails, or goes on and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cutwater
from cutwater.errors import NotFound, Refused
from cutwater.spark.source.source import StreamReader
from tests.spark.planner_kit import columns, latest, rows_of, stream


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[cutwater.Client]:
    with cutwater.open(tmp_path / "data") as client:
        yield client


def until_it_moves(reader: StreamReader, start: dict[str, Any]) -> dict[str, Any]:
    while (end := latest(reader, start)) == start:
        pass
    return end


def test_a_topic_of_a_pattern_that_was_deleted(fresh: cutwater.Client, caplog: pytest.LogCaptureFixture) -> None:
    kept, gone = fresh.create_topic("orders-1"), fresh.create_topic("orders-2")
    fresh.append(kept.name, b"a")
    options = {"servers": fresh.servers, "subscribePattern": "orders-.*", "columns": "glsn,value"}
    early = {**options, "startingOffsets": "earliest"}
    with stream(**early) as reader:
        start = latest(reader, reader.initialOffset())
        assert sorted(start["topics"].values()) == ["orders-1", "orders-2"]
        fresh.append(gone.name, b"lost")
        fresh.delete_topic(gone.name)
        with pytest.raises(NotFound, match="'orders-2'; records may be gone that this query has not read"):
            until_it_moves(reader, start)
    fresh.create_topic(gone.name)
    last = fresh.append(gone.name, b"another topic of that name")
    goes_on_with_what_was_created_again(early, gone, start, int(last.glsn), caplog)


def goes_on_with_what_was_created_again(
    options: dict[str, str],
    gone: cutwater.Topic,
    start: dict[str, Any],
    last: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Or fails, after a restart: ``gone`` was created again, and has a record at ``last``."""
    told = f"topic {gone.name!r} was deleted and created again: it was topic number {gone.number} .*DataLoss=false"
    with stream(**options) as reader, pytest.raises(Refused, match=told):
        latest(reader, start)
    with stream(**options) as reader, pytest.raises(Refused, match=told):
        reader.partitions(start, {"glsn": last})
    with stream(**options, failOnDataLoss="false") as reader:
        end = latest(reader, start)
        parts = reader.partitions(start, end)
        assert rows_of(reader, parts, columns(options))["value"].to_pylist() == [b"another topic of that name"]
        assert reader.reportLatestOffset()["deleted"] == [gone.name]
        assert caplog.text.count("DATA LOSS") == 1
    with stream(**options) as reader:
        assert latest(reader, end) == end


def test_a_topic_that_was_created_again(fresh: cutwater.Client, caplog: pytest.LogCaptureFixture) -> None:
    gone = fresh.create_topic("orders")
    first = fresh.append("orders", b"old")
    options = {
        "servers": fresh.servers, "subscribe": "orders", "columns": "glsn,value", "startingOffsets": "earliest",
    }  # fmt: skip
    with stream(**options) as reader:
        start = latest(reader, reader.initialOffset())
        assert start["topics"] == {str(gone.number): "orders"}
        fresh.append("orders", b"lost")
        fresh.delete_topic("orders")
        fresh.create_topic("orders")
        # Also without a record.
        with pytest.raises(Refused, match="the topic 'orders' was deleted and created again"):
            until_it_moves(reader, start)
    last = fresh.append("orders", b"another topic of that name")
    goes_on_with_what_was_created_again(options, gone, start, int(last.glsn), caplog)
    # An offset of an earlier version does not say which topics were read.
    with stream(**options) as reader:
        end = latest(reader, {"glsn": int(first.glsn)})
        assert list(end["topics"].values()) == ["orders"]
        assert str(gone.number) not in end["topics"]


@pytest.mark.parametrize("fewer", [{"subscribe": "a"}, {"subscribePattern": "a|aa"}])
def test_a_topic_that_is_not_read_any_more_may_be_deleted(fresh: cutwater.Client, fewer: dict[str, str]) -> None:
    for topic in "ab":
        fresh.create_topic(topic)
        fresh.append(topic, b"x")
    options = {"servers": fresh.servers, "columns": "glsn,value", "startingOffsets": "earliest"}
    with stream(**options, subscribe="a,b") as reader:
        start = latest(reader, reader.initialOffset())
    fresh.delete_topic("b")
    fresh.append("a", b"y")
    with stream(**options, **fewer) as reader:
        end = latest(reader, start)
        assert rows_of(reader, reader.partitions(start, end), columns({**options, **fewer}))["value"].to_pylist() == [
            b"y"
        ]
        assert list(end["topics"].values()) == ["a"]
    with stream(**options, subscribePattern=".*") as reader, pytest.raises(NotFound, match="'b'"):
        latest(reader, start)
