"""Defines what a user's function gets besides the record: the current key, the clocks, timers and outputs.

One ``Context`` serves one operator in one slice for its whole life. The operator sets it up before each call. Every
change of the call is recorded in ``_undo``, so that a failed call leaves nothing behind. Its output is collected in
``_emitted``, and passed on only when the call has succeeded.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from heapq import heappop, heappush
from operator import attrgetter
from types import GeneratorType
from typing import Any, Final, NoReturn

from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.pipeline.clocks.clock_steps import MAX_TIME, NEVER, NO_TIME, Steps
from cutwater.pipeline.position import glsn_of
from cutwater.pipeline.rows import Row
from cutwater.pipeline.values import to_datetime
from cutwater.types import GLSN

MAIN: Final = ""
"""The tag of the main output. Tags that users choose are not empty, and none begins with a dot."""
LATE: Final = ".late"
DEAD_LETTERS: Final = ".dead"

_data: Final = attrgetter("data")
_ONE_ROW: Final = (dict, Row)
_remove: Final = list.remove


class KeyEntry(Struct, eq=False, gc=False):
    """Everything that an operator keeps for one key: the raw values of its states, and its timers.

    A micro-batch makes many of these, so it is a struct, which is made without running Python code. Timers are sorted
    lists without duplicates, as they are stored: most keys have few, and the first to fire is the first in the list.
    """

    key: Any
    data: bytes
    hash: int
    values: list[Any]
    event_timers: list[int] | None = None
    processing_timers: list[int] | None = None

    def __lt__(self, other: KeyEntry) -> bool:
        """A queue may hold a timer twice, one of them of an entry that was removed: their order does not matter."""
        return False

    @property
    def empty(self) -> bool:
        """Whether nothing is kept for the key, so that it may be removed. A state that was cleared holds None."""
        return not (self.event_timers or self.processing_timers) and self.values.count(None) == len(self.values)


class TimerQueue:
    """The timers of one operator in one slice on one clock, by time and then by key bytes.

    Many timers often have the same time, such as the end of a window, so keys are grouped by time, and sorted when
    their time has come. A key's own list decides which timers are real: the queue may hold deleted timers, or
    duplicates. ``due`` is the next moment at which a timer of the queue fires. The queue need not hold timers beyond
    ``horizon``: they cannot fire while it is used.
    """

    def __init__(self, undo: list[tuple[Any, ...]] | None = None) -> None:
        """``undo`` has the actions that undo the current call; the queue adds its own."""
        self.steps = Steps()
        self.due = NEVER
        self._undo = [] if undo is None else undo
        self.horizon = MAX_TIME
        self._times: list[int] = []
        self._entries: dict[int, list[KeyEntry]] = {}
        self._limit = NO_TIME
        self.registered: list[tuple[int, bytes, KeyEntry]] = []
        self._fresh: set[tuple[int, bytes]] | None = None
        self.left = 0
        """How many timers did not fire at the end of the input, because their keys had reached the limit."""

    def add(self, time: int, entry: KeyEntry) -> None:
        entries = self._entries.get(time)
        if entries is None:
            self._entries[time] = [entry]
            heappush(self._times, time)
        else:
            entries.append(entry)

    def add_all(self, time: int, entries: list[KeyEntry]) -> None:
        """Add timers of many keys with the same time."""
        known = self._entries.get(time)
        if known is None:
            self._entries[time] = entries
            heappush(self._times, time)
        else:
            known += entries

    def register(self, time: int, entry: KeyEntry, when: int) -> None:
        """Register a timer for a function, at a moment."""
        if time <= self._limit:
            if self._fresh is not None and (time, entry.data) not in self._fresh:
                self._fresh.add((time, entry.data))
                self._undo.append((self._fresh.discard, (time, entry.data)))
            heappush(self.registered, (time, entry.data, entry))
            return
        # If the queue already has this time, the timer comes due no earlier than the others.
        if time not in self._entries and time <= self.steps.last:
            self.due = min(self.due, self.steps.next_reaching(time, when))
        self.add(time, entry)

    def look_ahead(self, when: int) -> None:
        """Find the next moment again, from ``when`` on."""
        self.due = self.steps.next_reaching(self._times[0], when) if self._times else NEVER

    def due_until(self, reached: int) -> list[tuple[int, list[KeyEntry]]]:
        """Remove the timers up to a time from the queue, and return them by time, and for each time by key bytes."""
        due = []
        while self._times and self._times[0] <= reached:
            time = heappop(self._times)
            due.append((time, sorted(self._entries.pop(time), key=_data)))
        return due

    def take(self, due: Sequence[tuple[int, Sequence[KeyEntry]]], reached: int) -> Iterator[tuple[int, KeyEntry]]:
        """Yield these timers, which are due at a time, smallest first, with those that are registered meanwhile."""
        self._limit = reached
        registered = self.registered
        for time, entries in due:
            for entry in entries:
                while registered and registered[0][:2] < (time, entry.data):
                    yield registered[0][0], heappop(registered)[2]
                yield time, entry
        while registered:
            yield registered[0][0], heappop(registered)[2]
        self._limit = NO_TIME

    def take_last(self, due: Sequence[tuple[int, Sequence[KeyEntry]]], firings: int) -> Iterator[tuple[int, KeyEntry]]:
        """Yield timers like ``take``, where the input ends. Of newly registered ones, ``firings`` per key fire."""
        self._limit, self._fresh = MAX_TIME, set()
        registered, fresh = self.registered, self._fresh
        spent: dict[bytes, int] = {}
        kept: dict[tuple[int, bytes], KeyEntry] = {}
        for time, entries in due:
            for entry in entries:
                yield from self._take_registered((time, entry.data), firings, fresh, spent, kept)
                # A timer that was deleted and registered again is taken with the registered ones.
                if (time, entry.data) not in fresh:
                    yield time, entry
        yield from self._take_registered(None, firings, fresh, spent, kept)
        assert not registered, "everything that was registered is taken or kept"
        left = [(time, entry) for (time, _), entry in kept.items() if time in (entry.event_timers or ())]
        for time, entry in left:
            self.add(time, entry)
        self.left += len(left)
        self._limit, self._fresh = NO_TIME, None

    def _take_registered(
        self,
        before: tuple[int, bytes] | None,
        firings: int,
        fresh: set[tuple[int, bytes]],
        spent: dict[bytes, int],
        kept: dict[tuple[int, bytes], KeyEntry],
    ) -> Iterator[tuple[int, KeyEntry]]:
        registered = self.registered
        while registered and (before is None or registered[0][:2] < before):
            time, data, entry = heappop(registered)
            # A timer that is not fresh was registered by a call that failed.
            if (time, data) not in fresh or time not in (entry.event_timers or ()):
                continue
            if spent.get(data, 0) >= firings:
                kept[time, data] = entry
                continue
            spent[data] = spent.get(data, 0) + 1
            yield time, entry


def put_in(times: list[int], time: int) -> bool:
    """Insert a time into a sorted list. Returns False if it is already there."""
    index = bisect_left(times, time)
    if index < len(times) and times[index] == time:
        return False
    times.insert(index, time)
    return True


def taken_out(times: list[int], time: int) -> bool:
    """Remove a time from a sorted list. Returns False if it is not there."""
    index = bisect_left(times, time)
    if index == len(times) or times[index] != time:
        return False
    del times[index]
    return True


def valid_tag(tag: Any) -> bool:
    return isinstance(tag, str) and bool(tag) and not tag.startswith(".")


class _NoKey:
    """Replaces the values of the current key while there is none."""

    def __getitem__(self, slot: int) -> Any:
        raise InvalidArgument(
            "state is read outside a key: keyed state exists only while a record or a timer of a key is processed; "
            "read it in process or on_timer, and keep what belongs to no key in broadcast state"
        )

    __setitem__: Callable[..., Any] = __getitem__


NO_KEY: Final = _NoKey()


class Timers:
    """The timers of the current key."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def at(self, time: int) -> None:
        """Call ``on_timer`` when the watermark has reached ``time`` (ms). The same time twice makes one timer."""
        context = self._context
        entry = context._entry
        if entry is None or type(time) is not int or not NO_TIME < time < MAX_TIME or context._no_event_timers:
            self._refuse(time, self._context._no_event_timers)
        own = entry.event_timers
        if own is None:
            own = entry.event_timers = []
        if put_in(own, time):
            context._undo.append((_remove, own, time))
            if time <= context._event_queue.horizon:
                context._event_queue.register(time, entry, context._moment)

    def delete(self, time: int) -> None:
        """Delete a timer, which need not exist."""
        self._remove(self._entry(time).event_timers, time)

    def at_processing_time(self, time: int) -> None:
        """Call ``on_processing_timer`` when processing time has reached ``time`` (ms)."""
        context, entry = self._context, self._entry(time)
        own = entry.processing_timers
        if own is None:
            own = entry.processing_timers = []
        if put_in(own, time):
            context._undo.append((_remove, own, time))
            if time <= context._processing_queue.horizon:
                context._processing_queue.register(time, entry, context._moment)

    def delete_processing_time(self, time: int) -> None:
        self._remove(self._entry(time).processing_timers, time)

    def _entry(self, time: int) -> KeyEntry:
        entry = self._context._entry
        if entry is None or type(time) is not int or not NO_TIME < time < MAX_TIME or self._context._timerless:
            self._refuse(time, self._context._timerless)
        return entry

    def _refuse(self, time: Any, why: str) -> NoReturn:
        if self._context._entry is None:
            raise InvalidArgument("a timer belongs to a key, and this call has none: use it in process or on_timer")
        if why:
            raise InvalidArgument(f"a timer was used, but {why}")
        raise InvalidArgument(f"a timer's time is {time!r}: give milliseconds since 1970 as an integer")

    def _remove(self, own: list[int] | None, time: int) -> None:
        if own and taken_out(own, time):
            self._context._undo.append((insort, own, time))


