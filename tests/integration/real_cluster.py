"""What the tests on real processes share: a local cluster that leaves nothing behind, faults, and the judgement."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import structs

from benchmarks.cluster_load import ClusterLoad, as_tagged
from cutwater.admin import local_cluster
from cutwater.admin.local_cluster import CLUSTER_ID, ClusterMember, LocalCluster
from cutwater.admin.local_etcd import EtcdMember
from cutwater.admin.operations import Admin
from cutwater.client.async_client import AsyncClient
from cutwater.core.order.decisions import Decision
from cutwater.metadata.stores.open_store import open_store
from cutwater.runtime import processes
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.small_files import ReplicaIdentity
from cutwater.storage.volume import replica_path
from cutwater.testing.checkers.guarantees import Evidence, ReplicaDump, check_all
from cutwater.testing.checkers.record import SimHistory
from cutwater.types import GLSN, LLSN, Batch, ClusterId, CommitContext, Epoch, LogStreamId, StorageNodeId

TOPIC = "orders"
KEEP_ALL = ("--snapshot-every", "1000000000")
"""The checkers want every decision that was ever made."""
RECOVERY_SECONDS = 20.0
"""How long a test waits for what should take one to five seconds: this machine may be busy. The figures are in
docs/benchmarks.md."""


@asynccontextmanager
async def running_cluster(
    directory: Path, *, storage_nodes: int = 3, metadata: int = 1, metadata_flags: tuple[str, ...] = ()
) -> AsyncIterator[LocalCluster]:
    flags = (*KEEP_ALL, *metadata_flags)
    cluster = await asyncio.to_thread(
        local_cluster.start, directory, storage_nodes=storage_nodes, metadata=metadata, metadata_flags=flags
    )
    try:
        yield cluster
    finally:
        processes.stop([member.pid for member in cluster.processes() if member.pid], 5.0)


@asynccontextmanager
async def loaded(
    cluster: LocalCluster, seed: int, *, streams: int = 2, appenders: int = 6, replication: int | None = None
) -> AsyncIterator[ClusterLoad]:
    """A topic under load. Whatever happens inside, the load ends."""
    async with await AsyncClient.connect(cluster.servers) as log:
        await log.create_topic(TOPIC, streams=streams, replication=replication)
    load = ClusterLoad(cluster, TOPIC, seed)
    load.start(appenders)
    try:
        await load.until_acknowledged(20, RECOVERY_SECONDS)
        yield load
    finally:
        await load.stop()


def kill(member: ClusterMember | EtcdMember) -> None:
    os.kill(member.pid, signal.SIGKILL)
    while processes.is_running(member.pid):
        pass


def stop(member: ClusterMember) -> None:
    os.kill(member.pid, signal.SIGSTOP)


def resume(member: ClusterMember) -> None:
    os.kill(member.pid, signal.SIGCONT)


async def restart(directory: Path, cluster: LocalCluster, *members: ClusterMember) -> None:
    """Start processes again, in a thread: the load goes on meanwhile."""

    def start_all() -> None:
        for member in members:
            local_cluster.start_again(directory, cluster, member)

    await asyncio.to_thread(start_all)


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = RECOVERY_SECONDS) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not await condition():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {seconds} s") from None


async def until_whole(cluster: LocalCluster) -> None:
    """Every log stream is open on all its replicas, or sealed for good on all of them."""

    async def is_whole() -> bool:
        async with Admin(cluster.addresses) as admin:
            description = await admin.describe()
        return all((s.is_open or s.final or s.held) and not s.missing for s in description.streams)

    await until(is_whole, "all log streams whole", 3 * RECOVERY_SECONDS)


async def decisions_of(directory: Path, cluster: LocalCluster) -> tuple[Decision, ...]:
    """All that was ever decided. The metadata nodes are stopped; etcd runs."""
    url = f"sqlite:{directory / 'metadata.sqlite'}"
    if cluster.etcd:
        url = "etcd://" + ",".join(etcd.address for etcd in cluster.etcd) + "/cutwater"
    store = await open_store(url, cluster=ClusterId(CLUSTER_ID))
    try:
        loaded = await store.load(timeout_ms=30_000)
    finally:
        await store.close()
    assert loaded.snapshot.index == 0, "a snapshot has taken the place of decisions that the checkers want"
    return loaded.decisions


async def judge(directory: Path, cluster: LocalCluster, load: ClusterLoad) -> None:
    """The load is over: read everything back, stop all processes, let the simulator's checkers look at the disks."""
    await until_whole(cluster)
    nodes = [StorageNodeId(member.id) for member in cluster.storage_nodes]
    await load.until_readable(nodes, 3 * RECOVERY_SECONDS)
    members = await members_of(cluster)
    processes.stop([member.pid for member in (*cluster.storage_nodes, *cluster.metadata)], 10.0)
    decisions = await decisions_of(directory, cluster)
    check_all(evidence_of(directory, cluster, load.record, decisions, members))
    assert load.acknowledged > 0


def evidence_of(
    directory: Path,
    cluster: LocalCluster,
    record: SimHistory,
    decisions: Iterable[Decision],
    members: dict[LogStreamId, tuple[StorageNodeId, ...]],
) -> Evidence:
    """Return what the disks of a stopped cluster hold. ``members`` are the current replicas: others may be behind."""
    dumps: dict[LogStreamId, list[ReplicaDump]] = {}
    applied: dict[LogStreamId, list[CommitContext]] = {}
    written: dict[tuple[LogStreamId, Epoch, LLSN], Batch] = {}
    for stream, nodes in members.items():
        for node in nodes:
            # Volumes that were added while it ran lie beside its first one, if the test put them there.
            volumes = sorted(directory.glob(f"sn{node}*/"))
            here = (v for v in volumes if replica_path(v, ClusterId(CLUSTER_ID), node, stream).exists())
            volume = next(here, directory / f"sn{node}")
            dump = dump_replica(volume, ClusterId(CLUSTER_ID), node, stream)
            dumps.setdefault(stream, []).append(dump)
            applied.setdefault(stream, []).extend(dump.contexts)
            for entry in dump.entries:
                written[stream, entry.epoch, entry.first_llsn] = entry.batch
    return Evidence(list(decisions), record, dumps, applied, written, GLSN(0))


def dump_replica(volume: Path, cluster: ClusterId, node: StorageNodeId, stream: LogStreamId) -> ReplicaDump:
    storage = SegmentStorage(replica_path(volume, cluster, node, stream), ReplicaIdentity(cluster, node, stream))
    try:
        storage.find()
        last = storage.last_commit
        end = last.last_llsn if last is not None else LLSN(0)
        found = storage.entries(storage.first_llsn, end) if end >= storage.first_llsn else ()
        entries = tuple(structs.replace(entry, batch=as_tagged(entry.batch)) for entry in found)
        return ReplicaDump(node, storage.first_llsn, end, entries, tuple(storage.contexts))
    finally:
        storage.close()


async def members_of(cluster: LocalCluster) -> dict[LogStreamId, tuple[StorageNodeId, ...]]:
    """Return the current replicas of each log stream."""
    async with Admin(cluster.addresses) as admin:
        description = await admin.describe()
        return {stream.stream: stream.members for stream in description.streams}
