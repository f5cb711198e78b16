"""Machines of a simulated cluster: each has an address, a disk, a key, and at most one process that serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from cutwater.storage.replica.segment_log import SUFFIX as ENTRIES
from cutwater.testing.fault_files import FaultFiles, Made, Operation, Renamed, Written
from cutwater.testing.virtual.loop import VirtualLoop
from cutwater.testing.virtual.processes import SimProcess
from cutwater.wire.identity.server_keys import ServerKey


class SimDisk(FaultFiles):
    """Files that charge time for syncs."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.recording = False
        self.random = random
        self.sync_seconds_max = 0.001
        self.sync_failure = 0.0
        self._charged = 0.0
        self.fail_sync = self._sync
        self._paths: dict[int, str] = {}
        self.written: list[tuple[str, bytes]] = []
        """Everything that was ever written to files of entries, with the names that they were created with."""

    def do(self, operation: Operation) -> None:
        super().do(operation)
        if isinstance(operation, Written):
            path = self._paths.get(operation.inode)
            if path is not None:
                self.written.append((path, operation.data))
        elif isinstance(operation, Made) and operation.path.endswith(ENTRIES):
            self._paths[operation.inode] = operation.path

    def _sync(self, path: Path) -> bool:
        self._charged += self.random.random() * self.sync_seconds_max
        return bool(self.sync_failure) and self.random.random() < self.sync_failure

    def rename(self, source: Path, target: Path) -> None:
        if self.is_dir(source):
            self._rename_dir(str(source), str(target))
        else:
            super().rename(source, target)

    def _rename_dir(self, source: str, target: str) -> None:
        """Rename a directory. It is durable at once."""

        def moved(path: str) -> str:
            return target + path[len(source) :] if path == source or path.startswith(f"{source}/") else path

        self._dirs = set(map(moved, self._dirs))
        self._names = {moved(path): inode for path, inode in self._names.items()}
        self._durable_names = {moved(path): inode for path, inode in self._durable_names.items()}
        self._volatile_names = [
            structs.replace(change, source=moved(change.source), target=moved(change.target))
            if isinstance(change, Renamed)
            else structs.replace(change, path=moved(change.path))
            for change in self._volatile_names
        ]

    def take_charge(self) -> float:
        charged, self._charged = self._charged, 0.0
        return charged


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
        self.disk = SimDisk(random)
        self.key = ServerKey(Ed25519PrivateKey.from_private_bytes(random.randbytes(32)))
        self.process: SimProcess | None = None
        self.server: Any = None
        """The server that runs there now; None before it has started."""
        self.asked_to_stop: asyncio.Event | None = None
        self.starts = 0
        self.rate = 1.0
        self.wall_offset_ns = 0
        self._lives: list[object] = []
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """Called when the process could not go on."""

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def is_running(self) -> bool:
        return self.process is not None and not self.process.is_dead

    @property
    def is_paused(self) -> bool:
        return self.process is not None and not self.process.is_dead and not self.process.is_running

    def start(self) -> None:
        assert not self.is_running
        self.starts += 1
        loop = self.loop
        random = Random(self.random.getrandbits(64))
        process = SimProcess(f"{self.name}.{self.starts}", self.host, random, started=loop.now, rate=self.rate)
        process.disk, process.wall_offset_ns = self.disk, self.wall_offset_ns
        self.process, self.server = process, None
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
        self.loop.call_as(None, self.end, process, failure)

    def end(self, process: SimProcess, failure: Exception | None = None) -> None:
        """The process has ended by itself."""
        if not process.is_dead:
            process.kill()
            self.loop.network.process_ended(process)
            self.disk.kill()
            if failure is not None:
                self.on_failure(failure)

    def kill(self) -> None:
        """Kill the process; the system lives on."""
        assert self.process is not None
        self.loop.trace.say(self.loop.now, f"{self.name} is killed")
        self.process.kill()
        self.loop.network.process_ended(self.process)
        self.disk.kill()

    def cut_power(self) -> None:
        """Lose what was not synced, and every connection without a word."""
        assert self.process is not None
        self.loop.trace.say(self.loop.now, f"{self.name} loses its power")
        self.process.kill()
        self.loop.network.power_lost(self.process)
        self.disk.crash(self.random)

    def pause(self) -> None:
        assert self.process is not None
        self.loop.trace.say(self.loop.now, f"{self.name} is paused")
        self.process.pause()

    def resume(self) -> None:
        if self.is_paused:
            assert self.process is not None
            self.loop.trace.say(self.loop.now, f"{self.name} goes on")
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
