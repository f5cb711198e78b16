"""Exports the progress of a job as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cutwater.jobs.job_file import Job, JobState
from cutwater.jobs.messages import Progress

PREFIX = "cutwater_pipeline_"
Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


class _Snapshot(Struct, frozen=True):
    pipeline: str
    state: JobState
    restarts: int
    progress: Progress | None
    dropped: Mapping[str, int]
    sent: Mapping[str, int]


class JobCollector(Collector):
    """Collects the metrics of a job. The supervisor calls ``take``, and the thread of the HTTP listener calls
    ``collect``. A snapshot is replaced as a whole, so the numbers of one answer are consistent."""

    def __init__(self) -> None:
        self._latest: _Snapshot | None = None

    def take(self, job: Job, progress: Progress | None) -> None:
        before = self._latest
        # A restarted program has no progress before its first micro-batch. The pipeline is still where it was: alarms
        # on the watermark must not end because the program fails repeatedly.
        if progress is None and before is not None:
            progress = before.progress
        # Spark observes late rows only in micro-batches with rows; counters must not disappear meanwhile.
        dropped, sent = (before.dropped, before.sent) if before is not None else ({}, {})
        if progress is not None:
            dropped, sent = {**dropped, **progress.dropped_late}, {**sent, **progress.late_sent}
        self._latest = _Snapshot(job.pipeline, job.state, job.restarts, progress, dropped, sent)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. There are none until the program has reported the name of its pipeline."""
        latest = self._latest
        if latest is None:
            return
        name = latest.pipeline
        states = [([name, state.value], latest.state is state) for state in JobState if state is not JobState.LOST]
        yield _family(GaugeMetricFamily, "state", "1 for the state the job is in", ["pipeline", "state"], states)
        text = "Restarts after failures, since the supervisor began"
        yield _family(CounterMetricFamily, "restarts", text, ["pipeline"], [([name], latest.restarts)])
        if latest.progress is not None:
            yield from _progress(name, latest.progress)
        for metric, what, rows in (
            ("late_rows_dropped", "were dropped", latest.dropped),
            ("late_rows_sent", "went to .late", latest.sent),
        ):
            text = f"Rows that were too late and {what}, since the pipeline first began"
            counts = [([name, uid], count) for uid, count in rows.items()]
            yield _family(CounterMetricFamily, metric, text, ["pipeline", "operator"], counts)


def _family(
    kind: type[Family], metric: str, text: str, labels: list[str], values: Iterable[tuple[list[str], float]]
) -> Family:
    family = kind(PREFIX + metric, text, labels=labels)
    for own, value in values:
        family.add_metric(own, value)
    return family


def _progress(name: str, progress: Progress) -> Iterator[Metric]:
    for metric, text, value in (
        ("batch", "The last micro-batch that is done", progress.batch),
        ("checkpoint_timestamp_seconds", "When it was committed, since 1970", progress.checkpoint_at),
        ("glsn", "The position in the log up to which input was read", progress.glsn),
        ("tail_glsn", "The last position of the log", progress.tail),
        ("records_per_second", "Records read, over the last ten seconds", progress.records_per_second),
        ("backlog_records", "Records of its topics that were not read yet", progress.lag_records),
        ("backlog_seconds", "How old the oldest of them is at most", progress.lag_seconds),
        ("state_rows", "Rows in the state store of Spark", progress.state_rows),
        ("state_bytes", "Memory that the state store of Spark uses", progress.state_bytes),
        (
            "watermark_seconds",
            "The lowest watermark of the pipeline: event time, since 1970",
            _seconds(progress.watermark_ms),
        ),
    ):
        if value is not None:
            yield _family(GaugeMetricFamily, metric, text, ["pipeline"], [([name], value)])
    held = progress.held_by
    if held is None:
        return
    # Times of the log's clock, in seconds since 1970.
    for metric, text, value in (
        (
            "watermark_held_since_seconds",
            "Since when the watermark has stood still, held back by this log stream; 0: it never moved",
            held.since,
        ),
        (
            "watermark_holder_last_entry_seconds",
            "The last entry of the log stream that holds the watermark back, or its creation",
            held.spoke_at,
        ),
        (
            "watermark_holder_seconds",
            "The event time that the log stream that holds the watermark back has come to",
            _seconds(held.watermark_ms),
        ),
    ):
        if value is not None:
            labels, own = ["pipeline", "source", "log_stream"], [name, held.topic, str(held.stream)]
            yield _family(GaugeMetricFamily, metric, text, labels, [(own, value)])


def _seconds(time_ms: int | None) -> float | None:
    return None if time_ms is None else time_ms / 1_000
