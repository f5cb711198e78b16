"""One timer for the deadlines of many calls.

Most calls end long before their deadline, so a timer each would be set and cancelled for nothing. Here a timer runs
to the earliest deadline noted; when it fires, whoever keeps the calls looks through them and says which is the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

PRECISION_SECONDS = 0.005
"""The timer does not fire more often than this, so a deadline may be noticed that much late."""


class DeadlineWatch:
    """Calls ``expire(now)`` when a deadline may have passed. It returns the earliest one that is left, or infinity."""

    __slots__ = ("_expire", "_loop", "_timer", "armed")

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[float], float]) -> None:
        self._loop = loop
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None
        self.armed = inf
        """When it will fire. A later deadline need not be noted."""

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
        now = self._loop.time()
        earliest = self._expire(now)
        if earliest < inf:
            self.note(max(earliest, now + PRECISION_SECONDS))
