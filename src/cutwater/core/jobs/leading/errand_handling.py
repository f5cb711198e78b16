"""Gives errands to agents, takes their answers, and grants tokens to the jobs that agents run."""

from __future__ import annotations

from collections.abc import Iterable

from cutwater.core.access.access_decisions import AccessMode, CreateToken
from cutwater.core.access.access_state import TOKENS_MAX, AccessState
from cutwater.core.access.principals import JobOfToken, check_token
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.agents import AgentRecord
from cutwater.core.jobs.errands import ERRAND_ANSWER_BYTES_MAX, ERRAND_BYTES_MAX, Errand, ErrandKind
from cutwater.core.jobs.job_records import ERROR_CHARS_MAX, JobRecord, JobSavepoint
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.job_spec import JobSpec, check_job_name, check_spec, principal_of_job
from cutwater.core.jobs.leading.agent_handling import CODE_CHARS_MAX, assigned
from cutwater.core.jobs.leading.assignment import reaches, why_not_offered
from cutwater.core.jobs.leading.errand_board import ErrandBoard, OpenErrand
from cutwater.core.jobs.leading.job_handling import check_may_delete, find_job
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import AlreadyExists, InvalidArgument, NotAnswered, NotFound, Refused
from cutwater.types import SECOND, CutTime, Instant, JobEpoch, JobNumber

JOB_TOKEN_US_MAX = 24 * 3_600 * SECOND
"""How long a token of a job is valid at most. The agent makes another one before."""
ERRAND_TOKEN_US_MAX = 600 * SECOND

_OF_SAVEPOINT = frozenset(
    (
        ErrandKind.SAVEPOINT_DESCRIBE,
        ErrandKind.SAVEPOINT_VERIFY,
        ErrandKind.SAVEPOINT_DIFF,
        ErrandKind.SAVEPOINT_DELETE,
        ErrandKind.STATE,
    )
)


def give_out(
    identifier: str,
    question: bytes,
    request: q.AskAgentRequest,
    jobs: JobRegistry,
    board: ErrandBoard,
    now: Instant,
    principal: str,
) -> None:
    """Make an errand from a question and choose the agent that is to answer."""
    check_job_name(request.name)
    if len(request.body) > ERRAND_BYTES_MAX:
        raise InvalidArgument(f"a question has at most {ERRAND_BYTES_MAX} bytes, not {len(request.body)}")
    job = jobs.named(request.name)
    spec, savepoint, other = request.spec, None, None
    if request.kind is ErrandKind.VALIDATE:
        if spec is None:
            raise InvalidArgument("say which specification is to be validated")
        check_spec(spec)
    else:
        if spec is not None:
            # The right to look at a job is no right to run a program with its rights.
            raise InvalidArgument(f"a question of kind {request.kind} takes no specification: that is for validate")
        job = find_job(jobs, request.name)
    if request.savepoint:
        savepoint = _savepoint(job, request.savepoint)
        if request.kind is ErrandKind.SAVEPOINT_DELETE and job is not None:
            check_may_delete(job, savepoint.id, jobs)
    elif request.kind in _OF_SAVEPOINT:
        raise InvalidArgument(f"say which savepoint of job {request.name!r} the question is about ({request.kind})")
    if request.kind is ErrandKind.SAVEPOINT_DIFF:
        other = _savepoint(job, request.other_savepoint)
    board.check_room(principal)
    needed = [one for one in (savepoint, other) if one is not None]
    agent = _choose(request, job, spec, needed, jobs)
    has_it = job is not None and job.assignment is not None and job.assignment.agent == agent.name
    errand = Errand(
        identifier,
        request.kind,
        request.name,
        request.body,
        spec,
        savepoint,
        other,
        job.number if job is not None else JobNumber(0),
        job.epoch if job is not None and has_it else JobEpoch(0),
        principal,
    )
    board.add(question, errand, agent.name, agent.session, now)


def _savepoint(job: JobRecord | None, identifier: str) -> JobSavepoint:
    found = job.savepoint_of(identifier) if job is not None else None
    if found is None:
        raise NotFound(f"the job has no savepoint {identifier[:80]!r}: `cutwater job describe` shows those that it has")
    return found


