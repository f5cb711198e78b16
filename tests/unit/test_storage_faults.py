"""What the shipped storage code does when a sync fails, when the disk is full, and when several threads are at it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from storage_kit import DIRECTORY, IDENTITY, SMALL, FaultBench, commit_of, entries_from

from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import HardState
from cutwater.errors import Damaged, ReadOnly, Trimmed, Unavailable
from cutwater.format.entry_codec import NO_TIME
from cutwater.format.errors import DiskFull, StorageBroken
from cutwater.storage.files import OsFile, OsFiles
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.testing.disk_inodes import SyncedFile
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import GLSN, LLSN, Epoch


def fill(storage, groups=3, contexts=()):
    contexts = list(contexts)
    for _ in range(groups):
        group = entries_from(storage.end + 1, 4)
        storage.write(group)
        storage.sync()
        contexts.append(commit_of(group, contexts[-1] if contexts else None))
        storage.write_contexts(contexts[-1:])
        storage.sync()
    return contexts


# A sync that fails.


def test_a_failed_sync_is_final_until_cut_back(tmp_path) -> None:
    bench = FaultBench(tmp_path)
    storage, files = bench.storage, bench.files
    contexts = fill(storage)
    durable, committed = storage.durable_end, contexts[-1].last_llsn
    storage.write(entries_from(storage.end + 1, 2))
    files.fail_sync = lambda path: path.suffix == ".entries"
    with pytest.raises(StorageBroken, match="Input/output error"):
        storage.sync()
    files.fail_sync = lambda path: False
    done = len(files.operations)
    for call in (
        storage.sync,
        lambda: storage.write(entries_from(storage.end + 1, 1)),
        lambda: storage.write_contexts([]),
        lambda: storage.save_hard_state(HardState()),
        lambda: storage.save_dedup(DedupCheckpoint(LLSN(0), ())),
        lambda: storage.truncate(durable),
        lambda: storage.restart(LLSN(9)),
        lambda: storage.drop_before(GLSN(1), LLSN(1)),
        lambda: storage.read(LLSN(1), LLSN(1), 1),
        lambda: storage.entry_at(LLSN(1)),
        storage.find,
        storage.verify,
        lambda: storage.contexts,
        lambda: storage.from_glsn(GLSN(1)),
    ):
        with pytest.raises(StorageBroken, match="reopen it and cut it back") as broken:
            call()
        assert isinstance(broken.value, Unavailable)
    assert len(files.operations) == done, "nothing is tried again"
    storage.cut_back(durable, committed)
    found = storage.find()
    assert (found.entries_end, found.last_commit, found.tail) == (durable, contexts[-1], ())
    fill(storage, 2, contexts)
    assert storage.verify() == []


@pytest.mark.parametrize("seed", range(60))
def test_what_a_failed_sync_lost_is_never_claimed(seed: int, tmp_path) -> None:
    """Syncs fail at random; each time the replica goes on from what it knows to be durable. In the end the power goes,
    and everything that was ever reported is there."""
    rng = Random(seed)
    bench = FaultBench(tmp_path)
    storage, files = bench.storage, bench.files
    files.rng = rng
    contexts = fill(storage, 1)
    entries = list(storage.entries(LLSN(1), storage.end))
    durable, durable_contexts = len(entries), len(contexts)
    for _ in range(25):
        files.fail_sync = lambda path: rng.random() < 0.12
        try:
            more = entries_from(storage.end + 1, rng.randint(1, 6), size=rng.choice((10, 200)))
            storage.write(more)
            entries += more
            storage.sync()
            durable = len(entries)
            group = [entry for entry in entries[:durable] if entry.last_llsn > contexts[-1].last_llsn]
            if group:
                context = commit_of(group, contexts[-1])
                storage.write_contexts([context])
                contexts.append(context)
                storage.sync()
                durable_contexts = len(contexts)
        except StorageBroken:
            files.fail_sync = lambda path: False
            files.evict()
            del entries[durable:], contexts[durable_contexts:]
            storage.cut_back(entries[-1].last_llsn, contexts[-1].last_llsn)
            assert list(storage.entries(LLSN(1), storage.end)) == entries
            assert list(storage.contexts) == contexts
    files.fail_sync = lambda path: False
    files.crash(rng, keep=rng.random())
    storage = bench.reopen()
    found = list(storage.entries(LLSN(1), storage.end))
    assert found[:durable] == entries[:durable]
    assert found == entries[: len(found)]
    assert list(storage.contexts)[:durable_contexts] == contexts[:durable_contexts]
    assert storage.verify() == []


def die_of_failed_syncs(seed: int, tmp_path) -> None:
    """The process dies of a sync that failed, and the next one sees what the system still shows, written or not. What
    it takes for durable is there when the power goes."""
    rng = Random(seed)
    bench = FaultBench(tmp_path)
    bench.files.rng = rng
    contexts = fill(bench.storage, 1)
    for _ in range(12):
        storage = bench.storage
        bench.files.fail_sync = lambda path: rng.random() < 0.2
        try:
            for _ in range(rng.randint(1, 4)):
                storage.write(entries_from(storage.end + 1, rng.randint(1, 4)))
                storage.sync()
                storage.write_contexts([commit_of(list(storage.find().tail), storage.last_commit)])
                storage.sync()
        except StorageBroken:
            pass
        bench.files.fail_sync = lambda path: False
        bench.files.kill()
        storage = bench.reopen()
        entries, contexts = list(storage.entries(LLSN(1), storage.end)), list(storage.contexts)
        assert storage.durable_end == storage.end
        if rng.random() < 0.5:
            storage = bench.lose_power()
            assert list(storage.entries(LLSN(1), storage.end)) == entries
            assert list(storage.contexts) == contexts
        assert storage.verify() == []


@pytest.mark.parametrize("seed", range(40))
def test_a_process_that_dies_of_a_failed_sync_leaves_nothing_half_durable(seed: int, tmp_path) -> None:
    die_of_failed_syncs(seed, tmp_path)


def test_that_would_be_found(tmp_path, monkeypatch) -> None:
    """Without writing it again, what a failed sync left would be taken for durable."""
    monkeypatch.setattr(MarkedFile, "rewrite", lambda self, start, end: None)

    def die_often() -> None:
        for seed in range(40):
            die_of_failed_syncs(seed, tmp_path)

    with pytest.raises((AssertionError, Damaged)):
        die_often()


def test_a_failed_save_leaves_the_old_state(tmp_path) -> None:
    bench = FaultBench(tmp_path)
    bench.storage.save_hard_state(HardState(epoch=Epoch(1)))
    bench.files.fail_sync = lambda path: path.name == "state.tmp"
    with pytest.raises(StorageBroken):
        bench.storage.save_hard_state(HardState(epoch=Epoch(2)))
    bench.files.fail_sync = lambda path: False
    bench.storage.cut_back(None, None)
    assert bench.storage.hard_state == HardState(epoch=Epoch(1))
    assert bench.lose_power().hard_state == HardState(epoch=Epoch(1))


class BigBench(FaultBench):
    options = SegmentOptions()


def test_one_sync_per_group_of_entries(tmp_path) -> None:
    bench = BigBench(tmp_path)
    bench.storage.write(entries_from(1, 2))
    bench.storage.sync()
    for group in range(5):
        before = len(bench.files.operations)
        bench.storage.write(entries_from(bench.storage.end + 1, 2, size=group))
        bench.storage.sync()
        done = bench.files.operations[before:]
        assert sum(isinstance(operation, SyncedFile) for operation in done) == 1
        bench.storage.sync()
        assert bench.files.operations[before:] == done, "there is nothing more to sync"


# A full disk.


def try_everything(storage, contexts):
    """Each call that needs room, and what it must do once there is room."""
    group = entries_from(storage.end + 1, 12, size=150)
    last = contexts[-1]
    return [
        lambda: storage.write(group),
        lambda: storage.write_contexts([commit_of(entries_from(last.last_llsn + 1, 1), last)]),
        lambda: storage.save_hard_state(HardState(epoch=Epoch(9))),
        lambda: storage.save_dedup(DedupCheckpoint(LLSN(4), ())),
        lambda: storage.drop_before(GLSN(last.high_watermark + 1), last.last_llsn),
        lambda: storage.restart(LLSN(700), NO_TIME),
    ]


@pytest.mark.parametrize("which", range(6))
def test_a_full_disk_loses_nothing(which: int, tmp_path) -> None:
    """Room runs out after any number of bytes: a typed error, the same replica as before, and it works again once there
    is room."""
    full = set()
    for room in (*range(0, 40, 3), *range(40, 9_000, 331)):
        bench = FaultBench(tmp_path)
        # The file of commits is full, so the next one needs another.
        contexts = fill(bench.storage, SMALL.commits_per_file)
        bench.storage.write(entries_from(bench.storage.end + 1, 1))
        bench.storage.sync()
        synced = bench.storage.durable_end
        entries = list(bench.storage.entries(LLSN(1), synced))
        call = try_everything(bench.storage, contexts)[which]
        bench.files.room_bytes = room
        try:
            call()
        except DiskFull:
            full.add(room)
            assert list(bench.storage.entries(LLSN(1), synced)) == entries
            assert bench.storage.durable_end >= synced
            assert bench.storage.verify() == []
            copy = bench.files.copy()
            copy.crash(Random(room))
            reopened = SegmentStorage(DIRECTORY, IDENTITY, SMALL, copy)
            assert list(reopened.entries(LLSN(1), synced)) == entries
            bench.files.room_bytes = None
            if which == 0:
                bench.storage.write(entries_from(bench.storage.end + 1, 3))
                bench.storage.sync()
            else:
                try_everything(bench.storage, contexts)[which]()
            assert bench.storage.verify() == []
            assert bench.lose_power().verify() == []
    assert len(full) >= 3
    assert issubclass(DiskFull, ReadOnly)


# Threads.


class UnsyncedFile(OsFile):
    def sync_data(self) -> None:
        pass

    def sync_all(self) -> None:
        pass


class UnsyncedFiles(OsFiles):
    """Real files without the wait for the disk, so that much happens at the same time."""

    def open(self, path: Path) -> UnsyncedFile:
        return UnsyncedFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def create(self, path: Path) -> UnsyncedFile:
        return UnsyncedFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))

    def sync_dir(self, path: Path) -> None:
        pass


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads take turns a hundred times as often as they would."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


class Readers:
    """Threads that read anywhere until told to stop. Each sees either the right entries or that they are trimmed."""

    def __init__(self, storage: SegmentStorage) -> None:
        self._storage = storage
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(3)]
        self.problems: list[BaseException] = []
        self.reads = 0

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        rng = Random(seed)
        while not self._stop.is_set():
            try:
                self._read(rng)
            except Trimmed:
                continue
            except BaseException as error:
                self.problems.append(error)

    def _read(self, rng: Random) -> None:
        first, last = self._storage.first_llsn, self._storage.committed_end
        # Mostly near the beginning, where trims are.
        llsn = rng.randint(first, min(last, first + rng.choice((0, 10, 1_000))))
        part = self._storage.read(LLSN(llsn), last, 2_000)
        for frame in part.frames:
            assert frame.entry == entries_from(frame.header.first_llsn, 1)[0]
        assert part.commits[0].first_llsn <= part.first_llsn
        assert part.commits[-1].last_llsn >= part.last_llsn
        self.reads += 1


def test_readers_go_on_while_the_writer_writes_and_trims(tmp_path, restless_threads) -> None:
    storage = SegmentStorage(tmp_path / "lsid=3", IDENTITY, SMALL, UnsyncedFiles())
    contexts = fill(storage, 9)
    with Readers(storage) as readers:
        for round_ in range(300):
            contexts = fill(storage, 3, contexts[-9:])
            storage.drop_before(contexts[-4].first_glsn, contexts[-1].last_llsn)
            if round_ % 20 == 0:
                assert storage.verify() == []
    assert not readers.problems, readers.problems[:3]
    assert readers.reads > 0


def test_files_are_the_only_thing_left_behind(tmp_path) -> None:
    bench = FaultBench(tmp_path)
    contexts = fill(bench.storage, 20)
    bench.storage.drop_before(contexts[-2].first_glsn, contexts[-1].last_llsn)
    bench.storage.restart(LLSN(1000), NO_TIME)
    assert isinstance(bench.files, FaultFiles)
    assert bench.files.names(DIRECTORY) == ["0000000002-00000000000000001000.entries", "manifest"]
