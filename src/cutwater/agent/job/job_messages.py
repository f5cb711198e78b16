"""Messages between the agent and a process of a job: lines of JSON."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import Struct

from cutwater.core.jobs.job_records import RunEnd
from cutwater.jobs.messages import Told

# To the job.


class SaveJob(Struct, frozen=True, tag=True):
    """Take a savepoint and run on. ``ask`` is a number for the answer. ``path`` is below the job's savepoint root."""

    ask: int
    path: str
    seconds: float


class StopJob(Struct, frozen=True, tag=True, omit_defaults=True):
    """Stop, with a savepoint if ``path`` is not empty. If that fails, the job runs on."""

    ask: int
    seconds: float
    path: str = ""


ToJob: TypeAlias = SaveJob | StopJob

# From the job.


class JobRuns(Struct, frozen=True, tag=True):
    """The program runs. ``restored``: what it went on from, in words."""

    parallelism: int
    restored: str = ""


class JobMoves(Struct, frozen=True, tag=True):
    """How far the job has come, see ``JobProgress``."""

    batch: int
    glsn: int
    rows_per_s: float = 0.0
    lag_rows: int = -1
    watermark: int = 0
    state_bytes: int = 0


class JobAnswers(Struct, frozen=True, tag=True, omit_defaults=True):
    """What came of ``SaveJob`` or ``StopJob``: a savepoint, with its position and size, or an error."""

    ask: int
    glsn: int = 0
    batch: int = -1
    bytes: int = 0
    error: Told | None = None


class JobEnds(Struct, frozen=True, tag=True, omit_defaults=True):
    """How the attempt ended. The process ends now. ``is_hopeless``: another attempt would fail, too."""

    end: RunEnd
    error: Told | None = None
    is_hopeless: bool = False
    glsn: int = 0
    """The record at which a function of the pipeline failed, if it is known."""


FromJob: TypeAlias = JobRuns | JobMoves | JobAnswers | JobEnds

read_to_job = msgspec.json.Decoder(ToJob).decode
read_from_job = msgspec.json.Decoder(FromJob).decode
