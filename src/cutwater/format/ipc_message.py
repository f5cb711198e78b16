"""Reads the metadata of an Arrow IPC message, without Arrow and before Arrow sees it.

It finds the buffers, their places, and their size after decompression. Everything is read by ``struct`` from a buffer
of known size, so the worst that a hostile message can do is to raise ``BadMessage``. The tables and fields are those of
``Message.fbs`` in Arrow's format.
"""

from __future__ import annotations

import struct
from operator import add
from typing import Final, NamedTuple

from cutwater.format.checksum import Buffer

_CONTINUATION: Final = b"\xff\xff\xff\xff"
_INT = struct.Struct("<i")
_UINT = struct.Struct("<I")
_SHORT = struct.Struct("<H")
_LONG = struct.Struct("<q")

_RECORD_BATCH = 3
_VERSION_5 = 4
"""Message versions count from 0. In older ones compression may be declared in free text."""
_VECTOR_MAX = 1 << 20
"""More columns or buffers than this are implausible."""
_NOT_COMPRESSED = -1


class BadMessage(Exception):
    """The bytes are not exactly one record batch message. The text says why."""


class Message(NamedTuple):
    """A record batch message.

    ``offsets`` and ``lengths`` are those of its buffers, relative to ``data_at``. ``values`` is the number of values of
    each column, including nested ones. ``inflated_bytes`` is the declared size of all buffers after decompression.
    """

    records: int
    values: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    is_compressed: bool
    data_at: int
    inflated_bytes: int


def read_message(body: Buffer) -> Message:
    """Read a message. Raises ``BadMessage`` unless it is exactly one record batch whose buffers are all within it."""
    try:
        return _read(body)
    except (struct.error, IndexError) as error:
        raise BadMessage("its metadata points outside of it") from error


def may_be_compressed(body: Buffer) -> bool:
    """Return whether the columns of a record batch must be decompressed.

    Uncompressed columns cost nothing until they are used. Malformed messages count as compressed: their reader will
    report what is wrong.
    """
    try:
        return bool(_fields(body, _follow(body, _fields(body, _follow(body, 8))[2]))[3])
    except (struct.error, BadMessage):
        return True


def _read(body: Buffer) -> Message:
    if bytes(body[:4]) != _CONTINUATION:
        raise BadMessage("it does not begin as an Arrow IPC message does")
    metadata_bytes = _INT.unpack_from(body, 4)[0]
    data_at = 8 + metadata_bytes
    if metadata_bytes < 8 or metadata_bytes % 8 or data_at > len(body):
        raise BadMessage(f"its metadata has {metadata_bytes} bytes, of {len(body)} in all")
    metadata = bytes(body[:data_at])
    message = _follow(metadata, 8)
    version_at, kind_at, header_at, size_at = _fields(metadata, message)
    if not version_at or _SHORT.unpack_from(metadata, version_at)[0] != _VERSION_5:
        raise BadMessage("it is not of version 5 of the Arrow format")
    if not kind_at or metadata[kind_at] != _RECORD_BATCH or not header_at:
        raise BadMessage("it is an Arrow IPC message, but no record batch")
    size = _LONG.unpack_from(metadata, size_at)[0] if size_at else 0
    if size != len(body) - data_at:
        raise BadMessage(f"it says that {size} bytes of columns follow, and {len(body) - data_at} do")
    batch = _follow(metadata, header_at)
    count_at, nodes_at, buffers_at, compression_at = _fields(metadata, batch)
    count = _LONG.unpack_from(metadata, count_at)[0] if count_at else 0
    buffers = _pairs(metadata, buffers_at)
    offsets, lengths = buffers[::2], buffers[1::2]
    if buffers and (min(buffers) < 0 or max(map(add, offsets, lengths)) > size):
        raise BadMessage(f"a column lies outside of the {size} bytes that all columns have")
    is_compressed = bool(compression_at)
    inflated = sum(lengths)
    if is_compressed:
        inflated = sum(_declared(body, data_at + at, length) for at, length in zip(offsets, lengths, strict=True))
    values = _pairs(metadata, nodes_at)[::2]
    return Message(count, values, offsets, lengths, is_compressed, data_at, inflated)


def _declared(body: Buffer, at: int, length: int) -> int:
    """Return the decompressed size of a buffer, which its first eight bytes declare."""
    if not length:
        return 0
    if length < 8:
        raise BadMessage(f"a compressed column has {length} bytes")
    declared: int = _LONG.unpack_from(body, at)[0]
    if declared == _NOT_COMPRESSED:
        return length - 8
    if declared < 0:
        raise BadMessage(f"a column would have {declared} bytes when it is decompressed")
    return declared


def _follow(data: Buffer, at: int) -> int:
    return at + int(_UINT.unpack_from(data, at)[0])


def _fields(data: Buffer, table: int) -> list[int]:
    """Return where the first four fields of this table lie; 0 for a field that is absent."""
    fields = table - _INT.unpack_from(data, table)[0]
    if fields < 0:
        raise BadMessage("its metadata points outside of it")
    count = min(4, (_SHORT.unpack_from(data, fields)[0] - 4) // 2)
    found = [table + offset if offset else 0 for offset in struct.unpack_from(f"<{max(0, count)}H", data, fields + 4)]
    return found + [0] * (4 - len(found))


def _pairs(data: bytes, at: int) -> tuple[int, ...]:
    """Read a vector of structs of two 64-bit numbers, as one flat tuple."""
    if not at:
        return ()
    start = _follow(data, at)
    count = _UINT.unpack_from(data, start)[0]
    if count > _VECTOR_MAX:
        raise BadMessage(f"its metadata lists {count} columns or buffers")
    return struct.unpack_from(f"<{2 * count}q", data, start + 4)
