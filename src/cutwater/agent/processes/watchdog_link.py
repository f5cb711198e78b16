"""The agent's side of the watchdog: starts it, tells it what to guard, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cutwater.agent.processes import watchdog
from cutwater.errors import Unavailable

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 3.0
"""How long the watchdog may take to answer."""
STARTS_MAX = 3
STARTS_SECONDS = 60.0
"""A watchdog that dies so many times within this time is not started again."""


class WatchdogLink:
    """``on_lost`` is called when no watchdog can be kept alive. Use it on one event loop."""

    def __init__(self, mark: str, on_lost: Callable[[], None]) -> None:
        self._mark, self._on_lost = mark, on_lost
        self._process: subprocess.Popen[bytes] | None = None
        self._starts: deque[float] = deque(maxlen=STARTS_MAX)
        self._told = self._heard = 0
        self._answered = asyncio.Event()
        self._deadline_ms = 0
        self._sessions: set[int] = set()
        self._cgroup = ""
        self._rest = b""
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start it, and wait until it answers."""
        self._spawn()
        self._watch = asyncio.create_task(self._guard())
        await self.answered()

    def set_deadline(self, at_ms: int) -> None:
        self._deadline_ms = at_ms
        self._tell({"deadline_ms": at_ms})

    def add(self, session: int) -> None:
        self._sessions.add(session)
        self._tell({"session": session})

    def remove(self, session: int) -> None:
        self._sessions.discard(session)
        self._tell({"gone": session})

    def set_cgroup(self, path: str) -> None:
        self._cgroup = path
        self._tell({"cgroup": path})

    async def answered(self) -> None:
        """Wait until it has heard everything so far. Raises ``Unavailable`` if it does not answer."""
        wanted = self._told
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while self._heard < wanted:
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            raise Unavailable(f"the watchdog, process {self.pid}, does not answer: was it stopped?") from None

    def close(self) -> None:
        """End it; it kills what is left."""
        if self._watch is not None:
            self._watch.cancel()
        process, self._process = self._process, None
        if process is not None:
            self._forget(process)
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(ANSWER_SECONDS)

    # The process.

    def _spawn(self) -> None:
        self._starts.append(time.monotonic())
        self._told = self._heard = 0
        self._rest = b""
        self._process = process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(Path(watchdog.__file__))),
                *(self._mark, str(os.getpid()), str(self._deadline_ms)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(process.stdout.fileno(), self._hear, process)
        # Its answer shows that it is alive.
        self._tell({"deadline_ms": self._deadline_ms})
        if self._cgroup:
            self._tell({"cgroup": self._cgroup})
        for session in self._sessions:
            self._tell({"session": session})

    def _tell(self, message: dict[str, object]) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._told += 1
        # Its death is noticed by ``_hear``.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        try:
            data = os.read(process.stdout.fileno(), watchdog.READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._forget(process)
            if process is self._process:
                self._again(process)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._heard = json.loads(line)["heard"]
        self._answered.set()

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        asyncio.get_running_loop().remove_reader(process.stdout.fileno())
        process.stdout.close()

    def _again(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        code = process.wait()
        is_often = len(self._starts) == STARTS_MAX and time.monotonic() - self._starts[0] < STARTS_SECONDS
        _log.error(
            "the watchdog, process %s, ended (%s)%s", process.pid, code, "" if is_often else ": starting another"
        )
        self._process = None
        if is_often:
            self._on_lost()
            return
        try:
            self._spawn()
        except OSError:
            _log.exception("no watchdog can be started")
            self._on_lost()

    async def _guard(self) -> None:
        """Replace a watchdog that does not answer."""
        while True:
            await asyncio.sleep(ANSWER_SECONDS)
            process = self._process
            if process is None:
                return
            self._tell({"deadline_ms": self._deadline_ms})
            try:
                await self.answered()
            except Unavailable as error:
                if process is self._process:
                    _log.error("%s", error.message)
                    process.kill()
