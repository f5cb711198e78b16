"""Passes whole frames between two sides in one process.

Frames are not encoded into a stream of bytes and decoded again, and a large body is not copied.

A ``FrameTransport`` is a transport that can do this. It delivers into a ``FrameQueue``, which takes the place of the
``FrameDecoder`` for bytes: it has the same limits, asks the same question before it takes a large message, and raises
the same errors.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from cutwater.protocol.errors import FrameTooLarge
from cutwater.protocol.methods import Body
from cutwater.wire.codec import LARGE_BYTES, Admit, whole_frame
from cutwater.wire.messages import FIXED_BYTES, WireFrame

TURN_BYTES_MAX = 4 * 1024 * 1024
"""Bytes that one side may read in one turn of the event loop, so that others get their turn."""


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


class FrameProtocol(asyncio.BufferedProtocol):
    """A protocol that also receives whole frames."""

    @abstractmethod
    def frames_received(self) -> None:
        """Called when there are frames in the ``inbox`` of the transport."""


class FrameTransport(asyncio.Transport):
    """A transport of whole frames. ``inbox`` holds the frames that its own protocol has not taken yet."""

    inbox: FrameQueue

    @abstractmethod
    def write_frame(self, kind: int, call: int, header: bytes, body: Body) -> None:
        """Send a frame. The body is not copied, so it must not change afterwards."""


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
