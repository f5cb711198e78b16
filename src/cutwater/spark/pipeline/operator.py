"""Implements the one stateful Spark operator of a level: it runs all operators of the level, one slice at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, functions
from pyspark.sql import Row as SparkRow
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from cutwater.pipeline.graph import WindowNode
from cutwater.pipeline.operators.executor import SliceTask
from cutwater.pipeline.operators.keyed_operator import OperatorSpec
from cutwater.pipeline.plan import Destination, Plan
from cutwater.pipeline.records import Records
from cutwater.spark.pipeline.envelope import LATE, LATE_SENT, LEFT, TICK, envelopes, merged_records, merged_ticks
from cutwater.spark.pipeline.error_translation import told
from cutwater.spark.pipeline.program import Program
from cutwater.spark.pipeline.state import NO_QUERY, ChunkFiles, SliceState

OBSERVED = "cutwater late rows, level "
LEFT_OBSERVED = "cutwater left timers, level "
"""Prefixes of the metric names that Spark observes for Cutwater."""
SENT = ".late "
"""Prefix of a uid whose count is late rows that were sent to ``.late`` and not dropped."""
COUNT_MAX = 2**31 - 1
_Envelope = SparkRow("slice", "node", "input", "data")


class LevelProcessor(StatefulProcessor):
    """Runs level ``level`` of a program. Spark pickles it with the query's plan and calls it in its workers."""

    def __init__(self, program: Program, level: int) -> None:
        self._program, self._level = program, level

    def init(self, handle: Any) -> None:
        self._manifest = handle.getValueState("manifest", "chunks binary")
        self._pieces = handle.getMapState("pieces", "name string, piece int", "data binary")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:  # noqa: N802, N803
        """Add state from a savepoint, in the first micro-batch, before its records."""
        data = initialState.data
        with told():
            self._state().add(initialState.uid, None if data is None else bytes(data), initialState.dropped_late)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        plan = self._program.plan
        own = {spec.order for spec in plan.levels[self._level]}
        waiting: dict[Destination, list[bytes]] = {}
        ticks: list[bytes] = []
        for row in rows:
            if row.node == TICK:
                ticks.append(bytes(row.data))
            elif row.node in own:
                waiting.setdefault((row.node, row.input), []).append(bytes(row.data))
            else:
                yield _Envelope(row.slice, row.node, row.input, row.data)
        index = self._program.slice_of_key(key[0])
        # The core makes no reference cycles per record or key. Searching many keys for cycles would cost more than the
        # work.
        gc.disable()
        try:
            with told():
                arrived, late, left = self._run(plan, index, waiting, ticks)
        finally:
            gc.enable()
        if self._level + 1 < len(plan.levels):
            for tick in ticks:
                yield _Envelope(key[0], TICK, 0, tick)
        for row in envelopes(self._program, arrived, index):
            yield _Envelope(*row)
        for spec in plan.levels[self._level]:
            if spec.uid in late:
                yield _Envelope(min(late[spec.uid], COUNT_MAX), LATE, spec.order, b"")
            if SENT + spec.uid in late:
                yield _Envelope(min(late[SENT + spec.uid], COUNT_MAX), LATE_SENT, spec.order, b"")
            if left.get(spec.uid):
                yield _Envelope(min(left[spec.uid], COUNT_MAX), LEFT, spec.order, b"")

    def _run(
        self, plan: Plan, index: int, waiting: dict[Destination, list[bytes]], ticks: Iterable[bytes]
    ) -> tuple[dict[Destination, list[Records]], dict[str, int], dict[str, int]]:
        """Run the level in one slice. Returns the records that leave the level, how many late rows its operators have
        dropped in this slice so far, by uid (with prefix ``SENT``: how many went to ``.late``), and how many timers are
        left at the end."""
        state = self._state()
        uids = [spec.uid for spec in plan.levels[self._level]]
        task = SliceTask(plan, self._level, index, state.chunks(plan.name, uids))
        inputs = {}
        for destination, parts in waiting.items():
            rows = plan.rows_for(destination)
            assert rows is not None, "a run has schemas everywhere"
            inputs[destination] = merged_records(parts, rows)
        arrived: dict[Destination, list[Records]] = {}
        task.run(inputs, merged_ticks(ticks), arrived)
        late = {operator.spec.uid: operator.dropped_late for operator in task.operators if operator.dropped_late}
        late |= {SENT + operator.spec.uid: operator.late_sent for operator in task.operators if operator.late_sent}
        left = {operator.spec.uid: operator.left_timers for operator in task.operators}
        return arrived, state.write(task.checkpoint(), late), left

    def _state(self) -> SliceState:
        """Return the state of the slice that Spark is processing."""
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        return SliceState(self._manifest, self._pieces, ChunkFiles(query or NO_QUERY))

    def close(self) -> None:
        pass


def observed(rows: DataFrame, plan: Plan, level: int) -> DataFrame:
    """Return the output of a level and let Spark count its late rows. Every slice reports its own count in every
    micro-batch, so the sums in Spark's progress cover all rows ever dropped, also before a restart."""
    specs = plan.levels[level]
    windows = [spec for spec in specs if isinstance(plan.graph.nodes[spec.order], WindowNode)]
    if windows:
        counts = [_count(*kind, spec) for spec in windows for kind in ((LATE, ""), (LATE_SENT, SENT))]
        rows = rows.observe(f"{OBSERVED}{level}", *counts)
    rows = rows.observe(f"{LEFT_OBSERVED}{level}", *(_count(LEFT, "", spec) for spec in specs))
    return rows.where(f"node not in ({LATE}, {LATE_SENT}, {LEFT})")


def _count(node: int, before: str, spec: OperatorSpec) -> Column:
    return functions.expr(f"sum(if(node = {node} and input = {spec.order}, slice, 0))").alias(before + spec.uid)


def dropped_late(told: Mapping[str, Any]) -> dict[str, int]:
    """Return how many late rows were dropped, from Spark's progress, by uid."""
    return {uid: count for uid, count in _observed(told, OBSERVED).items() if not uid.startswith(SENT)}


def late_sent(told: Mapping[str, Any]) -> dict[str, int]:
    """Return how many late rows went to ``.late``, from Spark's progress, by uid."""
    found = _observed(told, OBSERVED)
    return {uid.removeprefix(SENT): count for uid, count in found.items() if uid.startswith(SENT)}


def left_timers(told: Mapping[str, Any]) -> dict[str, int]:
    """Return how many timers were left when the input ended, from Spark's progress, by uid."""
    return _observed(told, LEFT_OBSERVED)


def _observed(told: Mapping[str, Any], prefix: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, row in (told.get("observedMetrics") or {}).items():
        if name.startswith(prefix):
            found |= {uid: int(count) for uid, count in row.asDict().items() if count}
    return found
