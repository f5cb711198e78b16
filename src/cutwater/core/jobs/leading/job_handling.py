"""Turns what users ask of jobs into the operation that carries it out, after validating it against the state.

The same request again, by its random operation id or by its idempotency key, begins nothing new: the answer is the
operation that it began before.
"""

from __future__ import annotations

from msgspec import msgpack, structs

from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.job_records import SAVEPOINTS_MAX, JobRecord, JobSavepoint, RunEnd, StartPoint
from cutwater.core.jobs.job_registry import SWITCHING, JobRegistry
from cutwater.core.jobs.job_spec import PARALLELISM_MAX, SLOTS_MAX, SPEC_BYTES_MAX, JobSpec, check_job_name, check_spec
from cutwater.core.jobs.operations import (
    IDEMPOTENCY_KEPT_US,
    IDEMPOTENCY_KEYS_MAX,
    KEYS_PER_PRINCIPAL_MAX,
    IdempotencyKey,
    Operation,
    OperationKind,
    OperationState,
    OperationStep,
    check_idempotency_key,
    check_random_id,
    steps_of,
)
from cutwater.errors import AlreadyExists, InvalidArgument, NotFound, Refused, ResourceExhausted
from cutwater.types import CutTime, JobNumber

JOBS_MAX = 10_000
SPECS_BYTES_MAX = 64 * 1024 * 1024
"""Size of all specifications together. They are in every snapshot."""
TIMEOUT_MS_MAX = 7 * 24 * 3_600_000
RETRY_MS = 60_000

Begins = q.SubmitJobRequest | q.UpgradeJobRequest | q.RescaleJobRequest | q.RollBackJobRequest | q.OperateJobRequest
"""Requests that begin an operation."""

Begun = tuple[tuple[j.JobDecision, ...], Operation]

_START, _STOP, _END, _COME_UP = OperationStep.START, OperationStep.STOP, OperationStep.END, OperationStep.COME_UP
_SAVING = frozenset((OperationStep.SAVEPOINT, _STOP))
_OPERATED = (
    *(OperationKind.START, OperationKind.STOP, OperationKind.CANCEL, OperationKind.SAVEPOINT),
    *(OperationKind.RESTART, OperationKind.DELETE),
)
"""What ``OperateJobRequest`` is for."""


def begin_operation(request: Begins, jobs: JobRegistry, now: CutTime, principal: str) -> Begun:
    """Return the decision that begins the operation, and the operation. There is no decision if it has begun before."""
    check_random_id("operation", request.operation)
    check_job_name(request.name)
    if not 0 <= getattr(request, "timeout_ms", 0) <= TIMEOUT_MS_MAX:
        raise InvalidArgument(f"a step may take 0 (the agent's default) to {TIMEOUT_MS_MAX} ms")
    if request.key is not None:
        check_idempotency_key(request.key)
    known = _repeated(request, jobs, now, principal)
    if known is not None:
        return (), known
    decision = _submit(request, jobs) if isinstance(request, q.SubmitJobRequest) else _change(request, jobs)
    operation = structs.replace(decision.operation, begun=now, principal=principal)
    return (structs.replace(decision, operation=operation, key=request.key),), operation


# Repeated requests.


def _repeated(request: Begins, jobs: JobRegistry, now: CutTime, principal: str) -> Operation | None:
    """Return the operation that the same request began before."""
    known = jobs.operations.get(request.operation)
    if known is not None:
        if (known.kind, known.name, known.principal) != (_kind(request), request.name, principal):
            raise AlreadyExists(
                f"operation {request.operation} is another one: make a random id for each request and use it again "
                "only to repeat the same request"
            )
        return known
    return None if request.key is None else _of_key(request, request.key, jobs, now, principal)


def _of_key(request: Begins, key: IdempotencyKey, jobs: JobRegistry, now: CutTime, principal: str) -> Operation | None:
    kept = jobs.keys.get((principal, key.key))
    if kept is not None and kept.at > now - IDEMPOTENCY_KEPT_US:
        began = jobs.operations[kept.operation]
        # The hash is the caller's claim. The caller may do this with the job that it names, and with no other.
        if kept.key.body != key.body or (began.kind, began.name) != (_kind(request), request.name):
            raise InvalidArgument(
                f"the idempotency key {key.key!r} was used for another request, which began operation "
                f"{kept.operation}: use each key for one request only"
            )
        return began
    living = [its for (its, _), one in jobs.keys.items() if one.at > now - IDEMPOTENCY_KEPT_US]
    own = living.count(principal)
    if len(living) >= IDEMPOTENCY_KEYS_MAX or own >= KEYS_PER_PRINCIPAL_MAX:
        raise ResourceExhausted(
            f"{len(living)} idempotency keys were used within 24 hours, {own} of them by this principal, which is the "
            "most: send the request without one, or later",
            retry_ms=RETRY_MS,
        )
    return None


