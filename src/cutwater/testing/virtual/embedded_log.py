"""The embedded log under virtual time: programs on one machine that open the same directory, or connect by its address.

Every program opens the log through the public ``AsyncClient.open``, or connects to the process that has it open, as
Spark's workers do, with the secret from the directory. The first one serves the others. When it ends, another one does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING

from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.holder_file import read_holder
from cutwater.client.cluster.metadata_client import SCHEME, parse_servers
from cutwater.client.errors import ClientClosed
from cutwater.core.order.leader import OrderLayer
from cutwater.embedded import LOOPBACK, EmbeddedLog
from cutwater.errors import AlreadyExists, CutwaterError
from cutwater.format.errors import VolumeLocked
from cutwater.metadata.server import MetadataServer
from cutwater.metadata.stores.sqlite_engine import StandardSqlite
from cutwater.metadata.stores.store_errors import StoreLocked
from cutwater.storage.files import OsFiles
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storagenode.server import StorageNodeServer
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.cluster import AGAIN_SECONDS, CLUSTER, ClusterShape, VirtualCluster
from cutwater.testing.virtual.local_disk import WatchedSqlite
from cutwater.testing.virtual.loop import VirtualLoop
from cutwater.testing.virtual.machines import SimMachine
from cutwater.testing.virtual.network import SimNetwork
from cutwater.testing.virtual.processes import SimProcess, current_process
from cutwater.testing.virtual.shared_host import LOCK, LOG, SharedHost
from cutwater.testing.virtual.store import SharedStore
from cutwater.testing.virtual.workload import PLAIN, AppendingClient, VirtualClient
from cutwater.types import StorageNodeId

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

ONE_HOLDER, SECRET, KEYS = "one holder", "secret", "keys"
"""Checks of the embedded log, besides the guarantees of every log."""
OPENER = "appender0"
"""This program always opens the log by its path. Others may connect by its address, so they cannot open it first."""
BY_ADDRESS = 0.4
LOOK_SECONDS = 0.2
PATIENCE_SECONDS = 3.0
"""A program that gets no answer for so long closes its client and opens the log again."""
EXIT_INSTEAD = 0.3
"""Share of the programs that end when they get no answer, without closing anything."""


class EmbeddedShape(ClusterShape, frozen=True):
    """Sizes as shipped: an embedded log takes no options."""

    @property
    def segments(self) -> SegmentOptions:
        return SegmentOptions()


class EmbeddedCluster(VirtualCluster):
    """One machine, which is at once the metadata node and the storage node in the eyes of the checkers."""

    def __init__(self, loop: VirtualLoop, random: Random, found: list[Violation], *, may_hang: bool) -> None:
        self.loop, self.shape, self._random, self._found = loop, EmbeddedShape(1, 1), random, found
        self.network = SimNetwork(loop, Random(random.getrandbits(64)))
        self.store = SharedStore("sqlite", CLUSTER, Random(random.getrandbits(64)))
        self.host = SharedHost(loop, "host", LOOPBACK, Random(random.getrandbits(64)))
        self.metadata, self.nodes = [self.host], [self.host]
        self.addresses, self.servers, self.token = (), "", ""
        self._opened: list[tuple[SimProcess, AsyncClient]] = []
        """Processes that have opened the log, with their clients."""
        self._may_hang = may_hang
        """Whether syncs hang for longer than the store of decisions waits for them."""
        self._keys: tuple[str, ...] | None = None
        self.counts = Counter()

    @property
    def machines(self) -> list[SimMachine]:
        return [self.host]

    def new_process(self, name: str, host: str) -> SimProcess:
        process = self.host.new_process(name)
        process.parts = {OsFiles: lambda: process.disk, StandardSqlite: lambda: self._sqlite(process)}
        return process

    def _sqlite(self, process: SimProcess) -> WatchedSqlite:
        # It needs a library that only tests have.
        sqlite_disk = import_module("cutwater.testing.stores.sqlite_disk")
        disk = process.disk
        assert disk is not None

        def charge(seconds: float) -> None:
            disk.charged_seconds += seconds

        engine = sqlite_disk.DiskSqlite(disk, Random(process.random.getrandbits(64)), charge)
        process.at_death.append(engine.kill)
        return WatchedSqlite(engine, self.store, self._found)

    async def found(self) -> None:
        self.host.start()

    def shut_down(self) -> None:
        self.host.cut_power()

    # Programs.

    async def connect(self, timeout: float) -> AsyncClient:
        return await self.open(timeout)

    async def open(self, timeout: float, *, exclusive: bool = False) -> AsyncClient:
        """Open the log by its path, in the current process. Only one process at a time may get it."""
        try:
            log = await AsyncClient.open(LOG, timeout=timeout, exclusive=exclusive)
        except (StoreLocked, VolumeLocked) as error:
            # The lock of the log keeps all other processes out, so no other lock is in the way. Only a process whose
            # disk hangs gives up an opening before its database has noticed.
            if not self._may_hang:
                self._found.append(Violation(ONE_HOLDER, f"two processes use the log: {error}"))
            raise
        if log._on_close is not None:
            self._is_holder(log)
        else:
            self.counts["connect by path"] += 1
        self._look_at_keys()
        return log

    def _is_holder(self, log: AsyncClient) -> None:
        process = current_process()
        assert process is not None
        self._opened = [holder for holder in self._opened if _has_it_open(*holder)]
        for other, _ in self._opened:
            self._found.append(Violation(ONE_HOLDER, f"{process.name} has opened the log, and {other.name} has it"))
        self._opened.append((process, log))
        self.counts["open"] += 1
        self.loop.trace.say(self.loop.now, f"{process.name} has opened the log")

    async def by_address(self, timeout: float) -> AsyncClient | None:
        """Connect to the process that has the log open, as a process does that was told its address."""
        holder = read_holder(LOG)
        if holder is None:
            return None
        log = await AsyncClient.connect(holder.servers, timeout=timeout)
        self.counts["connect by address"] += 1
        self._look_at_keys()
        return log

    def _look_at_keys(self) -> None:
        """The keys of the servers are made once."""
        holder = read_holder(LOG)
        if holder is None:
            return
        if self._keys is None:
            self._keys = holder.server_keys
        if holder.server_keys != self._keys:
            self._found.append(Violation(KEYS, f"the keys were {self._keys}, and are {holder.server_keys}"))

    async def live(self, client: VirtualClient) -> None:
        """Run a program, and open the log again whenever it cannot be used any more."""
        process = current_process()
        assert process is not None
        while True:
            log = await self._log_of(client)
            run = self.loop.create_task(client.run(log))
            watch = self.loop.create_task(self._until_useless(log))
            asked = self.loop.create_task(self.host.asked[process].wait())
            tasks = (run, watch, asked)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if run.done():
                watch.cancel()
                asked.cancel()
                run.result()
                return
            is_asked = asked.done()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            is_closed = (is_asked or client.random.random() >= EXIT_INSTEAD) and await self._closed(log)
            client.give_up()
            if is_asked or not is_closed:
                self.loop.call_as(None, self.host.exit, process)
                return

    async def _closed(self, log: AsyncClient) -> bool:
        """Close the client, and return whether that succeeded."""
        try:
            await log.close()
        except CutwaterError as error:
            self._say(f"cannot close the log: {error.code}")
            self.counts["close failed"] += 1
            return log._on_close is None
        self.counts["close"] += 1
        return True

    async def _log_of(self, client: VirtualClient) -> AsyncClient:
        timeout = client.world.options.timeout
        is_by_address = client.name != OPENER and client.random.random() < BY_ADDRESS
        while True:
            try:
                log = await (self.by_address(timeout) if is_by_address else self.open(timeout))
                if log is not None:
                    return log
            except CutwaterError as error:
                self._say(f"cannot open the log: {error.code}")
            await asyncio.sleep(AGAIN_SECONDS)

    def _say(self, what: str) -> None:
        self.loop.trace.say(self.loop.now, f"{current_process()}: {what}")

    async def _until_useless(self, log: AsyncClient) -> None:
        """Return when the log was closed elsewhere, or does not answer for a while."""
        since: float | None = None
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self.loop.time()
            try:
                await log.tail()
                since = None
            except ClientClosed:
                self.counts["told of the end"] += 1
                return
            except CutwaterError:
                since = now if since is None else since
                if self.loop.time() - since > PATIENCE_SECONDS:
                    return

    # The running log.

    def _log(self) -> EmbeddedLog | None:
        for process, client in self._opened:
            log = getattr(client._on_close, "__self__", None)
            if _has_it_open(process, client) and isinstance(log, EmbeddedLog):
                return log
        return None

    def has_it_open(self, process: SimProcess | None) -> bool:
        return any(holder is process and _has_it_open(holder, client) for holder, client in self._opened)

    def leader(self) -> OrderLayer | None:
        log = self._log()
        server: MetadataServer | None = log._metadata if log is not None else None
        term = server.term if server is not None else None
        return term.layer if term is not None and term.epoch == self.store.epoch else None

    def node_server(self, node: StorageNodeId) -> StorageNodeServer | None:
        log = self._log()
        return log._node if log is not None else None


def _has_it_open(process: SimProcess, client: AsyncClient) -> bool:
    """Return whether a process lives and has not closed the log that it opened."""
    return not process.is_dead and client._on_close is not None


class VirtualRival(AppendingClient):
    """Wants the log for itself, which is refused as long as another process has it open, and tries to get in without
    the secret."""

    async def run(self, log: AsyncClient) -> None:
        world = self.world
        cluster = world.cluster
        assert isinstance(cluster, EmbeddedCluster)
        while not world.is_healed:
            await self.pause(world.options.rivals_every)
            if self.random.random() < 0.3:
                await self._try_without_the_secret(cluster)
            else:
                await self._try_alone(world, cluster)

    async def _try_alone(self, world: ShippedSimulation, cluster: EmbeddedCluster) -> None:
        try:
            own = await cluster.open(world.options.timeout, exclusive=True)
        except AlreadyExists as error:
            cluster.counts["refused alone"] += 1
            holder = cluster.host.disk.holder(LOCK)
            if holder is None or holder.is_dead:
                world.violations.append(Violation(ONE_HOLDER, f"no process has the log open: {error}"))
            return
        except CutwaterError as error:
            world.note(f"{self.name}: {error.code}")
            return
        if own._on_close is None:
            world.violations.append(Violation(ONE_HOLDER, f"{self.name} wants the log alone, and is connected"))
        cluster.counts["open alone"] += 1
        await self.append_plain(own, PLAIN)
        if not await cluster._closed(own):
            assert self.process is not None
            world.loop.call_as(None, cluster.host.exit, self.process)

    async def _try_without_the_secret(self, cluster: EmbeddedCluster) -> None:
        holder = read_holder(LOG)
        if holder is None:
            return
        address = parse_servers(holder.servers)[0]
        try:
            await AsyncClient.connect(SCHEME + address, timeout=self.world.options.timeout)
        except CutwaterError:
            cluster.counts["refused without the secret"] += 1
            return
        if not cluster.has_it_open(self.process):
            # In the process that has the log open, no secret is asked for.
            self.world.violations.append(Violation(SECRET, f"{self.name} got in without the secret"))
