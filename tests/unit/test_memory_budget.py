"""Memory for decompression: in turn, bounded, and given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cutwater.errors import ResourceExhausted
from cutwater.format.bodies import BodyForm
from cutwater.format.checksum import crc32c
from cutwater.format.projection import serialize
from cutwater.storagenode.memory_budget import MemoryBudget
from cutwater.storagenode.publish.part_store import PartStore
from cutwater.storagenode.serving.picking import Needs, within
from cutwater.storagenode.validation.content_checks import ContentChecks
from cutwater.types import Batch, EventTime, LogStreamId

pytestmark = pytest.mark.asyncio


async def test_whoever_comes_first_is_served_first() -> None:
    budget, order = MemoryBudget(100), []

    async def use(name: str, size: int) -> None:
        async with budget.reserved(size, 5.0):
            order.append(name)
            assert budget.bytes <= 100
            await asyncio.sleep(0.01)

    await asyncio.gather(use("a", 60), use("b", 90), use("c", 10), use("d", 1_000))
    assert order == ["a", "b", "c", "d"]
    assert budget.bytes == 0


async def test_whoever_waits_too_long_is_told_to_try_again() -> None:
    budget = MemoryBudget(100)
    async with budget.reserved(100):
        with pytest.raises(ResourceExhausted, match="100 of 100 are in use"):
            async with budget.reserved(1, 0.01):
                pass
    async with budget.reserved(100, 0.01):
        assert budget.bytes == 100
    assert budget.bytes == 0


async def test_who_gives_up_waiting_holds_up_nobody() -> None:
    budget = MemoryBudget(100)
    async with budget.reserved(60):
        waiting = asyncio.create_task(budget._take(90, 5.0))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with budget.reserved(40, 0.01):
            assert budget.bytes == 100
    assert budget.bytes == 0


async def test_who_gives_up_waiting_lets_those_behind_go_on_at_once() -> None:
    budget = MemoryBudget(100)
    async with budget.reserved(60):
        large = asyncio.create_task(budget._take(90, 0.02))
        await asyncio.sleep(0)
        small = asyncio.create_task(budget._take(40, 5.0))
        with pytest.raises(ResourceExhausted):
            await large
        async with asyncio.timeout(1):
            await small
        assert budget.bytes == 100


async def test_memory_that_is_given_to_someone_who_has_just_given_up_is_not_lost() -> None:
    budget = MemoryBudget(100)
    async with budget.reserved(60):
        waiting = asyncio.create_task(budget._take(90, 5.0))
        await asyncio.sleep(0)
    assert budget.bytes == 90, "it is given, and the one that waits has not heard of it"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert budget.bytes == 0


async def test_what_needs_no_memory_waits_for_nobody() -> None:
    """Most batches are not compressed."""
    budget = MemoryBudget(100)
    async with budget.reserved(60):
        waiting = asyncio.create_task(budget._take(90, 5.0))
        await asyncio.sleep(0)
        async with budget.reserved(0, 0.01):
            assert budget.bytes == 60
    await waiting
    assert budget.bytes == 90


async def test_a_reader_that_is_cancelled_keeps_its_memory_until_its_thread_ends() -> None:
    """However often it is cancelled: by the caller, and again when the connection breaks."""
    budget, may_end, begun = MemoryBudget(100), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def decompress() -> str:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(20)
        return "columns"

    async def in_reader(job: object) -> str:
        return await loop.run_in_executor(None, decompress)

    reader = asyncio.create_task(within(budget, in_reader, Needs(80, decompress)))
    await begun.wait()
    try:
        for _ in range(3):
            reader.cancel()
            await asyncio.sleep(0.01)
            assert budget.bytes == 80
            assert not reader.done()
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert budget.bytes == 0


async def is_done(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def test_a_compressed_batch_that_is_appended_waits_for_memory_to_be_checked() -> None:
    rows = pa.record_batch({"n": pa.array(range(100_000), pa.int64())})
    body = bytes(serialize(rows, "zstd"))
    form = BodyForm(rows.schema.serialize().to_pybytes())

    async def form_of_stream(*asked: object) -> tuple[object, BodyForm]:
        return SimpleNamespace(name="t", ahead_us=0), form

    topics: Any = SimpleNamespace(now=lambda: 0, known=lambda stream: None, form_of_stream=form_of_stream)
    budget, taken, told = MemoryBudget(1_000_000), asyncio.Event(), list[Exception]()
    checks = ContentChecks(topics, {}, budget, "checks")
    batch = Batch(100_000, body, crc32c(body), EventTime(1), EventTime(1), schema=1)
    asker: Any = SimpleNamespace(is_cancelled=False, fail=told.append)
    try:
        async with budget.reserved(500_000):
            checks.append(LogStreamId(1), batch, asker, lambda batch: taken.set())
            assert not await is_done(taken, 0.5), "800 kB are needed to look into it"
        assert await is_done(taken, 20)
        assert told == []
    finally:
        checks.stop()


async def test_a_staged_part_waits_for_memory_to_be_checked() -> None:
    budget, checked = MemoryBudget(100), asyncio.Event()

    async def prepare(data: bytes, in_thread: object) -> int:
        return 80

    async def in_thread(job: Callable[[], None]) -> None:
        assert budget.bytes == 80
        job()

    staging: Any = SimpleNamespace(_memory=budget, in_thread=in_thread)
    writing: Any = SimpleNamespace(checks=SimpleNamespace(prepare=prepare, check=lambda data: checked.set()))
    async with budget.reserved(50):
        task = asyncio.create_task(PartStore._check(staging, writing, b""))
        assert not await is_done(checked, 0.1)
    await task
    assert checked.is_set()
    assert budget.bytes == 0
