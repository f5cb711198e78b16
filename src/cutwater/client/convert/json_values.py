"""Encodes values as JSON, in the same way for all commands.

Bytes are base64, decimals are texts, times are ISO 8601 with as many digits as they need, and numbers that JSON lacks
are the texts of ``NO_NUMBERS``. ``json_columns`` reads all of that.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from math import inf, isfinite, isnan, nan
from typing import Any

import msgspec

NO_NUMBERS = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}


def encode(value: object) -> bytes:
    encoded = msgspec.json.encode(value, enc_hook=_told)
    # Numbers such as NaN have become null, too. Most values contain no null, and need no second pass.
    if b"null" not in encoded:
        return encoded
    return msgspec.json.encode(_with_texts(msgspec.to_builtins(value, str_keys=True, enc_hook=_told)))


def _told(value: Any) -> str:
    """Encode what msgspec does not know: times with nanoseconds, for which pandas has classes."""
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, timedelta):
        nanoseconds: int = value.value  # type: ignore[attr-defined]
        seconds, rest = divmod(abs(nanoseconds), 1_000_000_000)
        sign = "-" if nanoseconds < 0 else ""
        return f"{sign}PT{seconds}{f'.{rest:09}'.rstrip('0').rstrip('.')}S"
    return str(value)


def _with_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_texts(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
