"""Times as callers may give them."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, TypeAlias

from cutwater.client.convert.error_text import short, shown
from cutwater.client.errors import InvalidRecord
from cutwater.durations import A_DATETIME, ARROW_TIMES, integer_is_no_time

Time: TypeAlias = datetime
"""A ``datetime`` with a time zone."""

TIMES = range(-62_135_596_800_000_000, 253_402_300_800_000_000)
"""Microseconds since 1970 that a ``datetime`` can represent."""
SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""Arrow unit → how many of it make a second."""
UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def time_us(time: Any, argument: str = "timestamp") -> int:
    """Return a caller's time as microseconds since 1970. Errors name the argument, unless the name is empty."""
    if not isinstance(time, datetime):
        raise _wrong(argument, no_time(time, ways=A_DATETIME))
    if time.tzinfo is None or (type(time) is not datetime and is_missing(time)):
        text = f"{time} is no time: write None, or leave it out" if is_missing(time) else no_zone(time)
        raise _wrong(argument, text)
    if type(time) is not datetime and getattr(time, "nanosecond", None):
        raise _wrong(argument, too_fine(time, "us"))
    delta = time - _EPOCH
    found = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
    if found not in TIMES:
        raise _wrong(argument, f"{time} is not within the years 1 to 9999 in UTC")
    return found


def _wrong(argument: str, text: str) -> InvalidRecord:
    return InvalidRecord(f"argument {argument!r}: {text}" if argument else text)


def is_missing(value: Any) -> bool:
    """Return whether the value is a missing value of pandas: ``NaT`` (which counts as a ``datetime``) or ``NA``."""
    return type(value).__name__ in ("NaTType", "NAType")


def no_zone(time: datetime) -> str:
    return f"{time} has no time zone: write datetime(..., tzinfo=UTC), or call astimezone()"


def too_fine(time: Any, unit: str) -> str:
    """Return an error text for a time or a duration that a column of this unit would truncate."""
    rounded = f"round it, as with .floor({unit!r})" if hasattr(time, "floor") else f"round it to {UNITS[unit]}"
    return f"{short(time)} is finer than {UNITS[unit]}: {rounded}, or let the column have a finer unit"


def no_time(given: Any, unit: str = "us", *, ways: str = f"{A_DATETIME}, or {ARROW_TIMES}") -> str:
    """Return an error text for a value that is no time, or none that a column of this unit can tell. ``ways``: what to
    give instead of an integer."""
    if isinstance(given, Integral) and not isinstance(given, bool):
        return integer_is_no_time(shown(given), ways)
    way_out = ""
    if isinstance(given, str):
        way_out = ": parse text with datetime.fromisoformat(...), and see that it has a time zone"
    elif isinstance(given, datetime):
        return f"{short(given)} is beyond what {UNITS[unit]} since 1970 can tell: let the column have a coarser unit"
    elif isinstance(given, date):
        way_out = f": write datetime({given.year}, {given.month}, {given.day}, tzinfo=UTC) for its beginning"
    elif isinstance(given, Real | Decimal) and not isinstance(given, bool):
        way_out = ": write datetime.fromtimestamp(seconds, UTC)"
    return f"a time is a datetime with a time zone, not {short(given)}{way_out}"
