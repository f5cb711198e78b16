"""Computes the watermark that each record of a task saw, by the rule of ``core.read.watermark``, for whole columns at
once.

The planner walks the headers of all log streams of a query (``log_walk``). It gives each task four numbers for each
batch of its log stream. From these and the event times of its records, a task computes what each record saw. Each topic
is a source, and the query is an operator that reads all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cutwater.core.read.watermark import NO_WATERMARK, Punctuated, Strategy, lag_us
from cutwater.types import GLSN

Numbers: TypeAlias = NDArray[np.int64]


class SeenWatermarks(Struct, frozen=True):
    """Numbers for each batch of one log stream, found by its first GLSN: the watermark before the batch, a lower bound
    of the watermark after its first record, the least watermark of other log streams and topics while it was committed,
    and the log stream's own watermark before it."""

    first_glsn: Numbers
    before: Numbers
    floor: Numbers
    others: Numbers
    own: Numbers

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int, int]]) -> SeenWatermarks:
        return cls(*np.array(rows, np.int64).reshape(-1, 5).T)

    def between(self, first: GLSN, last: GLSN) -> SeenWatermarks:
        """Return the batches with positions in a range. The first one may begin before the range."""
        start = max(0, int(np.searchsorted(self.first_glsn, first, side="right")) - 1)
        stop = int(np.searchsorted(self.first_glsn, last, side="right"))
        columns = (self.first_glsn, self.before, self.floor, self.others, self.own)
        return SeenWatermarks(*(column[start:stop] for column in columns))


def seen_by(
    times: Numbers, first_glsn: Numbers, counts: Numbers, seen: SeenWatermarks, strategy: Strategy
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the watermark that each record of consecutive batches of one log stream saw, and a mask of the records
    that saw none. ``times`` are the event times of all their records."""
    # A trim may have cut off the first part of a batch, so the planner may know it by a later position.
    at = np.searchsorted(seen.first_glsn, first_glsn + counts - 1, side="right") - 1
    is_known = (at >= 0) & (seen.first_glsn[at] >= first_glsn)
    assert is_known.all(), "the planner has walked over every batch that a task reads"
    floor, others = (np.repeat(column[at], counts) for column in (seen.floor, seen.others))
    if isinstance(strategy, Punctuated):
        own = np.repeat(seen.own[at], counts)
    else:
        # A log stream never falls behind its own past, so one running maximum serves all batches.
        own = _running(_less(times, lag_us(strategy)), int(seen.own[at[0]]))
    # A record sees the watermark after the record before it. The first record of a batch sees the one before the batch.
    found = others
    np.minimum(own[:-1], others[1:], out=found[1:])
    np.maximum(found, floor, out=found)
    found[np.cumsum(counts) - counts] = seen.before[at]
    return found, found == NO_WATERMARK


def _less(times: Numbers, lag: int) -> Numbers:
    """Subtract the lag. Distant times do not overflow 64 bits."""
    found: Numbers = np.maximum(times, NO_WATERMARK + lag)
    found -= lag
    return found


def _running(values: Numbers, initial: int) -> Numbers:
    """Return the running maximum."""
    # Times mostly rise already. Checking this takes a tenth of the time that it saves.
    is_rising = bool((values[1:] >= values[:-1]).all())
    found: Numbers = np.maximum(values if is_rising else np.maximum.accumulate(values), initial)
    return found
