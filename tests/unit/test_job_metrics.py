"""What Prometheus reads of a job."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from cutwater.jobs.job_file import Job, JobState
from cutwater.jobs.messages import HeldBy, Progress
from cutwater.jobs.metrics import PREFIX, JobCollector

HELD = HeldBy("orders", 3, 8_500, 1_700.0, 1_690.5)


def progress(batch: int = 7, **more: object) -> Progress:
    known: dict[str, object] = {"lag_records": 5, "watermark_ms": 9_250, "held_by": HELD} | more
    return Progress(  # type: ignore[misc]
        batch, 40, 45, 2.5, lag_seconds=1.5, state_rows=11, state_bytes=2_048, checkpoint_at=1_800.0, **known
    )


def read(collector: JobCollector) -> dict[str, float]:
    """Values by name and labels, without what the names begin with."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    found = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    assert all(name.startswith(PREFIX) for name, _, _ in found)
    return {name.removeprefix(PREFIX): float(value) for name, _, value in found}


def test_all_that_is_known_of_a_job() -> None:
    collector = JobCollector()
    assert read(collector) == {}
    late = {"dropped_late": {"w": 4, "v": 1}, "late_sent": {"v": 6}}
    collector.take(Job("p", "c", JobState.RUNNING, restarts=2), progress(**late))
    holder = '{log_stream="3",pipeline="p",source="orders"}'
    found = read(collector)
    states = {name: value for name, value in found.items() if name.startswith("state{")}
    assert [name for name, value in states.items() if value] == ['state{pipeline="p",state="running"}']
    assert len(states) == len(JobState) - 1
    assert {name: value for name, value in found.items() if name not in states} == {
        'restarts_total{pipeline="p"}': 2,
        'batch{pipeline="p"}': 7,
        'checkpoint_timestamp_seconds{pipeline="p"}': 1_800,
        'glsn{pipeline="p"}': 40,
        'tail_glsn{pipeline="p"}': 45,
        'records_per_second{pipeline="p"}': 2.5,
        'backlog_records{pipeline="p"}': 5,
        'backlog_seconds{pipeline="p"}': 1.5,
        'state_rows{pipeline="p"}': 11,
        'state_bytes{pipeline="p"}': 2_048,
        'watermark_seconds{pipeline="p"}': 9.25,
        f"watermark_held_since_seconds{holder}": 1_700,
        f"watermark_holder_last_entry_seconds{holder}": 1_690.5,
        f"watermark_holder_seconds{holder}": 8.5,
        'late_rows_dropped_total{operator="w",pipeline="p"}': 4,
        'late_rows_dropped_total{operator="v",pipeline="p"}': 1,
        'late_rows_sent_total{operator="v",pipeline="p"}': 6,
    }


def test_what_is_not_known_is_left_out() -> None:
    collector = JobCollector()
    job = Job("p", "c", JobState.RUNNING)
    collector.take(job, None)
    assert not {name for name in read(collector) if not name.startswith(("state{", "restarts_total"))}
    collector.take(job, progress(lag_records=None, watermark_ms=None, held_by=None))
    assert not {name for name in read(collector) if name.startswith(("backlog_records", "watermark"))}
    # A log stream that has said nothing yet has no event time, and still is named.
    collector.take(job, progress(watermark_ms=None, held_by=HeldBy("orders", 3, None, 0.0, 30.0)))
    told = {name.partition("{")[0]: value for name, value in read(collector).items() if name.startswith("watermark")}
    assert told == {"watermark_held_since_seconds": 0, "watermark_holder_last_entry_seconds": 30}


def test_another_holder_takes_the_place_of_the_one_before() -> None:
    collector = JobCollector()
    job = Job("p", "c", JobState.RUNNING)
    collector.take(job, progress())
    collector.take(job, progress(held_by=HeldBy("clicks", 8, None, 1_750.0, 1_740.0)))
    held = {name: value for name, value in read(collector).items() if name.startswith("watermark_held_since")}
    assert held == {'watermark_held_since_seconds{log_stream="8",pipeline="p",source="clicks"}': 1_750}


def test_a_program_that_is_started_again_is_where_it_was() -> None:
    collector = JobCollector()
    job = Job("p", "c", JobState.RUNNING)
    collector.take(job, progress(dropped_late={"w": 4, "v": 2}))
    job.state, job.restarts = JobState.WAITING, 1
    collector.take(job, None)
    found = read(collector)
    assert found['state{pipeline="p",state="waiting to restart"}'] == found['restarts_total{pipeline="p"}'] == 1
    assert found['watermark_seconds{pipeline="p"}'] == 9.25
    job.state = JobState.RUNNING
    collector.take(job, progress(8, watermark_ms=10_000, dropped_late={"w": 5}))
    found = read(collector)
    assert (found['batch{pipeline="p"}'], found['watermark_seconds{pipeline="p"}']) == (8, 10)
    late = [found[f'late_rows_dropped_total{{operator="{uid}",pipeline="p"}}'] for uid in ("w", "v")]
    assert late == [5, 2]
