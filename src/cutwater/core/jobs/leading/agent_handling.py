"""Turns what agents report into decisions, after validating it against the state.

A report that was stored before is noted again without a decision, since the agent may not have got the answer. A report
about an assignment that is over is refused, and so is every request of a session that is over.
"""

from __future__ import annotations

from msgspec import structs

from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.agents import AgentRecord, check_agent
from cutwater.core.jobs.job_records import (
    ERROR_CHARS_MAX,
    Assignment,
    JobRecord,
    RunEnd,
    RunFailure,
    check_pointer,
    check_savepoint,
)
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.operations import OperationError, OperationStep
from cutwater.errors import Fenced, InvalidArgument, NotFound, Refused
from cutwater.types import JobEpoch, JobNumber

AGENTS_MAX = 1_000
CODE_CHARS_MAX = 40

Reported = tuple[j.JobDecision, ...]

REPORTS = (
    q.BeginAttemptRequest
    | q.EndAttemptRequest
    | q.EndAssignmentRequest
    | q.NoteCheckpointRequest
    | q.NoteBatchRequest
    | q.NoteSavepointRequest
    | q.FinishStepRequest
)
"""Requests of agents that change a job. The answer to all of them is ``ReportNoted``."""

_TAKING = (OperationStep.SAVEPOINT, OperationStep.STOP)
_MAY_FAIL = (*_TAKING, OperationStep.VALIDATE)
"""Steps of an agent that may fail. It never fails to end a job."""


def register(request: q.RegisterAgentRequest, jobs: JobRegistry, principal: str | None) -> Reported:
    """``principal`` is None while access control is off: then everybody may do everything."""
    check_agent(request.agent, request.session)
    known = jobs.agents.get(request.agent.name)
    if known is None:
        if len(jobs.agents) >= AGENTS_MAX:
            raise Refused(
                f"there are {len(jobs.agents)} agents, which is the most: remove those that are gone with `cutwater "
                "agent remove`"
            )
    else:
        _check_principal(known, principal)
        is_same = (known.description, known.session, known.is_alive) == (request.agent, request.session, True)
        if is_same and principal in (None, known.principal):
            return ()
    return (j.RegisterAgent(request.agent, request.session),)


def session_of(request: q.FromAgent, jobs: JobRegistry, principal: str | None) -> AgentRecord:
    """Return the agent whose session sent the request. Raise if that session does not speak for the agent."""
    agent = jobs.agents.get(request.agent)
    if agent is None:
        raise Fenced(f"agent {request.agent!r} is not known, or was removed: register it")
    _check_principal(agent, principal)
    if principal and not agent.principal:
        # Its session is no secret: whoever may list agents sees it.
        raise Fenced(f"agent {agent.name!r} registered while access control was off: register it again")
    if agent.session != request.session:
        raise Fenced(f"another session speaks for agent {agent.name!r} now: give each agent a name of its own")
    if not agent.is_alive:
        raise Fenced(f"the lease of agent {agent.name!r} has ended, and its jobs went to others: register it again")
    return agent


def _check_principal(agent: AgentRecord, principal: str | None) -> None:
    if agent.principal and principal is not None and agent.principal != principal:
        raise Refused(
            f"another principal registered agent {agent.name!r}, and only that one speaks for it: choose another name, "
            f"or remove the agent first with `cutwater agent remove {agent.name}`"
        )


def drain(request: q.DrainAgentRequest, jobs: JobRegistry) -> Reported:
    agent = jobs.agents.get(request.agent)
    if agent is None:
        raise _unknown(request.agent)
    return () if agent.is_draining == request.is_draining else (j.DrainAgent(agent.name, request.is_draining),)


