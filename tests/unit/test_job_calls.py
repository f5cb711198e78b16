"""Calls of the job service: what they ask, how often, and what they make of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec import structs

from cutwater.admin.jobs import JobCalls, as_error, body_hash, progress_of
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.agents import AgentDescription, AgentRecord
from cutwater.core.jobs.errand_bodies import DataInfo, LogAnswer, StateAnswer, ValidateAnswer, ValidateQuestion
from cutwater.core.jobs.job_records import JobPhase, JobRecord, JobSavepoint, JobVersion
from cutwater.core.jobs.job_spec import DesiredState, JobSpec
from cutwater.core.jobs.operations import (
    Operation,
    OperationError,
    OperationKind,
    OperationState,
    OperationStep,
    check_random_id,
    steps_of,
)
from cutwater.errors import (
    DeadlineExceeded,
    Fenced,
    InvalidArgument,
    NotAnswered,
    NotFound,
    PipelineFailed,
    Refused,
    Unavailable,
)
from cutwater.types import GLSN, CutTime, JobNumber, Revision

T = TypeVar("T")
SPEC = JobSpec("ab" * 32, "fraud.py:p", labels={"b": "2", "a": "1"})
ID = "0" * 31 + "1"
UPGRADE = Operation(ID, OperationKind.UPGRADE, JobNumber(1), "fraud", steps_of(OperationKind.UPGRADE), CutTime(1))


class Leader:
    """Answers as told, one after another; the last answer again and again. An exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.idempotent: list[bool] = []
        self.timeouts: list[int] = []

    def __call__(self, request: Any, expected: type[T], *, timeout_ms: int, idempotent: bool = True) -> Awaitable[T]:
        self.asked.append(request)
        self.idempotent.append(idempotent)
        self.timeouts.append(timeout_ms)
        return self._answer(request, expected)

    async def _answer(self, request: Any, expected: type[T]) -> T:
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        answer = answer(request) if callable(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, expected)
        return answer


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def begun(request: Any) -> q.OperationAnswer:
    """Answer as the leader does: with an operation of the id that was asked for."""
    return q.OperationAnswer(structs.replace(UPGRADE, id=request.operation))


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda jobs: jobs.submit("fraud", SPEC, savepoint=ID, from_job="old"), q.SubmitJobRequest),
        (lambda jobs: jobs.upgrade("fraud", SPEC, step_timeout=1.5), q.UpgradeJobRequest),
        (lambda jobs: jobs.rescale("fraud", 4, slots=2), q.RescaleJobRequest),
        (lambda jobs: jobs.roll_back("fraud", version=1), q.RollBackJobRequest),
        (lambda jobs: jobs.start("fraud", savepoint=ID), q.OperateJobRequest),
        (lambda jobs: jobs.operate("fraud", OperationKind.STOP, step_timeout=60), q.OperateJobRequest),
    ],
)
def test_every_change_has_an_operation_of_its_own_and_may_be_repeated(
    call: Callable[[JobCalls], Coroutine[Any, Any, q.OperationAnswer]], kind: type
) -> None:
    leader = Leader(begun)
    jobs = JobCalls(leader, timeout=3)
    first, second = run(call(jobs)).operation.id, run(call(jobs)).operation.id
    check_random_id("operation", first)
    assert first != second
    assert [type(request) for request in leader.asked] == [kind, kind]
    assert leader.idempotent == [True, True]
    assert all(0 < timeout <= 3_000 for timeout in leader.timeouts)
    assert structs.replace(leader.asked[0], operation="") == structs.replace(leader.asked[1], operation="")


def test_times_of_steps_are_in_milliseconds() -> None:
    leader = Leader(begun)
    run(JobCalls(leader).upgrade("fraud", SPEC, step_timeout=1.5))
    assert leader.asked[0].timeout_ms == 1_500


