"""Who a storage node is: keys are compared before anything else is said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from cutwater.core.messages import LeaderHello
from cutwater.core.requests import AddNodeRequest
from cutwater.types import ClusterId, LeaderEpoch, StorageNodeId
from cutwater.wire import storage_api as api
from tests.integration.node_cluster import CLUSTER, Cluster, with_cluster
from tests.integration.order_double import OrderDouble
from tests.integration.sn_process import NodeProcess, until_logged


def test_a_node_that_was_not_added_reports_nothing_until_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path)
        cluster.metadata = await cluster.order.start()
        try:
            server = await cluster.start_node(1)
            await cluster.until(lambda: 1 in cluster.order.addresses, "it says who it is")
            assert cluster.order.addresses[StorageNodeId(1)] == server.address
            assert server.volumes.identity.cluster_key is None
            assert cluster.order.reports == {}
            await cluster.order.ask(AddNodeRequest(StorageNodeId(1)))
            await cluster.until(lambda: 1 in cluster.order.reports, "it reports")
            assert server.volumes.identity.cluster_key == cluster.order.cluster_key
            assert server.metadata_joined == 1
        finally:
            await cluster.stop_node(1)
            await cluster.order.stop()

    asyncio.run(test())


def test_a_node_describes_itself_to_anyone(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        async with cluster.client(1) as connection:
            said = (await connection.call(api.DESCRIBE, None, timeout_ms=2_000)).value
        identity = cluster.nodes[1].volumes.identity
        assert (said.cluster, said.node, said.node_key) == (CLUSTER, 1, identity.node_key)
        assert (said.cluster_key, said.incarnation) == (cluster.order.cluster_key, identity.incarnation)
        assert said.address == f"127.0.0.1:{cluster.ports[1]}"
        assert [volume.path for volume in said.volumes] == [str(cluster.volume(1))]
        assert 0 < said.volumes[0].free_bytes < said.volumes[0].total_bytes

    with_cluster(tmp_path, test, nodes=1)


def test_only_a_metadata_repository_that_was_joined_gives_orders(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        node = cluster.nodes[1].node
        async with cluster.client(1) as stranger:
            stranger.notify(api.LEADER_SAYS, LeaderHello(LeaderEpoch(99)))
            stranger.notify(api.ADDRESSES, api.Addresses({StorageNodeId(5): "127.0.0.1:1"}))
            # Notices and calls are handled in the order in which they were sent.
            await stranger.call(api.STATUS, None, timeout_ms=2_000)
        assert node.leader_epoch == 1
        assert list(cluster.nodes[1].peers.connected((StorageNodeId(5),))) == []

    with_cluster(tmp_path, test, nodes=1)


def test_keys_that_do_not_belong_together_end_the_process(tmp_path: Path) -> None:
    """A real process, of which the metadata repository says that its number is another's."""

    async def test() -> None:
        order = OrderDouble(CLUSTER)
        metadata = await order.start()
        (tmp_path / "volume").mkdir()
        process = NodeProcess(1, [tmp_path / "volume"], metadata, tmp_path / "log")
        try:
            await order.ask(AddNodeRequest(StorageNodeId(1)))
            order.node_keys[StorageNodeId(1)] = "of another node"
            await asyncio.to_thread(process.start)
            assert await asyncio.to_thread(process.wait) == 13
            error = json.loads(process.log.read_text().splitlines()[-1])["error"]
            assert (error["code"], error["exit_code"]) == ("wrong_identity", 13)
            assert error["message"] == "storage node 1 is not the one that was added: check its volumes"
            assert order.reports == {}
        finally:
            process.kill()
            await order.stop()

    asyncio.run(test())


def test_a_cluster_that_has_the_same_number_is_not_the_same(tmp_path: Path) -> None:
    """Once it was added, a node goes nowhere else, also if the others do not mind."""

    async def test() -> None:
        first, second = OrderDouble(CLUSTER), OrderDouble(CLUSTER)
        second.cluster_key = "of another cluster"
        (tmp_path / "volume").mkdir()
        processes = []
        try:
            for order in (first, second):
                metadata = await order.start()
                await order.ask(AddNodeRequest(StorageNodeId(1)))
                process = NodeProcess(1, [tmp_path / "volume"], metadata, tmp_path / "log")
                processes.append(process)
                await asyncio.to_thread(process.start)
                if order is first:
                    await asyncio.to_thread(until_logged, process, "knows this storage node")
                    process.kill()
            assert await asyncio.to_thread(processes[1].wait) == 13
            assert second.reports == {}
        finally:
            for process in processes:
                process.kill()
            await first.stop()
            await second.stop()

    asyncio.run(test())


def test_a_metadata_repository_of_a_cluster_with_another_number_ends_the_process(tmp_path: Path) -> None:
    async def test() -> None:
        order = OrderDouble(ClusterId(2))
        (tmp_path / "volume").mkdir()
        process = NodeProcess(1, [tmp_path / "volume"], await order.start(), tmp_path / "log")
        try:
            await asyncio.to_thread(process.start)
            assert await asyncio.to_thread(process.wait) == 13
            assert "this is cluster 2, not 1: check the address and the cluster id" in process.log.read_text()
        finally:
            process.kill()
            await order.stop()

    asyncio.run(test())