def remove(request: q.RemoveAgentRequest, jobs: JobRegistry) -> Reported:
    agent = jobs.agents.get(request.agent)
    if agent is None:
        raise _unknown(request.agent)
    if agent.is_alive:
        raise Refused(f"agent {agent.name!r} is alive: end its process first (`cutwater agent drain` moves its jobs)")
    return (j.RemoveAgent(agent.name),)


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no agent {name!r}: `cutwater agent list` shows those that exist")


def assigned(jobs: JobRegistry, agent: str, number: JobNumber, epoch: JobEpoch) -> tuple[JobRecord, Assignment]:
    """Return a job that the agent has under this epoch. Raise if it has it no more."""
    job = jobs.jobs.get(number)
    assignment = job.assignment if job is not None else None
    if job is None or assignment is None or assignment.epoch != epoch or assignment.agent != agent:
        raise _is_over(number, epoch)
    return job, assignment


def _is_over(number: JobNumber, epoch: JobEpoch) -> Refused:
    return Refused(f"the assignment of job number {number} with epoch {epoch} is over: end its processes")


def report(request: REPORTS, jobs: JobRegistry) -> Reported:
    """Return the decisions that follow from a report of a session that speaks for its agent."""
    if isinstance(request, q.EndAssignmentRequest | q.NoteSavepointRequest) and _has_ended(request, jobs):
        return ()
    job, assignment = assigned(jobs, request.agent, request.job, request.epoch)
    match request:
        case q.BeginAttemptRequest():
            return _begin_attempt(request, job, assignment)
        case q.EndAttemptRequest():
            return _end_attempt(request, job, assignment)
        case q.EndAssignmentRequest():
            return _end(request, job, jobs)
        case q.NoteCheckpointRequest():
            check_pointer(request.checkpoint)
            is_same = job.start.checkpoint == request.checkpoint
            return () if is_same else (j.NoteCheckpoint(job.number, assignment.epoch, request.checkpoint),)
        case q.NoteBatchRequest():
            if job.has_come_up or request.batch < 0:
                return ()
            return (j.NoteFirstBatch(job.number, assignment.epoch, request.batch, request.glsn),)
        case q.NoteSavepointRequest():
            return _note_savepoint(request, job, jobs)
        case q.FinishStepRequest():
            return _finish_step(request, job, jobs)


def _has_ended(request: q.EndAssignmentRequest | q.NoteSavepointRequest, jobs: JobRegistry) -> bool:
    """Whether the assignment is over, as the agent says. It may have said so before. The job may also be gone."""
    if isinstance(request, q.NoteSavepointRequest) and not request.has_ended:
        return False
    job = jobs.jobs.get(request.job)
    is_known = request.epoch <= jobs.last_epoch and request.job <= jobs.last_job
    is_present = job is not None and job.assignment is not None and job.assignment.epoch == request.epoch
    if isinstance(request, q.NoteSavepointRequest) and not is_present:
        return job is not None and job.savepoint_of(request.savepoint.id) is not None
    return is_known and not is_present


def _begin_attempt(request: q.BeginAttemptRequest, job: JobRecord, assignment: Assignment) -> Reported:
    check_pointer(request.checkpoint)
    last = last_attempt(job, assignment.epoch)
    if assignment.attempt == request.attempt == last:
        is_same = job.start.checkpoint is not None and job.start.checkpoint.path == request.checkpoint.path
        if is_same:
            return ()
        raise InvalidArgument(f"attempt {request.attempt} of job {job.name!r} runs with another checkpoint")
    if request.attempt != last + 1:
        raise InvalidArgument(f"the next attempt of job {job.name!r} is number {last + 1}, not {request.attempt}")
    if assignment.attempt:
        raise Refused(f"attempt {assignment.attempt} of job {job.name!r} has not ended: report its end first")
    return (j.BeginAttempt(job.number, assignment.epoch, request.attempt, request.checkpoint),)


def last_attempt(job: JobRecord, epoch: JobEpoch) -> int:
    return max((attempt.number for attempt in job.attempts if attempt.epoch == epoch), default=0)


