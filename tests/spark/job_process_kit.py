"""Starts processes of jobs as an agent does, and talks to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cutwater.agent.job.job_messages import FromJob, JobAnswers, JobEnds, JobMoves, read_from_job
from cutwater.agent.job.job_setup import ClusterSetup, ErrandEnds, ErrandSetup, JobSetup, ProgramSetup, read_errand_ends
from cutwater.jobs.child import session_members
from cutwater.programs.packing import pack_program
from cutwater.programs.unpacking import unpack_program

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0

Message = TypeVar("Message", bound=FromJob)


class Started:
    """A process with its first line. What it writes is read by a thread."""

    def __init__(self, module: str, setup: JobSetup | ErrandSetup, read: Callable[[bytes], Any], log: Path) -> None:
        events, writes = os.pipe()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTWATER_")}
        environment |= {"PYTHONPATH": str(ROOT / "src"), "CUTWATER_TOKEN": "cwt_00_00"}
        Path(setup.scratch).mkdir(parents=True)
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"cutwater.agent.job.{module}", str(writes)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(writes,),
                env=environment,
                start_new_session=True,
            )
        os.close(writes)
        self.heard: list[Any] = []
        self._reader = threading.Thread(target=self._listen, args=(events, read), daemon=True)
        self._reader.start()
        self.tell(setup)

    def _listen(self, events: int, read: Callable[[bytes], Any]) -> None:
        with os.fdopen(events, "rb") as lines:
            for one in lines:
                self.heard.append(read(one))

    def tell(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to everything that the process has started, too."""
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def left(self) -> list[int]:
        return session_members(self.process.pid) or []

    def until(self, holds: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            is_over = self.process.poll() is not None and not self._reader.is_alive()
            assert not is_over or holds(), f"it has ended before {what}: {self.heard[-3:]}\n{self.printed()}"
            assert time.monotonic() < deadline, f"{what}: {self.heard[-3:]}\n{self.printed()}"
            time.sleep(0.05)

    def printed(self) -> str:
        return self.log.read_text()[-4_000:]

    def gone(self) -> None:
        """Wait until nothing of it is left, though nobody kills it."""
        self.process.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while self.left():
            # What it has killed may take a moment.
            assert time.monotonic() < deadline, self.left()
            time.sleep(0.05)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self._reader.join(10)


class JobProcess(Started):
    def __init__(self, setup: JobSetup, log: Path) -> None:
        super().__init__("job_process", setup, read_from_job, log)

    def next(self, kind: type[Message], holds: Callable[[Message], bool] = lambda message: True) -> Message:
        """The first message of this kind for which something holds, among those to come."""
        start = len(self.heard)

        def found() -> Message | None:
            return next((one for one in self.heard[start:] if isinstance(one, kind) and holds(one)), None)

        self.until(found, f"a {kind.__name__}")
        message = found()
        assert message is not None
        return message

    def first(self, kind: type[Message]) -> Message:
        """The first message of this kind since the start."""
        self.until(lambda: any(isinstance(one, kind) for one in self.heard), f"the first {kind.__name__}")
        return next(one for one in self.heard if isinstance(one, kind))

    def asked(self, message: Any) -> JobAnswers:
        self.tell(message)
        return self.next(JobAnswers, lambda answer: answer.ask == message.ask)

    def decided(self, glsn: int) -> JobMoves:
        """Wait until everything up to a position is done."""
        return self.next(JobMoves, lambda move: move.glsn >= glsn and move.batch >= 0)

    def ended(self) -> JobEnds:
        found = self.first(JobEnds)
        self.gone()
        return found


def errand(setup: ErrandSetup, log: Path) -> ErrandEnds:
    started = Started("errand_process", setup, read_errand_ends, log)
    try:
        started.until(lambda: started.heard, "the errand is done")
        started.gone()
    finally:
        started.close()
    (found,) = started.heard
    assert isinstance(found, ErrandEnds)
    return found


def unpacked(place: Path, files: dict[str, str], entry: str, **arguments: str) -> ProgramSetup:
    """A program as an agent's cache has it."""
    for name, text in files.items():
        file = place / "given" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    data = pack_program(place / "given").data
    (place / "files").mkdir()
    unpack_program(data, place / "files")
    (place / "program.zip").write_bytes(data)
    return ProgramSetup(str(place / "files"), str(place / "program.zip"), entry, arguments)


def cluster_setup(servers: str, ca: Path, token: Path) -> ClusterSetup:
    return ClusterSetup(servers, str(token), str(ca))
