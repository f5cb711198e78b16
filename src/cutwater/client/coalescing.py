"""Small appends that are under way at the same time travel together.

While a batch is in flight, what comes meanwhile is collected into the next one; nothing waits when nothing is in
flight. Each append keeps its own outcome: a part of the batch's positions, and its own deadline. One that is cancelled
or too late before its batch was sent is left out of it; afterwards it is *unknown* like any other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.client.appending import Shipment, Shipping
from cutwater.client.deadlines import Deadline
from cutwater.client.errors import ClientClosed
from cutwater.client.schemas import HEADERS, KEY_VALUE, TIMESTAMP, no_values
from cutwater.core.requests import TopicInfo
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded
from cutwater.types import GLSN, LLSN, Ack, Batch, LogStreamId, TopicId
from cutwater.wire.deadlines import DeadlineWatch

IN_FLIGHT_MAX = 2
"""Batches that one lane has under way: the next one is made while another is being written."""
BATCH_BYTES_MAX = 1024 * 1024
SMALL_BYTES = 64 * 1024
"""An append up to this size may travel together with others."""
LANE_BYTES_MAX = 16 * 1024 * 1024
"""Beyond this, appends wait before they are taken in."""
RECORD_COST_BYTES = 64
"""What a record takes besides its values, about."""


class Single(Struct, frozen=True):
    """One record of key and value that was checked; it becomes Arrow together with its neighbours."""

    value: bytes
    key: bytes | None
    timestamp: int


Part: TypeAlias = Single | pa.RecordBatch


class _Waiting:
    __slots__ = ("count", "deadline", "future", "part", "shipment", "size")

    def __init__(self, part: Part, count: int, size: int, deadline: Deadline, future: asyncio.Future[Ack]) -> None:
        self.part, self.count, self.size, self.deadline, self.future = part, count, size, deadline, future
        self.shipment: Shipment | None = None
        """Set when it has left the queue."""


class Lane:
    """Appends to one topic, or to one log stream of it, with the same schema."""

    def __init__(
        self,
        topic: TopicInfo,
        pin: LogStreamId | None,
        shipping: Shipping,
        encode: Callable[[Joined], Batch],
    ) -> None:
        self.topic = topic
        self._pin, self._shipping, self._encode = pin, shipping, encode
        self._loop = asyncio.get_running_loop()
        self._watch = DeadlineWatch(self._loop, self._expire)
        self._pending: dict[_Waiting, None] = {}
        """All that have no outcome yet."""
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._is_due = self._is_closed = False
        self._in_flight: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._in_flight

    async def append(self, part: Part, count: int, size: int, deadline: Deadline) -> Ack:
        while self._bytes > LANE_BYTES_MAX:
            await self._wait_for_room(deadline)
        if self._is_closed:
            raise ClientClosed("the client was closed before this append was sent")
        future: asyncio.Future[Ack] = self._loop.create_future()
        waiting = _Waiting(part, count, size, deadline, future)
        self._pending[waiting] = None
        self._queue.append(waiting)
        self._bytes += size
        if deadline.at < self._watch.armed:
            self._watch.note(deadline.at)
        if not self._is_due and len(self._in_flight) < IN_FLIGHT_MAX:
            # Whoever appends in this turn of the event loop goes along.
            self._is_due = True
            self._loop.call_soon(self._depart)
        try:
            return await future
        finally:
            del self._pending[waiting]

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
        """One timer for all: most get their outcome long before it fires."""
        earliest = inf
        for waiting in self._pending:
            if waiting.future.done():
                continue
            if waiting.deadline.at <= now:
                waiting.future.set_exception(self._late(waiting))
            else:
                earliest = min(earliest, waiting.deadline.at)
        return earliest

    async def close(self) -> None:
        self._is_closed = True
        for waiting in self._queue:
            if not waiting.future.done():
                waiting.future.set_exception(ClientClosed("the client was closed before this append was sent"))
        self._queue.clear()
        # Those who wait for room are let in, to be told.
        self._bytes = 0
        self._room.set()
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        self._watch.stop()

    def _late(self, waiting: _Waiting) -> CutwaterError:
        if waiting.shipment is None or not waiting.shipment.may_have_arrived:
            return DeadlineExceeded(f"nothing was appended within {waiting.deadline.seconds:g} s")
        return AppendUnknown(
            f"no answer came within {waiting.deadline.seconds:g} s, so whether the append is in the log is not known: "
            "read the log, or use a producer, which finds out"
        )

    def _depart(self) -> None:
        self._is_due = False
        while self._queue and len(self._in_flight) < IN_FLIGHT_MAX:
            group = self._next_group()
            if not group:
                continue
            task = self._loop.create_task(self._deliver(group))
            self._in_flight.add(task)
            task.add_done_callback(self._arrived)

    def _next_group(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        size = 0
        while self._queue and (not group or size + self._queue[0].size <= BATCH_BYTES_MAX):
            waiting = self._queue.popleft()
            self._bytes -= waiting.size
            if not waiting.future.done():
                group.append(waiting)
                size += waiting.size
        self._room.set()
        return group

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._depart()

    async def _deliver(self, group: list[_Waiting]) -> None:
        shipment = Shipment()
        for waiting in group:
            waiting.shipment = shipment
        # The others may have longer; who has not gives up by itself.
        deadline = max((waiting.deadline for waiting in group), key=lambda deadline: deadline.at)

        def load() -> Batch:
            group[:] = [waiting for waiting in group if not waiting.future.done()]
            if not group:
                raise ClientClosed("nobody waits for these appends any more")
            return self._encode(joined([waiting.part for waiting in group]))

        try:
            ack = await self._shipping.ship(shipment, self.topic, self._pin, load, None, deadline)
        except CutwaterError as error:
            for waiting in group:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            return
        except BaseException as error:
            for waiting in group:
                if not waiting.future.done():
                    waiting.future.set_exception(_interrupted(shipment, error))
            raise
        offset = 0
        for waiting in group:
            if not waiting.future.done():
                waiting.future.set_result(part_of(ack, offset, waiting.count))
            offset += waiting.count


def _interrupted(shipment: Shipment, error: BaseException) -> CutwaterError:
    if shipment.may_have_arrived:
        return AppendUnknown(f"the append was interrupted ({error!r}): whether it is in the log is not known")
    return ClientClosed(f"the append was interrupted before it was sent: {error!r}")


def part_of(ack: Ack, offset: int, count: int) -> Ack:
    """What the acknowledgement of a batch means for some of its records."""
    return Ack(GLSN(ack.glsn + offset), LLSN(ack.llsn + offset), ack.stream, count)


class Joined(NamedTuple):
    """One record batch, and the smallest and the largest event time in it, if they are known."""

    rows: pa.RecordBatch
    times: tuple[int, int] | None


def joined(parts: Sequence[Part]) -> Joined:
    """All parts as one record batch, in their order."""
    batches: list[pa.RecordBatch] = []
    singles: list[Single] = []
    for part in parts:
        if isinstance(part, Single):
            singles.append(part)
            continue
        if singles:
            batches.append(_of_singles(singles).rows)
            singles = []
        batches.append(part)
    if not batches:
        return _of_singles(singles)
    if singles:
        batches.append(_of_singles(singles).rows)
    return Joined(batches[0] if len(batches) == 1 else pa.concat_batches(batches), None)


def _of_singles(singles: list[Single]) -> Joined:
    """Nothing has to be checked any more, so this is much less than ``to_batch`` does."""
    count = len(singles)
    keys = [single.key for single in singles]
    times = [single.timestamp for single in singles]
    arrays = [
        pa.array(keys, _BINARY) if any(key is not None for key in keys) else pa.nulls(count, _BINARY),
        pa.array([single.value for single in singles], _BINARY),
        pa.array(times, TIMESTAMP),
        no_values(count, HEADERS),
    ]
    return Joined(pa.RecordBatch.from_arrays(arrays, schema=KEY_VALUE), (min(times), max(times)))


_BINARY = pa.binary()

Lanes = dict[tuple[TopicId, LogStreamId | None, int], Lane]
"""By topic, log stream and number of the schema."""
