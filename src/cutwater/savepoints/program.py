"""Describes the state of a program as data: its operators with their states and keys, its sources and sinks.

A checkpoint has this description next to Spark's files, and a savepoint has it next to the state. So both can be
understood without the program.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.errors import InvalidArgument, Refused
from cutwater.pipeline.functions import BatchFunction
from cutwater.pipeline.graph import OperatorNode, SinkNode, SourceNode, WindowNode
from cutwater.pipeline.operators.keyed_operator import OperatorSpec
from cutwater.pipeline.plan import Plan
from cutwater.schema_text import parse_type, quoted, shown

KEYED: Final = "keyed"
WINDOW: Final = "window"
PARTITIONS: Final = "partitions"
BATCHES: Final = "batches"


class StateInfo(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One state of an operator: the type that the user declares, and the stored type of a key, both as text."""

    name: str
    kind: str
    type: str
    stored: str
    ttl_ms: int | None = None

    def __str__(self) -> str:
        ttl = "" if self.ttl_ms is None else f", with a ttl, which is kept as {self.stored}"
        return f"{self.kind} {self.type}{ttl}"


class OperatorInfo(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An operator. ``layout`` is what state belongs to: ``keyed``, ``window``, ``partitions`` or ``batches`` (a key
    group). ``key`` has the columns of the key as a schema; it is empty if a function makes the key. ``aggregates`` are
    those of a window."""

    uid: str
    kind: str
    layout: str
    level: int
    key: str
    max_parallelism: int
    sources: tuple[str, ...]
    states: tuple[StateInfo, ...]
    partitions: int = 0
    window: str = ""
    aggregates: dict[str, str] = {}

    def state(self, name: str) -> StateInfo | None:
        return next((state for state in self.states if state.name == name), None)


class SourceInfo(Struct, frozen=True, forbid_unknown_fields=True):
    topic: str
    watermark: str


class SinkInfo(Struct, frozen=True, forbid_unknown_fields=True):
    uid: str
    topic: str


class ProgramInfo(Struct, frozen=True):
    """Everything that a savepoint says about the program that it was taken from."""

    operators: tuple[OperatorInfo, ...]
    sources: tuple[SourceInfo, ...]
    sinks: tuple[SinkInfo, ...]
    levels: int

    @property
    def by_uid(self) -> dict[str, OperatorInfo]:
        return {operator.uid: operator for operator in self.operators}


def described(plan: Plan) -> ProgramInfo:
    nodes = {node.order: node for node in plan.graph.of_type(OperatorNode)}
    operators = [_operator(plan, nodes[spec.order], spec) for specs in plan.levels for spec in specs]
    sources = [SourceInfo(node.topic, str(node.watermark or "none")) for node in plan.graph.of_type(SourceNode)]
    sinks = [SinkInfo(node.uid, node.topic) for node in plan.graph.of_type(SinkNode)]
    return ProgramInfo(tuple(operators), tuple(sources), tuple(sinks), len(plan.levels))


def _operator(plan: Plan, node: OperatorNode, spec: OperatorSpec) -> OperatorInfo:
    window, aggregates = "", {}
    if isinstance(node, WindowNode):
        window = str(node.window)
        aggregates = {
            name: given if isinstance(given, str) else type(given).__name__ for name, given in node.aggregates.items()
        }
    return OperatorInfo(
        uid=spec.uid,
        kind=node.kind,
        layout=_layout(node, spec),
        level=plan.node_levels[node.order] - 1,
        key=_key(plan, node, spec),
        max_parallelism=spec.max_parallelism,
        sources=tuple(sorted(spec.sources)),
        states=tuple(
            StateInfo(
                state.name, state.kind, _text(spec.uid, state.name, state.type, state.stored_type),
                _text(spec.uid, state.name, state.stored_type, state.stored_type), state.ttl_ms,
            )
            for state in spec.states
        ),
        partitions=spec.partitions,
        window=window,
        aggregates=aggregates,
    )  # fmt: skip


def _layout(node: OperatorNode, spec: OperatorSpec) -> str:
    if isinstance(node, WindowNode):
        return WINDOW
    if isinstance(spec.function, BatchFunction):
        return BATCHES
    return PARTITIONS if spec.partitions else KEYED


def _key(plan: Plan, node: OperatorNode, spec: OperatorSpec) -> str:
    if spec.partitions:
        return "partition int"
    if isinstance(spec.function, BatchFunction):
        return "key_group int"
    reader, port = next(
        (key, port) for key, port in zip(node.keys, node.inputs, strict=True) if key is not None
    )  # fmt: skip
    fields = reader.fields(plan.rows_at(port))
    return "" if fields is None else ", ".join(f"{quoted(field.name)} {shown(field.type)}" for field in fields)


def _text(uid: str, name: str, kind: pa.DataType, stored: pa.DataType) -> str:
    if pa.types.is_null(kind) and not pa.types.is_null(stored):
        return shown(stored)
    text = shown(kind)
    try:
        parse_type(text)
    except InvalidArgument:
        raise Refused(
            f"the state {name!r} of {uid!r} is of Arrow's type {kind}, which checkpoints and savepoints do not know: "
            "declare it with one of Spark SQL's types, as a text"
        ) from None
    return text
