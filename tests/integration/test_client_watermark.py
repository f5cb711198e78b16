"""The watermark of a topic at every position, against the rule applied by hand to what a subscriber sees."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.client.read import watermarks
from cutwater.core.requests import ClockMarks, ClockRequest
from cutwater.errors import InvalidArgument, NotYetCommitted, Trimmed
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN
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
            await log.append(
                "t", [b"x"] * len(times), timestamp=[at(time) for time in times], stream=random.choice(streams)
            )
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
        for same in (bound, "5ms", 5):
            assert await log.watermark("t", bound=same, idle_after="1d") == at(highest)
        for wrong, said in (
            ({"bound": "soon"}, "bound= is 'soon': give"),
            ({"bound": 0.5}, "bound= is 0.5: give"),
            ({"idle_after": timedelta(-1)}, "idle_after= is .* at least 0 ms"),
            ({"at": "latest"}, "at= is a GLSN"),
            ({"at": EPOCH}, "at= is a GLSN"),
            ({"at": -1}, "there is no GLSN -1"),
        ):
            with pytest.raises(InvalidArgument, match=said):
                await log.watermark("t", **cast("Any", wrong))

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
        assert await log.watermark("t", at=0, punctuated=True) is None

    with_log(tmp_path, test)


def test_a_silent_stream_is_left_out_when_the_clock_says_so(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        first, second = (await log.create_topic("t", streams=2)).streams
        ack = await log.append("t", b"x", stream=first, timestamp=at(5_000_000))
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
        again = await log.append("t", b"y", stream=second, timestamp=at(1_000_000))
        assert await log.watermark("t", at=again.glsn, idle_after=idle_after) == at(5_000_000 - 1_000)
        assert await log.watermark("t", at=again.glsn, idle_after=FAR) == at(1_000_000 - 1_000)

    with_log(tmp_path, test)


def test_it_is_the_same_wherever_the_walk_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With streams that are silent for a while, lag, declare, or come late: against a walk from the beginning."""
    random = seeded()

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        streams = list((await log.create_topic("t", streams=3)).streams)
        await log.create_topic("u")
        now = 0
        for turn in range(120):
            now += random.randrange(50_000)
            if turn == 60:
                await log.change_topic("t", streams=4)
            if random.random() < 0.2:
                await log.append("u", b"someone else")
            lag = random.choice((0, 0, 100_000, 2_000_000))
            times = [now - random.randrange(lag + 1) for _ in range(random.randrange(1, 4))]
            # One stream after the other is left out for a while.
            stream = random.choice([s for i, s in enumerate(streams) if i != turn // 20 % 3])
            watermark = at(max(times) - 10_000) if random.random() < 0.5 else None
            await log.append(
                "t", [b"x"] * len(times), timestamp=[at(time) for time in times], stream=stream, watermark=watermark
            )
            if random.random() < 0.1:
                await asyncio.sleep(0.02)
        end = await log.tail()
        for _ in range(40):
            question: dict[str, Any] = {
                "at": random.randrange(1, end + 1),
                "punctuated": random.random() < 0.3,
                "idle_after": random.choice((timedelta(0), timedelta(milliseconds=30), FAR)),
                "bound": timedelta(milliseconds=random.choice((0, 40))),
            }
            answers = []
            for span in (10**9, random.choice((1, 2, 5, 20))):
                monkeypatch.setattr(watermarks, "SPAN_MIN", span)
                log._watermarks._kept.clear()
                answers.append(await log.watermark("t", **question))
            assert answers[0] == answers[1], question

    with_log(tmp_path, test)


def test_a_long_topic_is_read_at_its_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    class Noting(watermarks.Feed):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            starts.append(arguments[5])
            super().__init__(*arguments, **more)

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        monkeypatch.setattr(watermarks, "Feed", Noting)
        streams = (await log.create_topic("t", streams=2)).streams
        for turn in range(60):
            times = [at(turn * 1_000_000 + i) for i in range(500)]
            await log.append("t", [b"x"] * 500, timestamp=times, stream=streams[turn % 2])
        async with cluster.client() as other:
            for glsn in (None, 25_000, 20_000):
                assert await other.watermark("t", at=glsn, idle_after=FAR) is not None
        end = await log.tail()
        assert starts[0] > end - 3 * watermarks.SPAN_MIN
        # Also when the topic has long been silent, and others have not.
        await log.create_topic("u")
        for _ in range(5):
            await log.append("u", [b"y"] * 4_000)
        before = len(starts)
        await log.watermark("t", idle_after=timedelta(0))
        assert starts[before] > end - 3 * watermarks.SPAN_MIN
        # What was trimmed still counts.
        whole = await log.watermark("t", idle_after=FAR)
        await log.trim("t", before=end - 10)
        async with cluster.client() as other:
            assert await other.watermark("t", idle_after=FAR) == whole

    with_log(tmp_path, test)


def test_marks_that_the_log_has_not_come_to_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[GLSN] = []

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        repository = log._watermarks._repository
        ask = repository.ask

        async def noting(request: Any, *arguments: Any, **more: Any) -> Any:
            asked.extend([request.after] if isinstance(request, ClockRequest) else [])
            return await ask(request, *arguments, **more)

        monkeypatch.setattr(repository, "ask", noting)
        await log.create_topic("t")
        end = (await log.append("t", b"x")).glsn
        with pytest.raises(NotYetCommitted, match="is not given out yet, after 1 s: the log ends at"):
            await watermarks.marks_between(repository, end, GLSN(end + 1_000_000), Deadline(1))
        # With pauses that double there is no time for more, also if the log ticks meanwhile.
        assert len(asked) < 40
        asked.clear()
        waiting = asyncio.create_task(watermarks.marks_between(repository, end, GLSN(end + 5), Deadline(30)))
        while not asked:
            await asyncio.sleep(0)
        following = await log.append("t", [b"x"] * 5)
        assert all(end < mark.glsn <= following.glsn for mark in await waiting)

    with_log(tmp_path, test)


def test_after_a_trim_log_streams_that_were_sealed_for_good_before_do_not_count(tmp_path: Path) -> None:
    """As for every other reader that begins there."""

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        first, second = (await log.create_topic("t", streams=2)).streams
        await log.create_topic("u")
        await log.append("t", b"x", timestamp=at(500_000_000), stream=second)
        await log.append("t", b"x", timestamp=at(100_000_000), stream=first, idle=True)
        assert (await log.change_topic("t", streams=1)).streams == (first,)
        after = await log.append("u", b"y")
        await log.trim("t", before=after.glsn + 1)
        end = await log.append("u", b"y")
        async with cluster.client() as other:
            assert await other.watermark("t", at=end.glsn, idle_after=timedelta(0)) == at(99_999_000)

    with_log(tmp_path, test)


def test_a_trim_between_two_questions_hides_nothing(tmp_path: Path) -> None:
    """What the clock of the first question had not seen, and is trimmed now, still counts."""

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        first, second = (await log.create_topic("t", streams=2)).streams
        await log.append("t", b"x", stream=first, timestamp=at(1_000_000))
        one = await log.append("t", b"x", stream=second, timestamp=at(1_000_000))
        assert await log.watermark("t", at=one.glsn, idle_after=FAR) == at(999_000)
        await log.append("t", b"x", stream=first, timestamp=at(2_000_000))
        three = await log.append("t", b"x", stream=second, timestamp=at(9_000_000))
        await log.trim("t", before=three.glsn)
        assert await log.watermark("t", at=three.glsn, idle_after=FAR) == at(1_999_000)

    with_log(tmp_path, test)
