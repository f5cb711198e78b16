"""Converts Python values to an Arrow column of a type.

Arrow converts most values exactly or refuses them. The others are searched for first, at every depth: values that Arrow
would misinterpret, such as a time without a zone, or cut off, and members of structs that it would leave out. Usually
the Python types of the values show already that there are none (ADR 0045 has the figures).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from math import isnan
from numbers import Complex, Integral, Real
from typing import Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.convert.arrow_cast import no_member
from cutwater.client.convert.error_text import no_number, short, shown, whole_numbers
from cutwater.client.convert.nested import is_list_type
from cutwater.client.convert.times import SECOND, is_missing, no_time, no_zone, too_fine
from cutwater.client.convert.value_rule import (
    ARROW_ERRORS,
    WHOLE_MAX,
    ColumnConversion,
    Unfit,
    changed,
    check_unchanged,
)

Check = Callable[[pa.DataType, Sequence[Any], set[type], bool], None]
"""Checks values of a type; gets their Python types, and whether they come from pandas. Raises ``Unfit``. Nested values
are checked separately."""

_NONE = type(None)
_TEXTS = (str, bytes, bytearray)
_NUMBERS = (Complex, Decimal)
_UNSIGNED = ("uint64", "ulonglong")
"""NumPy's names for the types of large unsigned numbers."""
_SHORT_ITEMS = 32
"""NumPy arrays up to this length are checked as a whole, which takes no longer than taking out the first item."""


class PythonConversion(ColumnConversion):
    """Converts lists of values. ``is_pandas``: they come from a pandas series, where NaN is null, and a time without a
    zone counts as UTC."""

    def __init__(self, *, is_pandas: bool = False) -> None:
        self._is_pandas = is_pandas

    def column(self, name: str, values: list[Any], kind: pa.DataType) -> pa.Array:
        try:
            return self.convert(pa.field(name, kind), values)
        except ARROW_ERRORS:
            values = [None if is_missing(value) else value for value in values]
        return super().column(name, values, kind)

    def convert(self, field: pa.Field, values: Sequence[Any]) -> pa.Array:
        _check_all(_plan(field.type), values, self._is_pandas)
        return pa.array(values, field.type, from_pandas=self._is_pandas)

    def parts(self, kind: pa.DataType, value: Sequence[Any]) -> Iterator[tuple[str, pa.Field, Sequence[Any]]]:
        if pa.types.is_struct(kind):
            for inner, part in zip(kind, _members(kind, value), strict=True):
                yield f".{inner.name}", inner, part
        elif pa.types.is_map(kind):
            for key, item in _pairs(value[0], _pair_names(kind)):
                yield f"[{shown(key)}]", kind.key_field, [key]
                yield f"[{shown(key)}]", kind.item_field, [item]
        elif is_list_type(kind) and _is_list(value[0]) and not isinstance(value[0], _TEXTS):
            yield "", kind.value_field, list(value[0])

    def refusal(self, kind: pa.DataType, value: Any, error: Exception) -> str:
        if pa.types.is_timestamp(kind) and isinstance(value, date):
            return no_time(value, kind.unit)
        if pa.types.is_string(kind) and not isinstance(value, str | bytes):
            return f"text is wanted, not {short(value)}: write str(...)"
        if pa.types.is_binary(kind):
            if isinstance(value, str):
                return f"this text cannot be stored as UTF-8: {error}"
            way = "a topic of rows needs a schema" if isinstance(value, dict) else "write str(...).encode()"
            return f"bytes or str are wanted, not {short(value)}: {way}"
        if pa.types.is_date(kind) and isinstance(value, str):
            return f"a date is wanted, not {short(value)}: write date.fromisoformat(...)"
        is_number = isinstance(value, Real | Decimal) and not isinstance(value, bool)
        if (not is_number or pa.types.is_boolean(kind)) and (text := no_number(value, kind)):
            return text
        if isinstance(value, int) and pa.types.is_floating(kind):
            return changed(value, kind, _inexact(kind))
        if isinstance(value, int) and pa.types.is_integer(kind):
            numbers = whole_numbers(kind)
            return changed(value, kind, f"that goes from {numbers[0]} to {numbers[-1]}")
        return changed(value, kind, error)


# Values that Arrow would misinterpret.


