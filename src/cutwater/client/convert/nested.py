"""Parts of nested types and columns: members of structs, items of lists, pairs of maps. Unions have no parts here."""

from __future__ import annotations

import pyarrow as pa  # type: ignore[import-untyped]


def is_list_type(kind: pa.DataType) -> bool:
    """Return whether the type is a list of any kind, but not a map."""
    return bool(pa.types.is_nested(kind) and not pa.types.is_map(kind) and hasattr(kind, "value_field"))


def inner_pairs(given: pa.DataType, wanted: pa.DataType) -> list[tuple[str, pa.Field, pa.Field]]:
    """Return the matching inner fields of two nested types, with the step to each: ``.name`` for a member, empty for
    items of lists and pairs of maps."""
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        shared = [field for field in wanted if given.get_field_index(field.name) >= 0]
        return [(f".{field.name}", given.field(field.name), field) for field in shared]
    if not all(is_list_type(kind) or pa.types.is_map(kind) for kind in (given, wanted)):
        return []
    return [("", _item_field(given), _item_field(wanted))]


def _item_field(kind: pa.DataType) -> pa.Field:
    if not pa.types.is_map(kind):
        return kind.value_field
    # Arrow itself ensures that keys are present.
    key = kind.key_field.with_name("key").with_nullable(True)
    return pa.field("entries", pa.struct([key, kind.item_field.with_name("value")]))


def inner_column(column: pa.Array, step: str) -> pa.Array:
    """Return the values of a part of a nested column. A member of a null struct is null; a null list has no items."""
    return column.flatten()[column.type.get_field_index(step[1:])] if step else _as_list(column).flatten()


def _as_list(column: pa.Array) -> pa.Array:
    """Return a map as a list of its pairs, and any other column as it is."""
    kind = column.type
    if not pa.types.is_map(kind):
        return column
    # Arrow's own cast refuses nulls in non-nullable fields, which the checks search for.
    pair = _item_field(kind).type
    pairs = pa.Array.from_buffers(pair, len(column.keys), [None], children=[column.keys, column.items])
    buffers = column.buffers()[:2]
    return pa.Array.from_buffers(pa.list_(pair), len(column), buffers, -1, column.offset, children=[pairs])
