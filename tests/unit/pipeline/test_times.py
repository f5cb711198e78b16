"""Columns of times take a ``datetime`` and no integer: pipelines count milliseconds, and appends count microseconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from events import run, source

from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.pipeline import (
    Aggregator,
    BatchFunction,
    Pipeline,
    ProcessFunction,
    Stream,
    Tumbling,
    ValueState,
    Watermark,
    to_datetime,
)
from cutwater.pipeline.local.run_checks import check_sink
from cutwater.pipeline.rows import RowType

ROWS = "k string, at timestamp"
WAYS = r"is an integer, .* cannot be told: give ctx\.event_time or to_datetime\(ms\) of cutwater\.pipeline, or "


class Returned(ProcessFunction):
    """Returns the event time, as an integer or as a ``datetime``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def process(self, record: Any, ctx: Any) -> Any:
        return {"k": ctx.key, "at": getattr(ctx, self.name)}


class Fired(Returned):
    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.at(record.t + 5)

    def on_timer(self, time: int, ctx: Any) -> Any:
        return {"k": ctx.key, "at": getattr(ctx, self.name)}


class Aside(Returned):
    def process(self, record: Any, ctx: Any) -> None:
        ctx.output("aside", {"k": ctx.key, "at": getattr(ctx, self.name)})


class Kept(ProcessFunction):
    at = ValueState("timestamp")

    def process(self, record: Any, ctx: Any) -> Any:
        self.at.set(ctx.timestamp)


class Newest(Aggregator):
    state, result_type = "bigint", "timestamp"

    def create(self) -> int:
        return 0

    def add(self, accumulator: int, row: Any) -> int:
        return max(accumulator, row.t)

    def merge(self, accumulator: int, other: int) -> int:
        return max(accumulator, other)


class Batches(BatchFunction):
    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> pa.RecordBatch:
        return batch.rename_columns(["k", "at", "_cw"])


def process(stream: Stream, function: ProcessFunction | BatchFunction) -> Stream:
    return stream.process(key="k", function=function, uid="x", schema=ROWS)


def renamed(table: pa.Table) -> pa.Table:
    return table.rename_columns(["k", "at", "_cw"])


@pytest.mark.parametrize(
    "build",
    [
        lambda stream: stream.map(lambda row: {"k": row.k, "at": row.t}, ROWS),
        lambda stream: stream.flat_map(lambda row: [{"k": row.k, "at": row.t}], ROWS),
        lambda stream: stream.map(lambda row: {"all": [{"at": row.t}]}, "all array<struct<at:timestamp>>"),
        lambda stream: stream.transform(arrow=renamed, schema=ROWS),
        lambda stream: process(stream, Returned("timestamp")),
        lambda stream: process(stream, Fired("timestamp")),
        lambda stream: process(stream, Aside("timestamp")).side("aside", ROWS),
        lambda stream: process(stream, Kept()),
        lambda stream: process(stream, Batches()),
        lambda stream: stream.window(key="k", window=Tumbling(10), aggregate={"at": Newest()}, uid="w"),
        lambda stream: stream.map(lambda row: {"value": b"", "timestamp": row.t}, "value binary, timestamp bigint"),
    ],
)
def test_an_integer_is_no_time(build: Callable[[Stream], Stream]) -> None:
    p, stream = source()
    build(stream).sink("out", uid="out")
    with pytest.raises(CutwaterError, match=WAYS) as caught:
        run(p, "a1 a2")
    told = caught.value.message
    # A state is no column; the error shows the line that sets it.
    assert re.search(r"the column '(at|all|timestamp)'|test_times\.py, line \d+, in process\)", told)
    assert "last checkpoint if there is one" in told or "topic" in told
    assert ("Arrow timestamps" in told) == ("a bigint is an integer" in told)


@pytest.mark.parametrize("schema", [ROWS, "k string, at timestamp_ntz", None])
def test_an_integer_in_a_row_of_a_test_is_no_time(schema: str | None) -> None:
    p = Pipeline("test")
    name = "timestamp" if schema is None else "at"
    given = p.source("in", schema=schema, event_time=name, watermark=Watermark.ascending())
    given.filter(lambda row: True).sink("out", uid="out")
    with pytest.raises(InvalidArgument, match=rf"topic 'in'.*{WAYS}") as caught:
        p.test({"in": [{"k": "a", name: 1_000}]})
    assert f"the column {name!r}" in caught.value.message


def test_event_time_is_still_read_from_a_column_of_integers() -> None:
    p, stream = source()
    stream.window(key="k", window=Tumbling(10), aggregate={"n": "count(*)"}, uid="w").sink("out", uid="out")
    assert run(p, "a1 a12")["out"][0] == {"k": "a", "window_start": 0, "window_end": 10, "n": 1}


def test_a_context_and_a_function_give_times_for_columns() -> None:
    for function, at in ((Returned("event_time"), 1), (Fired("event_time"), 6)):
        p, stream = source()
        process(stream, function).sink("out", uid="out")
        assert run(p, "a1")["out"] == [{"k": "a", "at": datetime(1970, 1, 1, 0, 0, 0, at * 1_000, UTC)}]
    assert to_datetime(-1) == datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC)
    with pytest.raises(
        InvalidArgument,
        match=r"no time of the years 1 to 9999\..* beyond .*: compare ctx\.watermark with .*, or use ctx\.event_time",
    ):
        to_datetime(-(2**63))


@pytest.mark.parametrize(("kind", "zone"), [("timestamp", UTC), ("timestamp_ntz", None)])
def test_windows_over_times_have_times(kind: str, zone: Any) -> None:
    p = Pipeline("test")
    stream = p.source("in", schema=f"k string, at {kind}", event_time="at", watermark=Watermark.ascending())
    stream.window(key="k", window=Tumbling("1s"), aggregate={"last": "max(at)"}, uid="w").sink("out", uid="out")
    noon = datetime(2026, 1, 31, 12, tzinfo=zone)
    at = noon + timedelta(milliseconds=7)
    (row,) = p.test({"in": [{"k": "a", "at": at}]})["out"]
    assert row == {"k": "a", "window_start": noon, "window_end": noon + timedelta(seconds=1), "last": at}


def test_a_sink_does_not_write_integers_into_a_topic_of_times() -> None:
    declared = RowType.of("k string, at array<timestamp>").schema
    assert check_sink("out", declared, RowType.of("k string, at array<timestamp>")) == ""
    told = check_sink("out", declared, RowType.of("k string, at array<bigint>"))
    assert "the column 'at' of the topic 'out': a bigint is an integer, and whether it counts" in told
