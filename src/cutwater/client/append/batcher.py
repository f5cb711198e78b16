"""Joins small concurrent appends into batches.

``AppendQueue`` keeps appends and their deadlines; a producer has one too. A ``BatchQueue`` decides when appends without
a producer leave: while a batch is in flight, new appends are collected into the next one; without a batch in flight, an
append is sent at once. Each append keeps its own outcome (its share of the batch's positions) and its own deadline. An
append that is cancelled or expires before its batch is sent is left out of the batch; afterwards its outcome is
*unknown*, as for any other append.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, repeat
from math import inf
from operator import attrgetter
from typing import Generic, Protocol, TypeVar, cast

from msgspec import Struct

from cutwater.client.append.plain_arrow import AppendRecords
from cutwater.client.append.sender import Shipment, Shipping
from cutwater.client.convert.schemas import TopicSchema
from cutwater.client.errors import ClientClosed
from cutwater.core.requests import TopicInfo
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded, QuotaExceeded
from cutwater.runtime.deadline_watch import DeadlineWatch
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, LLSN, Ack, Batch, LogStreamId

IN_FLIGHT_MAX = 2
"""Batches that one lane has in flight: the next one is made while another is being written."""
HANGING_MAX = 16
"""The same limit including batches that hang on silent storage nodes, while other log streams take appends."""
PATIENCE_SECONDS = 0.05
"""How long a few appends wait behind a batch in flight so that more can join them. That batch may hang on a dead
node."""
QUOTA_DIVISOR = 20
"""Under a quota of bytes, appends that share a batch have at most this part of a second's bytes. A node lets a batch
begin as a whole, so others would notice larger ones."""
QUOTA_SECONDS = 10.0
"""For so long after a batch was refused by a quota."""
LANE_BYTES_MAX = 16 * 1024 * 1024
"""While more than this waits in a lane, further appends wait before the lane accepts them."""


class AppendOutcome(Protocol):
    """Receives the outcome of an append, once: a future, or something cheaper. If it is done before that, the caller
    no longer waits."""

    def done(self) -> bool: ...

    def set_result(self, ack: Ack, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class QueuedAppend(Struct, eq=False):
    """Records of one call, on their way to an outcome. ``at`` is their deadline in event loop time, ``seconds`` after
    the call."""

    part: AppendRecords | None
    """None if there is only a declaration."""
    count: int
    size: int
    seconds: float
    outcome: AppendOutcome
    at: float = inf


A = TypeVar("A", bound=QueuedAppend)


class AppendQueue(ABC, Generic[A]):
    """Appends that wait for a batch, and the deadlines of all that have no outcome. ``bytes`` are those of all appends
    that were added and not released."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = DeadlineWatch(self._loop, self._expire)
        self._queue: deque[A] = deque()
        self.bytes = 0

    @abstractmethod
    def _waiting(self) -> Iterable[tuple[Iterable[A], Callable[[A], CutwaterError]]]:
        """Return all appends without an outcome, in groups, each with a function that returns the error for an append
        of the group whose deadline has passed."""

    @abstractmethod
    def _changed(self) -> None:
        """Called when there may be room again."""

    def add(self, append: A) -> None:
        self._queue.append(append)
        self.bytes += append.size
        if append.at < self._watch.armed:
            self._watch.note(append.at)

    def settle(self, group: Sequence[A], ack: Ack) -> None:
        """Give the appends of a batch that is in the log their acknowledgements."""
        for append, share in zip(group, shares(ack, group), strict=True):
            outcome = append.outcome
            if not outcome.done():
                outcome.set_result(share)

    def fail(self, group: Iterable[A], error: Exception) -> None:
        for append in group:
            if not append.outcome.done():
                append.outcome.set_exception(error)

    def release(self, group: Iterable[A]) -> None:
        self.bytes -= sum([append.size for append in group])
        self._changed()

    def _expire(self, now: float) -> float:
        """Fail the appends whose deadline has passed, with one timer for all: most have their outcome long before."""
        earliest = inf
        for group, late in self._waiting():
            for append in group:
                if append.at < earliest and not append.outcome.done():
                    if append.at <= now:
                        self.fail([append], late(append))
                    else:
                        earliest = append.at
        self._changed()
        return earliest


