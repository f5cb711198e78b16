"""Casts an Arrow column to another type, if that changes no value.

Arrow itself refuses most casts that would change a value. The changes that it accepts are searched for afterwards, in
whole columns: numbers that become infinite, text and numbers that do not convert back to the same value, times without
their date or dates without their time, and members of structs that would be left out. A floating-point number is
rounded when it is cast to one of fewer bits, because users expect that.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.client.convert.error_text import shown
from cutwater.client.convert.violations import Fault, check_columns, fault_error, first_wrong, parts_of

ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError, LookupError, AttributeError)
WHOLE_MAX = {16: 2**11, 32: 2**24, 64: 2**53}
"""Bits of a floating-point type → the largest whole number up to which it represents all of them exactly."""


def cast(name: str, column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    column = _one_chunk(column)
    if column.type.equals(kind):
        return column
    try:
        column = _plain(column)
    except ARROW_ERRORS as error:
        raise fault_error(name, None, Fault("", f"{column.type} cannot be {kind}: {error}")) from error
    unknown = _unknown_member(column.type, kind)
    if unknown is not None:
        raise fault_error(name, None, unknown)
    try:
        after = _tried(column, kind)
    except ARROW_ERRORS as error:
        row = _first_uncast(column, kind)
        path, value, wanted = _blamed(column.slice(row, 1), kind)
        text = f"{value} cannot be {wanted} without being changed: {error}"
        raise fault_error(name, row, Fault(path, text)) from error
    if _may_change(column.type, kind):
        check_columns(name, _changed, _may_change, column, after)
    return after


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
    if not _has_dictionary(kind):
        return kind
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


def _has_dictionary(kind: pa.DataType) -> bool:
    return pa.types.is_dictionary(kind) or any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


@lru_cache(maxsize=256)
def _unknown_member(given: pa.DataType, wanted: pa.DataType) -> Fault | None:
    """Find a struct member that the topic does not have: Arrow would leave it out. Also find list views inside of other
    types, which Arrow would convert to wrong lists that begin where they end."""
    if _is_view(given) and is_list_type(wanted) and not _is_view(wanted):
        return Fault("", f"it is a {given}, and {wanted} is wanted: give lists that are no views")
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        for field in given:
            if wanted.get_field_index(field.name) < 0:
                return Fault("", no_member(field.name, wanted))
            if given.names.count(field.name) > 1:
                return Fault(f".{field.name}", "it is there twice")
    for step, before, after in _pairs(given, wanted):
        found = _unknown_member(before, after)
        if found is not None:
            return Fault(step + found.path, found.text)
    return None


def no_member(name: object, wanted: pa.DataType) -> str:
    return f"there is no field {name!r}: leave it out, or name it as the topic does: {wanted}"


def _pairs(given: pa.DataType, wanted: pa.DataType) -> list[tuple[str, pa.DataType, pa.DataType]]:
    """Return the matching inner types of two nested types, with the step to each."""
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        shared = [field for field in wanted if given.get_field_index(field.name) >= 0]
        return [(f".{field.name}", given.field(field.name).type, field.type) for field in shared]
    if not all(is_list_type(kind) or pa.types.is_map(kind) for kind in (given, wanted)):
        return []
    return [("[]", _item_type(given), _item_type(wanted))]


def is_list_type(kind: pa.DataType) -> bool:
    """Return whether the type is a list of any kind, but not a map."""
    return bool(pa.types.is_nested(kind) and not pa.types.is_map(kind) and hasattr(kind, "value_field"))


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _item_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_map(kind):
        return pa.struct([kind.key_field.with_name("key"), kind.item_field.with_name("value")])
    return kind.value_type


def _tried(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column. Nulls in non-nullable fields are accepted here and found by later checks: Arrow would also refuse
    nulls that are there only because the enclosing value is null."""
    detour = _detour(column.type, kind)
    if not detour.equals(column.type):
        column = _sliced_cast(column, detour)
    if not _has_demands(kind):
        return _fixed_cast(column, kind)
    found = _fixed_cast(column, _without_demands(kind))
    _, data = found.__arrow_c_array__()
    return pa.Array._import_from_c_capsule(kind.__arrow_c_schema__(), data)


