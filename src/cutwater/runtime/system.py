"""What the log needs of the machine: clocks, chance, free space, listening sockets, workers, and what ``made`` returns.

Code of the log calls the functions of this module. They pass every call on to one ``System``, which is the operating
system unless ``use`` has replaced it. ``cutwater.testing.virtual`` puts a simulated one in its place, so the same code
runs under virtual time. Code on an event loop may also use ``loop.time()``, timers and ``run_in_executor``; a virtual
loop provides them.
"""

from __future__ import annotations

import os
import random as random_numbers
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from cutwater.runtime import processes
from cutwater.runtime.daemon_executor import DaemonExecutor
from cutwater.runtime.event_loop import occupy_standard_descriptors as occupy_descriptors
from cutwater.runtime.sockets import listening_sockets
from cutwater.runtime.worker import ThreadWorker, Worker, WorkerStep

T = TypeVar("T")


class Space(Struct, frozen=True):
    """The space of a file system. ``device`` tells two file systems apart."""

    total_bytes: int
    free_bytes: int
    device: int


class System:
    """The operating system. A simulated one overrides all methods."""

    monotonic = staticmethod(time.monotonic)
    wall_time_ns = staticmethod(time.time_ns)

    def thread_time(self) -> float:
        return time.thread_time()

    def token_bytes(self, size: int) -> bytes:
        return secrets.token_bytes(size)

    def random_bits(self, bits: int) -> int:
        return secrets.randbits(bits)

    def random(self) -> random_numbers.Random:
        return random_numbers.Random()

    def free_space(self, path: Path) -> Space:
        stats = os.statvfs(path)
        return Space(stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize, os.stat(path).st_dev)

    async def listen(self, host: str, port: int, backlog: int) -> list[socket.socket]:
        return await listening_sockets(host, port, backlog)

    def worker(self, name: str, step: WorkerStep[T]) -> Worker[T]:
        return ThreadWorker(name, step)

    def executor(self, threads_max: int, name: str) -> DaemonExecutor:
        return DaemonExecutor(threads_max, name)

    def process_id(self) -> int:
        return os.getpid()

    def started_at(self, pid: int) -> int:
        return processes.started_at(pid)

    def lives_on(self, pid: int, started: int) -> bool:
        return processes.lives_on(pid, started)

    def occupy_standard_descriptors(self) -> None:
        occupy_descriptors()

    def made(self, kind: Callable[[], T]) -> T:
        return kind()


_system = System()

# Every append reads these clocks, so they are variables: another call for each reading would show in its speed. Call
# them as ``system.monotonic()``; an imported name would not change with ``use``.
monotonic: Callable[[], float] = _system.monotonic
"""Returns seconds that never go back, from an arbitrary start."""
wall_time_ns: Callable[[], int] = _system.wall_time_ns
"""Returns the nanoseconds since 1970, which may go back when the clock is set."""


def use(other: System) -> System:
    """Replace the system for the whole process. Returns the previous one. Only for tests."""
    global _system, monotonic, wall_time_ns
    previous, _system = _system, other
    monotonic, wall_time_ns = other.monotonic, other.wall_time_ns
    return previous


def thread_time() -> float:
    """Return the seconds of processor time that this thread has used."""
    return _system.thread_time()


def token_bytes(size: int) -> bytes:
    """Return bytes that cannot be guessed."""
    return _system.token_bytes(size)


def token_hex(size: int) -> str:
    """Return as many bytes that cannot be guessed, as text with two digits for each."""
    return _system.token_bytes(size).hex()


def random_bits(bits: int) -> int:
    """Return a number of so many bits that cannot be guessed."""
    return _system.random_bits(bits)


def random() -> random_numbers.Random:
    """Return a new generator of numbers that may be guessed: for jitter and for choices that spread load."""
    return _system.random()


def free_space(path: Path) -> Space:
    """Return the space of the file system that holds ``path``. Raises ``OSError``."""
    return _system.free_space(path)


async def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listen on all addresses of ``host``; the sockets do not block. All have the same port, a free one if that is 0.

    Raises ``InvalidArgument`` if the name has no address. Raises ``OSError`` if the port cannot be used; its
    ``filename`` is the host and the port.
    """
    return await _system.listen(host, port, backlog)


def worker(name: str, step: WorkerStep[T]) -> Worker[T]:
    """Start a worker that calls ``step`` with the items that are waiting, off the event loop."""
    return _system.worker(name, step)


def executor(threads_max: int, name: str) -> DaemonExecutor:
    """Make a pool of threads for ``run_in_executor`` of the event loop."""
    return _system.executor(threads_max, name)


def process_id() -> int:
    """Return the number of this process."""
    return _system.process_id()


def started_at(pid: int) -> int:
    """Return when a process was started; see ``processes.started_at``."""
    return _system.started_at(pid)


def lives_on(pid: int, started: int) -> bool:
    """Return whether the process that was started at this time lives; see ``processes.lives_on``."""
    return _system.lives_on(pid, started)


def occupy_standard_descriptors() -> None:
    """Keep files and sockets out of the places of standard input, output and error, if these are closed."""
    _system.occupy_standard_descriptors()


def made(kind: Callable[[], T]) -> T:
    """Make an object that stands for a part of the machine, such as its files: of this class, or a simulated one."""
    return _system.made(kind)
