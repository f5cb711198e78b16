"""Random pipelines on a real log, through the classes that Spark calls, with crashes: the output topics equal
``Pipeline.test``, in order. Spark itself is left out, so that many programs can be tried.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from msgspec import structs
from pyspark.sql.streaming.datasource import ReadAllAvailable

import cutwater
from cutwater.errors import InvalidArgument, NotFound, PipelineFailed, Refused
from cutwater.jobs.messages import Start
from cutwater.pipeline import Pipeline, ProcessFunction, Session, Tumbling, ValueState, Watermark
from cutwater.pipeline.clocks.clock import LogClock
from cutwater.pipeline.graph import RowNode
from cutwater.savepoints import new_savepoint
from cutwater.spark.job import where_of_job
from cutwater.spark.job_program import ProgramRun
from cutwater.spark.options import Where
from cutwater.spark.pipeline.envelope import in_envelopes, merged_ticks, unpacked
from cutwater.spark.pipeline.error_translation import WorkerFailed, heard, of_spark
from cutwater.spark.pipeline.program import balanced_keys, spark_hash
from cutwater.spark.pipeline.runner import connected, run_pipeline
from cutwater.spark.pipeline.source import PipelineReader, RangePart, SourceRunOptions, TickPart
from cutwater.spark.pipeline.transform import rounds_of
from tests.spark.pipeline_kit import InOneProcess, placed, program_of, written
from tests.spark.random_pipelines import expected, filled, random_pipeline

SEED_NAME = "CUTWATER_SPARK_SEED"
SEEDS = [int(os.environ[SEED_NAME])] if SEED_NAME in os.environ else range(12)
T0 = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = "user string, amount double, at timestamp"


@pytest.mark.parametrize("seed", SEEDS)
def test_any_pipeline_gives_what_one_thread_gives(log: cutwater.Client, seed: int) -> None:
    """Replay: CUTWATER_SPARK_SEED=… python -m pytest tests/spark/test_pipeline_one_process.py"""
    pipeline, choice = random_pipeline(seed, f"one-process-{seed}")
    filled(log, pipeline, choice, choice.randint(10, 80))
    until = int(log.tail())
    wanted = expected(log, pipeline, until)
    query = InOneProcess(
        pipeline,
        log.servers,
        until=until,
        rows_max=choice.choice([None, 1, 7, 25]),
        parallelism=choice.choice([1, 2, 5]),
        slices=choice.choice([5, 16]),
    )
    try:
        query.run(choice)
    finally:
        query.close()
    for topic, rows in wanted.items():
        assert written(log, topic) == rows, f"seed {seed}, topic {topic}"


class Last(ProcessFunction):
    """Gives each user's amount before this one, until a minute after it."""

    last = ValueState("double")

    def process(self, record: Any, ctx: Any) -> Any:
        before = self.last.get()
        self.last.set(record.amount)
        ctx.timers.at(ctx.timestamp + 60_000)
        if record.amount < 0:
            raise ArithmeticError("below nothing")
        return {"user": ctx.key, "amount": before}

    def on_timer(self, time: int, ctx: Any) -> None:
        self.last.clear()


def payments(log: cutwater.Client, topic: str, amounts: list[float], **options: Any) -> None:
    schema = pa.schema({"user": pa.string(), "amount": pa.float64(), "at": pa.timestamp("us", "UTC")})
    log.create_topic(topic, streams=2, schema=schema, event_time="at")
    for i, amount in enumerate(amounts):
        row = {"user": "abc"[i % 3], "amount": amount, "at": T0 + timedelta(seconds=7 * i, microseconds=i)}
        log.append(topic, [row], stream=log.topic(topic).streams[i % 2], **options)


def run_here(log: cutwater.Client, pipeline: Pipeline, **options: Any) -> InOneProcess:
    query = InOneProcess(pipeline, log.servers, **options)
    try:
        query.run()
    finally:
        query.close()
    return query


