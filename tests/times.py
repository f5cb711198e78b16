"""Event times in tests, which are small numbers for easy reading."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def at_us(microseconds: int) -> datetime:
    """The time that many microseconds after 1970 began."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
