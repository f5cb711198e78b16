"""The keyed state of one operator in one slice: what is live in memory, and what lies packed in chunks.

A later chunk replaces the keys that it has of earlier ones, and may say that a key is gone. A micro-batch turns only
those keys into Python objects that it touches, by a record or by a timer that comes due, and adds one small chunk. Then
chunks are merged until each is at least twice as large as the next, so there are few of them, and a row is rewritten as
often as state doubles, not once per micro-batch.

A chunk is the unit that a state store keeps. A savepoint is one compacted table per uid, which any tool opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any
from zlib import crc32

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.pipeline.chunks import (
    BROADCAST_GROUP,
    SORTED,
    TIMES,
    Chunk,
    chunk_schema,
    column_of,
    hashes_of,
    merged,
    order_of,
    without_expired,
    without_gone,
)
from cutwater.pipeline.context import KeyEntry, TimerQueue
from cutwater.pipeline.keys import key_bytes, key_of_bytes
from cutwater.pipeline.state import State


class KeyedStore:
    """Live entries by key, the packed chunks behind them, and which entries have changed."""

    def __init__(
        self,
        states: Sequence[State],
        groups: int | None,
        chunks: Iterable[pa.Table | pa.RecordBatch | Chunk] = (),
    ) -> None:
        self._states = list(states)
        self._schema = chunk_schema(states)
        self._groups = groups
        self.chunks: list[Chunk] = [
            chunk.checked(self._schema) if isinstance(chunk, Chunk) else Chunk.of_table(chunk, self._schema)
            for chunk in chunks
        ]
        self.live: dict[Any, KeyEntry] = {}
        self.dirty: set[KeyEntry] = set()
        self.broadcast = KeyEntry(None, b"", crc32(b""), [None] * len(self._states))
        for chunk in self.chunks:
            for entry in self._entries(chunk.broadcast_row(), [None]):
                self.broadcast.values[:] = entry.values

    def entry(self, key: Any) -> KeyEntry:
        """The entry of a key that is not live: a new one, after ``load`` has had its chance."""
        data = key_bytes(key)
        entry = KeyEntry(key, data, crc32(data), [None] * len(self._states))
        self.live[key] = entry
        return entry

    # ---------------------------------------------------------------------------------------------------------- loading

    def load(
        self, keys: Iterable[Any], event_time: int, processing_time: int, queues: tuple[TimerQueue, TimerQueue]
    ) -> None:
        """Make live what a micro-batch touches: these keys, and those with a timer that may come due in it.

        Chunks are searched from the newest on, so the first row that is found for a key is the valid one.
        """
        if not self.chunks:
            return
        limits = (event_time, processing_time)
        wanted = [key for key in dict.fromkeys(keys) if key not in self.live]
        data = list(map(key_bytes, wanted))
        hashes = hashes_of(map(crc32, data), len(data))
        for chunk in reversed(self.chunks):
            rows = chunk.find(hashes, data)
            own, left = (rows >= 0).nonzero()[0], (rows < 0).nonzero()[0]
            if not len(own):
                continue
            self._enliven(self._entries(chunk.rows(rows[own]), [wanted[i] for i in own.tolist()]), limits, queues)
            wanted, data, hashes = [wanted[i] for i in left.tolist()], [data[i] for i in left.tolist()], hashes[left]
        for index in reversed(range(len(self.chunks))):
            self._load_due(self.chunks[index], self.chunks[index + 1 :], limits, queues)

    def _load_due(
        self, chunk: Chunk, newer: Sequence[Chunk], limits: tuple[int, int], queues: tuple[TimerQueue, TimerQueue]
    ) -> None:
        due = chunk.due(*limits)
        if not len(due):
            return
        batch = chunk.rows(due)
        data = column_of(batch, "key")
        keys = list(map(key_of_bytes, data))
        hashes = batch.column("key_hash").to_numpy()
        replaced = [other.find(hashes, data).tolist() for other in newer]
        chosen = [
            i for i, key in enumerate(keys) if key not in self.live and all(rows[i] < 0 for rows in replaced)
        ]  # fmt: skip
        self._enliven(
            self._entries(batch.take(pa.array(chosen, pa.int64())), [keys[i] for i in chosen]), limits, queues
        )

    def load_all(self, queues: tuple[TimerQueue, TimerQueue]) -> None:
        """Make everything live, for a store that stays in memory."""
        for entry in self.entries():
            self.live[entry.key] = entry
            for queue, times in zip(queues, (entry.event_timers, entry.processing_timers), strict=True):
                for time in times or ():
                    queue.add(time, entry)
        self.chunks = []

    def _enliven(self, entries: list[KeyEntry], limits: tuple[int, int], queues: tuple[TimerQueue, TimerQueue]) -> None:
        """Timers that do not come due in this micro-batch stay with their keys: the queue need not know them."""
        live = self.live
        (event, processing), (event_limit, processing_limit) = queues, limits
        for entry in entries:
            live[entry.key] = entry
            if entry.event_timers:
                for time in entry.event_timers:
                    if time <= event_limit:
                        event.add(time, entry)
            if entry.processing_timers:
                for time in entry.processing_timers:
                    if time <= processing_limit:
                        processing.add(time, entry)

    # ---------------------------------------------------------------------------------------------------------- packing

    def checkpoint(self) -> Chunk | None:
        """What has changed since the last call, as a chunk; entries that hold nothing any more are forgotten."""
        if not self.dirty:
            return None
        chunk = self._packed(list(self.dirty))
        self.chunks.append(chunk)
        if pc.any(chunk.batch.column("gone")).as_py():
            self._forget_empty()
        self.dirty.clear()
        return chunk

    def settle(self) -> None:
        """As ``checkpoint``, where everything stays live: nothing is packed until someone asks for a snapshot."""
        self._forget_empty()

    def pack_live(self) -> None:
        """Pack everything that is live, in place of all chunks."""
        self.chunks = [self._packed([*self.entries(), *([] if self.broadcast.empty else [self.broadcast])])]

    def _forget_empty(self) -> None:
        for entry in self.dirty:
            if entry.empty and entry is not self.broadcast:
                self.live.pop(entry.key, None)
        self.dirty.clear()

    def merge(self, watermark: int) -> None:
        """Merge chunks until each is at least twice as large as the next."""
        chunks = self.chunks
        while len(chunks) > 1 and len(chunks[-2]) < 2 * len(chunks[-1]):
            self._merge_last(watermark)

    def compact(self, watermark: int) -> pa.Table:
        """One base in place of all chunks, without what is gone or has expired under a watermark."""
        if not self.chunks:
            self.chunks = [Chunk.of_table(self._schema.empty_table(), self._schema)]
        while len(self.chunks) > 1:
            self._merge_last(watermark)
        self.chunks[0] = self._without_expired(without_gone(self.chunks[0]), watermark)
        return pa.Table.from_batches([self.chunks[0].batch.replace_schema_metadata(None)])

    def _merge_last(self, watermark: int) -> None:
        newer = self.chunks.pop()
        self.chunks[-1] = merged(self.chunks[-1], newer)
        if len(self.chunks) == 1:
            self.chunks[0] = self._without_expired(without_gone(self.chunks[0]), watermark)

    def _without_expired(self, base: Chunk, watermark: int) -> Chunk:
        if all(state.ttl_ms is None for state in self._states):
            return base
        return without_expired(base, self._states, watermark)

    def entries(self) -> list[KeyEntry]:
        """Everything that is kept for keys, live or packed, by key group and key."""
        found: dict[bytes, KeyEntry] = {}
        for chunk in self.chunks:
            for entry in self._entries(chunk.batch, map(_key_or_none, column_of(chunk.batch, "key"))):
                found[entry.data] = entry
        found.update({entry.data: entry for entry in self.live.values()})
        return sorted(
            (entry for entry in found.values() if entry.data and not entry.empty),
            key=lambda entry: (self._group(entry), entry.data),
        )

    def _group(self, entry: KeyEntry) -> int:
        if not entry.data:
            return BROADCAST_GROUP
        return int(entry.key) if self._groups is None else entry.hash % self._groups

    def _packed(self, entries: Sequence[KeyEntry]) -> Chunk:
        entries = [entries[i] for i in order_of(hashes_of((entry.hash for entry in entries), len(entries)))]
        event = _Times([entry.event_timers for entry in entries])
        processing = _Times([entry.processing_timers for entry in entries])
        states = [state.packed([entry.values[slot] for entry in entries]) for slot, state in enumerate(self._states)]
        gone = pc.and_(event.first.is_null(), processing.first.is_null())
        for column in states:
            gone = pc.and_(gone, column.is_null())
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array(list(map(self._group, entries)), pa.int32()),
                pa.array([entry.data for entry in entries], pa.binary()),
                pa.array([entry.hash for entry in entries], pa.uint32()),
                gone,
                event.first,
                processing.first,
                event.every,
                processing.every,
                *states,
            ],
            schema=self._schema,
        )
        return Chunk(batch.replace_schema_metadata(SORTED))

    def _entries(self, batch: pa.RecordBatch, keys: Iterable[Any]) -> list[KeyEntry]:
        """Entries of rows, whose keys the caller knows."""
        columns = [state.unpacked(batch.column(f"state_{state.name}")) for state in self._states]
        values = map(list, zip(*columns, strict=True)) if columns else ([] for _ in repeat(None))
        stored = (column_of(batch, "key"), column_of(batch, "key_hash"))
        entries = list(map(KeyEntry, keys, *stored, values))
        for name in ("event", "processing"):
            firsts = batch.column(f"next_{name}_timer")
            if firsts.null_count < len(firsts):
                every = batch.column(f"{name}_timers")
                many = every.to_pylist() if every.null_count < len(every) else repeat(None)
                attribute = f"{name}_timers"
                for entry, first, times in zip(entries, firsts.to_pylist(), many, strict=False):
                    if first is not None:
                        setattr(entry, attribute, set(times) if times else {first})
        return entries


def _key_or_none(data: bytes) -> Any:
    return key_of_bytes(data) if data else None


class _Times:
    """The timers of many keys as columns: the first of each key, and all where there are several."""

    def __init__(self, times: Sequence[set[int] | None]) -> None:
        if any(times):
            self.first = pa.array([min(own) if own else None for own in times], pa.int64())
            self.every = pa.array([sorted(own) if own and len(own) > 1 else None for own in times], TIMES)
        else:
            self.first, self.every = pa.nulls(len(times), pa.int64()), pa.nulls(len(times), TIMES)
