"""The clocks of several sources: reference cases of Flink, what needs a clock, and what holds a watermark back."""

from __future__ import annotations

from typing import Any

import pytest

from cutwater.core.read.watermark import NO_WATERMARK, BoundedOutOfOrderness
from cutwater.errors import InvalidArgument, PipelineFailed
from cutwater.pipeline import Global, Pipeline, ProcessFunction, Trigger, Tumbling, ValueState, Watermark
from cutwater.pipeline.clocks.clock import LogClock, holder_of
from cutwater.pipeline.clocks.rule_one import RuleOneClock, RuleOneSnapshot, RuleOneStream, converted
from cutwater.types import SECOND

A, B, BOTH = frozenset({"a"}), frozenset({"b"}), frozenset({"a", "b"})
ASCENDING = Watermark.ascending()


class Log:
    """Appends at the next position; times in milliseconds, cut times in seconds. Every call gives ``W`` of a and b."""

    def __init__(self, **sources: Watermark | None) -> None:
        self.clock = LogClock(sources or {"a": ASCENDING, "b": ASCENDING}, [A, B, BOTH])
        self.glsn = 0

    def say(self, topic: str, time: int, *, stream: int = 1, at_s: float = 0, idle: bool = False) -> int:
        self.glsn += 1
        place = (topic, stream, self.glsn, 1, int(at_s * SECOND))
        self.clock.batch(*place, time * 1_000, None, idle=idle)
        return self.clock.watermark

    def declare(
        self, topic: str, time: int | None = None, *, stream: int = 1, at_s: float = 0, idle: bool = False
    ) -> int:
        self.glsn += 1
        declared = None if time is None else time * 1_000
        self.clock.heartbeat(topic, stream, self.glsn, int(at_s * SECOND), declared, idle=idle)
        return self.clock.watermark

    def mark(self, at_s: float) -> int:
        self.glsn += 1
        self.clock.tick(self.glsn, int(at_s * SECOND))
        return self.clock.watermark


def two(**sources: Watermark | None) -> Log:
    log = Log(**sources)
    for topic in sources or ("a", "b"):
        log.clock.add_stream(topic, 1, 0)
    return log


NOTHING = -(2**63)


def test_the_slower_of_two_sources_decides() -> None:
    log = two()
    assert log.say("a", 100) == NOTHING, "b has said nothing"
    assert log.say("b", 50) == 49
    assert log.say("b", 200) == 99


def test_an_idle_source_is_left_out() -> None:
    """99, not 49: the source that was slower is idle."""
    log = two()
    log.say("b", 50, at_s=1)
    assert log.say("a", 100, at_s=20) == 49
    assert log.mark(32) == 99, "b is idle, a is not"


def test_two_idle_sources_give_the_higher_one() -> None:
    log = two()
    log.say("a", 100, at_s=1)
    assert log.say("b", 50, at_s=1) == 49
    assert log.mark(31) == 49, "exactly 30 s back is not idle"
    assert log.mark(31.000001) == 99


def test_a_source_that_declares_idleness_is_left_out_at_once() -> None:
    log = two()
    log.say("b", 50)
    assert log.say("a", 100) == 49
    assert log.declare("b", idle=True) == 99
    assert log.say("a", 110) == 109
    assert log.say("b", 60) == 109, "it counts again, and nothing goes back"
    assert log.say("a", 200) == 109
    assert log.say("b", 150) == 149


def test_a_source_is_not_evaluated_at_entries_of_others() -> None:
    """Before, every position let time pass for all streams."""
    log = two()
    log.say("b", 50, at_s=1)
    log.say("a", 100, at_s=1)
    assert log.say("a", 120, at_s=100) == 49, "b turns idle at the next mark, or at an entry of its own"
    assert log.mark(100.5) == 119


def test_one_idle_stream_of_a_source_does_not_make_the_source_idle() -> None:
    log = two()
    log.clock.add_stream("a", 2, 0)
    log.say("a", 100, stream=1, at_s=1)
    log.say("a", 30, stream=2, at_s=1)
    assert log.say("b", 500, at_s=1) == 29
    log.say("a", 110, stream=1, at_s=20)
    log.say("b", 510, at_s=20)
    assert log.mark(40) == 109


