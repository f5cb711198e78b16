"""The store in etcd: what etcd keeps, how much, and what is said when it keeps something else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trustme

from benchmarks.local_etcd import MISSING, LocalEtcd
from cutwater.admin.local_etcd import find_etcd
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.errors import DeadlineExceeded, Fenced, InvalidArgument, ReadOnly, ResourceExhausted
from cutwater.metadata.admin_recovery import RECOVERY, recover_admin
from cutwater.metadata.etcd import etcd_pb2 as pb
from cutwater.metadata.etcd.client import COMPACT, RANGE, TXN, Compacted
from cutwater.metadata.stores import etcd_store
from cutwater.metadata.stores.etcd_store import EtcdStore, delete, put
from cutwater.metadata.stores.open_store import open_store
from cutwater.metadata.stores.store_errors import DamagedStore
from cutwater.metadata.stores.store_interface import NO_LEADER
from cutwater.types import ClusterId, DecisionIndex, LeaderEpoch
from tests.integration.stores.conftest import CLUSTER, ETCD_OPTIONS, Etcd
from tests.integration.stores.store_kit import HERE, ONE, START, THERE, TWO, History, cursors

E0, E1, E2 = LeaderEpoch(0), LeaderEpoch(1), LeaderEpoch(2)


async def opened(backend: Etcd) -> EtcdStore:
    store = await backend.open()
    assert isinstance(store, EtcdStore)
    return store


async def keys_under(store: EtcdStore, start: bytes, end: bytes) -> list[str]:
    answer = await store._client.call(RANGE, pb.Range(key=start, range_end=end))
    return [pair.key.decode() for pair in answer.kvs]


async def test_a_trim_leaves_one_snapshot_and_no_rubbish(on_etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "PIECE_BYTES", 200)
    store, history = await opened(on_etcd), History()
    keys = store._keys
    await store.acquire(ONE, HERE, E0)
    for n in range(1, 6):
        await store.append(E1, history.state.index, history.next(10))
        # As an earlier attempt would leave them that was given up.
        for directory in (f"{n:020d}-0", f"{99:020d}-0"):
            await store._client.call(TXN, pb.Txn(success=[put(keys.piece(directory, 0), b"rubbish")]))
        await store.trim(E1, history.state.snapshot())
        pieces = await keys_under(store, keys.pieces, keys.pieces_end)
        assert len(pieces) > 3
        assert len({key.rpartition("/")[0] for key in pieces}) == 1
        # The batch in which the snapshot ends stays, to recognize its repetition.
        assert await keys_under(store, keys.decisions, keys.decisions_end) == [
            keys.batch(history.state.index - 9).decode()
        ]
    assert (await store.load()).snapshot == history.state.snapshot()


async def test_a_snapshot_that_is_not_finished_changes_nothing(on_etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    store, history = await opened(on_etcd), History()
    await store.acquire(ONE, HERE, E0)
    await store.append(E1, START, history.next(10))
    await store.trim(E1, history.state.snapshot())
    await store.append(E1, DecisionIndex(10), history.next(10))
    before = await store.load()
    monkeypatch.setattr(etcd_store, "PIECE_BYTES", 50)
    trimming = asyncio.ensure_future(store.trim(E1, history.state.snapshot()))
    while len(await keys_under(store, store._keys.pieces, store._keys.pieces_end)) < 5:
        await asyncio.sleep(0)
    trimming.cancel()
    await asyncio.wait([trimming])
    assert await store.load() == before
    monkeypatch.setattr(etcd_store, "PIECE_BYTES", 5_000)
    await store.trim(E1, history.state.snapshot())
    assert (await store.load()).snapshot == history.state.snapshot()


async def test_nothing_is_stored_when_too_much_is_not_trimmed(on_etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "UNTRIMMED_DECISIONS_MAX", 20)
    one, two, history = await opened(on_etcd), await opened(on_etcd), History()
    await one.acquire(ONE, HERE, E0)
    await one.append(E1, START, history.next(20))
    snapshot, decisions = history.state.snapshot(), history.next(3)
    with pytest.raises(ResourceExhausted, match="more than 20 after the snapshot of decision 0") as caught:
        await one.append(E1, DecisionIndex(20), decisions)
    assert caught.value.retry_ms > 0
    assert len((await two.load()).decisions) == 20
    # A confirmation needs no room, and neither does what is stored already.
    await one.append(E1, DecisionIndex(20), ())
    await one.append(E1, START, tuple(history.made[:20]))
    # Someone else makes room, and nobody says so.
    await two.trim(E1, snapshot)
    await one.append(E1, DecisionIndex(20), decisions)
    assert (await two.load()).decisions == decisions


async def test_what_is_too_large_for_etcd_is_refused(on_etcd: Etcd) -> None:
    store, random = await opened(on_etcd), Random(1)
    await store.acquire(ONE, HERE, E0)
    with pytest.raises(InvalidArgument, match=r"2 decisions take [0-9]+ bytes, and etcd takes 1400000 at once"):
        await store.append(E1, START, cursors(2, 3_000_000, random))
    almost = cursors(2, 1_000_000, random)
    await store.append(E1, START, almost)
    assert (await store.load()).decisions == almost


async def test_etcd_forgets_what_is_over(on_etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "UPKEEP_SECONDS", 0.05)
    store, history = await opened(on_etcd), History()
    await store.acquire(ONE, HERE, E0)
    first = store._revision
    async with asyncio.timeout(20):
        while True:
            await store.append(E1, history.state.index, history.next())
            try:
                await store._client.call(RANGE, pb.Range(key=store._keys.last, revision=first))
            except Compacted:
                break
            await asyncio.sleep(0.01)
    assert (await store.load()).decisions == tuple(history.made)


async def test_a_load_begins_again_if_etcd_forgot_its_beginning(on_etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "PAGE_KEYS", 1)
    store, history = await opened(on_etcd), History()
    await store.acquire(ONE, HERE, E0)
    await store.append(E1, START, history.next(5))
    await store.append(E1, DecisionIndex(5), history.next(5))
    ask, pages = store._client.call, 0

    async def compact_after_the_first_page(rpc: Any, request: Any) -> Any:
        nonlocal pages
        answer = await ask(rpc, request)
        if rpc is RANGE and request.revision:
            pages += 1
            if pages == 1:
                await store.append(E1, DecisionIndex(10), history.next())
                await ask(COMPACT, pb.Compaction(revision=store._revision))
        return answer

    monkeypatch.setattr(store._client, "call", compact_after_the_first_page)
    assert (await store.load()).decisions == tuple(history.made)
    assert len(history.made) == 11
    assert pages > 2


@pytest.mark.parametrize(
    ("key", "data", "message"),
    [
        ("decisions", b"", "decision 4 is missing|decision 7 follows decision 3"),
        ("decisions", b"CWMD and nonsense, as long as you like", "0000004 is damaged .it is no record of Cutwater"),
        ("leader", b"", "the leader is of epoch 0"),
        ("epoch", b"12a", "epoch is damaged .it is no number"),
        ("last", b"%020d" % 12, "they do not end with decision 12"),
        ("snapshot", b"x" * 100, "snapshot is damaged .it is no record"),
    ],
)
async def test_what_does_not_fit_together_is_damage(on_etcd: Etcd, key: str, data: bytes, message: str) -> None:
    store, history = await opened(on_etcd), History()
    await store.acquire(ONE, HERE, E0)
    for _ in range(3):
        await store.append(E1, history.state.index, history.next(3))
    name = store._keys.batch(4) if key == "decisions" else getattr(store._keys, key)
    await store._client.call(TXN, pb.Txn(success=[put(name, data) if data else delete(name, name + b"\0")]))
    with pytest.raises(DamagedStore, match=message):
        await store.load()


async def test_pieces_that_are_missing_are_damage(on_etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "PIECE_BYTES", 300)
    store, history = await opened(on_etcd), History()
    await store.acquire(ONE, HERE, E0)
    await store.append(E1, START, history.next(20))
    await store.trim(E1, history.state.snapshot())
    keys = await keys_under(store, store._keys.pieces, store._keys.pieces_end)
    await store._client.call(TXN, pb.Txn(success=[delete(keys[1].encode(), keys[2].encode())]))
    with pytest.raises(DamagedStore, match=r"is damaged .[0-9]+ pieces with [0-9]+ bytes instead of"):
        await store.load()


async def test_two_clusters_do_not_see_each_other(on_etcd: Etcd) -> None:
    store = await opened(on_etcd)
    await store.acquire(ONE, HERE, E0)
    other = await open_store(on_etcd.url, cluster=ClusterId(8))
    on_etcd.stores.append(other)
    assert await other.leader() == NO_LEADER
    assert await other.acquire(TWO, THERE, E0) == E1
    assert (await store.leader()).node == ONE


async def test_a_used_up_quota_is_said(tmp_path: Path) -> None:
    if find_etcd() is None:
        pytest.skip(MISSING)
    options = (*ETCD_OPTIONS, "--quota-backend-bytes", "4000000")
    with LocalEtcd(tmp_path, options=options) as etcd:
        store, random, state = await open_store(etcd.url("quota"), cluster=CLUSTER), Random(1), OrderState()
        await store.acquire(ONE, HERE, E0)
        refused: ReadOnly | None = None
        while refused is None:
            decisions = cursors(1, 1_000_000, random)
            try:
                await store.append(E1, state.index, decisions)
                state.apply(decisions[0])
            except ReadOnly as error:
                refused = error
        assert "its quota is used up, so it takes no writes; compact and defragment it" in refused.message
        # Reading goes on. If etcd was slow, the one that was refused had gone through at the first attempt.
        loaded = await store.load()
        if len(loaded.decisions) > state.index:
            state.apply(decisions[0])
        assert OrderState(Snapshot(), loaded.decisions).snapshot() == state.snapshot()
        await store.append(E1, state.index, ())
        await store.close()


async def test_certificates_are_asked_for_and_shown(tmp_path: Path) -> None:
    if find_etcd() is None:
        pytest.skip(MISSING)
    authority, stranger = trustme.CA(), trustme.CA()
    certificate, shown = authority.issue_cert("127.0.0.1"), authority.issue_cert("mr@example.org", common_name="mr")
    for name, blob in (
        ("ca", authority.cert_pem),
        ("stranger", stranger.cert_pem),
        ("key", certificate.private_key_pem),
        ("cert", certificate.cert_chain_pems[0]),
        ("client-key", shown.private_key_pem),
        ("client-cert", shown.cert_chain_pems[0]),
    ):
        blob.write_to_path(tmp_path / f"{name}.pem")
        (tmp_path / f"{name}.pem").chmod(0o600)
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "stranger", "cert", "key", "client-cert", "client-key")}
    options = ["--cert-file", files["cert"], "--key-file", files["key"], "--trusted-ca-file", files["ca"]]
    with LocalEtcd(tmp_path, options=(*ETCD_OPTIONS, *map(str, options), "--client-cert-auth"), scheme="https") as etcd:
        shown_too = f"&tls.cert={files['client-cert']}&tls.key={files['client-key']}"
        good = await open_store(f"{etcd.url('tls')}?tls.ca={files['ca']}{shown_too}", cluster=CLUSTER)
        assert await good.acquire(ONE, HERE, E0, timeout_ms=20_000) == E1
        for query in (f"?tls.ca={files['ca']}", f"?tls.ca={files['stranger']}{shown_too}", ""):
            bad = await open_store(etcd.url("tls") + query, cluster=CLUSTER)
            with pytest.raises(DeadlineExceeded, match=r"the last it said was: etcd at 127\.0\.0\.1"):
                await bad.leader(timeout_ms=700)
            await bad.close()
        await good.close()
    with pytest.raises(InvalidArgument, match=r"none\.pem cannot be read"):
        await open_store(f"{etcd.url('tls')}?tls.ca={tmp_path}/none.pem", cluster=CLUSTER)
    files["client-key"].chmod(0o644)
    with pytest.raises(InvalidArgument, match=r"chmod 600 \S+client-key\.pem"):
        await open_store(f"{etcd.url('tls')}?tls.ca={files['ca']}{shown_too}", cluster=CLUSTER)


async def test_a_version_that_loses_data_is_warned_of_once(on_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    store = await opened(on_etcd)
    await store.leader()
    await store._client.choose()
    said = [record.getMessage() for record in caplog.records if "version" in record.getMessage()]
    version = (await store._client._status(store._client._asked)).version
    assert len(said) == (1 if version == "3.5.1" else 0)


async def test_an_administrator_is_recovered_while_a_leader_runs(on_etcd: Etcd) -> None:
    store, history = await opened(on_etcd), History()
    await store.acquire(ONE, HERE, E0)
    await store.append(E1, history.state.index, history.next(3))
    made = await recover_admin(on_etcd.url, CLUSTER, "ann", "0" * 16, "1" * 64)
    assert (made.is_running, made.mode) == (True, "off")
    with pytest.raises(Fenced):
        await store.append(E1, history.state.index, history.next(1))
    loaded = await store.load()
    # The leader before finds itself named, and leads again.
    assert (loaded.leader.epoch, loaded.leader.node, loaded.leader.address) == (E2, ONE, HERE)
    access = OrderState(loaded.snapshot, loaded.decisions).access
    assert (access.admins(), access.tokens["0" * 16].creator) == ({"ann"}, RECOVERY)
    assert await store.acquire(ONE, HERE, E2) == 3


def test_without_etcd_nothing_of_it_is_imported() -> None:
    program = """
import asyncio, sys
from cutwater.metadata.stores.open_store import open_store
sys.modules["grpc"] = None
async def run():
    assert not any(name.split(".")[0] in ("grpc", "google.protobuf") and module for name, module in sys.modules.items())
    try:
        await open_store("etcd://127.0.0.1:2379/x", cluster=1)
    except Exception as error:
        print(type(error).__name__, error)
asyncio.run(run())
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("InvalidArgument 'etcd://127.0.0.1:2379/x' needs the package grpc, which is not inst")
