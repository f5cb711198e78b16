"""Checks that a pipeline gives the same result in pieces as in one: over several slices and micro-batches, with its
functions sent to another worker and its state restored between them. Data that a function keeps outside its declared
state is lost there, as in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.errors import PipelineFailed
from cutwater.pipeline.clocks.clock_steps import Ticks
from cutwater.pipeline.graph import Graph, OperatorNode, SinkNode, TransformNode
from cutwater.pipeline.operators.executor import Machine
from cutwater.pipeline.pickling import unpickled_graph
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.position import glsn_of
from cutwater.pipeline.records import Records
from cutwater.pipeline.rows import RowType
from cutwater.types import GLSN

MicroBatch: TypeAlias = tuple[Mapping[str, Records], Ticks]
"""A micro-batch: records by topic, and the steps of the clocks."""
Transform: TypeAlias = Callable[[Plan, TransformNode, Records], Records]

WAY_OUT: Final = (
    "Keep what one record leaves for the next in a ValueState, ListState or MapState, and let functions depend on "
    "nothing else, neither the time of day nor random numbers. p.test(..., slices=1, batches=1) does without this check"
)
_SHOWN: Final = 3


def in_pieces(
    plan: Plan,
    pickled: bytes,
    rows: Mapping[str, RowType],
    ranges: Iterator[MicroBatch],
    slices: int,
    state: Mapping[str, pa.Table] | None,
    transform: Transform,
) -> dict[str, Records]:
    """Run each micro-batch with newly unpickled functions, from a snapshot, over another number of slices."""
    written: dict[str, list[Records]] = {}
    for index, (batch, ticks) in enumerate(ranges):
        own = Plan(plan.name, unpickled_graph(pickled), rows)
        count = 1 + (slices + index - 1) % slices if slices > 1 else 1
        machine = Machine(own, count, state=state, transform=partial(_transformed, plan, transform))
        for uid, records in machine.run(batch, ticks).items():
            written.setdefault(uid, []).append(records)
        state = machine.snapshot()
    return {uid: Records.merged(parts) for uid, parts in written.items()}


def _transformed(plan: Plan, transform: Transform, node: TransformNode, records: Records) -> Records:
    """Run code on data frames with the original node, which may hold a session."""
    own = plan.graph.nodes[node.order]
    assert isinstance(own, TransformNode), "both graphs have the same nodes"
    return transform(plan, own, records)


def require_same(
    plan: Plan, whole: Mapping[str, Records], pieces: Mapping[str, Records], machine: Machine, pickled: bytes
) -> None:
    """Refuse a pipeline whose rows depend on how it is cut. ``machine`` has run it in one piece."""
    for sink in plan.graph.of_type(SinkNode):
        rows = plan.rows_at(sink.inputs[0])
        once, cut = _rows(whole[sink.uid], rows), _rows(pieces.get(sink.uid, Records()), rows)
        if once == cut:
            continue
        pairs = enumerate(zip(once, cut, strict=False))
        index = next((i for i, (one, other) in pairs if one != other), min(len(once), len(cut)))
        uid, why = _why(plan, machine, pickled)
        raise PipelineFailed(
            f"the rows of topic {sink.topic!r} depend on how the run is cut into slices and micro-batches: row "
            f"{index + 1} is {_shown(once, index)} in one piece, and {_shown(cut, index)} over several, with the state "
            f"restored between them: {why}. {WAY_OUT}",
            pipeline=plan.name,
            uid=uid or sink.label,
            glsn=GLSN((once[index] if index < len(once) else cut[index])[0]),
        )


def failed_in_pieces(plan: Plan, error: PipelineFailed, machine: Machine, pickled: bytes) -> PipelineFailed:
    """Return the error for a failure that does not happen in one piece."""
    _, why = _why(plan, machine, pickled)
    what = error.message.removeprefix(
        PipelineFailed("", pipeline=error.pipeline, uid=error.uid, glsn=error.glsn).message
    )
    return PipelineFailed(
        f"in one piece the pipeline runs, but over several slices and micro-batches, with the state restored between "
        f"them, it fails: {what}. Perhaps {why}. {WAY_OUT}",
        pipeline=error.pipeline,
        uid=error.uid,
        glsn=error.glsn,
    )


def _why(plan: Plan, machine: Machine, pickled: bytes) -> tuple[str, str]:
    kept = _kept_attributes(plan.graph, machine, pickled)
    for uid, names in kept.items():
        told = ", ".join(f"self.{name}" for name in names[:_SHOWN])
        return uid, f"the function of {uid!r} keeps {told} as a Python attribute, which no worker hands on to the next"
    return "", "a function keeps something outside its declared state, or gives something else each time"


def _rows(records: Records, rows: RowType | None) -> list[tuple[int, int, str]]:
    """Return rows after transport between workers, with positions. They are texts, so that a NaN equals itself."""
    if rows is not None:
        records = Records.from_arrow(records.to_arrow(rows), rows)
    return [
        (glsn_of(when), time, repr(tuple(row)))
        for when, time, row in zip(records.moments, records.times, records.rows, strict=True)
    ]


def _shown(rows: Sequence[tuple[int, int, str]], index: int) -> str:
    if index >= len(rows):
        return "not there"
    glsn, _, row = rows[index]
    return f"{row} (of GLSN {glsn})"


def _kept_attributes(graph: Graph, machine: Machine, pickled: bytes) -> dict[str, list[str]]:
    """Return the attributes of functions that have changed since the program was built, by uid."""
    fresh = {node.uid: node.function for node in unpickled_graph(pickled).nodes if isinstance(node, OperatorNode)}
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        if not isinstance(node, OperatorNode) or node.function is None:
            continue
        states = {state.name for state in node.states}
        before = vars(fresh[node.uid])
        for operator in machine.operators(node.uid):
            after = vars(operator.function)
            changed = [
                name
                for name in after
                if name not in states and not (name in before and _are_equal(before[name], after[name]))
            ]
            if changed:
                found[node.uid] = changed
    return found


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other) or repr(one) == repr(other)
    except Exception:
        return False