def test_the_same_call_under_a_key_has_the_same_hash_and_another_one_does_not() -> None:
    leader = Leader(begun)
    jobs = JobCalls(leader)
    for spec in (SPEC, structs.replace(SPEC, labels={"a": "1", "b": "2"}), structs.replace(SPEC, parallelism=2)):
        run(jobs.submit("fraud", spec, key="deploy-7"))
    keys = [request.key for request in leader.asked]
    assert [key.key for key in keys] == ["deploy-7"] * 3
    assert keys[0] == keys[1] != keys[2]
    assert keys[0].body == body_hash(leader.asked[0])
    assert body_hash(q.OperateJobRequest("a", OperationKind.STOP, ID)) != body_hash(
        q.OperateJobRequest("a", OperationKind.CANCEL, ID)
    )


def test_a_key_that_is_no_name_is_refused_before_anything_is_asked() -> None:
    leader = Leader(begun)
    with pytest.raises(InvalidArgument, match="idempotency key"):
        run(JobCalls(leader).submit("fraud", SPEC, key="a\nb"))
    assert not leader.asked


def test_what_would_not_be_the_same_twice_is_asked_once() -> None:
    leader = Leader(object())
    jobs = JobCalls(leader)
    run(jobs.forget_savepoint("fraud", ID))
    run(jobs.remove_agent("a"))
    run(jobs.drain_agent("a", is_draining=False))
    assert leader.idempotent == [False, False, True]
    assert leader.asked[2] == q.DrainAgentRequest("a", is_draining=False)


# Waiting.


def at_step(number: int, state: OperationState = OperationState.RUNNING, **more: Any) -> q.OperationAnswer:
    return q.OperationAnswer(structs.replace(UPGRADE, step=number, state=state, **more))


async def followed(jobs: JobCalls, timeout: float = 5) -> list[int]:
    return [answer.operation.step async for answer in jobs.follow_operation(ID, timeout=timeout)]


def test_following_an_operation_tells_each_change_once_and_ends_with_it() -> None:
    leader = Leader(at_step(0), at_step(0), at_step(1), at_step(1), at_step(3, OperationState.DONE))
    assert run(followed(JobCalls(leader))) == [0, 1, 3]
    # The first question does not wait: what is there is told at once.
    assert [request.wait_ms for request in leader.asked] == [0, 1_000, 1_000, 1_000, 1_000]


def test_a_time_without_a_leader_is_waited_out() -> None:
    leader = Leader(at_step(0), Unavailable("no leader"), at_step(3, OperationState.DONE))
    assert run(followed(JobCalls(leader))) == [0, 3]


def test_an_operation_that_is_not_known_is_not_waited_for() -> None:
    with pytest.raises(NotFound):
        run(followed(JobCalls(Leader(NotFound("there is no such operation")))))


def test_who_waits_for_too_short_a_time_is_told_how_far_it_has_come() -> None:
    async def slow(jobs: JobCalls) -> Operation:
        return await jobs.end_of(ID, timeout=0.05)

    with pytest.raises(DeadlineExceeded, match=r"not over after 0\.05 s \(upgrade: step 2 of 3, start\). It goes on"):
        run(slow(JobCalls(Leader(at_step(1)))))
    with pytest.raises(DeadlineExceeded, match=r"not over after 0\.05 s\. It goes on"):
        run(slow(JobCalls(Leader(Unavailable("no leader")))))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("refused", Refused),
        ("run_fenced", Fenced),
        ("pipeline_failed", Exception),
        ("job_ended", Exception),
    ],
)
def test_an_operation_that_failed_raises_its_error(code: str, kind: type[Exception]) -> None:
    leader = Leader(at_step(1, OperationState.FAILED, error=OperationError(code, "boom")))
    with pytest.raises(kind, match=r"^boom$") as caught:
        run(JobCalls(leader).end_of(ID))
    assert caught.value.code == code  # type: ignore[attr-defined]


def test_an_operation_that_succeeds_is_returned() -> None:
    done = at_step(3, OperationState.DONE)
    assert run(JobCalls(Leader(at_step(0), done)).end_of(ID)) == done.operation


