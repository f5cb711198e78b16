"""Simulated processes: each has a clock, randomness and callbacks of its own, and can be killed and paused."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from cutwater.testing.fault_files import FaultFiles

if TYPE_CHECKING:
    from cutwater.testing.virtual.loop import SimHandle, VirtualLoop

WALL_START_NS = 1_700_000_000 * 10**9
TASKS_KEPT_MIN = 256

process_variable: contextvars.ContextVar[SimProcess | None] = contextvars.ContextVar("simulated process", default=None)


def current_process() -> SimProcess | None:
    return process_variable.get()


class SimProcess:
    """A process on a host. ``rate`` is how fast its clocks go; ``slowness`` stretches jobs of its threads."""

    def __init__(self, name: str, host: str, random: Random, *, started: float = 0.0, rate: float = 1.0) -> None:
        self.name, self.host, self.random = name, host, random
        self.slowness = 1.0
        self.wall_offset_ns = 0
        """How far the wall clock is off, apart from drift."""
        self.is_running = True
        """Whether callbacks run: it is neither dead nor paused."""
        self.is_dead = False
        self.disk: FaultFiles | None = None
        """The disk of its host, if it has one."""
        self.at_death: list[Callable[[], object]] = []
        """Called when it is killed."""
        self.pid = self.started_ticks = 0
        """Its number, and when it was started, on a machine with several processes."""
        self.neighbours: dict[int, SimProcess] = {}
        """The processes of its machine by their numbers."""
        self.parts: dict[object, Callable[[], Any]] = {}
        """What makes the parts of its machine, by the class that ``system.made`` is asked for."""
        self.context = contextvars.Context()
        self.context.run(process_variable.set, self)
        self._rate, self._since, self._offset = rate, started, random.uniform(10.0, 1000.0)
        self._pauses = 0
        self._parked: list[SimHandle] = []
        self._kept: list[object] = []
        """What the process would have run. Dropping it would run the ``finally`` blocks of its coroutines."""
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_max = TASKS_KEPT_MIN

    def __repr__(self) -> str:
        return f"<{self.name}>"

    # Clocks.

    def time(self, now: float) -> float:
        """The monotonic clock at a true time."""
        return (now - self._since) * self._rate + self._offset

    def true_time(self, local: float) -> float:
        return (local - self._offset) / self._rate + self._since

    def wall_ns(self, now: float) -> int:
        drift = self.time(now) - self._offset - (now - self._since)
        return WALL_START_NS + int((now + drift) * 1e9) + self.wall_offset_ns

    def set_rate(self, rate: float, now: float) -> None:
        """Let the clocks go at another rate from now on. Neither jumps."""
        wall = self.wall_ns(now)
        self._offset, self._since, self._rate = self.time(now), now, rate
        self.wall_offset_ns += wall - self.wall_ns(now)

    @property
    def waits_for_disk(self) -> bool:
        """Whether the disk has charged time that has yet to pass."""
        return self.disk is not None and self.disk.charged_seconds > 0

    def take_charge(self) -> float:
        """Return the seconds that the disk charged since the last call."""
        return 0.0 if self.disk is None else self.disk.take_charged_seconds()

    # Life and death.

    def keep(self, handle: SimHandle) -> None:
        (self._kept if self.is_dead else self._parked).append(handle)

    def keep_task(self, task: asyncio.Task[Any]) -> None:
        """Keep a task alive until it is done, so that a kill leaves its coroutine where it stands."""
        self._tasks.append(task)
        if len(self._tasks) > self._tasks_max:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks_max = max(TASKS_KEPT_MIN, 2 * len(self._tasks))

    def kill(self) -> None:
        self.is_dead, self.is_running = True, False
        for call in self.at_death:
            call()

    def pause(self) -> None:
        """Stand still until ``resume``; as often as this was called."""
        self.is_running = False
        self._pauses += 1

    def resume(self, loop: VirtualLoop) -> None:
        self._pauses -= 1
        if self.is_dead or self._pauses:
            return
        self.is_running = True
        parked, self._parked = self._parked, []
        loop.requeue(parked)
