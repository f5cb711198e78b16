"""Encodes one log entry as a frame. A frame is the same on every replica, in files and on the wire. Pure.

::

    header    fixed part, the producer's name, the group's tag, CRC32C of all three
    body      opaque; its CRC32C, which the client computed, is in the header
    trailer   length, first LLSN, the header's CRC32C again, CRC32C of the trailer

The trailer lets a reader walk backwards, so that a damaged header does not hide where its frame begins and ends.
``RunningEventTime`` in the header is event time *before* this batch. With the batch's own maximum it gives the time
after it. So a reader that starts here needs nothing from before, which may be trimmed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from struct import Struct as Layout
from typing import Protocol

from msgspec import Struct, structs

from cutwater.errors import Damaged, InvalidArgument
from cutwater.format.checksum import Buffer, crc32c
from cutwater.format.errors import NewerFormat
from cutwater.types import (
    LLSN,
    Batch,
    BatchKind,
    BatchNumber,
    DecisionIndex,
    Entry,
    Epoch,
    EventTime,
    GroupTag,
    ProducerEpoch,
    ProducerId,
    ProducerTag,
    RunId,
)
from cutwater.types import Sequence as BatchSequence

NUMBER_MAX = (1 << 63) - 1
"""Largest LLSN or GLSN."""
FRAME_VERSION = 3
"""The newest version that this release reads."""
_PLAIN_VERSION, _GROUP_VERSION, _DECLARATION_VERSION = 1, 2, 3
"""A frame has the oldest version that can express it.

Version 2 is for frames of a group: code that knows only version 1 could cut a group in two. Version 3 is for
declarations without a record, and for idleness that is declared with a record: older code does not know that kind, and
would overlook that flag.
"""
FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Largest frame. It is far above what the wire lets through."""
BODY_BYTES_MAX = 16 * 1024 * 1024 - 64 * 1024
"""Largest body. One message of the wire must carry it to readers, together with its commits."""
PRODUCER_BYTES_MAX = 1024

_MAGIC = b"CWFR"
_FIXED = Layout("<4sBBHHHIIIQqqqqqQQII")
_GROUP = Layout("<QQQQQ")
_CRC = Layout("<I")
_TRAILER_START = Layout("<IQI")
_TRAILER = Layout(_TRAILER_START.format + "I")

TRAILER_BYTES = _TRAILER.size
HEADER_BYTES_MIN = _FIXED.size + _CRC.size
HEADER_BYTES_MAX = HEADER_BYTES_MIN + PRODUCER_BYTES_MAX + _GROUP.size

_HAS_PRODUCER, _HAS_DECLARED, _HAS_RUNNING_MAX, _HAS_RUNNING_DECLARED = 1, 2, 4, 8
_MORE, _HAS_GROUP = 16, 32
_IDLE, _RUNNING_IDLE = 64, 128
_CHECKED = 256
_KINDS = frozenset(map(int, BatchKind))


class Timed(Protocol):
    """Something that can advance event time: a batch, or the header of a frame."""

    @property
    def kind(self) -> BatchKind: ...
    @property
    def time_max(self) -> EventTime: ...
    @property
    def declared(self) -> EventTime | None: ...
    @property
    def idle(self) -> bool: ...


class RunningEventTime(Struct, frozen=True):
    """Event time of a log stream before some entry.

    These are the maximum of its records and the maximum that its producers declared; None if there was none yet.
    ``idle``: the last entry before it declares idleness.
    """

    time_max: EventTime | None = None
    declared: EventTime | None = None
    idle: bool = False

    def after(self, batch: Timed) -> RunningEventTime:
        """Return event time after one more batch. Fences and declarations hold no records."""
        time_max, declared = self.time_max, self.declared
        if batch.kind is BatchKind.DATA and (time_max is None or batch.time_max > time_max):
            time_max = batch.time_max
        if batch.declared is not None and (declared is None or batch.declared > declared):
            declared = batch.declared
        if time_max == self.time_max and declared == self.declared and batch.idle == self.idle:
            return self
        return RunningEventTime(time_max, declared, batch.idle)


NO_TIME = RunningEventTime()


