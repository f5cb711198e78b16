"""A few storage nodes with real files and sockets, ordered by the real order layer; and a small client of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa

from cutwater.client.append.plain_arrow import Single, plain_body
from cutwater.client.convert.schemas import KEY_VALUE
from cutwater.core.requests import AddNodeRequest, ChangeTopicRequest, CreateTopicRequest
from cutwater.errors import CutwaterError, Unavailable
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import frames_in
from cutwater.protocol import storage_api as api
from cutwater.protocol.access import STORAGE_NODE
from cutwater.protocol.methods import Received
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.server import NodeOptions, StorageNodeServer
from cutwater.types import GLSN, Batch, ClusterId, Epoch, EventTime, LogStreamId, ReplicaState, StorageNodeId
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from tests.integration.order_double import OrderDouble

CLUSTER = ClusterId(1)
STREAM = LogStreamId(1)
WITHIN_SECONDS = 30


def body_of(value: bytes, count: int = 1, time: int = 1) -> bytes:
    """The body of a batch whose first record has this value; the others, if there are any, have none."""
    made = plain_body([Single(value, None, time), *[Single(b"", None, time)] * (count - 1)])
    assert made is not None
    return made.body


def value_of(body: bytes) -> bytes:
    """The value of the first record."""
    value: bytes = pa.ipc.read_record_batch(pa.py_buffer(body), KEY_VALUE).column(1)[0].as_py()
    return value


def batch(body: bytes, count: int = 1, time: int = 1) -> Batch:
    return Batch(count, b"", crc32c(body), EventTime(time), EventTime(time))


def records_of(received: Received[api.ReadAnswerHeader]) -> list[tuple[int, bytes]]:
    """(GLSN of the first record, its value) of each batch."""
    records = []
    for frame in frames_in(bytes(received.body)):
        llsn = frame.header.first_llsn
        context = next(c for c in received.value.commits if c.first_llsn <= llsn <= c.last_llsn)
        records.append((int(context.glsn_of(llsn)), value_of(bytes(frame.body))))
    return records


class Client:
    """Asks storage nodes by their ports. ``order`` says who leads a chain."""

    def __init__(self, order: OrderDouble) -> None:
        self.order = order
        self.ports: dict[int, int] = {}

    async def connect(self, node: int) -> Connection:
        return await connect(Endpoint(CLUSTER, "client"), "127.0.0.1", self.ports[node], timeout_ms=2_000)

    @asynccontextmanager
    async def client(self, node: int) -> AsyncIterator[Connection]:
        connection = await self.connect(node)
        try:
            yield connection
        finally:
            connection.abort()
            await connection.closed

    async def append(self, body: bytes, count: int = 1, time: int = 1) -> api.AppendAnswer:
        """To the head, as soon as there is one that takes it."""
        async with asyncio.timeout(WITHIN_SECONDS):
            while True:
                stream = self.order.state.streams[STREAM]
                try:
                    return await self.append_to(stream.members[0], stream.epoch, body, count, time)
                except (CutwaterError, IndexError):
                    await asyncio.sleep(0.02)

    async def append_to(self, node: int, epoch: Epoch, value: bytes, count: int = 1, time: int = 1) -> api.AppendAnswer:
        body = body_of(value, count, time)
        async with self.client(node) as connection:
            arguments = api.AppendArguments(STREAM, epoch, batch(body, count, time))
            return (await connection.call(api.APPEND, arguments, body, timeout_ms=3_000)).value

    async def read(self, node: int, from_glsn: int = 1, bytes_max: int = 1 << 20) -> list[tuple[int, bytes]]:
        return records_of(await self.read_raw(node, from_glsn, bytes_max))

    async def read_raw(self, node: int, from_glsn: int = 1, bytes_max: int = 1 << 20) -> Received[api.ReadAnswerHeader]:
        async with self.client(node) as connection:
            return await connection.call(
                api.READ, api.ReadArguments(STREAM, GLSN(from_glsn), bytes_max), timeout_ms=3_000
            )

    async def read_all(self, node: int, from_glsn: int = 1) -> tuple[list[tuple[int, bytes]], bytes]:
        """Everything that a node serves: records, and the frames as they are stored."""
        records: list[tuple[int, bytes]] = []
        frames = b""
        while True:
            received = await self.read_raw(node, from_glsn)
            if not received.body:
                return records, frames
            records += records_of(received)
            frames += bytes(received.body)
            last = list(frames_in(bytes(received.body)))[-1].header.last_llsn
            context = next(c for c in received.value.commits if c.first_llsn <= last <= c.last_llsn)
            from_glsn = context.glsn_of(last) + 1

    async def status(self, node: int) -> api.NodeStatus:
        async with self.client(node) as connection:
            return (await connection.call(api.STATUS, None, timeout_ms=3_000)).value

    async def verify(self, node: int) -> tuple[api.VerifyFinding, ...]:
        async with self.client(node) as connection:
            return (await connection.call(api.VERIFY, STREAM, timeout_ms=30_000)).value

    async def until(self, holds: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(WITHIN_SECONDS):
                while True:
                    found = holds()
                    if found if isinstance(found, bool) else await found:
                        return
                    await asyncio.sleep(0.01)
        except TimeoutError:
            streams = list(self.order.state.streams.values())
            raise AssertionError(f"not within {WITHIN_SECONDS} s: {what}; {streams}") from None

    async def create_topic(self, replication: int, schemas: Sequence[pa.Schema] = ()) -> None:
        """One topic with one log stream, as soon as there are enough nodes that report."""
        encoded = [schema.serialize().to_pybytes() for schema in schemas]

        async def created() -> bool:
            try:
                await self.order.ask(CreateTopicRequest("t", 1, replication, encoded[0] if encoded else b""))
            except Unavailable:
                return False
            return True

        await self.until(created, "there are enough storage nodes")
        for number, schema in enumerate(encoded[1:], 1):
            await self.order.ask(ChangeTopicRequest("t", schema=schema, schema_after=number))
        await self.until(lambda: self.order.state.streams[STREAM].is_open, "the stream opens")

    async def until_all_run(self, committed_end: int = 0) -> None:
        """Every replica is a member, runs, and has applied everything up to there."""

        async def holds() -> bool:
            stream = self.order.state.streams[STREAM]
            if not stream.is_open or set(stream.members) != set(stream.replicas):
                return False
            for node in stream.replicas:
                try:
                    replica = next(r for r in (await self.status(node)).replicas if r.stream == STREAM)
                except (CutwaterError, StopIteration):
                    return False
                if replica.state is not ReplicaState.RUNNING or replica.committed_end < committed_end:
                    return False
            return True

        await self.until(holds, "all replicas run")


class Cluster(Client):
    """Storage nodes in this process, each with its own volume, listener and connections."""

    def __init__(self, directory: Path, segments: SegmentOptions | None = None, reserve_bytes: int = 0) -> None:
        super().__init__(OrderDouble(CLUSTER))
        self.directory = directory
        self.metadata = ""
        self.nodes: dict[int, StorageNodeServer] = {}
        self._segments, self._reserve_bytes = segments or SegmentOptions(), reserve_bytes

    def volume(self, number: int) -> Path:
        return self.directory / f"volume{number}"

    def replica_path(self, number: int) -> Path:
        return self.volume(number) / "cid=1" / f"snid={number}" / f"lsid={STREAM}"

    async def start_node(self, number: int) -> StorageNodeServer:
        self.volume(number).mkdir(exist_ok=True)
        options = NodeOptions(
            "127.0.0.1",
            self.ports.get(number, 0),
            (self.metadata,),
            segments=self._segments,
            reserve_bytes=self._reserve_bytes,
        )
        volumes = NodeVolumes([self.volume(number)], CLUSTER, StorageNodeId(number))
        try:
            server = StorageNodeServer(options, volumes)
            await server.start()
        except BaseException:
            volumes.release()
            raise
        self.nodes[number] = server
        self.ports[number] = server.port
        return server

    async def stop_node(self, number: int) -> None:
        server = self.nodes.pop(number)
        try:
            assert await server.stop(timeout_ms=2_000)
        finally:
            server.volumes.release()

    async def add_node(self, number: int) -> None:
        await self.start_node(number)
        await self.order.ask(AddNodeRequest(StorageNodeId(number)))

    @asynccontextmanager
    async def peer(self, node: int, methods: Methods, *, sender: int | None = None) -> AsyncIterator[Connection]:
        """What a storage node says to another one, with the private key of the first: of the one before it in the
        chain, if there is one and nothing else is said."""
        stream = self.order.state.streams.get(STREAM)
        before = stream.members[: stream.members.index(StorageNodeId(node))] if stream is not None else ()
        other = int(before[-1]) if before else next(number for number in self.nodes if number != node)
        other = sender or other
        endpoint = Endpoint(CLUSTER, STORAGE_NODE, str(other), methods, key=self.nodes[other]._key)
        expect = self.nodes[other].peers._links[StorageNodeId(node)]._expect
        connection = await connect(endpoint, "127.0.0.1", self.ports[node], timeout_ms=2_000, expect=expect)
        try:
            yield connection
        finally:
            connection.abort()
            await connection.closed

    def state(self, node: int) -> ReplicaState:
        return self.nodes[node].node.replicas[STREAM].replica.state


def with_cluster(
    directory: Path,
    test: Callable[[Cluster], Awaitable[None]],
    nodes: int = 3,
    segments: SegmentOptions | None = None,
    reserve_bytes: int = 0,
    replication: int | None = None,
    schemas: Sequence[pa.Schema] = (),
) -> None:
    """Run a test on a cluster that has one topic with one log stream, on all nodes if not said otherwise, and with
    these schemas."""

    async def run() -> None:
        cluster = Cluster(directory, segments, reserve_bytes)
        cluster.metadata = await cluster.order.start()
        try:
            for number in range(1, nodes + 1):
                await cluster.order.ask(AddNodeRequest(StorageNodeId(number)))
                await cluster.start_node(number)
            await cluster.create_topic(replication or nodes, schemas)
            await test(cluster)
            assert cluster.order.alarms == []
        finally:
            for number in list(cluster.nodes):
                await cluster.stop_node(number)
            await cluster.order.stop()

    asyncio.run(run())
