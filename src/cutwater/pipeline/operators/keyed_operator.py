"""Implements one keyed operator in one slice: its input is its records of a micro-batch and the ticks, its output is
what it emits.

Records and due timers are processed in the order of their positions. The hot path is the loop in ``KeyedOperator.run``:
one comparison decides whether a timer is due before the record, one look-up finds the key, then the user's function
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, Final

from msgspec import json

from cutwater.pipeline.clocks.clock_steps import NEVER, Ticks, is_end
from cutwater.pipeline.clocks.watermarks import WAYS
from cutwater.pipeline.context import DEAD_LETTERS, NO_KEY, Context, KeyEntry, TimerQueue, taken_out
from cutwater.pipeline.failures import stopped
from cutwater.pipeline.functions import BatchFunction
from cutwater.pipeline.keyed_state.keys import MAX_PARALLELISM, key_bytes
from cutwater.pipeline.keyed_state.state import BroadcastHolder, BroadcastState, State
from cutwater.pipeline.keyed_state.store import KeyedStore
from cutwater.pipeline.position import FIRST, firing, glsn_of, number
from cutwater.pipeline.records import Entries, Records, arrivals
from cutwater.pipeline.rows import Row, RowType

DEAD_LETTER_ROWS: Final = RowType.of(
    "uid string, source_glsn bigint, key string, time bigint, timer boolean, record string, error string"
)

_UNREADABLE: Final = object()


@dataclass(slots=True)
class OperatorSpec:
    """An operator, independent of where it runs. ``keys`` has one reader per input; None is a broadcast input."""

    pipeline: str
    uid: str
    order: int
    function: Any
    methods: Sequence[str]
    keys: Sequence[Callable[[Row], Any] | None]
    states: Sequence[State]
    outputs: dict[str, Callable[[Any], Row]]
    sources: frozenset[str]
    dead_letters: bool = False
    max_parallelism: int = MAX_PARALLELISM
    partitions: int = 0
    """The number of partitions of a ``process_partition``; 0 for keyed operators."""
    input_rows: Sequence[RowType | None] = field(default_factory=tuple)
    output_rows: RowType | None = None
    has_clock: bool = True
    """Whether one of the sources has a watermark."""

    @property
    def groups(self) -> int:
        """The number of groups that the operator's keys are divided into. A partition is its own group."""
        return self.partitions or self.max_parallelism

    @property
    def hashed_groups(self) -> int | None:
        """The number of key groups, chosen by hash; None if a key is the number of its group (partitions, batches)."""
        return None if self.partitions or isinstance(self.function, BatchFunction) else self.max_parallelism


