"""Readers get the columns that they ask for, and no others."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cutwater.errors import Damaged, InvalidArgument
from cutwater.format.checksum import crc32c
from cutwater.format.ipc_message import may_be_compressed
from cutwater.format.projection import projected_schema, read_columns, serialize

BATCH = pa.record_batch(
    {
        "key": pa.array([b"a", None, b"c"] * 100, pa.binary()),
        "value": pa.array([b"x" * i for i in range(300)], pa.binary()),
        "timestamp": pa.array(range(300), pa.timestamp("us", "UTC")),
        "headers": pa.array([[("h", b"1")], None, []] * 100, pa.map_(pa.string(), pa.binary())),
    }
)
CODECS = [None, "lz4", "zstd"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("columns", [["timestamp"], ["value", "key"], ["headers"], list(BATCH.schema.names)])
def test_the_chosen_columns_come_back(codec: str | None, columns: list[str]) -> None:
    body = serialize(BATCH, codec).to_pybytes()
    assert may_be_compressed(body) == (codec is not None)
    assert read_columns(body, BATCH.schema, columns).equals(BATCH.select(columns))
    for compression in CODECS:
        smaller = serialize(read_columns(memoryview(body), BATCH.schema, columns), compression)
        schema = projected_schema(BATCH.schema, columns)
        assert pa.ipc.read_record_batch(smaller, schema).equals(BATCH.select(columns))


def test_a_body_is_the_batch_without_its_schema() -> None:
    assert serialize(BATCH).to_pybytes() == BATCH.serialize().to_pybytes()
    assert read_columns(BATCH.serialize(), BATCH.schema, ["timestamp"]).serialize().size < 3000


def test_a_checksum_is_the_same_of_bytes_of_views_and_in_pieces() -> None:
    data = bytes(range(256)) * 1_000
    for view in (memoryview(data), memoryview(bytearray(data)), bytearray(data)):
        assert crc32c(view) == crc32c(data)
    assert crc32c(memoryview(data)[100_001:], crc32c(data[:100_001])) == crc32c(data)
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("columns", [[], ["nothing"], ["key", "key"]])
def test_columns_that_cannot_be(columns: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        read_columns(BATCH.serialize(), BATCH.schema, columns)


@pytest.mark.parametrize("columns", [["key"], list(BATCH.schema.names)])
@pytest.mark.parametrize("body", [b"", b"garbage" * 10, b"\xff\xff\xff\xff\x10\0\0\0" + bytes(50)])
def test_what_is_no_record_batch_is_damage(body: bytes, columns: list[str]) -> None:
    with pytest.raises(Damaged):
        read_columns(body, BATCH.schema, columns)


def _union(codes: list[int]) -> pa.DataType:
    return pa.dense_union([pa.field("a", pa.int64()), pa.field("b", pa.string())], type_codes=codes)


def _of_another_schema() -> dict[str, tuple[pa.Array, pa.Array, pa.DataType]]:
    """Two sound columns, and what a reader says that they are."""
    numbers = pa.array([1, 2, 3, 4], pa.int32())
    sizes = pa.array([2**31 - 1, -7, 10**9, 5], pa.int32()).buffers()[1]
    offsets = pa.array([0, 4, 8, 12, 16], pa.int32()).buffers()[1]
    kinds = pa.array([0, 0, 1, 1], pa.int8()), pa.array([0, 1, 0, 1], pa.int32())
    union = pa.UnionArray.from_dense(*kinds, [pa.array([1, 2]), pa.array(["x", "y"])], ["a", "b"], [0, 1])
    return {
        "union": (union, numbers, _union([5, 6])),
        "list view": (pa.Array.from_buffers(pa.binary(), 4, [None, offsets, sizes]), numbers, pa.list_view(pa.int32())),
    }


@pytest.mark.parametrize("what", _of_another_schema())
def test_a_schema_that_is_not_that_of_the_body_leads_nobody_outside_of_it(what: str) -> None:
    """Arrow follows what each value of such a column says when it writes the column again, and would crash."""
    first, second, kind = _of_another_schema()[what]
    body = pa.record_batch([first, second], names=["a", "b"]).serialize().to_pybytes()
    with pytest.raises(Damaged):
        read_columns(body, pa.schema([("x", kind)]), ["x"])
