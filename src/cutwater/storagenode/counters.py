"""Counters of a storage node: plain numbers, changed where events happen, and read by metrics and status.

They count batches, calls and syncs, never records. Only one thread changes a number; other threads may read it at any
time. ``metrics`` exports them, with their annotations as help texts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Annotated

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

    appends: Annotated[int, "Batches that clients sent to replicas here as heads"] = 0
    append_bytes: Annotated[int, "Bytes of those batches"] = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """How appends ended: ``acknowledged``, or the code of the error."""
    entries_refused: Annotated[int, "Entries of other heads that were not taken"] = 0
    reports: Annotated[int, "Reports to the metadata repository"] = 0
    commits: Annotated[int, "Commits that the metadata repository sent"] = 0
    reads: Annotated[int, "Ranges that were read"] = 0
    read_bytes: Annotated[int, "Bytes of those ranges"] = 0
    syncs_served: Annotated[int, "Rounds of sync in which this node was the source"] = 0
    sync_sent_bytes: Annotated[int, "Bytes of entries sent to learners"] = 0
    syncs_begun: Annotated[int, "Rounds of sync in which this node learned"] = 0
    sync_received_bytes: Annotated[int, "Bytes received while learning"] = 0
    damage_met: Annotated[int, "Times that something was found damaged"] = 0
    entries_repaired: Annotated[int, "Damaged entries replaced by a copy of a peer's"] = 0
    contexts_repaired: Annotated[int, "Damaged commit contexts replaced by a copy of a peer's"] = 0
    repairs_failed: Annotated[int, "Times that damage could not be repaired; each place is tried again"] = 0
    parts_staged: Annotated[int, "Parts that were staged completely"] = 0
    parts_copied: Annotated[int, "Staged parts that were copied from another holder"] = 0
    parts_dropped: Annotated[int, "Staged parts that were not needed any more"] = 0
    stage_bytes: Annotated[int, "Bytes that were staged"] = 0
    groups_published: Annotated[int, "Groups that were handed to a replica here as head"] = 0
    groups_failed: Annotated[int, "Times that a group could not be handed over"] = 0
