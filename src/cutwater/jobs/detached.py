"""Runs a supervisor in the background: ``python -m cutwater.jobs.detached READY``, with the request on standard input.

It reports once, on the file descriptor READY, that the pipeline runs or why it does not. After that, ``job.json`` has
its state.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial

import msgspec
from msgspec import Struct

from cutwater.errors import CutwaterError, DeadlineExceeded, Unavailable
from cutwater.jobs.job_file import Job, JobState
from cutwater.jobs.messages import READ_BYTES, Progress, Told, first_line, line
from cutwater.jobs.supervisor import JobOptions, Supervisor

END_SECONDS_MAX = 30.0
"""How long a supervisor may take to end after it has reported an error."""
PROGRAM = ("-m", "cutwater.jobs.detached")


def start(asked: JobOptions, seconds: float) -> Job:
    """Start the supervisor in its own session. Returns when the pipeline runs or has already ended."""
    reads, writes = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, *PROGRAM, str(writes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writes,),
            start_new_session=True,
        )
    finally:
        os.close(writes)
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(msgspec.json.encode(asked))
    told = None
    try:
        told = first_line(partial(_read, reads, time.monotonic() + seconds))
    except TimeoutError:
        process.terminate()
    finally:
        os.close(reads)
    found = msgspec.json.decode(told, type=_Said) if told else None
    if found is not None and found.error is not None:
        # The supervisor closes the log before it ends. A start before that would connect to a log that is being closed.
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS_MAX)
    # The supervisor outlives this process, which need not wait for it.
    process.returncode = 0
    if told is None:
        raise DeadlineExceeded(
            f"the pipeline does not run after {seconds:g} s, and was stopped: `cutwater pipeline describe` shows its "
            "last error; allow for more with --timeout"
        )
    if found is None:
        raise Unavailable(f"the supervisor, process {process.pid}, ended without a word: try without --detach")
    if found.error is not None:
        raise found.error.error()
    assert found.job is not None
    return found.job


class _Said(Struct, frozen=True):
    job: Job | None = None
    error: Told | None = None


def _read(fd: int, deadline: float) -> bytes:
    ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise TimeoutError
    return os.read(fd, READ_BYTES)


class _Ready:
    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd

    def tell(self, what: _Said) -> None:
        if self._fd >= 0:
            with suppress(BrokenPipeError):
                os.write(self._fd, line(what))
            os.close(self._fd)
            self._fd = -1

    def watch(self, job: Job, progress: Progress | None) -> None:
        # A failure that ends the job is reported with its error; another failure may pass.
        if job.state not in (JobState.STARTING, JobState.WAITING, JobState.FAILED):
            self.tell(_Said(job=job))


def main(fd: str) -> None:
    ready = _Ready(int(fd))
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=JobOptions)
    try:
        Supervisor(asked, ready.watch).run()
    except CutwaterError as error:
        ready.tell(_Said(error=Told.of(error)))
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
