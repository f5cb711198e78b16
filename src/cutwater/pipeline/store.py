"""The keyed state of one operator in one slice: what is live in memory, and what lies packed in Arrow tables.

Packed state is a list of *chunks*: a base and, behind it, what each micro-batch changed. A row is all that is kept
for one key: its states and its timers. A later row replaces an earlier one of the same key, and may say that the key
is gone. A micro-batch turns only those keys into Python objects that it touches, by a record or by a timer that comes
due, and adds one small chunk. The others are passed over by vectorised filters. Now and then the chunks are compacted
into a new base.

A chunk is the unit that a state store keeps: write each under a number, and the base anew after a compaction. A
savepoint is the compacted table, one per uid, which any tool opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final
from zlib import crc32

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument
from cutwater.pipeline.context import KeyEntry, TimerQueue
from cutwater.pipeline.keys import key_bytes, key_of_bytes
from cutwater.pipeline.state import State
from cutwater.pipeline.values import decoded, encoded

BROADCAST_GROUP: Final = -1
"""The key group of broadcast state, which has no key: every slice has a copy, a savepoint takes that of the first."""

_CHUNKS_MAX: Final = 32
_TIMES: Final = pa.list_(pa.int64())


def chunk_schema(states: Sequence[State]) -> pa.Schema:
    """Columns of a chunk. ``key_hash`` is the CRC-32 of the key, by which touched keys are found. ``next_…`` is a key's
    smallest timer, so that due ones are found without looking inside.
    """
    return pa.schema(
        [
            pa.field("key_group", pa.int32()),
            pa.field("key", pa.binary()),
            pa.field("key_hash", pa.uint32()),
            pa.field("gone", pa.bool_()),
            pa.field("next_event_timer", pa.int64()),
            pa.field("next_processing_timer", pa.int64()),
            pa.field("event_timers", _TIMES),
            pa.field("processing_timers", _TIMES),
            *(pa.field(f"state_{state.name}", state.stored_type) for state in states),
        ]
    )


class KeyedStore:
    """Live entries by key, the packed chunks behind them, and which entries have changed."""

    def __init__(
        self, states: Sequence[State], group_of: Callable[[bytes], int], chunks: Iterable[pa.Table] = ()
    ) -> None:
        self._states = list(states)
        self._schema = chunk_schema(states)
        self._group_of = group_of
        self._chunks: list[pa.Table] = []
        self.live: dict[Any, KeyEntry] = {}
        self.dirty: set[KeyEntry] = set()
        self.broadcast = KeyEntry(None, b"", BROADCAST_GROUP, len(self._states))
        for chunk in chunks:
            self._add_chunk(chunk)

    @property
    def chunks(self) -> list[pa.Table]:
        return list(self._chunks)

    def entry(self, key: Any) -> KeyEntry:
        """The entry of a key that is not live: a new one, after ``load`` has had its chance."""
        data = key_bytes(key)
        entry = KeyEntry(key, data, self._group_of(data), len(self._states))
        self.live[key] = entry
        return entry

    def load(
        self, keys: Iterable[Any], event_time: int, processing_time: int, queues: tuple[TimerQueue, TimerQueue]
    ) -> None:
        """Make live what a micro-batch touches: these keys, and those with a timer that may come due in it.

        Chunks are searched from the newest on, so the first row that is found for a key is the valid one.
        """
        if not self._chunks:
            return
        missing = {key_bytes(key) for key in set(keys) if key not in self.live}
        newer: list[pa.Table] = []
        for chunk in reversed(self._chunks):
            touched = pc.is_in(chunk["key_hash"], value_set=pa.array(list(map(crc32, missing)), pa.uint32()))
            collision = False
            for entry in self._entries(chunk.filter(touched)):
                if entry.data in missing:
                    missing.remove(entry.data)
                    self._enliven(entry, queues)
                else:
                    collision = True
            due = _due(chunk, event_time, processing_time)
            if not collision:
                due = pc.and_not(due, touched)
            for entry in self._entries(_without_replaced(chunk.filter(due), newer)):
                if entry.key not in self.live:
                    self._enliven(entry, queues)
            newer.append(chunk)

    def _enliven(self, entry: KeyEntry, queues: tuple[TimerQueue, TimerQueue]) -> None:
        self.live[entry.key] = entry
        for time in entry.event_timers or ():
            queues[0].add(time, entry)
        for time in entry.processing_timers or ():
            queues[1].add(time, entry)

    def checkpoint(self) -> pa.Table | None:
        """What has changed since the last call, as a chunk; entries that hold nothing any more are forgotten."""
        changed = list(self.dirty)
        if not changed:
            return None
        chunk = self._packed(changed)
        self._chunks.append(chunk)
        if pc.any(chunk["gone"]).as_py():
            self._forget_empty()
        self.dirty.clear()
        return chunk

    def settle(self) -> None:
        """As ``checkpoint``, where everything stays live: nothing is packed until someone asks for a snapshot.

        What is packed already is then out of date, so that an entry has to stay, also an empty one, to hide it.
        """
        if self._chunks:
            self.dirty.clear()
        else:
            self._forget_empty()

    def pack_live(self) -> None:
        """Pack everything that is live, in place of all chunks."""
        self._chunks = [self._packed([*self.entries(), *([] if self.broadcast.empty else [self.broadcast])])]

    def _forget_empty(self) -> None:
        for entry in self.dirty:
            if entry.empty and entry is not self.broadcast:
                self.live.pop(entry.key, None)
        self.dirty.clear()

    @property
    def should_compact(self) -> bool:
        base = self._chunks[0].num_rows if self._chunks else 0
        return len(self._chunks) > 1 and (
            len(self._chunks) > _CHUNKS_MAX or 2 * sum(chunk.num_rows for chunk in self._chunks[1:]) > base
        )

    def compact(self, watermark: int) -> pa.Table:
        """One base in place of all chunks, without what is gone or has expired under a watermark."""
        kept: list[pa.Table] = []
        for index in reversed(range(len(self._chunks))):
            kept.append(_without_replaced(self._chunks[index], self._chunks[index + 1 :]))
        base = pa.concat_tables([self._schema.empty_table(), *kept])
        base = base.filter(pc.invert(base["gone"]))
        if any(state.ttl_ms is not None for state in self._states):
            base = self._packed([entry for entry in self._entries(base) if not self._expired(entry, watermark)])
        self._chunks = [base]
        return base

    def entries(self) -> list[KeyEntry]:
        """Everything that is kept for keys, live or packed, by key group and key."""
        live = {entry.data: entry for entry in self.live.values()}
        packed = {entry.data: entry for chunk in self._chunks for entry in self._entries(chunk)}
        merged = {**packed, **live}
        return sorted(
            (entry for entry in merged.values() if not entry.empty and entry.group != BROADCAST_GROUP),
            key=lambda entry: (entry.group, entry.data),
        )

    def _add_chunk(self, chunk: pa.Table) -> None:
        if not chunk.schema.equals(self._schema):
            raise InvalidArgument(
                f"stored state has the columns {chunk.schema.to_string()}, the operator declares "
                f"{self._schema.to_string()}: a changed state needs a new name"
            )
        self._chunks.append(chunk)
        for entry in self._entries(chunk.filter(pc.equal(chunk["key_group"], BROADCAST_GROUP))):
            self.broadcast.values[:] = entry.values

    def _packed(self, entries: Sequence[KeyEntry]) -> pa.Table:
        event = [sorted(entry.event_timers) if entry.event_timers else None for entry in entries]
        processing = [sorted(entry.processing_timers) if entry.processing_timers else None for entry in entries]
        return pa.Table.from_arrays(
            [
                pa.array([entry.group for entry in entries], pa.int32()),
                pa.array([entry.data for entry in entries], pa.binary()),
                pa.array([crc32(entry.data) for entry in entries], pa.uint32()),
                pa.array([entry.empty for entry in entries], pa.bool_()),
                pa.array([times and times[0] for times in event], pa.int64()),
                pa.array([times and times[0] for times in processing], pa.int64()),
                pa.array(event, _TIMES),
                pa.array(processing, _TIMES),
                *(
                    encoded(list(map(state.pack, [entry.values[slot] for entry in entries])), state.stored_type)
                    for slot, state in enumerate(self._states)
                ),
            ],
            schema=self._schema,
        )

    def _entries(self, chunk: pa.Table) -> list[KeyEntry]:
        columns = [
            list(map(state.unpack, decoded(chunk[f"state_{state.name}"]))) for state in self._states
        ]  # fmt: skip
        names = ("key_group", "key", "event_timers", "processing_timers")
        slots = len(columns)
        entries = []
        for group, data, event, processing, *values in zip(
            *(chunk[name].to_pylist() for name in names), *columns, strict=True
        ):
            entry = KeyEntry(None if group == BROADCAST_GROUP else key_of_bytes(data), data, group, slots)
            entry.values = values
            entry.event_timers = set(event) if event else None
            entry.processing_timers = set(processing) if processing else None
            entries.append(entry)
        return entries

    def _expired(self, entry: KeyEntry, watermark: int) -> bool:
        if entry.event_timers or entry.processing_timers:
            return False
        return all(
            state.plain(raw, watermark) is None for state, raw in zip(self._states, entry.values, strict=True)
        )  # fmt: skip


def _due(chunk: pa.Table, event_time: int, processing_time: int) -> pa.ChunkedArray:
    """Which rows have a timer up to these times."""
    return pc.or_(
        pc.fill_null(pc.less_equal(chunk["next_event_timer"], event_time), False),
        pc.fill_null(pc.less_equal(chunk["next_processing_timer"], processing_time), False),
    )


def _without_replaced(chunk: pa.Table, newer: Iterable[pa.Table]) -> pa.Table:
    """The rows of a chunk whose keys do not occur in newer ones."""
    for other in newer:
        if chunk.num_rows == 0:
            break
        chunk = chunk.filter(pc.invert(pc.is_in(chunk["key"], value_set=other["key"].combine_chunks())))
    return chunk