@pytest.mark.parametrize("kind", ["topic", "function", "rows"])
def test_event_time_comes_from_the_topic_or_a_function(log: cutwater.Client, kind: str) -> None:
    topic = f"payments-by-{kind}"
    payments(log, topic, [float(i % 5) for i in range(40)])
    p = Pipeline(kind)
    of_rows = Watermark.of_rows(lambda row: int(row.at.timestamp() * 1000) - 5_000)
    source = {
        "topic": {"event_time": "at", "watermark": Watermark.bounded("5s")},
        "function": {"event_time": lambda row: row.at, "watermark": Watermark.bounded("5s")},
        "rows": {"event_time": "at", "watermark": of_rows},
    }[kind]
    pay = p.source(topic, schema=ROWS, **source)  # type: ignore[arg-type]
    window = pay.filter(lambda row: row.amount > 0).window(
        key="user", window=Tumbling("20s"), aggregate={"n": "count(*)"}, uid="w"
    )
    window.sink(f"{kind}-windows", uid="windows")
    window.late.sink(f"{kind}-late", uid="late")
    wanted = expected(log, p)
    run_here(log, p, rows_max=9)
    assert {topic: written(log, topic) for topic in wanted} == wanted
    assert wanted[f"{kind}-windows"]


def test_plain_records_go_in_and_out(log: cutwater.Client) -> None:
    log.create_topic("plain-in")
    log.append("plain-in", [b"a", b"b", b"c"], key=[b"x", None, b"y"], timestamp=T0, headers={"h": b"1"})
    p = Pipeline("plain")
    keyed = p.source("plain-in").filter(lambda row: row.key is not None)
    keyed.map(lambda row: {"key": row.key, "value": row.value * 2}, "key binary, value binary").sink(
        "plain-out", uid="o"
    )
    run_here(log, p)
    found = [(record.key, record.value, record.timestamp) for record in log.subscribe("plain-out", follow=False)]
    assert found == [(b"x", b"aa", T0), (b"y", b"cc", T0)]


def test_a_failing_record_names_pipeline_operator_and_position(log: cutwater.Client) -> None:
    payments(log, "failing", [1.0, 2.0, -1.0])
    p = Pipeline("fails")
    p.source("failing", watermark=Watermark.ascending()).process(
        key="user", function=Last(), uid="last", schema="user string, amount double"
    ).sink("failed", uid="out")
    with pytest.raises(WorkerFailed) as caught:
        run_here(log, p)
    error = heard(f"org.apache.spark.SparkException: Job aborted\n\tat x.y(Z.java)\n{caught.value}\n\tat a.b")
    last = max(record.glsn for record in log.subscribe("failing", follow=False))
    assert isinstance(error, PipelineFailed)
    assert (error.pipeline, error.uid, error.glsn) == ("fails", "last", last)
    assert str(error).startswith("pipeline 'fails', operator 'last', at GLSN ")
    assert re.search(r"nothing \(\w+\.py, line \d+, in process\), on the record Row\(user='c'", str(error))
    assert "[cutwater:" not in str(error)


def test_an_error_of_spark_itself_is_short() -> None:
    text = "[STREAM_FAILED] Query [id = 1] terminated\nTraceback\n\tat a.b(C.java:1)\njava.io.IOException: disk full\n"
    assert heard(text) is None
    error = of_spark(text, "p")
    assert "java.io.IOException: disk full" in error.message
    assert len(error.message) < 400


