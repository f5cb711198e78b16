"""Defines chunks: packed state as Arrow batches that are searched by binary search and merged without decoding each
row.

A row holds everything that is kept for one key: its states and its timers. Rows are sorted by ``key_hash``, the CRC-32
of the key, so the cost of finding a key hardly depends on the number of keys. Different keys may have the same hash:
the key itself decides. A chunk never changes; a new one replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Final, TypeAlias
from zlib import crc32

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument
from cutwater.pipeline.keyed_state.state import State

if TYPE_CHECKING:
    import numpy.typing as npt

    Indexes: TypeAlias = npt.NDArray[np.int64]
    Hashes: TypeAlias = npt.NDArray[np.uint32]
    Flags: TypeAlias = npt.NDArray[np.bool_]

BROADCAST_GROUP: Final = -1
"""The key group of broadcast state, which has no key. Every slice has a copy, and a savepoint takes that of the first
slice."""

CLOCKS: Final = ("event", "processing")
TIMES: Final = pa.list_(pa.int64())
_LEAST: Final = -(2**63)
SORTED: Final = {b"sorted_by": b"key_hash"}


def chunk_schema(states: Sequence[State]) -> pa.Schema:
    """Return the columns of a chunk. ``next_…_timer`` is the smallest timer of a key, so that due timers are found at
    once. ``…_timers`` are all its timers; null if there is only one."""
    return pa.schema(
        [
            pa.field("key_group", pa.int32()),
            pa.field("key", pa.binary()),
            pa.field("key_hash", pa.uint32()),
            pa.field("gone", pa.bool_()),
            pa.field("next_event_timer", pa.int64()),
            pa.field("next_processing_timer", pa.int64()),
            pa.field("event_timers", TIMES),
            pa.field("processing_timers", TIMES),
            *(pa.field(f"state_{state.name}", state.stored_type) for state in states),
        ]
    )


class Sought:
    """Keys to look for in chunks, in the order of their hashes, so that each chunk is read from front to back."""

    __slots__ = ("data", "hashes")

    def __init__(self, hashes: Hashes, data: pa.Array) -> None:
        self.hashes, self.data = hashes, data

    @classmethod
    def of(cls, data: Sequence[bytes]) -> tuple[Sought, list[int]]:
        """Return the keys to look for, and the order in which it has them."""
        hashes = hashes_of(map(crc32, data), len(data))
        order = order_of(hashes)
        places: list[int] = order.tolist()
        return cls(hashes[order], pa.array([data[i] for i in places], pa.binary())), places

    def pick(self, chosen: Flags) -> Sought:
        return Sought(self.hashes[chosen], self.data.filter(pa.array(chosen)))

    def __len__(self) -> int:
        return len(self.hashes)


class Chunk:
    """One batch of packed state. ``batch`` may be in a memory-mapped file: only the requested parts are read."""

    __slots__ = ("_hashes", "batch", "stored_as")

    def __init__(self, batch: pa.RecordBatch) -> None:
        if batch.schema.metadata != SORTED:
            hashes = batch.column("key_hash").to_numpy()
            batch = batch.take(pa.array(np.argsort(hashes, kind="stable"))).replace_schema_metadata(SORTED)
        self.batch = batch
        self.stored_as: object = None
        """Where a state store keeps the chunk, if it does."""
        self._hashes: Hashes = batch.column("key_hash").to_numpy()

    @classmethod
    def of_table(cls, table: pa.Table | pa.RecordBatch, schema: pa.Schema) -> Chunk:
        """Make a chunk from stored data, whose columns must be those of the operator."""
        if isinstance(table, pa.RecordBatch):
            return cls(table).checked(schema)
        batches = table.combine_chunks().to_batches()
        return cls(batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)).checked(schema)

    def checked(self, schema: pa.Schema) -> Chunk:
        """Return the chunk itself if its columns are those that the operator declares."""
        stored = self.batch.schema
        if not stored.equals(schema):
            raise InvalidArgument(
                f"stored state has the columns {stored.remove_metadata().to_string()}, the operator declares "
                f"{schema.to_string()}: a changed state needs a new name"
            )
        return self

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def rows(self, indexes: Indexes) -> pa.RecordBatch:
        return self.batch.take(pa.array(indexes))

    def sought(self, indexes: Indexes) -> Sought:
        """Return the keys of rows, to look for them in other chunks."""
        return Sought(self._hashes[indexes], self.batch.column("key").take(pa.array(indexes)))

    def find(self, sought: Sought) -> Indexes:
        """Return the row of each key, or −1."""
        found = np.full(len(sought), -1, np.int64)
        if not len(self) or not len(sought):
            return found
        at = np.searchsorted(self._hashes, sought.hashes)
        candidates = np.flatnonzero(self._hashes[np.minimum(at, len(self) - 1)] == sought.hashes)
        at = at[candidates]
        asked = sought.data if len(candidates) == len(sought) else sought.data.take(pa.array(candidates))
        stored = self.batch.column("key").take(pa.array(at))
        same = pc.equal(stored, asked).to_numpy(zero_copy_only=False)
        found[candidates[same]] = at[same]
        for place in np.flatnonzero(~same).tolist():
            found[candidates[place]] = self._next_with(int(at[place]), asked[place].as_py())
        return found

    def _next_with(self, row: int, key: bytes) -> int:
        """Return the row of a key that follows another key with the same hash."""
        column = self.batch.column("key")
        for other in range(row + 1, len(self)):
            if self._hashes[other] != self._hashes[row]:
                break
            if column[other].as_py() == key:
                return other
        return -1

    def due(self, event_time: int, processing_time: int, besides: Indexes) -> Indexes:
        """Return the rows that have a timer up to these times, except the rows ``besides``."""
        column = self.batch.column
        masks = (
            pc.less_equal(column("next_event_timer"), event_time),
            pc.less_equal(column("next_processing_timer"), processing_time),
        )
        due: Indexes = pc.indices_nonzero(pc.or_kleene(*masks)).to_numpy().astype(np.int64)
        known = np.zeros(len(self), bool)
        known[besides] = True
        return due[~known[due]]

    def broadcast_row(self) -> pa.RecordBatch:
        """Return broadcast state, which has no key: one row or none."""
        if not len(self):
            return self.batch
        found = self.find(Sought(np.array([0], np.uint32), pa.array([b""], pa.binary())))
        return self.rows(found[found >= 0])


def hashes_of(values: Iterable[int], count: int) -> Hashes:
    return np.fromiter(values, np.uint32, count)


def order_of(hashes: Hashes) -> Indexes:
    """Return the indexes that sort the hashes."""
    order: Indexes = np.argsort(hashes, kind="stable")
    return order


def groups_of(hashes: Hashes, data: pa.Array, groups: int) -> pa.Array:
    """Return the key group of each key. Empty bytes mean broadcast state, which has no key."""
    hashed = pa.array((hashes % np.uint32(groups)).astype(np.int32))
    return pc.if_else(pc.equal(pc.binary_length(data), 0), pa.scalar(BROADCAST_GROUP, pa.int32()), hashed)


def nowhere_valid(columns: Sequence[pa.Array]) -> pa.Array:
    """Return the rows in which all columns are null."""
    nowhere = columns[0].is_null()
    for column in columns[1:]:
        nowhere = pc.and_(nowhere, column.is_null())
    return nowhere


def merged(older: Chunk, newer: Chunk) -> Chunk:
    """Merge two chunks into one. If both have a key, the newer row counts."""
    replaced = older.find(Sought(newer._hashes, newer.batch.column("key")))
    kept = np.ones(len(older), bool)
    kept[replaced[replaced >= 0]] = False
    rows = np.concatenate([np.flatnonzero(kept), np.arange(len(older), len(older) + len(newer))])
    hashes = np.concatenate([older._hashes[kept], newer._hashes])
    whole = pa.concat_batches([older.batch, newer.batch])
    return Chunk(whole.take(pa.array(rows[order_of(hashes)])).replace_schema_metadata(SORTED))


def without_gone(chunk: Chunk) -> Chunk:
    """Remove the rows of keys that are gone. A chunk with no older chunk before it does not need them."""
    if not pc.any(chunk.batch.column("gone")).as_py():
        return chunk
    return Chunk(chunk.batch.filter(pc.invert(chunk.batch.column("gone"))))


def without_expired(chunk: Chunk, states: Sequence[State], watermark: int) -> Chunk:
    """Remove the keys that have no timer and whose values have all expired under a watermark."""
    if all(state.ttl_ms is None for state in states):
        return chunk
    column = chunk.batch.column
    kept = pc.or_(column("next_event_timer").is_valid(), column("next_processing_timer").is_valid())
    for state in states:
        kept = pc.or_(kept, pa.array(_alive(column(f"state_{state.name}"), state.ttl_ms, watermark)))
    return chunk if pc.all(kept).as_py() else Chunk(chunk.batch.filter(kept))


def _alive(column: pa.Array, ttl_ms: int | None, watermark: int) -> Flags:
    """Return the rows in which something is left. With a time to live, each value or element has a time stamp."""
    valid: Flags = column.is_valid().to_numpy(zero_copy_only=False)
    if ttl_ms is None or watermark - ttl_ms < _LEAST:
        return valid
    if pa.types.is_struct(column.type):
        stamps: Indexes = column.flatten()[0].fill_null(_LEAST).to_numpy()
        return valid & (stamps > watermark - ttl_ms)
    elements = column.items if pa.types.is_map(column.type) else column.values
    ends = column.offsets.to_numpy()
    stamps = elements.flatten()[0].to_numpy()[ends[0] : ends[-1]]
    found = np.zeros(len(column), bool)
    found[np.repeat(np.arange(len(column)), np.diff(ends))[stamps > watermark - ttl_ms]] = True
    return valid & found


# ------------------------------------------------------------------------------------------------------------- timers


def due_timers(batch: pa.RecordBatch, clock: str, limit: int) -> list[tuple[int, list[int]]]:
    """Return the timers up to a time: each time, with the rows that have it."""
    firsts, every = batch.column(f"next_{clock}_timer"), batch.column(f"{clock}_timers")
    if firsts.null_count == len(firsts):
        return []
    rows = pc.indices_nonzero(pc.and_(pc.less_equal(firsts, limit), every.is_null())).to_numpy().astype(np.int64)
    times = firsts.take(pa.array(rows)).to_numpy()
    if every.null_count < len(every):
        listed = every.flatten().to_numpy()
        due = listed <= limit
        rows = np.concatenate([rows, pc.list_parent_indices(every).to_numpy()[due]])
        times = np.concatenate([times, listed[due]])
    order = np.argsort(times, kind="stable")
    rows, times = rows[order], times[order]
    starts = np.flatnonzero(np.diff(times, prepend=times[:1] - 1))
    return [(int(times[start]), own.tolist()) for start, own in zip(starts, np.split(rows, starts[1:]), strict=False)]


def timers_of(batch: pa.RecordBatch, clock: str) -> Iterable[list[int] | None]:
    """Return the timers of each row, or None for a row without timers."""
    firsts, every = batch.column(f"next_{clock}_timer"), batch.column(f"{clock}_timers")
    if firsts.null_count == len(firsts):
        return repeat(None)
    if every.null_count == len(every):
        return [None if first is None else [first] for first in firsts.to_pylist()]
    pairs = zip(firsts.to_pylist(), every.to_pylist(), strict=True)
    return [times if times or first is None else [first] for first, times in pairs]


def timer_columns(timers: Sequence[list[int] | None]) -> tuple[pa.Array, pa.Array]:
    """Return two columns: the first timer of each key, and all its timers if there are several."""
    if not any(timers):
        return pa.nulls(len(timers), pa.int64()), pa.nulls(len(timers), TIMES)
    firsts = pa.array([own[0] if own else None for own in timers], pa.int64())
    several = [own if own and len(own) > 1 else None for own in timers]
    return firsts, pa.array(several, TIMES) if any(several) else pa.nulls(len(timers), TIMES)
