"""Holds a checkpoint for this process, so that no other process goes on with it meanwhile."""

from __future__ import annotations

import os
import time

from cutwater.errors import CutwaterError, Refused
from cutwater.jobs.job_file import ROOT, Job, JobDirectory, JobState, ProgramFailure
from cutwater.jobs.locks import lock_checkpoint


class Hold:
    """A checkpoint that this process holds until ``let_go``. If no checkpoint is named, it is the one of the pipeline's
    job under ``root``, and ``job.json`` there names this process."""

    def __init__(
        self,
        pipeline: str,
        checkpoint: str | os.PathLike[str] | None,
        from_savepoint: str | None,
        root: str | os.PathLike[str] = ROOT,
    ) -> None:
        self._directory = JobDirectory(root, pipeline)
        self._before: Job | None = None
        self._job: Job | None = None
        if checkpoint is not None:
            self.place = os.fspath(checkpoint)
            self._lock = lock_checkpoint(self.place)
            return
        # First try to name the process that runs the job. Only the lock is certain.
        self._not_run()
        with self._directory.lock():
            self._before = self._not_run()
            job = self._directory.of_program(from_savepoint)
            self.place = job.checkpoint
            self._lock = lock_checkpoint(self.place)
            self._directory.change(job, JobState.RUNNING)
        self._job = job

    def _not_run(self) -> Job | None:
        """Return the stored job. Raises if another process runs it."""
        job = self._directory.load()
        if job is not None and job.is_alive and job.pid != os.getpid():
            raise Refused(
                f"pipeline {job.pipeline!r} is run by process {job.pid}, as {self._directory.path} says: stop that one "
                "first, or run with a checkpoint of its own"
            )
        return job

    def let_go(self, error: BaseException | None = None, *, is_stopped: bool = False, has_begun: bool = True) -> None:
        """Release the checkpoint, because the query has ended or has not begun. Further calls do nothing."""
        if self._lock is not None:
            self._lock.release()
        if self._job is None:
            return
        job, self._job = self._job, None
        if error is not None:
            code = error.code if isinstance(error, CutwaterError) else type(error).__name__
            job.last_error = ProgramFailure(code, str(error), time.time())
        if not has_begun and self._before is not None:
            job.go_back_to(self._before)
        self._directory.change(
            job, JobState.FAILED if error is not None else JobState.STOPPED if is_stopped else JobState.FINISHED
        )
