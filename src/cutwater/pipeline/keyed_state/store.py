"""Holds the keyed state of one operator in one slice: live entries in memory, and packed entries in chunks.

A later chunk replaces the keys that it shares with earlier ones, and may mark a key as gone. A micro-batch makes Python
objects only of the keys that it touches, by a record or by a due timer, and adds one small chunk. Then chunks are
merged until each is at least twice as large as the next. So there are few chunks, and a row is rewritten when state
doubles, not in every micro-batch.

A chunk is the unit that a state store keeps. A savepoint is one compacted table per uid, which any tool can open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from zlib import crc32

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.pipeline.context import KeyEntry, TimerQueue
from cutwater.pipeline.keyed_state import chunks as packed
from cutwater.pipeline.keyed_state.chunks import BROADCAST_GROUP, CLOCKS, Chunk, Sought
from cutwater.pipeline.keyed_state.keys import key_bytes, key_of_bytes
from cutwater.pipeline.keyed_state.state import State

if TYPE_CHECKING:
    from cutwater.pipeline.keyed_state.chunks import Indexes

Limits: TypeAlias = tuple[int, int]
"""How far event time and processing time advance in a micro-batch."""

_hash: Final = attrgetter("hash")


class KeyedStore:
    """Live entries by key, the packed chunks behind them, and the set of changed entries."""

    def __init__(
        self,
        states: Sequence[State],
        groups: int | None,
        chunks: Iterable[pa.Table | pa.RecordBatch | Chunk] = (),
    ) -> None:
        self._states = list(states)
        self._schema = packed.chunk_schema(states)
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
        """Make a new entry for a key that is not live. Call ``load`` first."""
        (entry,) = self._make_new([key], [key_bytes(key)])
        return entry

    def _make_new(self, keys: Sequence[Any], data: Sequence[bytes]) -> list[KeyEntry]:
        nothing = [None] * len(self._states)
        made = list(map(KeyEntry, keys, data, map(crc32, data), map(list, repeat(nothing, len(data)))))
        self.live.update(zip(keys, made, strict=True))
        return made

    # ---------------------------------------------------------------------------------------------------------- loading

    def load(self, keys: Iterable[Any], limits: Limits, queues: tuple[TimerQueue, TimerQueue]) -> None:
        """Make live what a micro-batch touches: these keys, and the keys with a timer up to the limits. Chunks are
        searched from the newest on, so the first row that is found for a key is the valid one."""
        assert not self.live, "a store serves one micro-batch"
        wanted = list(keys)
        data = list(map(key_bytes, wanted))
        if not self.chunks:
            self._make_new(wanted, data)
            return
        sought, order = Sought.of(data)
        wanted = [wanted[i] for i in order]
        for index in reversed(range(len(self.chunks))):
            chunk = self.chunks[index]
            rows = chunk.find(sought)
            here = rows >= 0
            rows = rows[here]
            if len(rows):
                self._enliven(chunk.rows(rows), list(compress(wanted, here.tolist())), limits, queues)
                wanted, sought = list(compress(wanted, (~here).tolist())), sought.pick(~here)
            self._load_due(index, rows, limits, queues)
        self._make_new(wanted, sought.data.to_pylist())

    def _load_due(self, index: int, live: Indexes, limits: Limits, queues: tuple[TimerQueue, TimerQueue]) -> None:
        """Make live the due rows of a chunk, except those that are already live and those that newer chunks replace."""
        chunk = self.chunks[index]
        due = chunk.due(*limits, besides=live)
        for newer in self.chunks[index + 1 :]:
            if len(due):
                due = due[newer.find(chunk.sought(due)) < 0]
        if len(due):
            batch = chunk.rows(due)
            self._enliven(batch, list(map(key_of_bytes, batch.column("key").to_pylist())), limits, queues)

    def _enliven(
        self, batch: pa.RecordBatch, keys: Sequence[Any], limits: Limits, queues: tuple[TimerQueue, TimerQueue]
    ) -> None:
        """Make rows live. Only timers that come due in this micro-batch enter the queue."""
        entries = self._entries(batch, keys)
        self.live.update(zip(keys, entries, strict=True))
        for name, limit, queue in zip(CLOCKS, limits, queues, strict=True):
            for time, rows in packed.due_timers(batch, name, limit):
                queue.add_all(time, [entries[row] for row in rows])

    # ---------------------------------------------------------------------------------------------------------- packing

    def checkpoint(self) -> Chunk | None:
        """Pack the changes into a chunk. The next micro-batch begins with the chunks, in a new store."""
        if not self.dirty:
            return None
        # In the order in which entries were made, memory is read from front to back, and they are nearly sorted.
        changed = [entry for entry in (*self.live.values(), self.broadcast) if entry in self.dirty]
        chunk = self._packed(changed)
        self.chunks.append(chunk)
        self.dirty.clear()
        return chunk

    def merge(self, watermark: int) -> None:
        """Merge chunks until each is at least twice as large as the next."""
        chunks = self.chunks
        while len(chunks) > 1 and len(chunks[-2]) < 2 * len(chunks[-1]):
            self._merge_last(watermark)

    def compact(self, watermark: int) -> pa.Table:
        """Replace all chunks with one, without keys that are gone or have expired under a watermark."""
        if not self.chunks:
            self.chunks = [Chunk.of_table(self._schema.empty_table(), self._schema)]
        while len(self.chunks) > 1:
            self._merge_last(watermark)
        self._clean(watermark)
        return pa.Table.from_batches([self.chunks[0].batch.replace_schema_metadata(None)])

    def _merge_last(self, watermark: int) -> None:
        newer = self.chunks.pop()
        self.chunks[-1] = packed.merged(self.chunks[-1], newer)
        if len(self.chunks) == 1:
            self._clean(watermark)

    def _clean(self, watermark: int) -> None:
        self.chunks[0] = packed.without_expired(packed.without_gone(self.chunks[0]), self._states, watermark)

    def entries(self) -> list[KeyEntry]:
        """Return everything that is kept for keys, live or packed, by key group and key."""
        found: dict[bytes, KeyEntry] = {}
        for chunk in self.chunks:
            for entry in self._entries(chunk.batch, map(_key_or_none, chunk.batch.column("key").to_pylist())):
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
        hashes = packed.hashes_of(map(_hash, entries), len(entries))
        order = packed.order_of(hashes)
        entries = [entries[i] for i in order.tolist()]
        hashes = hashes[order]
        data = pa.array([entry.data for entry in entries], pa.binary())
        event = packed.timer_columns([entry.event_timers for entry in entries])
        processing = packed.timer_columns([entry.processing_timers for entry in entries])
        states = [state.packed([entry.values[slot] for entry in entries]) for slot, state in enumerate(self._states)]
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array(list(map(self._group, entries)), pa.int32())
                if self._groups is None
                else packed.groups_of(hashes, data, self._groups),
                data,
                pa.array(hashes),
                packed.nowhere_valid([event[0], processing[0], *states]),
                event[0],
                processing[0],
                event[1],
                processing[1],
                *states,
            ],
            schema=self._schema,
        )
        return Chunk(batch.replace_schema_metadata(packed.SORTED))

    def _entries(self, batch: pa.RecordBatch, keys: Iterable[Any]) -> list[KeyEntry]:
        columns = [state.unpacked(batch.column(f"state_{state.name}")) for state in self._states]
        values = map(list, zip(*columns, strict=True)) if columns else ([] for _ in repeat(None))
        stored = (batch.column("key").to_pylist(), batch.column("key_hash").to_pylist())
        return list(map(KeyEntry, keys, *stored, values, *(packed.timers_of(batch, name) for name in CLOCKS)))


def _key_or_none(data: bytes) -> Any:
    return key_of_bytes(data) if data else None
