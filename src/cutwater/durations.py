"""Durations and times as users write them. Durations have several forms, and the package counts whole milliseconds; a
time is never an integer, because its unit would be a guess."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final, TypeAlias

from cutwater.errors import InvalidArgument

Duration: TypeAlias = int | str | timedelta

A_DATETIME: Final = "a datetime with a time zone, such as datetime.fromtimestamp(seconds, UTC)"
"""In error texts: how a time is given, and how a column of them."""
ARROW_TIMES: Final = "Arrow timestamps, such as numbers.cast(pa.timestamp('ms', 'UTC'))"

_UNITS_MS: Final = {
    **dict.fromkeys(("ms", "milli", "millis", "millisecond", "milliseconds"), 1),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1_000),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60_000),
    **dict.fromkeys(("h", "hour", "hours"), 3_600_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000),
}
_SHOWN: Final = [(unit, _UNITS_MS[unit]) for unit in "dhms"]
_TERM: Final = re.compile(r"\s*(-?\d+)\s*([a-z]+)", re.IGNORECASE)
_FORM: Final = re.compile(rf"({_TERM.pattern})+\s*", re.IGNORECASE)


def milliseconds(given: Duration, what: str, *, least: int | None = 0) -> int:
    """Return a duration in milliseconds. It is given as ``"5s"``, ``"1 minute 30 seconds"``, a ``timedelta`` or a
    number of milliseconds, and must be at least ``least``."""
    value = _parsed(given)
    if value is None and isinstance(given, str) and given.strip().isdecimal():
        number = given.strip()
        raise InvalidArgument(f"{what} is {given!r}: a unit is missing, write '{number}ms', '{number}s' or '{number}m'")
    if value is None:
        raise InvalidArgument(
            f"{what} is {given!r}: give whole milliseconds, a timedelta, or a text such as '500ms', '5s', '10m' or '1d'"
        )
    if least is not None and value < least:
        raise InvalidArgument(f"{what} is {given!r}, which is {value} ms: it must be at least {least} ms")
    return value


def _parsed(given: Duration) -> int | None:
    if isinstance(given, bool):
        return None
    if isinstance(given, int):
        return given
    if isinstance(given, timedelta):
        exact, rest = divmod(given, timedelta(milliseconds=1))
        return None if rest else exact
    terms = _TERM.findall(str(given)) if _FORM.fullmatch(str(given)) else []
    if not terms or any(unit.lower() not in _UNITS_MS for _, unit in terms):
        return None
    return sum(int(number) * _UNITS_MS[unit.lower()] for number, unit in terms)


def roughly(value_ms: int) -> str:
    """Format a duration for people, rounded, in the largest unit of which there are at least ten."""
    unit, size = next((one for one in _SHOWN if value_ms >= 10 * one[1]), ("ms", 1))
    return f"{round(value_ms / size)}{unit}"


def shown(value_ms: int) -> str:
    """Format a duration for people, exactly, in the largest unit that divides it."""
    unit, size = next((one for one in _SHOWN if value_ms and value_ms % one[1] == 0), ("ms", 1))
    return f"{value_ms // size}{unit}"


def integer_is_no_time(number: object, ways: str) -> str:
    """Return the error text for an integer in the place of a time. ``ways``: what to give instead."""
    return (
        f"{number} is an integer, and whether it counts seconds, milliseconds or microseconds cannot be told: give "
        f"{ways}"
    )
