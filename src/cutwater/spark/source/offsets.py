"""The offsets of a query, as Spark keeps them in its checkpoint, and where a micro-batch begins.

Spark keeps where each micro-batch ends. Where the first one begins it asks again every time: when it looks for the end,
when it plans the batch, and when it plans it again after a restart. Whatever is the end of the log by then is none of
its business, so the end of the first micro-batch says where that begins, and only this counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field

from cutwater.core.read.watermark import require_known_rule
from cutwater.errors import InvalidArgument
from cutwater.types import GLSN, TopicId


class End(Protocol):
    """``since``: where the query begins; its first offset has its own position there, later ones than that of the first
    micro-batch have none."""

    @property
    def glsn(self) -> int: ...

    @property
    def since(self) -> int | None: ...


class Offset(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything of the query's topics at or below ``glsn`` has been read. ``began``: where topics begin for this query
    that began above it, if it began with the earliest: what was trimmed by then is not missed. ``topics``: those that
    were read, by number, so that one that is gone is missed, also if another one has its name; older offsets have those
    of a pattern only. ``rule``: the rule of the watermark that the micro-batch up
    to here was planned by; none if the query has no such column, or if it was planned before rules had numbers."""

    glsn: GLSN
    since: GLSN | None = field(default=None, name="from")
    began: dict[TopicId, GLSN] = {}
    topics: dict[TopicId, str] = {}
    rule: int | None = None

    def plain(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return made

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Offset:
        if given.get("rule") is not None:
            require_known_rule(given["rule"], "this checkpoint")
        try:
            return msgspec.convert(given, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidArgument(
                f'an offset is {{"glsn": n}}, not {given} ({error}): does this checkpoint belong to a log?'
            ) from None


def is_first(offset: End) -> bool:
    """Whether nothing has been read yet."""
    return offset.since == offset.glsn


def since_after(start: End) -> GLSN | None:
    """What the end of a micro-batch that begins here says of the beginning of the query."""
    return GLSN(start.glsn) if is_first(start) else None


def start_of(start: End, end: End) -> GLSN:
    """Where the micro-batch between two offsets begins, whatever Spark was told of the beginning this time."""
    if is_first(start) and end.since is not None:
        return GLSN(end.since)
    return GLSN(start.glsn)


def began_of(start: Offset, end: Offset) -> dict[TopicId, GLSN]:
    """Where topics begin in the micro-batch between two offsets, if it is not where that begins."""
    return end.began if is_first(start) and end.since is not None else start.began


def began_above(began: Mapping[TopicId, GLSN], glsn: GLSN) -> dict[TopicId, GLSN]:
    """Those that matter to whoever reads on after a position."""
    return {topic: first for topic, first in began.items() if first > glsn + 1}