def _kind(request: Begins) -> OperationKind:
    match request:
        case q.SubmitJobRequest():
            return OperationKind.SUBMIT
        case q.UpgradeJobRequest():
            return OperationKind.UPGRADE
        case q.RescaleJobRequest():
            return OperationKind.RESCALE
        case q.RollBackJobRequest():
            return OperationKind.ROLLBACK
        case q.OperateJobRequest():
            return request.kind


# New jobs.


def _submit(request: q.SubmitJobRequest, jobs: JobRegistry) -> j.BeginOperation:
    check_spec(request.spec)
    known = jobs.named(request.name)
    if known is not None:
        raise AlreadyExists(
            f"there is a job {request.name!r} ({known.phase}): upgrade it to run another program, start it if it has "
            "ended, or choose another name"
        )
    if len(jobs.jobs) >= JOBS_MAX:
        raise Refused(f"there are {len(jobs.jobs)} jobs, which is the most: delete those that are not needed")
    _check_size(jobs, request.spec)
    savepoint = None if not (request.from_job or request.savepoint) else _savepoint_of_other(request, jobs)
    if savepoint is None and (request.replay_output or request.allow_non_restored_state):
        raise InvalidArgument("what to do about a savepoint can be said only with one: name the job and its savepoint")
    start = None
    if savepoint is not None:
        start = StartPoint(
            savepoint=savepoint.id,
            replay_output=request.replay_output,
            allow_non_restored_state=request.allow_non_restored_state,
        )
    number = JobNumber(jobs.last_job + 1)
    operation = Operation(
        request.operation,
        OperationKind.SUBMIT,
        number,
        request.name,
        steps_of(OperationKind.SUBMIT),
        CutTime(0),
        version=1,
        savepoint=savepoint.id if savepoint is not None else "",
        was_running=True,
        replay_output=request.replay_output,
        allow_non_restored_state=request.allow_non_restored_state,
    )
    return j.BeginOperation(operation, request.spec, start, savepoint=savepoint)


def _savepoint_of_other(request: q.SubmitJobRequest, jobs: JobRegistry) -> JobSavepoint:
    if not request.from_job:
        raise InvalidArgument(f"say which job has savepoint {request.savepoint!r}: a new job has none")
    return _savepoint(find_job(jobs, request.from_job), request.savepoint)


def _check_size(jobs: JobRegistry, spec: JobSpec) -> None:
    """Limit the size of all specifications. They are measured only if there are so many that it could be too large."""
    versions = [version.spec for job in jobs.jobs.values() for version in job.versions]
    if (len(versions) + 1) * SPEC_BYTES_MAX <= SPECS_BYTES_MAX:
        return
    size = sum(len(msgpack.encode(one)) for one in (*versions, spec))
    if size > SPECS_BYTES_MAX:
        raise Refused(
            f"the specifications of all versions of all jobs would take {size} bytes, and {SPECS_BYTES_MAX} is the "
            "most: delete jobs that are not needed, and put data into programs"
        )


# Jobs that exist.


def find_job(jobs: JobRegistry, name: str) -> JobRecord:
    job = jobs.named(name)
    if job is None:
        raise NotFound(f"there is no job {name!r}: `cutwater job list` shows those that exist")
    return job


def _savepoint(job: JobRecord, identifier: str) -> JobSavepoint:
    """Return a savepoint of a job: the newest one if no id is given."""
    found = job.savepoint_of(identifier) if identifier else job.savepoints[-1] if job.savepoints else None
    if found is None:
        which = f"savepoint {identifier!r}" if identifier else "savepoint"
        raise NotFound(f"job {job.name!r} has no {which}: `cutwater job describe {job.name}` shows those that it has")
    return found


def _change(request: Begins, jobs: JobRegistry) -> j.BeginOperation:
    job = find_job(jobs, request.name)
    _check_free(job, request, jobs)
    match request:
        case q.UpgradeJobRequest():
            check_spec(request.spec)
            decision = _upgrade(request, job, request.spec, OperationKind.UPGRADE)
        case q.RescaleJobRequest():
            decision = _upgrade(request, job, _rescaled(request, job), OperationKind.RESCALE)
        case q.RollBackJobRequest():
            decision = _roll_back(request, job)
        case _:
            assert isinstance(request, q.OperateJobRequest)
            decision = _operate(request, job)
    if decision.spec is not None:
        _check_size(jobs, decision.spec)
    if len(job.savepoints) >= SAVEPOINTS_MAX and _SAVING.intersection(decision.operation.steps):
        raise Refused(
            f"job {job.name!r} has {len(job.savepoints)} savepoints, which is the most, and this would take another "
            "one: delete those that are not needed"
        )
    return decision


