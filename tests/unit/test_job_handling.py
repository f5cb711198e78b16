"""What users and agents may ask of jobs: operations, reports, waiting questions, errands, leases and limits."""

from __future__ import annotations

from typing import Any

import pytest
from job_driver import JobLeader
from job_kit import CHECKPOINT, OTHER_PROGRAM, PROGRAM, SPEC, agent, identifier
from msgspec import structs

from cutwater.core import requests as r
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import (
    AccessChanged,
    AllowRequest,
    CreateTokenRequest,
    ListTokensRequest,
    RemoveRightsRequest,
    SetAccessModeRequest,
    TokenList,
)
from cutwater.core.access.principals import LOCAL_ADMIN
from cutwater.core.access.rights import parse_pattern
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.agents import JobIsolation
from cutwater.core.jobs.errands import ErrandKind
from cutwater.core.jobs.job_records import CheckpointPointer, JobPhase, JobSavepoint, RunEnd, RunFailure
from cutwater.core.jobs.job_requests import OrderedAction
from cutwater.core.jobs.leading import job_handling
from cutwater.core.jobs.operations import (
    IDEMPOTENCY_KEPT_US,
    IdempotencyKey,
    OperationError,
    OperationKind,
    OperationState,
)
from cutwater.errors import (
    AlreadyExists,
    CutwaterError,
    Fenced,
    InvalidArgument,
    NotFound,
    Refused,
    ResourceExhausted,
    RunFenced,
    Unavailable,
)
from cutwater.types import GLSN, SECOND, BatchNumber, CutTime, Instant, JobEpoch, JobNumber, Revision, RunId

NEW = structs.replace(SPEC, program=OTHER_PROGRAM)
LEASE_MS = 10_000


def running(**more: Any) -> JobLeader:
    """A job that runs on agent a and has come up."""
    leader = JobLeader()
    leader.register(**more)
    leader.submit()
    leader.settle()
    return leader


# Operations.


def test_a_job_is_assigned_in_the_write_that_submits_it() -> None:
    leader = JobLeader()
    leader.register()
    submit = leader.submit()
    assert leader.epoch() == 1
    leader.settle()
    leader.done(submit)
    assert leader.job().phase is JobPhase.RUNNING


def test_a_job_that_fits_nowhere_says_what_it_waits_for() -> None:
    leader = JobLeader()
    answer = leader.ask(q.SubmitJobRequest("fraud", SPEC, leader.new_id()), q.OperationAnswer)
    assert "start one with `cutwater agent start`" in answer.advice
    leader.register("a", slots=1, labels={"zone": "east"})
    assert leader.job().assignment is not None
    leader.submit("second")
    described = leader.ask(q.DescribeJobRequest("second"), q.JobDescription)
    assert "agent a has 0 of 1 slot free" in described.waits_for
    leader.submit("picky", structs.replace(SPEC, labels={"zone": "west"}))
    assert "agent a lacks the label zone=west" in leader.ask(q.DescribeJobRequest("picky"), q.JobDescription).waits_for
    leader.register("b", 2, labels={"zone": "west"})
    for name in ("second", "picky"):
        assert leader.ask(q.DescribeJobRequest(name), q.JobDescription).waits_for == ""


def test_submit_says_that_a_root_which_is_not_shared_pins_the_job() -> None:
    leader = JobLeader()
    leader.register(is_shared=False)
    answer = leader.ask(q.SubmitJobRequest("fraud", SPEC, leader.new_id()), q.OperationAnswer)
    assert "checkpoint root 'default' is not shared" in answer.advice
    leader.settle()
    leader.register("b", 2, is_shared=False)
    leader.pass_time(LEASE_MS - 5_000)
    leader.renew("b", 2)
    leader.pass_time(LEASE_MS - 4_000)
    described = leader.ask(q.DescribeJobRequest("fraud"), q.JobDescription)
    assert "does not reach the checkpoint, which only agent a has" in described.waits_for
    leader.register("a", 5, is_shared=False)
    assert leader.job().assignment is not None


@pytest.mark.parametrize("from_snapshot", [True, False])
def test_the_same_request_again_is_the_same_operation_also_for_the_next_leader(from_snapshot: bool) -> None:
    leader = JobLeader()
    key = IdempotencyKey("once", "ab" * 32)
    request = q.SubmitJobRequest("fraud", SPEC, identifier(9), key=key)
    first = leader.ask(request, q.OperationAnswer, "ann").operation
    leader.next_leader(from_snapshot=from_snapshot)
    for again in (request, structs.replace(request, operation=identifier(10))):
        assert leader.ask(again, q.OperationAnswer, "ann").operation.id == first.id
    other = structs.replace(request, operation=identifier(10), key=IdempotencyKey("once", "cd" * 32))
    with pytest.raises(InvalidArgument, match="was used for another request"):
        leader.ask(other, q.OperationAnswer, "ann")
    # The hash is a claim of the caller, whose rights were judged for the job that it names now.
    elsewhere = q.SubmitJobRequest("other", SPEC, identifier(11), key=key)
    operated = q.OperateJobRequest("fraud", OperationKind.CANCEL, identifier(11), key=key)
    for misused in (elsewhere, operated):
        with pytest.raises(InvalidArgument, match="was used for another request"):
            leader.ask(misused, q.OperationAnswer, "ann")
    with pytest.raises(AlreadyExists, match="make a random id"):
        leader.ask(request, q.OperationAnswer, "bob")
    with pytest.raises(AlreadyExists, match="there is a job 'fraud'"):
        leader.ask(structs.replace(request, operation=identifier(10)), q.OperationAnswer, "bob")
    assert len(leader.jobs.jobs) == 1


def test_an_idempotency_key_may_be_used_again_after_a_day() -> None:
    leader = running()
    key = IdempotencyKey("once", "ab" * 32)
    first = leader.operate(OperationKind.SAVEPOINT, key=key)
    leader.settle()
    now = leader.leader.now
    leader.leader.now = Instant(now.monotonic, now.wall + IDEMPOTENCY_KEPT_US + SECOND)
    assert leader.operate(OperationKind.SAVEPOINT, key=key) != first


