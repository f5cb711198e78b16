"""What jobs cost the leader: 200 of them that run and have nothing to do, and the list of 1,000.

One metadata node runs as a process of its own, with its store on disk. Agents are simulated in this process: each has
a connection of its own and the shipped ``AgentState``, with its times, and tells of processes that there are not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import TypeVar

from msgspec import Struct

from benchmarks.usage import Watch
from cutwater.admin.jobs import JobCalls
from cutwater.agent import agent_events as e
from cutwater.agent.agent_state import AgentOptions, AgentState
from cutwater.agent.job.job_messages import JobMoves, JobRuns
from cutwater.client.async_client import AsyncClient
from cutwater.core.jobs import job_requests as r
from cutwater.core.jobs.agents import AgentDescription, AgentRoot, JobIsolation
from cutwater.core.jobs.job_records import JobPhase
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import CutwaterError, Fenced
from cutwater.runtime import processes
from cutwater.runtime.event_loop import run

T = TypeVar("T")

IDLE_JOBS, LISTED_JOBS = 200, 1_000
IDLE_SECONDS = 20.0
LISTS = 30
TIMEOUT_SECONDS = 60.0
START_SECONDS_MAX = 60.0
SUBMITTED_AT_ONCE = 16
IDLE_SHARE_MAX, LIST_MS_MAX = 0.05, 300.0
"""What is promised: cores of the leader for idle jobs, and the time of one list at the leader."""
SPEC = JobSpec("ab" * 32, "main.py:p", {"region": "eu"}, parallelism=4)
ROOTS = (AgentRoot("default", is_shared=True, place="hdfs://nn:8020/cutwater"),)


class BenchAgent:
    """An agent whose jobs only say that they run."""

    def __init__(self, name: str, slots: int, log: AsyncClient) -> None:
        description = AgentDescription(
            name, slots, {"disk": "ssd"}, ROOTS, ROOTS, isolation=JobIsolation.SHARED_USER, host="127.0.0.1"
        )
        self._state = AgentState(AgentOptions(description), Random(name))
        self._log, self._tasks = log, set[asyncio.Task[None]]()
        self._wake: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._carry_out(self._state.start())

    def stop(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        for task in self._tasks:
            task.cancel()

    def _happen(self, event: e.AgentEvent) -> None:
        self._carry_out(self._state.handle(event, _now_ms()))

    def _carry_out(self, effects: Sequence[e.AgentEffect]) -> None:
        loop = asyncio.get_running_loop()
        for effect in effects:
            match effect:
                case e.Ask(request, timeout_ms):
                    task = loop.create_task(self._ask(request, timeout_ms))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case e.StartJob(key):
                    loop.call_soon(self._happen, e.JobSpoke(key, JobRuns(4)))
                    loop.call_soon(self._happen, e.JobSpoke(key, JobMoves(0, 0)))
                case e.FindSession():
                    loop.call_soon(self._happen, e.NameFree())
                case e.KillJob(key):
                    loop.call_soon(self._happen, e.JobGone(key, "was killed"))
                case e.WakeAgent(at_ms):
                    if self._wake is not None:
                        self._wake.cancel()
                    self._wake = loop.call_later((at_ms - _now_ms()) / 1_000, self._happen, e.Tick())

    async def _ask(self, request: e.AgentRequest, timeout_ms: int) -> None:
        sent_ms = _now_ms()
        event: e.AgentEvent
        try:
            answer: r.JobAnswer = await self._log.repository.ask(request, object, timeout_ms=timeout_ms)  # type: ignore[arg-type]
            event = e.RequestAnswered(request, answer, sent_ms)
        except CutwaterError as error:
            told = OperationError(error.code, error.message)
            event = e.RequestUnanswered(request, error.message)
            if not error.retriable:
                event = e.RequestRefused(request, told, is_session_over=type(error) is Fenced)
        self._happen(event)


class IdleFigures(Struct, frozen=True):
    """``cores``: how much of a core the leader was busy. ``decisions``: how many it made meanwhile."""

    agents: int
    slots: int
    cores: float
    decisions: int


class ListFigures(Struct, frozen=True):
    """``ms`` are the times of lists as a client sees them, ``cpu_ms`` is processor time of the leader for one."""

    jobs: int
    ms: list[float]
    cpu_ms: float


def _now_ms() -> int:
    return int(time.monotonic() * 1_000)


class MetadataProcess:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pid = 0

    async def start(self) -> str:
        store = f"sqlite://{self._folder}/metadata.sqlite"
        command = [sys.executable, "-m", "benchmarks.scale_metadata", store, "1", str(self._folder), "10"]
        self.pid = processes.start(command, self._folder / "metadata.log")
        address = self._folder / "metadata1.address"
        async with asyncio.timeout(START_SECONDS_MAX):
            while not address.exists() or not address.read_text():
                await asyncio.sleep(0.05)
        return f"cutwater://{address.read_text()}"

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


async def idle(agents: int, seconds: float) -> IdleFigures:
    """Let jobs run that have nothing to do, and measure the leader."""
    with tempfile.TemporaryDirectory() as folder:
        metadata = MetadataProcess(Path(folder))
        made: list[BenchAgent] = []
        clients: list[AsyncClient] = []
        try:
            servers = await metadata.start()
            slots = IDLE_JOBS // agents
            for i in range(agents):
                clients.append(await AsyncClient.connect(servers, timeout=TIMEOUT_SECONDS))
                made.append(BenchAgent(f"agent-{i:03}", slots, clients[-1]))
                made[-1].start()
            calls = JobCalls.of(clients[0], timeout=TIMEOUT_SECONDS)
            await _submit(calls, IDLE_JOBS)
            async with asyncio.timeout(START_SECONDS_MAX):
                while any(job.phase is not JobPhase.RUNNING for job in (await calls.jobs())):
                    await asyncio.sleep(0.5)
            await asyncio.sleep(2.0)
            before = (await calls.jobs_page(limit=1)).revision
            watch = Watch({"leader": [metadata.pid]}, Path(folder))
            await asyncio.sleep(seconds)
            busy = watch.stop()
            changes = (await calls.jobs_page(limit=1)).revision - before
            return IdleFigures(agents, slots, busy.cores("leader"), changes)
        finally:
            for agent in made:
                agent.stop()
            for client in clients:
                await client.close()
            metadata.end()


async def listed(jobs: int) -> ListFigures:
    """List jobs, again and again."""
    with tempfile.TemporaryDirectory() as folder:
        metadata = MetadataProcess(Path(folder))
        try:
            log = await AsyncClient.connect(await metadata.start(), timeout=TIMEOUT_SECONDS)
            calls = JobCalls.of(log, timeout=TIMEOUT_SECONDS)
            await _submit(calls, jobs)
            took: list[float] = []
            watch = Watch({"leader": [metadata.pid]}, Path(folder))
            for _ in range(LISTS):
                begin = time.perf_counter()
                found = len(await calls.jobs())
                took.append((time.perf_counter() - begin) * 1_000)
                assert found == jobs, (found, jobs)
            cpu_ms = watch.stop().spent["leader"].cpu * 1_000 / LISTS
            await log.close()
            return ListFigures(jobs, took, cpu_ms)
        finally:
            metadata.end()


async def _submit(calls: JobCalls, jobs: int) -> None:
    names = iter(f"job-{i:04}" for i in range(jobs))
    await asyncio.gather(*(_each(names, lambda name: calls.submit(name, SPEC)) for _ in range(SUBMITTED_AT_ONCE)))


async def _each(names: Iterator[str], call: Callable[[str], Awaitable[T]]) -> None:
    for name in names:
        await call(name)


def lines(seconds: float = IDLE_SECONDS) -> Iterator[str]:
    yield "## Jobs: what they cost the leader"
    yield ""
    yield (
        f"One metadata node with SQLite; agents are simulated with the shipped state and its times, over a connection "
        f"each. {IDLE_JOBS} jobs run and have nothing to do for {seconds:.0f} s. Processor time is that of the "
        "leader's process."
    )
    yield ""
    yield f"| {IDLE_JOBS} idle jobs | leader, of a core | decisions meanwhile | target |"
    yield "| --- | ---: | ---: | ---: |"
    for agents in (10, IDLE_JOBS):
        found = run(idle(agents, seconds))
        where = f"on {found.agents} agents with {found.slots} {'slot' if found.slots == 1 else 'slots'}"
        yield f"| {where} | {found.cores:.1%} | {found.decisions} | {IDLE_SHARE_MAX:.0%} |"
    yield ""
    yield f"| {LISTS} lists, one after the other | median | slowest | processor time of the leader for one | target |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    told = run(listed(LISTED_JOBS))
    yield (
        f"| {told.jobs} jobs | {median(told.ms):.0f} ms | {max(told.ms):.0f} ms | {told.cpu_ms:.1f} ms "
        f"| {LIST_MS_MAX:.0f} ms |"
    )
