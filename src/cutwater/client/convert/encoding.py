"""Encodes a record batch to the stored bytes, and checks the limits before anything is sent.

The body of a batch is one Arrow IPC record batch message, without the schema before it; ``format.projection`` describes
the same form. Storage nodes never look into it, so what they need to know (number of records, event times, checksum)
is computed here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.client.append.plain_arrow import AppendRecords, joined, plain_body
from cutwater.client.convert.schemas import TopicSchema
from cutwater.client.errors import RecordTooLarge
from cutwater.errors import InvalidArgument
from cutwater.format.bodies import INFLATED_BYTES_FREE, INFLATED_BYTES_MAX, limit_problem
from cutwater.format.checksum import crc32c
from cutwater.format.ipc_message import read_message
from cutwater.format.projection import event_times, serialize
from cutwater.types import Batch, EventTime
from cutwater.wire.options import KIB, MIB, WireOptions

Compression = Literal["lz4", "zstd"]
COMPRESSIONS: tuple[Compression, ...] = ("lz4", "zstd")

TOGETHER_BYTES_MAX = MIB
ENVELOPE_BYTES = 64 * KIB
"""Bytes that a message may need besides the body, when it is sent and when it is read back with its commits."""


class Limits(Struct, frozen=True, kw_only=True):
    """Limits that are checked before anything is sent."""

    record_bytes_max: int = MIB
    batch_bytes_max: int = WireOptions().frame_bytes_max - ENVELOPE_BYTES

    @property
    def together_bytes_max(self) -> int:
        """The most bytes of small appends that share a batch. The size of the batch is known only when it is made: with
        empty values, it is five times as large as their counted size."""
        return min(TOGETHER_BYTES_MAX, self.batch_bytes_max // 8)


def check_compression(compression: str | None) -> Compression | None:
    for known in COMPRESSIONS:
        if compression == known:
            return known
    if compression is not None:
        raise InvalidArgument(f"compression is 'lz4', 'zstd' or None, not {compression!r}")
    return None


def encode(
    batch: pa.RecordBatch,
    schema: TopicSchema,
    now_us: int,
    *,
    limits: Limits,
    compression: Compression | None = None,
    declared: EventTime | None = None,
    times: tuple[int, int] | None = None,
) -> Batch:
    """Encode a batch. ``now_us`` is the event time in a topic that has no column for it. ``times``: the smallest and
    the largest event time, if they are known already."""
    body = (serialize(batch, compression) if compression else batch.serialize()).to_pybytes()
    if compression:
        _check_inflated(body)
    # The total size bounds the size of each record, so a batch that is small as a whole needs no closer look.
    if (compression or len(body) > limits.record_bytes_max) and batch.nbytes > limits.record_bytes_max:
        _check_records(batch, limits.record_bytes_max)
    if times is None:
        times = event_times(batch, schema.event_time) if schema.event_time else (now_us, now_us)
    return _batch(batch.num_rows, body, times, limits, declared, schema.number)


def encode_parts(
    parts: Sequence[AppendRecords],
    schema: TopicSchema,
    now_us: Callable[[], int],
    *,
    limits: Limits,
    compression: Compression | None,
) -> Batch:
    """Encode parts. Plain records were checked one by one when they were accepted, so they are not checked again."""
    if compression is None and (found := plain_body(parts)) is not None:
        return _batch(found.records, found.body, found.times, limits, None, schema.number)
    rows, times = joined(parts)
    return encode(rows, schema, now_us(), limits=limits, compression=compression, times=times)


def _batch(
    count: int, body: bytes, times: tuple[int, int], limits: Limits, declared: EventTime | None, schema: int
) -> Batch:
    if len(body) > limits.batch_bytes_max:
        raise RecordTooLarge(None, len(body), limits.batch_bytes_max)
    first, last = times
    return Batch(count, body, crc32c(body), EventTime(first), EventTime(last), declared=declared, schema=schema)


def _check_inflated(body: bytes) -> None:
    """Refuse a batch that is too large when decompressed: no storage node would take it."""
    message = read_message(body)
    if limit_problem(message, len(body)):
        limit = INFLATED_BYTES_FREE if message.inflated_bytes <= INFLATED_BYTES_MAX else INFLATED_BYTES_MAX
        raise RecordTooLarge(None, message.inflated_bytes, limit)


def _check_records(batch: pa.RecordBatch, limit: int) -> None:
    sizes = sum_of([row_bytes(column) for column in batch.columns], batch.num_rows)
    largest = pc.max(sizes).as_py()
    if largest > limit:
        raise RecordTooLarge(int(pc.index(sizes, largest).as_py()), int(largest), limit)


def value_bytes_max(values: pa.Array) -> int:
    """Return the length of the longest value of a column of bytes or text."""
    return int(pc.max(pc.binary_length(values)).as_py())


def row_bytes(column: pa.Array) -> pa.Array:
    """Return the bytes of the value in each row, without Arrow's overhead."""
    kind = column.type
    if pa.types.is_struct(kind):
        return sum_of([row_bytes(field) for field in column.flatten()], len(column))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        children = column.values
        ends = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(row_bytes(children)).cast(pa.int64())])
        offsets = column.offsets
        at = ends.take(offsets)
        return pc.subtract(at.slice(1), at.slice(0, len(column)))
    if pa.types.is_fixed_size_list(kind):
        each = row_bytes(column.values.slice(column.offset * kind.list_size, len(column) * kind.list_size))
        total = pc.sum(each).as_py() or 0
        return pa.repeat(pa.scalar(total // max(len(column), 1), pa.int64()), len(column))
    try:
        return pa.repeat(pa.scalar((kind.bit_width + 7) // 8, pa.int64()), len(column))
    except ValueError:
        return pc.fill_null(pc.binary_length(column), 0).cast(pa.int64())


def sum_of(sizes: list[pa.Array], count: int) -> pa.Array:
    total = pa.repeat(pa.scalar(0, pa.int64()), count)
    for one in sizes:
        total = pc.add(total, one)
    return total
