"""Runs the program of a job as a process, with everything that it starts: the driver, its JVM, and Spark's Python
workers.

These processes form one session, so they can be found even when the driver that started them is dead. Each end of a
pipe notices the death of the other: the program ends when its standard input ends, and the supervisor reads the end of
its messages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cutwater.jobs.messages import READ_BYTES, FromProgram, Lines, ToProgram, line, read_from_program
from cutwater.runtime.permissions import open_file

PROGRAM = "cutwater.spark.job"
LOOK_SECONDS = 0.02
KILL_SECONDS = 30.0
"""A killed process may have to write data first, and a disk may be slow."""


class Child:
    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
        self.events, events = os.pipe()
        with open(log, "ab", opener=open_file) as output:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, str(events), *arguments],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(events,),
                    start_new_session=True,
                    env=environment,
                )
            except BaseException:
                os.close(self.events)
                raise
            finally:
                os.close(events)
        self._lines = Lines()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToProgram) -> None:
        """Send a message. If the program is dead, ``read`` reports it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line(message))
            self._process.stdin.flush()

    def read(self) -> list[FromProgram] | None:
        """Wait for messages and return them, or None at the end."""
        data = os.read(self.events, READ_BYTES)
        return [read_from_program(one) for one in self._lines.add(data)] if data else None

    def end(self, seconds: float) -> int:
        """End the whole session, killing it after a time. Returns the driver's exit code, or minus its signal."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._wait(seconds)
        self.kill()
        self._wait(KILL_SECONDS)
        # Only now may the system reuse its process id, which is also the id of the session.
        code = self._process.wait()
        os.close(self.events)
        return code

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._left() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def kill(self) -> None:
        for pid in self._left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """Return the living processes of the session. A dead driver that has not been waited for is not one of them."""
        found = session_members(self.pid)
        if found is not None:
            return found
        is_over = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return [] if is_over else [self.pid]


def session_members(session: int) -> list[int] | None:
    """Return the living processes of a session, or None if the system does not tell."""
    if not Path("/proc/self/stat").exists():
        return None
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX" and int(fields[3]) == session:
                    found.append(int(entry.name))
    return found


def how_it_ended(code: int) -> str:
    """Describe an exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"was killed ({name})"


def environment(scratch: Path, file: Path, more: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a program: its scratch directory, and the modules next to the file."""
    made = {**os.environ, "TMPDIR": str(scratch), **more}
    made.setdefault("SPARK_LOCAL_DIRS", str(scratch))
    made["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(file.parent.absolute()))))
    return made
