"""Shipped storage nodes on simulated disks: every file of a node goes through the file layer, so a power cut can be
simulated for a whole node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutwater.runtime import system
from cutwater.runtime.event_loop import run
from cutwater.runtime.system import Space, System
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storage.volume import NodeVolumes
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import StorageNodeId
from cutwater.wire.identity.server_keys import ServerKey
from tests.integration.log_cluster import CLUSTER, LogCluster, running, seeded

pytestmark = pytest.mark.timeout(60)

VOLUME = Path("/a simulated volume")
"""No directory of this name exists, and no part of a node makes one."""
SPARE = VOLUME.with_name("a simulated spare volume")
NODES = 2


class DiskCluster(LogCluster):
    """A cluster whose storage nodes have simulated disks."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), SegmentOptions(segment_bytes=4_096))
        self.disks = {number: FaultFiles() for number in range(1, NODES + 1)}
        self.keys = {number: ServerKey.generate() for number in self.disks}
        for disk in self.disks.values():
            disk.make_dir(VOLUME)
            disk.make_dir(SPARE)

    def volumes_of(self, number: int) -> NodeVolumes:
        return NodeVolumes([VOLUME], CLUSTER, StorageNodeId(number), files=self.disks[number])

    def key_of(self, number: int) -> ServerKey:
        return self.keys[number]


class DiskSystem(System):
    """The operating system, but for the space of simulated disks."""

    def free_space(self, path: Path) -> Space:
        assert path in (VOLUME, SPARE)
        return Space(1 << 40, 1 << 40, 1)


@pytest.fixture(autouse=True)
def simulated_space() -> Iterator[None]:
    before = system.use(DiskSystem())
    try:
        yield
    finally:
        system.use(before)


async def use_a_disk_and_cut_its_power(cluster: DiskCluster) -> None:
    rng = seeded()
    async with cluster.client() as log:
        await log.create_topic("t", streams=2)
        await log.create_topic("passing")
        values = [b"%06d" % number * 20 for number in range(400)]
        for start in range(0, len(values), 40):
            await log.append("t", values[start : start + 40])
        await log.append("passing", [b"x"])
        opened = await log.open_run("totals", "a checkpoint")
        parts = [await log.stage(opened, 0, "t", [b"staged", b"too"])]
        staged = [path for path in cluster.disks[1].paths() + cluster.disks[2].paths() if "staged" in path.parts]
        assert len(staged) == NODES
        await log.publish(opened, 0, parts)
        await log.delete_topic("passing")

        for server in cluster.nodes.values():
            server.volumes.add(SPARE)
            server.volumes.take_away(SPARE)
        for number, disk in cluster.disks.items():
            assert not disk.names(SPARE)
            await cluster.stop_node(number)
            disk.crash(rng)
        for number in cluster.disks:
            await cluster.start_node(number)

        await log.append("t", [b"after the power cut"])
        wanted = {*values, b"staged", b"too", b"after the power cut"}
        assert {record.value async for record in log.subscribe("t", follow=False)} == wanted


def test_all_files_of_a_storage_node_are_on_its_simulated_disk() -> None:
    async def main() -> None:
        async with running(DiskCluster(), NODES) as cluster, asyncio.timeout(50):
            await use_a_disk_and_cut_its_power(cluster)
            names = {path.name for disk in cluster.disks.values() for path in disk.paths()}
            assert {"lock", "node"} <= names

    run(main())
    assert not VOLUME.exists()
    assert not SPARE.exists()
