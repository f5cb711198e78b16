"""Formats counts, lists and durations for text that operators read."""

from __future__ import annotations

from collections.abc import Iterable

from cutwater.types import SECOND


def is_token_text(text: str) -> bool:
    """Whether the text has the form of a token with its secret, and must not be shown."""
    prefix, _, rest = text.partition("_")
    identifier, _, secret = rest.partition("_")
    return prefix == "cwt" and len(identifier) == 16 and len(secret) >= 32


def listed(items: Iterable[object]) -> str:
    """Join items: ``1``, ``1 and 2``, ``1, 2 and 3``."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def counted(count: int, thing: str) -> str:
    """Format a count: ``1 log stream``, ``2 log streams``, ``2 processes``."""
    plural = "es" if thing.endswith("s") else "s"
    return f"{count} {thing}{'' if count == 1 else plural}"


def nodes_in_words(nodes: Iterable[int]) -> str:
    found = tuple(nodes)
    if not found:
        return "no storage node"
    return f"storage node{'s' if len(found) > 1 else ''} {listed(found)}"


def hold(nodes: Iterable[int]) -> str:
    """Begin a sentence: ``storage nodes 1 and 2 hold``."""
    found = tuple(nodes)
    return f"{nodes_in_words(found)} {'hold' if len(found) > 1 else 'holds'}"


def seconds(us: int) -> str:
    """Format a duration in seconds, below 10 s with one decimal."""
    return f"{us / SECOND:.1f} s" if us < 10 * SECOND else f"{us // SECOND} s"
