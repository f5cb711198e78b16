"""Sync between storage nodes: in rounds, in parts, with event time, and not from the beginning after it broke off."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutwater.core.requests import TrimRequest
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storagenode.repair import syncing
from cutwater.types import GLSN
from tests.integration.node_cluster import STREAM, Cluster, with_cluster

SMALL = SegmentOptions(segment_bytes=4_000, index_interval_bytes=1_000, commits_per_file=16)


async def append_many(cluster: Cluster, first: int, count: int) -> list[tuple[int, bytes]]:
    """One commit each; the event times go up and down."""
    records = []
    for i in range(first, first + count):
        answer = await cluster.append(b"record %d" % i, time=1_000 + (i * 7919) % 500)
        records.append((int(answer.ack.glsn), b"record %d" % i))
    return records


async def same_everywhere(cluster: Cluster, expected: list[tuple[int, bytes]]) -> None:
    """All replicas hold the same bytes, event time in the headers included."""
    found = {node: await cluster.read_all(node) for node in cluster.nodes}
    assert [records for records, _ in found.values()] == [expected] * len(found)
    assert len({frames for _, frames in found.values()}) == 1
    for node in cluster.nodes:
        assert await cluster.verify(node) == ()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a few records need several rounds of several parts."""
    monkeypatch.setattr(syncing, "ROUND_CONTEXTS_MAX", 20)
    monkeypatch.setattr(syncing, "CONTEXTS_AT_ONCE", 7)
    monkeypatch.setattr(syncing, "PART_BYTES", 600)
    monkeypatch.setattr(syncing, "BACKLOG_BYTES_MAX", 1_000)


@pytest.mark.usefixtures("small_parts")
def test_a_learner_that_lacks_much_learns_in_rounds(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await append_many(cluster, 0, 10)
        await cluster.until_all_run(10)
        victim = cluster.order.state.streams[STREAM].members[-1]
        await cluster.stop_node(victim)
        expected += await append_many(cluster, 10, 90)
        await cluster.start_node(victim)
        await cluster.until_all_run(100)
        assert cluster.nodes[victim].node.counters.syncs_begun >= 5
        await same_everywhere(cluster, expected)

    with_cluster(tmp_path, test, segments=SMALL)


@pytest.mark.usefixtures("small_parts")
def test_a_learner_begins_after_what_was_trimmed_with_event_time_as_it_was_there(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        before = await append_many(cluster, 0, 60)
        await cluster.until_all_run(60)
        victim = cluster.order.state.streams[STREAM].members[-1]
        await cluster.stop_node(victim)
        after = await append_many(cluster, 60, 40)
        first = after[20][0]
        await cluster.order.ask(TrimRequest("t", GLSN(first)))
        others = [server.node.replicas[STREAM] for server in cluster.nodes.values()]
        await cluster.until(lambda: all(driver.replica.first_llsn > 60 for driver in others), "it is trimmed")
        await cluster.start_node(victim)
        await cluster.until_all_run(100)
        expected = [record for record in (*before, *after) if record[0] >= first]
        found = {node: await cluster.read_all(node, first) for node in cluster.nodes}
        assert [records for records, _ in found.values()] == [expected] * 3
        assert len({frames for _, frames in found.values()}) == 1, "event time goes on as it did at the source"
        assert cluster.nodes[victim].node.replicas[STREAM].storage.first_llsn > 1

    with_cluster(tmp_path, test, segments=SMALL)


@pytest.mark.usefixtures("small_parts")
def test_a_sync_that_broke_off_goes_on_from_its_last_round(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await append_many(cluster, 0, 10)
        await cluster.until_all_run(10)
        victim = cluster.order.state.streams[STREAM].members[-1]
        await cluster.stop_node(victim)
        expected += await append_many(cluster, 10, 130)
        learner = await cluster.start_node(victim)
        await cluster.until(
            lambda: learner.node.replicas[STREAM].replica.durable_committed_end > 30, "some rounds are done"
        )
        await cluster.stop_node(victim)
        kept = learner.node.replicas[STREAM].replica.durable_committed_end
        learner = await cluster.start_node(victim)
        assert learner.node.replicas[STREAM].replica.committed_end >= kept
        await cluster.until_all_run(140)
        await same_everywhere(cluster, expected)

    with_cluster(tmp_path, test, segments=SMALL)
