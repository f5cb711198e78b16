"""Jobs and agents as folded from decisions: the part of the state of the cluster that ``OrderState.jobs`` holds.

Invariants:

1. No two assignments have the same epoch, and a later one has a higher epoch, whatever the jobs and agents.
2. A job has at most one assignment, and at most one operation in progress, whose next step ``operations`` lists.
3. A report of an agent changes a job only under the epoch of its present assignment.
4. A version is switched only when the job has no assignment.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs.agents import AgentRecord
from cutwater.core.jobs.job_records import (
    ATTEMPTS_KEPT,
    PLACES_MAX,
    PROGRAMS_MAX,
    Assignment,
    AttemptRecord,
    BeforeSwitch,
    CheckpointPointer,
    JobRecord,
    JobVersion,
    ProgramPlace,
    RunEnd,
    RunFailure,
    StartPoint,
)
from cutwater.core.jobs.job_spec import DesiredState
from cutwater.core.jobs.job_text import what_goes_on
from cutwater.core.jobs.operations import (
    IDEMPOTENCY_KEPT_US,
    KeptKey,
    Operation,
    OperationError,
    OperationKind,
    OperationState,
    OperationStep,
)
from cutwater.types import GLSN, BatchNumber, CutTime, JobEpoch, JobNumber, Revision

OPERATIONS_KEPT = 10_000
"""Number of operations that are remembered. Those in progress, and those that an idempotency key names, stay."""
SWITCHING = (OperationKind.UPGRADE, OperationKind.RESCALE, OperationKind.ROLLBACK)
"""Operations that change the version of a job."""


class StoredProgram(Struct, frozen=True):
    """A program in the topic of programs, by its SHA-256."""

    sha256: str
    places: tuple[ProgramPlace, ...]


class JobsSnapshot(Struct, frozen=True, omit_defaults=True):
    """The state in a snapshot, see ``JobRegistry``."""

    revision: Revision = Revision(0)
    last_job: JobNumber = JobNumber(0)
    last_epoch: JobEpoch = JobEpoch(0)
    agents: tuple[AgentRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    operations: tuple[Operation, ...] = ()
    keys: tuple[KeptKey, ...] = ()
    programs: tuple[StoredProgram, ...] = ()


class JobRegistry:
    """See the module. Read it freely; change it with ``apply`` only. ``revision`` grows with every decision."""

    def __init__(self, start: JobsSnapshot | None = None) -> None:
        start = start or JobsSnapshot()
        self.revision, self.last_job, self.last_epoch = start.revision, start.last_job, start.last_epoch
        self.agents = {agent.name: agent for agent in start.agents}
        self.jobs = {job.number: job for job in start.jobs}
        self.operations = {operation.id: operation for operation in start.operations}
        self.keys = {(kept.principal, kept.key.key): kept for kept in start.keys}
        """In the order in which they were used."""
        self.programs_stored = {program.sha256: program.places for program in start.programs}
        """Where programs are, by their SHA-256, in the order in which they were stored."""
        self._numbers = {job.name: job.number for job in start.jobs}
        self._of_agent: dict[str, dict[JobNumber, None]] = {}
        self.epochs: dict[JobEpoch, JobNumber] = {}
        """The epochs of all present assignments."""
        self.waiting: dict[JobNumber, None] = {}
        """Jobs that want an agent, in the order in which they began to."""
        self._at = CutTime(0)
        """The time of the decision that is being folded."""
        for job in self.jobs.values():
            self._index(None, job)

    def snapshot(self) -> JobsSnapshot:
        # Jobs that wait come first, in their order.
        others = sorted(number for number in self.jobs if number not in self.waiting)
        return JobsSnapshot(
            self.revision,
            self.last_job,
            self.last_epoch,
            tuple(self.agents.values()),
            tuple(self.jobs[number] for number in (*self.waiting, *others)),
            tuple(self.operations.values()),
            tuple(self.keys.values()),
            tuple(StoredProgram(sha256, places) for sha256, places in self.programs_stored.items()),
        )

    @property
    def is_untouched(self) -> bool:
        """Whether nothing about jobs was ever decided."""
        return self.revision == 0

    def named(self, name: str) -> JobRecord | None:
        number = self._numbers.get(name)
        return None if number is None else self.jobs[number]

    def names_after(self, name: str) -> list[str]:
        return sorted(other for other in self._numbers if other > name)

    def on_agent(self, agent: str) -> Iterator[JobRecord]:
        """Yield the jobs that are assigned to an agent."""
        for number in tuple(self._of_agent.get(agent, ())):
            yield self.jobs[number]

    def used_slots(self, agent: str) -> int:
        return sum(job.spec.slots for job in self.on_agent(agent))

    def operation_of(self, job: JobRecord) -> Operation | None:
        """Return the operation in progress."""
        return self.operations.get(job.operation)

    def next_step(self, job: JobRecord) -> OperationStep | None:
        operation = self.operation_of(job)
        return None if operation is None else operation.next_step

    def programs(self) -> set[str]:
        """Return the programs and lists of requirements that versions of jobs name, by their SHA-256."""
        specs = [version.spec for job in self.jobs.values() for version in job.versions]
        return {spec.program for spec in specs} | {spec.requirements for spec in specs if spec.requirements}

    # Checks.

    def problem(self, decision: j.JobDecision) -> str:
        """Return why the decision is not valid, or an empty string."""
        match decision:
            case j.RegisterAgent():
                return ""
            case j.ExpireAgent() | j.DrainAgent() | j.RemoveAgent():
                return self._problem_of_agent(decision)
            case j.BeginOperation():
                return self._problem_of_operation(decision)
            case j.FinishStep() | j.FailOperation() | j.NoteSavepoint():
                return self._problem_of_step(decision)
            case j.AssignJob():
                return self._problem_of_assignment(decision)
            case j.ForgetSavepoint():
                job = self.jobs.get(decision.job)
                is_known = job is not None and job.savepoint_of(decision.savepoint) is not None
                return "" if is_known else "there is no such savepoint"
            case j.EndAssignment() if decision.end is RunEnd.STOPPED and not self._is_saved(decision.job):
                return "it did not stop with a savepoint"
            case _:
                return self._problem_of_epoch(decision.job, decision.epoch)

    def _is_saved(self, number: JobNumber) -> bool:
        """Whether the step ``stop`` of the operation in progress has its savepoint."""
        operation = self.operation_of(self.jobs[number]) if number in self.jobs else None
        return operation is not None and operation.next_step is OperationStep.STOP and operation.is_saved

    def _problem_of_agent(self, decision: j.ExpireAgent | j.DrainAgent | j.RemoveAgent) -> str:
        agent = self.agents.get(decision.agent)
        if agent is None:
            return "there is no such agent"
        if isinstance(decision, j.ExpireAgent) and not (agent.is_alive and agent.session == decision.session):
            return "this session of the agent is over"
        return "the agent is alive" if isinstance(decision, j.RemoveAgent) and agent.is_alive else ""

    def _problem_of_assignment(self, decision: j.AssignJob) -> str:
        job, agent = self.jobs.get(decision.job), self.agents.get(decision.agent)
        if job is None or not job.wants_agent:
            return "the job wants no agent"
        if agent is None or not agent.is_alive or agent.session != decision.session:
            return "this session of the agent is over"
        return "" if decision.epoch > self.last_epoch else "the epoch was given out before"

    def _problem_of_operation(self, decision: j.BeginOperation) -> str:
        operation = decision.operation
        if operation.id in self.operations:
            return "there is an operation with this id"
        if operation.kind is OperationKind.SUBMIT:
            is_next = operation.job == self.last_job + 1 and decision.spec is not None
            return "" if is_next and operation.name not in self._numbers else "the job is not new"
        job = self.jobs.get(operation.job)
        if job is None or job.name != operation.name:
            return "there is no such job"
        if operation.kind in SWITCHING and (decision.spec is None) != job.has_version(operation.version):
            return "the version is not new, or does not exist"
        return ""

    def _problem_of_step(self, decision: j.FinishStep | j.FailOperation | j.NoteSavepoint) -> str:
        operation = self.operations.get(decision.operation)
        if operation is None or operation.next_step is None or operation.step != decision.step:
            return "this step of the operation is not next"
        if isinstance(decision, j.NoteSavepoint):
            if operation.next_step not in (OperationStep.SAVEPOINT, OperationStep.STOP):
                return "the step takes no savepoint"
            if self.jobs[operation.job].savepoint_of(decision.savepoint.id) is not None:
                return "the savepoint is known already"
        if isinstance(decision, j.FinishStep) and operation.next_step is not OperationStep.VALIDATE:
            return "the step ends by itself"
        return "" if isinstance(decision, j.FailOperation) else self._problem_of_epoch(operation.job, decision.epoch)

    def _problem_of_epoch(self, number: JobNumber, epoch: JobEpoch) -> str:
        job = self.jobs.get(number)
        is_present = job is not None and job.assignment is not None and job.assignment.epoch == epoch
        return "" if is_present else "the assignment is over"

    # The fold.

    def apply(self, decision: j.JobDecision, cut_time: CutTime) -> None:
        """Fold a decision without a problem. ``cut_time`` is its time if it has none of its own."""
        self.revision = Revision(self.revision + 1)
        at = cut_time if isinstance(decision, j.NoteCheckpoint | j.NoteFirstBatch) else decision.at or cut_time
        self._at = at
        match decision:
            case j.RegisterAgent():
                self._register(decision, at)
            case j.ExpireAgent():
                agent = self.agents[decision.agent]
                self._set_agent(structs.replace(agent, is_alive=False, since=at))
                self._lose(decision.agent, at)
            case j.DrainAgent():
                self._set_agent(structs.replace(self.agents[decision.agent], is_draining=decision.is_draining))
            case j.RemoveAgent():
                del self.agents[decision.agent]
                self._of_agent.pop(decision.agent, None)
            case j.BeginOperation():
                self._begin(decision, at)
            case j.AssignJob():
                self._assign(decision, at)
            case j.ReleaseJob():
                job = self.jobs[decision.job]
                assert job.assignment is not None
                self._set(structs.replace(job, assignment=structs.replace(job.assignment, is_releasing=True)))
            case j.BeginAttempt():
                self._begin_attempt(decision, at)
            case j.EndAttempt():
                self._end_attempt(self.jobs[decision.job], decision.end, decision.failure, at)
            case j.EndAssignment():
                self._end_assignment(self.jobs[decision.job], decision.end, decision.failure, at)
            case j.NoteCheckpoint():
                self._note_checkpoint(self.jobs[decision.job], decision.checkpoint)
            case j.NoteFirstBatch():
                self._note_first_batch(self.jobs[decision.job], decision.batch, at)
            case j.NoteSavepoint():
                self._note_savepoint(decision, at)
            case j.FinishStep():
                self._advance(self.operations[decision.operation], at)
            case j.FailOperation():
                self._fail(self.operations[decision.operation], decision.error, at)
            case j.ForgetSavepoint():
                job = self.jobs[decision.job]
                left = tuple(found for found in job.savepoints if found.id != decision.savepoint)
                self._set(structs.replace(job, savepoints=left))

    # Agents.

    def _register(self, decision: j.RegisterAgent, at: CutTime) -> None:
        name = decision.agent.name
        known = self.agents.get(name)
        is_same = known is not None and known.is_alive and known.session == decision.session
        if not is_same:
            self._lose(name, at)
        self._set_agent(
            AgentRecord(
                decision.agent,
                decision.session,
                decision.by.principal if decision.by else "",
                is_draining=known is not None and known.is_draining,
                since=known.since if known is not None and is_same else at,
            )
        )

    def _lose(self, agent: str, at: CutTime) -> None:
        """End all assignments to an agent, whose jobs go to other agents."""
        # Not in the order of assignment, which a snapshot does not have: all copies of the state must agree.
        for job in sorted(self.on_agent(agent), key=lambda job: job.number):
            self._end_assignment(job, RunEnd.LOST, None, at)

    def _set_agent(self, agent: AgentRecord) -> None:
        self.agents[agent.name] = structs.replace(agent, revision=self.revision)

    def _touch_agent(self, name: str) -> None:
        agent = self.agents.get(name)
        if agent is not None and agent.revision != self.revision:
            self._set_agent(agent)

    # Jobs.

    def _set(self, job: JobRecord, *, is_told: bool = True) -> JobRecord:
        """Store a job that has changed, and let its agent know."""
        before = self.jobs.get(job.number)
        since = before.since if before is not None and before.phase is job.phase else self._at
        job = structs.replace(job, revision=self.revision, since=since)
        self._index(before, job)
        self.jobs[job.number], self._numbers[job.name] = job, job.number
        if is_told and job.assignment is not None:
            self._touch_agent(job.assignment.agent)
        return job

    def _index(self, before: JobRecord | None, job: JobRecord | None) -> None:
        present = job or before
        assert present is not None
        if before is not None and before.assignment is not None:
            self._of_agent.get(before.assignment.agent, {}).pop(present.number, None)
            self.epochs.pop(before.assignment.epoch, None)
        if job is not None and job.assignment is not None:
            self._of_agent.setdefault(job.assignment.agent, {})[present.number] = None
            self.epochs[job.assignment.epoch] = present.number
        if job is not None and job.wants_agent:
            self.waiting.setdefault(present.number)
        else:
            self.waiting.pop(present.number, None)

    def _assign(self, decision: j.AssignJob, at: CutTime) -> None:
        self.last_epoch = decision.epoch
        job = self.jobs[decision.job]
        root = self.agents[decision.agent].description.checkpoint_root(job.spec.checkpoint_root)
        self._set(
            structs.replace(
                job,
                assignment=Assignment(decision.agent, decision.session, decision.epoch, at),
                epoch=decision.epoch,
                pinned_to="" if root is None or root.is_shared else decision.agent,
            )
        )

    def _begin_attempt(self, decision: j.BeginAttempt, at: CutTime) -> None:
        job = self.jobs[decision.job]
        assert job.assignment is not None
        attempt = AttemptRecord(decision.epoch, decision.attempt, job.assignment.agent, job.version, at)
        assignment = structs.replace(job.assignment, attempt=decision.attempt)
        job = self._set(
            structs.replace(
                job,
                assignment=assignment,
                start=structs.replace(job.start, checkpoint=decision.checkpoint),
                attempts=(*job.attempts, attempt)[-ATTEMPTS_KEPT:],
            )
        )
        operation = self.operation_of(job)
        if operation is not None and operation.next_step is OperationStep.START:
            self._advance(operation, at)

    def _end_attempt(self, job: JobRecord, end: RunEnd, failure: RunFailure | None, at: CutTime) -> JobRecord:
        assert job.assignment is not None
        attempts = job.attempts
        if job.assignment.attempt and attempts and attempts[-1].end is None:
            attempts = (*attempts[:-1], structs.replace(attempts[-1], ended=at, end=end, failure=failure))
        has_failed = end is RunEnd.FAILED
        assignment = structs.replace(job.assignment, attempt=0, has_failed=has_failed)
        job = structs.replace(job, assignment=assignment, attempts=attempts)
        if failure is not None:
            job = structs.replace(job, failure=failure, failed_version=job.version)
        return self._set(job)

    def _end_assignment(self, job: JobRecord, end: RunEnd, failure: RunFailure | None, at: CutTime) -> None:
        job = self._end_attempt(job, end, failure, at)
        assert job.assignment is not None
        self._touch_agent(job.assignment.agent)
        is_over = end not in (RunEnd.LOST, RunEnd.RELEASED)
        if end is RunEnd.FINISHED:
            job = job.with_working_version()
        job = self._set(structs.replace(job, assignment=None, end=end if is_over else None))
        operation = self.operation_of(job)
        if operation is None:
            return
        if operation.next_step is OperationStep.END or end is RunEnd.STOPPED:
            self._advance(operation, at)
        elif is_over:
            self._end_in_operation(job, operation, end, failure, at)

    def _end_in_operation(
        self, job: JobRecord, operation: Operation, end: RunEnd, failure: RunFailure | None, at: CutTime
    ) -> None:
        """The job ended while an operation wanted something else."""
        if end is RunEnd.FINISHED and operation.next_step in (OperationStep.START, OperationStep.COME_UP):
            # A pipeline with an end may come to it without a batch.
            self._finish(structs.replace(operation, step=len(operation.steps)), OperationState.DONE, at)
            return
        code, message = (failure.code, failure.message) if failure is not None else ("job_ended", f"the job {end}")
        if _returns(operation) and job.version == operation.version and not job.has_come_up:
            before = job.before or BeforeSwitch(StartPoint(savepoint=operation.savepoint), False, BatchNumber(-1))
            if operation.kind is OperationKind.START:
                outcome = f" from savepoint {operation.savepoint}"
            else:
                outcome = f", and {what_goes_on(operation, before)}"
            message = f"version {operation.version} did not come up{outcome}: {message}"
            self._fail(operation, OperationError(code, message), at)
            self._return(self.jobs[job.number], operation, before)
        else:
            self._fail(operation, OperationError(code, message), at)

    def _return(self, job: JobRecord, operation: Operation, before: BeforeSwitch) -> None:
        """Go on with the version before, from the savepoint at which it stopped, or as it was. If the job did not run
        before, it has ended as it had. Nothing was published since."""
        changed = structs.replace(job.as_before(before), version=operation.version_before, end=before.end or job.end)
        if operation.was_running:
            changed = structs.replace(changed, end=None, desired=DesiredState.RUNNING)
        elif before.failure is not None and operation.version != operation.version_before:
            # It is failed again, for the reason for which it was.
            changed = structs.replace(changed, failure=before.failure, failed_version=operation.version_before)
        self._set(changed)

    def _note_checkpoint(self, job: JobRecord, checkpoint: CheckpointPointer) -> None:
        known = job.start.checkpoint
        is_told = known is None or (known.root, known.path) != (checkpoint.root, checkpoint.path)
        self._set(structs.replace(job, start=structs.replace(job.start, checkpoint=checkpoint)), is_told=is_told)

    def _note_first_batch(self, job: JobRecord, batch: BatchNumber, at: CutTime) -> None:
        if not job.has_come_up:
            job = self._set(structs.replace(job, has_come_up=True, batch=batch).with_working_version())
        operation = self.operation_of(job)
        if operation is not None and operation.next_step is OperationStep.COME_UP:
            self._advance(operation, at)

    def note_batch(self, name: str, epoch: JobEpoch, batch: BatchNumber, cut_time: CutTime) -> None:
        """Note that a run under the name of a job has decided a batch, as the assignment with this epoch."""
        job = self.named(name)
        if job is not None and not job.has_come_up and not self._problem_of_epoch(job.number, epoch):
            self.apply(j.NoteFirstBatch(job.number, epoch, batch), cut_time)

    def _note_savepoint(self, decision: j.NoteSavepoint, at: CutTime) -> None:
        job, operation = self.jobs[decision.job], self.operations[decision.operation]
        assert job.assignment is not None
        taken = structs.replace(decision.savepoint, version=job.version, agent=job.assignment.agent, taken=at)
        self._set(structs.replace(job, savepoints=(*job.savepoints, taken)))
        is_stop = operation.next_step is OperationStep.STOP
        operation = self.operations[operation.id] = structs.replace(operation, savepoint=taken.id, is_saved=is_stop)
        if not is_stop:
            self._advance(operation, at)

    # Operations.

    def _begin(self, decision: j.BeginOperation, at: CutTime) -> None:
        by = decision.by.principal if decision.by else ""
        operation = structs.replace(decision.operation, begun=at, principal=by)
        self._forget_keys(at)
        if decision.key is not None:
            kept = KeptKey(by, decision.key, operation.id, at)
            self.keys[by, decision.key.key] = kept
        if operation.kind is OperationKind.SUBMIT:
            assert decision.spec is not None
            self.last_job = operation.job
            version = JobVersion(1, decision.spec, at, by)
            job = JobRecord(operation.job, operation.name, by, (version,), 1, at, start=decision.start or StartPoint())
            if decision.savepoint is not None:
                job = structs.replace(job, savepoints=(decision.savepoint,))
        else:
            job = self.jobs[operation.job]
            before = self.operation_of(job)
            if before is not None:
                self._finish(before, OperationState.SUPERSEDED, at)
                job = self.jobs[job.number]
            if decision.spec is not None:
                job = job.with_version(JobVersion(operation.version, decision.spec, at, by))
            if decision.start is not None and operation.kind is OperationKind.START:
                job = structs.replace(job, before=job.before_switch(), start=decision.start, has_come_up=False)
        self.operations[operation.id] = operation
        self._set(structs.replace(job, operation=operation.id))
        self._enter(operation, at)
        self._forget_operations()

    def _advance(self, operation: Operation, at: CutTime) -> None:
        """Go on to the next step, or to the end."""
        operation = structs.replace(operation, step=operation.step + 1, is_saved=False)
        self.operations[operation.id] = operation
        if operation.next_step is None:
            self._finish(operation, OperationState.DONE, at)
        else:
            self._set(self.jobs[operation.job])
            self._enter(operation, at)

    def _enter(self, operation: Operation, at: CutTime) -> None:
        """Begin the step that is next. A step that has nothing to do ends at once."""
        job = self.jobs[operation.job]
        match operation.next_step:
            case OperationStep.START:
                self._start(job, operation, at)
            case OperationStep.END:
                desired = _DESIRED_AT_END.get(operation.kind, job.desired)
                job = self._set(structs.replace(job, desired=desired))
                if job.assignment is None:
                    self._advance(operation, at)
            case OperationStep.COME_UP if job.has_come_up:
                self._advance(operation, at)

    def _start(self, job: JobRecord, operation: Operation, at: CutTime) -> None:
        if operation.kind in SWITCHING and job.version != operation.version:
            if job.has_come_up and not operation.savepoint:
                # The version has published meanwhile, so its beginning is no place to start from any more.
                said = f"version {job.version} decided its first batch while it was ended: it goes on"
                self._fail(operation, OperationError("refused", f"{said}; ask again"), at)
                job = self.jobs[job.number]
            else:
                has_own = OperationStep.STOP in operation.steps
                job = structs.replace(
                    job,
                    before=None if has_own else job.before_switch(),
                    version=operation.version,
                    start=StartPoint(
                        savepoint=operation.savepoint or job.start.savepoint,
                        replay_output=operation.replay_output,
                        allow_non_restored_state=operation.allow_non_restored_state,
                    ),
                    has_come_up=False,
                    batch=BatchNumber(-1),
                )
        self._set(structs.replace(job, desired=DesiredState.RUNNING, end=None, failure=None, failed_version=0))

    def _finish(
        self, operation: Operation, state: OperationState, at: CutTime, error: OperationError | None = None
    ) -> None:
        self.operations[operation.id] = structs.replace(operation, state=state, finished=at, error=error)
        job = self.jobs[operation.job]
        if operation.kind is OperationKind.DELETE and state is OperationState.DONE:
            self._index(job, None)
            del self.jobs[job.number], self._numbers[job.name]
            return
        if state is OperationState.DONE:
            end, desired = job.end, job.desired
            if operation.kind is OperationKind.CANCEL:
                end = RunEnd.CANCELLED
                if job.before is not None and not job.has_come_up:
                    # It ended a start from a savepoint, of which nothing was published.
                    job = job.as_before(job.before)
            elif operation.kind is OperationKind.STOP:
                end, desired = RunEnd.STOPPED, DesiredState.STOPPED
            job = structs.replace(job, end=end, desired=desired)
        is_start = state is OperationState.SUPERSEDED and operation.kind is OperationKind.START
        self._set(structs.replace(job, operation="", before=job.before if is_start else None))

    def _fail(self, operation: Operation, error: OperationError, at: CutTime) -> None:
        self._finish(operation, OperationState.FAILED, at, error)

    # Programs.

    def note_program(self, sha256: str, place: ProgramPlace) -> None:
        """Note that a program was stored. Only its hash tells whether the records are that program, so several places
        are kept: the first and the newest ones."""
        self.revision = Revision(self.revision + 1)
        known = self.programs_stored.pop(sha256, ())
        places = (*known, place)
        self.programs_stored[sha256] = (*places[:1], *places[1:][-(PLACES_MAX - 1) :])
        surplus = len(self.programs_stored) - PROGRAMS_MAX
        if surplus > 0:
            live = self.programs()
            for other in [known for known in self.programs_stored if known not in live][:surplus]:
                del self.programs_stored[other]

    def note_trim_of_programs(self, before: GLSN) -> None:
        """Forget places that were trimmed."""
        self.revision = Revision(self.revision + 1)
        left = {
            sha256: tuple(place for place in places if place.glsn >= before)
            for sha256, places in self.programs_stored.items()
        }
        self.programs_stored = {sha256: places for sha256, places in left.items() if places}

    # Limits.

    def _forget_keys(self, at: CutTime) -> None:
        old = [place for place, kept in self.keys.items() if kept.at <= at - IDEMPOTENCY_KEPT_US]
        for place in old:
            del self.keys[place]

    def _forget_operations(self) -> None:
        surplus = len(self.operations) - OPERATIONS_KEPT
        if surplus <= 0:
            return
        kept = {key.operation for key in self.keys.values()}
        over = [
            identifier
            for identifier, operation in self.operations.items()
            if operation.state is not OperationState.RUNNING and identifier not in kept
        ]
        for identifier in over[:surplus]:
            del self.operations[identifier]


_DESIRED_AT_END = {
    OperationKind.CANCEL: DesiredState.CANCELLED,
    OperationKind.DELETE: DesiredState.DELETED,
}


def _returns(operation: Operation) -> bool:
    """Whether the job becomes what it was before, if it ends before it has come up: another version goes on, or the
    job can be started where it had ended."""
    return operation.kind in (*SWITCHING, OperationKind.START) and OperationStep.COME_UP in operation.steps
