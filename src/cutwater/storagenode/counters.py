"""Counters of a storage node: plain numbers, changed where events happen, and read by metrics and status.

They count batches, calls and syncs, never records. Only one thread changes a number; other threads may read it at any
time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from msgspec import Struct, field

BOUNDS_SECONDS = (0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram:
    """Counts durations by the smallest bound that they do not exceed; the last count is of those above all bounds."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.seconds += seconds


class NodeCounters(Struct):
    """Counts since the process started; changed on the event loop only."""

    appends: int = 0
    append_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """How appends ended: ``acknowledged``, or the code of the error."""
    entries_refused: int = 0
    """Entries from the previous replica of the chain that were refused."""
    reports: int = 0
    commits: int = 0
    reads: int = 0
    read_bytes: int = 0
    syncs_served: int = 0
    sync_sent_bytes: int = 0
    syncs_begun: int = 0
    sync_received_bytes: int = 0
    damage_met: int = 0
    entries_repaired: int = 0
    contexts_repaired: int = 0
    staged_bytes: int = 0
    """Bytes that clients staged since the start. ``Staging`` knows how many are held now."""
    parts_staged: int = 0
    parts_copied: int = 0
    """Parts that were copied from another holder in order to publish them."""
    parts_dropped: int = 0
    groups_published: int = 0
    """Groups that were given to a replica here completely."""
    groups_failed: int = 0
