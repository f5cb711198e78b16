"""Named producers and records that the head refuses for their content: only the guilty ones fail, at once and for
good, and everything else is there once, in order."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import cutwater
from cutwater.client.async_client import AsyncClient
from cutwater.client.produce.producer import AsyncProducer
from cutwater.core.order import request_handling
from cutwater.core.order.state import OrderState
from cutwater.core.publish.run_requests import Outcome
from cutwater.core.requests import RenewProducerRequest
from cutwater.errors import InvalidArgument
from cutwater.storagenode.validation import content_checks
from cutwater.testing.fault_proxy import FaultProxy
from cutwater.types import Ack, LogStreamId
from tests.integration.log_cluster import LogCluster, seeded, with_log

AT_ONCE_SECONDS = 5.0
"""Far below the timeout of a send, which is 30 s."""


def ahead(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


async def content(log: AsyncClient) -> dict[int, bytes]:
    return {record.glsn: record.value async for record in log.subscribe("t", follow=False)}


async def outcomes(futures: list[asyncio.Future[Ack]]) -> list[Ack | BaseException]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*futures, return_exceptions=True)


async def heard(producer: AsyncProducer) -> None:
    """A flush tells of failures too."""
    with pytest.raises(InvalidArgument, match="ahead"):
        await producer.flush()


@pytest.mark.parametrize("bytes_max", [1, 300, 1 << 20])
def test_only_the_guilty_ones_fail(bytes_max: int, tmp_path: Path) -> None:
    """Each record in a batch of its own, a few together, or all."""

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", event_time_ahead_max="1h")
        producer = await log.producer("t", id="p")
        producer._bytes_max = bytes_max
        bad = {5, 6, 40, 99}
        began = time.monotonic()
        futures = [await producer.send(b"%d" % i, timestamp=ahead(7_200 if i in bad else 0)) for i in range(100)]
        told = await outcomes(futures)
        assert time.monotonic() - began < AT_ONCE_SECONDS
        refused = {i for i, outcome in enumerate(told) if isinstance(outcome, InvalidArgument)}
        assert refused == bad
        await heard(producer)
        # It goes on, and a declaration is refused as a record is.
        wrong = await producer.declare(watermark=ahead(7_200))
        right = await producer.send(b"last")
        with pytest.raises(InvalidArgument, match="declared watermark"):
            await wrong
        last = await right
        with pytest.raises(InvalidArgument):
            await producer.close()
        assert await content(log) == {
            **{ack.glsn: b"%d" % i for i, ack in enumerate(told) if isinstance(ack, Ack)},
            last.glsn: b"last",
        }
        assert [ack.glsn for ack in told if isinstance(ack, Ack)] == sorted(
            ack.glsn for ack in told if isinstance(ack, Ack)
        )
        assert producer.held_bytes == 0

    with_log(tmp_path, test)


def test_whoever_has_the_name_by_now_is_not_fenced_by_a_refusal(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", event_time_ahead_max="1h")
        old = await log.producer("t", id="p")
        async with cluster.client() as other, await other.producer("t", id="p") as new:
            future = await old.send(b"bad", timestamp=ahead(7_200))
            with pytest.raises(cutwater.CutwaterError):
                await asyncio.wait_for(future, AT_ONCE_SECONDS)
            await (await new.send(b"good"))
            with pytest.raises(cutwater.CutwaterError):
                await old.close()
        assert list((await content(log)).values()) == [b"good"]

    with_log(tmp_path, test)


def test_a_metadata_repository_of_an_older_version_is_asked_until_it_is_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, right = [], request_handling._renew_producer

    def renew(request: RenewProducerRequest, state: OrderState) -> Outcome:
        asked.append(request)
        if len(asked) < 4:
            raise InvalidArgument("ask: the argument is not as expected: Invalid value 'RenewProducerRequest'")
        return right(request, state)

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", event_time_ahead_max="1h")
        producer = await log.producer("t", id="p")
        before, bad = await producer.send(b"before"), await producer.send(b"bad", timestamp=ahead(7_200))
        after = await producer.send(b"after")
        with pytest.raises(InvalidArgument, match="ahead"):
            await asyncio.wait_for(bad, AT_ONCE_SECONDS)
        acks = [await before, await after]
        await heard(producer)
        await producer.close()
        assert await content(log) == {acks[0].glsn: b"before", acks[1].glsn: b"after"}
        assert len(asked) >= 4

    monkeypatch.setattr(request_handling, "_renew_producer", renew)
    with_log(tmp_path, test)


def test_connections_break_off_while_records_at_the_limit_are_refused_and_taken(tmp_path: Path) -> None:
    """The limit moves with time, so that a repeated attempt may be taken which was refused before. Whatever a caller is
    told is true."""
    rng = seeded()

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", event_time_ahead_max="1s")
        async with FaultProxy("127.0.0.1", cluster.ports[1]) as proxy:
            await cluster.restart_node(1, advertise=proxy.address)
            producer = await log.producer("t", id="p")
            producer._bytes_max = 100
            proxy.delay_seconds = 0.002
            futures: list[asyncio.Future[Ack]] = []
            for i in range(200):
                seconds = rng.choice((0, 0, 1.005, 1.02, 100))
                futures.append(await producer.send(b"%d" % i, timestamp=ahead(seconds)))
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.01)
                if rng.random() < 0.05:
                    proxy.break_off()
            told = await outcomes(futures)
            await heard(producer)
            await producer.close()
            found = await content(log)
        acks = {outcome.glsn: b"%d" % i for i, outcome in enumerate(told) if isinstance(outcome, Ack)}
        assert all(isinstance(outcome, Ack | InvalidArgument) for outcome in told), told
        assert list(acks) == sorted(acks)
        assert len(acks) < len(told)
        assert found == acks

    with_log(tmp_path, test)


@pytest.mark.parametrize("is_checked_in_a_thread", [False, True])
def test_what_is_in_the_log_is_not_refused_when_it_is_repeated(
    is_checked_in_a_thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The acknowledgement is lost, and by the time of the next attempt the topic has a limit that the record breaks."""
    if is_checked_in_a_thread:
        monkeypatch.setattr(content_checks, "is_plain", lambda *_: False)
        monkeypatch.setattr(content_checks, "LOOP_BYTES_MAX", 0)

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        async with FaultProxy("127.0.0.1", cluster.ports[1]) as proxy:
            await cluster.restart_node(1, advertise=proxy.address)
            producer = await log.producer("t", id="p")
            proxy.swallow(from_target=True)
            future = await producer.send(b"early", timestamp=ahead(7_200))
            replica = cluster.nodes[1].node.replicas[LogStreamId(1)].replica
            await cluster.until(lambda: replica.committed_end >= 2, "it is in the log")
            await log.change_topic("t", event_time_ahead_max="1h")
            topics = cluster.nodes[1].topics
            await cluster.until(lambda: getattr(topics.known(LogStreamId(1)), "ahead_us", 0) > 0, "the limit is known")
            proxy.heal()
            ack = await asyncio.wait_for(future, 20)
            late = await producer.send(b"late", timestamp=ahead(7_200))
            with pytest.raises(InvalidArgument):
                await late
            await heard(producer)
            await producer.close()
            assert await content(log) == {ack.glsn: b"early"}

    with_log(tmp_path, test)


