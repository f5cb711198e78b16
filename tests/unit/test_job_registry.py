"""The fold of decisions about jobs: every transition of jobs, assignments and operations."""

from __future__ import annotations

import msgspec
import pytest
from job_kit import CHECKPOINT, FAILURE, J1, J2, OTHER_PROGRAM, SPEC, Jobs, identifier
from msgspec import structs

from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs import job_registry
from cutwater.core.jobs.job_records import (
    ATTEMPTS_KEPT,
    VERSIONS_MAX,
    CheckpointPointer,
    JobPhase,
    JobSavepoint,
    ProgramPlace,
    RunEnd,
    StartPoint,
)
from cutwater.core.jobs.job_registry import JobRegistry, JobsSnapshot
from cutwater.core.jobs.job_spec import DesiredState, JobSpec
from cutwater.core.jobs.leading.job_answers import summary_of
from cutwater.core.jobs.operations import (
    IDEMPOTENCY_KEPT_US,
    IdempotencyKey,
    OperationError,
    OperationKind,
    OperationState,
    OperationStep,
)
from cutwater.types import GLSN, BatchNumber, CutTime, JobEpoch

NEW = structs.replace(SPEC, program=OTHER_PROGRAM)
UPGRADE, ROLLBACK = OperationKind.UPGRADE, OperationKind.ROLLBACK
STOP, START, COME_UP = OperationStep.STOP, OperationStep.START, OperationStep.COME_UP


def running(*, is_up: bool = True) -> Jobs:
    """One job that runs on agent a; agent b has nothing to do."""
    jobs = Jobs()
    jobs.register("a", 1)
    jobs.register("b", 2)
    jobs.submit()
    jobs.run()
    if is_up:
        jobs.first_batch()
    return jobs


def upgrade(
    jobs: Jobs, spec: JobSpec = NEW, *, version: int = 2, steps: tuple[OperationStep, ...] | None = None
) -> str:
    before = jobs.job().version
    return jobs.begin(UPGRADE, spec=spec, version=version, version_before=before, was_running=True, steps=steps)


def test_a_job_is_submitted_assigned_and_runs() -> None:
    jobs = Jobs()
    jobs.register()
    submit = jobs.submit()
    assert jobs.job().phase is JobPhase.WAITING
    assert list(jobs.state.waiting) == [J1]
    jobs.assign()
    assert jobs.job().phase is JobPhase.STARTING
    assert not jobs.state.waiting
    assert jobs.operation(submit).state is OperationState.RUNNING
    jobs.attempt()
    assert jobs.job().phase is JobPhase.RUNNING
    assert jobs.operation(submit).state is OperationState.DONE
    assert not jobs.job().operation
    assert jobs.job().start == StartPoint(CHECKPOINT)
    assert [job.name for job in jobs.state.on_agent("a")] == ["fraud"]
    assert jobs.state.used_slots("a") == 1


def test_an_attempt_that_fails_is_followed_by_another_in_the_same_epoch() -> None:
    jobs = running()
    epoch = jobs.epoch()
    jobs.apply(j.EndAttempt(J1, epoch, 1, RunEnd.FAILED, FAILURE))
    assert jobs.job().phase is JobPhase.RESTARTING
    assert jobs.job().failure == FAILURE
    jobs.attempt(number=2)
    assert jobs.job().phase is JobPhase.RUNNING
    assert jobs.epoch() == epoch
    assert [(one.number, one.end) for one in jobs.job().attempts] == [(1, RunEnd.FAILED), (2, None)]
    for number in range(3, 20):
        jobs.attempt(number=number)
    assert len(jobs.job().attempts) == ATTEMPTS_KEPT


