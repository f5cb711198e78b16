"""The rule for values: storing changes none, and readers can read each of them.

A column is cast, cast back and compared, in whole columns. Arrow itself refuses most casts that would change a value,
so only the casts that it accepts wrongly are compared (``_rule``). Values of Python become Arrow values of a type that
holds them exactly before the same rule applies. Two changes are accepted, because users expect them: a floating-point
number is rounded to fewer bits, and so is a decimal or text with a fraction.

``ColumnConversion`` finds the wrong value among many: its row, and the place inside of a nested value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.client.convert.error_text import shown
from cutwater.client.convert.nested import inner_column, inner_pairs
from cutwater.client.convert.times import SECOND, no_time
from cutwater.client.errors import InvalidRecord

ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError, LookupError, AttributeError)
WHOLE_MAX = {16: 2**11, 32: 2**24, 64: 2**53}
"""Bits of a floating-point type → the largest whole number up to which it represents all of them exactly."""
NO_VALUE = "this may not be null: give a value"
_DAY_MS = 86_400_000


class Unfit(ValueError):
    """A value cannot be stored as it is. The text says why, and what to do."""


# Finding the wrong value.


class ColumnConversion(ABC):
    """Converts values of one form to a column of a type."""

    @abstractmethod
    def convert(self, field: pa.Field, values: Any) -> pa.Array:
        """Convert values. Raises ``Unfit``, or one of ``ARROW_ERRORS``."""

    @abstractmethod
    def parts(self, kind: pa.DataType, value: Any) -> Iterator[tuple[str, pa.Field, Any]]:
        """Yield the parts of one nested value: the step to it, empty for the items of a list; the field; the values."""

    @abstractmethod
    def refusal(self, kind: pa.DataType, value: Any, error: Exception) -> str:
        """Say why a value cannot be stored, of which Arrow said this."""

    def column(self, name: str, values: Any, kind: pa.DataType) -> pa.Array:
        """Convert values. An error names the first row that is wrong, and the place in it."""
        field = pa.field(name, kind)
        try:
            return self.convert(field, values)
        except ARROW_ERRORS as error:
            row, path, text = self._located(field, values, error)
            raise InvalidRecord(f"{name}{path}: {text}" if path else text, column=name, row=row) from error

    def _located(self, field: pa.Field, values: Any, error: Exception) -> tuple[int | None, str, str]:
        row = self._first_wrong(field, values)
        one = values[row : row + 1]
        for step, inner, part in self.parts(field.type, one):
            if len(part) and (found := self._error(inner, part)) is not None:
                index, path, text = self._located(inner, part, found)
                return row, (step or f"[{index}]") + path, text
        alone = self._error(field, one)
        if alone is None:
            return None, "", f"they have too many bytes for one batch: append them in parts ({error})"
        return row, "", str(alone) if isinstance(alone, Unfit) else self.refusal(field.type, one[0], alone)

    def _first_wrong(self, field: pa.Field, values: Any) -> int:
        """Binary search for the first failing row. At least one of the rows must be wrong."""
        low, high = 0, len(values)
        while high - low > 1:
            middle = (low + high) // 2
            if self._error(field, values[low:middle]) is not None:
                high = middle
            else:
                low = middle
        return low

    def _error(self, field: pa.Field, values: Any) -> Exception | None:
        try:
            self.convert(field, values)
        except ARROW_ERRORS as error:
            return error
        return None


# Casts that Arrow accepts although they change values.


class _Rule(NamedTuple):
    """A check for changed values. ``finds`` compares a column before and after, and marks the changed values."""

    finds: Callable[[pa.Array, pa.Array], pa.Array]
    way_out: str


def check_unchanged(before: pa.Array, after: pa.Array) -> None:
    """Compare a column with what a cast made of it, at every depth. Raises ``Unfit``."""
    if not _may_change(before.type, after.type):
        return
    rule = _rule(before.type, after.type)
    if rule is not None and (index := pc.index(rule.finds(before, after), True).as_py()) >= 0:
        raise Unfit(changed(before[index], after.type, rule.way_out))
    for step, _, _ in inner_pairs(before.type, after.type):
        check_unchanged(inner_column(before, step), inner_column(after, step))


def changed(value: Any, kind: pa.DataType, why: object) -> str:
    if pa.types.is_timestamp(kind) and isinstance(value, pa.Scalar) and _is_number(value.type):
        return no_time(value.as_py())
    return f"{shown(value)} cannot be {kind} without being changed: {why}"


@lru_cache(maxsize=256)
def _may_change(before: pa.DataType, after: pa.DataType) -> bool:
    if before.equals(after):
        return False
    inside = inner_pairs(before, after)
    return _rule(before, after) is not None or any(_may_change(one.type, other.type) for _, one, other in inside)


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
    if kinds.is_boolean(after) and _is_number(before):
        return _Rule(_not_back, "only 0 and 1 are false and true")
    if (kinds.is_integer(after) or kinds.is_decimal(after)) and is_text(before):
        return _PADDED
    if kinds.is_date(after) and kinds.is_timestamp(before):
        if before.tz is not None:
            return _Rule(_any, "which date it is depends on the time zone: give dates")
        return _Rule(_not_back, "the time of day would be lost: give dates")
    if kinds.is_time(after) and kinds.is_timestamp(before):
        return _Rule(_any, "the date would be lost: give times of a day")
    # The unit of a number is not known; ``changed`` has the words for it.
    return _Rule(_any, "") if kinds.is_timestamp(after) and _is_number(before) else None


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
    if is_text(before):
        return _Rule(lambda before, after: _no_float(before, after, whole_max), _PADDED.way_out)
    return None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_text(kind: pa.DataType) -> bool:
    """Return whether the type is text or bytes, which Arrow parses as numbers in the same way."""
    texts = pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()
    return kind in texts


def _not_back(before: pa.Array, after: pa.Array) -> pa.Array:
    if pa.types.is_decimal(after.type):
        # From text Arrow finds the nearest number, and from decimals often the one next to it.
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
    if is_text(before.type):
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


# What readers can read.


def check_arrow(data: pa.Array | pa.ChunkedArray | pa.RecordBatch | pa.Table) -> None:
    """Refuse malformed Arrow data, such as values that begin after the end of their memory: it could be stored, but
    never be read."""
    try:
        data.validate(full=True)
    except pa.ArrowException as error:
        raise InvalidRecord(
            f"this Arrow data does not hold together: {error}. Make it anew, as by pa.array()"
        ) from None


def check_readable(field: pa.Field, column: pa.Array, absent: int = 0) -> None:
    """Check at every depth that values are present where they are demanded, and that Python can represent every time.
    ``absent`` values are null because the enclosing value is. Raises ``Unfit``."""
    if column.null_count > absent and not field.nullable:
        raise Unfit(NO_VALUE)
    kind = column.type
    if not _has_rules(kind):
        return
    if pa.types.is_temporal(kind):
        if (text := _untold(column)) is not None:
            raise Unfit(text)
        return
    for step, _, inner in inner_pairs(kind, kind):
        check_readable(inner, inner_column(column, step), column.null_count if step else 0)


@lru_cache(maxsize=256)
def _has_rules(kind: pa.DataType) -> bool:
    if pa.types.is_duration(kind) or pa.types.is_time(kind):
        return _numbers(kind) is not None
    inside = [inner for _, _, inner in inner_pairs(kind, kind)]
    is_one = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    return is_one or any(not inner.nullable or _has_rules(inner.type) for inner in inside)


def _numbers(kind: pa.DataType) -> range | None:
    """Return the range of numbers that are valid durations, times of day or times in nanoseconds; None if all are."""
    second = SECOND[kind.unit]
    if pa.types.is_timestamp(kind):
        # Valid in any time zone. Pandas uses the smallest number for a missing time.
        return range(-(2**63) + 86_400 * second, 2**63 - 86_400 * second)
    if pa.types.is_time(kind):
        return range(86_400 * second)
    return range(-999_999_999 * 86_400 * second, 1_000_000_000 * 86_400 * second) if second <= 1_000 else None


def _untold(times: pa.Array) -> str | None:
    """Return what is wrong if Python cannot represent one of the times: a reader of records would fail at it, and never
    get past it. A time needs a ``datetime`` in its own zone and in UTC."""
    kind = times.type
    if pa.types.is_duration(kind) or pa.types.is_time(kind) or (pa.types.is_timestamp(kind) and kind.unit == "ns"):
        numbers = _numbers(kind)
        found = pc.min_max(times.view(pa.int32() if kind.bit_width == 32 else pa.int64())).as_py()
        wrong = [one for one in (found["min"], found["max"]) if one is not None and numbers and one not in numbers]
        if not wrong:
            return None
        if pa.types.is_duration(kind):
            wanted = "no duration of at most 999,999,999 days: count in that unit, or give a timedelta"
        elif pa.types.is_timestamp(kind):
            wanted = "no time that nanoseconds can tell in every time zone, of the years 1677 to 2262"
        else:
            wanted = "no time of a day: count from midnight in that unit, or give a time"
        return f"{wrong[0]} as {kind} is {wanted}"
    found = pc.min_max(times)
    for extreme in (found["min"], found["max"]):
        try:
            time = extreme.as_py()
            if isinstance(time, datetime) and time.tzinfo is not None:
                time.astimezone(UTC)
        except OverflowError:
            return (
                f"{extreme.value} as {kind} is no time of the years 1 to 9999: count from 1970 in that unit, or give a "
                "datetime with a time zone"
            )
        except LookupError:
            # This machine does not know the zone; others may.
            return _untold(times.view(pa.timestamp(kind.unit, "UTC")))
    if pa.types.is_date64(kind):
        return _no_whole_day(times.view(pa.int64()))
    return None


def _no_whole_day(numbers: pa.Array) -> str | None:
    days = pc.multiply(pc.divide(numbers, _DAY_MS), _DAY_MS)
    index = pc.index(pc.not_equal(days, numbers), True).as_py()
    return None if index < 0 else f"{numbers[index]} ms are no whole days: count 86_400_000 for each, or give a date"
