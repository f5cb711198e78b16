"""Declared watermarks and idleness, with records and without: positions of the log that no subscriber sees."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

import cutwater
from cutwater.client.async_client import AsyncClient
from cutwater.client.errors import InvalidRecord
from cutwater.client.read.range_reader import Ranges
from cutwater.core.requests import SealRequest
from cutwater.errors import InvalidArgument, NoRecordHere, NotFound, StreamSealed
from cutwater.protocol.scan_api import COLUMNS, NOTHING
from cutwater.protocol.storage_api import EventTimeAnswer
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.testing.fault_proxy import FaultProxy
from cutwater.types import GLSN, LogStreamId
from tests.integration.log_cluster import LogCluster, with_log
from tests.times import at_us

SMALL = SegmentOptions(segment_bytes=4_000, index_interval_bytes=1_000, commits_per_file=16)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOON_US = 1_767_268_800_000_000


async def content(log: AsyncClient) -> list[bytes]:
    return [record.value async for record in log.subscribe("t", follow=False)]


async def heads(cluster: LogCluster, stream: int, start: int = 1) -> list[tuple[int, int | None, int | None, bool]]:
    """Of each batch: GLSN, largest event time, declared watermark, idleness."""
    ranges = await Ranges.connect(cluster.servers, timeout=10)
    try:
        view = await ranges.view(10)
        info = view.streams[LogStreamId(stream)]
        found = await ranges.heads(info, GLSN(start), info.last_glsn, 10)
    finally:
        await ranges.close()
    columns = dict(zip(COLUMNS, found.columns, strict=True))
    rows = zip(columns["first_glsn"], columns["time_max"], columns["declared"], found.idle, strict=True)
    return [
        (glsn, None if most == NOTHING else most, None if said == NOTHING else said, bool(idle))
        for glsn, most, said, idle in rows
    ]


async def event_time(log: AsyncClient, stream: int, at: int) -> EventTimeAnswer:
    view = await log._catalogs.fresh(log._deadline(10))
    return await log._reading.event_time(view.streams[LogStreamId(stream)], GLSN(at), log._deadline(10))


def test_a_declaration_takes_one_position_that_subscribers_never_see(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        streams = (await log.create_topic("t", streams=3)).streams
        await log.append("t", b"first", timestamp=NOON, stream=streams[0])
        acks = await log.declare("t", watermark=NOON, idle=True)
        assert sorted(ack.stream for ack in acks) == list(streams)
        assert [ack.count for ack in acks] == [1, 1, 1]
        (one,) = await log.declare("t", idle=True, stream=streams[1])
        assert one.stream == streams[1]
        last = await log.append(
            "t", [b"a", b"b"], watermark=at_us(NOON_US + 5), idle=True, stream=streams[2], timestamp=at_us(9)
        )
        assert await content(log) == [b"first", b"a", b"b"]
        assert [record.value async for record in log.subscribe("t", start=acks[0].glsn, follow=False)] == [b"a", b"b"]
        rows = [batch.num_rows async for batch in log.batches("t", start=1, follow=False, columns=["value"])]
        assert sum(rows) == 3
        for ack in acks:
            with pytest.raises(
                NoRecordHere, match=r"it declares the watermark 2026-01-01T12:00:00\+00:00 and idleness"
            ):
                await log.read(ack.glsn)
        with pytest.raises(NoRecordHere, match=f"in log stream {one.stream} holds no record: it declares idleness"):
            await log.read(one.glsn, stream=one.stream)
        assert (await log.read(last.glsn + 1)).value == b"b"
        assert await heads(cluster, streams[2]) == [
            (next(ack.glsn for ack in acks if ack.stream == streams[2]), None, NOON_US, True),
            (last.glsn, 9, NOON_US + 5, True),
        ]

    with_log(tmp_path, test)


def test_idleness_lasts_until_the_next_entry_of_the_stream_fences_included(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        (stream,) = (await log.create_topic("t")).streams
        ack = await log.append("t", [b"a", b"b"], idle=True, timestamp=at_us(7))
        (declared,) = await log.declare("t", idle=True)
        # Only at its end does a batch declare anything; and a reader may begin anywhere.
        assert [(await event_time(log, stream, ack.glsn + i)).idle for i in range(-1, 2)] == [False, False, True]
        assert (await event_time(log, stream, declared.glsn)).idle
        assert (await event_time(log, stream, declared.glsn)).time_max == 7
        async with await log.producer("t", id="p") as producer:
            fence = await log.tail()
            assert (await event_time(log, stream, declared.glsn)).idle
            assert not (await event_time(log, stream, fence)).idle
            future = await producer.send(b"c", watermark=NOON, idle=True)
            assert (await event_time(log, stream, (await future).glsn)).idle
        assert [idle for _, _, _, idle in await heads(cluster, stream)] == [True, True, False, True]

    with_log(tmp_path, test)


def test_what_is_declared_outlives_restarts_trims_and_syncs(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        (stream,) = (await log.create_topic("t", replication=2)).streams
        for i in range(30):
            await log.append("t", b"%d" % i * 100, timestamp=at_us(i))
            await log.declare("t", watermark=at_us(i + 1), idle=i % 2 == 0)
        before = await heads(cluster, stream)
        await cluster.stop_node(2)
        (last,) = await log.declare("t", watermark=NOON, idle=True, timeout=20)
        await cluster.start_node(2)
        replicas = [cluster.nodes[n].node.replicas for n in (1, 2)]

        def are_equal() -> bool:
            return all(
                LogStreamId(stream) in r and r[LogStreamId(stream)].replica.committed_end >= 61 for r in replicas
            )

        await cluster.until(are_equal, "the second replica has learned everything")
        await cluster.restart_node(1)
        await cluster.until_joined(2)
        assert (await heads(cluster, stream))[: len(before)] == before
        await log.trim("t", before=last.glsn + 1)
        assert await content(log) == []
        said = await event_time(log, stream, last.glsn)
        assert (said.time_max, said.declared, said.idle) == (29, NOON_US, True)
        ack = await log.append("t", b"after", timeout=20)
        assert not (await event_time(log, stream, ack.glsn)).idle
        for node in cluster.nodes.values():
            assert node.node.replicas[LogStreamId(stream)].storage.verify() == []

    with_log(tmp_path, test, nodes=2, segments=SMALL)


def test_a_declaration_of_a_producer_is_there_once_and_in_order(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        (stream,) = (await log.create_topic("t")).streams
        async with FaultProxy("127.0.0.1", cluster.ports[1]) as proxy:
            await cluster.restart_node(1, advertise=proxy.address)
            async with await log.producer("t", id="p") as producer:
                first = await (await producer.send(b"first", timestamp=at_us(1)))
                proxy.swallow(from_target=True)
                sent = [await producer.send(b"%d" % i, timestamp=at_us(i)) for i in range(3)]
                declared = await producer.declare(watermark=NOON, idle=True)
                sent.append(await producer.send(b"3", timestamp=at_us(3), watermark=at_us(NOON_US + 1)))
                sent.append(await producer.send(b"4", timestamp=at_us(4)))
                replica = cluster.nodes[1].node.replicas[LogStreamId(stream)].replica
                await cluster.until(lambda: replica.committed_end >= 8, "all of it is in the log")
                assert not declared.done()
                proxy.heal()
                acks = [await future for future in (*sent[:3], declared, *sent[3:])]
            assert [ack.glsn for ack in acks] == list(range(first.glsn + 1, first.glsn + 7))
            assert await content(log) == [b"first", b"0", b"1", b"2", b"3", b"4"]
            assert [(said, idle) for _, _, said, idle in await heads(cluster, stream) if said or idle] == [
                (NOON_US, True),
                (NOON_US + 1, False),
            ]
            async with await log.producer("t", id="p") as again:
                # The sequence went on over the declaration.
                await (await again.send(b"5"))

    with_log(tmp_path, test)


def test_what_cannot_be_declared_is_refused(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        (stream,) = (await log.create_topic("t")).streams
        with pytest.raises(InvalidArgument, match="nothing is declared: give watermark=, idle=True or both"):
            await log.declare("t")
        with pytest.raises(InvalidArgument, match="idle= is True or False, not 1"):
            await log.declare("t", idle=1)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="idle= is True or False, not 'yes'"):
            await log.append("t", b"x", idle="yes")  # type: ignore[arg-type]
        with pytest.raises(InvalidRecord, match="has no time zone"):
            await log.declare("t", watermark=datetime(2026, 1, 1))
        with pytest.raises(InvalidRecord, match="argument 'watermark': 1767268800000 is an integer"):
            await log.declare("t", watermark=NOON_US // 1_000)  # type: ignore[arg-type]
        with pytest.raises(NotFound, match="has no log stream 99"):
            await log.declare("t", idle=True, stream=99)
        with pytest.raises(NotFound):
            await log.declare("nope", idle=True)
        await cluster.ask(SealRequest(LogStreamId(stream)))
        with pytest.raises(StreamSealed, match=f"this is log stream {stream}; those that have the declaration: none"):
            await log.declare("t", idle=True, timeout=0.3)

    with_log(tmp_path, test)


def test_programs_without_asyncio_declare_in_the_same_way(tmp_path: Path) -> None:
    with cutwater.open(tmp_path / "log") as log:
        log.create_topic("t", streams=2)
        assert len(log.declare("t", watermark=NOON)) == 2
        with log.producer("t", id="p") as producer:
            futures = [producer.send(b"a", idle=True), producer.declare(watermark=NOON), producer.send(b"b")]
            glsns = [future.result().glsn for future in futures]
            with pytest.raises(InvalidArgument, match="nothing is declared"):
                producer.declare()
        assert glsns == sorted(glsns)
        assert [record.value for record in log.subscribe("t", follow=False)] == [b"a", b"b"]
        assert log.append("t", b"c", idle=True).count == 1
