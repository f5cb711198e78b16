"""Small appends that are under way at the same time travel together.

While a batch is in flight, what comes meanwhile is collected into the next one; nothing waits when nothing is in
flight. Each append keeps its own outcome: a part of the batch's positions, and its own deadline. One that is cancelled
or too late before its batch has left is taken out; afterwards it is *unknown* like any other.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.client.appending import Shipment, Shipping
from cutwater.client.conversion import to_batch
from cutwater.client.deadlines import Deadline
from cutwater.client.errors import ClientClosed
from cutwater.client.schemas import TopicSchema
from cutwater.core.requests import TopicInfo
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded
from cutwater.types import GLSN, LLSN, Ack, Batch, LogStreamId, TopicId

IN_FLIGHT_MAX = 2
"""Batches that one lane has under way: the next one is made while another is being written."""
BATCH_BYTES_MAX = 1024 * 1024
SMALL_BYTES = 64 * 1024
"""An append up to this size may travel together with others."""
LANE_BYTES_MAX = 16 * 1024 * 1024
"""Beyond this, appends wait before they are taken in."""
RECORD_COST_BYTES = 64
"""What a record takes besides its values, about."""


def now_us() -> int:
    return time.time_ns() // 1_000


class Single(Struct, frozen=True):
    """One record of key and value that was checked; it becomes Arrow together with its neighbours."""

    value: bytes
    key: bytes | str | None
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
        encode: Callable[[pa.RecordBatch], Batch],
        schema: TopicSchema,
    ) -> None:
        self.topic = topic
        self._pin, self._shipping, self._encode, self._schema = pin, shipping, encode, schema
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._is_due = False
        self._in_flight: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._in_flight

    async def append(self, part: Part, count: int, size: int, deadline: Deadline) -> Ack:
        future: asyncio.Future[Ack] = self._loop.create_future()
        waiting = _Waiting(part, count, size, deadline, future)
        try:
            async with asyncio.timeout_at(deadline.at):
                while self._bytes > LANE_BYTES_MAX:
                    self._room.clear()
                    await self._room.wait()
                self._queue.append(waiting)
                self._bytes += size
                if not self._is_due and len(self._in_flight) < IN_FLIGHT_MAX:
                    # Whoever appends in this turn of the event loop goes along.
                    self._is_due = True
                    self._loop.call_soon(self._depart)
                return await future
        except TimeoutError:
            raise self._late(waiting) from None

    async def close(self) -> None:
        for waiting in self._queue:
            if not waiting.future.done():
                waiting.future.set_exception(ClientClosed("the client was closed before this append was sent"))
        self._queue.clear()
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

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
        try:
            batch = self._encode(joined(self._schema, [waiting.part for waiting in group]))
            ack = await self._shipping.ship(shipment, self.topic, self._pin, batch, None, deadline)
        except CutwaterError as error:
            for waiting in group:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            return
        except BaseException as error:
            for waiting in group:
                if not waiting.future.done():
                    waiting.future.set_exception(AppendUnknown(f"the append was interrupted: {error!r}"))
            raise
        offset = 0
        for waiting in group:
            if not waiting.future.done():
                waiting.future.set_result(part_of(ack, offset, waiting.count))
            offset += waiting.count


def part_of(ack: Ack, offset: int, count: int) -> Ack:
    """What the acknowledgement of a batch means for some of its records."""
    return Ack(GLSN(ack.glsn + offset), LLSN(ack.llsn + offset), ack.stream, count)


def joined(schema: TopicSchema, parts: Sequence[Part]) -> pa.RecordBatch:
    """One record batch, in the order of the parts."""
    batches: list[pa.RecordBatch] = []
    singles: list[Single] = []
    for part in parts:
        if isinstance(part, Single):
            singles.append(part)
            continue
        if singles:
            batches.append(_of_singles(schema, singles))
            singles = []
        batches.append(part)
    if singles:
        batches.append(_of_singles(schema, singles))
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _of_singles(schema: TopicSchema, singles: list[Single]) -> pa.RecordBatch:
    has_keys = any(single.key is not None for single in singles)
    return to_batch(
        schema,
        [single.value for single in singles],
        key=[single.key for single in singles] if has_keys else None,
        timestamp=pa.array([single.timestamp for single in singles], pa.timestamp("us", "UTC")),
        now_us=0,
    )


Lanes = dict[tuple[TopicId, LogStreamId | None, int], Lane]
"""By topic, log stream and number of the schema."""
