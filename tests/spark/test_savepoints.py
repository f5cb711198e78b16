"""Savepoints on real Spark: what a pipeline gives and keeps is what one thread gives, over stops, changes and moves."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import cutwater
from cutwater.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    OutputExists,
    Refused,
    SavepointDamaged,
)
from cutwater.pipeline import Pipeline
from cutwater.pipeline.keyed_state.keys import key_of_bytes
from cutwater.savepoints import Savepoint, delete_savepoint, open_savepoint
from cutwater.spark.pipeline.operator import dropped_late
from cutwater.spark.savepoint.files import HadoopFiles
from cutwater.spark.savepoints import frame, new_savepoint, take_savepoint
from tests.spark.pipeline_kit import placed, written
from tests.spark.savepoint_programs import FixedTotals, Totals, payments, reminders

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = pa.schema({"user": pa.string(), "amount": pa.int32(), "at": pa.int64()})
OUTPUTS = ("out", "out-windows", "out-limits")
KEYS = 100_000
PATIENCE = 900
SECONDS_MAX = 300.0


def paid(log: cutwater.Client, choice: random.Random, first: int, count: int) -> None:
    """Payments in disorder, on two log streams."""
    for i in range(first, first + count, 20):
        rows = []
        for k in range(i, i + 20):
            # Some come too late for their windows.
            at = 1_000 * k + choice.randint(0, 4_000) - choice.choice([0] * 20 + [50_000])
            rows.append({"user": f"u{choice.randint(0, 12)}", "amount": choice.randint(1, 99), "at": at})
        log.append("payments", rows, stream=choice.choice(log.topic("payments").streams))


def kept(savepoint: Savepoint, uid: str, state: str) -> dict[Any, Any]:
    rows = savepoint.table(uid).to_pylist()
    found = {key_of_bytes(row["key_bytes"]): row[f"state_{state}"] for row in rows if row["key_bytes"]}
    return {key: value for key, value in found.items() if value is not None}


def same_state(savepoint: Savepoint, oracle: Any) -> None:
    """Whether a savepoint has what ``Pipeline.test`` has kept."""
    n = {key: own["n"] for key, own in oracle.state("totals").items() if "n" in own}
    assert kept(savepoint, "totals", "n") == n
    rows = savepoint.table("totals").to_pylist()
    timers = sorted((time, row["key_bytes"]) for row in rows for time in row["event_timers"] or ())
    assert [(time, key_of_bytes(data)) for time, data in timers] == [
        (own.time, own.key) for own in oracle.timers("totals")
    ]
    windows = {
        key: sorted((pane["start"], pane["acc0"], pane["acc1"]) for pane in panes)
        for key, panes in kept(savepoint, "windows", "windows").items()
    }
    assert windows == {
        key: sorted((span[0], *values) for span, values in own["windows"].items())
        for key, own in oracle.state("windows").items()
    }
    dropped = oracle.dropped_late("windows")
    assert savepoint.operator("windows").dropped_late == dropped > 0
    limits = [row["state_limit"] for row in savepoint.table("limits").to_pylist()]
    assert list(map(dict, limits)) == [oracle.broadcast_state("limits")["limit"]]


@pytest.mark.timeout(PATIENCE)
def test_stopped_scaled_moved_changed_and_started_again(spark: SparkSession, tmp_path: Path) -> None:
    """The six uses, in one story: pause, archive, move to another directory and a copy of the log, rescale 2 → 5 → 1,
    two programs side by side, a repaired program that processes again."""
    choice = random.Random(8)
    here, there = tmp_path / "here", tmp_path / "there"
    with cutwater.open(here / "data") as log:
        log.create_topic("payments", streams=2, schema=SCHEMA)
        paid(log, choice, 0, 200)
        p = payments("pays", log.servers, Totals(), "out")
        run = p.run(
            spark=spark, available_now=True, parallelism=2, slices=5, checkpoint=here / "run-1", retain=10,
            max_records_per_trigger=90,
        )  # fmt: skip
        committed = sorted((here / "run-1" / "commits").iterdir(), key=lambda path: int(path.name))
        assert len(committed) > 1
        # As if it had been stopped between what it publishes and what it notes in the checkpoint.
        committed[-1].unlink()
        first = run.stop(savepoint=here / "first")
        assert first is not None
        assert committed[-1].exists()
        same_state(first, p.test(placed(log, p), drain=False))
        assert first.manifest.run.batch == len(committed) - 1
    shutil.copytree(here, there)
    shutil.rmtree(here)

    with cutwater.open(there / "data") as log:
        p = payments("pays", log.servers, Totals(), "out")
        damaged_is_refused(spark, p, there)
        paid(log, choice, 200, 100)
        run = p.run(
            spark=spark, available_now=True, parallelism=5, slices=7, checkpoint=there / "run-2",
            from_savepoint=there / "first",
        )  # fmt: skip
        assert run.restoration is not None
        assert not run.restoration.left_behind
        with pytest.raises(DeadlineExceeded, match=r"late was not done within 0.001 s, and was given up"):
            run.savepoint(there / "late", timeout=0.001)
        with pytest.raises(Refused, match="half-written"):
            open_savepoint(there / "late")
        second = run.savepoint(there / "second")
        same_state(second, p.test(placed(log, p), drain=False))
        # Also those of before the savepoint, and whichever slice had them.
        assert dropped_late(run.progress or {}) == {"windows": second.operator("windows").dropped_late}
        as_frame = frame(spark, second.path, "totals").selectExpr("key.user", "state_n").collect()
        assert {row[0]: row[1] for row in as_frame} == kept(second, "totals", "n")
        through_hadoop(spark, second)
        before = {topic: len(written(log, topic)) for topic in OUTPUTS}

        paid(log, choice, 300, 60)
        until = int(log.tail())
        wanted = p.test(placed(log, p))
        p.run(
            spark=spark, until=until, drain=True, parallelism=1, slices=1, checkpoint=there / "run-3",
            from_savepoint=second,
        )  # fmt: skip
        for topic in OUTPUTS:
            assert written(log, topic) == wanted[topic]
        same_state(take_savepoint(there / "run-3", there / "third", spark=spark), wanted)
        after = {topic: wanted[topic][before[topic] :] for topic in OUTPUTS}
        beside_and_again(spark, log, there, after, until)
        assert len(written(log, "out")) == len(wanted["out"]) + len(after["out"])


def damaged_is_refused(spark: SparkSession, p: Pipeline, place: Path) -> None:
    shutil.copytree(place / "first", place / "damaged")
    file = place / "damaged" / open_savepoint(place / "damaged").manifest.files[1].path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(SavepointDamaged, match=file.name):
        p.run(spark=spark, available_now=True, checkpoint=place / "never", from_savepoint=place / "damaged")
    assert not any((place / "never" / name).exists() for name in ("cutwater.json", "metadata", "offsets", "state"))
    with pytest.raises(AlreadyExists, match="already belongs to a pipeline"):
        p.run(spark=spark, available_now=True, checkpoint=place / "run-1", from_savepoint=place / "first")
    with pytest.raises(Refused, match=r"there/run-1 was moved or copied from file:.*here/run-1, .*Run the pipeline"):
        take_savepoint(place / "run-1", place / "gone", spark=spark)
    with pytest.raises(NotFound, match="does not have micro-batch 77"):
        take_savepoint(place / "run-1", place / "never", spark=spark, batch=77)
    with pytest.raises(InvalidArgument, match="give from_savepoint"):
        p.run(spark=spark, available_now=True, checkpoint=place / "never", allow_non_restored_state=True)
    with pytest.raises(OutputExists, match=r"never would publish rows of that input again\..*--start \d+"):
        p.run(spark=spark, available_now=True, checkpoint=place / "never")
    assert not any((place / "never" / name).exists() for name in ("cutwater.json", "metadata", "offsets", "state"))
    other = Pipeline("pays", log=p.log)
    other.source("payments").sink("else", uid="else")
    with pytest.raises(Refused, match="has state of 'totals', 'windows', 'limits'"):
        other.run(spark=spark, available_now=True, checkpoint=place / "never", from_savepoint=place / "first")
    with pytest.raises(Refused, match="operator 'limits' was there before, and is not now; operator 'totals' was"):
        other.run(spark=spark, available_now=True, checkpoint=place / "run-1", parallelism=2, slices=5)


def through_hadoop(spark: SparkSession, savepoint: Savepoint) -> None:
    """The same files, as Hadoop's file systems show them."""
    files, place = HadoopFiles(spark), f"file://{savepoint.path}"
    found = open_savepoint(place, files=files)
    assert found.manifest == savepoint.manifest
    found.verify()
    assert found.table("totals").equals(savepoint.table("totals"))
    files.write(f"{place}/../note/text", b"1")
    files.write(f"{place}/../note/text", b"2")
    assert files.read(f"{place}/../note/text") == b"2"
    assert files.list(f"{place}/../note") == ["text"]
    files.delete(f"{place}/../note")
    assert not files.exists(f"{place}/../note")


