"""What ``cutwater pipeline describe`` says of event time."""

from __future__ import annotations

from cutwater.cli.io.pipeline_output import held_line, late_line
from cutwater.jobs.messages import HeldBy, Progress
from cutwater.pipeline.clocks.clock import LogClock
from cutwater.pipeline.clocks.watermarks import Watermark
from cutwater.spark.job_progress import _holder, _watermark
from cutwater.spark.pipeline.offsets import PipelineOffset


def progress(**more: object) -> Progress:
    return Progress(1, 2, 3, 0.0, 0, 0.0, None, 0, 0, 0.0, **more)  # type: ignore[arg-type]


def test_the_log_stream_that_holds_the_watermark_back_is_named() -> None:
    assert held_line(progress()) == "nothing holds the watermark back"
    held = HeldBy("orders", 3, 1_000, 60.0, 30.0)
    assert held_line(progress(held_by=held)) == (
        "log stream 3 of 'orders' holds the watermark back, which has stood still since 1970-01-01 00:01:00 UTC: it "
        "has come to 1970-01-01 00:00:01, and its last entry is of 1970-01-01 00:00:30 UTC"
    )
    silent = held_line(progress(held_by=HeldBy("orders", 3, None, 0.0, 30.0)))
    assert "which has not moved yet: it has said nothing" in silent


def test_late_rows_are_dropped_or_sent() -> None:
    assert late_line(progress()) == "no row dropped"
    assert late_line(progress(dropped_late={"w": 1}, late_sent={"v": 2})) == (
        "1 row by 'w' dropped; 2 rows by 'v' sent to .late"
    )


def test_progress_tells_the_holder_of_the_lowest_clock() -> None:
    sources = {"a": Watermark.ascending(), "b": Watermark.ascending()}
    clock = LogClock(sources, [frozenset({"a"}), frozenset({"a", "b"})])
    clock.add_stream("a", 7, 0)
    clock.add_stream("b", 8, 0)
    clock.batch("a", 7, 1, 1, 2_000_000, 100_000, None)
    clock.batch("b", 8, 2, 1, 3_000_000, 50_000, None)
    clock.batch("a", 7, 3, 1, 4_000_000, 120_000, None)
    offset = PipelineOffset(3, 1, clock.snapshot())
    assert _watermark(offset) == 49
    assert _holder(offset) == HeldBy("b", 8, 49, 3.0, 3.0)
    clock.tick(4, 90_000_000)
    assert _holder(PipelineOffset(4, 1, clock.snapshot())) is None
    assert _holder(PipelineOffset(4, 1, clock.snapshot(), ended=True)) is None


def test_operators_without_a_clock_do_not_hide_the_watermark_of_the_others() -> None:
    clock = LogClock({"a": Watermark.ascending(), "rules": None}, [frozenset({"a"}), frozenset({"rules"})])
    clock.add_stream("a", 7, 0)
    clock.batch("a", 7, 1, 1, 2_000_000, 100_000, None)
    clock.batch("rules", 9, 2, 1, 3_000_000, 500_000, None)
    offset = PipelineOffset(2, 1, clock.snapshot())
    assert _watermark(offset) == 99
    assert _holder(offset) == HeldBy("a", 7, 99, 2.0, 2.0)
