"""Converts Python values to an Arrow column of a type, if that changes no value.

Values that Arrow would misinterpret are searched for first: a fraction in the place of a whole number, an ambiguous
time, a time that is finer than its column, and members of structs that would be left out. Usually the Python types of
the values show already that there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.client.convert.arrow_cast import ARROW_ERRORS, WHOLE_MAX, is_list_type, no_member
from cutwater.client.convert.error_text import short, shown
from cutwater.client.convert.times import SECOND, is_missing, no_time, no_zone, too_fine
from cutwater.client.convert.violations import Fault, fault_error, first_wrong

Check = Callable[[pa.DataType, Sequence[Any], set[type], bool], str | None]
"""Checks values of a type; gets their Python types, and whether they come from pandas. Returns what is wrong, or None.
Nested values are checked separately."""

_WHOLE = {int, type(None)}


def of_values(name: str, values: list[Any], kind: pa.DataType, *, is_pandas: bool = False) -> pa.Array:
    """Convert values. ``is_pandas``: they come from a pandas series, where NaN is null, and a time without a zone
    counts as UTC."""
    if _fault(_plan(kind), values, is_pandas) is not None:
        if any(map(is_missing, values)):
            return of_values(name, _without_missing(values), kind, is_pandas=is_pandas)

        def fault(kind: pa.DataType, values: Sequence[Any]) -> str | None:
            return _fault(_plan(kind), values, is_pandas)

        row, path, inner, value = _blamed(kind, values, lambda kind, values: fault(kind, values) is not None)
        raise fault_error(name, row, Fault(path, fault(inner, [value]) or "it is wrong"))
    try:
        return pa.array(values, kind, from_pandas=is_pandas)
    except ARROW_ERRORS as error:
        if any(map(is_missing, values)):
            return of_values(name, _without_missing(values), kind, is_pandas=is_pandas)

        def is_wrong(kind: pa.DataType, values: Sequence[Any]) -> bool:
            try:
                pa.array(values, kind, from_pandas=is_pandas)
            except ARROW_ERRORS:
                return True
            return False

        row, path, inner, value = _blamed(kind, values, is_wrong)
        raise fault_error(name, row, Fault(path, _unfit(inner, value, error))) from error


def _without_missing(values: list[Any]) -> list[Any]:
    return [None if is_missing(value) else value for value in values]


def _unfit(kind: pa.DataType, value: Any, error: Exception) -> str:
    """Return an error text that says what is wanted, in words of Python where Arrow's are not."""
    if pa.types.is_timestamp(kind) and isinstance(value, str | float | date):
        return no_time(value, kind.unit)
    if pa.types.is_string(kind) and not isinstance(value, str | bytes):
        return f"text is wanted, not {short(value)}: write str(...)"
    if pa.types.is_date(kind) and isinstance(value, str):
        return f"a date is wanted, not {short(value)}: write date.fromisoformat(...)"
    what = f"{shown(value)} cannot be {kind} without being changed"
    if isinstance(value, int) and pa.types.is_floating(kind):
        whole_max = WHOLE_MAX[kind.bit_width]
        return f"{what}: whole numbers are exact up to {whole_max}. Write float(...), or let the column be decimal"
    if isinstance(value, int) and not isinstance(value, bool) and pa.types.is_integer(kind):
        bits = kind.bit_width
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if pa.types.is_signed_integer(kind) else (0, 2**bits - 1)
        return f"{what}: that goes from {low} to {high}"
    return f"{what}: {error}"


# Values that Arrow would misinterpret.


class _Plan(NamedTuple):
    """The check for values of a type, and the plans for their parts: members of structs, keys and items of maps, items
    of lists. ``parts`` is empty if no part needs a check."""

    kind: pa.DataType
    check: Check | None
    names: tuple[str, ...]
    parts: tuple[_Plan, ...]


