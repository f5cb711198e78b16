"""The connection of a program's process to the process that started it: lines on standard input, and lines to an
inherited file descriptor. When standard input ends, this process ends with everything that it has started.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar

from cutwater.jobs.child import session_members
from cutwater.jobs.messages import Lines, line

COMMANDS_MAX = 16
READ_BYTES = 1 << 16

T = TypeVar("T")


class ParentPipe(Generic[T]):
    """``commands`` has what the parent has sent, as ``read`` decodes each line."""

    def __init__(self, events: int, read: Callable[[bytes], T]) -> None:
        os.set_inheritable(events, False)
        self._events, self._read, self._lock = events, read, threading.Lock()
        self.commands: queue.Queue[T] = queue.Queue(COMMANDS_MAX)
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def send(self, message: Any) -> None:
        data = line(message)
        with self._lock, suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._events, data) :]

    def _listen(self) -> None:
        lines = Lines()
        try:
            # This bypasses Python's own buffer: a thread that waits forever would hold its lock when the interpreter
            # ends.
            while data := os.read(sys.stdin.fileno(), READ_BYTES):
                for one in lines.add(data):
                    self.commands.put(self._read(one))
        except Exception:
            # Without its parent's commands, this process is of no use.
            traceback.print_exc()
        end_all(1)


def end_all(code: int) -> NoReturn:
    """End this process with its JVM and Spark's workers, and whatever else its session has."""
    for pid in session_members(os.getsid(0)) or []:
        if pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    os._exit(code)


def print_to(path: str) -> None:
    """Append further output of this process to a file."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
