"""What tests about jobs have in common: specifications, agents, and a registry that checks every decision."""

from __future__ import annotations

from itertools import count

from msgspec import structs

from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs.agents import AgentDescription, AgentRoot, JobIsolation
from cutwater.core.jobs.job_records import CheckpointPointer, JobRecord, JobSavepoint, RunEnd, RunFailure, StartPoint
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.operations import (
    IdempotencyKey,
    Operation,
    OperationError,
    OperationKind,
    OperationStep,
    steps_of,
)
from cutwater.types import GLSN, BatchNumber, CutTime, JobEpoch, JobNumber

PROGRAM = "ab" * 32
OTHER_PROGRAM = "cd" * 32
SPEC = JobSpec(PROGRAM, "fraud.py:p")
CHECKPOINT = CheckpointPointer("default", "fraud/run-1")
SHARED = (AgentRoot("default", is_shared=True),)
FAILURE = RunFailure("pipeline_failed", "boom")
J1, J2 = JobNumber(1), JobNumber(2)


def identifier(number: int) -> str:
    """Return a valid id of an operation or a savepoint."""
    return f"{number:032x}"


def agent(
    name: str = "a",
    slots: int = 4,
    *,
    labels: dict[str, str] | None = None,
    is_shared: bool = True,
    isolation: JobIsolation = JobIsolation.SHARED_USER,
    masters: tuple[str, ...] = ("local",),
) -> AgentDescription:
    roots = (AgentRoot("default", is_shared=is_shared),)
    return AgentDescription(name, slots, labels or {}, roots, roots, masters, isolation)


class Jobs:
    """A registry to which decisions are applied as the state of the cluster does it."""

    def __init__(self) -> None:
        self.state = JobRegistry()
        self.now = CutTime(1_000)
        self._ids = count(1)

    def apply(self, *decisions: j.JobDecision) -> None:
        for decision in decisions:
            problem = self.state.problem(decision)
            assert not problem, (problem, decision)
            self.state.apply(decision, self.now)

    def refuses(self, decision: j.JobDecision) -> str:
        problem = self.state.problem(decision)
        assert problem, decision
        return problem

    def job(self, name: str = "fraud") -> JobRecord:
        job = self.state.named(name)
        assert job is not None
        return job

    def epoch(self, name: str = "fraud") -> JobEpoch:
        assignment = self.job(name).assignment
        assert assignment is not None
        return assignment.epoch

    def operation(self, identifier: str) -> Operation:
        return self.state.operations[identifier]

    def register(self, name: str = "a", session: int = 1, **more: object) -> None:
        self.apply(j.RegisterAgent(agent(name, **more), session))  # type: ignore[arg-type]

    def begin(
        self,
        kind: OperationKind,
        name: str = "fraud",
        *,
        steps: tuple[OperationStep, ...] | None = None,
        spec: JobSpec | None = None,
        start: StartPoint | None = None,
        key: IdempotencyKey | None = None,
        **fields: object,
    ) -> str:
        """Begin an operation without the checks of requests, and return its id."""
        job = self.state.named(name)
        number = job.number if job is not None else JobNumber(self.state.last_job + 1)
        found = identifier(next(self._ids))
        steps = steps_of(kind) if steps is None else steps
        operation = Operation(found, kind, number, name, steps, CutTime(0))
        operation = structs.replace(operation, **fields)
        self.apply(j.BeginOperation(operation, spec, start, key))
        return found

    def submit(self, name: str = "fraud", spec: JobSpec = SPEC) -> str:
        return self.begin(OperationKind.SUBMIT, name, spec=spec, version=1)

    def assign(self, name: str = "fraud", agent: str = "a") -> JobEpoch:
        epoch = JobEpoch(self.state.last_epoch + 1)
        self.apply(j.AssignJob(self.job(name).number, agent, self.state.agents[agent].session, epoch))
        return epoch

    def attempt(self, name: str = "fraud", number: int = 1) -> None:
        self.apply(j.BeginAttempt(self.job(name).number, self.epoch(name), number, CHECKPOINT))

    def run(self, name: str = "fraud", agent: str = "a") -> JobEpoch:
        """Assign the job and begin an attempt."""
        epoch = self.assign(name, agent)
        self.attempt(name)
        return epoch

    def first_batch(self, name: str = "fraud") -> None:
        self.apply(j.NoteFirstBatch(self.job(name).number, self.epoch(name), BatchNumber(0), GLSN(5)))

    def end(self, end: RunEnd, failure: RunFailure | None = None, name: str = "fraud") -> None:
        self.apply(j.EndAssignment(self.job(name).number, self.epoch(name), end, failure))

    def savepoint(self, operation: str, name: str = "fraud") -> str:
        found = identifier(next(self._ids) + 10_000)
        taken = JobSavepoint(found, "default", f"{name}-1", GLSN(7))
        step = self.operation(operation).step
        self.apply(j.NoteSavepoint(self.job(name).number, self.epoch(name), operation, step, taken))
        return found

    def stop(self, operation: str, name: str = "fraud") -> str:
        """Do the step ``stop``: take a savepoint, and end."""
        found = self.savepoint(operation, name)
        self.end(RunEnd.STOPPED, name=name)
        return found

    def fail(self, operation: str) -> None:
        step = self.operation(operation).step
        self.apply(j.FailOperation(operation, step, OperationError("refused", "no")))
