"""A job of the cluster with everything real: its agents, a standalone Spark, and an HDFS for its checkpoint.

Only with ``make soak``: the parts have tests of their own in the suite.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cutwater
from cutwater.admin import local_cluster
from cutwater.agent.processes.watchdog import kill_members
from cutwater.agent.start import STATE
from cutwater.runtime import processes
from tests.soak import IS_SOAK
from tests.spark import programs
from tests.spark.cluster_kit import LOOPBACK, standalone
from tests.spark.hdfs_kit import mini_hdfs
from tests.spark.pipeline_kit import written
from tests.spark.random_pipelines import expected

pytestmark = [
    pytest.mark.skipif(not IS_SOAK, reason="runs with make soak"),
    pytest.mark.timeout(2_400),
]

PATIENCE_SECONDS = 400
ROWS = 200
PATHS = os.pathsep.join((str(Path(cutwater.__file__).parents[1]), str(Path(__file__).parents[2])))
PROGRAM = """
from tests.spark import programs

p = programs.pipeline("counting", "", "job-in")
"""


def command(directory: Path, *words: object) -> Any:
    """Run a command of the command line, and return its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "cutwater.cli", *map(str, words), "--dir", str(directory), "-o", "json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS + 60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def agents(cluster: Path, directory: Path, master: str, hdfs: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two agents that share their roots, by name. What they have started ends with the test."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    roots = [(f"--{kind}-root", f"default={hdfs}/{kind}s,shared") for kind in ("checkpoint", "savepoint")]
    variables = [word for name in ("PYTHONPATH", *LOOPBACK) for word in ("--job-env", name)]
    options = [*(word for root in roots for word in root), *variables, "--master", master, "--dir", str(cluster)]
    start = (sys.executable, "-m", "cutwater.cli", "agent", "start")
    try:
        for name in ("one", "other"):
            with (directory / f"{name}.log").open("wb") as log:
                started[name] = subprocess.Popen(
                    [*start, "--name", name, "--work-dir", str(directory / name), *options],
                    env={**os.environ, **LOOPBACK, "PYTHONPATH": PATHS},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        yield started
    finally:
        for name, agent in started.items():
            agent.kill()
            agent.wait()
            state = directory / name / STATE
            if state.exists():
                kill_members(json.loads(state.read_text())["mark"], seconds=10.0)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(1.0)


def test_a_job_loses_a_worker_of_spark_and_its_agent(swift_start: None, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster"
    places = [tmp_path / name for name in ("hdfs", "spark", "agents")]
    for place in places:
        place.mkdir()
    program = tmp_path / "counting.py"
    program.write_text(PROGRAM)
    started = local_cluster.start(cluster, storage_nodes=3, metadata=1)
    try:
        with (
            mini_hdfs(places[0]) as hdfs,
            standalone(places[1]) as (master, workers),
            agents(cluster, places[2], master, hdfs) as running,
            cutwater.connect(started.servers) as log,
        ):
            log.create_topic("job-in", streams=2)
            appended = 0

            def all_counted(what: str) -> None:
                """Append some more, and wait until the job has counted them."""
                nonlocal appended
                for n in range(appended, appended + ROWS, 20):
                    log.append("job-in", [b"%d" % i for i in range(n, n + 20)])
                appended += ROWS
                until(lambda: sum(row["n"] > 0 for row in written(log, "counting-counts")) >= appended, what)

            timeout = ("--timeout", PATIENCE_SECONDS)
            settings = ("--conf", "spark.executor.memory=600m", "--conf", "spark.cores.max=2")
            command(cluster, "job", "submit", program, "--name", "counting", "--parallelism", 2, *settings, *timeout)
            all_counted("the first records")
            os.kill(workers[0], signal.SIGKILL)
            all_counted("records after a worker was killed")
            first = command(cluster, "job", "describe", "counting")["job"]["assignment"]
            running[first["agent"]].kill()
            all_counted("records after the agent was killed")
            then = command(cluster, "job", "describe", "counting")["job"]["assignment"]
            assert (then["agent"], then["epoch"]) != (first["agent"], first["epoch"])
            command(cluster, "job", "rescale", "counting", "--parallelism", 3, *timeout)
            all_counted("records after it was rescaled")
            command(cluster, "job", "stop", "counting", *timeout)
            job = command(cluster, "job", "describe", "counting")
            assert (job["phase"], job["job"]["version"]) == ("stopped", 2)
            wanted = expected(log, programs.pipeline("counting", log.servers, "job-in"), int(log.tail()))
            for topic, rows in wanted.items():
                # The rows of the end of the input, which the job has not seen, come last.
                found = written(log, topic)
                assert found == rows[: len(found)], topic
    finally:
        processes.stop([member.pid for member in started.processes() if member.pid], 5.0)
