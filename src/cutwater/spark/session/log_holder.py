"""Keeps an embedded log open for Spark applications if no other process has it open: ``python -m … PATH``.

Spark's planner and tasks run in short-lived processes that only connect to the log. If the program that started Spark
has not opened the log, this process opens it. It closes the log when that program and all other applications that asked
for the log have ended. The file ``holder.lock`` lists these applications with their start times, because the system
reuses process ids. Each application locks the file while it adds itself. The holder locks it from the moment when it
finds no application left until it has closed the log, so an application never gets the address of a holder that is
about to end.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from cutwater.client.cluster.holder_file import read_holder
from cutwater.client.cluster.log_directory import METADATA
from cutwater.errors import CutwaterError, NotFound, Unavailable
from cutwater.runtime.permissions import open_file
from cutwater.runtime.processes import lives_on, started_at

LOOK_SECONDS = 0.2
POLL_SECONDS = 0.02
LOCK_FILE = "holder.lock"


def servers_of(path: str, application: int, timeout: float) -> str:
    """Return the address of the servers of the log in this directory. If no process has the log open, start one that
    does not end before process ``application``."""
    deadline = time.monotonic() + timeout
    log = Path(path)
    if not (log / METADATA).exists():
        # A reader or a writer must not create a new log from a mistyped path.
        raise NotFound(f"there is no log in {path}: cutwater.open({path!r}) makes one")
    helper: subprocess.Popen[bytes] | None = None
    is_noted = False
    while True:
        is_noted = is_noted or _noted(log, application)
        holder = read_holder(log) if is_noted else None
        if holder is not None and holder.lives():
            return holder.servers
        if is_noted and (helper is None or helper.poll() is not None):
            if helper is not None and helper.returncode:
                raise Unavailable(f"{path} could not be opened: see {log / 'holder.log'}")
            helper = _start(log)
        if time.monotonic() >= deadline:
            raise Unavailable(f"{path} is not served by any process after {timeout:g} s: see {log / 'holder.log'}")
        time.sleep(POLL_SECONDS)


def _noted(log: Path, application: int) -> bool:
    """Add the application to the list of those that need the log. Returns False while a holder is about to close the
    log."""
    if not os.access(log, os.W_OK):
        # The log belongs to another user. Its holder does not wait for this application.
        return True
    file = _locked(log)
    if file is None:
        return False
    with file:
        noted = sorted({*_applications(file), (application, started_at(application))})
        file.truncate(0)
        file.writelines(f"{number} {started}\n" for number, started in noted)
    return True


def _locked(log: Path) -> TextIO | None:
    """Return the list of applications, locked until the file is closed, or None if another process has locked it."""
    file = open(log / LOCK_FILE, "a+", opener=open_file)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _applications(file: TextIO) -> list[tuple[int, int]]:
    """Return the listed applications that still run, with their start times; 0 if the start time is not listed."""
    file.seek(0)
    noted = [(*map(int, line.split()), 0)[:2] for line in file]
    return [(number, started) for number, started in noted if lives_on(number, started)]


def _start(log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cutwater.spark.session.log_holder", str(log)]
    with open(log / "holder.log", "wb", opener=open_file) as output:
        # It gets its own session, because Spark ends whole process groups.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def hold(path: str) -> None:
    """Keep the log open until all applications that need it have ended."""
    from cutwater import embedded  # noqa: PLC0415

    log = Path(path)
    with ExitStack() as after_closing, embedded.open(path):
        while True:
            holder = read_holder(log)
            if holder is None or holder.pid != os.getpid():
                # Another process opened the log first.
                return
            file = _locked(log)
            if file is not None:
                if not _applications(file):
                    # The system may give their process ids to other processes.
                    file.truncate(0)
                    after_closing.enter_context(file)
                    return
                file.close()
            time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    try:
        hold(sys.argv[1])
    except CutwaterError as error:
        sys.exit(f"{error}")
