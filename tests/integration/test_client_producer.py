"""Named producers: each record once, in order, with its position, whatever got lost on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.client.errors import ClientClosed, InvalidRecord, RecordTooLarge
from cutwater.core.requests import AddStreamRequest, SealRequest
from cutwater.errors import AppendUnknown, DeadlineExceeded, InvalidArgument, NotFound, ProducerFenced
from cutwater.testing.fault_proxy import FaultProxy
from cutwater.types import Ack, LogStreamId
from tests.integration.log_cluster import LogCluster, seeded, with_log
from tests.times import at_us


async def content(log: AsyncClient) -> dict[int, bytes]:
    return {record.glsn: record.value async for record in log.subscribe("t", follow=False)}


def test_records_are_there_in_order_with_the_positions_that_were_told(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", streams=3)
        before = cluster.nodes[1].node.counters.appends
        async with await log.producer("t", id="p") as producer:
            futures = [await producer.send(b"%d" % i, key=b"k") for i in range(2000)]
            futures.append(await producer.send([b"a", b"b"], timestamp=[at_us(1), at_us(2)], headers={"h": b"1"}))
            futures.append(await producer.send(pa.table({"value": [b"c"] * 3})))
            await producer.flush()
            acks = [future.result() for future in futures]
        assert cluster.nodes[1].node.counters.appends - before < 100
        assert [ack.count for ack in acks[-2:]] == [2, 3]
        assert len({ack.stream for ack in acks}) == 1
        assert [ack.glsn for ack in acks] == sorted(ack.glsn for ack in acks)
        found = await content(log)
        assert list(found.values()) == [b"%d" % i for i in range(2000)] + [b"a", b"b", b"c", b"c", b"c"]
        assert all(found[acks[i].glsn] == b"%d" % i for i in range(2000))
        with pytest.raises(ClientClosed):
            await producer.send(b"late")
        async with await log.producer("t", id="p") as again:
            assert (await (await again.send(b"again"))).glsn > acks[-1].glsn
            for wrong, error in ((5, InvalidArgument), ([b"a", 1], InvalidRecord), (b"x" * (2 << 20), RecordTooLarge)):
                with pytest.raises(error):
                    await again.send(wrong)
        with pytest.raises(NotFound):
            await log.producer("nope", id="p")
        await log.create_topic("u")
        with pytest.raises(InvalidArgument, match="another topic"):
            await log.producer("u", id="p")

    with_log(tmp_path, test)


def test_a_producer_that_sends_tells_its_client_of_new_log_streams(tmp_path: Path) -> None:
    """By the revision in its acknowledgements: the client asks for no catalog otherwise."""

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        async with await log.producer("t", id="p") as producer:
            await (await producer.send(b"before"))
            (topic,) = log._catalogs.view.catalog.topics
            assert len(log._catalogs.view.streams_of(topic.topic)) == 1
            await cluster.ask(AddStreamRequest("t"))
            async with asyncio.timeout(10):
                while len(log._catalogs.view.streams_of(topic.topic)) == 1:
                    await (await producer.send(b"meanwhile"))
                    await asyncio.sleep(0.02)

    with_log(tmp_path, test)


def test_an_older_holder_of_the_name_can_do_no_more_harm(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        old = await log.producer("t", id="p")
        await (await old.send(b"old"))
        async with cluster.client() as other, await other.producer("t", id="p") as new:
            await (await new.send(b"new"))
            future = await old.send(b"too late")
            with pytest.raises(ProducerFenced):
                await future
            with pytest.raises(ProducerFenced):
                await old.send(b"still")
            with pytest.raises(ProducerFenced):
                await old.close()
            await old.close()
            await (await new.send(b"newer"))
        assert list((await content(log)).values()) == [b"old", b"new", b"newer"]

    with_log(tmp_path, test)


def test_a_lost_acknowledgement_is_found_and_the_record_is_there_once(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        async with FaultProxy("127.0.0.1", cluster.ports[1]) as proxy:
            await cluster.restart_node(1, advertise=proxy.address)
            async with await log.producer("t", id="p") as producer:
                first = await (await producer.send(b"first"))
                proxy.swallow(from_target=True)
                futures = [await producer.send(b"lost %d" % i) for i in range(10)]
                late = await producer.send(b"impatient", timeout=0.3)
                replica = cluster.nodes[1].node.replicas[LogStreamId(1)].replica
                await cluster.until(lambda: replica.committed_end >= 13, "all of it is in the log")
                with pytest.raises(AppendUnknown):
                    await late
                assert not any(future.done() for future in futures)
                proxy.heal()
                acks = [await future for future in futures]
                with pytest.raises(AppendUnknown):
                    await producer.flush()
            assert await content(log) == {
                first.glsn: b"first",
                **{ack.glsn: b"lost %d" % i for i, ack in enumerate(acks)},
                acks[-1].glsn + 1: b"impatient",
            }
            proxy.refuse()
            # Whoever knows that there is more does not wait for ever.
            with pytest.raises(DeadlineExceeded):
                [record async for record in log.subscribe("t", follow=False, timeout=1)]

    with_log(tmp_path, test)


def test_what_cannot_be_sent_waits_and_what_is_too_much_has_to(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        producer = await log.producer("t", id="p", buffer_bytes=10_000)
        await (await producer.send(b"x"))
        await cluster.stop_node(1)
        futures = [await producer.send(b"%d" % i * 1000) for i in range(8)]
        with pytest.raises(DeadlineExceeded, match="no room"):
            await producer.send(b"y" * 5000, timeout=0.2)
        room = asyncio.create_task(producer.send(b"z" * 5000))
        await asyncio.sleep(0)
        await cluster.start_node(1)
        acks = [await future for future in futures]
        last = await (await room)
        assert last.llsn > acks[-1].llsn
        await producer.close()
        gone = await log.producer("t", id="q")
        await (await gone.send(b"x"))
        await cluster.stop_node(1)
        sent = await gone.send(b"in flight")
        await asyncio.sleep(0.05)
        with pytest.raises((DeadlineExceeded, AppendUnknown)):
            await gone.close(timeout=0.3)
        with pytest.raises((AppendUnknown, ClientClosed)):
            await sent

    with_log(tmp_path, test)


def test_what_was_never_sent_never_will_be_and_an_end_without_outcome_is_told(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        async with FaultProxy("127.0.0.1", cluster.ports[1]) as proxy:
            await cluster.restart_node(1, advertise=proxy.address)
            producer = await log.producer("t", id="p", buffer_bytes=10_000)
            await (await producer.send(b"first"))
            proxy.refuse()
            await cluster.until(lambda: log._nodes.ready(proxy.address) is None, "the client has noticed")
            late = await producer.send(b"never" * 1000, timeout=0.5)
            with pytest.raises(DeadlineExceeded, match=r"could not send it within 0\.5 s: .*127\.0\.0\.1:"):
                await late
            # There is room again.
            await producer.send(b"x" * 9_000, timeout=0.5)
            with pytest.raises(DeadlineExceeded, match="could not send it"):
                await producer.flush()
            proxy.heal()
            await (await producer.send(b"second"))
            proxy.swallow(from_target=True)
            with pytest.raises(AppendUnknown):
                await (await producer.send(b"third", timeout=0.2))
            with pytest.raises(AppendUnknown):
                await producer.flush()
            with pytest.raises(AppendUnknown, match="1 record, and does not go on trying"):
                await producer.close(timeout=0.2)
            proxy.heal()
            assert list((await content(log)).values()) == [b"first", b"second", b"third"]

    with_log(tmp_path, test)


def test_a_sealed_stream_is_left_for_another_one(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", streams=2)
        async with await log.producer("t", id="p") as producer:
            first = await (await producer.send(b"first"))
            futures = [await producer.send(b"%d" % i) for i in range(50)]
            await cluster.ask(SealRequest(first.stream, final=True))
            futures += [await producer.send(b"%d" % i) for i in range(50, 100)]
            acks = [await future for future in futures]
        assert acks[-1].stream != first.stream
        found = await content(log)
        assert [found[ack.glsn] for ack in acks] == [b"%d" % i for i in range(100)]
        assert len(found) == 101

    with_log(tmp_path, test)


@pytest.mark.timeout(240)
def test_exactly_once_while_nodes_go_and_come_back(tmp_path: Path) -> None:
    random = seeded()

    async def produce(cluster: LogCluster, number: int) -> list[tuple[Ack, bytes]]:
        sent: list[tuple[asyncio.Future[Ack], bytes]] = []
        async with cluster.client(timeout=60) as client, await client.producer("t", id=f"p{number}") as producer:
            for i in range(1500):
                value = b"%d/%d" % (number, i)
                sent.append((await producer.send(value), value))
                if random.random() < 0.01:
                    await asyncio.sleep(random.random() * 0.2)
        return [(future.result(), value) for future, value in sent]

    async def break_things(cluster: LogCluster) -> None:
        for number in random.sample((1, 2, 3), 3):
            await asyncio.sleep(random.random())
            await cluster.stop_node(number)
            await asyncio.sleep(random.random() * 2)
            await cluster.start_node(number)

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", streams=3, replication=3)
        *produced, _ = await asyncio.gather(*(produce(cluster, n) for n in range(4)), break_things(cluster))
        found = await content(log)
        expected = {ack.glsn: value for one in produced if one is not None for ack, value in one}
        assert len(expected) == 6000
        assert found == expected
        for one in produced:
            assert one is not None
            by_stream: dict[int, list[int]] = {}
            for ack, _ in one:
                by_stream.setdefault(ack.stream, []).append(ack.llsn)
            assert all(llsns == sorted(llsns) for llsns in by_stream.values())

    with_log(tmp_path, test, nodes=3, seconds=230)
