"""Requests to the metadata repository about jobs and agents, and its answers. Plain data.

Users ask by the name of a job, agents by their name and session. Long lists come in pages: the next one begins after
the last name of this one.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from cutwater.core.jobs.agents import AgentDescription, AgentRecord
from cutwater.core.jobs.errands import Errand, ErrandKind
from cutwater.core.jobs.job_records import (
    CheckpointPointer,
    JobPhase,
    JobRecord,
    JobSavepoint,
    JobVersion,
    ProgramPlace,
    RunEnd,
    RunFailure,
    StartPoint,
)
from cutwater.core.jobs.job_spec import DesiredState, JobSpec
from cutwater.core.jobs.operations import IdempotencyKey, Operation, OperationError, OperationKind
from cutwater.types import GLSN, BatchNumber, CutTime, JobEpoch, JobNumber, Revision

JOBS_PAGE_MAX = 1_000
WAIT_MS_MAX = 2_000
"""How long the leader keeps a request that waits for a change. Less than a client waits for one node, which it would
otherwise take for dead. A caller that wants to wait longer asks again."""

# Users: operations. ``operation`` is a random id that the caller makes; the same request again begins nothing new.


class SubmitJobRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Make a job and start it: from nothing, or from a savepoint of another job (``from_job``)."""

    name: str
    spec: JobSpec
    operation: str
    savepoint: str = ""
    from_job: str = ""
    replay_output: bool = False
    allow_non_restored_state: bool = False
    key: IdempotencyKey | None = None


class UpgradeJobRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Go on with another specification, from a savepoint that is taken for it. A job that does not run needs one that
    it has: ``savepoint``, or that of its last stop."""

    name: str
    spec: JobSpec
    operation: str
    savepoint: str = ""
    replay_output: bool = False
    allow_non_restored_state: bool = False
    timeout_ms: int = 0
    key: IdempotencyKey | None = None


class RescaleJobRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Go on with another parallelism, and with as many slots, if given."""

    name: str
    parallelism: int
    operation: str
    slots: int = 0
    timeout_ms: int = 0
    key: IdempotencyKey | None = None


class RollBackJobRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Go back to an earlier version; 0 stands for the one before."""

    name: str
    operation: str
    version: int = 0
    timeout_ms: int = 0
    key: IdempotencyKey | None = None


class OperateJobRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Start, stop, cancel, restart, delete a job, or take a savepoint of it. The fields about savepoints are for
    ``start``."""

    name: str
    kind: OperationKind
    operation: str
    savepoint: str = ""
    replay_output: bool = False
    allow_non_restored_state: bool = False
    timeout_ms: int = 0
    key: IdempotencyKey | None = None


class ForgetSavepointRequest(Struct, frozen=True, tag=True):
    """Let a savepoint be known by its id no longer. Its files stay."""

    name: str
    savepoint: str


# Users: questions.


class ListJobsRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Ask for jobs by name, of one owner or in one phase if it is given."""

    after: str = ""
    limit: int = JOBS_PAGE_MAX
    owner: str = ""
    phase: JobPhase | None = None


class DescribeJobRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Ask for a job. ``seen``: answer when it has changed after this revision, or after ``wait_ms``. That is how one
    follows a job, and its operations."""

    name: str
    seen: Revision = Revision(0)
    wait_ms: int = 0


class FetchVersionRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Ask for a version of a job; 0 stands for the present one."""

    name: str
    version: int = 0


class DescribeOperationRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Ask for an operation. ``wait_ms``: answer when it is over, or after this time."""

    operation: str
    wait_ms: int = 0


class ListOperationsRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Ask for the operations of a job that are still known, the newest first."""

    name: str
    limit: int = 100


class ListAgentsRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Ask for agents, or for one of them."""

    name: str = ""
    after: str = ""


class AskAgentRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Send an errand to an agent and wait for the answer, ErrandAnswer.

    ``body`` is JSON. ``spec`` is the specification to validate; the job need not exist then. ``savepoint`` is the id of
    a savepoint of the job. ``agent``: ask this one; otherwise the leader chooses one that can answer. A caller that
    gets a retriable error asks the same again and waits for the same errand.
    """

    name: str
    kind: ErrandKind
    body: bytes = b"{}"
    spec: JobSpec | None = None
    savepoint: str = ""
    other_savepoint: str = ""
    agent: str = ""
    wait_ms: int = 0


class FetchProgramPlaceRequest(Struct, frozen=True, tag=True):
    """Ask where the program with this SHA-256 is in the topic of programs. Answer: ProgramPlaces."""

    sha256: str


# Operators.


class DrainAgentRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Give the agent no further jobs and move those that can run elsewhere; or let it have jobs again."""

    agent: str
    is_draining: bool = True


class RemoveAgentRequest(Struct, frozen=True, tag=True):
    """Forget an agent that is not alive."""

    agent: str


# Agents. Each request of a session that was accepted shows the leader that the agent is alive.


class RegisterAgentRequest(Struct, frozen=True, tag=True):
    """Begin as this session, or tell what has changed. Everything of earlier sessions is over. Answer: AgentLease."""

    agent: AgentDescription
    session: int


