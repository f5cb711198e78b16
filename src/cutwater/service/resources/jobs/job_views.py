"""Jobs, operations and agents as the API shows them. Every field is always there; null stands for what is not.

The structs of the core are what is stored and sent among servers. These may stay as they are when those change.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from cutwater.core.jobs import errand_bodies as b
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.agents import AgentRoot, JobIsolation
from cutwater.core.jobs.job_records import (
    AttemptRecord,
    JobPhase,
    JobRecord,
    JobSavepoint,
    JobVersion,
    RunEnd,
    RunFailure,
)
from cutwater.core.jobs.job_spec import DesiredState, JobSpec
from cutwater.core.jobs.operations import Operation, OperationKind, OperationState, OperationStep

JOB_IN_PATH: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$"}
ID_IN_PATH: dict[str, Any] = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
RandomId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
JobName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]


class FailureView(Struct, frozen=True):
    """``glsn`` is the record at which it failed, if it is known."""

    code: str
    message: str
    glsn: int | None = None


class OperationView(Struct, frozen=True):
    """What was asked of a job, and how far it has come. ``next_step`` is null when it is over. ``version`` is the one
    with which the job runs afterwards. ``advice`` says what it waits for, or what else a user should know."""

    id: str
    kind: OperationKind
    job: str
    state: OperationState
    is_over: bool
    steps: tuple[OperationStep, ...]
    steps_done: int
    next_step: OperationStep | None
    begun: int
    finished: int | None
    principal: str | None
    version: int | None
    version_before: int | None
    savepoint: str | None
    error: FailureView | None
    advice: str | None = None


class JobRow(Struct, frozen=True):
    """A job in a list. ``operation`` is the one in progress, ``since`` when its phase became the
    present one, ``error`` why the present version does not run."""

    name: str
    number: int
    owner: str | None
    phase: JobPhase
    desired: DesiredState
    version: int
    parallelism: int
    agent: str | None
    operation: str | None
    since: int
    error: str | None
    revision: int


class VersionView(Struct, frozen=True):
    """A version of a job. ``has_come_up``: it ever decided a batch, or came to its end without one."""

    number: int
    made: int
    principal: str | None
    has_come_up: bool
    spec: SpecView


class SpecView(Struct, frozen=True):
    """What a version of a job is asked to run. The fields are those with which it is submitted."""

    program: str
    entry: str
    arguments: dict[str, str]
    conf: dict[str, str]
    parallelism: int
    slots: int
    labels: dict[str, str]
    master: str
    checkpoint_root: str
    savepoint_root: str
    restart: str
    requirements: str
    memory_bytes: int
    cpus: float


class AttemptView(Struct, frozen=True):
    epoch: int
    attempt: int
    agent: str
    version: int
    begun: int
    ended: int | None
    end: RunEnd | None
    failure: FailureView | None


class SavepointView(Struct, frozen=True):
    """A savepoint of a job. ``path`` is below the root of this name at agents. ``bytes`` is null if it is unknown."""

    id: str
    root: str
    path: str
    glsn: int
    batch: int | None
    version: int | None
    agent: str | None
    bytes: int | None
    taken: int


class CheckpointView(Struct, frozen=True):
    root: str
    path: str
    batch: int | None
    glsn: int


class ProgressView(Struct, frozen=True):
    """How far a job has come, as its agent has told the leader lately. ``lag_rows`` is null if it is unknown."""

    batch: int | None
    glsn: int
    rows_per_s: float
    lag_rows: int | None
    watermark: int
    state_bytes: int


class JobView(Struct, frozen=True):
    """A job. ``versions`` are the numbers of all versions that are kept, and ``spec`` is the present one.
    ``has_come_up``: the present version has decided a batch. ``waits_for`` says why it has no agent, if it wants one,
    and ``pinned_to`` names the agent that has its checkpoint, if others cannot reach that. ``operations`` are the last
    ones, the newest first."""

    name: str
    number: int
    owner: str | None
    phase: JobPhase
    desired: DesiredState
    version: int
    versions: tuple[int, ...]
    spec: SpecView
    created: int
    has_come_up: bool
    epoch: int
    agent: str | None
    attempt: int | None
    waits_for: str | None
    pinned_to: str | None
    checkpoint: CheckpointView | None
    savepoint: str | None
    """The savepoint from which it began."""
    end: RunEnd | None
    failure: FailureView | None
    attempts: tuple[AttemptView, ...]
    savepoints: int
    operation: str | None
    operations: tuple[OperationView, ...]
    progress: ProgressView | None
    revision: int


class DataView(Struct, frozen=True):
    """A topic that a program reads or writes. ``schema`` is null if the topic does not exist, or has none."""

    topic: str
    uid: str | None
    schema: str | None


class ValidationView(Struct, frozen=True):
    """What a program is, and what a savepoint would restore: operators and states by uid. ``plan`` is text."""

    pipeline: str
    plan: str
    sources: tuple[DataView, ...]
    sinks: tuple[DataView, ...]
    restored: tuple[str, ...]
    left_behind: tuple[str, ...]
    empty: tuple[str, ...]
    notes: tuple[str, ...]


class VerificationView(Struct, frozen=True):
    """A savepoint is intact. One that is not is a problem, ``savepoint_damaged``."""

    files: int
    bytes: int
    intact: bool


class StateView(Struct, frozen=True):
    """Rows of state by the uid of the operator. ``more``: there are further ones."""

    operators: dict[str, list[dict[str, Any]]]
    more: bool


class AgentView(Struct, frozen=True):
    """An agent and its jobs, as far as the caller may see them. ``silent_ms``: how long the leader has not heard of it,
    at most since it leads."""

    name: str
    host: str | None
    version: str | None
    principal: str | None
    is_alive: bool
    is_draining: bool
    since: int
    silent_ms: int
    slots: int
    used_slots: int
    jobs: tuple[str, ...]
    labels: dict[str, str]
    masters: tuple[str, ...]
    checkpoint_roots: tuple[RootView, ...]
    savepoint_roots: tuple[RootView, ...]
    isolation: JobIsolation


class RootView(Struct, frozen=True):
    name: str
    is_shared: bool
    place: str


def view_failure(failure: RunFailure | None) -> FailureView | None:
    return None if failure is None else FailureView(failure.code, failure.message, failure.glsn or None)


def view_operation(operation: Operation, advice: str = "") -> OperationView:
    error = operation.error
    return OperationView(
        operation.id,
        operation.kind,
        operation.name,
        operation.state,
        operation.state is not OperationState.RUNNING,
        operation.steps,
        operation.step,
        operation.next_step,
        operation.begun,
        operation.finished or None,
        operation.principal or None,
        operation.version or None,
        operation.version_before or None,
        operation.savepoint or None,
        None if error is None else FailureView(error.code, error.message),
        advice or None,
    )


def view_row(job: q.JobSummary) -> JobRow:
    return JobRow(
        job.name,
        job.number,
        job.owner or None,
        job.phase,
        job.desired,
        job.version,
        job.parallelism,
        job.agent or None,
        job.operation or None,
        job.since,
        job.error or None,
        job.revision,
    )


def view_spec(spec: JobSpec) -> SpecView:
    return SpecView(*(getattr(spec, name) for name in SpecView.__struct_fields__))


def view_version(version: JobVersion) -> VersionView:
    made = (version.number, version.made, version.principal or None)
    return VersionView(*made, version.has_come_up, view_spec(version.spec))


def view_attempt(attempt: AttemptRecord) -> AttemptView:
    return AttemptView(
        attempt.epoch,
        attempt.number,
        attempt.agent,
        attempt.version,
        attempt.begun,
        attempt.ended or None,
        attempt.end,
        view_failure(attempt.failure),
    )


def view_savepoint(savepoint: JobSavepoint) -> SavepointView:
    return SavepointView(
        savepoint.id,
        savepoint.root,
        savepoint.path,
        savepoint.glsn,
        _from_zero(savepoint.batch),
        savepoint.version or None,
        savepoint.agent or None,
        savepoint.bytes or None,
        savepoint.taken,
    )


def view_job(found: q.JobDescription) -> JobView:
    job, assignment = found.job, found.job.assignment
    return JobView(
        name=job.name,
        number=job.number,
        owner=job.owner or None,
        phase=found.phase,
        desired=job.desired,
        version=job.version,
        versions=found.versions,
        spec=view_spec(job.spec),
        created=job.created,
        has_come_up=job.has_come_up,
        epoch=job.epoch,
        agent=None if assignment is None else assignment.agent,
        attempt=None if assignment is None else assignment.attempt or None,
        waits_for=found.waits_for or None,
        pinned_to=job.pinned_to or None,
        checkpoint=_checkpoint(job),
        savepoint=job.start.savepoint or None,
        end=job.end,
        failure=view_failure(job.failure),
        attempts=tuple(map(view_attempt, job.attempts)),
        savepoints=len(job.savepoints),
        operation=job.operation or None,
        operations=tuple(map(view_operation, found.operations)),
        progress=_progress(found.progress),
        revision=job.revision,
    )


def _checkpoint(job: JobRecord) -> CheckpointView | None:
    place = job.start.checkpoint
    if place is None:
        return None
    return CheckpointView(place.root, place.path, _from_zero(place.batch), place.glsn)


def _progress(progress: q.JobProgress | None) -> ProgressView | None:
    if progress is None:
        return None
    return ProgressView(
        _from_zero(progress.batch),
        progress.glsn,
        progress.rows_per_s,
        _from_zero(progress.lag_rows),
        progress.watermark,
        progress.state_bytes,
    )


def _from_zero(number: int) -> int | None:
    return number if number >= 0 else None


def view_validation(found: b.ValidateAnswer) -> ValidationView:
    return ValidationView(
        found.pipeline,
        found.plan,
        tuple(map(_data, found.sources)),
        tuple(map(_data, found.sinks)),
        found.restored,
        found.left_behind,
        found.empty,
        found.notes,
    )


def _data(info: b.DataInfo) -> DataView:
    return DataView(info.topic, info.uid or None, info.schema or None)


def view_verification(found: b.VerifyAnswer) -> VerificationView:
    return VerificationView(found.files, found.bytes, found.intact)


def view_state(found: b.StateAnswer) -> StateView:
    return StateView(found.operators, found.more)


def view_agent(found: q.AgentSummary) -> AgentView:
    agent = found.agent
    offers = agent.description
    return AgentView(
        offers.name,
        offers.host or None,
        offers.version or None,
        agent.principal or None,
        agent.is_alive,
        agent.is_draining,
        agent.since,
        found.silent_us // 1_000,
        offers.slots,
        found.used_slots,
        found.jobs,
        offers.labels,
        offers.masters,
        tuple(map(_root, offers.checkpoint_roots)),
        tuple(map(_root, offers.savepoint_roots)),
        offers.isolation,
    )


def _root(root: AgentRoot) -> RootView:
    return RootView(root.name, root.is_shared, root.place)
