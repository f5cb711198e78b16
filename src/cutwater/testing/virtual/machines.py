"""Machines of a simulated cluster: each has an address, a disk, a key, and at most one process that serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cutwater.storage.replica.segment_log import SUFFIX as ENTRIES
from cutwater.testing.disk_inodes import Made, Operation, Written
from cutwater.testing.fault_files import FaultFiles
from cutwater.testing.virtual.loop import VirtualLoop
from cutwater.testing.virtual.processes import SimProcess
from cutwater.wire.identity.server_keys import ServerKey

VOLUME = Path("/volume")


class SimDisk(FaultFiles):
    """The disk of a machine, which remembers everything that was ever written to files of entries."""

    def __init__(self, random: Random, clock: Callable[[], float]) -> None:
        super().__init__(random, clock=clock)
        self.recording = False
        self._paths: dict[int, str] = {}
        self.written: list[tuple[str, bytes]] = []
        """Writes to files of entries, with the names that the files were created with."""

    def copy(self) -> SimDisk:
        other = super().copy()
        assert isinstance(other, SimDisk)
        other._paths = dict(self._paths)
        return other

    def do(self, operation: Operation) -> None:
        super().do(operation)
        if isinstance(operation, Written):
            path = self._paths.get(operation.inode)
            if path is not None:
                self.written.append((path, operation.data))
        elif isinstance(operation, Made) and ENTRIES in operation.path:
            self._paths[operation.inode] = operation.path


class SimMachine:
    """A host with a disk. ``start`` starts a process that runs ``serve``."""

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        host: str,
        random: Random,
        serve: Callable[[SimMachine], Coroutine[Any, Any, None]],
    ) -> None:
        self.loop, self.name, self.host, self.random = loop, name, host, random
        self._serve = serve
        self.disk = SimDisk(random, lambda: loop.now)
        self.disk.on_death = self._died
        self.key = ServerKey(Ed25519PrivateKey.from_private_bytes(random.randbytes(32)))
        self.volume = VOLUME
        self.process: SimProcess | None = None
        self.server: Any = None
        """The server that runs there now; None before it has started."""
        self.asked_to_stop: asyncio.Event | None = None
        self.starts = 0
        self._is_paused = False
        self.is_retired = False
        """Whether it never starts again, because its disk is lost."""
        self.rate = 1.0
        self.wall_offset_ns = 0
        self._lives: list[object] = []
        self.on_end: Callable[[], None] = lambda: None
        """Called when the process has ended by itself."""

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def is_running(self) -> bool:
        return self.process is not None and not self.process.is_dead

    @property
    def is_paused(self) -> bool:
        return self.is_running and self._is_paused

    def start(self) -> None:
        """Start the process, unless the machine is retired."""
        assert not self.is_running
        if self.is_retired:
            return
        self.starts += 1
        loop = self.loop
        random = Random(self.random.getrandbits(64))
        process = SimProcess(f"{self.name}.{self.starts}", self.host, random, started=loop.now, rate=self.rate)
        process.disk, process.wall_offset_ns = self.disk, self.wall_offset_ns
        self.process, self.server, self._is_paused = process, None, False
        self.loop.network.power_returned(self.host)
        self.loop.trace.say(loop.now, f"{self.name} starts")
        task = loop.spawn(process, self._live())
        self._lives.append((process, task))

    async def _live(self) -> None:
        process = self.process
        assert process is not None
        self.asked_to_stop = asyncio.Event()
        failure: Exception | None = None
        try:
            await self._serve(self)
        except Exception as error:
            failure = error
        self.loop.trace.say(self.loop.now, f"{self.name} ended{f': {failure!r}' if failure else ''}")
        self.loop.call_as(None, self.end, process)

    def end(self, process: SimProcess) -> None:
        """The process has ended by itself."""
        if not process.is_dead:
            process.kill()
            self.loop.network.process_ended(process)
            self.disk.kill()
            self.on_end()

    def kill(self) -> None:
        """Kill the process; the system lives on."""
        assert self.process is not None
        self.loop.trace.say(self.loop.now, f"{self.name} is killed")
        self.process.kill()
        self.loop.network.process_ended(self.process)
        self.disk.kill()

    def kill_soon(self, operations: int) -> None:
        """Kill the process at one of its next file operations, in the middle of what it does."""
        self.disk.die_at = self.disk.calls + operations

    def _died(self) -> None:
        process = self.process
        assert process is not None
        self.loop.trace.say(self.loop.now, f"{self.name} is killed at a file operation")
        process.kill()
        self.loop.network.process_ended(process)
        self.loop.call_as(None, self._bury)

    def _bury(self) -> None:
        self.disk.kill()
        self.on_end()

    def cut_power(self) -> None:
        """Lose what was not synced, and every connection without a word."""
        assert self.process is not None
        self.loop.trace.say(self.loop.now, f"{self.name} loses its power")
        self.process.kill()
        self.loop.network.power_lost(self.process)
        self.disk.crash(self.random)

    def replace_disk(self, disk: SimDisk, what: str) -> None:
        """Give the machine, which does not run, another disk."""
        assert not self.is_running
        self.loop.trace.say(self.loop.now, f"{self.name} {what}")
        disk.on_death, disk.written = self._died, self.disk.written
        self.disk = disk

    def pause(self) -> None:
        assert self.process is not None
        self.loop.trace.say(self.loop.now, f"{self.name} is paused")
        self._is_paused = True
        self.process.pause()

    def resume(self) -> None:
        if self.is_paused:
            assert self.process is not None
            self.loop.trace.say(self.loop.now, f"{self.name} goes on")
            self._is_paused = False
            self.process.resume(self.loop)

    def stop(self) -> None:
        """Ask the process to end, as SIGTERM does."""
        if self.is_running and self.asked_to_stop is not None:
            assert self.process is not None
            self.loop.trace.say(self.loop.now, f"{self.name} is asked to stop")
            self.loop.call_as(self.process, self.asked_to_stop.set)

    def jump_clock(self, seconds: float) -> None:
        """Put the wall clock forward or back."""
        self.loop.trace.say(self.loop.now, f"the clock of {self.name} jumps by {seconds:.3f} s")
        self.wall_offset_ns += int(seconds * 1e9)
        if self.process is not None:
            self.process.wall_offset_ns += int(seconds * 1e9)

    def set_rate(self, rate: float) -> None:
        self.loop.trace.say(self.loop.now, f"the clocks of {self.name} go {rate:.4f} times as fast")
        self.rate = rate
        if self.process is not None:
            self.process.set_rate(rate, self.loop.now)