def test_keys_are_limited_for_each_principal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_handling, "KEYS_PER_PRINCIPAL_MAX", 1)
    leader = JobLeader()
    leader.submit("one", principal="ann", key=IdempotencyKey("k1", "ab" * 32))
    with pytest.raises(ResourceExhausted, match="idempotency keys were used"):
        leader.submit("two", principal="ann", key=IdempotencyKey("k2", "ab" * 32))
    leader.submit("two", principal="bob", key=IdempotencyKey("k2", "ab" * 32))


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (q.SubmitJobRequest("fraud", SPEC, identifier(9)), "there is a job 'fraud'"),
        (q.SubmitJobRequest("new", structs.replace(SPEC, program="x"), identifier(9)), "no SHA-256"),
        (q.SubmitJobRequest("new", SPEC, "x"), "32 hexadecimal digits"),
        (q.SubmitJobRequest("new", SPEC, identifier(9), savepoint=identifier(3)), "say which job has savepoint"),
        (q.SubmitJobRequest("new", SPEC, identifier(9), replay_output=True), "only with one"),
        (q.SubmitJobRequest("new", SPEC, identifier(9), from_job="fraud"), "has no savepoint"),
        (q.UpgradeJobRequest("fraud", SPEC, identifier(9), savepoint=identifier(3)), "takes a savepoint of its own"),
        (q.UpgradeJobRequest("other", SPEC, identifier(9)), "there is no job 'other'"),
        (q.RescaleJobRequest("fraud", 1, identifier(9)), "has parallelism 1 and 1 slots already"),
        (q.RescaleJobRequest("fraud", 0, identifier(9)), "parallelism is 1 to"),
        (q.RollBackJobRequest("fraud", identifier(9)), "no version before it to go back to; it has no other version"),
        (q.RollBackJobRequest("fraud", identifier(9), 7), "no version 7"),
        (q.OperateJobRequest("fraud", OperationKind.START, identifier(9)), "it was started before"),
        (q.OperateJobRequest("fraud", OperationKind.UPGRADE, identifier(9)), "has a request of its own"),
        (q.OperateJobRequest("fraud", OperationKind.STOP, identifier(9), savepoint=identifier(3)), "is for start"),
        (q.OperateJobRequest("fraud", OperationKind.STOP, identifier(9), timeout_ms=-1), "a step may take"),
        (q.ListJobsRequest(limit=0), "a page has 1 to"),
        (q.ListOperationsRequest("fraud", 0), "ask for 1 to"),
        (q.DescribeOperationRequest("x"), "there is no operation"),
        (q.FetchVersionRequest("fraud", 7), "has no version 7"),
        (q.FetchProgramPlaceRequest("x"), "no SHA-256"),
        (q.DrainAgentRequest("x"), "there is no agent"),
        (q.RemoveAgentRequest("a"), "is alive"),
        (q.RenewAgentRequest("x", 1), "is not known"),
        (q.RenewAgentRequest("a", 2), "another session speaks for"),
        (q.RegisterAgentRequest(agent(slots=0), 1), "an agent has 1 to"),
        (q.AskAgentRequest("fraud", ErrandKind.VALIDATE), "say which specification"),
        (q.AskAgentRequest("fraud", ErrandKind.SAVEPOINT_VERIFY), "say which savepoint"),
        (q.AskAgentRequest("fraud", ErrandKind.LOG, spec=SPEC), "takes no specification"),
        (q.AskAgentRequest("fraud", ErrandKind.STATE, savepoint=identifier(3)), "has no savepoint"),
        (q.AskAgentRequest("fraud", ErrandKind.LOG, agent="x"), "there is no agent"),
        (q.ForgetSavepointRequest("fraud", "x"), "32 hexadecimal digits"),
    ],
    ids=lambda one: type(one).__name__ if not isinstance(one, str) else "",
)
def test_what_cannot_be_done_is_refused_in_words(request_: q.JobRequest, says: str) -> None:
    leader = running()
    revision = leader.jobs.revision
    with pytest.raises(CutwaterError, match=says):
        leader.ask(request_, object)
    assert leader.jobs.revision == revision


def test_one_operation_is_in_progress_at_a_time_and_cancel_ends_it() -> None:
    leader = running()
    stop = leader.operate(OperationKind.STOP)
    with pytest.raises(Refused, match="is in progress"):
        leader.operate(OperationKind.SAVEPOINT)
    cancel = leader.operate(OperationKind.CANCEL)
    assert leader.operation(stop).state is OperationState.SUPERSEDED
    leader.settle()
    leader.done(cancel)
    assert leader.job().phase is JobPhase.CANCELLED
    for kind in (OperationKind.CANCEL, OperationKind.STOP, OperationKind.RESTART, OperationKind.SAVEPOINT):
        with pytest.raises(Refused, match="does not run"):
            leader.operate(kind)
    leader.operate(OperationKind.DELETE)
    assert leader.jobs.named("fraud") is None


def test_stop_start_and_restart() -> None:
    leader = running()
    stop = leader.operate(OperationKind.STOP)
    assert leader.orders()["fraud"].action is OrderedAction.STOP
    leader.settle()
    assert leader.job().phase is JobPhase.STOPPED
    assert leader.job().savepoint_of(leader.done(stop).savepoint) is not None
    first = leader.job().epoch
    start = leader.operate(OperationKind.START)
    leader.settle()
    leader.done(start)
    restart = leader.operate(OperationKind.RESTART)
    leader.settle()
    leader.done(restart)
    assert leader.epoch() == first + 2


def test_a_job_starts_from_a_savepoint_and_keeps_it_until_it_has_come_up() -> None:
    leader = running()
    taken = leader.done(_settled(leader, leader.operate(OperationKind.SAVEPOINT))).savepoint
    _settled(leader, leader.operate(OperationKind.CANCEL))
    leader.operate(OperationKind.START, savepoint=taken, replay_output=True)
    assert leader.job().start.savepoint == taken
    assigned = leader.ask(q.FetchAssignedRequest("a", 1, JobNumber(1), leader.epoch()), q.AssignedJob)
    assert assigned.savepoint is not None
    assert (assigned.savepoint.id, assigned.start.replay_output) == (taken, True)
    with pytest.raises(Refused, match="goes on from savepoint"):
        leader.ask(q.ForgetSavepointRequest("fraud", taken), q.ReportNoted)
    leader.settle()
    leader.ask(q.ForgetSavepointRequest("fraud", taken), q.ReportNoted)
    leader.ask(q.ForgetSavepointRequest("fraud", taken), q.ReportNoted)
    assert leader.job().savepoint_of(taken) is None


