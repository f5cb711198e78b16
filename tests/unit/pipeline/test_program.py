"""``Pipeline`` and ``Stream``: what a program may say, what is refused and when, and how ``p.test`` runs it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from events import events, run, source

from cutwater.errors import AlreadyExists, CutwaterError, InvalidArgument, NotFound, PipelineFailed, Refused
from cutwater.pipeline import (
    Aggregator,
    BatchFunction,
    BroadcastFunction,
    BroadcastState,
    CoProcessFunction,
    MapState,
    OperatorListState,
    PartitionFunction,
    Pipeline,
    ProcessFunction,
    Tumbling,
    UnionListState,
    ValueState,
    Watermark,
    to_datetime,
)

KT = "k string, t bigint"


class Fraud(ProcessFunction):
    """A program with a process function, a window, late rows and three sinks."""

    last = ValueState("double")

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        if self.last.get() and record.amount > 100 * self.last.get():
            yield {"user": ctx.key, "at": ctx.event_time}
        self.last.set(record.amount)
        ctx.timers.at(ctx.timestamp + 60_000)

    def on_timer(self, time: int, ctx: Any) -> None:
        self.last.clear()


def fraud() -> Pipeline:
    p = Pipeline("fraud", log="./data")
    pay = p.source("payments", watermark=Watermark.bounded("5s").idle_after("30s"))
    big = pay.filter(lambda r: r.amount > 10)
    out = big.process(key="user", function=Fraud(), uid="fraud", schema="user string, at timestamp")
    per = pay.window(
        key="user", window=Tumbling("10s"), aggregate={"n": "count(*)"}, allowed_lateness="5s", uid="w"
    )  # fmt: skip
    out.sink("alerts", uid="alerts")
    per.sink("per-user", uid="per")
    per.late.sink("late", uid="late")
    return p


def test_the_example_of_the_design() -> None:
    rows = [
        {"user": "ann", "amount": 20.0, "timestamp": to_datetime(1_000)},
        {"user": "ann", "amount": 5.0, "timestamp": to_datetime(2_000)},
        {"user": "ann", "amount": 2_500.0, "timestamp": to_datetime(3_000)},
        {"user": "bob", "amount": 11.0, "timestamp": to_datetime(100_000)},
        {"user": "ann", "amount": 9_000_000.0, "timestamp": to_datetime(101_000)},
        {"user": "ann", "amount": 1.0, "timestamp": to_datetime(4_000)},
    ]
    result = fraud().test({"payments": rows})
    assert [(row["user"], row["at"].timestamp()) for row in result["alerts"]] == [("ann", 3.0)]
    assert result["per-user"] == [
        {"user": "ann", "window_start": to_datetime(0), "window_end": to_datetime(10_000), "n": 3},
        {"user": "ann", "window_start": to_datetime(100_000), "window_end": to_datetime(110_000), "n": 1},
        {"user": "bob", "window_start": to_datetime(100_000), "window_end": to_datetime(110_000), "n": 1},
    ]
    assert result["late"] == [rows[-1]]
    assert result.state("fraud") == {}


def test_explain_shows_levels_chains_state_and_watermarks() -> None:
    p = fraud()
    text = p.explain()
    for line in (
        "pipeline fraud",
        "source payments",
        "watermark: bounded 5s, idle after 30s",
        "process fraud ← filter-1",
        "key: user; 128 key groups; watermark: of payments",
        "state last: value double",
        "window: tumbling 10s, at the watermark, allowed lateness 5s",
        "sink late ← window w [.late]",
    ):
        assert line in text
    q = Pipeline("chains")
    stream = q.source("in").map(lambda r: r).filter(lambda r: True)
    stream.unchained().flat_map(lambda r: []).sink("out", uid="out")
    assert "map-1 → filter-2 ← source in\n    flat_map-3 ← filter-2" in q.explain()


def test_building_contacts_nothing_and_running_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutwater.spark.pipeline.runner", None)
    p = fraud()
    with pytest.raises(Refused, match=r"install cutwater\[spark\]"):
        p.run()


WITHOUT_SPARK = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("pyspark", "pandas"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from cutwater.pipeline import *

p = Pipeline("fine")
stream = p.source("in", schema="k string, t bigint", event_time="t", watermark=Watermark.ascending())
stream.window(key="k", window=Tumbling(5), aggregate={"n": "count(*)"}, uid="w").sink("out", uid="out")
print(p.test({"in": [{"k": "a", "t": 1}, {"k": "a", "t": 2}]})["out"][0]["n"])
"""


