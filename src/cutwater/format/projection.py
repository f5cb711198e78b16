"""Projection: reduces one or several bodies to the columns that a reader asked for, without decoding the others.

A body is one Arrow IPC record batch, whose schema is known by its number. Columns are picked before they are
decompressed, and no value ever becomes a Python object.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.errors import Damaged, InvalidArgument
from cutwater.format.checksum import Buffer
from cutwater.format.ipc_message import may_be_compressed

END_OF_STREAM_BYTES = 8
TIMESTAMP = pa.timestamp("us", "UTC")
"""The type of event time."""
HEADERS = pa.map_(pa.string(), pa.binary())
KEY_VALUE = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("timestamp", TIMESTAMP, nullable=False),
        pa.field("headers", HEADERS),
    ]
)
"""Schema of records of a topic without its own schema. All four columns are always present.

A column that holds only nulls costs four bytes per record. In return, every such batch of every log has the same form.
"""


def serialize(batch: pa.RecordBatch, compression: str | None = None) -> pa.Buffer:
    """Encode a record batch as a body: the IPC message, without the schema before it and the end of stream after it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    stream, start = sink.getvalue(), batch.schema.serialize().size
    return stream.slice(start, stream.size - start - END_OF_STREAM_BYTES)


def event_times(batch: pa.RecordBatch, event_time: str) -> tuple[int, int]:
    """Return the smallest and the largest event time of a batch, by the column with this name."""
    found = pc.min_max(timestamps(batch, event_time).view(pa.int64()))
    return found["min"].as_py(), found["max"].as_py()


def timestamps(batch: pa.RecordBatch, event_time: str) -> pa.Array:
    """Return a column of event time in microseconds UTC. Finer units are truncated."""
    column = batch.column(batch.schema.get_field_index(event_time))
    return column if column.type.equals(TIMESTAMP) else column.cast(TIMESTAMP, safe=False)


def no_values(count: int, kind: pa.DataType) -> pa.Array:
    """Return a column of nulls.

    ``pyarrow.nulls`` gives maps and lists content that is stored for every row, and as a whole with each slice.
    """
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
    """Decode a schema from its IPC form."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise InvalidArgument(f"this is no Arrow schema in its IPC form: {error}") from error


def projected_schema(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Return the schema with only these columns, in this order."""
    return pa.schema([schema.field(i) for i in _indexes(schema, columns)], metadata=schema.metadata)


def read_columns(body: Buffer, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    """Read the chosen columns of a body. Buffers of uncompressed columns are not copied (ADR 0030)."""
    indexes = _indexes(schema, columns)
    message = pa.py_buffer(body)
    try:
        if len(indexes) == len(schema) or not may_be_compressed(body):
            return _sound(pa.ipc.read_record_batch(message, schema).select(list(columns)))
        options = pa.ipc.IpcReadOptions(included_fields=sorted(indexes))
        # With a stream of one batch, the reader decompresses only the chosen fields.
        stream = pa.BufferReader(pa.py_buffer(b"".join((schema.serialize(), memoryview(message)))))
        with pa.ipc.open_stream(stream, options=options) as reader:
            return _sound(reader.read_next_batch().select(list(columns)))
    except (pa.ArrowException, OSError, EOFError, StopIteration) as error:
        raise Damaged(f"the body is no record batch of its schema: {error}") from error


def _sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Validate a batch, which may point to bytes that it does not have if it was read with a wrong schema.

    To write a column again, Arrow uses only the ends of most columns, but every value of others. Those are fully
    checked.
    """
    batch.validate(full=any(_is_followed(field.type) for field in batch.schema))
    return batch


@lru_cache(maxsize=256)
def _is_followed(kind: pa.DataType) -> bool:
    """Return whether Arrow uses every value as a reference when it writes a column of this type."""
    types = pa.types
    is_one = types.is_union(kind) or types.is_run_end_encoded(kind) or types.is_dictionary(kind)
    is_view = types.is_list_view(kind) or types.is_large_list_view(kind)
    return is_one or is_view or any(_is_followed(kind.field(i).type) for i in range(kind.num_fields))


def _indexes(schema: pa.Schema, columns: Sequence[str]) -> list[int]:
    if not columns or len(set(columns)) != len(columns):
        raise InvalidArgument("a projection names at least one column, and each column once")
    indexes = [schema.get_field_index(column) for column in columns]
    for column, index in zip(columns, indexes, strict=True):
        if index < 0:
            known = ", ".join(schema.names)
            raise InvalidArgument(f"there is no single column {column!r}: choose among {known}")
    return indexes
