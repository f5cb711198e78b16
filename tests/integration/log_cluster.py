"""A whole cluster in this process, for tests of clients: real servers, files and sockets; decisions kept in memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from cutwater.admin.free_ports import free_addresses
from cutwater.client.async_client import AsyncClient
from cutwater.core.order.options import OrderOptions
from cutwater.core.requests import AddNodeRequest, DescribeRequest, Description
from cutwater.metadata.server import MetadataOptions, MetadataServer
from cutwater.metadata.stores.memory_store import MemoryData, MemoryStore
from cutwater.protocol.metadata_api import ASK
from cutwater.runtime.event_loop import run
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.server import NodeOptions, StorageNodeServer
from cutwater.types import ClusterId, MetadataNodeId, StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ServerKey

C = TypeVar("C", bound="LogCluster")

CLUSTER = ClusterId(7)
WITHIN_SECONDS = 30
ORDER = OrderOptions(node_dead_after_us=1_000_000, reopen_patience_us=300_000, retry_us_min=50_000)


def seeded() -> Random:
    """Another sequence each time; a failure says how to have it again."""
    seed = int(os.environ.get("SEED") or Random().randrange(1 << 32))
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    print(f"replay: SEED={seed} python -m pytest '{test}'")
    return Random(seed)


class LogCluster:
    def __init__(
        self,
        directory: Path,
        segments: SegmentOptions | None = None,
        order: OrderOptions = ORDER,
        staged_ask_seconds: float = 60.0,
    ) -> None:
        self.directory = directory
        self._order, self._staged_ask_seconds = order, staged_ask_seconds
        self.data = MemoryData()
        self.metadata: MetadataServer | None = None
        self.metadata_port = 0
        self.metadata_key = ServerKey.generate()
        self.nodes: dict[int, StorageNodeServer] = {}
        self.ports: dict[int, int] = {}
        self._segments = segments or SegmentOptions()

    @property
    def servers(self) -> str:
        return f"cutwater://127.0.0.1:{self.metadata_port}"

    async def start_metadata(self) -> None:
        options = MetadataOptions(
            CLUSTER, MetadataNodeId(1), port=self.metadata_port, order=self._order, key=self.metadata_key
        )
        self.metadata = MetadataServer(options, MemoryStore(self.data))
        await self.metadata.start()
        self.metadata_port = parse_address(self.metadata.address)[1]

    async def stop_metadata(self) -> None:
        metadata, self.metadata = self.metadata, None
        if metadata is not None:
            await metadata.stop(timeout_ms=500)

    def volumes_of(self, number: int) -> NodeVolumes:
        volume = self.directory / f"volume{number}"
        volume.mkdir(exist_ok=True)
        return NodeVolumes([volume], CLUSTER, StorageNodeId(number))

    def key_of(self, number: int) -> ServerKey | None:
        """The key of a storage node; None means the one on its volume."""
        return None

    async def start_node(self, number: int, advertise: str = "") -> None:
        volumes = self.volumes_of(number)
        options = NodeOptions(
            "127.0.0.1",
            self.ports.get(number, 0),
            (f"127.0.0.1:{self.metadata_port}",),
            advertise=advertise,
            segments=self._segments,
            reserve_bytes=0,
            staged_ask_seconds=self._staged_ask_seconds,
        )
        try:
            server = StorageNodeServer(options, volumes, key=self.key_of(number))
            await server.start()
        except BaseException:
            volumes.release()
            raise
        self.nodes[number], self.ports[number] = server, server.port

    async def add_node(self, number: int) -> None:
        """Before it runs, so that it need not ask twice; the leader looks for it where it will listen."""
        address = free_addresses(1)[0]
        self.ports[number] = parse_address(address)[1]
        await self.ask(AddNodeRequest(StorageNodeId(number), address))

    async def stop_node(self, number: int) -> None:
        server = self.nodes.pop(number)
        try:
            await server.stop(timeout_ms=1_000)
        finally:
            server.volumes.release()

    async def restart_node(self, number: int, advertise: str = "") -> None:
        await self.stop_node(number)
        await self.start_node(number, advertise)

    async def ask(self, request: Any) -> Any:
        connection = await connect(Endpoint(CLUSTER, "test"), "127.0.0.1", self.metadata_port, timeout_ms=2_000)
        try:
            return (await connection.call(ASK, request, timeout_ms=10_000)).value
        finally:
            connection.abort()

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[AsyncClient]:
        client = await AsyncClient.connect(self.servers, **options)
        try:
            yield client
        finally:
            await client.close()

    async def until(self, holds: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(WITHIN_SECONDS):
                while True:
                    found = holds()
                    if found if isinstance(found, bool) else await found:
                        return
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not within {WITHIN_SECONDS} s: {what}") from None

    async def until_joined(self, nodes: int) -> None:
        async def holds() -> bool:
            description: Description = await self.ask(DescribeRequest())
            return sum(node.is_alive for node in description.nodes) == nodes

        await self.until(holds, "all storage nodes report")


@asynccontextmanager
async def log_cluster(
    directory: Path, nodes: int = 1, segments: SegmentOptions | None = None, **options: Any
) -> AsyncIterator[LogCluster]:
    async with running(LogCluster(directory, segments, **options), nodes) as cluster:
        yield cluster


@asynccontextmanager
async def running(cluster: C, nodes: int) -> AsyncIterator[C]:
    try:
        await cluster.start_metadata()
        for number in range(1, nodes + 1):
            await cluster.add_node(number)
            await cluster.start_node(number)
        await cluster.until_joined(nodes)
        yield cluster
    finally:
        for number in list(cluster.nodes):
            await cluster.stop_node(number)
        await cluster.stop_metadata()


def with_log(
    directory: Path,
    test: Callable[[LogCluster, AsyncClient], Awaitable[None]],
    nodes: int = 1,
    segments: SegmentOptions | None = None,
    seconds: float = 100,
    **options: Any,
) -> None:
    """Run a test with a client of a cluster."""

    async def main() -> None:
        async with (
            log_cluster(directory, nodes, segments, **options) as cluster,
            cluster.client() as client,
            # uvloop does not let itself be interrupted by the signal that usually ends a test which hangs.
            asyncio.timeout(seconds),
        ):
            await test(cluster, client)

    run(main())