def test_a_lost_agent_loses_its_jobs_and_the_next_epoch_is_higher() -> None:
    jobs = running()
    first = jobs.epoch()
    jobs.apply(j.ExpireAgent("a", 1))
    assert jobs.job().phase is JobPhase.WAITING
    assert jobs.job().attempts[-1].end is RunEnd.LOST
    assert jobs.refuses(j.AssignJob(J1, "a", 1, JobEpoch(9))) == "this session of the agent is over"
    assert jobs.refuses(j.AssignJob(J1, "b", 2, first)) == "the epoch was given out before"
    assert jobs.run(agent="b") > first
    for late in (
        j.BeginAttempt(J1, first, 2, CHECKPOINT),
        j.EndAttempt(J1, first, 1, RunEnd.FAILED),
        j.EndAssignment(J1, first, RunEnd.FAILED),
        j.NoteCheckpoint(J1, first, CHECKPOINT),
        j.NoteFirstBatch(J1, first, BatchNumber(0)),
        j.ReleaseJob(J1, first),
    ):
        assert jobs.refuses(late) == "the assignment is over"
    assert jobs.refuses(j.ExpireAgent("a", 1)) == "this session of the agent is over"


def test_epochs_are_given_once_over_all_jobs() -> None:
    jobs = running()
    jobs.submit("other")
    assert jobs.refuses(j.AssignJob(jobs.job("other").number, "b", 2, jobs.epoch())) == "the epoch was given out before"
    assert jobs.assign("other", "b") == jobs.epoch() + 1


def test_a_new_session_takes_over_the_name_and_the_jobs_of_the_earlier_one_move() -> None:
    jobs = running()
    jobs.register("a", 1)
    assert jobs.job().phase is JobPhase.RUNNING, "the same session again changes nothing"
    jobs.register("a", 7)
    assert jobs.job().phase is JobPhase.WAITING
    assert jobs.refuses(j.AssignJob(J1, "a", 1, JobEpoch(9))) == "this session of the agent is over"
    jobs.apply(j.ExpireAgent("a", 7))
    jobs.register("a", 7)
    assert jobs.state.agents["a"].is_alive


def test_draining_outlives_a_restart_and_an_agent_is_removed_only_when_dead() -> None:
    jobs = running()
    jobs.apply(j.DrainAgent("a", True), j.ReleaseJob(J1, jobs.epoch()))
    assert jobs.job().phase is JobPhase.STOPPING
    jobs.end(RunEnd.RELEASED)
    assert jobs.job().phase is JobPhase.WAITING
    jobs.register("a", 3)
    assert jobs.state.agents["a"].is_draining
    assert jobs.refuses(j.RemoveAgent("a")) == "the agent is alive"
    jobs.apply(j.ExpireAgent("a", 3), j.RemoveAgent("a"))
    assert "a" not in jobs.state.agents
    assert jobs.refuses(j.DrainAgent("a", True)) == "there is no such agent"


def test_a_checkpoint_that_only_one_agent_reaches_pins_the_job() -> None:
    jobs = Jobs()
    jobs.register("a", 1, is_shared=False)
    jobs.register("b", 2)
    jobs.submit()
    jobs.run()
    assert jobs.job().pinned_to == "a"
    jobs.apply(j.ExpireAgent("a", 1))
    jobs.run(agent="b")
    assert jobs.job().pinned_to == ""


@pytest.mark.parametrize("end", [RunEnd.FINISHED, RunEnd.FAILED])
def test_a_job_that_ended_by_itself_waits_for_no_agent(end: RunEnd) -> None:
    jobs = running()
    jobs.end(end, FAILURE if end is RunEnd.FAILED else None)
    assert jobs.job().phase.value == end.value
    assert not jobs.state.waiting
    jobs.begin(OperationKind.START)
    assert jobs.job().phase is JobPhase.WAITING
    assert jobs.job().failure is None


def test_a_job_is_in_its_phase_since_the_decision_that_brought_it_there() -> None:
    jobs = Jobs()
    since: dict[JobPhase, int] = {}

    def later() -> None:
        jobs.now = CutTime(jobs.now + 1_000)

    def note() -> None:
        summary = summary_of(jobs.job())
        since[summary.phase] = summary.since
        later()

    jobs.register()
    jobs.submit()
    note()
    jobs.assign()
    note()
    jobs.attempt()
    note()
    jobs.first_batch()
    later()
    assert summary_of(jobs.job()).since == since[JobPhase.RUNNING]
    stop = jobs.begin(OperationKind.STOP)
    later()
    jobs.stop(stop)
    note()
    jobs.begin(OperationKind.START)
    jobs.run()
    later()
    jobs.apply(j.EndAttempt(J1, jobs.epoch(), 1, RunEnd.FAILED, FAILURE))
    note()
    jobs.end(RunEnd.FAILED, FAILURE)
    note()
    assert since == {
        JobPhase.WAITING: 1_000,
        JobPhase.STARTING: 2_000,
        JobPhase.RUNNING: 3_000,
        JobPhase.STOPPED: 6_000,
        JobPhase.RESTARTING: 8_000,
        JobPhase.FAILED: 9_000,
    }
    copy = JobRegistry(msgspec.msgpack.decode(msgspec.msgpack.encode(jobs.state.snapshot()), type=JobsSnapshot))
    assert summary_of(copy.jobs[J1]) == summary_of(jobs.job())


