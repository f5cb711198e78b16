"""Whether a disk is so quick that waiting for it costs less than asking a thread to.

To have a thread sync, and to be told when it is done, takes two wake-ups, each about as long as half a sync of a good
disk. So whoever has nothing else to do syncs by itself, as long as the disk answers at once. One that does not is left
to threads for a while: then others are not kept waiting. A single slow sync tells nothing; every disk has them.
"""

from __future__ import annotations

import time

SLOW_SECONDS = 0.002
"""Syncs that take longer than this on average should not keep anyone else waiting."""
REST_SECONDS = 0.5
"""How long a disk that is slow is left to threads, before it is tried again."""
MEMORY = 8
"""About how many syncs the average is over."""


class Pace:
    """Of one disk, as one thread sees it."""

    def __init__(self) -> None:
        self._average = self._slow_until = 0.0

    @property
    def is_quick(self) -> bool:
        return time.monotonic() >= self._slow_until

    def observe(self, begun: float) -> None:
        """Something that was begun at this monotonic time has just been synced."""
        now = time.monotonic()
        self._average += (now - begun - self._average) / MEMORY
        if self._average > SLOW_SECONDS:
            self._average, self._slow_until = 0.0, now + REST_SECONDS
