"""Runs attempts: prepares what a job needs, starts its process, passes messages and output on, and ends it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
from msgspec import Struct

from cutwater.agent import agent_events as e
from cutwater.agent.job.job_messages import JobEnds, ToJob, read_from_job
from cutwater.agent.job.job_setup import JobSetup
from cutwater.agent.processes.job_process import JobProcess
from cutwater.agent.processes.limits import MEASURE_SECONDS, excesses, too_much_memory
from cutwater.agent.processes.watchdog_link import WatchdogLink
from cutwater.agent.workplace import PlaceWanted, Workplace, Workshop
from cutwater.client.async_client import AsyncClient
from cutwater.core.jobs.errand_bodies import LogAnswer
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import CutwaterError, DeadlineExceeded
from cutwater.jobs.child import how_it_ended
from cutwater.jobs.messages import line
from cutwater.jobs.restarts import is_hopeless
from cutwater.programs.job_logs import JobLogAppender

_log = logging.getLogger(__name__)

LINGER_SECONDS = 30.0
"""How long a process may take to end after its last message."""
RECENT_BYTES = 256 * 1024
"""How much of what an attempt printed is kept for questions about its log."""

NOT_STARTED = "it was ended before it started"

Happen = Callable[[e.AgentEvent], None]


class JobServices(Struct, frozen=True):
    """What runs and errands work with."""

    agent: str
    mark: str
    """Begins the mark of every process of a job of this agent."""
    workshop: Workshop
    client: AsyncClient
    watchdog: WatchdogLink
    logs: JobLogAppender

    def mark_of(self, key: str) -> str:
        return f"{self.mark}:{key};"


class RecentOutput:
    """The last bytes that an attempt printed."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._end = 0

    def add(self, data: bytes) -> None:
        self._data += data[-RECENT_BYTES:]
        self._end += len(data)
        if len(self._data) > 2 * RECENT_BYTES:
            del self._data[:-RECENT_BYTES]

    def last(self, count: int, attempt: int) -> LogAnswer:
        found = bytes(self._data[-min(max(count, 1), RECENT_BYTES) :])
        return LogAnswer(found.decode(errors="replace"), attempt, self._end - len(found), self._end)