def test_a_new_job_starts_from_the_savepoint_of_another_that_may_be_deleted() -> None:
    leader = running()
    taken = leader.done(_settled(leader, leader.operate(OperationKind.STOP))).savepoint
    leader.submit("second", from_job="fraud")
    leader.operate(OperationKind.DELETE)
    leader.next_leader()
    leader.register()
    assigned = leader.ask(
        q.FetchAssignedRequest("a", 1, leader.job("second").number, leader.epoch("second")), q.AssignedJob
    )
    assert assigned.savepoint is not None
    assert assigned.savepoint.id == taken


def test_no_file_of_a_savepoint_is_deleted_while_a_job_may_have_to_begin_with_it() -> None:
    leader = running()
    leader.upgrade(NEW)
    leader.obey()
    taken = leader.job().start.savepoint
    delete = q.AskAgentRequest("fraud", ErrandKind.SAVEPOINT_DELETE, savepoint=taken, wait_ms=1_000)
    with pytest.raises(Refused, match="it is needed until that is done"):
        leader.ask(delete, q.ErrandAnswer)
    leader.settle()
    leader.submit("second", from_job="fraud", savepoint=taken)
    with pytest.raises(Refused, match=r"a job that begins with savepoint .* has published nothing yet"):
        leader.ask(delete, q.ErrandAnswer)
    leader.settle()
    assert leader.send(delete) not in leader.answers, "an agent deletes it"


def test_a_start_from_a_savepoint_that_fails_leaves_the_job_as_it_was() -> None:
    """Otherwise the checkpoint would be forgotten, and nothing could go on exactly once."""
    leader = running()
    leader.operate(OperationKind.SAVEPOINT)
    leader.settle()
    taken = leader.job().savepoints[-1].id
    leader.operate(OperationKind.CANCEL)
    leader.settle()
    ended = leader.job()
    start = leader.operate(OperationKind.START, savepoint=taken)
    leader.obey()
    assert leader.job().start.savepoint == taken
    failure = RunFailure("output_exists", "rows were published since")
    failed = q.EndAssignmentRequest("a", 1, ended.number, leader.epoch(), RunEnd.FAILED, failure)
    leader.ask(failed, q.ReportNoted)
    operation = leader.operation(start)
    assert operation.state is OperationState.FAILED
    assert operation.error == OperationError(
        "output_exists", f"version 1 did not come up from savepoint {taken}: rows were published since"
    )
    job = leader.job()
    assert (job.phase, job.start, job.has_come_up) == (JobPhase.CANCELLED, ended.start, True)
    again = leader.operate(OperationKind.START)
    leader.settle()
    assert leader.done(again)
    leader.operate(OperationKind.CANCEL)
    leader.settle()
    start = leader.operate(OperationKind.START, savepoint=taken)
    leader.obey()
    assert not leader.job().has_come_up
    leader.operate(OperationKind.CANCEL)
    leader.next_leader()
    leader.settle()
    assert leader.operation(start).state is OperationState.SUPERSEDED
    assert (leader.job().phase, leader.job().start.savepoint) == (JobPhase.CANCELLED, "")
    leader.done(_settled(leader, leader.operate(OperationKind.START, savepoint=taken)))
    leader.operate(OperationKind.CANCEL)
    leader.settle()
    assert leader.job().start.savepoint == taken, "it has published since"


def test_an_upgrade_does_not_go_on_from_an_earlier_savepoint_than_that_of_the_stop() -> None:
    leader = running()
    leader.operate(OperationKind.SAVEPOINT)
    leader.settle()
    leader.pass_time(1_000)
    leader.renew()
    stop = leader.done(_settled(leader, leader.operate(OperationKind.STOP)))
    leader.ask(q.ForgetSavepointRequest("fraud", stop.savepoint), q.ReportNoted)
    with pytest.raises(Refused, match="has no savepoint of where it ended"):
        leader.upgrade(NEW)


def _settled(leader: JobLeader, operation: str) -> str:
    leader.settle()
    return operation


def test_an_upgrade_and_a_rollback_before_it_comes_up() -> None:
    leader = running()
    upgrade = leader.upgrade(NEW)
    leader.obey()
    leader.obey()
    job = leader.job()
    assert (job.version, job.has_come_up, job.phase) == (2, False, JobPhase.RUNNING)
    back = leader.roll_back()
    assert leader.operation(upgrade).state is OperationState.SUPERSEDED
    assert leader.orders()["fraud"].action is OrderedAction.END
    leader.settle()
    leader.done(back)
    job = leader.job()
    assert (job.version, job.start.savepoint) == (1, leader.operation(upgrade).savepoint)


def test_a_rollback_after_it_has_come_up_validates_a_new_savepoint_first() -> None:
    leader = running()
    _settled(leader, leader.upgrade(NEW))
    back = leader.roll_back()
    leader.obey()
    order = leader.orders()["fraud"]
    assert (order.action, order.version_to) == (OrderedAction.VALIDATE, 1)
    assert order.savepoint is not None
    leader.settle()
    assert leader.done(back).version_before == 2
    assert leader.job().version == 1
    with pytest.raises(NotFound, match="no version before it to go back to; choose one of the others with --to N: 2"):
        leader.roll_back()


def test_a_rollback_that_the_earlier_program_cannot_follow_is_refused_and_the_job_runs_on() -> None:
    leader = running()
    _settled(leader, leader.upgrade(NEW))
    back = leader.roll_back()
    leader.obey()
    order = leader.orders()["fraud"]
    error = OperationError("refused", "an operator has gone")
    request = q.FinishStepRequest("a", 1, order.job, order.epoch, order.operation, order.step, error)
    leader.ask(request, q.ReportNoted)
    leader.ask(request, q.ReportNoted)
    assert leader.operation(back).error == error
    assert (leader.job().version, leader.job().phase) == (2, JobPhase.RUNNING)