def test_progress_is_told_in_steps() -> None:
    assert progress_of(UPGRADE) == "upgrade: step 1 of 3, stop"
    assert UPGRADE.next_step is OperationStep.STOP
    assert progress_of(at_step(3, OperationState.SUPERSEDED).operation) == "upgrade: superseded"


def test_errors_come_back_as_the_nearest_class_that_needs_no_more_than_a_message() -> None:
    assert type(as_error(OperationError("not_found", "gone"))) is NotFound
    fenced = as_error(OperationError("run_fenced", "by another"))
    assert (type(fenced), fenced.code) == (Fenced, "run_fenced")
    assert not isinstance(as_error(OperationError("pipeline_failed", "boom")), PipelineFailed)


# Lists.


def summary(name: str) -> q.JobSummary:
    return q.JobSummary(JobNumber(1), name, "ann", JobPhase.RUNNING, DesiredState.RUNNING, 1, 1)


def test_all_pages_of_a_list_are_asked_for() -> None:
    pages = q.JobList((summary("a"), summary("b")), more=True), q.JobList((summary("c"),))
    leader = Leader(*pages)
    assert [job.name for job in run(JobCalls(leader).jobs(owner="ann", phase=JobPhase.RUNNING))] == ["a", "b", "c"]
    assert [request.after for request in leader.asked] == ["", "b"]
    assert {(request.owner, request.phase) for request in leader.asked} == {("ann", JobPhase.RUNNING)}


def test_agents_come_in_pages_or_by_name() -> None:
    one = q.AgentSummary(AgentRecord(AgentDescription("a", 1), 7))
    leader = Leader(q.AgentList((one,), more=True), q.AgentList(()))
    assert run(JobCalls(leader).agents()) == (one,)
    assert run(JobCalls(Leader(q.AgentList((one,)))).agent("a")) == one
    with pytest.raises(NotFound, match="cutwater agent list"):
        run(JobCalls(Leader(q.AgentList(()))).agent("b"))


JOB = JobRecord(JobNumber(1), "fraud", "ann", (JobVersion(2, SPEC),), 2, last_version=2, revision=Revision(7))


def described(revision: int) -> q.JobDescription:
    return q.JobDescription(structs.replace(JOB, revision=Revision(revision)), JobPhase.RUNNING, (1, 2))


def test_a_version_that_goes_while_versions_are_listed_is_left_out() -> None:
    leader = Leader(described(7), NotFound("no version 1"), q.VersionAnswer(JobVersion(2, SPEC)))
    assert [version.number for version in run(JobCalls(leader).versions("fraud"))] == [2]


def test_following_a_job_tells_each_change_and_ends_with_its_time() -> None:
    async def follow(jobs: JobCalls) -> list[int]:
        return [found.job.revision async for found in jobs.follow_job("fraud", timeout=0.2)]

    leader = Leader(described(7), described(7), Unavailable("no leader"), described(9))
    assert run(follow(JobCalls(leader)))[:2] == [7, 9]
    assert [request.seen for request in leader.asked[:3]] == [0, 7, 7]


def test_following_from_a_revision_that_does_not_exist_yet_asks_no_more_often_than_from_another() -> None:
    async def follow(jobs: JobCalls) -> list[int]:
        return [found.job.revision async for found in jobs.follow_job("fraud", seen=1_000, timeout=0.1)]

    leader = Leader(described(7))
    assert run(follow(JobCalls(leader))) == [7]
    assert [request.seen for request in leader.asked[:3]] == [1_000, 7, 7], "the leader waits for a change after 7"


# Errands.


def answered(body: object) -> q.ErrandAnswer:
    return q.ErrandAnswer(msgspec.json.encode(body), "a")


def test_a_question_is_asked_until_the_agent_answers() -> None:
    told = ValidateAnswer("fraud", "pipeline fraud", (DataInfo("payments", "in", "id string"),), restored=("count",))
    leader = Leader(Unavailable("no answer yet"), Unavailable("no leader"), answered(told))
    found = run(JobCalls(leader).validate("fraud", SPEC, savepoint=ID, allow_non_restored_state=True))
    assert found == told
    assert len({(r.name, r.kind, r.body, r.savepoint) for r in leader.asked}) == 1
    assert msgspec.json.decode(leader.asked[0].body, type=ValidateQuestion) == ValidateQuestion(True)
    assert all(0 < request.wait_ms <= 1_000 for request in leader.asked)


