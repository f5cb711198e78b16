"""Runs and queries over topics that were trimmed at different positions, without Spark: however they are batched and
wherever they begin, what they see is one and the same, and never above what a run over all of the log saw.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs
from pyspark.sql.streaming.datasource import ReadAllAvailable

import cutwater
from cutwater.pipeline import Pipeline, ProcessFunction, Watermark
from cutwater.savepoints.program import described
from cutwater.spark.pipeline.error_translation import WorkerFailed
from cutwater.spark.pipeline.offsets import PipelineOffset
from cutwater.spark.savepoint.checkpoints import FinishedBatch, Note, Origin
from cutwater.spark.savepoint.savepoint_restore import _offset
from cutwater.spark.savepoint.savepoints import _manifest
from tests.spark.pipeline_kit import InOneProcess
from tests.spark.planner_kit import columns, latest, rows_of, stream

T0 = datetime(2026, 1, 1, tzinfo=UTC)
TOPICS = ("a", "b")
IDLE_AFTER = {"ever": None, "soon": "3ms"}


class Seen(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        return {"place": ctx.glsn, "seen": ctx.watermark}


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[cutwater.Client]:
    with cutwater.open(tmp_path / "data") as client:
        yield client


def fill(log: cutwater.Client, choice: random.Random) -> list[tuple[str, int]]:
    """Topic and position of each batch. The first topic is a minute ahead of the second."""
    schema = pa.schema({"user": pa.string(), "at": pa.timestamp("us", "UTC")})
    streams = {topic: log.create_topic(topic, streams=2, schema=schema, event_time="at").streams for topic in TOPICS}
    placed = []
    for i in range(24):
        topic = choice.choice(TOPICS)
        at = T0 + timedelta(seconds=i + (60 if topic == "a" else 0) - choice.randint(0, 3))
        rows = [{"user": "x", "at": at}] * choice.choice([1, 1, 3])
        placed.append((topic, int(log.append(topic, rows, stream=choice.choice(streams[topic])).glsn)))
        time.sleep(choice.choice([0, 0, 0.005]))
    return placed


def seeing(log: cutwater.Client, idle_after: str | None, name: str, **options: Any) -> InOneProcess:
    p = Pipeline(name)
    strategy = Watermark.ascending().idle_after(idle_after)
    a, b = (p.source(t, schema="user string, at timestamp", event_time="at", watermark=strategy) for t in TOPICS)
    a.union(b).process(key="user", function=Seen(), uid="seen", schema="place bigint, seen bigint").sink(name, uid="o")
    return InOneProcess(p, log.servers, drain=False, slices=2, parallelism=1, **options)


def seen_by_pipeline(log: cutwater.Client, idle_after: str | None, name: str, **options: Any) -> dict[int, int]:
    query = seeing(log, idle_after, name, **options)
    try:
        query.run()
    finally:
        query.close()
    return seen(log, name)


def seen(log: cutwater.Client, name: str) -> dict[int, int]:
    return {row["place"]: row["seen"] for row in log.table(name).to_pylist()}


def seen_by_query(log: cutwater.Client, idle_after: str | None, rows_max: int, start: str = "earliest") -> Any:
    options = {
        "servers": log.servers,
        "subscribe": ",".join(TOPICS),
        "startingOffsets": start,
        "maxOffsetsPerTrigger": str(rows_max),
        "watermark.idleAfter": idle_after or "9d",
        "failOnDataLoss": "true" if start == "earliest" else "false",
    }
    found: dict[int, int | None] = {}
    with stream(**options) as reader:
        offset = reader.initialOffset()
        while (end := latest(reader, offset)) != offset:
            table = rows_of(reader, reader.partitions(offset, end), columns(options))
            numbers = table["watermark"].cast(pa.int64()).to_pylist()
            found |= dict(zip(table["glsn"].to_pylist(), numbers, strict=True))
            offset = end
    return {place: -(2**63) if value is None else value for place, value in found.items()}


def trim(log: cutwater.Client, placed: list[tuple[str, int]], choice: random.Random) -> int:
    """Both topics, at different positions, of which one may be the beginning; returns where the later one begins to
    count again: at its first batch from there on.
    """
    topics = choice.sample(TOPICS, 2)
    early, late = (choice.choice(placed[:6])[1], choice.choice(placed[9:15])[1])
    if choice.random() < 0.7:
        log.trim(topics[0], before=early)
    log.trim(topics[1], before=late)
    return next(glsn for topic, glsn in placed if topic == topics[1] and glsn >= late)


@pytest.mark.parametrize(("seed", "idle"), [(0, "ever"), (1, "soon")])
def test_topics_that_were_trimmed_at_different_positions(fresh: cutwater.Client, seed: int, idle: str) -> None:
    choice, idle_after = random.Random(seed), IDLE_AFTER[idle]
    placed = fill(fresh, choice)
    whole = seen_by_pipeline(fresh, idle_after, "whole")
    whole_query = seen_by_query(fresh, idle_after, 1_000)
    known = trim(fresh, placed, choice)
    found = seen_by_pipeline(fresh, idle_after, "trimmed")
    found_query = seen_by_query(fresh, idle_after, 1_000)
    assert found.keys() == found_query.keys()
    for trimmed, true in ((found, whole), (found_query, whole_query)):
        assert all(value <= true[place] for place, value in trimmed.items())
        if idle_after is None:
            rest = {place: value for place, value in trimmed.items() if place > known + 2}
            assert rest == {place: true[place] for place in rest}
    assert seen_by_pipeline(fresh, idle_after, "trimmed-4", rows_max=4) == found
    assert seen_by_query(fresh, idle_after, 4) == found_query
    start = choice.choice(sorted(found)[1:-1])
    rest = {place: value for place, value in found.items() if place >= start}
    assert seen_by_pipeline(fresh, idle_after, "later", start=str(start), rows_max=7) == rest
    rest = {place: value for place, value in found_query.items() if place >= start}
    assert seen_by_query(fresh, idle_after, 7, str(start)) == rest


def test_a_savepoint_before_a_topic_begins_misses_nothing(fresh: cutwater.Client) -> None:
    """What was trimmed when the run began is not missed by one that goes on from its savepoint either."""
    for topic in TOPICS:
        fresh.create_topic(topic, schema="user string, at timestamp", event_time="at")
    rows = [(topic, {"user": "x", "at": T0 + timedelta(seconds=i)}) for i, topic in enumerate("aaabbbab")]
    ends = [int(fresh.append(topic, [row]).glsn) for topic, row in rows]
    fresh.trim("b", before=ends[-1])
    found = seen_by_pipeline(fresh, None, "from-the-beginning")
    first = seeing(fresh, None, "first", rows_max=1, follow=True)
    assert first.step()
    assert first.step()
    offset = PipelineOffset.of(first._offset or {})
    assert offset.trimmed == {"b": ends[-1]}
    first.close()
    note = Note("", 1, "first", 2, 1, "", described(first._program.plan), {})
    made = _manifest(note, FinishedBatch(1, offset, "key"))
    origin = Origin("savepoint", made.id, made.glsn, made.clock, False, made.topics, made.trimmed)
    second = seeing(fresh, None, "second")
    second._options = structs.replace(second._options, begin=_offset(origin, 2))
    second._reader.stop()
    second._offset = None
    second._start()
    second.run()
    second.close()
    assert seen(fresh, "second") == {place: value for place, value in found.items() if place > offset.glsn}


def filled(log: cutwater.Client, places: str, seconds: list[int]) -> list[int]:
    for topic in TOPICS:
        log.create_topic(topic, schema="user string, at timestamp", event_time="at")
    rows = [(topic, {"user": "x", "at": T0 + timedelta(seconds=at)}) for topic, at in zip(places, seconds, strict=True)]
    return [int(log.append(topic, [row]).glsn) for topic, row in rows]


def test_a_micro_batch_that_ends_right_before_a_topic_begins(fresh: cutwater.Client) -> None:
    """The next one knows what the topic had said by then: its next record, which is late, does not set it back."""
    ends = filled(fresh, "bbaabaa", [100, 101, 2, 3, 1, 4, 5])
    true = seen_by_query(fresh, None, 1_000)
    fresh.trim("b", before=ends[3] + 1)
    found = seen_by_query(fresh, None, 1_000)
    last = ends[-1]
    assert found[last] == true[last] > -(2**63)
    assert true[last] // 10**6 == int(T0.timestamp()) + 3
    for rows_max in (1, 2, 3):
        assert seen_by_query(fresh, None, rows_max) == found


def test_what_is_trimmed_after_the_first_micro_batch_was_planned_is_missed(fresh: cutwater.Client) -> None:
    """What was gone when it was planned is not: it is repeated as it was."""
    ends = filled(fresh, "abbbba", list(range(6)))
    fresh.trim("b", before=ends[2])
    query = seeing(fresh, None, "repeats")
    start = query._reader.initialOffset()
    end = query._reader.latestOffset(start, ReadAllAvailable())
    query.close()
    assert PipelineOffset.of(end).trimmed == {"b": ends[2]}
    again = seeing(fresh, None, "repeats")
    again._reader.partitions(again._reader.initialOffset(), end)
    again.close()
    fresh.trim("b", before=ends[4])
    missing = seeing(fresh, None, "repeats")
    with pytest.raises(WorkerFailed, match=rf"GLSN {ends[2]} of topic 'b' was trimmed: the first one left is"):
        missing._reader.partitions(missing._reader.initialOffset(), end)
    missing.close()
