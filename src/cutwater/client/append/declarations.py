"""Declares a watermark or idleness: with records, or alone to one log stream or to all log streams of a topic."""

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
"""Approximate room that a declaration takes in a producer's buffer."""


class Declared(Struct, frozen=True):
    """A declaration: no later record of the log stream has an event time before ``watermark``; the log stream is
    ``idle`` until its next entry."""

    watermark: EventTime | None = None
    idle: bool = False

    def with_records(self, batch: Batch) -> Batch:
        """Return the batch with this declaration at its end."""
        return structs.replace(batch, declared=self.watermark, idle=self.idle)

    def alone(self) -> Batch:
        """Return an entry that holds only the declaration and no record."""
        zero, kind = EventTime(0), BatchKind.DECLARATION
        return Batch(1, b"", 0, zero, zero, kind, declared=self.watermark, idle=self.idle)


def declared_of(watermark: Time | None, idle: Any) -> Declared | None:
    """Return the caller's declaration, or None if there is none."""
    if type(idle) is not bool:
        raise InvalidArgument(f"idle= is True or False, not {idle!r}")
    if watermark is None:
        return Declared(idle=True) if idle else None
    return Declared(EventTime(time_us(watermark, "watermark")), idle)


def required(watermark: Time | None, idle: Any) -> Declared:
    """Return the caller's declaration; raise if there is none. For calls that do nothing else."""
    declared = declared_of(watermark, idle)
    if declared is None:
        raise InvalidArgument("nothing is declared: give watermark=, idle=True or both")
    return declared


class Declarations:
    """Appends declarations without a record."""

    def __init__(self, catalogs: Catalogs, shipping: Shipping) -> None:
        self._catalogs, self._shipping = catalogs, shipping

    async def declare(self, name: str, declared: Declared, pin: LogStreamId | None, deadline: Deadline) -> list[Ack]:
        """Append to the log stream ``pin``, or to every log stream of the topic that is not sealed permanently."""
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
    """Raise the first failure, and say which log streams have the declaration: declaring it again is safe."""
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
