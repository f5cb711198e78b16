"""Ends the processes of jobs in time, whatever becomes of the agent.

``python -I -S watchdog.py MARK AGENT DEADLINE_MS`` starts it, with the process number of the agent. It has nothing to
do with the agent's event loop, and needs the standard library only. Standard input has lines of JSON from the agent,
and each is answered with a line on standard output:

    {"deadline_ms": 123456}             all processes of jobs must be dead then, on the clock that runs during suspend
    {"session": 4711}                   the job process with this number has begun a session
    {"gone": 4711}                      no process of that session is left
    {"cgroup": "/sys/fs/cgroup/…"}      groups of jobs are below this directory

Processes of jobs are those that have MARK in their environment, those of the sessions, all of their descendants, and
those in the groups. Without a deadline in the future, and when the agent ends, they are killed. Signals that end other
programs do not end this one: it lives as long as the agent.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

VARIABLE = "CUTWATER_JOB_MARK"
"""Environment variable that marks the processes of jobs. Its value begins with the mark of the agent."""
LOOK_SECONDS = 0.2
"""How often it looks at the clock: a machine that slept does not wake it by itself."""
AGAIN_SECONDS = 0.01
STOPS_MAX = 100
"""How often it looks for further processes before it kills: nothing starts them faster than it finds them for long."""
READ_BYTES = 1 << 16


def now_ms() -> int:
    """Return the time on a clock that runs while the machine sleeps."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000_000


class SeenProcess:
    """A living process, as the system describes it."""

    __slots__ = ("parent", "pid", "session")

    def __init__(self, pid: int, parent: int, session: int) -> None:
        self.pid, self.parent, self.session = pid, parent, session


def living() -> Iterator[SeenProcess]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields and fields[0] not in (b"Z", b"X"):
                yield SeenProcess(int(name), int(fields[1]), int(fields[3]))


def is_marked(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in b"\0" + file.read()
    except OSError:
        return False


def members(mark: str, sessions: Iterable[int] = (), cgroups: Iterable[str] = ()) -> set[int]:
    """Return the living processes with a mark, of these sessions and groups, and all their descendants."""
    found, known = list(living()), set(sessions)
    wanted, own = f"\0{VARIABLE}={mark}".encode(), os.getpid()
    grouped = set(_grouped(cgroups))
    chosen = {one.pid for one in found if one.session in known or one.pid in grouped or is_marked(one.pid, wanted)}
    while True:
        more = {one.pid for one in found if one.parent in chosen and one.pid not in chosen}
        if not more:
            return chosen - {own, 0, 1}
        chosen |= more


def _grouped(cgroups: Iterable[str]) -> Iterator[int]:
    for group in cgroups:
        for folder, _, _ in os.walk(group):
            # The group itself may have the agent in it; those of jobs are below.
            if folder != group:
                try:
                    with open(f"{folder}/cgroup.procs", encoding="ascii") as file:
                        yield from (int(line) for line in file)
                except OSError:
                    continue


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def kill_once(mark: str, sessions: Iterable[int] = (), cgroups: Iterable[str] = (), *, spare: int = 0) -> set[int]:
    """Kill all members, and return them.

    They are stopped first, until no further ones appear: a process could start another one after a list was made, and
    the death of its parent would hide where it comes from.
    """
    stopped: set[int] = set()
    for _ in range(STOPS_MAX):
        new = members(mark, sessions, cgroups) - stopped - {spare}
        if not new:
            break
        _send(new, signal.SIGSTOP)
        stopped |= new
    _send(stopped, signal.SIGKILL)
    return stopped


def kill_members(mark: str, sessions: Iterable[int] = (), cgroups: Iterable[str] = (), *, seconds: float) -> set[int]:
    """Kill until no process is left, or the time is up. Returns those that are left."""
    sessions, cgroups = list(sessions), list(cgroups)
    until = time.monotonic() + seconds
    while left := kill_once(mark, sessions, cgroups):
        if time.monotonic() >= until:
            return left
        time.sleep(AGAIN_SECONDS)
    return set()


class LeaseGuard:
    def __init__(self, mark: str, agent: int, deadline_ms: int) -> None:
        self._mark, self._agent, self._deadline_ms = mark, agent, deadline_ms
        self._sessions: set[int] = set()
        self._cgroups: set[str] = set()
        self._rest = b""
        self._heard = 0

    def run(self) -> None:
        while self._turn():
            pass
        kill_members(self._mark, self._sessions, self._cgroups, seconds=60.0)

    def _turn(self) -> bool:
        """Wait for the agent or the deadline. Returns whether the agent lives."""
        wait = min(LOOK_SECONDS, max(0.0, (self._deadline_ms - now_ms()) / 1_000)) or LOOK_SECONDS
        ready, _, _ = select.select([0], [], [], wait)
        if ready and not self._hear():
            return False
        # More may appear while the agent does not know that its time is up.
        is_late = now_ms() >= self._deadline_ms
        if is_late and kill_once(self._mark, self._sessions, self._cgroups, spare=self._agent):
            time.sleep(AGAIN_SECONDS)
        # An agent of which this process is no child any more is dead, even if another process has the pipe open.
        return os.getppid() == self._agent

    def _hear(self) -> bool:
        data = os.read(0, READ_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        if lines:
            # The agent may be gone, which standard input tells, or it reads nothing now.
            with suppress(OSError):
                os.write(1, json.dumps({"heard": self._heard}).encode() + b"\n")
        return bool(data)

    def _take(self, message: dict[str, object]) -> None:
        self._heard += 1
        match message:
            case {"deadline_ms": int(at)}:
                self._deadline_ms = at
            case {"session": int(session)}:
                self._sessions.add(session)
            case {"gone": int(session)}:
                self._sessions.discard(session)
            case {"cgroup": str(path)}:
                self._cgroups.add(path)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(1, False)
    # Only root may do that.
    with suppress(OSError):
        os.nice(-10)
    LeaseGuard(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run()


if __name__ == "__main__":
    main()