def _end_attempt(request: q.EndAttemptRequest, job: JobRecord, assignment: Assignment) -> Reported:
    if assignment.attempt != request.attempt:
        if 0 < request.attempt <= last_attempt(job, assignment.epoch):
            return ()
        raise InvalidArgument(f"attempt {request.attempt} of job {job.name!r} has not begun")
    return (
        j.EndAttempt(job.number, assignment.epoch, request.attempt, request.end, _checked_failure(request.failure)),
    )


def _end(request: q.EndAssignmentRequest, job: JobRecord, jobs: JobRegistry) -> Reported:
    end = request.end
    if end is RunEnd.LOST:
        raise InvalidArgument("that an assignment is lost is decided, not reported")
    if end is RunEnd.STOPPED:
        raise InvalidArgument("a job stops with a savepoint: report it, and that no process is left, together")
    if end is RunEnd.CANCELLED and jobs.next_step(job) is not OperationStep.END:
        # What asked for the end was itself ended meanwhile: the job goes on, here or elsewhere.
        end = RunEnd.RELEASED
    return (j.EndAssignment(job.number, request.epoch, end, _checked_failure(request.failure)),)


def _note_savepoint(request: q.NoteSavepointRequest, job: JobRecord, jobs: JobRegistry) -> Reported:
    check_savepoint(request.savepoint)
    if job.savepoint_of(request.savepoint.id) is not None:
        return ()
    step = _check_step(request, job, jobs)
    if step not in _TAKING:
        raise InvalidArgument(f"the next step of operation {request.operation} is {step}, which takes no savepoint")
    if request.has_ended is not (step is OperationStep.STOP):
        raise InvalidArgument(
            "after the step stop no process of the job is left, and after the step savepoint it runs on: the step is "
            f"{step}"
        )
    agent = jobs.agents[request.agent].description
    if agent.savepoint_root(request.savepoint.root) is None:
        raise InvalidArgument(f"agent {agent.name!r} has no savepoint root {request.savepoint.root!r}")
    note = j.NoteSavepoint(job.number, request.epoch, request.operation, request.step, request.savepoint)
    return (note, j.EndAssignment(job.number, request.epoch, RunEnd.STOPPED)) if request.has_ended else (note,)


def _finish_step(request: q.FinishStepRequest, job: JobRecord, jobs: JobRegistry) -> Reported:
    operation = jobs.operations.get(request.operation)
    is_of_job = operation is not None and operation.job == job.number
    if operation is not None and is_of_job and (operation.next_step is None or operation.step > request.step):
        return ()
    step = _check_step(request, job, jobs)
    if request.error is not None:
        if step not in _MAY_FAIL:
            raise InvalidArgument(f"the step {step} does not fail: report how the assignment ended")
        return (j.FailOperation(request.operation, request.step, _checked_error(request.error)),)
    if step is not OperationStep.VALIDATE:
        raise InvalidArgument(f"the step {step} ends by itself")
    return (j.FinishStep(request.operation, request.step, request.epoch),)


def _check_step(
    request: q.NoteSavepointRequest | q.FinishStepRequest, job: JobRecord, jobs: JobRegistry
) -> OperationStep:
    """Return the step that the report is about, if it is the next one."""
    operation = jobs.operation_of(job)
    step = operation.next_step if operation is not None else None
    if operation is None or operation.id != request.operation or operation.step != request.step or step is None:
        raise Refused(f"step {request.step} of operation {request.operation} is not the next one: ask for the orders")
    return step


def _checked_failure(failure: RunFailure | None) -> RunFailure | None:
    if failure is None:
        return None
    error = _checked_error(OperationError(failure.code, failure.message))
    return structs.replace(failure, code=error.code, message=error.message)


def _checked_error(error: OperationError) -> OperationError:
    """Return an error whose texts are not too long to store."""
    return OperationError(error.code[:CODE_CHARS_MAX], error.message[:ERROR_CHARS_MAX])