def test_programs_that_cannot_run_are_refused_before_anything_starts(log: cutwater.Client) -> None:
    payments(log, "given", [1.0])

    def refused(build: Any, error: type[Exception], match: str) -> None:
        p = Pipeline("refused", log=log.servers)
        build(p)
        with pytest.raises(error, match=match):
            program_of(p, log, 1, 16)

    refused(lambda p: p.source("nothing").sink("x", uid="x"), NotFound, "'nothing', which does not exist")
    refused(lambda p: p.source("given", schema="who string").sink("x", uid="x"), InvalidArgument, "the column 'who'")
    refused(lambda p: p.source("given").map(lambda r: r).sink("x", uid="x"), InvalidArgument, "has no schema")
    payments(log, "other-given", [1.0])
    into_other = (lambda p: p.source("given").map(dict, "b bigint").sink("other-given", uid="x"), "no column 'b'")
    refused(into_other[0], InvalidArgument, into_other[1])
    refused(
        lambda p: (
            p.source("given", watermark=Watermark.ascending())
            .window(key="user", window=Tumbling("1m"), aggregate={"n": "sum(amuont)"}, uid="w")
            .sink("x", uid="x")
        ),
        InvalidArgument,
        r"pipeline 'refused', window w: 'sum\(amuont\)' names the column 'amuont', which is not there: there are",
    )
    for options, match in (
        ({"drain": True}, "say which, with until"),
        ({"available_now": True, "until": 3}, "one or the other"),
        ({"parallelism": 17}, "from 1 to the number of slices"),
    ):
        p = Pipeline("refused", log=log.servers)
        p.source("given").sink("x", uid="x")
        with pytest.raises(InvalidArgument, match=match):
            run_pipeline(p, **options)
    p = Pipeline("no log")
    p.source("given").sink("x", uid="x")
    with pytest.raises(InvalidArgument, match="which log it reads"):
        run_pipeline(p)