class Context:
    """The record or timer that is being processed. Times are integer milliseconds, except ``event_time``."""

    __slots__ = (
        "__weakref__", "_emitted", "_entry", "_event_queue", "_make", "_moment", "_no_event_timers", "_outputs",
        "_processing_queue",
        "_reached", "_timerless", "_undo", "_values", "key", "partition", "partitions", "timers", "timestamp",
    )  # fmt: skip

    def __init__(self, outputs: dict[str, Callable[[Any], Row]]) -> None:
        self.key: Any = None
        """The key of the record or timer."""
        self.timestamp = 0
        """The event time of the record, or the time of the timer."""
        self.partition = 0
        self.partitions = 1
        self.timers = Timers(self)
        self._outputs = outputs
        self._make = outputs[MAIN]
        self._undo: list[tuple[Any, ...]] = []
        """The actions that undo the call: functions with their arguments."""
        self._event_queue = TimerQueue(self._undo)
        self._processing_queue = TimerQueue(self._undo)
        self._entry: KeyEntry | None = None
        self._values: Any = NO_KEY
        self._moment = 0
        self._reached: int | None = None
        self._timerless = ""
        """Why the operator has no timers at all."""
        self._no_event_timers = ""
        """Why the operator has no event-time timers."""
        self._emitted: list[tuple[str, int, Row]] = []

    @property
    def glsn(self) -> GLSN:
        """The position in the log of the record, or of what made the timer fire."""
        return glsn_of(self._moment)

    @property
    def event_time(self) -> datetime:
        """``timestamp`` as a ``datetime`` in UTC, for ``timestamp`` columns. ``to_datetime`` converts other times."""
        return to_datetime(self.timestamp)

    @property
    def watermark(self) -> int:
        """The watermark under which the record is processed, or the one that fired the timer."""
        return self._event_queue.steps.seen_at(self._moment) if self._reached is None else self._reached

    @property
    def processing_time(self) -> int:
        """The cut time of the position."""
        return self._processing_queue.steps.reached_at(glsn_of(self._moment))

    def output(self, tag: str, row: Any) -> None:
        """Emit a row to a side output, which ``stream.side(tag)`` reads. Without a reader the row is dropped."""
        make = self._outputs.get(tag)
        if make is not None:
            self._emitted.append((tag, self.timestamp, make(row)))
        elif not valid_tag(tag):
            raise InvalidArgument(f"the tag of a side output is {tag!r}: give a name that does not begin with a dot")

    def _emit(self, result: Any) -> None:
        time, make, emitted = self.timestamp, self._make, self._emitted
        if type(result) is not GeneratorType and isinstance(result, _ONE_ROW):
            emitted.append((MAIN, time, make(result)))
            return
        for row in result:
            emitted.append((MAIN, time, make(row)))

    def _roll_back(self) -> None:
        for action, *arguments in reversed(self._undo):
            action(*arguments)
        self._undo.clear()
        self._emitted.clear()
