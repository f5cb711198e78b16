"""Decisions about jobs and agents. They are part of the one sequence of decisions, see ``core.order.decisions``."""

from __future__ import annotations

from cutwater.core.jobs.agents import AgentDescription
from cutwater.core.jobs.job_records import CheckpointPointer, JobSavepoint, RunEnd, RunFailure, StartPoint
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.operations import IdempotencyKey, Operation, OperationError
from cutwater.core.order.origin import Attributed, Dated
from cutwater.types import GLSN, BatchNumber, JobEpoch, JobNumber


class RegisterAgent(Dated, frozen=True, tag=True):
    """The agent is there, as this session. What an earlier session had is lost to it."""

    agent: AgentDescription
    session: int


class ExpireAgent(Dated, frozen=True, tag=True):
    """The lease of the agent has ended: its jobs go to other agents."""

    agent: str
    session: int
    reason: str = ""


class DrainAgent(Dated, frozen=True, tag=True):
    """The agent gets no further jobs, or may get some again."""

    agent: str
    is_draining: bool


class RemoveAgent(Dated, frozen=True, tag=True):
    """Forgets an agent that is not alive."""

    agent: str


class BeginOperation(Dated, frozen=True, tag=True):
    """Begins an operation. ``spec`` is that of the new job or version, if it makes one; ``start`` is where the job
    starts, if the operation says so. ``savepoint`` is that of another job from which a new job starts."""

    operation: Operation
    spec: JobSpec | None = None
    start: StartPoint | None = None
    key: IdempotencyKey | None = None
    savepoint: JobSavepoint | None = None


class AssignJob(Dated, frozen=True, tag=True):
    """The job belongs to this session of an agent, under an epoch that no other assignment has."""

    job: JobNumber
    agent: str
    session: int
    epoch: JobEpoch


class ReleaseJob(Dated, frozen=True, tag=True):
    """The agent is to give the job back."""

    job: JobNumber
    epoch: JobEpoch
    reason: str = ""


class BeginAttempt(Dated, frozen=True, tag=True):
    """An attempt begins, with this checkpoint. It is stored before the program starts, so that no successor begins
    another checkpoint from the same savepoint."""

    job: JobNumber
    epoch: JobEpoch
    attempt: int
    checkpoint: CheckpointPointer


class EndAttempt(Dated, frozen=True, tag=True):
    """An attempt ended, and the agent keeps the job: it will begin another one."""

    job: JobNumber
    epoch: JobEpoch
    attempt: int
    end: RunEnd
    failure: RunFailure | None = None


class EndAssignment(Dated, frozen=True, tag=True):
    """The agent has the job no longer, and none of its processes runs there."""

    job: JobNumber
    epoch: JobEpoch
    end: RunEnd
    failure: RunFailure | None = None


class NoteCheckpoint(Attributed, frozen=True, tag=True):
    """The checkpoint of the job is here, and contains this batch."""

    job: JobNumber
    epoch: JobEpoch
    checkpoint: CheckpointPointer


class NoteFirstBatch(Attributed, frozen=True, tag=True):
    """The version of the job has decided its first batch: it has come up."""

    job: JobNumber
    epoch: JobEpoch
    batch: BatchNumber
    glsn: GLSN = GLSN(0)


class NoteSavepoint(Dated, frozen=True, tag=True):
    """The agent took a savepoint as this step of the operation. After the step ``stop``, the job ends in the same
    write."""

    job: JobNumber
    epoch: JobEpoch
    operation: str
    step: int
    savepoint: JobSavepoint


class FinishStep(Dated, frozen=True, tag=True):
    """The agent has done this step of the operation."""

    operation: str
    step: int
    epoch: JobEpoch


class FailOperation(Dated, frozen=True, tag=True):
    """This step of the operation failed, and so did the operation. The job goes on as it is."""

    operation: str
    step: int
    error: OperationError


class ForgetSavepoint(Dated, frozen=True, tag=True):
    """The savepoint is not known by its id any more. Its files are not concerned."""

    job: JobNumber
    savepoint: str


JobDecision = (
    RegisterAgent
    | ExpireAgent
    | DrainAgent
    | RemoveAgent
    | BeginOperation
    | AssignJob
    | ReleaseJob
    | BeginAttempt
    | EndAttempt
    | EndAssignment
    | NoteCheckpoint
    | NoteFirstBatch
    | NoteSavepoint
    | FinishStep
    | FailOperation
    | ForgetSavepoint
)
