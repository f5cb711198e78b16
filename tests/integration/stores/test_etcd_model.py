"""The model of etcd answers every request as a real etcd does, and fails in the ways of a real one.

A failure of the comparison shows its seed. To have it again:
STORE_SEED=n python -m pytest tests/integration/stores/test_etcd_model.py
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest

from cutwater.errors import DeadlineExceeded, InvalidArgument, LeaderFenced, ReadOnly, Unavailable
from cutwater.metadata.etcd import etcd_pb2 as pb
from cutwater.metadata.etcd.address import EtcdAddress
from cutwater.metadata.etcd.client import COMPACT, RANGE, TXN, MemberConnection, Rpc, connect_members
from cutwater.metadata.stores.etcd_store import delete, get, put
from cutwater.metadata.stores.store_interface import LeaderInfo
from cutwater.testing.stores.etcd_model import EtcdFaults, EtcdModel
from cutwater.types import LeaderEpoch
from tests.integration.stores.conftest import CLUSTER, Etcd
from tests.integration.stores.store_kit import HERE, ONE, START, THERE, TWO, History, cursors

STEPS = 400
SEED = int(os.environ.get("STORE_SEED", time.time_ns() % 1_000_000))
E0, E1, E2 = LeaderEpoch(0), LeaderEpoch(1), LeaderEpoch(2)
RESULTS = (pb.Compare.EQUAL, pb.Compare.GREATER, pb.Compare.LESS, pb.Compare.NOT_EQUAL)


class Requests:
    """Makes requests that make sense, and some that do not. Revisions are those of the model; ``offset`` is how far the
    real etcd is ahead."""

    def __init__(self, random: Random, prefix: bytes, offset: int) -> None:
        self.random, self.prefix, self.offset = random, prefix, offset
        self.newest = 1

    def key(self) -> bytes:
        return self.prefix + b"%d" % self.random.randrange(12) if self.random.random() < 0.98 else b""

    def revision(self, of_real: bool, revision: int) -> int:
        return revision + self.offset if of_real and revision else revision

    def next(self) -> tuple[Rpc[Any, Any], Callable[[bool], Any]]:
        """A request, as a function of whether the real etcd gets it."""
        kind = self.random.choices(("txn", "range", "compact"), (6, 4, 1))[0]
        if kind == "compact":
            revision = max(1, self.newest + self.random.randint(-10, 1))
            return COMPACT, lambda real: pb.Compaction(revision=self.revision(real, revision))
        if kind == "range":
            return RANGE, self._range()
        compare = [self._compare() for _ in range(self.random.choice((0, 0, 1, 2)))]
        success = [self._operation() for _ in range(self.random.randint(0, 4))]
        failure = [self._operation() for _ in range(self.random.randint(0, 2))]
        return TXN, lambda real: pb.Txn(
            compare=[make(real) for make in compare],
            success=[make(real) for make in success],
            failure=[make(real) for make in failure],
        )

    def _range(self) -> Callable[[bool], pb.Range]:
        start, end = self.key(), self.random.choice((b"", self.prefix + b"9", self.key()))
        limit, keys_only = self.random.choice((0, 0, 1, 3)), self.random.random() < 0.2
        order = self.random.choice((pb.Range.ASCENDING, pb.Range.DESCENDING))
        revision = self.random.choice((0, 0, 0, max(1, self.newest + self.random.randint(-12, 1))))
        return lambda real: pb.Range(
            key=start,
            range_end=end,
            limit=limit,
            keys_only=keys_only,
            sort_order=order,
            revision=self.revision(real, revision),
        )

    def _operation(self) -> Callable[[bool], pb.Operation]:
        match self.random.choices(("put", "get", "delete"), (5, 2, 2))[0]:
            case "put":
                key, value = self.key(), self.random.randbytes(self.random.randrange(20))
                return lambda real: put(key, value)
            case "delete":
                start, end = self.key(), self.random.choice((b"", self.key()))
                return lambda real: delete(start, end)
        make = self._range() if self.random.random() < 0.3 else None
        key = self.key()
        return lambda real: pb.Operation(range=make(real)) if make else get(key)

    def _compare(self) -> Callable[[bool], pb.Compare]:
        key, result = self.key(), self.random.choice(RESULTS)
        match self.random.choice(("value", "version", "mod", "create")):
            case "value":
                value = self.random.randbytes(self.random.randrange(3))
                return lambda real: pb.Compare(target=pb.Compare.VALUE, key=key, result=result, value=value)
            case "version":
                number = self.random.randrange(4)
                return lambda real: pb.Compare(target=pb.Compare.VERSION, key=key, result=result, version=number)
            case "mod":
                revision = self.random.choice((0, max(1, self.newest - self.random.randrange(8))))
                return lambda real: pb.Compare(
                    target=pb.Compare.MOD, key=key, result=result, mod_revision=self.revision(real, revision)
                )
        revision = self.random.choice((0, max(1, self.newest - self.random.randrange(8))))
        return lambda real: pb.Compare(
            target=pb.Compare.CREATE, key=key, result=result, create_revision=self.revision(real, revision)
        )


async def outcome(call: Awaitable[Any], offset: int) -> object:
    """What was answered, without what differs between two clusters."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    if isinstance(answer, pb.CompactionAnswer):
        return "compacted"
    if isinstance(answer, pb.RangeAnswer):
        return answer.header.revision - offset, found(answer, offset)
    reads = [found(one.range, offset) for one in answer.responses]
    return answer.header.revision - offset, answer.succeeded, reads


