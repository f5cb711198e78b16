"""Takeovers from drivers that are not dead: they are paused in the middle of a micro-batch, succeeded, and resumed.

A driver of the first assignment is stopped by SIGSTOP, with its JVM and all its workers, at each point of
``paused_program``. The second assignment begins from its checkpoint and does three micro-batches. Then the first driver
goes on; both are killed. The third assignment must give what one undisturbed run gives, in output and in state.

In the suite, one point; ``make soak`` has all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

import cutwater
import cutwater.savepoints
from cutwater.errors import RunFenced
from cutwater.jobs.child import session_members
from cutwater.jobs.locks import LOCK_FILE
from cutwater.savepoints.files import LocalFiles
from cutwater.spark.savepoint.checkpoints import NOTE, Checkpoint
from cutwater.spark.savepoint.succession import mark_of
from tests.soak import rounds
from tests.spark import paused_program
from tests.spark.paused_program import (
    BATCH,
    DECIDED,
    FIRST,
    PARALLELISM,
    PAUSES,
    PLANNED,
    POINTS,
    READING,
    SLICES,
    STAGED,
    STATE,
    Plan,
    of_epoch,
)
from tests.spark.pipeline_kit import written
from tests.spark.random_pipelines import expected

pytestmark = pytest.mark.timeout(rounds(900, 3_600))

IN_SUITE = (STATE,)
AFTER = {"offsets": PLANNED, "state": STAGED, "the log": DECIDED, "commits": None}
"""What a micro-batch leaves behind, in this order, and the point after it. After the last one, it is over."""
WITHIN = (READING, STATE)
"""Points in the middle of reading, and in the middle of the state."""
ONCE = {"metadata", NOTE, LOCK_FILE}
"""Files of a checkpoint that no micro-batch writes."""
ROOT = Path(__file__).resolve().parents[2]
ROWS = 600
PATIENCE_SECONDS = 300.0
SECOND, THIRD = FIRST + 1, FIRST + 2
OUTPUTS = ("counts", "windows")


@contextmanager
def driver(plan: Plan, output: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a JVM that runs the pipelines of all points. It is killed at the end, with all that it started."""
    command = [sys.executable, "-c", "from tests.spark import paused_program; paused_program.start()"]
    paths = os.pathsep.join((str(Path(cutwater.__file__).parents[1]), str(ROOT)))
    with output.open("wb") as log:
        process = subprocess.Popen(
            [*command, msgspec.json.encode(plan).decode()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    except BaseException:
        print(output.read_text(errors="replace")[-6_000:])
        raise
    finally:
        to_all(process, signal.SIGKILL)
        process.wait()


def to_all(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a driver, its JVM and Spark's workers. Some may start others meanwhile."""
    for _ in range(3):
        for pid in session_members(process.pid) or []:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert process.poll() is None, f"the driver ended before {what}"
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


def is_paused(plan: Plan, point: str) -> bool:
    """Whether the driver waits at a point, and its files are as they are there."""
    if not (Path(plan.directory) / f"{point}.reached").exists():
        return False
    checkpoint = Checkpoint(plan.checkpoint(point), LocalFiles())
    stores = [(Path(checkpoint.path) / "state" / "0" / str(number)) for number in range(PARALLELISM)]
    committed = sum((store / f"{BATCH + 1}.changelog").exists() for store in stores)
    wanted = {PLANNED: 0, READING: 0, STATE: 1, STAGED: PARALLELISM, DECIDED: PARALLELISM}[point]
    # Spark writes files of state in the background.
    return committed == wanted and (checkpoint.planned()[-1], checkpoint.committed()[-1]) == (BATCH, BATCH - 1)


def decided(log: cutwater.Client, plan: Plan, point: str) -> int:
    """The last decided batch of a pipeline."""
    (run,) = log.find_runs(f"{plan.prefix}-{point}")
    return int(run.last_batch)


def append(log: cutwater.Client, topic: str, start: int, count: int) -> None:
    for first in range(start, start + count, 20):
        log.append(topic, [b"%d" % n for n in range(first, first + 20)])


def test_the_points_are_all_there_are() -> None:
    """Where a driver can be between two things that outlive it. That a checkpoint has no others is checked below."""
    assert {*filter(None, AFTER.values()), *WITHIN} == set(POINTS)
    named = {name: value for name, value in vars(paused_program).items() if name.isupper() and value in POINTS}
    assert sorted(named.values()) == sorted(POINTS)
    assert set(IN_SUITE) < set(POINTS)


def test_a_paused_driver_changes_nothing_after_it_was_succeeded(
    log: cutwater.Client, spark: SparkSession, tmp_path: Path
) -> None:
    topic, points = "paused-in", rounds(IN_SUITE, POINTS)
    log.create_topic(topic, streams=2)
    append(log, topic, 0, ROWS)
    first = Plan(log.servers, topic, "paused", str(tmp_path), points, FIRST)
    second = of_epoch(first, SECOND, FIRST, trigger="1 second")
    third = of_epoch(first, THIRD, SECOND)
    with driver(first, tmp_path / "first.log", **{PAUSES: str(tmp_path)}) as old:
        for point in points:
            until(lambda point=point: is_paused(first, point), old, f"it paused at {point!r}")  # type: ignore[misc]
            assert decided(log, first, point) == BATCH - (point != DECIDED), point
            assert set(os.listdir(first.checkpoint(point))) == ONCE | AFTER.keys() - {"the log"}
        to_all(old, signal.SIGSTOP)
        with driver(second, tmp_path / "second.log") as new:
            for point in points:
                until(
                    lambda point=point: decided(log, first, point) >= BATCH + 3,  # type: ignore[misc]
                    new,
                    f"the successor did three micro-batches of {point!r}",
                )
            for point in points:
                mark = mark_of(Checkpoint(second.checkpoint(point), LocalFiles()))
                assert mark is not None
                assert (mark.batch, mark.is_done) == (BATCH - (point != DECIDED), True), point
            (tmp_path / "go").touch()
            to_all(old, signal.SIGCONT)
            for point in points:
                until(first.ended(point).exists, old, f"the earlier driver gave up {point!r}")
                assert first.ended(point).read_text() == RunFenced.code, point
                assert not second.ended(point).exists(), second.ended(point).read_text()
    append(log, topic, ROWS, 200)
    judge(log, spark, third, tmp_path)


def judge(log: cutwater.Client, spark: SparkSession, third: Plan, directory: Path) -> None:
    """Run the third assignment to the end of the log, beside a pipeline that nothing disturbs, and compare both with
    each other, and the output with that of one thread. That has the rows of an end of the input, too, which come
    last."""
    end = int(log.tail())
    run = third.pipeline("undisturbed").run(
        spark=spark, until=end, checkpoint=directory / "undisturbed", parallelism=PARALLELISM, slices=SLICES
    )
    oracle = run.savepoint(directory / "oracle")
    assert oracle.table("count").num_rows == 7
    wanted = expected(log, third.pipeline("undisturbed"), end)
    whole = {name: written(log, f"paused-undisturbed-{name}") for name in OUTPUTS}
    for name, rows in whole.items():
        assert len(rows) > 0
        assert rows == wanted[f"paused-undisturbed-{name}"][: len(rows)], name
    for point in third.points:
        kept = third.run(point, spark=spark, until=end).savepoint(directory / "saved" / point)
        difference = cutwater.savepoints.diff(oracle, kept)
        assert (difference.glsn, difference.watermark_ms, difference.operators) == (0, 0, ()), (point, difference)
        assert difference.is_empty, (point, difference)
        for name, rows in whole.items():
            assert written(log, f"paused-{point}-{name}") == rows, (point, name)