def test_pipelines_are_tested_without_pyspark_and_pandas() -> None:
    command = [sys.executable, "-c", WITHOUT_SPARK]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout == "2\n"


class Ok(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        return {"k": ctx.key, "t": record.t}


class Wrong(Ok):
    rules = BroadcastState("string", "int")


class Partition(PartitionFunction):
    seen = OperatorListState("bigint")
    everyone = UnionListState("bigint")

    def process(self, record: Any, ctx: Any) -> Any:
        self.seen.append(record.t)
        return {"p": ctx.partition, "of": ctx.partitions, "n": len(self.seen)}


class KeyedPartition(Partition):
    other = ValueState("int")


def ok(stream: Any, **options: Any) -> Any:
    return stream.process(**({"key": "k", "function": Ok(), "uid": "x", "schema": KT} | options))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda p, s: ok(s, uid=""), "process has no uid: give it uid='…'.*none is made up"),
        (lambda p, s: s.sink("out"), "a sink has no uid"),
        (lambda p, s: (ok(s), ok(s)), "the uid 'x' is used twice, by process x and process x"),
        (lambda p, s: (ok(s), s.sink("out", uid="x")), "the uid 'x' is used twice"),
        (lambda p, s: ok(s, key="user"), "'test', process x: key of x names the column 'user', which is not there"),
        (lambda p, s: ok(s, key=5), "give a column, a list of columns, or a function"),
        (lambda p, s: ok(s, function=Ok), r"takes an instance, not the class Ok: write Ok\(\)"),
        (lambda p, s: ok(s, function=print), "takes a function derived from ProcessFunction or BatchFunction"),
        (lambda p, s: ok(s, function=Wrong()), r"broadcast state exists only in broadcast\(\)"),
        (lambda p, s: ok(s, schema="k strng"), "'strng' where a type is due"),
        (lambda p, s: p.source("in"), "reads the topic 'in' twice"),
        (
            lambda p, s: p.source("b", schema=KT, event_time="at", watermark=Watermark.ascending()),
            "event_time of the source 'b' names the column 'at'",
        ),
        (
            lambda p, s: p.source("b", schema=KT, event_time="k", watermark=Watermark.ascending()),
            r"'test', source b: event time is the column 'k', whose type is string: it must be a timestamp, or an "
            r"integer in milliseconds since 1970\. Name such a column of k string, t bigint, or give a function",
        ),
        (lambda p, s: p.source("b", on_malformed="ignore"), "on_malformed of the source 'b' is 'error' or 'skip', not"),
        (lambda p, s: p.source("b", watermark="5s"), r"give Watermark.bounded\('5s'\)"),
        (lambda p, s: s.map("x"), "map takes a function"),
        (lambda p, s: s.union(), "at least one other stream"),
        (lambda p, s: s.union(Pipeline("o").source("o")), "only streams of one pipeline can be joined"),
        (lambda p, s: s.union(s.map(lambda r: {"a": 1}, "a int")), "different schemas: k string, t bigint and a int"),
        (lambda p, s: s.side("x"), "source in has no side outputs"),
        (lambda p, s: ok(s).side(".x"), "does not begin with a dot"),
        (lambda p, s: (o := ok(s)) and (o.side("x", "a int"), o.side("x", "b int")), "has two schemas"),
        (lambda p, s: s.late, "only a window has"),
        (lambda p, s: ok(s).dead_letters, "ask for them with dead_letters=True"),
        (lambda p, s: s.sink("", uid="x"), "the topic of a sink is ''"),
        (lambda p, s: s.process_partition(function=Partition(), parallelism=0, uid="x"), "give a number from 1 on"),
        (lambda p, s: s.process_partition(function=KeyedPartition(), parallelism=1, uid="x"), "which needs a key"),
        (lambda p, s: Pipeline(""), "a pipeline's name is ''"),
        (lambda p, s: Pipeline("a\nb"), "give a text that can be printed"),
        (lambda p, s: Pipeline("ü" * 101), "of 1 to 200 bytes"),
        (lambda p, s: Pipeline("x", max_parallelism=0), "must be from 1 to"),
    ],
)
def test_errors_come_where_they_are_written(build: Any, text: str) -> None:
    p, stream = source()
    with pytest.raises(CutwaterError, match=text):
        build(p, stream)
    count = len(p.graph.nodes)
    ok(stream, uid="later").sink("out", uid="fine")
    assert len(p.graph.nodes) == count + 2, "what was refused is not part of the pipeline"
    assert run(p, "a1")["out"] == [{"k": "a", "t": 1}]


