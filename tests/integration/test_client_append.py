"""Appends through the client: what is acknowledged is there, what failed is not, and every error says what it is."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.client.errors import ClientClosed, IncompatibleSchema, InvalidRecord, RecordTooLarge
from cutwater.core.requests import DescribeRequest, SealRequest, UnsealRequest
from cutwater.errors import (
    AlreadyExists,
    AppendUnknown,
    ConditionFailed,
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    NoRecordHere,
    NotFound,
    NotYetCommitted,
    StreamSealed,
    Unavailable,
)
from cutwater.protocol.errors import ConnectionLost, WrongCluster
from cutwater.testing.fault_proxy import FaultProxy
from cutwater.types import LogStreamId, Retention
from tests.integration.log_cluster import LogCluster, with_log
from tests.times import at_us

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


async def values(log: AsyncClient, topic: str = "t") -> list[bytes]:
    return [record.value async for record in log.subscribe(topic, follow=False)]


def test_what_is_appended_can_be_read(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        made = await log.create_topic("t", streams=2, retention=timedelta(days=1))
        assert (made.name, len(made.streams), made.replication, made.schema) == ("t", 2, 1, None)
        ack = await log.append("t", b"hello", key=b"k", timestamp=NOON, headers={"h": b"1"})
        record = await log.read(ack.glsn)
        assert (record.glsn, record.llsn, record.stream, record.topic) == (ack.glsn, ack.llsn, ack.stream, "t")
        assert (record.key, record.value, record.timestamp) == (b"k", b"hello", NOON)
        assert record.headers == {"h": b"1"}
        assert record == await log.read(ack.glsn, stream=ack.stream)
        many = await log.append(
            "t",
            [b"a", "b", b""],
            key=[None, b"x", b"y"],
            timestamp=[at_us(1), at_us(2), at_us(3)],
            stream=made.streams[1],
        )
        assert (many.count, many.stream) == (3, made.streams[1])
        found = [await log.read(many.glsn + i) for i in range(3)]
        assert [(r.key, r.value, r.timestamp_us) for r in found] == [(None, b"a", 1), (b"x", b"b", 2), (b"y", b"", 3)]
        assert [r.llsn for r in found] == [many.llsn + i for i in range(3)]
        assert await log.tail() >= many.glsn + 2
        arrow = pa.table({"value": [b"%d" % i for i in range(1000)], "key": [b"k"] * 1000})
        assert (await log.append("t", arrow)).count == 1000
        assert len(await values(log)) == 1004
        assert [topic.name for topic in await log.topics()] == ["t"]

    with_log(tmp_path, test)


def test_a_topic_gets_more_log_streams_and_fewer(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        made = await log.create_topic("t", streams=2)
        await log.append("t", b"1", stream=made.streams[1])
        more = await log.change_topic("t", streams=3)
        assert len(more.streams) == 3
        await log.append("t", b"2", stream=more.streams[2])
        fewer = await log.change_topic("t", streams=1)
        assert fewer.streams == made.streams[:1]
        with pytest.raises(StreamSealed):
            await log.append("t", b"3", stream=more.streams[2])
        assert (await log.append("t", b"4")).stream == fewer.streams[0]
        assert await values(log) == [b"1", b"2", b"4"]
        with pytest.raises(InvalidArgument, match="nothing to change"):
            await log.change_topic("t")

    with_log(tmp_path, test)


def test_every_wrong_call_gets_its_own_error(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        topic = await log.create_topic("t", streams=2)
        ack = await log.append("t", b"x")
        with pytest.raises(AlreadyExists, match="use it as it is"):
            await log.create_topic("t")
        assert await log.create_topic("t", streams=5, exist_ok=True) == topic
        with pytest.raises(AlreadyExists, match=r"another schema:.*\n  present: no schema.*\n  given:   a int64; no"):
            await log.create_topic("t", schema={"a": pa.int64()}, exist_ok=True)
        timed = {"a": pa.int64(), "at": pa.timestamp("us", "UTC")}
        await log.create_topic("timed", schema=timed, event_time="at")
        own = r"\n  present: a int64, at timestamp\[us, tz=UTC\]; event_time='at'\n  given:   "
        with pytest.raises(AlreadyExists, match=rf"another event_time: .* name{own}.*; no event_time$"):
            await log.create_topic("timed", schema=timed, exist_ok=True)
        with pytest.raises(AlreadyExists, match=rf"another schema: .* grow with change_topic{own}at timestamp.*='at'$"):
            await log.create_topic("timed", schema={"at": timed["at"]}, event_time="at", exist_ok=True)
        with pytest.raises(AlreadyExists, match=f"another schema and another event_time: .* name{own}no schema, rec"):
            await log.create_topic("timed", exist_ok=True)
        await log.delete_topic("timed")
        for name in ("", "a b", "t/u", "-t", "é", "t" * 256):
            with pytest.raises(InvalidArgument, match="name"):
                await log.create_topic(name)
        with pytest.raises(Unavailable, match="replication 3 needs 3"):
            await log.create_topic("u", replication=3)
        with pytest.raises(NotFound, match="there is no topic 'nope'; topics: t"):
            await log.append("nope", b"x")
        with pytest.raises(NotFound, match="no log stream 77"):
            await log.append("t", b"x", stream=77)
        with pytest.raises(InvalidArgument, match="no record"):
            await log.append("t", [])
        with pytest.raises(InvalidRecord, match="row 1"):
            await log.append("t", [b"a", 1])
        for large in (b"x" * ((1 << 20) + 1), [b"x", b"x" * (1 << 20)]):
            with pytest.raises(RecordTooLarge):
                await log.append("t", large)
        with pytest.raises(RecordTooLarge, match="in parts"):
            await log.append("t", [b"x" * 500_000] * 40)
        with pytest.raises(InvalidArgument, match="stream="):
            await log.append("t", b"x", if_llsn=1)
        for wrong in ([1], "1", 1.0):
            with pytest.raises(InvalidArgument, match="stream= is the number of a log stream"):
                await log.append("t", b"x", stream=wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="stream= is the number of a log stream"):
                await log.read(ack.glsn, stream=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="timeout"):
            await log.append("t", b"x", timeout=0)
        with pytest.raises(NotYetCommitted):
            await log.read(await log.tail() + 1000)
        with pytest.raises(InvalidArgument):
            await log.read(0)
        async with await log.producer("t", id="p"):
            # Its beginning takes a position.
            records = {record.glsn async for record in log.subscribe("t", follow=False)}
        holes = set(range(1, await log.tail() + 1)) - records
        assert holes
        for glsn in holes:
            with pytest.raises(NoRecordHere):
                await log.read(glsn)
        assert await values(log) == [b"x"]
        await cluster.ask(SealRequest(ack.stream, final=True))
        with pytest.raises(StreamSealed):
            await log.append("t", b"x", stream=ack.stream, timeout=20)
        other = next(stream for stream in topic.streams if stream != ack.stream)
        assert (await log.append("t", b"y", timeout=20)).stream != ack.stream
        await cluster.ask(SealRequest(LogStreamId(other)))
        with pytest.raises(StreamSealed):
            await log.append("t", b"z", stream=other, timeout=0.3)
        waiting = asyncio.create_task(log.append("t", b"patient", stream=other))
        await asyncio.sleep(0.05)
        await cluster.ask(UnsealRequest(LogStreamId(other)))
        assert (await waiting).stream == other
        assert await values(log) == [b"x", b"y", b"patient"]
        await log.delete_topic("t")
        with pytest.raises(NotFound):
            await log.append("t", b"x")

    with_log(tmp_path, test)


def test_arguments_of_the_wrong_kind_are_named_in_words(tmp_path: Path) -> None:
    day = timedelta(days=1)
    topics: list[tuple[dict[str, Any], str]] = [
        ({"streams": "3"}, r"streams= is how many log streams the topic has, such as 3, not '3' \(str\)"),
        ({"streams": 1.5}, r"streams= is how many log streams the topic has, such as 3, not 1.5 \(float\)"),
        ({"streams": True}, r"streams= is how many.*not True \(bool\)"),
        ({"streams": 2**70}, "streams= is how many.*too large"),
        ({"streams": 0}, "a topic has 1 to 1024 log streams, not 0"),
        ({"replication": "3"}, r"replication= is how many storage nodes hold each record, such as 3, not '3' \(str\)"),
        ({"retention": "1d"}, r"retention= is a timedelta, such as timedelta\(days=7\), or cutwater.Retention.*'1d'"),
        ({"retention": 3}, "retention= is a timedelta"),
        ({"retention": Retention(time_us=day)}, "Retention.time_us= is a number of microseconds"),  # type: ignore[arg-type]
        ({"event_time": 3}, "event_time= is the name of a column"),
        ({"timeout": "3"}, "a timeout is a number of seconds, not '3'"),
    ]

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        for arguments, said in topics:
            with pytest.raises(InvalidArgument, match=said):
                await log.create_topic("t", **arguments)
        await log.create_topic("t", streams=np.int64(1))  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"streams= is how many log streams.*not '3' \(str\)"):
            await log.change_topic("t", streams="3")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="retention= is a timedelta"):
            await log.change_topic("t", retention=3)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"before= is a GLSN, such as 3, not '3' \(str\)"):
            await log.trim("t", before="3")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"if_llsn= is an LLSN, such as 3, not '3' \(str\)"):
            await log.append("t", b"x", stream=1, if_llsn="3")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"name of a producer is text, not 3 \(int\)"):
            await log.producer("t", id=3)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"name of a cursor is text, not 3 \(int\)"):
            log.cursor(3)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"glsn= is a position, such as 3, not '3' \(str\)"):
            await log.cursor("c").commit("3")  # type: ignore[arg-type]
        wrong: Any
        for wrong in (3, None, b"t", ["t"], {"t": 1}):
            for call in (
                log.append(wrong, b"x"),
                log.append(wrong, b"x", headers={"h": b"1"}),
                log.create_topic(wrong),
                log.change_topic(wrong, streams=2),
                log.delete_topic(wrong),
                log.topic(wrong),
                log.trim(wrong, before=2),
                log.producer(wrong, id="p"),
                log.watermark(wrong),
            ):
                with pytest.raises(InvalidArgument, match="a topic is a name, such as 'orders', not"):
                    await call
        for wrong in (3, b"t", [b"t"], ["t", 3]):
            with pytest.raises(InvalidArgument, match="a topic is a name, such as 'orders', not"):
                log.subscribe(wrong)
        with pytest.raises(InvalidArgument, match="name at least one topic"):
            log.subscribe([])

    with_log(tmp_path, test)


def test_addresses_that_lead_nowhere_or_elsewhere(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        wrong: Any
        for wrong in (3, "127.0.0.1:1", "cutwater://", "cutwater://127.0.0.1", "cutwater://127.0.0.1:http"):
            with pytest.raises(InvalidArgument):
                await AsyncClient.connect(wrong)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            with pytest.raises(ConnectionLost):
                await AsyncClient.connect(f"cutwater://127.0.0.1:{port}", timeout=0.3)
            # One of several is enough.
            both = f"cutwater://127.0.0.1:{port},127.0.0.1:{cluster.metadata_port}"
            async with await AsyncClient.connect(both, timeout=5) as other:
                assert other.cluster == log.cluster
        with pytest.raises(InvalidArgument, match=r"cluster= is the number of a cluster, such as 3, not 'x' \(str\)"):
            await AsyncClient.connect(cluster.servers, cluster="x")  # type: ignore[arg-type]
        with pytest.raises(WrongCluster):
            await AsyncClient.connect(cluster.servers, cluster=99)
        closed = await AsyncClient.connect(cluster.servers)
        await closed.close()
        with pytest.raises(ClientClosed):
            await closed.append("t", b"x")

    with_log(tmp_path, test)


def test_appends_at_the_same_time_travel_together(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", streams=2)
        before = cluster.nodes[1].node.counters.appends
        acks = await asyncio.gather(*(log.append("t", b"%d" % i, key=b"k%d" % i) for i in range(500)))
        assert cluster.nodes[1].node.counters.appends - before <= 20
        assert len({ack.glsn for ack in acks}) == 500
        records = {record.glsn: record async for record in log.subscribe("t", follow=False)}
        for i, ack in enumerate(acks):
            record = records[ack.glsn]
            assert (record.value, record.key, record.llsn, record.stream) == (
                b"%d" % i,
                b"k%d" % i,
                ack.llsn,
                ack.stream,
            )
        # One that is cancelled before it left takes nobody along, and is not there.
        tasks = [asyncio.create_task(log.append("t", b"c%d" % i)) for i in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[3], asyncio.CancelledError)
        found = [value for value in await values(log) if value.startswith(b"c")]
        assert sorted(found) == [b"c%d" % i for i in range(10) if i != 3]

    with_log(tmp_path, test)


def test_log_streams_take_turns_also_those_whose_node_has_to_be_connected_to(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        topic = await log.create_topic("t", streams=2, replication=1)

        async def taken() -> dict[int, int]:
            return Counter([(await log.append("t", b"x")).stream for _ in range(40)])

        assert await taken() == dict.fromkeys(topic.streams, 20)
        # Nobody tells the client but the connection itself, when the node closes it.
        await cluster.restart_node(1)

        async def is_open() -> bool:
            await log.topics()
            return all(info.is_open for info in log._catalogs.view.streams.values())

        await cluster.until_joined(2)
        await cluster.until(is_open, "both log streams are open again")
        assert await taken() == dict.fromkeys(topic.streams, 20)
        # One that is named takes nobody's turn.
        for _ in range(4):
            acks = [await log.append("t", b"x", stream=stream) for stream in (None, topic.streams[0], None)]
            assert {ack.stream for ack in acks[::2]} == set(topic.streams)

    with_log(tmp_path, test, nodes=2)


def test_a_condition_holds_or_nothing_is_appended(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        stream = (await log.create_topic("t")).streams[0]
        first = await log.append("t", b"one", stream=stream, if_llsn=1)
        assert first.llsn == 1
        outcomes = await asyncio.gather(
            *(log.append("t", b"two %d" % i, stream=stream, if_llsn=2) for i in range(5)), return_exceptions=True
        )
        assert [type(outcome).__name__ for outcome in outcomes].count("Ack") == 1
        failed = [outcome for outcome in outcomes if isinstance(outcome, ConditionFailed)]
        assert len(failed) == 4
        assert {error.actual for error in failed} == {3}
        assert len(await values(log)) == 2

    with_log(tmp_path, test)


def test_topics_with_a_schema_grow(tmp_path: Path) -> None:
    schema = pa.schema(
        [pa.field("user", pa.string(), nullable=False), ("amount", pa.int64()), ("at", pa.timestamp("ms"))]
    )

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        made = await log.create_topic("t", schema=schema, event_time="at")
        assert made.schema == schema
        rows = [{"user": "ann", "amount": 1, "at": NOON.replace(tzinfo=None)}]
        ack = await log.append("t", rows)
        record = await log.read(ack.glsn)
        assert (record.row, record["user"], record.timestamp) == (rows[0], "ann", NOON)
        async with cluster.client() as other:
            grown = schema.append(pa.field("note", pa.string()))
            with pytest.raises(IncompatibleSchema):
                await other.change_topic("t", schema=schema.remove(1))
            assert (await other.change_topic("t", schema=grown)).schema == grown
        # The first client finds out by itself when it needs to.
        await log.append("t", pa.table({"user": ["bob"], "note": ["new"], "at": [NOON.replace(tzinfo=None)]}))
        table = await log.table("t")
        assert table.column("note").to_pylist() == [None, "new"]
        assert table.column("amount").to_pylist() == [1, None]
        assert table.column_names == [
            "topic",
            "stream",
            "glsn",
            "llsn",
            "timestamp",
            "user",
            "amount",
            "at",
            "note",
            "ingested_at",
        ]
        assert (await log.read(ack.glsn)).row == {**rows[0], "note": None}
        narrow = await log.table("t", columns=["glsn", "note", "user"])
        assert narrow.column_names == ["glsn", "note", "user"]
        assert narrow.column("user").to_pylist() == ["ann", "bob"]
        with pytest.raises(InvalidRecord, match="'amount', row 0"):
            await log.append("t", [{"user": "eve", "amount": "much"}])

    with_log(tmp_path, test)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_are_smaller_and_read_the_same(tmp_path: Path, compression: str) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        values = [b"again and again %d" % (i % 7) for i in range(5000)]
        plain = await log.append("t", values)
        plain_bytes = cluster.nodes[1].node.counters.append_bytes
        async with cluster.client(compression=compression) as other:
            await other.append("t", values, key=b"k")
            assert cluster.nodes[1].node.counters.append_bytes - plain_bytes < plain_bytes / 4
            assert (await log.table("t", start=plain.glsn + 5000)).column("value").to_pylist() == values
            few = await log.table("t", start=plain.glsn + 5000, columns=["key"])
            assert few.column("key").to_pylist() == [b"k"] * 5000
        with pytest.raises(InvalidArgument, match="compression"):
            await AsyncClient.connect(cluster.servers, compression="gzip")  # type: ignore[arg-type]

    with_log(tmp_path, test)


def test_a_topic_that_is_made_anew_is_found(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        await log.append("t", b"old")
        async with cluster.client() as other:
            await other.delete_topic("t")
            await other.create_topic("t")
        await log.append("t", b"new", timeout=20)
        assert await values(log) == [b"new"]
        for wrong in ({"timestamp": 2**70}, {"key": 5}, {"timestamp": "noon"}):
            with pytest.raises(InvalidArgument):
                await log.append("t", b"x", **wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRecord, match="UTF-8"):
            await log.append("t", "\ud800")

    with_log(tmp_path, test)


def test_an_answer_that_is_lost_leaves_an_append_unknown_and_nothing_is_sent_twice(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        async with FaultProxy("127.0.0.1", cluster.ports[1]) as proxy:
            await cluster.restart_node(1, advertise=proxy.address)
            await log.append("t", b"before")
            assert proxy.connections
            proxy.swallow(from_target=True)
            with pytest.raises(AppendUnknown, match="not known"):
                await log.append("t", b"swallowed", timeout=0.5)
            lost = asyncio.create_task(log.append("t", b"lost"))
            replica = cluster.nodes[1].node.replicas[LogStreamId(1)].replica
            await cluster.until(lambda: replica.committed_end == 3, "it is in the log")
            proxy.heal()
            with pytest.raises(AppendUnknown):
                await lost
            assert await values(log) == [b"before", b"swallowed", b"lost"]
            # A node that cannot be reached at all is certain not to have it.
            proxy.refuse()
            await asyncio.sleep(0.1)
            with pytest.raises(CutwaterError) as refused:
                await log.append("t", b"never", timeout=0.5)
            assert not isinstance(refused.value, AppendUnknown)
            proxy.heal()
            assert await values(log) == [b"before", b"swallowed", b"lost"]

    with_log(tmp_path, test)


def test_every_call_ends_in_time_when_nobody_answers(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        ack = await log.append("t", b"x")
        await cluster.stop_node(1)
        await cluster.stop_metadata()
        calls = {
            "append": log.append("t", b"y", timeout=0.3),
            "append to a stream": log.append("t", [b"y"] * 100_000, stream=ack.stream, timeout=0.3),
            "read": log.read(ack.glsn, timeout=0.3),
            "tail": log.tail(timeout=0.3),
            "find": log.find(NOON, timeout=0.3),
            "topics": log.topics(timeout=0.3),
            "create": log.create_topic("u", timeout=0.3),
            "trim": log.trim("t", before=1, timeout=0.3),
            "cursor": log.cursor("c").get(timeout=0.3),
            "producer": log.producer("t", id="p", timeout=0.3),
            "table": log.table("t", timeout=0.3),
        }
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
        for name, outcome in zip(calls, outcomes, strict=True):
            assert isinstance(outcome, Unavailable | DeadlineExceeded), (name, outcome)
            assert not isinstance(outcome, AppendUnknown), name

    with_log(tmp_path, test)


def test_an_append_that_nobody_can_take_says_why(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        await cluster.stop_node(1)

        async def is_sealed() -> bool:
            return not any(stream.is_open for stream in (await cluster.ask(DescribeRequest())).streams)

        await cluster.until(is_sealed, "the log stream is sealed")
        with pytest.raises(Unavailable, match=r"takes appends now: storage nodes that do not answer: 1 \(start them"):
            await log.append("t", b"x", timeout=3)
        await cluster.start_node(1)
        assert (await log.append("t", b"x")).count == 1

    with_log(tmp_path, test)
