"""What was given, in a message."""

from __future__ import annotations

from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

SHOWN_MAX = 60
"""Of a value that is wrong, so many characters are shown."""


def short(value: Any) -> str:
    """With its type, for those who did not expect it."""
    return f"{shown(value)} ({type(value).__name__})"


def shown(value: Any) -> str:
    """Also of Arrow."""
    try:
        return cut_off(repr(value.as_py() if isinstance(value, pa.Scalar) else value))
    except (OverflowError, ValueError, LookupError):
        # A time far beyond those that Python knows, or of a zone that is unknown here, or nanoseconds where there is no
        # pandas; or a number with thousands of digits.
        if isinstance(value, pa.Scalar):
            return f"{getattr(value, 'value', 'what was given')} ({value.type})"
        return "a value too long to be shown"


def cut_off(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"
