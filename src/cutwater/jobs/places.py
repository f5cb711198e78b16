"""Chooses the default place of jobs and their checkpoints: one for each user and log.

::

    ~/.local/state/cutwater/jobs/       $XDG_STATE_HOME in place of ~/.local/state, if it is set
      7d1f…/                            the key of the cluster, which its copies share
        fraud/                          the job, as ``job_file`` describes it

So a pipeline that is started in another working directory goes on from its checkpoint. In earlier versions, the place
was ``./checkpoints``: a job that exists only there goes on there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cutwater.errors import InvalidArgument
from cutwater.jobs.job_file import ROOT, Job, JobDirectory, list_jobs

STATE_HOME = "XDG_STATE_HOME"
NOTE = "cutwater.json"


def state_directory() -> Path:
    """Return the directory that holds the jobs of all logs."""
    given = Path(os.environ.get(STATE_HOME, ""))
    home = given if given.is_absolute() else Path.home() / ".local" / "state"
    return home / "cutwater" / "jobs"


def root_of(log: str, pipeline: str) -> Path:
    """Return the directory that holds a job of a log. ``log`` is the key of its cluster."""
    own = state_directory() / log
    before = JobDirectory(ROOT, pipeline)
    if JobDirectory(own, pipeline).current() is None and _is_of(before, log):
        return before.root
    # Other users must not read programs and their output.
    state_directory().mkdir(parents=True, exist_ok=True, mode=0o700)
    return own


def _is_of(directory: JobDirectory, log: str) -> bool:
    """Report whether the directory has a job that does not belong to another log."""
    checkpoint = directory.current()
    if checkpoint is None:
        return False
    path = checkpoint.removeprefix("file://")
    if "://" in path:
        return True
    try:
        note = msgspec.json.decode((Path(path) / NOTE).read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError):
        return True
    return note.get("log", "") in ("", log)


def find(pipeline: str) -> JobDirectory:
    """Return the job of this name, of any log. If there is none, return a directory that does not exist."""
    found = [directory for root in _roots() if (directory := JobDirectory(root, pipeline)).current() is not None]
    if len(found) > 1:
        found = [own for own in found if (job := own.load()) is not None and job.is_alive] or found
    if len(found) > 1:
        places = " or ".join(f"--jobs-dir {directory.root}" for directory in found)
        raise InvalidArgument(f"several jobs are called {pipeline!r}: say which one with {places}")
    return found[0] if found else JobDirectory(state_directory(), pipeline, all_jobs)


def all_jobs() -> Iterator[Job]:
    """Yield the jobs of all logs and of the working directory."""
    for root in _roots():
        yield from list_jobs(root)


def _roots() -> Iterator[Path]:
    yield Path(ROOT).absolute()
    yield from sorted(path for path in state_directory().glob("*") if path.is_dir())
