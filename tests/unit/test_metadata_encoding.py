"""How decisions, snapshots and leaders are stored: what comes back, what is damage, what is of another version."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.core.order import decisions as d
from cutwater.core.order.state import Snapshot
from cutwater.format.checksum import crc32c
from cutwater.format.errors import NewerFormat
from cutwater.metadata.stores import encoding
from cutwater.metadata.stores.encoding import (
    COMPRESS_BYTES_MIN,
    FORMAT_VERSION,
    Header,
    LeaderRecord,
    SnapshotPointer,
    StoredBatch,
    StoredKind,
    StoreIdentity,
    decode_batch,
    decode_leader,
    decode_record,
    decode_snapshot,
    encode_batch,
    encode_record,
    encode_snapshot,
    header_of,
)
from cutwater.metadata.stores.store_errors import DamagedStore, UnknownContent
from cutwater.metadata.stores.store_interface import LeaderInfo
from cutwater.types import GLSN, ClusterId, CutTime, DecisionIndex, LeaderEpoch, MetadataNodeId, Revision

EPOCH, FIRST = LeaderEpoch(3), DecisionIndex(17)
TICK = d.Cut(GLSN(1), GLSN(0), CutTime(5), Revision(2), ())
CURSOR = d.CommitCursor("reader", GLSN(9))
BATCH = encode_batch(EPOCH, FIRST, (TICK, CURSOR))

cursors = st.builds(d.CommitCursor, st.text(max_size=40), st.integers(0, 2**63).map(GLSN))


@given(st.lists(cursors, max_size=20).map(tuple), st.integers(0, 2**63), st.integers(1, 2**63))
def test_decisions_come_back_as_they_were(decisions: tuple[d.Decision, ...], epoch: int, first: int) -> None:
    stored = StoredBatch(LeaderEpoch(epoch), DecisionIndex(first), decisions)
    data = encode_batch(stored.epoch, stored.first, decisions)
    assert decode_batch(data, "here") == stored
    header = Header(StoredKind.DECISIONS, stored.epoch, stored.first, len(decisions))
    assert header_of(data, "here", StoredKind.DECISIONS) == header
    assert header.end == stored.end


def test_everything_else_comes_back_too() -> None:
    snapshot = Snapshot(index=FIRST, high_watermark=GLSN(4), cursors={"reader": GLSN(4)})
    assert decode_snapshot(encode_snapshot(EPOCH, snapshot), "here") == snapshot
    leader = encode_record(LeaderRecord(MetadataNodeId(2), "host:9000", b"nonce"), EPOCH)
    assert decode_leader(leader, "here") == LeaderInfo(EPOCH, MetadataNodeId(2), "host:9000")
    identity = StoreIdentity(ClusterId(7))
    assert decode_record(encode_record(identity), "here", StoreIdentity) == identity
    pointer = SnapshotPointer(FIRST, "directory", 3, 2_500_000)
    assert decode_record(encode_record(pointer, EPOCH, pointer.index), "here", SnapshotPointer) == pointer


def test_large_content_is_compressed_and_small_is_not() -> None:
    small, large = (TICK,), (TICK,) * 1_000
    assert len(msgspec.msgpack.encode(large)) > COMPRESS_BYTES_MIN
    assert len(encode_batch(EPOCH, FIRST, large)) < len(msgspec.msgpack.encode(large)) // 10
    assert msgspec.msgpack.encode(small) in encode_batch(EPOCH, FIRST, small)
    assert decode_batch(encode_batch(EPOCH, FIRST, large), "here").decisions == large


@pytest.mark.parametrize("data", [BATCH, encode_batch(EPOCH, FIRST, (CURSOR,) * 1_000)], ids=["plain", "compressed"])
def test_every_changed_bit_and_every_missing_byte_is_found(data: bytes) -> None:
    for at in range(len(data)):
        for bit in range(8):
            changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            with pytest.raises(DamagedStore, match=r"^here is damaged"):
                decode_batch(changed, "here")
        with pytest.raises(DamagedStore):
            decode_batch(data[:at], "here")
    with pytest.raises(DamagedStore):
        decode_batch(data + b"\0", "here")


def sealed(body: bytes) -> bytes:
    """With the right checksum, whatever it is."""
    return struct.pack("<I", crc32c(body)) + body


@pytest.mark.parametrize(
    ("at", "value", "error", "message"),
    [
        (4, FORMAT_VERSION + 1, NewerFormat, "here has format version 2; this program reads versions up to 1"),
        (5, StoredKind.SNAPSHOT, DamagedStore, "it holds a record of kind 4 instead of 3"),
        (6, 2, UnknownContent, "here is intact, but holds what this version does not know .flags 0x2"),
        (24, 3, DamagedStore, "2 decisions instead of 3"),
        (28, 3, DamagedStore, "bytes of content instead of 3"),
    ],
)
def test_what_is_intact_but_not_as_it_should_be_is_said(
    at: int, value: int, error: type[Exception], message: str
) -> None:
    body = bytearray(BATCH[4:])
    body[at] = value
    with pytest.raises(error, match=message):
        decode_batch(sealed(bytes(body)), "here")


def test_a_decision_of_a_later_version_is_not_called_damage() -> None:
    class Tomorrow(msgspec.Struct, frozen=True, tag=True):
        topic: int

    data = encode_batch(EPOCH, FIRST, (CURSOR, Tomorrow(1)))  # type: ignore[arg-type]
    with pytest.raises(UnknownContent, match=r"does not know .Invalid value 'Tomorrow'.*start the newer version"):
        decode_batch(data, "here")
    assert header_of(data, "here", StoredKind.DECISIONS).count == 2


def test_a_snapshot_of_another_decision_is_damage() -> None:
    record = encoding._seal(Header(StoredKind.SNAPSHOT, EPOCH, FIRST), Snapshot(index=DecisionIndex(4)))
    with pytest.raises(DamagedStore, match="a snapshot of decision 4 instead of 17"):
        decode_snapshot(record, "here")
