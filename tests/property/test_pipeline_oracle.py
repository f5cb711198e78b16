"""'So the output is the same at parallelism 1 and 8, with micro-batches of 10 and of 100,000, with and without crashes,
in content and in order.' Random pipelines on random logs, against the dumb interpreter in ``pipeline_oracle``.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pipeline_oracle import DumbOperator, DumbState, Oracle, Place
from pipeline_programs import SCHEMA, log_of, program

from cutwater.pipeline import BatchFunction, MapState, ProcessFunction, ValueState, Watermark
from cutwater.pipeline.clocks.clock import LogClock
from cutwater.pipeline.clocks.clock_steps import Ticks
from cutwater.pipeline.graph import OperatorNode, SourceNode, WindowNode
from cutwater.pipeline.keyed_state.chunks import chunk_schema
from cutwater.pipeline.operators.executor import Machine
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.position import RECORD, glsn_of, moment
from cutwater.pipeline.records import Records
from cutwater.pipeline.stream import Pipeline
from cutwater.savepoints.evolution import evolved
from cutwater.savepoints.program import described
from cutwater.savepoints.tables import to_chunk, to_table

SEED_NAME = "CUTWATER_PIPELINE_SEED"
Written = dict[str, list[tuple[int, int, dict[str, Any]]]]


class Replay:
    """Feeds a log to the real machine, range by range."""

    def __init__(self, pipeline: Pipeline, streams: set[tuple[str, int]]) -> None:
        self.sources = {node.topic: node for node in pipeline.graph.of_type(SourceNode)}
        self.plan = Plan(pipeline.name, pipeline.graph, {topic: node.rows for topic, node in self.sources.items()})
        watermarks = {topic: node.watermark for topic, node in self.sources.items()}
        self.clock = LogClock(watermarks, self.plan.source_sets)
        for topic, stream in sorted(streams):
            self.clock.add_stream(topic, stream, 0)
        self.written: Written = {}

    def range_of(self, places: list[Place]) -> tuple[dict[str, Records], Ticks]:
        batch = {topic: Records() for topic in self.sources}
        for place in places:
            at = (place.topic, place.stream, place.glsn, place.cut_ms * 1_000)
            declared = None if place.declared is None else place.declared * 1_000
            if place.row is not None:
                rows = self.sources[place.topic].rows
                assert rows is not None
                row = rows.row(place.row)
                batch[place.topic].append(moment(place.glsn, RECORD), b"", place.time, row)
                self.clock.record(*at, row, place.time, declared, idle=place.idle)
            elif place.topic:
                self.clock.heartbeat(*at, declared, idle=place.idle)
            else:
                self.clock.tick(place.glsn, place.cut_ms * 1_000)
        return batch, self.clock.ticks()

    def keep(self, written: dict[str, Records]) -> None:
        for uid, records in written.items():
            rows = zip(map(glsn_of, records.moments), records.times, records.rows, strict=True)
            self.written.setdefault(uid, []).extend(rows)


def real(
    pipeline: Pipeline, places: list[Place], streams: set[tuple[str, int]], choice: random.Random, firings: int = 10
) -> tuple[Machine, Written]:
    """Runs with random cuts, slices and crashes: a crashed micro-batch runs again from the state before it."""
    replay = Replay(pipeline, streams)
    machine = Machine(replay.plan, choice.randint(1, 8))
    left = list(places)
    while left:
        size = choice.choice([1, 2, 10, len(places)])
        batch, ticks = replay.range_of(left[:size])
        del left[:size]
        if not left:
            ticks.end(places[-1].glsn, firings)
        if choice.random() < 0.3:
            before = machine.snapshot()
            machine.run(batch, ticks)
            state = by_savepoint(replay.plan, before) if choice.random() < 0.5 else before
            machine = Machine(replay.plan, choice.randint(1, 8), state=state)
        replay.keep(machine.run(batch, ticks))
    return machine, replay.written


def by_savepoint(plan: Plan, state: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """State on its way through a savepoint, as far as columns go."""
    found = {}
    specs = {spec.uid: spec for spec in plan.specs.values()}
    for operator in described(plan).operators:
        chunk, spec = state[operator.uid].combine_chunks().to_batches(), specs[operator.uid]
        if chunk:
            rows = evolved(to_table(chunk[0], operator), operator, operator)
            made = to_chunk(rows, chunk_schema(spec.states), spec.hashed_groups)
            found[operator.uid] = pa.Table.from_batches([made])
    return found


def dumb_state(operator: DumbOperator) -> dict[Any, dict[str, Any]]:
    """What the oracle's operator keeps, as ``TestResult.state`` shows it."""
    if isinstance(operator.node, WindowNode):
        return {}
    found = {}
    for (key, broadcast), kept in operator.kept.items():
        shown: dict[str, Any] = {}
        for name in kept:
            bound: DumbState = operator.function.__dict__[name]
            operator.key = key
            items = bound.elements()
            if items and not broadcast:
                pairs = {item[1]: item[2] for item in items} if len(items[0]) == 3 else None
                value_or_list = items[0][1] if bound.declared.kind == "value" else [item[1] for item in items]
                shown[name] = value_or_list if pairs is None else pairs
        if shown:
            found[key] = shown
    return found


