"""The random programs of ``tests/property`` over topics of a real log, and what ``Pipeline.test`` says they give."""

from __future__ import annotations

import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import cutwater
from cutwater.pipeline import Pipeline
from cutwater.pipeline.graph import SinkNode, SourceNode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "property"))

from pipeline_programs import log_of, program

from tests.spark.pipeline_kit import placed

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def random_pipeline(seed: int, name: str, log: str = "") -> tuple[Pipeline, random.Random]:
    """The same for the same seed and name. Its topics have names of their own."""
    choice = random.Random(seed)
    pipeline = program(choice)
    pipeline.name, pipeline.log = name, log
    for node in pipeline.graph.nodes:
        if isinstance(node, SourceNode | SinkNode):
            node.topic = f"{node.topic}-{name}"
        if isinstance(node, SourceNode):
            # What turns idle depends on how fast this machine is.
            node.watermark = node.watermark.idle_after(None)
    return pipeline, choice


def filled(log: cutwater.Client, pipeline: Pipeline, choice: random.Random, length: int) -> None:
    """Create the topics, with some records in disorder, in batches of one to four, on all their streams."""
    topics = [node.topic for node in pipeline.graph.of_type(SourceNode)]
    for node in pipeline.graph.of_type(SourceNode):
        assert node.rows is not None
        log.create_topic(node.topic, streams=choice.randint(1, 3), schema=node.rows.schema)
    streams = {topic: log.topic(topic).streams for topic in topics}
    for topic in topics:
        for stream in streams[topic]:
            log.append(topic, [{"k": "a", "t": 0, "v": 1}], stream=stream, watermark=EPOCH)
    places = [place for place in log_of(choice, topics, length) if place.row is not None]
    while places:
        topic = places[0].topic
        own = [place for place in places[: choice.randint(1, 4)] if place.topic == topic]
        places = places[len(own) :]
        rows = [dict(zip(("k", "t", "v"), place.row or (), strict=True)) for place in own]
        declared = max((place.declared for place in own if place.declared is not None), default=None)
        watermark = None if declared is None else EPOCH + timedelta(milliseconds=declared)
        log.append(topic, rows, stream=streams[topic][own[0].stream % len(streams[topic])], watermark=watermark)


def expected(log: cutwater.Client, pipeline: Pipeline, until: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """What each sink's topic gets, if the input ends at a position, or where the log ends now. Time goes on by itself,
    so whoever has timers of processing time compares with a run to the same position.
    """
    result = pipeline.test(placed(log, pipeline, until))
    return {topic: result[topic] for topic in {node.topic for node in pipeline.graph.of_type(SinkNode)}}
