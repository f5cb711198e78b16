"""Child processes of a local cluster: started with a log file, stopped politely, and never left behind half started."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from cutwater.errors import Refused, Unavailable

START_SECONDS_MAX = 30.0
LOG_TAIL_BYTES = 2_000
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.\-]+):(\d+)")


def start(command: list[str], log: Path) -> int:
    """Start a process of its own session, so that a Ctrl-C meant for someone else does not reach it; its pid."""
    with log.open("ab") as out:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    return _let_go(child)


def _let_go(child: subprocess.Popen[bytes]) -> int:
    """The process outlives the object, which would otherwise complain that nobody waited for it."""
    child.returncode = 0
    return child.pid


class Starting:
    """A server that was started and has yet to say, in its first line, where it listens."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log
        # How this user reaches another cluster is not how the servers of this one listen.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUTWATER_TLS_", "CUTWATER_TOKEN"))}
        with log.open("ab") as errors:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=environment,
            )
        self.pid = self._child.pid

    def served(self) -> str:
        """Wait until it serves; the address."""
        child = self._child
        assert child.stdout is not None
        with child.stdout:
            line = _first_line(child.stdout.fileno(), time.monotonic() + START_SECONDS_MAX)
        found = _ADDRESS.search(line)
        if found is None:
            child.kill()
            code = child.wait()
            told = tail(self._log) or line or "it said nothing"
            raise Unavailable(f"`{' '.join(self._command)}` does not serve (exit code {code}): {told}")
        _let_go(child)
        return found.group(0)


def _first_line(fd: int, deadline: float) -> str:
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(fd, 1) if ready else b""
        if not piece:
            break
        line += piece
    return line.decode(errors="replace")


def tail(log: Path) -> str:
    """The last words of a log file."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip()


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
    when. Whosever it is: that it may not be signalled says that it is there. Its parent still hears of its end."""
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
        raise Refused(f"process {pid} belongs to another user, who can stop it") from None