def test_a_version_that_has_not_come_up_is_replaced_from_its_beginning() -> None:
    leader = JobLeader()
    leader.register()
    leader.submit()
    leader.obey()
    assert not leader.job().has_come_up
    upgrade = leader.upgrade(NEW)
    assert leader.orders()["fraud"].action is OrderedAction.END
    leader.obey()
    assert leader.job().version == 2
    leader.obey()
    failed = q.EndAssignmentRequest("a", 1, JobNumber(1), leader.epoch(), RunEnd.FAILED, RunFailure("boom", "it broke"))
    leader.ask(failed, q.ReportNoted)
    assert leader.operation(upgrade).state is OperationState.FAILED
    assert leader.job().version == 1, "it returns as it was"
    leader.settle()
    assert leader.job().phase is JobPhase.RUNNING


def test_a_stopped_job_is_upgraded_from_the_savepoint_of_its_stop_and_returns_as_it_was() -> None:
    leader = running()
    taken = leader.done(_settled(leader, leader.operate(OperationKind.STOP))).savepoint
    before = leader.job()
    upgrade = leader.upgrade(NEW)
    assert leader.operation(upgrade).savepoint == taken
    leader.obey()
    leader.ask(q.EndAssignmentRequest("a", 1, JobNumber(1), leader.epoch(), RunEnd.FAILED), q.ReportNoted)
    job = leader.job()
    assert (job.version, job.start, job.has_come_up, job.end) == (1, before.start, True, RunEnd.STOPPED)


def test_a_failed_job_has_no_savepoint_to_be_upgraded_from() -> None:
    leader = running()
    leader.ask(q.EndAssignmentRequest("a", 1, JobNumber(1), leader.epoch(), RunEnd.FAILED), q.ReportNoted)
    with pytest.raises(Refused, match="has no savepoint of where it ended"):
        leader.upgrade(NEW)


def test_a_job_is_rescaled_by_another_version() -> None:
    leader = running()
    rescale = leader.ask(q.RescaleJobRequest("fraud", 8, leader.new_id(), 2), q.OperationAnswer).operation.id
    leader.settle()
    leader.done(rescale)
    assert (leader.job().spec.parallelism, leader.jobs.used_slots("a")) == (8, 2)


def test_jobs_and_their_specifications_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_handling, "JOBS_MAX", 1)
    leader = running()
    with pytest.raises(Refused, match="which is the most"):
        leader.submit("second")
    monkeypatch.setattr(job_handling, "SPECS_BYTES_MAX", 500)
    with pytest.raises(Refused, match="the specifications of all versions"):
        leader.upgrade(structs.replace(NEW, arguments={"text": "x" * 500}))
    monkeypatch.setattr(job_handling, "SAVEPOINTS_MAX", 0)
    with pytest.raises(Refused, match="savepoints, which is the most"):
        leader.operate(OperationKind.SAVEPOINT)


# Agents.


def test_an_agent_is_one_session_of_one_principal() -> None:
    leader = JobLeader()
    leader.register("a", 1, "agents")
    for request in (q.RegisterAgentRequest(agent("a"), 2), q.RenewAgentRequest("a", 1)):
        with pytest.raises(Refused, match="another principal registered agent 'a'"):
            leader.ask(request, q.AgentLease, "mallory")
    leader.register("a", 2, "agents")
    with pytest.raises(Fenced, match="another session"):
        leader.ask(q.RenewAgentRequest("a", 1), q.AgentLease, "agents")
    leader.pass_time(LEASE_MS + 500)
    with pytest.raises(Fenced, match="the lease of agent 'a' has ended"):
        leader.ask(q.RenewAgentRequest("a", 2), q.AgentLease, "agents")


def test_the_lease_is_kept_by_renewals_and_a_new_leader_grants_a_full_one() -> None:
    leader = running()
    leader.register("b", 2)
    for _ in range(3):
        leader.pass_time(LEASE_MS - 1_000)
        leader.renew("a", 1)
        leader.renew("b", 2)
    first = leader.epoch()
    leader.pass_time(LEASE_MS - 1_000)
    leader.next_leader()
    leader.pass_time(LEASE_MS - 1_000)
    assert leader.epoch() == first
    leader.renew("b", 2)
    leader.pass_time(2_000)
    assert not leader.jobs.agents["a"].is_alive
    assert leader.epoch() > first
    assert leader.job().assignment is not None
    assert leader.job().assignment.agent == "b"


def test_an_agent_that_registers_late_has_a_full_lease() -> None:
    leader = running()
    leader.pass_time(LEASE_MS * 3)
    for session in (2, 3):
        leader.register("a", session)
        leader.pass_time(LEASE_MS - 500)
        assert leader.jobs.agents["a"].is_alive
        leader.pass_time(1_000)
        assert not leader.jobs.agents["a"].is_alive


def test_a_leader_that_slept_expires_no_agent_for_that() -> None:
    leader = running()
    leader.pass_time(5_000)
    now = leader.leader.now
    leader.leader.now = Instant(now.monotonic + 60 * SECOND, now.wall + 60 * SECOND)
    leader.pass_time(5_000)
    assert leader.jobs.agents["a"].is_alive
    leader.pass_time(LEASE_MS)
    assert not leader.jobs.agents["a"].is_alive


def test_reports_of_an_assignment_that_is_over_are_refused_and_repeated_ones_noted() -> None:
    leader = running()
    leader.register("b", 2)
    who: tuple[Any, ...] = ("a", 1, JobNumber(1), leader.epoch())
    leader.ask(q.EndAttemptRequest(*who, 1), q.ReportNoted)
    leader.ask(q.EndAttemptRequest(*who, 1), q.ReportNoted)
    begin = q.BeginAttemptRequest(*who, 2, CHECKPOINT)
    with pytest.raises(InvalidArgument, match="the next attempt of job 'fraud' is number 2"):
        leader.ask(structs.replace(begin, attempt=3), q.ReportNoted)
    revision = leader.ask(begin, q.ReportNoted).revision
    assert leader.ask(begin, q.ReportNoted).revision == revision
    with pytest.raises(Refused, match="has not ended"):
        leader.ask(structs.replace(begin, attempt=3), q.ReportNoted)
    with pytest.raises(InvalidArgument, match="a job stops with a savepoint"):
        leader.ask(q.EndAssignmentRequest(*who, RunEnd.STOPPED), q.ReportNoted)
    end = q.EndAssignmentRequest(*who, RunEnd.RELEASED)
    leader.ask(end, q.ReportNoted)
    leader.ask(end, q.ReportNoted)
    assert leader.job().assignment is not None
    assert leader.job().assignment.agent == "b", "the agent that gave it back is about to end"
    late = JobSavepoint(leader.new_id(), "default", "late", GLSN(1))
    for request in (
        begin,
        q.EndAttemptRequest(*who, 2),
        q.NoteCheckpointRequest(*who, CHECKPOINT),
        q.NoteBatchRequest(*who, BatchNumber(9)),
        q.NoteSavepointRequest(*who, identifier(5), 0, late, True),
        q.FinishStepRequest(*who, identifier(5), 0),
        q.FetchAssignedRequest(*who),
    ):
        with pytest.raises(Refused, match="is over"):
            leader.ask(request, object)


