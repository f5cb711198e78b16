"""Shows the progress of a pipeline: a line that is updated on a terminal, lines of JSON elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

import msgspec

from cutwater.cli.framework.exit_codes import Settings
from cutwater.core.text import counted
from cutwater.jobs.job_file import Job, JobState
from cutwater.jobs.messages import Progress
from cutwater.pipeline.clocks.clock_steps import MAX_TIME, NO_TIME

QUIET_SECONDS = 10.0
"""Lines of JSON come for each micro-batch, and otherwise at this interval."""
_CLEAR = "\r\x1b[K"
_HOW_TO_END = (
    "  Ctrl-C stops it. With --restart none the first failure ends it, with --restart fixed:attempts=3 the fourth."
)


class Display:
    """Shows changes and progress of a job as they happen."""

    def __init__(self) -> None:
        self._is_live = sys.stdout.isatty() and not Settings.is_json
        self._state: JobState | None = None
        self._batch, self._shown_at = -1, 0.0
        self._has_waited = False

    def show(self, job: Job, progress: Progress | None) -> None:
        if job.state is not self._state:
            self._state = job.state
            self._change(job)
        elif progress is not None:
            self._progress(job, progress)

    def _change(self, job: Job) -> None:
        if not self._is_live:
            told = {"pipeline": job.pipeline, "state": job.state, "at": job.since, "checkpoint": job.checkpoint}
            told |= {"pid": job.pid, "driver": job.driver, "jvm": job.jvm, "restarts": job.restarts}
            self._print_json(told | {"last_error": job.last_error})
            return
        more = ""
        if job.state is JobState.WAITING:
            more = f", restart {job.restarts}" + (f": {job.last_error.message}" if job.last_error else "")
            if not self._has_waited:
                self._has_waited, more = True, f"{more}\n{_HOW_TO_END}"
        print(f"{_CLEAR}{clock(job.since)} {job.pipeline}: {job.state}{more}", flush=True)

    def _progress(self, job: Job, progress: Progress) -> None:
        if self._is_live:
            print(f"{_CLEAR}{progress_line(progress)}", end="", flush=True)
            return
        now = time.monotonic()
        if progress.batch != self._batch or now - self._shown_at >= QUIET_SECONDS:
            self._batch, self._shown_at = progress.batch, now
            self._print_json({"pipeline": job.pipeline, "progress": progress})

    def _print_json(self, told: object) -> None:
        print(msgspec.json.encode(told).decode(), flush=True)

    def close(self) -> None:
        if self._is_live:
            print(_CLEAR, end="", flush=True)


def progress_line(progress: Progress) -> str:
    """Format progress in less than the width of a screen."""
    lag = "?" if progress.lag_records is None else f"{progress.lag_records:,}"
    ago = max(0.0, time.time() - progress.checkpoint_at)
    return (
        f"{progress.records_per_second:,.0f} rows/s  lag {lag} rows, {progress.lag_seconds:.1f} s  "
        f"watermark {time_of_ms(progress.watermark_ms)}  state {size(progress.state_bytes)}  "
        f"checkpoint {progress.batch}, {ago:.0f} s ago"
    )


def held_line(progress: Progress) -> str:
    """Describe the log stream that holds the watermark back, and since when."""
    held = progress.held_by
    if held is None:
        return "nothing holds the watermark back"
    since = f"which has stood still since {moment(held.since)} UTC" if held.since else "which has not moved yet"
    said = "it has said nothing" if held.watermark_ms is None else f"it has come to {time_of_ms(held.watermark_ms)}"
    return (
        f"log stream {held.stream} of {held.topic!r} holds the watermark back, {since}: {said}, and its last entry "
        f"is of {moment(held.spoke_at)} UTC"
    )


def late_line(progress: Progress) -> str:
    dropped = [f"{counted(rows, 'row')} by {uid!r}" for uid, rows in progress.dropped_late.items()]
    sent = [f"{counted(rows, 'row')} by {uid!r}" for uid, rows in progress.late_sent.items()]
    more = f"; {', '.join(sent)} sent to .late" if sent else ""
    return f"{', '.join(dropped) or 'no row'} dropped{more}"


def time_of_ms(value: int | None) -> str:
    """Format an event time, which may be any number."""
    if value is None or value <= NO_TIME:
        return "-"
    if value >= MAX_TIME:
        return "the end of time"
    try:
        return datetime.fromtimestamp(value / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{value} ms"


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1_024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1_024
    return f"{value:.1f} TiB"


def clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S")


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"
