"""How much memory and processor time the processes of a job get, and what holds them to it.

Where the agent has control groups (version 2) for itself, the kernel does: a job that uses more memory loses its
processes, and its processor time is cut. Elsewhere the agent measures the memory of each job once a second and kills
one that uses more, and lets it run on as many processors as it may use, rounded up. What holds is in the description of
the agent.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from cutwater.agent.processes.watchdog import living
from cutwater.core.text import counted
from cutwater.errors import InvalidArgument

_log = logging.getLogger(__name__)

MEASURE_SECONDS = 1.0
PERIOD_US = 100_000
CONTROLLERS = ("memory", "cpu")
UNIFIED = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
OWN_GROUP = Path("/proc/self/cgroup")
JOBS, AGENT, PROCESSES = "jobs", "agent", "all"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class JobLimits(Struct, frozen=True):
    """The most that all processes of a job may use together; 0 for no limit."""

    memory_bytes: int = 0
    cpus: float = 0.0


class SlotLimits(Struct, frozen=True):
    """The limits of a slot."""

    memory_bytes: int = 0
    cpus: float = 0.0

    def of(self, slots: int, memory_bytes: int, cpus: float) -> JobLimits:
        """Return the limits of a job with so many slots, which asks for these. Raises if it asks for more than they
        have."""
        most_bytes, most_cpus = self.memory_bytes * slots, self.cpus * slots
        has = counted(slots, "slot")
        if most_bytes and memory_bytes > most_bytes:
            raise InvalidArgument(
                f"the job wants {memory_bytes} bytes of memory, and {has} of this agent have {most_bytes}: give it "
                "more slots, or let it use less"
            )
        if most_cpus and cpus > most_cpus:
            raise InvalidArgument(
                f"the job wants {cpus:g} processors, and {has} of this agent have {most_cpus:g}: give it more slots, "
                "or let it use fewer"
            )
        return JobLimits(memory_bytes or most_bytes, cpus or most_cpus)


class Confinement(Protocol):
    """Holds jobs to their limits."""

    text: str
    """What holds, for operators."""

    def open(self, name: str, limits: JobLimits) -> tuple[str, tuple[int, ...]]:
        """Return the control group, if any, and the processors that the processes of a job get."""

    def why_ended(self, name: str) -> str:
        """Return why the kernel may have killed processes of this job; empty if it has not."""

    def close(self, name: str) -> None:
        """No process of the job is left."""


class MeasuredJobs:
    """Without control groups. ``measured`` is what ``excesses`` compares."""

    text = "memory is measured once a second, processors are whole ones"

    def __init__(self, processors: Iterable[int] | None = None) -> None:
        self._processors = tuple(sorted(os.sched_getaffinity(0) if processors is None else processors))
        self._used: dict[str, tuple[int, ...]] = {}

    def open(self, name: str, limits: JobLimits) -> tuple[str, tuple[int, ...]]:
        wanted = math.ceil(limits.cpus)
        if not wanted or wanted >= len(self._processors):
            return "", ()
        load = dict.fromkeys(self._processors, 0)
        for used in self._used.values():
            for processor in used:
                load[processor] += 1
        chosen = tuple(sorted(sorted(load, key=lambda processor: (load[processor], processor))[:wanted]))
        self._used[name] = chosen
        return "", chosen

    def why_ended(self, name: str) -> str:
        return ""

    def close(self, name: str) -> None:
        self._used.pop(name, None)


class ControlGroups:
    """With control groups below ``root``, in which the kernel holds jobs to their limits."""

    text = "control groups hold jobs to their memory and processors"

    def __init__(self, root: Path) -> None:
        self.root = root
        """The group of all jobs. Each has a group below it."""

    def open(self, name: str, limits: JobLimits) -> tuple[str, tuple[int, ...]]:
        group = self.root / name
        leaf = group / PROCESSES
        leaf.mkdir(parents=True, exist_ok=True)
        if limits.memory_bytes:
            (group / "memory.max").write_text(str(limits.memory_bytes))
            # Otherwise, the machine swaps instead of ending the job. A kernel without swap has no such file.
            with suppress(OSError):
                (group / "memory.swap.max").write_text("0")
            (group / "memory.oom.group").write_text("1")
        if limits.cpus:
            (group / "cpu.max").write_text(f"{round(limits.cpus * PERIOD_US)} {PERIOD_US}")
        return str(leaf), ()

    def why_ended(self, name: str) -> str:
        with suppress(OSError, ValueError, KeyError):
            events = dict(line.split() for line in (self.root / name / "memory.events").read_text().splitlines())
            if int(events["oom_kill"]):
                limit = (self.root / name / "memory.max").read_text().strip()
                return too_much_memory(int(limit))
        return ""

    def close(self, name: str) -> None:
        for group in (self.root / name / PROCESSES, self.root / name):
            with suppress(OSError):
                group.rmdir()


def too_much_memory(limit: int, used: int = 0) -> str:
    have = f", {used} bytes" if used else ""
    return (
        f"its processes used more memory than the job may{have} (limit: {limit} bytes): give the job more with "
        "--memory or --slots, or let Spark use less (--conf spark.driver.memory=…)"
    )


def confinement() -> Confinement:
    """Return what holds jobs to their limits on this machine."""
    found = _own_group()
    if found is None:
        return MeasuredJobs()
    try:
        return ControlGroups(_delegated(found))
    except OSError as error:
        _log.info("no control groups for jobs: %s: %s", found, error.strerror or error)
        return MeasuredJobs()


def _own_group() -> Path | None:
    """Return the control group of this process, if it has the controllers that limits need."""
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        return None
    own = next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), None)
    if own is None:
        return None
    for mount in UNIFIED:
        with suppress(OSError):
            if set(CONTROLLERS) <= set((mount / own / "cgroup.controllers").read_text().split()):
                return mount / own
    return None


def _delegated(group: Path) -> Path:
    """Make the group of all jobs below a group that belongs to the agent. Raises ``OSError`` if it does not.

    A group has either processes or groups with controllers, so the agent moves into a group of its own first.
    """
    (group / AGENT).mkdir(exist_ok=True)
    for process in (group / "cgroup.procs").read_text().split():
        (group / AGENT / "cgroup.procs").write_text(process)
    allow = " ".join(f"+{controller}" for controller in CONTROLLERS)
    (group / "cgroup.subtree_control").write_text(allow)
    (group / JOBS).mkdir(exist_ok=True)
    (group / JOBS / "cgroup.subtree_control").write_text(allow)
    return group / JOBS


# Measured memory.


def excesses(limits: Mapping[int, int]) -> dict[int, int]:
    """Return what the jobs use that use more memory than they may. ``limits`` has their limits by session, in bytes;
    processes count that are in the session, or descend from one that is."""
    found = list(living())
    session_of = {one.pid: one.session for one in found if one.session in limits}
    while True:
        more = {
            one.pid: session_of[one.parent] for one in found if one.parent in session_of and one.pid not in session_of
        }
        if not more:
            break
        session_of |= more
    used: dict[int, int] = dict.fromkeys(limits, 0)
    for pid, session in session_of.items():
        used[session] += _resident_bytes(pid)
    high = {session for session, size in used.items() if size > limits[session]}
    # What processes share was counted for each of them.
    exact: dict[int, int] = dict.fromkeys(high, 0)
    for pid, session in session_of.items():
        if session in high:
            exact[session] += _proportional_bytes(pid)
    return {session: size for session, size in exact.items() if size > limits[session]}


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


def _proportional_bytes(pid: int) -> int:
    """Return the memory of a process, with its share of what it has together with others."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident_bytes(pid)
