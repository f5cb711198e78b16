"""Jobs, agents and their users in one simulated cluster: what they share, when they begin and end, and their checks."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from cutwater.agent import agent_events as e
from cutwater.core.jobs.agents import AgentDescription, AgentRoot, JobIsolation
from cutwater.core.jobs.job_records import JobRecord, RunEnd
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.leading.assignment import waits_for
from cutwater.testing.checkers.jobs import JobFold, JobNotes, check_output, why_not_offered
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.jobs.agent_machine import KILL_SECONDS_MAX, AgentLife, AgentMachine
from cutwater.testing.virtual.jobs.job_files import LOCAL, SHARED, JobFiles
from cutwater.testing.virtual.jobs.job_nemesis import JobNemesis
from cutwater.testing.virtual.jobs.job_users import LABELS, JobUser
from cutwater.types import DecisionIndex, JobEpoch

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

LOOK_SECONDS = 0.05
SETTLE_SECONDS = 60.0
"""After the faults end, all operations end, and all jobs that want to run do, within this time."""
EXPECTED_FAILURES = ("broken", "output_exists")
"""Codes of errors with which jobs may fail for good: those of broken programs, and of starts that users chose."""


class JobWorld:
    """See the module."""

    def __init__(self, world: ShippedSimulation, seed: int) -> None:
        self._world = world
        self.random = Random(f"jobs/{seed}")
        self.files, self.notes = JobFiles(), JobNotes()
        self.fold = JobFold(self.notes, world.history.staged)
        self._folded = DecisionIndex(0)
        self.machines: list[AgentMachine] = []
        self.users: list[JobUser] = []
        self.is_frozen = False
        """Whether jobs publish nothing more, so that the cluster comes to rest."""
        self._batches: dict[JobEpoch, float] = {}
        """When each assignment has published last."""
        self._settled_from = 0.0
        self._last_jobs = JobRegistry()
        self._nemesis: JobNemesis | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_healed(self) -> bool:
        return self._world.is_healed

    # Phases.

    def start(self) -> None:
        """Start machines with agents, and users."""
        world, options = self._world, self._world.options
        for i in range(options.agents):
            self.machines.append(AgentMachine(world, f"127.0.5.{i + 1}", self._description(i), self._new_random()))
        for machine in self.machines:
            self._tasks.append(world.loop.create_task(machine.run()))
        for i in range(options.job_users):
            self.users.append(JobUser(world, self, f"job user{i}", f"127.0.6.{i + 1}", self._new_random()))
        self._nemesis = JobNemesis(world, self, self._new_random())
        self._nemesis.start()
        self._tasks.append(world.loop.create_task(self._watch()))

    def _new_random(self) -> Random:
        return Random(self.random.getrandbits(64))

    def _description(self, number: int) -> AgentDescription:
        random = self.random
        roots = (AgentRoot(SHARED, is_shared=True), AgentRoot(LOCAL))
        return AgentDescription(
            f"agent{number}",
            random.choice((1, 2, 3)),
            {} if number and random.random() < 0.5 else dict([random.choice(LABELS)]),
            roots if number == 0 or random.random() < 0.7 else roots[:1],
            roots[:1],
            isolation=random.choice((JobIsolation.SHARED_USER, JobIsolation.ONE_OWNER)),
            host=f"127.0.5.{number + 1}",
        )

    def heal(self) -> None:
        """End all faults of machines and jobs."""
        if self._nemesis is not None:
            self._nemesis.stop()
        self._settled_from = self._world.loop.now

    def freeze(self) -> None:
        self.is_frozen = True

    def shut_down(self, jobs: JobRegistry) -> None:
        """End all processes. ``jobs`` is the state of the last leader."""
        self._last_jobs = jobs
        for task in self._tasks:
            task.cancel()
        for machine in self.machines:
            if machine.life is not None and not machine.life.is_over:
                machine.life.lose_power()

    # What is known.

    def catch_up(self) -> None:
        """Fold the decisions that were stored since the last call."""
        for decision in self._world.cluster.store.after(self._folded):
            self._folded = DecisionIndex(self._folded + 1)
            self.fold.apply(decision)

    def is_present(self, epoch: JobEpoch) -> bool:
        self.catch_up()
        return self.fold.is_present(epoch)

    def spec_of(self, name: str, version: int) -> JobSpec | None:
        self.catch_up()
        job = next((job for job in self.fold.jobs.values() if job.name == name), None)
        return job.versions.get(version) if job is not None else None

    def note_batch(self, epoch: JobEpoch) -> None:
        self._batches[epoch] = self._world.loop.now

    # Checks while the cluster runs.

    async def _watch(self) -> None:
        while True:
            try:
                self.catch_up()
                self.fold.check_room()
                for machine in self.machines:
                    machine.check_lease()
            except Violation as violation:
                self._world.violations.append(violation)
                return
            await asyncio.sleep(LOOK_SECONDS)

    def check_start(self, life: AgentLife, start: e.StartJob) -> None:
        """Where clocks go right, no process of an earlier assignment runs any more when a later one begins."""
        if self._world.options.drift:
            return
        for machine in self.machines:
            if machine.is_asleep or self._world.loop.now < machine.woken_at + KILL_SECONDS_MAX:
                continue
            for job in machine.jobs:
                is_other = job.name == start.assigned.name and job.epoch != start.key[1]
                if is_other and job.life.watchdog.is_running:
                    what = (
                        f"{job.process.name} still runs on {machine.name}, and {life.machine.name} starts {start.key}"
                    )
                    self._world.violations.append(Violation("job lease", what))

    # Checks when the faults have ended.

    def unsettled(self) -> str | None:
        """Return what has to happen yet until every operation is over and every job runs that wants to."""
        leader = self._world.cluster.leader()
        if leader is None:
            return "no metadata node leads"
        jobs = leader.state.jobs
        for user in self.users:
            if not user.is_done:
                return f"{user.name} has not finished"
        for job in jobs.jobs.values():
            what = self._unsettled(job, jobs)
            if what is not None:
                return f"job {job.name!r}: {what}"
        return None

    def _unsettled(self, job: JobRecord, jobs: JobRegistry) -> str | None:
        operation = jobs.operation_of(job)
        why = self._why_waiting(job, jobs)
        if why:
            # It is reported, with a reason, for as long as nobody gives it room.
            return None if waits_for(job, jobs) else f"waits for {why}, and says nothing"
        if operation is not None:
            return f"operation {operation.id} is in progress: {operation.kind}, step {operation.next_step}"
        if job.end is RunEnd.FAILED:
            code = job.failure.code if job.failure is not None else ""
            if code not in EXPECTED_FAILURES:
                raise Violation("job liveness", f"job {job.name!r} failed for good: {job.failure}")
        if job.end is not None:
            return None
        assignment = job.assignment
        if assignment is None:
            return f"it has no agent: {job.phase}, {waits_for(job, jobs)}"
        if self._batches.get(assignment.epoch, -1.0) < self._settled_from:
            return f"epoch {assignment.epoch} on {assignment.agent} has published nothing since, {job.failure}"
        return None

    def _why_waiting(self, job: JobRecord, jobs: JobRegistry) -> str:
        """Return why no agent can have a job that wants one, judged without the code that assigns it."""
        if not job.wants_agent:
            return ""
        reasons = []
        for name, agent in jobs.agents.items():
            others = [other for other in jobs.jobs.values() if other.assignment and other.assignment.agent == name]
            is_one_owner = agent.description.isolation is JobIsolation.ONE_OWNER
            why = why_not_offered(agent.description, job.spec)
            if not agent.is_alive or agent.is_draining:
                why = why or "is not there, or drains"
            elif sum(other.spec.slots for other in others) + job.spec.slots > agent.description.slots:
                why = why or "is full"
            elif is_one_owner and any(other.owner != job.owner for other in others):
                why = why or "has another owner's jobs"
            elif job.pinned_to not in ("", name):
                why = why or "is not the one to which the job is pinned"
            if not why:
                return ""
            reasons.append(f"{name} {why}")
        return "; ".join(reasons) or "no agent has registered"

    def check(self) -> None:
        """Judge everything, when all processes have ended."""
        self.catch_up()
        self.fold.check_memory(self._last_jobs)
        check_output(self._world.cluster.store.history, self.notes, self._world.history.staged)
        self.notes.check_seen(self._last_jobs.operations)
