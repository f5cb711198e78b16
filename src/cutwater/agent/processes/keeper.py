"""Keeps one process of a job: ``python -I -S keeper.py PLACE COMMAND…``, with a ``ProcessPlace`` as JSON.

It starts the command in a session of its own, under its limits, and is the parent of all that descends from it: what
loses its parent becomes a child of the keeper. So a process cannot hide by leaving its session, its environment and its
parent. When the command has ended, the keeper kills what is left and ends as the command did. It needs the standard
library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

CHILD_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux."""
OOM_SCORE = 500
"""Of all processes of the machine, those of jobs go first when memory runs out; not the agent, nor what guards it."""
CANNOT_START = 127
LOOK_SECONDS = 0.01


def main(place: str, *command: str) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit(f"this system has no subreaper: {os.strerror(ctypes.get_errno())}")
    pid = os.fork()
    if pid == 0:
        _become(json.loads(place), command)
    # The pipes are those of the command alone: the agent is to see when it closes them.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    status = _reap_until(pid)
    _end_all()
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        if ended_by != signal.SIGKILL:
            signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    os._exit(os.waitstatus_to_exitcode(status))


def _become(told: dict[str, Any], command: tuple[str, ...]) -> None:
    """Become the command. Nothing of it ever runs outside its limits."""
    try:
        os.setsid()
        if told.get("cgroup"):
            with open(f"{told['cgroup']}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
        if told.get("processors"):
            os.sched_setaffinity(0, told["processors"])
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(OOM_SCORE))
        if told.get("nice"):
            os.nice(told["nice"])
        if "uid" in told:
            os.setgroups(told["groups"])
            os.setgid(told["gid"])
            os.setuid(told["uid"])
        os.umask(0o077)
        os.chdir(told["directory"])
        os.execv(command[0], command)
    except BaseException as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
    os._exit(CANNOT_START)


def _reap_until(wanted: int) -> int:
    """Reap children until this one has ended, and return how."""
    while True:
        pid, status = os.wait()
        if pid == wanted:
            return status


def _end_all() -> None:
    """Kill all descendants, until none is left."""
    while True:
        for pid in _descendants():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(LOOK_SECONDS)


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found - {os.getpid()}


if __name__ == "__main__":
    main(*sys.argv[1:])
