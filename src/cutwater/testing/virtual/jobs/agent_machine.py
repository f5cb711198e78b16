"""Machines of a simulated cluster that run jobs: an agent, its watchdog, and the processes of jobs.

The agent is ``AgentState`` as shipped, with a shell that carries its effects out on the simulated network. The watchdog
is a process of its own, which does what the shipped one does: it kills all processes of jobs when their deadline has
come or the agent has ended. The clock of all of them is that of the machine, and runs while it sleeps.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from msgspec import json

from cutwater.agent import agent_events as e
from cutwater.agent.agent_state import AgentOptions, AgentState
from cutwater.agent.job.job_messages import FromJob, ToJob
from cutwater.agent.processes.watchdog import LOOK_SECONDS
from cutwater.client.async_client import AsyncClient
from cutwater.core.jobs import errand_bodies as b
from cutwater.core.jobs import job_requests as r
from cutwater.core.jobs.agents import AgentDescription
from cutwater.core.jobs.errands import Errand, ErrandKind
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import CutwaterError, Fenced, InvalidArgument, RunFenced
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.jobs.job_process import JobProgram
from cutwater.testing.virtual.loop import place_of
from cutwater.testing.virtual.processes import SimProcess
from cutwater.testing.virtual.workload import AGAIN_SECONDS
from cutwater.types import JobEpoch

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

TELL_SECONDS_MAX = 0.005
"""How long a message between an agent and a process of a job takes."""
START_FAILS = 0.02
WORK_SECONDS_MAX = 0.5
"""How long a validation or an errand takes."""
DRAIN_MS = 2_000
RESTART_SECONDS_MAX = 0.5
KILL_SECONDS_MAX = 0.3
"""After a machine goes on, its watchdog looks at the clock within this time, and kills."""
REFUSES = "refuses-savepoints"
"""The argument of versions that cannot restore a savepoint of another one."""


class SimJob:
    """The processes of one attempt, as one process."""

    def __init__(self, life: AgentLife, start: e.StartJob) -> None:
        self.life, self.machine, self.key = life, life.machine, start.key
        self.epoch = JobEpoch(start.key[1])
        self.name = start.assigned.name
        random = self._random = life.new_random()
        self.process = life.machine.new_process(f"{self.name}/{self.epoch}/{start.attempt}")
        self.is_gone = False
        self.program = JobProgram(life.world, self, start.assigned, start.checkpoint, Random(random.getrandbits(64)))
        life.world.loop.spawn(self.process, self._live())

    async def _live(self) -> None:
        try:
            await self.program.run()
        except Violation as violation:
            self.life.world.violations.append(violation)
        except Exception as error:
            self.life.world.violations.append(Violation("crash", f"{self.name}: {error!r}{place_of(error)}"))
        self.life.world.loop.call_as(None, self.kill, "ended by itself")

    def tell(self, message: FromJob) -> None:
        self.life.tell_agent(e.JobSpoke(self.key, message))

    def take(self, message: ToJob) -> None:
        self.life.world.loop.call_as_later(
            self.process, self._random.uniform(0.0, TELL_SECONDS_MAX), self.program.inbox.append, message
        )

    def kill(self, reason: str) -> None:
        """End all processes; the agent hears of it, if it lives."""
        if self.is_gone:
            return
        self.is_gone = True
        self.life.note(f"{self.process.name} is gone: {reason}")
        self.process.kill()
        self.life.world.cluster.network.process_ended(self.process)
        self.life.jobs.pop(self.key, None)
        self.life.tell_agent(e.JobGone(self.key, reason))


class AgentLife:
    """One process of an agent, its watchdog, and its jobs."""

    def __init__(self, world: ShippedSimulation, machine: AgentMachine, number: int) -> None:
        self.world, self.machine = world, machine
        self._random = Random(machine.random.getrandbits(64))
        self.process = machine.new_process(f"{machine.name}.{number}")
        self.watchdog = machine.new_process(f"watchdog of {machine.name}.{number}")
        self.jobs: dict[e.JobKey, SimJob] = {}
        self.deadline_ms = 0
        self.leased_until_ms = 0
        """When the lease ends, as the last confirmed renewal says, on the clock of the machine."""
        self.is_over = False
        """Whether neither the agent nor a process of a job is left."""
        self._state = AgentState(AgentOptions(machine.description, DRAIN_MS), self.new_random())
        self._log: AsyncClient | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._told_at = 0.0
        self._errands: dict[str, asyncio.Task[None]] = {}
        world.loop.spawn(self.process, self._live())
        world.loop.spawn(self.watchdog, self._guard())

    def new_random(self) -> Random:
        return Random(self._random.getrandbits(64))

    def note(self, what: str) -> None:
        self.world.note(what)

    # The agent.

    async def _live(self) -> None:
        while self._log is None:
            try:
                self._log = await self.world.cluster.connect(self.world.options.timeout)
            except CutwaterError:
                await asyncio.sleep(AGAIN_SECONDS)
        self._carry_out(self._state.start())

    def tell_agent(self, event: e.AgentEvent) -> None:
        """Pass an event on to the agent, in the order in which they came."""
        now = self.world.loop.now
        self._told_at = max(self._told_at, now + self._random.uniform(0.0, TELL_SECONDS_MAX))
        self.world.loop.call_as_later(self.process, self._told_at - now, self.happen, event)

    def happen(self, event: e.AgentEvent) -> None:
        try:
            self._carry_out(self._state.handle(event, self.machine.boot_ms()))
        except Exception as error:
            self.world.violations.append(Violation("crash", f"{self.process.name}: {error!r}{place_of(error)}"))

    def _carry_out(self, effects: list[e.AgentEffect]) -> None:
        for effect in effects:
            self._do(effect)

    def _do(self, effect: e.AgentEffect) -> None:
        match effect:
            case e.Ask(request, timeout_ms):
                self._spawn(self._ask(request, timeout_ms))
            case e.FindSession(session):
                self._spawn(self._find(session))
            case e.SetDeadline(at_ms):
                self.deadline_ms = at_ms
            case e.StartJob():
                self._start(effect)
            case e.TellJob(key, message):
                if key in self.jobs:
                    self.jobs[key].take(message)
            case e.KillJob(key):
                if key in self.jobs:
                    self.world.loop.call_as(None, self.jobs[key].kill, "was killed by its agent")
                else:
                    self.tell_agent(e.JobGone(key, "was gone"))
            case e.ValidateJob():
                self._spawn(self._validate(effect))
            case e.StartErrand(errand):
                self._errands[errand.id] = self._spawn(self._run_errand(errand))
            case e.GiveUpErrand(errand):
                task = self._errands.pop(errand, None)
                if task is not None:
                    task.cancel()
                self.tell_agent(e.ErrandDone(errand))
            case e.AgentReady():
                self.note(f"{self.process.name} is ready")
            case e.ExitAgent(error):
                self.note(f"{self.process.name} ends: {error}")
                self.world.loop.call_as(None, self.end)
            case e.WakeAgent(at_ms):
                if self._wake is not None:
                    self._wake.cancel()
                delay = max(0, at_ms - self.machine.boot_ms()) / 1_000
                self._wake = asyncio.get_running_loop().call_later(delay, self.happen, e.Tick())

    def _spawn(self, work: object) -> asyncio.Task[None]:
        return self.world.loop.spawn(self.process, work)  # type: ignore[arg-type]

    async def _ask(self, request: e.AgentRequest, timeout_ms: int) -> None:
        assert self._log is not None
        sent_ms = self.machine.boot_ms()
        event: e.AgentEvent
        try:
            answer: r.JobAnswer = await self._log.repository.ask(request, object, timeout_ms=timeout_ms)  # type: ignore[arg-type]
        except CutwaterError as error:
            told = OperationError(error.code, error.message)
            if isinstance(error, Fenced) and not isinstance(error, RunFenced):
                event = e.RequestRefused(request, told, is_session_over=True)
            elif error.retriable:
                event = e.RequestUnanswered(request, error.message)
            else:
                self._check_refusal(request, error)
                event = e.RequestRefused(request, told)
        else:
            if isinstance(answer, r.AgentLease):
                # What the lease means, whatever the agent makes of it.
                self.leased_until_ms = max(self.leased_until_ms, sent_ms + answer.lease_ms)
            elif isinstance(answer, r.AssignedJob):
                self.machine.world_jobs.notes.versions[answer.epoch] = answer.version
            event = e.RequestAnswered(request, answer, sent_ms)
        self.happen(event)

    def _check_refusal(self, request: e.AgentRequest, error: CutwaterError) -> None:
        """An agent that does what it is told sends nothing that is not valid."""
        if isinstance(error, InvalidArgument):
            self.world.violations.append(
                Violation("job steps", f"{self.process.name} sent {request}, and was told: {error.message}")
            )

    async def _find(self, session: int) -> None:
        assert self._log is not None
        name = self.machine.description.name
        while True:
            try:
                found = (
                    await self._log.repository.ask(r.ListAgentsRequest(name), r.AgentList, timeout_ms=2_000)
                ).agents
                break
            except CutwaterError:
                await asyncio.sleep(AGAIN_SECONDS)
        is_taken = bool(found) and found[0].agent.is_alive and found[0].agent.session != session
        self.happen(e.NameTaken(found[0].agent.description.host) if is_taken else e.NameFree())

    def _start(self, effect: e.StartJob) -> None:
        jobs = self.machine.world_jobs
        if not jobs.is_healed and self._random.random() < START_FAILS:
            self.tell_agent(e.JobGone(effect.key, "could not be started", OperationError("unavailable", "no memory")))
            return
        jobs.check_start(self, effect)
        self.note(f"{self.process.name} starts attempt {effect.attempt} of {effect.assigned.name!r}, {effect.key}")
        self.jobs[effect.key] = SimJob(self, effect)

    async def _validate(self, effect: e.ValidateJob) -> None:
        await asyncio.sleep(self._random.uniform(0.0, WORK_SECONDS_MAX))
        version = self.machine.world_jobs.spec_of(effect.name, effect.version)
        is_refused = version is not None and REFUSES in version.arguments
        error = OperationError("savepoint_incompatible", "the state is of another kind") if is_refused else None
        self.happen(e.JobValidated(effect.key, effect.operation, effect.step, error))

    async def _run_errand(self, errand: Errand) -> None:
        await asyncio.sleep(self._random.uniform(0.0, WORK_SECONDS_MAX))
        self._errands.pop(errand.id, None)
        self.happen(e.ErrandDone(errand.id, json.encode(_answer(errand))))

    # The watchdog, and the end.

    async def _guard(self) -> None:
        while not self.is_over:
            if self.process.is_dead or self.machine.boot_ms() >= self.deadline_ms:
                for job in tuple(self.jobs.values()):
                    self.world.loop.call_as(None, job.kill, "was killed by the watchdog")
                if self.process.is_dead:
                    self.world.loop.call_as(None, self._finish)
                    return
            await asyncio.sleep(LOOK_SECONDS)

    def _finish(self) -> None:
        for job in tuple(self.jobs.values()):
            job.kill("was killed by the watchdog")
        self._is_gone(self.watchdog)
        self.is_over = True

    def end(self) -> None:
        """The process of the agent has ended, or is killed. Its jobs live until the watchdog notices."""
        if not self.process.is_dead:
            self._is_gone(self.process)

    def lose_power(self) -> None:
        for process in (self.process, self.watchdog, *(job.process for job in self.jobs.values())):
            if not process.is_dead:
                process.kill()
                self.world.cluster.network.power_lost(process)
        for job in tuple(self.jobs.values()):
            job.is_gone = True
        self.jobs.clear()
        self.is_over = True

    def _is_gone(self, process: SimProcess) -> None:
        process.kill()
        self.world.cluster.network.process_ended(process)

    def drain(self) -> None:
        self.world.loop.call_as(self.process, self.happen, e.DrainWanted())


class AgentMachine:
    """A host with a clock that runs while it sleeps, on which an agent is started again whenever it has ended."""

    def __init__(self, world: ShippedSimulation, host: str, description: AgentDescription, random: Random) -> None:
        assert world.jobs is not None
        self._world, self.host, self.description, self.random = world, host, description, random
        self.world_jobs = world.jobs
        self.name = description.name
        drift = world.options.drift
        self.rate = random.uniform(1 - drift, 1 + drift) if drift else 1.0
        self._clock = self.new_process("clock")
        self.life: AgentLife | None = None
        self._starts = 0
        self.is_asleep = self.is_dark = False
        self.woken_at = 0.0

    def new_process(self, name: str) -> SimProcess:
        now = self._world.loop.now
        return SimProcess(name, self.host, Random(self.random.getrandbits(64)), started=now, rate=self.rate)

    def boot_ms(self) -> int:
        return int(self._clock.time(self._world.loop.now) * 1_000)

    @property
    def jobs(self) -> list[SimJob]:
        return [] if self.life is None else list(self.life.jobs.values())

    async def run(self) -> None:
        """Start the agent whenever it has ended."""
        while True:
            if (self.life is None or self.life.is_over) and not self.is_dark and not self.is_asleep:
                self._starts += 1
                self._world.loop.network.power_returned(self.host)
                self._world.note(f"{self.name} starts")
                self.life = AgentLife(self._world, self, self._starts)
            await asyncio.sleep(self.random.uniform(0.05, RESTART_SECONDS_MAX))

    # Faults.

    def _processes(self) -> list[SimProcess]:
        if self.life is None:
            return []
        return [self.life.process, self.life.watchdog, *(job.process for job in self.life.jobs.values())]

    def sleep(self, seconds: float) -> None:
        """Stop all processes at once, as a machine does that is suspended."""
        if self.is_asleep or self.is_dark:
            return
        self.is_asleep = True
        stopped = [process for process in self._processes() if not process.is_dead]
        for process in stopped:
            process.pause()
        self._world.note(f"{self.name} sleeps for {seconds:.3f} s")

        def wake() -> None:
            self.is_asleep, self.woken_at = False, self._world.loop.now
            self._world.note(f"{self.name} is awake")
            for process in stopped:
                process.resume(self._world.loop)

        self._world.loop.call_later(seconds, wake)

    def pause(self, process: SimProcess, seconds: float) -> None:
        if process.is_dead or self.is_asleep:
            return
        self._world.note(f"{process.name} is paused for {seconds:.3f} s")
        process.pause()
        self._world.loop.call_later(seconds, process.resume, self._world.loop)

    def stop_guards(self, life: AgentLife, seconds: float) -> None:
        """Stop the agent and its watchdog."""
        if self.is_asleep or life.watchdog.is_dead:
            return
        self.pause(life.process, seconds)
        self.pause(life.watchdog, seconds)
        self.woken_at = max(self.woken_at, self._world.loop.now + seconds)

    def lose_power(self, seconds: float) -> None:
        if self.life is None or self.life.is_over or self.is_asleep:
            return
        self._world.note(f"{self.name} loses its power for {seconds:.3f} s")
        self.is_dark = True
        self.life.lose_power()

        def return_() -> None:
            self.is_dark = False

        self._world.loop.call_later(seconds, return_)

    # Checks.

    def check_lease(self) -> None:
        """A process of a job does not outlive the lease, on the clock of its machine."""
        life, now = self.life, self._world.loop.now
        if life is None or not life.jobs or self.is_asleep or now < self.woken_at + KILL_SECONDS_MAX:
            return
        if life.watchdog.is_running and self.boot_ms() > life.leased_until_ms:
            late = self.boot_ms() - life.leased_until_ms
            names = sorted(job.process.name for job in life.jobs.values())
            raise Violation("job lease", f"{names} run on {self.name}, {late} ms after its lease ended")


def _answer(errand: Errand) -> object:
    """Return an answer that says which question it answers."""
    match errand.kind:
        case ErrandKind.VALIDATE:
            return b.ValidateAnswer(errand.name, errand.spec.entry if errand.spec is not None else "")
        case ErrandKind.LOG:
            return b.LogAnswer(f"log of {errand.name}")
        case ErrandKind.SAVEPOINT_VERIFY:
            return b.VerifyAnswer(1, 100)
        case _:
            return {"savepoint": errand.savepoint.id if errand.savepoint is not None else ""}