@lru_cache(maxsize=256)
def _plan(kind: pa.DataType) -> _Plan:
    names: tuple[str, ...] = ()
    inside: list[pa.DataType] = []
    if pa.types.is_struct(kind):
        names, inside = tuple(kind.names), [field.type for field in kind]
    elif pa.types.is_map(kind):
        inside = [kind.key_type, kind.item_type]
    elif is_list_type(kind):
        inside = [kind.value_type]
    parts = tuple(map(_plan, inside))
    is_needed = any(part.check is not None or part.parts for part in parts)
    return _Plan(kind, _check(kind), names, parts if is_needed else ())


def _check(kind: pa.DataType) -> Check | None:
    kinds = pa.types
    if kinds.is_timestamp(kind):
        return _wrong_times
    if kinds.is_temporal(kind):
        return _wrong_dates if kinds.is_date(kind) else _wrong_spans
    if kinds.is_integer(kind):
        return _fractions
    if kinds.is_floating(kind):
        return _infinite if kind.bit_width < 64 else None
    if kinds.is_struct(kind):
        return _unknown_members
    if kinds.is_map(kind):
        return _no_pairs
    if kinds.is_fixed_size_list(kind):
        return _wrong_sizes
    return _texts if is_list_type(kind) else None


def _fault(plan: _Plan, values: Sequence[Any], is_pandas: bool) -> str | None:
    if plan.check is not None:
        # Finding the set of types is quick, and usually none of them can be wrong.
        found = plan.check(plan.kind, values, set(map(type, values)), is_pandas)
        if found is not None:
            return found
    if plan.parts:
        for part, given in zip(plan.parts, _inside(plan, values), strict=True):
            found = _fault(part, given, is_pandas)
            if found is not None:
                return found
    return None


