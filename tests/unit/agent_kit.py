"""An agent's state with a virtual clock, processes that are numbers, and a leader made of the fold of decisions."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

from msgspec import Struct

from cutwater.agent import agent_events as e
from cutwater.agent.agent_state import AgentOptions, AgentState
from cutwater.agent.job.job_messages import JobAnswers, JobEnds, JobMoves, JobRuns, SaveJob, StopJob
from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs import job_requests as r
from cutwater.core.jobs.agents import AgentRecord
from cutwater.core.jobs.job_records import RunEnd
from cutwater.core.jobs.leading import agent_handling, job_answers
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import CutwaterError
from cutwater.jobs.messages import Told
from tests.unit.job_kit import Jobs, agent

LEASE_MS = 12_000


class Refusal(Struct, frozen=True):
    message: str
    is_session_over: bool = False


class LeaderDouble(Jobs):
    """Answers agents as the leader does. Time is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, int] = {}

    def expire(self, now: int) -> None:
        for name, found in list(self.state.agents.items()):
            if found.is_alive and now > self.heard[name] + LEASE_MS:
                self.apply(j.ExpireAgent(name, found.session))

    def assign_waiting(self) -> None:
        for number in list(self.state.waiting):
            job = self.state.jobs[number]
            for name, found in self.state.agents.items():
                has_root = found.description.checkpoint_root(job.spec.checkpoint_root) is not None
                is_free = self.state.used_slots(name) < found.description.slots
                if found.is_alive and not found.is_draining and has_root and is_free:
                    self.assign(job.name, name)
                    break

    def ask(self, request: e.AgentRequest, now: int) -> r.JobAnswer | Refusal:
        self.expire(now)
        if isinstance(request, r.RegisterAgentRequest):
            self.heard[request.agent.name] = now
            self.apply(j.RegisterAgent(request.agent, request.session))
            return r.AgentLease(LEASE_MS, self.state.revision)
        found = self.state.agents.get(request.agent)
        if found is None or not found.is_alive or found.session != request.session:
            return Refusal("this session is over", is_session_over=True)
        self.heard[request.agent] = now
        match request:
            case r.RenewAgentRequest():
                return r.AgentLease(LEASE_MS, self.state.revision)
            case r.WatchAgentRequest():
                return r.AgentOrders(found.revision, job_answers.orders_of(found, self.state), found.is_draining)
            case r.LeaveAgentRequest():
                self.apply(j.ExpireAgent(request.agent, request.session))
                return r.ReportNoted(self.state.revision)
        try:
            return self._answer(request, found)
        except CutwaterError as error:
            return Refusal(error.message)

    def _answer(self, request: e.AgentRequest, found: AgentRecord) -> r.JobAnswer:
        if isinstance(request, r.FetchAssignedRequest):
            job, _ = agent_handling.assigned(self.state, found.name, request.job, request.epoch)
            return job_answers.assigned_job(job, request.epoch)
        assert isinstance(request, agent_handling.REPORTS), request
        self.apply(*agent_handling.report(request, self.state))
        return r.ReportNoted(self.state.revision)


class Process:
    """The processes of one attempt."""

    def __init__(self, key: e.JobKey, attempt: int) -> None:
        self.key, self.attempt, self.is_alive, self.told = key, attempt, True, 0