def test_a_uid_is_taken_by_what_is_part_of_the_pipeline() -> None:
    _, stream = source()
    with pytest.raises(InvalidArgument):
        ok(stream, key="user")
    ok(stream)
    with pytest.raises(AlreadyExists):
        ok(stream)


def test_streams_without_a_schema_are_refused_as_a_run_does() -> None:
    p = Pipeline("test")
    stream = p.source("in", event_time="t", watermark=Watermark.ascending()).map(lambda r: {"user": r.k, "n": r.t})
    made = stream.window(key="user", window=Tumbling(10), aggregate={"all": "collect_list(n)"}, uid="w")
    made.map(lambda r: {"user": r.user, "until": r.window_end, "all": r["all"]}).sink("out", uid="out")
    with pytest.raises(InvalidArgument, match="the output of map-1 has no schema, which a run needs"):
        run(p, "a1 a2")
    q, typed = source()
    ok(typed).sink("out", uid="out")
    run(q, "a1 a2")


# ------------------------------------------------------------------------------------------------------ row functions


def test_row_functions_and_their_dead_letters() -> None:
    p, stream = source()
    made = stream.map(lambda r: {"k": r.k, "t": 12 // r.t}, KT, dead_letters=True)
    made.sink("out", uid="out")
    made.dead_letters.sink("dead", uid="dead")
    result = run(p, "a3 b0 c4")
    assert result["out"] == [{"k": "a", "t": 4}, {"k": "c", "t": 3}]
    assert [(row["uid"], row["source_glsn"], row["record"], row["error"]) for row in result["dead"]] == [
        ("map-1", 2, '{"k":"b","t":0}', "ZeroDivisionError: integer division or modulo by zero")
    ]


def test_a_failing_row_function_names_itself_and_the_position() -> None:
    p, stream = source()
    stream.filter(lambda r: r.amount > 1).sink("out", uid="out")
    with pytest.raises(
        PipelineFailed,
        match=r"'filter-1', at GLSN 1: AttributeError: no column 'amount': there are k, t \(test_program.py, line \d+, "
        r"in <lambda>\), on the record Row\(k='a', t=1\)",
    ):
        run(p, "a1")


def test_a_failure_is_found_in_the_users_own_file(tmp_path: Path) -> None:
    """Also behind the standard library, and with the function that was called first; never in Cutwater's own files."""
    (tmp_path / "bug.py").write_text(
        "from json import loads\n\ndef parse(text):\n    return loads(text)\n\ndef f(row):\n    return parse(row.k)\n"
    )
    p, stream = source()
    stream.map(runpy.run_path(str(tmp_path / "bug.py"))["f"], KT).sink("out", uid="out")
    with pytest.raises(
        PipelineFailed,
        match=r"JSONDecodeError: .* \(bug.py, line 4, in parse, called from bug.py, line 7, in f\), on the record",
    ):
        run(p, "a1")
    p, stream = source()
    stream.map(lambda row: 1, KT).sink("out", uid="out")
    with pytest.raises(PipelineFailed, match=r"return a dict or a row[^(]*, on the record"):
        run(p, "a1")


def test_a_key_function_may_fail_like_any_other() -> None:
    p, stream = source()
    made = ok(stream, key=lambda r: r.k if r.t else r.missing, dead_letters=True)
    made.dead_letters.sink("dead", uid="dead")
    (letter,) = run(p, "a1 b0 c2")["dead"]
    assert (letter["key"], letter["source_glsn"]) == (None, 2)
    assert letter["error"] == "AttributeError: no column 'missing': there are k, t"


@pytest.mark.parametrize("given", [{"event_time": lambda r: 1 // r.t}, {"watermark": lambda r: 1 // r.t}])
def test_a_failing_function_of_time_names_source_and_position(given: dict[str, Any]) -> None:
    p = Pipeline("test")
    p.source("in", **({"event_time": "t", "watermark": Watermark.ascending()} | given)).sink("out", uid="out")
    with pytest.raises(
        PipelineFailed, match=r"operator 'source in', at GLSN 2: ZeroDivisionError: .*\(test_program.py, line "
    ):
        run(p, "a1 a0")


def test_rows_that_do_not_fit_the_schema_fail_where_they_are_made() -> None:
    p, stream = source()
    stream.map(lambda r: {"k": r.t}, "k string").sink("out", uid="out")
    with pytest.raises(PipelineFailed, match="1 is not a value of type string"):
        run(p, "a1")


def test_user_code_runs_once_per_record_whoever_reads_its_output() -> None:
    """'Two sinks and a … side output from one operator: user code ran once per record (counted), one state store.'"""
    calls: list[int] = []

    class Counting(ProcessFunction):
        n = ValueState("bigint", default=0)

        def process(self, record: Any, ctx: Any) -> Any:
            calls.append(record.t)
            self.n.set(self.n.get() + 1)
            ctx.output("side", {"k": "side", "t": record.t})
            ctx.output("nobody", {"anything": 1})
            yield {"k": ctx.key, "t": self.n.get()}

    p, stream = source()
    made = stream.process(key="k", function=Counting(), uid="x", schema=KT)
    made.sink("one", uid="one")
    made.sink("two", uid="two")
    made.side("side", KT).sink("two", uid="side")
    result = run(p, "a1 b2 a3")
    assert calls == [1, 2, 3]
    assert [row["t"] for row in result["one"]] == [1, 1, 2]
    assert [(row["k"], row["t"]) for row in result["two"]] == [
        ("side", 1), ("a", 1), ("side", 2), ("b", 1), ("side", 3), ("a", 2),
    ]  # fmt: skip


def test_transform_is_for_spark_unless_it_comes_as_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    p, stream = source()
    stream.transform(lambda df: df, schema=KT).sink("out", uid="out")
    monkeypatch.setitem(sys.modules, "cutwater.spark.pipeline.transform", None)
    with pytest.raises(Refused, match=r"pipeline 'test' runs on Spark, which is not there .*transform without arrow="):
        run(p, "a1")
    p, stream = source()
    with pytest.raises(InvalidArgument, match="transform takes a function, not None"):
        stream.transform(schema=KT)

    def doubled(table: pa.Table) -> pa.Table:
        both = pa.concat_tables([table, table])
        return both.set_column(1, "t", pc.multiply(both["t"], 10)).filter(pc.not_equal(both["k"], "b"))

    stream.transform(schema=KT, arrow=doubled).sink("out", uid="out")
    assert [(row["k"], row["t"]) for row in run(p, "a1 b2 c3")["out"]] == [("a", 10), ("a", 10), ("c", 30), ("c", 30)]
    p, stream = source()
    stream.transform(lambda df: df, schema=KT, arrow=lambda table: table.select(["k", "t"])).sink("out", uid="out")
    with pytest.raises(InvalidArgument, match="returned a table without _cw"):
        run(p, "a1")


def test_a_function_of_arrow_tables_may_give_other_types_as_long_as_the_values_fit() -> None:
    def given(*columns: tuple[str, str, pa.Array]) -> list[Any]:
        p, stream = source()
        schema = ", ".join(f"{name} {kind}" for name, kind, _ in columns)

        def function(table: pa.Table) -> pa.Table:
            return pa.table({name: column for name, _, column in columns} | {"_cw": table["_cw"]})

        stream.transform(schema=schema, arrow=function).sink("out", uid="out")
        return [tuple(row.values()) for row in run(p, "a1")["out"]]

    fine = pa.array([-1_999], pa.timestamp("ns", "UTC"))
    at = datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)
    assert given(("d", "decimal(10,2)", pa.array([7])), ("t", "timestamp", fine)) == [(Decimal("7.00"), at)]
    assert given(("d", "array<decimal(10,2)>", pa.array([[7]])), ("n", "int", pa.array([2.0]))) == [([Decimal(7)], 2)]
    for kind, column in (("decimal(3,2)", pa.array([10])), ("decimal(3,1)", pa.array([Decimal("1.55")]))):
        with pytest.raises(PipelineFailed, match=r"more than 3 digits|would cause data loss"):
            given(("d", kind, column))


def _divided(table: pa.Table) -> pa.Table:
    return table.set_column(1, "t", pa.array([1 // 0]))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (_divided, r"ZeroDivisionError: .* \(test_program.py, line \d+, in _divided\), on a table of 2 records"),
        (lambda table: None, r"the function returned None: return a pyarrow.Table, on a table"),
        (
            lambda table: table.set_column(1, "t", table["k"]),
            r"'a' is not a value of type bigint: .*, on a table of 2 records",
        ),
        (lambda table: table.set_column(1, "t", pa.array([1.5, 2.0])), r"1.5 is not a value of type bigint: .*"),
    ],
)
def test_a_failing_function_of_arrow_tables_names_itself(function: Any, told: str) -> None:
    p, stream = source()
    stream.transform(schema=KT, arrow=function).sink("out", uid="out")
    with pytest.raises(PipelineFailed, match=rf"operator 'transform-1', at GLSN 1: .*{told}"):
        run(p, "a1 b2")


def test_a_key_that_looks_reserved_is_a_column_only_if_it_is_declared() -> None:
    p = Pipeline("test")
    p.source("in", event_time="t", watermark=Watermark.ascending()).sink("out", uid="out")
    with pytest.raises(InvalidArgument, match=r"'_steam' in the row .* no reserved key: those are _stream, _watermark"):
        p.test({"in": [{"t": 1, "_steam": 2}]})
    p = Pipeline("test")
    p.source("in", event_time="t", schema="t bigint, _id bigint", watermark=Watermark.ascending()).sink(
        "out", uid="out"
    )
    assert p.test({"in": [{"t": 1, "_id": 2}]})["out"] == [{"t": 1, "_id": 2}]


# ------------------------------------------------------------------------------------------- batches and partitions


class Totals(BatchFunction):
    """A running total per key, computed on whole columns."""

    totals = MapState("string", "bigint")

    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        made = []
        for k, t in zip(batch["k"].to_pylist(), batch["t"].to_pylist(), strict=True):
            self.totals.put(k, self.totals.get(k, 0) + t)
            made.append(self.totals.get(k))
        return batch.set_column(1, "t", pa.array(made, pa.int64()))


def test_a_function_of_whole_batches_per_key_group() -> None:
    p, stream = source()
    stream.process(key="k", function=Totals(), uid="x", schema=KT).sink("out", uid="out")
    assert [(row["k"], row["t"]) for row in run(p, "a1 b2 a3 c4 b5")["out"]] == [
        ("a", 1), ("b", 2), ("a", 4), ("c", 4), ("b", 7),
    ]  # fmt: skip
    with pytest.raises(InvalidArgument, match="it has no dead letters"):
        stream.process(key="k", function=Totals(), uid="y", schema=KT, dead_letters=True)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (lambda r: 1 // (r.t - 2), r"ZeroDivisionError: .* \(test_program.py, line \d+, in <lambda>\)"),
        (lambda r: "x" if r.t < 2 else [1], r"InvalidArgument: the key function gave \[1\]"),
    ],
)
def test_a_failing_key_of_a_function_of_batches_names_operator_and_record(key: Any, told: str) -> None:
    p, stream = source()
    stream.process(key=key, function=Totals(), uid="x", schema=KT).sink("out", uid="out")
    with pytest.raises(PipelineFailed, match=rf"operator 'x', at GLSN 2: {told}.*, on the record Row\(k='b', t=2\)"):
        run(p, "a1 b2")


def test_partitions_take_records_in_turn_and_have_state_of_their_own() -> None:
    p, stream = source()
    made = stream.process_partition(function=Partition(), parallelism=2, uid="x", schema="p int, of int, n int")
    made.sink("out", uid="out")
    assert [(row["p"], row["of"], row["n"]) for row in run(p, "a1 a2 a3 a4 a5")["out"]] == [
        (1, 2, 1), (0, 2, 1), (1, 2, 2), (0, 2, 2), (1, 2, 3),
    ]  # fmt: skip


class TimersInPartition(PartitionFunction):
    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.at(5)


def test_a_partition_has_no_timers() -> None:
    p, stream = source()
    stream.process_partition(function=TimersInPartition(), parallelism=2, uid="x", schema=KT).sink("out", uid="out")
    with pytest.raises(PipelineFailed, match="a partition has no key: only keyed operators have timers"):
        run(p, "a1")


# ------------------------------------------------------------------------------------------------------------- p.test


def test_rows_of_several_topics_are_ordered_by_glsn_or_topic_after_topic() -> None:
    p = Pipeline("test")
    one, two = (
        p.source("one", event_time="t", watermark=Watermark.ascending()),
        p.source("two", event_time="t", watermark=Watermark.ascending()),
    )
    one.union(two).sink("out", uid="out")
    assert [row["t"] for row in p.test({"two": [{"t": 1}], "one": [{"t": 2}]})["out"]] == [1, 2]
    rows = {"two": [{"t": 1, "_glsn": 7}], "one": [{"t": 2, "_glsn": 3}]}
    assert [row["t"] for row in p.test(rows)["out"]] == [2, 1]
    with pytest.raises(InvalidArgument, match="give each row one of its own"):
        p.test({"two": [{"t": 1, "_glsn": 7}], "one": [{"t": 2}]})


def test_a_record_without_event_time_has_the_time_it_was_appended_at() -> None:
    p = Pipeline("test")
    p.source("in", watermark=Watermark.ascending()).sink("out", uid="out")
    result = p.test({"in": [{"value": b"x", "_time": 5_000}]}, drain=False)
    assert (result["out"], result.watermark) == ([{"value": b"x"}], 4_999)


@pytest.mark.parametrize(
    ("topics", "text"),
    [
        ({"other": []}, "has no source 'other': its sources are in"),
        (
            {},
            r"the rows of its sources \(in\), each row a dict: p.test\(\{'in': \[\{column: value, ...\}, ...\]\}\)",
        ),
        ([{"k": "a"}], r"rows are given by topic: p.test\(\{'in': .*\(list\)"),
        (None, r"rows are given by topic: p.test\(\{'in': .*not None"),
        ({"in": {"k": "a"}}, r"the rows of topic 'in' are a list of dicts: p.test\(.*not \{'k': 'a'\} \(dict\)"),
        ({"in": None}, "the rows of topic 'in' are a list of dicts: .*not None"),
        ({"in": [3]}, "a row of topic 'in' is a dict of its columns, not 3"),
        ({"in": [{"k": "a", "t": "x"}]}, "topic 'in', row 1: the column 't': 'x' is not a value of type bigint"),
        ({"in": [{"k": "a", "t": 1, "x": 2}]}, "has the column 'x', which its schema does not"),
        ({"in": [{"k": "a", "t": None}]}, "topic 'in', row 1: an event time is an integer in milliseconds"),
        ({"in": [{"k": "a", "t": 1, "_time": "now"}]}, "_time is 'now'"),
    ],
)
def test_wrong_rows_are_refused(topics: Any, text: str) -> None:
    p, stream = source()
    stream.sink("out", uid="out")
    with pytest.raises(InvalidArgument, match=text):
        p.test(topics)


def test_a_pipeline_without_a_source_says_so_and_one_without_rows_is_fine() -> None:
    with pytest.raises(InvalidArgument, match="pipeline 'p' has no source: begin it with"):
        Pipeline("p").test({})
    p, stream = source()
    ok(stream).sink("out", uid="out")
    assert p.test({"in": []})["out"] == []


def test_results_say_what_there_is() -> None:
    p, stream = source()
    ok(stream).sink("out", uid="out")
    result = p.test({"in": events("a1")})
    with pytest.raises(NotFound, match="no sink writes to 'nothing': there are out"):
        _ = result["nothing"]
    with pytest.raises(InvalidArgument, match="no operator has the uid 'y': there are x"):
        result.state("y")


def test_a_function_may_be_used_by_several_operators() -> None:
    class Both(CoProcessFunction):
        n = ValueState("int", default=0)

        def process1(self, record: Any, ctx: Any) -> Any:
            self.n.set(self.n.get() + 1)
            return {"n": self.n.get()}

        process2 = process1

    p, stream = source()
    shared = Both()
    for uid in ("one", "two"):
        stream.connect(stream, key="k", function=shared, uid=uid, schema="n int").sink(uid, uid=f"s{uid}")
    result = run(p, "a1 a2")
    assert [row["n"] for row in result["one"]] == [row["n"] for row in result["two"]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("base", "missing"),
    [
        (ProcessFunction, "process"),
        (CoProcessFunction, "process1"),
        (BroadcastFunction, "process_broadcast"),
        (PartitionFunction, "process"),
        (BatchFunction, "process_batch"),
        (Aggregator, "merge"),
    ],
)
def test_what_a_function_lacks_is_told_when_it_is_made(base: type, missing: str) -> None:
    with pytest.raises(TypeError, match=rf"abstract method.*\b{missing}\b"):
        type("Half", (base,), {})()


def test_a_trigger_that_is_none_is_told_with_those_there_are() -> None:
    p = Pipeline("triggers")
    source = p.source("in", schema="k string, n bigint")
    with pytest.raises(InvalidArgument, match=r"trigger of the window 'w' is 'count\(3\)': give .*Trigger\.count\(3\)"):
        source.window(key="k", window=Tumbling("1m"), aggregate={"n": "count(*)"}, trigger="count(3)", uid="w")
