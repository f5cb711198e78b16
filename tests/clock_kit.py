"""Reports batches to a clock record by record."""

from __future__ import annotations

from collections.abc import Sequence

from cutwater.core.read.watermark import WatermarkClock
from cutwater.types import GLSN, CutTime, LogStreamId


def report(
    clock: WatermarkClock,
    lsid: LogStreamId,
    first: int,
    time: CutTime,
    times: Sequence[int],
    declared: int | None = None,
    *,
    idle: bool = False,
) -> list[int]:
    """The watermark that each record sees. What a batch declares takes effect at its last record."""
    seen = []
    for i, event_time in enumerate(times):
        is_last = i == len(times) - 1
        seen.append(clock.watermark)
        place = (lsid, GLSN(first + i), 1, time)
        clock.seen(*place, event_time, declared if is_last else None, idle=idle and is_last)
    return seen