def _wrong_times(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> str | None:
    if kind.tz is not None and not is_pandas and any(issubclass(own, datetime) for own in types):
        for one in values:
            if isinstance(one, datetime) and one.tzinfo is None and not is_missing(one):
                return no_zone(one)
    # Arrow would take a whole number of seconds as a number of a smaller unit.
    if any(issubclass(own, str | float) for own in types):
        for one in values:
            if isinstance(one, str) or (isinstance(one, float) and not (is_pandas and _is_nan(one))):
                return no_time(one, kind.unit)
    return _wrong_spans(kind, values, types, is_pandas)


def _wrong_dates(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> str | None:
    if any(issubclass(own, datetime) for own in types):
        for one in values:
            if isinstance(one, datetime) and not is_missing(one) and (one.tzinfo is not None or not _is_midnight(one)):
                return f"a date is wanted, not {short(one)}, whose time of day would be lost: write .date()"
    return _wrong_spans(kind, values, types, is_pandas)


def _is_midnight(one: datetime) -> bool:
    return one.time() == time() and not getattr(one, "nanosecond", 0)


def _wrong_spans(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> str | None:
    if not is_pandas and any(own.__name__ == "NaTType" for own in types):
        # Arrow takes it as the first possible day.
        return "NaT is how pandas says that there is no time: write None"
    if time in types:
        for one in values:
            if type(one) is time and one.tzinfo is not None:
                return f"{short(one)} has a time zone, which would be lost: write .replace(tzinfo=None)"
    return (
        _fractions(kind, values, types, is_pandas) or _numpy_time(kind, values, types) or _too_fine(kind, values, types)
    )


def _too_fine(kind: pa.DataType, values: Sequence[Any], types: set[type]) -> str | None:
    """Find a time, a time of day or a duration that would be truncated to the unit of its column."""
    unit = "" if pa.types.is_date(kind) else getattr(kind, "unit", "")
    step = 1_000_000 // SECOND[unit] if unit in ("s", "ms") else 1
    names = ("nanosecond", "nanoseconds")
    if step == 1 and (unit != "us" or not any(hasattr(own, name) for own in types for name in names)):
        return None
    for one in values:
        if isinstance(one, datetime | time):
            parts = one.microsecond, getattr(one, "nanosecond", 0)
        elif isinstance(one, timedelta):
            parts = one.microseconds, getattr(one, "nanoseconds", 0)
        else:
            continue
        # The parts of NaT are not numbers.
        if not is_missing(one) and (parts[0] % step or parts[1]):
            return too_fine(one, unit)
    return None


def _numpy_time(kind: pa.DataType, values: Sequence[Any], types: set[type]) -> str | None:
    """Find NumPy times of another unit: inside of another value, Arrow would take their numbers as they are."""
    if not any(own.__name__ in ("datetime64", "timedelta64") for own in types):
        return None
    unit = "D" if pa.types.is_date32(kind) else getattr(kind, "unit", "ms")
    for one in values:
        if type(one).__name__ in ("datetime64", "timedelta64") and not one.dtype.str.endswith(f"8[{unit}]"):
            return f"{short(one)} is of {one.dtype}: convert it, as with .astype('{type(one).__name__}[{unit}]')"
    return None


def _fractions(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> str | None:
    """Find a number with a fraction where a whole number or a time is wanted. Arrow would truncate it."""
    if types <= _WHOLE or not any(issubclass(own, Real | Decimal) and not issubclass(own, Integral) for own in types):
        return None
    for one in values:
        if isinstance(one, Real | Decimal) and not _is_nan(one) and one != _whole(one):
            other = "give a datetime" if pa.types.is_temporal(kind) else "let the column be double"
            return f"{shown(one)} cannot be {kind} without being changed: round it, or {other}"
    return None


def _whole(number: Any) -> Any:
    """Round to a whole number; ``//`` fails for a large decimal."""
    return number.to_integral_value() if isinstance(number, Decimal) else number // 1


def _is_nan(number: Any) -> bool:
    return bool(number.is_nan() if isinstance(number, Decimal) else number != number)  # noqa: PLR0124 (any type has it)


def _infinite(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> str | None:
    try:
        given = pa.array(values, pa.float64())
    except ARROW_ERRORS:
        # The conversion raises an error that says what is wrong.
        return None
    index = pc.index(pc.and_not(pc.is_inf(given.cast(kind)), pc.is_inf(given)), True).as_py()
    if index >= 0:
        return (
            f"{shown(values[index])} cannot be {kind} without being changed: it is beyond the largest number of that "
            "type, so let the column be double"
        )
    if kind.bit_width == 16:
        whole_max = WHOLE_MAX[16]
        for one in values:
            if isinstance(one, Integral) and abs(int(one)) > whole_max:
                return f"{shown(one)} cannot be {kind} without being changed: whole numbers are exact up to {whole_max}"
    return None


def _unknown_members(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> str | None:
    """Find members that the struct does not have: Arrow would leave them out."""
    if (found := _texts(kind, values, types, is_pandas)) is not None:
        return found
    known = frozenset(kind.names)
    for one in values:
        if isinstance(one, Mapping):
            if not known.issuperset(one):
                unknown = next(name for name in one if name not in known)
                return no_member(unknown, kind)
        elif isinstance(one, list):
            for name, _ in _pairs(one):
                if name not in known:
                    return no_member(name, kind)
    return None


def _texts(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> str | None:
    """Find text in the place of a list, a dict or pairs; Arrow would split it into characters."""
    if not any(issubclass(own, str | bytes | bytearray) for own in types):
        return None
    one = next(one for one in values if isinstance(one, str | bytes | bytearray))
    return f"a {'list' if is_list_type(kind) else 'dict'} is wanted, not {short(one)}"


def _wrong_sizes(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> str | None:
    """Find lists of the wrong size: of a set that is too large, Arrow would put the rest into the next row."""
    if (found := _texts(kind, values, types, is_pandas)) is not None:
        return found
    for one in values:
        if _is_list(one) and isinstance(one, Sized) and len(one) != kind.list_size:
            return f"a list of {kind.list_size} is wanted, not {short(one)}, which has {len(one)}"
    return None


def _no_pairs(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> str | None:
    """Find items of a map that are not pairs: Arrow would crash the process."""
    if (found := _texts(kind, values, types, is_pandas)) is not None:
        return found
    for one in values:
        if not isinstance(one, Mapping) and _is_list(one):
            for pair in one:
                if not isinstance(pair, tuple | list | Mapping):
                    return f"a dict or a list of pairs is wanted, and {short(pair)} is no pair"
                if isinstance(pair, Mapping) and (unknown := [name for name in pair if name not in _pair_names(kind)]):
                    return no_member(unknown[0], kind)
    return None


# Parts of nested values.


def _inside(plan: _Plan, values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the inner values of a nested column, for each part. Values of another form than their type are left out,
    and Arrow will refuse them."""
    if plan.names:
        rows = [value for value in values if isinstance(value, Mapping)]
        others = [value for value in values if isinstance(value, tuple) and len(value) == len(plan.names)]
        pairs = [pair for value in values if isinstance(value, list) for pair in _pairs(value)]
        for i, (own, part) in enumerate(zip(plan.names, plan.parts, strict=True)):
            if part.check is None and not part.parts:
                yield ()
                continue
            members = [row.get(own) for row in rows] + [value[i] for value in others]
            yield members + [value for name, value in pairs if name == own]
    elif len(plan.parts) > 1:
        names = _pair_names(plan.kind)
        pairs = [pair for value in values for pair in _pairs(value, names)]
        yield from ([key for key, _ in pairs], [item for _, item in pairs])
    else:
        kind = plan.kind.value_type
        yield [item for value in values if _is_list(value) for item in _items(value, kind)]


def _is_list(value: Any) -> bool:
    # A NumPy array may have no dimension.
    return isinstance(value, Iterable) and not isinstance(value, Iterator) and getattr(value, "ndim", 1) != 0


def _items(values: Any, kind: pa.DataType) -> Iterable[Any]:
    """Return the items of a list. Of a NumPy array, return only the first item if the array's type shows that checking
    the others is unnecessary: arrays are long."""
    if type(values).__module__ != "numpy":
        return cast(Iterable[Any], values)
    dtype = values.dtype
    if dtype.kind == "f":
        is_narrow = pa.types.is_floating(kind) and dtype.itemsize * 8 <= kind.bit_width
        return cast(Iterable[Any], values[:1] if is_narrow else values.tolist())
    return cast(Iterable[Any], values if dtype.kind not in "biumM" or pa.types.is_float16(kind) else values[:1])


def _pair_names(kind: pa.DataType) -> tuple[str, str]:
    return kind.key_field.name, kind.item_field.name


def _pairs(value: Any, names: tuple[str, str] = ("", "")) -> list[tuple[Any, Any]]:
    """Return the pairs of a dict or of a list of pairs; the pairs of a map may be dicts with these names."""
    if isinstance(value, Mapping):
        return list(value.items())
    given = value if _is_list(value) and not isinstance(value, str | bytes | bytearray) else ()
    found = []
    for pair in given:
        if isinstance(pair, list | tuple) and len(pair) == 2:
            found.append((pair[0], pair[1]))
        elif isinstance(pair, Mapping):
            found.append((pair.get(names[0]), pair.get(names[1])))
    return found


def _blamed(
    kind: pa.DataType, values: Sequence[Any], is_wrong: Callable[[pa.DataType, Sequence[Any]], bool]
) -> tuple[int, str, pa.DataType, Any]:
    """Find the first wrong value, and its innermost wrong part."""
    index = first_wrong(len(values), lambda start, end: is_wrong(kind, values[start:end]))
    for step, inner, parts in _parts(kind, values[index]):
        if parts and is_wrong(inner, parts):
            place, path, *rest = _blamed(inner, parts, is_wrong)
            return index, (step or f"[{place}]") + path, *rest
    return index, "", kind, values[index]


def _parts(kind: pa.DataType, value: Any) -> Iterator[tuple[str, pa.DataType, Sequence[Any]]]:
    """Yield the parts of a value with the step to each, which is empty for items of lists."""
    if pa.types.is_struct(kind):
        for i, field in enumerate(kind):
            if isinstance(value, tuple):
                members = value[i : i + 1]
            else:
                members = tuple(member for name, member in _pairs(value) if name == field.name)
            yield f".{field.name}", field.type, members
    elif pa.types.is_map(kind):
        for key, item in _pairs(value, _pair_names(kind)):
            yield f"[{shown(key)}]", kind.key_type, [key]
            yield f"[{shown(key)}]", kind.item_type, [item]
    elif is_list_type(kind) and _is_list(value) and not isinstance(value, str | bytes | bytearray):
        yield "", kind.value_type, list(value)