class FrameHeader(Struct, frozen=True):
    first_llsn: LLSN
    count: int
    epoch: Epoch
    kind: BatchKind
    time_min: EventTime
    time_max: EventTime
    declared: EventTime | None
    running: RunningEventTime
    producer: ProducerTag | None
    schema: int
    checksum: int
    header_bytes: int
    body_bytes: int
    header_crc: int
    more: bool = False
    group: GroupTag | None = None
    idle: bool = False
    checked: bool = False

    @property
    def last_llsn(self) -> LLSN:
        return LLSN(self.first_llsn + self.count - 1)

    @property
    def frame_bytes(self) -> int:
        return self.header_bytes + self.body_bytes + TRAILER_BYTES

    def entry(self, body: Buffer) -> Entry:
        """Return the entry. The body is copied unless it is ``bytes`` already."""
        batch = Batch(
            count=self.count,
            body=bytes(body),
            checksum=self.checksum,
            time_min=self.time_min,
            time_max=self.time_max,
            kind=self.kind,
            producer=self.producer,
            declared=self.declared,
            schema=self.schema,
            more=self.more,
            group=self.group,
            idle=self.idle,
            checked=self.checked,
        )
        return Entry(self.first_llsn, self.epoch, batch)


class Trailer(Struct, frozen=True):
    frame_bytes: int
    first_llsn: LLSN
    header_crc: int


def encode_frame(entry: Entry, running: RunningEventTime) -> tuple[bytes, bytes]:
    """Return the bytes before and after the body of an entry. ``running`` is event time before the entry."""
    batch, tag = entry.batch, entry.batch.producer
    producer = tag.producer.encode() if tag else b""
    producer_bytes, body_bytes = len(producer), len(batch.body)
    header_bytes = HEADER_BYTES_MIN + producer_bytes + (_GROUP.size if batch.group else 0)
    frame_bytes = header_bytes + body_bytes + TRAILER_BYTES
    if producer_bytes > PRODUCER_BYTES_MAX:
        raise InvalidArgument(f"a producer's name has at most {PRODUCER_BYTES_MAX} bytes, this one {producer_bytes}")
    if frame_bytes > FRAME_BYTES_MAX:
        raise InvalidArgument(f"an entry has at most {FRAME_BYTES_MAX} bytes, this one would have {frame_bytes}")
    flags = (
        (_HAS_PRODUCER if tag else 0)
        | (_HAS_DECLARED if batch.declared is not None else 0)
        | (_HAS_RUNNING_MAX if running.time_max is not None else 0)
        | (_HAS_RUNNING_DECLARED if running.declared is not None else 0)
        | (_MORE if batch.more else 0)
        | (_HAS_GROUP if batch.group else 0)
        | (_IDLE if batch.idle else 0)
        | (_RUNNING_IDLE if running.idle else 0)
        | (_CHECKED if batch.checked else 0)
    )
    try:
        fixed = _FIXED.pack(
            _MAGIC,
            _version(batch.kind, flags),
            batch.kind,
            flags,
            header_bytes,
            producer_bytes,
            body_bytes,
            batch.count,
            entry.epoch,
            entry.first_llsn,
            batch.time_min,
            batch.time_max,
            running.time_max or 0,
            batch.declared or 0,
            running.declared or 0,
            tag.epoch if tag else 0,
            tag.sequence if tag else 0,
            batch.schema,
            batch.checksum,
        )
        header = fixed + producer + (_GROUP.pack(*structs.astuple(batch.group)) if batch.group else b"")
        crc = crc32c(header)
        trailer = _TRAILER_START.pack(frame_bytes, entry.first_llsn, crc)
    except struct.error as error:
        raise InvalidArgument(f"the entry at LLSN {entry.first_llsn} has a number out of range: {error}") from error
    return header + _CRC.pack(crc), trailer + _CRC.pack(crc32c(trailer))


def _version(kind: BatchKind, flags: int) -> int:
    if kind is BatchKind.DECLARATION or flags & _IDLE:
        return _DECLARATION_VERSION
    return _GROUP_VERSION if flags & (_MORE | _HAS_GROUP) else _PLAIN_VERSION


def staged_frame(batch: Batch, first: int) -> tuple[bytes, bytes, bytes]:
    """Return the whole frame of a batch that has no place in a log stream yet. ``first`` numbers its first record."""
    header, trailer = encode_frame(Entry(LLSN(first), Epoch(0), batch), RunningEventTime())
    return header, batch.body, trailer


