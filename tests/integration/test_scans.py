"""Scans of whole log streams: from files by those who are on the machine, through a storage node by all others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.client.read import range_reader as client_ranges
from cutwater.client.read.range_reader import Ranges, Scanned
from cutwater.client.read.records import ColumnLayout
from cutwater.types import GLSN
from tests.integration.log_cluster import LogCluster, with_log

BATCHES, ROWS = 20, 50
VALUES = [b"%03d" % batch * 40 for batch in range(BATCHES) for _ in range(ROWS)]


async def fill(log: AsyncClient) -> None:
    await log.create_topic("t", replication=2)
    for batch in range(BATCHES):
        await log.append("t", VALUES[batch * ROWS : (batch + 1) * ROWS])


async def scan(cluster: LogCluster, columns: Sequence[str] | None = None) -> tuple[list[Scanned], list[bytes]]:
    """What a task gets of the only log stream, and the values in it."""
    ranges = await Ranges.connect(cluster.servers, timeout=10)
    try:
        view = await ranges.view(10)
        (info,) = view.catalog.streams
        layout = ColumnLayout(view.schema(view.topics["t"]), columns)
        pieces = ranges.pieces(info.stream, GLSN(1), info.last_glsn, layout.projection, patience=10)
        found = [piece async for piece in pieces]
    finally:
        await ranges.close()
    values: list[bytes] = []
    for piece in found:
        for number, block in enumerate(piece.blocks):
            following = piece.blocks[number + 1 :]
            counts = piece.runs[client_ranges.COUNT][block.first_run : following[0].first_run if following else None]
            rows = layout.rows(block.schema, block.body, sum(counts), 1, is_stored=piece.is_stored)
            assert columns is None or rows.schema.names == list(columns)
            values += rows.column("value").to_pylist()
    return found, values


@pytest.mark.parametrize("columns", [None, ["value"]])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_files_have_the_same_rows_as_storage_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str] | None, compression: str | None
) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        async with cluster.client(compression=compression) as writer:
            await fill(writer)
        monkeypatch.setattr(client_ranges, "SCAN_BYTES", 8 * 1024)
        near, values = await scan(cluster, columns)
        assert values == VALUES
        assert len(near) > 1
        assert all(piece.is_stored for piece in near)
        monkeypatch.setattr(client_ranges, "is_loopback", lambda host: False)
        far, values = await scan(cluster, columns)
        assert values == VALUES
        assert not any(piece.is_stored for piece in far)
        runs = [[run for piece in pieces for run in zip(*piece.runs[:6], strict=True)] for pieces in (near, far)]
        assert runs[0] == runs[1]

    with_log(tmp_path, test, nodes=2)


async def asked_first(cluster: LogCluster) -> int:
    """The storage node that a scan begins with, which is the last of the chain."""
    ranges = await Ranges.connect(cluster.servers, timeout=10)
    try:
        (info,) = (await ranges.view(10)).catalog.streams
        return info.chain[-1]
    finally:
        await ranges.close()


def test_what_is_damaged_or_gone_is_read_through_a_storage_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await fill(log)
        node = await asked_first(cluster)
        (path,) = (cluster.directory / f"volume{node}").rglob("*.entries")
        # A storage node has its file open, whatever that is called.
        kept = path.rename(path.with_name("kept"))
        found, values = await scan(cluster)
        assert values == VALUES
        assert not any(piece.is_stored for piece in found)
        kept.rename(path)
        at = path.read_bytes().index(VALUES[3 * ROWS])
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"?")
        monkeypatch.setattr(client_ranges, "SCAN_BYTES", 8 * 1024)
        found, values = await scan(cluster)
        assert values == VALUES
        # What lies before the damage was told in the same answer, and is right.
        is_stored = [piece.is_stored for piece in found]
        assert is_stored == sorted(is_stored, reverse=True)
        assert (is_stored[0], is_stored[-1]) == (True, False)
        assert cluster.nodes[node].node.counters.damage_met > 0
        await cluster.until(lambda: path.read_bytes()[at : at + 1] != b"?", "the damage is repaired")
        found, values = await scan(cluster)
        assert (values, all(piece.is_stored for piece in found)) == (VALUES, True)

    with_log(tmp_path, test, nodes=2)


def test_headers_are_told_once_by_a_replica_that_catches_up(tmp_path: Path) -> None:
    """It has commits beyond the position up to which it knows to be complete. It was found by storm seed 2000187 of the
    simulator, where a range of headers had some of them twice."""

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await fill(log)
        drivers = [driver for server in cluster.nodes.values() for driver in server.node.replicas.values()]
        for driver in drivers:
            driver.replica.complete_through = driver.storage.contexts[6].high_watermark
        ranges = await Ranges.connect(cluster.servers, timeout=10)
        try:
            (info,) = (await ranges.view(10)).catalog.streams
            found = asyncio.create_task(ranges.heads(info, GLSN(1), info.last_glsn, 10))
            await asyncio.sleep(0.2)
            for driver in drivers:
                driver.replica.complete_through = info.last_glsn
            heads = await found
        finally:
            await ranges.close()
        assert list(heads.columns[2]) == [ROWS] * BATCHES

    with_log(tmp_path, test, nodes=2)