def test_a_list_shows_the_error_of_the_last_attempt_until_another_one_runs() -> None:
    jobs = running()
    told = f"{FAILURE.code}: {FAILURE.message}"
    jobs.apply(j.EndAttempt(J1, jobs.epoch(), 1, RunEnd.FAILED, FAILURE))
    assert summary_of(jobs.job()).error == told
    jobs.attempt(number=2)
    assert (jobs.job().failure, summary_of(jobs.job()).error) == (FAILURE, "")
    jobs.apply(j.ExpireAgent("a", 1))
    assert summary_of(jobs.job()).error == ""
    jobs.run(agent="b")
    jobs.end(RunEnd.FAILED, FAILURE)
    assert summary_of(jobs.job()).error == told
    jobs.begin(OperationKind.START)
    assert summary_of(jobs.job()).error == ""


def test_a_failed_job_keeps_its_error_when_another_version_of_it_fails() -> None:
    jobs = running(is_up=False)
    jobs.end(RunEnd.FAILED, FAILURE)
    other = structs.replace(FAILURE, message="worse")
    operation = jobs.begin(UPGRADE, spec=NEW, version=2, version_before=1, steps=(START, COME_UP))
    jobs.run()
    jobs.end(RunEnd.FAILED, other)
    job = jobs.job()
    assert (job.phase, job.version, job.failure, job.failed_version) == (JobPhase.FAILED, 1, FAILURE, 1)
    assert summary_of(job).error == f"{FAILURE.code}: {FAILURE.message}"
    error = jobs.operation(operation).error
    assert error is not None
    assert error.message == "version 2 did not come up, and the job is failed with version 1 again: worse"


def test_a_version_that_finishes_without_a_batch_has_come_up() -> None:
    jobs = running(is_up=False)
    jobs.end(RunEnd.FINISHED)
    assert [version.has_come_up for version in jobs.job().versions] == [True]


def test_stop_takes_a_savepoint_and_ends() -> None:
    jobs = running()
    stop = jobs.begin(OperationKind.STOP)
    assert jobs.refuses(j.EndAssignment(J1, jobs.epoch(), RunEnd.STOPPED)) == "it did not stop with a savepoint"
    taken = jobs.stop(stop)
    assert jobs.operation(stop).state is OperationState.DONE
    assert jobs.operation(stop).savepoint == taken
    assert (jobs.job().phase, jobs.job().desired) == (JobPhase.STOPPED, DesiredState.STOPPED)
    found = jobs.job().savepoint_of(taken)
    assert found is not None
    assert (found.version, found.agent) == (1, "a")


def test_a_step_is_done_once() -> None:
    jobs = running()
    operation = jobs.begin(OperationKind.SAVEPOINT)
    jobs.savepoint(operation)
    assert jobs.operation(operation).state is OperationState.DONE
    again = JobSavepoint(identifier(99), "default", "again", GLSN(9))
    assert "not next" in jobs.refuses(j.NoteSavepoint(J1, jobs.epoch(), operation, 0, again))
    assert "not next" in jobs.refuses(j.FailOperation(operation, 0, OperationError("x", "y")))
    assert "not next" in jobs.refuses(j.FinishStep(operation, 0, jobs.epoch()))


