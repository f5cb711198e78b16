"""Collects frames to send: all frames of one turn of the event loop are written to the transport together.

Small parts are joined, which is the cheapest way to write them. Large parts are written as they are.

A transport that takes whole frames gets each frame at once, since it keeps them until the next turn by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cutwater.protocol.errors import FrameTooLarge
from cutwater.protocol.methods import Body, Payload
from cutwater.wire.codec import LARGE_BYTES
from cutwater.wire.inprocess_transport import InProcessTransport
from cutwater.wire.messages import FIXED_BYTES, PACK_FIXED

JOIN_BYTES_MAX = 16 * 1024
"""Parts above this are not joined with others."""
FLUSH_BYTES = 256 * 1024
"""Above this, a write does not wait for the end of the turn."""


class Outbox:
    """Frames that wait to be written.

    A sender of much data checks ``is_busy`` first. Requests and notices are refused while it ``is_full``. If more than
    ``bytes_max`` waits, the outbox drops everything and accepts nothing more. It calls ``overflow`` in the next turn,
    when no other code is half-way through its work.

    A transport tries to write first, so it may report that it is full only after this turn of the event loop. Therefore
    more than ``high`` waiting bytes make the outbox busy for this turn, and ``on_settled`` is called in the next.
    """

    __slots__ = (
        "_by_frame",
        "_bytes",
        "_has_large",
        "_high",
        "_loop",
        "_on_settled",
        "_overflow",
        "_parts",
        "_transport",
        "bytes_max",
        "frame_bytes_max",
        "header_bytes_max",
        "is_busy",
        "is_paused",
        "position",
        "will_flush",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        high: int,
        bytes_max: int,
        header_bytes_max: int,
        on_settled: Callable[[], None],
        overflow: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._by_frame: InProcessTransport | None = None
        """The same transport, if it takes whole frames."""
        self._high = high
        self._on_settled = on_settled
        self._overflow = overflow
        self._parts: list[Body] = []
        self._bytes = 0
        self._has_large = False
        self.position = 0
        """Bytes that were ever sent. The operating system has taken all of them except the last ``size``."""
        self.will_flush = False
        """``flush`` will be called before this turn ends. Code that sets this must call it."""
        self.is_paused = False
        """The transport has paused writing."""
        self.is_busy = False
        """The transport has paused writing, or will probably do so in the next turn."""
        self.bytes_max = bytes_max
        self.frame_bytes_max = self.header_bytes_max = header_bytes_max
        """What the peer takes. Small, until the peer has sent its limits."""

    @property
    def is_full(self) -> bool:
        """The peer does not read. The other half of ``bytes_max`` is for answers, which cannot be refused."""
        return self.is_busy and 2 * self.size > self.bytes_max

    @property
    def size(self) -> int:
        """Bytes that the operating system has not taken yet."""
        return self._bytes + (self._transport.get_write_buffer_size() if self._transport is not None else 0)

    def pause(self) -> None:
        self.is_paused = self.is_busy = True

    def resume(self) -> None:
        self.is_paused = self.is_busy = False

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._by_frame = transport if isinstance(transport, InProcessTransport) else None

    def detach(self) -> None:
        """Drop what has not been written. Nothing can be sent any more."""
        self._transport = self._by_frame = None
        self._parts = []
        self.position -= self._bytes
        self._bytes = 0
        self._has_large = False

    def send(self, kind: int, call: int, header: bytes, body: Payload = b"", *, is_alone: bool = False) -> None:
        """Send a frame.

        ``is_alone``: this turn will probably send nothing else, so the frame is written without waiting for more.
        """
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
        self.position += FIXED_BYTES + len(header) + size
        if self._by_frame is not None:
            self._by_frame.write_frame(kind, call, header, lasting(parts))
            waiting = self._by_frame.get_write_buffer_size()
            if waiting > self._high:
                self._fall_behind(waiting)
            return
        head = PACK_FIXED(size, len(header), call, kind, 0) + header
        self._parts.append(head)
        if parts:
            self._parts += parts
            if size > JOIN_BYTES_MAX:
                self._has_large = True
        self._bytes += len(head) + size
        if self._bytes > FLUSH_BYTES or (is_alone and not self.will_flush):
            self._write()
        elif not self.will_flush:
            self.will_flush = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self.will_flush = False
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
            self._fall_behind(waiting)

    def _fall_behind(self, waiting: int) -> None:
        """Note that the transport has this many bytes left to send."""
        if not self.is_busy:
            self.is_busy = True
            self._loop.call_soon(self._settle)
        if waiting > self.bytes_max:
            self.detach()
            self._loop.call_soon(self._overflow, waiting)

    def _settle(self) -> None:
        self.is_busy = self.is_paused
        self._on_settled()


def lasting(pieces: Sequence[Body]) -> Body:
    """Join the pieces to a body that cannot change any more, and copy only where needed.

    A small body is always ``bytes``. A large view of ``bytes`` is kept, unless it would keep much more in memory than
    itself. Any other view is copied, since its owner may go on to write to it.
    """
    if not pieces:
        return b""
    if len(pieces) > 1:
        return b"".join(pieces)
    (piece,) = pieces
    if type(piece) is bytes:
        return piece
    if isinstance(piece, memoryview) and len(piece) > LARGE_BYTES and piece.c_contiguous:
        whole = piece.obj
        if type(whole) is bytes and 2 * len(piece) >= len(whole):
            return piece
    return bytes(piece)


def _plain(piece: Body) -> Body:
    """Return the piece, as a view whose length is its number of bytes."""
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
