"""The bytes of files: layout of headers, marks, index points, commit contexts and small whole files. Pure.

All numbers are little-endian. Every file begins with the same 16 bytes, in every version of the format: magic, version,
and a checksum of both. So a file of a newer version can be told apart from a damaged one before anything else is read.
The layout of frames, which also travel over the wire, is in ``format/entry_codec.py``. ``docs/data-files.md`` describes
all layouts.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct as Layout
from typing import TypeVar

import msgspec
from msgspec import Struct

from cutwater.format.checksum import Buffer, crc32c
from cutwater.format.entry_codec import NO_TIME, NUMBER_MAX, RunningEventTime
from cutwater.format.errors import DamagedFile, NewerFormat
from cutwater.types import GLSN, LLSN, CommitContext, CutTime, Epoch, EventTime

VERSION = 1

SEGMENT = b"CWSEGMNT"
COMMITS = b"CWCOMMIT"
MANIFEST = b"CWMANIFS"
HARD_STATE = b"CWHARDST"
DEDUP = b"CWDEDUPL"
NODE = b"CWNODEID"
STAGED = b"CWSTAGED"

SECTOR_BYTES = 512
"""Size of an atomic disk write. Nothing that is rewritten in place shares a sector with anything else."""

HEADER_BYTES = 4 * SECTOR_BYTES
"""The header of a segment or commit file: a sector that never changes, two for the mark, written in turn, and the first
sector again.
"""

POINT_BYTES = 16
CONTEXT_BYTES = 64

_PREFIX = Layout("<8sHHI")
_CRC = Layout("<I")
_WHOLE = Layout("<II")
_HEADER = Layout("<QQIIBqq")
_MARK = Layout("<QQQBqq")
_POINT = Layout("<QII")
_CONTEXT = Layout("<QQQQqQIII")
_CONTEXT_AND_CRC = Layout(_CONTEXT.format + "I")
_CONTEXT_MAGIC = 0x43435743


class FileHeader(Struct, frozen=True):
    """The unchanging header of a segment or commit file.

    ``running`` is event time before the first entry. ``points`` is the room for index points, and a new one is due
    every ``interval`` bytes; both are 0 in commit files.
    """

    generation: int
    first_llsn: LLSN
    points: int = 0
    interval: int = 0
    running: RunningEventTime = NO_TIME

    @property
    def data_start(self) -> int:
        """Offset at which the header and the index end. It is a multiple of the sector size."""
        sectors = -(-self.points * POINT_BYTES // SECTOR_BYTES)
        return HEADER_BYTES + sectors * SECTOR_BYTES


class SyncMark(Struct, frozen=True):
    """Notes that everything below ``offset``, the entries up to ``llsn``, was synced. Higher ``sequence`` counts."""

    sequence: int
    offset: int
    llsn: LLSN
    running: RunningEventTime = NO_TIME


class ReplicaManifest(Struct, frozen=True):
    """Identifies a replica's directory, and says which of its files count.

    These are the files of this generation that hold ``first_llsn``, at which the entries begin, or a later LLSN.
    """

    cluster: int
    node: int
    stream: int
    generation: int
    first_llsn: LLSN
    has_commits: bool = False
    """A commit in this generation is durable, so there must be a file of commits."""


# Common to all files.


def _prefix(magic: bytes) -> bytes:
    start = _PREFIX.pack(magic, VERSION, 0, 0)[:12]
    return start + _CRC.pack(crc32c(start))


def check_prefix(data: Buffer, magic: bytes, path: Path) -> None:
    """Raise unless this is the beginning of a file of this kind, in a version that this release can read."""
    if len(data) < _PREFIX.size:
        raise DamagedFile(path, f"{len(data)} bytes are less than its header")
    found, version, reserved, crc = _PREFIX.unpack_from(data)
    if crc != crc32c(bytes(data[:12])):
        raise DamagedFile(path, "the checksum of its first bytes is wrong")
    if found != magic:
        raise DamagedFile(path, f"it begins with {found!r} and not with {magic!r}")
    if version > VERSION:
        raise NewerFormat(str(path), version, VERSION)
    if version < 1 or reserved:
        raise DamagedFile(path, f"no format version {version}")


def _sector(data: bytes) -> bytes:
    """Pad with zeros, and append a checksum."""
    filled = data.ljust(SECTOR_BYTES - _CRC.size, b"\0")
    return filled + _CRC.pack(crc32c(filled))


def _is_sound(sector: bytes) -> bool:
    if len(sector) != SECTOR_BYTES:
        return False
    return crc32c(sector[: -_CRC.size]) == int.from_bytes(sector[-_CRC.size :], "little")


def _pack_running(running: RunningEventTime) -> tuple[int, int, int]:
    flags = (running.time_max is not None) | (running.declared is not None) << 1 | running.idle << 2
    return flags, running.time_max or 0, running.declared or 0


def _unpack_running(flags: int, time_max: int, declared: int) -> RunningEventTime:
    most = EventTime(time_max) if flags & 1 else None
    return RunningEventTime(most, EventTime(declared) if flags & 2 else None, bool(flags & 4))


# Segment and commit files.


def encode_header(magic: bytes, header: FileHeader) -> bytes:
    """Encode the header, one sector."""
    fields = _HEADER.pack(
        header.generation, header.first_llsn, header.points, header.interval, *_pack_running(header.running)
    )
    return _sector(_prefix(magic) + fields)


def decode_header(data: bytes, magic: bytes, path: Path) -> FileHeader:
    check_prefix(data, magic, path)
    if not _is_sound(data[:SECTOR_BYTES]):
        raise DamagedFile(path, "the checksum of its header is wrong")
    generation, first_llsn, points, interval, *running = _HEADER.unpack_from(data, _PREFIX.size)
    return FileHeader(generation, LLSN(first_llsn), points, interval, _unpack_running(*running))


def encode_mark(mark: SyncMark) -> bytes:
    """Encode the mark, one sector."""
    return _sector(_MARK.pack(mark.sequence, mark.offset, mark.llsn, *_pack_running(mark.running)))


def decode_mark(sector: bytes) -> SyncMark | None:
    """Decode a mark. Returns None if there is none, or it is damaged."""
    if not _is_sound(sector):
        return None
    sequence, offset, llsn, *running = _MARK.unpack_from(sector)
    return SyncMark(sequence, offset, LLSN(llsn), _unpack_running(*running)) if sequence else None


def encode_point(llsn: LLSN, offset: int) -> bytes:
    """Encode an index point: the frame at this offset of the file begins with this LLSN."""
    point = _POINT.pack(llsn, offset, 0)[: -_CRC.size]
    return point + _CRC.pack(crc32c(point))


def decode_point(data: bytes) -> tuple[LLSN, int] | None:
    """Decode an index point. Returns None if there is none, or it is damaged."""
    llsn, offset, crc = _POINT.unpack(data)
    if crc != crc32c(data[: -_CRC.size]) or not llsn:
        return None
    return LLSN(llsn), offset


def encode_context(context: CommitContext, number: int) -> bytes:
    """Encode a commit context as the ``number``-th of its file."""
    record = _CONTEXT.pack(
        context.first_llsn,
        context.first_glsn,
        context.high_watermark,
        context.prev_high_watermark,
        context.time,
        context.count,
        context.epoch,
        number,
        _CONTEXT_MAGIC,
    )
    return record + _CRC.pack(crc32c(record))


def decode_context(record: bytes, number: int) -> CommitContext | None:
    """Decode a commit context. Returns None if there is none, it is damaged, or it does not belong here."""
    if len(record) != CONTEXT_BYTES:
        return None
    first_llsn, first_glsn, hwm, prev_hwm, time, count, epoch, found, magic, crc = _CONTEXT_AND_CRC.unpack(record)
    if found != number or magic != _CONTEXT_MAGIC or not count or crc32c(record[: -_CRC.size]) != crc:
        return None
    if max(first_llsn, first_glsn, hwm) + count > NUMBER_MAX or not first_llsn:
        return None
    return CommitContext(
        Epoch(epoch), LLSN(first_llsn), GLSN(first_glsn), count, GLSN(hwm), GLSN(prev_hwm), CutTime(time)
    )


# Small files, which are always replaced as a whole.

T = TypeVar("T")
WHOLE_START_BYTES = _PREFIX.size + _WHOLE.size + _CRC.size


def encode_whole(magic: bytes, body: bytes) -> bytes:
    start = _prefix(magic) + _WHOLE.pack(len(body), crc32c(body))
    return start + _CRC.pack(crc32c(start)) + body


def whole_bytes(start: bytes, path: Path) -> int:
    """Return the length of a whole file, or of a header in that form, from its first ``WHOLE_START_BYTES``."""
    check_prefix(start, start[:8], path)
    if len(start) < WHOLE_START_BYTES:
        raise DamagedFile(path, f"{len(start)} bytes are less than its header")
    return WHOLE_START_BYTES + int(_WHOLE.unpack_from(start, _PREFIX.size)[0])


def decode_whole(data: bytes, magic: bytes, path: Path) -> bytes:
    check_prefix(data, magic, path)
    if len(data) < WHOLE_START_BYTES:
        raise DamagedFile(path, f"{len(data)} bytes are less than its header")
    end = WHOLE_START_BYTES - _CRC.size
    if crc32c(data[:end]) != int.from_bytes(data[end:WHOLE_START_BYTES], "little"):
        raise DamagedFile(path, "the checksum of its header is wrong")
    size, crc = _WHOLE.unpack_from(data, _PREFIX.size)
    body = data[WHOLE_START_BYTES:]
    if len(body) != size:
        raise DamagedFile(path, f"it has {len(body)} bytes after its header and not {size}")
    if crc32c(body) != crc:
        raise DamagedFile(path, "its checksum is wrong")
    return body


def encode_struct(magic: bytes, content: Struct) -> bytes:
    return encode_whole(magic, msgspec.msgpack.encode(content))


def decode_struct(data: bytes, magic: bytes, path: Path, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(decode_whole(data, magic, path), type=kind)
    except msgspec.MsgspecError as error:
        raise DamagedFile(path, f"its checksum is right but its content is not: {error}") from error
