"""``cutwater sn start`` as a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "cutwater.cli"]
SECONDS_MAX = 60


def environment() -> dict[str, str]:
    """Without options from whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CUTWATER_")}


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
        env={**environment(), **(env or {})},
    )


class NodeProcess:
    """A storage node that runs from ``start`` on, and no longer than its ``with`` block."""

    def __init__(self, number: int, volumes: list[Path], metadata: str, log: Path, *flags: str) -> None:
        self.number = number
        self.log = log
        self.serving: dict[str, Any] = {}
        self.process: subprocess.Popen[str] | None = None
        self._volumes, self._metadata, self._flags = volumes, metadata, flags

    def arguments(self, listen: str = "127.0.0.1:0") -> list[str]:
        volumes = [flag for volume in self._volumes for flag in ("--volumes", str(volume))]
        which = ["--cluster-id", "1", "--id", str(self.number), "--metadata", self._metadata, "--listen", listen]
        return ["sn", "start", *which, *volumes, *self._flags]

    def start(self) -> NodeProcess:
        """Start, and wait for the line that says that it serves."""
        self.begin()
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"storage node {self.number} did not start: {self.log.read_text()[-2000:]}"
        self.serving = json.loads(line)
        return self

    def begin(self) -> None:
        """Start, and wait for nothing."""
        assert self.process is None
        port = self.serving["address"].rpartition(":")[2] if self.serving else "0"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *self.arguments(f"127.0.0.1:{port}"), "-o", "json"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(),
            )

    @property
    def port(self) -> int:
        return int(self.serving["address"].rpartition(":")[2])

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the end of the process; its exit code."""
        assert self.process is not None
        code = self.process.wait(SECONDS_MAX)
        self._forget()
        return code

    def kill(self) -> None:
        """Kill -9, if it still runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(SECONDS_MAX)
            self._forget()

    def _forget(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    def __enter__(self) -> NodeProcess:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.kill()


def until_logged(process: NodeProcess, text: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while text not in process.log.read_text():
        assert time.monotonic() < deadline, process.log.read_text()
        time.sleep(0.05)