def test_an_agent_that_gave_a_job_back_gets_it_again_only_after_a_while() -> None:
    leader = running()
    who: tuple[Any, ...] = ("a", 1, JobNumber(1), leader.epoch())
    leader.ask(q.EndAssignmentRequest(*who, RunEnd.RELEASED), q.ReportNoted)
    assert "gave the job back" in leader.ask(q.DescribeJobRequest("fraud"), q.JobDescription).waits_for
    for _ in range(3):
        leader.pass_time(4_000)
        leader.renew()
    assert leader.job().assignment is not None


def test_an_agent_that_leaves_gives_its_jobs_to_others_at_once() -> None:
    leader = running()
    leader.register("b", 2)
    leader.ask(q.LeaveAgentRequest("a", 1), q.ReportNoted)
    assert leader.job().assignment is not None
    assert leader.job().assignment.agent == "b"


def test_draining_moves_the_jobs_for_which_others_have_room() -> None:
    leader = JobLeader()
    leader.register("a", 1, slots=3)
    for name in ("one", "two", "three"):
        leader.submit(name)
    leader.settle()
    leader.register("b", 2, slots=2)
    leader.ask(q.DrainAgentRequest("a"), q.ReportNoted)
    orders = leader.orders()
    assert [orders[name].is_releasing for name in ("one", "two", "three")] == [True, True, False]
    leader.settle(("a", 1), ("b", 2))
    where = {name: leader.job(name).assignment for name in ("one", "two", "three")}
    assert [its.agent for its in where.values() if its is not None] == ["b", "b", "a"]
    assert leader.ask(q.WatchAgentRequest("a", 1), q.AgentOrders).is_draining
    leader.register("c", 3)
    leader.settle(("a", 1), ("b", 2), ("c", 3))
    assert leader.job("three").assignment is not None
    leader.ask(q.DrainAgentRequest("a", False), q.ReportNoted)
    assert not leader.jobs.agents["a"].is_draining


def test_an_agent_of_one_owner_gets_no_jobs_of_others() -> None:
    leader = JobLeader()
    leader.register("a", 1, isolation=JobIsolation.ONE_OWNER)
    leader.submit("anns", principal="ann")
    leader.submit("bobs", principal="bob")
    leader.submit("anns2", principal="ann")
    assert [job.name for job in leader.jobs.on_agent("a")] == ["anns", "anns2"]
    waits = leader.ask(q.DescribeJobRequest("bobs"), q.JobDescription).waits_for
    assert "runs jobs of another owner and takes those of one owner at a time" in waits


def test_a_savepoint_report_is_about_the_step_that_is_next() -> None:
    leader = running()
    operation = leader.operate(OperationKind.STOP)
    who: tuple[Any, ...] = ("a", 1, JobNumber(1), leader.epoch())
    taken = JobSavepoint(leader.new_id(), "default", "fraud/1", GLSN(7))
    with pytest.raises(InvalidArgument, match="no process of the job is left"):
        leader.ask(q.NoteSavepointRequest(*who, operation, 0, taken), q.ReportNoted)
    with pytest.raises(Refused, match="is not the next one"):
        leader.ask(q.NoteSavepointRequest(*who, operation, 1, taken, True), q.ReportNoted)
    other = structs.replace(taken, root="other")
    with pytest.raises(InvalidArgument, match="has no savepoint root"):
        leader.ask(q.NoteSavepointRequest(*who, operation, 0, other, True), q.ReportNoted)
    with pytest.raises(InvalidArgument, match="names with '/' between"):
        leader.ask(q.NoteSavepointRequest(*who, operation, 0, structs.replace(taken, path="../x"), True), object)
    request = q.NoteSavepointRequest(*who, operation, 0, taken, True)
    leader.ask(request, q.ReportNoted)
    leader.ask(request, q.ReportNoted)
    assert [one.id for one in leader.job().savepoints] == [taken.id]


def test_a_checkpoint_moves_and_its_batch_does_not_wake_the_agent() -> None:
    leader = running()
    who: tuple[Any, ...] = ("a", 1, JobNumber(1), leader.epoch())
    seen = leader.jobs.agents["a"].revision
    at = leader.job().start.checkpoint
    assert at is not None
    leader.ask(q.NoteCheckpointRequest(*who, structs.replace(at, batch=BatchNumber(4))), q.ReportNoted)
    assert leader.jobs.agents["a"].revision == seen
    leader.ask(q.NoteCheckpointRequest(*who, CheckpointPointer("default", "elsewhere")), q.ReportNoted)
    assert leader.jobs.agents["a"].revision > seen


# Questions that wait.


def test_orders_are_answered_when_they_change() -> None:
    leader = running()
    seen = leader.jobs.agents["a"].revision
    watch = leader.send(q.WatchAgentRequest("a", 1, seen, 2_000))
    assert watch not in leader.answers
    leader.submit("second")
    assert [order.name for order in leader.answers[watch].orders] == ["fraud", "second"]
    seen = leader.answers[watch].revision
    watch = leader.send(q.WatchAgentRequest("a", 1, seen, 500))
    leader.pass_time(450)
    assert watch not in leader.answers
    leader.pass_time(100)
    assert leader.answers[watch].revision == seen
    watch = leader.send(q.WatchAgentRequest("a", 1, seen, 60_000))
    leader.pass_time(q.WAIT_MS_MAX + 100)
    assert watch in leader.answers, "less than a client waits for one node"
    watch = leader.send(q.WatchAgentRequest("a", 1, seen, 2_000))
    leader.register("a", 2)
    assert isinstance(leader.answers[watch], Fenced)


