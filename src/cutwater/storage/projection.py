"""Projection: a body, or several, cut down to the columns that a reader asked for, without decoding the others.

A body is one Arrow IPC record batch, whose schema is known by its number. Columns are picked before they are
decompressed, and no value is ever turned into a Python object.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.errors import Damaged, InvalidArgument
from cutwater.storage.checksum import Buffer

END_OF_STREAM_BYTES = 8
_INT = struct.Struct("<i")
_SHORT = struct.Struct("<H")
TIMESTAMP = pa.timestamp("us", "UTC")
"""Event time."""


def project(body: Buffer, schema: pa.Schema, columns: Sequence[str], compression: str | None = None) -> pa.Buffer:
    """The record batch with these columns only, in this order, as a body again."""
    batch = read_columns(body, schema, columns)
    return serialize(batch, compression) if compression else batch.serialize()


def serialize(batch: pa.RecordBatch, compression: str | None = None) -> pa.Buffer:
    """A record batch as a body: the IPC message without the schema before it and the end of stream after it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    stream, start = sink.getvalue(), batch.schema.serialize().size
    return stream.slice(start, stream.size - start - END_OF_STREAM_BYTES)


def merged(batches: Sequence[pa.RecordBatch]) -> list[Buffer]:
    """The rows of several batches as one body, in pieces: columns are put together, but not copied again."""
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    sink = _Pieces()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), batch.schema) as writer:
        writer.write_batch(batch)
        found = list(sink.found)
    # The schema comes first; after the batch, nothing yet.
    left = batch.schema.serialize().size
    while left > 0:
        left -= len(found.pop(0))
    assert left == 0, "a message begins with a piece of its own"
    return found


class _Pieces:
    """A file that keeps what is written to it as it comes: small things as bytes, columns as views of them."""

    closed = False

    def __init__(self) -> None:
        self.found: list[Buffer] = []

    def write(self, data: bytes | pa.Buffer) -> int:
        self.found.append(data if isinstance(data, bytes) else memoryview(data))
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def event_times(batch: pa.RecordBatch, event_time: str) -> tuple[int, int]:
    """The smallest and the largest event time of a batch, by the column with this name."""
    found = pc.min_max(timestamps(batch, event_time).view(pa.int64()))
    return found["min"].as_py(), found["max"].as_py()


def timestamps(batch: pa.RecordBatch, event_time: str) -> pa.Array:
    """A column of event time in microseconds UTC; what is finer is cut off."""
    column = batch.column(batch.schema.get_field_index(event_time))
    return column if column.type.equals(TIMESTAMP) else column.cast(TIMESTAMP, safe=False)


def no_values(count: int, kind: pa.DataType) -> pa.Array:
    """A column of nulls. ``pyarrow.nulls`` gives maps and lists something inside that is stored for every row, and with
    each slice as a whole."""
    inside = _nothing_inside(kind)
    if inside is None:
        return pa.nulls(count, kind)
    buffers = [pa.py_buffer(bytes((count + 7) // 8)), pa.py_buffer(bytes(4 * (count + 1)))]
    return pa.Array.from_buffers(kind, count, buffers, count, children=[inside])


@lru_cache(maxsize=64)
def _nothing_inside(kind: pa.DataType) -> pa.Array | None:
    if pa.types.is_map(kind):
        return pa.array([], pa.struct([kind.key_field, kind.item_field]))
    return pa.array([], kind.value_type) if pa.types.is_list(kind) else None


@lru_cache(maxsize=64)
def decode_schema(data: bytes) -> pa.Schema:
    """A schema in its IPC form, as it travels."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise InvalidArgument(f"this is no Arrow schema in its IPC form: {error}") from error


def projected_schema(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """The schema of what ``project`` returns."""
    return pa.schema([schema.field(i) for i in _indexes(schema, columns)], metadata=schema.metadata)


def read_columns(body: Buffer, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    """The chosen columns of a body. Buffers of uncompressed columns are not copied."""
    indexes = _indexes(schema, columns)
    message = pa.py_buffer(body)
    try:
        if len(indexes) == len(schema) or not is_compressed(body):
            return _sound(pa.ipc.read_record_batch(message, schema).select(list(columns)))
        options = pa.ipc.IpcReadOptions(included_fields=sorted(indexes))
        # A stream of one batch: the reader then decompresses only the fields that are wanted.
        stream = pa.BufferReader(pa.py_buffer(b"".join((schema.serialize(), memoryview(message)))))
        with pa.ipc.open_stream(stream, options=options) as reader:
            return _sound(reader.read_next_batch().select(list(columns)))
    except (pa.ArrowException, OSError, EOFError, StopIteration) as error:
        raise Damaged(f"the body is no record batch of its schema: {error}") from error


def is_compressed(body: Buffer) -> bool:
    """Whether the columns of a record batch have to be decompressed; those of others are where they are, and cost
    nothing until someone looks at them. Arrow does not tell, but the message says it in its metadata: a table within a
    table, each with a list of where its fields are. What is no record batch counts as compressed: its reader will
    say what is wrong with it."""
    try:
        message = 8 + _INT.unpack_from(body, 8)[0]
        field = message + _field(body, message, 2)
        batch = field + _INT.unpack_from(body, field)[0]
        return _field(body, batch, 3) != 0
    except struct.error:
        return True


def _field(data: Buffer, table: int, number: int) -> int:
    """Where a field of this table lies, counted from the table; 0 if it is not there."""
    fields = table - _INT.unpack_from(data, table)[0]
    place = 4 + 2 * number
    return _SHORT.unpack_from(data, fields + place)[0] if place < _SHORT.unpack_from(data, fields)[0] else 0


def _sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    """With a schema that is not its own, a batch may point to bytes that it does not have."""
    batch.validate()
    return batch


def _indexes(schema: pa.Schema, columns: Sequence[str]) -> list[int]:
    if not columns or len(set(columns)) != len(columns):
        raise InvalidArgument("a projection names at least one column, and each column once")
    indexes = [schema.get_field_index(column) for column in columns]
    for column, index in zip(columns, indexes, strict=True):
        if index < 0:
            known = ", ".join(schema.names)
            raise InvalidArgument(f"there is no single column {column!r}: choose among {known}")
    return indexes
