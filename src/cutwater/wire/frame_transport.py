"""Frames that change hands whole, between two sides in one process: nothing is encoded into a stream of bytes and cut
out of it again, and a large body is not copied.

A transport that can do that is a ``FrameTransport``. What it brings lies in a ``FrameQueue``, which stands where
``FrameDecoder`` does for bytes: the same limits, the same question before a large message is taken, the same errors.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from cutwater.protocol.errors import FrameTooLarge
from cutwater.protocol.methods import Body
from cutwater.wire.codec import LARGE_BYTES, Admit, whole_frame
from cutwater.wire.messages import FIXED_BYTES, Frame

TURN_BYTES_MAX = 4 * 1024 * 1024
"""What one side gets to read in one turn of the loop: others want their turn, too."""


class FrameQueue:
    """What was sent and not yet taken. It is the sender's: who sends counts ``waiting_bytes`` as unsent, and its limits
    hold for them.

    Until ``limit`` was called, nothing is taken out of it.
    """

    __slots__ = ("_admit", "_turn_bytes", "_waiting", "frame_bytes_max", "frames", "header_bytes_max", "waiting_bytes")

    is_amid_frame = False
    held_bytes = 0

    def __init__(self) -> None:
        self.frame_bytes_max = self.header_bytes_max = 0
        self.frames = 0
        """How many were ever taken."""
        self.waiting_bytes = 0
        self._admit: Admit | None = None
        self._turn_bytes = 0
        """How much may still be taken in this turn of the loop."""
        self._waiting: deque[tuple[int, int, bytes, Body]] = deque()

    def limit(self, bytes_max: int, admit: Admit) -> None:
        """``bytes_max`` is for the greeting; both limits grow after it."""
        self.frame_bytes_max = self.header_bytes_max = bytes_max
        self._admit = admit

    def put(self, kind: int, call: int, header: bytes, body: Body) -> None:
        self._waiting.append((kind, call, header, body))
        self.waiting_bytes += FIXED_BYTES + len(header) + len(body)

    def begin_turn(self) -> None:
        self._turn_bytes = TURN_BYTES_MAX

    def next_frame(self) -> Frame | None:
        """The next one, or None if there is none, or the turn is over."""
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
            return Frame(kind, 0, call, None, b"", size, True)
        return whole_frame(kind, 0, call, header, body, size)

    def clear(self) -> None:
        self._waiting.clear()
        self.waiting_bytes = 0


class FrameProtocol(asyncio.BufferedProtocol):
    """A protocol that also takes frames."""

    @abstractmethod
    def frames_received(self) -> None:
        """There is something in the ``inbox`` of the transport."""


class FrameTransport(asyncio.Transport):
    """``inbox`` is what its own protocol has yet to take."""

    inbox: FrameQueue

    @abstractmethod
    def write_frame(self, kind: int, call: int, header: bytes, body: Body) -> None:
        """The body must not change any more, and is not copied."""


def lasting(pieces: Sequence[Body]) -> Body:
    """A body in one piece that nobody can change any more, copied only if it has to be.

    Small ones are ``bytes`` always. Of the others, a view of ``bytes`` may stay what it is, unless it would keep much
    more in memory than itself. Any other view may be of something that its owner goes on to write to.
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