def test_jobs_and_operations_are_followed() -> None:
    leader = running()
    revision = leader.job().revision
    describe = leader.send(q.DescribeJobRequest("fraud", revision, 2_000))
    operation = leader.operate(OperationKind.SAVEPOINT)
    assert leader.answers[describe].job.revision > revision
    waits = leader.send(q.DescribeOperationRequest(operation, 2_000))
    assert waits not in leader.answers
    leader.settle()
    assert leader.answers[waits].operation.state is OperationState.DONE
    leader.operate(OperationKind.DELETE)
    describe = leader.send(q.DescribeJobRequest("fraud", leader.job().revision, 2_000))
    leader.settle()
    assert isinstance(leader.answers[describe], NotFound)
    leader.ask(q.DescribeOperationRequest(operation, 2_000), q.OperationAnswer)


def test_waiting_questions_are_answered_when_the_leader_steps_down() -> None:
    leader = running()
    describe = leader.send(q.DescribeJobRequest("fraud", leader.job().revision, 2_000))
    leader._take(leader.leader.layer._step_down("another one leads"))
    assert isinstance(leader.answers[describe], Unavailable)


# Errands.


def test_an_errand_reaches_the_agent_and_its_answer_the_caller() -> None:
    leader = running()
    watch = leader.send(q.WatchAgentRequest("a", 1, leader.jobs.agents["a"].revision, 2_000))
    request = q.AskAgentRequest("fraud", ErrandKind.LOG, b'{"bytes": 10}', wait_ms=2_000)
    asked = leader.send(request, "ann")
    leader.pass_time(50)
    (errand,) = leader.answers[watch].errands
    assert (errand.kind, errand.body, errand.principal, errand.epoch) == ("log", request.body, "ann", leader.epoch())
    again = leader.send(request, "ann")
    leader.pass_time(2_100)
    assert isinstance(leader.answers[asked], Unavailable), "the caller asks again"
    asked = leader.send(request, "ann")
    assert len(leader.ask(q.WatchAgentRequest("a", 1), q.AgentOrders).errands) == 1
    leader.ask(q.AnswerErrandRequest("a", 1, errand.id, b'{"text": "hello"}'), q.ReportNoted)
    assert leader.answers[asked] == q.ErrandAnswer(b'{"text": "hello"}', "a")
    assert isinstance(leader.answers[again], Unavailable)
    assert not leader.ask(q.WatchAgentRequest("a", 1), q.AgentOrders).errands


def test_an_error_of_an_agent_is_the_callers() -> None:
    leader = running()
    request = q.AskAgentRequest("new", ErrandKind.VALIDATE, spec=SPEC, wait_ms=2_000)
    asked = leader.send(request)
    (errand,) = leader.ask(q.WatchAgentRequest("a", 1), q.AgentOrders).errands
    assert (errand.job, errand.spec) == (0, SPEC)
    error = OperationError("invalid_argument", "no such file")
    leader.ask(q.AnswerErrandRequest("a", 1, errand.id, b"", error), q.ReportNoted)
    assert leader.answers[asked].error == error


def test_errands_end_with_their_agent_and_when_nobody_asks_any_more() -> None:
    leader = running()
    request = q.AskAgentRequest("fraud", ErrandKind.LOG, wait_ms=2_000)
    asked = leader.send(request)
    leader.register("a", 2)
    leader.pass_time(300)
    assert isinstance(leader.answers[asked], CutwaterError)
    leader.settle(("a", 2))
    leader.send(request)
    assert leader.ask(q.WatchAgentRequest("a", 2), q.AgentOrders).errands
    for _ in range(5):
        leader.pass_time(4_000)
        leader.renew("a", 2)
    assert not leader.ask(q.WatchAgentRequest("a", 2), q.AgentOrders).errands


def test_a_savepoint_in_a_root_that_is_not_shared_is_asked_about_at_its_agent() -> None:
    leader = running(is_shared=False)
    leader.register("b", 2, is_shared=False)
    taken = leader.done(_settled(leader, leader.operate(OperationKind.SAVEPOINT))).savepoint
    leader.send(q.AskAgentRequest("fraud", ErrandKind.SAVEPOINT_VERIFY, savepoint=taken, wait_ms=2_000))
    (errand,) = leader.ask(q.WatchAgentRequest("a", 1), q.AgentOrders).errands
    assert errand.savepoint is not None
    with pytest.raises(Refused, match="does not reach savepoint"):
        leader.ask(q.AskAgentRequest("fraud", ErrandKind.SAVEPOINT_VERIFY, savepoint=taken, agent="b"), object)


# Lists.


def test_jobs_come_in_pages_by_name() -> None:
    leader = JobLeader()
    leader.register(slots=2)
    for name in ("c", "a", "b"):
        leader.submit(name, principal="ann" if name == "b" else "bob")
    page = leader.ask(q.ListJobsRequest(limit=2), q.JobList)
    assert ([job.name for job in page.jobs], page.more) == (["a", "b"], True)
    page = leader.ask(q.ListJobsRequest(after="b", limit=2), q.JobList)
    assert ([job.name for job in page.jobs], page.more) == (["c"], False)
    assert [job.name for job in leader.ask(q.ListJobsRequest(owner="ann"), q.JobList).jobs] == ["b"]
    waiting = leader.ask(q.ListJobsRequest(phase=JobPhase.WAITING), q.JobList)
    assert [job.name for job in waiting.jobs] == ["b"]
    (summary,) = leader.ask(q.ListAgentsRequest(), q.AgentList).agents
    assert (summary.used_slots, summary.jobs) == (2, ("a", "c"))
    assert not leader.ask(q.ListAgentsRequest("x"), q.AgentList).agents


def test_progress_is_known_while_the_assignment_lasts() -> None:
    leader = running()
    progress = q.JobProgress(JobNumber(1), leader.epoch(), BatchNumber(5), lag_rows=7)
    stale = structs.replace(progress, epoch=JobEpoch(99), lag_rows=8)
    leader.ask(q.RenewAgentRequest("a", 1, (progress, stale)), q.AgentLease)
    assert leader.ask(q.DescribeJobRequest("fraud"), q.JobDescription).progress == progress
    leader.register("a", 2)
    assert leader.ask(q.DescribeJobRequest("fraud"), q.JobDescription).progress is None


