"""Entries, commits and the three kinds of storage that the tests of storage run on."""

from __future__ import annotations

from pathlib import Path
from random import Random

from msgspec import structs

from cutwater.format.checksum import crc32c
from cutwater.storage.files import OsFiles
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storage.replica.small_files import ReplicaIdentity
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import (
    GLSN,
    LLSN,
    Batch,
    BatchKind,
    ClusterId,
    CommitContext,
    CutTime,
    Entry,
    Epoch,
    EventTime,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    ProducerTag,
    Sequence,
    StorageNodeId,
)
from tests.unit.memory_storage import MemoryReplica, MemoryStorage

IDENTITY = ReplicaIdentity(ClusterId(1), StorageNodeId(2), LogStreamId(3))
SMALL = SegmentOptions(segment_bytes=1500, index_interval_bytes=400, commits_per_file=5)
"""So small that a few entries roll a segment."""
DIRECTORY = Path("/disk/cid=1/snid=2/lsid=3")


def declaration(number: int) -> Batch:
    """Idleness alone, or with a watermark."""
    declared, zero = EventTime(number * 5), EventTime(0)
    is_idle = number % 2 == 0
    return Batch(1, b"", 0, zero, zero, BatchKind.DECLARATION, None, None if is_idle else declared, idle=is_idle)


def batch(number: int, count: int = 1, size: int = 20, *, tagged: bool = False, fence: bool = False) -> Batch:
    body = b"" if fence else (b"%d:" % number).ljust(size, b".")
    tag = ProducerTag(ProducerId("prodüçer"), ProducerEpoch(1), Sequence(number)) if tagged or fence else None
    return Batch(
        count=1 if fence else count,
        body=body,
        checksum=crc32c(body),
        time_min=EventTime(number * 10 - 100),
        time_max=EventTime(number * 10 + 7 * (number % 3)),
        kind=BatchKind.FENCE if fence else BatchKind.DATA,
        producer=tag,
        declared=EventTime(number * 5) if number % 4 == 0 else None,
        schema=number % 2,
    )


def entries_from(first: int, count: int, *, epoch: int = 1, size: int = 20, records: int = 3) -> list[Entry]:
    """Entries of several shapes."""
    found = []
    llsn = first
    for i in range(count):
        number = llsn
        made = batch(number, 1 + number % records, size, tagged=number % 5 == 0, fence=number % 7 == 0)
        if number % 11 == 0:
            made = declaration(number)
        elif number % 13 == 0:
            made = structs.replace(made, idle=made.kind is BatchKind.DATA)
        found.append(Entry(LLSN(llsn), Epoch(epoch), made))
        llsn += made.count
        assert i >= 0
    return found


def heads_of(entries: list[Entry]) -> tuple[Entry, ...]:
    """The entries without their bodies, as opening finds them."""
    return tuple(structs.replace(entry, batch=structs.replace(entry.batch, body=b"")) for entry in entries)


def commit_of(entries: list[Entry], before: CommitContext | None, skip: int = 3) -> CommitContext:
    """One commit of all these entries; other log streams got ``skip`` GLSNs in between."""
    hwm = before.high_watermark if before else GLSN(0)
    first_glsn = hwm + 1 + skip
    count = entries[-1].last_llsn - entries[0].first_llsn + 1
    return CommitContext(
        epoch=entries[0].epoch,
        first_llsn=entries[0].first_llsn,
        first_glsn=GLSN(first_glsn),
        count=count,
        high_watermark=GLSN(first_glsn + count - 1 + skip % 2),
        prev_high_watermark=hwm,
        time=CutTime((before.time if before else 1_000) + 10),
    )


class MemoryBench:
    def __init__(self, root: Path) -> None:
        self.memory = MemoryReplica()
        self.storage = MemoryStorage(self.memory)

    def reopen(self) -> MemoryStorage:
        self.storage = MemoryStorage(self.memory)
        return self.storage

    def lose_power(self) -> MemoryStorage:
        self.memory.lose_unsynced()
        return self.reopen()

    def damage(self, llsn: LLSN) -> None:
        for i, frame in enumerate(self.memory.frames):
            if frame.header.first_llsn == llsn:
                data = bytearray(frame.data)
                data[frame.header.header_bytes] ^= 1
                self.memory.frames[i] = type(frame)(frame.header, memoryview(bytes(data)))

    options = SMALL


class SegmentBench:
    """On real files."""

    options = SMALL

    def __init__(self, root: Path) -> None:
        self.directory, self.files = root / "lsid=3", OsFiles()
        self.reopen()

    def reopen(self) -> SegmentStorage:
        self.storage = SegmentStorage(self.directory, IDENTITY, self.options, self.files)
        return self.storage

    def lose_power(self) -> SegmentStorage:
        """Real files lose nothing here; the test has to be content with what may be there."""
        return self.reopen()

    def damage(self, llsn: LLSN) -> None:
        segment = self.storage._log.segment_of(llsn)
        place = segment.place_of(llsn)
        offset = place.offset + place.header.header_bytes
        file = self.files.open(segment.path)
        file.pwritev([bytes([file.pread(1, offset)[0] ^ 1])], offset)


class FaultBench(SegmentBench):
    def __init__(self, root: Path) -> None:
        self.directory, self.files = DIRECTORY, FaultFiles()
        self.reopen()

    def lose_power(self) -> SegmentStorage:
        self.files.crash(Random(1), keep=0.0)
        return self.reopen()


BENCHES = {"memory": MemoryBench, "segments": SegmentBench, "faults": FaultBench}
