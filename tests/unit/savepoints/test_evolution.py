"""State in a changed program: what fits goes along, what does not is refused with both sides shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kit import ROWS, Last, pipeline, program_of, taken

from cutwater.core.read.watermark import NO_WATERMARK
from cutwater.errors import InvalidArgument, Refused
from cutwater.pipeline import (
    BatchFunction,
    ListState,
    MapState,
    OperatorListState,
    PartitionFunction,
    Pipeline,
    ProcessFunction,
    Session,
    Tumbling,
    UnionListState,
    ValueState,
    Watermark,
)
from cutwater.pipeline.clocks.clock import ClockSnapshot, LogClock
from cutwater.pipeline.keyed_state.keys import key_bytes
from cutwater.savepoints.clocks import migrated
from cutwater.savepoints.evolution import evolved, redistributed, restoration, widened, widens
from cutwater.savepoints.program import OperatorInfo
from cutwater.schema_text import parse_type


def fits(tmp_path: Path, changed: Pipeline, **options: Any) -> Any:
    return restoration(taken(tmp_path / "sp").manifest, program_of(changed), **options)


def test_states_are_found_by_name_and_may_become_wider(tmp_path: Path) -> None:
    class Wider(ProcessFunction):
        last = ValueState("bigint")
        counts = MapState("string", "bigint")
        fresh = ListState("string")

        def process(self, record: Any, ctx: Any) -> None: ...

    changed = pipeline(Wider())
    found = fits(tmp_path, changed)
    assert found.left_behind == ("last.recent",)
    assert found.empty == ("last.fresh",)
    table = taken(tmp_path / "again").table("last")
    after = program_of(changed).by_uid["last"]
    made = evolved(table.combine_chunks().to_batches()[0], found.operators[0], after)
    assert made.column("state_last").type == pa.int64()
    assert made.column("state_last").to_pylist() == table["state_last"].to_pylist()
    assert made.column("state_counts").to_pylist() == table["state_counts"].to_pylist()
    assert made.column("state_fresh").null_count == made.num_rows == table.num_rows
    assert made.column("event_timers").to_pylist() == table["event_timers"].to_pylist()


def test_operators_are_found_by_uid_wherever_they_are(tmp_path: Path) -> None:
    p = Pipeline("pays")
    pay = p.source("payments", schema=ROWS, event_time="at", watermark=Watermark.ascending())
    window = pay.filter(lambda row: True).window(
        key="user", window=Tumbling("20s"), aggregate={"s": "sum(amount)"}, uid="w"
    )
    window.sink("windows", uid="windows")
    pay.process(key="user", function=Last(), uid="last", schema=ROWS).sink("out", uid="out")
    found = fits(tmp_path, p)
    assert [operator.uid for operator in found.operators] == ["last", "w"]
    # Aggregates are found by name: of two, the second is left.
    before = {operator.uid: operator for operator in found.operators}["w"]
    after = program_of(p).by_uid["w"]
    table = taken(tmp_path / "again").table("w").combine_chunks().to_batches()[0]
    made = evolved(table, before, after)
    both = [batch.column("state_windows").to_pylist() for batch in (table, made)]
    for old, new in zip(*both, strict=True):
        assert [pane["acc1"] for pane in old] == [pane["acc0"] for pane in new]
        assert [(pane["start"], pane["end"]) for pane in old] == [(pane["start"], pane["end"]) for pane in new]


def test_state_without_an_operator_is_named(tmp_path: Path) -> None:
    p = Pipeline("pays")
    p.source("payments", schema=ROWS, event_time="at", watermark=Watermark.ascending()).process(
        key="user", function=Last(), uid="renamed", schema=ROWS
    ).sink("out", uid="out")
    with pytest.raises(Refused, match=r"has state of 'last', 'w', .* it has 'renamed'"):
        fits(tmp_path, p)
    found = restoration(taken(tmp_path / "x").manifest, program_of(p), allow_non_restored_state=True)
    assert (found.left_behind, found.empty, found.operators) == (("last", "w"), ("renamed",), ())


class Batches(BatchFunction):
    def process_batch(self, batch: Any, ctx: Any) -> None: ...


class _Base(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> None: ...


class OtherType(_Base):
    last = ValueState("string")


class OtherKind(_Base):
    last = ListState("int")


class NoTtl(_Base):
    recent = ListState("int")


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (OtherType(), "the state 'last' is value int in the savepoint and value string in the program: not every"),
        (OtherKind(), "the state 'last' is value int in the savepoint and list int in the program: a state keeps"),
        (NoTtl(), "'recent' is list int, with a ttl, .* and list int in the program: whether a state has a ttl"),
        (Batches(), "what its state belongs to is a key in the savepoint and a key group in the program: use"),
    ],
)
def test_what_does_not_fit_is_shown_from_both_sides(tmp_path: Path, function: Any, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        fits(tmp_path, pipeline(function))


def test_keys_and_windows_stay_what_they_are(tmp_path: Path) -> None:
    def changed(key: str = "user", window: Any = None, aggregate: Any = None) -> Pipeline:
        p = Pipeline("pays")
        pay = p.source("payments", schema=ROWS, event_time="at", watermark=Watermark.ascending())
        pay.process(key=key, function=Last(), uid="last", schema=ROWS).sink("out", uid="out")
        pay.window(
            key="user", window=window or Tumbling("10s"), aggregate=aggregate or {"n": "count(*)"}, uid="w"
        ).sink("windows", uid="windows")
        return p

    for given, match in (
        ({"key": "amount"}, "its key is user string in the savepoint and amount int in the program"),
        ({"window": Session("10s")}, "its window is tumbling 10s in the savepoint and session"),
        ({"aggregate": {"n": "max(amount)"}}, r"the aggregate 'n' is count\(\*\) in the savepoint and max"),
        ({"aggregate": {"m": "count(*)"}}, "the aggregate 'm' is not there in the savepoint"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            restoration(taken(tmp_path / str(len(list(tmp_path.iterdir())))).manifest, program_of(changed(**given)))


@pytest.mark.parametrize(
    ("before", "after", "value"),
    [
        ("int", "bigint", 7),
        ("float", "double", 0.5),
        ("decimal(5,2)", "decimal(9,2)", None),
        ("struct<a:int>", "struct<b:string,a:bigint>", {"b": None, "a": 7}),
        ("array<struct<a:int>>", "array<struct<a:bigint,c:int>>", [{"a": 1, "c": None}, None]),
        ("map<string,int>", "map<string,bigint>", [("x", 1)]),
    ],
)
def test_types_become_wider(before: str, after: str, value: Any) -> None:
    old, new = parse_type(before), parse_type(after)
    assert widens(old, new)
    assert not widens(new, old)
    given = {"struct<a:int>": {"a": 7}, "array<struct<a:int>>": [{"a": 1}, None]}.get(before, value)
    column = pa.array([None, given, None, given], old).slice(1)
    made = widened(column, new)
    assert made.type == new
    assert made.to_pylist() == [value, None, value]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("bigint", "int"),
        ("bigint", "double"),
        ("string", "binary"),
        ("decimal(5,2)", "decimal(9,3)"),
        ("int", "array<int>"),
    ],
)
def test_types_that_do_not_fit(before: str, after: str) -> None:
    assert not widens(parse_type(before), parse_type(after))


class Sharing(PartitionFunction):
    items = OperatorListState("string")
    rules = UnionListState("string")

    def process(self, record: Any, ctx: Any) -> None: ...


def sharing(parallelism: int) -> OperatorInfo:
    p = Pipeline("shares")
    p.source("payments", schema=ROWS).process_partition(
        function=Sharing(), parallelism=parallelism, uid="x", schema=ROWS
    ).sink("out", uid="out")
    return program_of(p).by_uid["x"]


def test_lists_are_divided_anew_and_unions_go_whole_to_each() -> None:
    table = pa.RecordBatch.from_arrays(
        [
            pa.array([1, 0], pa.int32()),
            pa.array([key_bytes(1), key_bytes(0)]),
            pa.nulls(2, pa.list_(pa.int64())),
            pa.nulls(2, pa.list_(pa.int64())),
            pa.array([list("efgh"), list("abcd")]),
            pa.array([["y"], ["x"]]),
        ],
        names=["key_group", "key_bytes", "event_timers", "processing_timers", "state_items", "state_rules"],
    )
    for count, parts in ((3, ["abc", "def", "gh"]), (1, ["abcdefgh"]), (8, list("abcdefgh"))):
        made = evolved(table, sharing(2), sharing(count))
        assert made.column("state_items").to_pylist() == list(map(list, parts))
        assert made.column("state_rules").to_pylist() == [["x", "y"]] * count
        assert made.column("key_bytes").to_pylist() == [key_bytes(number) for number in range(count)]
    many = redistributed(table, sharing(10)).column("state_items").to_pylist()
    assert many == [*map(list, "abcdefgh"), None, None]
    assert evolved(table, sharing(2), sharing(2)).column("state_items").to_pylist() == [list("efgh"), list("abcd")]


# ------------------------------------------------------------------------------------------------------------- clocks


def operator(uid: str, *sources: str) -> OperatorInfo:
    return OperatorInfo(uid, "process", "keyed", 0, "k string", 128, sources, ())


BOUNDED = Watermark.bounded(0)


def clock_of(*topics: str) -> ClockSnapshot:
    """Clocks of sources that have one stream each, at 1,000 ms, 2,000 ms and so on."""
    clock = LogClock(dict.fromkeys(topics, BOUNDED), [frozenset({topic}) for topic in topics])
    for topic in topics:
        clock.add_stream(topic, 1, 0)
    for number, topic in enumerate(topics, 1):
        clock.batch(topic, 1, number, 1, 10_000, (number * 1_000 + 1) * 1_000, None)
    return clock.snapshot()


def test_the_clocks_of_the_same_program_stay_as_they_are() -> None:
    snapshot = clock_of("a", "b")
    operators = [operator("x", "a"), operator("y", "b")]
    made = migrated(snapshot, {"a": BOUNDED, "b": BOUNDED}, operators, operators)
    assert made is not None
    assert set(made.operators) == set(snapshot.operators)
    assert (made.sources, made.time_us) == (snapshot.sources, snapshot.time_us)


def test_an_operator_behind_other_topics_keeps_its_watermark() -> None:
    snapshot = clock_of("a", "b")
    before = [operator("x", "a"), operator("y", "b")]
    after = [operator("x", "a"), operator("y", "b", "c")]
    strategies = {"a": BOUNDED, "b": Watermark.bounded("5s"), "c": BOUNDED}
    made = migrated(snapshot, strategies, after, before)
    assert made is not None
    reached = {own.topics: own.watermark for own in made.operators}
    assert reached["b", "c"] == {own.topics: own.watermark for own in snapshot.operators}[("b",)]
    assert made.strategies == {"a": BOUNDED.strategy, "b": strategies["b"].strategy}
    clock = LogClock.restore(strategies, [frozenset({"a"}), frozenset({"b", "c"})], made)
    assert not clock.knows("c", 1)
    clock.add_stream("c", 1, 10_000)
    clock.batch("c", 1, 3, 1, 11_000, 10_001_000, None)
    clock.batch("b", 1, 4, 1, 12_000, 20_001_000, None)
    steps = clock.ticks().watermarks[frozenset({"b", "c"})]
    assert (steps.before, steps.last) == (2_000, 2_000)


def test_a_topic_that_is_left_out_is_forgotten_and_may_come_back() -> None:
    snapshot = clock_of("a", "b", "c")
    made = migrated(snapshot, {"c": BOUNDED}, [operator("z", "c")], [operator("z", "c")])
    assert made is not None
    assert [source.topic for source in made.sources] == ["c"]
    clock = LogClock.restore({"c": BOUNDED}, [frozenset({"c"})], made)
    assert clock.knows("c", 1)
    clock.batch("c", 1, 9, 1, 20_000, 9_001_000, None)
    assert clock.watermark == 9_000
    assert migrated(None, {}, [], []) is None
    assert all(own.watermark > NO_WATERMARK for own in snapshot.operators)
