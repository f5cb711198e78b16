"""What happens under a node's feet: files opened anew while they are read, writes that hang, replicas that go away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec import structs

from cutwater.core.messages import CreateReplica, LearnFrom, Replicate, SyncRequest
from cutwater.core.replica.events import StorageFailed, Truncate
from cutwater.core.requests import CreateTopicRequest
from cutwater.errors import CutwaterError, InvalidArgument, Unavailable
from cutwater.format.errors import DamagedFile, StorageBroken
from cutwater.protocol import storage_api as api
from cutwater.protocol.methods import Notice
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.small_files import ReplicaIdentity
from cutwater.storagenode.peer_connections import Link
from cutwater.storagenode.repair.syncing import Syncing
from cutwater.storagenode.replica.replica_stores import VolumeStores
from cutwater.types import GLSN, LLSN, Entry, Epoch, EventTime, LogStreamId, Report, StorageNodeId, TopicId
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.calls.streams import StreamReceiver
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.listen.server import listen
from tests.integration.node_cluster import CLUSTER, STREAM, WITHIN_SECONDS, Cluster, batch, with_cluster

OTHER = LogStreamId(2)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """What waits for it is let go at the end, also if the test fails."""
    event = threading.Event()
    yield event
    event.set()


async def append_some(cluster: Cluster, count: int = 5) -> list[tuple[int, bytes]]:
    answers = [await cluster.append(b"record %d" % i) for i in range(count)]
    await cluster.until_all_run(count)
    return [(int(answer.ack.glsn), b"record %d" % i) for i, answer in enumerate(answers)]


async def to_the_end(stream: StreamReceiver[api.ReadAnswerHeader]) -> None:
    while await stream.receive(timeout_ms=WITHIN_SECONDS * 1_000) is not None:
        pass


@pytest.mark.parametrize("change", [{"schema": 2**40}, {"declared": EventTime(2**63)}, {"count": 2**32}])
def test_a_batch_that_cannot_be_stored_harms_nobody(tmp_path: Path, change: dict[str, int]) -> None:
    async def test(cluster: Cluster) -> None:
        await append_some(cluster)
        epoch = cluster.order.state.streams[STREAM].epoch
        bad = structs.replace(batch(b"x"), **change)
        async with cluster.client(1) as connection:
            with pytest.raises(InvalidArgument, match="cannot be stored"):
                await connection.call(api.APPEND, api.AppendArguments(STREAM, epoch, bad), b"x", timeout_ms=3_000)
        assert (await cluster.append_to(1, epoch, b"good")).ack.llsn == 6

    with_cluster(tmp_path, test, nodes=1)


def test_a_backup_takes_no_entry_that_was_damaged_on_the_way(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await append_some(cluster)
        stream = cluster.order.state.streams[STREAM]
        backup = stream.members[1]
        refused: asyncio.Future[api.EntryRefused] = asyncio.get_running_loop().create_future()
        methods = Methods()
        methods.hears(api.ENTRY_REFUSED)(lambda notification: refused.set_result(notification.argument))
        async with cluster.peer(backup, methods) as connection:
            entry = Entry(LLSN(6), stream.epoch, batch(b"right"))
            connection.notify(api.REPLICATE, Replicate(STREAM, entry), b"wrong")
            async with asyncio.timeout(WITHIN_SECONDS):
                assert "damaged on the way" in (await refused).reason
        # It was never here, so what belongs there follows, in the same epoch.
        assert (await cluster.append_to(stream.members[0], stream.epoch, b"good")).ack.llsn == 6

    with_cluster(tmp_path, test, nodes=2)


def test_what_was_read_while_files_were_opened_anew_is_no_answer(tmp_path: Path, held: threading.Event) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await append_some(cluster)
        pool = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(pool)
        pool.submit(held.wait)
        driver = cluster.nodes[1].node.replicas[STREAM]
        before = driver.replica
        async with cluster.client(1) as connection:
            asked = api.ReadArguments(STREAM, GLSN(expected[-1][0]), 1 << 20)
            read = asyncio.create_task(connection.call(api.READ, asked, timeout_ms=WITHIN_SECONDS * 1_000))
            follow = connection.open_stream(api.FOLLOW, api.ReadArguments(STREAM, GLSN(1_000), 1 << 20))
            # Both wait for the pool now.
            await cluster.until(lambda: len(driver.watchers) == 1 and pool._work_queue.qsize() >= 2, "both are read")
            driver.feed(StorageFailed("asked for by a test"))
            with pytest.raises(Unavailable, match="just being opened anew"):
                driver.require_readable()
            await cluster.until(lambda: driver.replica is not before, "it is opened anew")
            held.set()
            with pytest.raises(Unavailable, match="opened anew"):
                await read
            with pytest.raises(Unavailable, match="opened anew"):
                await follow.receive(timeout_ms=WITHIN_SECONDS * 1_000)
        await cluster.until_all_run(5)
        assert await cluster.read(1) == expected

    with_cluster(tmp_path, test, nodes=1)


def test_who_follows_a_replica_that_goes_away_hears_of_it(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await append_some(cluster)
        node = cluster.nodes[1].node
        driver = node.replicas[STREAM]
        async with cluster.client(1) as connection:
            follow = connection.open_stream(api.FOLLOW, api.ReadArguments(STREAM, GLSN(expected[-1][0]), 1 << 20))
            first = await follow.receive(timeout_ms=WITHIN_SECONDS * 1_000)
            assert first is not None
            node.cannot_open(STREAM, DamagedFile(Path("manifest"), "asked for by a test"))
            with pytest.raises(Unavailable):
                await to_the_end(follow)
        with pytest.raises(StorageBroken):
            await asyncio.wait_for(driver.in_writer(lambda: None), WITHIN_SECONDS)
        refusals: list[CutwaterError] = []
        driver.feed(Replicate(STREAM, Entry(LLSN(6), driver.replica.hard_state.epoch, batch(b"x"))), refusals.append)
        assert [type(error) for error in refusals] == [Unavailable]
        assert driver.is_busy

    with_cluster(tmp_path, test, nodes=1)


def test_a_directory_is_set_aside_only_after_the_last_write_to_it(tmp_path: Path, held: threading.Event) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await append_some(cluster)
        node, home = cluster.nodes[2].node, cluster.replica_path(2).parent
        driver = node.replicas[STREAM]
        old = driver.replica.hard_state

        def late() -> None:
            held.wait(WITHIN_SECONDS)
            driver.storage.save_hard_state(old)

        driver.writer.submit(late, lambda error: None)
        node.cannot_open(STREAM, DamagedFile(Path("manifest"), "asked for by a test"))
        await cluster.until(lambda: STREAM in node._directories.under_way, "it is to be learned anew")
        await asyncio.sleep(0.2)
        assert not list(home.glob("*.damaged*"))
        held.set()
        await cluster.until_all_run(5)
        assert await cluster.read(2) == expected
        assert len(list(home.glob("*.damaged-1"))) == 1
        await cluster.stop_node(2)
        storage = SegmentStorage(cluster.replica_path(2), ReplicaIdentity(CLUSTER, StorageNodeId(2), STREAM))
        assert storage.hard_state is not None
        assert storage.hard_state.epoch > old.epoch, "nothing of the old replica is in the new one's directory"
        storage.close()

    with_cluster(tmp_path, test, nodes=2)


def test_files_that_may_be_opened_again_are_not_given_up_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the peer may be damaged. It was found by random seed 2001059 of the simulator."""

    async def test(cluster: Cluster) -> None:
        expected = await append_some(cluster)
        await cluster.stop_node(2)
        opened, failing = VolumeStores.open, [StorageBroken("asked for by a test")] * 2

        def open_later(stores: VolumeStores, stream: LogStreamId) -> SegmentStorage:
            if failing and stores._volumes.identity.node == 2:
                raise failing.pop()
            return opened(stores, stream)

        monkeypatch.setattr(VolumeStores, "open", open_later)
        await cluster.start_node(2)
        node = cluster.nodes[2].node
        assert STREAM in node.unreadable
        node.leader_says(LearnFrom(STREAM, node.leader_epoch, Epoch(1), StorageNodeId(1)))
        assert not node._directories.under_way
        await cluster.until_all_run(5)
        assert await cluster.read(2) == expected
        assert not list(cluster.replica_path(2).parent.glob("*.damaged*"))

    with_cluster(tmp_path, test, nodes=2)


