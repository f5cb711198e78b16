"""Parts of a batch: the records of appends that share it, and how they become its body.

Most records are plain: a value, perhaps a key, no headers. This module assembles the body of plain records from their
bytes, because making an Arrow batch of a few records costs many times as much as the records. The body has the same
bytes that Arrow would write; Arrow writes all other bodies. ADR 0045 has the figures that justify this.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.client.convert.schemas import KEY_VALUE
from cutwater.format import plain_bodies
from cutwater.format.plain_bodies import layout, no_headers_bytes


class Single(Struct, frozen=True, gc=False):
    """One checked record of key and value; it becomes Arrow data together with its neighbours."""

    value: bytes
    key: bytes | None
    timestamp: int


_Buffer: TypeAlias = bytes | memoryview


class Values(Struct, frozen=True, gc=False):
    """Records that are only values, all with the same event time. ``data`` holds the values one after the other.
    ``offsets`` hold where each value begins and where the last one ends, as in Arrow. The first begins at ``start``,
    which is not zero if the values were cut out of a larger array."""

    offsets: _Buffer
    data: _Buffer
    start: int
    count: int
    timestamp: int


def values_of(values: pa.Array, timestamp: int, owned_bytes_max: int = 0) -> Values | None:
    """Return the values of an Arrow array of bytes without nulls. They share the array's memory, or are copied if they
    take at most ``owned_bytes_max``. Returns None if the array is empty or its buffers are too short; the offsets
    between the first and the last are not checked."""
    at, count = values.offset, len(values)
    _, offsets, data = values.buffers()
    found = memoryview(offsets or b"")[4 * at : 4 * (at + count + 1)]
    if not count or len(found) < 4 * (count + 1):
        return None
    numbers = found.cast("i")
    start, end = numbers[0], numbers[count]
    held = memoryview(data or b"")[start:end]
    if not 0 <= start <= end == start + len(held):
        return None
    if len(found) + len(held) <= owned_bytes_max:
        return Values(bytes(found), bytes(held), start, count, timestamp)
    return Values(found, held, start, count, timestamp)


def are_in_order(part: Values) -> bool:
    """Return whether no value ends before it begins."""
    return plain_bodies.are_in_order(part.offsets, part.count, part.start + len(part.data), part.start)


AppendRecords: TypeAlias = Single | Values | pa.RecordBatch


def owned(part: AppendRecords) -> AppendRecords:
    """Return the part in memory of its own. A part waits until its batch is sent, and a caller that appends NumPy,
    pandas or Arrow data may write to that memory meanwhile."""
    if isinstance(part, Single) or (isinstance(part, Values) and type(part.data) is bytes):
        return part
    if isinstance(part, Values):
        return Values(bytes(part.offsets), bytes(part.data), part.start, part.count, part.timestamp)
    return pa.RecordBatch.from_arrays([_copied(column) for column in part.columns], schema=part.schema)


def _copied(array: pa.Array) -> pa.Array:
    # For a single array, ``concat_arrays`` would return the same memory.
    return pa.concat_arrays([array, array.slice(0, 0)])


class JoinedBatch(NamedTuple):
    """One record batch, and the smallest and the largest event time in it, if known."""

    rows: pa.RecordBatch
    times: tuple[int, int] | None


def joined(parts: Sequence[AppendRecords]) -> JoinedBatch:
    """Return all parts as one record batch, in their order."""
    runs = [_of_run(list(run)) for _, run in groupby(parts, type)]
    if len(runs) == 1:
        return runs[0]
    return JoinedBatch(pa.concat_batches([run.rows for run in runs]), None)


def _of_run(run: list[AppendRecords]) -> JoinedBatch:
    """Convert parts of one kind together, which costs little more than converting one of them."""
    plain = plain_body(run)
    if plain is None:
        return JoinedBatch(run[0] if len(run) == 1 else pa.concat_batches(run), None)
    return JoinedBatch(pa.ipc.read_record_batch(pa.py_buffer(plain.body), KEY_VALUE), plain.times)


def _times_of_values(run: Sequence[Values]) -> list[bytes]:
    return [_NUMBER.pack(one.timestamp) * one.count for one in run]


def _first_and_last(run: Sequence[Values]) -> tuple[int, int]:
    stamps = [one.timestamp for one in run]
    return min(stamps), max(stamps)


def _values_column(run: Sequence[Values]) -> _Column:
    """Join the values of all parts, and shift the offsets of each part to the place of its data. The offsets of all
    parts are treated as one large integer, so that one addition shifts them all."""
    data = [one.data for one in run]
    if len(run) == 1 and not run[0].start:
        return run[0].offsets, data, len(data[0])
    *places, size = accumulate(map(len, data), initial=0)
    moved = int.from_bytes(b"".join([one.offsets[4:] for one in run]), "little") + _of_each(run, places)
    if any(starts := [one.start for one in run]):
        moved -= _of_each(run, starts)
    return bytes(4) + moved.to_bytes(4 * sum([one.count for one in run]), "little"), data, size


def _of_each(run: Sequence[Values], numbers: Sequence[int]) -> int:
    """Repeat the number of each part once for each of its values, and return the result as one large integer."""
    each = [_OFFSET.pack(number) * one.count for one, number in zip(run, numbers, strict=True)]
    return int.from_bytes(b"".join(each), "little")


# Bodies without Arrow.


class Plain(Struct, frozen=True):
    """The body of a batch of plain records, the number of records, and the smallest and the largest event time."""

    body: bytes
    records: int
    times: tuple[int, int]


def plain_body(parts: Sequence[AppendRecords]) -> Plain | None:
    """Return the body of these records, the same bytes that Arrow writes for them, or None if it needs Arrow."""
    kinds = set(map(type, parts))
    if kinds == {Single}:
        return _plain_singles(parts)
    return _plain_values(parts) if kinds == {Values} else None


def _plain_singles(singles: Sequence[Any]) -> Plain:
    count = len(singles)
    times = array("q", [single.timestamp for single in singles])
    keys = [single.key for single in singles]
    missing = keys.count(None)
    key_column = _column([key or b"" for key in keys]) if missing < count else _no_keys(count)
    values = _column([single.value for single in singles])
    body = _body(count, missing, _bits(keys, missing), key_column, values, [times])
    return Plain(body, count, (min(times), max(times)))


def _plain_values(run: Sequence[Any]) -> Plain:
    count = sum([one.count for one in run])
    bits = bytes((count + 7) // 8)
    body = _body(count, count, bits, _no_keys(count), _values_column(run), _times_of_values(run))
    return Plain(body, count, _first_and_last(run))


_Column: TypeAlias = "tuple[_Buffer | array[int], Sequence[_Buffer], int]"
"""The offsets (where each value begins, and where the last one ends); the values in pieces; and their total bytes."""


def _column(values: list[bytes]) -> _Column:
    offsets = array("i", accumulate(map(len, values), initial=0))
    return offsets, values, offsets[-1]


def _no_keys(count: int) -> _Column:
    return bytes(4 * count + 4), (), 0


def _bits(values: list[bytes | None], missing: int) -> bytes:
    """Return a bitmap of the values that are not None; empty if none is missing."""
    if not missing:
        return b""
    there = sum(1 << i for i, value in enumerate(values) if value is not None) if missing < len(values) else 0
    return there.to_bytes((len(values) + 7) // 8, "little")


_PADDING = [bytes(-size % 8) for size in range(8)]
_NUMBER = struct.Struct("<q")
_OFFSET = struct.Struct("<i")


def _body(
    count: int, missing: int, bits: bytes, keys: _Column, values: _Column, times: Sequence[bytes | array[int]]
) -> bytes:
    """Assemble a body. ``bits`` is the validity bitmap of the keys. Every buffer begins at a multiple of eight."""
    key_offsets, key_pieces, keys_bytes = keys
    offsets, pieces, values_bytes = values
    offsets_rest = _PADDING[(4 * count + 4) % 8]
    return b"".join(
        (
            layout(count, missing, keys_bytes, values_bytes).head,
            *(bits, _PADDING[len(bits) % 8], key_offsets, offsets_rest, *key_pieces, _PADDING[keys_bytes % 8]),
            *(offsets, offsets_rest, *pieces, _PADDING[values_bytes % 8]),
            *times,
            bytes(no_headers_bytes(count)),
        )
    )
