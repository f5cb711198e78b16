"""A test and a run agree: what a run refuses, a test refuses, and what a run forgets, a test shows."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from events import events, run, source

from cutwater.errors import InvalidArgument, PipelineFailed
from cutwater.pipeline import (
    Aggregator,
    BatchFunction,
    Pipeline,
    ProcessFunction,
    Stream,
    Tumbling,
    ValueState,
    Watermark,
)

KT = "k string, t bigint"
ROWS = "a1 b2 a3 a4 b5 a6 b7 a8"


def made(function: Any, rows: str = ROWS, **options: Any) -> list[dict[str, Any]]:
    p, stream = source()
    stream.process(key="k", function=function, uid="x", schema=KT).sink("out", uid="out")
    return run(p, rows, **options)["out"]


# --------------------------------------------------------------------------------------- state in Python attributes


class InAttribute(ProcessFunction):
    """Counts in a number of its own, of all keys that its worker has."""

    def __init__(self) -> None:
        self.count = 0

    def process(self, record: Any, ctx: Any) -> Any:
        self.count += 1
        return {"k": ctx.key, "t": self.count}


class InDict(ProcessFunction):
    """Counts by key, in a dict that was there from the start."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def process(self, record: Any, ctx: Any) -> Any:
        self.counts[ctx.key] = self.counts.get(ctx.key, 0) + 1
        return {"k": ctx.key, "t": self.counts[ctx.key]}


class MadeLater(ProcessFunction):
    """An attribute that only the first record makes."""

    def process(self, record: Any, ctx: Any) -> Any:
        if record.t == 1:
            self.first = record.t
        return {"k": ctx.key, "t": self.first}


class OfTheClass(ProcessFunction):
    seen: list[int] = []  # noqa: RUF012 - that is what it is about

    def process(self, record: Any, ctx: Any) -> Any:
        self.seen.append(record.t)
        return {"k": ctx.key, "t": len(self.seen)}


