"""Files that are opened anew under those who read them, and small files that are written anew from memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import HardState, Valid, judge
from cutwater.storage.files import OsFile, OsFiles
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.types import GLSN, LLSN, Epoch, LeaderEpoch, StorageNodeId
from tests.unit.storage_kit import IDENTITY, SMALL, commit_of, entries_from


class WatchedFiles(OsFiles):
    """Real files; ``look`` is called whenever one is opened."""

    look: Callable[[], None] | None = None

    def open(self, path: Path) -> OsFile:
        if self.look is not None:
            self.look()
        return super().open(path)


def filled(directory: Path, files: OsFiles) -> SegmentStorage:
    storage = SegmentStorage(directory, IDENTITY, SMALL, files)
    storage.save_hard_state(HardState(epoch=Epoch(3)))
    before = None
    for _ in range(12):
        group = entries_from(storage.end + 1, 3)
        storage.write(group)
        storage.sync()
        before = commit_of(group, before)
        storage.write_contexts([before])
    storage.sync()
    storage.save_dedup(DedupCheckpoint(storage.committed_end, ()))
    return storage


def test_a_replica_whose_only_commits_are_cut_back_is_whole_after_a_restart(tmp_path: Path) -> None:
    """The commit was on disk, and something failed before the replica heard of it."""
    storage = SegmentStorage(tmp_path, IDENTITY, SMALL)
    storage.save_hard_state(HardState(epoch=Epoch(1), leader_epoch=LeaderEpoch(1), chain=(StorageNodeId(2),)))
    entries = entries_from(1, 3)
    storage.write(entries)
    storage.sync()
    storage.write_contexts([commit_of(entries, None)])
    storage.sync()
    storage.cut_back(entries[-1].last_llsn, LLSN(0))
    assert isinstance(judge(storage.find()), Valid)
    storage.close()
    storage = SegmentStorage(tmp_path, IDENTITY, SMALL)
    assert isinstance(judge(storage.find()), Valid)
    # With commits again, files of commits that are missing are noticed again.
    storage.write_contexts([commit_of(entries, None)])
    storage.sync()
    storage.close()
    for path in tmp_path.glob("*.commits"):
        path.unlink()
    assert not isinstance(judge(SegmentStorage(tmp_path, IDENTITY, SMALL).find()), Valid)


def test_a_replica_that_began_anew_misses_no_commits_after_a_restart(tmp_path: Path) -> None:
    """It had some before, and has none of its own until it has learned."""
    storage = filled(tmp_path, OsFiles())
    storage.restart(LLSN(500))
    storage.save_hard_state(HardState(epoch=Epoch(3), base_llsn=LLSN(499), base_glsn=GLSN(499)))
    storage.save_dedup(DedupCheckpoint(LLSN(499), ()))
    storage.close()
    assert not list(tmp_path.glob("*.commits"))
    assert isinstance(judge(SegmentStorage(tmp_path, IDENTITY, SMALL).find()), Valid)


def test_a_reader_never_meets_files_that_are_half_opened(tmp_path: Path) -> None:
    files = WatchedFiles()
    storage = filled(tmp_path / "replica", files)
    end, contexts = storage.committed_end, list(storage.contexts)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        files.look = None
        assert (storage.committed_end, storage.end, storage.hard_state) == (end, end, HardState(epoch=Epoch(3)))
        assert storage.contexts[-1] == contexts[-1]
        assert storage.from_glsn(contexts[-1].first_glsn) == contexts[-1].first_llsn
        files.look = look

    files.look = look
    storage.cut_back(end, end)
    assert looks > 3
    assert list(storage.contexts) == contexts


def test_small_files_are_written_anew_from_memory(tmp_path: Path) -> None:
    storage = filled(tmp_path / "replica", OsFiles())
    end, dedup = storage.committed_end, storage.dedup
    assert storage.repair_headers() == 0
    for name in ("manifest", "state", "dedup"):
        path = tmp_path / "replica" / name
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    (tmp_path / "replica" / "dedup").unlink()
    assert len(storage.verify()) == 3
    assert storage.repair_headers() == 3
    assert storage.verify() == []
    storage.close()
    again = SegmentStorage(tmp_path / "replica", IDENTITY, SMALL)
    assert (again.hard_state, again.dedup) == (HardState(epoch=Epoch(3)), dedup)
    assert again.committed_end == end > LLSN(0)
    again.close()


def test_a_mark_that_comes_late_does_not_tell_of_what_was_cut_off(tmp_path: Path) -> None:
    storage = filled(tmp_path / "replica", OsFiles())
    end = storage.end
    storage.write(entries_from(end + 1, 3))
    storage.sync(contexts=False, marks=False)
    storage.truncate(end)
    storage.mark()
    again = SegmentStorage(tmp_path / "replica", IDENTITY, SMALL)
    assert again.find().damaged is None
    assert (again.end, again.verify()) == (end, [])


def test_what_was_synced_is_there_without_a_mark(tmp_path: Path) -> None:
    storage = filled(tmp_path / "replica", OsFiles())
    more = entries_from(storage.end + 1, 3)
    storage.write(more)
    storage.sync(contexts=False, marks=False)
    again = SegmentStorage(tmp_path / "replica", IDENTITY, SMALL)
    assert (again.end, again.durable_end, again.verify()) == (more[-1].last_llsn, more[-1].last_llsn, [])
