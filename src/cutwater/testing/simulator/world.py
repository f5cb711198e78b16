"""The simulated world: one thread, one heap of future events, one source of randomness, and only a virtual clock."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from random import Random
from typing import Any

from cutwater.testing.checkers.record import SimHistory
from cutwater.testing.simulator.options import Options
from cutwater.testing.simulator.proofs import Proofs
from cutwater.testing.simulator.protocol import Return, SimCall
from cutwater.types import GLSN, LLSN, MILLISECOND, Batch, Epoch, Instant, LogStreamId

Address = tuple[str, int]
"""The kind of a process and its number: ``("sn", 1)``, ``("mr", 2)``, ``("client", 3)``."""

BROKEN_LINK_NOTICED_US = 30 * MILLISECOND


class World:
    """Virtual time, the network between processes, and the trace of everything that happens."""

    def __init__(self, seed: int, options: Options) -> None:
        self.seed, self.options = seed, options
        self.rng = Random(f"world/{seed}")
        self.now = 0
        self.processes: dict[Address, Process] = {}
        self.proofs = Proofs()
        self.record = SimHistory()
        self.healing = False
        self.events = 0
        self.log: list[str] | None = None
        """Set to a list to keep the trace as readable text."""
        self.written: dict[tuple[LogStreamId, Epoch, LLSN], Batch] = {}
        """Every entry that any replica ever wrote, for the checkers."""
        self.stored_high_watermark: Callable[[], GLSN] = lambda: GLSN(0)
        self.on_death: Callable[[Process], None] = lambda process: None
        """Called with each process that dies by itself."""
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._hash = blake2b(digest_size=16)
        self.blocked: set[tuple[Address, Address]] = set()
        """Links, from one process to another, on which every message is lost."""
        self._client_numbers = count(1)
        self._link_times: dict[tuple[Address, Address], int] = {}

    def chance(self, probability: float, rng: Random | None = None) -> bool:
        """Whether a fault of this probability happens now. There are none after the faults have ended."""
        return probability > 0 and not self.healing and (rng or self.rng).random() < probability

    def next_client(self) -> int:
        return next(self._client_numbers)

    # Time.

    def after(self, delay_us: int, what: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_us, self._order, what, args))

    def run_until(self, time: int, stop: Callable[[], bool] | None = None) -> bool:
        """Run events until the given time, or until ``stop`` returns True. Returns whether ``stop`` did."""
        while self._heap and self._heap[0][0] <= time:
            self.now, _, what, args = heapq.heappop(self._heap)
            self.events += 1
            what(*args)
            if stop is not None and stop():
                return True
        self.now = time
        return False

    # The trace.

    def trace(self, *what: object) -> None:
        line = f"{self.now} {' '.join(map(str, what))}"
        self._hash.update(line.encode())
        if self.log is not None:
            self.log.append(line)

    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    # The network.

    def send(
        self, source: Address, target: Address, message: object, on_broken: Callable[[], None] | None = None
    ) -> None:
        """Send a message. If it does not arrive, ``on_broken`` is called at the sender after a while, as when a
        connection breaks. A sender that gives no ``on_broken`` never learns of a loss."""
        if (source, target) in self.blocked or self.chance(self.options.message_loss):
            self.trace("lost", source, target, type(message).__name__)
            if on_broken is not None:
                self._tell_broken(source, on_broken)
            return
        is_doubled = self.chance(self.options.message_duplication)
        # A call is sent once: nothing below a client repeats an append.
        for _ in range(2 if is_doubled and not isinstance(message, SimCall | Return) else 1):
            self.after(self._arrival(source, target) - self.now, self._deliver, source, target, message, on_broken)

    def _arrival(self, source: Address, target: Address) -> int:
        at = self.now + 30 + int(self.rng.random() * self.options.message_delay_us_max)
        if self.chance(self.options.message_reordering):
            return at + int(self.rng.random() * 20 * MILLISECOND)
        link = (source, target)
        at = max(at, self._link_times.get(link, 0))
        self._link_times[link] = at
        return at

    def _deliver(self, source: Address, target: Address, message: object, on_broken: Callable[[], None] | None) -> None:
        process = self.processes.get(target)
        if process is None or not process.alive:
            if on_broken is not None:
                self._tell_broken(source, on_broken)
            return
        process.arrive(source, message)

    def _tell_broken(self, source: Address, on_broken: Callable[[], None]) -> None:
        sender = self.processes.get(source)
        if sender is not None and sender.alive:
            sender.after(BROKEN_LINK_NOTICED_US, on_broken)


class Process(ABC):
    """A process that receives messages, and can be killed, paused and resumed like a real one."""

    def __init__(self, world: World, address: Address) -> None:
        self.world, self.address = world, address
        self.alive = False
        self.paused = False
        self.lives = 0
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        world.processes[address] = self
        world.proofs.enrol(address)

    # For subclasses.

    @abstractmethod
    def on_start(self) -> None:
        """Begin a life of the process."""

    @abstractmethod
    def on_message(self, source: Address, message: Any) -> None:
        """Handle a message."""

    def on_kill(self) -> None:
        """Handle the end of the process; now it is decided which unsynced writes its disks keep."""
        return

    # Public operations.

    def start(self) -> None:
        assert not self.alive
        self.alive, self.paused = True, False
        self.lives += 1
        self.world.trace("start", self.address)
        self.on_start()

    def kill(self) -> None:
        if self.alive:
            self.alive, self.paused = False, False
            self._backlog.clear()
            self.world.trace("kill", self.address)
            self.on_kill()

    def pause(self) -> None:
        if self.alive:
            self.paused = True
            self.world.trace("pause", self.address)

    def resume(self) -> None:
        if self.alive and self.paused:
            self.paused = False
            self.world.trace("resume", self.address)
            backlog, self._backlog = self._backlog, []
            life = self.lives
            for what, args in backlog:
                self.run(life, what, args)

    def after(self, delay_us: int, what: Callable[..., None], *args: Any) -> None:
        """Run a function later, if this life of the process lasts that long."""
        self.world.after(delay_us, self.run, self.lives, what, args)

    def arrive(self, source: Address, message: Any) -> None:
        self.world.trace(source, self.address, type(message).__name__)
        if self.world.proofs.admits(source, self.address, message):
            self.run(self.lives, self.on_message, (source, message))

    def send(self, target: Address, message: object, on_broken: Callable[[], None] | None = None) -> None:
        self.world.send(self.address, target, message, on_broken)

    def instant(self) -> Instant:
        return Instant(self.world.now, self.world.now)

    def run(self, life: int, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or life != self.lives:
            return
        if self.paused:
            self._backlog.append((what, args))
        else:
            what(*args)
