"""A closed file that lost both of its marks gets new ones, as soon as its entries prove where it ends."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from cutwater.core.replica.recovery import HardState
from cutwater.format.errors import DamagedEntries
from cutwater.storage.files import OsFiles
from cutwater.storage.format import HEADER_BYTES, SECTOR_BYTES, SyncMark, decode_mark
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.testing.disk_faults import ProcessDied
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import LLSN, Entry
from tests.unit.storage_kit import IDENTITY, commit_of, entries_from

OPTIONS = SegmentOptions(segment_bytes=1100, index_interval_bytes=400, commits_per_file=4)
MARKS = slice(SECTOR_BYTES, 3 * SECTOR_BYTES)


def filled(directory: Path, files: FaultFiles | OsFiles) -> list[Entry]:
    """Fill a replica with several closed segments and files of commits. Its last entries are not committed."""
    storage = SegmentStorage(directory, IDENTITY, OPTIONS, files)
    storage.save_hard_state(HardState())
    before = None
    for _ in range(10):
        group = entries_from(storage.end + 1, 4, size=30)
        storage.write(group)
        storage.sync()
        before = commit_of(group, before)
        storage.write_contexts([before])
    storage.write(entries_from(storage.end + 1, 20, size=30))
    storage.sync()
    found = list(storage.entries(LLSN(1), storage.end))
    storage.close()
    return found


def opened(directory: Path, files: FaultFiles | OsFiles | None = None) -> SegmentStorage:
    return SegmentStorage(directory, IDENTITY, OPTIONS, files)


def closed_files(directory: Path) -> list[Path]:
    segments, commits = (sorted(directory.glob(f"*.{kind}")) for kind in ("entries", "commits"))
    assert len(segments) > 4
    assert len(commits) > 2
    return segments[:-1] + commits[:-1]


def last_mark(path: Path) -> SyncMark:
    content = path.read_bytes()
    marks = [decode_mark(content[start : start + SECTOR_BYTES]) for start in (SECTOR_BYTES, 2 * SECTOR_BYTES)]
    return max((mark for mark in marks if mark is not None), key=lambda mark: mark.sequence)


def change(path: Path, place: slice, what: bytes = b"") -> None:
    """Overwrite a part of a file, with something random unless it is said what."""
    content = bytearray(path.read_bytes())
    size = len(content[place])
    content[place] = what.ljust(size, b"\0") if what else Random(str(place)).randbytes(size)
    path.write_bytes(content)


def change_entry(storage: SegmentStorage, llsn: LLSN) -> Path:
    """Overwrite the header of an entry on the disk, or its body, and return its file."""
    segment = storage._log.segment_of(llsn)
    place = segment.place_of(llsn)
    start = place.offset if llsn % 2 else place.offset + 90
    change(segment.path, slice(start, start + 8))
    return segment.path


def what_is_wrong(storage: SegmentStorage) -> set[str]:
    return {finding.what for finding in storage.verify()}


@pytest.mark.parametrize("lost", ["wrong", "zeros"])
def test_closed_files_get_new_marks_that_say_the_same(lost: str, tmp_path: Path) -> None:
    entries = filled(tmp_path, OsFiles())
    paths = closed_files(tmp_path)
    before = [last_mark(path) for path in paths]
    for path in paths:
        change(path, MARKS, b"\0" if lost == "zeros" else b"")
    storage = opened(tmp_path)
    assert {Path(finding.where) for finding in storage.check_files()} == set(paths)
    assert storage.repair_headers() == len(paths)
    assert storage.repair_marks() is None
    assert storage.repair_headers() == 0
    assert storage.verify() == []
    after = [last_mark(path) for path in paths]
    assert [(m.offset, m.llsn, m.running) for m in after] == [(m.offset, m.llsn, m.running) for m in before]
    storage.close()
    storage = opened(tmp_path)
    assert storage.verify() == []
    assert list(storage.entries(LLSN(1), storage.end)) == entries


def test_entries_are_repaired_before_their_file_gets_new_marks(tmp_path: Path) -> None:
    entries = filled(tmp_path, OsFiles())
    storage = opened(tmp_path)
    running = {entry.first_llsn: storage.running_before(entry.first_llsn) for entry in entries}
    by_first = {entry.first_llsn: entry for entry in entries}
    first, second = storage._log.firsts[1:3]
    lost = [first, LLSN(second - 1)]
    path = {change_entry(storage, llsn) for llsn in lost}.pop()
    change(path, MARKS)
    other = closed_files(tmp_path)[3]
    change(other, MARKS)
    storage = opened(tmp_path)
    marks = path.read_bytes()[MARKS]
    assert storage.repair_headers() == 1, "the other file need not wait"
    assert other.read_bytes()[MARKS] != marks
    repaired = 0
    while (error := storage.repair_marks()) is not None:
        assert path.read_bytes()[MARKS] == marks, "nothing proves where it ends"
        assert error.where == str(path)
        entry = by_first[error.first_llsn]
        assert storage.repair(entry, running[entry.first_llsn])
        repaired += 1
    assert repaired == len(lost)
    assert storage.verify() == []
    assert list(opened(tmp_path).entries(LLSN(1), storage.end)) == entries


def test_without_a_copy_of_its_entries_a_file_stays_as_it_is(tmp_path: Path) -> None:
    entries = filled(tmp_path, OsFiles())
    storage = opened(tmp_path)
    path = change_entry(storage, LLSN(storage._log.firsts[2] - 1))
    change(path, MARKS)
    content = path.read_bytes()
    storage = opened(tmp_path)
    for _ in range(3):
        storage.repair_headers()
        assert isinstance(storage.repair_marks(), DamagedEntries)
    assert path.read_bytes() == content
    assert {"mark 0 is wrong", "mark 1 is wrong"} <= what_is_wrong(storage)
    good = 0
    for entry in entries:
        with suppress(DamagedEntries):
            assert storage.entry_at(entry.first_llsn) == entry
            good += 1
    assert good == len(entries) - 1, "the others are served"


def test_a_file_that_is_too_short_gets_no_marks(tmp_path: Path) -> None:
    filled(tmp_path, OsFiles())
    path = closed_files(tmp_path)[1]
    change(path, MARKS)
    content = path.read_bytes()
    for size in (len(content) - 1, HEADER_BYTES + SECTOR_BYTES):
        path.write_bytes(content[:size])
        storage = opened(tmp_path)
        assert isinstance(storage.repair_marks(), DamagedEntries)
        assert path.read_bytes() == content[:size]


def test_what_lies_behind_the_last_entry_does_not_count(tmp_path: Path) -> None:
    """A disk may have put something there."""
    entries = filled(tmp_path, OsFiles())
    path = closed_files(tmp_path)[1]
    end = last_mark(path).offset
    change(path, MARKS)
    with path.open("ab") as file:
        file.write(bytes(100) + b"astray")
    storage = opened(tmp_path)
    assert storage.repair_marks() is None
    assert last_mark(path).offset == end
    assert storage.verify() == []
    assert list(opened(tmp_path).entries(LLSN(1), storage.end)) == entries


def test_trimmed_entries_need_not_be_intact(tmp_path: Path) -> None:
    """No replica has a copy of them."""
    filled(tmp_path, OsFiles())
    storage = opened(tmp_path)
    first = storage._log.firsts[1]
    kept = storage.entry_at(LLSN(storage.entry_at(first).last_llsn + 1)).first_llsn
    glsn = next(c for c in storage.contexts if c.first_llsn <= kept <= c.last_llsn).glsn_of(kept)
    assert storage.drop_before(glsn, storage.committed_end) == kept > first
    path = change_entry(storage, first)
    storage.close()
    change(path, MARKS)
    storage = opened(tmp_path)
    assert storage.repair_marks() is None
    assert last_mark(path).llsn == storage._log.firsts[1] - 1
    assert storage.verify() == []


@pytest.mark.parametrize(("keep", "step"), [(0.0, 4), (0.5, 2), (1.0, 4)])
def test_a_crash_while_marks_are_written_loses_nothing(keep: float, step: int) -> None:
    directory, files = Path("/replica"), FaultFiles()
    entries = filled(directory, files)
    for kind in (".entries", ".commits"):
        for path in [path for path in files.paths() if path.suffix == kind][:-1]:
            for mark in (1, 2):
                files.flip(path, mark * SECTOR_BYTES + 3)
    deaths = 0
    for call in range(1, 1_000, step):
        copy = files.copy()
        storage = opened(directory, copy)
        copy.die_at = copy.calls + call
        before = deaths
        try:
            storage.repair_headers()
        except ProcessDied:
            deaths += 1
        copy.crash(Random(call), keep=keep)
        storage = opened(directory, copy)
        assert list(storage.entries(LLSN(1), storage.end)) == entries
        storage.repair_headers()
        assert storage.repair_marks() is None
        assert storage.verify() == []
        copy.crash(Random(call), keep=0.0)
        assert opened(directory, copy).verify() == [], "it is durable"
        if deaths == before:
            break
    assert deaths > 50 // step


@pytest.mark.parametrize("call", [None, *range(1, 30)])
def test_a_segment_without_marks_becomes_the_last_one_again(call: int | None) -> None:
    """Without marks it could not be opened as the last one, even if nothing in it is damaged."""
    directory, files = Path("/replica"), FaultFiles()
    entries = filled(directory, files)
    for path in [path for path in files.paths() if path.suffix == ".entries"][:-1]:
        for mark in (1, 2):
            files.flip(path, mark * SECTOR_BYTES + 3)
    storage = opened(directory, files)
    end = storage.committed_end
    assert storage._log.firsts[-2] > end + 1, "several segments go"
    if call is not None:
        files.die_at = files.calls + call
    with suppress(ProcessDied):
        storage.truncate(end)
        assert storage.end == end
    files.crash(Random(call), keep=0.5)
    storage = opened(directory, files)
    storage.truncate(end)
    rest = entries_from(end + 1, 5, size=30)
    storage.write(rest)
    storage.sync()
    storage.close()
    storage = opened(directory, files)
    storage.repair_headers()
    assert storage.verify() == []
    assert list(storage.entries(LLSN(1), storage.end)) == [e for e in entries if e.last_llsn <= end] + rest


@pytest.mark.parametrize("call", [None, *range(1, 100)])
def test_commits_are_cut_back_into_a_file_without_marks(call: int | None) -> None:
    directory, files = Path("/replica"), FaultFiles()
    filled(directory, files)
    path = [path for path in files.paths() if path.suffix == ".commits"][-2]
    for mark in (1, 2):
        files.flip(path, mark * SECTOR_BYTES + 3)
    storage = opened(directory, files)
    context = storage.contexts[5]
    if call is not None:
        files.die_at = files.calls + call
    with suppress(ProcessDied):
        storage.cut_back(context.last_llsn, context.last_llsn)
    files.crash(Random(call), keep=0.5)
    storage = opened(directory, files)
    assert not storage.find().lost
    storage.cut_back(context.last_llsn, context.last_llsn)
    assert storage.last_commit == context
    storage.close()
    storage = opened(directory, files)
    assert storage.last_commit == context
    storage.repair_headers()
    assert storage.verify() == []
