"""Operations: what users ask of a job that takes more than one step, and the steps.

An operation makes progress by decisions only, so any process may die between two steps: another one reads in the state
which step is next. A step belongs to the leader (``START``) or to the agent that has the job. A report that a step is
done names operation and step, and is refused unless that step is next: no step is done twice.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from cutwater.core.jobs.job_spec import check_sha256
from cutwater.core.names import check_name
from cutwater.errors import InvalidArgument
from cutwater.types import CutTime, JobNumber

RANDOM_ID_DIGITS = 32
"""Ids of operations and savepoints are made at random by the process that asks or takes."""
IDEMPOTENCY_KEYS_MAX = 10_000
KEYS_PER_PRINCIPAL_MAX = 5_000
IDEMPOTENCY_KEPT_US = 24 * 3_600 * 1_000_000
_HEX = frozenset("0123456789abcdef")


class OperationKind(enum.StrEnum):
    SUBMIT = "submit"
    START = "start"
    STOP = "stop"
    """Take a savepoint, and end exactly there."""
    CANCEL = "cancel"
    """End at once. The checkpoint stays."""
    SAVEPOINT = "savepoint"
    RESTART = "restart"
    RESCALE = "rescale"
    UPGRADE = "upgrade"
    ROLLBACK = "rollback"
    DELETE = "delete"


class OperationStep(enum.StrEnum):
    START = "start"
    """The leader assigns the job to an agent, and that reports that its program has begun."""
    COME_UP = "come-up"
    """The version decides its first batch."""
    SAVEPOINT = "savepoint"
    """The agent takes a savepoint, and the job runs on."""
    VALIDATE = "validate"
    """The agent finds out whether the program of the target version can restore the savepoint of this operation. The
    job runs on."""
    STOP = "stop"
    """The agent takes a savepoint, and ends the job exactly there."""
    END = "end"
    """The agent ends the processes of the job."""


class OperationState(enum.StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    """A later operation made it pointless."""


class OperationError(Struct, frozen=True):
    """Why an operation failed, in the words of the process that noticed it."""

    code: str
    message: str


class Operation(Struct, frozen=True, omit_defaults=True):
    """An operation and how far it has come. ``step`` is the place in ``steps`` of the step that is next."""

    id: str
    kind: OperationKind
    job: JobNumber
    name: str
    """The name of the job."""
    steps: tuple[OperationStep, ...]
    begun: CutTime
    step: int = 0
    state: OperationState = OperationState.RUNNING
    principal: str = ""
    version: int = 0
    """The version with which the job runs after the operation."""
    version_before: int = 0
    savepoint: str = ""
    """The savepoint that it took last, or goes on from."""
    is_saved: bool = False
    """Whether the step ``stop``, which is next, has taken its savepoint. The job ends in the same write."""
    was_running: bool = False
    """Whether the job was to run when the operation began."""
    replay_output: bool = False
    allow_non_restored_state: bool = False
    timeout_ms: int = 0
    """How long the agent tries a step before it gives up; 0 for the agent's default."""
    error: OperationError | None = None
    finished: CutTime = CutTime(0)

    @property
    def next_step(self) -> OperationStep | None:
        """The step that is next; None if the operation is over."""
        is_running = self.state is OperationState.RUNNING
        return self.steps[self.step] if is_running and self.step < len(self.steps) else None


class IdempotencyKey(Struct, frozen=True):
    """A key that a client chose for a request, and the hash of the request. The same again means the same operation;
    the same key with another hash is refused."""

    key: str
    body: str


class KeptKey(Struct, frozen=True):
    """An idempotency key that a principal used, and the operation that it stands for."""

    principal: str
    key: IdempotencyKey
    operation: str
    at: CutTime


_PLAIN_STEPS: dict[OperationKind, tuple[OperationStep, ...]] = {
    OperationKind.SUBMIT: (OperationStep.START,),
    OperationKind.START: (OperationStep.START,),
    OperationKind.STOP: (OperationStep.STOP,),
    OperationKind.CANCEL: (OperationStep.END,),
    OperationKind.SAVEPOINT: (OperationStep.SAVEPOINT,),
    OperationKind.RESTART: (OperationStep.END, OperationStep.START),
    OperationKind.RESCALE: (OperationStep.STOP, OperationStep.START, OperationStep.COME_UP),
    OperationKind.UPGRADE: (OperationStep.STOP, OperationStep.START, OperationStep.COME_UP),
    OperationKind.DELETE: (OperationStep.END,),
}


def steps_of(kind: OperationKind) -> tuple[OperationStep, ...]:
    """Return the steps of an operation on a job that runs. Those of a rollback depend on more."""
    return _PLAIN_STEPS[kind]


def check_random_id(kind: str, identifier: str) -> None:
    if len(identifier) != RANDOM_ID_DIGITS or not _HEX.issuperset(identifier):
        raise InvalidArgument(
            f"{identifier[:80]!r} cannot be the id of a job's {kind}: it has {RANDOM_ID_DIGITS} hexadecimal digits "
            "(0-9, a-f), made at random"
        )


def check_idempotency_key(key: IdempotencyKey) -> None:
    check_name("idempotency key", key.key)
    check_sha256("the request", key.body)
