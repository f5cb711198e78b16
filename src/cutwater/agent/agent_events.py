"""Events and effects of the agent's state. Times are milliseconds of a clock that runs while the machine sleeps.

Effects are carried out in their order. ``Ask`` is repeated by the state until there is an answer or a refusal.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from cutwater.agent.job.job_messages import FromJob, ToJob
from cutwater.core.jobs.errands import Errand
from cutwater.core.jobs.job_records import CheckpointPointer, JobSavepoint
from cutwater.core.jobs.job_requests import AssignedJob, FromAgent, JobAnswer, RegisterAgentRequest
from cutwater.core.jobs.operations import OperationError
from cutwater.types import JobEpoch, JobNumber

JobKey: TypeAlias = tuple[JobNumber, JobEpoch]
"""One assignment of a job."""
AgentRequest: TypeAlias = RegisterAgentRequest | FromAgent

# Events.


class Tick(Struct, frozen=True):
    """A time that ``WakeAgent`` named has come, or anything else woke the agent."""


class RequestAnswered(Struct, frozen=True):
    """``sent_ms``: when the request was sent, or earlier."""

    request: AgentRequest
    answer: JobAnswer
    sent_ms: int


class RequestRefused(Struct, frozen=True):
    """The cluster will never accept the request. ``is_session_over``: since another session speaks for the agent, or
    the lease has ended."""

    request: AgentRequest
    error: OperationError
    is_session_over: bool = False


class RequestUnanswered(Struct, frozen=True):
    """No answer came in time. The request may have been carried out."""

    request: AgentRequest
    reason: str


class JobSpoke(Struct, frozen=True):
    key: JobKey
    message: FromJob


class JobGone(Struct, frozen=True):
    """No process of the assignment is left. ``reason`` says how the last one ended. ``error``: it could not be
    started, and a further try would fail, too, if ``is_hopeless``."""

    key: JobKey
    reason: str
    error: OperationError | None = None
    is_hopeless: bool = False


class JobValidated(Struct, frozen=True):
    """A step ``validate`` is done, or failed."""

    key: JobKey
    operation: str
    step: int
    error: OperationError | None = None


class ErrandDone(Struct, frozen=True):
    """An errand is done: with JSON, or with an error. ``error`` of None and no body: it was given up."""

    errand: str
    body: bytes = b""
    error: OperationError | None = None


class NameTaken(Struct, frozen=True):
    """Another process runs as the agent of this name: ``host`` says where."""

    host: str


class NameFree(Struct, frozen=True):
    """No other process runs as the agent of this name."""


class DrainWanted(Struct, frozen=True):
    """The agent shall give its jobs back and end."""


class KillWanted(Struct, frozen=True):
    """The agent shall kill its jobs and end."""


class WatchdogLost(Struct, frozen=True):
    """Nothing guards the lease of the agent any more."""


AgentEvent: TypeAlias = (
    Tick
    | RequestAnswered
    | RequestRefused
    | RequestUnanswered
    | JobSpoke
    | JobGone
    | JobValidated
    | ErrandDone
    | NameTaken
    | NameFree
    | DrainWanted
    | KillWanted
    | WatchdogLost
)

# Effects.


class Ask(Struct, frozen=True):
    """Send a request to the cluster, and return what came of it as an event. ``timeout_ms`` is how long to try."""

    request: AgentRequest
    timeout_ms: int


class FindSession(Struct, frozen=True):
    """Find out whether another session than this one has the name of this agent. ``NameTaken`` or ``NameFree``
    follows."""

    session: int


class SetDeadline(Struct, frozen=True):
    """All processes of jobs must be dead at this time. The watchdog must hear of it before the next effect."""

    at_ms: int


class StartJob(Struct, frozen=True):
    """Start a process for an attempt. ``JobGone`` follows, whatever comes of it."""

    key: JobKey
    assigned: AssignedJob
    attempt: int
    checkpoint: CheckpointPointer


class TellJob(Struct, frozen=True):
    key: JobKey
    message: ToJob


class KillJob(Struct, frozen=True):
    """Kill all processes of an assignment. ``JobGone`` follows."""

    key: JobKey


class ValidateJob(Struct, frozen=True):
    """Find out whether the program of another version can restore a savepoint. ``JobValidated`` follows."""

    key: JobKey
    name: str
    owner: str
    operation: str
    step: int
    version: int
    savepoint: JobSavepoint | None
    seconds: float


class StartErrand(Struct, frozen=True):
    """Do an errand, in a process of its own if it needs one. ``ErrandDone`` follows."""

    errand: Errand
    session: int


class GiveUpErrand(Struct, frozen=True):
    """End an errand for which nobody waits. ``ErrandDone`` follows."""

    errand: str


class AgentReady(Struct, frozen=True):
    """The agent has registered."""

    lease_ms: int


class ExitAgent(Struct, frozen=True):
    """No process of any job is left: end the agent, with this error."""

    error: OperationError | None = None


class WakeAgent(Struct, frozen=True):
    """Send ``Tick`` at this time. A later ``WakeAgent`` replaces it."""

    at_ms: int


AgentEffect: TypeAlias = (
    Ask
    | FindSession
    | SetDeadline
    | StartJob
    | TellJob
    | KillJob
    | ValidateJob
    | StartErrand
    | GiveUpErrand
    | AgentReady
    | ExitAgent
    | WakeAgent
)
