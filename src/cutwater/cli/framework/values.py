"""Parses values of options that several commands have: sizes, and pairs of a key and a value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from cutwater.errors import InvalidArgument

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(option: str, text: str) -> int:
    """Parse a size such as ``2g``, ``512MiB`` or a number of bytes."""
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise InvalidArgument(f"{option} is {text!r}: write a size such as 2g or 512m")
    return int(found[1]) * _UNITS[found[2]]


def parse_pairs(option: str, given: Sequence[str], before: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return values with those that were given as ``KEY=VALUE`` in the place of earlier ones."""
    merged = dict(before or {})
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InvalidArgument(f"{option} is KEY=VALUE, such as {option} region=eu, not {text!r}")
        merged[key] = value
    return merged