class Declared(ProcessFunction):
    count = ValueState("bigint", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.set(self.count.get() + 1)
        return {"k": ctx.key, "t": self.count.get()}


class Cached(ProcessFunction):
    """What can be made again at any time may be an attribute."""

    def process(self, record: Any, ctx: Any) -> Any:
        if not hasattr(self, "names"):
            self.names = {"a": "A", "b": "B"}
        return {"k": self.names[ctx.key], "t": record.t}


def test_state_in_a_python_attribute_shows() -> None:
    with pytest.raises(PipelineFailed, match=r"the function of 'x' keeps self.count as a Python attribute") as caught:
        made(InAttribute())
    told = caught.value.message
    assert "the rows of topic 'out' depend on how the run is cut into slices and micro-batches: row " in told
    assert "Keep what one record leaves for the next in a ValueState" in told
    assert (caught.value.pipeline, caught.value.uid) == ("test", "x")
    with pytest.raises(PipelineFailed, match=r"keeps self.counts as a Python attribute"):
        made(InDict())
    with pytest.raises(PipelineFailed, match=r"it fails: AttributeError: .*has no attribute 'first'.*keeps self.first"):
        made(MadeLater())
    with pytest.raises(PipelineFailed, match="depend on how the run is cut"):
        made(OfTheClass())


def test_declared_state_and_what_can_be_made_again_are_fine() -> None:
    assert [row["t"] for row in made(Declared())] == [1, 1, 2, 3, 2, 4, 3, 5]
    assert [row["k"] for row in made(Cached(), "a1 b2 a3")] == ["A", "B", "A"]


def test_state_of_row_functions_and_windows_shows_too() -> None:
    seen: set[str] = set()
    p, stream = source()
    stream.filter(lambda r: not (r.k in seen or seen.add(r.k))).sink("out", uid="out")
    with pytest.raises(PipelineFailed, match="a function keeps something outside its declared state"):
        run(p, ROWS)

    class Growing(Aggregator):
        result_type = "bigint"
        state = "bigint"
        calls = 0

        def create(self) -> int:
            return 0

        def add(self, state: int, row: Any) -> int:
            self.calls += 1
            return state + self.calls

        def merge(self, one: int, other: int) -> int:
            return one + other

        def result(self, state: int) -> int:
            return state

    p, stream = source()
    windows = stream.window(key="k", window=Tumbling(100), aggregate={"n": Growing()}, uid="w")
    windows.sink("out", uid="out")
    with pytest.raises(PipelineFailed, match="depend on how the run is cut"):
        run(p, ROWS)


def test_chance_shows_and_the_check_can_be_left_out() -> None:
    p, stream = source()
    stream.map(lambda r: {"k": r.k, "t": random.randrange(10**9)}, KT).sink("out", uid="out")
    with pytest.raises(PipelineFailed, match=r"gives something else each time.*slices=1, batches=1"):
        run(p, ROWS)
    assert len(run(p, ROWS, slices=1, batches=1)["out"]) == 8
    assert [row["t"] for row in made(InAttribute(), slices=1, batches=1)] == list(range(1, 9))
    for wrong in ({"slices": 0}, {"batches": "2"}, {"slices": 1001}):
        with pytest.raises(InvalidArgument, match=r"(slices|batches) is .*: give how many"):
            made(Declared(), **wrong)


def test_what_a_function_does_outside_is_done_once() -> None:
    """The second run has functions of its own, so a test that looks what was called is not misled."""
    calls: list[int] = []
    p, stream = source()
    stream.map(lambda r: calls.append(r.t) or {"k": r.k, "t": r.t}, KT).sink("out", uid="out")
    run(p, ROWS)
    assert calls == list(range(1, 9))


class Totals(BatchFunction):
    def process_batch(self, batch: Any, ctx: Any) -> Any:
        return batch.slice(0, 1)


def test_a_function_of_batches_must_not_depend_on_where_they_end() -> None:
    with pytest.raises(PipelineFailed, match="depend on how the run is cut"):
        made(Totals())


# ------------------------------------------------------------------------------------------------ what a run refuses


def refused(build: Any) -> str:
    p, stream = source()
    build(p, stream)
    with pytest.raises(InvalidArgument) as caught:
        run(p, "a1")
    return caught.value.message


def test_what_a_run_refuses_a_test_refuses() -> None:
    assert "pipeline 'test' has no sink: nothing would come of it" in refused(lambda p, s: s.filter(lambda r: True))
    assert "has no schema, which a run needs" in refused(lambda p, s: s.map(lambda r: {"a": 1}).sink("o", uid="o"))
    reserved = refused(lambda p, s: s.map(lambda r: {"glsn": 1}, "glsn bigint").sink("o", uid="o"))
    assert "pipeline 'test', sink o: a column cannot be named 'glsn'" in reserved
    assert "cannot be the name of a topic" in refused(lambda p, s: s.sink("-out", uid="o"))

    def two(p: Pipeline, stream: Stream) -> None:
        stream.sink("o", uid="one")
        stream.map(lambda r: {"other": r.k}, "other string").sink("o", uid="two")

    # A topic that takes both may exist.
    p, stream = source()
    two(p, stream)
    assert len(run(p, "a1")["o"]) == 2
    lock = threading.Lock()

    def locked(p: Pipeline, stream: Stream) -> None:
        def function(row: Any) -> bool:
            with lock:
                return True

        stream.filter(function).sink("o", uid="o")

    told = refused(locked)
    assert "filter-1: " in told
    assert "cannot be sent to Spark's workers" in told
    assert "it uses 'lock' (lock)" in told
    # Code on data frames stays where it is, also where a function of tables runs in its place.
    p, stream = source()
    stream.transform(lambda frame: frame if lock else None, schema=KT, arrow=lambda table: table).sink("o", uid="o")
    assert len(run(p, "a1")["o"]) == 1


def test_dead_letters_can_be_written_to_a_topic() -> None:
    p, stream = source()
    failing = stream.map(lambda r: {"k": r.k, "t": 12 // r.t}, KT, dead_letters=True)
    failing.sink("out", uid="out")
    failing.dead_letters.sink("dead", uid="dead")
    (letter,) = run(p, "a1 b0")["dead"]
    assert (letter["uid"], letter["source_glsn"], letter["timer"]) == ("map-1", 2, False)


# ---------------------------------------------------------------------------------------------------- silent streams


def test_silent_streams_count() -> None:
    p = Pipeline("test")
    own = Watermark.ascending().idle_after(100)
    stream = p.source("in", schema=KT, event_time="t", watermark=own)
    stream.sink("out", uid="out")
    rows = events("a5 a9")
    assert p.test({"in": rows}, drain=False).watermark == 8
    assert p.test({"in": rows}, drain=False, streams={"in": 1}).watermark == 8
    # As in a log whose topic has two: the second one has said nothing yet.
    assert p.test({"in": rows}, drain=False, streams={"in": 2}).watermark == -(2**63)
    late = [*rows, {"k": "a", "t": 9, "_time": 90}, {"_time": 150}]
    assert p.test({"in": late}, drain=False, streams={"in": 2}).watermark == 8
    named = [*rows, {"k": "b", "t": 7, "_stream": 3}]
    assert p.test({"in": named}, drain=False).watermark == 6
    assert p.test({"in": named}, drain=False, streams={"in": [1, 3]}).watermark == 6
    assert p.test({"in": named}, drain=False, streams={"in": 3}).watermark == -(2**63)
    for streams, text in (
        ({"in": 2}, r"_stream is 3 in a row of topic 'in': its log streams are 1, 2"),
        ({"other": 1}, "streams= names the topic 'other', which is no source: in"),
        ({"in": 0}, "says that the topic 'in' has 0 log streams"),
        ({"in": [0, 3]}, r"says that the topic 'in' has \[0, 3\] log streams"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            p.test({"in": named}, streams=streams)
    with pytest.raises(InvalidArgument, match="_stream is 0 in a row"):
        p.test({"in": [{"k": "a", "t": 1, "_stream": 0}]})


def test_a_test_takes_what_is_said_of_malformed_batches() -> None:
    p = Pipeline("test")
    p.source("in", schema=KT, on_malformed="skip").sink("out", uid="out")
    assert run(p, "a1")["out"] == [{"k": "a", "t": 1}]
    assert "malformed batches are skipped" in p.explain()


def test_event_time_that_is_no_time_is_refused_before_the_first_row() -> None:
    def tested(name: str, value: Any) -> Any:
        p = Pipeline("test")
        p.source("in", event_time=name, watermark=Watermark.ascending()).sink("out", uid="out")
        return p.test({"in": [{"at": value}]})["out"]

    for wrong, kind in (("12:00", "string"), (1.5, "double"), (True, "boolean")):
        with pytest.raises(InvalidArgument, match=f"source in: event time is the column 'at', whose type is {kind}"):
            tested("at", wrong)
    with pytest.raises(InvalidArgument, match="names the column 'when', which is not there: there are at bigint"):
        tested("when", 5)
    assert tested("at", 5) == [{"at": 5}]
    p = Pipeline("test")
    p.source("in", watermark=Watermark.ascending()).sink("out", uid="out")
    with pytest.raises(InvalidArgument, match="source in: event time is the column 'timestamp', whose type is string"):
        p.test({"in": [{"timestamp": "12:00"}]})
