"""A wrong bit anywhere is found by whoever meets it, and nothing wrong is ever served."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from storage_kit import DIRECTORY, IDENTITY, commit_of, entries_from

from cutwater.core.replica.deduplication import Deduplicator
from cutwater.core.replica.opening import open_replica
from cutwater.core.replica.recovery import HardState, Invalid, Valid, judge
from cutwater.errors import CutwaterError, Damaged, Unavailable
from cutwater.format.entry_codec import EntryFrame, RunningEventTime
from cutwater.format.errors import DamagedEntries, DamagedFile
from cutwater.storage.format import HEADER_BYTES, POINT_BYTES, SECTOR_BYTES
from cutwater.storage.replica.commits import CommitLog
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storagenode.repair.damage_repair import first_damaged_commit
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import LLSN, Epoch, EventTime

OPTIONS = SegmentOptions(segment_bytes=1100, index_interval_bytes=400, commits_per_file=4)
PARTS = 2
FILLING_EVERY = 16
SERVED_EVERY = 6
INDEX_BYTES = -(-OPTIONS.segment_bytes // OPTIONS.index_interval_bytes) * POINT_BYTES


class Original:
    """A replica with several segments and commit files, some uncommitted entries, and all small files."""

    def __init__(self) -> None:
        self.files = FaultFiles()
        storage = self.open(self.files)
        storage.save_hard_state(HardState(epoch=Epoch(1)))
        self.contexts = []
        for _ in range(6):
            group = entries_from(storage.end + 1, 4, size=30)
            storage.write(group)
            storage.sync()
            self.contexts.append(commit_of(group, self.contexts[-1] if self.contexts else None))
            storage.write_contexts(self.contexts[-1:])
        storage.sync()
        storage.write(entries_from(storage.end + 1, 2))
        storage.sync()
        self.entries = list(storage.entries(LLSN(1), storage.end))
        dedup = Deduplicator()
        for entry in self.entries:
            dedup.record(entry)
        for context in self.contexts:
            dedup.commit(context)
        storage.save_dedup(dedup.checkpoint(self.contexts[-1].last_llsn))
        storage.close()
        self.found = self.open(self.files).find()

    def open(self, files: FaultFiles) -> SegmentStorage:
        return SegmentStorage(DIRECTORY, IDENTITY, OPTIONS, files)


@pytest.fixture(scope="module")
def original() -> Original:
    return Original()


def places(original: Original) -> list[tuple]:
    """A bit of every byte of every file, but of few of those that only fill up a sector."""
    rng = Random("flips")
    return [
        (path, offset, rng.randrange(8))
        for path in original.files.paths()
        for offset in range(len(original.files.content(path)))
        if not path.suffix or not is_filling(path, offset) or offset % FILLING_EVERY == 0
    ]


def is_filling(path: Path, offset: int) -> bool:
    """Whether no field lies there: sectors of the header have theirs at the beginning and a checksum at the end, and
    the index of a small segment is short."""
    if offset < HEADER_BYTES:
        return 72 <= offset % SECTOR_BYTES < SECTOR_BYTES - 4
    return path.suffix == ".entries" and HEADER_BYTES + INDEX_BYTES <= offset < HEADER_BYTES + SECTOR_BYTES


def served(storage: SegmentStorage) -> list:
    """All entries that can be had, one by one; what is damaged is missing."""
    found = []
    llsn = storage.first_llsn
    while llsn <= storage.end:
        try:
            entry = storage.entry_at(llsn)
            found.append(entry)
            llsn = LLSN(entry.last_llsn + 1)
        except DamagedEntries as error:
            llsn = LLSN(error.last_llsn + 1)
    return found


def ranges_served(storage: SegmentStorage) -> None:
    """Reads of ranges give what is right, or say that it is damaged. What is told of headers is right."""
    llsn = storage.first_llsn
    while llsn <= storage.committed_end:
        try:
            located = storage.locate(llsn, storage.committed_end, 600, 100)
            if located is not None:
                first, count = located.headers[0].first_llsn, len(located.headers)
                entries = entries_from(first, count, size=30)
                assert [header.checksum for header in located.headers] == [e.batch.checksum for e in entries]
                assert located.headers[-1].last_llsn == entries[-1].last_llsn
            part = storage.read(llsn, storage.committed_end, 600)
        except Damaged:
            llsn = LLSN(llsn + 1)
            continue
        assert [frame.entry for frame in part.frames] == entries_from(part.first_llsn, len(part.frames), size=30)
        llsn = LLSN(part.last_llsn + 1)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_flipped_bit_in_any_file_is_found_and_never_served(original: Original, part: int) -> None:
    files = original.files.copy()
    storage = original.open(files)
    everything = places(original)
    assert len(everything) > 7_000
    for number, (path, offset, bit) in enumerate(everything[part::PARTS]):
        files.flip(path, offset, bit)
        where = f"bit {bit} of byte {offset} of {path.name}"
        assert storage.verify(), where
        if number % SERVED_EVERY == 0:
            check_served(original, storage, path, where)
        # Reading changes nothing, so all is well again.
        files.flip(path, offset, bit)
    assert storage.verify() == []
    assert served(storage) == original.entries


def check_served(original: Original, storage: SegmentStorage, path: Path, where: str) -> None:
    good = served(storage)
    assert all(entry in original.entries for entry in good), where
    assert len(good) >= len(original.entries) - 1 or path.suffix != ".entries", where
    ranges_served(storage)
    for context in range(len(original.contexts)):
        try:
            assert storage.contexts[context] == original.contexts[context], where
        except DamagedFile:
            assert path.suffix == ".commits", where


def test_a_flipped_bit_met_when_opening_is_an_error_or_harmless(original: Original) -> None:
    """After a restart: a typed error, a replica that is not trusted, or one that has everything."""
    for path, offset, bit in places(original)[::6]:
        files = original.files.copy()
        files.flip(path, offset, bit)
        where = f"bit {bit} of byte {offset} of {path.name}"
        try:
            storage = original.open(files)
            found = storage.find()
        except Damaged:
            continue
        if isinstance(judge(found), Invalid):
            continue
        assert found == original.found, where
        good = served(storage)
        assert all(entry in original.entries for entry in good), where
        if good != original.entries:
            assert storage.verify(), where


@pytest.mark.parametrize("part", ["header", "body", "trailer", "both ends"])
def test_each_part_of_an_entry_can_be_repaired(original: Original, part: str) -> None:
    for number in range(0, len(original.entries), 3):
        entry = original.entries[number]
        files = original.files.copy()
        storage = original.open(files)
        segment = storage._log.segment_of(entry.first_llsn)
        place = segment.place_of(entry.first_llsn)
        header_bytes = place.header.header_bytes
        offsets = {
            "header": [place.offset + 30],
            "body": [place.offset + header_bytes],
            "trailer": [place.end - 7],
            "both ends": [place.offset + 1, place.end - 1],
        }[part]
        for offset in offsets:
            files.flip(segment.path, offset)
        with pytest.raises(DamagedEntries) as damaged:
            storage.entry_at(entry.first_llsn)
        assert damaged.value.first_llsn == entry.first_llsn
        assert damaged.value.last_llsn == entry.last_llsn or part == "both ends"
        assert storage.repair(entry)
        assert served(storage) == original.entries
        files.crash(Random(1), keep=0.0)
        assert original.open(files).verify() == []


def test_neighbours_that_are_both_damaged_are_repaired_in_order(original: Original) -> None:
    files = original.files.copy()
    storage = original.open(files)
    segment = storage._log.segment_of(LLSN(10))
    first, second = [entry for entry in original.entries if segment.first_llsn <= entry.first_llsn][:2]
    for entry in (first, second):
        place = segment.place_of(entry.first_llsn)
        for offset in (place.offset + 5, place.end - 3):
            files.flip(segment.path, offset)
    assert storage.verify()
    assert storage.repair(first)
    assert storage.repair(second)
    assert served(storage) == original.entries
    assert storage.verify() == []


def test_damaged_neighbours_can_be_repaired_from_the_last_one_back(original: Original) -> None:
    """Nobody may have a copy of the first one: it may be trimmed elsewhere."""
    files = original.files.copy()
    storage = original.open(files)
    segment = storage._log.segment_of(LLSN(14))
    neighbours = [entry for entry in original.entries if segment.first_llsn <= entry.first_llsn][:3]
    runnings = [storage.running_before(entry.first_llsn) for entry in neighbours]
    places = [segment.place_of(entry.first_llsn) for entry in neighbours]
    for place in places:
        for offset in (place.offset + 5, place.end - 3):
            files.flip(segment.path, offset)
    with pytest.raises(DamagedEntries) as damaged:
        storage.entry_at(neighbours[1].first_llsn)
    assert (damaged.value.first_llsn, damaged.value.last_llsn) == (neighbours[0].first_llsn, neighbours[2].last_llsn)
    assert not storage.repair(neighbours[1], runnings[1]), "its place is not known yet"
    assert not storage.repair(neighbours[2]), "event time before it is not known"
    assert not storage.repair(neighbours[2], RunningEventTime(EventTime(10**9), None)), "the next entry says otherwise"
    for entry, running in list(zip(neighbours, runnings, strict=True))[:0:-1]:
        assert storage.repair(entry, running)
        assert storage.entry_at(entry.first_llsn) == entry
    assert [finding.first_llsn for finding in storage.verify()] == [neighbours[0].first_llsn]
    assert storage.repair(neighbours[0])
    assert served(storage) == original.entries
    assert storage.verify() == []


def test_damage_that_is_trimmed_keeps_nobody_from_opening(original: Original) -> None:
    """Deduplication needs the headers of all entries after its checkpoint, except of those that nobody has any more."""
    files = original.files.copy()
    files.unlink(DIRECTORY / "dedup")
    storage = original.open(files)
    second = original.entries[1]
    segment = storage._log.segment_of(second.first_llsn)
    files.flip(segment.path, segment.place_of(second.first_llsn).offset + 30)
    opening = open_replica(IDENTITY.node, IDENTITY.stream, storage)
    assert isinstance(opening.damage, DamagedEntries)
    before = original.contexts[1].first_glsn
    storage.save_hard_state(HardState(epoch=Epoch(1), trimmed_before=before))
    opening = open_replica(IDENTITY.node, IDENTITY.stream, storage)
    assert not opening.problem
    assert [entry.first_llsn for entry in storage.heads(LLSN(1), LLSN(9))] == [
        entry.first_llsn for entry in original.entries if entry.first_llsn <= 9 and entry is not second
    ]
    assert storage.drop_before(before, storage.committed_end) == original.contexts[1].first_llsn
    assert storage.verify() == []


def test_a_commit_context_can_be_repaired(original: Original) -> None:
    for number, context in enumerate(original.contexts[:-1]):
        files = original.files.copy()
        storage = original.open(files)
        file, record = divmod(number, OPTIONS.commits_per_file)
        path = [path for path in files.paths() if path.suffix == ".commits"][file]
        files.flip(path, HEADER_BYTES + 64 * record + 9)
        with pytest.raises(DamagedFile):
            storage.contexts[number]
        assert not storage.repair_context(original.contexts[(number + 2) % len(original.contexts)])
        assert storage.repair_context(context)
        assert list(storage.contexts) == original.contexts
        assert storage.verify() == []


@pytest.mark.parametrize("first", range(5))
def test_adjacent_commit_contexts_can_be_repaired_one_after_the_other(original: Original, first: int) -> None:
    files = original.files.copy()
    storage = original.open(files)
    numbers = range(first, min(first + 3, len(original.contexts) - 1))
    paths = [path for path in files.paths() if path.suffix == ".commits"]
    for number in numbers:
        file, record = divmod(number, OPTIONS.commits_per_file)
        files.flip(paths[file], HEADER_BYTES + 64 * record + 9)
    for _ in numbers:
        llsn = first_damaged_commit(storage)
        assert llsn is not None
        assert storage.repair_context(next(c for c in original.contexts if c.first_llsn <= llsn <= c.last_llsn))
    assert list(storage.contexts) == original.contexts
    assert storage.verify() == []


def test_headers_heal_themselves(original: Original) -> None:
    paths = [path for path in original.files.paths() if path.suffix]
    for sector in range(4):
        files = original.files.copy()
        for path in paths:
            files.flip(path, sector * 512 + 3)
        storage = original.open(files)
        assert served(storage) == original.entries
        assert storage.repair_headers() >= len(paths) - 2
        assert storage.verify() == []
        files.crash(Random(1), keep=0.0)
        storage = original.open(files)
        assert storage.verify() == []
        assert storage.find() == original.found


def test_an_index_is_healed_beside_a_damaged_entry_that_is_trimmed(original: Original) -> None:
    """No other node may have a copy of the entry. It was found by storm seed 2000263 of the simulator."""
    files = original.files.copy()
    storage = original.open(files)
    second = original.entries[1]
    segment = storage._log.segment_of(second.first_llsn)
    path, place = segment.path, segment.place_of(second.first_llsn)
    assert segment is storage._log.segment_of(LLSN(second.last_llsn + 1))
    files.flip(path, place.offset + 8)
    files.flip(path, HEADER_BYTES + SECTOR_BYTES - 1)
    storage = original.open(files)
    segment = storage._log.segment_of(second.first_llsn)
    assert segment.index.problems()
    storage.repair_headers()
    assert segment.index.problems(), "the entry must be repaired first"
    storage.save_hard_state(HardState(epoch=Epoch(1), trimmed_before=original.contexts[1].first_glsn))
    storage.drop_before(original.contexts[1].first_glsn, storage.committed_end)
    assert storage.first_llsn > second.last_llsn
    storage.repair_headers()
    assert not segment.index.problems()


def test_a_shortened_file_is_found(original: Original) -> None:
    """A file system check, or a careless hand, cut a file."""
    for path in original.files.paths():
        content = original.files.content(path)
        for size in {0, 1, len(content) // 2, len(content) - 1}:
            files = original.files.copy()
            files.put(path, content[:size])
            try:
                storage = original.open(files)
                found = storage.find()
                findings = storage.verify()
            except CutwaterError:
                continue
            if path.name in ("manifest", "dedup"):
                assert found == original.open(original.files.copy()).find(), "it is rebuilt"
                continue
            assert findings or isinstance(judge(found), Invalid), (path.name, size, len(content))
            assert all(entry in original.entries for entry in served(storage))


def test_a_missing_file_of_commits_hides_nothing(original: Original) -> None:
    """Nobody skips the records whose commits are gone."""
    files = FaultFiles()
    storage = SegmentStorage(DIRECTORY, IDENTITY, SegmentOptions(commits_per_file=2), files)
    context = None
    for _ in range(9):
        group = entries_from(storage.end + 1, 2)
        storage.write(group)
        storage.sync()
        context = commit_of(group, context)
        storage.write_contexts([context])
    storage.close()
    contexts = list(storage_of(files).contexts)
    paths = [path for path in files.paths() if path.suffix == ".commits"]
    for number in range(1, len(paths) - 1):
        copy = files.copy()
        copy.unlink(paths[number])
        try:
            storage = storage_of(copy)
        except DamagedFile:
            assert number == len(paths) - 2
            continue
        assert storage.verify()
        for context in contexts[2 * number : 2 * number + 2]:
            with pytest.raises(Damaged):
                storage.from_glsn(context.first_glsn)
            with pytest.raises(Damaged):
                storage.from_time(context.time)
            with pytest.raises(Damaged):
                storage.read(context.first_llsn, context.last_llsn, 10_000)
    files.unlink(paths[0])
    with pytest.raises(DamagedFile, match="the file of commits before it is missing"):
        storage_of(files)


@pytest.mark.parametrize("after", ["nothing", "file"])
def test_a_crash_at_the_first_commit_is_no_damage(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody need learn what a replica has only because the process died before its first commit was on disk."""
    files = FaultFiles()
    storage = storage_of(files)
    storage.save_hard_state(HardState())
    group = entries_from(1, 2)
    storage.write(group)
    storage.sync()
    if after == "nothing":
        monkeypatch.setattr(CommitLog, "write", lambda log, contexts: None)
    else:
        monkeypatch.setattr(MarkedFile, "extend", lambda *arguments: None)
    storage.write_contexts([commit_of(group, None)])
    monkeypatch.undo()
    for _ in range(2):
        found = storage_of(files).find()
        assert (found.lost, found.entries_end) == ("", group[-1].last_llsn)
        assert isinstance(judge(found), Valid)


