"""Exactly once: a streaming query whose driver and executors are killed, again and again, at every point that matters.

The log is a cluster of real processes. Each round is a driver with a JVM of its own that continues from the checkpoint
of the one before. Two topics get every row of the input; while all this goes on, others read them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import cutwater
from cutwater.admin import local_cluster
from cutwater.admin.local_cluster import LocalCluster
from cutwater.client.errors import ClientClosed
from cutwater.runtime import processes
from tests.integration.log_cluster import seeded
from tests.soak import rounds
from tests.spark.killed_program import DRIVER_POINTS, EXECUTOR_POINTS, ROWS_PER_BATCH, TOPICS, Plan

pytestmark = pytest.mark.timeout(rounds(1_500, 7_200))

DRIVER_KILLS, EXECUTOR_KILLS = rounds(len(DRIVER_POINTS), 42), rounds(2, 8)
"""In the suite, the driver is killed once at each point."""
ROUND_SECONDS_MAX = 240
ROOT = Path(__file__).parents[2]
QUIET = "-Xlog:disable -Xlog:all=off"
OUTPUT = pa.schema({"n": pa.int64(), "batch": pa.int64(), "round": pa.int64(), "token": pa.string()})


class Watcher(threading.Thread):
    """Looks at the output all the time: what it sees of a batch, and in which order a subscriber gets the records."""

    def __init__(self, servers: str) -> None:
        super().__init__(daemon=True)
        self._servers, self._over = servers, threading.Event()
        self.seen: set[tuple[str, int, int, int]] = set()
        self.trouble: BaseException | None = None

    def run(self) -> None:
        try:
            with cutwater.connect(self._servers) as log:
                while not self._over.is_set():
                    for topic in TOPICS:
                        self._look(topic, log.table(topic))
                    self._over.wait(0.2)
        except BaseException as error:
            self.trouble = error
            raise

    def _look(self, topic: str, table: pa.Table) -> None:
        rows = zip(table["batch"].to_pylist(), table["round"].to_pylist(), strict=True)
        self.seen |= {(topic, batch, number, count) for (batch, number), count in Counter(rows).items()}

    def end(self) -> None:
        self._over.set()
        self.join()
        assert self.trouble is None, self.trouble


class Subscriber(threading.Thread):
    def __init__(self, servers: str) -> None:
        super().__init__(daemon=True)
        self._log = cutwater.connect(servers)
        self.glsns: list[int] = []

    def run(self) -> None:
        # It ends when the client is closed.
        with suppress(ClientClosed):
            for record in self._log.subscribe(TOPICS, start="earliest"):
                self.glsns.append(record.glsn)

    def end(self, count: int) -> list[int]:
        deadline = time.monotonic() + 60
        while len(self.glsns) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        self._log.close()
        self.join()
        return self.glsns


@contextmanager
def cluster_of_two(directory: Path) -> Iterator[LocalCluster]:
    cluster = local_cluster.start(directory, storage_nodes=2, metadata=1)
    try:
        yield cluster
    finally:
        processes.stop([member.pid for member in cluster.processes() if member.pid], 5.0)


def run_driver(plan: Plan, output: Path) -> int:
    """What it ends with. Nothing that it has started is left."""
    mark = f"KILLED_PROGRAM={plan.marker}-{plan.round}"
    name, _, value = mark.partition("=")
    paths = os.pathsep.join((str(Path(cutwater.__file__).parents[1]), str(ROOT)))
    command = [sys.executable, "-c", "from tests.spark import killed_program; killed_program.start()"]
    with output.open("wb") as log:
        process = subprocess.Popen(
            [*command, msgspec.json.encode(plan).decode()],
            env={**os.environ, "PYTHONPATH": paths, name: value},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(ROUND_SECONDS_MAX)
    finally:
        process.kill()
        process.wait()
        end_all(mark.encode())


def end_all(mark: bytes) -> None:
    """The JVM, its Python workers, executors: all have this in their environment. Most of them are gone already."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


def next_batch(checkpoint: Path) -> int:
    """The one after the last that Spark knows to be committed."""
    committed = checkpoint / "commits"
    numbers = [int(path.name) for path in committed.iterdir() if path.name.isdecimal()] if committed.exists() else []
    return max(numbers, default=-1) + 1


def append_input(log: cutwater.Client, count: int) -> None:
    start = log.table("in").num_rows
    for n in range(start, start + count, 4):
        log.append("in", [{"n": i} for i in range(n, n + 4)])


