"""Limits a rate: the bucket of one limit at one server. Pure; time is an argument.

The bucket fills at its rate and holds what comes in a moment. Something may pass while the bucket is not in debt, and
is paid for then, if necessary with a debt. So a request that is larger than the bucket passes, too, and later ones wait
until it is paid for.
"""

from __future__ import annotations

from math import inf

BURST_SECONDS = 0.25
"""How much of its rate a bucket holds."""


class RateBucket:
    """``rate`` is per second. Nothing passes while it is 0."""

    __slots__ = ("_at", "_balance", "rate")

    def __init__(self, now: float) -> None:
        self.rate = 0.0
        self._balance = 0.0
        self._at = now

    def _go_on(self, now: float) -> None:
        # A clock that goes back must not empty the bucket, nor fill it twice.
        passed = now - self._at
        if passed > 0:
            self._balance = min(self._balance + passed * self.rate, self.rate * BURST_SECONDS)
            self._at = now

    def set_rate(self, rate: float, now: float) -> None:
        self._go_on(now)
        self.rate = rate
        self._balance = min(self._balance, rate * BURST_SECONDS)

    def may_pass(self, now: float) -> bool:
        self._go_on(now)
        return self.rate > 0 and self._balance >= 0

    def take(self, amount: float, now: float) -> None:
        self._go_on(now)
        self._balance -= amount

    def wait_seconds(self, ahead: float, now: float) -> float:
        """Return how long something waits that passes after ``ahead``."""
        self._go_on(now)
        owed = ahead - self._balance
        if self.rate <= 0:
            return inf
        return max(0.0, owed / self.rate)

    def debt(self, now: float) -> float:
        self._go_on(now)
        return max(0.0, -self._balance)
