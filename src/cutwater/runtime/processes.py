"""Child processes of a local cluster: started with a log file, stopped politely, and never left behind half started."""

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
"""How an error begins on standard error, and as a log message in text or JSON, of etcd too."""
_FRAME = " \t│╭╮╰╯─"
"""The frame around the error of a command that was called with wrong options."""
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.\-]+):(\d+)")


def start(command: list[str], log: Path) -> int:
    """Start a process in a session of its own, so that a Ctrl-C in this terminal does not reach it; its pid."""
    with open(log, "ab", opener=open_file) as out:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    return _let_go(child)


def _let_go(child: subprocess.Popen[bytes]) -> int:
    """The process outlives the object, which would otherwise warn that the process was not waited for."""
    child.returncode = 0
    return child.pid


class Starting:
    """A server that was started and has yet to say, in its first line, where it listens. An object that is dropped
    before leaves the process to the caller, which knows its pid."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log
        # How this user reaches another cluster is not how the servers of this one listen.
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
        """Wait until it serves; the address."""
        line = _first_line(self._out, time.monotonic() + START_SECONDS_MAX)
        found = _ADDRESS.search(line)
        if found is None:
            code = _killed(self.pid)
            told = reason_in(self._log, self._log_start) or line.strip() or "it said nothing"
            raise Unavailable(
                f"`{' '.join(self._command)}` does not serve (exit code {code}): {told}. Its log is {self._log}"
            )
        return found.group(0)


def _killed(pid: int) -> int:
    """End a child; the exit code, which is its own if it had ended by itself."""
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
    """The end of a log file, from this offset on."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - bytes_max))
        return file.read().decode(errors="replace").strip()


def reason_in(log: Path, start: int = 0) -> str:
    """Why a server ended: the last error in its log behind this offset, else the last line, if there is one."""
    lines = [line.strip(_FRAME) for line in tail(log, start, SERVER_LOG_BYTES).splitlines() if line.strip(_FRAME)]
    found = next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1] if lines else "")
    return found.removeprefix("error: ")[:REASON_CHARS_MAX].rstrip(".")


def is_running(pid: int, started: int = 0) -> bool:
    """As ``lives_on``, for processes that were started here or by a command: a child that ended is put to rest on the
    way."""
    if pid > 0:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return lives_on(pid, started)


def started_at(pid: int) -> int:
    """When the process was started, in ticks since the machine was: a number that is used again is told by it. 0 if it
    does not live, or nothing is known."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def lives_on(pid: int, started: int) -> bool:
    """Whether the process lives that was started then, and not another that got its number since; 0 if it is not known
    when. A process of another user counts, too: it exists if it may not be signalled. Its parent still hears of its
    end."""
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
    """What the system says of a process, from its state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def stop(pids: list[int], seconds: float) -> list[int]:
    """Ask all to end; those that do not in time are killed. Returns the killed ones."""
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
            # One that was stopped could not hear it.
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
    except PermissionError:
        raise Refused(f"process {pid} belongs to another user: stop it as that user") from None
