"""Parses positions, times and declarations of event time from a command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, NamedTuple, TypeAlias

import typer

from cutwater.errors import InvalidArgument

Start: TypeAlias = int | datetime | Literal["earliest", "latest"]
WatermarkOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Declare that no record with an earlier event time follows; as 2026-01-31T12:00Z."
    ),
]
IdleOption = Annotated[bool, typer.Option("--idle", help="Declare that nothing is expected until the next record.")]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_AGO = re.compile(r"-((?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+)")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_FORMS = "{0}2026-01-31T12:00Z (UTC unless it says otherwise), or {0}-5m for five minutes ago (ms, s, m, h, d)"


def parse_time(text: str, now: datetime) -> datetime:
    """Parse an ISO 8601 time, or a time before now; with or without a leading @."""
    mark = "@" if text.startswith("@") else ""
    text = text.removeprefix("@")
    try:
        if ago := _AGO.fullmatch(text):
            seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(ago[1]))
            return now - timedelta(seconds=seconds)
        found = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidArgument(f"{mark + text!r} is no time: write {_FORMS.format(mark)}") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def parse_position(text: str, now: datetime) -> int | datetime:
    """Parse a GLSN, or a time after an @."""
    if text.startswith("@"):
        return parse_time(text, now)
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise InvalidArgument(f"{text!r} is no position: write a GLSN from 1 on, or a time: {_FORMS.format('@')}")


def parse_glsn(text: str) -> int:
    """Parse a position that is an argument of a command."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise typer.BadParameter(f"a GLSN is a whole number from 1 on, not {text!r}")


def parse_start(text: str, now: datetime) -> Start:
    """Parse a start position, which may also be one of the ends of the log."""
    match text:
        case "earliest" | "latest":
            return text
    try:
        return parse_position(text, now)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error.message}; or 'earliest' or 'latest'") from None


class DeclaredOptions(NamedTuple):
    watermark: datetime | None
    idle: bool


def parse_declared(watermark: str | None, idle: bool) -> DeclaredOptions | None:
    """Return the declaration; None if nothing is declared."""
    if watermark is None and not idle:
        return None
    return DeclaredOptions(None if watermark is None else parse_time(watermark, datetime.now(UTC)), idle)
