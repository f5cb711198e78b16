"""Planner and tasks without Spark: what Spark would call, in the order in which it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable

import cutwater
from cutwater.core.read.watermark import NO_WATERMARK, BoundedOutOfOrderness, Strategy, WatermarkClock
from cutwater.spark.options import read_options
from cutwater.spark.session.worker_connections import link_to
from cutwater.spark.source.schema import arrow_schema, schema_of
from cutwater.spark.source.source import BatchReader, StreamReader
from cutwater.types import EventTime
from tests.clock_kit import report


def columns(options: dict[str, str]) -> Any:
    """The schema that Spark would have asked for."""
    found = read_options(options, streaming=None)
    link = link_to(found.where)
    return schema_of(found, link.loop.run(link.ranges.view(10)))


def read(**options: str) -> pa.Table:
    """A batch read."""
    reader = BatchReader(read_options(options, streaming=False), columns(options))
    return rows_of(reader, reader.partitions(), columns(options))


def rows_of(reader: BatchReader | StreamReader, parts: Any, schema: Any) -> pa.Table:
    batches = [batch for part in parts for batch in reader.read(part)]
    return pa.Table.from_batches(batches, schema=arrow_schema(schema)).sort_by("glsn")


@contextmanager
def stream(**options: str) -> Iterator[StreamReader]:
    reader = StreamReader(read_options(options, streaming=True), columns(options))
    try:
        yield reader
    finally:
        reader.stop()


def latest(reader: StreamReader, start: dict[str, Any], limit: Any = None) -> dict[str, Any]:
    return reader.latestOffset(start, limit or reader.getDefaultReadLimit() or ReadAllAvailable())


def watermarks(log: cutwater.Client, topics: list[str], strategy: Strategy) -> dict[int, int | None]:
    """What every record saw, by the core's clock, one record at a time: the dumb oracle. It knows no ticks, so nothing
    may turn idle by time alone."""
    clock = WatermarkClock()
    for topic in topics:
        for number in log.topic(topic).streams:
            clock.add_stream(number, strategy, 0)  # type: ignore[arg-type]
    found: dict[int, int | None] = {}
    for record in log.subscribe(topics, follow=False):
        time = EventTime(record.timestamp_us)
        (seen,) = report(clock, record.stream, record.glsn, record.ingested_us, [time])  # type: ignore[arg-type]
        found[record.glsn] = None if seen == NO_WATERMARK else seen
    return found


FOREVER = BoundedOutOfOrderness(0, 10**17)
