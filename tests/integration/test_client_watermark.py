"""The watermark of a topic at every position, against the rule applied by hand to what a subscriber sees."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.core.requests import ClockMarks, ClockRequest
from cutwater.errors import NotYetCommitted, Trimmed
from tests.integration.log_cluster import LogCluster, seeded, with_log

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FAR = timedelta(days=1)


def at(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else EPOCH + timedelta(microseconds=microseconds)


def test_the_smallest_of_the_largest_times_so_far(tmp_path: Path) -> None:
    random = seeded()

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        streams = (await log.create_topic("t", streams=3)).streams
        for _ in range(30):
            times = [random.randrange(10_000_000) for _ in range(random.randrange(1, 5))]
            await log.append("t", [b"x"] * len(times), timestamp=times, stream=random.choice(streams))
        bound = timedelta(milliseconds=5)
        largest: dict[int, int] = {}
        expected: dict[int, datetime | None] = {}
        highest: int | None = None
        async for record in log.subscribe("t", follow=False):
            largest[record.stream] = max(largest.get(record.stream, record.timestamp_us), record.timestamp_us)
            if len(largest) == 3:
                now = min(largest.values()) - 5_000 - 1_000
                highest = now if highest is None else max(now, highest)
            expected[record.glsn] = at(highest)
        # Once from the beginning each, and once going on from question to question.
        for glsn in random.sample(sorted(expected), 5):
            async with cluster.client() as other:
                assert await other.watermark("t", at=glsn, bound=bound, idle_after=FAR) == expected[glsn]
        for glsn in sorted(expected):
            assert await log.watermark("t", at=glsn, bound=bound, idle_after=FAR) == expected[glsn], glsn
        assert await log.watermark("t", bound=bound, idle_after=FAR) == at(highest)

    with_log(tmp_path, test)


def test_declared_watermarks_idle_streams_and_errors(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        first, second = (await log.create_topic("t", streams=2)).streams
        assert await log.watermark("t") is None
        one = await log.append("t", [b"a", b"b"], stream=first, watermark=at(100))
        assert await log.watermark("t", at=one.glsn + 1, punctuated=True) is None
        # The other log stream has said nothing, but nobody waits for it if it counts as idle at once.
        none = timedelta(0)
        assert await log.watermark("t", at=one.glsn, punctuated=True, idle_after=none) is None
        assert await log.watermark("t", at=one.glsn + 1, punctuated=True, idle_after=none) == at(100)
        async with await log.producer("t", id="p"):
            pass
        two = await log.append("t", b"c", stream=second, watermark=at(70))
        assert await log.watermark("t", at=two.glsn, punctuated=True) == at(70)
        three = await log.append("t", b"d", stream=second, watermark=at(60))
        assert await log.watermark("t", at=three.glsn, punctuated=True) == at(70)
        with pytest.raises(NotYetCommitted):
            await log.watermark("t", at=await log.tail() + 100)
        await log.trim("t", before=three.glsn)
        with pytest.raises(Trimmed):
            await log.watermark("t", at=one.glsn)

    with_log(tmp_path, test)


def test_a_silent_stream_is_left_out_when_the_clock_says_so(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        first, second = (await log.create_topic("t", streams=2)).streams
        ack = await log.append("t", b"x", stream=first, timestamp=5_000_000)
        committed = (await log.read(ack.glsn)).ingested_us
        marks: ClockMarks = await cluster.ask(ClockRequest(ack.glsn))
        while not marks.marks:
            # The log ticks when nothing is appended.
            await asyncio.sleep(0.05)
            marks = await cluster.ask(ClockRequest(ack.glsn))
        tick = marks.marks[0]
        # So long that the first log stream is not idle at the tick, while the second, which is older, is.
        idle_after = timedelta(microseconds=tick.time - committed)
        assert await log.watermark("t", at=tick.glsn, idle_after=idle_after) == at(5_000_000 - 1_000)
        assert await log.watermark("t", at=tick.glsn, idle_after=FAR) is None
        # One that speaks again counts again, and the watermark does not go back.
        again = await log.append("t", b"y", stream=second, timestamp=1_000_000)
        assert await log.watermark("t", at=again.glsn, idle_after=idle_after) == at(5_000_000 - 1_000)
        assert await log.watermark("t", at=again.glsn, idle_after=FAR) == at(1_000_000 - 1_000)

    with_log(tmp_path, test)
