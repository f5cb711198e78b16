"""Measures the operator core of pipelines per record, next to a bare Python loop that does the same with a dict.

One process, one slice; figures are per second of processor time. Each includes turning Arrow columns into rows, as a
worker has to. The garbage collector is off while a micro-batch runs: the core creates no cycles, and searching for some
among millions of live entries costs more than the work itself. Run it alone: ``python -m benchmarks.pipeline``.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.pipeline import Pipeline, ProcessFunction, Tumbling, ValueState, Watermark
from cutwater.pipeline.clocks.clock_steps import Steps, Ticks, watermark_step
from cutwater.pipeline.operators.executor import Machine
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.position import RECORD, moment
from cutwater.pipeline.records import Records
from cutwater.pipeline.rows import RowType

ROWS = RowType.of("user string, at bigint, amount double")
BATCH = 200_000
BATCHES = 3
KEYS = (1_000, 100_000, 1_000_000)
TOPIC = frozenset({"in"})


class Count(ProcessFunction):
    """A count per key, without output."""

    n = ValueState("bigint", default=0)

    def process(self, record: Any, ctx: Any) -> None:
        self.n.set(self.n.get() + 1)


class CountWithTimer(Count):
    """A count per key that is emitted every ten seconds of event time."""

    def process(self, record: Any, ctx: Any) -> None:
        self.n.set(self.n.get() + 1)
        ctx.timers.at((ctx.timestamp // 10_000 + 1) * 10_000)

    def on_timer(self, time: int, ctx: Any) -> Iterator[Any]:
        yield {"user": ctx.key, "n": self.n.get()}


def arrow_batch(keys: int, number: int) -> pa.RecordBatch:
    """Return the records of one micro-batch as a source task provides them; event time rises 1 ms every 20 records."""
    first = number * BATCH
    users = [f"user-{(first + i) * 7919 % keys}" for i in range(BATCH)]
    times = [(first + i) // 20 for i in range(BATCH)]
    rows = list(map(ROWS.row, zip(users, times, [1.5] * BATCH, strict=True)))
    moments = [moment(first + i + 1, RECORD) for i in range(BATCH)]
    return Records(moments, [b""] * BATCH, times, rows).to_arrow(ROWS)


def ticks_of(number: int) -> Ticks:
    """Return the watermark steps of a batch: it rises with every new event time, 10,000 times."""
    first = number * BATCH
    steps = Steps(first // 20 - 1)
    for i in range(20, BATCH + 1, 20):
        steps.add(watermark_step(first + i), (first + i) // 20 - 1)
    return Ticks({TOPIC: steps}, Steps(0))


def machine_of(build: Callable[[Any], Any]) -> Machine:
    p = Pipeline("bench")
    build(p.source("in", schema=ROWS, event_time="at", watermark=Watermark.ascending())).sink("out", uid="out")
    return Machine(Plan("bench", p.graph, {"in": ROWS}))


def rate(machine: Machine, keys: int) -> float:
    """Return records per second, after enough batches to make all keys known."""
    first = max(1, keys // BATCH)
    for number in range(first):
        machine.run({"in": Records.from_arrow(arrow_batch(keys, number), ROWS)}, ticks_of(number))
    batches = [(arrow_batch(keys, number), ticks_of(number)) for number in range(first, first + BATCHES)]
    gc.collect()
    gc.disable()
    try:
        started = time.process_time()
        for batch, ticks in batches:
            machine.run({"in": Records.from_arrow(batch, ROWS)}, ticks)
        return BATCHES * BATCH / (time.process_time() - started)
    finally:
        gc.enable()


def bare_loop(keys: int) -> float:
    """Measure the reference: the same Arrow columns, the key column as a list, a dict of counts."""
    batches = [arrow_batch(keys, number) for number in range(BATCHES)]
    counts: dict[str, int] = {}
    started = time.process_time()
    for batch in batches:
        for user in batch.column("user").to_pylist():
            counts[user] = counts.get(user, 0) + 1
    return BATCHES * BATCH / (time.process_time() - started)


def lines() -> Iterator[str]:
    """Yield the figures as rows of a table."""
    yield from ("", "## Pipelines: the operator core", "")
    yield f"| thousand records/s and core, at keys | {' | '.join(f'{keys:,}' for keys in KEYS)} |"
    yield f"| --- |{' ---: |' * len(KEYS)}"

    def line(name: str, measure: Callable[[int], float]) -> str:
        return f"| {name} | {' | '.join(f'{measure(keys) / 1_000:,.0f}' for keys in KEYS)} |"

    def count(stream: Any) -> Any:
        return stream.process(key="user", function=Count(), uid="x", schema="user string, n bigint")

    def timer(stream: Any) -> Any:
        return stream.process(key="user", function=CountWithTimer(), uid="x", schema="user string, n bigint")

    def window(stream: Any) -> Any:
        return stream.window(
            key="user", window=Tumbling("10s"), aggregate={"n": "count(*)", "s": "sum(amount)"}, uid="x"
        )

    yield line("bare loop: dict of counts", bare_loop)
    for name, build in (("process: count", count), ("process: count and timer", timer), ("window: count, sum", window)):
        yield line(name, lambda keys, build=build: rate(machine_of(build), keys))  # type: ignore[misc]


if __name__ == "__main__":
    for text in lines():
        sys.stdout.write(text + "\n")
