"""Opens an embedded log that nobody has open, for as long as Spark applications need it: ``python -m … PATH``.

Spark's planner and its tasks are short-lived processes that come and go, and each of them only connects. If the program
that started Spark has not opened the log, this process does, until that program ends, and all others that have asked
for the log meanwhile. They are noted in ``holder.lock``, with when each was started, because pids are used again. The
file is locked by whoever asks, and by the holder from the moment it finds that nobody needs it until it has closed the
log: so nobody is sent to one that is about to go.
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

from cutwater.client.cluster.log_directory import METADATA
from cutwater.errors import CutwaterError, NotFound, Unavailable
from cutwater.runtime.permissions import open_file
from cutwater.runtime.processes import lives_on, started_at

LOOK_SECONDS = 0.2
POLL_SECONDS = 0.02
LOCK_FILE = "holder.lock"


def servers_of(path: str, application: int, timeout: float) -> str:
    """Where the log in this directory is served: whoever has it open answers, or a process that is started for it, and
    that process does not end before process ``application``."""
    # Here and not above: every Python process of Spark would otherwise load servers that it does not need.
    from cutwater.embedded import holder_of  # noqa: PLC0415

    deadline = time.monotonic() + timeout
    log = Path(path)
    if not (log / METADATA).exists():
        # Whoever reads or writes topics does not make a new log out of a mistyped name.
        raise NotFound(f"there is no log in {path}: cutwater.open({path!r}) makes one")
    helper: subprocess.Popen[bytes] | None = None
    is_noted = False
    while True:
        is_noted = is_noted or _noted(log, application)
        holder = holder_of(log) if is_noted else None
        if holder is not None and holder.lives():
            return holder.servers
        if is_noted and (helper is None or helper.poll() is not None):
            if helper is not None and helper.returncode:
                raise Unavailable(f"{path} could not be opened: see {log / 'holder.log'}")
            helper = _start(log)
        if time.monotonic() >= deadline:
            raise Unavailable(f"{path} is not served by anyone after {timeout:g} s: see {log / 'holder.log'}")
        time.sleep(POLL_SECONDS)


def _noted(log: Path, application: int) -> bool:
    """Note that the application needs the log; False if that has to wait, as a holder is about to close it."""
    if not os.access(log, os.W_OK):
        # It is another user's, who does not hold it for us.
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
    """The file with the applications, which is this process's own until it is closed; None if it is another's."""
    file = open(log / LOCK_FILE, "a+", opener=open_file)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _applications(file: TextIO) -> list[tuple[int, int]]:
    """Those noted that still run, with when they were started; 0 if that was not noted."""
    file.seek(0)
    noted = [(*map(int, line.split()), 0)[:2] for line in file]
    return [(number, started) for number, started in noted if lives_on(number, started)]


def _start(log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cutwater.spark.session.log_holder", str(log)]
    with open(log / "holder.log", "wb", opener=open_file) as output:
        # In a session of its own, because Spark ends whole groups of processes.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def hold(path: str) -> None:
    """Have the log open until all applications that need it have ended."""
    from cutwater import embedded  # noqa: PLC0415

    log = Path(path)
    with ExitStack() as after_closing, embedded.open(path):
        while True:
            holder = embedded.holder_of(log)
            if holder is None or holder.pid != os.getpid():
                # Someone else was faster.
                return
            file = _locked(log)
            if file is not None:
                if not _applications(file):
                    # Their numbers may be given to others.
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
