"""Manages the directory of a job: what is known about it while it runs and afterwards, and where its checkpoints are.

::

    jobs/                     one place per user and log, see ``places``; --jobs-dir names another
      fraud/                  the job, by the name of its pipeline
        job.json              the fields of ``Job``; replaced as a whole
        job.lock              held by the supervisor; by a program while it starts, or while a stopped job is saved
        job.log               what the program and Spark print
        run-1/  run-2/ …      a checkpoint of Spark's for each start from a savepoint

A start without a savepoint always goes on with the newest checkpoint; a start from a savepoint makes another one. So a
program that ran by itself (``python fraud.py``) can go on under ``cutwater pipeline run``, and the other way round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from cutwater.errors import InvalidArgument, NotFound, Refused
from cutwater.jobs.locks import FileLock
from cutwater.runtime import processes
from cutwater.runtime.local_files import make_directory
from cutwater.runtime.permissions import open_file

ROOT = "checkpoints"
JOB_FILE = "job.json"
LOCK_FILE = "job.lock"
LOG_FILE = "job.log"
_RUN = "run-"


class JobState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting to restart"
    STOPPING = "stopping"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    """Its process is gone and could not record how it ended. Never stored."""


OVER = frozenset({JobState.STOPPED, JobState.CANCELLED, JobState.FINISHED, JobState.FAILED})


class ProgramFailure(Struct, frozen=True):
    """An error that ended a program, and its time in seconds since 1970."""

    code: str
    message: str
    at: float = 0.0


class Restored(Struct, frozen=True, omit_defaults=True):
    """What a start went on from, and the position there: the checkpoint after a micro-batch, or else a savepoint."""

    path: str
    glsn: int
    batch: int | None = None

    def __str__(self) -> str:
        what = "savepoint" if self.batch is None else f"micro-batch {self.batch} of checkpoint"
        return f"{what} {self.path}, GLSN {self.glsn}"


class Job(Struct):
    """The contents of ``job.json``."""

    pipeline: str
    checkpoint: str
    state: JobState = JobState.STARTING
    file: str = ""
    directory: str = ""
    """Where it was started: paths in the program are relative to this."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The requested options, without secrets."""
    parallelism: int | None = None
    """The parallelism of the current checkpoint, if known."""
    from_savepoint: str | None = None
    """The savepoint that the current checkpoint began with."""
    restored: Restored | None = None
    """What the last start went on from; None if it began anew."""
    savepoint: str | None = None
    """The last savepoint that was taken of it."""
    pid: int = 0
    started: int = 0
    """When the process was started, as in ``processes.started_at``, because the system reuses process ids."""
    driver: int = 0
    jvm: int = 0
    control: str = ""
    """The socket on which the process takes commands; empty for a program that runs by itself."""
    metrics: str = ""
    """The address where Prometheus can read metrics while the process runs; empty if they are not served."""
    ui: str = ""
    """The address of Spark's own pages while the program runs; empty if they are not served."""
    restarts: int = 0
    last_error: ProgramFailure | None = None
    since: float = 0.0
    """When the state changed, in seconds since 1970."""

    def go_back_to(self, before: Job) -> None:
        """Return to the earlier checkpoint, because a start with another one has failed."""
        self.checkpoint, self.from_savepoint = before.checkpoint, before.from_savepoint
        self.parallelism = before.parallelism

    @property
    def is_alive(self) -> bool:
        """Whether a process runs the job."""
        return self.state not in OVER and processes.is_running(self.pid, self.started)

    @property
    def state_now(self) -> JobState:
        return self.state if self.state in OVER or self.is_alive else JobState.LOST


