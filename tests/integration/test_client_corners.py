"""What goes on at the edges of a client: deadlines that differ, answers that are late, and ends that come early."""

from __future__ import annotations

import asyncio
import gc
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cutwater.client.append.batcher import LANE_BYTES_MAX
from cutwater.client.async_client import AsyncClient
from cutwater.client.errors import ClientClosed
from cutwater.client.produce.producer import AsyncProducer
from cutwater.client.produce.producer_queue import Flight
from cutwater.client.read.records import Record
from cutwater.client.subscribe.stream_readers import Feed
from cutwater.client.subscribe.subscriptions import AsyncSubscription
from cutwater.core import producer_session
from cutwater.core.producer_session import Phase
from cutwater.core.requests import SealRequest, UnsealRequest
from cutwater.errors import CutwaterError, DeadlineExceeded, NotFound, SequenceExpired, SequenceReused
from cutwater.protocol.methods import Received
from cutwater.protocol.storage_api import AppendAnswer
from cutwater.types import Ack, BatchKind, LogStreamId, ProducerEpoch, ProducerId, ProducerTag, Sequence
from cutwater.wire.states import ConnectionState
from tests.integration.log_cluster import LogCluster, with_log


async def values(log: AsyncClient) -> list[bytes]:
    return [record.value async for record in log.subscribe("t", follow=False)]


def background() -> int:
    return sum(not task.done() for task in asyncio.all_tasks())


