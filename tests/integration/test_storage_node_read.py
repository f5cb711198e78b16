"""Reading columns: the storage node sends those that were asked for, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from cutwater.errors import InvalidArgument
from cutwater.storage.checksum import crc32c
from cutwater.storage.frames import frames_in
from cutwater.storage.projection import projected_schema, serialize
from cutwater.types import GLSN, Batch, EventTime
from cutwater.wire import storage_api as api
from tests.integration.node_cluster import STREAM, Cluster, with_cluster

SCHEMA = pa.schema([("user", pa.string()), ("amount", pa.float64()), ("note", pa.large_binary())])
ROWS = 400


def rows(first: int) -> pa.RecordBatch:
    numbers = range(first, first + ROWS)
    columns = [[f"user {i}" for i in numbers], [i / 4 for i in numbers], [b"n" * 200 for _ in numbers]]
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


async def append(cluster: Cluster, body: bytes, count: int, schema: int) -> None:
    stream = cluster.order.state.streams[STREAM]
    batch = Batch(count, b"", crc32c(body), EventTime(1), EventTime(9), schema=schema)
    async with cluster.client(stream.members[0]) as connection:
        await connection.call(api.APPEND, api.AppendArguments(STREAM, stream.epoch, batch), body, timeout_ms=5_000)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_only_the_columns_that_were_asked_for_travel(tmp_path: Path, compression: str | None) -> None:
    async def test(cluster: Cluster) -> None:
        batches = [rows(0), rows(ROWS)]
        bodies = [serialize(batch, compression).to_pybytes() for batch in batches]
        for body in bodies:
            await append(cluster, body, ROWS, schema=1)
        await append(cluster, b"of another schema", 1, schema=2)
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
        assert bytes(frames[2].body) == b"of another schema"
        assert received.value.commits == whole.value.commits
        if compression is None:
            assert len(received.body) < len(whole.body) / 5
        assert b"n" * 100 not in bytes(received.body)

    with_cluster(tmp_path, test, nodes=1)


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
        assert cluster.nodes[1].node.counters.damage_met == 0

    with_cluster(tmp_path, test, nodes=1)
