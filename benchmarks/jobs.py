"""How long a job is away when its agent is killed, next to `cutwater pipeline run` on the same machine.

A local cluster with two agents; the agent that has the job is killed with SIGKILL, and so was, for comparison, the
supervisor of the same pipeline. That is started again at the moment at which the job is assigned to the other agent, so
both have the same machine. Both go on from their checkpoints, while rows are appended. Output counts when it is in the
log.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import cutwater
from cutwater.admin import local_cluster
from cutwater.admin.local_agents import agent_name, start_agents
from cutwater.admin.operations import Admin
from cutwater.client.client import Client
from cutwater.core.requests import Event
from cutwater.runtime import processes

ROUNDS = 3
LEASE_SECONDS = 10.0
RATIO_MAX = 1.2
ASSIGNED_SECONDS_MAX = 2.0
ROWS_PER_SECOND = 20
WAIT_SECONDS = 300.0
PROGRAM = """
from cutwater.pipeline import Pipeline, ProcessFunction, ValueState


class Number(ProcessFunction):
    seen = ValueState("bigint", default=0)

    def process(self, record, ctx):
        self.seen.set(self.seen.get() + 1)
        return {"k": ctx.key, "n": record.n, "seen": self.seen.get()}


p = Pipeline("%(name)s")
rows = p.source("in", schema="k string, n bigint")
numbered = rows.process(key="k", function=Number(), uid="number", schema="k string, n bigint, seen bigint")
numbered.sink("%(name)s-out", uid="out")
"""
_SILENT = re.compile(r"for ([\d.]+) s")


class Away(NamedTuple):
    """Seconds: from the end of the lease to the assignment, from there to the first output, and from the kill to it;
    and of the pipeline without agents, from its start to its first output."""

    to_assigned: float
    to_output: float
    in_all: float
    plain: float


class _Bench:
    def __init__(self, directory: Path, log: Client) -> None:
        self.directory, self.log = directory, log
        self.cluster = local_cluster.load(directory)

    def rows(self, name: str) -> int:
        with suppress(cutwater.NotFound):
            return len(self.log.table(f"{name}-out"))
        return 0

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        give_up = time.monotonic() + WAIT_SECONDS
        while not (found := condition()):
            if time.monotonic() >= give_up:
                raise TimeoutError(f"{what}: not within {WAIT_SECONDS:g} s")
            time.sleep(0.1)
        return found

    def until_more(self, name: str) -> None:
        before = self.rows(name)
        self.until(lambda: self.rows(name) > before, f"output of {name}")

    def ask(self, work: Callable[[Admin], Any]) -> Any:
        async def asked() -> Any:
            async with Admin(self.cluster.addresses) as admin:
                return await work(admin)

        return asyncio.run(asked())

    def program(self, name: str) -> str:
        path = self.directory.with_name(f"{name}.py")
        path.write_text(PROGRAM % {"name": name})
        return str(path)

    # The job.

    def submit(self) -> None:
        _cutwater("job", "submit", self.program("job"), "--dir", str(self.directory), "--no-wait")
        self.until_more("job")

    def kill_agent(self) -> Away:
        agent = self.ask(lambda admin: admin.jobs.job("job")).job.assignment.agent
        (member,) = (one for one in local_cluster.load(self.directory).agents if agent_name(one) == agent)
        after = self.ask(lambda admin: admin.events()).events[-1].index
        before, killed = self.rows("job"), time.time()
        os.kill(member.pid, signal.SIGKILL)
        expired, assigned = self.until(lambda: self._events(after), "another agent")
        # Rows that were in the log before the agent was dead do not count.
        before = max(before, self.rows("job"))
        with self.plain() as plain:
            self.until(lambda: self.rows("job") > before, "output of the job")
            output = time.time()
            took = plain()
        silent = float(_SILENT.search(expired.reason)[1])  # type: ignore[index]
        lease_end = expired.time / 1e6 - (silent - LEASE_SECONDS)
        start_agents(self.directory)
        self.until_more("job")
        return Away(assigned.time / 1e6 - lease_end, output - assigned.time / 1e6, output - killed, took)

    def _events(self, after: int) -> tuple[Event, Event] | None:
        events = self.ask(lambda admin: admin.events(after)).events
        expired = [event for event in events if "is gone" in event.what]
        assigned = [event for event in events if "assigned to agent" in event.what]
        return (expired[0], assigned[0]) if expired and assigned else None

    # The same without agents.

    @contextmanager
    def plain(self) -> Iterator[Callable[[], float]]:
        """Run the pipeline, and kill it in the end. Yields a function that waits until it has published, and returns
        how long that took."""
        command = [sys.executable, "-m", "cutwater.cli", "pipeline", "run", self.program("plain")]
        command += ["--log", self.cluster.servers, "--jobs-dir", str(self.directory.with_name("plain"))]
        before, begun, took = self.rows("plain"), time.monotonic(), list[float]()
        process = subprocess.Popen(
            [*command, "--parallelism", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

        def watch() -> None:
            self.until(lambda: self.rows("plain") > before, "output of the pipeline")
            took.append(time.monotonic() - begun)

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()

        def published() -> float:
            watching.join(WAIT_SECONDS)
            return took[0]

        try:
            yield published
        finally:
            process.kill()
            process.wait()
            # Its program notices that by itself.
            time.sleep(3.0)


def _cutwater(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "cutwater.cli", *words], check=True, stdout=subprocess.DEVNULL)


def _produce(servers: str, is_over: threading.Event) -> None:
    with cutwater.connect(servers, timeout=60.0) as log:
        number = 0
        while not is_over.wait(1 / ROWS_PER_SECOND):
            log.append("in", {"k": f"k{number % 7}", "n": number})
            number += 1


def measured() -> list[Away]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cutwater-bench-")))
        directory = folder / "cluster"
        cluster = local_cluster.start(directory, storage_nodes=1)
        stack.callback(_stop, directory)
        start_agents(directory, 2)
        log = stack.enter_context(cutwater.connect(cluster.servers, timeout=60.0))
        log.create_topic("in", schema="k string, n bigint")
        is_over = threading.Event()
        producing = threading.Thread(target=_produce, args=(cluster.servers, is_over), daemon=True)
        stack.callback(producing.join, 60.0)
        stack.callback(is_over.set)
        producing.start()
        bench = _Bench(directory, log)
        bench.submit()
        with bench.plain() as plain:
            # The first run begins with no checkpoint, and leaves one.
            plain()
        return [bench.kill_agent() for _ in range(ROUNDS)]


def _stop(directory: Path) -> None:
    processes.stop([member.pid for member in local_cluster.load(directory).processes() if member.pid], 20.0)


def lines() -> Iterator[str]:
    jobs = measured()
    runs = [away.plain for away in jobs]
    plain = median(runs)
    yield "## How long a job is away when its agent dies"
    yield ""
    yield (
        f"The agent is killed with SIGKILL, {ROUNDS} times; the lease is {LEASE_SECONDS:g} s. *pipeline run*: the same "
        "pipeline without the service, started again from its checkpoint when the job is assigned."
    )
    yield ""
    yield "| | median s | longest s | goal |"
    yield "| --- | ---: | ---: | --- |"
    assigned = [away.to_assigned for away in jobs]
    output = [away.to_output for away in jobs]
    everything = [away.in_all for away in jobs]
    yield (
        f"| from the end of the lease to the next assignment | {median(assigned):.2f} | {max(assigned):.2f} | "
        f"{ASSIGNED_SECONDS_MAX:g} s |"
    )
    yield (
        f"| from the assignment to output | {median(output):.1f} | {max(output):.1f} | {RATIO_MAX:g} × pipeline run: "
        f"{median(output) / plain:.2f} × |"
    )
    yield f"| *pipeline run*, from its start to output | {plain:.1f} | {max(runs):.1f} | |"
    yield f"| in all, from the kill to output | {median(everything):.1f} | {max(everything):.1f} | 30 s |"
    yield ""


if __name__ == "__main__":
    print("\n".join(lines()))