def test_a_new_limit_holds_as_soon_as_nodes_hear_of_it(tmp_path: Path) -> None:
    """Also while nothing is appended, so that no cut tells them."""

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        await log.append("t", b"before", timestamp=ahead(7_200))
        for limit, is_taken in (("1h", False), ("3h", True), ("30m", False), (0, True)):
            await asyncio.sleep(0.05)
            await log.change_topic("t", event_time_ahead_max=limit)
            topics, expected = cluster.nodes[1].topics, {"1h": 3_600, "3h": 10_800, "30m": 1_800, 0: 0}[limit]
            began = time.monotonic()
            await cluster.until(
                lambda: topics.known(LogStreamId(1)).ahead_us == expected * 1_000_000,  # noqa: B023
                "the limit is known",
            )
            assert time.monotonic() - began < 1.0
            if is_taken:
                await log.append("t", b"ahead", timestamp=ahead(7_200))
            else:
                with pytest.raises(InvalidArgument):
                    await log.append("t", b"ahead", timestamp=ahead(7_200))

    with_log(tmp_path, test)


def test_in_an_embedded_log(tmp_path: Path) -> None:
    with cutwater.open(tmp_path / "log") as log:
        log.create_topic("t", event_time_ahead_max="1h")
        with log.producer("t", id="p") as producer:
            futures = [producer.send(b"%d" % i, timestamp=ahead(7_200 if i == 50 else 0)) for i in range(100)]
            with pytest.raises(InvalidArgument, match="ahead"):
                futures[50].result(AT_ONCE_SECONDS)
            with pytest.raises(InvalidArgument):
                producer.flush()
            assert all(futures[i].result() for i in range(100) if i != 50)
        values = [record.value for record in log.subscribe("t", follow=False)]
        assert values == [b"%d" % i for i in range(100) if i != 50]
