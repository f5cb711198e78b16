"""Subscriptions: exactly the log from their start, in order, over failures, new log streams and topics, and trims."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.errors import ClientClosed
from cutwater.client.read.records import Record
from cutwater.client.subscribe import stream_readers
from cutwater.client.subscribe.subscriptions import AsyncSubscription
from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.core.requests import AddStreamRequest, SealRequest
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded, InvalidArgument, NotFound, Trimmed
from cutwater.runtime.deadlines import Deadline
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.types import LogStreamId
from tests.integration.log_cluster import LogCluster, seeded, with_log

WITHIN_SECONDS = 60


async def take(subscription: AsyncSubscription[Record], count: int) -> list[Record]:
    found: list[Record] = []
    async with asyncio.timeout(WITHIN_SECONDS):
        while len(found) < count:
            found += await subscription.take()
    assert len(found) == count
    return found


async def whole(log: AsyncClient, topics: str | list[str] = "t", **where: object) -> list[Record]:
    async with asyncio.timeout(WITHIN_SECONDS):
        return [record async for record in log.subscribe(topics, follow=False, **where)]  # type: ignore[arg-type]


def test_where_it_starts_and_stops(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", streams=2)
        acks = [await log.append("t", [b"%d" % i, b"x"]) for i in range(10)]
        glsns = [ack.glsn + i for ack in acks for i in range(2)]
        records = await whole(log)
        assert [record.glsn for record in records] == glsns
        assert [record.value for record in records[::2]] == [b"%d" % i for i in range(10)]
        # In the middle of a batch, too.
        for start, stop in ((3, 9), (4, 5), (0, 20), (7, 7)):
            found = await whole(log, start=glsns[start], stop=glsns[stop] if stop < 20 else None)
            assert [record.glsn for record in found] == glsns[start:stop]
        middle = records[10].ingested_at
        assert await log.find(middle) == records[10].glsn
        assert [r.glsn for r in await whole(log, start=middle)] == glsns[10:]
        assert [r.glsn for r in await whole(log, stop=middle)] == glsns[:10]
        assert await log.find(datetime(2000, 1, 1, tzinfo=UTC)) == glsns[0]
        assert await log.find(datetime.now(UTC) + timedelta(days=1)) > glsns[-1]
        cursor = log.cursor("c")
        assert await cursor.get() is None
        assert [r.glsn for r in await whole(log, start=cursor)] == glsns
        await cursor.commit(glsns[6])
        assert await cursor.get() == glsns[6]
        assert [r.glsn for r in await whole(log, start=log.cursor("c"))] == glsns[7:]
        await cursor.drop()
        assert await cursor.get() is None
        async with log.subscribe("t", start="latest") as latest:
            with pytest.raises(DeadlineExceeded):
                await latest.take(timeout=0.05)
            ack = await log.append("t", b"new")
            assert [record.glsn for record in await take(latest, 1)] == [ack.glsn]
        with pytest.raises(ClientClosed):
            await latest.take()
        for wrong in (0, -1, "middle", 1.5, None, True):
            with pytest.raises(InvalidArgument):
                log.subscribe("t", start=wrong)  # type: ignore[arg-type]
        for wrong in (0, "latest", 1.5, cursor):
            with pytest.raises(InvalidArgument, match="stop= is a GLSN from 1 on, or a datetime, not"):
                log.subscribe("t", stop=wrong)  # type: ignore[arg-type]
        day = datetime(2026, 1, 2, tzinfo=UTC)
        for begin, end in ((5, 2), (day, day - timedelta(days=1))):
            for subscribe in (log.subscribe, log.batches):
                with pytest.raises(InvalidArgument, match=r"ends before it begins: stop is .*2.*, and start is"):
                    subscribe("t", start=begin, stop=end)
        # Whether these are empty is known only from the log.
        assert not await whole(log, start="latest", stop=2)
        assert not await whole(log, start=datetime.now(UTC), stop=2)
        with pytest.raises(InvalidArgument, match="a datetime with a time zone"):
            await whole(log, start=datetime(2026, 1, 1))
        with pytest.raises(InvalidArgument, match="a datetime with a time zone"):
            await whole(log, start=datetime(2026, 1, 1), stop=day)
        for wrong in (1_767_225_600, "2026-01-01", 1.5, None):
            with pytest.raises(InvalidArgument, match="a datetime with a time zone"):
                await log.find(wrong)  # type: ignore[arg-type]
        for names in ([], [1], ""):
            with pytest.raises((InvalidArgument, NotFound)):
                await whole(log, names)  # type: ignore[arg-type]
        with pytest.raises(NotFound):
            await whole(log, "nope")

    with_log(tmp_path, test)


def test_what_is_closed_is_not_at_its_end_and_who_does_not_wait_gets_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        await log.append("t", [b"1", b"2"])
        subscription = log.subscribe("t")
        async with asyncio.timeout(WITHIN_SECONDS):
            # It begins, and what is on its way comes although whoever asks does not wait.
            while True:
                with suppress(DeadlineExceeded):
                    assert [record.value for record in await subscription.take(timeout=0)] == [b"1", b"2"]
                    break
        with pytest.raises(DeadlineExceeded, match="nothing has come yet"):
            await subscription.take(timeout=0)
        for wrong in (-1, float("nan"), "5"):
            with pytest.raises(InvalidArgument, match="timeout"):
                await subscription.take(timeout=wrong)  # type: ignore[arg-type]
        await subscription.close()
        with pytest.raises(ClientClosed, match="this subscription was closed"):
            await subscription.take(timeout=5)
        ended = log.subscribe("t", follow=False)
        assert (await anext(ended)).value == b"1"
        assert (await anext(ended)).value == b"2"
        assert await ended.take(timeout=0) == await ended.take() == []
        some = log.subscribe("t")
        async for record in some:
            assert record.value == b"1"
            await some.close()
        with pytest.raises(ClientClosed, match="this subscription was closed"):
            aiter(some)
        waits = await log.subscribe("t", start="latest")
        waiting = asyncio.create_task(anext(waits, None))
        await asyncio.sleep(0)
        await waits.close()
        assert await waiting is None, "by another task: its loop ends, too"
        last = await log.subscribe("t")
        feed = last._feed
        assert feed is not None
        take = feed.take

        async def taken() -> list[CommittedBatch]:
            runs = await take()
            await last.close()
            return runs

        monkeypatch.setattr(feed, "take", taken)
        assert [record async for record in last] == [], "not even what was just ready comes after it"

    with_log(tmp_path, test)


def test_who_has_everything_and_does_not_take_it_does_not_ask_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        await log.append("t", b"1")
        monkeypatch.setattr(stream_readers, "CATALOG_SECONDS_ALONE", 0.001)
        subscription = await log.subscribe("t", follow=False)
        await asyncio.sleep(0.1)
        asked, fresh = 0, Catalogs.fresh

        async def counted(catalogs: Catalogs, deadline: Deadline) -> CatalogView:
            nonlocal asked
            asked += 1
            return await fresh(catalogs, deadline)

        monkeypatch.setattr(Catalogs, "fresh", counted)
        await asyncio.sleep(0.2)
        assert asked <= 1
        await subscription.close()

    with_log(tmp_path, test)


def test_several_topics_patterns_and_columns(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        for name in ("orders-eu", "orders-us", "other"):
            await log.create_topic(name)
        acks = [await log.append(name, b"1", key=b"k") for name in ("orders-us", "other", "orders-eu", "orders-us")]
        both = await whole(log, ["orders-eu", "orders-us"])
        assert [(r.topic, r.glsn) for r in both] == [
            ("orders-us", acks[0].glsn), ("orders-eu", acks[2].glsn), ("orders-us", acks[3].glsn)
        ]  # fmt: skip
        subscription = await log.subscribe(re.compile("orders-.*"))
        assert [r.glsn for r in await take(subscription, 3)] == [acks[0].glsn, acks[2].glsn, acks[3].glsn]
        await log.create_topic("orders-new", streams=2)
        await log.append("other", b"no")
        new = [await log.append("orders-new", b"yes"), await log.append("orders-eu", b"yes")]
        assert [r.glsn for r in await take(subscription, 2)] == [ack.glsn for ack in new]
        await subscription.close()
        early = await log.subscribe(re.compile("later"), start="latest")
        await log.create_topic("later")
        await log.append("later", b"1")
        # Without looking more often, it would be 2 s until it hears of its first topic.
        assert [r.topic for r in await early.take(timeout=1)] == ["later"]
        await early.close()
        assert await whole(log, re.compile("nothing")) == []  # type: ignore[arg-type]
        assert (await log.table(re.compile("nothing"))).num_rows == 0
        batches = [batch async for batch in log.batches(["orders-eu", "other"], follow=False)]
        table = pa.Table.from_batches(batches)
        assert table.column_names == [
            "topic", "stream", "glsn", "llsn", "timestamp", "key", "value", "headers", "ingested_at"
        ]  # fmt: skip
        assert table.column("value").to_pylist() == [b"1", b"1", b"no", b"yes"]
        assert table.column("topic").to_pylist() == ["other", "orders-eu", "other", "orders-eu"]
        for columns in (["key", "glsn"], ["glsn"], ["timestamp"], ["ingested_at", "headers", "value"]):
            few = await log.table("orders-us", columns=columns)
            assert few.column_names == columns
            assert few.equals((await log.table("orders-us")).select(columns))
        with pytest.raises(InvalidArgument, match="no column 'nope'"):
            await log.table("other", columns=["nope"])
        await log.create_topic("empty")
        assert (await log.table("empty")).num_rows == 0
        doomed = await log.subscribe("other", start="latest")
        await log.delete_topic("other")
        with pytest.raises(NotFound, match="was deleted"):
            await take(doomed, 1)

    with_log(tmp_path, test)


def test_what_is_trimmed_is_said_also_after_a_restart(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        await log.create_topic("u")
        acks = [await log.append("t", b"%d" % i * 500) for i in range(20)]
        kept = await log.append("u", b"kept")
        behind = await log.subscribe("t", start=acks[3].glsn)
        first = await behind.take()
        assert first[0].glsn == acks[3].glsn
        await log.trim("t", before=acks[10].glsn)
        for is_restarted in (False, True):
            if is_restarted:
                await cluster.stop_node(1)
                await cluster.stop_metadata()
                await cluster.start_metadata()
                await cluster.start_node(1)
            with pytest.raises(Trimmed) as trimmed:
                await whole(log, start=acks[9].glsn)
            assert (trimmed.value.asked, trimmed.value.first_left) == (acks[9].glsn, acks[10].glsn)
            assert trimmed.value.topic == "t"
            assert f"of topic 't' was trimmed: the first one left is {acks[10].glsn}" in trimmed.value.message
            with pytest.raises(Trimmed, match="of topic 't'") as trimmed:
                await log.read(acks[0].glsn)
            assert trimmed.value.first_left == acks[10].glsn
            # Whoever can do without what is gone goes on.
            async with log.subscribe("t", start=acks[9].glsn, stop=acks[12].glsn) as lossy:
                with pytest.raises(Trimmed):
                    await lossy.take()
                assert [r.glsn for r in await take(lossy, 2)] == [acks[10].glsn, acks[11].glsn]
                assert await lossy.take() == []
            assert [r.glsn for r in await whole(log)] == [ack.glsn for ack in acks[10:]]
            # Each topic begins where it begins.
            assert [r.glsn for r in await whole(log, ["t", "u"])] == [*(ack.glsn for ack in acks[10:]), kept.glsn]
            assert (await log.read(kept.glsn)).value == b"kept"
        # A trim may end within a batch.
        batch = await log.append("t", [b"a", b"b", b"c", b"d"])
        await log.trim("t", before=batch.glsn + 2)
        assert [r.value for r in await whole(log)] == [b"c", b"d"]
        with pytest.raises(Trimmed):
            await log.read(batch.glsn + 1)
        await behind.close()

    with_log(tmp_path, test, segments=SegmentOptions(segment_bytes=2_000, commits_per_file=8))


def test_a_sealed_stream_holds_nobody_up_and_a_new_one_is_not_skipped(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        streams = (await log.create_topic("t", streams=2)).streams
        subscription = await log.subscribe("t")
        await log.append("t", b"a", stream=streams[0])
        await log.append("t", b"b", stream=streams[1])
        await cluster.ask(SealRequest(LogStreamId(streams[0]), final=True))
        await take(subscription, 2)
        for i in range(20):
            ack = await log.append("t", b"%d" % i, stream=streams[1])
            assert [r.glsn for r in await take(subscription, 1)] == [ack.glsn]
        added = (await cluster.ask(AddStreamRequest("t"))).streams[0]
        ack = await log.append("t", b"new", stream=added)
        assert [r.glsn for r in await take(subscription, 1)] == [ack.glsn]
        await subscription.close()

    with_log(tmp_path, test)


def test_who_follows_log_streams_that_are_all_closed_can_know(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        (stream,) = (await log.create_topic("t")).streams
        async with log.subscribe("t") as subscription:
            await log.append("t", b"a")
            await take(subscription, 1)
            assert not subscription.trouble
            await cluster.ask(SealRequest(LogStreamId(stream)))
            async with asyncio.timeout(WITHIN_SECONDS):
                while f"no log stream takes appends now (closed: {stream})" not in subscription.trouble:
                    await asyncio.sleep(0.05)

    with_log(tmp_path, test)


def test_it_goes_on_elsewhere_when_a_replica_goes_without_skip_or_repeat(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", streams=2)
        subscription = await log.subscribe("t")
        expected: list[int] = []
        seen: list[int] = []
        for number in (3, 1, 2):
            for phase in range(2):
                for i in range(20):
                    async with asyncio.timeout(WITHIN_SECONDS):
                        expected.append((await log.append("t", b"%d" % i)).glsn)
                seen += [record.glsn for record in await take(subscription, len(expected) - len(seen))]
                if phase == 0:
                    await cluster.stop_node(number)
            await cluster.start_node(number)
        assert seen == sorted(expected)
        assert [record.glsn for record in await whole(log)] == seen
        await subscription.close()

    with_log(tmp_path, test, nodes=3)


def test_who_reaches_no_storage_node_is_told_which_and_what_to_do(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", replication=2)
        await log.append("t", b"x")
        for number in (1, 2):
            await cluster.stop_node(number)
        for follow in (False, True):
            async with log.subscribe("t", follow=follow) as subscription:
                with pytest.raises(DeadlineExceeded) as told:
                    await subscription.take(timeout=1)
                assert "no storage node with log stream 1 could be read from" in subscription.trouble
            for part in (
                "no storage node with log stream 1 could be read from: ",
                *(f"{number} at 127.0.0.1:{cluster.ports[number]}" for number in (1, 2)),
                "cannot be reached",
                "`cutwater cluster health`",
            ):
                assert part in told.value.message

    with_log(tmp_path, test, nodes=2)


def test_a_slow_reader_is_waited_for_and_costs_bounded_memory(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", streams=2)
        body = [b"x" * 1000] * 1000
        for _ in range(40):
            await log.append("t", body)
        subscription = await log.subscribe("t")
        feed = subscription._feed
        assert feed is not None
        feed._machine._bytes_max = 8_000_000
        found = len(await subscription.take())
        await asyncio.sleep(0.5)
        held = feed._machine._bytes
        assert 0 < held <= 16_000_000
        while found < 40_000:
            found += len(await subscription.take(timeout=WITHIN_SECONDS))
        await subscription.close()

    with_log(tmp_path, test)


@pytest.mark.timeout(300)
def test_many_clients_ten_streams_and_faults_give_one_sequence(tmp_path: Path) -> None:
    """10 clients × 10,000 records on 10 log streams with three copies, while nodes go and come back."""
    random = seeded()
    appended: dict[int, bytes] = {}
    unknown: set[bytes] = set()

    async def append_all(cluster: LogCluster, number: int) -> None:
        async with cluster.client() as client:
            left = 10_000
            while left:
                count = min(left, random.choice((1, 10, 100, 300)))
                values = [b"%d/%d/" % (number, left - i) + b"x" * random.randrange(50) for i in range(count)]
                try:
                    ack = await client.append("t", values)
                except AppendUnknown:
                    unknown.update(values)
                except CutwaterError:
                    continue
                else:
                    appended.update((ack.glsn + i, value) for i, value in enumerate(values))
                left -= count

    async def break_things(cluster: LogCluster) -> None:
        for _ in range(3):
            await asyncio.sleep(random.random())
            number = random.choice((1, 2, 3))
            await cluster.stop_node(number)
            await asyncio.sleep(random.random() * 2)
            await cluster.start_node(number)

    async def read_all(log: AsyncClient) -> list[Record]:
        found: list[Record] = []
        async for record in log.subscribe("t", start=1):
            if record.value == b"end":
                return found
            found.append(record)
        raise AssertionError("it ended by itself")

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", streams=10, replication=3)
        readers = [asyncio.create_task(read_all(log)) for _ in range(2)]
        await asyncio.gather(*(append_all(cluster, number) for number in range(10)), break_things(cluster))
        await log.append("t", b"end")
        first, second = await asyncio.gather(*readers)
        assert first == second
        found = {record.glsn: record.value for record in first}
        assert len(found) == len(first)
        assert [record.glsn for record in first] == sorted(found)
        assert appended.items() <= found.items()
        extra = [found[glsn] for glsn in found.keys() - appended.keys()]
        assert len(set(extra)) == len(extra)
        assert set(extra) <= unknown
        assert len(appended) + len(unknown) == 100_000

    with_log(tmp_path, test, nodes=3, seconds=290)