class Keeping:
    """A file system that deletes nothing."""

    def __init__(self, system: Any) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        assert name != "delete", "a file is there until another one takes its place"
        return getattr(self._system, name)


def test_a_file_of_hadoop_is_there_until_another_takes_its_place(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = HadoopFiles(spark)
    at, place = files._at, f"file://{tmp_path}/note/text"
    monkeypatch.setattr(files, "_at", lambda path: (Keeping(at(path)[0]), at(path)[1]))
    for data in (b"1", b"22"):
        files.write(place, data)
        assert files.read(place) == data
        assert files.list(f"file://{tmp_path}/note") == ["text"]


def beside_and_again(
    spark: SparkSession, log: cutwater.Client, place: Path, after: dict[str, list[dict[str, Any]]], until: int
) -> None:
    """A repaired program under another name from the same savepoint, and one under the same name that repeats what the
    other has given ``after`` it.
    """
    fixed = [{**row, "total": 10 * row["total"]} for row in after["out"]]

    beside = payments("beside", log.servers, FixedTotals(), "beside", reordered=True)
    run = beside.run(
        spark=spark, until=until, drain=True, parallelism=2, slices=3, checkpoint=place / "run-b",
        from_savepoint=place / "second",
    )  # fmt: skip
    assert run.restoration is not None
    assert run.restoration.empty == ("totals.fresh",)
    assert written(log, "beside") == fixed
    assert written(log, "beside-windows") == after["out-windows"]
    assert written(log, "beside-limits") == after["out-limits"]
    alone = beside.test(placed(log, beside, until))
    same_state(take_savepoint(place / "run-b", place / "besides", spark=spark), alone)

    again = payments("pays", log.servers, FixedTotals(), "out")
    options: dict[str, Any] = {
        "spark": spark, "until": until, "drain": True, "parallelism": 2, "slices": 3, "checkpoint": place / "run-4",
        "from_savepoint": place / "second",
    }  # fmt: skip
    with pytest.raises(OutputExists, match=r"'pays' has published .* the savepoint .*second would publish"):
        again.run(**options)
    again.run(**options, replay_output=True)
    assert written(log, "out")[-len(fixed) :] == fixed
    ended = take_savepoint(place / "run-4", place / "ended", spark=spark)
    assert ended.manifest.ended
    same_state(ended, alone)
    with pytest.raises(Refused, match="had ended"):
        again.run(**{**options, "checkpoint": place / "run-5", "from_savepoint": ended})


@pytest.mark.timeout(PATIENCE)
def test_many_keys_with_timers_and_lists_over_other_numbers(
    log: cutwater.Client, spark: SparkSession, tmp_path: Path
) -> None:
    """100,000 keys, made from a table, over 3 and then 5 slices, at another max_parallelism; and 8 items over 2
    partitions, then 3."""
    log.create_topic("clock", schema=SCHEMA)
    users = [f"user {i}" for i in range(KEYS)]
    times = [1_000 + i % 97 for i in range(KEYS)]
    seen = pa.array(range(KEYS), pa.int64())
    table = pa.table({"user": users, "seen": seen, "event_timers": [[time] for time in times]})
    p = reminders(log.servers, 2)
    frame_of = {"reminder": spark.createDataFrame(table)}
    made = new_savepoint(spark, tmp_path / "made", p, glsn=int(log.tail()), states=frame_of)
    log.append("clock", [{"user": f"item {i}", "amount": 1, "at": 0} for i in range(8)])
    run = p.run(
        spark=spark, available_now=True, parallelism=2, slices=3, checkpoint=tmp_path / "1", from_savepoint=made
    )
    second = run.stop(savepoint=tmp_path / "second")
    assert second is not None
    assert (
        second.table("reminder")
        .select(["key_bytes", "state_seen", "event_timers"])
        .sort_by("key_bytes")
        .equals(made.table("reminder").select(["key_bytes", "state_seen", "event_timers"]).sort_by("key_bytes"))
    )
    shares = [row["state_items"] for row in second.table("sharing").to_pylist()]
    assert [len(items) for items in shares] == [4, 4]
    log.append("clock", [{"user": "x", "amount": 1, "at": 1_050}])
    p = reminders(log.servers, 3)
    for node in p.graph.nodes:
        if hasattr(node, "max_parallelism"):
            node.max_parallelism = 64
    run = p.run(
        spark=spark, available_now=True, parallelism=2, slices=5, checkpoint=tmp_path / "2", from_savepoint=second
    )
    third = run.stop(savepoint=tmp_path / "third")
    assert third is not None
    expected = [{"user": user, "n": i} for i, user in enumerate(users) if times[i] <= 1_049]
    told = written(log, "told")
    assert len(told) == len(expected)
    assert sorted(told, key=lambda row: row["n"]) == expected
    left = third.table("reminder").to_pylist()
    assert sorted(row["state_seen"] for row in left) == [i for i in range(KEYS) if times[i] > 1_049]
    again = [row["state_items"] for row in third.table("sharing").to_pylist()]
    assert [len(items) for items in again] == [3, 3, 2]
    items = [f"item {i}" for i in range(8)]
    assert sorted(chain(*again)) == sorted(chain(*shares)) == items
    assert [sorted(row["state_rules"]) for row in third.table("sharing").to_pylist()] == [items] * 3


@pytest.fixture
def taker() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.timeout(PATIENCE)
def test_a_killed_taker_leaves_what_was_before_and_a_pipeline_that_runs_on(
    log: cutwater.Client, spark: SparkSession, tmp_path: Path, taker: list[subprocess.Popen[str]]
) -> None:
    log.create_topic("payments", streams=2, schema=SCHEMA)
    choice = random.Random(9)
    paid(log, choice, 0, 60)
    p = payments("runs-on", log.servers, Totals(), "on")
    run = p.run(spark=spark, parallelism=2, slices=4, checkpoint=tmp_path / "run", wait=False)
    try:
        until(lambda: len(written(log, "on")) >= 60)
        earlier = until(lambda: taken(run, tmp_path / "earlier"))
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        command = [sys.executable, "-m", "tests.spark.take_and_wait", str(tmp_path / "run"), str(tmp_path / "half")]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        taker.append(process)
        assert process.stdout is not None
        assert any("about to finish" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(Refused, match="half-written"):
            open_savepoint(tmp_path / "half")
        with pytest.raises(Refused, match="half-written"):
            p.run(spark=spark, checkpoint=tmp_path / "never", from_savepoint=tmp_path / "half")
        delete_savepoint(tmp_path / "half")
        assert not (tmp_path / "half").exists()
        open_savepoint(earlier.path).verify()
        paid(log, choice, 60, 20)
        until(lambda: len(written(log, "on")) >= 80)
    finally:
        last = run.stop(savepoint=tmp_path / "last")
    assert last is not None
    same_state(last, p.test(placed(log, p), drain=False))


def taken(run: Any, target: Path) -> Savepoint | None:
    """None before the first micro-batch is done."""
    try:
        found: Savepoint = run.savepoint(target)
    except Refused:
        return None
    return found


def until(true: Any) -> Any:
    deadline = time.monotonic() + SECONDS_MAX
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found