def test_a_savepoint_of_an_agent_that_was_lost_is_taken_by_the_next() -> None:
    jobs = running()
    operation = jobs.begin(OperationKind.STOP)
    first = jobs.epoch()
    jobs.apply(j.ExpireAgent("a", 1))
    jobs.run(agent="b")
    late = JobSavepoint(identifier(99), "default", "late", GLSN(9))
    assert jobs.refuses(j.NoteSavepoint(J1, first, operation, 0, late)) == "the assignment is over"
    jobs.stop(operation)
    assert jobs.job().phase is JobPhase.STOPPED


def test_a_failed_step_leaves_the_job_as_it_is() -> None:
    jobs = running()
    operation = jobs.begin(OperationKind.STOP)
    jobs.fail(operation)
    assert jobs.operation(operation).state is OperationState.FAILED
    assert (jobs.job().phase, jobs.job().desired) == (JobPhase.RUNNING, DesiredState.RUNNING)


def test_a_job_that_fails_during_an_operation_fails_the_operation() -> None:
    jobs = running()
    operation = jobs.begin(OperationKind.SAVEPOINT)
    jobs.end(RunEnd.FAILED, FAILURE)
    assert jobs.operation(operation).error == OperationError(FAILURE.code, FAILURE.message)
    assert jobs.job().phase is JobPhase.FAILED


@pytest.mark.parametrize("is_lost", [False, True])
def test_cancel_ends_the_job_also_if_its_agent_is_lost(is_lost: bool) -> None:
    jobs = running()
    operation = jobs.begin(OperationKind.CANCEL)
    assert jobs.job().desired is DesiredState.CANCELLED
    jobs.apply(j.ExpireAgent("a", 1)) if is_lost else jobs.end(RunEnd.CANCELLED)
    assert jobs.job().phase is JobPhase.CANCELLED
    assert jobs.operation(operation).state is OperationState.DONE
    assert not jobs.state.waiting


def test_cancel_ends_an_operation_in_progress() -> None:
    jobs = running()
    stop = jobs.begin(OperationKind.STOP)
    jobs.begin(OperationKind.CANCEL)
    assert jobs.operation(stop).state is OperationState.SUPERSEDED
    jobs.end(RunEnd.CANCELLED)
    assert jobs.job().phase is JobPhase.CANCELLED


def test_a_deleted_job_is_gone_when_it_has_ended_and_its_name_is_free() -> None:
    jobs = running()
    delete = jobs.begin(OperationKind.DELETE)
    assert jobs.job().desired is DesiredState.DELETED
    jobs.end(RunEnd.FINISHED)
    assert jobs.state.named("fraud") is None
    assert jobs.operation(delete).state is OperationState.DONE
    jobs.submit()
    assert jobs.job().number == 2
    assert jobs.refuses(j.NoteFirstBatch(J1, JobEpoch(1), BatchNumber(0)))


def test_a_restart_ends_the_job_and_starts_it_under_another_epoch() -> None:
    jobs = running()
    first, restart = jobs.epoch(), jobs.begin(OperationKind.RESTART)
    jobs.end(RunEnd.CANCELLED)
    assert jobs.job().phase is JobPhase.WAITING
    assert jobs.job().start.checkpoint == CHECKPOINT
    assert jobs.run(agent="b") > first
    assert jobs.operation(restart).state is OperationState.DONE


# Versions.


def test_an_upgrade_goes_on_from_its_savepoint_and_is_done_with_the_first_batch() -> None:
    jobs = running()
    operation = upgrade(jobs)
    assert jobs.job().version == 1
    taken = jobs.stop(operation)
    job = jobs.job()
    assert (job.version, job.spec, job.has_come_up) == (2, NEW, False)
    assert job.start == StartPoint(savepoint=taken)
    assert job.phase is JobPhase.WAITING
    jobs.run()
    assert jobs.operation(operation).next_step is COME_UP
    assert jobs.job().start == StartPoint(CHECKPOINT, taken)
    jobs.first_batch()
    assert jobs.operation(operation).state is OperationState.DONE
    assert jobs.job().has_come_up


