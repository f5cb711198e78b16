"""Defines watermark strategies as a pipeline describes them. The rule itself is in ``cutwater.core.read.watermark``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from cutwater.core.read.watermark import BoundedOutOfOrderness, Punctuated, Strategy
from cutwater.durations import Duration, milliseconds, shown
from cutwater.errors import InvalidArgument
from cutwater.pipeline.rows import Row
from cutwater.pipeline.values import to_milliseconds
from cutwater.types import MILLISECOND

WatermarkFunction: TypeAlias = Callable[[Row], int | None]
"""Returns the watermark (ms) that holds after a row, or None if the row says nothing."""

WAYS: Final = (
    "watermark=Watermark.bounded('5s') if records come at most 5 s after later ones, Watermark.ascending() if event "
    "times of a log stream never go back, Watermark.punctuated() if producers declare it, or "
    "Watermark.of_rows(function)"
)
"""How to give a source a clock."""

_IDLE_AFTER_MS: Final = 30_000
_NEVER_IDLE_US: Final = 2**62


@dataclass(frozen=True, slots=True)
class Watermark:
    """A strategy that derives the watermark from the records of each stream. Make one with the class methods."""

    kind: str
    bound_ms: int = 0
    function: WatermarkFunction | None = None
    idle_after_ms: int | None = _IDLE_AFTER_MS

    @classmethod
    def bounded(cls, bound: Duration) -> Watermark:
        """Records are at most ``bound`` of event time behind the newest before them."""
        return cls("bounded", milliseconds(bound, "the bound of out-of-orderness"))

    @classmethod
    def ascending(cls) -> Watermark:
        """Event times of a stream never go back."""
        return cls("ascending")

    @classmethod
    def punctuated(cls) -> Watermark:
        """Producers declare the watermark in the log."""
        return cls("punctuated")

    @classmethod
    def of_rows(cls, function: WatermarkFunction) -> Watermark:
        """A function of a row returns the watermark that holds after it, in milliseconds, or None."""
        if not callable(function):
            raise InvalidArgument(f"Watermark.of_rows takes a function of a row, not {function!r}")
        return cls("of rows", function=function)

    def idle_after(self, time: Duration | None) -> Watermark:
        """A stream that was silent for this long (in cut time) does not hold the others back. With None, it always
        does."""
        return replace(self, idle_after_ms=None if time is None else milliseconds(time, "idle_after"))

    @property
    def strategy(self) -> Strategy:
        """The strategy for the core's clock. ``said_us`` is the event time to report with it."""
        idle_us = _NEVER_IDLE_US if self.idle_after_ms is None else self.idle_after_ms * MILLISECOND
        if self.kind == "punctuated":
            return Punctuated(idle_us)
        return BoundedOutOfOrderness(self.bound_ms * MILLISECOND, idle_us)

    def said_us(self, row: Row | None, time_ms: int) -> int | None:
        """Return what a record says about event time, as the core's clock takes it.

        The clock takes a watermark from a function as a largest event time, one millisecond above the watermark.
        """
        if self.function is None:
            return time_ms * MILLISECOND
        if row is None:
            return None
        given = self.function(row)
        if given is None:
            return None
        if type(given) is not int:
            raise InvalidArgument(f"a watermark function gave {given!r}: give milliseconds as an integer, or None")
        to_milliseconds(given)
        return (given + 1) * MILLISECOND

    def __str__(self) -> str:
        what = f"bounded {shown(self.bound_ms)}" if self.kind == "bounded" else self.kind
        return f"{what}, idle after {'ever' if self.idle_after_ms is None else shown(self.idle_after_ms)}"


def strategy_of(given: Watermark | WatermarkFunction | None) -> Watermark | None:
    """Return the strategy that ``source`` takes: from a ``Watermark``, from a function of a row, or None for a source
    without a clock."""
    if given is None or isinstance(given, Watermark):
        return given
    if callable(given):
        return Watermark.of_rows(given)
    described: Any = given
    raise InvalidArgument(
        f"watermark is {described!r}: give Watermark.bounded('5s'), .ascending(), .punctuated() or .of_rows(function)"
    )