def test_declared_watermarks_of_two_sources() -> None:
    """Flink's multiplexer: the least of what outputs say, idle ones left out, never back."""
    log = two(a=Watermark.punctuated(), b=Watermark.punctuated())
    assert log.declare("a", 10) == NOTHING
    assert log.declare("b", 5) == 5
    assert log.declare("b", 20) == 10
    assert log.declare("a", 8) == 10, "a smaller declaration is ignored"
    assert log.declare("a", idle=True) == 20
    assert log.declare("b", 15) == 20
    assert log.declare("a", 12) == 20
    assert log.declare("b", 30) == 20, "a is at 12 and not idle"
    assert log.declare("a", 25) == 25


def test_a_bounded_stream_heeds_idleness_only() -> None:
    log = two()
    log.say("a", 100)
    assert log.say("b", 50) == 49
    assert log.declare("b", 70) == 49
    assert log.declare("b", 90, idle=True) == 99


def test_a_source_without_a_clock_neither_holds_back_nor_advances() -> None:
    log = two(a=ASCENDING, b=None)
    assert log.say("a", 100) == 99
    assert log.say("b", 10) == 99
    assert log.say("b", 500) == 99
    assert log.mark(100) == 99
    assert [source.topic for source in log.clock.snapshot().sources] == ["a"]
    only = log.clock.ticks().watermarks
    assert only[B].last == NOTHING


def test_a_new_stream_wakes_an_idle_source_until_it_is_evaluated_again() -> None:
    log = two()
    log.say("a", 100, at_s=1)
    log.say("b", 50, at_s=1)
    log.say("a", 120, at_s=35)
    assert log.mark(36) == 119
    log.clock.add_stream("b", 2, 36 * SECOND)
    assert log.say("a", 200, at_s=37) == 119, "held back by b, which has come to 49"
    assert log.mark(67) == 199


def test_what_holds_the_watermark_back_is_named() -> None:
    log = two()
    log.clock.add_stream("b", 2, 0)
    held = holder_of(log.clock.snapshot())
    assert held is not None
    assert (held.watermark, held.since_us) == (NO_WATERMARK, 0)
    log.say("a", 100, at_s=1)
    log.say("b", 50, stream=1, at_s=2)
    log.say("b", 40, stream=2, at_s=3)
    log.say("a", 120, at_s=4)
    held = holder_of(log.clock.snapshot())
    assert held is not None
    assert (held.topic, held.stream, held.watermark, held.since_us, held.spoke_us) == (
        "b",
        2,
        39_000,
        3_000_000,
        3_000_000,
    )
    assert holder_of(log.clock.snapshot(), ["a"]) != held
    log.mark(100)
    assert holder_of(log.clock.snapshot()) is None, "all are idle"


# ------------------------------------------------------------------------------------------------- what needs a clock


