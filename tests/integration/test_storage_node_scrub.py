"""Background scrub: damage that nobody reads is found and repaired, slowly, and what is left over is let be."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest
from msgspec import structs

from cutwater.admin.damage import find_damage
from cutwater.admin.verification import Leftover
from cutwater.admin.verification import verify as verify_all
from cutwater.core.requests import DescribeRequest, Description, ReplaceRequest, SealRequest, UnsealRequest
from cutwater.errors import Damaged
from cutwater.storagenode.repair.scrubbing import Scrubber, ScrubOptions
from cutwater.storagenode.repair.stuck_replicas import LOOKS_BEFORE_TOLD, StuckReplicas
from cutwater.types import StorageNodeId
from tests.integration.node_cluster import STREAM, Cluster, with_cluster
from tests.integration.test_storage_node_damage import RECORDS, SMALL, body, damage_entry, fill, flip
from tests.integration.test_storage_node_small_files import flip_index_point, flipped


def flip_context(directory: Path) -> None:
    flip(sorted(directory.glob("*.commits"))[0], 2048 + 64 + 5)


def flip_header(directory: Path) -> None:
    flip(sorted(directory.glob("*.entries"))[0], 20)


DAMAGE = {
    "an entry": lambda directory: damage_entry(directory, body(3)),
    "a commit context": flip_context,
    "an index point": flip_index_point,
    "the header of a file": flip_header,
    "the hard state": lambda directory: flipped(directory / "state"),
    "the manifest": lambda directory: flipped(directory / "manifest"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_that_nobody_reads_is_found_and_repaired(tmp_path: Path, what: str) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await fill(cluster)
        DAMAGE[what](cluster.replica_path(2))
        server = cluster.nodes[2]
        await server.scrubber.scrub()
        assert server.scrubber.progress.findings >= 1

        async def is_clean() -> bool:
            storage = server.node.replicas[STREAM].storage
            return await asyncio.to_thread(storage.verify) == []

        await cluster.until(is_clean, f"{what} is repaired")
        assert (await cluster.read_all(2))[0] == expected
        before = server.scrubber.progress.findings
        await server.scrubber.scrub()
        assert server.scrubber.progress.findings == before, "and is not found again"
        assert server.scrubber.progress.passes == 2
        assert server.damage == ()
        await cluster.stop_node(2)
        await cluster.start_node(2)
        await cluster.until_all_run(RECORDS)

    with_cluster(tmp_path, test, segments=SMALL)


def test_a_scrub_reads_everything_and_no_faster_than_it_may(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await fill(cluster)
        node = cluster.nodes[1].node
        size = sum(path.stat().st_size for path in cluster.replica_path(1).glob("*.entries"))
        scrubber = Scrubber(node, ScrubOptions(bytes_per_second=size))
        begun = time.monotonic()
        await scrubber.scrub()
        assert scrubber.progress.bytes >= RECORDS * len(body(0))
        assert time.monotonic() - begun >= scrubber.progress.bytes / size * 0.9
        assert scrubber.progress.replicas_done == scrubber.progress.replicas == 1

    with_cluster(tmp_path, test, nodes=1, segments=SMALL)


def test_it_is_on_by_default_and_can_be_turned_off(tmp_path: Path) -> None:
    assert ScrubOptions().bytes_per_second > 0

    async def test(cluster: Cluster) -> None:
        off = Scrubber(cluster.nodes[1].node, ScrubOptions(bytes_per_second=0))
        await asyncio.wait_for(off.scrub_for_ever(), 1)
        on = Scrubber(cluster.nodes[1].node, ScrubOptions(first_after_seconds=0.01, every_seconds=0.01))
        running = asyncio.create_task(on.scrub_for_ever())
        await cluster.until(lambda: on.progress.passes >= 2, "two passes")
        running.cancel()

    with_cluster(tmp_path, test, nodes=1, segments=SMALL)


async def described(cluster: Cluster) -> Description:
    """As the leader describes it, with the addresses that the nodes have here."""
    found = await cluster.order.ask(DescribeRequest())
    assert isinstance(found, Description)
    nodes = tuple(structs.replace(node, address=f"127.0.0.1:{cluster.ports[node.node]}") for node in found.nodes)
    return structs.replace(found, nodes=nodes)


def test_operators_read_what_is_damaged_and_what_is_missing(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await fill(cluster)
        for node in (1, 2):
            damage_entry(cluster.replica_path(node), body(5))
        await cluster.nodes[1].scrubber.scrub()
        await cluster.until(lambda: any(damage.trouble for damage in cluster.nodes[1].damage), "the repair fails")
        found = await find_damage(await described(cluster), timeout_ms=2_000)
        (lines,) = [damage.lines for damage in found if damage.node == 1]
        assert "LLSN 6 to 6 cannot be read" in lines[0]
        assert "no other storage node has an intact copy of LLSN 6 of log stream 1 now" in lines[0]

    with_cluster(tmp_path, test, nodes=2, segments=SMALL)


@pytest.mark.parametrize("is_opened", [False, True], ids=["it cannot be opened", "it cannot be trusted"])
def test_what_is_left_of_a_replaced_replica_alarms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_opened: bool
) -> None:
    """It is damaged in every way, and the node is started again: no report, log, scrub or check complains."""

    async def test(cluster: Cluster) -> None:
        await fill(cluster)
        old = cluster.order.state.streams[STREAM].members[1]
        (new,) = {1, 2, 3} - set(cluster.order.state.streams[STREAM].members)
        await cluster.order.ask(SealRequest(STREAM))
        await cluster.until(lambda: replace_done(cluster), "the stream is sealed")
        await cluster.order.ask(ReplaceRequest(STREAM, StorageNodeId(old), StorageNodeId(new)))
        await cluster.order.ask(UnsealRequest(STREAM))
        await cluster.until_all_run(RECORDS)
        await cluster.stop_node(old)
        damage_entry(cluster.replica_path(old), body(3))
        if is_opened:
            flipped(cluster.replica_path(old) / "state")
        else:
            for path in cluster.replica_path(old).glob("*.entries"):
                with path.open("r+b") as file:
                    file.write(bytes(2048))
        caplog.clear()
        server = await cluster.start_node(old)
        await cluster.until(lambda: STREAM in server.node.leftovers, "the leader says that it is left over")
        await cluster.until(lambda: not cluster.order.reports[StorageNodeId(old)].invalid, "it is not reported")
        assert (STREAM in server.node.replicas) is is_opened
        await server.scrubber.scrub()
        server.node.damage_met(STREAM, Damaged("somebody has read it"))
        assert server.node.counters.damage_met == 0
        assert server.stuck == {}
        status = await cluster.status(old)
        assert (status.unreadable, status.damage, status.leftovers) == ((), (), (STREAM,))
        description = await described(cluster)
        assert await find_damage(description, timeout_ms=2_000) == []
        verification = await verify_all(description, timeout_ms=5_000)
        assert verification.findings == ()
        assert verification.leftovers == (Leftover(StorageNodeId(old), STREAM),)
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        assert cluster.replica_path(old).exists(), "the data stays"

    with_cluster(tmp_path, test, nodes=3, replication=2, segments=SMALL)


async def replace_done(cluster: Cluster) -> bool:
    members = cluster.order.state.streams[STREAM].replicas
    states = [(await cluster.status(node)).replicas[0].state.name for node in members]
    return states == ["SEALED"] * len(members)


def test_the_only_copy_without_its_hard_state_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No peer can help: operators read the file, that no other copy exists and the ways out, and so does the log."""

    async def test(cluster: Cluster) -> None:
        await fill(cluster)
        await cluster.stop_node(1)
        state = cluster.replica_path(1) / "state"
        saved = state.read_bytes()
        flipped(state)
        server = await cluster.start_node(1)

        async def is_told() -> bool:
            (stream,) = (await described(cluster)).streams
            return "no other storage node holds a copy: it goes on when that is restored" in stream.next_step

        await cluster.until(is_told, "the leader says that there is no copy")
        (damage,) = await find_damage(await described(cluster), timeout_ms=2_000)
        assert f"it cannot be trusted ({state} is damaged" in damage.lines[0]
        assert f"up to LLSN {RECORDS}" in damage.lines[0]
        assert "restore the damaged one from a backup" in damage.lines[1]
        assert "cutwater topic delete t" in damage.lines[1]
        assert list(server.stuck) == [STREAM]
        driver = server.node.replicas[STREAM]
        driver.is_reopening = True
        assert server.stuck == {}, "a disk that cannot be written may come back"
        driver.is_reopening = False
        stuck = StuckReplicas(server.node, lambda: server.damage)
        for _ in range(2 * LOOKS_BEFORE_TOLD):
            stuck.look()
        (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert str(state) in told
        assert "no copy exists: stop this storage node, restore the damaged file from a backup" in told
        await cluster.stop_node(1)
        state.write_bytes(saved)
        await cluster.start_node(1)
        await cluster.until_all_run(RECORDS)

    with_cluster(tmp_path, test, nodes=1, segments=SMALL)


def test_verification_says_which_nodes_have_an_intact_copy(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await fill(cluster)
        damage_entry(cluster.replica_path(1), body(5))
        damage_entry(cluster.replica_path(2), body(7))
        found = (await verify_all(await described(cluster), timeout_ms=5_000)).findings
        assert [(f.node, f.first_llsn, f.last_llsn) for f in found] == [(1, 6, 6), (2, 8, 8)]
        assert [f.way_out.partition(" an intact")[0] for f in found] == ["storage node 2 has", "storage node 1 has"]

    with_cluster(tmp_path, test, nodes=2, segments=SMALL)
