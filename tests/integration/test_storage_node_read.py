"""Reading columns: the storage node sends those that were asked for, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest

from cutwater.client.read.range_reader import COUNT, FIRST_GLSN, Scanned, scanned
from cutwater.client.read.range_reader import SCHEMA as NUMBER
from cutwater.core.requests import TrimRequest
from cutwater.errors import InvalidArgument, Trimmed
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import frames_in
from cutwater.format.projection import projected_schema, serialize
from cutwater.protocol import storage_api as api
from cutwater.protocol.methods import Method
from cutwater.protocol.scan_api import HEADS, RUN_COLUMNS, SCAN, HeadsArguments, ScanArguments, unpack
from cutwater.storage.replica.commits import CommitLog
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.types import GLSN, LLSN, Batch, EventTime
from cutwater.wire.connection import Connection
from tests.integration.node_cluster import STREAM, Cluster, with_cluster

SCHEMA = pa.schema([("user", pa.string()), ("amount", pa.float64()), ("note", pa.large_binary())])
GROWN = SCHEMA.append(pa.field("more", pa.int64()))
OTHER = pa.RecordBatch.from_pylist([{"user": "of another schema"}], schema=GROWN).serialize().to_pybytes()
ROWS = 400


def rows(first: int) -> pa.RecordBatch:
    numbers = range(first, first + ROWS)
    columns = [[f"user {i}" for i in numbers], [i / 4 for i in numbers], [b"n" * 200 for _ in numbers]]
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


async def append(cluster: Cluster, body: bytes, count: int, schema: int) -> None:
    stream = cluster.order.state.streams[STREAM]
    batch = Batch(count, b"", crc32c(body), EventTime(1), EventTime(1), schema=schema)
    async with cluster.client(stream.members[0]) as connection:
        await connection.call(api.APPEND, api.AppendArguments(STREAM, stream.epoch, batch), body, timeout_ms=5_000)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_only_the_columns_that_were_asked_for_travel(tmp_path: Path, compression: str | None) -> None:
    async def test(cluster: Cluster) -> None:
        batches = [rows(0), rows(ROWS)]
        bodies = [serialize(batch, compression).to_pybytes() for batch in batches]
        for body in bodies:
            await append(cluster, body, ROWS, schema=1)
        await append(cluster, OTHER, 1, schema=2)
        wanted = api.Columns(SCHEMA.serialize().to_pybytes(), ("amount", "user"))
        async with cluster.client(1) as connection:
            asked = api.ReadArguments(STREAM, GLSN(1), 1 << 20, {1: wanted})
            received = await connection.call(api.READ, asked, timeout_ms=5_000)
            whole = await connection.call(api.READ, api.ReadArguments(STREAM, GLSN(1), 1 << 20), timeout_ms=5_000)
        frames = list(frames_in(bytes(received.body)))
        assert [frame.header.first_llsn for frame in frames] == [1, ROWS + 1, 2 * ROWS + 1]
        small = projected_schema(SCHEMA, wanted.columns)
        for frame, batch in zip(frames[:2], batches, strict=True):
            found = pa.ipc.read_record_batch(pa.py_buffer(frame.body), small)
            assert found.equals(batch.select(["amount", "user"]))
            assert frame.header.count == ROWS
        assert bytes(frames[2].body) == OTHER
        assert received.value.commits == whole.value.commits
        if compression is None:
            assert len(received.body) < len(whole.body) / 5
        assert b"n" * 100 not in bytes(received.body)

    with_cluster(tmp_path, test, nodes=1, schemas=[SCHEMA, GROWN])


async def scan(connection: Connection, asked: ScanArguments) -> tuple[Scanned, int, int]:
    received = await connection.call(SCAN, asked, timeout_ms=5_000)
    return scanned(asked, received.value, received.body), received.value.complete_through, len(received.body)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_scan_gives_the_rows_of_many_entries_with_the_wanted_columns(tmp_path: Path, compression: str | None) -> None:
    async def test(cluster: Cluster) -> None:
        batches = [rows(i * ROWS) for i in range(4)]
        for batch in batches[:3]:
            await append(cluster, serialize(batch, compression).to_pybytes(), ROWS, schema=1)
        await append(cluster, OTHER, 1, schema=2)
        await append(cluster, serialize(batches[3], compression).to_pybytes(), ROWS, schema=1)
        wanted = api.Columns(SCHEMA.serialize().to_pybytes(), ("amount", "user"))
        small = projected_schema(SCHEMA, wanted.columns)
        last = GLSN(4 * ROWS + 1)
        async with cluster.client(1) as connection:
            asked = ScanArguments(STREAM, GLSN(1), last, 1 << 20, {1: wanted})
            found, through, size = await scan(connection, asked)
            assert through == last
            assert list(found.runs[FIRST_GLSN]) == [1, ROWS + 1, 2 * ROWS + 1, 3 * ROWS + 1, 3 * ROWS + 2]
            assert list(found.runs[COUNT]) == [ROWS, ROWS, ROWS, 1, ROWS]
            assert list(found.runs[NUMBER]) == [1, 1, 1, 2, 1]
            # Neighbours are one block. What is compressed stays as it is, entry by entry.
            assert [block.first_run for block in found.blocks] == (
                [0, 3, 4] if compression is None else [0, 1, 2, 3, 4]
            )
            bodies = [block.body for block in found.blocks if block.schema == 1]
            table = pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(body), small) for body in bodies])
            assert table.equals(pa.Table.from_batches(batches).select(["amount", "user"]))
            assert bytes(found.blocks[-2].body) == OTHER
            whole, _, whole_size = await scan(connection, ScanArguments(STREAM, GLSN(1), last, 1 << 20))
            assert list(whole.runs[FIRST_GLSN]) == list(found.runs[FIRST_GLSN])
            assert [bytes(block.body) for block in whole.blocks[:1]] == [
                serialize(batches[0], compression).to_pybytes()
            ]
            if compression is None:
                assert size < whole_size / 5

    with_cluster(tmp_path, test, nodes=1, schemas=[SCHEMA, GROWN])


def test_a_scan_ends_where_it_is_told_or_where_an_answer_is_full(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        for i in range(4):
            await append(cluster, serialize(rows(i * ROWS)).to_pybytes(), ROWS, schema=1)
        middle = GLSN(2 * ROWS + 5)
        async with cluster.client(1) as connection:
            found, through, _ = await scan(connection, ScanArguments(STREAM, GLSN(ROWS), middle, 1 << 20))
            assert (list(found.runs[FIRST_GLSN]), through) == ([1, ROWS + 1, 2 * ROWS + 1], middle)
            full, through, _ = await scan(connection, ScanArguments(STREAM, GLSN(ROWS + 1), middle, 1))
            assert (list(full.runs[FIRST_GLSN]), through) == ([ROWS + 1], 2 * ROWS)
            above = GLSN(4 * ROWS + 1)
            nothing, through, _ = await scan(connection, ScanArguments(STREAM, above, GLSN(above + 9), 1 << 20))
            assert (len(nothing), through) == (0, above - 1)

    with_cluster(tmp_path, test, nodes=1, schemas=[SCHEMA, GROWN])


def test_columns_and_schemas_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await append(cluster, serialize(rows(0)).to_pybytes(), ROWS, schema=1)
        schema = SCHEMA.serialize().to_pybytes()
        other = pa.schema([(name, pa.string()) for name in "abcdef"]).serialize().to_pybytes()
        async with cluster.client(1) as connection:
            for wanted, text in (
                (api.Columns(schema, ("price",)), "there is no single column 'price': choose among user, amount, note"),
                (api.Columns(schema, ()), "names at least one column"),
                (api.Columns(b"nonsense", ("user",)), "no Arrow schema in its IPC form"),
                (api.Columns(other, ("f",)), "the batch at LLSN 1 is not of the schema that was given for number 1"),
            ):
                asked = api.ReadArguments(STREAM, GLSN(1), 1 << 20, {1: wanted})
                with pytest.raises(InvalidArgument, match=text):
                    await connection.call(api.READ, asked, timeout_ms=5_000)
                with pytest.raises(InvalidArgument, match=text):
                    await scan(connection, ScanArguments(STREAM, GLSN(1), GLSN(1), 1 << 20, {1: wanted}))
        assert cluster.nodes[1].node.counters.damage_met == 0

    with_cluster(tmp_path, test, nodes=1, schemas=[SCHEMA, GROWN])


@pytest.mark.parametrize("method", [SCAN, HEADS])
@pytest.mark.parametrize("is_left", [True, False])
def test_a_trim_may_remove_the_commits_that_are_just_being_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method[Any, Any], is_left: bool
) -> None:
    """Whoever asks gets what is left, or hears that it is trimmed."""
    is_searching, is_trimmed = Event(), Event()
    read_block = CommitLog.read_block

    def paused(log: CommitLog, first_llsn: LLSN, number: int) -> bytes:
        if not is_searching.is_set():
            is_searching.set()
            assert is_trimmed.wait(10)
        return read_block(log, first_llsn, number)

    async def test(cluster: Cluster) -> None:
        *_, last = [(await cluster.append(b"%d" % i)).ack.glsn for i in range(12)]
        storage, files = cluster.nodes[1].node.driver(STREAM).storage, cluster.replica_path(1)
        await cluster.until(
            lambda: storage.last_commit is not None and storage.last_commit.last_llsn == 12, "commits are in the files"
        )
        monkeypatch.setattr(CommitLog, "read_block", paused)
        asked: Any = ScanArguments(STREAM, last if is_left else GLSN(last - 9), last, 1 << 20)
        if method is HEADS:
            asked = HeadsArguments(STREAM, asked.from_glsn, last)
        async with cluster.client(1) as connection:
            try:
                answer = asyncio.ensure_future(connection.call(method, asked, timeout_ms=10_000))
                await cluster.until(is_searching.is_set, "it searches")
                await cluster.order.ask(TrimRequest("t", last))
                await cluster.until(lambda: len(list(files.glob("*.commits"))) == 1, "the trim arrives")
            finally:
                is_trimmed.set()
            if is_left:
                received = await answer
                assert received.value.complete_through >= last
                columns = unpack(received.body[: 8 * len(RUN_COLUMNS)] if method is SCAN else received.body, 1)[0]
                assert list(columns[:3]) == [12, last, 1]
                return
            with pytest.raises(Trimmed) as trimmed:
                await answer
            assert trimmed.value.first_left == last

    with_cluster(tmp_path, test, nodes=1, segments=SegmentOptions(commits_per_file=2))