def found(answer: pb.RangeAnswer, offset: int) -> object:
    pairs = [
        (pair.key, pair.value, pair.mod_revision - offset, pair.create_revision - offset, pair.version)
        for pair in answer.kvs
    ]
    return pairs, answer.more


async def connections(on_etcd: Etcd) -> tuple[MemberConnection, EtcdModel, MemberConnection]:
    model = EtcdModel(Random(1), members=1)
    (real,) = connect_members(EtcdAddress(tuple(member.endpoint for member in on_etcd.etcd.members), "x"))
    return real, model, model.connect(model.address)[0]


async def test_the_model_answers_as_etcd_does(on_etcd: Etcd) -> None:
    print(f"to have this again: STORE_SEED={SEED} python -m pytest {__file__}")
    real, model, modelled = await connections(on_etcd)
    random, prefix = Random(SEED), f"{on_etcd.url}/".encode()
    try:
        before = (await real.ask(RANGE, pb.Range(key=b"x"), 5)).header.revision
        # What others stored earlier is forgotten, so that both have the same history from here.
        await real.ask(COMPACT, pb.Compaction(revision=before), 5)
        await modelled.ask(COMPACT, pb.Compaction(revision=1), 5)
        requests = Requests(random, prefix, before - 1)
        answers = set()
        for number in range(STEPS):
            rpc, make = requests.next()
            one = await outcome(real.ask(rpc, make(True), 5), requests.offset)
            other = await outcome(modelled.ask(rpc, make(False), 5), 0)
            assert one == other, (number, make(False))
            requests.newest = model.data.revision
            if isinstance(one[0], grpc.StatusCode):
                answers.add(one)
        assert len(answers) >= 3, answers
    finally:
        await real.close()


async def test_the_model_has_the_limits_of_etcd(on_etcd: Etcd) -> None:
    real, _, modelled = await connections(on_etcd)
    try:
        prefix = f"{on_etcd.url}/".encode()
        for txn in (
            pb.Txn(success=[put(prefix, bytes(1_600_000))]),
            pb.Txn(success=[put(prefix, bytes(1_570_000))]),
            pb.Txn(success=[put(prefix + b"%d" % n, b"") for n in range(129)]),
            pb.Txn(success=[put(prefix + b"%d" % n, b"") for n in range(128)]),
        ):
            answers = [await outcome(member.ask(TXN, txn, 5), 0) for member in (real, modelled)]
            if isinstance(answers[0][0], grpc.StatusCode):
                assert answers[0] == answers[1]
            else:
                assert answers[0][1:] == answers[1][1:]
    finally:
        await real.close()


async def test_a_watch_ends_as_that_of_etcd(on_etcd: Etcd) -> None:
    """It reports each change after the given revision; from a forgotten revision it is cancelled."""
    real, _, modelled = await connections(on_etcd)
    key = f"{on_etcd.url}/watched".encode()
    try:
        for member in (real, modelled):
            revisions = [
                (await member.ask(TXN, pb.Txn(success=[put(key, b"%d" % n)]), 5)).header.revision for n in range(4)
            ]
            assert await watched(member, key, revisions[1]) == ([b"1", b"2", b"3"], False)
            waiting = asyncio.ensure_future(watched(member, key, revisions[3] + 1))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await member.ask(TXN, pb.Txn(success=[put(key + b"0", b"another key")]), 5)
            await member.ask(TXN, pb.Txn(success=[put(key, b"4")]), 5)
            assert await waiting == ([b"4"], False)
            await member.ask(COMPACT, pb.Compaction(revision=revisions[3]), 5)
            assert await watched(member, key, revisions[1]) == ([], True)
            assert await watched(member, key, revisions[3]) == ([b"3", b"4"], False)
    finally:
        await real.close()