def test_whoever_was_told_that_nothing_was_appended_is_not_sent_with_the_others(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        stream = LogStreamId((await log.create_topic("t")).streams[0])
        await cluster.ask(SealRequest(stream))
        await cluster.until(lambda: _is_sealed(log, stream), "the catalog says that it is sealed")
        # They leave together, in one batch, which waits for the log stream to be open.
        short = asyncio.create_task(log.append("t", b"short", stream=stream, timeout=0.2))
        cancelled = asyncio.create_task(log.append("t", b"cancelled", stream=stream))
        long = [asyncio.create_task(log.append("t", b"long %d" % i, stream=stream)) for i in range(2)]
        with pytest.raises(DeadlineExceeded, match="nothing was appended"):
            await short
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await cluster.ask(UnsealRequest(stream))
        acks = [await task for task in long]
        assert await values(log) == [b"long 0", b"long 1"]
        assert [(await log.read(ack.glsn)).value for ack in acks] == [b"long 0", b"long 1"]

    with_log(tmp_path, test)


async def _is_sealed(log: AsyncClient, stream: LogStreamId) -> bool:
    await log.topics()
    return not log._catalogs.view.streams[stream].is_open


def test_closing_tells_also_those_who_wait_for_room(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        stream = LogStreamId((await log.create_topic("t")).streams[0])
        await cluster.ask(SealRequest(stream))
        async with cluster.client() as other:
            await cluster.until(lambda: _is_sealed(other, stream), "the catalog says that it is sealed")
            value = b"x" * 60_000
            tasks = [asyncio.create_task(other.append("t", value, stream=stream, timeout=1_000)) for _ in range(400)]
            (lane,) = await _lanes(cluster, other)
            await cluster.until(lambda: lane.bytes > LANE_BYTES_MAX, "the lane is full")
            await other.close()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {ClientClosed}
        await cluster.ask(UnsealRequest(stream))
        assert await values(log) == []

    with_log(tmp_path, test)


def test_an_iterator_is_read_once_also_if_there_is_no_room_yet(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        stream = LogStreamId((await log.create_topic("t")).streams[0])
        await cluster.ask(SealRequest(stream))
        await cluster.until(lambda: _is_sealed(log, stream), "the catalog says that it is sealed")
        tasks = [asyncio.create_task(log.append("t", b"x" * 60_000, stream=stream)) for _ in range(400)]
        (lane,) = await _lanes(cluster, log)
        await cluster.until(lambda: lane.bytes > LANE_BYTES_MAX, "the lane is full")
        late = asyncio.create_task(log.append("t", (value for value in (b"a", b"b")), stream=stream))
        await asyncio.sleep(0.1)
        assert not late.done()
        await cluster.ask(UnsealRequest(stream))
        assert (await late).count == 2
        await asyncio.gather(*tasks)
        assert [value for value in await values(log) if len(value) == 1] == [b"a", b"b"]

    with_log(tmp_path, test)


async def _lanes(cluster: LogCluster, log: AsyncClient) -> list[Any]:
    await cluster.until(lambda: bool(log._appends._lanes), "there is a lane")
    return list(log._appends._lanes.values())


def test_a_connection_that_was_lost_does_not_take_its_successor_along(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        await log.append("t", b"x")
        (address,) = log._catalogs.view.addresses.values()
        old = log._nodes.ready(address)
        assert old is not None
        old.abort()
        await cluster.until(lambda: old.state is ConnectionState.CLOSED, "it is closed")
        await log.append("t", b"y")
        new = log._nodes.ready(address)
        assert new is not None
        log._nodes.drop(address, old)
        assert log._nodes.ready(address) is new
        log._nodes.drop(address, new)
        assert log._nodes.ready(address) is None

    with_log(tmp_path, test)


def test_a_producer_that_was_never_open_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        await cluster.stop_node(1)
        async with cluster.client() as other:
            before = background()
            for _ in range(3):
                opening = asyncio.create_task(other.producer("t", id="p"))
                await cluster.until(lambda: bool(other._producers), "it is being opened")
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
            await cluster.until(lambda: background() <= before, "everything that it began has ended")
            opening = asyncio.create_task(other.producer("t", id="p", timeout=1_000))
            await cluster.until(lambda: any(not one.is_closed for one in other._producers), "it is being opened")
            await other.close()
            with pytest.raises(ClientClosed):
                await opening

    with_log(tmp_path, test)


def _answer(
    producer: AsyncProducer, epoch: int, sequence: int, outcome: Received[AppendAnswer] | CutwaterError
) -> None:
    flight = producer._queue.flights.get(Sequence(sequence)) or Flight([])
    flight.open_calls += 1
    tag = ProducerTag(ProducerId(producer.id), ProducerEpoch(epoch), Sequence(sequence))
    producer._answered(BatchKind.DATA, tag, flight, outcome)


def test_late_answers_do_a_producer_no_harm(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        producer = await log.producer("t", id="p")
        ack = await (await producer.send(b"first"))
        epoch, sequence = producer._session.epoch, producer._session.last_sequence
        # To an attempt of a batch that another attempt has settled.
        _answer(producer, epoch, sequence, SequenceExpired("too old"))
        _answer(producer, epoch, sequence, SequenceReused("other content"))
        _answer(producer, epoch, sequence, Received(AppendAnswer(ack, sequence), b""))
        future = await producer.send(b"second")
        await asyncio.sleep(0)
        # To an attempt under an epoch that the producer has left.
        _answer(producer, epoch - 1, sequence + 1, SequenceReused("other content"))
        await future
        await producer.close()
        _answer(producer, epoch, sequence + 1, Received(AppendAnswer(ack, sequence), b""))
        _answer(producer, epoch, sequence + 1, SequenceExpired("too old"))
        assert await values(log) == [b"first", b"second"]
        # One about a batch that is under way is no such answer.
        doomed = await log.producer("t", id="p")
        future = await doomed.send(b"third")
        await asyncio.sleep(0)
        _answer(doomed, doomed._session.epoch, doomed._session.last_sequence, SequenceReused("other content"))
        with pytest.raises(SequenceReused):
            await doomed.send(b"fourth")
        await asyncio.gather(doomed.close(), future, return_exceptions=True)

    with_log(tmp_path, test)


def test_what_the_session_cannot_take_yet_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to one batch is lost, and those after it are settled until the numbers have gone too far."""
    monkeypatch.setattr(producer_session, "IN_FLIGHT_BATCHES_MAX", 12)

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        async with await log.producer("t", id="p") as producer:
            answered, lost = producer._answered, producer._session.last_sequence + 1
            was_full = False

            def lose_first(kind: BatchKind, tag: ProducerTag, flight: Flight | None, outcome: Any) -> None:
                nonlocal was_full
                was_full = was_full or not producer._session.has_room
                if tag.sequence == lost and not was_full:
                    return
                answered(kind, tag, flight, outcome)

            monkeypatch.setattr(producer, "_answered", lose_first)
            futures: list[asyncio.Future[Ack]] = []
            for i in range(30):
                futures.append(await producer.send(b"%d" % i))
                # So that each is a batch of its own.
                await asyncio.sleep(0)
                if i:
                    await futures[i]
            acks = [await future for future in futures]
            assert was_full
        assert [ack.glsn for ack in acks] == sorted(ack.glsn for ack in acks)
        assert await values(log) == [b"%d" % i for i in range(30)]

    with_log(tmp_path, test)


def test_a_producer_is_told_that_its_topic_was_deleted(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        producer = await log.producer("t", id="p")
        await (await producer.send(b"x"))
        await log.delete_topic("t")
        future = await producer.send(b"y")
        with pytest.raises(NotFound, match="was deleted"):
            await future
        assert producer._session.phase is Phase.GONE
        with pytest.raises(NotFound):
            await producer.send(b"z")
        with pytest.raises(NotFound):
            await producer.close()

    with_log(tmp_path, test)


async def _doomed(log: AsyncClient) -> AsyncSubscription[Record]:
    await log.create_topic("doomed")
    subscription = await log.subscribe("doomed")
    await log.delete_topic("doomed")
    return subscription


def test_subscriptions_end_at_their_end_or_when_nobody_has_them(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", streams=2)
        await log.append("t", b"x")
        before = background()
        ended = log.subscribe("t", follow=False)
        assert [record.value async for record in ended] == [b"x"]
        assert ended._feed is None
        assert await ended.take() == []
        for _ in range(5):
            async for _record in log.subscribe("t"):
                break
        with pytest.raises(NotFound):
            await (await _doomed(log)).take()
        await cluster.until(lambda: background() <= before, "nothing works for those who are gone")
        gc.collect()
        assert list(log._subscribing.known) == [ended]

    with_log(tmp_path, test)


def _holds_something(feed: Feed) -> bool:
    return feed._machine._bytes > 0


async def _until_it_fails(subscription: AsyncSubscription[Record]) -> None:
    while True:
        await subscription.take()


def test_a_pattern_goes_on_without_a_topic_that_was_deleted(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        for name in ("doomed", "kept"):
            await log.create_topic(name)
        everything = await log.subscribe(re.compile(".*"))
        by_name = await log.subscribe(["doomed", "kept"])
        await log.append("doomed", b"0")
        acks = [await log.append("kept", b"1"), await log.append("doomed", b"2"), await log.append("kept", b"3")]
        for subscription in (everything, by_name):
            feed = subscription._feed
            assert feed is not None
            await cluster.until(partial(_holds_something, feed), "there is something to be taken")
        await log.delete_topic("doomed")
        found: list[int] = []
        async with asyncio.timeout(60):
            while acks[2].glsn not in found:
                found += [record.glsn for record in await everything.take()]
            assert found == [acks[0].glsn, acks[2].glsn]
            with pytest.raises(NotFound, match="'doomed' was deleted"):
                await _until_it_fails(by_name)
        await everything.close()
        await by_name.close()

    with_log(tmp_path, test)
