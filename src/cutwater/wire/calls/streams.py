"""Both ends of a stream: ``StreamSender`` for the handler, ``StreamReceiver`` for the caller.

The sender waits until the receiver has granted credit for its next item and the transport has room. So the bytes under
way are limited by what the receiver reserved, and at most one item waits here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from cutwater.errors import CutwaterError, DeadlineExceeded, ResourceExhausted
from cutwater.protocol.methods import Payload, Received, StreamMethod
from cutwater.wire.calls.credits import CreditPool, CreditSender, SendWindow
from cutwater.wire.calls.metering import CallMeter
from cutwater.wire.calls.outbox import FLUSH_BYTES, Outbox
from cutwater.wire.messages import ENCODE, BlockedHeader, FrameKind, ItemHeader, WireFrame

I = TypeVar("I")  # noqa: E741 - the item of a stream, as A is the argument and R the result of a call

WINDOW_ITEMS = 64
WINDOW_BYTES = 1024 * 1024
"""The room for one stream, unless the caller says otherwise."""
ITEM_BYTES_MAX = 16 * 1024 * 1024
"""An item that is larger than the room is let through alone, up to this size."""


class StreamSender(Generic[I]):
    """Sends the items of a stream, for its handler."""

    __slots__ = ("_backlog", "_call", "_in_a_row", "_outbox", "_stall_ms_max", "_waiter", "_window", "meter")

    def __init__(self, outbox: Outbox, call: int, items: int, size: int, stall_ms_max: int) -> None:
        self._outbox = outbox
        self._call = call
        self._window = SendWindow(items, size)
        self._stall_ms_max = stall_ms_max
        self._backlog = 0, 0
        self._in_a_row = 0
        """Bytes sent since other tasks had a turn."""
        self._waiter: asyncio.Future[None] | None = None
        self.meter: CallMeter | None = None

    async def send(self, value: I, body: Payload = b"", *, backlog_items: int = 0, backlog_bytes: int = 0) -> None:
        """Send an item as soon as the receiver has room for it.

        The backlog is what waits behind the item, as far as known. A receiver with several senders divides its room by
        backlog.
        """
        assert backlog_items >= 0
        assert backlog_bytes >= 0
        header = ENCODE((backlog_items, backlog_bytes, value))
        pieces = body if isinstance(body, list | tuple) else (body,)
        size = len(header) + sum(memoryview(piece).nbytes for piece in pieces)
        assert self._waiter is None, "two tasks send to the same stream"
        if self.meter is not None:
            await self.meter.pay_item(size)
        if self._in_a_row > FLUSH_BYTES:
            # Otherwise a handler with much to send would not let other tasks run.
            self._in_a_row = 0
            await asyncio.sleep(0)
        if not self._window.fits(size) or self._outbox.is_busy:
            self._in_a_row = 0
            await self._wait_for(size, backlog_items + 1, backlog_bytes + size)
        self._in_a_row += size
        self._window.use(size)
        self._backlog = backlog_items, backlog_bytes
        self._outbox.send(FrameKind.STREAM_ITEM, self._call, header, body)

    async def _wait_for(self, size: int, backlog_items: int, backlog_bytes: int) -> None:
        try:
            async with asyncio.timeout(self._stall_ms_max / 1_000):
                while not self._window.fits(size) or self._outbox.is_busy:
                    if not self._window.fits(size):
                        blocked = BlockedHeader(backlog_items, backlog_bytes, size, *self._window.give_back())
                        self._outbox.send(FrameKind.BLOCKED, self._call, ENCODE(blocked))
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        except TimeoutError:
            raise ResourceExhausted(
                f"the receiver of this stream took nothing for {self._stall_ms_max} ms", retry_ms=1
            ) from None
        finally:
            self._waiter = None

    def granted(self, items: int, size: int) -> None:
        """Take credit from the receiver. 0 items and 0 bytes mean that the receiver wants unused credit back."""
        if items or size:
            self._window.grant(items, size)
            self.wake()
        elif self._waiter is None:
            blocked = BlockedHeader(*self._backlog, 0, *self._window.give_back())
            self._outbox.send(FrameKind.BLOCKED, self._call, ENCODE(blocked))

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SharedCredit:
    """Room for the items of one or several streams, also of different connections. It is divided by backlog."""

    __slots__ = ("_streams", "pool")

    def __init__(
        self, items_max: int, bytes_max: int, senders_max: int = 1, *, item_bytes_max: int = ITEM_BYTES_MAX
    ) -> None:
        self.pool = CreditPool(items_max, bytes_max, senders_max, item_bytes_max)
        self._streams: dict[CreditSender, Callable[[int, int], None]] = {}

    def join(self, grant: Callable[[int, int], None]) -> tuple[CreditSender, int, int]:
        member, items, size = self.pool.join()
        self._streams[member] = grant
        return member, items, size

    def leave(self, member: CreditSender) -> None:
        self.pool.leave(member)
        self._streams.pop(member, None)
        self.settle()

    def settle(self) -> None:
        """Tell the senders what they may send now."""
        for member, items, size in self.pool.grants():
            grant = self._streams.get(member)
            # Granting to one stream may end the connection of another.
            if grant is not None:
                grant(items, size)


class StreamReceiver(Generic[I]):
    """Receives the items of a stream, in order::

    async with connection.open_stream(SUBSCRIBE, request) as stream:
        async for item in stream:
            ...
    """

    __slots__ = (
        "_call",
        "_credit",
        "_error",
        "_is_over",
        "_member",
        "_method",
        "_on_cancel",
        "_outbox",
        "_queue",
        "_waiter",
    )

    def __init__(
        self,
        method: StreamMethod[object, I],
        outbox: Outbox,
        call: int,
        credit: SharedCredit,
        on_cancel: Callable[[int], object],
    ) -> None:
        self._method = method
        self._outbox = outbox
        self._call = call
        self._credit = credit
        self._on_cancel = on_cancel
        self._member = CreditSender()
        self._queue: deque[tuple[Received[I], int]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: CutwaterError | None = None
        self._is_over = False

    @property
    def queued(self) -> tuple[int, int]:
        """Items and bytes that were received and not yet taken."""
        return self._member.queued_items, self._member.queued_bytes

    def begin(self) -> tuple[int, int]:
        """Join the credit pool, and return the first credit."""
        self._member, items, size = self._credit.join(self._grant)
        return items, size

    async def receive(self, *, timeout_ms: int | None = None) -> Received[I] | None:
        """Return the next item, or None at the end of the stream.

        Without a timeout it waits as long as the connection lives; the loss of the peer ends the wait too. Only one
        task may wait at a time.
        """
        if not self._queue and not self._is_over:
            try:
                async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1_000):
                    await self._wait()
            except TimeoutError:
                raise DeadlineExceeded(f"{self._method.name}: no item came within {timeout_ms} ms") from None
        return self.receive_nowait()

    async def _wait(self) -> None:
        assert self._waiter is None, "two tasks wait for the same stream"
        try:
            while not self._queue and not self._is_over:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        finally:
            self._waiter = None

    def receive_nowait(self) -> Received[I] | None:
        """Return an item that was received already, or None."""
        if not self._queue:
            if self._error is not None:
                raise self._error
            return None
        item, size = self._queue.popleft()
        self._credit.pool.consumed(self._member, 1, size)
        self._credit.settle()
        return item

    def cancel(self) -> None:
        """End the stream, and drop received items that were not taken."""
        if not self._is_over:
            self._on_cancel(self._call)
            self.end(None)
        self._queue.clear()
        self._credit.pool.consumed(self._member, *self.queued)
        self._credit.settle()

    def __aiter__(self) -> StreamReceiver[I]:
        return self

    async def __anext__(self) -> Received[I]:
        item = await self.receive()
        if item is None:
            raise StopAsyncIteration
        return item

    async def __aenter__(self) -> StreamReceiver[I]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    # Calls from the connection.

    def item(self, frame: WireFrame) -> None:
        header: ItemHeader = frame.header
        received = Received(self._method.result_of(header.value), frame.body)
        self._credit.pool.received(self._member, frame.size, header.backlog_items, header.backlog_bytes)
        self._queue.append((received, frame.size))
        self._wake()

    def blocked(self, header: BlockedHeader) -> None:
        backlog = header.backlog_items, header.backlog_bytes
        self._credit.pool.blocked(
            self._member, header.next_bytes, header.returned_items, header.returned_bytes, backlog
        )
        self._credit.settle()

    def end(self, error: CutwaterError | None) -> None:
        """End the stream. Items received already can still be taken."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._wake()
            self._credit.leave(self._member)

    def _grant(self, items: int, size: int) -> None:
        self._outbox.send(FrameKind.CREDIT, self._call, ENCODE((items, size)))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
