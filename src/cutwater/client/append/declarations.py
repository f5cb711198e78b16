"""Declarations of a watermark or idleness, as parts of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from cutwater.client.convert.times import Time, time_us
from cutwater.core.requests import StreamInfo
from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.types import Ack, Batch, BatchKind, EventTime


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


def raise_first(streams: Sequence[StreamInfo], outcomes: Sequence[Ack | BaseException]) -> None:
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
