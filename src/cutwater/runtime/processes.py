"""Child processes of a local cluster: started with a log file, stopped gracefully, never left behind half started."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
import weakref
from contextlib import suppress
from pathlib import Path

from cutwater.errors import Refused, Unavailable
from cutwater.runtime.permissions import open_file

START_SECONDS_MAX = 30.0
LOG_TAIL_BYTES = 2_000
SERVER_LOG_BYTES = 64 * 1024
REASON_CHARS_MAX = 1_000
_ERROR = re.compile(r'^(internal )?error: |\[(error|critical) *\]|"level": ?"(error|critical|fatal|panic)"')
"""The beginning of an error on standard error, and in log messages as text or JSON, including those of etcd."""
_FRAME = " \t│╭╮╰╯─"
"""Characters of the frame around the error of a command that was called with wrong options."""
_ANYTHING = re.compile(r"\S")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.\-]+):(\d+)")


def start(command: list[str], log: Path) -> int:
    """Start a process in its own session, so that Ctrl-C in this terminal does not reach it. Returns its pid."""
    with open(log, "ab", opener=open_file) as out:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    return _let_go(child)


def _let_go(child: subprocess.Popen[bytes]) -> int:
    """Return the pid. The process outlives ``child``, which would otherwise warn that it was not waited for."""
    child.returncode = 0
    return child.pid


class Starting:
    """A server that was started and has yet to print, in its first line, where it listens.

    If the object is dropped before that, the caller has to end the process, whose pid it knows.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log
        # Settings with which this user reaches another cluster do not apply to the servers of this one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUTWATER_TLS_", "CUTWATER_TOKEN"))}
        self._log_start = log.stat().st_size if log.exists() else 0
        self._out, out = os.pipe()
        weakref.finalize(self, os.close, self._out)
        try:
            with open(log, "ab", opener=open_file) as errors:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                    start_new_session=True,
                    env=environment,
                )
        finally:
            os.close(out)
        self.pid = _let_go(child)

    def served(self) -> str:
        """Wait until the server serves, and return its address."""
        return self._said(_ADDRESS)

    def runs(self) -> None:
        """Wait until a process that listens nowhere has said that it runs."""
        self._said(_ANYTHING)

    def _said(self, what: re.Pattern[str]) -> str:
        line = _first_line(self._out, time.monotonic() + START_SECONDS_MAX)
        found = what.search(line)
        if found is None:
            code = _killed(self.pid)
            told = reason_in(self._log, self._log_start) or line.strip() or "it said nothing"
            raise Unavailable(
                f"`{' '.join(self._command)}` does not serve (exit code {code}): {told}. Its log is {self._log}"
            )
        return found.group(0)


def _killed(pid: int) -> int:
    """Kill a child. Returns the exit code, which is its own if it had ended already."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _first_line(fd: int, deadline: float) -> str:
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(fd, 1) if ready else b""
        if not piece:
            break
        line += piece
    return line.decode(errors="replace")


def tail(log: Path, start: int = 0, bytes_max: int = LOG_TAIL_BYTES) -> str:
    """Return the end of a log file, from this offset on."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - bytes_max))
        return file.read().decode(errors="replace").strip()


def reason_in(log: Path, start: int = 0) -> str:
    """Return why a server ended: the last error in its log after this offset, or else the last line, if any."""
    lines = [line.strip(_FRAME) for line in tail(log, start, SERVER_LOG_BYTES).splitlines() if line.strip(_FRAME)]
    found = next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1] if lines else "")
    return found.removeprefix("error: ")[:REASON_CHARS_MAX].rstrip(".")


def is_running(pid: int, started: int = 0) -> bool:
    """Same as ``lives_on``, for processes started by this process or by a command. Reaps a child that has ended."""
    if pid > 0:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return lives_on(pid, started)


def started_at(pid: int) -> int:
    """Return when the process was started, in clock ticks since the machine started.

    This tells apart processes that had the same number. 0 if the process does not exist, or the time is unknown.
    """
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def lives_on(pid: int, started: int) -> bool:
    """Return whether the process that was started at this time lives, and not another one that got its number since.

    ``started`` is 0 if the time is unknown. A process of another user counts too: if it may not be signalled, it
    exists. The parent can still wait for the process.
    """
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    fields = _stat(pid)
    if len(fields) <= 19:
        return True
    return fields[0] != "Z" and started in (0, int(fields[19]))


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat``, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def stop(pids: list[int], seconds: float) -> list[int]:
    """Ask all processes to end, and kill those that do not in time. Returns the killed ones."""
    for pid in pids:
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    left = [pid for pid in pids if is_running(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if is_running(pid)]
    for pid in left:
        _signal(pid, signal.SIGKILL)
    for pid in left:
        while is_running(pid):
            time.sleep(0.01)
    return left


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
        if number is signal.SIGTERM:
            # A stopped process could not handle SIGTERM.
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
    except PermissionError:
        raise Refused(f"process {pid} belongs to another user: stop it as that user") from None
