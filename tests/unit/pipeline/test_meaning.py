"""What a pipeline means (docs/pipelines.md), each rule with an example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from events import events, run, source

from cutwater.errors import InvalidArgument
from cutwater.pipeline import (
    BroadcastFunction,
    BroadcastState,
    CoProcessFunction,
    Pipeline,
    ProcessFunction,
    Timer,
    ValueState,
    Watermark,
)
from cutwater.pipeline.clocks.clock_steps import MAX_TIME
from cutwater.pipeline.position import firing, key_part, number

FIRED = "k string, t bigint, w bigint, g bigint"


class Alarm(ProcessFunction):
    """A timer ten milliseconds after each record, registered twice."""

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.at(ctx.timestamp + 10)
        ctx.timers.at(ctx.timestamp + 10)

    def on_timer(self, time: int, ctx: Any) -> Iterator[Any]:
        yield {"k": ctx.key, "t": time, "w": ctx.watermark, "g": ctx.glsn}


def test_timers_fire_by_time_then_key_and_each_once() -> None:
    """'a5 b3 a5 b18 a4 a30 → after b18: b@13, a@15; after a30: a@14; at the end: b@28, a@40; each once'."""
    p, stream = source(bound=2)
    stream.process(key="k", function=Alarm(), uid="alarm", schema=FIRED).sink("out", uid="out")
    fired = [(row["k"], row["t"], row["g"]) for row in run(p, "a5 b3 a5 b18 a4 a30")["out"]]
    assert fired == [("b", 13, 4), ("a", 15, 4), ("a", 14, 6), ("b", 28, 6), ("a", 40, 6)]


def test_a_timer_at_or_below_the_watermark_fires_at_the_next_advance() -> None:
    p, stream = source(bound=2)
    stream.process(key="k", function=Alarm(), uid="alarm", schema=FIRED).sink("out", uid="out")
    result = run(p, "b18 a4", drain=False)
    assert (result["out"], result.watermark) == ([], 15)
    assert result.timers("alarm") == [Timer(14, "a"), Timer(28, "b")]
    assert run(p, "b18 a4 b19", drain=False)["out"] == [{"k": "a", "t": 14, "w": 16, "g": 3}]


class Chain(ProcessFunction):
    """A timer that registers another one before itself, and one after the watermark."""

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.at(ctx.timestamp)

    def on_timer(self, time: int, ctx: Any) -> Iterator[Any]:
        yield {"k": ctx.key, "t": time, "w": ctx.watermark, "g": ctx.glsn}
        if time % 10 == 0:
            ctx.timers.at(time - 5)
            ctx.timers.at(time + 100)


def test_a_timer_registered_in_on_timer_fires_in_the_same_advance() -> None:
    p, stream = source()
    stream.process(key="k", function=Chain(), uid="x", schema=FIRED).sink("out", uid="out")
    fired = [(row["k"], row["t"]) for row in run(p, "a10 b10 c50", drain=False)["out"]]
    assert fired == [("a", 10), ("a", 5), ("b", 10), ("b", 5)]


def test_timers_registered_at_the_end_fire_so_often_and_the_others_stay() -> None:
    """'Timers registered during that last advance fire too, at most n per key and operator; leftovers stay and are
    counted.'"""
    p, stream = source()
    stream.process(key="k", function=Chain(), uid="x", schema=FIRED).sink("out", uid="out")
    for firings, left in ((0, [5, 110]), (1, [110]), (2, [105, 210]), (3, [210])):
        result = run(p, "a10", drain_firings=firings)
        assert [row["t"] for row in result["out"]] == [10, 5, 110, 105][: firings + 1]
        assert {row["w"] for row in result["out"]} == {MAX_TIME}
        assert result.timers("x") == [Timer(time, "a") for time in left]
        assert result.left_timers("x") == len(left)
        assert result.watermark == MAX_TIME
    result = run(p, "a10 b10")
    fired = [(row["k"], row["t"]) for row in result["out"]]
    # Each key has ten, in the order of any advance; what there was before the end does not count.
    assert [len([key for key, _ in fired if key == own]) for own in "ab"] == [11, 11]
    assert fired[:8] == [("a", 10), ("a", 5), ("b", 10), ("b", 5), ("a", 110), ("a", 105), ("b", 110), ("b", 105)]
    assert result.left_timers("x") == 4
    with pytest.raises(InvalidArgument, match="drain_firings is -1"):
        run(p, "a10", drain_firings=-1)