async def watched(member: MemberConnection, key: bytes, start_revision: int) -> tuple[list[bytes], bool]:
    """The values of the first answer after that of the creation, and whether it ended the watch."""
    watch = member.watch()
    await watch.write(pb.Watch(create=pb.WatchCreate(key=key, start_revision=start_revision)))
    while True:
        answer = await watch.read()
        if answer.events or answer.canceled:
            watch.cancel()
            await watch.code()
            return [event.kv.value for event in answer.events], answer.canceled


# Faults of the model.


@pytest.mark.parametrize("fault", ["refused", "lost", "answer_lost", "reset", "disturbed", "late", "busy"])
async def test_the_store_gets_over_every_fault(fault: str) -> None:
    """Half of all requests have the fault: everything is stored once, in its order."""
    model = EtcdModel(Random(2), faults=EtcdFaults(**{fault: 0.5}, late_seconds_max=0.3))
    store, history = model.store(CLUSTER), History()
    await store.acquire(ONE, HERE, E0, timeout_ms=60_000)
    for count in (1, 3, 1):
        await store.append(E1, history.state.index, history.next(count), timeout_ms=60_000)
    assert (await store.load(timeout_ms=60_000)).decisions == tuple(history.made)
    await store.close()
    await model.close()


async def test_a_late_write_of_a_deposed_leader_changes_nothing() -> None:
    model = EtcdModel(Random(3))
    one, two, history = model.store(CLUSTER), model.store(CLUSTER), History()
    await one.acquire(ONE, HERE, E0)
    model.faults = EtcdFaults(late=1.0, late_seconds_max=1.0)
    with pytest.raises(DeadlineExceeded):
        await one.append(E1, START, history.next(), timeout_ms=1)
    model.faults = EtcdFaults()
    await two.acquire(TWO, THERE, E1)
    before = await two.load()
    await asyncio.sleep(1.1)
    assert await two.load() == before
    for store in (one, two):
        await store.close()


async def test_without_a_majority_nothing_is_answered() -> None:
    model = EtcdModel(Random(4))
    store, history = model.store(CLUSTER), History()
    await store.acquire(ONE, HERE, E0)
    model.cut_off(model.members[0])
    model.kill(model.members[1])
    with pytest.raises(DeadlineExceeded):
        await store.append(E1, START, history.next(), timeout_ms=700)
    with pytest.raises(DeadlineExceeded):
        await store.leader(timeout_ms=700)
    model.rejoin(model.members[0])
    await store.append(E1, START, tuple(history.made), timeout_ms=10_000)
    # The member that led before comes back, and another one leads by now.
    model.change_leader()
    model.start(model.members[1])
    assert (await store.load()).decisions == tuple(history.made)
    await store.close()
    await model.close()


async def test_a_watch_survives_the_death_of_its_member() -> None:
    model = EtcdModel(Random(5))
    one, two = model.store(CLUSTER), model.store(CLUSTER)
    watch = one.watch_leader()
    await anext(watch)
    await two.acquire(ONE, HERE, E0)
    assert await anext(watch) == LeaderInfo(E1, ONE, HERE)
    coming = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.05)
    assert model.leader is not None
    model.kill(model.leader)
    await two.acquire(TWO, THERE, E1)
    assert await coming == LeaderInfo(E2, TWO, THERE)
    for store in (one, two):
        await store.close()
    with pytest.raises(Unavailable):
        await anext(watch)
    await model.close()


async def test_a_used_up_quota_stops_writes_until_the_alarm_is_disarmed() -> None:
    model, random = EtcdModel(Random(6)), Random(6)
    model.data.quota_bytes = 500_000
    store = model.store(CLUSTER)
    await store.acquire(ONE, HERE, E0)
    large = cursors(1, 1_000_000, random)
    for _ in range(2):
        with pytest.raises(ReadOnly, match="its quota is used up"):
            await store.append(E1, START, large)
    await store.append(E1, START, ())
    model.data.quota_bytes = 10_000_000
    model.data.disarm()
    await store.append(E1, START, large)
    with pytest.raises(LeaderFenced):
        await store.append(E2, START, large)
    with pytest.raises(InvalidArgument, match="request is too large"):
        await store._client.call(TXN, pb.Txn(success=[put(b"k", bytes(1_600_000))]))
    await store.close()
