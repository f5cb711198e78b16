"""The watchdog of an agent, with real processes: it kills in time, whatever becomes of the agent, and is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cutwater.agent.processes.watchdog import living, now_ms

ROOT = Path(__file__).resolve().parents[2]
LEASE_MS, LONG_MS = 1_500, 3_000


class Watched:
    """A process in the place of an agent, with its watchdog and its job."""

    def __init__(self, renewals: int, lease_ms: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.watched_agent", str(lease_ms), str(renewals)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        )
        assert self.process.stdout is not None
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.watchdog, self.job, self.deadline_ms = told["watchdog"], told["job"], told["deadline_ms"]

    def left(self) -> list[int]:
        alive = {one.pid for one in living()}
        return [pid for pid in self.job if pid in alive]

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        give_up = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < give_up, self.left()
            time.sleep(0.01)


@pytest.fixture
def watched() -> Iterator[Callable[[int], Watched]]:
    made: list[Watched] = []

    def make(renewals: int) -> Watched:
        made.append(Watched(renewals, LONG_MS if renewals else LEASE_MS))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.communicate()
        one.until(lambda one=one: not one.left())  # type: ignore[misc]


def test_a_stopped_agent_loses_all_its_processes_before_the_deadline_has_passed_for_long(
    watched: Callable[[int], Watched],
) -> None:
    one = watched(0)
    assert len(one.job) == len(one.left()) == 5
    os.kill(one.process.pid, signal.SIGSTOP)
    one.until(lambda: not one.left())
    # A margin of the lease, of which this test has none, is for what the kill itself takes.
    assert -1_500 < now_ms() - one.deadline_ms < 1_000
    # It has other processes killed, too, until it knows that its time is up.
    os.kill(one.process.pid, signal.SIGCONT)


def test_renewals_keep_processes_alive_and_the_death_of_the_agent_ends_them(
    watched: Callable[[int], Watched],
) -> None:
    one = watched(100)
    time.sleep(1.2 * LONG_MS / 1_000)
    assert len(one.left()) == 5
    # What ends other programs does not end the watchdog.
    os.kill(one.watchdog, signal.SIGTERM)
    time.sleep(0.1)
    assert len(one.left()) == 5
    one.process.kill()
    one.process.wait()
    begun = time.monotonic()
    one.until(lambda: not one.left())
    assert time.monotonic() - begun < 5.0
    one.until(lambda: one.watchdog not in {found.pid for found in living()})


def test_a_watchdog_that_dies_is_replaced_a_few_times(watched: Callable[[int], Watched]) -> None:
    one = watched(1_000)

    def watchdogs() -> list[int]:
        return [found.pid for found in living() if found.parent == one.process.pid and found.pid not in one.job]

    for _ in range(2):
        (present,) = watchdogs()
        os.kill(present, signal.SIGKILL)
        one.until(lambda present=present: watchdogs() not in ([], [present]))  # type: ignore[misc]
    time.sleep(0.3)
    assert len(one.left()) == 5
    one.process.kill()
    one.until(lambda: not one.left())