class Postponed(ProcessFunction):
    """The first timer deletes the second one, registers it anew, and fails in one of the two cases."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.at(10)
        ctx.timers.at(20)

    def on_timer(self, time: int, ctx: Any) -> Iterator[Any]:
        if time == 10:
            ctx.timers.delete(20)
            ctx.timers.at(20)
            if self._fails:
                raise ValueError("no")
        elif time < 50:
            ctx.timers.at(time + 10)
        yield {"k": ctx.key, "t": time, "w": ctx.watermark, "g": ctx.glsn}


@pytest.mark.parametrize(
    ("fails", "firings", "fired", "left"),
    [
        (True, 0, [20], [30]),
        (True, 1, [20, 30], [40]),
        (False, 0, [10], [20]),
        (False, 1, [10, 20], [30]),
    ],
)
def test_a_call_that_fails_at_the_end_costs_its_key_no_firing(
    fails: bool, firings: int, fired: list[int], left: list[int]
) -> None:
    """A timer that a failed call registered anew is the one of before, which fires in any case."""
    p, stream = source()
    made = stream.process(key="k", function=Postponed(fails=fails), uid="x", schema=FIRED, dead_letters=True)
    made.sink("out", uid="out")
    result = run(p, "a5", drain_firings=firings)
    assert [row["t"] for row in result["out"]] == fired
    assert result.timers("x") == [Timer(time, "a") for time in left]
    assert result.left_timers("x") == len(left)


def test_what_an_operator_emits_at_the_end_still_reaches_the_next_one_before_it_ends() -> None:
    p, stream = source()
    first = stream.process(key="k", function=Alarm(), uid="one", schema=FIRED)
    first.process(key="k", function=Alarm(), uid="two", schema=FIRED).sink("out", uid="out")
    assert [(row["k"], row["t"]) for row in run(p, "a1")["out"]] == [("a", 21)]


class See(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        return {"k": ctx.key, "t": ctx.timestamp, "w": ctx.watermark, "g": ctx.glsn}


def test_a_record_is_delivered_under_the_watermark_before_it() -> None:
    """'Deliver the record … under the watermark W(g−1); then advance to W(g)'."""
    p, stream = source()
    stream.process(key="k", function=See(), uid="see", schema=FIRED).sink("out", uid="out")
    assert [row["w"] for row in run(p, "a5 a9 a7 a12")["out"]] == [-(2**63), 4, 8, 8]


def test_downstream_sees_the_old_watermark_until_upstream_has_fired() -> None:
    """'What they emit is delivered downstream before downstream advances'; event time is the timer's."""
    p, stream = source()
    fired = stream.process(key="k", function=Alarm(), uid="one", schema=FIRED)
    fired.process(key="k", function=See(), uid="two", schema=FIRED).sink("out", uid="out")
    assert run(p, "a1 a20", drain=False)["out"] == [{"k": "a", "t": 11, "w": 0, "g": 2}]


def test_branches_are_visited_depth_first_in_the_order_of_the_program() -> None:
    p, stream = source()
    twice = stream.flat_map(lambda r: [{"k": r.k + str(i), "t": r.t} for i in range(2)], "k string, t bigint")
    left = twice.map(lambda r: {"k": r.k + "l", "t": r.t}, "k string, t bigint")
    right = twice.flat_map(lambda r: [{"k": r.k + c, "t": r.t} for c in "rs"], "k string, t bigint")
    left.union(right, twice).sink("out", uid="out")
    first = ["a0l", "a0r", "a0s", "a0", "a1l", "a1r", "a1s", "a1"]
    assert [row["k"] for row in run(p, "a1 b2")["out"]] == [*first, *(name.replace("a", "b") for name in first)]


def test_a_stream_joined_with_itself_comes_in_the_order_of_the_inputs() -> None:
    p, stream = source()
    stream.union(stream.filter(lambda r: r.k == "b"), stream).sink("out", uid="out")
    assert [row["k"] for row in run(p, "a1 b2")["out"]] == ["a", "a", "b", "b", "b"]


