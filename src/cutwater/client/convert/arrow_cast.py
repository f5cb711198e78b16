"""Casts an Arrow column to another type, where Arrow's own cast fails, crashes, or picks a value next to the right one.

``value_rule`` says whether the cast changed a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.client.convert.error_text import no_number
from cutwater.client.convert.nested import inner_column, inner_pairs, is_list_type
from cutwater.client.convert.value_rule import (
    ARROW_ERRORS,
    ColumnConversion,
    changed,
    check_readable,
    check_unchanged,
    is_text,
)
from cutwater.client.errors import InvalidRecord


class ArrowConversion(ColumnConversion):
    """Casts columns; one of the wanted type is checked instead."""

    def column(self, name: str, values: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
        try:
            column = _one_chunk(values)
            if not column.type.equals(kind):
                column = _plain(column)
        except ARROW_ERRORS as error:
            raise InvalidRecord(f"{values.type} cannot be {kind}: {error}", column=name) from error
        if not column.type.equals(kind):
            if (unknown := _unknown_member(column.type, kind)) is not None:
                path, text = unknown
                raise InvalidRecord(f"{name}{path}: {text}" if path else text, column=name)
            column = super().column(name, column, kind)
        return super().column(name, column, kind)

    def convert(self, field: pa.Field, values: pa.Array) -> pa.Array:
        if values.type.equals(field.type):
            check_readable(field, values)
            return values
        after = _cast(values, field.type)
        check_unchanged(values, after)
        return after

    def parts(self, kind: pa.DataType, value: pa.Array) -> Iterator[tuple[str, pa.Field, pa.Array]]:
        for step, _, inner in inner_pairs(value.type, kind) if not value.null_count else ():
            yield step, inner, inner_column(value, step)

    def refusal(self, kind: pa.DataType, value: pa.Scalar, error: Exception) -> str:
        # Text of digits alone is a number, but one that the type does not hold.
        if is_text(value.type) and not str(given := value.as_py()).lstrip("+-").isdigit():
            return no_number(given, kind) or changed(value, kind, error)
        return changed(value, kind, error)


def _one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def _plain(column: pa.Array) -> pa.Array:
    """Return the same values without dictionaries and run-end encoding. Arrow cannot decode a dictionary of text
    views."""
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    if _is_view(column.type):
        ends = pc.cumulative_sum(column.value_lengths().cast(pa.int64()).fill_null(0))
        starts = pa.concat_arrays([pa.array([0], pa.int64()), ends])
        column = pa.LargeListArray.from_arrays(starts, column.flatten(), mask=column.is_null())
    plain = _without_dictionaries(column.type, is_plain=True)
    if plain.equals(column.type):
        return column
    return column.cast(_without_dictionaries(column.type, is_plain=False)).cast(plain)


@lru_cache(maxsize=256)
def _without_dictionaries(kind: pa.DataType, *, is_plain: bool) -> pa.DataType:
    """Return the type with dictionaries replaced by their values; if not ``is_plain``, with dictionaries whose values
    are not views."""
    if pa.types.is_dictionary(kind):
        views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
        values = views.get(kind.value_type, kind.value_type)
        return values if is_plain else pa.dictionary(kind.index_type, values, kind.ordered)
    return _rebuilt(kind, lambda field: field.with_type(_without_dictionaries(field.type, is_plain=is_plain)))


def _rebuilt(kind: pa.DataType, inner: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """Return a nested type with its inner fields replaced."""
    if pa.types.is_struct(kind):
        return pa.struct([inner(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field, inner(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_field), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return (pa.list_ if pa.types.is_list(kind) else pa.large_list)(inner(kind.value_field))
    return kind


@lru_cache(maxsize=256)
def _unknown_member(given: pa.DataType, wanted: pa.DataType) -> tuple[str, str] | None:
    """Find a struct member that the topic does not have: Arrow would leave it out. Also find list views inside of other
    types, which Arrow would convert to wrong lists that begin where they end. Returns the path to it and what is
    wrong."""
    if _is_view(given) and is_list_type(wanted) and not _is_view(wanted):
        return "", f"it is a {given}, and {wanted} is wanted: give lists that are no views"
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        for field in given:
            if wanted.get_field_index(field.name) < 0:
                return "", no_member(field.name, wanted)
            if given.names.count(field.name) > 1:
                return f".{field.name}", "it is there twice"
    for step, before, after in inner_pairs(given, wanted):
        if (found := _unknown_member(before.type, after.type)) is not None:
            path, text = found
            return (step or "[]") + path, text
    return None


def no_member(name: object, wanted: pa.DataType) -> str:
    return f"there is no field {name!r}: leave it out, or name it as the topic does: {wanted}"


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column. Nulls in non-nullable fields are accepted here and found by later checks: Arrow would also refuse
    nulls that are there only because the enclosing value is null."""
    detour = _detour(column.type, kind)
    if not detour.equals(column.type):
        column = _sliced_cast(column, detour)
    undemanding = _without_demands(kind)
    found = _fixed_cast(column, undemanding)
    if undemanding.equals(kind):
        return found
    return pa.array(_Retyped(found, kind))