class _Plan(NamedTuple):
    """The check for values of a type, and the plans for their parts: members of structs, keys and items of maps, items
    of lists. ``parts`` is empty if no part needs a check."""

    kind: pa.DataType
    check: Check | None
    parts: tuple[_Plan, ...]


@lru_cache(maxsize=256)
def _plan(kind: pa.DataType) -> _Plan:
    inside: list[pa.DataType] = []
    if pa.types.is_struct(kind):
        inside = [field.type for field in kind]
    elif pa.types.is_map(kind):
        inside = [kind.key_type, kind.item_type]
    elif is_list_type(kind):
        inside = [kind.value_type]
    parts = tuple(map(_plan, inside))
    is_needed = any(part.check is not None or part.parts for part in parts)
    return _Plan(kind, _check(kind), parts if is_needed else ())


def _check(kind: pa.DataType) -> Check | None:
    kinds = pa.types
    if kinds.is_temporal(kind) and not kinds.is_interval(kind):
        return _check_times
    if kinds.is_integer(kind):
        return _check_whole
    if kinds.is_floating(kind):
        return _check_finite if kind.bit_width < 64 else _check_unsigned
    if kinds.is_struct(kind):
        return _check_members
    if kinds.is_map(kind):
        return _check_pairs
    if kinds.is_fixed_size_list(kind):
        return _check_sizes
    return _check_no_text if is_list_type(kind) else None


def _check_all(plan: _Plan, values: Sequence[Any], is_pandas: bool) -> None:
    if plan.check is not None:
        # Finding the set of types is quick, and usually none of them can be wrong.
        plan.check(plan.kind, values, set(map(type, values)), is_pandas)
    if plan.parts:
        for part, given in zip(plan.parts, _inside(plan, values), strict=True):
            _check_all(part, given, is_pandas)


