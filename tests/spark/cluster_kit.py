"""Clusters of real processes on this machine: Spark's own, with a master and two workers, and a log on three nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cutwater
from cutwater.admin import local_cluster
from cutwater.runtime import processes

LOOPBACK = {"SPARK_LOCAL_IP": "127.0.0.1"}


@contextmanager
def standalone(directory: Path) -> Iterator[tuple[str, list[int]]]:
    """A Spark cluster of one master and two workers on this machine: the master's address, and the workers' processes.
    For Spark they are on two, by their addresses:
    it starts no second attempt of a task on the machine that has the first one."""
    spark_class = Path(os.environ["SPARK_HOME"]) / "bin" / "spark-class"
    environment = os.environ | LOOPBACK
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, host: str, *arguments: str) -> str:
        path = directory / f"{name}-{host}.log"
        with path.open("wb") as output:
            command = [str(spark_class), f"org.apache.spark.deploy.{name.lower()}.{name}", "--host", host]
            running.append(
                subprocess.Popen(
                    [*command, "--port", "0", "--webui-port", "0", *arguments],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return str(path)

    def wait_for(path: str, pattern: str) -> str:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            found = re.search(pattern, Path(path).read_text(encoding="utf-8", errors="replace"))
            if found:
                return found[1]
            time.sleep(0.1)
        raise AssertionError(Path(path).read_text(encoding="utf-8", errors="replace"))

    try:
        master = wait_for(start("Master", "127.0.0.1"), r"Starting Spark master at (spark://[\d.:]+)")
        own = ("--cores", "1", "--memory", "1500m", "--work-dir", str(directory / "work"), master)
        workers = [start("Worker", host, *own) for host in ("127.0.0.1", "127.0.0.2")]
        for worker in workers:
            wait_for(worker, r"Successfully (registered) with master")
        yield master, [process.pid for process in running[1:]]
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def several_processes(directory: Path) -> Iterator[cutwater.Client]:
    """A log on three storage nodes."""
    cluster = local_cluster.start(directory, storage_nodes=3, metadata=1)
    try:
        with cutwater.connect(cluster.servers) as log:
            yield log
    finally:
        processes.stop([member.pid for member in cluster.processes() if member.pid], 5.0)
