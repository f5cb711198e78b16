"""A machine whose processes share one disk and the loopback: each of them may open the embedded log in a directory.

The machine stands in for a server of a cluster in the eyes of the nemesis. A kill, a pause or a clean stop strikes the
process that has the log open, or any other if none has. A power cut strikes all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

from cutwater.client.cluster.log_directory import VOLUME
from cutwater.testing.disk_faults import ProcessDied
from cutwater.testing.fault_files import FaultLock
from cutwater.testing.virtual.loop import VirtualLoop
from cutwater.testing.virtual.machines import SimDisk, SimMachine
from cutwater.testing.virtual.processes import SimProcess, current_process

LOG = Path("/home/data/log")
LOCK = LOG / "lock"
PIDS_MAX = 60
"""So few numbers of processes that they are used again soon."""
TICKS_PER_SECOND = 100


class HostedProgram(Protocol):
    """A program with a process on the machine."""

    process: SimProcess | None

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def give_up(self) -> None: ...


class SharedDisk(SimDisk):
    """A disk that several processes use. The death of one releases its locks and leaves the others alone."""

    def _check_alive(self) -> None:
        process = current_process()
        if process is not None and process.is_dead:
            raise ProcessDied("it is dead already")

    def lock(self, path: Path) -> FaultLock | None:
        lock = super().lock(path)
        process = current_process()
        if lock is not None and process is not None:
            lock.owner = process
        return lock

    def holder(self, path: Path) -> SimProcess | None:
        """Return the process that has locked a file."""
        inode = self._found(path)
        lock = getattr(inode, "holder", None)
        return getattr(lock, "owner", None)

    def process_died(self, process: SimProcess) -> None:
        """Release the locks of a process, and undo what it had not done yet."""
        own = [lock for lock in self._locks if getattr(lock, "owner", None) is process]
        if own:
            now = self.clock()
            for inode in self._names.files():
                inode.lose_process(now)
            self._names.lose_process(now)
        for lock in own:
            lock.release()
            self._locks.remove(lock)
        self._is_dead = False


class SharedHost(SimMachine):
    """``programs`` are all programs with a process on this machine. ``start`` starts those again that are dead."""

    def __init__(self, loop: VirtualLoop, name: str, host: str, random: Random) -> None:
        super().__init__(loop, name, host, random, _serves_nothing)
        self.disk: SharedDisk = SharedDisk(random, lambda: loop.now)
        self.disk.on_death = self._died
        self.volume = LOG / VOLUME
        self.programs: Sequence[HostedProgram] = ()
        self.processes: dict[int, SimProcess] = {}
        """By their numbers, also those that have died."""
        self.asked: dict[SimProcess, asyncio.Event] = {}
        """Set when a process is asked to close the log and end."""
        self._is_up = False
        self._paused: SimProcess | None = None

    def new_process(self, name: str) -> SimProcess:
        loop = self.loop
        process = SimProcess(name, self.host, Random(self.random.getrandbits(64)), started=loop.now, rate=self.rate)
        process.disk, process.wall_offset_ns = self.disk, self.wall_offset_ns
        free = [pid for pid in range(2, PIDS_MAX) if pid not in self.processes or self.processes[pid].is_dead]
        process.pid, process.started_ticks = self.random.choice(free), int(loop.now * TICKS_PER_SECOND) + 1
        process.neighbours = self.processes
        self.processes[process.pid] = process
        self.asked[process] = asyncio.Event()
        process.at_death.append(lambda: self.disk.process_died(process))
        loop.network.power_returned(self.host)
        return process

    @property
    def alive(self) -> list[SimProcess]:
        return [process for process in self.processes.values() if not process.is_dead]

    @property
    def is_running(self) -> bool:
        return self._is_up

    @property
    def is_paused(self) -> bool:
        return self._paused is not None and not self._paused.is_dead

    def victim(self) -> SimProcess | None:
        """The process that has the log open, or else any that runs."""
        holder = self.disk.holder(LOCK)
        if holder is not None and not holder.is_dead:
            return holder
        return self.random.choice(alive) if (alive := self.alive) else None

    def _program(self, process: SimProcess) -> HostedProgram | None:
        return next((program for program in self.programs if program.process is process), None)

    def start(self) -> None:
        self._is_up = True
        self.starts += 1
        for program in list(self.programs):
            if program.process is not None and program.process.is_dead:
                program.start()

    def kill(self) -> None:
        process = self.victim()
        self._is_up = False
        if process is not None:
            self.loop.trace.say(self.loop.now, f"{process.name} is killed")
            self._kill(process)

    def _kill(self, process: SimProcess) -> None:
        program = self._program(process)
        if program is not None:
            program.kill()
        else:
            process.kill()
            self.loop.network.process_ended(process)

    def _died(self) -> None:
        process = current_process()
        assert process is not None
        self.loop.trace.say(self.loop.now, f"{process.name} is killed at a file operation")
        self.disk.die_at = None
        self._kill(process)
        self._is_up = False
        self.loop.call_as(None, self.on_end)

    def exit(self, process: SimProcess) -> None:
        """The process has ended by itself."""
        if not process.is_dead:
            self.loop.trace.say(self.loop.now, f"{process.name} ends")
            self._kill(process)
            self._is_up = False
            self.on_end()

    def cut_power(self) -> None:
        self.loop.trace.say(self.loop.now, f"{self.name} loses its power")
        self._is_up = False
        for process in self.alive:
            process.kill()
            self.loop.network.power_lost(process)
            program = self._program(process)
            if program is not None:
                program.give_up()
        self.disk.crash(self.random)

    def pause(self) -> None:
        process = self.victim()
        if process is not None and not self.is_paused:
            self.loop.trace.say(self.loop.now, f"{process.name} is paused")
            self._paused = process
            process.pause()

    def resume(self) -> None:
        if self._paused is not None:
            process, self._paused = self._paused, None
            if not process.is_dead:
                self.loop.trace.say(self.loop.now, f"{process.name} goes on")
                process.resume(self.loop)

    def stop(self) -> None:
        process = self.victim()
        if process is not None:
            self.loop.trace.say(self.loop.now, f"{process.name} is asked to stop")
            self.loop.call_as(process, self.asked[process].set)

    def jump_clock(self, seconds: float) -> None:
        super().jump_clock(seconds)
        for process in self.alive:
            process.wall_offset_ns += int(seconds * 1e9)

    def set_rate(self, rate: float) -> None:
        super().set_rate(rate)
        for process in self.alive:
            process.set_rate(rate, self.loop.now)


async def _serves_nothing(machine: SimMachine) -> Any:
    raise AssertionError(f"{machine} has no server of its own")
