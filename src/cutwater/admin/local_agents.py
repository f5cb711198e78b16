"""Agents of a local cluster: processes on the same machine that run its jobs.

With access control, each has a principal of its own, ``agent-<number>``, with the right to run jobs and no other, and a
token in the directory of the cluster.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from cutwater.admin import local_cluster
from cutwater.admin.access_calls import AccessCalls, CreatedToken
from cutwater.admin.cluster_certificates import authority_file
from cutwater.admin.cluster_security import local_control
from cutwater.admin.kept_tokens import make_kept
from cutwater.admin.local_cluster import ClusterMember, LocalCluster
from cutwater.admin.operations import Admin
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.rights import CLUSTER, Right
from cutwater.errors import InvalidArgument, NotFound
from cutwater.runtime import processes

AGENTS_MAX = 16
SLOTS = 4
DRAIN_SECONDS = 30
JOBS = "jobs"


def start_agents(directory: Path, count: int | None = None) -> list[ClusterMember]:
    """Start the agents of a cluster that runs: so many, or as many as it had; those that run already go on. Returns
    those that were started."""
    cluster = local_cluster.load(directory)
    _grow(cluster, count)
    started: list[tuple[ClusterMember, processes.Starting]] = []
    if all(map(local_cluster.is_up, cluster.agents)):
        return []
    if cluster.has_tls:
        asyncio.run(_make_tokens(directory, cluster))
    try:
        for agent in cluster.agents:
            if not local_cluster.is_up(agent):
                started.append((agent, _start(directory, cluster, agent)))
                cluster.save(directory)
        for _, process in started:
            process.runs()
    except BaseException:
        processes.stop([agent.pid for agent, _ in started], 1.0)
        raise
    return [agent for agent, _ in started]


def _grow(cluster: LocalCluster, count: int | None) -> None:
    if count is None:
        return
    if not 0 <= count <= AGENTS_MAX:
        raise InvalidArgument(f"a local cluster has up to {AGENTS_MAX} agents, not {count}: each runs several jobs")
    if count < len(cluster.agents):
        raise InvalidArgument(
            f"the cluster has {len(cluster.agents)} agents already: leave --agents out. To have fewer, end one with "
            "`kill`, and then `cutwater agent remove NAME`"
        )
    cluster.agents += [ClusterMember(number + 1, 0, "") for number in range(len(cluster.agents), count)]


def agent_name(agent: ClusterMember) -> str:
    """Return the name of an agent in the cluster, which is also that of its principal."""
    return f"agent-{agent.id}"


def _start(directory: Path, cluster: LocalCluster, agent: ClusterMember) -> processes.Starting:
    own, jobs = directory / f"agent{agent.id}", directory / JOBS
    command = [
        *(sys.executable, *cluster.options["program"], "agent", "start", "--name", agent_name(agent)),
        *("--servers", cluster.servers, "--work-dir", str(own), "--slots", str(SLOTS)),
        # All agents of the cluster are on this machine.
        *("--checkpoint-root", f"default={jobs / 'checkpoints'},shared"),
        *("--savepoint-root", f"default={jobs / 'savepoints'},shared"),
        *("--drain-seconds", str(DRAIN_SECONDS)),
    ]
    if cluster.has_tls:
        command += ["--tls-ca", str(authority_file(directory)), "--token-file", str(_token_file(directory, agent))]
    process = processes.Starting([*command, *agent.flags], Path(f"{own}.log"))
    agent.pid, agent.started = process.pid, processes.started_at(process.pid)
    return process


# Tokens.


def _token_file(directory: Path, agent: ClusterMember) -> Path:
    return directory / f"agent{agent.id}.token"


async def _make_tokens(directory: Path, cluster: LocalCluster) -> None:
    """Make what is missing of the principals of the agents, their rights and their tokens."""
    missing = [agent for agent in cluster.agents if not _token_file(directory, agent).exists()]
    if not missing:
        return
    async with _control(directory, cluster) as control:
        for agent in missing:
            name = agent_name(agent)
            await control.allow(name, (str(Right.RUN_JOBS),), str(CLUSTER))
            await make_kept(_token_file(directory, agent), partial(_make_token, control, name))


async def _make_token(control: AccessCalls, name: str, text: str) -> CreatedToken:
    return await control.create_token(name, text=text)


@asynccontextmanager
async def _control(directory: Path, cluster: LocalCluster) -> AsyncIterator[AccessCalls]:
    """Yield calls about access control: of the administrator, or of the owner of the cluster's files while it is
    off."""
    proven = await local_control(directory)
    if (await proven.who_am_i()).mode is AccessMode.OFF:
        yield proven
        return
    access = local_cluster.access_of(directory, cluster)
    if not access.has_token:
        raise NotFound(
            f"{directory} has no token of an administrator, who has to make one for the agent: put admin.token back, "
            "or make a token with the right run-jobs and start the agent with `cutwater agent start --token-file FILE`"
        )
    async with Admin(cluster.addresses, access=access) as admin:
        yield admin.control