class JobRun:
    """One attempt, from ``StartJob`` to ``JobGone``."""

    def __init__(self, services: JobServices, wanted: e.StartJob, session: int, happen: Happen) -> None:
        self.wanted, self._session = wanted, session
        self._services, self._happen = services, happen
        self._process: JobProcess | None = None
        self._is_killed = False
        self._lingering: asyncio.TimerHandle | None = None
        self._verdict = ""
        """How the program itself said that it ended, in words."""
        self.recent = RecentOutput()
        job, epoch = wanted.key
        self._attempt_log = services.logs.log_of(job, epoch, wanted.attempt)
        self._preparing: asyncio.Task[Workplace] | None = None
        self.task = asyncio.create_task(self._run())

    def tell(self, message: ToJob) -> None:
        if self._process is not None:
            self._process.send(line(message))

    def kill(self, because: str = "") -> None:
        self._is_killed = True
        if self._preparing is not None:
            self._preparing.cancel()
        if self._process is not None:
            self._process.kill(because)

    @property
    def key(self) -> str:
        job, epoch = self.wanted.key
        return f"{job}-{epoch}-{self.wanted.attempt}"

    async def _run(self) -> None:
        try:
            gone = await self._attempt()
        except CutwaterError as error:
            told = OperationError(error.code, error.message)
            gone = e.JobGone(self.wanted.key, error.message, told, is_hopeless(error))
        except asyncio.CancelledError:
            if not self._is_killed:
                raise
            gone = e.JobGone(self.wanted.key, NOT_STARTED)
        except Exception as error:
            _log.exception("job %s could not be run", self.wanted.assigned.name)
            told = OperationError("internal_error", f"the agent failed: {type(error).__name__}: {error}")
            gone = e.JobGone(self.wanted.key, told.message, told)
        name = self._services.agent
        how = gone.reason
        if self._verdict:
            # The process exits with code 0 then, which says nothing about its program.
            how = self._verdict + ("" if how == how_it_ended(0) else f"; its process {how}")
        self._print(f"[agent {name}] attempt {self.wanted.attempt} of epoch {self.wanted.key[1]}: {how}\n")
        self._attempt_log.end()
        _log.info(
            "job %s, epoch %s, attempt %s: %s",
            self.wanted.assigned.name,
            self.wanted.key[1],
            self.wanted.attempt,
            how,
        )
        self._happen(gone)

    def _print(self, text: str) -> None:
        self._printed(text.encode())

    def _printed(self, data: bytes) -> None:
        self._attempt_log.write(data)
        self.recent.add(data)

    async def _attempt(self) -> e.JobGone:
        services, assigned = self._services, self.wanted.assigned
        workshop, spec = services.workshop, assigned.version.spec
        root, own = workshop.place_of(workshop.checkpoints, spec.checkpoint_root, assigned.name)
        saved, own_saved = workshop.place_of(workshop.savepoints, spec.savepoint_root, assigned.name)
        own += own_saved
        savepoint = predecessor = ""
        if assigned.savepoint is not None:
            kept, own_kept = workshop.place_of(workshop.savepoints, assigned.savepoint.root, assigned.savepoint.path)
            savepoint = kept.path(assigned.savepoint.path)
            own += own_kept
        if assigned.start.checkpoint is not None:
            before = assigned.start.checkpoint
            predecessor = workshop.checkpoints.of(before.root).path(before.path)
        wanted = PlaceWanted(self.key, spec, (self._session, *self.wanted.key), own=own)
        place = await self._prepared(wanted)
        try:
            setup = JobSetup(
                *(assigned.job, assigned.name, assigned.epoch, self.wanted.attempt, assigned.version.number),
                place.cluster,
                place.program_setup(spec),
                spec.parallelism,
                root.path(self.wanted.checkpoint.path),
                saved.place,
                str(place.scratch),
                assigned.owner,
                predecessor,
                savepoint,
                assigned.start.replay_output,
                assigned.start.allow_non_restored_state,
                spec.conf,
                spec.master or workshop.options.masters[0],
                place.limits_setup,
            )
            return await self._supervised(place, setup)
        finally:
            await workshop.close(place)

    async def _prepared(self, wanted: PlaceWanted) -> Workplace:
        services = self._services
        self._preparing = asyncio.create_task(services.workshop.prepare(wanted, services.client, services.agent))
        try:
            return await self._preparing
        except TimeoutError:
            raise DeadlineExceeded("the program and its packages were not there in time: try again") from None
        finally:
            self._preparing = None

    async def _supervised(self, place: Workplace, setup: JobSetup) -> e.JobGone:
        """Run the process to its end."""
        services = self._services
        process = JobProcess(services.mark_of(self.key), place.place, self._line, self._printed)
        command = [place.python or sys.executable, "-P", "-m", services.workshop.options.job_process]
        # It may be killing what it finds, because it has not heard of the present lease yet.
        await services.watchdog.answered()
        if self._is_killed:
            # Nothing of it must begin now, when its assignment may be over.
            return e.JobGone(self.wanted.key, NOT_STARTED)
        await process.start(command, services.workshop.environment_of(place))
        self._process = process
        services.watchdog.add(process.pid)
        if self._is_killed:
            process.kill()
        process.send(line(setup))
        watching = asyncio.create_task(self._watch_memory(process, place))
        try:
            reason = await process.ended()
        finally:
            watching.cancel()
            services.watchdog.remove(process.pid)
            if self._lingering is not None:
                self._lingering.cancel()
        why = services.workshop.confinement.why_ended(place.key)
        return e.JobGone(self.wanted.key, f"{reason}: {why}" if why else reason)

    def _line(self, data: bytes) -> None:
        try:
            message = read_from_job(data)
        except msgspec.MsgspecError as error:
            self.kill(f"it wrote a line that is no message: {error}")
            return
        if isinstance(message, JobEnds):
            self._verdict = f"{message.end}: {message.error.code}" if message.error is not None else message.end.value
            loop = asyncio.get_running_loop()
            self._lingering = loop.call_later(
                LINGER_SECONDS, partial(self.kill, "it did not end by itself after its last message")
            )
        self._happen(e.JobSpoke(self.wanted.key, message))

    async def _watch_memory(self, process: JobProcess, place: Workplace) -> None:
        """Kill a job that uses more memory than it may, where the kernel does not."""
        limit = place.limits.memory_bytes
        while limit and not place.place.cgroup:
            await asyncio.sleep(MEASURE_SECONDS)
            with suppress(OSError):
                used = (await asyncio.to_thread(excesses, {process.pid: limit})).get(process.pid)
                if used is not None:
                    self._print(f"[agent {self._services.agent}] {too_much_memory(limit, used)}\n")
                    process.kill(too_much_memory(limit, used))
                    return