def _check_free(job: JobRecord, request: Begins, jobs: JobRegistry) -> None:
    """Refuse if another operation is in progress which this one may not end."""
    other, kind = jobs.operation_of(job), _kind(request)
    if other is None or kind is OperationKind.DELETE:
        return
    if kind is OperationKind.CANCEL and other.kind is not OperationKind.DELETE:
        return
    has_switched = other.kind in SWITCHING and job.version == other.version and job.version != other.version_before
    if kind is OperationKind.ROLLBACK and has_switched:
        # It goes back before the version has come up.
        return
    way_out = "wait until it is gone" if other.kind is OperationKind.DELETE else "wait for its end, or cancel the job"
    raise Refused(
        f"operation {other.id} of job {job.name!r} is in progress ({other.kind}, step {other.next_step}): {way_out}"
    )


def _begun(
    request: Begins,
    job: JobRecord,
    kind: OperationKind,
    steps: tuple[OperationStep, ...],
    version: int = 0,
    savepoint: str = "",
) -> Operation:
    return Operation(
        request.operation,
        kind,
        job.number,
        job.name,
        steps,
        CutTime(0),
        version=version or job.version,
        version_before=job.version,
        savepoint=savepoint,
        was_running=job.end is None,
        replay_output=getattr(request, "replay_output", False),
        allow_non_restored_state=getattr(request, "allow_non_restored_state", False),
        timeout_ms=getattr(request, "timeout_ms", 0),
    )


def _operate(request: q.OperateJobRequest, job: JobRecord) -> j.BeginOperation:
    kind = request.kind
    if kind not in _OPERATED:
        raise InvalidArgument(f"{kind} has a request of its own: here are {', '.join(_OPERATED)}")
    is_about_savepoint = bool(request.savepoint or request.replay_output or request.allow_non_restored_state)
    if kind is OperationKind.START:
        return _start(request, job)
    if is_about_savepoint:
        raise InvalidArgument(f"a savepoint to begin from is for start, not for {kind}")
    if job.end is not None and kind is not OperationKind.DELETE:
        raise Refused(f"job {job.name!r} does not run: it is {job.phase}. `cutwater job start {job.name}` starts it")
    return j.BeginOperation(_begun(request, job, kind, steps_of(kind)))


def _start(request: q.OperateJobRequest, job: JobRecord) -> j.BeginOperation:
    if job.end is None:
        raise Refused(f"job {job.name!r} is {job.phase}: it was started before; restart ends it and starts it again")
    steps = (_START, _COME_UP) if request.savepoint else steps_of(OperationKind.START)
    operation = _begun(request, job, OperationKind.START, steps, savepoint=request.savepoint)
    if not request.savepoint:
        if request.replay_output or request.allow_non_restored_state:
            raise InvalidArgument("what to do about a savepoint can be said only with one: name it")
        return j.BeginOperation(operation)
    start = StartPoint(
        savepoint=_savepoint(job, request.savepoint).id,
        replay_output=request.replay_output,
        allow_non_restored_state=request.allow_non_restored_state,
    )
    return j.BeginOperation(operation, start=start)


# Versions.


def _rescaled(request: q.RescaleJobRequest, job: JobRecord) -> JobSpec:
    if not 1 <= request.parallelism <= PARALLELISM_MAX or not 0 <= request.slots <= SLOTS_MAX:
        raise InvalidArgument(
            f"parallelism is 1 to {PARALLELISM_MAX} and slots are 0 (as they are) to {SLOTS_MAX}, not "
            f"{request.parallelism} and {request.slots}"
        )
    spec = structs.replace(job.spec, parallelism=request.parallelism, slots=request.slots or job.spec.slots)
    if spec == job.spec:
        raise Refused(f"job {job.name!r} has parallelism {spec.parallelism} and {spec.slots} slots already")
    return spec


