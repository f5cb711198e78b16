"""The store in etcd when etcd, or the way to it, fails: nothing that was confirmed is lost, nothing is stored twice.

The etcd that tests have (3.5.1) may lose a confirmed transaction on a member that is killed (docs/metadata-stores.md).
So what is stored is read at the end from members that were not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from benchmarks.local_etcd import EtcdServer, LocalEtcd
from cutwater.core.order.state import Snapshot
from cutwater.errors import DeadlineExceeded, LeaderFenced, Unavailable
from cutwater.metadata.etcd import etcd_pb2 as pb
from cutwater.metadata.etcd.address import EtcdAddress
from cutwater.metadata.etcd.client import STATUS
from cutwater.metadata.stores.etcd_store import EtcdStore
from cutwater.metadata.stores.store_interface import LeaderInfo, LoadedState
from cutwater.testing.fault_proxy import FaultProxy
from cutwater.types import LeaderEpoch
from tests.integration.stores.conftest import CLUSTER, Etcd
from tests.integration.stores.store_kit import HERE, ONE, START, THERE, TWO, History

E0, E1, E2 = LeaderEpoch(0), LeaderEpoch(1), LeaderEpoch(2)
PREFIX = "faults"


def store_on(backend: Etcd, *members: EtcdServer) -> EtcdStore:
    store = EtcdStore(EtcdAddress(tuple(member.endpoint for member in members), PREFIX), CLUSTER)
    backend.stores.append(store)
    return store


async def etcd_leader(etcd: LocalEtcd, store: EtcdStore) -> EtcdServer:
    """The member that leads the etcd cluster, as soon as there is one."""
    while True:
        await store._client.choose()
        member = store._client._asked
        try:
            answer = await member.ask(STATUS, pb.Status(), 1)
        except grpc.aio.AioRpcError:
            continue
        if answer.leader == answer.header.member_id:
            return next(one for one in etcd.members if one.endpoint == member.endpoint)


async def append_until(
    over: asyncio.Event, store: EtcdStore, epoch: LeaderEpoch, history: History, done: list[int]
) -> None:
    """One after the other, each repeated until its outcome is known, as a leader does it."""
    while not over.is_set():
        after, decisions = history.state.index, history.next(2)
        while True:
            try:
                await store.append(epoch, after, decisions)
                break
            except Unavailable:
                await asyncio.sleep(0.01)
        done.append(history.state.index)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_the_leader_of_etcd_fails_amid_appends(on_three: Etcd, fault: str) -> None:
    etcd, history, done = on_three.etcd, History(), list[int]()
    store = store_on(on_three, *etcd.members)
    await store.acquire(ONE, HERE, E0)
    over = asyncio.Event()
    appending = asyncio.create_task(append_until(over, store, E1, history, done))
    await until(lambda: len(done) >= 30 or appending.done())
    failed = await etcd_leader(etcd, store)
    failed.kill() if fault == "kill" else failed.stop()
    before = len(done)
    await until(lambda: len(done) >= before + 30 or appending.done())
    etcd.restart(failed) if fault == "kill" else failed.go_on()
    await until(lambda: len(done) >= before + 60 or appending.done())
    over.set()
    await appending
    others = [member for member in etcd.members if member is not failed]
    loaded = await store_on(on_three, *others).load()
    assert loaded.decisions == tuple(history.made)
    assert len(loaded.decisions) == 2 * len(done)


async def test_the_leader_of_etcd_is_asked_first(on_three: Etcd) -> None:
    etcd = on_three.etcd
    store = store_on(on_three, *etcd.members)
    await store.leader()
    leader = await etcd_leader(etcd, store)
    assert store._client._asked.endpoint == leader.endpoint
    others = [member for member in etcd.members if member is not leader]
    for order in ((leader, *others), (*others, leader)):
        fresh = store_on(on_three, *order)
        await fresh.leader()
        assert fresh._client._asked.endpoint == leader.endpoint


async def test_a_member_without_a_majority_confirms_nothing(on_three: Etcd) -> None:
    """The one that is left still has all it needs for an answer, and must not give it: others may have gone on."""
    etcd, history = on_three.etcd, History()
    store = store_on(on_three, *etcd.members)
    await store.acquire(ONE, HERE, E0)
    await store.append(E1, START, history.next(5))
    left, *stopped = etcd.members
    lonely = store_on(on_three, left)
    assert await lonely.leader() == LeaderInfo(E1, ONE, HERE)
    for member in stopped:
        member.stop()
    for attempt in (
        lambda: lonely.append(E1, history.state.index, (), timeout_ms=400),
        lambda: lonely.leader(timeout_ms=400),
        lambda: lonely.load(timeout_ms=400),
        lambda: store.append(E1, history.state.index, (), timeout_ms=400),
    ):
        with pytest.raises(DeadlineExceeded):
            await attempt()
    for member in stopped:
        member.go_on()
    await lonely.append(E1, history.state.index, (), timeout_ms=20_000)


async def test_who_watches_goes_on_with_another_member(on_three: Etcd) -> None:
    etcd = on_three.etcd
    one, two = store_on(on_three, *etcd.members), store_on(on_three, *etcd.members)
    watch = one.watch_leader()
    assert (await anext(watch)).epoch == E0
    coming = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.1)
    failed = await etcd_leader(etcd, one)
    failed.stop()
    await two.acquire(TWO, THERE, E0, timeout_ms=20_000)
    assert await coming == LeaderInfo(E1, TWO, THERE)
    failed.go_on()


# --------------------------------------------------------------------------------------------- answers that are lost


@asynccontextmanager
async def proxied(backend: Etcd) -> AsyncIterator[tuple[EtcdStore, EtcdStore, FaultProxy]]:
    """A store behind a proxy, and one that is not, on the same data."""
    direct = await backend.open()
    assert isinstance(direct, EtcdStore)
    async with FaultProxy("127.0.0.1", backend.etcd.members[0].client_port) as proxy:
        behind = EtcdStore(EtcdAddress((proxy.address,), backend.url.rpartition("/")[2]), CLUSTER)
        try:
            yield behind, direct, proxy
        finally:
            await behind.close()


async def with_lost_answer(
    proxy: FaultProxy, call: Awaitable[object], direct: EtcdStore, has_happened: Callable[[LoadedState], bool]
) -> None:
    """Make the call, lose its answer after it has been carried out, and let the client find out for itself."""
    connections = proxy.connections
    under_way = asyncio.ensure_future(call)
    while not has_happened(await direct.load()):
        await asyncio.sleep(0.005)
    assert not under_way.done()
    proxy.heal()
    await under_way
    assert proxy.connections > connections


async def test_an_answer_that_is_lost_is_found_out(on_etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    async with proxied(on_etcd) as (store, direct, proxy):
        await store.leader()
        proxy.swallow(from_target=True)
        await with_lost_answer(proxy, store.acquire(ONE, HERE, E0), direct, lambda now: now.leader.epoch == E1)
        for _ in range(3):
            append = store.append(E1, history.state.index, history.next(4))
            proxy.swallow(from_target=True)
            await with_lost_answer(proxy, append, direct, lambda now: len(now.decisions) == len(history.made))
        assert (await direct.load()).decisions == tuple(history.made)
        write_pieces = store._write_pieces

        async def write_pieces_then_lose_answers(epoch: LeaderEpoch, snapshot: Snapshot) -> tuple[str, bytes]:
            written = await write_pieces(epoch, snapshot)
            proxy.swallow(from_target=True)
            return written

        monkeypatch.setattr(store, "_write_pieces", write_pieces_then_lose_answers)
        snapshot = history.state.snapshot()
        await with_lost_answer(proxy, store.trim(E1, snapshot), direct, lambda now: now.snapshot == snapshot)
        assert (await direct.load()).decisions == ()


async def test_what_arrives_after_another_leads_has_no_effect(on_etcd: Etcd) -> None:
    history = History()
    async with proxied(on_etcd) as (store, direct, proxy):
        await store.acquire(ONE, HERE, E0)
        await store.append(E1, START, history.next(6))
        snapshot = history.state.snapshot()
        proxy.hold(to_target=True)
        late = [
            asyncio.ensure_future(call)
            for call in (
                store.append(E1, history.state.index, history.next(2)),
                store.trim(E1, snapshot),
                store.append(E1, snapshot.index, ()),
                store.acquire(ONE, HERE, E1),
            )
        ]
        await asyncio.sleep(0.1)
        assert await direct.acquire(TWO, THERE, E1) == E2
        other = History()
        other.next(6)
        other.random.seed(5)
        await direct.append(E2, snapshot.index, other.next(2))
        before = await direct.load()
        proxy.heal()
        for result in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(result, LeaderFenced), result
        assert await direct.load() == before
        assert before.decisions == tuple(other.made)