class Timed(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        ctx.timers.at(record.t + 5)
        yield {"t": record.t}


class ByProcessingTime(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        ctx.timers.at_processing_time(record.t)
        yield {"t": record.t}


class Expiring(ProcessFunction):
    last = ValueState("bigint", ttl="5s")

    def process(self, record: Any, ctx: Any) -> Any:
        self.last.set(record.t)


ROWS = "k string, t bigint"
WAYS = r"Watermark\.bounded\('5s'\) .* Watermark\.ascending\(\) .* Watermark\.punctuated\(\) .*Watermark\.of_rows"


def test_event_time_without_a_watermark_is_refused_with_the_ways_to_write_one() -> None:
    for given, name in (("t", "t"), (lambda row: row.t, "<lambda>")):
        with pytest.raises(InvalidArgument, match=rf"the source 'in' has event_time='{name}' .*{WAYS}"):
            Pipeline("p").source("in", schema=ROWS, event_time=given)


def test_windows_and_ttl_need_a_clock() -> None:
    def source() -> Any:
        return Pipeline("p").source("in", schema=ROWS)

    with pytest.raises(InvalidArgument, match=rf"window w: a window of event time ends .*\(in\) has a clock: .*{WAYS}"):
        source().window(key="k", window=Tumbling("1s"), aggregate={"n": "count(*)"}, uid="w")
    with pytest.raises(InvalidArgument, match=rf"the ttl of the state 'last' runs on event time, and none .*{WAYS}"):
        source().process(key="k", function=Expiring(), uid="x")
    rows = source().window(key="k", window=Global(), trigger=Trigger.count(2), aggregate={"n": "count(*)"}, uid="g")
    rows.sink("out", uid="out")
    p = Pipeline("p")
    clocked, plain = p.source("in", schema=ROWS, watermark=ASCENDING), p.source("rules", schema=ROWS)
    clocked.union(plain).window(key="k", window=Tumbling("1s"), aggregate={"n": "count(*)"}, uid="w")


def test_a_timer_needs_a_clock() -> None:
    p = Pipeline("p")
    p.source("in", schema=ROWS).process(key="k", function=Timed(), uid="x", schema="t bigint").sink("out", uid="out")
    with pytest.raises(
        PipelineFailed, match=rf"none of the sources of x \(in\) has a clock, so .*{WAYS}.*at_processing_time"
    ):
        p.test({"in": [{"k": "a", "t": 1}]})
    q = Pipeline("q")
    made = q.source("in", schema=ROWS).process(key="k", function=ByProcessingTime(), uid="x", schema="t bigint")
    made.sink("out", uid="out")
    assert q.test({"in": [{"k": "a", "t": 1}]})["out"] == [{"t": 1}]


def test_an_idle_source_lets_windows_close() -> None:
    """With defaults, a source that falls silent used to keep the windows of all others open."""
    p = Pipeline("p")
    one = p.source("one", schema=ROWS, event_time="t", watermark=ASCENDING)
    other = p.source("two", schema=ROWS, event_time="t", watermark=ASCENDING)
    per = one.union(other).window(key="k", window=Tumbling(50), aggregate={"n": "count(*)"}, uid="w")
    per.sink("out", uid="out")
    rows = {
        "one": [{"k": "a", "t": 10, "_glsn": 1}, {"k": "a", "t": 120, "_time": 40_000, "_glsn": 3}],
        "two": [{"k": "a", "t": 20, "_glsn": 2}, {"_time": 41_000, "_glsn": 4}],
    }
    assert [row["n"] for row in p.test(rows, drain=False)["out"]] == [2]


# ------------------------------------------------------------------------------------------------------------- rule 1


def test_clocks_of_rule_1_go_on_under_rule_2() -> None:
    strategy = BoundedOutOfOrderness(0, 30 * SECOND)
    one, two = RuleOneStream(0, strategy, 90 * SECOND, 99_000), RuleOneStream(1, strategy, 50 * SECOND, 49_000)
    old = RuleOneSnapshot(
        100_000,
        (("a", 7), ("b", 8)),
        (
            (("a",), RuleOneClock(20, 100 * SECOND, 98_000, False, (one,))),
            (("a", "b"), RuleOneClock(20, 100 * SECOND, 40_000, False, (one, two))),
        ),
    )
    made = converted(old)
    assert [(own.topics, own.watermark) for own in made.operators] == [(("a",), 98_000), (("a", "b"), 40_000)]
    clocks = {source.topic: source.clock for source in made.sources}
    assert [(clock.watermark, clock.idle) for clock in clocks.values()] == [(99_000, False), (49_000, True)]
    assert [stream.log_stream_id for clock in clocks.values() for stream in clock.streams] == [7, 8]
    clock = LogClock.restore({"a": ASCENDING, "b": ASCENDING}, [A, BOTH], made)
    assert clock.watermark == 40, "what was reached stays reached, and no more before the next position"
    clock.tick(21, 101 * SECOND)
    assert clock.watermark == 99


def test_a_source_of_rule_1_does_not_fall_back_to_a_stream_that_returned_behind() -> None:
    strategy = BoundedOutOfOrderness(0, 30 * SECOND)
    ahead, behind = RuleOneStream(0, strategy, 99 * SECOND, 99_000), RuleOneStream(1, strategy, 100 * SECOND, 49_000)
    reached = RuleOneClock(20, 100 * SECOND, 98_000, False, (ahead, behind))
    (source,) = converted(RuleOneSnapshot(100_000, (("a", 7), ("a", 8)), ((("a",), reached),))).sources
    assert (source.clock.watermark, source.clock.idle) == (98_000, False)
