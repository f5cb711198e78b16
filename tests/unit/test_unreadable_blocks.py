"""A disk that cannot read some blocks: what lies there is damage like any other, and nothing else is."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from storage_kit import IDENTITY, commit_of, entries_from

from cutwater.core.replica.recovery import HardState
from cutwater.errors import Damaged
from cutwater.format.errors import DamagedEntries
from cutwater.storage.files import BLOCK_BYTES, OsFile, OsFiles, look_again
from cutwater.storage.format import HEADER_BYTES
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.repair.scrubbing import Scrubber, ScrubOptions
from cutwater.types import LLSN, Entry, Epoch, Incarnation, LeaderEpoch, LogStreamId, ReplicaState, StorageNodeId

OPTIONS = SegmentOptions(segment_bytes=24 * 1024, index_interval_bytes=1024, commits_per_file=64)


class BadFile:
    """Blocks become good when they are written as a whole. A part of a bad one cannot be written."""

    def __init__(self, file: OsFile, bad: set[int]) -> None:
        self._file, self._bad = file, bad
        self.path, self.size, self.truncate = file.path, file.size, file.truncate
        self.sync_data, self.sync_all = file.sync_data, file.sync_all

    def _met(self, size: int, offset: int) -> list[int]:
        return [
            block for block in self._bad if offset < (block + 1) * BLOCK_BYTES and block * BLOCK_BYTES < offset + size
        ]

    def pread(self, size: int, offset: int) -> bytes:
        if self._met(min(size, self.size() - offset), offset):
            raise OSError(errno.EIO, "Input/output error", str(self.path))
        return self._file.pread(size, offset)

    def pwritev(self, buffers: Sequence[bytes], offset: int) -> None:
        end = offset + sum(map(len, buffers))
        for block in self._met(end - offset, offset):
            if offset > block * BLOCK_BYTES or end < min((block + 1) * BLOCK_BYTES, self.size()):
                raise OSError(errno.EIO, "Input/output error", str(self.path))
            self._bad.discard(block)
        self._file.pwritev(buffers, offset)


class BadDisk(OsFiles):
    def __init__(self) -> None:
        self.bad: dict[Path, set[int]] = {}

    def open(self, path: Path) -> BadFile:  # type: ignore[override]
        return BadFile(super().open(path), self.bad.setdefault(path, set()))


class Replica:
    """Two segments of entries, of which the first is closed, all of them committed."""

    def __init__(self, directory: Path, options: SegmentOptions = OPTIONS) -> None:
        self.files = BadDisk()
        self.storage = SegmentStorage(directory, IDENTITY, options, self.files)
        chain = (StorageNodeId(2),)
        self.storage.save_hard_state(HardState(epoch=Epoch(1), leader_epoch=LeaderEpoch(1), chain=chain))
        self.entries: list[Entry] = []
        context = None
        for _ in range(8):
            some = entries_from(self.storage.end + 1, 12, size=300)
            self.storage.write(some)
            self.storage.sync()
            context = commit_of(some, context)
            self.storage.write_contexts([context])
            self.entries += some
        self.storage.sync()
        self.paths = sorted(directory.glob("*.entries"))
        assert len(self.paths) == 2

    def read(self) -> tuple[list[Entry], list[DamagedEntries]]:
        found: list[Entry] = []
        damage: list[DamagedEntries] = []
        llsn = LLSN(1)
        while llsn <= self.entries[-1].last_llsn:
            try:
                frames = self.storage.read(llsn, self.entries[-1].last_llsn, 8 * 1024).frames
            except DamagedEntries as error:
                damage.append(error)
                llsn = LLSN(error.last_llsn + 1)
            else:
                found += [frame.entry for frame in frames]
                llsn = LLSN(found[-1].last_llsn + 1)
        return found, damage


@pytest.mark.parametrize(("segment", "block"), [(0, 1), (0, 2), (0, 4), (1, 1)])
def test_entries_in_an_unreadable_block_are_named_and_the_others_are_read(
    tmp_path: Path, segment: int, block: int
) -> None:
    whole, torn = Replica(tmp_path / "whole"), Replica(tmp_path / "torn")
    torn.files.bad[torn.paths[segment]].add(block)
    found, damage = torn.read()
    assert damage
    assert all("Input/output error" in error.message for error in damage)
    lost = [e for e in whole.entries if any(d.first_llsn <= e.first_llsn <= d.last_llsn for d in damage)]
    assert found == [entry for entry in whole.entries if entry not in lost]
    assert sum(len(entry.batch.body) for entry in lost) < 3 * BLOCK_BYTES
    assert torn.storage.verify() != []
    for entry in reversed(lost):
        torn.storage.repair(entry, whole.storage.running_before(entry.first_llsn))
    assert torn.read() == (whole.entries, [])
    torn.storage.repair_headers()
    assert torn.storage.verify() == []


def test_a_header_that_cannot_be_read_is_written_anew(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    for path in [*replica.paths, *sorted(tmp_path.glob("*.commits"))]:
        assert HEADER_BYTES < BLOCK_BYTES
        replica.files.bad.setdefault(path, set()).add(0)
    assert replica.storage.check_files() != []
    replica.storage.repair_headers()
    assert replica.storage.check_files() == []


@pytest.mark.parametrize("block", [0, 1])
def test_an_index_that_cannot_be_read_is_told_of_and_written_anew(tmp_path: Path, block: int) -> None:
    """The first block has the header and points, the second one nothing but points."""
    options = SegmentOptions(segment_bytes=24 * 1024, index_interval_bytes=32, commits_per_file=64)
    replica = Replica(tmp_path, options)
    path, index = replica.paths[0], slice(HEADER_BYTES, 2 * BLOCK_BYTES)
    before = path.read_bytes()[index]
    assert any(before[: BLOCK_BYTES - HEADER_BYTES])
    assert replica.storage.check_files() == []
    replica.files.bad[path].add(block)
    assert any("the index cannot be read" in finding.what for finding in replica.storage.check_files())
    replica.storage.repair_headers()
    assert replica.storage.verify() == []
    assert path.read_bytes()[index] == before


def test_a_closed_segment_that_cannot_be_opened_is_damage_of_its_entries(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.storage.close()
    replica.storage = SegmentStorage(tmp_path, IDENTITY, OPTIONS, replica.files)
    replica.files.bad[replica.paths[0]].add(0)
    found, (damage,) = replica.read()
    assert damage.first_llsn == 1
    assert found[0].first_llsn == damage.last_llsn + 1


async def scrubbed(storage: object, end: LLSN, *, is_left_over: bool = False) -> list[Damaged]:
    met: list[Damaged] = []

    async def in_reader(job):
        try:
            return look_again(job, Path("replica"))
        except Damaged as error:
            met.append(error)
            raise

    replica = SimpleNamespace(
        hard_state=SimpleNamespace(chain=(1,), base_llsn=LLSN(0)), state=ReplicaState.RUNNING, trusted=True
    )
    driver = SimpleNamespace(storage=storage, replica=replica, in_reader=in_reader)
    leftovers = {1} if is_left_over else set()
    node = SimpleNamespace(replicas={1: driver}, leftovers=leftovers, damage_met=lambda _, error: met.append(error))
    scrubber = Scrubber(node, ScrubOptions(bytes_per_second=1 << 40))  # type: ignore[arg-type]
    await scrubber.scrub()
    assert scrubber.progress.findings == len(met)
    assert scrubber.progress.passes == 1
    return met


def test_a_scrub_tells_of_what_it_cannot_read_and_goes_on_behind_it(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    for path, block in ((replica.paths[0], 2), (replica.paths[1], 1)):
        replica.files.bad[path].add(block)
    met = asyncio.run(scrubbed(replica.storage, replica.entries[-1].last_llsn))
    ranges = {(error.first_llsn, error.last_llsn) for error in met if isinstance(error, DamagedEntries)}
    assert ranges == {(error.first_llsn, error.last_llsn) for error in replica.read()[1]}
    assert len(ranges) >= 2


def test_a_scrub_does_not_look_at_what_is_left_of_a_replaced_replica(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.files.bad[replica.paths[0]].add(2)
    end = replica.entries[-1].last_llsn
    assert asyncio.run(scrubbed(replica.storage, end)) != []
    assert asyncio.run(scrubbed(replica.storage, end, is_left_over=True)) == []


def test_a_scrub_looks_at_entries_whose_commits_cannot_be_read(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    (commits,) = tmp_path.glob("*.commits")
    with commits.open("r+b") as file:
        file.seek(HEADER_BYTES + 3 * 64 + 7)
        file.write(b"\xff\xff")
    replica.files.bad[replica.paths[0]].add(3)
    met = asyncio.run(scrubbed(replica.storage, replica.entries[-1].last_llsn))
    assert any(not isinstance(error, DamagedEntries) for error in met)
    assert any(isinstance(error, DamagedEntries) for error in met)


def test_a_node_starts_though_a_file_of_commits_cannot_be_opened(tmp_path: Path) -> None:
    """The start ended with the error of the disk, again and again. The replica is opened again instead."""
    replica = Replica(tmp_path, structs.replace(OPTIONS, commits_per_file=2))
    replica.storage.close()
    paths = sorted(tmp_path.glob("*.commits"))
    assert len(paths) >= 3
    replica.files.bad.setdefault(paths[1], set()).add(0)
    storage = SegmentStorage(tmp_path, IDENTITY, structs.replace(OPTIONS, commits_per_file=2), replica.files)
    outside = SimpleNamespace(may_wait_for_disk=lambda: False, flush_peers=lambda: None)
    stores: Any = SimpleNamespace(streams=lambda: [LogStreamId(1)], open=lambda stream: storage)

    async def start() -> None:
        node = StorageNode(StorageNodeId(1), Incarnation(1), outside, stores)  # type: ignore[arg-type]
        node.start()
        assert "cannot be read" in node.unreadable[LogStreamId(1)]
        assert "Input/output error" in node.unreadable[LogStreamId(1)]

    asyncio.run(start())


def test_an_error_that_nobody_foresaw_is_told_as_damage() -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    storage = SimpleNamespace(
        first_llsn=LLSN(1),
        contexts=[],
        last_commit=SimpleNamespace(last_llsn=9),
        check_files=broken,
        read=broken,
        entries=broken,
    )
    met = asyncio.run(scrubbed(storage, LLSN(9)))
    assert len(met) == 2
