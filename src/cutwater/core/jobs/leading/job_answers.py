"""Answers questions about jobs and agents, as far as the caller may see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import structs

from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.agents import AgentRecord
from cutwater.core.jobs.job_records import JobRecord
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.job_requests import JobOrder, JobSummary, OrderedAction
from cutwater.core.jobs.leading.agent_handling import last_attempt
from cutwater.core.jobs.leading.assignment import Avoided, waits_for
from cutwater.core.jobs.leading.job_handling import find_job
from cutwater.core.jobs.operations import Operation, OperationStep
from cutwater.errors import InvalidArgument, NotFound
from cutwater.types import JobEpoch

OPERATIONS_SHOWN = 20
"""Number of operations of a job in its description, the newest first."""
OPERATIONS_LISTED_MAX = 200
PAGE_CHARS_MAX = 400_000
"""Size of a page, about, so that it fits into one message."""
ERROR_CHARS_SHOWN = 200

Sees = Callable[[str], bool]
"""Whether the caller may see the job with this name."""


def list_jobs(request: q.ListJobsRequest, jobs: JobRegistry, sees: Sees) -> q.JobList:
    if not 1 <= request.limit <= q.JOBS_PAGE_MAX:
        raise InvalidArgument(f"a page has 1 to {q.JOBS_PAGE_MAX} jobs, not {request.limit}")
    found: list[JobSummary] = []
    size = 0
    for name in jobs.names_after(request.after):
        job = jobs.named(name)
        if job is None or (request.owner and job.owner != request.owner) or not sees(name):
            continue
        if request.phase is not None and job.phase is not request.phase:
            continue
        if len(found) >= request.limit or size > PAGE_CHARS_MAX:
            return q.JobList(tuple(found), True, jobs.revision)
        summary = summary_of(job)
        found.append(summary)
        size += len(summary.name) + len(summary.owner) + len(summary.agent) + len(summary.error) + 200
    return q.JobList(tuple(found), False, jobs.revision)


def summary_of(job: JobRecord) -> JobSummary:
    spec, assignment, failure = job.spec, job.assignment, job.present_failure
    return JobSummary(
        job.number,
        job.name,
        job.owner,
        job.phase,
        job.desired,
        job.version,
        spec.parallelism,
        assignment.agent if assignment is not None else "",
        job.operation,
        job.since,
        f"{failure.code}: {failure.message}"[:ERROR_CHARS_SHOWN] if failure is not None else "",
        job.revision,
    )


def describe_job(
    job: JobRecord, jobs: JobRegistry, progress: q.JobProgress | None, avoided: Avoided
) -> q.JobDescription:
    return q.JobDescription(
        structs.replace(job, versions=(job.version_of(job.version),), before=None),
        job.phase,
        tuple(version.number for version in job.versions),
        tuple(operations_of(job, jobs, OPERATIONS_SHOWN)),
        progress,
        waits_for(job, jobs, avoided),
    )


def operations_of(job: JobRecord, jobs: JobRegistry, limit: int) -> list[Operation]:
    """Return the operations of a job, the newest first."""
    found: list[Operation] = []
    for operation in reversed(jobs.operations.values()):
        if operation.job == job.number:
            found.append(operation)
            if len(found) >= limit:
                break
    return found


def list_operations(request: q.ListOperationsRequest, jobs: JobRegistry) -> q.OperationList:
    if not 1 <= request.limit <= OPERATIONS_LISTED_MAX:
        raise InvalidArgument(f"ask for 1 to {OPERATIONS_LISTED_MAX} operations, not {request.limit}")
    job = find_job(jobs, request.name)
    return q.OperationList(tuple(operations_of(job, jobs, request.limit)))


def find_operation(jobs: JobRegistry, identifier: str) -> Operation:
    operation = jobs.operations.get(identifier)
    if operation is None:
        raise NotFound(f"there is no operation {identifier[:80]!r}, or it was over long ago and is forgotten")
    return operation


def fetch_version(request: q.FetchVersionRequest, jobs: JobRegistry) -> q.VersionAnswer:
    job = find_job(jobs, request.name)
    number = request.version or job.version
    if not job.has_version(number):
        raise NotFound(f"job {job.name!r} has no version {number}, or it was dropped as the oldest of too many")
    return q.VersionAnswer(job.version_of(number))


def list_agents(
    request: q.ListAgentsRequest, jobs: JobRegistry, sees: Sees, silence: Callable[[AgentRecord], int]
) -> q.AgentList:
    names: Iterable[str] = sorted(name for name in jobs.agents if name > request.after)
    if request.name:
        names = (request.name,) if request.name in jobs.agents else ()
    found: list[q.AgentSummary] = []
    size = 0
    for name in names:
        if size > PAGE_CHARS_MAX:
            return q.AgentList(tuple(found), True)
        agent = jobs.agents[name]
        its = tuple(sorted(job.name for job in jobs.on_agent(name) if sees(job.name)))
        found.append(q.AgentSummary(agent, jobs.used_slots(name), its, silence(agent)))
        offers = agent.description
        size += sum(map(len, its)) + sum(len(k) + len(v) for k, v in offers.labels.items()) + 500
        size += sum(len(root.place) + len(root.name) for root in (*offers.checkpoint_roots, *offers.savepoint_roots))
    return q.AgentList(tuple(found))


# What agents ask.


def orders_of(agent: AgentRecord, jobs: JobRegistry) -> tuple[JobOrder, ...]:
    return tuple(order_of(job, jobs) for job in sorted(jobs.on_agent(agent.name), key=lambda job: job.number))


def order_of(job: JobRecord, jobs: JobRegistry) -> JobOrder:
    """Return what the agent that has a job is to do with it."""
    assignment, operation = job.assignment, jobs.operation_of(job)
    assert assignment is not None
    step = operation.next_step if operation is not None else None
    plain = JobOrder(job.number, job.name, assignment.epoch, job.version, OrderedAction.RUN)
    if assignment.is_releasing and step not in (OperationStep.END, OperationStep.STOP):
        return structs.replace(plain, action=OrderedAction.END, is_releasing=True)
    action = _ACTIONS.get(step) if step is not None else None
    if operation is None or action is None:
        return plain
    order = structs.replace(
        plain, action=action, operation=operation.id, step=operation.step, timeout_ms=operation.timeout_ms
    )
    if action is OrderedAction.VALIDATE:
        savepoint = job.savepoint_of(operation.savepoint or job.start.savepoint)
        return structs.replace(order, savepoint=savepoint, version_to=operation.version)
    return order


_ACTIONS = {
    OperationStep.SAVEPOINT: OrderedAction.SAVEPOINT,
    OperationStep.VALIDATE: OrderedAction.VALIDATE,
    OperationStep.STOP: OrderedAction.STOP,
    OperationStep.END: OrderedAction.END,
}


def assigned_job(job: JobRecord, epoch: JobEpoch) -> q.AssignedJob:
    savepoint = job.savepoint_of(job.start.savepoint) if job.start.savepoint else None
    return q.AssignedJob(
        job.number,
        job.name,
        job.owner,
        epoch,
        job.version_of(job.version),
        job.start,
        savepoint,
        last_attempt(job, epoch),
    )
