"""Answers errands: questions of users, each in a process of its own, with the rights and limits of the job.

What a job printed last is answered by the agent itself. A step ``validate`` of an operation is the same as an errand,
about another version of a job that the agent has.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import msgspec
from msgspec import Raw, Struct

from cutwater.agent import agent_events as e
from cutwater.agent.job.job_setup import ErrandEnds, ErrandSetup, read_errand_ends
from cutwater.agent.job_runs import JobServices, RecentOutput
from cutwater.agent.processes.job_process import JobProcess
from cutwater.agent.workplace import PlaceWanted, Workplace
from cutwater.core.jobs.errand_bodies import LogQuestion, ValidateQuestion
from cutwater.core.jobs.errands import Errand, ErrandKind
from cutwater.core.jobs.job_records import JobSavepoint
from cutwater.core.jobs.job_requests import FetchVersionRequest, VersionAnswer
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import CutwaterError, DeadlineExceeded, Unavailable
from cutwater.jobs.messages import Told, line
from cutwater.types import JobEpoch, JobNumber

_log = logging.getLogger(__name__)

ERRANDS_MAX = 4
"""How many processes of errands run at a time. Each may start a JVM."""
ERRAND_SECONDS = 300.0
END_SECONDS = 10.0
"""How much longer than its own limit a process may take."""
FETCH_MS = 10_000


class ErrandWanted(Struct, frozen=True):
    """A question for a process. ``token_for`` and ``errand`` are as for ``PlaceWanted``."""

    key: str
    kind: ErrandKind
    name: str
    seconds: float
    body: bytes = b"{}"
    spec: JobSpec | None = None
    savepoint: JobSavepoint | None = None
    other_savepoint: JobSavepoint | None = None
    token_for: tuple[int, JobNumber, JobEpoch] | None = None
    errand: str = ""


class ErrandRuns:
    """See the module."""

    def __init__(self, services: JobServices) -> None:
        self._services = services
        self._room = asyncio.Semaphore(ERRANDS_MAX)
        self._count = 0

    async def answer(self, errand: Errand, session: int, recent: RecentOutput | None, attempt: int) -> e.ErrandDone:
        """Answer an errand. Cancel it to give it up; it returns when no process is left."""
        if errand.kind is ErrandKind.LOG:
            return _log_answer(errand, recent, attempt)
        is_validating = errand.kind is ErrandKind.VALIDATE
        wanted = ErrandWanted(
            errand.id,
            errand.kind,
            errand.name,
            errand.timeout_ms / 1_000 or ERRAND_SECONDS,
            errand.body,
            errand.spec,
            errand.savepoint,
            errand.other_savepoint,
            (session, errand.job, JobEpoch(0)) if is_validating else None,
            errand.id if is_validating else "",
        )
        ends = await self._answered(wanted)
        if ends.error is not None:
            return e.ErrandDone(errand.id, error=OperationError(ends.error.code, ends.error.message))
        return e.ErrandDone(errand.id, bytes(ends.body))

    async def validate(self, wanted: e.ValidateJob, session: int) -> e.JobValidated:
        """Find out whether another version of a job can restore a savepoint."""
        request = FetchVersionRequest(wanted.name, wanted.version)
        repository = self._services.client.repository
        try:
            found = await repository.ask(request, VersionAnswer, timeout_ms=FETCH_MS)
        except CutwaterError as error:
            return e.JobValidated(wanted.key, wanted.operation, wanted.step, OperationError(error.code, error.message))
        asked = ErrandWanted(
            f"validate-{wanted.operation}-{wanted.step}",
            ErrandKind.VALIDATE,
            wanted.name,
            wanted.seconds,
            msgspec.json.encode(ValidateQuestion()),
            found.version.spec,
            wanted.savepoint,
            token_for=(session, *wanted.key),
        )
        ends = await self._answered(asked)
        problem = None if ends.error is None else OperationError(ends.error.code, ends.error.message)
        return e.JobValidated(wanted.key, wanted.operation, wanted.step, problem)

    async def _answered(self, wanted: ErrandWanted) -> ErrandEnds:
        try:
            async with asyncio.timeout(wanted.seconds + END_SECONDS):
                async with self._room:
                    return await self._run(wanted)
        except TimeoutError:
            late = DeadlineExceeded(f"the agent did not find the answer within {wanted.seconds:g} s: ask again")
            return ErrandEnds(error=Told.of(late))
        except CutwaterError as error:
            return ErrandEnds(error=Told.of(error))

    async def _run(self, wanted: ErrandWanted) -> ErrandEnds:
        services = self._services
        self._count += 1
        key = f"errand-{self._count}"
        workshop = services.workshop
        own = tuple(
            place
            for saved in (wanted.savepoint, wanted.other_savepoint)
            if saved is not None
            for place in workshop.place_of(workshop.savepoints, saved.root, saved.path)[1]
        )
        needs = PlaceWanted(key, wanted.spec, wanted.token_for, wanted.errand, own)
        place = await services.workshop.prepare(needs, services.client, services.agent)
        try:
            return await self._asked(place, self._setup(wanted, place), key)
        finally:
            await services.workshop.close(place)

    def _setup(self, wanted: ErrandWanted, place: Workplace) -> ErrandSetup:
        spec, options = wanted.spec, self._services.workshop.options
        return ErrandSetup(
            wanted.kind,
            wanted.name,
            str(place.scratch),
            Raw(wanted.body),
            place.cluster if wanted.token_for is not None else None,
            place.program_setup(spec) if spec is not None else None,
            spec.parallelism if spec is not None else 1,
            self._path_of(wanted.savepoint),
            wanted.savepoint.id if wanted.savepoint is not None else "",
            self._path_of(wanted.other_savepoint),
            spec.conf if spec is not None else {},
            (spec.master if spec is not None else "") or options.masters[0],
            place.limits_setup,
            wanted.seconds,
        )

    def _path_of(self, savepoint: JobSavepoint | None) -> str:
        return "" if savepoint is None else self._services.workshop.savepoints.of(savepoint.root).path(savepoint.path)

    async def _asked(self, place: Workplace, setup: ErrandSetup, key: str) -> ErrandEnds:
        services = self._services
        answers: list[bytes] = []
        printed = RecentOutput()
        process = JobProcess(services.mark_of(key), place.place, answers.append, printed.add)
        command = [place.python or sys.executable, "-P", "-m", services.workshop.options.errand_process]
        await services.watchdog.answered()
        await process.start(command, services.workshop.environment_of(place))
        services.watchdog.add(process.pid)
        process.send(line(setup))
        ending = asyncio.create_task(process.ended())
        try:
            reason = await asyncio.shield(ending)
        finally:
            if not ending.done():
                process.kill("it was given up")
                await _to_its_end(ending)
            services.watchdog.remove(process.pid)
        text = printed.last(64 * 1024, 0).text.strip()
        if text:
            _log.debug("errand %s of job %s printed:\n%s", setup.kind, setup.name, text)
        try:
            return read_errand_ends(answers[-1])
        except (IndexError, msgspec.MsgspecError):
            last = f": {text.splitlines()[-1]}" if text else ""
            raise Unavailable(f"the process that was to answer {reason}{last}") from None


async def _to_its_end(ending: asyncio.Task[str]) -> None:
    """Wait until no process is left, also if this is cancelled again."""
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            continue


def _log_answer(errand: Errand, recent: RecentOutput | None, attempt: int) -> e.ErrandDone:
    if recent is None:
        error = OperationError("unavailable", "no attempt of the job has run here yet: ask again")
        return e.ErrandDone(errand.id, error=error)
    asked = msgspec.json.decode(errand.body or b"{}", type=LogQuestion)
    return e.ErrandDone(errand.id, msgspec.json.encode(recent.last(asked.bytes, attempt)))