def test_lost_files_of_commits_are_noticed() -> None:
    files = FaultFiles()
    storage = storage_of(files)
    storage.save_hard_state(HardState())
    group = entries_from(1, 2)
    storage.write(group)
    storage.sync()
    storage.write_contexts([commit_of(group, None)])
    storage.sync()
    storage.close()
    for path in files.paths():
        if path.suffix == ".commits":
            files.unlink(path)
    assert "the files of commits are missing" in storage_of(files).find().lost


def storage_of(files: FaultFiles) -> SegmentStorage:
    return SegmentStorage(DIRECTORY, IDENTITY, SegmentOptions(commits_per_file=2), files)


def test_a_missing_file_is_found(original: Original) -> None:
    last_commits = [path for path in original.files.paths() if path.suffix == ".commits"][-1]
    for path in original.files.paths():
        if path.name in ("dedup", "state") or path == last_commits:
            # Without them it is an older replica, and the order layer, which knows more, finds it out.
            continue
        files = original.files.copy()
        files.unlink(path)
        try:
            storage = original.open(files)
            found = storage.find()
            findings = storage.verify()
        except CutwaterError:
            continue
        if path.name == "manifest":
            assert found == original.open(original.files.copy()).find(), "it is rebuilt"
            continue
        assert findings or isinstance(judge(found), Invalid), path.name


def test_a_machine_that_cannot_look_into_an_entry_finds_no_damage(original: Original) -> None:
    """It has no memory for it now, say. Whoever asked is told so, and not that records are wrong."""
    storage = original.open(original.files.copy())
    looked = []

    def check(frame: EntryFrame) -> str:
        looked.append(frame.header.first_llsn)
        if len(looked) < 3:
            return ""
        raise Unavailable("there is no memory left")

    with pytest.raises(Unavailable, match="no memory left"):
        storage.verify(check)
    assert len(looked) == 3
    assert storage.verify(lambda frame: "") == []
