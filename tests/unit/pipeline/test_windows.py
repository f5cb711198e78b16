"""Windows: the reference cases, lateness, sessions, triggers and aggregates."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from events import run, source

from cutwater.errors import InvalidArgument
from cutwater.pipeline import Aggregator, Global, Pipeline, Session, Sliding, Trigger, Tumbling, Watermark
from cutwater.pipeline.local.local_runner import TestResult
from cutwater.pipeline.rows import RowType
from cutwater.pipeline.windowing.aggregates import bind


def windows(window: Any, text: str, *, bound: int = 0, late: bool = True, **options: Any) -> TestResult:
    p, stream = source(bound)
    made = stream.window(key="k", window=window, aggregate={"all": "collect_list(t)"}, uid="w", **options)
    made.sink("out", uid="out")
    if late:
        made.late.sink("late", uid="late")
    return run(p, text)


def shown(result: TestResult) -> list[str]:
    return [
        f"{row['k']}[{row['window_start']},{row['window_end']})={','.join(map(str, row['all']))}"
        for row in result["out"]
    ]  # fmt: skip


def late(result: TestResult) -> str:
    return " ".join(f"{row['k']}{row['t']}" for row in result["late"])


def test_tumbling() -> None:
    """'a[0,10) = 1,7,9; a[10,20) = 12,13; a[20,30) = 25; late: a8, b9, b14'."""
    result = windows(Tumbling(10), "a1 a7 a12 a9 a13 a8 b9 a25 b14", bound=3)
    assert shown(result) == ["a[0,10)=1,7,9", "a[10,20)=12,13", "a[20,30)=25"]
    assert late(result) == "a8 b9 b14"


def test_sliding() -> None:
    """'[−5,5) = 3; [0,10) = 3,7; [5,15) = 7,12; [10,20) = 12; [15,25) = 22; [20,30) = 22; late: a4'."""
    result = windows(Sliding(10, 5), "a3 a7 a12 a4 a22")
    assert shown(result) == ["a[-5,5)=3", "a[0,10)=3,7", "a[5,15)=7,12", "a[10,20)=12", "a[15,25)=22", "a[20,30)=22"]
    assert late(result) == "a4"


def test_an_offset_shifts_windows() -> None:
    assert shown(windows(Tumbling(10, offset=3), "a2 a3 a12")) == ["a[-7,3)=2", "a[3,13)=3,12"]


def test_late_rows_are_dropped_and_counted_where_nobody_reads_them() -> None:
    result = windows(Tumbling(10), "a1 a25 a3 a4", late=False)
    assert shown(result) == ["a[0,10)=1", "a[20,30)=25"]
    assert result.dropped_late("w") == 2


def test_a_row_between_sliding_windows_is_not_late() -> None:
    result = windows(Sliding(2, 10), "a5 a21 a7 a31")
    assert shown(result) == ["a[20,22)=21", "a[30,32)=31"]
    assert late(result) == "a7"


@pytest.mark.parametrize("given", [{}, {"allowed_lateness": None}, {"allowed_lateness": 0}, {"allowed_lateness": "0s"}])
def test_without_allowed_lateness_a_complete_window_is_over(given: dict[str, Any]) -> None:
    result = windows(Tumbling(10), "a1 a12 a3", **given)
    assert shown(result) == ["a[0,10)=1", "a[10,20)=12"]
    assert late(result) == "a3"


def test_within_the_allowed_lateness_each_late_row_gives_the_result_again() -> None:
    result = windows(Tumbling(10), "a1 a12 a3 b4 a16 a5", allowed_lateness=5)
    assert shown(result) == ["a[0,10)=1", "a[0,10)=1,3", "b[0,10)=4", "a[10,20)=12,16"]
    assert late(result) == "a5"


def test_sessions_grow_together_where_they_touch() -> None:
    assert shown(windows(Session(5), "a1 a9 a5 b3 a30", bound=20)) == ["b[3,8)=3", "a[1,14)=1,9,5", "a[30,35)=30"]
    assert shown(windows(Session(5), "a1 a6 a12")) == ["a[1,11)=1,6", "a[12,17)=12"]


def test_a_late_row_may_extend_a_session_that_is_still_open() -> None:
    result = windows(Session(5), "a1 a10 a6 a0")
    assert shown(result) == ["a[1,6)=1", "a[6,15)=10,6"]
    assert late(result) == "a0"


def test_a_merged_session_leaves_no_timers_of_its_parts() -> None:
    p, stream = source(bound=50)
    made = stream.window(key="k", window=Session(5), aggregate={"n": "count(*)"}, uid="w", allowed_lateness=3)
    made.sink("out", uid="out")
    result = run(p, "a1 a9 a5", drain=False)
    assert [time for time, _, _ in result.timers("w")] == [13, 16]
    assert result.state("w") == {"a": {"windows": {(1, 14): (3,)}}}


def test_a_global_window_gives_results_by_count() -> None:
    purging = windows(Global(), "a1 b2 a3 a4 a5", trigger=Trigger.count(2, purge=True))
    assert [row["all"] for row in purging["out"]] == [[1, 3], [4, 5]]
    assert purging["out"][0]["window_start"] is None
    growing = windows(Global(), "a1 a3 a4 a5", trigger=Trigger.count(2))
    assert [row["all"] for row in growing["out"]] == [[1, 3], [1, 3, 4, 5]]


def test_a_trigger_by_processing_time() -> None:
    p, stream = source()
    trigger = Trigger.processing_time(100)
    stream.window(key="k", window=Global(), aggregate={"n": "count(*)"}, trigger=trigger, uid="w").sink("out", uid="o")
    rows = [
        {"k": "a", "t": 1, "_time": 110}, {"k": "a", "t": 1, "_time": 150}, {"_time": 205},
        {"_time": 400}, {"k": "a", "t": 1, "_time": 410}, {"_time": 500},
    ]  # fmt: skip
    assert [row["n"] for row in p.test({"in": rows})["out"]] == [2, 3]


def test_all_aggregates_and_their_nulls() -> None:
    p = Pipeline("test")
    stream = p.source(
        "in", schema="k string, t bigint, x double, y int", event_time="t", watermark=Watermark.ascending()
    )
    names = "count(*) count(x) sum(x) sum(y) min(x) max(y) avg(y) first(x) last(x) collect_list(x)".split()
    made = stream.window(key=["k"], window=Tumbling(10), aggregate={name: name for name in names}, uid="w")
    made.sink("out", uid="out")
    rows = [{"k": "a", "t": 1, "x": x, "y": y} for x, y in ((None, 1), (0.5, None), (1, 4), (None, None))]
    (row,) = p.test({"in": rows})["out"]
    assert [row[name] for name in names] == [4, 2, 1.5, 5, 0.5, 4, 2.5, None, None, [0.5, 1.0]]
    empty = p.test({"in": [{"k": None, "t": 1}]})["out"][0]
    assert [empty[name] for name in names] == [1, 0, None, None, None, None, None, None, None, []]


class Distinct(Aggregator):
    state = "array<bigint>"
    result_type = "bigint"

    def create(self) -> Any:
        return []

    def add(self, accumulator: Any, row: Any) -> Any:
        if row.t == 13:
            raise ValueError("thirteen")
        if row.t not in accumulator:
            accumulator.append(row.t)
        return accumulator

    def merge(self, accumulator: Any, other: Any) -> Any:
        return sorted({*accumulator, *other})

    def result(self, accumulator: Any) -> Any:
        return len(accumulator)


def test_an_aggregator_of_ones_own() -> None:
    p, stream = source(bound=30)
    made = stream.window(key="k", window=Session(5), aggregate={"n": Distinct()}, uid="w", dead_letters=True)
    made.sink("out", uid="out")
    made.dead_letters.sink("dead", uid="dead")
    result = run(p, "a1 a7 a1 a13 a4")
    assert [(row["window_start"], row["window_end"], row["n"]) for row in result["out"]] == [(1, 12, 3)]
    assert [(row["time"], row["error"]) for row in result["dead"]] == [(13, "ValueError: thirteen")]


def test_window_bounds_have_the_type_of_the_event_time_column() -> None:
    p = Pipeline("test")
    stream = p.source("in", event_time="at", watermark=Watermark.bounded("1s"))
    stream.window(key="k", window=Tumbling("10s"), aggregate={"n": "count(*)"}, uid="w").sink("out", uid="out")
    noon = datetime(2026, 5, 1, 12, 0, 3, tzinfo=UTC)
    (row,) = p.test({"in": [{"k": "a", "at": noon}, {"k": "a", "at": noon + timedelta(seconds=2)}]})["out"]
    assert row == {"k": "a", "window_start": noon.replace(second=0), "window_end": noon.replace(second=10), "n": 2}


def test_windows_follow_windows_up_to_the_end_of_the_input() -> None:
    p, stream = source()
    first = stream.window(key="k", window=Tumbling(10), aggregate={"n": "count(*)"}, uid="one")
    first.window(key="k", window=Tumbling(100), aggregate={"n": "sum(n)"}, uid="two").sink("out", uid="out")
    assert run(p, "a1 a2 a15 a99")["out"] == [{"k": "a", "window_start": 0, "window_end": 100, "n": 4}]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": "10s"}, "give Tumbling, Sliding, Session or Global"),
        ({"window": Global()}, "never ends: give trigger="),
        ({"aggregate": {}}, "has no aggregate"),
        ({"aggregate": "count(*)"}, "give each result a name, such as aggregate={'n': "),
        ({"aggregate": {"n": "median(t)"}}, r"write count\(\*\) or one of count\(column\), sum"),
        ({"aggregate": {"n": "sum(*)"}}, r"write count\(\*\)"),
        ({"aggregate": {"n": "sum(x)"}}, "names the column 'x', which is not there: there are k string, t bigint"),
        ({"aggregate": {"n": "sum(k)"}}, "cannot be added up"),
        ({"aggregate": {"k": "count(*)"}}, "two result columns"),
        ({"key": "user"}, "key of w names the column 'user'"),
        ({"uid": ""}, "has no uid"),
        ({"allowed_lateness": "soon"}, "allowed_lateness is 'soon'"),
    ],
)
def test_what_cannot_be_is_refused_while_the_pipeline_is_built(options: dict[str, Any], text: str) -> None:
    _, stream = source()
    given: dict[str, Any] = {"key": "k", "window": Tumbling(10), "aggregate": {"n": "count(*)"}, "uid": "w"}
    with pytest.raises(InvalidArgument, match=text):
        stream.window(**(given | options))


@pytest.mark.parametrize(
    "make", [lambda: Tumbling(0), lambda: Tumbling(10, 10), lambda: Session("-1s"), lambda: Trigger.count(0)]
)
def test_impossible_windows_are_refused(make: Any) -> None:
    with pytest.raises(InvalidArgument):
        make()


@pytest.mark.parametrize(
    ("aggregate", "kind", "values", "expected"),
    [
        ("min(v)", "double", [5.0, float("nan"), 1.0], 1.0),
        ("max(v)", "double", [float("nan"), 1.0, 7.0], "nan"),
        ("min(v)", "double", [float("nan")], "nan"),
        ("sum(v)", "bigint", [1 << 62, 1 << 62, -(1 << 62)], "more than a bigint holds"),
        ("avg(v)", "bigint", [1 << 62, 1 << 62, -(1 << 62)], "more than a bigint holds"),
        ("sum(v)", "bigint", [1 << 62, -(1 << 62), 1 << 62], 1 << 62),
        (
            "sum(v)",
            "decimal(38,2)",
            [Decimal("123456789012345678901234567890.12"), Decimal("0.01")],
            Decimal("123456789012345678901234567890.13"),
        ),
    ],
)
def test_an_aggregate_does_not_depend_on_how_rows_are_divided(
    aggregate: str, kind: str, values: list[Any], expected: Any
) -> None:
    rows = RowType.of(f"v {kind}")
    made = bind("a", aggregate, rows)
    given = [rows.make({"v": value}) for value in values]

    def outcome(cuts: list[int]) -> Any:
        accumulator = made.create()
        try:
            for first, last in itertools.pairwise([0, *cuts, len(given)]):
                accumulator = made.unpack(made.pack(made.add(accumulator, given[first:last])))
        except InvalidArgument as error:
            return "more than a bigint holds" if "more than a bigint holds" in error.message else error.message
        result = made.result(accumulator)
        return "nan" if result != result else result  # noqa: PLR0124

    for cuts in ([], [1], [2], [1, 2]):
        assert outcome([cut for cut in cuts if cut < len(given)]) == expected, cuts
