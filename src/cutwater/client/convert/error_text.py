"""Formats given values for error messages."""

from __future__ import annotations

from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

SHOWN_MAX = 60
"""How many characters of a wrong value are shown."""


def short(value: Any) -> str:
    """Format a value with its type, which the caller may not expect."""
    return f"{shown(value)} ({type(value).__name__})"


def shown(value: Any) -> str:
    """Format a value of Python or Arrow."""
    try:
        return cut_off(repr(value.as_py() if isinstance(value, pa.Scalar) else value))
    except (OverflowError, ValueError, LookupError):
        # A time outside of Python's range, in a time zone unknown here, or with nanoseconds where pandas is not
        # installed; or a number with thousands of digits.
        if isinstance(value, pa.Scalar):
            return f"{getattr(value, 'value', 'what was given')} ({value.type})"
        return "a value too long to be shown"


def whole_numbers(kind: pa.DataType) -> range:
    """Return the numbers that an integer type holds."""
    if pa.types.is_unsigned_integer(kind):
        return range(2**kind.bit_width)
    return range(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1))


def cut_off(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"
