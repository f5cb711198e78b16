"""Computes the progress of a pipeline from what Spark reports about its last micro-batch and from the end of the
log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from cutwater.client.cluster.catalog_cache import CatalogView
from cutwater.core.read.watermark import MAX_WATERMARK, NO_WATERMARK
from cutwater.errors import CutwaterError
from cutwater.jobs.messages import HeldBy, Progress
from cutwater.pipeline.clocks.clock import ClockSnapshot, OperatorSnapshot, holder_of
from cutwater.pipeline.graph import SourceNode
from cutwater.pipeline.stream import Pipeline
from cutwater.protocol.scan_api import UNKNOWN
from cutwater.spark.options import Where
from cutwater.spark.pipeline.offsets import PipelineOffset
from cutwater.spark.pipeline.operator import dropped_late, late_sent, left_timers
from cutwater.spark.session.worker_connections import link_to
from cutwater.types import GLSN, MILLISECOND

RATE_SECONDS = 10.0
"""The rate is measured over this many seconds."""
LOOK_SECONDS_MAX = 5.0


class Watcher:
    def __init__(self, pipeline: Pipeline, where: Where) -> None:
        self._topics = [node.topic for node in pipeline.graph.of_type(SourceNode)]
        self._link = link_to(where)
        self._counted: list[tuple[float, int]] = []
        """Times, and how many records had been read at each, oldest first."""
        self._late: dict[str, int] = {}
        self._sent: dict[str, int] = {}

    def look(self, told: Mapping[str, Any] | None) -> Progress | None:
        """Return the progress. ``told`` is Spark's report. Returns None if nothing is known yet, or if the log does not
        answer."""
        offset = _offset(told)
        if told is None or offset is None:
            return None
        try:
            view = self._link.loop.run(self._link.ranges.view(LOOK_SECONDS_MAX))
            read, lag = self._counts(view, GLSN(offset.glsn))
        except CutwaterError:
            return None
        # While nothing happens, Spark reports no observed metrics.
        self._late, self._sent = dropped_late(told) or self._late, late_sent(told) or self._sent
        now = time.time()
        clock_ms = offset.clock.time_ms if offset.clock is not None else 0
        states = told.get("stateOperators") or []
        batch = int(told["batchId"])
        return Progress(
            batch=batch,
            # Without input, Spark reports the micro-batch that will be next.
            done=batch if "addBatch" in (told.get("durationMs") or {}) else batch - 1,
            glsn=offset.glsn,
            tail=int(view.catalog.high_watermark),
            records_per_second=self._rate(now, read),
            lag_records=lag,
            lag_seconds=max(0.0, now - clock_ms / 1_000) if lag else 0.0,
            watermark_ms=_watermark(offset),
            held_by=_holder(offset),
            state_rows=sum(int(state["numRowsTotal"]) for state in states),
            state_bytes=sum(int(state["memoryUsedBytes"]) for state in states),
            checkpoint_at=_committed_at(told),
            dropped_late=self._late,
            left_timers=left_timers(told),
            late_sent=self._sent,
        )

    def _counts(self, view: CatalogView, glsn: GLSN) -> tuple[int, int | None]:
        """Return how many records of the topics are at or below a position, and how many are above it."""
        read, lag, is_known = 0, 0, True
        for topic in self._topics:
            for info in view.streams_of(view.topics[topic].topic):
                end, done = int(info.committed_end), int(info.committed_end)
                if info.created_at >= glsn:
                    done = 0
                elif info.last_glsn > glsn:
                    answer = self._link.loop.run(self._link.ranges.measure(info, [glsn], LOOK_SECONDS_MAX))
                    is_known = is_known and answer.llsns[0] != UNKNOWN
                    done = max(0, int(answer.llsns[0]))
                read, lag = read + done, lag + end - done
        return read, lag if is_known else None

    def _rate(self, now: float, read: int) -> float:
        self._counted.append((now, read))
        while len(self._counted) > 2 and self._counted[1][0] <= now - RATE_SECONDS:
            self._counted.pop(0)
        since, before = self._counted[0]
        return max(0.0, (read - before) / (now - since)) if now > since else 0.0


def _offset(told: Mapping[str, Any] | None) -> PipelineOffset | None:
    sources = told.get("sources") if told else None
    end = sources[0].get("endOffset") if sources else None
    if end is None:
        return None
    return PipelineOffset.of(msgspec.json.decode(end) if isinstance(end, str) else end)


def _watermark(offset: PipelineOffset) -> int | None:
    """Return the lowest watermark of the pipeline's operators. Operators without a clock do not count."""
    least = min((own.watermark for own in _operators(offset)), default=NO_WATERMARK)
    return None if least in (NO_WATERMARK, MAX_WATERMARK) else least // MILLISECOND


def _operators(offset: PipelineOffset) -> list[OperatorSnapshot]:
    """Return the operators that have a clock."""
    if offset.clock is None:
        return []
    with_clock = set(offset.clock.strategies)
    return [own for own in offset.clock.operators if with_clock.intersection(own.topics)]


def _holder(offset: PipelineOffset) -> HeldBy | None:
    """Return the log stream that holds the lowest watermark of the pipeline back."""
    if not isinstance(offset.clock, ClockSnapshot) or offset.ended:
        return None
    lowest = min(_operators(offset), key=lambda own: (own.watermark, -len(own.topics)), default=None)
    found = None if lowest is None else holder_of(offset.clock, lowest.topics)
    if found is None:
        return None
    own_ms = None if found.watermark == NO_WATERMARK else found.watermark // MILLISECOND
    return HeldBy(found.topic, found.stream, own_ms, found.since_us / 1e6, found.spoke_us / 1e6)


def _committed_at(told: Mapping[str, Any]) -> float:
    began = datetime.fromisoformat(told["timestamp"]).timestamp()
    return began + int(told.get("batchDuration") or 0) / 1_000
