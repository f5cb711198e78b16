"""Defines windows and triggers as a pipeline describes them, and finds the windows that a time belongs to.

A window is a pair (start, end) of milliseconds; the end does not belong to it. Its last millisecond, end − 1, is the
event time of its result and the watermark that completes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from cutwater.durations import Duration, milliseconds, shown
from cutwater.errors import InvalidArgument
from cutwater.pipeline.clocks.clock_steps import MAX_TIME, NO_TIME

Span: TypeAlias = tuple[int, int]

GLOBAL: Final[Span] = (NO_TIME, MAX_TIME)


class Sliding:
    """Windows of ``size`` that start every ``slide``, shifted by ``offset``."""

    merges = False

    def __init__(self, size: Duration, slide: Duration, offset: Duration = 0) -> None:
        self.size_ms = milliseconds(size, "the size of a window", least=1)
        self.slide_ms = milliseconds(slide, "the slide of a window", least=1)
        self.offset_ms = milliseconds(offset, "the offset of a window", least=None)
        if abs(self.offset_ms) >= self.slide_ms:
            raise InvalidArgument(
                f"the offset of a window is {shown(self.offset_ms)}: it must be smaller than {shown(self.slide_ms)}"
            )

    def spans(self, time: int) -> list[Span]:
        """Return the windows that a time belongs to, earliest first."""
        last = time - (time - self.offset_ms) % self.slide_ms
        first = last - (self.size_ms - 1) // self.slide_ms * self.slide_ms
        return [
            (start, start + self.size_ms)
            for start in range(first, last + 1, self.slide_ms)
            if start + self.size_ms > time
        ]

    def __str__(self) -> str:
        offset = f", offset {shown(self.offset_ms)}" if self.offset_ms else ""
        return f"sliding {shown(self.size_ms)} by {shown(self.slide_ms)}{offset}"


class Tumbling(Sliding):
    """Windows of ``size``, one after the other, shifted by ``offset``."""

    def __init__(self, size: Duration, offset: Duration = 0) -> None:
        super().__init__(size, size, offset)

    def spans(self, time: int) -> list[Span]:
        start = time - (time - self.offset_ms) % self.size_ms
        return [(start, start + self.size_ms)]

    def __str__(self) -> str:
        return f"tumbling {shown(self.size_ms)}{f', offset {shown(self.offset_ms)}' if self.offset_ms else ''}"


class Session:
    """Windows that reach from a key's first record to ``gap`` after its last, and merge if they touch."""

    merges = True

    def __init__(self, gap: Duration) -> None:
        self.gap_ms = milliseconds(gap, "the gap of a session", least=1)

    def spans(self, time: int) -> list[Span]:
        return [(time, time + self.gap_ms)]

    def __str__(self) -> str:
        return f"session {shown(self.gap_ms)}"


class Global:
    """One window per key, forever. It needs a trigger, because no watermark completes it."""

    merges = False

    def spans(self, time: int) -> list[Span]:
        return [GLOBAL]

    def __str__(self) -> str:
        return "global"


Window: TypeAlias = Sliding | Session | Global


@dataclass(frozen=True, slots=True)
class Trigger:
    """Decides when a window emits its result."""

    kind: str
    every: int = 0
    purge: bool = False

    @classmethod
    def watermark(cls) -> Trigger:
        """Emit when the watermark passes the window's end, and again at each late row within the allowed lateness."""
        return cls("watermark")

    @classmethod
    def count(cls, rows: int, purge: bool = False) -> Trigger:
        """Emit after each ``rows`` rows of a window. With ``purge`` the window then starts again."""
        if type(rows) is not int or rows < 1:
            raise InvalidArgument(f"a count trigger has {rows!r} rows: give a number of at least 1")
        return cls("count", rows, purge)

    @classmethod
    def processing_time(cls, every: Duration, purge: bool = False) -> Trigger:
        """Emit at the next multiple of ``every`` of processing time after a row. With ``purge`` the window then starts
        again."""
        return cls("processing time", milliseconds(every, "the interval of a trigger", least=1), purge)

    def __str__(self) -> str:
        if self.kind == "watermark":
            return "at the watermark"
        every = f"{self.every} rows" if self.kind == "count" else f"{shown(self.every)} of processing time"
        return f"every {every}{', purging' if self.purge else ''}"
