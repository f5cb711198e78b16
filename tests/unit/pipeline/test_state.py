"""State: kinds, defaults, time to live, what a failed call leaves behind, and how state is packed."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pyarrow as pa
import pytest
from events import run, source
from hypothesis import given
from hypothesis import strategies as st

from cutwater.errors import InvalidArgument, PipelineFailed
from cutwater.pipeline import ListState, MapState, ProcessFunction, ValueState
from cutwater.pipeline.clocks.clock_steps import Steps, Ticks
from cutwater.pipeline.context import KeyEntry, TimerQueue, put_in, taken_out
from cutwater.pipeline.keyed_state.keys import key_bytes, key_of_bytes
from cutwater.pipeline.keyed_state.state import State
from cutwater.pipeline.keyed_state.store import KeyedStore
from cutwater.pipeline.operators.executor import Machine
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.position import RECORD, moment
from cutwater.pipeline.records import Records


class Keeper(ProcessFunction):
    total = ValueState("double", default=0)
    times = ListState("bigint")
    words = MapState("string", "struct<n: bigint>")

    def process(self, record: Any, ctx: Any) -> Any:
        self.total.set(self.total.get() + 1)
        self.times.append(record.t)
        old = self.words.get(record.k, {"n": 0})
        self.words.put(record.k, {"n": old["n"] + 1})
        old["n"] = 99
        ctx.timers.at(record.t + 100)
        yield {"t": record.t}
        if record.t == 13:
            raise ValueError("thirteen")

    def on_timer(self, time: int, ctx: Any) -> Any:
        self.times.clear()
        raise ValueError(f"timer {time}")


class Assigner(ProcessFunction):
    n = ValueState("bigint")
    words = MapState("string", "bigint")

    def __init__(self, name: str) -> None:
        self.name = name

    def process(self, record: Any, ctx: Any) -> None:
        setattr(self, self.name, 5)


@pytest.mark.parametrize(("name", "told"), [("n", r"self.n.set\("), ("words", r"self.words.put\(key, ")])
def test_a_state_is_not_assigned_to(name: str, told: str) -> None:
    """It would hide the state, which would be lost in silence."""
    p, stream = source()
    stream.process(key="k", function=Assigner(name), uid="x", schema="t bigint").sink("out", uid="out")
    with pytest.raises(PipelineFailed, match=rf"the state '{name}' cannot be assigned to.*: write {told}"):
        run(p, "a1")


def test_state_is_kept_per_key_in_the_form_of_its_type() -> None:
    p, stream = source()
    stream.process(key="k", function=Keeper(), uid="x", schema="t bigint").sink("out", uid="out")
    result = run(p, "a1 b2 a3", drain=False)
    assert result.state("x") == {
        "a": {"total": 2.0, "times": [1, 3], "words": {"a": {"n": 2}}},
        "b": {"total": 1.0, "times": [2], "words": {"b": {"n": 1}}},
    }
    assert type(result.state("x")["a"]["total"]) is float


def test_a_failed_call_leaves_no_state_timer_or_output_behind() -> None:
    """'With a dead-letter output the record (or timer: key, time) goes there with its error and the job goes on.'"""
    p, stream = source()
    made = stream.process(key="k", function=Keeper(), uid="x", schema="t bigint", dead_letters=True)
    made.sink("out", uid="out")
    made.dead_letters.sink("dead", uid="dead")
    result = run(p, "a1 a13 a14")
    assert result["out"] == [{"t": 1}, {"t": 14}]
    assert result.state("x")["a"]["times"] == [1, 14]
    assert [(row["timer"], row["key"], row["time"], row["source_glsn"], row["error"]) for row in result["dead"]] == [
        (False, "a", 13, 2, "ValueError: thirteen"),
        (True, "a", 101, 3, "ValueError: timer 101"),
        (True, "a", 114, 3, "ValueError: timer 114"),
    ]
    assert result["dead"][0]["record"] == '{"k":"a","t":13}'


def test_without_dead_letters_a_failure_stops_the_job_and_names_the_place() -> None:
    p, stream = source()
    stream.process(key="k", function=Keeper(), uid="x", schema="t bigint").sink("out", uid="out")
    with pytest.raises(
        PipelineFailed, match=r"pipeline 'test', operator 'x', at GLSN 2: ValueError: thirteen"
    ) as caught:
        run(p, "a1 a13")
    assert (caught.value.uid, caught.value.glsn) == ("x", 2)
    assert "dead_letters=True" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


class Brief(ProcessFunction):
    last = ValueState("bigint", default=-1, ttl="10ms")
    recent = ListState("bigint", ttl=10)
    by_time = MapState("bigint", "bigint", ttl=10)

    def process(self, record: Any, ctx: Any) -> Any:
        yield {"last": self.last.get(), "recent": self.recent.get(), "keys": self.by_time.keys(), "n": len(self.recent)}
        if record.t != 14:
            self.last.set(record.t)
        self.recent.append(record.t)
        self.by_time.put(record.t, 1)


def test_state_expires_by_event_time() -> None:
    """Gone 'once the watermark reaches the time of its last write plus ttl'."""
    p, stream = source()
    schema = "last bigint, recent array<bigint>, keys array<bigint>, n int"
    stream.process(key="k", function=Brief(), uid="x", schema=schema).sink("out", uid="out")
    out = run(p, "a1 b11 a5 b12 a6 b14 b16 a17")["out"]
    # a5 is late: it is written at the watermark, 10, and lives until 20.
    assert [row["last"] for row in out] == [-1, -1, 1, 11, 5, 12, 12, 6]
    assert [row["recent"] for row in out][2:5] == [[1], [11], [5]]
    assert out[-1] == {"last": 6, "recent": [5, 6], "keys": [5, 6], "n": 2}


def test_state_without_a_key_says_so() -> None:
    function = Keeper()
    with pytest.raises(InvalidArgument, match="the state 'total' is read outside a key"):
        function.total.get()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ValueState("doubel"), "'doubel' where a type is due"),
        (lambda: ValueState("bigint", default="x"), "'x' is not a value of type bigint"),
        (lambda: ValueState("bigint", ttl=0), "at least 1 ms"),
        (lambda: MapState("array<int>", "int"), "must be of a simple type"),
    ],
)
def test_wrong_declarations_are_refused(make: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        make()


# ------------------------------------------------------------------------------------------------------------ packing


def states() -> list[State]:
    made: list[State] = [ValueState("bigint"), ListState("string", ttl=5), MapState("string", "double")]
    for state, name in zip(made, ("n", "recent", "by"), strict=True):
        state.name = name
    return made


def queues() -> tuple[TimerQueue, TimerQueue]:
    return TimerQueue(), TimerQueue()


def filled(store: KeyedStore, keys: range) -> None:
    for key in keys:
        entry = store.live.get(key) or store.entry(key)
        entry.values[:] = [key, [(key, "x")], {"a": 0.5}]
        entry.event_timers = [1000 + key, 5000]
        store.dirty.add(entry)


def contents(entries: list[KeyEntry]) -> list[Any]:
    return sorted((entry.key, entry.values, sorted(entry.event_timers or ())) for entry in entries)


def test_a_micro_batch_makes_only_those_keys_live_that_it_touches() -> None:
    first = KeyedStore(states(), 128)
    filled(first, range(100))
    base = first.checkpoint()
    second = KeyedStore(states(), 128, [base])
    own = queues()
    second.load([7, 200], (1003, -1), own)
    assert sorted(second.live) == [0, 1, 2, 3, 7, 200]
    assert [(time, [entry.key for entry in entries]) for time, entries in own[0].due_until(1500)] == [
        (1000, [0]), (1001, [1]), (1002, [2]), (1003, [3]),
    ]  # fmt: skip
    assert second.live[7].values == [7, [(7, "x")], {"a": 0.5}]


def test_later_chunks_replace_earlier_ones_and_may_say_that_a_key_is_gone() -> None:
    first = KeyedStore(states(), 128)
    filled(first, range(10))
    store = KeyedStore(states(), 128, [first.checkpoint()])
    store.load([3, 4], (-1, -1), queues())
    entry, gone = store.live[3], store.live[4]
    entry.values[0] = 33
    gone.values[:], gone.event_timers = [None] * 3, None
    store.dirty |= {entry, gone}
    delta = store.checkpoint()
    assert delta is not None
    assert len(delta) == 2
    again = KeyedStore(states(), 128, store.chunks)
    again.load(range(10), (2000, -1), queues())
    assert again.live[3].values[0] == 33
    assert again.live[4].empty
    before = contents(store.entries())
    base = again.compact(-(2**63))
    assert base.num_rows == 9
    assert contents(KeyedStore(states(), 128, [base]).entries()) == before


@pytest.mark.parametrize("watermark", [-(2**63), 0, 9, 12, 2**63 - 1])
def test_compaction_drops_what_has_expired(watermark: int) -> None:
    """All kinds of state, some of them empty, and keys that have nothing but a timer."""
    declared: list[State] = [
        ValueState("string", ttl=5),
        ListState("string", ttl=5),
        MapState("string", "string", ttl=3),
        ValueState("bigint"),
    ]
    for state, name in zip(declared, "abcd", strict=True):
        state.name = name
    store = KeyedStore(declared, 128)
    for key in range(60):
        entry = store.entry(key)
        time = key % 15
        values = [(time, "x"), [(time - 4, "x"), (time, "y")], {"k": (time, "x"), "l": (time - 1, "y")}, key]
        chosen = (0, 1, 2, (0, 2), (0, 1, 2, 3), ())[key % 6]
        for slot in chosen if isinstance(chosen, tuple) else (chosen,):
            entry.values[slot] = values[slot]
        entry.event_timers = [key] if key % 7 == 0 or not chosen else None
    kept = [
        entry.key
        for entry in store.entries()
        if entry.event_timers
        or any(state.plain(raw, watermark) is not None for state, raw in zip(declared, entry.values, strict=True))
    ]
    store.dirty |= set(store.live.values())
    store.checkpoint()
    store.live.clear()
    store.compact(watermark)
    assert sorted(entry.key for entry in store.entries()) == sorted(kept)


def test_state_of_another_shape_is_refused() -> None:
    store = KeyedStore(states(), 128)
    filled(store, range(2))
    with pytest.raises(InvalidArgument, match="a changed state needs a new name"):
        KeyedStore(states()[:1], 128, [store.compact(0)])


def test_chunks_are_plain_tables() -> None:
    store = KeyedStore(states(), 128)
    filled(store, range(3))
    made = store.checkpoint()
    assert made is not None
    chunk = made.batch
    assert chunk.schema.names[:2] == ["key_group", "key"]
    assert chunk.schema.field("state_by").type == pa.map_(pa.string(), pa.float64())
    assert sorted(key_of_bytes(data) for data in chunk["key"].to_pylist()) == [0, 1, 2]


def test_keys_with_one_hash_are_told_apart() -> None:
    one, other = "k6081969", "k20060004"
    assert crc32(key_bytes(one)) == crc32(key_bytes(other))
    for stored in ([one, other], [other, one], [one], [other]):
        first = KeyedStore(states(), 128)
        for key in stored:
            first.entry(key).values[0] = stored.index(key)
            first.dirty.add(first.live[key])
        second = KeyedStore(states(), 128, [first.checkpoint()])
        second.load([one, "x", other], (-1, -1), queues())
        assert [second.live[key].values[0] for key in stored] == list(range(len(stored)))
        assert all(second.live[key].empty for key in ("x", one, other) if key not in stored)


def test_of_all_timers_those_that_come_due_are_queued_by_time() -> None:
    """Keys with one timer, with several and with none, of which a record touches some."""
    first = KeyedStore(states(), 128)
    timers = {0: [5], 1: [5, 9], 2: None, 3: [-3, 5, 20], 4: [20], 5: [21, 30]}
    for key, times in timers.items():
        entry = first.entry(key)
        entry.values[0], entry.event_timers = key, times
        first.dirty.add(entry)
    for touched, limit in ([], 5), ([0, 2, 5], 9), ([3], 20), (list(timers), 29), ([], -4):
        second = KeyedStore(states(), 128, first.chunks or [first.checkpoint()])
        own = queues()
        second.load(touched, (limit, -1), own)
        found = [(time, [entry.key for entry in entries]) for time, entries in own[0].due_until(100)]
        due = sorted((time, key) for key, times in timers.items() for time in times or () if time <= limit)
        assert [(time, key) for time, keys in found for key in keys] == due
        assert all(second.live[key].event_timers == timers[key] for key in second.live)


@given(st.lists(st.tuples(st.booleans(), st.integers(-5, 5))))
def test_timers_of_a_key_are_a_sorted_set(changes: list[tuple[bool, int]]) -> None:
    times: list[int] = []
    expected: set[int] = set()
    for is_put, time in changes:
        if is_put:
            assert put_in(times, time) == (time not in expected)
            expected.add(time)
        else:
            assert taken_out(times, time) == (time in expected)
            expected.discard(time)
        assert times == sorted(expected)


def test_a_key_that_cannot_be_fails_with_its_record_alone() -> None:
    """Also where state is packed, and all keys of a micro-batch are read ahead."""
    p, stream = source()
    made = stream.process(
        key=lambda row: row.t if row.t < 10 else 2**70, function=Keeper(), uid="x", schema="t bigint", dead_letters=True
    )
    made.sink("out", uid="out")
    made.dead_letters.sink("dead", uid="dead")
    rows = p.graph.nodes[0].rows  # type: ignore[attr-defined]
    machine = Machine(Plan("test", p.graph, {"in": rows}))
    for glsn in range(1, 7, 3):
        records = Records()
        for place, time in enumerate((1, 50, 2)):
            records.append(moment(glsn + place, RECORD), b"", time, rows.row(("a", time)))
        ticks = Ticks({frozenset({"in"}): Steps()}, Steps(0))
        written = machine.run({"in": records}, ticks)
        assert [row.t for row in written["out"].rows] == [1, 2]
        assert [(row.source_glsn, row.key) for row in written["dead"].rows] == [(glsn + 1, None)]