class JobDirectory:
    """The directory of one job. ``others`` returns the jobs to name if it is missing, by default those of ``root``."""

    def __init__(
        self, root: str | os.PathLike[str], pipeline: str, others: Callable[[], Iterable[Job]] | None = None
    ) -> None:
        self.root, self.pipeline, self._others = Path(root).absolute(), pipeline, others
        self.path = self.root / _file_name(pipeline)

    def load(self) -> Job | None:
        return _load(self.path / JOB_FILE)

    def require(self) -> Job:
        job = self.load()
        if job is None:
            found = list_jobs(self.root) if self._others is None else self._others()
            names = sorted({job.pipeline for job in found})
            where = f" in {self.root}" if self._others is None else ""
            near = get_close_matches(self.pipeline, names, 1)
            meant = f" (is {near[0]!r} meant?)" if near else ""
            raise NotFound(
                f"no job is called {self.pipeline!r}{where}: there are {', '.join(names) or 'none'}{meant}; `cutwater "
                "pipeline list` shows all of this user, and --jobs-dir names another place"
            )
        return job

    def lock(
        self, way_out: str = "a savepoint of it is being taken, or it is just starting or ending; try again soon"
    ) -> FileLock:
        """Lock the job, so that no other process starts it, or takes a savepoint of it while it is stopped."""
        return FileLock(self.path / LOCK_FILE, f"the job of pipeline {self.pipeline!r} in {self.path}", way_out)

    def save(self, job: Job) -> None:
        """Write the job atomically, even if the machine fails meanwhile."""
        make_directory(self.path)
        temporary = self.path / f"{JOB_FILE}.new"
        with open(temporary, "wb", opener=open_file) as file:
            file.write(msgspec.json.format(msgspec.json.encode(job), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / JOB_FILE)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def change(self, job: Job, state: JobState) -> None:
        job.state, job.since = state, time.time()
        self.save(job)

    def current(self) -> str | None:
        """Return the checkpoint with which a start without a savepoint goes on."""
        job = self.load()
        if job is not None:
            return job.checkpoint
        # Before jobs existed, the checkpoint was this directory itself.
        return str(self.path) if (self.path / "offsets").is_dir() else None

    def next_checkpoint(self) -> str:
        """Return a new checkpoint directory."""
        taken = [path.name.removeprefix(_RUN) for path in self.path.glob(f"{_RUN}*")]
        job = self.load()
        if job is not None:
            # It may have been named already without having begun.
            taken.append(Path(job.checkpoint).name.removeprefix(_RUN))
        number = 1 + max((int(name) for name in taken if name.isdecimal()), default=0)
        return str(self.path / f"{_RUN}{number}")

    def of_program(self, from_savepoint: str | None) -> Job:
        """Return the job of a program that runs by itself, in this process. It goes on with the newest checkpoint,
        unless that one began with another savepoint than the program names: starting a program again starts the same
        program."""
        job = self.load()
        current = self.current()
        is_other = from_savepoint is not None and (job is None or job.from_savepoint != from_savepoint)
        checkpoint = self.next_checkpoint() if current is None or is_other else current
        began_with = from_savepoint if is_other or job is None else job.from_savepoint
        return Job(self.pipeline, checkpoint, from_savepoint=began_with, **here())


def here() -> dict[str, Any]:
    """Return the fields of ``Job`` that identify this process."""
    return {"pid": os.getpid(), "started": processes.started_at(os.getpid()), "directory": str(Path.cwd())}


def has_begun(checkpoint: str) -> bool:
    """Report whether a micro-batch was planned in a local checkpoint. If so, the micro-batch may be published, and its
    output can only go on from there."""
    return any((Path(checkpoint) / "offsets").glob("[0-9]*"))


def require_parallelism(checkpoint: str, made_with: int | None, wanted: int | None) -> None:
    """Refuse another parallelism than the checkpoint has, if that is known."""
    if None not in (made_with, wanted) and wanted != made_with:
        raise Refused(
            f"the checkpoint {checkpoint} was made with parallelism {made_with}, not {wanted}: leave --parallelism "
            "(parallelism=…) out, and say `cutwater pipeline rescale` if it is a job, or take a savepoint and start "
            "from it with another one"
        )


def list_jobs(root: str | os.PathLike[str]) -> Iterator[Job]:
    """Yield all jobs under a directory, by name."""
    for path in sorted(Path(root).glob(f"*/{JOB_FILE}")):
        job = _load(path)
        if job is not None:
            yield job


def _load(path: Path) -> Job | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Job)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, OSError) as error:
        raise InvalidArgument(
            f"{path} is not the description of a job: {error}; put back the right one, or move it away and name the "
            "checkpoint to go on with by --checkpoint"
        ) from error


def _file_name(pipeline: str) -> str:
    """Escape the name of a pipeline. It may be any printable text, but the name of a directory may not."""
    made = pipeline.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return f"%2E{made[1:]}" if made.startswith(".") else made
