"""Which processes of a local cluster run, and whose they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cutwater.admin import processes
from cutwater.errors import Refused


def test_a_process_of_another_user_runs_and_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    pid = os.getpid()
    assert processes.is_running(pid)
    assert processes.is_running(pid, processes.started_at(pid))
    assert not processes.is_running(pid, processes.started_at(pid) + 1)
    with pytest.raises(Refused, match=f"process {pid} belongs to another user"):
        processes.stop([pid], 1.0)


def test_a_child_that_ended_does_not_run_and_only_is_running_puts_it_to_rest() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.lives_on(child.pid, 0)
    assert not processes.is_running(child.pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, 0)
    child.returncode = 0
    assert not processes.is_running(0)
