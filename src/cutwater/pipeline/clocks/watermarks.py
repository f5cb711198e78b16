"""Watermark strategies as a pipeline describes them. The rule itself is ``cutwater.core.read.watermark``."""

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
"""Gives the watermark (ms) that holds after a row, or None if the row says nothing."""

WAYS: Final = (
    "watermark=Watermark.bounded('5s') if records come at most 5 s after later ones, Watermark.ascending() if event "
    "times of a log stream never go back, Watermark.punctuated() if producers declare it, or "
    "Watermark.of_rows(function)"
)
"""What to write to give a source a clock."""

_IDLE_AFTER_MS: Final = 30_000
_NEVER_IDLE_US: Final = 2**62


@dataclass(frozen=True, slots=True)
class Watermark:
    """How far event time has come, judged from the records of each stream. Make one with the class methods."""

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
        """A function of a row gives the watermark that holds after it, in milliseconds, or None."""
        if not callable(function):
            raise InvalidArgument(f"Watermark.of_rows takes a function of a row, not {function!r}")
        return cls("of rows", function=function)

    def idle_after(self, time: Duration | None) -> Watermark:
        """A stream that was silent for this long (of cut time) does not hold the others back; None: it always does."""
        return replace(self, idle_after_ms=None if time is None else milliseconds(time, "idle_after"))

    @property
    def strategy(self) -> Strategy:
        """What the core's clock is given. ``said_us`` is the event time to report with it."""
        idle_us = _NEVER_IDLE_US if self.idle_after_ms is None else self.idle_after_ms * MILLISECOND
        if self.kind == "punctuated":
            return Punctuated(idle_us)
        return BoundedOutOfOrderness(self.bound_ms * MILLISECOND, idle_us)

    def said_us(self, row: Row | None, time_ms: int) -> int | None:
        """What a record says of event time, as the core's clock takes it.

        A watermark that a function gives is a largest event time to the clock, one millisecond above the watermark.
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
    """A strategy as ``source`` takes it: a ``Watermark``, a function of a row, or None: a source without a clock."""
    if given is None or isinstance(given, Watermark):
        return given
    if callable(given):
        return Watermark.of_rows(given)
    described: Any = given
    raise InvalidArgument(
        f"watermark is {described!r}: give Watermark.bounded('5s'), .ascending(), .punctuated() or .of_rows(function)"
    )
