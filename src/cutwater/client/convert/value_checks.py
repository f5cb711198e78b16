"""Checks every column before it is stored, wherever it came from: values are present where they are demanded, at any
depth, and Python can represent every time."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.client.convert.times import SECOND
from cutwater.client.convert.violations import check_columns
from cutwater.client.errors import InvalidRecord

NO_VALUE = "there is no value, and one is demanded"
_DAY_MS = 86_400_000


def check_arrow(data: pa.Array | pa.ChunkedArray | pa.RecordBatch | pa.Table) -> None:
    """Refuse malformed Arrow data, such as values that begin after the end of their memory: it could be stored, but
    never be read."""
    try:
        data.validate(full=True)
    except pa.ArrowException as error:
        raise InvalidRecord(
            f"this Arrow data does not hold together: {error}. Make it anew, as by pa.array()"
        ) from None


def check_stored(name: str, column: pa.Array) -> None:
    """Check a column. Whether the column itself may be null is not checked here."""
    kind = column.type
    if _has_rules(kind) and (kind.num_fields or _untold(column) is not None):
        check_columns(name, _wrong, _has_rules, column)


@lru_cache(maxsize=256)
def _has_rules(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        # Arrow itself ensures that keys are present.
        return _has_rules(kind.key_type) or not kind.item_field.nullable or _has_rules(kind.item_type)
    inside = [kind.field(i) for i in range(kind.num_fields)]
    return _has_times(kind) or any(not field.nullable or _has_rules(field.type) for field in inside)


def _wrong(field: pa.Field, absent: int, column: pa.Array) -> str | None:
    if column.null_count > absent and not field.nullable:
        return NO_VALUE
    return _untold(column) if _has_times(column.type) else None


def _has_times(kind: pa.DataType) -> bool:
    """Return whether a column of this type has times that may be too early, too late or too long."""
    if pa.types.is_duration(kind) or pa.types.is_time(kind):
        return _numbers(kind) is not None
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


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