def _check_times(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> None:
    if not is_pandas and any(own.__name__ == "NaTType" for own in types):
        # Arrow takes it as the first possible day.
        raise Unfit("NaT is how pandas says that there is no time: write None")
    is_coarse = getattr(kind, "unit", "") in ("s", "ms") and not pa.types.is_date(kind)
    if types <= {datetime, _NONE} and pa.types.is_timestamp(kind) and not is_coarse:
        needs_zone = kind.tz is not None and not is_pandas
        if not needs_zone or all(one is None or one.tzinfo is not None for one in values):
            return
    if (types <= {timedelta, _NONE} and not is_coarse) or (types <= {date, _NONE} and pa.types.is_date(kind)):
        return
    for one in values:
        if one is not None and not is_missing(one) and (text := _misread(kind, one, is_pandas)):
            raise Unfit(text)


def _misread(kind: pa.DataType, one: Any, is_pandas: bool) -> str:
    """Return what is wrong if Arrow would store this as another time; empty if Arrow stores or refuses it."""
    is_timestamp, unit = pa.types.is_timestamp(kind), getattr(kind, "unit", "ms")
    if isinstance(one, datetime | time | timedelta):
        if isinstance(one, datetime):
            if is_timestamp and kind.tz is not None and one.tzinfo is None and not is_pandas:
                return no_zone(one)
            is_midnight = one.time() == time() and not getattr(one, "nanosecond", 0)
            if pa.types.is_date(kind) and (one.tzinfo is not None or not is_midnight):
                return f"a date is wanted, not {short(one)}, whose time of day would be lost: write .date()"
        if isinstance(one, time) and one.tzinfo is not None:
            return f"{short(one)} has a time zone, which would be lost: write .replace(tzinfo=None)"
        return "" if pa.types.is_date(kind) or not _is_finer(one, unit) else too_fine(one, unit)
    if (name := type(one).__name__) in ("datetime64", "timedelta64"):
        # Inside of another value, Arrow would take their numbers as they are.
        unit = "D" if pa.types.is_date32(kind) else unit
        is_same = one.dtype.str.endswith(f"8[{unit}]")
        return "" if is_same else f"{short(one)} is of {one.dtype}: convert it, as with .astype('{name}[{unit}]')"
    if is_timestamp and isinstance(one, Real | Decimal | str):
        return "" if is_pandas and not isinstance(one, str) and isnan(one) else no_time(one, unit)
    return _fraction(kind, one, "give a datetime")


def _is_finer(one: datetime | time | timedelta, unit: str) -> bool:
    if isinstance(one, timedelta):
        parts = one.microseconds, getattr(one, "nanoseconds", 0)
    else:
        parts = one.microsecond, getattr(one, "nanosecond", 0)
    return unit != "ns" and bool(parts[0] % (1_000_000 // SECOND[unit]) or parts[1])


def _check_whole(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> None:
    if types <= {int, _NONE} or all(issubclass(own, Integral) or not issubclass(own, _NUMBERS) for own in types):
        return
    for one in values:
        if text := _fraction(kind, one, "let the column be double"):
            raise Unfit(text)


def _fraction(kind: pa.DataType, one: Any, way_out: str) -> str:
    """Return what is wrong with a number that has a fraction or an imaginary part, which Arrow would leave out."""
    if not isinstance(one, _NUMBERS):
        return ""
    if not isinstance(one, Real | Decimal):
        return changed(one, kind, "give a whole number, as with int(...)")
    if isnan(one):
        return ""
    # For a large decimal, ``//`` fails.
    whole = one.to_integral_value() if isinstance(one, Decimal) else one // 1
    return "" if one == whole else changed(one, kind, f"round it, or {way_out}")


def _check_unsigned(kind: pa.DataType, values: Iterable[Any], types: set[type], is_pandas: bool) -> None:
    """Find large unsigned numbers of NumPy: Arrow would store the largest of them as negative numbers."""
    if any(own.__name__ in _UNSIGNED for own in types):
        for one in values:
            if type(one).__name__ in _UNSIGNED and int(one) > WHOLE_MAX[kind.bit_width]:
                raise Unfit(changed(one, kind, _inexact(kind)))


def _inexact(kind: pa.DataType) -> str:
    whole_max = WHOLE_MAX[kind.bit_width]
    return f"whole numbers are exact up to {whole_max}. Write float(...), or let the column be decimal"


def _check_finite(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> None:
    _check_unsigned(kind, values, types, is_pandas)
    try:
        given = pa.array(values, pa.float64(), from_pandas=is_pandas)
    except ARROW_ERRORS:
        # The conversion raises an error that says what is wrong.
        return
    check_unchanged(given, given.cast(kind))
    if kind.bit_width == 16:
        for one in values:
            if isinstance(one, Integral) and abs(int(one)) > WHOLE_MAX[16]:
                raise Unfit(changed(one, kind, f"whole numbers are exact up to {WHOLE_MAX[16]}"))


def _check_members(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> None:
    """Find members that the struct does not have: Arrow would leave them out."""
    _check_no_text(kind, values, types, is_pandas)
    known = frozenset(kind.names)
    for one in values:
        if isinstance(one, Mapping | list):
            names = one if isinstance(one, Mapping) else [name for name, _ in _pairs(one)]
            if not known.issuperset(names):
                raise Unfit(no_member(next(name for name in names if name not in known), kind))


def _check_no_text(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> None:
    """Find text in the place of a list, a dict or pairs; Arrow would split it into characters."""
    if any(issubclass(own, _TEXTS) for own in types):
        one = next(one for one in values if isinstance(one, _TEXTS))
        raise Unfit(f"a {'list' if is_list_type(kind) else 'dict'} is wanted, not {short(one)}")


def _check_sizes(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> None:
    """Find lists of the wrong size: of a set that is too large, Arrow would put the rest into the next row."""
    _check_no_text(kind, values, types, is_pandas)
    for one in values:
        if _is_list(one) and isinstance(one, Sized) and len(one) != kind.list_size:
            raise Unfit(f"a list of {kind.list_size} is wanted, not {short(one)}, which has {len(one)}")


def _check_pairs(kind: pa.DataType, values: Sequence[Any], types: set[type], is_pandas: bool) -> None:
    """Find items of a map that are not pairs: Arrow would crash the process."""
    _check_no_text(kind, values, types, is_pandas)
    names = _pair_names(kind)
    for one in values:
        if not isinstance(one, Mapping) and _is_list(one):
            for pair in one:
                if not isinstance(pair, tuple | list | Mapping):
                    raise Unfit(f"a dict or a list of pairs is wanted, and {short(pair)} is no pair")
                if isinstance(pair, Mapping) and (unknown := [name for name in pair if name not in names]):
                    raise Unfit(no_member(unknown[0], kind))


# Parts of nested values.


def _inside(plan: _Plan, values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """Return the inner values of a nested column, for each part. Values of another form than their type are left out,
    and Arrow will refuse them."""
    kind = plan.kind
    if pa.types.is_struct(kind):
        unchecked = {own for own, part in zip(kind.names, plan.parts, strict=True) if not (part.check or part.parts)}
        return _members(kind, values, unchecked)
    if pa.types.is_map(kind):
        names = _pair_names(kind)
        pairs = [pair for value in values for pair in _pairs(value, names)]
        return [key for key, _ in pairs], [item for _, item in pairs]
    if pa.types.is_float64(kind.value_type):
        return (_unsigned(values),)
    return (_items(values, kind.value_type),)


def _unsigned(values: Sequence[Any]) -> list[Any]:
    """Return the items of lists if a large unsigned number may be among them. Nothing else in lists of doubles needs a
    check, and these lists are long."""
    lists = [_as_array(value) for value in values if _is_list(value)]
    names, mixed = set[str](), []
    for value in lists:
        if type(value).__name__ == "ndarray" and value.dtype != object:
            names.add(value.dtype.type.__name__)
        else:
            mixed.append(value)
    names.update(own.__name__ for own in set(map(type, chain.from_iterable(mixed))))
    return [] if names.isdisjoint(_UNSIGNED) else list(chain.from_iterable(lists))


def _members(kind: pa.DataType, values: Sequence[Any], without: Collection[str] = ()) -> Iterator[Sequence[Any]]:
    """Yield the values of each member of a struct; none for the members ``without``."""
    names = kind.names
    rows = [value for value in values if isinstance(value, Mapping)]
    others = [value for value in values if isinstance(value, tuple) and len(value) == len(names)]
    pairs = [pair for value in values if isinstance(value, list) for pair in _pairs(value)]
    for i, own in enumerate(names):
        if own in without:
            yield ()
            continue
        members = [row.get(own) for row in rows] + [value[i] for value in others]
        yield members + [value for name, value in pairs if name == own]


def _is_list(value: Any) -> bool:
    # A NumPy array may have no dimension.
    return isinstance(value, Iterable) and not isinstance(value, Iterator) and getattr(value, "ndim", 1) != 0


def _as_array(value: Any) -> Any:
    """Return a column of pandas as a NumPy array, whose items keep their types. Return all else as it is."""
    return value.to_numpy() if type(value).__module__.startswith("pandas.") and hasattr(value, "to_numpy") else value


def _items(values: Sequence[Any], kind: pa.DataType) -> list[Any]:
    """Return the items of lists. Of a long NumPy array, return only the first item if the array's type shows that
    checking the others is unnecessary (ADR 0045)."""
    found: list[Any] = []
    is_enough: dict[Any, bool] = {}
    for value in map(_as_array, values):
        if type(value).__name__ != "ndarray":
            found.extend(value if _is_list(value) else ())
        elif value.ndim:
            dtype = value.dtype
            if dtype not in is_enough:
                is_enough[dtype] = _is_first_enough(dtype, kind)
            if is_enough[dtype] and len(value) > _SHORT_ITEMS:
                value = value[:1]  # noqa: PLW2901 - the part of it that is checked
            is_plain = dtype.kind == "f" or (is_enough[dtype] and dtype.kind in "biu")
            found.extend(value.tolist() if is_plain else value)
    return found


def _is_first_enough(dtype: Any, kind: pa.DataType) -> bool:
    is_floating = pa.types.is_floating(kind)
    if dtype.kind == "f":
        return bool(is_floating and dtype.itemsize * 8 <= kind.bit_width)
    needs_all = pa.types.is_float16(kind) or (is_floating and dtype == "uint64")
    return dtype.kind in "biumM" and not needs_all


def _pair_names(kind: pa.DataType) -> tuple[str, str]:
    return kind.key_field.name, kind.item_field.name


def _pairs(value: Any, names: tuple[str, str] = ("", "")) -> list[tuple[Any, Any]]:
    """Return the pairs of a dict or of a list of pairs; the pairs of a map may be dicts with these names."""
    if isinstance(value, Mapping):
        return list(value.items())
    given = value if _is_list(value) and not isinstance(value, _TEXTS) else ()
    found = []
    for pair in given:
        if isinstance(pair, list | tuple) and len(pair) == 2:
            found.append((pair[0], pair[1]))
        elif isinstance(pair, Mapping):
            found.append((pair.get(names[0]), pair.get(names[1])))
    return found
