"""Savepoints of a running pipeline: how long they take, how large they are, how much they delay the pipeline, and how
soon there is output again after its process was killed.

Run it alone: ``python -m benchmarks.savepoints``, optionally with a number of keys.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

import cutwater
import cutwater.spark
from cutwater.pipeline import Pipeline, ProcessFunction, ValueState, Watermark
from cutwater.spark.pipeline.runner import run_pipeline

KEYS = 1_000_000
ROWS = "user string, amount bigint"
PARTITIONS = 2
APPENDED = 50_000
SECONDS_MAX = 900.0
BEAT_SECONDS = 0.2
BEATS = 25
"""How many outputs are timed before the savepoint is taken, for comparison."""


class Remember(ProcessFunction):
    """Keeps state and a timer for every key, and emits output only for ``beat`` records."""

    total = ValueState("bigint", default=0)
    name = ValueState("string")

    def process(self, record: Any, ctx: Any) -> Any:
        self.total.set(self.total.get() + record.amount)
        self.name.set(f"{ctx.key} with something to remember")
        ctx.timers.at(ctx.timestamp + 86_400_000)
        return {"user": ctx.key, "total": self.total.get()} if record.user.startswith("beat") else None


def pipeline(servers: str) -> Pipeline:
    p = Pipeline("bench-savepoints", log=servers)
    rows = p.source("in", schema=ROWS, watermark=Watermark.ascending())
    rows.process(key="user", function=Remember(), uid="remember", schema="user string, total bigint").sink(
        "out", uid="out"
    )
    return p


class Beats:
    """Appends records at an interval, and notes when their output arrives."""

    def __init__(self, log: cutwater.Client) -> None:
        self._log, self._stopped = log, threading.Event()
        self.arrived: list[float] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._append, self._follow)]
        for thread in self._threads:
            thread.start()

    def _append(self) -> None:
        count = 0
        while not self._stopped.wait(BEAT_SECONDS):
            self._log.append("in", [{"user": f"beat {count}", "amount": 1}])
            count += 1

    def _follow(self) -> None:
        seen = 0
        while not self._stopped.wait(BEAT_SECONDS / 4):
            rows = self._log.table("out").num_rows
            if rows > seen:
                seen = rows
                self.arrived.append(time.monotonic())

    def wait(self, count: int) -> None:
        """Wait until ``count`` more outputs were seen."""
        wanted, deadline = len(self.arrived) + count, time.monotonic() + SECONDS_MAX
        while len(self.arrived) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError("the pipeline of the benchmark gives nothing")
            time.sleep(BEAT_SECONDS / 4)

    def longest(self, first: float, last: float) -> float:
        """Return the longest time without output that overlaps this span."""
        times = sorted(self.arrived)
        gaps = [(b - a) for a, b in pairwise(times) if b > first and a < last]
        return max(gaps, default=0.0)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


def child(servers: str, checkpoint: str) -> None:
    """Run the pipeline in a process of its own, which will be killed."""
    pipeline(servers).run(parallelism=PARTITIONS, checkpoint=checkpoint)


def filled(log: cutwater.Client, keys: int) -> None:
    log.create_topic("in", streams=2, schema=pa.schema({"user": pa.string(), "amount": pa.int64()}))
    for first in range(0, keys, APPENDED):
        users = [f"user-{i}" for i in range(first, min(first + APPENDED, keys))]
        log.append("in", pa.table({"user": users, "amount": pa.array([1] * len(users), pa.int64())}))


class Process:
    """A child that runs the pipeline, and is killed with all processes that it has started."""

    def __init__(self, log: cutwater.Client, checkpoint: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.savepoints", "child", log.servers, str(checkpoint)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def lines(keys: int = KEYS) -> Iterator[str]:
    """Yield the figures as rows of a table."""
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as made:
        place = Path(made)
        with cutwater.open(place / "data") as log:
            filled(log, keys)
            yield from _table(keys, _measured(log, place))


def _measured(log: cutwater.Client, place: Path) -> dict[str, str]:
    spark = cutwater.spark.session("bench", master=f"local[{PARTITIONS}]")
    spark.sparkContext.setLogLevel("ERROR")
    run = run_pipeline(pipeline(log.servers), spark=spark, parallelism=PARTITIONS, checkpoint=place / "1", wait=False)
    beats = Beats(log)
    found: dict[str, str] = {}

    def note(name: str, value: str) -> None:
        found[name] = value
        sys.stderr.write(f"{name}: {value}\n")

    try:
        beats.wait(BEATS)
        usual = _usual(beats)
        started = time.monotonic()
        savepoint = run.savepoint(place / "savepoint")
        ended = time.monotonic()
        beats.wait(2)
        note("savepoint while the pipeline runs, seconds", f"{ended - started:,.1f}")
        note("its size, MB", f"{savepoint.manifest.bytes / 1e6:,.1f}")
        note("its rows", f"{sum(state.rows for state in savepoint.manifest.operators):,}")
        note("longest time between outputs meanwhile, seconds", f"{beats.longest(started, ended):,.1f}")
        note("median time between outputs before, seconds", f"{usual:,.2f}")
        run.stop()
        started = time.monotonic()
        savepoint.verify()
        note("verify, seconds", f"{time.monotonic() - started:,.1f}")
        started = time.monotonic()
        run = run_pipeline(
            pipeline(log.servers), spark=spark, parallelism=PARTITIONS, checkpoint=place / "2", wait=False,
            from_savepoint=savepoint, replay_output=True,
        )  # fmt: skip
        beats.wait(1)
        note("start from the savepoint to first output, seconds", f"{time.monotonic() - started:,.1f}")
        run.stop()
        spark.stop()
        note("kill -9 of the process to first new output, seconds", f"{_recovered(log, beats, place / '2'):,.1f}")
    finally:
        beats.stop()
    return found


def _usual(beats: Beats) -> float:
    times = beats.arrived[-BEATS:]
    return statistics.median(b - a for a, b in pairwise(times))


def _recovered(log: cutwater.Client, beats: Beats, checkpoint: Path) -> float:
    first = Process(log, checkpoint)
    second = None
    try:
        beats.wait(3)
        first.kill()
        killed = time.monotonic()
        second = Process(log, checkpoint)
        # The log itself publishes soon what was decided before the kill: that does not count.
        time.sleep(1)
        beats.wait(1)
        return time.monotonic() - killed
    finally:
        first.kill()
        if second is not None:
            second.kill()


def _table(keys: int, found: dict[str, str]) -> Iterator[str]:
    yield from ("", "## Savepoints", "")
    yield f"A pipeline on {PARTITIONS} cores that keeps a number, a text and a timer for each of {keys:,} keys."
    yield from ("", "| what | |", "| --- | ---: |")
    for name, value in found.items():
        yield f"| {name} | {value} |"


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:4])
        return
    for text in lines(int(sys.argv[1]) if len(sys.argv) > 1 else KEYS):
        print(text, flush=True)


if __name__ == "__main__":
    # Spark's workers look the classes up by the module's name.
    import_module("benchmarks.savepoints").main()