class RoutedAppend(QueuedAppend, eq=False, kw_only=True):
    """An append without a producer, and where it goes. If it goes alone, ``batch`` holds its records."""

    topic: TopicInfo
    pin: LogStreamId | None
    schema: TopicSchema | None = None
    """None if it goes alone."""
    batch: Batch | None = None
    if_llsn: LLSN | None = None


class _Flight(Shipment, eq=False, kw_only=True):
    """A batch of a lane. Its deadline is the latest of its appends; the others expire on their own."""

    lane: BatchQueue
    group: list[RoutedAppend]

    def load(self) -> Batch:
        return self.lane.load(self)

    def end(self, outcome: Ack | Exception) -> None:
        self.lane.end(self, outcome)

    def note_slow(self) -> None:
        self.lane.depart_soon()

    def note_quota(self, error: QuotaExceeded) -> None:
        self.lane.be_modest(error)


_at = attrgetter("at")
_part = attrgetter("part")


class BatchQueue(AppendQueue[RoutedAppend]):
    """A lane: appends to one topic, or to one log stream of it, with the same schema."""

    def __init__(
        self,
        topic: TopicInfo,
        pin: LogStreamId | None,
        shipping: Shipping,
        encode: Callable[[Sequence[AppendRecords]], Batch],
        bytes_max: int,
    ) -> None:
        """``bytes_max``: the most bytes that share a batch."""
        super().__init__()
        self._topic, self._pin, self._shipping, self._encode = topic, pin, shipping, encode
        self._bytes_max = self._bytes_max_usual = bytes_max
        self._room = asyncio.Event()
        self._is_due = self._is_closed = False
        self._usual = 0
        """How many appends shared a batch lately."""
        self._in_flight: dict[_Flight, None] = {}
        self._departed = 0.0
        """When the last batch was sent, in event loop time."""
        self._patience: asyncio.TimerHandle | None = None
        self._modesty: asyncio.TimerHandle | None = None
        """When batches may be as large as usual again."""

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._in_flight

    def take(self, append: RoutedAppend) -> bool:
        """Queue the append and return True, or return False if there is no room. A queued append gets an outcome."""
        if self._is_closed:
            raise ClientClosed("the client was closed before this append was sent")
        if self.bytes > LANE_BYTES_MAX:
            return False
        self.add(append)
        if not self._is_due:
            if self._may_depart():
                self.depart_soon()
            else:
                self._be_patient()
        return True

    async def wait_for_room(self, deadline: Deadline) -> None:
        self._room.clear()
        try:
            async with asyncio.timeout_at(deadline.at):
                await self._room.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.bytes} bytes of appends wait to be sent, so nothing was appended within {deadline.seconds:g} s"
            ) from None

    def close(self) -> None:
        """Fail the appends in the queue, and those that wait for room. ``Shipping`` ends those in flight."""
        self._is_closed = True
        self.fail(self._queue, ClientClosed("the client was closed before this append was sent"))
        self._queue.clear()
        self._changed()
        self._watch.stop()
        for timer in (self._patience, self._modesty):
            if timer is not None:
                timer.cancel()

    def _waiting(self) -> Iterable[tuple[Iterable[RoutedAppend], Callable[[RoutedAppend], CutwaterError]]]:
        yield self._queue, partial(_late, None)
        for flight in self._in_flight:
            yield flight.group, partial(_late, flight)

    def _changed(self) -> None:
        self._room.set()

    def _may_depart(self) -> bool:
        """Return whether the next batch may be sent now. Without a batch in flight, it may. Otherwise it has to be
        large enough: callers whose batch was just acknowledged append again one by one, and if each append were sent by
        itself, none would share a batch."""
        if not self._in_flight:
            return True
        if not self._has_a_place():
            return False
        return len(self._queue) >= self._usual or self._loop.time() >= self._departed + PATIENCE_SECONDS

    def _has_a_place(self) -> bool:
        """Return whether another batch may be in flight. A batch that hangs on a silent head does not count if another
        log stream can be used."""
        under_way = len(self._in_flight)
        if under_way < IN_FLIGHT_MAX:
            return True
        hanging = sum([flight.is_slow for flight in self._in_flight])
        has_place = under_way - hanging < IN_FLIGHT_MAX and under_way < HANGING_MAX
        return has_place and self._shipping.has_way_around(self._topic, self._pin)

    def _be_patient(self) -> None:
        """Look again when ``PATIENCE_SECONDS`` have passed since the last batch was sent."""
        if self._patience is None and self._has_a_place():
            self._patience = self._loop.call_at(self._departed + PATIENCE_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._patience = None
        self._depart()

    def be_modest(self, error: QuotaExceeded) -> None:
        """Make smaller batches for a while, if a quota of bytes has refused one."""
        if error.limit != "bytes_in_per_s" or self._is_closed:
            return
        self._bytes_max = min(self._bytes_max_usual, error.quota // QUOTA_DIVISOR)
        if self._modesty is not None:
            self._modesty.cancel()
        self._modesty = self._loop.call_later(QUOTA_SECONDS, self._be_usual)

    def _be_usual(self) -> None:
        self._bytes_max, self._modesty = self._bytes_max_usual, None

    def depart_soon(self) -> None:
        """Send a batch after this turn of the event loop, so that every append made in this turn joins it."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._depart)

    def _depart(self) -> None:
        self._is_due = False
        while self._queue and self._may_depart():
            group = self._next_group()
            last = max(group, key=_at)
            deadline = Deadline(last.seconds, last.at)
            flight = _Flight(topic=self._topic, pin=self._pin, deadline=deadline, lane=self, group=group)
            self._usual = max(len(group), self._usual // 2)
            self._departed = self._loop.time()
            self._in_flight[flight] = None
            self._shipping.send(flight)
        if self._queue and not self._is_closed:
            self._be_patient()

    def _next_group(self) -> list[RoutedAppend]:
        queue = self._queue
        if self.bytes <= self._bytes_max:
            group = list(queue)
            queue.clear()
        else:
            group = [queue.popleft()]
            size = group[0].size
            while queue and size + queue[0].size <= self._bytes_max:
                group.append(queue.popleft())
                size += group[-1].size
        self.release(group)
        return group

    def load(self, flight: _Flight) -> Batch:
        """Encode the appends of a batch whose callers still wait."""
        flight.group = group = [append for append in flight.group if not append.outcome.done()]
        if not group:
            raise ClientClosed("no caller waits for these appends any more")
        return self._encode(list(map(_part, group)))

    def end(self, flight: _Flight, outcome: Ack | Exception) -> None:
        self._in_flight.pop(flight, None)
        if isinstance(outcome, Ack):
            self.settle(flight.group, outcome)
        else:
            self.fail(flight.group, outcome)
        # Callers that were just answered may append more, and run first.
        self.depart_soon()


def _late(shipment: Shipment | None, append: RoutedAppend) -> CutwaterError:
    if shipment is None or not shipment.may_have_arrived:
        why = f": {shipment.trouble}" if shipment is not None and shipment.trouble else ""
        return DeadlineExceeded(f"nothing was appended within {append.seconds:g} s{why}")
    return AppendUnknown(
        f"no answer came within {append.seconds:g} s, so whether the append is in the log is not known: "
        "read the log, or use a producer, which finds out"
    )


def shares(ack: Ack, group: Sequence[QueuedAppend]) -> list[Ack]:
    """Return the positions of each append of an acknowledged batch."""
    if len(group) == 1:
        return [ack]
    counts = [append.count for append in group]
    glsns, llsns = accumulate(counts, initial=ack.glsn), accumulate(counts, initial=ack.llsn)
    return list(map(Ack, cast("Iterator[GLSN]", glsns), cast("Iterator[LLSN]", llsns), repeat(ack.stream), counts))
