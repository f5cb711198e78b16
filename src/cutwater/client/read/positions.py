"""Positions as users name them: numbers, times, the ends of the log, cursors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Literal, TypeAlias

from msgspec import Struct

from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.cluster.cursors import AsyncCursor, NamedCursor
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.convert.times import time_us
from cutwater.client.read.point_reads import PointReads
from cutwater.client.subscribe.stream_readers import Selection
from cutwater.errors import InvalidArgument
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, CutTime, TopicId

TopicNames: TypeAlias = str | Sequence[str] | re.Pattern[str]
Position: TypeAlias = int | datetime | Literal["earliest", "latest"] | NamedCursor
"""A GLSN, the time at which records were committed, an end of the log, or the position of a cursor."""


class SubscriptionRange(Struct, frozen=True):
    """The range of a subscription. ``stop`` is not included; None means that it never ends. ``starts``: topics of which
    only later records are wanted."""

    start: GLSN
    stop: GLSN | None
    starts: dict[TopicId, GLSN]
    view: CatalogView


def check_range(start: object, stop: object) -> None:
    """Refuse what names no position, and a range that ends before it begins, even if it holds no records. A range that
    ends where it begins is empty."""
    if not (_is_glsn(start) or isinstance(start, datetime | NamedCursor) or start in ("earliest", "latest")):
        raise InvalidArgument(
            f"start= is a GLSN from 1 on, 'earliest', 'latest', a datetime or a cursor, not {start!r}"
        )
    if not (stop is None or _is_glsn(stop) or isinstance(stop, datetime)):
        raise InvalidArgument(
            f"stop= is a GLSN from 1 on, or a datetime, not {stop!r}; without it, follow=False ends at the end of "
            "the log"
        )
    if isinstance(start, datetime) and isinstance(stop, datetime):
        # A time without a time zone is refused later, when it is looked up.
        is_wrong = start.tzinfo is not None and stop.tzinfo is not None and stop < start
    else:
        is_wrong = isinstance(start, int) and isinstance(stop, int) and stop < start
    if is_wrong:
        raise InvalidArgument(
            f"the range ends before it begins: stop is {stop}, and start is {start}. Exchange them, or leave stop out"
        )


def _is_glsn(position: object) -> bool:
    return isinstance(position, int) and not isinstance(position, bool) and position >= 1


class Positions:
    def __init__(self, catalogs: Catalogs, reading: PointReads, repository: Repository) -> None:
        self._catalogs, self._reading, self._repository = catalogs, reading, repository

    async def find(self, time: datetime, selection: Selection | None, view: CatalogView, deadline: Deadline) -> GLSN:
        """Return the first position of these topics, or of any, that was committed at or after the time."""
        given: object = time
        if not isinstance(given, datetime) or given.tzinfo is None:
            raise InvalidArgument(f"a time is a datetime with a time zone, such as datetime.now(UTC), not {time!r}")
        streams = view.catalog.streams
        if selection is not None:
            streams = tuple(info for topic in selection.topics(view) for info in view.streams_of(topic.topic))
        return await self._reading.find(CutTime(time_us(time, "time")), streams, view, deadline)

    async def resolve(
        self, selection: Selection, start: Position, stop: int | datetime | None, follow: bool, deadline: Deadline
    ) -> SubscriptionRange:
        """Return the range of a subscription that begins now."""
        view = await self._catalogs.fresh(deadline)
        topics = selection.topics(view)
        after_end = GLSN(view.catalog.high_watermark + 1)
        if isinstance(start, NamedCursor):
            at = await AsyncCursor(self._repository, start.name, deadline.seconds).get(
                timeout=max(deadline.left, 0.001)
            )
            start = "earliest" if at is None else at + 1
        starts = {}
        if start == "earliest":
            starts = {topic.topic: topic.trimmed_before for topic in topics}
            first = min(starts.values(), default=GLSN(1))
        elif start == "latest":
            first = after_end
        elif isinstance(start, datetime):
            first = await self.find(start, selection, view, deadline)
        else:
            first = GLSN(start)
        last = None if follow else after_end
        if stop is not None:
            at_stop = await self.find(stop, selection, view, deadline) if isinstance(stop, datetime) else GLSN(stop)
            last = at_stop if last is None else min(last, at_stop)
        return SubscriptionRange(first, last, starts, view)
