"""One timer for the deadlines of many calls.

Most calls end long before their deadline, so a timer for each would be set and cancelled for nothing. Here one timer
runs to the earliest noted deadline. When it fires, ``expire`` ends the calls that are due and returns the next
deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from cutwater.runtime import system

PRECISION_SECONDS = 0.005
"""The timer fires at most once in this time, so a deadline may be noticed this much late."""
PAUSES = 10
"""With very many calls, the timer fires so seldom that ``expire`` takes at most one part in this many of the time."""
PAUSE_SECONDS_MAX = 0.25
"""But it never waits longer than this for a deadline that has passed."""


class DeadlineWatch:
    """Calls ``expire(now)`` when a deadline may have passed.

    ``expire`` returns the earliest deadline that is left, or infinity.
    """

    __slots__ = ("_expire", "_loop", "_timer", "armed")

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[float], float]) -> None:
        self._loop = loop
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None
        self.armed = inf
        """When the timer will fire. A later deadline need not be noted."""

    def note(self, deadline: float) -> None:
        if deadline < self.armed:
            self.stop()
            self.armed = deadline
            self._timer = self._loop.call_at(deadline, self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.armed = inf

    def _fire(self) -> None:
        self._timer, self.armed = None, inf
        now, begun = self._loop.time(), system.thread_time()
        earliest = self._expire(now)
        if earliest < inf:
            # Processor time: a process that is stopped or has to wait for a core spends nothing on ``expire``.
            pause = min(PAUSES * (system.thread_time() - begun), PAUSE_SECONDS_MAX)
            self.note(max(earliest, now + max(PRECISION_SECONDS, pause)))