class Join(CoProcessFunction):
    seen = ValueState("string", default="")

    def process1(self, record: Any, ctx: Any) -> None:
        self.seen.set(self.seen.get() + "1")

    def process2(self, record: Any, ctx: Any) -> Any:
        self.seen.set(self.seen.get() + "2")
        return {"k": ctx.key, "s": self.seen.get(), "w": ctx.watermark}


def test_connected_inputs_share_keys_state_and_one_clock() -> None:
    p = Pipeline("test")
    one = p.source("one", event_time="t", watermark=Watermark.ascending())
    two = p.source("two", event_time="t", watermark=Watermark.ascending())
    one.connect(two, key="k", function=Join(), uid="j", schema="k string, s string, w bigint").sink("out", uid="out")
    rows = {
        "one": [{"k": "a", "t": 5, "_glsn": 1}, {"k": "a", "t": 30, "_glsn": 4}],
        "two": [{"k": "a", "t": 9, "_glsn": 2}, {"k": "b", "t": 20, "_glsn": 3}, {"k": "a", "t": 21, "_glsn": 5}],
    }
    result = p.test(rows, drain=False)
    assert [(row["k"], row["s"]) for row in result["out"]] == [("a", "12"), ("b", "2"), ("a", "1212")]
    assert [row["w"] for row in result["out"]] == [-(2**63), 4, 19]


def test_an_operator_is_held_back_only_by_the_sources_that_feed_it() -> None:
    p = Pipeline("test")
    one = p.source("one", schema="k string, t bigint", event_time="t", watermark=Watermark.ascending())
    two = p.source("two", schema="k string, t bigint", event_time="t", watermark=Watermark.ascending())
    one.process(key="k", function=See(), uid="alone", schema=FIRED).sink("alone", uid="a")
    one.union(two).process(key="k", function=See(), uid="both", schema=FIRED).sink("both", uid="b")
    rows = {"one": events("a5 a9"), "two": []}
    rows["two"] = [{"_stream": 1}]
    result = p.test({"two": rows["two"], "one": rows["one"]}, drain=False)
    assert [row["w"] for row in result["alone"]] == [-(2**63), 4]
    assert [row["w"] for row in result["both"]] == [-(2**63), -(2**63)]
    assert result.watermark == -(2**63)


class Apply(BroadcastFunction):
    rules = BroadcastState("string", "bigint")
    mine = ValueState("bigint")

    def process(self, record: Any, ctx: Any) -> Any:
        if record.t < 0:
            self.rules.put("x", 1)
        return {"k": ctx.key, "v": self.rules.get("limit", -1)}

    def process_broadcast(self, record: Any, ctx: Any) -> Any:
        if record.t < 0:
            self.mine.get()
        self.rules.put("limit", record.t)


def test_a_rule_applies_to_exactly_the_records_after_it() -> None:
    """'A rule at GLSN b applies to exactly the records after b.'"""
    p = Pipeline("test")
    data, rules = (
        p.source("data", event_time="t", watermark=Watermark.ascending()),
        p.source("rules", event_time="t", watermark=Watermark.ascending()),
    )
    data.broadcast(rules, key="k", function=Apply(), uid="b", schema="k string, v bigint").sink("out", uid="out")
    rows = {
        "data": [{"k": key, "t": 1, "_glsn": glsn} for key, glsn in (("a", 1), ("b", 3), ("a", 4), ("c", 6))],
        "rules": [{"k": "", "t": 7, "_glsn": 2}, {"k": "", "t": 8, "_glsn": 5}],
    }
    result = p.test(rows)
    assert [(row["k"], row["v"]) for row in result["out"]] == [("a", -1), ("b", 7), ("a", 7), ("c", 8)]
    assert result.broadcast_state("b") == {"rules": {"limit": 8}}


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ({"data": [{"k": "a", "t": -1}], "rules": []}, "broadcast state is written outside process_broadcast"),
        ({"data": [], "rules": [{"k": "a", "t": -1}]}, "state is read outside a key"),
    ],
)
def test_state_of_the_other_kind_is_out_of_reach(rows: dict[str, Any], text: str) -> None:
    p = Pipeline("test")
    schema = "k string, t bigint"
    data, rules = (
        p.source("data", schema=schema, event_time="t", watermark=Watermark.ascending()),
        p.source("rules", schema=schema, event_time="t", watermark=Watermark.ascending()),
    )
    data.broadcast(rules, key="k", function=Apply(), uid="b", schema="k string, v bigint").sink("out", uid="out")
    with pytest.raises(Exception, match=text) as caught:
        p.test(rows)
    assert "operator 'b', at GLSN 1" in str(caught.value)