class KeyedOperator:
    """Runs a spec on one slice. ``first``: this is the slice whose broadcast output counts."""

    def __init__(self, spec: OperatorSpec, store: KeyedStore, first: bool = True) -> None:
        self.spec = spec
        self.store = store
        self.dropped_late = 0
        self._firings = 0
        self.late_sent = 0
        self._first = first
        self._context = Context(spec.outputs)
        if not spec.has_clock:
            self._context._no_event_timers = (
                f"none of the sources of {spec.uid} ({', '.join(sorted(spec.sources))}) has a clock, so it would never "
                f"fire: give one of them {WAYS}; or use ctx.timers.at_processing_time"
            )
        self._events = self._context._event_queue
        self._processing = self._context._processing_queue
        self._broadcast = BroadcastHolder(self._context, store.broadcast.values)
        self.function = copy(spec.function)
        """The user's function as this operator uses it."""
        for slot, state in enumerate(spec.states):
            holder: Any = self._broadcast if isinstance(state, BroadcastState) else self._context
            self.function.__dict__[state.name] = state.bind(holder, slot)
        self._calls: list[Callable[[Row, Context], Any]] = [getattr(self.function, name) for name in spec.methods]
        self._read_keys: Sequence[Callable[[Row], Any] | None] = spec.keys
        self._out: dict[str, Records] = {}

    def run(self, inputs: Sequence[Records], ticks: Ticks) -> dict[str, Records]:
        """Process a micro-batch. Returns the emitted records by tag, each in the order of positions."""
        return self._run_through(inputs, self._begin(ticks, self._keys(inputs)))

    def _run_through(self, inputs: Sequence[Records], entries: Sequence[Entries]) -> dict[str, Records]:
        context, events, processing = self._context, self._events, self._processing
        dirty, undo, emitted = self.store.dirty, context._undo, context._emitted
        calls = self._calls
        for source, when, path, time, row, entry in arrivals(inputs, entries):
            if when > events.due or when > processing.due:
                self._fire_until(when)
            if entry is None and self._read_keys[source] is None:
                self._process_broadcast(source, when, path, time, row)
                continue
            context._moment = when
            context.timestamp = time
            try:
                if entry is None:
                    entry = self._entry(source, row)  # noqa: PLW2901 - the record's own, which was not known before
                context.key = entry.key
                context._entry = entry
                context._values = entry.values
                result = calls[source](row, context)
                if result is not None:
                    context._emit(result)
            except Exception as error:
                self._failed(error, when, path, row=row)
                continue
            if undo:
                dirty.add(entry)
                undo.clear()
            if emitted:
                self._hand_on(when, path)
        self._fire_until(NEVER)
        return self._out

    def _begin(self, ticks: Ticks, keys: Sequence[Sequence[Any] | None]) -> list[Entries]:
        """Load these keys of each input, and the keys with a timer that may come due. Returns the keys' entries."""
        self._out = {tag: Records() for tag in self.spec.outputs}
        self._events.steps = ticks.watermarks[self.spec.sources]
        self._processing.steps = ticks.times
        self._firings = ticks.firings
        queues = (self._events, self._processing)
        limits = (self._events.steps.last, ticks.times.last)
        self._events.horizon, self._processing.horizon = limits
        touched = dict.fromkeys(chain.from_iterable(own for own in keys if own is not None))
        touched.pop(_UNREADABLE, None)
        self.store.load(touched, limits, queues)
        for queue in queues:
            queue.look_ahead(0)
        found = self.store.live.get
        return [repeat(None) if own is None else list(map(found, own)) for own in keys]

    @property
    def left_timers(self) -> int:
        """How many timers stayed at the end of the input because their keys had reached the limit."""
        return self._events.left

    def _keys(self, inputs: Sequence[Records]) -> list[list[Any] | None]:
        """Return the key of each record of each input with keys, so that the store can load them all at once."""
        return [
            None if read_key is None else _keys_of(read_key, records, is_typed=rows is not None)
            for read_key, records, rows in zip(self._read_keys, inputs, self.spec.input_rows, strict=True)
        ]

    def _entry(self, source: int, row: Row) -> KeyEntry:
        """Return the entry of a record whose key was not read ahead: it can be read only now, or fails."""
        context, read_key = self._context, self._read_keys[source]
        assert read_key is not None, "what has no key is broadcast"
        context.key, context._entry, context._values = None, None, NO_KEY
        key = read_key(row)
        return self.store.live.get(key) or self.store.entry(key)

    def _process_broadcast(self, source: int, when: int, path: bytes, time: int, row: Row) -> None:
        context = self._context
        context._moment, context.timestamp = when, time
        context.key, context._entry, context._values = None, None, NO_KEY
        self._broadcast.open_for_writing(True)
        try:
            result = self._calls[source](row, context)
            if result is not None:
                context._emit(result)
        except Exception as error:
            self._failed(error, when, path, row=row, heard=self._first)
            return
        finally:
            self._broadcast.open_for_writing(False)
        if context._undo:
            self.store.dirty.add(self.store.broadcast)
            context._undo.clear()
        if self._first:
            self._hand_on(when, path)
        context._emitted.clear()

    def _hand_on(self, when: int, path: bytes) -> None:
        emitted = self._context._emitted
        if len(emitted) == 1:
            tag, time, row = emitted.pop()
            self._out[tag].append(when, path + FIRST, time, row)
            return
        for index, (tag, time, row) in enumerate(emitted):
            self._out[tag].append(when, path + number(index), time, row)
        emitted.clear()

    # ------------------------------------------------------------------------------------------------------- timers

    def _fire_until(self, when: int) -> None:
        while True:
            due = min(self._events.due, self._processing.due)
            if due >= when:
                return
            if due == self._events.due:
                self._advance(self._events, due, self.function.on_timer)
            else:
                self._advance(self._processing, due, self.function.on_processing_timer)

    def _advance(self, queue: TimerQueue, when: int, call: Callable[[int, Context], Any]) -> None:
        """Fire the timers that are due at one step, smallest (time, key bytes) first, also new ones."""
        context, undo, emitted, dirty = self._context, self._context._undo, self._context._emitted, self.store.dirty
        reached = queue.steps.seen_at(when + 1)
        event, order = queue is self._events, self.spec.order
        context._moment, context._reached = when, reached if event else None
        due = queue.due_until(reached)
        # How often a key has fired matters only if it may fire again: at several times, or by a timer that it
        # registers.
        fired: dict[bytes, tuple[int, int]] = {}
        registered, several = queue.registered, len(due) > 1
        taken = queue.take_last(due, self._firings) if is_end(when) else queue.take(due, reached)
        for time, entry in taken:
            own = entry.event_timers if event else entry.processing_timers
            if not own or not taken_out(own, time):
                continue
            dirty.add(entry)
            latest, count = time, 0
            if fired and (before := fired.get(entry.data)) is not None:
                latest, count = max(before[0], time), before[1] + 1
            context.timestamp, context.key = time, entry.key
            context._entry, context._values = entry, entry.values
            try:
                result = call(time, context)
                if result is not None:
                    context._emit(result)
            except Exception as error:
                self._failed(error, when, firing(order, latest, entry.data, count), timer=time)
            else:
                undo.clear()
                if emitted:
                    self._hand_on(when, firing(order, latest, entry.data, count))
            if several or registered:
                fired[entry.data] = latest, count
        context._reached = None
        queue.look_ahead(when + 1)

    # ----------------------------------------------------------------------------------------------------- failures

    def _failed(
        self, error: Exception, when: int, path: bytes, *, row: Row | None = None, timer: int | None = None,
        heard: bool = True,
    ) -> None:  # fmt: skip
        """Undo the call. Emit the record or timer as a dead letter, or stop."""
        context = self._context
        context._roll_back()
        if not self.spec.dead_letters:
            of = f"the timer at {timer} of key {context.key!r}" if timer is not None else f"the record {row!r}"
            raise stopped(error, of, pipeline=self.spec.pipeline, uid=self.spec.uid, when=when) from error
        if not heard or DEAD_LETTERS not in self._out:
            return
        what = f"{type(error).__name__}: {error}"
        letter = dead_letter(self.spec.uid, when, what, key=context.key, time=context.timestamp, row=row)
        self._out[DEAD_LETTERS].append(when, path + number(0), context.timestamp, letter)

    def watermark(self) -> int:
        return self._events.steps.last


def _keys_of(read_key: Callable[[Row], Any], records: Records, *, is_typed: bool) -> list[Any]:
    """Return the keys of records; ``_UNREADABLE`` for a key that cannot be read, which fails later, with its record."""
    if is_typed and isinstance(read_key, attrgetter | itemgetter):
        return list(map(read_key, records.rows))
    keys: list[Any] = []
    checked: set[Any] = set()
    for row in records.rows:
        try:
            key = read_key(row)
            if key not in checked:
                key_bytes(key)
                checked.add(key)
        except Exception:
            key = _UNREADABLE
        keys.append(key)
    return keys


def dead_letter(uid: str, when: int, error: str, *, key: Any, time: int, row: Row | None) -> Row:
    """Make the row for a record, or a timer if there is no row, that a function failed on."""
    name = None if key is None else _as_text(key)
    record = None if row is None else _as_text(row._asdict())
    return DEAD_LETTER_ROWS.row((uid, glsn_of(when), name, time, row is None, record, error))


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.encode(value, order="deterministic").decode()
    except (TypeError, NotImplementedError):
        return repr(value)
