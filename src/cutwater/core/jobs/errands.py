"""Errands: questions of users that only an agent can answer, since it has the files and may run programs.

Only the leader's memory has them. A new leader has forgotten them, and the caller asks again.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from cutwater.core.jobs.job_records import JobSavepoint
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.types import JobEpoch, JobNumber

ERRAND_BYTES_MAX = 64 * 1024
"""Size of a question, as JSON."""
ERRAND_ANSWER_BYTES_MAX = 1_000_000
"""Size of an answer, as JSON. With what is around it, it fits into one message."""


class ErrandKind(enum.StrEnum):
    VALIDATE = "validate"
    """Import the program of a specification, and tell its plan, its schemas, and what a savepoint would restore."""
    SAVEPOINT_DESCRIBE = "savepoint-describe"
    SAVEPOINT_VERIFY = "savepoint-verify"
    SAVEPOINT_DIFF = "savepoint-diff"
    SAVEPOINT_DELETE = "savepoint-delete"
    STATE = "state"
    """Tell what a job keeps under a key, from a savepoint or its checkpoint."""
    LOG = "log"
    """Tell the newest lines of the log of a job that runs."""


class Errand(Struct, frozen=True, omit_defaults=True):
    """A question to an agent. ``body`` is JSON whose form depends on the kind.

    ``job`` and ``epoch`` are those of the job with this name, as far as it exists and the agent has it. ``spec`` is the
    specification to validate. ``savepoint`` is the savepoint that the question names, and ``other_savepoint`` the
    second one of ``savepoint-diff``.
    """

    id: str
    kind: ErrandKind
    name: str
    body: bytes = b"{}"
    spec: JobSpec | None = None
    savepoint: JobSavepoint | None = None
    other_savepoint: JobSavepoint | None = None
    job: JobNumber = JobNumber(0)
    epoch: JobEpoch = JobEpoch(0)
    principal: str = ""
    """The principal that asks, if access control is on."""
    timeout_ms: int = 0
    """How long the caller will wait at most, since the errand was given out."""