def real_state(machine: Machine, node: OperatorNode) -> dict[Any, dict[str, Any]]:
    found = {}
    for operator in machine.operators(node.uid):
        for entry in operator.store.entries():
            shown = {
                state.name: value
                for state, raw in zip(operator.spec.states, entry.values, strict=True)
                if state.kind != "windows" and (value := state.plain(raw, 2**63 - 1)) is not None
            }
            if shown:
                found[entry.key] = shown
    return found


def check(seed: int) -> None:
    choice = random.Random(seed)
    pipeline = program(choice)
    topics = [node.topic for node in pipeline.graph.of_type(SourceNode)]
    places = log_of(choice, topics, choice.randint(1, 60))
    streams = {(place.topic, place.stream) for place in places if place.topic}
    firings = choice.choice([0, 1, 3, 10])
    oracle = Oracle(pipeline, streams, firings)
    for place in places:
        oracle.position(place)
    oracle.end()
    for _ in range(2):
        machine, written = real(pipeline, places, streams, choice, firings)
        for uid in {*written, *oracle.written}:
            expected = [(glsn, time, tuple(row)) for glsn, time, row in oracle.written.get(uid, [])]
            assert [(glsn, time, tuple(row)) for glsn, time, row in written.get(uid, [])] == expected, uid
        for order, operator in oracle.operators.items():
            node = operator.node
            assert real_state(machine, node) == dumb_state(operator), node.label
            timers = [
                (time, entry.data)
                for real_operator in machine.operators(node.uid)
                for entry in real_operator.store.entries()
                for time in entry.event_timers or ()
            ]
            assert sorted(timers) == sorted(operator.event_timers), (order, node.label)
            left = sum(own.left_timers for own in machine.operators(node.uid))
            assert left == len(operator.event_timers), (order, node.label)


@given(st.integers(0, 2**32))
def test_any_pipeline_gives_what_one_thread_gives(seed: int) -> None:
    note(f"replay: {SEED_NAME}={seed} python -m pytest tests/property/test_pipeline_oracle.py -k one_seed")
    check(seed)


@pytest.mark.parametrize("seed", [int(os.environ[SEED_NAME])] if SEED_NAME in os.environ else range(10))
def test_one_seed(seed: int) -> None:
    check(seed)


class RunningTotal(ProcessFunction):
    total = ValueState("bigint", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.total.set(self.total.get() + record.v)
        return {"k": ctx.key, "t": record.t, "v": self.total.get()}


class RunningTotals(BatchFunction):
    totals = MapState("string", "bigint")

    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        made = []
        for key, value in zip(batch["k"].to_pylist(), batch["v"].to_pylist(), strict=True):
            self.totals.put(key, self.totals.get(key, 0) + value)
            made.append(self.totals.get(key))
        return batch.set_column(2, "v", pa.array(made, pa.int64()))


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_a_function_of_batches_gives_what_one_of_records_gives(seed: int) -> None:
    choice = random.Random(seed)
    places = log_of(choice, ["one"], choice.randint(1, 60))
    streams = {(place.topic, place.stream) for place in places if place.topic}
    results = []
    for function in (RunningTotal(), RunningTotals()):
        p = Pipeline("totals")
        stream = p.source("one", schema=SCHEMA, event_time="t", watermark=Watermark.ascending())
        stream.process(key="k", function=function, uid="x", schema=SCHEMA).sink("out", uid="out")
        results.append(real(p, places, streams, choice)[1])
    assert results[0] == results[1]