def test_programs_are_found() -> None:
    leader = running()
    assert leader.ask(q.FetchProgramPlaceRequest(PROGRAM), q.ProgramPlaces).places == ()
    assert Revision(0) < leader.jobs.revision
    assert leader.ask(
        q.JobTokenRequest("a", 1, JobNumber(1), leader.epoch(), "", "", CutTime(1)), q.JobTokenGranted
    ) == (q.JobTokenGranted("", CutTime(0))), "while access control is off, none is needed"


# Runs of jobs.


def published_by(leader: JobLeader, epoch: JobEpoch, batch: int) -> None:
    """Open the run of the job under an epoch, and decide an empty batch of it."""
    leader.ask(r.OpenRunRequest("fraud", "key", job_epoch=epoch), r.RunAnswer)
    leader.ask(r.PublishRequest(RunId(1), BatchNumber(batch), (), job_epoch=epoch), r.PublishAnswer)


def test_the_first_batch_that_is_decided_shows_that_the_version_has_come_up() -> None:
    leader = JobLeader()
    leader.register()
    leader.submit()
    leader.obey()
    upgrade = leader.upgrade(NEW)
    leader.obey()
    leader.obey()
    published_by(leader, leader.epoch(), 0)
    assert leader.job().has_come_up
    leader.done(upgrade)
    leader.next_leader(from_snapshot=False)
    assert leader.job().has_come_up


def test_the_name_of_a_new_job_does_not_shut_out_a_query() -> None:
    """Who may submit the job need not have the right to publish under its name. The run of the job takes that."""
    leader = JobLeader()
    query = r.OpenRunRequest("fraud", "checkpoint of a query")
    leader.ask(query, r.RunAnswer)
    leader.register()
    leader.submit()
    leader.obey()
    assert leader.ask(query, r.RunAnswer).run == 1, "it goes on"
    leader.ask(r.PublishRequest(RunId(1), BatchNumber(0), ()), r.PublishAnswer)
    with pytest.raises(Refused, match="only the job itself publishes under it"):
        leader.ask(r.OpenRunRequest("fraud", "another query"), r.RunAnswer)
    leader.ask(r.OpenRunRequest("fraud", "the job", job_epoch=leader.epoch()), r.RunAnswer)
    with pytest.raises(RunFenced):
        leader.ask(query, r.RunAnswer)


def test_only_the_present_assignment_of_a_job_opens_its_run() -> None:
    leader = running()
    first = leader.epoch()
    published_by(leader, first, 0)
    with pytest.raises(Refused, match="is the name of a job, and only the job itself publishes under it"):
        leader.ask(r.OpenRunRequest("fraud", "other"), r.RunAnswer)
    with pytest.raises(RunFenced):
        leader.ask(r.OpenRunRequest("fraud", "key", job_epoch=JobEpoch(first + 7)), r.RunAnswer)
    leader.register("a", 2)
    assert leader.epoch() == first + 1
    with pytest.raises(
        RunFenced, match=f"assignment {first} of job .fraud. is over, and assignment {first + 1} publishes"
    ):
        leader.ask(r.OpenRunRequest("fraud", "key", job_epoch=first), r.RunAnswer)
    published_by(leader, leader.epoch(), 1)
    late = r.PublishRequest(RunId(1), BatchNumber(2), (), job_epoch=first)
    with pytest.raises(RunFenced):
        leader.ask(late, r.PublishAnswer)
    leader.operate(OperationKind.DELETE)
    leader.settle(("a", 2))
    leader.ask(r.OpenRunRequest("other", "other"), r.RunAnswer)


def test_a_paused_driver_of_a_job_that_was_deleted_meanwhile_publishes_nothing() -> None:
    leader = running()
    epoch = leader.epoch()
    published_by(leader, epoch, 0)
    leader.operate(OperationKind.DELETE)
    leader.ask(q.LeaveAgentRequest("a", 1), q.ReportNoted)
    assert leader.jobs.named("fraud") is None
    late: tuple[r.Request, ...] = (
        r.PublishRequest(RunId(1), BatchNumber(1), (), job_epoch=epoch),
        r.OpenRunRequest("fraud", "key", job_epoch=epoch),
        r.OpenRunRequest("fraud", "another", job_epoch=epoch, start=r.RunStart(replay=True)),
    )
    for request in late:
        with pytest.raises(RunFenced, match="is over: stop this driver"):
            leader.ask(request, object)


def test_an_assignment_that_is_over_publishes_nothing_though_no_other_has_opened_the_run() -> None:
    """Another version may be about to go on from where nothing was published."""
    leader = running()
    first = leader.epoch()
    leader.ask(r.OpenRunRequest("fraud", "key", job_epoch=first), r.RunAnswer)
    leader.ask(q.LeaveAgentRequest("a", 1), q.ReportNoted)
    assert leader.job().assignment is None
    late = r.PublishRequest(RunId(1), BatchNumber(0), (), job_epoch=first)
    with pytest.raises(RunFenced):
        leader.ask(late, r.PublishAnswer)
    leader.register("a", 2)
    assert leader.epoch() > first
    with pytest.raises(RunFenced):
        leader.ask(late, r.PublishAnswer)
    assert leader.ask(r.OpenRunRequest("fraud", "key", job_epoch=leader.epoch()), r.RunAnswer).last_batch == -1


# Tokens of jobs.


def secured() -> JobLeader:
    """Access control is on, and a job of ann runs on agent a, which belongs to the principal agents."""
    leader = JobLeader()
    everything = AllowRequest("ann", ("cluster-admin",), parse_pattern("cluster"))
    token = CreateTokenRequest("0" * 16, "ab" * 32, "ann")
    for request in (everything, token, SetAccessModeRequest(AccessMode.ENFORCED)):
        leader.ask(request, AccessChanged, LOCAL_ADMIN)
    leader.ask(AllowRequest("agents", ("run-jobs",), parse_pattern("cluster")), AccessChanged, "ann")
    leader.register("a", 1, "agents")
    leader.submit(principal="ann")
    return leader


