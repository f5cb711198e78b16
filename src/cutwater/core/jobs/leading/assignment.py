"""Chooses an agent for each job that wants one, and says what a job waits for. A function of the state.

An agent can have a job if it offers what the specification asks for, reaches the files from which the job goes on, and
may run jobs of its owner. Among those that have room, the one with the most free slots gets it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from cutwater.core.jobs.agents import AgentRecord, JobIsolation
from cutwater.core.jobs.job_decisions import AssignJob, ReleaseJob
from cutwater.core.jobs.job_records import JobRecord, JobSavepoint
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.text import counted
from cutwater.types import JobEpoch

NAMED_MAX = 5
"""Number of agents about which a text says why they cannot have a job."""

Avoided = Container[tuple[str, int]]
"""Sessions of agents that gave the job back without being asked to: they are about to end."""


def why_not_offered(agent: AgentRecord, spec: JobSpec) -> str:
    """Return what the specification asks for and the agent does not offer, or an empty string."""
    offers = agent.description
    for label, value in spec.labels.items():
        if offers.labels.get(label) != value:
            return f"lacks the label {label}={value}"
    if spec.master and spec.master not in offers.masters:
        return f"does not offer the master {spec.master!r}"
    if offers.checkpoint_root(spec.checkpoint_root) is None:
        return f"has no checkpoint root {spec.checkpoint_root!r}"
    if offers.savepoint_root(spec.savepoint_root) is None:
        return f"has no savepoint root {spec.savepoint_root!r}"
    return f"has {counted(offers.slots, 'slot')}, not {spec.slots}" if offers.slots < spec.slots else ""


def reaches(agent: AgentRecord, savepoint: JobSavepoint) -> bool:
    root = agent.description.savepoint_root(savepoint.root)
    return root is not None and (root.is_shared or agent.name == savepoint.agent)


def _why_out_of_reach(agent: AgentRecord, job: JobRecord) -> str:
    """Return why the agent does not reach the files from which the job goes on, or an empty string."""
    start = job.start
    if start.checkpoint is not None:
        is_there = job.pinned_to in ("", agent.name)
        return "" if is_there else f"does not reach the checkpoint, which only agent {job.pinned_to} has"
    savepoint = job.savepoint_of(start.savepoint) if start.savepoint else None
    if savepoint is None or reaches(agent, savepoint):
        return ""
    return f"does not reach savepoint {savepoint.id}, which agent {savepoint.agent} has in a root that is not shared"


class FreeSlots:
    """The slots of all agents and the owners of their jobs, at one revision. ``take`` and ``give_back`` change it."""

    def __init__(self, jobs: JobRegistry) -> None:
        self._jobs = jobs
        self.free = {name: agent.description.slots for name, agent in jobs.agents.items() if agent.is_alive}
        self._owners: dict[str, dict[str, int]] = {name: {} for name in self.free}
        for name in self.free:
            for job in jobs.on_agent(name):
                self.take(job, name)

    def take(self, job: JobRecord, agent: str) -> None:
        self.free[agent] -= job.spec.slots
        owners = self._owners[agent]
        owners[job.owner] = owners.get(job.owner, 0) + 1

    @property
    def is_full(self) -> bool:
        return all(free <= 0 for free in self.free.values())

    def why_not(self, job: JobRecord, agent: AgentRecord, avoided: Avoided = ()) -> str:
        """Return why the agent cannot have the job now, or an empty string."""
        if not agent.is_alive:
            return "is not alive"
        if agent.is_draining:
            return "drains"
        if (agent.name, agent.session) in avoided:
            return "gave the job back and is about to end"
        why = why_not_offered(agent, job.spec) or _why_out_of_reach(agent, job)
        if why:
            return why
        has_others = any(owner != job.owner for owner in self._owners[agent.name])
        if has_others and agent.description.isolation is JobIsolation.ONE_OWNER:
            # All who may describe this job read it, and need not know the other owner.
            return "runs jobs of another owner and takes those of one owner at a time"
        free = self.free[agent.name]
        return "" if free >= job.spec.slots else f"has {free} of {counted(agent.description.slots, 'slot')} free"

    def choose(self, job: JobRecord, avoided: Avoided = (), but: str = "") -> AgentRecord | None:
        """Return the agent that is to have the job; not the one with the name ``but``."""
        agents = self._jobs.agents
        fit = [name for name in self.free if name != but and not self.why_not(job, agents[name], avoided)]
        if not fit:
            return None
        return agents[min(fit, key=lambda name: (-self.free[name], name))]


def assign(job: JobRecord, jobs: JobRegistry, room: FreeSlots, avoided: Avoided = ()) -> AssignJob | None:
    """Return the assignment of a job that wants an agent, or None if it has to wait."""
    agent = room.choose(job, avoided)
    if agent is None:
        return None
    room.take(job, agent.name)
    return AssignJob(job.number, agent.name, agent.session, JobEpoch(jobs.last_epoch + 1))


def moves(jobs: JobRegistry, room: FreeSlots) -> Iterator[ReleaseJob]:
    """Yield the jobs that agents which drain shall give back, as others have room for them. Those that were told to
    before come first, as they need that room."""
    draining = [name for name, agent in jobs.agents.items() if agent.is_alive and agent.is_draining]
    its = [(job, job.assignment) for name in draining for job in jobs.on_agent(name) if job.assignment is not None]
    if any(assignment.is_releasing for _, assignment in its):
        return
    for job, assignment in its:
        target = room.choose(job, but=assignment.agent)
        if target is not None:
            room.take(job, target.name)
            yield ReleaseJob(job.number, assignment.epoch, f"agent {assignment.agent} drains")


def waits_for(job: JobRecord, jobs: JobRegistry, avoided: Avoided = ()) -> str:
    """Say why a job that wants an agent has none; empty if it wants none, or will get one at once."""
    if not job.wants_agent:
        return ""
    if not jobs.agents:
        return "no agent has registered: start one with `cutwater agent start`"
    room = FreeSlots(jobs)
    reasons = [f"agent {name} {room.why_not(job, agent, avoided)}" for name, agent in sorted(jobs.agents.items())]
    if any(not room.why_not(job, agent, avoided) for agent in jobs.agents.values()):
        return ""
    more = len(reasons) - NAMED_MAX
    needed = counted(job.spec.slots, "slot")
    told = f"no agent can have it, which takes {needed}: {'; '.join(reasons[:NAMED_MAX])}"
    return f"{told}; and {more} more" if more > 0 else told


def advice(job: JobRecord, jobs: JobRegistry) -> str:
    """Say what a user should know about where a job runs, or will run."""
    waits = waits_for(job, jobs)
    if waits:
        return f"the job waits: {waits}"
    if job.assignment is not None:
        agents = [jobs.agents[job.assignment.agent]]
    else:
        agents = [agent for agent in jobs.agents.values() if agent.is_alive and not why_not_offered(agent, job.spec)]
    roots = [agent.description.checkpoint_root(job.spec.checkpoint_root) for agent in agents]
    if any(root is not None and not root.is_shared for root in roots):
        return (
            f"checkpoint root {job.spec.checkpoint_root!r} is not shared: the job is pinned to the agent that it is "
            "given, and waits for it if it dies; name a shared root for a job that shall go on elsewhere"
        )
    return ""