def test_other_replicas_go_on_while_one_is_created(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[LogStreamId] = []
    create = VolumeStores.create

    def slow(stores: VolumeStores, stream: LogStreamId, base_glsn: GLSN) -> SegmentStorage:
        created.append(stream)
        if stream == OTHER:
            assert held.wait(WITHIN_SECONDS)
        return create(stores, stream, base_glsn)

    monkeypatch.setattr(VolumeStores, "create", slow)

    async def test(cluster: Cluster) -> None:
        node = cluster.nodes[1].node
        asked = asyncio.create_task(cluster.order.ask(CreateTopicRequest("other", 1, 1)))
        await cluster.until(lambda: OTHER in node._directories.under_way, "it is being created")
        # Each report in between has the leader ask again.
        await append_some(cluster)
        assert OTHER not in node.replicas
        held.set()
        await cluster.until(lambda: OTHER in node.replicas and not node._directories.under_way, "it is created")
        await asked
        assert created == [STREAM, OTHER]
        await cluster.until(lambda: cluster.order.state.streams[OTHER].is_open, "it opens")

    with_cluster(tmp_path, test, nodes=1)


def test_a_node_that_is_stopped_waits_for_what_it_creates(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = VolumeStores.create

    def slow(stores: VolumeStores, stream: LogStreamId, base_glsn: GLSN) -> SegmentStorage:
        assert stream == STREAM or held.wait(WITHIN_SECONDS)
        return create(stores, stream, base_glsn)

    monkeypatch.setattr(VolumeStores, "create", slow)

    async def test(cluster: Cluster) -> None:
        server = cluster.nodes[1]
        for number in range(2, 10):
            stream = LogStreamId(number)
            message = CreateReplica(
                stream, TopicId(2), GLSN(0), server.node.incarnation, server.node._writer.sequence + 1
            )
            server.node.leader_says(message)
        stopping = asyncio.create_task(server.stop(timeout_ms=WITHIN_SECONDS * 1_000))
        await cluster.until(lambda: server.node._is_stopping, "it stops")
        held.set()
        assert await stopping
        assert list(server.node.replicas) == [STREAM], "what was created meanwhile is opened at the next start"

    with_cluster(tmp_path, test, nodes=1)


def test_a_pending_barrier_does_not_silence_a_node_unless_it_removes_something(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cluster: Cluster) -> None:
        await append_some(cluster)
        server = cluster.nodes[1]
        driver = server.node.replicas[STREAM]
        reports: list[Report] = []

        def tell(notice: Notice[Any], argument: object) -> bool:
            if notice is api.REPORT:
                reports.append(cast(Report, argument))
            return True

        monkeypatch.setattr(server, "tell_metadata", tell)
        await cluster.until(lambda: bool(reports), "a report")
        said = reports[-1].uncommit_reports
        driver._wait_for(lambda: bool(held.wait(WITHIN_SECONDS)), lambda: None)
        reports.clear()
        await cluster.until(lambda: len(reports) >= 2, "reports go on")
        assert [report.uncommit_reports for report in reports] == [said] * len(reports)
        held.set()
        await cluster.until(lambda: not driver.is_busy, "the barrier is done")
        # While something is removed, what was said before may not be true any more.
        held.clear()
        driver.writer.submit(lambda: bool(held.wait(WITHIN_SECONDS)), lambda error: None)
        driver._carry_out([Truncate(driver.replica.written_end, driver.replica.generation)], 0)
        reports.clear()
        await asyncio.sleep(0.3)
        assert reports == []
        held.set()
        await cluster.until(lambda: bool(reports), "it reports again")

    with_cluster(tmp_path, test, nodes=1)


@pytest.mark.parametrize("failure", [msgspec.DecodeError("nonsense"), RuntimeError("a bug")])
def test_a_learner_learns_again_whatever_ended_its_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    receive, failures = Syncing._receive, [failure]

    async def fail_once(syncing: Syncing, connection: Connection, request: SyncRequest, driver: object) -> None:
        if failures:
            raise failures.pop()
        await receive(syncing, connection, request, driver)  # type: ignore[arg-type]

    monkeypatch.setattr(Syncing, "_receive", fail_once)

    async def test(cluster: Cluster) -> None:
        await append_some(cluster)
        victim = cluster.order.state.streams[STREAM].members[1]
        await cluster.stop_node(victim)
        await cluster.append(b"meanwhile")
        await cluster.start_node(victim)
        await cluster.until_all_run(6)
        assert failures == []

    with_cluster(tmp_path, test, nodes=2)


@pytest.mark.parametrize("name", ["manifest", "state"])
def test_a_damaged_small_file_is_written_anew(tmp_path: Path, name: str) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await append_some(cluster)
        path = cluster.replica_path(1) / name
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert len(await cluster.verify(1)) == 1

        async def is_repaired() -> bool:
            return await cluster.verify(1) == ()

        await cluster.until(is_repaired, "the file is written anew")
        await cluster.stop_node(1)
        await cluster.start_node(1)
        await cluster.until_all_run(5)
        assert await cluster.read(1) == expected

    with_cluster(tmp_path, test, nodes=1)


def test_a_link_that_is_closed_closes_its_connection() -> None:
    async def test() -> None:
        endpoint = Endpoint(CLUSTER, "test", "1", Methods())
        listener = await listen(endpoint, "127.0.0.1", 0)
        up: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        address = f"127.0.0.1:{listener.port}"
        link = Link(
            endpoint,
            address,
            None,
            expect=lambda server: None,
            on_up=up.set_result,
            on_down=lambda: None,
            on_trouble=up.set_exception,
        )
        try:
            connection = await asyncio.wait_for(up, WITHIN_SECONDS)
            await link.close()
            await asyncio.wait_for(connection.closed, WITHIN_SECONDS)
            assert connection.is_closed
        finally:
            await listener.close(timeout_ms=1_000)

    asyncio.run(test())
