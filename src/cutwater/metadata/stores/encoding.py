"""Encodes decisions, snapshots and the leader: a header with a checksum over everything, then MessagePack.

A record states its kind, the epoch that wrote it and its position, so reading detects damage and mix-ups in any store.
Large content is compressed: field names repeat, so it shrinks to a fraction.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import TypeVar

import msgspec
from msgspec import Struct

from cutwater.core.order.decisions import Decision
from cutwater.core.order.state import Snapshot
from cutwater.format.checksum import crc32c
from cutwater.format.errors import NewerFormat
from cutwater.metadata.stores.store_errors import DamagedStore, UnknownContent
from cutwater.metadata.stores.store_interface import LeaderInfo
from cutwater.types import ClusterId, DecisionIndex, LeaderEpoch, MetadataNodeId

FORMAT_VERSION = 1
COMPRESS_BYTES_MIN = 16 * 1024
COMPRESSION_LEVEL = 1

MAGIC = b"CWMD"
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<4sBBHQQII")
"""Magic, version, kind, flags, leader epoch, index, count, size of the content in bytes before compression."""
_COMPRESSED = 1
_START = _CHECKSUM.size + _HEADER.size

T = TypeVar("T")
S = TypeVar("S", bound=Struct)


class StoredKind(enum.IntEnum):
    IDENTITY = 1
    LEADER = 2
    DECISIONS = 3
    SNAPSHOT = 4
    POINTER = 5
    MEMBER = 6


class Header(Struct, frozen=True):
    """Header of a record. ``index`` is the first decision of a batch, or the last one that a snapshot contains."""

    kind: StoredKind
    epoch: LeaderEpoch = LeaderEpoch(0)
    index: DecisionIndex = DecisionIndex(0)
    count: int = 0

    @property
    def end(self) -> DecisionIndex:
        return DecisionIndex(self.index + self.count - 1)


class StoreIdentity(Struct, frozen=True):
    """The cluster that the decisions belong to."""

    cluster: ClusterId


class LeaderRecord(Struct, frozen=True):
    """A leader. ``nonce`` distinguishes attempts to lead, even of the same node at the same address."""

    node: MetadataNodeId
    address: str
    nonce: bytes = b""


class MemberRecord(Struct, frozen=True):
    """The public key of a metadata node."""

    node: MetadataNodeId
    key: str


class SnapshotPointer(Struct, frozen=True):
    """Location of the pieces of the valid snapshot."""

    index: DecisionIndex
    directory: str
    pieces: int
    size: int


class StoredBatch(Struct, frozen=True):
    """Decisions that were appended together."""

    epoch: LeaderEpoch
    first: DecisionIndex
    decisions: tuple[Decision, ...]

    @property
    def end(self) -> DecisionIndex:
        return DecisionIndex(self.first + len(self.decisions) - 1)


_ENCODE = msgspec.msgpack.Encoder().encode
_DECISIONS = msgspec.msgpack.Decoder(tuple[Decision, ...])
_SNAPSHOT = msgspec.msgpack.Decoder(Snapshot)
_KINDS: dict[type[Struct], StoredKind] = {
    StoreIdentity: StoredKind.IDENTITY,
    LeaderRecord: StoredKind.LEADER,
    SnapshotPointer: StoredKind.POINTER,
    MemberRecord: StoredKind.MEMBER,
}


def encode_batch(epoch: LeaderEpoch, first: DecisionIndex, decisions: tuple[Decision, ...]) -> bytes:
    return _seal(Header(StoredKind.DECISIONS, epoch, first, len(decisions)), decisions)


def decode_batch(data: bytes, where: str) -> StoredBatch:
    header, content = _open(data, where, StoredKind.DECISIONS)
    decisions = _decode(_DECISIONS, content, where)
    if len(decisions) != header.count:
        raise DamagedStore(where, f"{len(decisions)} decisions instead of {header.count}")
    return StoredBatch(header.epoch, header.index, decisions)


def encode_snapshot(epoch: LeaderEpoch, snapshot: Snapshot) -> bytes:
    return _seal(Header(StoredKind.SNAPSHOT, epoch, snapshot.index), snapshot)


def decode_snapshot(data: bytes, where: str) -> Snapshot:
    header, content = _open(data, where, StoredKind.SNAPSHOT)
    snapshot = _decode(_SNAPSHOT, content, where)
    if snapshot.index != header.index:
        raise DamagedStore(where, f"a snapshot of decision {snapshot.index} instead of {header.index}")
    return snapshot


def encode_record(record: Struct, epoch: int = 0, index: int = 0) -> bytes:
    return _seal(Header(_KINDS[type(record)], LeaderEpoch(epoch), DecisionIndex(index)), record)


def decode_record(data: bytes, where: str, kind: type[S]) -> S:
    return _decode(msgspec.msgpack.Decoder(kind), _open(data, where, _KINDS[kind])[1], where)


def decode_leader(data: bytes, where: str) -> LeaderInfo:
    header, content = _open(data, where, StoredKind.LEADER)
    record = _decode(msgspec.msgpack.Decoder(LeaderRecord), content, where)
    return LeaderInfo(header.epoch, record.node, record.address)


def header_of(data: bytes, where: str, kind: StoredKind) -> Header:
    """Return the header of the record after verifying its checksum. Does not decode the content."""
    if len(data) < _START or data[_CHECKSUM.size : _CHECKSUM.size + len(MAGIC)] != MAGIC:
        raise DamagedStore(where, "it is no record of Cutwater")
    _, version, found, _, epoch, index, count, _ = _HEADER.unpack_from(data, _CHECKSUM.size)
    (checksum,) = _CHECKSUM.unpack_from(data)
    if crc32c(memoryview(data)[_CHECKSUM.size :]) != checksum:
        raise DamagedStore(where, "the checksum is wrong")
    if version > FORMAT_VERSION:
        raise NewerFormat(where, version, FORMAT_VERSION)
    if found != kind:
        raise DamagedStore(where, f"it holds a record of kind {found} instead of {kind}")
    return Header(kind, LeaderEpoch(epoch), DecisionIndex(index), count)


def _seal(header: Header, content: object) -> bytes:
    payload = _ENCODE(content)
    size, flags = len(payload), 0
    if size >= COMPRESS_BYTES_MIN:
        payload, flags = zlib.compress(payload, COMPRESSION_LEVEL), _COMPRESSED
    fixed = _HEADER.pack(MAGIC, FORMAT_VERSION, header.kind, flags, header.epoch, header.index, header.count, size)
    body = fixed + payload
    return _CHECKSUM.pack(crc32c(body)) + body


def _open(data: bytes, where: str, kind: StoredKind) -> tuple[Header, bytes | memoryview]:
    header = header_of(data, where, kind)
    *_, flags, _, _, _, size = _HEADER.unpack_from(data, _CHECKSUM.size)
    content: bytes | memoryview = memoryview(data)[_START:]
    if flags & ~_COMPRESSED:
        raise UnknownContent(where, f"flags {flags:#x}")
    if flags & _COMPRESSED:
        try:
            content = zlib.decompressobj().decompress(content, size + 1)
        except zlib.error as error:
            raise DamagedStore(where, str(error)) from error
    if len(content) != size:
        raise DamagedStore(where, f"{len(content)} bytes of content instead of {size}")
    return header, content


def _decode(decoder: msgspec.msgpack.Decoder[T], content: bytes | memoryview, where: str) -> T:
    """Decode the content. Its checksum is right, so content that cannot be decoded was written by a newer version."""
    try:
        return decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise UnknownContent(where, str(error)) from error
