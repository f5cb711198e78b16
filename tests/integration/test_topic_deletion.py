"""Deleting a topic removes its data from every storage node, also from one that was away; other topics stay."""

from __future__ import annotations

from pathlib import Path

from cutwater.client.async_client import AsyncClient
from cutwater.core.messages import CreateReplica
from cutwater.core.requests import DescribeRequest, Description
from cutwater.types import GLSN, Incarnation, TopicId
from tests.integration.log_cluster import LogCluster, with_log


def replicas_on(cluster: LogCluster, number: int) -> list[str]:
    volume = cluster.directory / f"volume{number}"
    return sorted(path.name for path in volume.glob("cid=*/snid=*/lsid=*"))


def test_the_data_of_a_deleted_topic_is_removed_everywhere(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("gone", streams=2, replication=2)
        await log.create_topic("stays", streams=1, replication=2)
        gone = await log.append("gone", [b"a", b"b"], timeout=20)
        kept = await log.append("stays", b"c", timeout=20)
        assert len(replicas_on(cluster, 1)) == len(replicas_on(cluster, 2)) == 3
        await cluster.stop_node(2)
        await log.delete_topic("gone")
        left = [f"lsid={kept.stream}"]
        await cluster.until(lambda: replicas_on(cluster, 1) == left, "the first node has removed them")
        node = cluster.nodes[1].node
        for incarnation, report in ((node.incarnation, 1), (node.incarnation - 1, 1_000_000)):
            node.leader_says(CreateReplica(gone.stream, TopicId(1), GLSN(0), Incarnation(incarnation), report))
            assert gone.stream not in node.replicas, "an order that was under way for long does not bring one back"
        assert len(replicas_on(cluster, 2)) == 3
        await cluster.start_node(2)
        await cluster.until(lambda: replicas_on(cluster, 2) == left, "the second node has removed them")
        description: Description = await cluster.ask(DescribeRequest())
        assert [stream.stream for stream in description.streams] == [kept.stream]
        assert description.halted == ""
        assert (await log.read(kept.glsn)).value == b"c"
        await log.create_topic("gone", streams=1, replication=2)
        assert (await log.append("gone", b"anew", timeout=20)).glsn > kept.glsn

    with_log(tmp_path, test, nodes=2)
