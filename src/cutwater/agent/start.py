"""Runs an agent as a process, from its options to its end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from cutwater.agent import agent_events as e
from cutwater.agent.agent import Agent
from cutwater.agent.agent_options import AgentServing, AgentStartOptions
from cutwater.agent.agent_state import AgentOptions
from cutwater.agent.cluster_calls import ClusterCalls
from cutwater.agent.errand_runs import ErrandRuns
from cutwater.agent.job_runs import JobServices
from cutwater.agent.processes.limits import ControlGroups
from cutwater.agent.processes.watchdog import kill_members
from cutwater.agent.processes.watchdog_link import WatchdogLink
from cutwater.agent.workplace import Workshop
from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.metadata_client import Repository, parse_servers
from cutwater.core.jobs.agents import AgentDescription
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import CutwaterError, InvalidArgument, Unavailable
from cutwater.jobs.locks import FileLock
from cutwater.programs.job_logs import JobLogAppender
from cutwater.protocol.errors import WireError, from_wire
from cutwater.runtime.event_loop import allow_descriptors, run, settle_in
from cutwater.runtime.local_files import make_directory
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint

_log = logging.getLogger(__name__)

LOCK, STATE = "agent.lock", "agent.json"
MARK_BYTES = 16
CONNECT_SECONDS = 10.0
LEFT_SECONDS = 60.0
"""How long to try to kill what an earlier process of this agent left."""
LOGS_SECONDS = 5.0


class _Kept(Struct, frozen=True):
    """What an agent leaves for the next process of it: the mark of its jobs' processes."""

    mark: str


def run_agent(options: AgentStartOptions, on_serving: Callable[[AgentServing], None]) -> None:
    """Run jobs until SIGTERM or SIGINT, then give them back. A second signal kills them."""
    if not Path("/proc/self/stat").exists() or not hasattr(os, "pidfd_open"):
        raise InvalidArgument(f"an agent needs Linux, with /proc and kernel 5.3 or newer, and this is {sys.platform}")
    allow_descriptors()
    run(_run(options, on_serving))


async def _run(options: AgentStartOptions, on_serving: Callable[[AgentServing], None]) -> None:
    directory = options.directory
    try:
        make_directory(directory)
    except OSError as error:
        raise InvalidArgument(f"{directory} cannot hold an agent: {error.strerror}; name another --work-dir") from error
    with FileLock(directory / LOCK, f"{directory}, of an agent,", "end that one first, or name another --work-dir"):
        mark = await asyncio.to_thread(_new_mark, directory)
        workshop = await asyncio.to_thread(Workshop, options)
        description = options.description(workshop.confinement.text)
        stop = _Signals()
        async with await _connected(options, stop) as client:
            ended = await _serve(options, description, workshop, client, mark, stop, on_serving)
    if ended is not None:
        raise from_wire(WireError(ended.code, ended.message, False, msgspec.Raw(b"")))


def _new_mark(directory: Path) -> str:
    """Kill what an earlier process of this agent left, and return the mark of this one."""
    path = directory / STATE
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        before = msgspec.json.decode(path.read_bytes(), type=_Kept)
        left = kill_members(before.mark, seconds=LEFT_SECONDS)
        if left:
            raise Unavailable(
                f"processes of jobs of an earlier agent do not end: {', '.join(map(str, sorted(left)))}. Two processes "
                "of a job must not run: end them, or restart the machine"
            )
    mark = secrets.token_hex(MARK_BYTES)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.encode(_Kept(mark)))
    temporary.replace(path)
    return mark


class _Signals:
    """The first signal asks the agent to give its jobs back; the second to kill them."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.count = 0
        self.asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take)

    def _take(self) -> None:
        self.count += 1
        self.asked.set()
        _log.info("asked to end%s", "" if self.count == 1 else " at once")
        if self.agent is not None:
            self.agent.happen(e.DrainWanted() if self.count == 1 else e.KillWanted())


async def _connected(options: AgentStartOptions, stop: _Signals) -> AsyncClient:
    """Connect to the cluster, again and again until it answers."""
    trouble = ""
    while True:
        try:
            return await AsyncClient.connect(
                options.servers,
                timeout=CONNECT_SECONDS,
                token=options.token,
                tls=options.context,
            )
        except CutwaterError as error:
            if not error.retriable or stop.asked.is_set():
                raise
            if error.message != trouble:
                _log.warning("the cluster cannot be reached yet: %s", error.message)
            trouble = error.message
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await stop.asked.wait()


async def _serve(
    options: AgentStartOptions,
    description: AgentDescription,
    workshop: Workshop,
    client: AsyncClient,
    mark: str,
    stop: _Signals,
    on_serving: Callable[[AgentServing], None],
) -> OperationError | None:
    repository = Repository(Endpoint(ANY_CLUSTER, "agent"), parse_servers(options.servers), options.access)
    logs = JobLogAppender(client)
    appending = asyncio.create_task(logs.append_for_ever())
    agents: list[Agent] = []
    watchdog = WatchdogLink(mark, lambda: agents[0].happen(e.WatchdogLost()) if agents else None)
    try:
        await watchdog.start()
        if isinstance(workshop.confinement, ControlGroups):
            watchdog.set_cgroup(str(workshop.confinement.root))
        services = JobServices(options.name, mark, workshop, client, watchdog, logs)

        def ready(lease_ms: int) -> None:
            settle_in()
            roots = tuple(root.name for root in description.checkpoint_roots)
            on_serving(
                AgentServing(options.name, options.slots, lease_ms, os.getpid(), roots, workshop.confinement.text)
            )

        agent = Agent(
            AgentOptions(description, round(options.drain_seconds * 1_000)),
            ClusterCalls(repository),
            services,
            ErrandRuns(services),
            ready,
        )
        agents.append(agent)
        stop.agent = agent
        if stop.count:
            return None
        error = await agent.run()
        _log.info("stopped: no process of a job is left")
        return error
    finally:
        appending.cancel()
        with suppress(asyncio.CancelledError):
            await appending
        await logs.close(LOGS_SECONDS)
        watchdog.close()
        repository.close()