def _choose(
    request: q.AskAgentRequest,
    job: JobRecord | None,
    spec: JobSpec | None,
    savepoints: Iterable[JobSavepoint],
    jobs: JobRegistry,
) -> AgentRecord:
    """Return the agent that can answer. That of the job comes first, then one that does not drain."""
    present = job.assignment.agent if job is not None and job.assignment is not None else ""

    def why_not(agent: AgentRecord) -> str:
        if not agent.is_alive:
            return "is not alive"
        if request.kind is ErrandKind.LOG and agent.name != present:
            return "does not have the job"
        for savepoint in savepoints:
            if not reaches(agent, savepoint):
                return f"does not reach savepoint {savepoint.id}, which agent {savepoint.agent} took"
        return why_not_offered(agent, spec) if spec is not None else ""

    if request.kind is ErrandKind.LOG and not present:
        raise Refused(f"no agent has job {request.name!r} now: the logs of its attempts are stored")
    if request.agent and request.agent not in jobs.agents:
        raise NotFound(f"there is no agent {request.agent!r}: `cutwater agent list` shows those that exist")
    asked = [jobs.agents[request.agent]] if request.agent else list(jobs.agents.values())
    fit = [agent for agent in asked if not why_not(agent)]
    if fit:
        return min(fit, key=lambda agent: (agent.name != present, agent.is_draining, agent.name))
    reasons = "; ".join(f"agent {agent.name} {why_not(agent)}" for agent in asked[:5])
    raise Refused(f"no agent can answer this: {reasons or 'none has registered'}")


def answer(request: q.AnswerErrandRequest, board: ErrandBoard) -> None:
    size = len(request.body)
    error = request.error
    if size > ERRAND_ANSWER_BYTES_MAX:
        error = OperationError(
            "resource_exhausted",
            f"the answer has {size} bytes, and {ERRAND_ANSWER_BYTES_MAX} is the most: ask for less",
        )
    if error is not None:
        error = OperationError(error.code[:CODE_CHARS_MAX], error.message[:ERROR_CHARS_MAX])
    board.answer(request.errand, request.agent, request.body, error)


def take_answer(errand: OpenErrand, board: ErrandBoard) -> q.ErrandAnswer:
    """Return what the agent answered, and forget it: who asks the same again asks anew."""
    board.remove(errand.errand.id)
    return q.ErrandAnswer(errand.body or b"", errand.agent, errand.error)


def not_answered(errand: OpenErrand | None) -> NotAnswered:
    who = f"agent {errand.agent}" if errand is not None else "the agent"
    return NotAnswered(f"{who} has not answered yet: ask the same again")


# Tokens.


def grant_token(
    request: q.JobTokenRequest,
    jobs: JobRegistry,
    access: AccessState,
    board: ErrandBoard,
    now: CutTime,
    *,
    may_run: bool,
) -> tuple[tuple[CreateToken, ...], q.JobTokenGranted]:
    """Make a token known. While access control is off, no token is needed and none is made. While it is permissive,
    callers without the right to run jobs get here, too (``may_run``). They get none either: it would hold later."""
    name, of_job, longest = _use_of_token(request, jobs, board)
    if access.mode is AccessMode.OFF or not may_run:
        return (), q.JobTokenGranted("", CutTime(0))
    check_token(request.token, request.sha256)
    principal = principal_of_job(name)
    if request.expires <= now:
        raise InvalidArgument(f"the token would expire at {request.expires}, which is past (now: {now})")
    known = access.tokens.get(request.token)
    if known is not None:
        if (known.sha256, known.principal, known.of_job) != (request.sha256, principal, of_job):
            raise AlreadyExists(f"there is a token {request.token} already: make another one, with a random id")
        return (), q.JobTokenGranted(principal, known.expires)
    count = access.count_tokens()
    if count >= TOKENS_MAX:
        raise Refused(f"there are {count} tokens, which is the most: revoke those that are not needed")
    expires = CutTime(min(request.expires, now + longest))
    made = CreateToken(request.token, request.sha256, principal, (), expires, of_job=of_job)
    return (made,), q.JobTokenGranted(principal, expires)


def _use_of_token(request: q.JobTokenRequest, jobs: JobRegistry, board: ErrandBoard) -> tuple[str, JobOfToken, int]:
    """Return the name of the job, what the token is for, and how long it may be valid."""
    if not request.errand:
        job, _ = assigned(jobs, request.agent, request.job, request.epoch)
        return job.name, JobOfToken(job.number, request.epoch), JOB_TOKEN_US_MAX
    found = board.get(request.errand)
    if found is None or found.agent != request.agent or found.is_answered:
        raise Refused(f"errand {request.errand!r} was answered or given up: end its processes")
    if found.errand.kind is not ErrandKind.VALIDATE:
        raise Refused(f"an errand of kind {found.errand.kind} needs no token")
    return found.errand.name, JobOfToken(found.errand.job, JobEpoch(0)), ERRAND_TOKEN_US_MAX
