"""Pipelines on real Spark: the output topics equal ``Pipeline.test``, in order, at any parallelism and micro-batch
size, also after the driver was killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import cutwater
from cutwater.errors import PipelineFailed
from cutwater.pipeline import Pipeline, ProcessFunction, ValueState, Watermark
from cutwater.savepoints.files import LocalFiles
from cutwater.spark.savepoint.checkpoints import Checkpoint
from tests.spark.pipeline_kit import written
from tests.spark.random_pipelines import expected, filled, random_pipeline

ROOT = Path(__file__).resolve().parents[2]
KILL_SECONDS = 400.0
PATIENCE = 600
"""Seconds: a query is started in less than ten, but not where many others are."""
SCHEMA = "k string, n bigint"


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("seed", range(8))
def test_a_random_pipeline_gives_what_one_thread_gives(
    log: cutwater.Client, spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    pipeline, choice = random_pipeline(seed, f"spark-{seed}", log.servers)
    filled(log, pipeline, choice, 40)
    until = int(log.tail())
    wanted = expected(log, pipeline, until)
    pipeline.run(
        spark=spark,
        until=until,
        drain=True,
        parallelism=(1, 2, 5)[seed % 3],
        slices=5,
        checkpoint=tmp_path / "checkpoint",
        max_records_per_trigger=(None, 25, 10, None)[seed % 4],
    )
    for topic, rows in wanted.items():
        assert written(log, topic) == rows, f"seed {seed}, topic {topic}"


@pytest.fixture
def killed() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("seed", [8, 9])
def test_after_the_driver_was_killed_nothing_is_missing_or_doubled(
    log: cutwater.Client,
    spark: SparkSession,
    tmp_path: Path,
    killed: list[subprocess.Popen[bytes]],
    seed: int,
) -> None:
    name, checkpoint = f"killed-{seed}", tmp_path / "checkpoint"
    pipeline, choice = random_pipeline(seed, name, log.servers)
    filled(log, pipeline, choice, 35)
    until = int(log.tail())
    wanted = expected(log, pipeline, until)
    command = [sys.executable, "-m", "tests.spark.run_random_pipeline"]
    arguments = [str(seed), name, log.servers, str(checkpoint), str(until)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            command + arguments,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    killed.append(process)
    deadline = time.monotonic() + KILL_SECONDS
    while len(list((checkpoint / "commits").glob("[0-9]*"))) < 1:
        assert process.poll() is None, (tmp_path / "output").read_text()[-5_000:]
        assert time.monotonic() < deadline, "no micro-batch was committed in time"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if seed == 9:
        # A checkpoint goes on wherever it is moved to, though Spark's files name places.
        assert list((checkpoint / "state").iterdir())
        checkpoint = checkpoint.rename(tmp_path / "moved")
    pipeline.run(
        spark=spark, until=until, drain=True, parallelism=2, slices=4, checkpoint=checkpoint, max_records_per_trigger=10
    )
    for topic, rows in wanted.items():
        assert written(log, topic) == rows, f"seed {seed}, topic {topic}"


class Counted(ProcessFunction):
    """Leaves a line for each call."""

    n = ValueState("bigint", default=0)

    def __init__(self, path: str) -> None:
        self.path = path

    def process(self, record: Any, ctx: Any) -> Any:
        with Path(self.path).open("a") as calls:
            calls.write(f"{ctx.glsn}\n")
        self.n.set(self.n.get() + 1)
        ctx.output("odd", {"k": ctx.key, "n": self.n.get()})
        if record.n < 0:
            raise ArithmeticError("below nothing")
        return {"k": ctx.key, "n": self.n.get()}


def counting(log: cutwater.Client, name: str, path: Path, numbers: list[int]) -> Pipeline:
    """One operator with two sinks and a side output."""
    p = Pipeline(name, log=log.servers)
    source = p.source(f"{name}-in", schema=SCHEMA)
    log.create_topic(f"{name}-in", streams=2, schema=pa.schema({"k": pa.string(), "n": pa.int64()}))
    log.append(f"{name}-in", [{"k": "abc"[i % 3], "n": number} for i, number in enumerate(numbers)])
    made = source.process(key="k", function=Counted(str(path)), uid="counted", schema=SCHEMA)
    made.sink(f"{name}-one", uid="one")
    made.filter(lambda row: row.n % 2 == 0).sink(f"{name}-two", uid="two")
    made.side("odd", SCHEMA).sink(f"{name}-three", uid="three")
    return p


@pytest.mark.timeout(PATIENCE)
def test_user_code_runs_once_per_record_and_there_is_one_state_store(
    log: cutwater.Client, spark: SparkSession, tmp_path: Path
) -> None:
    """'Two sinks and a … side output from one operator: user code ran once per record (counted), one state store.'"""
    calls = tmp_path / "calls"
    pipeline = counting(log, "once", calls, list(range(20)))
    run = pipeline.run(
        spark=spark, until="now", drain=True, parallelism=2, slices=4, checkpoint=tmp_path / "checkpoint"
    )
    assert len(calls.read_text().split()) == 20
    assert len(set(calls.read_text().split())) == 20
    assert run.progress is not None
    assert len(run.progress["stateOperators"]) == 1
    assert [len(written(log, f"once-{name}")) for name in ("one", "two", "three")] == [20, 9, 20]


@pytest.mark.timeout(PATIENCE)
def test_an_exception_in_user_code_is_told_in_our_words(
    log: cutwater.Client, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = counting(log, "fails", tmp_path / "calls", [1, 2, -1])
    with pytest.raises(PipelineFailed) as caught:
        pipeline.run(spark=spark, available_now=True, parallelism=1, slices=1, checkpoint=tmp_path / "checkpoint")
    error = caught.value
    last = max(record.glsn for record in log.subscribe("fails-in", follow=False))
    assert (error.pipeline, error.uid, error.glsn) == ("fails", "counted", last)
    assert re.search(
        r"nothing \(test_pipelines_on_spark\.py, line \d+, in process\), on the record Row\(k='c', n=-1\)", str(error)
    )
    assert "java" not in str(error)
    assert not written(log, "fails-one")


class Heartbeat(ProcessFunction):
    """A timer that registers the next one."""

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.at(ctx.timestamp)

    def on_timer(self, time: int, ctx: Any) -> Any:
        ctx.timers.at(time + 1)
        return {"k": ctx.key, "n": time}


def test_timers_registered_while_the_input_drains_fire_so_often(
    log: cutwater.Client, spark: SparkSession, tmp_path: Path
) -> None:
    log.create_topic("beats", schema={"k": pa.string(), "n": pa.int64()})
    log.append("beats", [{"k": key, "n": 5} for key in "abc"])
    p = Pipeline("beating", log=log.servers)
    stream = p.source("beats", event_time="n", watermark=Watermark.ascending())
    stream.process(key="k", function=Heartbeat(), uid="x", schema=SCHEMA).sink("beaten", uid="out")
    run = p.run(spark=spark, until="now", drain=True, drain_firings=3, slices=4, checkpoint=tmp_path / "checkpoint")
    expected = p.test({"beats": [{"k": key, "n": 5} for key in "abc"]}, drain_firings=3)
    assert [(row["k"], row["n"]) for row in written(log, "beaten")] == [(r["k"], r["n"]) for r in expected["beaten"]]
    assert len(expected["beaten"]) == 3 * 4
    assert run.left_timers == {"x": 3}
    # What is stored with the micro-batch holds, not what a later run says.
    offset = Checkpoint(str(tmp_path / "checkpoint"), LocalFiles()).point().offset
    assert (offset.ended, offset.firings) == (True, 3)
    p.run(spark=spark, until="now", drain=True, drain_firings=9, slices=4, checkpoint=tmp_path / "checkpoint")
    assert len(written(log, "beaten")) == 3 * 4
