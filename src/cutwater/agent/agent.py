"""The shell of the agent's state: carries its effects out on one event loop, and tells it what happens.

Nothing is decided here. Effects are begun in their order; what takes time goes on as a task, and ends with an event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from cutwater.agent import agent_events as e
from cutwater.agent.agent_state import AgentOptions, AgentState
from cutwater.agent.cluster_calls import ClusterCalls
from cutwater.agent.errand_runs import ErrandRuns
from cutwater.agent.job_runs import JobRun, JobServices
from cutwater.agent.processes.watchdog import now_ms
from cutwater.core.jobs.agents import JobIsolation
from cutwater.core.jobs.errands import Errand, ErrandKind
from cutwater.core.jobs.operations import OperationError
from cutwater.runtime import system

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often it looks at the clock at least: timers stand still while the machine sleeps."""


class Agent:
    """See the module. ``on_ready`` is called when it has registered. Belongs to one event loop."""

    def __init__(
        self,
        options: AgentOptions,
        calls: ClusterCalls,
        services: JobServices,
        errands: ErrandRuns,
        on_ready: Callable[[int], None],
    ) -> None:
        self._options, self._calls, self._services = options, calls, services
        self._answers, self._on_ready = errands, on_ready
        self.state = AgentState(options, system.random())
        self._runs: dict[e.JobKey, JobRun] = {}
        self._errands: dict[str, tuple[Errand, asyncio.Task[None]]] = {}
        self._given_up: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self._wake_ms = 0
        self._over: asyncio.Future[OperationError | None] = asyncio.get_running_loop().create_future()

    async def run(self) -> OperationError | None:
        """Run until the agent is to end, and return why, if that is an error. No process of a job is left then."""
        self._carry_out(self.state.start())
        self._look()
        try:
            return await self._over
        finally:
            if self._wake is not None:
                self._wake.cancel()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def happen(self, event: e.AgentEvent) -> None:
        if not self._over.done():
            self._carry_out(self.state.handle(event, now_ms()))

    # Time.

    def _look(self) -> None:
        """Send ``Tick`` if its time has come, and look again in a while."""
        if self._over.done():
            return
        left = self._wake_ms - now_ms()
        if left <= 0:
            # The state says with the effects when the next one is due.
            self.happen(e.Tick())
            left = self._wake_ms - now_ms()
        if self._wake is not None:
            self._wake.cancel()
        wait = min(LOOK_SECONDS, max(left, 1) / 1_000)
        self._wake = asyncio.get_running_loop().call_later(wait, self._look)

    # Effects.

    def _carry_out(self, effects: list[e.AgentEffect]) -> None:
        for effect in effects:
            self._begin(effect)

    def _begin(self, effect: e.AgentEffect) -> None:
        match effect:
            case e.SetDeadline(at_ms):
                self._services.watchdog.set_deadline(at_ms)
            case e.Ask(request, timeout_ms):
                self._follow(self._calls.ask(request, timeout_ms))
            case e.FindSession(session):
                self._follow(self._calls.find_session(self._options.description.name, session))
            case e.StartJob():
                self._start_job(effect)
            case e.TellJob(key, message):
                if (run := self._runs.get(key)) is not None:
                    run.tell(message)
            case e.KillJob(key):
                if (run := self._runs.get(key)) is not None:
                    run.kill()
                else:
                    # Between two attempts.
                    self._soon(e.JobGone(key, "no process of it ran"))
            case e.ValidateJob():
                self._follow(self._answers.validate(effect, self.state.session))
            case e.StartErrand(errand, session):
                self._start_errand(errand, session)
            case e.GiveUpErrand(errand):
                self._give_up(errand)
            case e.AgentReady(lease_ms):
                self._on_ready(lease_ms)
            case e.ExitAgent(error):
                self._over.set_result(error)
            case e.WakeAgent(at_ms):
                self._wake_ms = at_ms
                if self._wake is not None and (at_ms - now_ms()) / 1_000 < LOOK_SECONDS:
                    self._wake.cancel()
                    self._wake = asyncio.get_running_loop().call_later(max(at_ms - now_ms(), 1) / 1_000, self._look)

    def _soon(self, event: e.AgentEvent) -> None:
        asyncio.get_running_loop().call_soon(self.happen, event)

    def _follow(self, work: Coroutine[Any, Any, e.AgentEvent]) -> asyncio.Task[None]:
        async def followed() -> None:
            self.happen(await work)

        task = asyncio.create_task(followed())
        self._tasks.add(task)
        task.add_done_callback(self._followed)
        return task

    def _followed(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the agent failed", exc_info=error)

    # Jobs.

    def _start_job(self, effect: e.StartJob) -> None:
        assigned = effect.assigned
        _log.info("job %s, epoch %s: attempt %s begins", assigned.name, assigned.epoch, effect.attempt)
        if self._options.description.isolation is JobIsolation.ONE_OWNER:
            for errand, _ in list(self._errands.values()):
                if errand.kind is ErrandKind.VALIDATE and errand.principal != assigned.owner:
                    # It runs a program of another user, which could read what this job has.
                    self._give_up(errand.id)

        def gone(event: e.AgentEvent) -> None:
            if isinstance(event, e.JobGone):
                self._gone(run)
            self.happen(event)

        run = self._runs[effect.key] = JobRun(self._services, effect, self.state.session, gone)

    def _gone(self, run: JobRun) -> None:
        if self._runs.get(run.wanted.key) is run:
            del self._runs[run.wanted.key]

    # Errands.

    def _start_errand(self, errand: Errand, session: int) -> None:
        other = self._other_owner(errand)
        if other:
            said = (
                f"agent {self._options.description.name!r} runs jobs of another owner, and a program of this user "
                "could read what they have: ask when they have ended, or start the agent with --shared-user or "
                "--job-users"
            )
            self._soon(e.ErrandDone(errand.id, error=OperationError("refused", said)))
            return
        run = self._runs.get((errand.job, errand.epoch))
        recent, attempt = (run.recent, run.wanted.attempt) if run is not None else (None, 0)

        async def answered() -> e.ErrandDone:
            try:
                return await self._answers.answer(errand, session, recent, attempt)
            except asyncio.CancelledError:
                if errand.id not in self._given_up:
                    raise
                return e.ErrandDone(errand.id)
            except Exception as error:
                _log.exception("errand %s of job %s failed", errand.kind, errand.name)
                told = OperationError("internal_error", f"the agent failed: {type(error).__name__}: {error}")
                return e.ErrandDone(errand.id, error=told)
            finally:
                self._errands.pop(errand.id, None)
                self._given_up.discard(errand.id)

        self._errands[errand.id] = errand, self._follow(answered())

    def _other_owner(self, errand: Errand) -> str:
        """Return who else has programs running here, if that keeps this errand from running one."""
        is_shared = self._options.description.isolation is not JobIsolation.ONE_OWNER
        if is_shared or errand.kind is not ErrandKind.VALIDATE:
            return ""
        owners = [run.wanted.assigned.owner for run in self._runs.values()]
        owners += [other.principal for other, _ in self._errands.values() if other.kind is ErrandKind.VALIDATE]
        return next((owner or "nobody" for owner in owners if owner != errand.principal), "")

    def _give_up(self, identifier: str) -> None:
        found = self._errands.get(identifier)
        if found is None:
            self._soon(e.ErrandDone(identifier))
            return
        self._given_up.add(identifier)
        found[1].cancel()