class World:
    """Agents, a leader, and a network that may lose requests and answers. ``now`` is in milliseconds."""

    def __init__(self, seed: int = 0, *, loss: float = 0.0) -> None:
        self.random, self.loss, self.now = Random(seed), loss, 0
        self.leader = LeaderDouble()
        self.agents: dict[int, AgentDouble] = {}
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: int, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, what))

    def add(self, name: str = "a", slots: int = 4, **more: object) -> AgentDouble:
        made = AgentDouble(self, AgentOptions(agent(name, slots, **more)), len(self.agents))  # type: ignore[arg-type]
        self.agents[len(self.agents)] = made
        made.apply(made.state.start())
        return made

    def run(self, until: int, each: Callable[[], None] | None = None) -> None:
        """Run up to this time. ``each`` is called after every event."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, what = heapq.heappop(self._heap)
            what()
            self.leader.expire(self.now)
            self.leader.assign_waiting()
            if each is not None:
                each()
        self.now = until

    def running(self) -> dict[str, list[Process]]:
        """Return the living processes by the names of their jobs."""
        found: dict[str, list[Process]] = {}
        for agent_double in self.agents.values():
            for process in agent_double.processes:
                if process.is_alive:
                    found.setdefault(agent_double.names[process.key], []).append(process)
        return found


class AgentDouble:
    """An agent: its state, and its shell without a machine."""

    def __init__(self, world: World, options: AgentOptions, number: int) -> None:
        self.world, self.state = world, AgentState(options, Random(world.random.random()))
        self.name = options.description.name
        self.processes: list[Process] = []
        self.names: dict[e.JobKey, str] = {}
        self.effects: list[e.AgentEffect] = []
        self.asked: list[e.AgentRequest] = []
        self.exit: e.ExitAgent | None = None
        self.deadline_ms = self.wake_ms = 0
        self.is_cut_off = self.is_dead = self.is_paused = False
        self.life: dict[str, str] = {}
        """How programs of a job behave, by its name: "run", "fail", "hopeless", "finish", "deaf",
        "unsavable", "dies-saved", "bad-size"."""

    def happen(self, event: e.AgentEvent) -> None:
        if self.is_dead or self.exit is not None:
            return
        if self.is_paused:
            self.world.at(self.world.now + 100, lambda: self.happen(event))
            return
        self.apply(self.state.handle(event, self.world.now))

    def apply(self, effects: list[e.AgentEffect]) -> None:
        self.effects += effects
        for effect in effects:
            self._apply(effect)

    def _apply(self, effect: e.AgentEffect) -> None:
        world = self.world
        match effect:
            case e.Ask(request, timeout_ms):
                self.asked.append(request)
                self._ask(request, timeout_ms)
            case e.FindSession(session):
                world.at(world.now + 20, lambda: self._find(session))
            case e.SetDeadline(at_ms):
                self.deadline_ms = at_ms
                world.at(at_ms, self._watchdog)
            case e.StartJob(key, assigned, attempt):
                self.names[key] = assigned.name
                process = Process(key, attempt)
                self.processes.append(process)
                world.at(world.now + 200, lambda: self._live(process))
            case e.TellJob(key, message):
                for process in self._alive(key):
                    world.at(world.now + 100, lambda process=process: self._told(process, message))  # type: ignore[misc]
            case e.KillJob(key):
                for process in self._alive(key):
                    process.is_alive = False
                world.at(world.now + 10, lambda: self.happen(e.JobGone(key, "was killed (SIGKILL)")))
            case e.ValidateJob():
                done = e.JobValidated(effect.key, effect.operation, effect.step)
                world.at(world.now + 500, lambda: self.happen(done))
            case e.ExitAgent():
                self.exit = effect
            case e.WakeAgent(at_ms):
                self.wake_ms = at_ms
                world.at(at_ms, lambda: self.happen(e.Tick()) if self.wake_ms == at_ms else None)

    def _alive(self, key: e.JobKey) -> list[Process]:
        return [process for process in self.processes if process.is_alive and process.key == key]

    def _watchdog(self) -> None:
        """Kill what runs when the deadline has come, whatever the agent does."""
        if self.world.now >= self.deadline_ms:
            for process in self.processes:
                if process.is_alive:
                    process.is_alive = False
                    gone = e.JobGone(process.key, "was killed by the watchdog")
                    self.world.at(self.world.now, lambda gone=gone: self.happen(gone))  # type: ignore[misc]

    def _find(self, session: int) -> None:
        if self.is_cut_off:
            self.world.at(self.world.now + 500, lambda: self._find(session))
            return
        found = self.world.leader.state.agents.get(self.name)
        is_taken = found is not None and found.is_alive and found.session != session
        self.happen(e.NameTaken("host-b") if is_taken else e.NameFree())

    def _ask(self, request: e.AgentRequest, timeout_ms: int) -> None:
        world, sent = self.world, self.world.now
        is_lost = self.is_cut_off or world.random.random() < world.loss

        def arrive() -> None:
            answer = world.leader.ask(request, world.now)
            if isinstance(request, r.WatchAgentRequest) and isinstance(answer, r.AgentOrders):
                is_new = answer.revision != request.seen
                if not is_new and world.now < sent + request.wait_ms and not self.is_cut_off:
                    world.at(world.now + 200, arrive)
                    return
            if self.is_cut_off or world.random.random() < world.loss:
                lose()
            elif isinstance(answer, Refusal):
                refused = e.RequestRefused(request, OperationError("refused", answer.message), answer.is_session_over)
                world.at(world.now + 5, lambda: self.happen(refused))
            else:
                world.at(world.now + 5, lambda: self.happen(e.RequestAnswered(request, answer, sent)))

        def lose() -> None:
            world.at(sent + timeout_ms, lambda: self.happen(e.RequestUnanswered(request, "no answer")))

        world.at(sent + 5, lose if is_lost else arrive)

    def _say(self, process: Process, message: JobRuns | JobMoves | JobAnswers | JobEnds) -> None:
        self.happen(e.JobSpoke(process.key, message))

    def _live(self, process: Process) -> None:
        if not process.is_alive:
            return
        life = self.life.get(self.names[process.key], "run")
        if life in ("fail", "hopeless"):
            error = Told("pipeline_failed", "boom")
            self._end(process, JobEnds(RunEnd.FAILED, error, is_hopeless=life == "hopeless", glsn=7))
            return
        self._say(process, JobRuns(2))
        self._say(process, JobMoves(0, 5))
        if life == "finish":
            self._end(process, JobEnds(RunEnd.FINISHED))

    def _end(self, process: Process, message: JobEnds) -> None:
        if process.is_alive:
            process.is_alive = False
            self._say(process, message)
            self.world.at(self.world.now + 50, lambda: self.happen(e.JobGone(process.key, "ended with exit code 0")))

    def _told(self, process: Process, message: SaveJob | StopJob) -> None:
        life = self.life.get(self.names[process.key], "run")
        if not process.is_alive or life == "deaf":
            return
        process.told += 1
        if life == "unsavable" and message.path:
            self._say(process, JobAnswers(message.ask, error=Told("refused", "cannot be written")))
            return
        self._say(process, JobAnswers(message.ask, 9, 1, -1 if life == "bad-size" else 100))
        if life == "dies-saved":
            process.is_alive = False
            self.world.at(self.world.now + 50, lambda: self.happen(e.JobGone(process.key, "was killed (SIGKILL)")))
            return
        if isinstance(message, StopJob):
            self._end(process, JobEnds(RunEnd.STOPPED))
