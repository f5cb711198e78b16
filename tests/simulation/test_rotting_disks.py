"""A disk of a simulated cluster rots in chosen places, and the cluster repairs it from the intact copy of another
storage node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.errors import CutwaterError
from cutwater.storage.format import CONTEXT_BYTES, HEADER_BYTES, SECTOR_BYTES
from cutwater.testing.virtual.cluster import ClusterShape, VirtualCluster
from cutwater.testing.virtual.loop import VirtualLoop
from cutwater.testing.virtual.options import ShippedOptions
from cutwater.testing.virtual.simulation import simulate_shipped
from cutwater.testing.virtual.system import run_simulated
from cutwater.testing.virtual.trace import Trace
from cutwater.types import LogStreamId, StorageNodeId
from tests.soak import rounds

STREAM, NODE = LogStreamId(1), StorageNodeId(1)
SHAPE = ClusterShape(storage_nodes=2, metadata_nodes=1, segment_bytes=16 * 1024, scrub_every=0.5, min_replication=2)
WAIT_SECONDS = 120.0


class Scene:
    """A cluster with one topic of one log stream on two nodes, and a client."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.cluster = VirtualCluster(loop, SHAPE, Random(1))
        self.machine = self.cluster.nodes[NODE - 1]
        self.log: AsyncClient

    async def begin(self) -> None:
        await self.cluster.found()
        self.log = await AsyncClient.connect(self.cluster.servers)
        await self.log.create_topic("t", streams=1, replication=2)

    async def append(self, count: int) -> None:
        for number in range(count):
            with suppress(CutwaterError):
                await self.log.append("t", [b"%d" % number])

    def paths(self, suffix: str) -> list[Path]:
        return [path for path in self.machine.disk.paths() if path.name.endswith(suffix)]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not holds():
                await asyncio.sleep(0.1)

    def is_whole(self) -> bool:
        """Whether both nodes are members, and the first one finds no damage."""
        leader, server = self.cluster.leader(), self.cluster.node_server(NODE)
        if leader is None or server is None or STREAM not in server.node.replicas:
            return False
        storage = server.node.replicas[STREAM].storage
        return len(leader.state.streams[STREAM].members) == 2 and not server.damage and not storage.verify()


def play(work: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    def run(loop: VirtualLoop) -> None:
        scene = Scene(loop)

        async def all_of_it() -> None:
            await scene.begin()
            await work(scene)

        async def outside() -> None:
            process = scene.cluster.new_process("client", "127.0.2.1")
            await loop.spawn(process, all_of_it())

        loop.run_until_complete(outside())
        assert not loop.complaints

    run_simulated(run, Random(1), Trace())


def test_a_replica_whose_newest_file_cannot_be_read_is_learned_anew() -> None:
    """It cannot be written in part either, so opening it again does not help."""

    async def work(scene: Scene) -> None:
        await scene.append(20)
        scene.machine.disk.spoil(scene.paths(".entries")[-1], 0)
        await scene.append(20)
        await scene.until(scene.is_whole)

    play(work)


def test_a_commit_of_trimmed_records_is_repaired_too() -> None:
    """A search among the commits may meet it."""

    async def work(scene: Scene) -> None:
        await scene.append(40)
        await scene.log.trim("t", before=30)
        await scene.until(lambda: scene.cluster.nodes[0].server.node.replicas[STREAM].storage.first_llsn > 20)
        await asyncio.sleep(1.0)
        scene.machine.disk.flip(scene.paths(".commits")[0], HEADER_BYTES + 10 * CONTEXT_BYTES)
        assert not scene.is_whole()
        await scene.until(scene.is_whole)
        assert not [path for path in scene.machine.disk.paths() if "damaged" in str(path)], "it was learned anew"

    play(work)


@pytest.mark.parametrize("is_entry_damaged", [False, True])
def test_a_segment_that_lost_both_marks_is_repaired(is_entry_damaged: bool) -> None:
    """Its entries say where it ends. If one of them is damaged too, a copy of it is needed first."""

    async def work(scene: Scene) -> None:
        for _ in range(30):
            await scene.log.append("t", [bytes(2_000)])
        segments = scene.paths(".entries")
        assert len(segments) > 2
        scene.machine.kill()
        for path in segments[:-1]:
            for mark in (1, 2):
                scene.machine.disk.flip(path, mark * SECTOR_BYTES + 3)
            if is_entry_damaged:
                scene.machine.disk.flip(path, len(scene.machine.disk.content(path)) - 100)
        scene.machine.start()
        await scene.until(lambda: scene.cluster.node_server(NODE) is not None)
        assert not scene.is_whole()
        await scene.until(scene.is_whole)
        assert not [path for path in scene.machine.disk.paths() if "damaged" in str(path)], "it was learned anew"

    play(work)


def test_a_node_starts_from_the_copy_if_its_own_file_cannot_be_read() -> None:
    async def work(scene: Scene) -> None:
        await scene.append(5)
        scene.machine.kill()
        scene.machine.disk.spoil(scene.paths("node")[0], 0)
        scene.machine.start()
        await scene.until(scene.is_whole)

    play(work)


ROT = {
    "bits": {"rot_every": 0.05},
    "reads": {"wrong_reads": 0.02},
    "writes": {"stray_writes": 0.02},
    "all": {"rot_every": 0.1, "wrong_reads": 0.01, "stray_writes": 0.01, "scrub_every": 0.3, "power_every": 0.7},
}


@pytest.mark.parametrize("seed", range(rounds(1, 50)))
@pytest.mark.parametrize("kind", ROT)
def test_a_disk_rots_and_all_replicas_are_whole_at_the_end(kind: str, seed: int) -> None:
    options = ShippedOptions(seconds=2.0, **ROT[kind])  # type: ignore[arg-type]
    result = simulate_shipped(seed, options)
    assert result.violation is None, f"seed {seed} of {kind}: {result.violation}"
    faults = ("strike", "read in", "write in", "read error")
    assert any(fault in name for name in result.struck for fault in faults), "nothing was damaged"