def test_nobody_else_keeps_the_lease_of_an_agent() -> None:
    """Its session is no secret."""
    leader = secured()
    leader.ask(AllowRequest("others", ("run-jobs",), parse_pattern("cluster")), AccessChanged, "ann")
    for _ in range(LEASE_MS // 1_000 + 1):
        with pytest.raises(CutwaterError):
            leader.ask(q.RenewAgentRequest("a", 1), q.AgentLease, "others")
        leader.pass_time(1_000)
    assert not leader.jobs.agents["a"].is_alive


def token_request(leader: JobLeader, number: int, **fields: Any) -> q.JobTokenRequest:
    expires = CutTime(leader.leader.now.wall + 3_600 * SECOND)
    asked = q.JobTokenRequest("a", 1, JobNumber(1), leader.epoch(), f"{number:016x}", f"{number:064x}", expires)
    return structs.replace(asked, **fields)


def tokens_of(leader: JobLeader) -> list[str]:
    return sorted(token.id for token in leader.leader.state.access.tokens.values() if token.of_job)


@pytest.mark.parametrize("end", ["report", "expiry", "session"])
def test_a_job_has_tokens_as_long_as_its_assignment(end: str) -> None:
    leader = secured()
    granted = leader.ask(token_request(leader, 1), q.JobTokenGranted, "agents")
    assert (granted.principal, granted.expires) == ("job:fraud", leader.leader.now.wall + 3_600 * SECOND)
    index = leader.leader.state.index
    assert leader.ask(token_request(leader, 1), q.JobTokenGranted, "agents") == granted
    assert leader.leader.state.index == index
    listed = leader.ask(ListTokensRequest(), TokenList, "ann")
    assert [token.id for token in listed.tokens] == ["0" * 16]
    assert len(leader.ask(ListTokensRequest("job:fraud"), TokenList, "ann").tokens) == 1
    leader.next_leader()
    for number in (2, 3):
        leader.pass_time(100)
        leader.ask(token_request(leader, number), q.JobTokenGranted, "agents")
    assert tokens_of(leader) == [f"{number:016x}" for number in (2, 3)], "one, and the one that it replaces"
    narrowed = leader.leader.state.access.narrowed_at
    if end == "report":
        request = q.EndAssignmentRequest("a", 1, JobNumber(1), leader.epoch(), RunEnd.FAILED)
        leader.ask(request, q.ReportNoted, "agents")
    elif end == "expiry":
        leader.pass_time(LEASE_MS + 500)
    else:
        leader.register("a", 2, "agents")
    assert tokens_of(leader) == []
    assert leader.leader.state.access.narrowed_at > narrowed


def test_a_token_of_a_job_is_for_its_agent_only_and_has_limits() -> None:
    leader = secured()
    long = token_request(leader, 1, expires=CutTime(2**60))
    granted = leader.ask(long, q.JobTokenGranted, "agents")
    assert granted.expires == leader.leader.now.wall + 24 * 3_600 * SECOND
    for request, principal, says in (
        (token_request(leader, 2), "mallory", "another principal registered"),
        (token_request(leader, 2, epoch=JobEpoch(9)), "agents", "is over"),
        (token_request(leader, 2, expires=CutTime(5)), "agents", "is past"),
        (token_request(leader, 1, sha256="cd" * 32), "agents", "there is a token"),
        (token_request(leader, 2, token="x"), "agents", "cannot be the id of a token"),
        (token_request(leader, 2, errand="7-1"), "agents", "was answered or given up"),
    ):
        with pytest.raises(CutwaterError, match=says):
            leader.ask(request, q.JobTokenGranted, principal)


def test_while_access_control_is_permissive_a_caller_without_the_right_gets_no_token() -> None:
    """It would hold when the rules are in force."""
    leader = secured()
    leader.ask(SetAccessModeRequest(AccessMode.PERMISSIVE), AccessChanged, "ann")
    leader.ask(RemoveRightsRequest("agents", parse_pattern("cluster")), AccessChanged, "ann")
    granted = leader.ask(token_request(leader, 1), q.JobTokenGranted, "agents")
    assert (granted.principal, granted.expires, tokens_of(leader)) == ("", 0, [])


def test_an_agent_that_registered_before_access_control_registers_again() -> None:
    """Whoever may list agents sees the number of its session."""
    leader = JobLeader()
    leader.register("a", 1)
    leader.submit()
    epoch = leader.epoch()
    with pytest.raises(Fenced, match="while access control was off"):
        leader.ask(q.RenewAgentRequest("a", 1), q.AgentLease, "mallory")
    leader.register("a", 1, "agents")
    leader.ask(q.RenewAgentRequest("a", 1), q.AgentLease, "agents")
    assert leader.epoch() == epoch, "its jobs stay"
    with pytest.raises(Refused, match="another principal registered"):
        leader.ask(q.RenewAgentRequest("a", 1), q.AgentLease, "mallory")
    # Access control is off again.
    leader.ask(q.RenewAgentRequest("a", 1), q.AgentLease)


def test_a_program_is_validated_with_a_token_of_its_job() -> None:
    leader = secured()
    leader.send(q.AskAgentRequest("new", ErrandKind.VALIDATE, spec=SPEC, wait_ms=2_000), "ann")
    (errand,) = leader.ask(q.WatchAgentRequest("a", 1), q.AgentOrders, "agents").errands
    granted = leader.ask(token_request(leader, 1, errand=errand.id), q.JobTokenGranted, "agents")
    assert (granted.principal, granted.expires) == ("job:new", leader.leader.now.wall + 600 * SECOND)
    for number in (3, 4, 5):
        leader.ask(token_request(leader, number, errand=errand.id), q.JobTokenGranted, "agents")
    assert len(tokens_of(leader)) == 4, "several programs of one job are validated at a time"
    leader.ask(q.AnswerErrandRequest("a", 1, errand.id, b"{}"), q.ReportNoted, "agents")
    with pytest.raises(Refused, match="was answered or given up"):
        leader.ask(token_request(leader, 2, errand=errand.id), q.JobTokenGranted, "agents")


def test_lists_show_what_the_caller_may_describe() -> None:
    leader = secured()
    leader.submit("bobs", principal="ann")
    rule = AllowRequest("bob", ("describe",), parse_pattern("job:bobs"))
    leader.ask(rule, AccessChanged, "ann")
    assert [job.name for job in leader.ask(q.ListJobsRequest(limit=1), q.JobList, "bob").jobs] == ["bobs"]
    assert len(leader.ask(q.ListJobsRequest(), q.JobList, "ann").jobs) == 2
    (summary,) = leader.ask(q.ListAgentsRequest(), q.AgentList, "bob").agents
    assert summary.jobs == ("bobs",)
