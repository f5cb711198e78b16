"""What every store keeps, on every store: the contract of ``MetadataStore``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

import pytest

from cutwater.core.order.state import OrderState, Snapshot
from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, LeaderFenced, Unavailable
from cutwater.metadata.stores import sqlite_store
from cutwater.metadata.stores.store_interface import NO_LEADER, LeaderInfo, LoadedState, MetadataStore
from cutwater.types import DecisionIndex, LeaderEpoch
from tests.integration.stores.conftest import Backend
from tests.integration.stores.store_kit import HERE, ONE, START, THERE, TWO, Begun, History, cursors

E0, E1, E2 = LeaderEpoch(0), LeaderEpoch(1), LeaderEpoch(2)


def fold(loaded: LoadedState) -> Snapshot:
    return OrderState(loaded.snapshot, loaded.decisions).snapshot()


async def store_led_by_one(backend: Backend) -> MetadataStore:
    store = await backend.open()
    assert await store.acquire(ONE, HERE, E0) == E1
    return store


async def test_at_first_there_is_nothing_and_nobody(backend: Backend) -> None:
    store = await backend.open()
    assert await store.leader() == NO_LEADER
    assert await store.load() == LoadedState(NO_LEADER, Snapshot(), ())
    with pytest.raises(LeaderFenced, match="no node has ever led"):
        await store.append(E0, START, History().next())
    with pytest.raises(LeaderFenced):
        await store.append(E0, START, ())
    with pytest.raises(LeaderFenced):
        await store.trim(E0, Snapshot())


async def test_the_leader_is_whoever_acquired_last(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    assert await one.acquire(ONE, HERE, E0) == E1
    assert await two.leader() == LeaderInfo(E1, ONE, HERE)
    assert await two.acquire(TWO, THERE, E1) == E2
    assert await one.leader() == LeaderInfo(E2, TWO, THERE)
    again = await backend.reopen()
    assert await again.leader() == LeaderInfo(E2, TWO, THERE)


async def test_keys_of_metadata_nodes_are_kept_and_replaced_and_are_no_decisions(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    assert await one.members() == {}
    await one.announce(ONE, "a key")
    await two.announce(TWO, "another key")
    await two.announce(TWO, "another key")
    assert await one.members() == {ONE: "a key", TWO: "another key"}
    assert await one.load() == LoadedState(NO_LEADER, Snapshot(), ())
    assert await one.acquire(ONE, HERE, E0) == E1
    await one.append(E1, START, History().next())
    await two.announce(TWO, "a new key")
    again = await backend.reopen()
    assert await again.members() == {ONE: "a key", TWO: "a new key"}
    assert await again.leader() == LeaderInfo(E1, ONE, HERE)


async def test_nobody_takes_over_from_an_epoch_that_is_over(backend: Backend) -> None:
    store = await store_led_by_one(backend)
    for seen in (E0, E2):
        with pytest.raises(LeaderFenced, match="metadata node 1 leads in epoch 1"):
            await store.acquire(TWO, THERE, seen)
    assert await store.leader() == LeaderInfo(E1, ONE, HERE)


async def test_of_many_who_want_to_lead_one_does(backend: Backend) -> None:
    """Also if two processes take themselves for the same node."""
    stores = [await backend.open() for _ in range(4)]
    for seen in (E0, E1, E2):
        results = await asyncio.gather(
            *(stores[n % 4].acquire(TWO, THERE, seen) for n in range(12)), return_exceptions=True
        )
        (winner,) = [n for n, result in enumerate(results) if not isinstance(result, BaseException)]
        assert results[winner] == seen + 1
        assert all(isinstance(result, LeaderFenced) for n, result in enumerate(results) if n != winner)
        assert await stores[0].leader() == LeaderInfo(LeaderEpoch(seen + 1), TWO, THERE)


async def test_what_is_appended_is_loaded(backend: Backend) -> None:
    store, history = await store_led_by_one(backend), History()
    for count in (1, 7, 30):
        after = history.state.index
        await store.append(E1, after, history.next(count))
    expected = LoadedState(LeaderInfo(E1, ONE, HERE), Snapshot(), tuple(history.made))
    assert await store.load() == expected
    again = await backend.reopen()
    assert await again.load() == expected
    assert fold(expected) == history.state.snapshot()


async def test_a_deposed_leader_stores_nothing(backend: Backend) -> None:
    one, two, history = await backend.open(), await backend.open(), History()
    await one.acquire(ONE, HERE, E0)
    await one.append(E1, START, history.next(10))
    snapshot, decisions = history.state.snapshot(), history.next()
    await two.acquire(TWO, THERE, E1)
    before = await two.load()
    for attempt in (
        lambda: one.append(E1, DecisionIndex(10), decisions),
        lambda: one.append(E1, DecisionIndex(10), ()),
        lambda: one.append(E1, START, tuple(history.made[:10])),
        lambda: one.trim(E1, snapshot),
        lambda: one.append(LeaderEpoch(3), DecisionIndex(10), decisions),
    ):
        with pytest.raises(LeaderFenced, match="metadata node 2 leads in epoch 2"):
            await attempt()
    assert await two.load() == before
    await two.append(E2, DecisionIndex(10), decisions)
    assert (await one.load()).decisions == tuple(history.made)


async def test_the_same_append_again_succeeds_and_is_stored_once(backend: Backend) -> None:
    store, history = await store_led_by_one(backend), History()
    await store.append(E1, START, history.next(6))
    decisions = history.next(3)
    for _ in range(3):
        await store.append(E1, DecisionIndex(6), decisions)
    await store.trim(E1, history.state.snapshot())
    await store.append(E1, DecisionIndex(6), decisions)
    assert await store.load() == LoadedState(LeaderInfo(E1, ONE, HERE), history.state.snapshot(), ())


async def test_another_append_at_the_same_place_is_refused(backend: Backend) -> None:
    store, history, other = await store_led_by_one(backend), History(1), History(2)
    await store.append(E1, START, history.next(6))
    await store.append(E1, DecisionIndex(6), history.next(20))
    other.next(6)
    for after, decisions in (
        (6, other.next(20)),
        (6, tuple(history.made[6:25])),
        (6, (*history.made[6:], *history.made[-1:])),
        (0, tuple(history.made[:6])),
        (0, tuple(history.made)),
        (25, tuple(history.made[25:])),
        (27, other.next(1)),
        (20, ()),
        (27, ()),
    ):
        with pytest.raises(
            LeaderFenced, match=f"the last decision stored is 26, so nothing can follow decision {after}"
        ):
            await store.append(E1, DecisionIndex(after), decisions)
    assert (await store.load()).decisions == tuple(history.made)


async def test_an_empty_append_confirms_that_the_epoch_leads(backend: Backend) -> None:
    store, history = await store_led_by_one(backend), History()
    await store.append(E1, START, ())
    await store.append(E1, START, history.next(4))
    await store.append(E1, DecisionIndex(4), ())
    assert (await store.load()).decisions == tuple(history.made)


async def test_a_snapshot_takes_the_place_of_decisions(backend: Backend) -> None:
    """What is loaded is the fold of all decisions, wherever in a batch the snapshot ends."""
    store, history = await store_led_by_one(backend), History(3)
    snapshots = [Snapshot()]
    for count in (5, 1, 9, 1, 1, 20):
        after, decisions = history.state.index, []
        for _ in range(count):
            decisions += history.next()
            snapshots.append(history.state.snapshot())
        await store.append(E1, after, tuple(decisions))
    highest = 0
    for index in (0, 3, 5, 6, 10, 6, 16, 17, 30, 36, 37):
        highest = max(index, highest)
        await store.trim(E1, snapshots[index])
        loaded = await store.load()
        assert loaded == LoadedState(LeaderInfo(E1, ONE, HERE), snapshots[highest], tuple(history.made[highest:]))
        assert fold(loaded) == history.state.snapshot()
        await store.append(E1, DecisionIndex(37), ())
    again = await backend.reopen()
    assert await again.load() == LoadedState(LeaderInfo(E1, ONE, HERE), history.state.snapshot(), ())
    await again.append(E1, DecisionIndex(37), history.next(2))
    assert fold(await again.load()) == history.state.snapshot()


async def test_a_snapshot_of_what_is_not_stored_is_refused(backend: Backend) -> None:
    store, history = await store_led_by_one(backend), History()
    await store.append(E1, START, history.next(3))
    history.next()
    with pytest.raises(InvalidArgument, match="the last decision stored is 3"):
        await store.trim(E1, history.state.snapshot())
    assert (await store.load()).snapshot == Snapshot()


async def test_appends_go_on_while_a_large_snapshot_is_stored(backend: Backend) -> None:
    """Larger than one request to etcd, and than what replaces it."""
    store, random = await store_led_by_one(backend), Random(4)
    state = OrderState()
    for size in (3_000_000, 5_000_000, 1_000):
        decisions = cursors(4, size // 4 // 8, random)
        await store.append(E1, state.index, decisions)
        for decision in decisions:
            state.apply(decision)
        state.cursors["large"] = state.high_watermark
        state.cursors.update(
            dict.fromkeys((random.randbytes(50).hex() for _ in range(size // 100)), state.high_watermark)
        )
        snapshot = state.snapshot()
        trimming = asyncio.create_task(store.trim(E1, snapshot))
        more = cursors(3, 20, random)
        for decision in more:
            await store.append(E1, state.index, (decision,))
            state.apply(decision)
        await trimming
        assert await store.load() == LoadedState(LeaderInfo(E1, ONE, HERE), snapshot, more)
    again = await backend.reopen()
    assert fold(await again.load()) == state.snapshot()


async def test_who_watches_is_told_of_every_leader_that_stays(backend: Backend) -> None:
    one, two = await backend.open(), await backend.open()
    watch = one.watch_leader()
    assert await anext(watch) == NO_LEADER
    for epoch, store, node, address in ((E1, two, TWO, THERE), (E2, one, ONE, HERE), (LeaderEpoch(3), two, ONE, HERE)):
        coming = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.02)
        assert not coming.done()
        await store.acquire(node, address, LeaderEpoch(epoch - 1))
        assert await coming == LeaderInfo(epoch, node, address)
    late = two.watch_leader()
    assert await anext(late) == LeaderInfo(LeaderEpoch(3), ONE, HERE)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.02)
    await one.close()
    with pytest.raises(Unavailable, match="closed"):
        await waiting


async def test_a_call_ends_at_its_deadline(backend: Backend) -> None:
    store, history = await store_led_by_one(backend), History()
    await store.append(E1, START, history.next(2))
    decisions = history.next()
    backend.stall()
    for attempt in (
        lambda: store.append(E1, DecisionIndex(2), decisions, timeout_ms=80),
        lambda: store.acquire(TWO, THERE, E1, timeout_ms=80),
    ):
        with pytest.raises(DeadlineExceeded, match="within 80 ms"):
            await attempt()
    with pytest.raises(InvalidArgument, match="at least 1 ms"):
        await store.leader(timeout_ms=0)
    backend.resume()
    # Both may have happened, or may happen at any time from now on; but not a bit of either.
    with suppress(LeaderFenced):
        await store.append(E1, DecisionIndex(2), decisions)
    assert (await store.load()).decisions in (tuple(history.made[:2]), tuple(history.made))


async def test_closing_ends_what_is_under_way(backend: Backend) -> None:
    store, history = await store_led_by_one(backend), History()
    backend.stall()
    calls = [
        asyncio.ensure_future(call)
        for call in (
            store.append(E1, START, history.next()),
            store.acquire(TWO, THERE, E1),
            store.trim(E1, Snapshot()),
            store.load(timeout_ms=60_000),
        )
    ]
    await asyncio.sleep(0.05)
    await store.close(timeout_ms=100)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert result is None or (isinstance(result, CutwaterError) and "closed" in str(result)), result
    assert any(isinstance(call.exception(), Unavailable) for call in calls)
    for attempt in (store.leader, store.load, lambda: store.append(E1, START, ()), lambda: anext(store.watch_leader())):
        with pytest.raises(Unavailable, match="was closed: open it again"):
            await attempt()
    await store.close()


# Appends that are begun. A store may refuse to begin any; then ``append`` is the way, and the result is the same.


async def test_appends_that_are_begun_one_after_the_other_are_stored_in_this_order(backend: Backend) -> None:
    store, history = await store_led_by_one(backend), History()
    begun, told = list[Begun](), list[int]()
    for number, count in enumerate((6, 1, 4, 1, 9)):
        after = history.state.index
        append = Begun(store, E1, after, history.next(count))
        begun.append(append)
        if append.is_begun:
            outcome = asyncio.ensure_future(append.outcome())
            outcome.add_done_callback(lambda _, number=number: told.append(number))
    for append in begun:
        await append.finish()
    assert told == sorted(told)
    assert all(append.told == [None] for append in begun if append.is_begun)
    expected = LoadedState(LeaderInfo(E1, ONE, HERE), Snapshot(), tuple(history.made))
    assert await store.load() == expected
    assert await (await backend.reopen()).load() == expected


async def test_an_append_that_is_begun_after_one_that_fails_fails_too(backend: Backend) -> None:
    store, history, other = await store_led_by_one(backend), History(1), History(2)
    await store.append(E1, START, history.next(6))
    before = await store.load()
    other.next(6)
    first = Begun(store, E1, DecisionIndex(5), other.next(2))
    second = Begun(store, E1, DecisionIndex(7), other.next(1))
    for append in (first, second):
        if append.is_begun:
            assert isinstance(await append.outcome(), LeaderFenced)
        with pytest.raises(LeaderFenced, match=f"so nothing can follow decision {append.after}"):
            await append.finish()
    assert await store.load() == before
    await Begun(store, E1, DecisionIndex(6), history.next(2)).finish()
    assert (await store.load()).decisions == tuple(history.made)


async def test_a_deposed_leader_stores_nothing_that_it_begins(backend: Backend) -> None:
    one, two, history = await backend.open(), await backend.open(), History()
    await one.acquire(ONE, HERE, E0)
    await Begun(one, E1, START, history.next(3)).finish()
    await two.acquire(TWO, THERE, E1)
    before = await two.load()
    for decisions in (history.next(), ()):
        with pytest.raises(LeaderFenced, match="metadata node 2 leads in epoch 2"):
            await Begun(one, E1, DecisionIndex(3), decisions).finish()
    assert await two.load() == before


async def test_the_same_append_begun_again_succeeds_and_is_stored_once(backend: Backend) -> None:
    """The first report may have been lost. An append without decisions confirms that the epoch leads."""
    store, history = await store_led_by_one(backend), History()
    decisions = history.next(6)
    for _ in range(3):
        await Begun(store, E1, START, decisions).finish()
    await Begun(store, E1, DecisionIndex(6), ()).finish()
    assert (await store.load()).decisions == tuple(history.made)


async def test_an_append_that_was_begun_is_reported_at_its_deadline_and_may_be_repeated(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, history = await store_led_by_one(backend), History()
    await store.append(E1, START, history.next(2))
    decisions = history.next()
    monkeypatch.setattr(sqlite_store, "TIMEOUT_MS", 80)
    backend.stall()
    append = Begun(store, E1, DecisionIndex(2), decisions)
    if append.is_begun:
        assert isinstance(await append.outcome(), DeadlineExceeded)
    backend.resume()
    # It may have happened or not. The same append settles that, and nothing is stored twice.
    await Begun(store, E1, DecisionIndex(2), decisions).finish()
    assert (await store.load()).decisions == tuple(history.made)
    assert len(append.told) == append.is_begun


async def test_closing_reports_an_append_that_was_begun_and_nothing_begins_after_it(backend: Backend) -> None:
    store, history = await store_led_by_one(backend), History()
    decisions = history.next()
    backend.stall()
    append = Begun(store, E1, START, decisions)
    await store.close(timeout_ms=100)
    if append.is_begun:
        assert isinstance(await append.outcome(), Unavailable)
    backend.resume()
    late = Begun(store, E1, START, decisions)
    assert not late.is_begun
    with pytest.raises(Unavailable, match="was closed: open it again"):
        await late.finish()
    await asyncio.sleep(0.05)
    assert late.told == []
    assert len(append.told) == append.is_begun
