"""Who a storage node is: keys are compared before anything else is said."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from msgspec import structs

from cutwater.core.messages import LeaderHello
from cutwater.core.requests import AddNodeRequest
from cutwater.errors import CutwaterError, Unavailable
from cutwater.protocol import storage_api as api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import Unproven
from cutwater.storage.volume import NodeVolumes
from cutwater.types import ClusterId, Epoch, LeaderEpoch, Revision, StorageNodeId
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.client import connect
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ProvenServer
from cutwater.wire.listen.server import listen
from tests.integration.node_cluster import CLUSTER, STREAM, Cluster, with_cluster
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
        assert (said.cluster, said.node, said.node_key) == (CLUSTER, 1, ""), "a key is nobody's business"
        assert (said.cluster_key, said.incarnation) == (cluster.order.cluster_key, identity.incarnation)
        assert said.address == f"127.0.0.1:{cluster.ports[1]}"
        assert [volume.path for volume in said.volumes] == [str(cluster.volume(1))]
        assert 0 < said.volumes[0].free_bytes < said.volumes[0].total_bytes

    with_cluster(tmp_path, test, nodes=1)


@pytest.mark.parametrize("is_proven", [False, True], ids=["a client", "a metadata node where nobody joined"])
def test_only_a_metadata_repository_that_was_joined_gives_orders(tmp_path: Path, is_proven: bool) -> None:
    async def test(cluster: Cluster) -> None:
        node = cluster.nodes[1].node
        key = cluster.order.key if is_proven else None
        endpoint = Endpoint(CLUSTER, METADATA_NODE, "1", key=key)
        for order, argument in (
            (api.LEADER_SAYS, LeaderHello(LeaderEpoch(99))),
            (api.ADDRESSES, api.Addresses({StorageNodeId(5): "127.0.0.1:1"}, {StorageNodeId(5): "key"})),
        ):
            stranger = await connect(
                endpoint, "127.0.0.1", cluster.ports[1], timeout_ms=2_000, expect=lambda server: None
            )
            stranger.notify(order, argument)
            try:
                # Notices and calls are handled in the order in which they were sent.
                await stranger.call(api.STATUS, None, timeout_ms=2_000)
                assert is_proven
            except CutwaterError:
                assert not is_proven
                assert isinstance(stranger.error, Unproven)
            stranger.abort()
        assert node.leader_epoch == 1
        assert list(cluster.nodes[1].peers.connected((StorageNodeId(5),))) == []

    with_cluster(tmp_path, test, nodes=1)


def test_a_metadata_node_with_another_key_is_not_believed_until_a_known_one_tells_it(tmp_path: Path) -> None:
    """Whoever takes the port of a metadata node that is down gets no reports, and gives no orders."""

    async def test(cluster: Cluster) -> None:
        server = cluster.nodes[1]
        assert server.volumes.identity.metadata_keys == {1: cluster.order.key.public}
        cluster_key = cluster.order.cluster_key
        await cluster.stop_node(1)
        thief = OrderDouble(CLUSTER)
        thief.cluster_key = cluster_key
        real_address, thief_address = cluster.metadata, await thief.start()
        await thief.ask(AddNodeRequest(StorageNodeId(1)))
        try:
            cluster.metadata = thief_address
            server = await cluster.start_node(1)
            await asyncio.sleep(0.5)
            assert (thief.reports, thief.addresses, server.metadata_joined) == ({}, {}, 0)
            await cluster.stop_node(1)
            # The operator says that all metadata nodes were replaced.
            volumes = NodeVolumes([cluster.volume(1)], CLUSTER, StorageNodeId(1), forget_metadata_keys=True)
            volumes.release()
            server = await cluster.start_node(1)
            await cluster.until(lambda: 1 in thief.reports, "it reports to those that answer now")
            assert server.volumes.identity.metadata_keys == {1: thief.key.public}
            await cluster.stop_node(1)
        finally:
            cluster.metadata = real_address
            await thief.stop()

    with_cluster(tmp_path, test, nodes=1)


def test_a_node_that_was_removed_is_no_peer_any_more_and_an_older_word_does_not_bring_it_back(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.until_all_run()
        order, first = cluster.order, cluster.nodes[1]
        both = api.Addresses(dict(order.addresses), dict(order.server_keys), order.metadata_keys, Revision(5))
        alone = structs.replace(both, keys={StorageNodeId(1): order.server_keys[StorageNodeId(1)]})
        second = ProvenServer(STORAGE_NODE, "2", order.server_keys[StorageNodeId(2)])

        async def told(servers: api.Addresses) -> bool:
            order._connections[StorageNodeId(1)].notify(api.ADDRESSES, servers)
            await cluster.until(lambda: first._servers_revision >= servers.revision, "it was told")
            await asyncio.sleep(0.05)
            return first._book.is_known(second)

        assert await told(both)
        assert await told(structs.replace(alone, revision=Revision(4)))
        assert not await told(structs.replace(alone, revision=Revision(6)))
        assert not await told(both)
        async with cluster.peer(1, Methods()) as connection:
            asked = api.KeepUpArguments(STREAM, order.state.streams[STREAM].epoch)
            with pytest.raises(Unavailable, match="the key of storage node 2 is not known here"):
                await connection.call(api.KEEP_UP, asked, timeout_ms=2_000)

    with_cluster(tmp_path, test, nodes=2)


def test_servers_of_an_earlier_version_are_told_to_be_upgraded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They greet without a key, whichever of the two sides they are."""

    async def test() -> None:
        earlier = Methods()
        earlier.answers(api.JOIN)(lambda call: api.JoinAnswer("key", known=True))
        listener = await listen(Endpoint(CLUSTER, METADATA_NODE, "1", earlier), "127.0.0.1", 0)
        cluster = Cluster(tmp_path)
        cluster.metadata = f"127.0.0.1:{listener.port}"
        try:
            server = await cluster.start_node(1)
            await cluster.until(lambda: "of an earlier version, upgrade it" in caplog.text, "it says what to do")
            assert server.metadata_joined == 0
            async with cluster.client(1) as connection:
                node = await connect(Endpoint(CLUSTER, STORAGE_NODE, "2"), "127.0.0.1", server.port, timeout_ms=2_000)
                asked = api.KeepUpArguments(STREAM, Epoch(1))
                with pytest.raises(Unproven, match="storage node 2 may be of an earlier version: upgrade it"):
                    await node.call(api.KEEP_UP, asked, timeout_ms=2_000)
                node.abort()
                assert (await connection.call(api.STATUS, None, timeout_ms=2_000)).value.node == 1
        finally:
            await cluster.stop_node(1)
            await listener.close(timeout_ms=500)

    with caplog.at_level(logging.WARNING):
        asyncio.run(test())


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
    """Once it was added, a node goes nowhere else, also if the others do not mind, and have the same private key."""

    async def test() -> None:
        first = OrderDouble(CLUSTER)
        second = OrderDouble(CLUSTER, first.key)
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
