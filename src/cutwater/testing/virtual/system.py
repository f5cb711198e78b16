"""The machine that simulated processes see: clocks, chance, free space, listening sockets, workers and files."""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast

from cutwater.errors import CutwaterError, ProtocolViolation
from cutwater.runtime import system
from cutwater.runtime.daemon_executor import DaemonExecutor
from cutwater.runtime.local_files import MachineFiles
from cutwater.runtime.system import Space, System
from cutwater.runtime.worker import Worker, WorkerStep
from cutwater.testing.virtual.local_disk import SimMachineFiles
from cutwater.testing.virtual.loop import VirtualLoop, new_loop
from cutwater.testing.virtual.processes import SimProcess, current_process
from cutwater.testing.virtual.trace import Trace
from cutwater.wire.inprocess_transport import forget_doors

T = TypeVar("T")

WORKER_SECONDS_MAX = 0.0005
"""A worker begins within this time after it got something to do, unless its process is slow."""


class SimSystem(System):
    """Passes every call on to the process that makes it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def _process(self) -> SimProcess:
        process = current_process()
        assert process is not None, "code of the log runs outside of all processes"
        return process

    def monotonic(self) -> float:
        return self._loop.time()

    def wall_time_ns(self) -> int:
        return self._process().wall_ns(self._loop.now)

    def thread_time(self) -> float:
        return 0.0

    def token_bytes(self, size: int) -> bytes:
        return self._process().random.randbytes(size)

    def random_bits(self, bits: int) -> int:
        return self._process().random.getrandbits(bits)

    def random(self) -> Random:
        return Random(self._process().random.getrandbits(64))

    def free_space(self, path: Path) -> Space:
        disk = self._process().disk
        assert disk is not None
        return disk.free_space(path)

    async def listen(self, host: str, port: int, backlog: int) -> list[Any]:
        return [self._loop.network.listen(host, port, backlog)]

    def worker(self, name: str, step: WorkerStep[T]) -> SimWorker[T]:
        return SimWorker(self._loop, step)

    def executor(self, threads_max: int, name: str) -> SimExecutor:
        return SimExecutor(threads_max, name)

    def process_id(self) -> int:
        return self._process().pid

    def started_at(self, pid: int) -> int:
        other = self._process().neighbours.get(pid)
        return 0 if other is None or other.is_dead else other.started_ticks

    def lives_on(self, pid: int, started: int) -> bool:
        other = self._process().neighbours.get(pid)
        return other is not None and not other.is_dead and started in (0, other.started_ticks)

    def occupy_standard_descriptors(self) -> None:
        pass

    def made(self, kind: Callable[[], T]) -> T:
        process = self._process()
        if kind is MachineFiles:
            found: Any = SimMachineFiles(process.disk)
        else:
            found = process.parts[kind]()
        return cast(T, found)


class SimExecutor(DaemonExecutor):
    """Stands for threads: the loop runs their jobs, and this counts them."""

    jobs = 0

    def count(self, change: int) -> None:
        if change > 0 and self._is_shut:
            raise RuntimeError("this executor was shut down")
        self.jobs += change

    @property
    def has_ended(self) -> bool:
        return self._is_shut and not self.jobs


class SimWorker(Worker[T]):
    """A worker whose steps run on the virtual loop, never two at a time. What a step tells the loop, and the next step,
    wait for the time that the disk charged."""

    def __init__(self, loop: VirtualLoop, step: WorkerStep[T]) -> None:
        self._loop, self._step = loop, step
        self._items: list[T] = []
        self._is_busy = self._is_stopped = False
        self._busy_until = 0.0
        """When the last step is over, by the clock of the process."""

    @property
    def is_idle(self) -> bool:
        return not self._items and not self._is_busy

    def put(self, item: T) -> None:
        if not self._is_stopped:
            self._items.append(item)
            self._begin_soon()

    def stop(self) -> None:
        self._is_stopped = True

    def join(self, timeout: float) -> bool:
        """Handle what is left at once: the caller is a simulated thread, which cannot wait for another one. If a step
        is under way, the caller is charged the time that is left of it."""
        left = self._busy_until - self._loop.time()
        if left > timeout:
            return False
        process = current_process()
        if left > 0 and process is not None and process.disk is not None:
            process.disk.charged_seconds += left
        while self._items:
            items, self._items = self._items, []
            then = self._step(items)
            if then is not None:
                then()
        return self._is_stopped

    def _begin_soon(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            process = current_process()
            slowness = 1.0 if process is None else process.slowness
            self._loop.call_later(self._loop.random.random() * WORKER_SECONDS_MAX * slowness, self._begin)

    def _begin(self) -> None:
        items, self._items = self._items, []
        if items:
            self._busy_until = self._loop.in_thread(lambda: self._step(items), self._done)
        else:
            # Another thread has waited for the end of this worker, and handled them.
            self._is_busy = False

    def _done(self, then: Callable[[], object] | None, error: BaseException | None) -> None:
        if error is not None:
            raise error
        self._is_busy = False
        if then is not None:
            then()
        if self._items:
            self._begin_soon()


def run_simulated(work: Callable[[VirtualLoop], T], random: Random, trace: Trace) -> T:
    """Call ``work`` with a new loop, while the log uses the simulated system. Free what it leaves, without a word about
    tasks that never end. Errors that the log reports and that are none of its own kinds become complaints of the loop.
    """
    logger = logging.getLogger("cutwater")
    collects, hook = gc.isenabled(), sys.unraisablehook
    silence, propagates = logging.root.manager.disable, logger.propagate
    before = system.use(SimSystem(new_loop(random, Trace())))
    gc.disable()
    # What was there before is no garbage of this run, and takes most of the time of a collection.
    gc.freeze()
    sys.unraisablehook = lambda what: None
    logger.propagate = False
    try:
        return _run_on_loop(work, new_loop(random, trace), logger)
    finally:
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The first time closes coroutines, which keeps what they hold for the second time.
            gc.collect()
            gc.collect()
        gc.unfreeze()
        logging.disable(silence)
        logger.propagate = propagates
        sys.unraisablehook = hook
        if collects:
            gc.enable()
        system.use(before)


def _run_on_loop(work: Callable[[VirtualLoop], T], loop: VirtualLoop, logger: logging.Logger) -> T:
    errors, simulated = _ErrorLog(loop), SimSystem(loop)
    before = system.use(simulated)
    logging.disable(logging.WARNING)
    logger.addHandler(errors)
    try:
        return work(loop)
    finally:
        loop.close()
        forget_doors(loop)
        logger.removeHandler(errors)
        system.use(before)


class _ErrorLog(logging.Handler):
    """Notes reported errors that point to bugs."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(logging.ERROR)
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        process = current_process()
        if process is None or not process.is_dead:
            self._loop.alarms += [told for told in record.args or () if isinstance(told, ProtocolViolation)]
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, CutwaterError | OSError):
            self._loop.call_exception_handler({"message": record.getMessage(), "exception": error})
