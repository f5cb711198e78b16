"""Converts the state of an operator between a table that people read and the chunks that operators work on.

A table has one row per key: ``key_group``, ``key_bytes`` (see ``pipeline/keyed_state/keys.py``), ``key`` as a struct of
the key's own columns, ``event_timers`` and ``processing_timers`` in milliseconds, and ``state_NAME`` for each state.
Broadcast state is one row without a key. All conversions work column by column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from zlib import crc32

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from msgspec import json

from cutwater.pipeline.keyed_state.chunks import BROADCAST_GROUP, TIMES, Chunk, hashes_of, merged, without_gone
from cutwater.pipeline.keyed_state.keys import key_of_bytes
from cutwater.savepoints.program import OperatorInfo
from cutwater.schema_text import parse_schema, parse_type

PREFIX: Final = "state_"
FUNCTION_KEY: Final = "key string"
"""The result of a key function may have any type, so it is shown as text; ``key_bytes`` is exact."""


def key_fields(operator: OperatorInfo) -> list[pa.Field]:
    return list(parse_schema(operator.key or FUNCTION_KEY))


def table_schema(operator: OperatorInfo) -> pa.Schema:
    return pa.schema(
        [
            pa.field("key_group", pa.int32()),
            pa.field("key_bytes", pa.binary()),
            pa.field("key", pa.struct(key_fields(operator))),
            pa.field("event_timers", TIMES),
            pa.field("processing_timers", TIMES),
            *(pa.field(f"{PREFIX}{state.name}", parse_type(state.stored)) for state in operator.states),
        ]
    )


# ------------------------------------------------------------------------------------------------- chunks to a table


def compacted(chunks: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Merge chunks, oldest first, into one batch with the newest row of each key. Keys that are gone are left out."""
    whole = Chunk(chunks[0])
    for newer in chunks[1:]:
        whole = merged(whole, Chunk(newer))
    return without_gone(whole).batch.replace_schema_metadata(None)


def to_table(chunk: pa.RecordBatch, operator: OperatorInfo, *, with_broadcast: bool = True) -> pa.RecordBatch:
    """Return the live rows of a chunk as a savepoint has them, by key group and key."""
    if not with_broadcast:
        chunk = chunk.filter(pc.not_equal(chunk.column("key_group"), BROADCAST_GROUP))
    schema = table_schema(operator)
    order = pc.sort_indices(
        pa.table({"group": chunk.column("key_group"), "key": chunk.column("key")}),
        sort_keys=[("group", "ascending"), ("key", "ascending")],
    )
    chunk = chunk.take(order)
    columns = [
        chunk.column("key_group"),
        chunk.column("key"),
        shown_keys(chunk.column("key"), operator),
        _all_timers(chunk.column("next_event_timer"), chunk.column("event_timers")),
        _all_timers(chunk.column("next_processing_timer"), chunk.column("processing_timers")),
        *(chunk.column(f"{PREFIX}{state.name}") for state in operator.states),
    ]
    return pa.RecordBatch.from_arrays(
        [as_type(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def _all_timers(first: pa.Array, every: pa.Array) -> pa.Array:
    has = first.is_valid()
    ends = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(has.cast(pa.int32()))])
    singles = pa.ListArray.from_arrays(ends, first.drop_null(), type=TIMES, mask=pc.invert(has))
    return pc.coalesce(every, singles)


def shown_keys(data: pa.Array, operator: OperatorInfo) -> pa.StructArray:
    """Return the keys as a struct of their columns. Broadcast state, which has no key, is null."""
    fields = key_fields(operator)
    keys = [key_of_bytes(own) if own else None for own in data.to_pylist()]
    if not operator.key:
        columns = [[None if key is None else _shown(key) for key in keys]]
    elif len(fields) == 1:
        columns = [keys]
    else:
        parts = [key if key is not None else (None,) * len(fields) for key in keys]
        columns = [[part[i] for part in parts] for i in range(len(fields))]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=pc.equal(pc.binary_length(data), 0))


def _shown(key: Any) -> str:
    return key if isinstance(key, str) else json.encode(key).decode()


# -------------------------------------------------------------------------------------------------- a table to chunks


def to_chunk(table: pa.RecordBatch, schema: pa.Schema, hashed_groups: int | None) -> pa.RecordBatch:
    """Convert rows with the states of ``schema`` to a chunk. Without ``hashed_groups``, groups are the table's own."""
    data = as_type(table.column("key_bytes"), pa.binary())
    hashes = hashes_of(map(crc32, data.to_pylist()), len(data))
    groups = as_type(table.column("key_group"), pa.int32())
    if hashed_groups is not None:
        is_broadcast = pc.equal(groups, BROADCAST_GROUP)
        groups = pc.if_else(is_broadcast, groups, pa.array((hashes % hashed_groups).astype("int32")))
    columns = {
        "key_group": groups,
        "key": data,
        "key_hash": pa.array(hashes),
        "gone": pa.repeat(pa.scalar(False), len(data)),
    }
    for name in ("event", "processing"):
        times = as_type(table.column(f"{name}_timers"), TIMES)
        lengths = pc.fill_null(pc.list_value_length(times), 0)
        times = pc.if_else(pc.greater(lengths, 0), times, pa.nulls(len(times), TIMES))
        columns[f"next_{name}_timer"] = pc.list_element(times, 0) if len(times) else pa.array([], pa.int64())
        columns[f"{name}_timers"] = pc.if_else(pc.greater(lengths, 1), times, pa.nulls(len(times), TIMES))
    for field in schema:
        if field.name.startswith(PREFIX):
            columns[field.name] = table.column(field.name)
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema)


def as_type(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Return a column as one array of exactly this type. Tools may name the inner fields of Parquet differently."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    return column if column.type.equals(kind) else column.cast(kind)
