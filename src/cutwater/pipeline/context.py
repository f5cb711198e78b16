"""What a user's function is given besides the record: the current key, the clocks, timers and outputs.

One ``Context`` serves one operator in one slice for its whole life. The operator sets it up before each call. All that
the call changes is noted in ``_undo``, so that a call that fails leaves nothing behind, or gathered in ``_emitted``,
which is handed on only when the call has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, Final

from cutwater.errors import InvalidArgument
from cutwater.pipeline.position import glsn_of
from cutwater.pipeline.rows import Row
from cutwater.pipeline.steps import MAX_TIME, NEVER, NO_TIME, Steps
from cutwater.types import GLSN

MAIN: Final = ""
"""The tag of the main output. Tags that users choose are not empty, and none begins with a dot."""
LATE: Final = ".late"
DEAD_LETTERS: Final = ".dead"

_data: Final = attrgetter("data")


class KeyEntry:
    """All that an operator keeps for one key: the raw values of its states, and its timers."""

    __slots__ = ("data", "event_timers", "hash", "key", "processing_timers", "values")

    def __init__(self, key: Any, data: bytes, hashed: int, values: list[Any]) -> None:
        self.key = key
        self.data = data
        self.hash = hashed
        self.values = values
        # Most keys have no timers at a time, so the sets are made when they are needed.
        self.event_timers: set[int] | None = None
        self.processing_timers: set[int] | None = None

    def __lt__(self, other: KeyEntry) -> bool:
        """A queue may hold a timer twice, one of them of an entry that was forgotten: their order is all one."""
        return False

    @property
    def empty(self) -> bool:
        """Nothing is kept for the key, so that it may be forgotten. A state that was cleared holds None."""
        return not (self.event_timers or self.processing_timers) and self.values.count(None) == len(self.values)


class TimerQueue:
    """The timers of one operator in one slice on one clock, by time and then by key bytes.

    Many timers often have one time, such as the end of a window, so keys are gathered by time, and put in order when
    their time has come. A key's own set says which timers are real: the queue may hold some that were deleted, or some
    twice. ``due`` is the next moment at which a timer of the queue fires.
    """

    def __init__(self) -> None:
        self.steps = Steps()
        self.due = NEVER
        self._times: list[int] = []
        self._entries: dict[int, list[KeyEntry]] = {}
        self._limit = NO_TIME
        self._registered: list[tuple[int, bytes, KeyEntry]] = []
        self._fresh: set[tuple[int, bytes]] | None = None

    def add(self, time: int, entry: KeyEntry) -> None:
        entries = self._entries.get(time)
        if entries is None:
            self._entries[time] = [entry]
            heappush(self._times, time)
        else:
            entries.append(entry)

    def register(self, time: int, entry: KeyEntry, when: int) -> None:
        """A function registers a timer at a moment."""
        if time <= self._limit:
            heappush(self._registered, (time, entry.data, entry))
            return
        self.add(time, entry)
        if self._fresh is not None:
            self._fresh.add((time, entry.data))
        if time <= self.steps.last:
            self.due = min(self.due, self.steps.next_reaching(time, when))

    def look_ahead(self, when: int) -> None:
        """Find the next moment anew, from ``when`` on."""
        self.due = self.steps.next_reaching(self._times[0], when) if self._times else NEVER

    def take(self, reached: int, end: bool) -> Iterator[tuple[int, KeyEntry]]:
        """The timers up to a time, smallest first, with those that are registered while they are taken.

        At the end of the input the latter are not among them: they stay in the queue.
        """
        due = []
        while self._times and self._times[0] <= reached:
            time = heappop(self._times)
            due.append((time, sorted(self._entries.pop(time), key=_data)))
        if end:
            self._fresh = set()
        else:
            self._limit = reached
        registered = self._registered
        for time, entries in due:
            for entry in entries:
                while registered and registered[0][:2] < (time, entry.data):
                    yield registered[0][0], heappop(registered)[2]
                if not self._fresh or (time, entry.data) not in self._fresh:
                    yield time, entry
        while registered:
            yield registered[0][0], heappop(registered)[2]
        self._limit, self._fresh = NO_TIME, None


def valid_tag(tag: Any) -> bool:
    return isinstance(tag, str) and bool(tag) and not tag.startswith(".")


class _NoKey:
    """Stands where the values of the current key would be while there is none."""

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
        """Call ``on_timer`` once the watermark has reached ``time`` (ms); twice the same time is one timer."""
        entry = self._entry(time)
        if entry.event_timers is None:
            entry.event_timers = set()
        self._add(entry, entry.event_timers, self._context._event_queue, time)

    def delete(self, time: int) -> None:
        """Take a timer back; it need not exist."""
        self._remove(self._entry(time).event_timers, time)

    def at_processing_time(self, time: int) -> None:
        """Call ``on_processing_timer`` once processing time has reached ``time`` (ms)."""
        entry = self._entry(time)
        if entry.processing_timers is None:
            entry.processing_timers = set()
        self._add(entry, entry.processing_timers, self._context._processing_queue, time)

    def delete_processing_time(self, time: int) -> None:
        self._remove(self._entry(time).processing_timers, time)

    def _entry(self, time: int) -> KeyEntry:
        entry = self._context._entry
        if entry is None:
            raise InvalidArgument("a timer belongs to a key, and this call has none: use it in process or on_timer")
        if self._context._timerless:
            raise InvalidArgument(f"a timer was used, but {self._context._timerless}")
        if type(time) is not int or not NO_TIME < time < MAX_TIME:
            raise InvalidArgument(f"a timer's time is {time!r}: give milliseconds since 1970 as an integer")
        return entry

    def _add(self, entry: KeyEntry, own: set[int], queue: TimerQueue, time: int) -> None:
        if time not in own:
            own.add(time)
            self._context._undo.append((own.discard, (time,)))
            queue.register(time, entry, self._context._moment)

    def _remove(self, own: set[int] | None, time: int) -> None:
        if own and time in own:
            own.discard(time)
            self._context._undo.append((own.add, (time,)))


class Context:
    """The record or timer that is being processed. Times are integer milliseconds."""

    __slots__ = (
        "__weakref__", "_emitted", "_entry", "_event_queue", "_make", "_moment", "_outputs", "_processing_queue",
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
        self._event_queue = TimerQueue()
        self._processing_queue = TimerQueue()
        self._entry: KeyEntry | None = None
        self._values: Any = NO_KEY
        self._moment = 0
        self._reached: int | None = None
        self._timerless = ""
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._emitted: list[tuple[str, int, Row]] = []

    @property
    def glsn(self) -> GLSN:
        """The position in the log of the record, or of what made the timer fire."""
        return glsn_of(self._moment)

    @property
    def watermark(self) -> int:
        """The watermark under which the record is processed, or the one that fired the timer."""
        return self._event_queue.steps.seen_at(self._moment) if self._reached is None else self._reached

    @property
    def processing_time(self) -> int:
        """The cut time of the position."""
        return self._processing_queue.steps.reached_at(glsn_of(self._moment))

    def output(self, tag: str, row: Any) -> None:
        """Emit a row to a side output, which ``stream.side(tag)`` reads. Without a reader it goes nowhere."""
        make = self._outputs.get(tag)
        if make is not None:
            self._emitted.append((tag, self.timestamp, make(row)))
        elif not valid_tag(tag):
            raise InvalidArgument(f"the tag of a side output is {tag!r}: give a name that does not begin with a dot")

    def _emit(self, row: Any) -> None:
        self._emitted.append((MAIN, self.timestamp, self._make(row)))

    def _roll_back(self) -> None:
        """Undo what the call did, last first."""
        for action, arguments in reversed(self._undo):
            action(*arguments)
        self._undo.clear()
        self._emitted.clear()
