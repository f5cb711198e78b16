"""What waits to be written: everything of one turn of the event loop goes to the transport in one piece.

Small parts are joined, which is cheaper than any other way to hand them over. Large ones are passed on as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cutwater.wire.codec import encode_head
from cutwater.wire.errors import FrameTooLarge
from cutwater.wire.frames import Body, Payload

JOIN_BYTES_MAX = 16 * 1024
"""Parts above this are not joined with others."""
FLUSH_BYTES = 256 * 1024
"""Above this, writing does not wait for the end of the turn."""


class Outbox:
    """Whoever has much to send looks at ``is_busy`` first. ``overflow`` is called if more waits than ``bytes_max``.

    ``paused`` is what the transport says; it may say so only after this turn of the event loop, since it tries to write
    first. Until then ``is_crowded`` tells that it has more than ``high``; ``on_settled`` is called in the next turn.
    """

    __slots__ = (
        "_bytes",
        "_has_large",
        "_high",
        "_loop",
        "_on_settled",
        "_overflow",
        "_parts",
        "_scheduled",
        "_transport",
        "bytes_max",
        "frame_bytes_max",
        "header_bytes_max",
        "is_crowded",
        "paused",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        high: int,
        bytes_max: int,
        on_settled: Callable[[], None],
        overflow: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._high = high
        self._on_settled = on_settled
        self._overflow = overflow
        self._parts: list[Body] = []
        self._bytes = 0
        self._has_large = False
        self._scheduled = False
        self.paused = False
        self.is_crowded = False
        self.bytes_max = bytes_max
        self.frame_bytes_max = self.header_bytes_max = FLUSH_BYTES
        """What the peer takes. Little, until it has said how much."""

    @property
    def is_busy(self) -> bool:
        return self.paused or self.is_crowded

    @property
    def size(self) -> int:
        """Bytes that the operating system has not taken yet."""
        return self._bytes + (self._transport.get_write_buffer_size() if self._transport is not None else 0)

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def detach(self) -> None:
        """Drop what is left; nothing can be sent any more."""
        self._transport = None
        self._parts.clear()
        self._bytes = 0

    def send(self, kind: int, call: int, header: bytes, body: Payload = b"", *, is_alone: bool = False) -> None:
        """``is_alone``: nothing else is likely to be sent in this turn, so there is nothing to wait for."""
        parts: tuple[Body, ...]
        if type(body) is bytes:
            size = len(body)
            parts = (body,) if size else ()
        else:
            parts = tuple(_plain(piece) for piece in (body if isinstance(body, list | tuple) else (body,)))
            size = sum(len(piece) for piece in parts)
        if len(header) > self.header_bytes_max:
            raise FrameTooLarge("a header", len(header), self.header_bytes_max)
        if size + len(header) > self.frame_bytes_max:
            raise FrameTooLarge("a message", size + len(header), self.frame_bytes_max)
        if self._transport is None:
            return
        head = encode_head(kind, call, header, size)
        self._parts.append(head)
        if parts:
            self._parts += parts
            if size > JOIN_BYTES_MAX:
                self._has_large = True
        self._bytes += len(head) + size
        if self._bytes > FLUSH_BYTES or (is_alone and not self._scheduled):
            self._write()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def cork(self) -> None:
        """The caller will ``flush`` before this turn ends."""
        self._scheduled = True

    def flush(self) -> None:
        self._scheduled = False
        if self._parts:
            self._write()

    def _write(self) -> None:
        transport, parts = self._transport, self._parts
        if transport is None:
            return
        self._parts = []
        self._bytes = 0
        if len(parts) == 1:
            transport.write(parts[0])
        elif not self._has_large:
            transport.write(b"".join(parts))
        else:
            self._has_large = False
            _write_apart(transport, parts)
        waiting = transport.get_write_buffer_size()
        if waiting > self._high:
            if not self.is_busy:
                self.is_crowded = True
                self._loop.call_soon(self._settle)
            if waiting > self.bytes_max:
                self._overflow(waiting)

    def _settle(self) -> None:
        self.is_crowded = False
        self._on_settled()


def _plain(piece: Body) -> Body:
    """A view whose length is its number of bytes."""
    if isinstance(piece, memoryview) and (piece.itemsize != 1 or piece.ndim != 1):
        return piece.cast("B")
    return piece


def _write_apart(transport: asyncio.Transport, parts: list[Body]) -> None:
    small: list[Body] = []
    for part in parts:
        if len(part) <= JOIN_BYTES_MAX:
            small.append(part)
            continue
        if small:
            transport.write(b"".join(small))
            small = []
        transport.write(part)
    if small:
        transport.write(b"".join(small))
