"""Storage nodes over real sockets and real files, ordered by the real order layer: chain, seal, recovery, learning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cutwater.core.requests import AddNodeRequest, CreateTopicRequest, SealRequest, TrimRequest, UnsealRequest
from cutwater.errors import CutwaterError, InvalidArgument, Trimmed, WrongEpoch
from cutwater.storage.checksum import crc32c
from cutwater.storage.frames import frames_in
from cutwater.storage.replica_storage import ReplicaIdentity, SegmentStorage
from cutwater.storagenode.server import NodeOptions, StorageNodeServer
from cutwater.types import (
    GLSN,
    LLSN,
    Batch,
    ClusterId,
    Epoch,
    EventTime,
    Incarnation,
    LogStreamId,
    ReplicaState,
    StorageNodeId,
)
from cutwater.wire import storage_api as api
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.handshake import Endpoint
from tests.integration.order_double import OrderDouble

CLUSTER = ClusterId(1)
STREAM = LogStreamId(1)


def batch(body: bytes, count: int = 1) -> Batch:
    return Batch(count, b"", crc32c(body), EventTime(1), EventTime(1))


class Cluster:
    """A few storage nodes in this process, each with its own directory, listener and connections."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.order = OrderDouble(CLUSTER)
        self.metadata = ""
        self.nodes: dict[int, StorageNodeServer] = {}
        self.ports: dict[int, int] = {}
        self.lives: dict[int, int] = {}

    async def start_node(self, number: int) -> StorageNodeServer:
        home = self.directory / f"node{number}"
        home.mkdir(exist_ok=True)
        node = StorageNodeId(number)

        def storage(stream: LogStreamId) -> SegmentStorage:
            return SegmentStorage(home / f"lsid={stream}", ReplicaIdentity(CLUSTER, node, stream))

        streams = tuple(LogStreamId(int(path.name.split("=")[1])) for path in sorted(home.iterdir()))
        self.lives[number] = self.lives.get(number, 0) + 1
        options = NodeOptions(
            CLUSTER,
            node,
            Incarnation(self.lives[number]),
            "127.0.0.1",
            self.ports.get(number, 0),
            (self.metadata,),
            streams,
            storage,
        )
        server = self.nodes[number] = StorageNodeServer(options)
        await server.start()
        self.ports[number] = server.port
        self.order.addresses[node] = f"127.0.0.1:{server.port}"
        return server

    async def append(self, body: bytes, count: int = 1) -> api.AppendAnswer:
        """To the head, as soon as there is one that takes it."""
        async with asyncio.timeout(15):
            while True:
                stream = self.order.state.streams[STREAM]
                try:
                    return await self.append_to(stream.members[0], stream.epoch, body, count)
                except (CutwaterError, IndexError):
                    await asyncio.sleep(0.02)

    async def append_to(self, node: int, epoch: Epoch, body: bytes, count: int = 1) -> api.AppendAnswer:
        async with self.client(node) as connection:
            arguments = api.AppendArguments(STREAM, epoch, batch(body, count))
            return (await connection.call(api.APPEND, arguments, body, timeout_ms=3_000)).value

    async def read(self, node: int, from_glsn: int = 1) -> list[tuple[int, bytes]]:
        """What a node serves, as (GLSN, body)."""
        async with self.client(node) as connection:
            got = await connection.call(api.READ, api.ReadArguments(STREAM, GLSN(from_glsn), 1 << 20), timeout_ms=3_000)
        records = []
        for frame in frames_in(bytes(got.body)):
            context = next(c for c in got.value.commits if c.first_llsn <= frame.header.first_llsn <= c.last_llsn)
            records.append((int(context.glsn_of(frame.header.first_llsn)), bytes(frame.body)))
        return records

    @asynccontextmanager
    async def client(self, node: int) -> AsyncIterator[Connection]:
        endpoint = Endpoint(CLUSTER, "client")
        connection = await connect(endpoint, "127.0.0.1", self.ports[node], timeout_ms=2_000)
        try:
            yield connection
        finally:
            connection.abort()

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(15):
                while not holds():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not within 15 s: {what}; {self.order.layer.explanations}") from None

    async def until_all_run(self, committed_end: int = 0) -> None:
        """Every replica is a member, runs, and has applied everything up to there."""

        def holds() -> bool:
            stream = self.order.state.streams[STREAM]
            replicas = [self.nodes[node].node.replicas[STREAM].replica for node in stream.replicas]
            return (
                stream.is_open
                and set(stream.members) == set(stream.replicas)
                and all(
                    replica.state is ReplicaState.RUNNING and replica.committed_end >= committed_end
                    for replica in replicas
                )
            )

        await self.until(holds, "all replicas run")

    def state(self, node: int) -> ReplicaState:
        return self.nodes[node].node.replicas[STREAM].replica.state


def with_cluster(directory: Path, test: Callable[[Cluster], Awaitable[None]], nodes: int = 3) -> None:
    async def run() -> None:
        cluster = Cluster(directory)
        cluster.metadata = await cluster.order.start()
        try:
            for number in range(1, nodes + 1):
                await cluster.start_node(number)
                await cluster.order.ask(AddNodeRequest(StorageNodeId(number)))
            await cluster.until(lambda: len(cluster.order.reports) == nodes, "all nodes report")
            await asyncio.sleep(0.05)
            await cluster.order.ask(CreateTopicRequest("t", 1, nodes))
            await cluster.until(lambda: cluster.order.state.streams[STREAM].is_open, "the stream opens")
            await test(cluster)
            assert cluster.order.alarms == []
        finally:
            for server in cluster.nodes.values():
                await server.stop(timeout_ms=1_000)
            await cluster.order.stop()

    asyncio.run(run())


