"""Joins small concurrent appends into batches.

While a batch is in flight, new appends are collected into the next one. Without a batch in flight, an append is sent at
once. Each append keeps its own outcome (its share of the batch's positions) and its own deadline. An append that is
cancelled or expires before its batch is sent is left out of the batch; afterwards its outcome is *unknown*, as for any
other append.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from operator import attrgetter
from typing import Protocol

from msgspec import Struct

from cutwater.client.append.plain_arrow import AppendRecords, shares
from cutwater.client.append.sender import Shipment, Shipping, may_retry, unknown
from cutwater.client.errors import ClientClosed
from cutwater.core.requests import TopicInfo
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded
from cutwater.runtime.deadline_watch import DeadlineWatch
from cutwater.runtime.deadlines import Deadline
from cutwater.types import Ack, Batch, LogStreamId, TopicId

IN_FLIGHT_MAX = 2
"""Batches that one lane has in flight: the next one is made while another is being written."""
HANGING_MAX = 16
"""The same limit including batches that hang on silent storage nodes, while other log streams take appends."""
PATIENCE_SECONDS = 0.05
"""How long a few appends wait behind a batch in flight so that more can join them. That batch may hang on a dead
node."""
SMALL_BYTES = 64 * 1024
"""Appends up to this size may share a batch."""
LANE_BYTES_MAX = 16 * 1024 * 1024
"""While more than this waits in a lane, further appends wait before the lane accepts them."""
RECORD_COST_BYTES = 64
"""Approximate overhead of a record besides its values."""


class AppendOutcome(Protocol):
    """Receives the outcome of an append, once: a future, or something cheaper. If it is done before that, the caller
    no longer waits."""

    def done(self) -> bool: ...

    def set_result(self, ack: Ack, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class Waiting(Struct, eq=False):
    """An append that has no outcome yet. ``at`` is its deadline in event loop time, ``seconds`` after the append was
    made."""

    part: AppendRecords
    count: int
    size: int
    at: float
    seconds: float
    outcome: AppendOutcome


_deadline, _part = attrgetter("at"), attrgetter("part")


class _Flight(Shipment, eq=False, kw_only=True):
    """A batch in flight. ``last`` is the append with the latest deadline; appends with an earlier deadline expire on
    their own."""

    group: list[Waiting]
    last: Waiting


class BatchQueue:
    """Appends to one topic, or to one log stream of it, with the same schema."""

    def __init__(
        self,
        topic: TopicInfo,
        pin: LogStreamId | None,
        shipping: Shipping,
        encode: Callable[[Sequence[AppendRecords]], Batch],
        bytes_max: int,
    ) -> None:
        """``bytes_max``: the most bytes that share a batch."""
        self.topic = topic
        self._pin, self._shipping, self._encode, self._bytes_max = pin, shipping, encode, bytes_max
        self._loop = asyncio.get_running_loop()
        self._watch = DeadlineWatch(self._loop, self._expire)
        self._queue: deque[Waiting] = deque()
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._is_due = self._is_closed = False
        self._usual = 0
        """How many appends shared a batch lately."""
        self._in_flight: set[_Flight] = set()
        self._retrying: set[asyncio.Task[None]] = set()
        """Tasks for the batches in flight that could not be sent at once."""
        self._departed = 0.0
        """When the last batch was sent, in event loop time."""
        self._patience: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._in_flight

    async def append(self, part: AppendRecords, count: int, size: int, deadline: Deadline) -> Ack:
        future: asyncio.Future[Ack] = self._loop.create_future()
        waiting = Waiting(part, count, size, deadline.at, deadline.seconds, future)
        while not self.take(waiting):
            await self._wait_for_room(deadline)
        return await future

    def begin(
        self, part: AppendRecords, count: int, size: int, seconds: float
    ) -> tuple[asyncio.Future[Ack], float] | None:
        """Begin an append without waiting. Returns the outcome and the deadline, or None if there is no room."""
        loop = self._loop
        future: asyncio.Future[Ack] = loop.create_future()
        at = loop.time() + seconds
        return (future, at) if self.take(Waiting(part, count, size, at, seconds, future)) else None

    def take(self, waiting: Waiting) -> bool:
        """Queue the append and return True, or return False if there is no room. A queued append gets an outcome."""
        if self._bytes > LANE_BYTES_MAX:
            return False
        if self._is_closed:
            raise ClientClosed("the client was closed before this append was sent")
        self._queue.append(waiting)
        self._bytes += waiting.size
        if waiting.at < self._watch.armed:
            self._watch.note(waiting.at)
        if not self._is_due:
            if self._may_depart():
                self._depart_soon()
            else:
                self._be_patient()
        return True

    async def _wait_for_room(self, deadline: Deadline) -> None:
        self._room.clear()
        try:
            async with asyncio.timeout_at(deadline.at):
                await self._room.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._bytes} bytes of appends wait to be sent, so nothing was appended within {deadline.seconds:g} s"
            ) from None

    def _expire(self, now: float) -> float:
        """Expire late appends with one timer for all: most have their outcome long before it fires."""
        earliest = _expire(self._queue, None, now)
        for flight in self._in_flight:
            earliest = min(earliest, _expire(flight.group, flight, now))
        return earliest

    async def close(self) -> None:
        self._is_closed = True
        _fail(self._queue, ClientClosed("the client was closed before this append was sent"))
        self._queue.clear()
        # Appends that wait for room are let in, so that they get the error.
        self._bytes = 0
        self._room.set()
        for task in self._retrying:
            task.cancel()
        await asyncio.gather(*self._retrying, return_exceptions=True)
        for flight in self._in_flight:
            _fail(flight.group, _interrupted(flight))
        self._watch.stop()
        if self._patience is not None:
            self._patience.cancel()

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
        return has_place and self._shipping.has_way_around(self.topic, self._pin)

    def _be_patient(self) -> None:
        """Look again when ``PATIENCE_SECONDS`` have passed since the last batch was sent."""
        if self._patience is None and self._has_a_place():
            self._patience = self._loop.call_at(self._departed + PATIENCE_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._patience = None
        self._depart()

    def _depart_soon(self) -> None:
        """Send a batch after this turn of the event loop, so that every append made in this turn joins it."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._depart)

    def _depart(self) -> None:
        self._is_due = False
        while self._queue and self._may_depart():
            flight = self._next_flight()
            self._usual = max(len(flight.group), self._usual // 2)
            self._departed = now = self._loop.time()
            self._in_flight.add(flight)
            load, answered = partial(self._load, flight), partial(self._answered, flight)
            timeout_ms = max(1, int((flight.last.at - now) * 1_000))
            try:
                is_sent = self._shipping.begin(flight, self.topic, self._pin, load, timeout_ms, answered)
            except Exception as error:
                # An unexpected error, such as no memory, or malformed Arrow data from a caller.
                self._arrived(flight)
                _fail(flight.group, _broken(flight, error))
            else:
                if not is_sent:
                    self._retry(flight, None)
        if self._queue and not self._is_closed:
            self._be_patient()

    def _next_flight(self) -> _Flight:
        queue = self._queue
        if self._bytes <= self._bytes_max:
            group, size = list(queue), self._bytes
            queue.clear()
        else:
            group = [queue.popleft()]
            size = group[0].size
            while queue and size + queue[0].size <= self._bytes_max:
                group.append(queue.popleft())
                size += group[-1].size
        if self._bytes > LANE_BYTES_MAX:
            self._room.set()
        self._bytes -= size
        return _Flight(group=group, last=max(group, key=_deadline), on_slow=self._depart_soon)

    def _load(self, flight: _Flight) -> Batch:
        """Encode the appends of the batch whose callers still wait."""
        flight.group = group = [waiting for waiting in flight.group if not waiting.outcome.done()]
        if not group:
            raise ClientClosed("no caller waits for these appends any more")
        return self._encode(list(map(_part, group)))

    def _answered(self, flight: _Flight, outcome: Ack | CutwaterError) -> None:
        if isinstance(outcome, Ack):
            _settle(flight.group, outcome)
        elif may_retry(flight, outcome) and not self._is_closed:
            self._retry(flight, outcome)
            return
        else:
            _fail(flight.group, outcome)
        self._arrived(flight)

    def _arrived(self, flight: _Flight) -> None:
        self._in_flight.discard(flight)
        # Callers that were just answered may append more, and run first.
        self._depart_soon()

    def _retry(self, flight: _Flight, error: CutwaterError | None) -> None:
        task = self._loop.create_task(self._deliver(flight, error))
        self._retrying.add(task)
        task.add_done_callback(self._retrying.discard)

    async def _deliver(self, flight: _Flight, error: CutwaterError | None) -> None:
        """Deliver a batch that takes more than one attempt or has to wait for a connection."""
        load, deadline = partial(self._load, flight), Deadline(flight.last.seconds, flight.last.at)
        try:
            ack = await self._shipping.ship(flight, self.topic, self._pin, load, None, deadline, error)
        except CutwaterError as failure:
            _fail(flight.group, failure)
        except Exception as failure:
            _fail(flight.group, _broken(flight, failure))
        except BaseException:
            _fail(flight.group, _interrupted(flight))
            raise
        else:
            _settle(flight.group, ack)
        finally:
            self._arrived(flight)


def _settle(group: list[Waiting], ack: Ack) -> None:
    for waiting, part in zip(group, shares(ack, group), strict=True):
        outcome = waiting.outcome
        if not outcome.done():
            outcome.set_result(part)


def _fail(group: Iterable[Waiting], error: Exception) -> None:
    for waiting in group:
        if not waiting.outcome.done():
            waiting.outcome.set_exception(error)


def _expire(group: Iterable[Waiting], shipment: Shipment | None, now: float) -> float:
    """Fail the appends whose deadline has passed, and return the next deadline. Without a ``shipment``, they are still
    in the queue."""
    earliest = inf
    for waiting in group:
        if waiting.outcome.done():
            continue
        if waiting.at <= now:
            waiting.outcome.set_exception(_late(waiting.seconds, shipment))
        elif waiting.at < earliest:
            earliest = waiting.at
    return earliest


def _late(seconds: float, shipment: Shipment | None) -> CutwaterError:
    if shipment is None or not shipment.may_have_arrived:
        why = f": {shipment.trouble}" if shipment is not None and shipment.trouble else ""
        return DeadlineExceeded(f"nothing was appended within {seconds:g} s{why}")
    return AppendUnknown(
        f"no answer came within {seconds:g} s, so whether the append is in the log is not known: "
        "read the log, or use a producer, which finds out"
    )


def _broken(shipment: Shipment, error: Exception) -> Exception:
    """Return the error for the callers when an unexpected exception occurred while sending."""
    return unknown(error) if shipment.may_have_arrived else error


def _interrupted(shipment: Shipment) -> CutwaterError:
    if shipment.may_have_arrived:
        return AppendUnknown(
            "the client was closed before an answer came: whether the append is in the log is not known"
        )
    return ClientClosed("the client was closed before this append was sent")


BatchQueues = dict[tuple[TopicId, LogStreamId | None, int], BatchQueue]
"""Lanes by topic, log stream and number of the schema."""
