"""Defines steps: how event time and processing time advance within a range of the log.

A micro-batch is a range of positions with the places where a clock moves. An operator that has no record at a place is
not woken there: it finds the place by binary search when a timer is due.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cutwater.core.read.watermark import MAX_WATERMARK, NO_WATERMARK
from cutwater.errors import InvalidArgument, ProtocolViolation
from cutwater.pipeline.position import END, EVENT_TIME, PROCESSING_TIME, glsn_of, moment
from cutwater.types import MILLISECOND

NO_TIME: Final = -(2**63)
"""The watermark before anything is known about event time."""

MAX_TIME: Final = 2**63 - 1
"""The watermark at the end of a bounded input."""

NEVER: Final = 2**63 - 1
"""A moment that no range reaches."""

DRAIN_FIRINGS: Final = 10
"""How many timers that are registered while a bounded input drains fire, per key and operator. Without a limit, a timer
that registers the next one would fire forever."""


def check_drain_firings(given: object) -> int:
    if type(given) is not int or given < 0:
        raise InvalidArgument(
            f"drain_firings is {given!r}: give how many timers that a function registers while the input drains fire, "
            "per key and operator, as an integer from 0 on"
        )
    return given


@dataclass(slots=True)
class Steps:
    """One clock over a range: its value before the range, and the moments at which it rises, with the new values.

    Both lists rise strictly.
    """

    before: int = NO_TIME
    moments: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def add(self, when: int, value: int) -> None:
        if value <= self.last or (self.moments and when <= self.moments[-1]):
            raise ProtocolViolation(f"a clock steps to {value} at {when}, after {self.last}: clocks only rise")
        self.moments.append(when)
        self.values.append(value)

    @property
    def last(self) -> int:
        return self.values[-1] if self.values else self.before

    def seen_at(self, when: int) -> int:
        """Return the value that holds at a moment: that of the last step before it."""
        index = bisect_left(self.moments, when)
        return self.values[index - 1] if index else self.before

    def reached_at(self, glsn: int) -> int:
        """Return the value that holds when everything at a position is done."""
        index = bisect_right(self.moments, moment(glsn, END))
        return self.values[index - 1] if index else self.before

    def next_reaching(self, time: int, when: int) -> int:
        """Return the first moment, not before ``when``, at which the clock steps to ``time`` or beyond."""
        if time > self.last:
            return NEVER
        index = max(bisect_left(self.values, time), bisect_left(self.moments, when))
        return self.moments[index] if index < len(self.moments) else NEVER


@dataclass(slots=True)
class Ticks:
    """The steps of all clocks over one range (from, to].

    ``watermarks`` has one clock per set of sources that feeds an operator: its watermark is the minimum over these
    sources, and other sources do not affect it. ``times`` is cut time, which is processing time. ``firings`` is how
    many timers that an operator registers for a key while the input ends also fire.
    """

    watermarks: Mapping[frozenset[str], Steps]
    times: Steps
    firings: int = 0

    def rise(self, topics: frozenset[str], glsn: int, watermark_us: int) -> None:
        """Note the watermark after a position, if it is a step."""
        steps, value = self.watermarks[topics], shown_ms(watermark_us)
        if value > steps.last:
            steps.add(watermark_step(glsn), value)

    def pass_time(self, glsn: int, cut_us: int) -> None:
        """Note the cut time of a position, if it is a step."""
        cut_ms = cut_us // MILLISECOND
        if cut_ms > self.times.last:
            self.times.add(moment(glsn, PROCESSING_TIME), cut_ms)

    def end(self, glsn: int, firings: int = DRAIN_FIRINGS) -> None:
        """End the input after ``glsn``: every watermark steps to the maximum."""
        self.firings = firings
        for steps in self.watermarks.values():
            if steps.last < MAX_TIME:
                steps.add(moment(glsn, END), MAX_TIME)


def watermark_step(glsn: int) -> int:
    return moment(glsn, EVENT_TIME)


def shown_ms(watermark_us: int) -> int:
    """Convert a watermark to the milliseconds of pipelines."""
    if watermark_us in (NO_WATERMARK, MAX_WATERMARK):
        return NO_TIME if watermark_us == NO_WATERMARK else MAX_TIME
    return watermark_us // MILLISECOND


def is_end(when: int) -> bool:
    return when == moment(glsn_of(when), END)
