"""Damage: a flipped byte in a real file is found, not served, and repaired from a peer that has an intact copy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cutwater.errors import CutwaterError, Damaged
from cutwater.storage.replica.segment_log import SegmentOptions
from tests.integration.node_cluster import STREAM, Cluster, with_cluster

SMALL = SegmentOptions(segment_bytes=8_000, index_interval_bytes=1_000, commits_per_file=8)
RECORDS = 30


def body(number: int) -> bytes:
    return (b"record %d " % number).ljust(500, b".")


def flip(path: Path, offset: int) -> None:
    """One bit of a file is wrong from now on."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def damage_entry(directory: Path, content: bytes) -> None:
    """Flip a bit of the entry with this content, wherever it is."""
    for path in sorted(directory.glob("*.entries")):
        at = path.read_bytes().find(content)
        if at >= 0:
            flip(path, at + 3)
            return
    raise AssertionError(f"{content!r} is nowhere in {directory}")


async def fill(cluster: Cluster) -> list[tuple[int, bytes]]:
    answers = [await cluster.append(body(i), time=i) for i in range(RECORDS)]
    await cluster.until_all_run(RECORDS)
    return [(int(answer.ack.glsn), body(i)) for i, answer in enumerate(answers)]


async def read_or_error(cluster: Cluster, node: int) -> list[tuple[int, bytes]] | CutwaterError:
    """Everything that the node serves, or the first error, which must be one to try again after."""
    try:
        return (await cluster.read_all(node))[0]
    except CutwaterError as error:
        if not error.retriable:
            raise
        return error


async def until_right(cluster: Cluster, node: int, expected: list[tuple[int, bytes]]) -> None:
    """Until the node serves everything again. Whatever it serves meanwhile is right."""

    async def holds() -> bool:
        found = await read_or_error(cluster, node)
        if isinstance(found, CutwaterError):
            return False
        assert found == expected[: len(found)]
        return found == expected

    await cluster.until(holds, "the damage is repaired")


@pytest.mark.parametrize("number", [0, 13, RECORDS - 1])
def test_a_damaged_entry_is_refused_and_then_repaired(tmp_path: Path, number: int) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await fill(cluster)
        damage_entry(cluster.replica_path(2), body(number))
        with pytest.raises(Damaged) as refused:
            await cluster.read(2, expected[number][0])
        assert refused.value.retriable
        await until_right(cluster, 2, expected)
        assert await cluster.verify(2) == ()
        assert (await cluster.read_all(2))[1] == (await cluster.read_all(1))[1]
        assert cluster.nodes[2].node.counters.entries_repaired == 1

    with_cluster(tmp_path, test, segments=SMALL)


def test_verify_has_everything_repaired_that_it_finds(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await fill(cluster)
        damaged = (3, 4, 5, 17, 29)
        for number in damaged:
            damage_entry(cluster.replica_path(3), body(number))
        assert len(await cluster.verify(3)) >= len(damaged)

        async def holds() -> bool:
            return await cluster.verify(3) == ()

        await cluster.until(holds, "verify finds nothing any more")
        assert (await cluster.read_all(3))[0] == expected

    with_cluster(tmp_path, test, segments=SMALL)


def test_a_source_that_meets_damage_repairs_itself_and_goes_on(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.append(b"first")
        await cluster.until_all_run(1)
        learner = cluster.order.state.streams[STREAM].members[-1]
        await cluster.stop_node(learner)
        answers = [await cluster.append(body(i)) for i in range(RECORDS)]
        sources = list(cluster.nodes)
        for number, node in enumerate(sources):
            damage_entry(cluster.replica_path(node), body(10 + number))
        await cluster.start_node(learner)
        await cluster.until_all_run(RECORDS + 1)
        expected = [(int(answer.ack.glsn), body(i)) for i, answer in enumerate(answers)]
        assert (await cluster.read_all(learner))[0][1:] == expected
        assert sum(cluster.nodes[node].node.counters.entries_repaired for node in sources) >= 1

    with_cluster(tmp_path, test, segments=SMALL)


def test_a_damaged_commit_context_is_repaired(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await fill(cluster)
        commits = sorted(cluster.replica_path(1).glob("*.commits"))
        flip(commits[0], 2048 + 64 + 5)
        assert any("commit context" in finding.what for finding in await cluster.verify(1))
        await until_right(cluster, 1, expected)

        async def holds() -> bool:
            return await cluster.verify(1) == ()

        await cluster.until(holds, "verify finds nothing any more")

    with_cluster(tmp_path, test, segments=SMALL)


def test_without_another_copy_it_stays_damaged_and_is_never_served(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await fill(cluster)
        damage_entry(cluster.replica_path(1), body(13))
        for _ in range(5):
            with pytest.raises(Damaged):
                await cluster.read(1, expected[13][0])
            await asyncio.sleep(0.02)
        # What is before and after it can be read.
        before = await cluster.read(1, 1)
        assert before == expected[: len(before)]
        assert (await cluster.read(1, expected[14][0]))[0] == expected[14]
        # It can still be written to, and restarted.
        last = await cluster.append(b"after")
        await cluster.stop_node(1)
        await cluster.start_node(1)
        await cluster.until_all_run(int(last.ack.llsn))
        with pytest.raises(Damaged):
            await cluster.read(1, expected[13][0])
        assert await cluster.read(1, int(last.ack.glsn)) == [(int(last.ack.glsn), b"after")]

    with_cluster(tmp_path, test, nodes=1, segments=SMALL)


def test_damage_that_a_restart_meets_is_repaired(tmp_path: Path) -> None:
    """Headers are read when a replica is opened, for deduplication; one that is damaged must not keep it closed."""

    async def test(cluster: Cluster) -> None:
        expected = await fill(cluster)
        await cluster.stop_node(3)
        for path in sorted(cluster.replica_path(3).glob("*.entries"))[:2]:
            # The first bytes of the second frame's header.
            at = path.read_bytes().find(b"CWFR", path.read_bytes().find(b"CWFR") + 4)
            flip(path, at + 20)
        await cluster.start_node(3)
        await cluster.until_all_run(RECORDS)
        await until_right(cluster, 3, expected)

    with_cluster(tmp_path, test, segments=SMALL)


def test_what_cannot_be_put_right_in_place_is_learned_anew(tmp_path: Path) -> None:
    """Both copies of a segment's header are gone, so nobody can tell any more what the file is."""

    async def test(cluster: Cluster) -> None:
        expected = await fill(cluster)
        await cluster.stop_node(2)
        with sorted(cluster.replica_path(2).glob("*.entries"))[0].open("r+b") as file:
            file.write(bytes(2048))
        await cluster.start_node(2)
        await until_right(cluster, 2, expected)
        await cluster.until_all_run(RECORDS)
        assert (await cluster.read_all(2))[1] == (await cluster.read_all(1))[1]

    with_cluster(tmp_path, test, segments=SMALL)


def test_files_that_cannot_be_opened_are_learned_anew_and_kept(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        expected = await fill(cluster)
        await cluster.stop_node(2)
        for path in cluster.replica_path(2).glob("*.entries"):
            path.write_bytes(b"garbage")
        await cluster.start_node(2)
        await cluster.until_all_run(RECORDS)
        assert (await cluster.read_all(2))[0] == expected
        assert (await cluster.read_all(2))[1] == (await cluster.read_all(1))[1]
        kept = [path.name for path in cluster.replica_path(2).parent.iterdir() if "damaged" in path.name]
        assert kept == ["lsid=1.damaged-2"]

    with_cluster(tmp_path, test, segments=SMALL)