def test_an_upgrade_that_fails_before_it_came_up_returns_to_the_savepoint() -> None:
    jobs = running()
    operation = upgrade(jobs)
    taken = jobs.stop(operation)
    jobs.run()
    jobs.end(RunEnd.FAILED, FAILURE)
    job = jobs.job()
    assert (job.version, job.start, job.phase) == (1, StartPoint(savepoint=taken), JobPhase.WAITING)
    error = jobs.operation(operation).error
    assert error is not None
    assert error.message == f"version 2 did not come up, and version 1 goes on from savepoint {taken}: boom"
    # The failure is that of version 2, and version 1 runs.
    assert (job.failure, job.failed_version, job.present_failure) == (FAILURE, 2, None)
    assert [version.has_come_up for version in job.versions] == [True, False]
    jobs.run()
    assert (jobs.job().failure, summary_of(jobs.job()).error) == (FAILURE, "")


def test_an_upgrade_whose_agent_is_lost_goes_on_elsewhere() -> None:
    jobs = running()
    operation = upgrade(jobs)
    jobs.stop(operation)
    jobs.run()
    jobs.apply(j.ExpireAgent("a", 1))
    assert (jobs.job().version, jobs.job().phase) == (2, JobPhase.WAITING)
    jobs.run(agent="b")
    jobs.first_batch()
    assert jobs.operation(operation).state is OperationState.DONE


def test_a_version_that_came_up_and_fails_stays() -> None:
    jobs = running()
    operation = upgrade(jobs)
    jobs.stop(operation)
    jobs.run()
    jobs.first_batch()
    jobs.end(RunEnd.FAILED, FAILURE)
    assert (jobs.job().version, jobs.job().phase) == (2, JobPhase.FAILED)
    assert jobs.operation(operation).state is OperationState.DONE


def test_a_batch_of_the_run_of_an_assignment_is_its_first_batch() -> None:
    jobs = running(is_up=False)
    jobs.state.note_batch("fraud", JobEpoch(jobs.epoch() - 1), BatchNumber(0), jobs.now)
    jobs.state.note_batch("other", jobs.epoch(), BatchNumber(0), jobs.now)
    assert not jobs.job().has_come_up
    jobs.state.note_batch("fraud", jobs.epoch(), BatchNumber(0), jobs.now)
    assert jobs.job().has_come_up
    revision = jobs.state.revision
    jobs.state.note_batch("fraud", jobs.epoch(), BatchNumber(1), jobs.now)
    assert jobs.state.revision == revision


def test_a_version_that_published_while_it_was_ended_is_not_replaced_from_its_beginning() -> None:
    jobs = running(is_up=False)
    operation = upgrade(jobs, steps=(OperationStep.END, START, COME_UP))
    jobs.first_batch()
    jobs.end(RunEnd.CANCELLED)
    job = jobs.job()
    assert (job.version, job.phase, job.start) == (1, JobPhase.WAITING, StartPoint(CHECKPOINT))
    assert jobs.operation(operation).state is OperationState.FAILED


def test_a_pipeline_that_ends_without_a_batch_has_come_up_well_enough() -> None:
    jobs = running()
    operation = upgrade(jobs)
    jobs.stop(operation)
    jobs.run()
    jobs.end(RunEnd.FINISHED)
    assert jobs.operation(operation).state is OperationState.DONE
    assert (jobs.job().phase, jobs.job().version) == (JobPhase.FINISHED, 2)


def test_a_rollback_validates_before_it_stops() -> None:
    jobs = running()
    steps = (OperationStep.SAVEPOINT, OperationStep.VALIDATE, STOP, START)
    before = upgrade(jobs)
    jobs.stop(before)
    jobs.run()
    jobs.first_batch()
    operation = jobs.begin(ROLLBACK, version=1, version_before=2, was_running=True, steps=steps)
    first = jobs.savepoint(operation)
    assert jobs.operation(operation).next_step is OperationStep.VALIDATE
    jobs.apply(j.FinishStep(operation, 1, jobs.epoch()))
    second = jobs.stop(operation)
    assert first != second
    assert (jobs.job().version, jobs.job().start) == (1, StartPoint(savepoint=second))
    jobs.run()
    assert jobs.operation(operation).state is OperationState.DONE


