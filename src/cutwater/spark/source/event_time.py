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
from numpy.typing import NDArray

from cutwater.core.read.watermark import NO_WATERMARK, Punctuated, Strategy, lag_us
from cutwater.types import GLSN

Numbers: TypeAlias = NDArray[np.int64]


SeenWatermarks: TypeAlias = Numbers
"""Five rows, with a column for each batch of one log stream: its first GLSN, the watermark before the batch, a lower
bound of the watermark after its first record, the least watermark of other log streams and topics while it was
committed, and the log stream's own watermark before it."""


def seen_watermarks(batches: Sequence[tuple[int, int, int, int, int]]) -> SeenWatermarks:
    found: Numbers = np.array(batches, np.int64).reshape(-1, 5).T
    return found


def between(seen: SeenWatermarks, first: GLSN, last: GLSN) -> SeenWatermarks:
    """Return the batches with positions in a range. The first one may begin before the range."""
    start, stop = np.searchsorted(seen[0], (first, last), side="right").tolist()
    return seen[:, max(0, start - 1) : stop]


def seen_by(
    times: Numbers, first_glsn: Numbers, counts: Numbers, seen: SeenWatermarks, strategy: Strategy
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the watermark that each record of consecutive batches of one log stream saw, and a mask of the records
    that saw none. ``times`` are the event times of all their records."""
    # A trim may have cut off the first part of a batch, so the planner may know it by a later position.
    at = np.searchsorted(seen[0], first_glsn + counts - 1, side="right") - 1
    is_known = (at >= 0) & (seen[0][at] >= first_glsn)
    assert is_known.all(), "the planner has walked over every batch that a task reads"
    before, own_before = seen[1][at], seen[4][at]
    floor, others = np.repeat(seen[2][at], counts), np.repeat(seen[3][at], counts)
    if isinstance(strategy, Punctuated):
        own = np.repeat(own_before, counts)
    else:
        # A log stream never falls behind its own past, so one running maximum serves all batches.
        own = _running(_less(times, lag_us(strategy)), int(own_before[0]))
    # A record sees the watermark after the record before it. The first record of a batch sees the one before the batch.
    found = others
    np.minimum(own[:-1], others[1:], out=found[1:])
    np.maximum(found, floor, out=found)
    found[np.cumsum(counts) - counts] = before
    return found, found == NO_WATERMARK


def _less(times: Numbers, lag: int) -> Numbers:
    """Subtract the lag. Distant times do not overflow 64 bits."""
    found: Numbers = np.maximum(times, NO_WATERMARK + lag)
    found -= lag
    return found


def _running(values: Numbers, initial: int) -> Numbers:
    """Return the running maximum."""
    found: Numbers = np.maximum(np.maximum.accumulate(values), initial)
    return found
