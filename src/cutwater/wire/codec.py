"""Decodes frames from bytes. Pure: knows no transport, no clock and no connection.

Small frames are cut out of the received bytes. A large frame that is still incomplete gets a buffer of its own, into
which a transport can receive directly (``target`` and ``filled``), so its bytes are not copied again.

1. Lengths are checked before anything is allocated, and ``admit`` is asked before a large buffer is.
2. For any bytes, the outcome is a frame, None (more bytes are needed), or an error of ``protocol.errors``, after which
   this decoder cannot be used any more. Nothing here executes or instantiates what the bytes name.
3. It holds at most one frame, plus the bytes that were fed and not yet taken.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cutwater.errors import CutwaterError
from cutwater.protocol.errors import FrameTooLarge, MalformedFrame
from cutwater.protocol.methods import Body
from cutwater.wire.messages import FIXED, FIXED_BYTES, HEADERS, PACK_FIXED, WITH_BODY, FrameKind, WireFrame

LARGE_BYTES = 16 * 1024
"""Frames above this size do not wait in the common buffer until they are complete."""

Admit = Callable[[int, int, int], bool]
"""Returns whether there is room for a frame of this kind, call id and size."""

_KINDS_MAX = max(FrameKind) + 1
_BODY_MAX = [0xFFFF_FFFF if kind in WITH_BODY else 0 for kind in range(_KINDS_MAX)]
_HEADER_MAX = [0xFFFF_FFFF if HEADERS.get(kind) is not None else 0 for kind in range(_KINDS_MAX)]
_DECODE = [
    msgspec.msgpack.Decoder(cls).decode if (cls := HEADERS.get(kind)) is not None else None
    for kind in range(_KINDS_MAX)
]

_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)

_unpack_from = FIXED.unpack_from


def encode_frame(kind: int, call: int, header: bytes, body: Body = b"") -> bytes:
    """Encode a frame in one piece. Connections send the pieces without joining them, see ``outbox``."""
    return PACK_FIXED(len(body), len(header), call, kind, 0) + header + body


class FrameDecoder:
    """Decodes frames. ``feed`` it bytes, or receive into ``target`` and call ``filled``; then call ``next_frame``."""

    __slots__ = (
        "_admit",
        "_data",
        "_error",
        "_filled",
        "_fixed",
        "_position",
        "_skip",
        "frame_bytes_max",
        "frames",
        "header_bytes_max",
        "large",
    )

    def __init__(self, frame_bytes_max: int, header_bytes_max: int, admit: Admit | None = None) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.header_bytes_max = header_bytes_max
        self.frames = 0
        self._admit = admit
        self._data = b""
        self._position = 0
        self.large: bytearray | None = None
        """The buffer of a large frame that is being received. ``target`` is the part that is still missing."""
        self._filled = 0
        self._fixed = (0, 0, 0, 0, 0)
        self._skip = 0
        self._error: CutwaterError | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes that the decoder holds now."""
        return len(self._data) - self._position + (len(self.large) if self.large is not None else 0)

    @property
    def is_amid_frame(self) -> bool:
        return self.large is not None or self._skip > 0 or self._position < len(self._data)

    def target(self) -> memoryview | None:
        """Return the buffer for the next bytes, if a large frame is being received."""
        return memoryview(self.large)[self._filled :] if self.large is not None else None

    def filled(self, count: int) -> None:
        """Note that ``count`` bytes were written to the beginning of ``target``."""
        assert self.large is not None
        assert count <= len(self.large) - self._filled
        self._filled += count

    def feed(self, data: bytes) -> None:
        if self.large is not None:
            count = min(len(data), len(self.large) - self._filled)
            self.large[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
        elif self._skip:
            count = min(len(data), self._skip)
            self._skip -= count
            data = data[count:]
        if self._position < len(self._data):
            self._data = self._data[self._position :] + data
        else:
            self._data = data
        self._position = 0

    def next_frame(self) -> WireFrame | None:
        """Return the next complete frame, or None if there is none yet."""
        if self._error is not None:
            raise self._error
        try:
            if self.large is not None:
                return self._finish_large() if self._filled == len(self.large) else None
            data, position = self._data, self._position
            if self._skip or len(data) - position < FIXED_BYTES:
                return None
            fixed = body_bytes, header_bytes, call, kind, flags = _unpack_from(data, position)
            size = header_bytes + body_bytes
            if flags or not 0 < kind < _KINDS_MAX or body_bytes > _BODY_MAX[kind] or header_bytes > _HEADER_MAX[kind]:
                raise MalformedFrame(
                    f"no frame has kind {kind}, flags {flags}, "
                    f"a header of {header_bytes} bytes and a body of {body_bytes}"
                )
            if header_bytes > self.header_bytes_max:
                raise FrameTooLarge("a header", header_bytes, self.header_bytes_max)
            if size > self.frame_bytes_max:
                raise FrameTooLarge("a message", size, self.frame_bytes_max)
            start = position + FIXED_BYTES
            end = start + size
            if end > len(data):
                return self._begin_large(fixed) if size > LARGE_BYTES else None
            middle = start + header_bytes
            self._position = end
            self.frames += 1
            decode = _DECODE[kind]
            try:
                header = None if decode is None else decode(data[start:middle])
            except _DECODE_ERRORS as error:
                raise _senseless(kind, error) from None
            return WireFrame(kind, flags, call, header, data[middle:end], size)
        except CutwaterError as error:
            self._error = error
            self._data, self._position, self.large, self._skip = b"", 0, None, 0
            raise

    def _begin_large(self, fixed: tuple[int, int, int, int, int]) -> WireFrame | None:
        """Begin a large frame: its fixed part was received, the rest was not."""
        body_bytes, header_bytes, call, kind, flags = fixed
        size = header_bytes + body_bytes
        rest = self._data[self._position + FIXED_BYTES :]
        self._data, self._position = b"", 0
        if self._admit is not None and not self._admit(kind, call, size):
            self._skip = size - len(rest)
            self.frames += 1
            return WireFrame(kind, flags, call, None, b"", size, True)
        self._fixed = fixed
        self.large = bytearray(size)
        self.large[: len(rest)] = rest
        self._filled = len(rest)
        return None

    def _finish_large(self) -> WireFrame:
        assert self.large is not None
        body_bytes, header_bytes, call, kind, flags = self._fixed
        view = memoryview(self.large).toreadonly()
        self.large = None
        self.frames += 1
        return whole_frame(
            kind, flags, call, bytes(view[:header_bytes]), view[header_bytes:], header_bytes + body_bytes
        )


def whole_frame(kind: int, flags: int, call: int, header: bytes, body: Body, size: int) -> WireFrame:
    """Return a frame of a known kind, whose header is still encoded."""
    decode = _DECODE[kind]
    if decode is None:
        return WireFrame(kind, flags, call, None, body, size)
    try:
        return WireFrame(kind, flags, call, decode(header), body, size)
    except _DECODE_ERRORS as error:
        raise _senseless(kind, error) from None


def _senseless(kind: int, error: Exception) -> MalformedFrame:
    return MalformedFrame(f"the header of a {FrameKind(kind).name} frame makes no sense: {error}")
