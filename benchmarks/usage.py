"""What was busy during a measurement: processor time of each process, bytes written, the disk, the machine.

All of it is read from the kernel's accounts before and after, so measuring costs nothing meanwhile. Only Linux has
them; elsewhere the figures are zero.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
FULL = 0.85
"""From this share on a resource counts as the limit."""

_ALL_THREADS = 2
"""In the number of a process's clock on Linux: time that all its threads ran, to the nanosecond."""


class Spent(Struct, frozen=True):
    """Resources that one process used. ``user`` and ``system`` are in seconds, counted in ticks of 10 ms; ``cpu`` is
    their exact sum."""

    user: float = 0.0
    system: float = 0.0
    written: int = 0
    cpu: float = 0.0

    def plus(self, other: Spent) -> Spent:
        sums = self.user + other.user, self.system + other.system, self.written + other.written
        return Spent(*sums, self.cpu + other.cpu)

    def minus(self, other: Spent) -> Spent:
        rests = self.user - other.user, self.system - other.system, self.written - other.written
        return Spent(*rests, self.cpu - other.cpu)


class Busy(Struct, frozen=True):
    """``cores`` that each process kept busy, and the shares of the time that the disk and all processors were busy."""

    seconds: float
    spent: dict[str, Spent]
    disk: float
    machine: float

    def cores(self, name: str) -> float:
        return self.spent[name].cpu / self.seconds

    def total(self) -> Spent:
        total = Spent()
        for spent in self.spent.values():
            total = total.plus(spent)
        return total

    def told(self) -> str:
        """Return the busy cores as text, in the order of the names."""
        total = self.total()
        ticks = total.user + total.system
        kernel = total.system / ticks if ticks else 0.0
        each = ", ".join(f"{name} {self.cores(name):.2f}" for name in self.spent)
        return f"{each}; {kernel:.0%} of it in the kernel; {total.written / self.seconds / 1e6:.0f} MB/s dirtied"

    def limit(self) -> str:
        """Name the exhausted resource. Time in the kernel is mostly copying: between sockets, and to the page cache."""
        total = self.total()
        name, most = max(((name, self.cores(name)) for name in self.spent), key=lambda one: one[1])
        copies = ", mostly copies in the kernel" if total.system > total.user else ""
        ours = total.cpu / self.seconds / max(self.machine * (os.cpu_count() or 1), 0.01)
        if self.machine >= FULL:
            others = "" if ours >= 0.8 else f", of which {1 - min(ours, 1.0):.0%} were others'"
            return f"CPU: all cores busy{others}{copies}"
        if most >= FULL:
            return f"CPU of {name}{copies}"
        if self.disk >= FULL:
            return "disk"
        return f"waiting for syncs and each other (disk busy {self.disk:.0%})"


class Watch:
    """Measures from its construction until ``stop``. Several processes may share a name."""

    def __init__(self, processes: Mapping[str, Sequence[int]], folder: Path) -> None:
        self._processes = processes
        device = os.stat(folder).st_dev
        self._disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
        self._before = self._spent()
        self._disk_before, self._machine_before = self._disk_ms(), _machine_ticks()
        self._begun = time.monotonic()

    def stop(self) -> Busy:
        seconds = time.monotonic() - self._begun
        after = self._spent()
        spent = {name: after[name].minus(self._before[name]) for name in after}
        busy, all_ticks = (b - a for a, b in zip(self._machine_before, _machine_ticks(), strict=True))
        disk = (self._disk_ms() - self._disk_before) / 1_000 / seconds
        return Busy(seconds, spent, min(disk, 1.0), busy / all_ticks if all_ticks else 0.0)

    def _spent(self) -> dict[str, Spent]:
        found = {}
        for name, pids in self._processes.items():
            found[name] = Spent()
            for pid in pids:
                found[name] = found[name].plus(_of_process(pid))
        return found

    def _disk_ms(self) -> int:
        """Return for how long the disk had requests in progress."""
        try:
            return int(self._disk.read_text().split()[9])
        except OSError:
            return 0


def _of_process(pid: int) -> Spent:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        accounts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        exact = time.clock_gettime(~pid << 3 | _ALL_THREADS)
    except OSError:
        return Spent()
    user, system = (int(field) / TICKS_PER_SECOND for field in fields[11:13])
    return Spent(user, system, int(accounts["write_bytes"]), exact)


def _machine_ticks() -> tuple[int, int]:
    """Return the busy ticks and all ticks."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return 0, 0
    ticks = [int(field) for field in first.split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)
