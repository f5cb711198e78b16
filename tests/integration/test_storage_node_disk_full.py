"""A full disk, on a real file system that is small: nothing is lost, and it goes on as soon as there is room."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.core.requests import SealRequest, UnsealRequest
from cutwater.errors import CutwaterError, ReadOnly, ResourceExhausted
from cutwater.types import NodeState, Part, ReplicaState, StorageNodeId
from tests.integration.log_cluster import LogCluster, with_log
from tests.integration.node_cluster import STREAM, Cluster, with_cluster

MIB = 1024 * 1024
VOLUME_MIB = 24
BODY_BYTES = 300_000


@pytest.fixture
def small_volumes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory in which the volume of one node, the first unless said otherwise, is a file system of its own, of a
    few MiB."""
    volume = tmp_path / f"volume{getattr(request, 'param', 1)}"
    volume.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={VOLUME_MIB}m", "none", str(volume)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.decode().strip()}")
    try:
        yield tmp_path
    finally:
        # Lazily: files are closed when the garbage collector gets to them.
        subprocess.run(["umount", "--lazy", str(volume)], check=True)


def body(number: int) -> bytes:
    return (b"record %d " % number).ljust(BODY_BYTES, b".")


async def fill(cluster: Cluster) -> list[tuple[int, int]]:
    """Append until the node says that it is full: GLSN and number of what was acknowledged."""
    acknowledged = []
    for number in range(10_000):
        stream = cluster.order.state.streams[STREAM]
        try:
            answer = await cluster.append_to(1, stream.epoch, body(number))
        except ReadOnly:
            return acknowledged
        except CutwaterError:
            # The write that found the disk full: its stream is being opened anew.
            await asyncio.sleep(0.02)
            continue
        acknowledged.append((int(answer.ack.glsn), number))
    raise AssertionError("the disk does not get full")


async def serves_all(cluster: Cluster, acknowledged: list[tuple[int, int]]) -> None:
    records, _ = await cluster.read_all(1)
    found = dict(records)
    assert all(found[glsn] == body(number) for glsn, number in acknowledged)
    assert await cluster.verify(1) == ()


@pytest.mark.parametrize("reserve_mib", [4, 0], ids=["with a reserve", "until nothing can be written"])
def test_a_full_disk_loses_nothing_and_recovers_by_itself(small_volumes: Path, reserve_mib: int) -> None:
    async def test(cluster: Cluster) -> None:
        # Something else takes up room, and gives it back later.
        ballast = cluster.volume(1) / "ballast"
        ballast.write_bytes(bytes(10 * MIB))
        acknowledged = await fill(cluster)
        assert acknowledged
        await cluster.until(
            lambda: cluster.order.reports[StorageNodeId(1)].node_state is NodeState.READ_ONLY,
            "the metadata repository hears of it",
        )
        await serves_all(cluster, acknowledged)
        if reserve_mib:
            # What must be written can be written: the stream is sealed, and opened again once there is room.
            await cluster.order.ask(SealRequest(STREAM))
            await cluster.until(lambda: cluster.state(1) is ReplicaState.SEALED, "it is sealed")
            await cluster.order.ask(UnsealRequest(STREAM))
        with pytest.raises(ReadOnly, match="append to another log stream, make room on its volumes, or trim") as full:
            await cluster.append_to(1, cluster.order.state.streams[STREAM].epoch, b"one more")
        assert full.value.retriable
        ballast.unlink()
        answer = await cluster.append(b"there is room again")
        await serves_all(cluster, acknowledged)
        assert cluster.order.reports[StorageNodeId(1)].node_state is NodeState.READY
        assert (await cluster.read(1, int(answer.ack.glsn)))[-1][1] == b"there is room again"

    with_cluster(small_volumes, test, nodes=1, reserve_bytes=reserve_mib * MIB)


def test_a_node_that_starts_on_a_full_disk_serves_reads(small_volumes: Path) -> None:
    async def test(cluster: Cluster) -> None:
        acknowledged = await fill(cluster)
        await cluster.stop_node(1)
        await cluster.start_node(1)
        assert (await cluster.status(1)).state is NodeState.READ_ONLY
        await serves_all(cluster, acknowledged)

    with_cluster(small_volumes, test, nodes=1, reserve_bytes=4 * MIB)


@pytest.mark.parametrize(
    ("small_volumes", "short"), [(1, 1), (2, 2)], ids=["head", "backup"], indirect=["small_volumes"]
)
def test_a_member_without_room_is_left_out_and_learns_when_there_is_some(small_volumes: Path, short: int) -> None:
    async def test(cluster: Cluster) -> None:
        ballast = cluster.volume(short) / "ballast"
        ballast.write_bytes(bytes(16 * MIB))
        stream = cluster.order.state.streams[STREAM]
        assert stream.members == (1, 2, 3)
        expected = []
        for number in range(30):
            answer = await cluster.append(body(number))
            expected.append((int(answer.ack.glsn), body(number)))
        assert set(stream.members) == {1, 2, 3} - {short}
        assert cluster.order.reports[StorageNodeId(short)].node_state is NodeState.READ_ONLY
        ballast.unlink()
        await cluster.until(lambda: set(stream.members) == {1, 2, 3}, "it joins again")
        await cluster.until_all_run(30)
        assert (await cluster.read_all(short))[0] == expected

    with_cluster(small_volumes, test, reserve_bytes=2 * MIB)


def test_whatever_could_be_staged_can_be_published(small_volumes: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        run = await log.open_run("", "a key")
        rows = [b"x" * 1_000] * 1_000
        for batch in range(2):
            parts: list[Part | None] = []
            refusal = ""
            while not refusal:
                try:
                    parts.append(await log.stage(run, batch, "t", rows, timeout=5))
                except (ResourceExhausted, ReadOnly) as error:
                    refusal = error.message
            assert "publishing them" in refusal
            assert len(parts) > 1
            (published,) = await log.publish(run, batch, parts)
            # What is published is dropped as soon as its room is wanted, long before the node would ask otherwise.
            assert published.count == len(rows) * len(parts)
        assert cluster.nodes[1].node.counters.groups_failed == 0

    with_log(small_volumes, test)
