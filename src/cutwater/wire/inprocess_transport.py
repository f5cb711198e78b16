"""Connects two sides that run on the same event loop: whole frames are passed without sockets (ADR 0031).

A server that allows it can be reached this way from its own event loop, at its usual address. All other peers go
through the operating system. The same ``Connection`` runs on both ends, with the same greetings, limits and errors, so
it behaves as over a socket. Frames are delivered in the next turn of the loop, as a socket would, and a side that does
not read makes the other one wait. Headers are encoded, frames are not: a body is not copied on the way, so what is sent
must never change afterwards (``outbox.lasting``).

``FrameQueue`` takes the place of the ``FrameDecoder`` for bytes: it has the same limits, asks the same question before
it takes a large message, and raises the same errors. One conformance suite runs on this and on every other transport.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from cutwater.protocol.errors import FrameTooLarge
from cutwater.protocol.methods import Body
from cutwater.runtime import system
from cutwater.wire.codec import LARGE_BYTES, Admit, whole_frame
from cutwater.wire.messages import FIXED_BYTES, WireFrame

if TYPE_CHECKING:
    from cutwater.wire.connection import Connection

TURN_BYTES_MAX = 4 * 1024 * 1024
"""Bytes that one side may read in one turn of the event loop, so that others get their turn."""

Door = Callable[[], "Connection"]
"""Returns the other end of a new connection."""

_doors: dict[tuple[asyncio.AbstractEventLoop, int, str, int], Door] = {}
"""By event loop, process, host and port. An event loop may simulate several processes."""


def open_door(host: str, port: int, door: Door) -> Callable[[], None]:
    """Accept connections from this event loop at this address. Returns a function that ends it."""
    key = asyncio.get_running_loop(), system.process_id(), host, port
    _doors[key] = door

    def close() -> None:
        _doors.pop(key, None)

    return close


def door_to(host: str, port: int) -> Door | None:
    return _doors.get((asyncio.get_running_loop(), system.process_id(), host, port))


def forget_doors(loop: asyncio.AbstractEventLoop) -> None:
    """Forget what servers have left that were never closed, on an event loop that has ended."""
    for key in [key for key in _doors if key[0] is loop]:
        del _doors[key]


def attach(connection: Connection, door: Door, host: str, port: int) -> None:
    """Connect ``connection`` to the other end that ``door`` returns."""
    other = door()
    loop = asyncio.get_running_loop()
    near, far = InProcessTransport(loop, connection, (host, port)), InProcessTransport(loop, other, (host, 0))
    near.peer, far.peer = far, near
    other.connection_made(far)
    connection.connection_made(near)


class FrameQueue:
    """Frames that were sent and not yet taken. They count as unsent bytes of the sender (``waiting_bytes``), so the
    sender's limits apply to them.

    No frame is taken out before ``limit`` was called.
    """

    __slots__ = ("_admit", "_turn_bytes", "_waiting", "frame_bytes_max", "frames", "header_bytes_max", "waiting_bytes")

    is_amid_frame = False
    held_bytes = 0

    def __init__(self) -> None:
        self.frame_bytes_max = self.header_bytes_max = 0
        self.frames = 0
        """Number of frames that were ever taken."""
        self.waiting_bytes = 0
        self._admit: Admit | None = None
        self._turn_bytes = 0
        """Bytes that may still be taken in this turn of the event loop."""
        self._waiting: deque[tuple[int, int, bytes, Body]] = deque()

    def limit(self, bytes_max: int, admit: Admit) -> None:
        """Set the limit for the greeting. Both limits are raised after it."""
        self.frame_bytes_max = self.header_bytes_max = bytes_max
        self._admit = admit

    def put(self, kind: int, call: int, header: bytes, body: Body) -> None:
        self._waiting.append((kind, call, header, body))
        self.waiting_bytes += FIXED_BYTES + len(header) + len(body)

    def begin_turn(self) -> None:
        self._turn_bytes = TURN_BYTES_MAX

    def next_frame(self) -> WireFrame | None:
        """Return the next frame, or None if there is none or the turn is over."""
        if not self._waiting or self._turn_bytes <= 0 or self._admit is None:
            return None
        kind, call, header, body = self._waiting.popleft()
        size = len(header) + len(body)
        self.waiting_bytes -= FIXED_BYTES + size
        self._turn_bytes -= FIXED_BYTES + size
        if len(header) > self.header_bytes_max:
            raise FrameTooLarge("a header", len(header), self.header_bytes_max)
        if size > self.frame_bytes_max:
            raise FrameTooLarge("a message", size, self.frame_bytes_max)
        self.frames += 1
        if size > LARGE_BYTES and not self._admit(kind, call, size):
            return WireFrame(kind, 0, call, None, b"", size, True)
        return whole_frame(kind, 0, call, header, body, size)

    def clear(self) -> None:
        self._waiting.clear()
        self.waiting_bytes = 0


class InProcessTransport(asyncio.Transport):
    """One end of a connection. Its inbox holds frames of the other end that its own protocol has not taken yet."""

    peer: InProcessTransport

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: Connection, peer_address: tuple[str, int]) -> None:
        super().__init__({"peername": peer_address})
        self._loop, self._protocol = loop, protocol
        self.inbox = FrameQueue()
        self._high, self._low = 64 * 1024, 16 * 1024
        self._is_due = self._is_reading_paused = self._is_writing_paused = False
        self._is_closing = self._is_lost = False
        self._has_peer_ended = False

    # Calls from the protocol.

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        self._is_reading_paused = False
        self._deliver_soon()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self.peer.inbox.waiting_bytes

    def write_frame(self, kind: int, call: int, header: bytes, body: Body) -> None:
        if self._is_closing:
            return
        peer = self.peer
        if peer._is_lost:
            # The peer will not read it. Frames that the peer wrote before it closed must still be read here.
            self._deliver_soon()
            return
        peer.inbox.put(kind, call, header, body)
        peer._deliver_soon()
        if peer.inbox.waiting_bytes > self._high and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.peer._has_peer_ended = True
        self.peer._deliver_soon()

    def close(self) -> None:
        """Close this end. What was written is still delivered."""
        if not self._is_closing:
            self.write_eof()
            self._lose(None)

    def abort(self) -> None:
        self._lose(None)
        self.peer._lose(ConnectionResetError("the connection was reset by the peer"))

    # Delivery between the two ends.

    def _lose(self, error: Exception | None) -> None:
        self._is_closing = True
        if not self._is_lost:
            self._is_lost = True
            self.inbox.clear()
            self._loop.call_soon(self._protocol.connection_lost, error)
            self._loop.call_soon(self.peer._let_write)

    def _deliver_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_due = False
        inbox = self.inbox
        if inbox.waiting_bytes and not self._is_reading_paused:
            inbox.begin_turn()
            self._protocol.frames_received()
        if self._is_lost:
            return
        if inbox.waiting_bytes <= self.peer._low:
            self.peer._let_write()
        if inbox.waiting_bytes:
            if not self._is_reading_paused:
                self._deliver_soon()
        elif self.peer._is_lost:
            # A side that stopped reading because it cannot write would wait for ever.
            self._protocol.eof_received()
            self.close()
        elif self._has_peer_ended and not self._is_reading_paused and not self._protocol.eof_received():
            self.close()

    def _let_write(self) -> None:
        """Resume writing: the other side has room, or is gone."""
        if self._is_writing_paused:
            self._is_writing_paused = False
            if not self._is_lost:
                self._protocol.resume_writing()
