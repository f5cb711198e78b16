"""Directories that were made before servers had keys: they open, and the servers enrol themselves.

``tests/data/before-server-keys.tar.gz`` was made by the code before ADR 0036: an embedded log, and a local cluster of
one metadata node and three storage nodes, each with five records in the topic ``t``.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import cutwater
from cutwater.admin import local_cluster
from cutwater.admin.free_ports import free_addresses
from cutwater.admin.local_cluster import CLUSTER_ID
from cutwater.core.order.decisions import AddNode
from cutwater.core.order.state import Node, OrderState
from cutwater.metadata.stores.open_store import open_store
from cutwater.runtime import processes
from cutwater.types import ClusterId, DecisionIndex, MetadataNodeId, StorageNodeId

pytestmark = pytest.mark.timeout(180)

ARCHIVE = Path(__file__).resolve().parents[1] / "data" / "before-server-keys.tar.gz"
OLD = [b"old %d" % i for i in range(5)]


@pytest.fixture
def made_before(tmp_path: Path) -> Path:
    shutil.unpack_archive(ARCHIVE, tmp_path)
    return tmp_path


def values(log: cutwater.Client) -> list[bytes]:
    return [record.value for record in log.subscribe("t", follow=False)]


def check_keys(directory: Path, count: int) -> set[bytes]:
    """There are so many private keys, which nobody else can read."""
    files = [*directory.rglob("server-key"), *directory.glob("*.key")]
    assert len(files) == count
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    keys = {file.read_bytes() for file in files}
    assert len(keys) == count
    return keys


def test_an_embedded_log_opens_and_keeps_its_keys(made_before: Path) -> None:
    directory = made_before / "embedded"
    with cutwater.open(directory) as log:
        assert values(log) == OLD
        log.append("t", b"new")
    keys = check_keys(directory, 2)
    with cutwater.open(directory) as log:
        assert values(log) == [*OLD, b"new"]
        log.append("t", b"newer")
    assert check_keys(directory, 2) == keys


async def nodes_in_the_catalog(directory: Path) -> dict[StorageNodeId, Node]:
    store = await open_store(f"sqlite:{directory / 'metadata.sqlite'}", cluster=ClusterId(CLUSTER_ID))
    try:
        loaded = await store.load()
        return OrderState(loaded.snapshot, loaded.decisions).nodes
    finally:
        await store.close()


async def move(directory: Path) -> None:
    """The addresses of that time may be in use. Let the servers have listened elsewhere, as they noted it then."""
    cluster = local_cluster.load(directory)
    store = await open_store(f"sqlite:{directory / 'metadata.sqlite'}", cluster=ClusterId(CLUSTER_ID))
    try:
        loaded = await store.load()
        state = OrderState(loaded.snapshot, loaded.decisions)
        moves = []
        for member in cluster.storage_nodes:
            member.address = free_addresses(1)[0]
            known = state.nodes[StorageNodeId(member.id)]
            assert known.server_key == ""
            moves.append(AddNode(known.node, member.address, known.key, known.volumes))
        epoch = await store.acquire(MetadataNodeId(1), "", loaded.leader.epoch)
        await store.append(epoch, DecisionIndex(state.index), tuple(moves))
    finally:
        await store.close()
    cluster.metadata[0].address = free_addresses(1)[0]
    cluster.servers = f"cutwater://{cluster.metadata[0].address}"
    (directory / "cluster.json").write_bytes(msgspec.json.encode(cluster))


@pytest.fixture
def cluster_made_before(made_before: Path) -> Iterator[Path]:
    directory = made_before / "cluster"
    asyncio.run(move(directory))
    try:
        yield directory
    finally:
        processes.stop(local_cluster.load(directory).running(), 5.0)


def test_a_cluster_starts_and_enrols_its_storage_nodes(cluster_made_before: Path) -> None:
    directory = cluster_made_before
    with cutwater.connect(local_cluster.start(directory).servers, timeout=60) as log:
        assert values(log) == OLD
        log.append("t", b"new")
    local_cluster.stop(directory)
    keys = check_keys(directory, 4)
    nodes = asyncio.run(nodes_in_the_catalog(directory))
    assert len({node.server_key for node in nodes.values() if node.server_key}) == 3
    with cutwater.connect(local_cluster.start(directory).servers, timeout=60) as log:
        assert values(log) == [*OLD, b"new"]
        log.append("t", b"newer")
    local_cluster.stop(directory)
    assert check_keys(directory, 4) == keys
    assert asyncio.run(nodes_in_the_catalog(directory)) == nodes
