"""Opens an embedded log that nobody has open, for as long as a Spark application runs: ``python -m … PATH PID``.

Spark's planner and its tasks are short-lived processes that come and go, and each of them only connects. If the program
that started Spark has not opened the log, this process does, until that program ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from cutwater.client.directories import METADATA
from cutwater.errors import CutwaterError, NotFound, Unavailable

LOOK_SECONDS = 0.2
POLL_SECONDS = 0.02


def servers_of(path: str, application: int, timeout: float) -> str:
    """Where the log in this directory is served; whoever has it open answers, or a process that is started for it and
    ends with process ``application``."""
    # Here and not above: every Python process of Spark would otherwise load servers that it does not need.
    from cutwater.embedded import holder_of  # noqa: PLC0415

    deadline = time.monotonic() + timeout
    log = Path(path)
    if not (log / METADATA).exists():
        # Whoever reads or writes topics does not make a new log out of a mistyped name.
        raise NotFound(f"there is no log in {path}: cutwater.open({path!r}) makes one")
    helper: subprocess.Popen[bytes] | None = None
    while True:
        holder = holder_of(log)
        if holder is not None and _is_running(holder.pid):
            return holder.servers
        if helper is None or helper.poll() is not None:
            if helper is not None and helper.returncode:
                raise Unavailable(f"{path} could not be opened: see {log / 'holder.log'}")
            helper = _start(log, application)
        if time.monotonic() >= deadline:
            raise Unavailable(f"{path} is not served by anyone after {timeout:g} s: see {log / 'holder.log'}")
        time.sleep(POLL_SECONDS)


def _start(log: Path, application: int) -> subprocess.Popen[bytes]:
    log.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "cutwater.spark.holder", str(log), str(application)]
    with (log / "holder.log").open("wb") as output:
        # In a session of its own, because Spark ends whole groups of processes.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def hold(path: str, application: int) -> None:
    """Have the log open until the application has ended."""
    from cutwater import embedded  # noqa: PLC0415

    with embedded.open(path):
        log = Path(path)
        while _is_running(application):
            holder = embedded.holder_of(log)
            if holder is None or holder.pid != os.getpid():
                # Someone else was faster.
                return
            time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    try:
        hold(sys.argv[1], int(sys.argv[2]))
    except CutwaterError as error:
        sys.exit(f"{error}")
