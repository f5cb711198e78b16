"""What a storage node counts: plain numbers, changed where things happen, read by whoever shows them.

Everything here counts batches, calls and syncs, never records. A number is changed by one thread only; others may read
it at any time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from msgspec import Struct, field

BOUNDS_SECONDS = (0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram:
    """How many durations were at most each of the bounds; the last count is of those above all of them."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.seconds += seconds


class Counters(Struct):
    """Since the start of the process; changed on the event loop only."""

    appends: int = 0
    append_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """How appends ended: ``acknowledged``, or the code of the error."""
    entries_refused: int = 0
    """Entries of the replica before in the chain that were not taken."""
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
    """What clients staged, ever; how much of it is here now is known elsewhere."""
    parts_staged: int = 0
    parts_copied: int = 0
    """Those that were copied from another holder, in order to publish them."""
    parts_dropped: int = 0
    groups_published: int = 0
    """Given to a replica here, to the last entry."""
    groups_failed: int = 0
