"""Matches the state of a savepoint to a program, by the uids of operators and the names of states.

1.  A state that only the program has begins empty. A state that only the savepoint has is left behind, and so is an
    operator, if that is allowed. The result lists the state that is left behind.
2.  A state keeps its kind. Its type may become wider: integers with more bits, ``float`` to ``double``, decimals with
    more digits before the point, and structs with more fields, which are null; also inside lists, maps and structs.
3.  The key of an operator keeps its types. Only the names of columns may change, and the bits of an integer.
4.  A window keeps its kind and its aggregates, found by name: they may be reordered and left out.
5.  If the number of partitions changes, list state is divided again, and each partition gets all of the union state.

Any other difference is refused before anything starts. The error shows both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.errors import InvalidArgument, Refused
from cutwater.pipeline.keyed_state.keys import key_bytes
from cutwater.pipeline.operators.partition_operator import UnionListState
from cutwater.savepoints.manifest import Manifest
from cutwater.savepoints.program import BATCHES, KEYED, PARTITIONS, WINDOW, OperatorInfo, ProgramInfo, StateInfo
from cutwater.savepoints.tables import PREFIX, as_type, to_chunk
from cutwater.schema_text import parse_schema, parse_type, shown

_OWNERS = {KEYED: "a key", WINDOW: "the windows of a key", PARTITIONS: "a partition", BATCHES: "a key group"}
WINDOW_FIELDS = ("start", "end", "pending", "fires_at")


class Restoration(Struct, frozen=True):
    """Operators that go on with state, as they were; what is left behind and what begins empty, by uid and name."""

    operators: tuple[OperatorInfo, ...]
    left_behind: tuple[str, ...]
    empty: tuple[str, ...]


def restoration(manifest: Manifest, program: ProgramInfo, *, allow_non_restored_state: bool = False) -> Restoration:
    """Decide what happens to each state of a savepoint in a program. Raises if something does not fit."""
    known = program.by_uid
    kept = [state.operator for state in manifest.operators if state.operator.uid in known]
    homeless = [
        state for state in manifest.operators
        if state.operator.uid not in known and (state.operator.states or state.rows)
    ]  # fmt: skip
    if homeless and not allow_non_restored_state:
        uids = ", ".join(repr(state.operator.uid) for state in homeless)
        raise Refused(
            f"the savepoint of {manifest.pipeline!r} has state of {uids}, and the program has no operator with that "
            f"uid: it has {', '.join(map(repr, known)) or 'none'}. Give the operator its uid back, or leave that state "
            "behind with allow_non_restored_state=True (--allow-non-restored-state)"
        )
    left = [state.operator.uid for state in homeless]
    empty = [operator.uid for operator in program.operators if operator.uid not in manifest.by_uid]
    for before in kept:
        after = known[before.uid]
        _require_fit(before, after)
        left += [f"{before.uid}.{state.name}" for state in before.states if after.state(state.name) is None]
        empty += [f"{before.uid}.{state.name}" for state in after.states if before.state(state.name) is None]
    return Restoration(tuple(kept), tuple(left), tuple(empty))


def _require_fit(before: OperatorInfo, after: OperatorInfo) -> None:
    if before.layout != after.layout:
        owners = _OWNERS[before.layout], _OWNERS[after.layout]
        raise _misfit(before, "what its state belongs to", *owners, "use another uid")
    if key_kinds(before) != key_kinds(after) and before.key and after.key:
        raise _misfit(before, "its key", before.key, after.key, "the state of a key is found by the key's bytes")
    if before.layout == BATCHES and before.max_parallelism != after.max_parallelism:
        raise _misfit(
            before, "max_parallelism", before.max_parallelism, after.max_parallelism,
            "a function of batches keeps state per key group, which cannot be divided anew",
        )  # fmt: skip
    if before.layout == WINDOW:
        _require_window(before, after)
        return
    for state in after.states:
        stored = before.state(state.name)
        if stored is not None:
            wrong = _state_misfit(stored, state)
            if wrong:
                raise _misfit(before, f"the state {state.name!r}", stored, state, wrong)


def _require_window(before: OperatorInfo, after: OperatorInfo) -> None:
    if window_kind(before) != window_kind(after):
        hint = "only windows of the same kind can be restored"
        raise _misfit(before, "its window", before.window, after.window, hint)
    for name, given in after.aggregates.items():
        if before.aggregates.get(name) != given:
            was = before.aggregates.get(name, "not there")
            hint = "windows that are open have no value for it: use a new uid"
            raise _misfit(before, f"the aggregate {name!r}", was, given, hint)
    fields = parse_type(before.states[0].stored).value_type
    wanted = parse_type(after.states[0].stored).value_type
    for index, old in enumerate(_accumulators(before, after)):
        kinds = fields.field(old).type, wanted.field(len(WINDOW_FIELDS) + index).type
        if not widens(*kinds):
            name = list(after.aggregates)[index]
            texts = [shown(kind) for kind in kinds]
            raise _misfit(before, f"what the aggregate {name!r} keeps", texts[0], texts[1], "not every value fits")


def _state_misfit(before: StateInfo, after: StateInfo) -> str:
    if before.kind != after.kind:
        return "a state keeps its kind: give the new one another name"
    if (before.ttl_ms is None) != (after.ttl_ms is None):
        return "whether a state has a ttl is part of how it is kept: give the new one another name"
    if not widens(parse_type(before.stored), parse_type(after.stored)):
        return "not every value fits: give the new one another name, and convert in the function"
    return ""


def _misfit(operator: OperatorInfo, what: str, before: object, after: object, hint: str) -> InvalidArgument:
    return InvalidArgument(
        f"operator {operator.uid!r}: {what} is {before} in the savepoint and {after} in the program: {hint}"
    )


def key_kinds(operator: OperatorInfo) -> list[str]:
    """Return what decides the bytes of a key: integers of all sizes have the same."""
    kinds = [field.type for field in parse_schema(operator.key)] if operator.key else []
    return ["integer" if pa.types.is_integer(kind) else shown(kind) for kind in kinds]


def window_kind(operator: OperatorInfo) -> str:
    """Return the first word of a window's text; empty if there is no window."""
    return "".join(operator.window.split()[:1])


