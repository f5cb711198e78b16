"""Keeps what an attempt printed until it is in the topic of logs: the beginning, and the newest part of the rest.

Memory is bounded by ``HEAD_BYTES`` and ``TAIL_BYTES``. What an attempt may append is bounded as well: its first 1 MiB,
then ``TAIL_BYTES`` in an hour, and when it ends, the last ``TAIL_BYTES``. What does not fit is left out, and the offset
of what follows shows it. Time is an argument.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.core.jobs.log_records import HEAD_BYTES, TAIL_BYTES

HOUR_SECONDS = 3_600.0
PIECE_BYTES_MIN = 4_096
"""Less is not appended of a tail that has used up its share, unless that is all of it."""


class LogPiece(Struct, frozen=True):
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class LogBuffer:
    """See the module."""

    def __init__(self, now: float, *, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES) -> None:
        self._head_bytes, self._tail_bytes = head_bytes, tail_bytes
        self._head, self._tail = bytearray(), bytearray()
        self._head_at, self._tail_at = 0, head_bytes
        """Offsets of the first bytes that wait."""
        self._share, self._counted_at = float(tail_bytes), now
        """How much of the tail may be appended now."""
        self.is_ended = False

    def write(self, data: bytes) -> None:
        """Add what was printed. Takes no more memory than it may."""
        if self.is_ended:
            return
        room = max(0, self._head_bytes - self._head_at - len(self._head))
        self._head += data[:room]
        rest = data[room:]
        surplus = len(self._tail) + len(rest) - self._tail_bytes
        if surplus > 0:
            del self._tail[:surplus]
            rest = rest[-self._tail_bytes :]
            self._tail_at += surplus
        self._tail += rest

    def end(self) -> None:
        """Nothing more is written."""
        self.is_ended = True

    @property
    def waiting_bytes(self) -> int:
        return len(self._head) + len(self._tail)

    @property
    def is_done(self) -> bool:
        return self.is_ended and not self.waiting_bytes

    def next(self, bytes_max: int, now: float) -> LogPiece | None:
        """Return the next piece to append, or None if there is none now. It stays until ``appended``."""
        if self._head:
            return LogPiece(self._head_at, bytes(self._head[:bytes_max]))
        passed, self._counted_at = now - self._counted_at, now
        self._share = min(float(self._tail_bytes), self._share + passed * self._tail_bytes / HOUR_SECONDS)
        share = bytes_max if self.is_ended else min(bytes_max, int(self._share))
        piece = bytes(self._tail[:share])
        if not piece or (len(piece) < PIECE_BYTES_MIN and len(piece) < len(self._tail)):
            return None
        return LogPiece(self._tail_at, piece)

    def appended(self, piece: LogPiece) -> None:
        """Forget a piece that is in the topic. Parts of it may have been left out meanwhile."""
        if piece.offset < self._head_bytes:
            del self._head[: len(piece.data)]
            self._head_at = piece.end
            return
        self._share -= len(piece.data)
        dropped = piece.end - self._tail_at
        if dropped > 0:
            del self._tail[:dropped]
            self._tail_at = piece.end
