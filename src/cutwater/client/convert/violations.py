"""Locates errors in a column: the row, and the place inside of a nested value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.errors import InvalidRecord


class Fault(NamedTuple):
    """An error in a value. ``path`` leads from a value of the column to the wrong part, such as ``.lines[2].price``."""

    path: str
    text: str


Check = Callable[..., str | None]
"""Checks columns of equal length; gets a field, and how many nulls are there because the enclosing value is null.
Returns what is wrong, or None. Nested values are checked separately."""
Concerns = Callable[..., bool]
"""Returns whether columns of these types need any check."""


def fault_error(name: str, row: int | None, fault: Fault) -> InvalidRecord:
    return InvalidRecord(f"{name}{fault.path}: {fault.text}" if fault.path else fault.text, column=name, row=row)


def check_columns(name: str, check: Check, concerns: Concerns, *columns: pa.Array) -> None:
    """Check columns of equal length, such as one before and after its conversion, at every depth. The type of the last
    column decides which parts are checked. An error names the first row that is wrong."""
    found = _first_fault(pa.field(name, columns[-1].type), check, concerns, columns)
    if found is not None:
        raise fault_error(name, *found)


def first_wrong(count: int, is_wrong: Callable[[int, int], bool]) -> int:
    """Binary search for the first failing row. At least one of the ``count`` rows must be wrong."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if is_wrong(low, middle):
            high = middle
        else:
            low = middle
    return low


def _first_fault(
    field: pa.Field, check: Check, concerns: Concerns, columns: tuple[pa.Array, ...]
) -> tuple[int, Fault] | None:
    """Return the first row that is wrong, and what is wrong in it."""
    fault = _fault(field, 0, check, concerns, columns)
    if fault is None:
        return None

    def within(start: int, end: int) -> Fault | None:
        return _fault(field, 0, check, concerns, tuple(column.slice(start, end - start) for column in columns))

    row = first_wrong(len(columns[-1]), lambda start, end: within(start, end) is not None)
    return row, within(row, row + 1) or fault


def _fault(
    field: pa.Field, absent: int, check: Check, concerns: Concerns, columns: tuple[pa.Array, ...]
) -> Fault | None:
    text = check(field, absent, *columns)
    if text is not None:
        return Fault("", text)
    if not concerns(*(column.type for column in columns)):
        return None
    for step, inner, missing, parts in parts_of(*columns):
        if step:
            found = _fault(inner, missing, check, concerns, parts)
            if found is not None:
                return Fault(step + found.path, found.text)
        elif (first := _first_fault(inner, check, concerns, parts)) is not None:
            index, found = first
            return Fault(f"[{index}]{found.path}", found.text)
    return None


def parts_of(*columns: pa.Array) -> Iterator[tuple[str, pa.Field, int, tuple[pa.Array, ...]]]:
    """Yield the parts of nested columns: the step to the part, which is empty for items of lists; its field; how many
    nulls are there because the enclosing value is null; and the values. Unions are not searched."""
    last = columns[-1]
    if pa.types.is_struct(last.type):
        flat = [dict(zip(column.type.names, column.flatten(), strict=True)) for column in columns]
        for inner in last.type:
            if all(inner.name in one for one in flat):
                yield f".{inner.name}", inner, last.null_count, tuple(one[inner.name] for one in flat)
    elif pa.types.is_nested(last.type) and hasattr(last, "flatten"):
        lists = [as_list(column) for column in columns]
        yield "", lists[-1].type.value_field, 0, tuple(column.flatten() for column in lists)


def as_list(column: pa.Array) -> pa.Array:
    """Return a map as a list of its pairs, and any other column as it is."""
    kind = column.type
    if not pa.types.is_map(kind):
        return column
    # Arrow's own cast refuses nulls in non-nullable fields, which the checks here search for.
    pair = pa.struct([kind.key_field.with_name("key"), kind.item_field.with_name("value")])
    pairs = pa.Array.from_buffers(pair, len(column.keys), [None], children=[column.keys, column.items])
    buffers = column.buffers()[:2]
    return pa.Array.from_buffers(pa.list_(pair), len(column), buffers, -1, column.offset, children=[pairs])
