"""Damage is repaired place by place: one that nobody can repair does not keep the others waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from types import SimpleNamespace

import pytest

from cutwater.errors import Damaged
from cutwater.format.errors import DamagedEntries
from cutwater.storage.results import StorageFinding
from cutwater.storagenode.counters import NodeCounters
from cutwater.storagenode.repair import damage_repair
from cutwater.types import GLSN, LLSN, LogStreamId
from tests.unit.replica_bench import context

STREAM = LogStreamId(1)


def on_a_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: object, **named: object) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def damage(llsn: int) -> DamagedEntries:
    return DamagedEntries("a file", LLSN(llsn), LLSN(llsn), "wrong checksum")


class Bench:
    """A mender whose repairs fail as long as a place is ``hopeless``."""

    def __init__(self, *hopeless: int) -> None:
        self.hopeless, self.tried = set(hopeless), list[int]()
        node = SimpleNamespace(replicas={STREAM: 1}, driver=lambda stream: stream, counters=NodeCounters())
        self.tasks: set[asyncio.Future[None]] = set()
        self.mender = damage_repair.Mender(node, None, self._spawn)  # type: ignore[arg-type]
        self.mender._mend = self._mend  # type: ignore[method-assign]

    def _spawn(self, work) -> None:
        self.tasks.add(asyncio.ensure_future(work))

    async def _mend(self, driver, error: DamagedEntries) -> None:
        self.tried.append(error.first_llsn)
        await asyncio.sleep(0)
        if error.first_llsn in self.hopeless:
            raise Damaged(f"nobody has an intact copy of LLSN {error.first_llsn}")

    async def done(self) -> None:
        await asyncio.gather(*self.tasks)

    def left(self) -> list[tuple[int, bool]]:
        return [(status.first_llsn, bool(status.trouble)) for status in self.mender.damage]


@on_a_loop
async def test_one_place_that_nobody_can_repair_does_not_starve_the_others() -> None:
    bench = Bench(5, 7)
    for llsn in (5, 9, 7, 11):
        bench.mender.mend(STREAM, damage(llsn))
    await bench.done()
    assert bench.tried == [5, 9, 7, 11]
    assert bench.left() == [(5, True), (7, True)]


@on_a_loop
async def test_what_is_met_during_a_repair_is_repaired_too() -> None:
    bench = Bench(5)
    bench.mender.mend(STREAM, damage(5))
    await asyncio.sleep(0)
    bench.mender.mend(STREAM, damage(6))
    bench.mender.mend(STREAM, damage(5))
    await bench.done()
    assert bench.tried == [5, 6]


@on_a_loop
async def test_a_place_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage_repair, "TRY_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(damage_repair, "AGAIN_SECONDS", 0.01)
    bench = Bench(5)
    bench.mender.mend(STREAM, damage(5))
    bench.mender.mend(STREAM, damage(9))
    await bench.done()
    bench.mender.mend(STREAM, damage(5))
    assert bench.left() == [(5, True)]
    assert bench.mender._node.counters.repairs_failed == 1
    bench.hopeless.clear()
    again = asyncio.ensure_future(bench.mender.try_again_for_ever())
    async with asyncio.timeout(5):
        while bench.mender.damage:
            await asyncio.sleep(0.01)
    again.cancel()
    assert bench.tried[:2] == [5, 9]


@on_a_loop
async def test_so_many_places_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage_repair, "PLACES_MAX", 2)
    bench = Bench(1, 2, 3)
    for llsn in (1, 2, 3):
        bench.mender.mend(STREAM, damage(llsn))
    await bench.done()
    assert [llsn for llsn, _ in bench.left()] == [1, 2]


@on_a_loop
async def test_damage_that_stays_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage_repair, "AGAIN_SECONDS", 0.0)
    bench = Bench(5)
    for _ in range(3):
        bench.mender.mend(STREAM, damage(5))
        await bench.done()
    assert len(bench.tried) == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


@on_a_loop
async def test_only_the_entry_that_was_committed_there_takes_a_damaged_place() -> None:
    """A peer may have kept one of an epoch that went on without it, or one that reaches further."""

    async def in_thread(job: Callable[[], object]) -> object:
        return job()

    mender = damage_repair.Mender(SimpleNamespace(in_thread=in_thread), None, lambda work: None)  # type: ignore[arg-type]
    own, sent = context(4, 3, epoch=2), context(7, 3, epoch=2)
    driver = SimpleNamespace(storage=SimpleNamespace(contexts=[own]))

    async def belongs(first: int, last: int, epoch: int, llsn: int) -> bool:
        frame = SimpleNamespace(header=SimpleNamespace(first_llsn=first, last_llsn=last, epoch=epoch))
        return await mender._belongs(driver, frame, (sent,), LLSN(llsn))  # type: ignore[arg-type]

    assert await belongs(4, 5, 2, 5)
    assert await belongs(7, 9, 2, 7), "the commit that came with it says so, where there is none here"
    for wrong in ((4, 5, 1, 5), (4, 5, 3, 5), (4, 5, 2, 6), (6, 7, 2, 6), (7, 9, 1, 7), (10, 10, 2, 10)):
        assert not await belongs(*wrong), wrong


def test_what_is_trimmed_and_not_removed_yet_is_no_finding() -> None:
    whole = StorageFinding("a file", "its header is wrong")
    found = [whole, *(StorageFinding("a file", "wrong checksum", LLSN(first), LLSN(first + 1)) for first in (1, 3, 5))]
    storage = SimpleNamespace(contexts=[context(1, 6)], verify=lambda check: found)
    replica = SimpleNamespace(hard_state=SimpleNamespace(trimmed_before=GLSN(4)))
    driver = SimpleNamespace(storage=storage, replica=replica)
    # LLSN 4 is the first that is left of the second one.
    left = [(whole, None), (found[2], GLSN(5)), (found[3], GLSN(7))]
    assert damage_repair.verified(driver, None) == left  # type: ignore[arg-type]


@on_a_loop
async def test_pauses_between_failed_repairs_grow_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(damage_repair, "system", SimpleNamespace(monotonic=lambda: now, wall_time_ns=lambda: 0))
    bench = Bench(5)
    pauses = []
    for number in range(1, 8):
        bench.mender.mend(STREAM, damage(5))
        await bench.done()
        assert bench.mender._node.counters.repairs_failed == number
        pauses.append(bench.mender._known[STREAM][LLSN(5), LLSN(5)].not_before - now)
        now += pauses[-1] - 0.5
        bench.mender.mend(STREAM, damage(5))
        await bench.done()
        assert len(bench.tried) == number, "it waits"
        now += 0.5
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    assert bench.left() == [(5, True)]
