"""The time that a call has left. Every public call makes a ``Deadline`` and passes it down."""

from __future__ import annotations

import asyncio

from cutwater.errors import DeadlineExceeded, InvalidArgument

TIMEOUT_SECONDS = 30.0
"""How long a call may take, unless its caller or the creator of the client says otherwise."""
TIMEOUT_SECONDS_MAX = 10_000_000.0
SLOW_SECONDS = 0.5
"""A storage node that owes an answer for this long may hang. That counts against it, and other nodes are asked too."""


def check_timeout(seconds: float) -> float:
    if not isinstance(seconds, int | float):
        raise InvalidArgument(f"a timeout is a number of seconds, not {seconds!r}")
    if not 0 < seconds <= TIMEOUT_SECONDS_MAX:
        raise InvalidArgument(f"a timeout is more than 0 and at most {TIMEOUT_SECONDS_MAX:.0f} seconds, not {seconds}")
    return seconds


def check_wait(seconds: float) -> float:
    """Check a time to wait for something that may come. It may be 0, which means not to wait."""
    if not isinstance(seconds, int | float):
        raise InvalidArgument(f"a timeout is a number of seconds, not {seconds!r}")
    if not 0 <= seconds <= TIMEOUT_SECONDS_MAX:
        raise InvalidArgument(f"this timeout is from 0 to {TIMEOUT_SECONDS_MAX:.0f} seconds, not {seconds}")
    return seconds


class Deadline:
    """The time at which a call must end. ``at`` is in the time of the event loop."""

    __slots__ = ("_loop", "at", "seconds")

    def __init__(self, seconds: float, at: float | None = None) -> None:
        """Set the deadline ``seconds`` from now, or at ``at``, which was computed from them before."""
        self._loop = loop = asyncio.get_running_loop()
        self.seconds = check_timeout(seconds)
        self.at = loop.time() + seconds if at is None else at

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def left(self) -> float:
        """Seconds left; never below 0."""
        return max(0.0, self.at - self._loop.time())

    @property
    def is_over(self) -> bool:
        return self._loop.time() >= self.at

    def left_ms(self, at_most: int | None = None) -> int:
        """Milliseconds left, for a call over the wire, which needs at least one."""
        left = max(1, int(self.left * 1_000))
        return left if at_most is None else min(left, at_most)

    def check(self, what: str) -> None:
        """Raise if the time is over. ``what`` says what was not done, and why if that is known."""
        if self.is_over:
            raise DeadlineExceeded(f"{what}, after {self.seconds:g} s")

    async def pause(self, seconds: float) -> None:
        """Wait, but not beyond the deadline."""
        await asyncio.sleep(min(seconds, self.left))
