"""A cluster of the shipped servers under virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, structs

from cutwater.admin.operations import Admin
from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.credentials import Access
from cutwater.core.order.decisions import CreateTopic, GroupPublished
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.options import OrderOptions
from cutwater.errors import CutwaterError
from cutwater.metadata.server import MetadataOptions, MetadataServer
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.repair.scrubbing import ScrubOptions
from cutwater.storagenode.report_writer import BASE_REPLICAS_MIN
from cutwater.storagenode.server import NodeOptions, StorageNodeServer
from cutwater.testing.virtual.loop import VirtualLoop
from cutwater.testing.virtual.machines import SimMachine
from cutwater.testing.virtual.network import SimNetwork
from cutwater.testing.virtual.processes import SimProcess
from cutwater.testing.virtual.store import SharedStore
from cutwater.types import GLSN, MILLISECOND, SECOND, ClusterId, MetadataNodeId, StorageNodeId, TopicId
from cutwater.wire.addresses import format_address

if TYPE_CHECKING:
    from cutwater.testing.virtual.workload import VirtualClient

T = TypeVar("T")

CLUSTER = ClusterId(1)
METADATA_PORT, NODE_PORT = 7_100, 7_000
COMMITS_PER_FILE = 64
AGAIN_SECONDS = 0.1
"""A client that cannot connect waits so long."""
STAGED_ASK_SECONDS = 1.0
"""Storage nodes ask this often which staged parts they may drop; runs are too short for the usual time."""

HASTY = OrderOptions(
    node_dead_after_us=250 * MILLISECOND,
    reopen_patience_us=60 * MILLISECOND,
    retry_us_min=80 * MILLISECOND,
    retry_us_max=640 * MILLISECOND,
    tick_us_min=100 * MILLISECOND,
    tick_us_max=800 * MILLISECOND,
    compact_every_decisions=16,
    replace_node_after_us=600 * MILLISECOND,
    replace_stream_after_us=400 * MILLISECOND,
    publish_again_us=40 * MILLISECOND,
    publish_wait_us=200 * MILLISECOND,
    first_reports_wait_us=200 * MILLISECOND,
    staged_expire_after_us=500 * MILLISECOND,
)
"""As shipped, only much faster, so that much happens in a few simulated seconds."""


class ClusterShape(Struct, frozen=True):
    """How many servers there are, and the sizes of their files."""

    storage_nodes: int = 3
    metadata_nodes: int = 2
    segment_bytes: int = 16 * 1024
    may_wait_for_disk: bool = False
    store: str = "memory"
    scrub_every: float = 0.0
    """Seconds between two passes of the scrub; 0 means as usual."""
    min_replication: int = 1
    is_hasty: bool = False
    tells_changes: bool = False
    access_lease: float = 10.0
    """How long servers without contact may act by the rules of access control that they know."""
    agent_lease: float = 10.0
    """After this silence of an agent, its jobs go to others."""

    @property
    def scrub(self) -> ScrubOptions:
        if not self.scrub_every:
            return ScrubOptions()
        return ScrubOptions(first_after_seconds=self.scrub_every, every_seconds=self.scrub_every)

    @property
    def order(self) -> OrderOptions:
        usual = HASTY if self.is_hasty else OrderOptions()
        list_min = 1 if self.tells_changes else usual.member_list_min
        return structs.replace(
            usual,
            min_replication=self.min_replication,
            member_list_min=list_min,
            agent_lease_us=round(self.agent_lease * SECOND),
        )

    @property
    def segments(self) -> SegmentOptions:
        return SegmentOptions(self.segment_bytes, self.segment_bytes // 4, COMMITS_PER_FILE, self.segment_bytes // 4)


class VirtualCluster:
    """Machines with metadata nodes and storage nodes, a network between them, and a store."""

    def __init__(self, loop: VirtualLoop, shape: ClusterShape, random: Random) -> None:
        self.loop, self.shape, self._random = loop, shape, random
        self.network = SimNetwork(loop, Random(random.getrandbits(64)))
        self.store = SharedStore(shape.store, CLUSTER, Random(random.getrandbits(64)))
        self.metadata: list[SimMachine] = []
        self.nodes: list[SimMachine] = []
        for number in range(1, shape.metadata_nodes + 1):
            self.metadata.append(self._machine(f"mr{number}", f"127.0.1.{number}", self._serve_metadata(number)))
        self.addresses = tuple(format_address(machine.host, METADATA_PORT) for machine in self.metadata)
        self.servers = "cutwater://" + ",".join(self.addresses)
        for _ in range(shape.storage_nodes):
            self.new_node()
        self._operator = self.new_process("operator", "127.0.3.1")
        self.counts: Counter[str] = Counter()
        """How often something happened that no history has."""
        self.token = ""
        """The token of all clients that may do everything, where access control is on."""

    @property
    def machines(self) -> list[SimMachine]:
        return [*self.metadata, *self.nodes]

    def _machine(self, name: str, host: str, serve: Callable[[SimMachine], Coroutine[Any, Any, None]]) -> SimMachine:
        return SimMachine(self.loop, name, host, Random(self._random.getrandbits(64)), serve)

    def new_node(self) -> SimMachine:
        """A machine for one more storage node. Start it, then ``add`` it."""
        number = len(self.nodes) + 1
        machine = self._machine(f"sn{number}", f"127.0.0.{number + 1}", self._serve_node(number))
        self.nodes.append(machine)
        return machine

    def new_process(self, name: str, host: str) -> SimProcess:
        """A process of a client, on a machine without a disk."""
        return SimProcess(name, host, Random(self._random.getrandbits(64)), started=self.loop.now)

    def _serve_metadata(self, number: int) -> Callable[[SimMachine], Coroutine[Any, Any, None]]:
        async def serve(machine: SimMachine) -> None:
            node = MetadataNodeId(number)
            options = MetadataOptions(
                CLUSTER,
                node,
                machine.host,
                METADATA_PORT,
                order=self.shape.order,
                key=machine.key,
                access_lease_seconds=self.shape.access_lease,
            )
            store = await self.store.open(machine.random, may_wait=self.shape.may_wait_for_disk)
            server = MetadataServer(options, store)
            await server.start()
            machine.server = server
            await _first(machine.asked_to_stop, server.failed)
            await server.stop(timeout_ms=1_000)

        return serve

    def _serve_node(self, number: int) -> Callable[[SimMachine], Coroutine[Any, Any, None]]:
        shape = self.shape
        options = NodeOptions(
            f"127.0.0.{number + 1}",
            NODE_PORT,
            self.addresses,
            segments=shape.segments,
            may_wait_for_disk=shape.may_wait_for_disk,
            staged_ask_seconds=STAGED_ASK_SECONDS,
            scrub=shape.scrub,
            base_replicas_min=1 if shape.tells_changes else BASE_REPLICAS_MIN,
        )

        async def serve(machine: SimMachine) -> None:
            machine.disk.make_dir(machine.volume)
            volumes = open_volumes(machine, StorageNodeId(number))
            try:
                server = StorageNodeServer(options, volumes, key=machine.key)
                await server.start()
                machine.server = server
                await _first(machine.asked_to_stop, server.fatal)
                await server.stop(timeout_ms=1_000)
            finally:
                volumes.release()

        return serve

    async def connect(self, timeout: float) -> AsyncClient:
        """Connect to the cluster, in the current process."""
        return await AsyncClient.connect(self.servers, timeout=timeout, token=self.token)

    def admin(self, timeout_ms: int = 2_000) -> Admin:
        """Return the calls of an operator, for the current process."""
        return Admin(self.addresses, timeout_ms=timeout_ms, access=Access(token=self.token))

    async def live(self, client: VirtualClient) -> None:
        """Run the program of a client as soon as it is connected."""
        while True:
            try:
                log = await self.connect(client.world.options.timeout)
                break
            except CutwaterError:
                await asyncio.sleep(AGAIN_SECONDS)
        await client.run(log)

    def shut_down(self) -> None:
        """End all servers."""
        for machine in self.machines:
            if machine.is_running:
                machine.kill()

    # Founding.

    async def found(self) -> None:
        """Start all machines and add the storage nodes."""
        for machine in self.machines:
            machine.start()
        await asyncio.gather(*map(self.add, self.nodes))

    async def add(self, machine: SimMachine) -> None:
        """Add a running storage node to the cluster, however long that takes."""
        address = format_address(machine.host, NODE_PORT)
        await self.operate(lambda admin: admin.add_storage_node(address))

    async def operate(self, work: Callable[[Admin], Coroutine[Any, Any, T]], attempts: int = 100) -> T:
        """Run an operation of an operator until it succeeds."""

        async def insist() -> T:
            for attempt in range(attempts):
                try:
                    async with self.admin() as admin:
                        return await work(admin)
                except CutwaterError:
                    if attempt == attempts - 1:
                        raise
                    await asyncio.sleep(0.1)
            raise AssertionError

        return await self.loop.spawn(self._operator, insist())

    # The running cluster.

    def leader(self) -> OrderLayer | None:
        """The order layer that leads according to the store."""
        for machine in self.metadata:
            server: MetadataServer | None = machine.server
            term = server.term if server is not None and machine.is_running else None
            if term is not None and term.epoch == self.store.epoch:
                return term.layer
        return None

    def topic(self, name: str) -> TopicId:
        """Return the number of a topic that was created."""
        created = (decision for decision in self.store.history if isinstance(decision, CreateTopic))
        return next(decision.topic for decision in created if decision.name == name)

    def last_published(self, name: str) -> GLSN:
        """Return the last position of rows that were published to a topic."""
        topic = self.topic(name)
        groups = (decision for decision in self.store.history if isinstance(decision, GroupPublished))
        return max((GLSN(group.glsn + group.count - 1) for group in groups if group.topic == topic), default=GLSN(0))

    def node_server(self, node: StorageNodeId) -> StorageNodeServer | None:
        machine = self.nodes[node - 1]
        server: StorageNodeServer | None = machine.server
        return server if machine.is_running else None


def open_volumes(machine: SimMachine, node: StorageNodeId) -> NodeVolumes:
    return NodeVolumes([machine.volume], CLUSTER, node, files=machine.disk)


async def _first(asked: asyncio.Event | None, failed: asyncio.Future[CutwaterError]) -> None:
    """Wait until the server is asked to stop, or cannot go on."""
    assert asked is not None
    stop = asyncio.ensure_future(asked.wait())
    either: list[asyncio.Future[Any]] = [stop, failed]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