def _upgrade(
    request: q.UpgradeJobRequest | q.RescaleJobRequest, job: JobRecord, spec: JobSpec, kind: OperationKind
) -> j.BeginOperation:
    """A job that runs and has come up stops with a savepoint. One that has not come up begins again where it began,
    since nothing was published from there."""
    asked = request.savepoint if isinstance(request, q.UpgradeJobRequest) else ""
    savepoint = ""
    if job.end is None:
        if asked:
            raise InvalidArgument(
                f"job {job.name!r} is {job.phase}, so it takes a savepoint of its own: stop or cancel it first to go "
                "on from another one"
            )
        steps: tuple[OperationStep, ...] = (_STOP if job.has_come_up else _END, _START, _COME_UP)
    else:
        steps = (_START, _COME_UP)
        savepoint = _savepoint(job, asked).id if asked else _savepoint_at_end(job, kind)
    operation = _begun(request, job, kind, steps, job.last_version + 1, savepoint)
    return j.BeginOperation(operation, spec)


def _savepoint_at_end(job: JobRecord, kind: OperationKind) -> str:
    """Return the savepoint with which another version can go on from where the job ended; empty if it published
    nothing since it began, so that it can begin there."""
    if not job.has_come_up:
        return ""
    last = job.savepoints[-1] if job.savepoints else None
    if job.end is RunEnd.STOPPED and last is not None and last.version == job.version:
        stopped = next((attempt for attempt in reversed(job.attempts) if attempt.end is RunEnd.STOPPED), None)
        # The savepoint of the stop may have been deleted. Those before it are of an earlier place.
        if stopped is None or last.taken >= stopped.ended:
            return last.id
    raise Refused(
        f"job {job.name!r} is {job.phase} and has no savepoint of where it ended, so no other version can go on from "
        f"there ({kind}): start it and do it then, or name a savepoint and say what becomes of the output since"
    )


def _roll_back(request: q.RollBackJobRequest, job: JobRecord) -> j.BeginOperation:
    """Go back to an earlier version: from where the present one began, as long as it has not come up; from a new
    savepoint of it, which the earlier program must be able to restore, afterwards."""
    version = request.version or max((one.number for one in job.versions if one.number < job.version), default=0)
    if version == job.version or not job.has_version(version):
        known = ", ".join(str(one.number) for one in job.versions if one.number != job.version)
        others = f"choose one of the others with --to N: {known}" if known else "it has no other version"
        which = f"version {version}" if request.version else "version before it"
        raise NotFound(f"job {job.name!r} has version {job.version} and no {which} to go back to; {others}")
    savepoint = ""
    steps: tuple[OperationStep, ...]
    if job.end is not None:
        steps = (_START, _COME_UP)
        savepoint = _savepoint_at_end(job, OperationKind.ROLLBACK)
    elif job.has_come_up:
        steps = (OperationStep.SAVEPOINT, OperationStep.VALIDATE, _STOP, _START)
    else:
        began = job.savepoint_of(job.start.savepoint) if job.start.savepoint else None
        is_sure = began is None or began.version == version
        steps = (_END, _START, _COME_UP) if is_sure else (OperationStep.VALIDATE, _END, _START, _COME_UP)
    return j.BeginOperation(_begun(request, job, OperationKind.ROLLBACK, steps, version, savepoint))


def forget_savepoint(request: q.ForgetSavepointRequest, jobs: JobRegistry) -> j.ForgetSavepoint | None:
    """Return the decision; None if the savepoint is not known."""
    check_random_id("savepoint", request.savepoint)
    job = find_job(jobs, request.name)
    if job.savepoint_of(request.savepoint) is None:
        return None
    _check_not_needed(job, request.savepoint, jobs)
    return j.ForgetSavepoint(job.number, request.savepoint)


def check_may_delete(job: JobRecord, identifier: str, jobs: JobRegistry) -> None:
    """Refuse if this job, or another that starts from the same files, needs the savepoint still."""
    _check_not_needed(job, identifier, jobs)
    if any(_needs(other, identifier, jobs) for other in jobs.jobs.values()):
        # The caller need not know of the other job.
        raise Refused(f"a job that begins with savepoint {identifier} has published nothing yet: try again later")


def _check_not_needed(job: JobRecord, identifier: str, jobs: JobRegistry) -> None:
    if _needs(job, identifier, jobs):
        raise Refused(f"job {job.name!r} goes on from savepoint {identifier}: it is needed until that is done")


def _needs(job: JobRecord, identifier: str, jobs: JobRegistry) -> bool:
    """Whether a job may have to begin with this savepoint, as it is or with the version before."""
    operation, before = jobs.operation_of(job), job.before
    if job.start.savepoint == identifier and not job.has_come_up:
        return True
    if before is not None and before.start.savepoint == identifier and not before.has_come_up:
        return True
    return operation is not None and operation.savepoint == identifier


def is_over(operation: Operation) -> bool:
    return operation.state is not OperationState.RUNNING