def test_a_job_with_a_program_that_cannot_run_ends_before_spark_is_started(
    log: cutwater.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payments(log, "job-in", [1.0])
    payments(log, "job-other", [1.0])
    before = {topic.name for topic in log.topics()}
    monkeypatch.setattr(
        sys.modules["cutwater.spark.session"], "session", lambda *_, **__: pytest.fail("Spark was started")
    )
    start, unused = Start(str(tmp_path / "c"), until="now"), cast("Any", None)

    def refused(where: str, key: str, sink: str | None, match: str, **changed: Any) -> None:
        p = Pipeline("refused", log=where)
        stream = p.source("job-in", watermark=Watermark.ascending()).window(
            key=key, window=Tumbling("1m"), aggregate={"n": "count(*)"}, uid="w"
        )
        if sink is not None:
            stream.sink(sink, uid="x")
        with pytest.raises(InvalidArgument, match=match):
            ProgramRun(unused, p, structs.replace(start, **changed), where_of_job(p)).run()

    refused(log.servers, "usre", "new", "names the column 'usre', which is not there")
    refused(log.servers, "user", "job-other", "the topic 'job-other' has no column 'window_start'")
    refused(log.servers, "user", None, "has no sink")
    refused(log.servers, "user", "new", "the log ends at", until=10**9)
    hourly = Pipeline("refused")
    read = hourly.source("job-in", watermark=Watermark.ascending())
    read.window(key="user", window=Session("1h"), aggregate={"n": "count(*)"}, uid="w").sink("new", uid="x")
    schemas = {"job-in": log.topic("job-in").schema}
    savepoint = new_savepoint(tmp_path / "savepoint", hourly, glsn=0, states={}, schemas=schemas)
    told = "its window is session 1h in the savepoint and tumbling 1m in the program"
    refused(log.servers, "user", "new", told, from_savepoint=savepoint.path, until=None)
    refused("", "user", "new", "does not say which log it reads: name one with --log")
    assert {topic.name for topic in log.topics()} == before


def test_state_is_not_read_with_another_number_of_slices(log: cutwater.Client) -> None:
    payments(log, "sliced", [1.0])
    p = Pipeline("slices")
    p.source("sliced").sink("sliced-out", uid="out")
    query = InOneProcess(p, log.servers, slices=4, drain=False)
    query.run()
    with pytest.raises(WorkerFailed, match="cut into 4 slices, not 8: run it with slices=4"):
        query.go_on(drain=True, slices=8)
    query.close()


def test_a_pause_gives_no_final_watermark_and_goes_on(log: cutwater.Client) -> None:
    payments(log, "paused", [float(i) for i in range(10)])
    p = Pipeline("pauses")
    p.source("paused", schema=ROWS, event_time="at", watermark=Watermark.ascending()).window(
        key="user", window=Tumbling("20s"), aggregate={"n": "count(*)"}, uid="w"
    ).sink("paused-windows", uid="s")
    rows = placed(log, p)
    query = InOneProcess(p, log.servers, drain=False)
    query.run()
    assert written(log, "paused-windows") == p.test(rows, drain=False)["paused-windows"]
    payments_after = {"user": "z", "amount": 1.0, "at": T0 + timedelta(hours=1)}
    for stream in log.topic("paused").streams:
        log.append("paused", [payments_after], stream=stream)
    wanted = expected(log, p)
    query.go_on(drain=True)
    query.close()
    assert written(log, "paused-windows") == wanted["paused-windows"]


@pytest.mark.parametrize("kind", ["log", "savepoint"])
def test_a_job_begins_with_a_micro_batch_also_without_input(log: cutwater.Client, kind: str) -> None:
    """And only with one: after it, and after a restart, it waits for input."""
    topic = f"no-input-{kind}"
    payments(log, topic, [] if kind == "log" else [1.0, 2.0])
    p = Pipeline(topic)
    pay = p.source(topic, schema=ROWS, event_time="at", watermark=Watermark.ascending())
    pay.process(key="user", function=Last(), uid="last", schema="user string, amount double").sink(
        f"{topic}-out", uid="o"
    )
    after = int(log.tail()) if kind == "savepoint" else None
    start = "latest" if kind == "log" else "earliest"
    query = InOneProcess(p, log.servers, follow=True, begins_empty=True, after=after, start=start)
    begin = query.offset
    assert query.step()
    assert not query.step()
    assert written(log, f"{topic}-out") == []
    row = {"user": "a", "amount": 3.0, "at": T0 + timedelta(hours=1)}
    log.append(topic, [row, row | {"amount": 4.0}])
    # The first micro-batch again, after a crash: it has no input, whatever the log has now.
    assert query.planned_again(begin) == []
    while query.step():
        pass
    assert [row["amount"] for row in written(log, f"{topic}-out")] == [None, 3.0]
    query.close()


def test_a_run_begins_where_it_was_first_decided(log: cutwater.Client) -> None:
    """Spark asks where the first micro-batch begins: to look for its end, to plan it, and again after a restart."""
    payments(log, "late-start", [1.0, 2.0])
    p = Pipeline("begins")
    p.source("late-start", schema=ROWS, event_time="at", watermark=Watermark.ascending()).sink(
        "late-start-out", uid="out"
    )
    with connected(Where(servers=log.servers)) as client:
        program = program_of(p, client, 1, 4)
    where, options = Where(servers=log.servers), SourceRunOptions(start="latest")

    def reader() -> PipelineReader:
        return PipelineReader(program, where, options)

    first = reader()
    start = first.initialOffset()
    wanted = log.append("late-start", [{"user": "a", "amount": 3.0, "at": T0}]).glsn
    end = start
    while end == start:
        end = first.latestOffset(start, ReadAllAvailable())
    log.append("late-start", [{"user": "a", "amount": 4.0, "at": T0}])
    assert first.initialOffset() == start
    again = reader()
    for plans, asked in ((first, start), (again, again.initialOffset())):
        parts = [part for part in plans.partitions(asked, end) if isinstance(part, RangePart)]
        assert [part.found.first for part in parts] == [wanted]
    first.stop()
    again.stop()


def test_a_repeated_end_fires_as_many_timers_as_the_first_time(log: cutwater.Client) -> None:
    """Whatever the run that repeats it was told."""
    payments(log, "fires-again", [1.0, 2.0])
    p = Pipeline("again")
    p.source("fires-again", schema=ROWS, event_time="at", watermark=Watermark.ascending()).sink("fired", uid="out")
    where = Where(servers=log.servers)
    with connected(where) as client:
        program = program_of(p, client, 1, 4)

    def reader(firings: int) -> PipelineReader:
        return PipelineReader(program, where, SourceRunOptions(drain=True, drain_firings=firings))

    first, again = reader(3), reader(7)
    start = first.initialOffset()
    first.prepareForTriggerAvailableNow()
    end = first.latestOffset(start, ReadAllAvailable())
    assert (end["ended"], end["firings"]) == (True, 3)
    for plans in (first, again):
        (ticks,) = [part.data for part in plans.partitions(start, end) if isinstance(part, TickPart)]
        assert merged_ticks([ticks]).firings == 3
        plans.stop()


def test_unchained_row_functions_give_what_chained_ones_give(log: cutwater.Client) -> None:
    """In front of operators and behind them, in a row, in branches, and with dead letters."""
    payments(log, "unchained-in", [float(n) for n in range(40)])

    def halved(row: Any) -> Any:
        if row.amount == 7:
            raise ValueError("seven")
        return {"user": row.user, "amount": row.amount / 2, "at": row.at}

    p = Pipeline("unchained", log=log.servers)
    pays = p.source("unchained-in", schema=ROWS, event_time="at", watermark=Watermark.ascending())
    half = pays.filter(lambda r: r.amount != 3).unchained().map(halved, ROWS, dead_letters=True)
    twice = half.unchained().flat_map(lambda r: [r, r], ROWS)
    half.dead_letters.map(lambda r: {"what": r.error}, "what string").sink("unchained-dead", uid="dead")
    counts = twice.window(key="user", window=Tumbling("1m"), aggregate={"n": "count(*)"}, uid="w")
    counts.map(lambda r: {"n": r.n}, "n bigint").unchained().filter(lambda r: r.n > 1).sink("unchained-n", uid="n")
    twice.unchained().filter(lambda r: r.amount > 5).sink("unchained-large", uid="large")
    pays.unchained().map(lambda r: {"user": r.user}, "user string").sink("unchained-users", uid="users")
    wanted = expected(log, p)
    query = InOneProcess(p, log.servers, slices=4, rows_max=15)
    waiting = [orders for rounds in rounds_of(query._program.plan) for orders, _ in rounds]
    assert sorted(order for orders in waiting for order in orders) == [
        node.order for node in p.graph.of_type(RowNode) if not node.chained
    ]
    query.run()
    query.close()
    for topic in ("unchained-dead", "unchained-n", "unchained-large", "unchained-users"):
        assert wanted[topic]
        assert written(log, topic) == wanted[topic]


class Seen(ProcessFunction):
    """Tells what each record saw."""

    def process(self, record: Any, ctx: Any) -> Any:
        return {"place": ctx.glsn, "seen": ctx.watermark}


@pytest.mark.parametrize("kind", ["topic", "column", "function", "declared"])
def test_a_run_that_begins_or_ends_anywhere_sees_the_watermark_of_the_log(
    log: cutwater.Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Between batches and inside them; the clock is that of a run from the beginning, whatever it has looked at."""
    topic = f"begins-{kind}"
    schema = pa.schema({"user": pa.string(), "at": pa.timestamp("us", "UTC"), "other": pa.int64()})
    log.create_topic(topic, streams=3, schema=schema, event_time="at")
    choice = random.Random(kind)
    for i in range(40):
        times = [T0 + timedelta(seconds=i * 3 - choice.randint(0, 20)) for _ in range(choice.randint(1, 5))]
        rows = [{"user": "a", "at": time, "other": int(time.timestamp() * 1_000) + 7} for time in times]
        log.append(topic, rows, stream=log.topic(topic).streams[choice.choice([0, 0, 1, 1, 2])], watermark=min(times))
    forever = Watermark.bounded("2s").idle_after(None)
    p = Pipeline(topic)
    source = {
        "topic": {"event_time": "at", "watermark": forever},
        "column": {"event_time": "other", "watermark": forever},
        "function": {"event_time": lambda row: row.at, "watermark": forever},
        "declared": {"event_time": "at", "watermark": Watermark.punctuated().idle_after(None)},
    }[kind]
    p.source(topic, schema="user string, at timestamp, other bigint", **source).process(  # type: ignore[arg-type]
        key="user", function=Seen(), uid="seen", schema="place bigint, seen bigint"
    ).sink(f"{topic}-out", uid="out")
    wanted = expected(log, p)[f"{topic}-out"]
    assert len({row["seen"] for row in wanted}) > 5
    found_before = 0
    for back in (1, 10, 4_096):
        monkeypatch.setattr("cutwater.spark.source.log_walk.LOOK_BACK", back)
        monkeypatch.setattr("cutwater.spark.pipeline.planning.WALK_POSITIONS", 3 * back)
        start, until = sorted(choice.sample([row["place"] for row in wanted], 2))
        for begins in ({"start": str(start)}, {"after": start - 1}):
            run_here(log, p, **begins, until=until, drain=False, rows_max=choice.choice([None, 3]))
            found = written(log, f"{topic}-out")[found_before:]
            found_before += len(found)
            assert found == [row for row in wanted if start <= row["place"] <= until], (back, begins, until)


@pytest.mark.parametrize("how", ["column", "function"])
def test_a_time_that_is_too_large_names_its_record(log: cutwater.Client, how: str) -> None:
    topic = f"far-{how}"
    log.create_topic(topic, schema=pa.schema({"at": pa.int64()}))
    acks = [log.append(topic, [{"at": time}]) for time in (5, 2**60, 7)]
    p = Pipeline(topic)
    times: Any = "at" if how == "column" else lambda row: row.at
    p.source(topic, schema="at bigint", event_time=times, watermark=Watermark.ascending()).sink(
        f"{topic}-out", uid="out"
    )
    with pytest.raises(WorkerFailed, match="the event time 1152921504606846976 is too far off") as caught:
        run_here(log, p)
    error = heard(str(caught.value))
    assert isinstance(error, PipelineFailed)
    assert error.glsn == acks[1].glsn
    with pytest.raises(InvalidArgument, match=r"topic 'far-.*', row 1: the event time 1152921504606846976 is too far"):
        p.test({topic: [{"at": 2**60}]})


def test_another_watermark_needs_another_checkpoint(log: cutwater.Client) -> None:
    payments(log, "rewatermarked", [1.0, 2.0])

    def pipeline(bound: str) -> Pipeline:
        p = Pipeline("rewatermarked")
        source = p.source("rewatermarked", schema=ROWS, event_time="at", watermark=Watermark.bounded(bound))
        source.sink("rewatermarked-out", uid="out")
        return p

    query = InOneProcess(pipeline("5s"), log.servers, drain=False)
    query.run()
    query.go_on(drain=False)
    query._pipeline = pipeline("7s")
    with pytest.raises(WorkerFailed, match=r"was bounded 5s, idle after 30s when .* is bounded 7s.* a new checkpoint"):
        query.go_on(drain=True, slices=16)
    query.close()


def test_large_parts_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutwater.spark.pipeline.envelope.BLOB_BYTES_MAX", 1_000)
    batch = pa.RecordBatch.from_pydict({"n": list(range(1_000))})
    made = list(in_envelopes(5, (3, 1), batch))
    assert [envelope[:3] for envelope in made] == [(5, 3, 1)] * 8
    pieces = [data for _, _, _, data in made]
    assert pa.concat_tables([unpacked(piece) for piece in pieces])["n"].to_pylist() == list(range(1_000))


def test_an_old_copy_of_a_checkpoint_is_refused(log: cutwater.Client) -> None:
    payments(log, "copied", [float(i) for i in range(6)])
    p = Pipeline("copies")
    p.source("copied", schema=ROWS, event_time="at", watermark=Watermark.ascending()).sink("copied-out", uid="out")
    query = InOneProcess(p, log.servers, rows_max=2, follow=True)
    try:
        assert query.step()
        copy = query._offset, query.batch
        assert query.step()
        assert query.step()
        query._offset, query.batch = copy
        with pytest.raises(Refused, match="the checkpoint is an old copy"):
            query.step()
    finally:
        query.close()


def test_a_trim_of_what_was_read_does_no_harm(log: cutwater.Client) -> None:
    payments(log, "trimmed", [1.0, 2.0])
    payments(log, "other", [float(i) for i in range(20)])
    p = Pipeline("trims")
    p.source("trimmed", schema=ROWS, event_time="at", watermark=Watermark.ascending()).sink("trimmed-out", uid="out")
    query = InOneProcess(p, log.servers, drain=False)
    query.run()
    ack = log.append("other", [{"user": "a", "amount": 1.0, "at": T0}])
    log.trim("trimmed", before=ack.glsn)
    log.append("trimmed", [{"user": "a", "amount": 3.0, "at": T0}])
    query.go_on(drain=True)
    query.close()
    assert [row["amount"] for row in log.table("trimmed-out").to_pylist()] == [1.0, 2.0, 3.0]


def test_a_stream_that_is_sealed_for_good_holds_no_window_back() -> None:
    clock = LogClock({"t": Watermark.ascending().idle_after(None)}, [])
    for stream in (1, 2):
        clock.add_stream("t", stream, 0)
    clock.batch("t", 1, 1, 1, 10_000, 5_000_000, None)
    assert clock.watermark < 0
    clock.end_stream("t", 2)
    clock = LogClock.restore({"t": Watermark.ascending().idle_after(None)}, [], clock.snapshot())
    clock.end_stream("t", 2)
    clock.tick(2, 11_000)
    assert clock.watermark == 4_999


def test_a_run_without_end_takes_what_comes(log: cutwater.Client) -> None:
    payments(log, "followed", [1.0, 2.0, 3.0])
    p = Pipeline("follows")
    p.source("followed", schema=ROWS, event_time="at", watermark=Watermark.ascending()).process(
        key="user", function=Last(), uid="last", schema="user string, amount double"
    ).sink("follower", uid="out")
    query = InOneProcess(p, log.servers, follow=True)
    try:
        assert query.step()
        assert len(written(log, "follower")) == 3
        while query.step():
            # Time alone may move on, at marks of the log's clock.
            assert len(written(log, "follower")) == 3
        log.append("followed", [{"user": "a", "amount": 9.0, "at": T0 + timedelta(seconds=30)}])
        deadline = time.monotonic() + 60
        while len(written(log, "follower")) == 3 and time.monotonic() < deadline:
            query.step()
        assert written(log, "follower")[3:] == [{"user": "a", "amount": 1.0}]
    finally:
        query.close()


def test_chunks_are_found_in_the_state_store_when_the_local_copy_is_gone(
    log: cutwater.Client, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    payments(log, "moving", [float(i) for i in range(30)])
    p = Pipeline("moves")
    p.source("moving", schema=ROWS, event_time="at", watermark=Watermark.ascending()).process(
        key="user", function=Last(), uid="last", schema="user string, amount double"
    ).sink("moved", uid="out")
    wanted = expected(log, p)
    moves = iter(range(1_000))
    monkeypatch.setattr("cutwater.spark.pipeline.state.directory", lambda: tmp_path / str(next(moves)))
    query = run_here(log, p, rows_max=4)
    assert query.batch > 5
    assert written(log, "moved") == wanted["moved"]


def test_slices_are_spread_evenly_over_partitions() -> None:
    # Known values of Spark's hash function.
    assert [spark_hash(value) for value in (0, 1, 42)] == [933211791, -559580957, 29417773]
    keys = balanced_keys(16)
    for partitions in (1, 2, 3, 5, 8, 16):
        counts = [sum(spark_hash(key) % partitions == number for key in keys) for number in range(partitions)]
        assert len(set(keys)) == 16
        assert max(counts) - min(counts) <= 1


class Divides(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        return {"user": ctx.key, "n": 12 // int(record.amount)}


def test_dead_letters_are_written_to_a_topic_as_a_test_says(log: cutwater.Client) -> None:
    payments(log, "dividends", [3.0, 0.0, 4.0])
    p = Pipeline("dividing", log=log.servers)
    stream = p.source("dividends", event_time="at", watermark=Watermark.ascending())
    made = stream.process(key="user", function=Divides(), uid="x", schema="user string, n bigint", dead_letters=True)
    made.sink("divided", uid="out")
    made.dead_letters.sink("undivided", uid="dead")
    run_here(log, p)
    expected = p.test(placed(log, p))
    assert written(log, "divided") == expected["divided"]
    (letter,) = written(log, "undivided")
    assert [letter] == expected["undivided"]
    assert (letter["uid"], letter["error"]) == ("x", "ZeroDivisionError: integer division or modulo by zero")
    (record,) = [record for record in log.subscribe("dividends", follow=False) if record.row["amount"] == 0.0]
    assert letter["source_glsn"] == record.glsn


def test_a_source_topic_that_was_created_again_is_refused(log: cutwater.Client) -> None:
    """While the query runs, and when it goes on from a checkpoint; one of before, which does not say which topic it
    read, goes on with the one that is there.
    """
    payments(log, "again-in", [1.0, 2.0])
    p = Pipeline("again", log=log.servers)
    p.source("again-in").sink("again-out", uid="out")
    query = InOneProcess(p, log.servers, follow=True)
    assert query.step()
    number = query._offset["topics"]["again-in"]  # type: ignore[index]
    log.delete_topic("again-in")
    with pytest.raises(WorkerFailed, match="'again' reads the topic 'again-in', which was deleted: create"):
        query.step()
    payments(log, "again-in", [3.0])
    told = rf"'again-in' was deleted and created again: it was topic number {number} .* new checkpoint .*--start \d+"
    for _ in ("while it runs", "when it goes on"):
        with pytest.raises(WorkerFailed, match=told):
            query.step()
        query._start()
    with pytest.raises(WorkerFailed, match=told):
        query._reader.partitions(query._offset, query._offset)
    del query._offset["topics"]  # type: ignore[union-attr]
    assert query.step()
    assert query._offset["topics"]["again-in"] > number  # type: ignore[index]
    query.close()


@pytest.mark.parametrize("kind", ["bounded", "punctuated"])
def test_declarations_move_the_clocks_of_a_pipeline(log: cutwater.Client, kind: str) -> None:
    """With and without records, for one log stream and for all; bounded streams heed idleness only."""
    topic = f"declared-{kind}"
    schema = {"user": pa.string(), "amount": pa.float64(), "at": pa.timestamp("us", "UTC")}
    one, two = log.create_topic(topic, streams=2, schema=schema, event_time="at").streams

    def at(second: int) -> datetime:
        return T0 + timedelta(seconds=second)

    def row(second: int) -> list[dict[str, Any]]:
        return [{"user": "a", "amount": 1.0, "at": at(second)}]

    log.append(topic, row(1), stream=one, watermark=at(1))
    log.declare(topic, idle=True, stream=two)
    third = log.append(topic, row(12), stream=one, watermark=at(11))
    log.declare(topic, watermark=at(25))
    log.append(topic, row(30), stream=two, idle=True)
    log.append(topic, row(26), stream=one)
    log.append(topic, row(45), stream=one, watermark=at(44), idle=True)
    log.declare(topic, watermark=at(60), idle=True)
    p = Pipeline(topic, log=log.servers)
    strategy = Watermark.bounded("1s") if kind == "bounded" else Watermark.punctuated()
    stream = p.source(topic, schema=ROWS, event_time="at", watermark=strategy.idle_after(None))
    made = stream.window(key="user", window=Tumbling("10s"), aggregate={"n": "count(*)"}, uid="w")
    made.sink(f"{topic}-out", uid="out")
    run_here(log, p)
    expected = p.test(placed(log, p))
    assert written(log, f"{topic}-out") == expected[f"{topic}-out"]
    assert len(expected[f"{topic}-out"]) >= 4
    # Declared idleness lets the first window close long before the end.
    early = p.test(placed(log, p, int(third.glsn)), drain=False)
    assert early.watermark >= at(10).timestamp() * 1_000
