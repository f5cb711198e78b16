"""A job as decided: its versions, its assignment to an agent, its attempts, checkpoint and savepoints."""

from __future__ import annotations

import enum

from msgspec import Struct, structs

from cutwater.core.jobs.job_spec import DesiredState, JobSpec
from cutwater.core.jobs.operations import check_random_id
from cutwater.core.names import check_name
from cutwater.errors import InvalidArgument
from cutwater.types import GLSN, BatchNumber, CutTime, JobEpoch, JobNumber, Revision

VERSIONS_MAX = 50
"""Number of versions of a job that are kept. The oldest that nothing needs goes first."""
ATTEMPTS_KEPT = 5
SAVEPOINTS_MAX = 200
"""Number of savepoints of a job that are known by their ids."""
PROGRAMS_MAX = 10_000
"""Number of programs whose places are known. Those that a version of a job names stay, of the others the newest."""
PLACES_MAX = 4
"""Number of known places of one program."""
PROGRAM_RUN_PREFIX = "program:"
"""Before the SHA-256 of a program, in the name of the run that stores it."""
ERROR_CHARS_MAX = 4_096
PATH_CHARS_MAX = 1_024


class RunEnd(enum.StrEnum):
    """How an assignment, or an attempt, ended."""

    FINISHED = "finished"
    """The pipeline came to the end that it was given."""
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """Its restart strategy allows no further attempt; or, of an attempt, it ended with an error."""
    RELEASED = "released"
    """The agent gives the job back: it drains, or ends. Another agent goes on."""
    LOST = "lost"
    """The lease of the agent ended, or it registered anew."""


class JobPhase(enum.StrEnum):
    """What a job is doing now, derived from what is decided."""

    WAITING = "waiting"
    """It waits for an agent."""
    STARTING = "starting"
    """An agent has it, and no attempt has begun."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """The last attempt failed, and the agent will begin another."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FINISHED = "finished"
    FAILED = "failed"


class RunFailure(Struct, frozen=True, omit_defaults=True):
    """The exception with which an attempt or an assignment ended. ``glsn`` is the record, if it is known."""

    code: str
    message: str
    glsn: GLSN = GLSN(0)


class CheckpointPointer(Struct, frozen=True, omit_defaults=True):
    """Where a checkpoint is: a path below a root. ``batch`` is the last batch in it that is known here."""

    root: str
    path: str
    batch: BatchNumber = BatchNumber(-1)
    glsn: GLSN = GLSN(0)


class JobSavepoint(Struct, frozen=True, omit_defaults=True):
    """A savepoint of a job. ``id`` is made by the agent, at random, and addresses it. ``version`` is the version of
    which it was taken."""

    id: str
    root: str
    path: str
    glsn: GLSN
    batch: BatchNumber = BatchNumber(-1)
    version: int = 0
    agent: str = ""
    bytes: int = 0
    taken: CutTime = CutTime(0)


class StartPoint(Struct, frozen=True, omit_defaults=True):
    """What the next assignment goes on from: the checkpoint if there is one, otherwise the savepoint with this id,
    otherwise nothing. ``savepoint`` stays when a checkpoint has begun from it: it is where the version began. The other
    fields hold for a start from a savepoint."""

    checkpoint: CheckpointPointer | None = None
    savepoint: str = ""
    replay_output: bool = False
    allow_non_restored_state: bool = False


class BeforeSwitch(Struct, frozen=True, omit_defaults=True):
    """Where a job was when it was switched to another version without a savepoint of its own. It returns there, if that
    version does not come up."""

    start: StartPoint
    has_come_up: bool
    batch: BatchNumber
    end: RunEnd | None = None
    failure: RunFailure | None = None


class JobVersion(Struct, frozen=True, omit_defaults=True):
    """One version of a job."""

    number: int
    spec: JobSpec
    made: CutTime = CutTime(0)
    principal: str = ""
    has_come_up: bool = False
    """Whether it ever decided a batch, or came to its end without one."""


class Assignment(Struct, frozen=True, omit_defaults=True):
    """The job belongs to this session of an agent. ``epoch`` is higher than that of any earlier assignment of any job,
    and fences them all. ``attempt`` is the number of the attempt that runs; 0 if none does."""

    agent: str
    session: int
    epoch: JobEpoch
    since: CutTime = CutTime(0)
    attempt: int = 0
    has_failed: bool = False
    """Whether the last attempt in this assignment has failed."""
    is_releasing: bool = False
    """Whether the agent is to give the job back, since it drains."""


class ProgramPlace(Struct, frozen=True, omit_defaults=True):
    """Where a program is in the topic of programs: ``rows`` records from ``glsn`` on. ``bytes`` is their stored size,
    and 0 if it is unknown. Whether they are the program, its hash tells."""

    glsn: GLSN
    rows: int
    bytes: int = 0


class AttemptRecord(Struct, frozen=True, omit_defaults=True):
    """One attempt to run the program, within an assignment. ``end`` is None while it runs."""

    epoch: JobEpoch
    number: int
    agent: str
    version: int
    begun: CutTime
    ended: CutTime = CutTime(0)
    end: RunEnd | None = None
    failure: RunFailure | None = None


