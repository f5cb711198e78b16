"""Damage with an intact copy left: each small file of a replica, flipped, torn or missing, while a peer is damaged.

Whatever is lost on one node, what the other one has is used: nothing that is committed is lost, no replica begins anew
although most of it is intact, and a node without a replica takes part when there are too few copies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cutwater.core.requests import TrimRequest
from cutwater.types import GLSN, ReplicaState
from tests.integration.node_cluster import STREAM, Cluster, with_cluster
from tests.integration.test_storage_node_damage import RECORDS, SMALL, body, damage_entry, fill, flip, until_right

Harm = Callable[[Path], None]


def flipped(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def torn(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def missing(path: Path) -> None:
    path.unlink()


HARMS = [flipped, torn, missing]
FILES = ["state", "manifest", "dedup"]


def last_commits(directory: Path) -> Path:
    return sorted(directory.glob("*.commits"))[-1]


def flip_last_context(directory: Path) -> None:
    path = last_commits(directory)
    flip(path, path.stat().st_size - 40)


def flip_both_marks(directory: Path) -> None:
    for sector in (1, 2):
        flip(last_commits(directory), sector * 512 + 8)


def tear_commits(directory: Path) -> None:
    path = last_commits(directory)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def no_commits(directory: Path) -> None:
    for path in directory.glob("*.commits"):
        path.unlink()


def flip_index_point(directory: Path) -> None:
    for path in directory.glob("*.entries"):
        flip(path, 2048 + 24 + 5)


OTHERS = [flip_last_context, flip_both_marks, tear_commits, no_commits, flip_index_point]


def whole(harm: Harm, name: str) -> Harm:
    return lambda directory: harm(directory / name)


CASES = [pytest.param(whole(harm, name), id=f"{name} {harm.__name__}") for name in FILES for harm in HARMS]
CASES += [pytest.param(harm, id=harm.__name__) for harm in OTHERS]


@pytest.mark.parametrize("harm", CASES)
def test_what_is_lost_on_one_node_does_not_keep_another_from_being_repaired(tmp_path: Path, harm: Harm) -> None:
    """A's entries are damaged in several places, B loses a small file: both are as before in the end, in place."""

    async def test(cluster: Cluster) -> None:
        expected = await fill(cluster)
        a, b = cluster.order.state.streams[STREAM].members
        trimmed = 0
        if "dedup" in harm.__qualname__ or "whole" in harm.__qualname__:
            # So that there is a checkpoint, and entries that it came from are gone.
            trimmed = 8
            await cluster.order.ask(TrimRequest("t", GLSN(expected[trimmed][0])))
            dedup = cluster.replica_path(b) / "dedup"
            await cluster.until(dedup.exists, "deduplication is saved")
            # A file that the trim removes must not go while its neighbours are damaged.
            first = [
                next(iter(sorted(cluster.replica_path(n).glob("*-00000000000000000001.entries"))), None) for n in (a, b)
            ]
            await cluster.until(lambda: not any(path and path.exists() for path in first), "the trim is carried out")
        for number in (9, 13, 28):
            damage_entry(cluster.replica_path(a), body(number))
        await cluster.stop_node(b)
        harm(cluster.replica_path(b))
        await cluster.start_node(b)
        await cluster.until_all_run(RECORDS)
        left = expected[trimmed:]
        members = cluster.order.state.streams[STREAM].members
        for node in members:
            await until_right_from(cluster, node, left)
        after = await cluster.append(b"after")
        await cluster.until_all_run(int(after.ack.llsn))
        if a in members:

            async def is_clean() -> bool:
                return await cluster.verify(a) == ()

            await cluster.until(is_clean, "A is repaired")
        aside = [path for n in (a, b) for path in cluster.replica_path(n).parent.iterdir() if "damaged" in path.name]
        assert aside == [], "no replica is set aside"

    with_cluster(tmp_path, test, nodes=2, segments=SMALL)


async def until_right_from(cluster: Cluster, node: int, expected: list[tuple[int, bytes]]) -> None:
    async def holds() -> bool:
        try:
            return (await cluster.read_all(node, expected[0][0]))[0][: len(expected)] == expected
        except Exception:
            return False

    await cluster.until(holds, f"storage node {node} serves everything again")


def test_a_replica_without_hard_state_never_reports_before_it_has_learned(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await fill(cluster)
        await cluster.stop_node(2)
        flipped(cluster.replica_path(2) / "state")
        node = await cluster.start_node(2)
        assert cluster.state(2) is ReplicaState.LEARNING
        driver = node.node.replicas[STREAM]
        assert driver.report() is None
        assert driver.replica.committed_end == RECORDS, "what it had committed is kept"
        await cluster.until_all_run(RECORDS)
        first = cluster.order.first_reports[node.node.node, node.node.incarnation]
        assert first.invalid == (STREAM,)
        assert first.uncommit_reports == ()
        assert node.node.counters.sync_received_bytes < 5_000, "nothing was copied that was there"

    with_cluster(tmp_path, test, segments=SMALL)


def test_the_fault_of_the_issue(tmp_path: Path) -> None:
    """One flipped byte in A's entries and one in B's hard state: every record can be read, and is on two disks."""

    async def test(cluster: Cluster) -> None:
        expected = await fill(cluster)
        a, b = cluster.order.state.streams[STREAM].members
        await cluster.stop_node(b)
        damage_entry(cluster.replica_path(a), body(0))
        flipped(cluster.replica_path(b) / "state")
        await cluster.start_node(b)
        await cluster.until_all_run(RECORDS)
        assert len(cluster.order.state.streams[STREAM].members) == 2
        for node in cluster.order.state.streams[STREAM].members:
            await until_right(cluster, node, expected)

    with_cluster(tmp_path, test, nodes=3, replication=2, segments=SMALL)
