"""Volumes that a storage node gets and loses while it runs, as real processes and through the command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cutwater.admin.local_cluster import ClusterMember, LocalCluster
from cutwater.admin.operations import Admin
from cutwater.client.async_client import AsyncClient
from cutwater.errors import InvalidArgument, NotFound, Refused
from cutwater.types import StorageNodeId
from tests.integration.real_cluster import judge, kill, loaded, restart, running_cluster, until, until_whole
from tests.integration.sn_process import run

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

NODE = StorageNodeId(1)


async def volumes_of(admin: Admin) -> tuple[str, ...]:
    """Which volumes of the node are in the catalog."""
    return next(node.volumes for node in (await admin.describe()).nodes if node.node == NODE)


def replicas_on(volume: Path) -> list[int]:
    names = [path.name for path in volume.glob("cid=1/snid=1/lsid=*")]
    return sorted(int(name.removeprefix("lsid=")) for name in names if name.removeprefix("lsid=").isdecimal())


async def restarted(directory: Path, cluster: LocalCluster, member: ClusterMember, admin: Admin) -> None:
    kill(member)
    await restart(directory, cluster, member)

    async def is_alive() -> bool:
        return all(node.is_alive for node in (await admin.describe()).nodes)

    await until(is_alive, "the node reports again")


async def test_a_volume_comes_and_goes_under_load(tmp_path: Path) -> None:
    """Storage nodes and their volumes (added, removed); what is added is used, kept over a crash, and goes only
    when nothing lies there."""
    async with running_cluster(tmp_path, storage_nodes=2) as cluster:
        first, second = tmp_path / "sn1", tmp_path / "sn1-more"
        second.mkdir()
        async with loaded(cluster, 1, streams=2, appenders=3) as load, Admin(cluster.addresses) as admin:
            member = cluster.storage_nodes[0]
            where = ("--node", "1", "--dir", tmp_path)
            added = await asyncio.to_thread(run, "sn", "volume", "add", str(second), *map(str, where))
            assert added.returncode == 0, added.stderr
            assert "uses" in added.stdout
            assert await volumes_of(admin) == (str(first), str(second))
            async with await AsyncClient.connect(cluster.servers) as log:
                await log.create_topic("more", streams=2, replication=2)
            more = [stream.stream for stream in (await admin.describe()).streams if stream.topic == "more"]
            assert replicas_on(second) == more, "they go where there is most room for them"
            with pytest.raises(Refused, match=f"holds replicas of log streams {more[0]}, {more[1]}\\."):
                await admin.remove_volume(NODE, str(second))
            await restarted(tmp_path, cluster, member, admin)
            await until_whole(cluster)
            await load.until_acknowledged(20, 20.0)
            assert await volumes_of(admin) == (str(first), str(second))
            await admin.delete_topic("more")
            await until(lambda: _is_empty(second), "the replicas of a deleted topic are gone")
            removed = await asyncio.to_thread(
                run, "sn", "volume", "remove", str(second), *map(str, where), "--output", "json"
            )
            assert removed.returncode == 0, removed.stderr
            assert [volume["path"] for volume in json.loads(removed.stdout)["volumes"]] == [str(first)]
            assert await volumes_of(admin) == (str(first),)
            assert list(second.iterdir()) == []
            await restarted(tmp_path, cluster, member, admin)
            assert await volumes_of(admin) == (str(first),)
        await judge(tmp_path, cluster, load)


async def _is_empty(volume: Path) -> bool:
    return not list(volume.glob("cid=1/snid=1/lsid=*"))


async def test_what_a_node_does_not_take(tmp_path: Path) -> None:
    """Each refusal says why, and the node goes on as it was."""
    async with running_cluster(tmp_path, storage_nodes=2) as cluster, Admin(cluster.addresses) as admin:
        (tmp_path / "file").touch()
        for path, error, text in (
            ("data", InvalidArgument, "on the machine of the storage node, from / on"),
            (str(tmp_path / "none"), InvalidArgument, "none does not exist: create it, or mount it, first"),
            (str(tmp_path / "file"), InvalidArgument, "file is not a directory"),
        ):
            with pytest.raises(error, match=text):
                await admin.add_volume(NODE, path)
        with pytest.raises(NotFound, match="there is no storage node 9; storage nodes: 1, 2"):
            await admin.add_volume(StorageNodeId(9), str(tmp_path))
        with pytest.raises(Refused, match="is the only volume of storage node 1"):
            await admin.remove_volume(NODE, str(tmp_path / "sn1"))
        with pytest.raises(InvalidArgument, match=r"is not a volume of storage node 1: choose one of .*/sn1"):
            await admin.remove_volume(NODE, str(tmp_path / "sn2"))
        assert await volumes_of(admin) == (str(tmp_path / "sn1"),)
