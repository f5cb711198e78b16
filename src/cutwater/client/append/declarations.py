"""Declarations of a watermark or of idleness: with records, or by themselves to one log stream or to all of a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from cutwater.client.append.sender import Shipment, Shipping
from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.convert.times import Time, time_us
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.errors import CutwaterError, InvalidArgument, Unavailable
from cutwater.runtime.deadlines import Deadline
from cutwater.types import Ack, Batch, BatchKind, EventTime, LogStreamId

DECLARATION_BYTES = 128
"""About the room of a declaration in a producer's buffer."""


class Declared(Struct, frozen=True):
    """A declaration: no record with an earlier event time than ``watermark`` follows in the log stream; the log
    stream is ``idle`` until its next entry."""

    watermark: EventTime | None = None
    idle: bool = False

    def with_records(self, batch: Batch) -> Batch:
        """The batch, which declares this at its end."""
        return structs.replace(batch, declared=self.watermark, idle=self.idle)

    def alone(self) -> Batch:
        """An entry of its own, without a record."""
        zero, kind = EventTime(0), BatchKind.DECLARATION
        return Batch(1, b"", 0, zero, zero, kind, declared=self.watermark, idle=self.idle)


def declared_of(watermark: Time | None, idle: Any) -> Declared | None:
    """What a caller declares; None if nothing."""
    if type(idle) is not bool:
        raise InvalidArgument(f"idle= is True or False, not {idle!r}")
    if watermark is None:
        return Declared(idle=True) if idle else None
    return Declared(EventTime(time_us(watermark, "watermark")), idle)


def required(watermark: Time | None, idle: Any) -> Declared:
    """The same for a call that has nothing else to say."""
    declared = declared_of(watermark, idle)
    if declared is None:
        raise InvalidArgument("nothing is declared: give watermark=, idle=True or both")
    return declared


class Declarations:
    """Appends declarations without a record."""

    def __init__(self, catalogs: Catalogs, shipping: Shipping) -> None:
        self._catalogs, self._shipping = catalogs, shipping

    async def declare(self, name: str, declared: Declared, pin: LogStreamId | None, deadline: Deadline) -> list[Ack]:
        """To the log stream ``pin``, or to every one of the topic that is not sealed for good."""
        view = await self._catalogs.fresh(deadline)
        topic = await self._catalogs.topic(name, deadline)
        if pin is not None:
            return [await self._ship(topic, pin, declared, deadline)]
        streams = [info for info in view.streams_of(topic.topic) if not info.final]
        if not streams:
            raise Unavailable(f"topic {name!r} has no log stream that takes appends, so nothing was declared")
        outcomes = await asyncio.gather(
            *(self._ship(topic, info.stream, declared, deadline) for info in streams), return_exceptions=True
        )
        _raise_first(streams, outcomes)
        return [outcome for outcome in outcomes if isinstance(outcome, Ack)]

    async def _ship(self, topic: TopicInfo, pin: LogStreamId, declared: Declared, deadline: Deadline) -> Ack:
        batch = declared.alone()
        return await self._shipping.ship(Shipment(), topic, pin, lambda: batch, None, deadline)


def _raise_first(streams: Sequence[StreamInfo], outcomes: Sequence[Ack | BaseException]) -> None:
    """If a log stream has not got the declaration, say which ones have: it is safe to declare the same again."""
    failed = {
        info.stream: outcome
        for info, outcome in zip(streams, outcomes, strict=True)
        if isinstance(outcome, BaseException)
    }
    for stream, error in failed.items():
        if isinstance(error, CutwaterError):
            having = ", ".join(str(info.stream) for info in streams if info.stream not in failed) or "none"
            error.message += (
                f" (this is log stream {stream}; those that have the declaration: {having}; declaring it again is safe)"
            )
        raise error
