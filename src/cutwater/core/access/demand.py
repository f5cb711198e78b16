"""Estimates the rate that clients need at one server, from what they used. Pure; time is an argument.

Use comes in lumps: a batch of several megabytes may be all that a server gets in seconds. The estimate must not swing
with each of them, since what one server gets more, another one loses before it arrives. And it must fall soon when the
use ends, since others wait for that share.
"""

from __future__ import annotations

from math import exp

MEMORY_SECONDS = 5.0
"""The use of so long ago counts little."""
LUMP_SECONDS = 0.5
"""What follows so soon belongs to the same lump."""
YOUNG_SECONDS = 1.5
"""The first use is taken as that of so long."""


class Demand:
    """The use per second: an average over some seconds, and never more than the last lump in the time since it."""

    __slots__ = ("_at", "_lump", "_since", "_sum")

    def __init__(self) -> None:
        self._sum = self._lump = 0.0
        self._at = self._since = 0.0

    def note(self, amount: float, now: float) -> None:
        passed = max(0.0, now - self._at)
        before = self._sum * exp(-passed / MEMORY_SECONDS)
        if before < amount / MEMORY_SECONDS:
            # What was before does not matter: the use begins.
            self._since = now
        self._sum = before + amount
        self._lump = self._lump * exp(-passed / LUMP_SECONDS) + amount
        self._at = max(self._at, now)

    def rate(self, now: float) -> float:
        passed = max(0.0, now - self._at)
        age = max(YOUNG_SECONDS, now - self._since)
        average = self._sum * exp(-passed / MEMORY_SECONDS) / (MEMORY_SECONDS * (1 - exp(-age / MEMORY_SECONDS)))
        return average if passed <= LUMP_SECONDS else min(average, self._lump / passed)
