"""Random pipelines on a real log, through the classes that Spark calls, with crashes: the output topics equal
``Pipeline.test``, in order. Spark itself is left out, so that many programs can be tried.
"""

from __future__ import annotations

import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import cutwater
from cutwater.pipeline import Pipeline
from cutwater.pipeline.graph import SinkNode, SourceNode

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "property")]

from pipeline_kit import InOneProcess, placed, written
from pipeline_programs import log_of, program

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def fill(log: cutwater.Client, pipeline: Pipeline, choice: random.Random, length: int) -> None:
    """Some records in disorder, in batches of one to four, on all streams of the sources."""
    topics = [node.topic for node in pipeline.graph.of_type(SourceNode)]
    streams = {topic: log.topic(topic).streams for topic in topics}
    places = [place for place in log_of(choice, topics, length) if place.row is not None]
    for topic in topics:
        for stream in streams[topic]:
            log.append(topic, [{"k": "a", "t": 0, "v": 1}], stream=stream, watermark=EPOCH)
    while places:
        size = choice.randint(1, 4)
        topic = places[0].topic
        own = [place for place in places[:size] if place.topic == topic]
        places = places[len(own) :]
        rows = [dict(zip(("k", "t", "v"), place.row or (), strict=True)) for place in own]
        declared = max((place.declared for place in own if place.declared is not None), default=None)
        watermark = None if declared is None else EPOCH + timedelta(milliseconds=declared)
        stream = streams[topic][own[0].stream % len(streams[topic])]
        log.append(topic, rows, stream=stream, watermark=watermark)


def prepared(log: cutwater.Client, seed: int, length: int) -> tuple[Pipeline, random.Random]:
    """A random program over topics of its own, which are filled."""
    choice = random.Random(seed)
    pipeline = program(choice)
    pipeline.name = f"seed {seed} {random.random()}"
    schema = next(iter(pipeline.graph.of_type(SourceNode))).rows
    assert schema is not None
    for node in pipeline.graph.nodes:
        if isinstance(node, SourceNode | SinkNode):
            node.topic = f"{node.topic} {pipeline.name}"
    for node in pipeline.graph.of_type(SourceNode):
        node.watermark = node.watermark.idle_after(None)
        log.create_topic(node.topic, streams=choice.randint(1, 3), schema=schema.schema)
    fill(log, pipeline, choice, length)
    return pipeline, choice


def expected(log: cutwater.Client, pipeline: Pipeline) -> dict[str, Any]:
    result = pipeline.test(placed(log, pipeline))
    return {topic: result[topic] for topic in {node.topic for node in pipeline.graph.of_type(SinkNode)}}


@pytest.mark.parametrize("seed", range(25))
def test_any_pipeline_gives_what_one_thread_gives(log: cutwater.Client, seed: int) -> None:
    pipeline, choice = prepared(log, seed, choice_of_length(seed))
    rows_max = choice.choice([None, 1, 7, 25])
    wanted = expected(log, pipeline)
    query = InOneProcess(
        pipeline, log.servers, rows_max=rows_max, parallelism=choice.choice([1, 2, 5]), slices=choice.choice([5, 16])
    )
    try:
        query.run(choice)
    finally:
        query.close()
    for topic, rows in wanted.items():
        assert written(log, topic) == rows, f"seed {seed}, topic {topic}"


def choice_of_length(seed: int) -> int:
    return 20 + seed * 3