class JobProgress(Struct, frozen=True, omit_defaults=True):
    """How far a job has come. Only the leader's memory has it; it is not stored."""

    job: JobNumber
    epoch: JobEpoch
    batch: BatchNumber = BatchNumber(-1)
    glsn: GLSN = GLSN(0)
    rows_per_s: float = 0.0
    lag_rows: int = -1
    watermark: int = 0
    state_bytes: int = 0


class RenewAgentRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Keep the lease. The answer, AgentLease, confirms it from the time at which the request was sent."""

    agent: str
    session: int
    progress: tuple[JobProgress, ...] = ()


class WatchAgentRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Ask for the orders of an agent: when they have changed after the revision ``seen``, or after ``wait_ms``."""

    agent: str
    session: int
    seen: Revision = Revision(0)
    wait_ms: int = 0


class LeaveAgentRequest(Struct, frozen=True, tag=True):
    """Tell that the agent ends, and that no process of any job is left there. Its jobs go to other agents at once."""

    agent: str
    session: int


class FetchAssignedRequest(Struct, frozen=True, tag=True):
    """Ask for all that is needed to run a job that this session has."""

    agent: str
    session: int
    job: JobNumber
    epoch: JobEpoch


class BeginAttemptRequest(Struct, frozen=True, tag=True):
    """Tell that an attempt begins, with this checkpoint. The program starts only after the answer. Attempts count from
    1 within an epoch."""

    agent: str
    session: int
    job: JobNumber
    epoch: JobEpoch
    attempt: int
    checkpoint: CheckpointPointer


class EndAttemptRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Tell that an attempt ended and that the agent will begin another one."""

    agent: str
    session: int
    job: JobNumber
    epoch: JobEpoch
    attempt: int
    end: RunEnd = RunEnd.FAILED
    failure: RunFailure | None = None


class EndAssignmentRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Tell that no process of the job runs at the agent any more, and how it ended."""

    agent: str
    session: int
    job: JobNumber
    epoch: JobEpoch
    end: RunEnd
    failure: RunFailure | None = None


class NoteCheckpointRequest(Struct, frozen=True, tag=True):
    """Tell where the checkpoint is. Needed when it moves; its batch may be noted now and then."""

    agent: str
    session: int
    job: JobNumber
    epoch: JobEpoch
    checkpoint: CheckpointPointer


class NoteBatchRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Tell that the job has decided a batch. Only the first one of a version changes anything."""

    agent: str
    session: int
    job: JobNumber
    epoch: JobEpoch
    batch: BatchNumber
    glsn: GLSN = GLSN(0)


class NoteSavepointRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Tell that a savepoint was taken, as this step of an operation. ``has_ended``: the step was ``stop``, and no
    process of the job runs any more."""

    agent: str
    session: int
    job: JobNumber
    epoch: JobEpoch
    operation: str
    step: int
    savepoint: JobSavepoint
    has_ended: bool = False


class FinishStepRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Tell that a step of an operation is done (``validate``), or that it failed (``error``): then the job goes on."""

    agent: str
    session: int
    job: JobNumber
    epoch: JobEpoch
    operation: str
    step: int
    error: OperationError | None = None


class AnswerErrandRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Answer an errand: with ``body``, which is JSON, or with an error."""

    agent: str
    session: int
    errand: str
    body: bytes = b""
    error: OperationError | None = None


class JobTokenRequest(Struct, frozen=True, tag=True, omit_defaults=True):
    """Make a token of the job's principal known, whose secret only the agent has. It ends with the assignment, or at
    ``expires``. ``errand``: the token is for this errand, which validates a job, and ends ten minutes later at most.
    Answer: JobTokenGranted."""

    agent: str
    session: int
    job: JobNumber
    epoch: JobEpoch
    token: str
    """The id of the token, made at random."""
    sha256: str
    expires: CutTime
    errand: str = ""


FromAgent = (
    RenewAgentRequest
    | WatchAgentRequest
    | LeaveAgentRequest
    | FetchAssignedRequest
    | BeginAttemptRequest
    | EndAttemptRequest
    | EndAssignmentRequest
    | NoteCheckpointRequest
    | NoteBatchRequest
    | NoteSavepointRequest
    | FinishStepRequest
    | AnswerErrandRequest
    | JobTokenRequest
)
"""Requests of an agent that has registered."""

JobRequest = (
    SubmitJobRequest
    | UpgradeJobRequest
    | RescaleJobRequest
    | RollBackJobRequest
    | OperateJobRequest
    | ForgetSavepointRequest
    | ListJobsRequest
    | DescribeJobRequest
    | FetchVersionRequest
    | DescribeOperationRequest
    | ListOperationsRequest
    | ListAgentsRequest
    | AskAgentRequest
    | FetchProgramPlaceRequest
    | DrainAgentRequest
    | RemoveAgentRequest
    | RegisterAgentRequest
    | FromAgent
)

# Answers.


