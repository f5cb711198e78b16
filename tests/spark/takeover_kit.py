"""A job on two agents and real Spark, faults of everything that it needs, and the oracle of its output."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

import cutwater
from cutwater.admin import local_cluster
from cutwater.agent.processes.watchdog import living, members
from cutwater.agent.start import STATE
from cutwater.runtime import processes
from tests.integration.running_agent import RunningAgent, Starting, starting_agents, until
from tests.integration.test_cli_jobs import Commands

JOB = "numbered"
KEYS = 7
PROGRAM = """
from cutwater.pipeline import Pipeline, ProcessFunction, ValueState


class Number(ProcessFunction):
    seen = ValueState("bigint", default=0)

    def process(self, record, ctx):
        self.seen.set(self.seen.get() + 1)
        return {"k": ctx.key, "n": record.n, "seen": self.seen.get()}


p = Pipeline("numbered", log="cutwater://nowhere.invalid:1")
numbered = p.source("in", schema="k string, n bigint").process(
    key="k", function=Number(), uid="number", schema="k string, n bigint, seen bigint"
)
numbered.sink("out", uid="out")
"""
PAUSE_SECONDS = 18.0
"""How long something is stopped: longer than a lease."""
RECOVERY_SECONDS = 240.0
ROWS_PER_SECOND = 20


class Recovery(Struct):
    """How long the job was away, in seconds since the fault."""

    fault: str
    assigned: float
    output: float


class Producer:
    """Appends rows until it is told to stop, whatever happens to the cluster."""

    def __init__(self, servers: str) -> None:
        self._servers, self._is_over = servers, threading.Event()
        self.appended = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with cutwater.connect(self._servers, timeout=60.0) as log, log.producer("in", id="rows") as producer:
            while not self._is_over.wait(1 / ROWS_PER_SECOND):
                producer.send({"k": f"k{self.appended % KEYS}", "n": self.appended})
                self.appended += 1
            producer.flush()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "the producer does not end"


class Takeovers:
    """See the module."""

    def __init__(self, directory: Path, starting: Starting, seed: int) -> None:
        self.directory, self.random = directory, random.Random(seed)
        self.cluster = local_cluster.load(directory)
        self.cutwater = Commands(directory)
        self.shared = starting.directory / "shared"
        self.agents: dict[str, RunningAgent] = {}
        for name in ("one", "two"):
            self.agents[name] = starting(name, shared=self.shared, is_real=True)
        self.log = cutwater.connect(self.cluster.servers, timeout=60.0)
        self.recoveries: list[Recovery] = []

    def begin(self, program: Path) -> None:
        self.log.create_topic("in", streams=2, schema="k string, n bigint")
        self.log.create_topic("out", schema="k string, n bigint, seen bigint")
        program.write_text(PROGRAM)
        self.producer = Producer(self.cluster.servers)
        self.cutwater("job", "submit", program, "--restart", "fixed:delay=1s,attempts=1000", "--no-wait")
        until(lambda: self.rows() > 0, "the first output", RECOVERY_SECONDS)

    def rows(self) -> int:
        """Return how many rows were published."""
        return len(self.log.table("out"))

    @property
    def assignment(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cutwater.job(JOB)["job"].get("assignment") or {}
        return found

    def until_goes_on(self, fault: str, begun: float, epoch: int) -> None:
        """Wait until the job publishes what was appended after the fault, and note how long that took."""
        wanted = self.producer.appended
        assigned = 0.0

        def goes_on() -> bool:
            nonlocal assigned
            if not assigned and self.assignment.get("epoch", 0) > epoch:
                assigned = time.monotonic() - begun
            return self.rows() > wanted

        until(goes_on, f"output after {fault}", RECOVERY_SECONDS)
        self.recoveries.append(Recovery(fault, assigned, time.monotonic() - begun))
        print(self.recoveries[-1], flush=True)

    def fault(self, name: str) -> None:
        """Let one thing go wrong, and wait until the job goes on."""
        epoch = self.assignment["epoch"]
        begun = time.monotonic()
        after = getattr(self, name)()
        if name in TAKEOVERS:
            until(lambda: self.assignment.get("epoch", 0) > epoch, f"another epoch after {name}", 60.0)
        self.until_goes_on(name, begun, epoch)
        if after is not None:
            after()

    # Faults. Each returns what is to be done when the job goes on, if anything.

    def kill_agent(self) -> Callable[[], object]:
        agent = self.agent
        agent.process.kill()
        agent.ended()
        return agent.start

    def pause_agent(self) -> Callable[[], object]:
        agent = self.agent
        agent.send(signal.SIGSTOP)
        return lambda: agent.send(signal.SIGCONT)

    def pause_machine(self) -> Callable[[], object]:
        """Stop everything on the machine of the job, its watchdog as well, and let it go on when another one has
        published: its processes may try to publish, too, until they are killed."""
        agent = self.agent
        stopped = self.processes_of(agent)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

        def resume() -> None:
            # Those that could kill the others go on last.
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.2)

        return resume

    def kill_driver(self) -> None:
        os.kill(self.driver, signal.SIGKILL)

    def kill_jvm(self) -> None:
        found = [one.pid for one in living() if one.parent == self.driver]
        java = [pid for pid in found if b"java" in words_of(pid)]
        os.kill(java[0], signal.SIGKILL)

    def pause_driver(self) -> None:
        driver = self.driver
        os.kill(driver, signal.SIGSTOP)
        time.sleep(PAUSE_SECONDS)
        os.kill(driver, signal.SIGCONT)

    def kill_leader(self) -> None:
        member = self.cluster.metadata[0]
        os.kill(member.pid, signal.SIGKILL)
        until(lambda: not processes.is_running(member.pid), "the leader is dead")
        time.sleep(self.random.uniform(0.0, 4.0))
        local_cluster.start_again(self.directory, self.cluster, member)

    def pause_leader(self) -> None:
        member = self.cluster.metadata[0]
        os.kill(member.pid, signal.SIGSTOP)
        time.sleep(PAUSE_SECONDS)
        os.kill(member.pid, signal.SIGCONT)

    def kill_storage_node(self) -> None:
        member = self.cluster.storage_nodes[0]
        os.kill(member.pid, signal.SIGKILL)
        until(lambda: not processes.is_running(member.pid), "the storage node is dead")
        local_cluster.start_again(self.directory, self.cluster, member)

    @property
    def agent(self) -> RunningAgent:
        return self.agents[self.assignment["agent"]]

    def processes_of(self, agent: RunningAgent) -> list[int]:
        """Return the agent, its watchdog and all processes of its jobs, in this order."""
        mark = json.loads((agent.place / STATE).read_text())["mark"]
        jobs = members(mark)
        own = [one.pid for one in living() if one.parent == agent.process.pid and one.pid not in jobs]
        return [agent.process.pid, *own, *sorted(jobs)]

    @property
    def driver(self) -> int:
        mark = json.loads((self.agent.place / STATE).read_text())["mark"]
        for pid in sorted(members(mark)):
            words = words_of(pid)
            if b"cutwater.agent.job.job_process" in words and b"keeper.py" not in words:
                return pid
        raise AssertionError("no driver runs")

    # The end.

    def judge(self) -> None:
        """Stop the job when it has read everything, and compare its output with the oracle."""
        self.producer.stop()
        until(lambda: self.rows() >= self.producer.appended, "all rows are published", RECOVERY_SECONDS)
        self.cutwater("job", "stop", JOB, "--timeout", "200")
        seen: dict[str, int] = {}
        expected: dict[str, list[tuple[int, int]]] = {}
        for row in self.log.table("in").to_pylist():
            seen[row["k"]] = seen.get(row["k"], 0) + 1
            expected.setdefault(row["k"], []).append((row["n"], seen[row["k"]]))
        found: dict[str, list[tuple[int, int]]] = {}
        for row in self.log.table("out").to_pylist():
            found.setdefault(row["k"], []).append((row["n"], row["seen"]))
        assert found == expected


def words_of(pid: int) -> bytes:
    """Return the command line of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


TAKEOVERS = frozenset({"kill_agent", "pause_agent", "pause_machine"})
"""Faults after which another agent has the job."""
FAULTS = (
    *("kill_agent", "pause_agent", "pause_machine", "kill_driver", "kill_jvm", "pause_driver"),
    *("kill_leader", "pause_leader", "kill_storage_node"),
)


@contextmanager
def takeovers(directory: Path, seed: int) -> Iterator[Takeovers]:
    """A job that runs, on a cluster with two agents."""
    place = directory / "cluster"
    local_cluster.start(place, storage_nodes=1)
    try:
        with starting_agents(local_cluster.load(place).servers, directory) as starting:
            made = Takeovers(place, starting, seed)
            try:
                made.begin(directory / "numbered.py")
                yield made
            finally:
                made.log.close()
    finally:
        processes.stop([member.pid for member in local_cluster.load(place).processes() if member.pid], 10.0)