def test_versions_are_kept_up_to_a_limit_and_the_present_one_always() -> None:
    jobs = running()
    for version in range(2, VERSIONS_MAX + 5):
        operation = upgrade(jobs, version=version)
        jobs.fail(operation)
    numbers = [version.number for version in jobs.job().versions]
    assert len(numbers) == VERSIONS_MAX
    assert numbers[0] == jobs.job().version == 1
    assert numbers[1] == 6


# Keys, limits, snapshots.


def test_idempotency_keys_are_forgotten_after_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = running()
    key = IdempotencyKey("again", "ef" * 32)
    operation = jobs.begin(OperationKind.SAVEPOINT, key=key)
    jobs.fail(operation)
    monkeypatch.setattr(job_registry, "OPERATIONS_KEPT", 2)
    for _ in range(3):
        jobs.fail(jobs.begin(OperationKind.SAVEPOINT))
    assert operation in jobs.state.operations, "a key names it"
    jobs.now = CutTime(jobs.now + IDEMPOTENCY_KEPT_US)
    jobs.fail(jobs.begin(OperationKind.SAVEPOINT))
    assert not jobs.state.keys
    assert operation not in jobs.state.operations
    assert len(jobs.state.operations) == 2


def test_a_savepoint_is_forgotten_by_its_id() -> None:
    jobs = running()
    taken = jobs.savepoint(jobs.begin(OperationKind.SAVEPOINT))
    jobs.apply(j.ForgetSavepoint(J1, taken))
    assert not jobs.job().savepoints
    assert jobs.refuses(j.ForgetSavepoint(J1, taken)) == "there is no such savepoint"


def test_programs_of_all_versions_are_live() -> None:
    jobs = running()
    upgrade(jobs)
    assert jobs.state.programs() == {SPEC.program, NEW.program}


def test_the_places_of_programs_are_kept_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = running()
    monkeypatch.setattr(job_registry, "PROGRAMS_MAX", 2)
    places = [ProgramPlace(GLSN(10 * (number + 1)), 3, 900) for number in range(6)]
    for place in places:
        jobs.state.note_program(SPEC.program, place)
    assert jobs.state.programs_stored[SPEC.program] == (places[0], *places[-3:])
    for program in ("01" * 32, "02" * 32):
        jobs.state.note_program(program, places[-1])
    assert list(jobs.state.programs_stored) == [SPEC.program, "02" * 32], "a version of a job names the first"
    assert JobRegistry(jobs.state.snapshot()).programs_stored == jobs.state.programs_stored
    jobs.state.note_trim_of_programs(GLSN(50))
    assert jobs.state.programs_stored[SPEC.program] == tuple(places[-2:])
    jobs.state.note_trim_of_programs(GLSN(1_000))
    assert not jobs.state.programs_stored


def test_a_snapshot_is_the_state_and_changes_reach_agents_and_jobs_by_revision() -> None:
    jobs = running()
    jobs.submit("other")
    loaded = JobRegistry(msgspec.msgpack.decode(msgspec.msgpack.encode(jobs.state.snapshot()), type=JobsSnapshot))
    assert loaded.snapshot() == jobs.state.snapshot()
    assert list(loaded.waiting) == list(jobs.state.waiting)
    seen = jobs.state.agents["a"].revision
    jobs.apply(j.NoteCheckpoint(J1, jobs.epoch(), CheckpointPointer("default", "fraud/run-2")))
    assert jobs.state.agents["a"].revision == jobs.job().revision == jobs.state.revision > seen
    seen = jobs.state.agents["a"].revision
    jobs.end(RunEnd.FAILED, FAILURE)
    assert jobs.state.agents["a"].revision > seen
    assert JobRegistry().is_untouched


def test_a_copy_from_a_snapshot_lets_jobs_of_a_lost_agent_wait_in_the_same_order() -> None:
    jobs = Jobs()
    jobs.register()
    jobs.submit("first")
    jobs.submit("second")
    jobs.run("second")
    jobs.run("first")
    loaded = JobRegistry(jobs.state.snapshot())
    lost = j.ExpireAgent("a", 1)
    jobs.apply(lost)
    loaded.apply(lost, jobs.now)
    assert loaded.snapshot() == jobs.state.snapshot()
    assert list(jobs.state.waiting) == [J1, J2]
