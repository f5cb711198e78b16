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


def no_number(value: Any, kind: pa.DataType) -> str:
    """Return an error text for a value that is no number, or no truth value, in a column of these; empty for columns of
    other types."""
    if pa.types.is_boolean(kind):
        return f"the type is {kind}, so True or False is wanted, not {short(value)}"
    if pa.types.is_integer(kind):
        wanted, way_out = "a whole number", "int"
    elif pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        wanted, way_out = "a number", "float" if pa.types.is_floating(kind) else "Decimal"
    else:
        return ""
    return f"the type is {kind}, so {wanted} is wanted, not {short(value)}: give one, as with {way_out}(...)"


def cut_off(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"
