"""A storage node asks for the catalog when it needs to know a schema, and no more often than that helps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs

from cutwater.core.requests import Catalog, CatalogRequest
from cutwater.errors import CutwaterError, InvalidArgument, NotFound, Unavailable
from cutwater.format.checksum import crc32c
from cutwater.runtime.event_loop import run
from cutwater.storagenode.memory_budget import MemoryBudget
from cutwater.storagenode.validation.content_checks import ContentChecks, check_ahead, largest_of
from cutwater.storagenode.validation.topic_forms import AGAIN_SECONDS, FETCH_SECONDS, KnownTopics, TopicForms
from cutwater.types import GLSN, Batch, CutTime, EventTime, LogStreamId, Revision

STREAM = LogStreamId(1)
EMPTY = Catalog(Revision(1), GLSN(0), CutTime(0), (), (), ())


class Asker:
    is_cancelled = False

    def __init__(self, told: list[CutwaterError]) -> None:
        self._told = told

    def fail(self, error: CutwaterError) -> None:
        self._told.append(error)


class Bench:
    """``answer`` is what the metadata repository says; None: nothing."""

    def __init__(self, answer: Catalog | CutwaterError | None) -> None:
        self.answer, self.questions = answer, 0
        self.topics = KnownTopics(self._ask)
        self.checks = ContentChecks(self.topics, {}, MemoryBudget(), "checks")
        self.told: list[CutwaterError] = []

    async def _ask(self, request: CatalogRequest) -> Catalog:
        self.questions += 1
        await asyncio.sleep(0.01)
        if self.answer is None:
            await asyncio.sleep(60)
        if isinstance(self.answer, CutwaterError):
            raise self.answer
        assert self.answer is not None
        return self.answer

    async def append(self, count: int) -> float:
        """Batches of a log stream that is not known; how long it takes until all of them have an outcome."""
        batch = Batch(1, b"x", crc32c(b"x"), EventTime(1), EventTime(1), schema=7)
        began = time.monotonic()
        for _ in range(count):
            self.checks.append(STREAM, batch, Asker(self.told), lambda batch: None)
        while len(self.told) < count:
            await asyncio.sleep(0.01)
        self.checks.stop()
        self.topics.stop()
        return time.monotonic() - began


@pytest.mark.parametrize("answer", [EMPTY, Unavailable("no leader")])
def test_one_question_is_enough_for_all_appends_that_came_before_it(answer: Catalog | CutwaterError) -> None:
    """Appends that name nonsense keep nobody waiting who comes after them."""

    async def test() -> None:
        bench = Bench(answer)
        assert await bench.append(200) < 20 * AGAIN_SECONDS
        assert bench.questions == 1
        kind = Unavailable if isinstance(answer, CutwaterError) else NotFound
        assert all(isinstance(error, kind) for error in bench.told)

    run(test())


def test_a_repository_that_does_not_answer_is_waited_for_once() -> None:
    async def test() -> None:
        bench = Bench(None)
        assert FETCH_SECONDS <= await bench.append(20) + 0.1 < 2 * FETCH_SECONDS
        assert all(isinstance(error, Unavailable) for error in bench.told)

    run(test())


def test_whoever_comes_after_a_question_has_it_asked_again() -> None:
    async def test() -> None:
        topics = (bench := Bench(EMPTY)).topics
        for number in (1, 2):
            with pytest.raises(NotFound):
                await topics.form_of_stream(STREAM, 7)
            assert bench.questions == number
        first = asyncio.create_task(topics.of_stream(STREAM))
        await asyncio.sleep(AGAIN_SECONDS + 0.005)
        second = asyncio.create_task(topics.of_stream(STREAM))
        assert all(isinstance(one, NotFound) for one in await asyncio.gather(first, second, return_exceptions=True))
        assert bench.questions in (3, 4)
        bench.checks.stop()

    run(test())


async def settled(topics: KnownTopics) -> None:
    while topics._fetching is not None:
        await asyncio.sleep(0.01)


def test_a_log_stream_that_was_asked_for_too_early_is_not_said_to_be_missing_when_it_exists() -> None:
    """Anyone may ask for numbers of log streams that do not exist yet."""

    async def test() -> None:
        topics = Bench(EMPTY).topics
        with pytest.raises(Unavailable):
            topics.name_of_stream(STREAM)
        await settled(topics)
        assert topics.name_of_stream(STREAM) is None
        topics.expect(STREAM)
        with pytest.raises(Unavailable, match="not known here yet"):
            topics.name_of_stream(STREAM)
        await settled(topics)
        assert (topics.name_of_stream(STREAM), topics.revision) == (None, 1)
        topics.refresh(Revision(2))
        with pytest.raises(Unavailable, match="not known here yet"):
            topics.name_of_stream(STREAM)
        topics.stop()

    run(test())


def test_a_newer_catalog_that_is_heard_of_is_asked_for_once_and_at_once() -> None:
    async def test() -> None:
        bench = Bench(EMPTY)
        for revision in (1, 1, 1):
            bench.topics.refresh(Revision(revision))
        await until(lambda: bench.topics.revision == 1)
        bench.topics.refresh(Revision(1))
        await asyncio.sleep(2 * AGAIN_SECONDS)
        assert bench.questions == 1
        # What is heard of while an answer is on its way is asked for behind it.
        bench.topics.refresh(Revision(2))
        await until(lambda: bench.questions == 2)
        bench.answer = structs.replace(EMPTY, revision=Revision(3))
        bench.topics.refresh(Revision(3))
        await until(lambda: bench.topics.revision == 3)
        bench.topics.refresh()
        await asyncio.sleep(3 * AGAIN_SECONDS)
        assert bench.questions <= 4, "whether it has changed is asked once"
        bench.checks.stop()

    run(test())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


def test_a_check_that_ends_with_a_bug_is_logged_and_keeps_nobody_waiting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        bench = Bench(EMPTY)

        async def fail(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(bench.topics, "form_of_stream", fail)
        await bench.append(3)
        assert all(isinstance(error, Unavailable) and "nothing was appended" in error.message for error in bench.told)

    run(test())
    (logged,) = (record for record in caplog.records if "which is a bug" in record.message)
    assert "a bug" in str(logged.exc_info)


@pytest.mark.parametrize(
    ("what", "moment", "told"),
    [
        (largest_of(1), 4_070_908_800, "the event time is 2099-01-01T00:00:00+00:00, 26342d ahead of the log's clock"),
        (largest_of(3), 1_795_000_000, "the largest event time of 3 records is 2026-11-18T11:06:40+00:00, 114m ahead"),
        (
            "the declared watermark",
            10**15,
            "the declared watermark is 1000000000000000000000 (microseconds since 1970)",
        ),
    ],
)
def test_times_that_are_far_ahead_are_told_as_people_write_them(what: str, moment: int, told: str) -> None:
    topic = cast(TopicForms, SimpleNamespace(name="pay", ahead_us=3_600_000_000))
    with pytest.raises(InvalidArgument) as raised:
        check_ahead(topic, what, EventTime(moment * 1_000_000), 1_794_993_160 * 1_000_000)
    assert raised.value.message.startswith(told)
    assert "topic 'pay' takes at most 1h: correct the clock" in raised.value.message
