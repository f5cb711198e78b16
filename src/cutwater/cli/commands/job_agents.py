"""``cutwater agent``: runs the agent of this machine, and looks after those of a cluster from anywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from cutwater.cli.commands import agent_start
from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.io.job_output import agents_table, tell_agent
from cutwater.cli.io.output import show

AgentArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the agent.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the group of ``cutwater agent``."""
    command(app, "list")(list_agents)
    command(app)(describe)
    command(app)(drain)
    command(app)(undrain)
    command(app)(remove)


def list_agents(log: ClusterTarget) -> None:
    """Show all agents: their state, their slots, and the jobs that they run."""
    found = log.administer(lambda admin: admin.jobs.agents())
    show(found, agents_table(found))


def describe(name: AgentArgument, log: ClusterTarget) -> None:
    """Show an agent: its slots, jobs, labels, masters and roots."""
    found = log.administer(lambda admin: admin.jobs.agent(name))
    show(found, "\n".join(tell_agent(found)))


def drain(name: AgentArgument, log: ClusterTarget) -> None:
    """Give an agent no further jobs, and move those that can run elsewhere. For work on its machine."""
    log.administer(lambda admin: admin.jobs.drain_agent(name))
    show(
        {"agent": name, "is_draining": True},
        f"agent {name!r} gets no further jobs; `cutwater agent describe {name}` shows which it still has",
    )


def undrain(name: AgentArgument, log: ClusterTarget) -> None:
    """Let an agent have jobs again."""
    log.administer(lambda admin: admin.jobs.drain_agent(name, is_draining=False))
    show({"agent": name, "is_draining": False}, f"agent {name!r} may get jobs again")


def remove(name: AgentArgument, log: ClusterTarget) -> None:
    """Forget an agent that is not alive. One that starts again is a new one."""
    log.administer(lambda admin: admin.jobs.remove_agent(name))
    show({"removed": name}, f"agent {name!r} is forgotten")


app = noun("Agents: processes that run jobs, one per machine.")
agent_start.add_to(app)
add_to(app)
