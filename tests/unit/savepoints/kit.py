"""Savepoints of small pipelines, made without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from cutwater.pipeline import ListState, MapState, Pipeline, ProcessFunction, Tumbling, ValueState, Watermark
from cutwater.pipeline.plan import Plan
from cutwater.savepoints import Manifest, Savepoint, write_savepoint
from cutwater.savepoints.manifest import FORMAT, VERSION, OperatorState, RunPoint
from cutwater.savepoints.program import ProgramInfo, described
from cutwater.savepoints.tables import to_table

ROWS = "user string, amount int, at bigint"


class Last(ProcessFunction):
    last = ValueState("int")
    recent = ListState("int", ttl="1d")
    counts = MapState("string", "int")

    def process(self, record: Any, ctx: Any) -> None:
        self.last.set(record.amount)
        self.recent.append(record.amount)
        self.counts.put("n", (self.counts.get("n") or 0) + 1)
        ctx.timers.at(ctx.timestamp + 60_000)
        if record.amount > 5:
            ctx.timers.at(ctx.timestamp + 90_000)


def pipeline(function: Any = None, name: str = "pays", **options: Any) -> Pipeline:
    p = Pipeline(name, **options)
    pay = p.source("payments", schema=ROWS, event_time="at", watermark=Watermark.ascending())
    pay.process(key="user", function=function or Last(), uid="last", schema=ROWS).sink("out", uid="out")
    pay.window(key="user", window=Tumbling("10s"), aggregate={"n": "count(*)", "s": "sum(amount)"}, uid="w").sink(
        "windows", uid="windows"
    )
    return p


def payments(count: int = 30) -> list[dict[str, Any]]:
    return [{"user": f"u{i % 7}", "amount": i % 11, "at": 1_000 * i} for i in range(count)]


def program_of(p: Pipeline) -> ProgramInfo:
    return described(Plan(p.name, p.graph, {"payments": p.graph.nodes[0].rows}))  # type: ignore[attr-defined]


def taken(
    target: Path,
    count: int = 30,
    p: Pipeline | None = None,
    rows: list[dict[str, Any]] | None = None,
    *,
    with_clock: bool = False,
    ended: bool = False,
) -> Savepoint:
    """What ``p`` has kept after some payments."""
    p = p or pipeline()
    result = p.test({"payments": payments(count) if rows is None else rows}, drain=False)
    machine, clock = result._machine, result._clock.snapshot() if with_clock else None
    program = program_of(p)
    state = machine.snapshot()
    tables = {}
    for operator in program.operators:
        chunks = state[operator.uid].combine_chunks().to_batches()
        if chunks:
            tables[operator.uid] = pa.Table.from_batches([to_table(chunks[0], operator)])
    created = "2026-01-01T00:00:00.000+00:00"
    manifest = Manifest(
        FORMAT, VERSION, f"id-{count}", p.name, created, count, 1_000 * count, clock, ended, 4, 2,
        RunPoint(p.name, "key", 3), "log", program.sources, program.sinks,
        tuple(OperatorState(operator, 0, 0, ()) for operator in program.operators), {"cutwater": "0"},
    )  # fmt: skip
    return write_savepoint(target, manifest, tables)
