"""Decides whether a disk is fast enough to sync it in the calling thread.

Handing a sync to another thread, and being told when it is done, takes two wake-ups. Each takes about as long as half a
sync of a good disk. So a thread that has nothing else to do syncs by itself, as long as the disk answers at once. A
slow disk is left to other threads for a while, so that nothing else has to wait for it. A single slow sync does not
count; every disk has them.
"""

from __future__ import annotations

from cutwater.runtime import system

SLOW_SECONDS = 0.002
"""Syncs that take longer than this on average should not make others wait."""
REST_SECONDS = 0.5
"""How long a slow disk is left to other threads before it is tried again."""
MEMORY = 8
"""The average is over about this many syncs."""


class Pace:
    """Sync latency of one disk, as one thread sees it."""

    def __init__(self) -> None:
        self._average = self._slow_until = 0.0

    @property
    def is_quick(self) -> bool:
        return system.monotonic() >= self._slow_until

    def observe(self, begun: float) -> None:
        """Note a sync that has just ended and began at this monotonic time."""
        now = system.monotonic()
        self._average += (now - begun - self._average) / MEMORY
        if self._average > SLOW_SECONDS:
            self._average, self._slow_until = 0.0, now + REST_SECONDS