def test_drivers_and_executors_are_killed(tmp_path: Path) -> None:
    random = seeded()
    points = [DRIVER_POINTS[i % len(DRIVER_POINTS)] for i in range(DRIVER_KILLS)]
    random.shuffle(points)
    with cluster_of_two(tmp_path / "cluster") as cluster, cutwater.connect(cluster.servers) as log:
        log.create_topic("in", streams=2, schema={"n": pa.int64()})
        for topic in TOPICS:
            log.create_topic(topic, streams=2, schema=OUTPUT)
        watcher, subscriber = Watcher(cluster.servers), Subscriber(cluster.servers)
        watcher.start()
        subscriber.start()
        archive = tmp_path / "classes.jsa"
        plan = Plan(
            cluster.servers,
            str(tmp_path / "checkpoint"),
            round=0,
            marker=str(tmp_path / "marker"),
            java=f"{QUIET} -XX:ArchiveClassesAtExit={archive}",
            storage_nodes=tuple(member.pid for member in cluster.storage_nodes),
        )
        # The first one ends by itself and leaves behind what lets the others start sooner.
        append_input(log, 2 * ROWS_PER_BATCH)
        assert run_driver(plan, tmp_path / "0.log") == 0, (tmp_path / "0.log").read_text()
        plan.java = f"{QUIET} -XX:SharedArchiveFile={archive}"
        for plan.round, plan.point in enumerate(points, 1):
            append_input(log, 2 * ROWS_PER_BATCH)
            # The batch that comes again, or the one after it.
            plan.batch = next_batch(Path(plan.checkpoint)) + random.choice((0, 1))
            output = tmp_path / f"{plan.round}.log"
            ended = run_driver(plan, output)
            said = output.read_text()
            assert (ended, Path(plan.marker).exists()) == (-signal.SIGKILL, True), f"{plan.point}: {said}"
            Path(plan.marker).unlink()
        kill_executors(
            plan, log, tmp_path / "last.log", [EXECUTOR_POINTS[i % len(EXECUTOR_POINTS)] for i in range(EXECUTOR_KILLS)]
        )
        watcher.end()
        judge(log, watcher, subscriber)


def kill_executors(plan: Plan, log: cutwater.Client, output: Path, points: list[str]) -> None:
    """One driver that goes through to the end, whatever becomes of its executors."""
    append_input(log, len(points) * ROWS_PER_BATCH)
    plan.round, plan.point, plan.executor_points = plan.round + 1, "", tuple(points)
    plan.master, plan.batch = "local-cluster[2,1,1024]", next_batch(Path(plan.checkpoint)) + 1
    assert run_driver(plan, output) == 0, output.read_text()
    for number in range(len(points)):
        assert Path(f"{plan.marker}.{number}").exists(), f"executor {number} was not killed: {output.read_text()}"


def judge(log: cutwater.Client, watcher: Watcher, subscriber: Subscriber) -> None:
    count = log.table("in").num_rows
    groups: dict[str, dict[int, tuple[Any, ...]]] = {topic: {} for topic in TOPICS}
    glsns: list[int] = []
    for topic in TOPICS:
        table = log.table(topic)
        # Every row of the input once.
        assert sorted(table["n"].to_pylist()) == list(range(count)), topic
        glsns += table["glsn"].to_pylist()
        for batch in set(table["batch"].to_pylist()):
            group = table.filter(pa.compute.equal(table["batch"], batch))
            rounds, own = set(group["round"].to_pylist()), group["glsn"].to_pylist()
            assert len(rounds) == 1, f"batch {batch} of {topic} mixes attempts: {rounds}"
            assert own == list(range(own[0], own[0] + len(own))), f"batch {batch} of {topic} is not in one piece"
            assert len(set(group["stream"].to_pylist())) == 1
            groups[topic][batch] = (rounds.pop(), len(own), sorted(set(group["token"].to_pylist())))
    # A batch is in both topics or in none, and of the same attempts of the same tasks.
    first, second = (groups[topic] for topic in TOPICS)
    assert first == second
    assert sorted(first) == list(range(len(first)))
    # Whoever looked meanwhile saw all of a batch or nothing, and never what another attempt had staged.
    whole = {(topic, batch, rounds, size) for topic in TOPICS for batch, (rounds, size, _) in groups[topic].items()}
    assert watcher.seen <= whole
    assert len({batch for _, batch, _, _ in watcher.seen}) > len(first) // 2
    assert subscriber.end(len(glsns)) == sorted(glsns)


def test_a_jvm_that_is_killed_is_told_of(log: cutwater.Client, tmp_path: Path) -> None:
    log.create_topic("killed-in")
    log.append("killed-in", b"x")
    program = [sys.executable, str(Path(__file__).parent / "jvm_killed_program.py"), log.servers, str(tmp_path / "run")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=True)
    first, second = done.stdout.splitlines()[-2:]
    assert re.fullmatch(
        r"unavailable: pipeline 'killed': the JVM of Spark, process \d+, was killed \(SIGKILL\)\. The checkpoint is as "
        "it was: start the program again, in a new process, to go on from there",
        first,
    )
    assert re.search(r"unavailable: .*the JVM of Spark, process \d+, was killed \(SIGKILL\).*new process", second)