def decode_header(data: Buffer, offset: int = 0) -> FrameHeader | None:
    """Decode the header at this offset, or return None if there is no intact one."""
    if len(data) - offset < HEADER_BYTES_MIN or data[offset : offset + 4] != _MAGIC:
        return None
    fields = _FIXED.unpack_from(data, offset)
    _, version, kind, flags, header_bytes, producer_bytes, body_bytes, count, epoch, first_llsn = fields[:10]
    time_min, time_max, running_max, declared, running_declared, epoch_of, sequence, schema, checksum = fields[10:]
    crc_at = offset + header_bytes - _CRC.size
    if not HEADER_BYTES_MIN <= header_bytes <= HEADER_BYTES_MAX or crc_at + _CRC.size > len(data):
        return None
    header_crc = _CRC.unpack_from(data, crc_at)[0]
    if crc32c(bytes(data[offset:crc_at])) != header_crc:
        return None
    if version > FRAME_VERSION:
        raise NewerFormat(f"the entry at LLSN {first_llsn}", version, FRAME_VERSION)
    group_bytes = _GROUP.size if flags & _HAS_GROUP else 0
    is_whole = HEADER_BYTES_MIN + producer_bytes + group_bytes == header_bytes
    if kind not in _KINDS or not is_whole or not count or not first_llsn or first_llsn + count > NUMBER_MAX:
        return None
    producer = None
    if flags & _HAS_PRODUCER:
        try:
            name = bytes(data[offset + _FIXED.size : crc_at - group_bytes]).decode()
        except UnicodeDecodeError:
            return None
        producer = ProducerTag(ProducerId(name), ProducerEpoch(epoch_of), BatchSequence(sequence))
    return FrameHeader(
        LLSN(first_llsn),
        count,
        Epoch(epoch),
        BatchKind(kind),
        EventTime(time_min),
        EventTime(time_max),
        EventTime(declared) if flags & _HAS_DECLARED else None,
        RunningEventTime(
            EventTime(running_max) if flags & _HAS_RUNNING_MAX else None,
            EventTime(running_declared) if flags & _HAS_RUNNING_DECLARED else None,
            bool(flags & _RUNNING_IDLE),
        ),
        producer,
        schema,
        checksum,
        header_bytes,
        body_bytes,
        header_crc,
        bool(flags & _MORE),
        _decode_group(data, crc_at - group_bytes) if group_bytes else None,
        bool(flags & _IDLE),
        bool(flags & _CHECKED),
    )


def _decode_group(data: Buffer, offset: int) -> GroupTag:
    run, batch, count, decided, oldest = _GROUP.unpack_from(data, offset)
    return GroupTag(RunId(run), BatchNumber(batch), count, DecisionIndex(decided), DecisionIndex(oldest))


def decode_trailer(data: Buffer) -> Trailer | None:
    """Decode the trailer at the end of these bytes, or return None if there is no intact one."""
    if len(data) < TRAILER_BYTES:
        return None
    trailer = bytes(data[len(data) - TRAILER_BYTES :])
    frame_bytes, first_llsn, header_crc, crc = _TRAILER.unpack(trailer)
    if crc != crc32c(trailer[: -_CRC.size]) or frame_bytes < HEADER_BYTES_MIN + TRAILER_BYTES:
        return None
    return Trailer(frame_bytes, LLSN(first_llsn), header_crc)


class EntryFrame(Struct, frozen=True):
    """A frame in memory. ``data`` is all of it and ``body`` a part of that; nothing is copied."""

    header: FrameHeader
    data: memoryview

    @property
    def body(self) -> memoryview:
        start = self.header.header_bytes
        return self.data[start : start + self.header.body_bytes]

    @property
    def entry(self) -> Entry:
        return self.header.entry(self.body)

    @property
    def problem(self) -> str | None:
        """Describe a fault in the bytes after the header; None if there is none."""
        if len(self.data) != self.header.frame_bytes:
            return "it is cut off"
        if crc32c(self.body) != self.header.checksum:
            return "the checksum of the body is wrong"
        trailer = decode_trailer(self.data)
        if trailer != Trailer(self.header.frame_bytes, self.header.first_llsn, self.header.header_crc):
            return "the trailer is wrong"
        return None


def frames_in(data: Buffer, *, is_verified: bool = False) -> Iterator[EntryFrame]:
    """Yield the frames of a range that a reader received. Each is verified, unless all of them have been before."""
    view = memoryview(data).cast("B")
    offset = 0
    while offset < len(view):
        header = decode_header(view, offset)
        if header is None:
            raise Damaged(f"no intact frame at byte {offset} of the range that was read: read it again")
        frame = EntryFrame(header, view[offset : offset + header.frame_bytes])
        problem = None if is_verified else frame.problem
        if problem is not None:
            raise Damaged(f"the entry at LLSN {header.first_llsn} arrived damaged ({problem}): read it again")
        yield frame
        offset += header.frame_bytes
