"""A real HDFS for tests: a name node and a data node in one process, on loopback (Hadoop's mini cluster).

Its classes come from Maven's local repository, and with the first test from a registry (60 MB). Without ``mvn``, or
without a registry, tests are skipped, unless ``TESTS_NEED_HDFS=1`` says that they must run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NEEDED = "TESTS_NEED_HDFS"
POM = Path(__file__).parent / "mini_hdfs" / "pom.xml"
FETCH_SECONDS, START_SECONDS, LIFE_SECONDS = 300, 120, 900
"""It ends by itself after its life, also if the test was killed."""
MAIN = "org.apache.hadoop.test.MiniDFSClusterManager"


def _missing(why: str) -> None:
    if os.environ.get(NEEDED) == "1":
        pytest.fail(f"{why}; {NEEDED}=1 says that tests on HDFS must run")
    pytest.skip(f"{why}: no test on HDFS")


def classes(directory: Path) -> str:
    """The class path. Its version of Hadoop is that of PySpark's jars."""
    maven = shutil.which("mvn")
    if maven is None:
        _missing("there is no mvn")
    jars = Path(os.environ["SPARK_HOME"]) / "jars"
    (client,) = jars.glob("hadoop-client-api-*.jar")
    version = client.stem.removeprefix("hadoop-client-api-")
    found = directory / "classes"
    asked = [str(maven), "-B", "-q", "-f", str(POM), f"-Dhadoop.version={version}", f"-Dmdep.outputFile={found}"]
    said = ""
    # What is in the local repository needs no registry.
    for more in (["-o"], []):
        try:
            done = subprocess.run(
                [*asked, *more, "dependency:build-classpath"],
                capture_output=True,
                text=True,
                timeout=FETCH_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            said = f"it took longer than {FETCH_SECONDS} s"
            continue
        if done.returncode == 0:
            return f"{found.read_text().strip()}:{jars}/*"
        said = next((line for line in done.stdout.splitlines() if "ERROR" in line), done.stderr)[:300]
    _missing(f"mvn cannot get Hadoop's mini cluster {version}: {said}")
    raise AssertionError


@contextmanager
def mini_hdfs(directory: Path) -> Iterator[str]:
    """Yields ``hdfs://127.0.0.1:port``."""
    java = str(Path(os.environ["JAVA_HOME"]) / "bin" / "java") if os.environ.get("JAVA_HOME") else "java"
    details, output = directory / "details.json", directory / "output"
    options = [f"-Dtest.build.data={directory / 'data'}", f"-Djava.io.tmpdir={directory}", "-Xmx400m"]
    command = [java, *options, "-cp", classes(directory), MAIN, "-datanodes", "1", "-format"]
    with output.open("wb") as log:
        process = subprocess.Popen(
            ["timeout", "-s", "KILL", str(LIFE_SECONDS), *command, "-writeDetails", str(details)],
            cwd=directory,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.fullmatch(r"\{.*\}\s*", details.read_text() if details.exists() else "")):
            assert process.poll() is None, output.read_text()[-3_000:]
            assert time.monotonic() < deadline, output.read_text()[-3_000:]
            time.sleep(0.1)
        yield f"hdfs://127.0.0.1:{json.loads(found[0])['namenode_port']}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