class Ticker(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.at_processing_time(ctx.processing_time + 100)
        ctx.timers.at_processing_time(ctx.processing_time + 50)
        ctx.timers.delete_processing_time(ctx.processing_time + 50)

    def on_processing_timer(self, time: int, ctx: Any) -> Any:
        return {"k": ctx.key, "t": time, "w": ctx.processing_time, "g": ctx.glsn}


def test_processing_time_is_the_cut_time_at_the_position() -> None:
    p, stream = source()
    stream.process(key="k", function=Ticker(), uid="x", schema=FIRED).sink("out", uid="out")
    rows = [{"k": "a", "t": 1, "_time": 1000}, {"_time": 1099}, {"k": "b", "t": 2, "_time": 1130}, {"_time": 1400}]
    assert [(row["k"], row["t"], row["w"], row["g"]) for row in p.test({"in": rows})["out"]] == [
        ("a", 1100, 1130, 3),
        ("b", 1230, 1400, 4),
    ]


def test_three_streams_with_declared_watermarks() -> None:
    """'s0:10 s1:20 s2:15 → watermark 10; s0:30 → 15; s2 idle → 20; s1:25 → 25; s0:40, s1:50, s2:60 → 40'."""
    p = Pipeline("test")
    p.source("in", watermark=Watermark.punctuated()).sink("out", uid="out")
    said = [(0, 10), (1, 20), (2, 15), (0, 30), (2, None), (1, 25), (0, 40), (1, 50), (2, 60)]
    rows = [
        {"_stream": stream + 1, "_idle": True} if time is None else {"_stream": stream + 1, "_watermark": time}
        for stream, time in said
    ]
    watermarks = [p.test({"in": rows[:count]}, drain=False).watermark for count in range(3, len(rows) + 1)]
    assert watermarks == [10, 15, 20, 25, 25, 40, 40]


def test_a_silent_stream_is_idle_after_its_time() -> None:
    p = Pipeline("test")
    p.source("in", event_time="t", watermark=Watermark.ascending().idle_after(100)).sink("out", uid="out")
    rows = [
        {"t": 5, "_stream": 1, "_time": 10},
        {"t": 3, "_stream": 2, "_time": 20},
        {"t": 9, "_stream": 1, "_time": 110},
    ]
    assert p.test({"in": rows}, drain=False).watermark == 2
    assert p.test({"in": [*rows, {"_time": 121}]}, drain=False).watermark == 8


def test_a_function_may_give_time_and_watermark() -> None:
    p = Pipeline("test")
    p.source("in", event_time=lambda r: r.t * 1000, watermark=lambda r: r.t * 1000 if r.k == "mark" else None).process(
        key="k", function=See(), uid="see", schema=FIRED
    ).sink("out", uid="out")
    rows = [{"k": "a", "t": 1}, {"k": "mark", "t": 2}, {"k": "mark", "t": 1}, {"k": "a", "t": 3}]
    assert [(row["t"], row["w"]) for row in p.test({"in": rows})["out"]] == [
        (1000, -(2**63)), (2000, -(2**63)), (1000, 2000), (3000, 2000),
    ]  # fmt: skip


def test_paths_sort_as_what_they_stand_for() -> None:
    numbers = [0, 1, 127, 128, 255, 256, 1023, 1024, 70_000, 2**40]
    assert sorted(numbers, key=number) == numbers
    keys = [b"", b"\x00", b"\x00\x00", b"\x00\x01", b"\x01", b"a", b"a\x00", b"ab", b"\xff"]
    assert sorted(keys, key=key_part) == keys
    paths = [
        firing(3, -5, b"b", 0),
        firing(3, 7, b"a", 0),
        firing(3, 7, b"a", 1),
        firing(3, 7, b"a\x00", 0),
        firing(4, -9, b"", 0),
    ]
    assert sorted(paths) == paths