def test_an_error_of_the_agent_is_not_asked_for_twice() -> None:
    leader = Leader(InvalidArgument("fraud.py, line 3: invalid syntax"))
    with pytest.raises(InvalidArgument, match="line 3"):
        run(JobCalls(leader).validate("fraud", SPEC))
    assert len(leader.asked) == 1


def test_a_question_without_an_answer_ends_with_the_reason() -> None:
    with pytest.raises(Unavailable, match="no agent with slots"):
        run(JobCalls(Leader(Unavailable("no agent with slots"))).validate("fraud", SPEC, timeout=0.3))


def test_that_an_agent_works_on_it_says_more_than_that_the_time_is_up() -> None:
    leader = Leader(NotAnswered("agent a has not answered yet"), DeadlineExceeded("no answer came in time"))
    with pytest.raises(NotAnswered, match="has not answered yet"):
        run(JobCalls(leader).validate("fraud", SPEC, timeout=0.5))
    assert all(request.wait_ms <= limit for request, limit in zip(leader.asked, (250, 150, 100), strict=False))


def test_an_answer_of_another_version_is_told_as_such() -> None:
    with pytest.raises(Unavailable, match="agent 'a' is of another version"):
        run(JobCalls(Leader(answered([1]))).verify_savepoint("fraud", ID))


def test_state_is_that_of_the_last_savepoint_unless_one_is_named() -> None:
    taken = tuple(JobSavepoint(f"{number:032x}", "default", "p", GLSN(1)) for number in (1, 2))
    job = structs.replace(described(7), job=structs.replace(JOB, savepoints=taken))
    leader = Leader(job, answered(StateAnswer({"count": [{"key": {"user": "ann"}}]})))
    assert run(JobCalls(leader).state("fraud", uid="count", key=("ann",))).operators["count"]
    assert leader.asked[1].savepoint == taken[1].id
    with pytest.raises(NotFound, match="has no savepoint"):
        run(JobCalls(Leader(described(7))).state("fraud"))


def test_a_savepoint_that_is_deleted_is_forgotten_too() -> None:
    leader = Leader(answered({"deleted": ID}), NotFound("there is no such savepoint"))
    run(JobCalls(leader).delete_savepoint("fraud", ID))
    assert [type(request) for request in leader.asked] == [q.AskAgentRequest, q.ForgetSavepointRequest]


def test_a_savepoint_without_files_is_told_with_a_way_to_forget_it() -> None:
    known = described(7)
    saved = JobSavepoint(ID, "default", "fraud/1", GLSN(7))
    known = structs.replace(known, job=structs.replace(known.job, savepoints=(saved,)))
    with pytest.raises(NotFound, match=f"no savepoint there. If .* `cutwater job forget-savepoint fraud {ID}`"):
        run(JobCalls(Leader(NotFound("no savepoint there"), known)).delete_savepoint("fraud", ID))
    with pytest.raises(NotFound, match=r"^the job has no savepoint$"):
        run(JobCalls(Leader(NotFound("the job has no savepoint"), described(7))).delete_savepoint("fraud", ID))


def test_the_other_questions_have_their_kinds() -> None:
    leader = Leader(answered({"glsn": 1}), answered({"glsn": 2}), answered(LogAnswer("boom", 2, 0, 4)))
    jobs = JobCalls(leader)
    assert run(jobs.describe_savepoint("fraud", ID)) == {"glsn": 1}
    assert run(jobs.diff_savepoints("fraud", ID, ID)) == {"glsn": 2}
    assert run(jobs.log_tail("fraud", bytes=100)).text == "boom"
    assert [request.kind for request in leader.asked] == ["savepoint-describe", "savepoint-diff", "log"]