def widens(before: pa.DataType, after: pa.DataType) -> bool:
    """Report whether every value of one type fits another type."""
    if before.equals(after):
        return True
    is_a = pa.types
    if is_a.is_signed_integer(before) and is_a.is_signed_integer(after):
        return bool(after.bit_width >= before.bit_width)
    if is_a.is_floating(before) and is_a.is_floating(after):
        return bool(after.bit_width >= before.bit_width)
    if is_a.is_decimal(before) and is_a.is_decimal(after):
        return bool(before.scale == after.scale and after.precision >= before.precision)
    if is_a.is_list(before) and is_a.is_list(after):
        return widens(before.value_type, after.value_type)
    if is_a.is_map(before) and is_a.is_map(after):
        return widens(before.key_type, after.key_type) and widens(before.item_type, after.item_type)
    if is_a.is_struct(before) and is_a.is_struct(after):
        names = {field.name for field in after}
        return all(field.name in names and widens(field.type, after.field(field.name).type) for field in before)
    return False


def widened(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert a column to a type that its own type ``widens`` to."""
    if column.type.equals(kind):
        return column
    if pa.types.is_struct(kind):
        own = {field.name: column.field(i) for i, field in enumerate(column.type)}
        parts = [
            widened(own[field.name], field.type) if field.name in own else pa.nulls(len(column), field.type)
            for field in kind
        ]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=column.is_null())
    if pa.types.is_list(kind):
        return _list(column, widened(column.flatten(), kind.value_type), kind)
    if pa.types.is_map(kind):
        return pa.array(column.to_pylist(), kind)
    return column.cast(kind)


def _list(column: pa.Array, values: pa.Array, kind: pa.DataType) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    ends = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
    return pa.ListArray.from_arrays(ends, values, type=kind, mask=column.is_null())


# ------------------------------------------------------------------------------------------------------------ evolving


def evolved_chunk(
    rows: pa.RecordBatch, before: OperatorInfo, after: OperatorInfo, schema: pa.Schema, hashed_groups: int | None
) -> pa.RecordBatch:
    """Convert rows of a savepoint to a chunk for the current operator. ``schema`` is the schema of its chunks."""
    table = evolved(rows, before, after)
    exact = [
        as_type(column, schema.field(name).type) if name in schema.names and name.startswith(PREFIX) else column
        for name, column in zip(table.schema.names, table.columns, strict=True)
    ]
    return to_chunk(pa.RecordBatch.from_arrays(exact, names=table.schema.names), schema, hashed_groups)


def evolved(table: pa.RecordBatch, before: OperatorInfo, after: OperatorInfo) -> pa.RecordBatch:
    """Return the rows of an operator with the states that it has now. Keys for which nothing is left have no row."""
    names, columns = [], []
    for name in ("key_group", "key_bytes", "event_timers", "processing_timers"):
        names.append(name)
        columns.append(as_type(table.column(name), table.schema.field(name).type))
    for state in after.states:
        stored = before.state(state.name)
        kind = parse_type(state.stored)
        names.append(f"{PREFIX}{state.name}")
        if stored is None:
            columns.append(pa.nulls(table.num_rows, kind))
            continue
        column = as_type(table.column(f"{PREFIX}{state.name}"), parse_type(stored.stored))
        columns.append(_windows(column, before, after) if before.layout == WINDOW else widened(column, kind))
    made = pa.RecordBatch.from_arrays(columns, names=names)
    if before.layout == PARTITIONS and before.partitions != after.partitions:
        made = redistributed(made, after)
    kept = pc.or_(made.column("event_timers").is_valid(), made.column("processing_timers").is_valid())
    for state in after.states:
        kept = pc.or_(kept, made.column(f"{PREFIX}{state.name}").is_valid())
    return made.filter(kept)


def _accumulators(before: OperatorInfo, after: OperatorInfo) -> list[int]:
    """Return the place in a stored window of each aggregate that the window has now."""
    places = {name: len(WINDOW_FIELDS) + index for index, name in enumerate(before.aggregates)}
    return [places[name] for name in after.aggregates]


def _windows(column: pa.Array, before: OperatorInfo, after: OperatorInfo) -> pa.Array:
    kind = parse_type(after.states[0].stored)
    panes = column.flatten()
    plain = [panes.field(index) for index in range(len(WINDOW_FIELDS))]
    sums = [panes.field(index) for index in _accumulators(before, after)]
    fields = list(kind.value_type)
    parts = [widened(part, field.type) for part, field in zip([*plain, *sums], fields, strict=True)]
    return _list(column, pa.StructArray.from_arrays(parts, fields=fields), kind)


def redistributed(table: pa.RecordBatch, after: OperatorInfo) -> pa.RecordBatch:
    """Distribute the state of all partitions over their current number. Lists are divided into contiguous parts whose
    sizes differ by at most one, larger ones first; each partition gets all of a union."""
    count = after.partitions
    data = [key_bytes(number) for number in range(count)]
    order = pc.sort_indices(table.column("key_group"))
    columns: dict[str, pa.Array] = {
        "key_group": pa.array(range(count), pa.int32()),
        "key_bytes": pa.array(data, pa.binary()),
    }
    for name in ("event_timers", "processing_timers"):
        columns[name] = pa.nulls(count, table.schema.field(name).type)
    for state in after.states:
        column = table.column(f"{PREFIX}{state.name}").take(order)
        columns[f"{PREFIX}{state.name}"] = _divided(column, state.kind == UnionListState.kind, count)
    return pa.RecordBatch.from_arrays([columns[name] for name in table.schema.names], names=table.schema.names)


def _divided(column: pa.Array, is_union: bool, count: int) -> pa.Array:
    items = column.flatten()
    if is_union:
        sizes: Sequence[int] = [len(items)] * count
        items = pa.concat_arrays(list(repeat(items, count)))
    else:
        size, larger = divmod(len(items), count)
        sizes = [size + (index < larger) for index in range(count)]
    ends = pa.array(list(accumulate(sizes, initial=0)), pa.int32())
    is_empty = pa.array([size == 0 for size in sizes], pa.bool_())
    return pa.ListArray.from_arrays(ends, items, type=column.type, mask=is_empty)