def test_an_append_is_on_every_replica_when_it_is_acknowledged(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        answers = [await cluster.append(b"record %d" % i) for i in range(20)]
        assert [answer.ack.llsn for answer in answers] == list(range(1, 21))
        glsns = [answer.ack.glsn for answer in answers]
        assert glsns == sorted(set(glsns))
        expected = [(glsn, b"record %d" % i) for i, glsn in enumerate(glsns)]
        await cluster.until_all_run(20)
        await cluster.until_all_run(answers[-1].ack.llsn)
        for node in (1, 2, 3):
            assert await cluster.read(node) == expected

    with_cluster(tmp_path, test)


def test_a_wrong_epoch_and_damaged_bytes_are_refused(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.append(b"x")
        stream = cluster.order.state.streams[STREAM]
        with pytest.raises(WrongEpoch):
            await cluster.append_to(stream.members[0], Epoch(stream.epoch + 5), b"y")
        async with cluster.client(stream.members[0]) as connection:
            arguments = api.AppendArguments(STREAM, stream.epoch, batch(b"right"))
            with pytest.raises(InvalidArgument):
                await connection.call(api.APPEND, arguments, b"wrong", timeout_ms=2_000)
        assert (await cluster.append(b"z")).ack.llsn == 2

    with_cluster(tmp_path, test, nodes=1)


def test_a_node_that_stops_is_left_out_and_learns_when_it_comes_back(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        before = [await cluster.append(b"before %d" % i) for i in range(5)]
        await cluster.until_all_run()
        victim = cluster.order.state.streams[STREAM].members[1]
        await cluster.nodes[victim].stop(timeout_ms=500)
        during = [await cluster.append(b"during %d" % i) for i in range(5)]
        assert victim not in cluster.order.state.streams[STREAM].members
        await cluster.start_node(victim)
        await cluster.until(lambda: len(cluster.order.state.streams[STREAM].members) == 3, "it joins again")
        after = await cluster.append(b"after")
        await cluster.until_all_run(after.ack.llsn)
        bodies = [b"before %d" % i for i in range(5)] + [b"during %d" % i for i in range(5)] + [b"after"]
        glsns = [answer.ack.glsn for answer in (*before, *during, after)]
        for node in (1, 2, 3):
            assert await cluster.read(node) == list(zip(glsns, bodies, strict=True))

    with_cluster(tmp_path, test)


def test_all_nodes_restart_and_nothing_acknowledged_is_missing(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        answers = [await cluster.append(b"r%d" % i, count=1) for i in range(10)]
        for number in (1, 2, 3):
            await cluster.nodes[number].stop(timeout_ms=500)
        for number in (1, 2, 3):
            await cluster.start_node(number)
        last = await cluster.append(b"again")
        assert last.ack.llsn == 11
        head = cluster.order.state.streams[STREAM].members[0]
        expected = [(answer.ack.glsn, b"r%d" % i) for i, answer in enumerate(answers)] + [(last.ack.glsn, b"again")]
        assert await cluster.read(head) == expected

    with_cluster(tmp_path, test)


def test_a_sealed_stream_takes_nothing_until_it_is_unsealed_and_what_is_trimmed_is_gone(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        first = await cluster.append(b"one")
        epoch = cluster.order.state.streams[STREAM].epoch
        head = cluster.order.state.streams[STREAM].members[0]
        await cluster.order.ask(SealRequest(STREAM))
        await cluster.until(lambda: cluster.state(head) is ReplicaState.SEALED, "it is sealed")
        with pytest.raises(CutwaterError) as refused:
            await cluster.append_to(head, epoch, b"two")
        assert refused.value.code == "stream_sealed"
        await cluster.order.ask(UnsealRequest(STREAM))
        second = await cluster.append(b"three")
        head = cluster.order.state.streams[STREAM].members[0]
        assert (first.ack.llsn, second.ack.llsn) == (LLSN(1), LLSN(2))
        assert [body for _, body in await cluster.read(head)] == [b"one", b"three"]
        replica = cluster.nodes[head].node.replicas[STREAM].replica
        await cluster.order.ask(TrimRequest("t", GLSN(second.ack.glsn)))
        await cluster.until(lambda: replica.hard_state.trimmed_before == second.ack.glsn, "the trim arrives")
        with pytest.raises(Trimmed) as trimmed:
            await cluster.read(head, first.ack.glsn)
        assert trimmed.value.first_left == second.ack.glsn

    with_cluster(tmp_path, test)


def test_status_and_verify_tell_what_a_node_has(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.append(b"x" * 1000)
        async with cluster.client(1) as connection:
            status = (await connection.call(api.STATUS, None, timeout_ms=2_000)).value
            assert [(r.stream, r.state, r.committed_end) for r in status.replicas] == [(1, ReplicaState.RUNNING, 1)]
            assert (await connection.call(api.VERIFY, STREAM, timeout_ms=5_000)).value == ()

    with_cluster(tmp_path, test, nodes=1)