@lru_cache(maxsize=256)
def _has_demands(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return not kind.item_field.nullable or _has_demands(kind.item_type)
    return any(not kind.field(i).nullable or _has_demands(kind.field(i).type) for i in range(kind.num_fields))


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
    pairs = _pairs(given, wanted)
    inside = {step: _loose(before, after) for step, before, after in pairs}
    if pairs and pa.types.is_fixed_size_list(wanted) and not pa.types.is_fixed_size_list(given):
        return pa.list_(wanted.value_field.with_type(inside["[]"]))
    if all(inside[step].equals(after) for step, _, after in pairs):
        return wanted
    return _with_inside(wanted, inside)


@lru_cache(maxsize=256)
def _detour(given: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    """Return the type to cast to first. Decimals go through text to floating-point numbers: from text Arrow finds the
    nearest number, and from decimals often the one next to it. Whole numbers go through a decimal of another size,
    because Arrow demands room for the largest number of their type."""
    if pa.types.is_decimal(given) and pa.types.is_floating(wanted):
        return pa.string()
    if pa.types.is_integer(given) and pa.types.is_decimal(wanted):
        return pa.decimal128(20)
    pairs = _pairs(given, wanted)
    inside = {step: _detour(before, after) for step, before, after in pairs}
    if all(inside[step].equals(before) for step, before, _ in pairs):
        return given
    return _with_inside(given, inside)


def _with_inside(kind: pa.DataType, inside: dict[str, pa.DataType]) -> pa.DataType:
    """Return a nested type with its inner types replaced, by the step to them."""

    def inner(field: pa.Field) -> pa.Field:
        if pa.types.is_struct(kind):
            return field.with_type(inside.get(f".{field.name}", field.type))
        item = inside["[]"]
        return field.with_type(item.field("value").type if pa.types.is_map(kind) else item)

    return _rebuilt(kind, inner)


def _casts(column: pa.Array, kind: pa.DataType) -> bool:
    try:
        _tried(column, kind)
    except ARROW_ERRORS:
        return False
    return True


def _first_uncast(column: pa.Array, kind: pa.DataType) -> int:
    return first_wrong(len(column), lambda start, end: not _casts(column.slice(start, end - start), kind))


def _blamed(column: pa.Array, kind: pa.DataType) -> tuple[str, str, pa.DataType]:
    """Find the part of a value that cannot be cast: the path to it, its text, and the wanted type."""
    parts = {step or "[]": part for step, _, _, (part,) in parts_of(column)}
    for step, _, wanted in _pairs(column.type, kind):
        part = parts[step]
        if not len(part) or _casts(part, wanted):
            continue
        if step == "[]":
            index = _first_uncast(part, wanted)
            path, value, inner = _blamed(part.slice(index, 1), wanted)
            return f"[{index}]{path}", value, inner
        path, value, inner = _blamed(part, wanted)
        return step + path, value, inner
    return "", shown(column[0]), kind


# Casts that Arrow accepts although they change values.


class _Rule(NamedTuple):
    """A check for changed values. ``finds`` compares a column before and after, and marks the changed values."""

    finds: Callable[[pa.Array, pa.Array], pa.Array]
    way_out: str


def _changed(field: pa.Field, absent: int, before: pa.Array, after: pa.Array) -> str | None:
    rule = _rule(before.type, after.type)
    if rule is None:
        return None
    index = pc.index(rule.finds(before, after), True).as_py()
    if index < 0:
        return None
    return f"{shown(before[index])} cannot be {after.type} without being changed: {rule.way_out}"


@lru_cache(maxsize=256)
def _may_change(before: pa.DataType, after: pa.DataType) -> bool:
    if before.equals(after):
        return False
    return _rule(before, after) is not None or any(_may_change(*pair) for _, *pair in _pairs(before, after))


@lru_cache(maxsize=256)
def _rule(before: pa.DataType, after: pa.DataType) -> _Rule | None:
    kinds = pa.types
    if before.equals(after):
        return None
    if kinds.is_floating(after):
        return _floating_rule(before, after)
    if kinds.is_decimal(after) and kinds.is_floating(before):
        return _Rule(_not_back, f"round it to {after.scale} digits after the point, or give a Decimal")
    if kinds.is_decimal32(after) and (kinds.is_integer(before) or kinds.is_decimal(before)):
        return _Rule(_cut_short, f"it has more than {after.precision} digits")
    if kinds.is_boolean(after) and (kinds.is_integer(before) or kinds.is_floating(before)):
        return _Rule(_not_back, "only 0 and 1 are false and true")
    if (kinds.is_integer(after) or kinds.is_decimal(after)) and _is_text(before):
        return _PADDED
    if kinds.is_date(after) and kinds.is_timestamp(before):
        if before.tz is not None:
            return _Rule(_any, "which date it is depends on the time zone: give dates")
        return _Rule(_not_back, "the time of day would be lost: give dates")
    if kinds.is_time(after) and kinds.is_timestamp(before):
        return _Rule(_any, "the date would be lost: give times of a day")
    return None


def _floating_rule(before: pa.DataType, after: pa.DataType) -> _Rule | None:
    kinds = pa.types
    whole_max = WHOLE_MAX[after.bit_width]
    inexact = f"whole numbers are exact up to {whole_max}: let the column be decimal"
    beyond = "it is beyond the largest number of that type"
    if kinds.is_floating(before):
        return _Rule(_infinite, f"{beyond}: let the column be double") if before.bit_width > after.bit_width else None
    if kinds.is_integer(before) and after.bit_width == 16:
        return _Rule(lambda before, after: _larger(before.cast(pa.decimal128(20)), whole_max), inexact)
    if kinds.is_decimal(before):
        if before.scale < 0:
            return _Rule(_infinite, beyond)
        is_small = before.precision - before.scale < len(str(whole_max))
        return None if is_small else _Rule(lambda before, after: _larger(before, whole_max), inexact)
    if _is_text(before):
        return _Rule(lambda before, after: _no_float(before, after, whole_max), _PADDED.way_out)
    return None


def _is_text(kind: pa.DataType) -> bool:
    """Return whether the type is text or bytes, which Arrow parses as numbers in the same way."""
    texts = pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()
    return kind in texts


def _not_back(before: pa.Array, after: pa.Array) -> pa.Array:
    if pa.types.is_decimal(after.type):
        # Through text, as in ``_detour``.
        after = after.cast(pa.string())
    if pa.types.is_float16(before.type):
        before = before.cast(pa.float32())
    return pc.not_equal(after.cast(before.type, safe=False), before)


def _cut_short(before: pa.Array, after: pa.Array) -> pa.Array:
    """Compare whole decimals: for a decimal of 32 bits, Arrow ignores the higher bits."""
    wide = pa.decimal256(76, after.type.scale)
    return pc.not_equal(before.cast(wide), after.cast(wide))


def _infinite(before: pa.Array, after: pa.Array) -> pa.Array:
    found = pc.is_inf(after)
    if pa.types.is_floating(before.type):
        return pc.and_not(found, pc.is_inf(before))
    if _is_text(before.type):
        return pc.and_not(found, pc.match_substring(before.cast(pa.large_string()), "inf", ignore_case=True))
    return found


def _larger(before: pa.Array, whole_max: int) -> pa.Array:
    if before.type.bit_width < 128:
        before = before.cast(pa.decimal128(38, before.type.scale))
    return pc.greater(pc.abs(before), pa.scalar(Decimal(whole_max), before.type))


def _padded(before: pa.Array, after: pa.Array | None = None) -> pa.Array:
    return pc.match_substring_regex(before.cast(pa.large_string()), "^[+-]?0[0-9xX]")


def _no_float(before: pa.Array, after: pa.Array, whole_max: int) -> pa.Array:
    """Mark text of which a floating-point number would lose information."""
    text = before.cast(pa.large_string())
    is_large = pc.greater_equal(pc.abs(after.cast(pa.float64())), whole_max)
    is_inexact = pc.and_(is_large, pc.match_substring_regex(text, "^[+-]?[0-9]+$"))
    exact = pa.array([str(whole_max), str(-whole_max)], pa.large_string())
    return pc.or_(pc.or_(_padded(text), _infinite(text, after)), pc.and_not(is_inexact, pc.is_in(text, exact)))


def _any(before: pa.Array, after: pa.Array) -> pa.Array:
    return before.is_valid()


_PADDED = _Rule(_padded, "it is more than a number of that type: let the column be string, or write it as a number")
