"""A task at batches that hold no records of their topic: an error, or the rows around them."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import cutwater
from cutwater.client.append.plain_arrow import Single, plain_body
from cutwater.client.read.range_reader import RowBlock, Scanned
from cutwater.core.read.watermark import NO_WATERMARK, ascending
from cutwater.core.requests import TopicInfo
from cutwater.errors import Malformed
from cutwater.pipeline import Pipeline, ProcessFunction, Watermark
from cutwater.pipeline.clocks.clock_steps import Steps, Ticks, watermark_step
from cutwater.pipeline.graph import SourceNode
from cutwater.protocol.scan_api import NOTHING
from cutwater.spark.options import Where, read_options
from cutwater.spark.pipeline.envelope import merged_ticks, packed_ticks
from cutwater.spark.pipeline.error_translation import WorkerFailed
from cutwater.spark.pipeline.planning import StreamRange
from cutwater.spark.pipeline.source import _StepsInside
from cutwater.spark.source.read_task import Batches, ReadPartition, Scan
from cutwater.types import GLSN, LogStreamId, TopicId
from tests.integration.log_cluster import LogCluster, with_log
from tests.integration.test_hostile_bodies import store_old
from tests.spark.pipeline_kit import InOneProcess

COLUMNS = pa.schema([("glsn", pa.int64()), ("value", pa.binary())])


def body(value: bytes) -> memoryview:
    made = plain_body([Single(value, None, 5)])
    assert made is not None
    return memoryview(made.body)


def part(*, skips: bool) -> ReadPartition:
    scan = Scan(Where(servers="cutwater://here:1"), COLUMNS, False, ascending(), True, skips)
    return ReadPartition(scan, TopicInfo(TopicId(1), "t", GLSN(1)), LogStreamId(1), GLSN(1), GLSN(4), None)


def scanned() -> Scanned:
    """Good, malformed as the storage node says, malformed as the task finds, good."""
    numbers = [1, 2, 3, 4]
    zeros = [0] * 4
    schemas = [0, NOTHING, 0, 0]
    runs = tuple(
        array("q", column) for column in (numbers, numbers, [1] * 4, zeros, zeros, schemas, zeros, zeros, zeros)
    )
    blocks = (
        RowBlock(0, 0, body(b"first"), True),
        RowBlock(0, 2, memoryview(b"no Arrow"), False),
        RowBlock(0, 3, body(b"last"), False),
    )
    return Scanned(runs, blocks, malformed=((GLSN(2), GLSN(2)),))


def test_what_is_malformed_is_skipped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row for batch in Batches(part(skips=True)).batches(scanned(), GLSN(1)) for row in batch.to_pylist()]
    assert rows == [{"glsn": 1, "value": b"first"}, {"glsn": 4, "value": b"last"}]
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[1][:16] for line in told] == [" GLSN 2 to 2 of ", " GLSN 3 to 3 of "]
    assert all("onMalformed=skip" in line for line in told)


def test_what_is_malformed_is_an_error() -> None:
    with pytest.raises(Malformed, match="GLSN 3 of topic 't' cannot be read"):
        list(Batches(part(skips=False)).batches(scanned(), GLSN(1)))


def test_the_option() -> None:
    given = {"servers": "cutwater://here:1", "subscribe": "t"}
    assert not read_options(given, streaming=False).skips_malformed
    assert read_options(given | {"onMalformed": "Skip"}, streaming=True).skips_malformed
    with pytest.raises(Exception, match="error or skip is wanted"):
        read_options(given | {"onMalformed": "ignore"}, streaming=True)


class Waits(ProcessFunction):
    """Tells of every record when the watermark has come to it: where, and how far the watermark was then."""

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.at(ctx.timestamp)

    def on_timer(self, time: int, ctx: Any) -> Any:
        return {"value": ctx.key, "at": ctx.glsn, "w": ctx.watermark}


@pytest.mark.parametrize("event_time", [None, lambda row: 1_000 * len(row.value)], ids=["of the log", "a function"])
def test_a_pipeline_skips_or_fails_at_what_an_older_version_let_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, event_time: Any
) -> None:
    """Wherever micro-batches end, headers of skipped batches mean the same for the watermark."""

    def pipeline(servers: str, name: str, **more: Any) -> Pipeline:
        p = Pipeline(name, log=servers)
        source = p.source("t", event_time=event_time, watermark=Watermark.ascending(), **more)
        source.sink(f"{name}-all", uid="all")
        source.process(key="value", function=Waits(), uid="x", schema="value binary, at bigint, w bigint").sink(
            name, uid="out"
        )
        return p

    def ran(servers: str, name: str, rows_max: int | None, **more: Any) -> int:
        query = InOneProcess(pipeline(servers, name, **more), servers, rows_max=rows_max, drain=False)
        try:
            query.run()
        finally:
            query.close()
        return query.batch

    async def test(cluster: LogCluster, log: cutwater.AsyncClient) -> None:
        await log.create_topic("t")
        stored, places = await store_old(cluster, log)
        last = await log.append("t", b"a last one")
        good = [b"good %d" % i for i in range(len(stored))] + [b"good at last", b"a last one"]
        found, counts = [], []
        for name, rows_max in (("whole", None), ("few", 3), ("single", 1)):
            caplog.clear()
            counts.append(await asyncio.to_thread(ran, cluster.servers, name, rows_max, on_malformed="skip"))
            told = {int(record.getMessage().split("GLSN ")[1].split()[0]) for record in caplog.records}
            assert sorted(told) == places
            assert [record.value async for record in await log.subscribe(f"{name}-all", follow=False)] == good
            found.append([record.row async for record in await log.subscribe(name, follow=False)])
        assert found[0] == found[1] == found[2]
        # One of the skipped batches says that it has 2**31 records, more than a micro-batch takes.
        assert 3 == counts[0] < counts[1] < counts[2]
        if event_time is None:
            (place, case) = next(
                pair for pair in zip(places, stored, strict=True) if pair[1].name == "a false time_max"
            )
            assert found[0][-1] == {"value": b"good 5", "at": place + case.count - 1, "w": ((1 << 62) - 1_000) // 1_000}
        else:
            assert {row["at"] for row in found[0]} == {last.glsn - 1}
        with pytest.raises(
            WorkerFailed, match=rf"GLSN {places[0]} to .*of topic 't' cannot be read.*on_malformed='skip'"
        ):
            await asyncio.to_thread(ran, cluster.servers, "fails", None)

    with_log(tmp_path, test, nodes=1, seconds=300)


def test_the_header_of_a_skipped_batch_counts_inside_the_batches_after_it() -> None:
    """The other log streams are at 50 ms at first, then at 100 ms; the second of three batches is skipped, and its
    header says 81 ms.
    """
    p = Pipeline("p")
    p.source("t", watermark=Watermark.ascending(), on_malformed="skip")
    (node,) = p.graph.of_type(SourceNode)
    rows = [
        (1, NO_WATERMARK, 50_000, NO_WATERMARK),
        (2, 39_000, 50_000, 39_000),
        (3, 50_000, 100_000, 80_000),
    ]
    steps = _StepsInside(StreamRange("t", 1, GLSN(1), GLSN(4), {("t",): rows}), node)
    for glsns, times in (([1], [40]), ([3, 4], [60, 95])):
        steps.add(np.array(glsns), np.array(times))
    found = merged_ticks([packed_ticks(Ticks({frozenset({"t"}): Steps()}, Steps())), steps.packed()])
    made = found.watermarks[frozenset({"t"})]
    assert (made.moments, made.values) == ([watermark_step(glsn) for glsn in (1, 3, 4)], [39, 80, 94])


LOGGING = "spark.sql.pyspark.worker.logging.enabled"


def test_a_query_skips_or_fails_at_what_an_older_version_let_in(tmp_path: Path, spark: SparkSession) -> None:
    """On Spark: tasks find the batches, and what they report is in the log of Spark's Python processes."""

    def read(servers: str, **options: str) -> list[bytes]:
        reader = spark.read.format("cutwater").options(servers=servers, subscribe="t", **options)
        # Without the watermark: a false event time of a header stays in it, and no datetime can hold that.
        rows = reader.load().select("glsn", "value").collect()
        return [bytes(value) for _, value in sorted(rows)]

    def reported() -> list[str]:
        return [row["msg"] for row in spark.tvf.python_worker_logs().collect() if "MALFORMED" in row["msg"]]

    async def test(cluster: LogCluster, log: cutwater.AsyncClient) -> None:
        await log.create_topic("t")
        stored, places = await store_old(cluster, log)
        good = [b"good %d" % i for i in range(len(stored))] + [b"good at last"]
        spark.conf.set(LOGGING, "true")
        try:
            assert await asyncio.to_thread(read, cluster.servers, onMalformed="skip") == good
            told = await asyncio.to_thread(reported)
        finally:
            spark.conf.unset(LOGGING)
        assert sorted(int(line.split("GLSN ")[1].split()[0]) for line in told) == places
        with pytest.raises(PySparkException, match=rf"Malformed: .*GLSN {places[0]}\b"):
            await asyncio.to_thread(read, cluster.servers)

    with_log(tmp_path, test, nodes=1, seconds=300)
