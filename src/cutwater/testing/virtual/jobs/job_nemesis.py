"""Faults of machines with agents and of the processes of jobs. All of them end with the other faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from cutwater.testing.virtual.jobs.agent_machine import AgentLife, AgentMachine

if TYPE_CHECKING:
    from cutwater.testing.virtual.jobs.job_world import JobWorld
    from cutwater.testing.virtual.simulation import ShippedSimulation

OUT_SECONDS_MAX = 4.0
"""For so long a machine sleeps, is off, or is cut off at most: leases of some clusters end meanwhile."""
SHORT_SECONDS_MAX = 0.8
PAUSE_SECONDS_MAX = 3.0


class JobNemesis:
    def __init__(self, world: ShippedSimulation, jobs: JobWorld, random: Random) -> None:
        self._world, self._jobs, self._random = world, jobs, random
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        options = self._world.options
        self._every(options.agent_faults_every, (self._kill_agent, self._pause_agent, self._cut_power, self._drain))
        self._every(options.agent_silences_every, (self._sleep, self._cut_off, self._cut_off, self._stop_guards))
        self._every(options.job_faults_every, (self._kill_job, self._pause_job))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _every(self, mean: float, faults: tuple[Callable[[AgentMachine, AgentLife], None], ...]) -> None:
        async def again_and_again() -> None:
            while True:
                await asyncio.sleep(self._random.expovariate(1 / mean))
                machine = self._random.choice(self._jobs.machines)
                fault = self._random.choice(faults)
                if machine.life is not None and not machine.life.is_over:
                    self._jobs.notes.struck[fault.__name__.strip("_").replace("_", " ")] += 1
                    fault(machine, machine.life)

        if mean:
            self._tasks.append(self._world.loop.create_task(again_and_again()))

    def _out(self) -> float:
        return self._random.uniform(0.0, self._random.choice((SHORT_SECONDS_MAX, OUT_SECONDS_MAX)))

    # Machines and agents.

    def _kill_agent(self, machine: AgentMachine, life: AgentLife) -> None:
        self._world.note(f"{life.process.name} is killed")
        life.end()

    def _pause_agent(self, machine: AgentMachine, life: AgentLife) -> None:
        machine.pause(life.process, self._random.uniform(0.0, PAUSE_SECONDS_MAX))

    def _sleep(self, machine: AgentMachine, life: AgentLife) -> None:
        machine.sleep(self._out())

    def _stop_guards(self, machine: AgentMachine, life: AgentLife) -> None:
        """Stop the agent and its watchdog, but not the processes of jobs: only their epoch ends them."""
        machine.stop_guards(life, self._out())

    def _cut_power(self, machine: AgentMachine, life: AgentLife) -> None:
        machine.lose_power(self._out())

    def _cut_off(self, machine: AgentMachine, life: AgentLife) -> None:
        """Cut the lines between a machine and all metadata nodes, both ways or one; or all of its lines."""
        network, cluster = self._world.cluster.network, self._world.cluster
        others = [other.host for other in (cluster.machines if self._random.random() < 0.5 else cluster.metadata)]
        ways = self._random.choice(("both", "both", "from", "to"))
        pairs = [(machine.host, other) for other in others if ways != "to"]
        pairs += [(other, machine.host) for other in others if ways != "from"]
        self._world.note(f"{machine.name} is cut off: {ways}, {len(pairs)} lines")
        for pair in pairs:
            network.cut(*pair)

        def heal() -> None:
            self._world.note(f"{machine.name} is connected again")
            for pair in pairs:
                network.heal(*pair)

        self._world.loop.call_later(self._out(), heal)

    def _drain(self, machine: AgentMachine, life: AgentLife) -> None:
        """Ask the agent to end, as SIGTERM does."""
        self._world.note(f"{life.process.name} is asked to end")
        life.drain()

    # Jobs.

    def _kill_job(self, machine: AgentMachine, life: AgentLife) -> None:
        if machine.jobs:
            self._random.choice(machine.jobs).kill("was killed")

    def _pause_job(self, machine: AgentMachine, life: AgentLife) -> None:
        if machine.jobs:
            machine.pause(self._random.choice(machine.jobs).process, self._random.uniform(0.0, PAUSE_SECONDS_MAX))
