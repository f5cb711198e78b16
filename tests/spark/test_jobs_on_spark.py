"""A pipeline by the command line, on real Spark: its driver and its JVM are killed, it is saved, rescaled and
cancelled, and the output topic has every row once.
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

import pyarrow as pa
import pytest

import cutwater
from cutwater.jobs.job_file import Job, JobDirectory, JobState
from cutwater.runtime import processes

pytestmark = pytest.mark.timeout(1_500)

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "spark" / "jobs_program.py"
PATIENCE = 500.0
ROWS = 30
FAST_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cutwater.cli", "pipeline", *arguments]


def until(condition: Callable[[], object], process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "the supervisor has ended"
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class Kit:
    def __init__(self, log: cutwater.Client, path: Path, process: subprocess.Popen[bytes]) -> None:
        self._log, self.path, self.process = log, path, process
        self._environment = environment(log)

    def job(self) -> Job | None:
        return JobDirectory(self.path / "jobs", "numbered").load()

    def running(self, is_new: Callable[[Job], bool] = lambda job: True) -> Job:
        """The job, when it runs and something of it is new."""

        def found() -> bool:
            job = self.job()
            return job is not None and job.state is JobState.RUNNING and is_new(job)

        until(found, self.process, "the job runs")
        job = self.job()
        assert job is not None
        return job

    def ask(self, *arguments: str) -> Any:
        done = subprocess.run(
            command(*arguments, "--jobs-dir", str(self.path / "jobs"), "-o", "json"),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def append(self) -> None:
        """So many rows more, in small batches."""
        start = self._log.table("in").num_rows
        for n in range(start, start + ROWS, 3):
            self._log.append("in", [{"k": "abc"[i % 3], "n": i} for i in range(n, n + 3)])

    def until_all_is_out(self) -> None:
        """Every row of the input once, each with its number among those of its key."""
        count = self._log.table("in").num_rows
        until(lambda: self.out() is not None and len(self.out()) >= count, self.process, "all rows are out")
        wanted = [{"k": "abc"[n % 3], "n": n, "seen": n // 3 + 1} for n in range(count)]
        assert sorted(self.out(), key=lambda row: row["n"]) == wanted

    def out(self) -> list[dict[str, Any]]:
        if not any(topic.name == "out" for topic in self._log.topics()):
            return []
        return self._log.table("out").select(["k", "n", "seen"]).to_pylist()


def environment(log: cutwater.Client) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    # None of these JVMs lives long enough for its compiler to pay.
    return {**os.environ, "PYTHONPATH": path, "JOBS_LOG": log.servers, "JAVA_TOOL_OPTIONS": FAST_START}


@contextmanager
def started(log: cutwater.Client, path: Path, *options: str) -> Iterator[Kit]:
    arguments = command("run", str(PROGRAM), "--jobs-dir", str(path / "jobs"), *options)
    with (path / "output").open("ab") as output:
        process = subprocess.Popen(arguments, env=environment(log), stdout=output, stderr=output)
    try:
        yield Kit(log, path, process)
    except AssertionError as error:
        logs = [path / "output", path / "jobs" / "numbered" / "job.log"]
        error.add_note("\n".join(log.read_text()[-4_000:] for log in logs if log.exists()))
        raise
    finally:
        # All that it has started ends with it.
        process.kill()
        process.wait()


def test_killed_saved_rescaled_and_cancelled(log: cutwater.Client, tmp_path: Path) -> None:
    log.create_topic("in", streams=2, schema=pa.schema({"k": pa.string(), "n": pa.int64()}))
    with started(log, tmp_path, "--parallelism", "2", "--restart", "fixed:delay=100ms,attempts=2") as kit:
        kit.append()
        kit.until_all_is_out()
        first = kit.running()
        # Output is in the log before Spark notes that the micro-batch is done. Only then can a restart go on from it.
        until(lambda: any(Path(first.checkpoint).rglob("commits/0")), kit.process, "Spark has noted a micro-batch")
        kit.append()
        os.kill(first.jvm, signal.SIGKILL)
        second = kit.running(lambda job: job.jvm not in (0, first.jvm))
        kit.append()
        os.kill(second.driver, signal.SIGKILL)
        third = kit.running(lambda job: job.driver not in (0, second.driver))
        kit.append()
        kit.until_all_is_out()
        # Nothing of the earlier lives is left.
        assert not any(map(processes.is_running, (first.driver, second.jvm)))
        assert (third.restarts, third.checkpoint) == (2, first.checkpoint)
        assert (first.restored, third.restored and third.restored.path) == (None, first.checkpoint)
        # A micro-batch tells of itself only when all of it is done.
        until(
            lambda: (kit.ask("describe", "numbered")["progress"] or {}).get("lag_records") == 0,
            kit.process,
            "it is known that nothing is left",
        )
        described = kit.ask("describe", "numbered")
        assert described["progress"]["state_rows"] > 0
        assert "was killed (SIGKILL)" in described["last_error"]["message"]
        place = str(tmp_path / "savepoints")
        saved = kit.ask("savepoint", "numbered", "--savepoint-dir", place)["savepoint"]
        kit.append()
        rescaled = kit.ask("rescale", "numbered", "--parallelism", "1", "--savepoint-dir", place)["savepoint"]
        kit.append()
        kit.until_all_is_out()
        fourth = kit.running()
        assert (fourth.parallelism, fourth.from_savepoint, Path(fourth.checkpoint).name) == (1, rescaled, "run-2")
        assert (fourth.restored and fourth.restored.path, fourth.restored and fourth.restored.batch) == (rescaled, None)
        kit.ask("cancel", "numbered")
        assert kit.process.wait(PATIENCE) == 0
        assert not any(map(processes.is_running, (fourth.driver, fourth.jvm)))
    (job,) = kit.ask("list")
    assert job["state"] == "cancelled"
    assert "TransformWithStateInPySparkStateServer" not in (tmp_path / "jobs" / "numbered" / "job.log").read_text()
    look_into(saved, 4 * ROWS // 3)
    changed = savepoint_command("diff", saved, rescaled)
    assert changed["glsn"] >= 0
    assert {operator["uid"] for operator in changed["operators"]} <= {"number"}


def savepoint_command(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "cutwater.cli", "savepoint", *arguments, "-o", "json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return json.loads(done.stdout)


def look_into(savepoint: str, seen: int) -> None:
    assert savepoint_command("verify", savepoint)["intact"]
    rows = savepoint_command("inspect", savepoint, "--uid", "number")["number"]
    assert {row["key"]["k"]: row["state_seen"] for row in rows} == dict.fromkeys("abc", seen)
