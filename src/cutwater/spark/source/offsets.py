"""Defines the offsets of a query, as Spark stores them in its checkpoint, and the beginning of a micro-batch.

Spark stores the end of each micro-batch. It asks for the beginning of the first one every time: when it looks for the
end, when it plans the batch, and when it plans it again after a restart. The answer must not depend on the end of the
log at that time. So the end of the first micro-batch stores the beginning, and only this value counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from cutwater.core.read.watermark import require_known_rule
from cutwater.errors import InvalidArgument
from cutwater.types import GLSN, TopicId

Topic = TypeVar("Topic", TopicId, str)
Position = TypeVar("Position", bound=int)


class SourceOffset(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An offset: everything of the query's topics at or below ``glsn`` has been read.

    ``since``: the beginning of the query. In the first offset it equals the offset's own position; the end of the first
    micro-batch has it as well, and later offsets have none.

    ``began``: the first position of each topic that begins above the offset, if the query began with the earliest
    record; what had been trimmed by then does not count as lost.

    ``topics``: the topics that were read, by number. So the query notices that a topic was deleted, even if another
    topic has its name now. Older offsets list only the topics of a pattern.

    ``rule``: the watermark rule with which the micro-batch up to here was planned. None if the query has no watermark
    column, or if the micro-batch was planned before rules had numbers.
    """

    glsn: GLSN
    since: GLSN | None = field(default=None, name="from")
    began: dict[TopicId, GLSN] = {}
    topics: dict[TopicId, str] = {}
    rule: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether the query has read nothing yet."""
        return self.since == self.glsn

    def plain(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return made

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SourceOffset:
        if given.get("rule") is not None:
            require_known_rule(given["rule"], "this checkpoint")
        try:
            return msgspec.convert(given, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidArgument(
                f'an offset is {{"glsn": n}}, not {given} ({error}): does this checkpoint belong to a log?'
            ) from None


def begin_of(start: SourceOffset, end: SourceOffset) -> tuple[GLSN, dict[TopicId, GLSN]]:
    """Return the beginning of the micro-batch between two offsets, independent of the beginning that Spark was told
    this time, and the first positions of topics that begin later."""
    if start.is_first and end.since is not None:
        return end.since, end.began
    return start.glsn, start.began


def began_above(began: Mapping[Topic, Position], glsn: int) -> dict[Topic, Position]:
    """Keep the topics that begin after the next position to read."""
    return {topic: first for topic, first in began.items() if first > glsn + 1}
