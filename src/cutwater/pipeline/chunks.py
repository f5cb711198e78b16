"""Chunks: packed state as Arrow batches that are found in by binary search and merged without looking at each row.

A row is all that is kept for one key: its states and its timers. Rows are sorted by ``key_hash``, the CRC-32 of the
key, so that what it costs to find a key hardly depends on how many there are. Different keys may have one hash: the key
itself decides. A chunk never changes; what replaces it is a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument
from cutwater.pipeline.state import State

# It comes with Spark. ``Pipeline.test``, which keeps state in memory, does without.
with suppress(ImportError):
    import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Indexes: TypeAlias = npt.NDArray[np.int64]
    Hashes: TypeAlias = npt.NDArray[np.uint32]
    Flags: TypeAlias = npt.NDArray[np.bool_]

BROADCAST_GROUP: Final = -1
"""The key group of broadcast state, which has no key: every slice has a copy, a savepoint takes that of the first."""

TIMES: Final = pa.list_(pa.int64())
_LEAST: Final = -(2**63)
SORTED: Final = {b"sorted_by": b"key_hash"}


def chunk_schema(states: Sequence[State]) -> pa.Schema:
    """Columns of a chunk. ``next_…_timer`` is a key's smallest timer, so that due ones are found at once; ``…_timers``
    are all of them, null where there is only that one.
    """
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


class Chunk:
    """One batch of packed state. ``batch`` may lie in a memory-mapped file: only what is asked for is read."""

    __slots__ = ("_hashes", "batch", "stored_as")

    def __init__(self, batch: pa.RecordBatch) -> None:
        if batch.schema.metadata != SORTED:
            hashes = batch.column("key_hash").to_numpy()
            batch = batch.take(pa.array(np.argsort(hashes, kind="stable"))).replace_schema_metadata(SORTED)
        self.batch = batch
        self.stored_as: object = None
        """Where a state store keeps it, if it does."""
        self._hashes: Hashes = batch.column("key_hash").to_numpy()

    @classmethod
    def of_table(cls, table: pa.Table | pa.RecordBatch, schema: pa.Schema) -> Chunk:
        """A chunk of what was stored before, whose columns must be those of the operator."""
        if isinstance(table, pa.RecordBatch):
            return cls(table).checked(schema)
        batches = table.combine_chunks().to_batches()
        return cls(batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)).checked(schema)

    def checked(self, schema: pa.Schema) -> Chunk:
        """Itself, if its columns are those that the operator declares."""
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

    def find(self, hashes: Hashes, keys: Sequence[bytes]) -> Indexes:
        """The row of each key, −1 where there is none."""
        found = np.full(len(keys), -1, np.int64)
        if not len(self) or not len(keys):
            return found
        at = np.searchsorted(self._hashes, hashes)
        candidates = np.flatnonzero(self._hashes[np.minimum(at, len(self) - 1)] == hashes)
        at = at[candidates]
        stored = self.batch.column("key").take(pa.array(at)).to_pylist()
        found[candidates] = at
        for index, row, data in zip(candidates.tolist(), at.tolist(), stored, strict=True):
            if data != keys[index]:
                found[index] = self._next_with(row, keys[index])
        return found

    def _next_with(self, row: int, key: bytes) -> int:
        """The row of a key behind another one with the same hash."""
        column = self.batch.column("key")
        for other in range(row + 1, len(self)):
            if self._hashes[other] != self._hashes[row]:
                break
            if column[other].as_py() == key:
                return other
        return -1

    def due(self, event_time: int, processing_time: int) -> Indexes:
        """The rows that have a timer up to these times."""
        column = self.batch.column
        masks = (
            pc.less_equal(column("next_event_timer"), event_time),
            pc.less_equal(column("next_processing_timer"), processing_time),
        )
        due: Indexes = pc.indices_nonzero(pc.or_kleene(*masks)).to_numpy().astype(np.int64)
        return due

    def broadcast_row(self) -> pa.RecordBatch:
        """What is kept for no key: one row or none."""
        if not len(self):
            return self.batch
        found = self.find(np.array([0], np.uint32), [b""])
        return self.rows(found[found >= 0])


def hashes_of(values: Iterable[int], count: int) -> Hashes:
    return np.fromiter(values, np.uint32, count)


def order_of(hashes: Hashes) -> list[int]:
    """The indexes of the hashes, in their order."""
    order: list[int] = np.argsort(hashes, kind="stable").tolist()
    return order


def merged(older: Chunk, newer: Chunk) -> Chunk:
    """One chunk in place of two; of a key that is in both, the row of the newer one."""
    hashes = newer._hashes
    replaced = older.find(hashes, newer.batch.column("key").to_pylist())
    kept = np.ones(len(older), bool)
    kept[replaced[replaced >= 0]] = False
    whole = pa.concat_batches([older.batch.filter(pa.array(kept)), newer.batch])
    return Chunk(whole.replace_schema_metadata(None))


def without_gone(chunk: Chunk) -> Chunk:
    """A chunk behind which there is no older one need not say what is gone."""
    if not pc.any(chunk.batch.column("gone")).as_py():
        return chunk
    return Chunk(chunk.batch.filter(pc.invert(chunk.batch.column("gone"))))


def without_expired(chunk: Chunk, states: Sequence[State], watermark: int) -> Chunk:
    """A chunk without the keys that have no timer, and of whose values none is left under a watermark."""
    column = chunk.batch.column
    kept = pc.or_(column("next_event_timer").is_valid(), column("next_processing_timer").is_valid())
    for state in states:
        kept = pc.or_(kept, pa.array(_alive(column(f"state_{state.name}"), state.ttl_ms, watermark)))
    return chunk if pc.all(kept).as_py() else Chunk(chunk.batch.filter(kept))


def _alive(column: pa.Array, ttl_ms: int | None, watermark: int) -> Flags:
    """In which rows something is left. With a time to live, a value or each element of a list or map has its stamp."""
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


def column_of(batch: pa.RecordBatch, name: str) -> list[Any]:
    values: list[Any] = batch.column(name).to_pylist()
    return values