class JobRecord(Struct, frozen=True, omit_defaults=True):
    """A job. ``version`` is the number of the version that runs, or would run."""

    number: JobNumber
    name: str
    owner: str
    versions: tuple[JobVersion, ...]
    version: int
    created: CutTime = CutTime(0)
    desired: DesiredState = DesiredState.RUNNING
    last_version: int = 1
    start: StartPoint = StartPoint()
    has_come_up: bool = False
    """Whether the version has decided a batch since it was last switched to."""
    assignment: Assignment | None = None
    epoch: JobEpoch = JobEpoch(0)
    """The highest epoch that the job has had."""
    pinned_to: str = ""
    """The agent that has the checkpoint, if other agents cannot reach it."""
    end: RunEnd | None = None
    """How it ended by itself, or was ended: finished, stopped, cancelled or failed. None if it shall run."""
    failure: RunFailure | None = None
    """Why it failed last."""
    failed_version: int = 0
    """The version that failed so."""
    attempts: tuple[AttemptRecord, ...] = ()
    savepoints: tuple[JobSavepoint, ...] = ()
    operation: str = ""
    """The operation in progress."""
    before: BeforeSwitch | None = None
    batch: BatchNumber = BatchNumber(-1)
    """The first batch that the version decided, or -1."""
    revision: Revision = Revision(0)
    """The revision of the jobs at which it changed."""
    since: CutTime = CutTime(0)
    """When its phase became the present one."""

    @property
    def spec(self) -> JobSpec:
        return self.version_of(self.version).spec

    def version_of(self, number: int) -> JobVersion:
        return next(version for version in self.versions if version.number == number)

    def has_version(self, number: int) -> bool:
        return any(version.number == number for version in self.versions)

    def savepoint_of(self, identifier: str) -> JobSavepoint | None:
        return next((found for found in self.savepoints if found.id == identifier), None)

    @property
    def present_failure(self) -> RunFailure | None:
        """Why the job does not run: how its last attempt or its end failed. None if it runs, or ended otherwise, and if
        another version than the present one failed."""
        if self.failed_version != self.version:
            return None
        if self.end is None:
            # A running attempt has no failure, and one that was lost, or given back, has none either.
            has_failed = bool(self.attempts) and self.attempts[-1].failure is not None
            return self.failure if has_failed else None
        return self.failure if self.end is RunEnd.FAILED else None

    @property
    def wants_agent(self) -> bool:
        """Whether the job is to be assigned to an agent."""
        return self.desired is DesiredState.RUNNING and self.end is None and self.assignment is None

    @property
    def phase(self) -> JobPhase:
        if self.assignment is None:
            return JobPhase.WAITING if self.end is None else JobPhase(self.end.value)
        if self.desired is not DesiredState.RUNNING or self.assignment.is_releasing:
            return JobPhase.STOPPING
        if self.assignment.attempt:
            return JobPhase.RUNNING
        return JobPhase.RESTARTING if self.assignment.has_failed else JobPhase.STARTING

    # Changes of the version.

    def with_version(self, version: JobVersion) -> JobRecord:
        """Return the job with one more version. The oldest that is not the present one goes, if there are too many."""
        versions = [*self.versions, version]
        if len(versions) > VERSIONS_MAX:
            versions.remove(next(known for known in versions if known.number != self.version))
        return structs.replace(self, versions=tuple(versions), last_version=version.number)

    def with_working_version(self) -> JobRecord:
        """Return the job with the note that its present version has come up."""
        working = structs.replace(self.version_of(self.version), has_come_up=True)
        return structs.replace(
            self, versions=tuple(working if known.number == working.number else known for known in self.versions)
        )

    def before_switch(self) -> BeforeSwitch:
        return BeforeSwitch(self.start, self.has_come_up, self.batch, self.end, self.failure)

    def as_before(self, before: BeforeSwitch) -> JobRecord:
        return structs.replace(self, start=before.start, has_come_up=before.has_come_up, batch=before.batch)


def check_pointer(pointer: CheckpointPointer) -> None:
    check_name("checkpoint root", pointer.root)
    _check_path("checkpoint", pointer.path)


def check_savepoint(savepoint: JobSavepoint) -> None:
    check_random_id("savepoint", savepoint.id)
    check_name("savepoint root", savepoint.root)
    _check_path("savepoint", savepoint.path)
    if savepoint.bytes < 0 or savepoint.glsn < 0:
        raise InvalidArgument(f"a savepoint has no negative size or position: {savepoint}")


def _check_path(what: str, path: str) -> None:
    """Check a path below a root. It never leaves the root."""
    parts = path.split("/")
    is_plain = 0 < len(path) <= PATH_CHARS_MAX and path.isprintable() and "\\" not in path
    if not is_plain or any(part in ("", ".", "..") for part in parts):
        raise InvalidArgument(
            f"{path[:80]!r} cannot be the path of a {what}: it has names with '/' between, below a root"
        )
