"""An agent as a process, in tests; its jobs run no Spark. It and all that it started end with the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cutwater.agent.processes.watchdog import kill_members, living
from cutwater.agent.start import STATE

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 60.0


class RunningAgent:
    """See the module. ``place`` is its directory; agents with the same ``shared`` directory share their roots."""

    def __init__(self, servers: str, name: str, place: Path, shared: Path | None = None, **options: Any) -> None:
        self.name, self.place = name, place
        roots = (
            {}
            if shared is None
            else {kind: [f"default={shared / kind},shared"] for kind in ("checkpoint", "savepoint")}
        )
        given = {
            "name": name,
            "servers": servers,
            "work_dir": str(place),
            "slots": 8,
            "checkpoint": [],
            "savepoint": [],
        }
        self.options = given | roots | options
        self.log = place.with_name(f"{place.name}.log")
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.agent_process", json.dumps(self.options)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                    "CUTWATER_SECRET_OF_AGENT": "secret",
                },
            )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            self.ended()
            raise AssertionError(self.log.read_text())
        return self.process

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def ended(self, seconds: float = WAIT_SECONDS) -> int:
        code = self.process.wait(seconds)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def end(self) -> None:
        """End it and everything that it started."""
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.process.kill()
        self.ended()
        if (self.place / STATE).exists():
            mark = json.loads((self.place / STATE).read_text())["mark"]
            assert not kill_members(mark, seconds=10.0)


class Starting:
    """Starts agents, which end with the test."""

    def __init__(self, servers: str, directory: Path) -> None:
        self.servers, self.directory = servers, directory
        self.started: list[RunningAgent] = []

    def __call__(self, name: str, **options: Any) -> RunningAgent:
        agent = RunningAgent(self.servers, name, self.directory / name, **options)
        self.started.append(agent)
        return agent


@contextmanager
def starting_agents(servers: str, directory: Path) -> Iterator[Starting]:
    starting = Starting(servers, directory)
    try:
        yield starting
    finally:
        for agent in starting.started:
            agent.end()


def until(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    """Wait until a condition holds, and return its value."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return found


def notes_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_alive(pid: int) -> bool:
    return pid in {one.pid for one in living()}
