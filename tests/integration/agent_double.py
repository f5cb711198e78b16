"""An agent that runs no programs: it speaks the requests of agents, and does with a job what the job's argument says.

``--arg as=…`` of a job: ``good`` (decides a batch at once), ``idle`` (runs, and decides none), ``fails`` (its first
attempt ends it; so does that of ``finds-nothing``, for want of something), ``unstoppable`` (its savepoints fail). A
version with ``--arg restores=no`` cannot restore savepoints of others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec

from cutwater.client.cluster.credentials import ANYONE, Access
from cutwater.client.cluster.metadata_client import Repository, parse_servers
from cutwater.core.jobs import errand_bodies as b
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.agents import AgentDescription, AgentRoot, JobIsolation
from cutwater.core.jobs.errands import Errand, ErrandKind
from cutwater.core.jobs.job_records import CheckpointPointer, JobSavepoint, RunEnd, RunFailure
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import CutwaterError
from cutwater.runtime import system
from cutwater.types import GLSN, BatchNumber, JobEpoch, JobNumber, Revision
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint

TIMEOUT_MS = 10_000


class AgentDouble:
    """Runs in a thread of its own while it is entered. ``seen`` are the actions that it was ordered, by job."""

    def __init__(
        self, servers: str, name: str = "a1", *, slots: int = 50, is_shared: bool = True, access: Access = ANYONE
    ) -> None:
        roots = (AgentRoot("default", is_shared, "/tmp/default"),)
        self.description = AgentDescription(
            name, slots, {"disk": "ssd"}, roots, roots, isolation=JobIsolation.SHARED_USER, host="here", version="1"
        )
        self.session = system.random_bits(62) + 1
        self._servers, self._access = parse_servers(servers), access
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._is_ready: Future[None] = Future()
        self._stop: Callable[[], object] = lambda: None
        self._jobs: dict[tuple[JobNumber, JobEpoch], q.AssignedJob] = {}
        self._done: set[tuple[str, int]] = set()
        self._errands: set[str] = set()
        self.seen: list[tuple[str, str]] = []
        self.pause_seconds = 0.0
        """How long an errand takes."""
        self.troubles: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_ready.result(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._thread.join(30)
        assert not self.troubles, self.troubles

    async def _ask(self, request: Any, expected: type[Any] = object) -> Any:
        return await self._repository.ask(request, expected, timeout_ms=TIMEOUT_MS)

    async def _main(self) -> None:
        self._repository = Repository(Endpoint(ANY_CLUSTER, "agent"), self._servers, self._access)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        with suppress(asyncio.CancelledError):
            try:
                await self._ask(q.RegisterAgentRequest(self.description, self.session), q.AgentLease)
                self._is_ready.set_result(None)
                await asyncio.gather(self._renew(), self._watch())
            except CutwaterError as error:
                if not self._is_ready.done():
                    self._is_ready.set_exception(error)
                self.troubles.append(f"{error.code}: {error.message}")
        self._repository.close()

    async def _renew(self) -> None:
        while True:
            progress = tuple(
                q.JobProgress(number, epoch, BatchNumber(1), GLSN(10), 12.5, 3) for number, epoch in list(self._jobs)
            )
            await self._ask(q.RenewAgentRequest(self.description.name, self.session, progress), q.AgentLease)
            await asyncio.sleep(0.5)

    async def _watch(self) -> None:
        seen = Revision(0)
        while True:
            request = q.WatchAgentRequest(self.description.name, self.session, seen, 1_000)
            orders: q.AgentOrders = await self._ask(request, q.AgentOrders)
            seen = orders.revision
            have = {(order.job, order.epoch) for order in orders.orders}
            self._jobs = {key: job for key, job in self._jobs.items() if key in have}
            for errand in orders.errands:
                if errand.id not in self._errands:
                    self._errands.add(errand.id)
                    await self._answer(errand)
            for order in orders.orders:
                with suppress(CutwaterError):
                    # What is over by now shows in the next orders.
                    await self._obey(order)

    async def _obey(self, order: q.JobOrder) -> None:
        key = order.job, order.epoch
        if key not in self._jobs:
            await self._begin(order)
        if order.action is q.OrderedAction.RUN or (done := (order.operation, order.step)) in self._done:
            return
        self.seen.append((order.name, str(order.action)))
        who = self.description.name, self.session, *key
        behaviour = self._jobs[key].version.spec.arguments.get("as", "good")
        match order.action:
            case q.OrderedAction.END:
                end = RunEnd.RELEASED if order.is_releasing else RunEnd.CANCELLED
                await self._ask(q.EndAssignmentRequest(*who, end))
            case q.OrderedAction.VALIDATE:
                program = await self._ask(q.FetchVersionRequest(order.name, order.version_to), q.VersionAnswer)
                misfit = program.version.spec.arguments.get("restores") == "no"
                error = OperationError("refused", "the program has no operator 'count'") if misfit else None
                await self._ask(q.FinishStepRequest(*who, *done, error))
            case q.OrderedAction.SAVEPOINT | q.OrderedAction.STOP if behaviour == "unstoppable":
                error = OperationError("unavailable", "the disk is full")
                await self._ask(q.FinishStepRequest(*who, *done, error))
            case q.OrderedAction.SAVEPOINT | q.OrderedAction.STOP:
                taken = JobSavepoint(system.token_hex(16), "default", f"{order.name}/s{len(self.seen)}", GLSN(10))
                has_ended = order.action is q.OrderedAction.STOP
                await self._ask(q.NoteSavepointRequest(*who, *done, taken, has_ended))
        self._done.add(done)

    async def _begin(self, order: q.JobOrder) -> None:
        who = self.description.name, self.session, order.job, order.epoch
        job: q.AssignedJob = await self._ask(q.FetchAssignedRequest(*who), q.AssignedJob)
        self._jobs[order.job, order.epoch] = job
        self.seen.append((order.name, f"run {job.version.number}"))
        place = CheckpointPointer("default", f"{order.name}/epoch-{order.epoch}")
        await self._ask(q.BeginAttemptRequest(*who, job.attempt + 1, place))
        behaviour = job.version.spec.arguments.get("as", "good")
        if behaviour == "fails":
            failure = RunFailure("pipeline_failed", "boom in function 'f'", GLSN(7))
            await self._ask(q.EndAssignmentRequest(*who, RunEnd.FAILED, failure))
        elif behaviour == "finds-nothing":
            failure = RunFailure("not_found", "there is no topic 'x'")
            await self._ask(q.EndAssignmentRequest(*who, RunEnd.FAILED, failure))
        elif behaviour != "idle":
            await self._ask(q.NoteBatchRequest(*who, BatchNumber(0), GLSN(5)))

    async def _answer(self, errand: Errand) -> None:
        who = self.description.name, self.session, errand.id
        self.seen.append((errand.name, str(errand.kind)))
        await asyncio.sleep(self.pause_seconds)
        if errand.kind is ErrandKind.VALIDATE:
            assert errand.spec is not None
            if errand.spec.arguments.get("as") == "fails":
                error = OperationError("invalid_argument", "fraud.py, line 3: invalid syntax")
                await self._ask(q.AnswerErrandRequest(*who, error=error))
                return
            told: Any = b.ValidateAnswer(errand.name, f"pipeline {errand.name}", (b.DataInfo("in", "i", "id string"),))
        elif errand.kind is ErrandKind.LOG:
            told = b.LogAnswer("began\nboom\n", 1, 0, 11)
        elif errand.kind is ErrandKind.STATE:
            told = b.StateAnswer({"count": [{"key": {"user": "ann"}, "state.n": 3}]})
        elif errand.kind is ErrandKind.SAVEPOINT_VERIFY:
            told = b.VerifyAnswer(3, 4_096)
        else:
            told = {"kind": errand.kind, "savepoint": errand.savepoint and errand.savepoint.id}
        await self._ask(q.AnswerErrandRequest(*who, msgspec.json.encode(told)))