class OperationAnswer(Struct, frozen=True, tag=True, omit_defaults=True):
    """An operation. ``advice`` is what a user should know: what it waits for, or which agent the job is pinned to."""

    operation: Operation
    advice: str = ""


class OperationList(Struct, frozen=True, tag=True):
    operations: tuple[Operation, ...]


class JobSummary(Struct, frozen=True, omit_defaults=True):
    """A job in a list. ``since`` is when its phase became the present one. ``error`` says why the present version does
    not run; an error of an attempt before the present one, or of another version, is in the description only."""

    number: JobNumber
    name: str
    owner: str
    phase: JobPhase
    desired: DesiredState
    version: int
    parallelism: int
    agent: str = ""
    operation: str = ""
    since: CutTime = CutTime(0)
    error: str = ""
    revision: Revision = Revision(0)


class JobList(Struct, frozen=True, tag=True):
    """``more``: there are further ones. ``revision`` is that of all jobs."""

    jobs: tuple[JobSummary, ...]
    more: bool = False
    revision: Revision = Revision(0)


class JobDescription(Struct, frozen=True, tag=True, omit_defaults=True):
    """A job. ``job.versions`` has the present version only; ``versions`` are the numbers of all. ``waits_for`` says why
    it has no agent, if it wants one."""

    job: JobRecord
    phase: JobPhase
    versions: tuple[int, ...]
    operations: tuple[Operation, ...] = ()
    progress: JobProgress | None = None
    waits_for: str = ""


class VersionAnswer(Struct, frozen=True, tag=True):
    version: JobVersion


class AgentSummary(Struct, frozen=True, omit_defaults=True):
    """An agent, the slots that its jobs take, and those jobs. ``silent_us``: how long the leader has not heard of it,
    at most since it leads."""

    agent: AgentRecord
    used_slots: int = 0
    jobs: tuple[str, ...] = ()
    silent_us: int = 0


class AgentList(Struct, frozen=True, tag=True):
    agents: tuple[AgentSummary, ...]
    more: bool = False


class AgentLease(Struct, frozen=True, tag=True):
    """The session speaks for the agent. Its jobs must have ended before ``lease_ms`` have passed since it sent the last
    request that was answered like this, on a clock that runs while the machine sleeps."""

    lease_ms: int
    revision: Revision


class OrderedAction(enum.StrEnum):
    """What an agent is to do with a job that it has."""

    RUN = "run"
    SAVEPOINT = "savepoint"
    """Take a savepoint for the operation and step in the order; run on."""
    VALIDATE = "validate"
    """Find out whether the program of version ``version_to`` restores the savepoint in the order; run on."""
    STOP = "stop"
    """Take a savepoint for the operation and step in the order, and end exactly there."""
    END = "end"
    """End all processes, then report ``EndAssignment``: as released if ``is_releasing``, otherwise as cancelled."""


class JobOrder(Struct, frozen=True, omit_defaults=True):
    """One job that an agent has, and what it is to do with it."""

    job: JobNumber
    name: str
    epoch: JobEpoch
    version: int
    action: OrderedAction
    operation: str = ""
    step: int = 0
    savepoint: JobSavepoint | None = None
    version_to: int = 0
    timeout_ms: int = 0
    is_releasing: bool = False


class AgentOrders(Struct, frozen=True, tag=True, omit_defaults=True):
    """All jobs that the agent has, and the errands that it has not answered. It ends every job of which it has
    processes and that is not among the orders. It gives up an errand that is not among the errands any more."""

    revision: Revision
    orders: tuple[JobOrder, ...]
    is_draining: bool = False
    errands: tuple[Errand, ...] = ()


class AssignedJob(Struct, frozen=True, tag=True, omit_defaults=True):
    """All that is needed to run a job. ``savepoint`` is the one that ``start`` names. ``attempt`` is the last attempt
    of this epoch that is known; the next one has the next number."""

    job: JobNumber
    name: str
    owner: str
    epoch: JobEpoch
    version: JobVersion
    start: StartPoint
    savepoint: JobSavepoint | None = None
    attempt: int = 0


class ReportNoted(Struct, frozen=True, tag=True):
    """The report of an agent is stored, or was before."""

    revision: Revision


class ErrandAnswer(Struct, frozen=True, tag=True, omit_defaults=True):
    """What an agent answered: JSON, or an error."""

    body: bytes
    agent: str = ""
    error: OperationError | None = None


class ProgramPlaces(Struct, frozen=True, tag=True):
    """Where a program is stored, the newest place last. There is none if it was never stored, or was trimmed."""

    places: tuple[ProgramPlace, ...]


class JobTokenGranted(Struct, frozen=True, tag=True):
    """The token is valid, as this principal, until it expires or the assignment ends."""

    principal: str
    expires: CutTime


JobAnswer = (
    OperationAnswer
    | OperationList
    | JobList
    | JobDescription
    | VersionAnswer
    | AgentList
    | AgentLease
    | AgentOrders
    | AssignedJob
    | ReportNoted
    | ErrandAnswer
    | ProgramPlaces
    | JobTokenGranted
)
