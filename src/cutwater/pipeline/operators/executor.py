"""Runs a plan micro-batch by micro-batch, level by level, slice by slice.

``SliceTask`` is the unit that Spark runs in parallel: all operators of one level in one slice. Its input is the records
of the slice and the ticks of the range. Its output goes to later levels and sinks. ``Machine`` does the same within one
process, in one thread, for tests and for ``Pipeline.test``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.pipeline.clocks.clock_steps import Ticks
from cutwater.pipeline.functions import BatchFunction
from cutwater.pipeline.graph import Port, SinkNode, SourceNode, TransformNode
from cutwater.pipeline.keyed_state.chunks import BROADCAST_GROUP, Chunk
from cutwater.pipeline.keyed_state.keys import key_bytes, key_group, slice_of
from cutwater.pipeline.keyed_state.store import KeyedStore
from cutwater.pipeline.operators.batch_operator import BatchOperator
from cutwater.pipeline.operators.keyed_operator import KeyedOperator, OperatorSpec
from cutwater.pipeline.operators.partition_operator import PartitionOperator, partition_of
from cutwater.pipeline.plan import Destination, Plan
from cutwater.pipeline.records import Records
from cutwater.pipeline.windowing.window_function import WindowFunction
from cutwater.pipeline.windowing.window_operator import WindowOperator


def operator_of(spec: OperatorSpec, store: KeyedStore, first: bool) -> KeyedOperator:
    """Make the kind of operator that runs a function."""
    if isinstance(spec.function, WindowFunction):
        return WindowOperator(spec, store, first)
    if isinstance(spec.function, BatchFunction):
        return BatchOperator(spec, store, first)
    return PartitionOperator(spec, store, first) if spec.partitions else KeyedOperator(spec, store, first)


class SliceTask:
    """All operators of one level in one slice, with their state, for one micro-batch."""

    def __init__(
        self,
        plan: Plan,
        level: int,
        index: int,
        chunks: Mapping[str, Iterable[pa.Table | pa.RecordBatch | Chunk]],
    ) -> None:
        self._plan = plan
        self.operators = []
        for spec in plan.levels[level]:
            store = KeyedStore(spec.states, spec.hashed_groups, chunks.get(spec.uid, ()))
            self.operators.append(operator_of(spec, store, first=index == 0))

    def run(
        self, inputs: Mapping[Destination, Records], ticks: Ticks, arrived: dict[Destination, list[Records]]
    ) -> None:
        """Process a micro-batch. Emitted records go through row functions and are added to ``arrived``."""
        for operator in self.operators:
            order = operator.spec.order
            own = [inputs.get((order, index), Records()) for index in range(len(operator.spec.keys))]
            for tag, records in operator.run(own, ticks).items():
                if len(records):
                    self._plan.push(Port(order, tag), records, arrived)

    def checkpoint(self) -> dict[str, list[Chunk]]:
        """Return the state after the micro-batch, by operator: earlier chunks, changes, or both merged."""
        for operator in self.operators:
            if operator.store.checkpoint() is not None:
                operator.store.merge(operator.watermark())
        return {operator.spec.uid: operator.store.chunks for operator in self.operators}


def routed(spec: OperatorSpec, index: int, records: Records, slices: int) -> list[Records]:
    """Divide the records of one input among slices. All slices get broadcast records. A record whose key cannot be read
    goes to the first slice and fails there."""
    read_key = spec.keys[index]
    if slices == 1 or (read_key is None and not spec.partitions):
        return [records] * slices
    chosen: list[list[int]] = [[] for _ in range(slices)]
    if spec.partitions:
        for i, when in enumerate(records.moments):
            chosen[slice_of(partition_of(when, spec.partitions), slices, spec.groups)].append(i)
        return [records.pick(indexes) for indexes in chosen]
    assert read_key is not None, "only a broadcast has no key"
    known: dict[Any, int] = {}
    for i, row in enumerate(records.rows):
        try:
            key = read_key(row)
            place = known.get(key)
            if place is None:
                place = known[key] = slice_of(key_group(key_bytes(key), spec.groups), slices, spec.groups)
        except Exception:
            place = 0
        chosen[place].append(i)
    return [records.pick(indexes) for indexes in chosen]


class Machine:
    """A whole pipeline in one process. It works like workers that share nothing: every micro-batch starts from chunks,
    and records go from level to level as Arrow."""

    def __init__(
        self,
        plan: Plan,
        slices: int = 1,
        *,
        state: Mapping[str, pa.Table] | None = None,
        transform: Callable[[TransformNode, Records], Records] | None = None,
    ) -> None:
        """``state`` is a snapshot, made with any number of slices, to go on from. ``transform`` runs code on Spark's
        data frames."""
        self._plan = plan
        self._transform = transform
        self._slices = slices
        self._source_ports = {node.topic: Port(node.order) for node in plan.graph.of_type(SourceNode)}
        self._kept: list[list[dict[str, list[Chunk]]]] | None = None
        """The state after the last micro-batch, by level and slice."""
        self._tasks = [
            [SliceTask(plan, level, index, self._cut(state or {}, level, index)) for index in range(slices)]
            for level in range(len(plan.levels))
        ]

    def run(self, batch: Mapping[str, Records], ticks: Ticks) -> dict[str, Records]:
        """Process a micro-batch of records by source topic. Returns the records of each sink by uid, in order."""
        if self._kept is not None:
            self._tasks = [
                [SliceTask(self._plan, level, index, chunks) for index, chunks in enumerate(own)]
                for level, own in enumerate(self._kept)
            ]
        arrived: dict[Destination, list[Records]] = {}
        for topic, records in batch.items():
            self._plan.push(self._source_ports[topic], records, arrived)
        self._apply_transforms(arrived)
        for level, tasks in enumerate(self._tasks):
            inputs: list[dict[Destination, Records]] = [{} for _ in tasks]
            for spec in self._plan.levels[level]:
                for index in range(len(spec.keys)):
                    records = Records.merged(arrived.pop((spec.order, index), []))
                    rows = spec.input_rows[index]
                    for own, part in zip(inputs, routed(spec, index, records, self._slices), strict=True):
                        own[spec.order, index] = Records.from_arrow(part.to_arrow(rows), rows) if rows else part
            for task, own in zip(tasks, inputs, strict=True):
                task.run(own, ticks, arrived)
            self._apply_transforms(arrived)
        self._kept = [[task.checkpoint() for task in tasks] for tasks in self._tasks]
        return {
            sink.uid: Records.merged(arrived.get((sink.order, 0), [])) for sink in self._plan.graph.of_type(SinkNode)
        }

    def _apply_transforms(self, arrived: dict[Destination, list[Records]]) -> None:
        """Run code on Spark on waiting records, in the order of the program, because one node may feed another."""
        for node in self._plan.graph.of_type(TransformNode):
            records = Records.merged(arrived.pop((node.order, 0), []))
            if len(records):
                assert self._transform is not None, "the runner of a plan with code on Spark provides transform"
                self._plan.push(Port(node.order), self._transform(node, records), arrived)

    def operators(self, uid: str) -> list[KeyedOperator]:
        """Return the operator with a uid, in each slice, as the last micro-batch left it."""
        return [op for tasks in self._tasks for task in tasks for op in task.operators if op.spec.uid == uid]

    def snapshot(self) -> dict[str, pa.Table]:
        """Return the whole state of every operator: what a savepoint holds."""
        whole: dict[str, pa.Table] = {}
        for spec in (spec for specs in self._plan.levels for spec in specs):
            parts = []
            for index, operator in enumerate(self.operators(spec.uid)):
                base = operator.store.compact(operator.watermark())
                parts.append(base if index == 0 else base.filter(pc.not_equal(base["key_group"], BROADCAST_GROUP)))
            whole[spec.uid] = pa.concat_tables(parts).sort_by([("key_group", "ascending"), ("key", "ascending")])
        return whole

    def _cut(self, state: Mapping[str, pa.Table], level: int, index: int) -> dict[str, list[pa.Table]]:
        cut = {}
        for spec in self._plan.levels[level]:
            if spec.uid in state:
                table = state[spec.uid]
                own = [
                    group == BROADCAST_GROUP or slice_of(group, self._slices, spec.groups) == index
                    for group in table["key_group"].to_pylist()
                ]
                cut[spec.uid] = [table.filter(pa.array(own, pa.bool_()))]
        return cut