class _Retyped:
    """An array that passes for one of another type with the same layout, by Arrow's protocol for exporting data."""

    def __init__(self, array: pa.Array, kind: pa.DataType) -> None:
        self._array, self._kind = array, kind

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return self._kind.__arrow_c_schema__(), self._array.__arrow_c_array__()[1]


@lru_cache(maxsize=256)
def _without_demands(kind: pa.DataType) -> pa.DataType:
    return _rebuilt(kind, lambda field: field.with_type(_without_demands(field.type)).with_nullable(True))


def _fixed_cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    loose = _loose(column.type, kind)
    if loose.equals(kind):
        return _sliced_cast(column, kind)
    # When a null list becomes one of fixed size, Arrow reads beyond the end of its memory.
    found = _sliced_cast(column, loose)
    if pa.types.is_fixed_size_list(kind) and not pa.types.is_nested(kind.value_type):
        places = pc.subtract(pc.cumulative_sum(found.is_valid().cast(pa.int64())), 1)
        return found.drop_null().cast(kind).take(pc.if_else(found.is_valid(), places, None))
    return pa.array(found.to_pylist(), kind)


def _sliced_cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return column.cast(kind)
    except ARROW_ERRORS:
        if not pa.types.is_nested(column.type):
            raise
    # Arrow also converts the list items before and after a slice. Serializing leaves those out.
    batch = pa.record_batch([column], names=["column"])
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema).column(0).cast(kind)


@lru_cache(maxsize=256)
def _loose(given: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    """Return the wanted type, but with lists of any size wherever the given lists may have any size."""
    found = _with_inside(wanted, {step: _loose(a.type, b.type) for step, a, b in inner_pairs(given, wanted)})
    if pa.types.is_fixed_size_list(found) and is_list_type(given) and not pa.types.is_fixed_size_list(given):
        return pa.list_(found.value_field)
    return found


@lru_cache(maxsize=256)
def _detour(given: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    """Return the type to cast to first. Decimals go through text to floating-point numbers: from text Arrow finds the
    nearest number, and from decimals often the one next to it. Whole numbers go through a decimal of another size,
    because Arrow demands room for the largest number of their type. Numbers in the place of times go through the one
    type that Arrow casts to times, so that the rule for values finds and refuses them."""
    if pa.types.is_decimal(given) and pa.types.is_floating(wanted):
        return pa.string()
    if pa.types.is_integer(given) and pa.types.is_decimal(wanted):
        return pa.decimal128(20)
    if pa.types.is_timestamp(wanted) and (pa.types.is_integer(given) or pa.types.is_floating(given)):
        return pa.int64()
    return _with_inside(given, {step: _detour(a.type, b.type) for step, a, b in inner_pairs(given, wanted)})


def _with_inside(kind: pa.DataType, inside: dict[str, pa.DataType]) -> pa.DataType:
    """Return a nested type with its inner types replaced, by the step to them."""

    def inner(field: pa.Field) -> pa.Field:
        if pa.types.is_struct(kind):
            return field.with_type(inside.get(f".{field.name}", field.type))
        item = inside[""]
        return field.with_type(item.field("value").type if pa.types.is_map(kind) else item)

    return _rebuilt(kind, inner) if inside else kind
