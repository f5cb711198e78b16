"""Stores one replica in files.

::

    manifest                  which replica this is, which generation of files counts, where the entries begin
    state                     hard state
    dedup                     deduplication checkpoint
    <generation>-<llsn>.entries    segments of entries, by first LLSN
    <generation>-<llsn>.commits    commit contexts, by the first LLSN of the first one

The first three are replaced as a whole. A restart begins files of the next generation and then replaces the manifest. A
trim replaces the manifest and then removes the files that no longer count. So both happen at one instant. Files that a
crash leaves behind are recognized by their names and removed when the replica is opened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from cutwater.core.read.commit_index import first_glsn_at_or_after_time, first_llsn_at_or_after, glsn_of_llsn
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import FoundFiles, HardState
from cutwater.errors import Damaged, NotYetCommitted, Trimmed
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import NO_TIME, RunningEventTime
from cutwater.format.errors import DamagedEntries, DamagedFile, DiskFull, StorageBroken, TrimmedEntries
from cutwater.storage.files import TEMPORARY, OsFiles, StorageFiles, is_full, look_again
from cutwater.storage.format import ReplicaManifest
from cutwater.storage.replica import commits, segment_log
from cutwater.storage.replica.commits import CommitLog, ContextView
from cutwater.storage.replica.segment import EntryPlace
from cutwater.storage.replica.segment_log import SegmentLog, SegmentOptions, parse_name
from cutwater.storage.replica.small_files import ReplicaIdentity, SmallFiles
from cutwater.storage.replica.verify import check_files, verify
from cutwater.storage.results import EntryRange, FrameCheck, Located, StorageFinding
from cutwater.types import GLSN, LLSN, CommitContext, CutTime, Entry

ENTRIES_BYTES = 1 << 20
HEADS_AT_ONCE = 256

T = TypeVar("T")
_last_llsn = attrgetter("last_llsn")


class _Guard:
    """Turns errors of the file system into errors of Cutwater. All errors except a full disk are final."""

    __slots__ = ("_directory", "broken")

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.broken: str | None = None

    def check(self) -> None:
        if self.broken is not None:
            raise StorageBroken(f"{self._directory} failed before ({self.broken}): reopen it and cut it back")

    __enter__ = check

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, StorageBroken):
            self.broken = error.message
        elif isinstance(error, OSError):
            if is_full(error):
                raise DiskFull(
                    f"{self._directory}: no room is left ({error}): nothing was lost; make room, or trim"
                ) from error
            self.broken = str(error)
            raise StorageBroken(f"{self._directory} failed ({error}): reopen it and cut it back") from error


class SegmentStorage:
    """The storage of one replica.

    One thread writes. ``write``, ``write_contexts`` and ``sync`` are separate, so that the thread can collect what
    arrives while a sync is under way and sync it together. Other threads may read committed entries meanwhile.
    """

    def __init__(
        self,
        directory: Path,
        identity: ReplicaIdentity,
        options: SegmentOptions | None = None,
        files: StorageFiles | None = None,
    ) -> None:
        """Open the files, or begin empty. ``core.replica.recovery.judge`` decides whether that is allowed."""
        self._directory, self._identity = directory, identity
        self._options, self._files = options or SegmentOptions(), files or OsFiles()
        self._guard = _Guard(directory)
        self._lost = ""
        """Describes what could not be read when the replica was opened, apart from entries."""
        with self._guard:
            self._open()

    @property
    def path(self) -> Path:
        return self._directory

    # Opening.

    def _open(self) -> None:
        files, directory = self._files, self._directory
        files.make_dir(directory)
        # File names from just before the process died may not be durable yet.
        files.sync_dir(directory)
        names = files.names(directory)
        small = SmallFiles(files, directory, self._identity)
        if small.is_new(names):
            # The first segment first, the manifest last. So nothing exists without a manifest.
            self._segment_log(1).create(LLSN(1), NO_TIME)
            small.begin()
            names = files.names(directory)
        else:
            small.load_manifest(names)
            self._remove_leftovers(names, small.manifest.generation)
        small.load_state(names)
        committed, log = self._recover_logs(names, small.manifest)
        # Concurrent readers see either the logs that were open before or the recovered ones, never a half-recovered
        # state.
        self._commits, self._log, self._small = committed, log, small
        lost = list(small.lost)
        if small.manifest.has_commits and not any(name.endswith(commits.SUFFIX) for name in names):
            lost.append(f"{directory}: the files of commits are missing")
        self._lost = "; ".join([*lost, committed.lost] if committed.lost else lost)

    def _remove_leftovers(self, names: Sequence[str], generation: int) -> None:
        """Remove unfinished files and files of other generations."""
        for name in names:
            parsed = parse_name(name, segment_log.SUFFIX) or parse_name(name, commits.SUFFIX)
            if name.endswith(TEMPORARY) or (parsed is not None and parsed[0] != generation):
                self._files.unlink(self._directory / name)

    def _recover_logs(self, names: Sequence[str], manifest: ReplicaManifest) -> tuple[CommitLog, SegmentLog]:
        def firsts_of(suffix: str) -> list[LLSN]:
            parsed = [parse_name(name, suffix) for name in names]
            return sorted(one[1] for one in parsed if one is not None and one[0] == manifest.generation)

        committed = self._commit_log(manifest.generation)
        committed.recover(firsts_of(commits.SUFFIX), manifest.first_llsn)
        committed.check_reach(manifest.first_llsn)
        log = self._segment_log(manifest.generation)
        firsts = firsts_of(segment_log.SUFFIX)
        left_over = bisect_right(firsts, manifest.first_llsn) - 1
        if left_over < 0:
            raise DamagedFile(
                self._directory, f"the segment of LLSN {manifest.first_llsn} is missing, where the entries begin"
            )
        last = committed.last
        log.recover(firsts[left_over:], last.last_llsn if last else LLSN(0))
        for first in firsts[:left_over]:
            name = segment_log.file_name(manifest.generation, first, segment_log.SUFFIX)
            self._files.unlink(self._directory / name)
        return committed, log

    def _segment_log(self, generation: int) -> SegmentLog:
        return SegmentLog(self._files, self._directory, generation, self._options)

    def _commit_log(self, generation: int) -> CommitLog:
        return CommitLog(self._files, self._directory, generation, self._options)

    # State.

    @property
    def first_llsn(self) -> LLSN:
        """The LLSN at which the entries begin. Trimmed ones before it are removed with the rest of their segment."""
        return self._small.manifest.first_llsn

    @property
    def end(self) -> LLSN:
        """The LLSN at which the entries end, synced or not."""
        return self._log.end_llsn

    @property
    def durable_end(self) -> LLSN:
        return self._log.durable_llsn

    @property
    def last_commit(self) -> CommitContext | None:
        """The last commit context that was written, synced or not."""
        return self._commits.last

    @property
    def durable_commit(self) -> CommitContext | None:
        return self._commits.durable

    @property
    def committed_end(self) -> LLSN:
        """The end of the committed entries, according to the files."""
        last = self._commits.last
        if last is not None:
            return last.last_llsn
        return self.hard_state.base_llsn if self.hard_state else LLSN(0)

    @property
    def hard_state(self) -> HardState | None:
        return self._small.hard_state

    @property
    def dedup(self) -> DedupCheckpoint | None:
        return self._small.dedup

    @property
    def contexts(self) -> ContextView:
        """All stored commit contexts, for the searches of ``core.read.commit_index``."""
        self._guard.check()
        return self._commits.contexts

    def find(self) -> FoundFiles:
        """Return what opening the files found, for ``core.replica.recovery.judge``."""
        self._guard.check()
        log = self._log
        tail: list[Entry] = []
        bad = [] if log.lost is None else [log.lost]
        for place in log.places(LLSN(max(self.committed_end + 1, self.first_llsn)), log.end_llsn):
            try:
                # An unfinished group may be larger than memory, and the bodies are not needed.
                tail.append(log.frame_of(place.first_llsn).header.entry(b""))
            except Damaged:
                bad.append(place.first_llsn)
        last = self._commits.last
        found = (self.hard_state, last, self.first_llsn, log.end_llsn, tuple(tail), min(bad, default=None), self._lost)
        return FoundFiles(*found, lacks_dedup=self.dedup is None and self.first_llsn > 1)

    # Writing. All methods raise ``DiskFull`` if there is no room: then nothing is lost, and the caller may try again.
    # They raise ``StorageBroken`` if anything else fails: then every later call fails too, until ``cut_back``.

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries that follow the last one. They are durable after ``sync``."""
        for entry in entries:
            if crc32c(entry.batch.body) != entry.batch.checksum:
                raise DamagedEntries("before it was written", entry.first_llsn, entry.last_llsn, "wrong checksum")
        with self._guard:
            if self._log.lost is not None:
                raise DamagedEntries(str(self._directory), self._log.lost, self._log.lost, "lost: cut back or restart")
            self._log.write(entries)

    def write_contexts(self, contexts: Sequence[CommitContext]) -> None:
        """Write commits that follow the last one, of durable entries only. They are durable after ``sync``."""
        with self._guard:
            if contexts:
                # A commit context on disk implies that the entries it covers are on disk.
                assert contexts[-1].last_llsn <= self._log.durable_llsn, (contexts[-1], self._log.durable_llsn)
                self._commits.write(contexts)

    def sync(self, *, entries: bool = True, contexts: bool = True, marks: bool = True) -> None:
        """Make written data durable.

        ``marks``: note in the files how far entries are durable. Without it, call ``mark`` later.
        """
        with self._guard:
            if entries:
                self._log.sync()
            if contexts:
                self._commits.sync()
                if self._commits.durable is not None and not self._small.manifest.has_commits:
                    # Only now: a crash before this point may leave no file of commits, and then nothing is lost.
                    self._small.change_manifest(has_commits=True)
            if marks:
                self._log.mark()

    def mark(self) -> None:
        """Note how far entries are durable, if ``sync`` did not. It is a hint for the next opening, so it can wait."""
        with self._guard:
            self._log.mark()

    def save_hard_state(self, hard_state: HardState) -> None:
        """Save the hard state. It is durable on return, as with all methods below."""
        with self._guard:
            self._small.save_hard_state(hard_state)

    def save_dedup(self, checkpoint: DedupCheckpoint) -> None:
        with self._guard:
            self._small.save_dedup(checkpoint)

    def truncate(self, end: LLSN) -> None:
        """Remove the entries above ``end``, none of which is committed. A full disk raises ``StorageBroken`` here."""
        with self._guard:
            last = self._commits.last
            assert last is None or end >= last.last_llsn, (end, last)
            try:
                self._log.truncate(end)
            except OSError as error:
                # Some of it may be done. Not even a full disk lets the caller go on then.
                raise StorageBroken(f"{self._directory} failed ({error}): reopen it and cut it back") from error

    def restart(self, first_llsn: LLSN, running: RunningEventTime = NO_TIME, keep_end: LLSN | None = None) -> None:
        """Remove all commit contexts, and all entries except those from ``first_llsn`` to ``keep_end``.

        The entries that are kept are durable afterwards. If none is kept, the next entry is ``first_llsn``. ``running``
        is event time before it.
        """
        with self._guard:
            generation = self._small.manifest.generation + 1
            log = self._segment_log(generation)
            log.create(first_llsn, running)
            llsn = first_llsn
            while keep_end is not None and llsn <= keep_end:
                log.write([frame.entry for frame in self._log.read(llsn, keep_end, ENTRIES_BYTES).frames])
                llsn = LLSN(log.end_llsn + 1)
            log.sync()
            log.mark()
            self._small.change_manifest(generation=generation, first_llsn=first_llsn, has_commits=False)
            self._log, self._commits = log, self._commit_log(generation)
            self._remove_leftovers(self._files.names(self._directory), generation)

    def drop_before(self, before: GLSN, upto: LLSN) -> LLSN:
        """Remove committed entries below this GLSN, but none above ``upto``. Returns where the entries begin now."""
        with self._guard:
            durable = self._commits.durable
            if durable is None or upto < self.first_llsn:
                return self.first_llsn
            upto = min(upto, durable.last_llsn)
            llsn = first_llsn_at_or_after(self._commits.contexts, before)
            if llsn is None or llsn > upto:
                llsn = LLSN(upto + 1)
            if llsn <= self.first_llsn:
                return self.first_llsn
            self._log.roll_if_all_below(llsn)
            first = self._log.entry_start(llsn)
            if first > self.first_llsn:
                self._small.change_manifest(first_llsn=first)
                self._log.forget_before(first)
                self._commits.forget_before(first)
            return self.first_llsn

    def cut_back(self, end: LLSN | None, committed_end: LLSN | None) -> None:
        """Reopen the files, and remove everything above these ends, which are known to be durable.

        If either is None, nothing is removed. After ``StorageBroken``, this is the only call that can succeed.
        """
        self._guard.broken = None
        with self._guard:
            try:
                self._open()
            except Damaged as error:
                # The logs that were open before are closed, and nothing has replaced them.
                self._guard.broken = error.message
                raise
            if end is None or committed_end is None:
                return
            has_commits = self._small.manifest.has_commits
            if has_commits and not bisect_right(self._commits.contexts, committed_end, key=_last_llsn):
                # No commit is left. Without this, their files would be reported as missing.
                self._small.change_manifest(has_commits=False)
            self._commits.cut_back(committed_end)
            # The failed operation may have been a restart that succeeded after all.
            end = max(end, LLSN(self.first_llsn - 1))
            if self._log.end_llsn > end:
                self._log.truncate(end)

    def repair(self, entry: Entry, running: RunningEventTime | None = None) -> bool:
        """Replace a damaged entry with an intact copy. Returns False if the copy does not belong there.

        If several entries in a row are damaged beyond recognition, the first or the last one can be repaired, one after
        the other. The last one needs the copy's ``running``.
        """
        with self._guard:
            if crc32c(entry.batch.body) != entry.batch.checksum:
                return False
            if not self._log.first_llsn <= entry.first_llsn <= self._log.end_llsn:
                return False
            return self._log.repair(entry, running)

    def repair_context(self, context: CommitContext) -> bool:
        with self._guard:
            return self._commits.repair(context)

    def repair_headers(self) -> int:
        """Repair damaged file headers, of which each file has a copy, and small files, whose content is in memory.

        Returns the number of repaired files. A segment without marks may have to wait, see ``repair_marks``.
        """
        with self._guard:
            repaired = self._small.repair()
            segments = [self._log.segment_of(first) for first in self._log.firsts]
            marked = [file for _, file, _ in self._commits.files()]
            repaired += sum(segment.heal_index(self.first_llsn) for segment in segments)
            for segment in segments:
                with suppress(DamagedEntries):
                    repaired += segment.heal_header(self.first_llsn)
            return repaired + sum(file.heal() for file in marked)

    def repair_marks(self) -> DamagedEntries | None:
        """Give new marks to each segment that lost both. Returns damaged entries that must be repaired before that."""
        with self._guard:
            for first in self._log.firsts:
                try:
                    self._log.segment_of(first).heal_header(self.first_llsn)
                except DamagedEntries as error:
                    return error
            return None

    def close(self) -> None:
        """Sync everything, and then write the marks that say so."""
        if self._guard.broken is None:
            self.sync()
            with self._guard:
                self._log.close()
                self._commits.close()
        self._guard.broken = "it was closed"

    # Reading. Everything is verified. Damaged data is never returned; ``Damaged`` is raised instead. A trim may remove
    # files between two steps of a reader. Then the reader starts again.

    def _read(self, what: Callable[[], T], llsn: LLSN | None = None) -> T:
        """Call ``what``, again if a trim interferes. ``llsn`` is an LLSN of the entry that it reads, if any."""
        self._guard.check()

        def read() -> T:
            if llsn is not None and llsn < self.first_llsn:
                raise TrimmedEntries(llsn, self.first_llsn, self._first_left())
            return what()

        return look_again(read, self._directory)

    def read(self, from_llsn: LLSN, to_llsn: LLSN, bytes_max: int) -> EntryRange:
        """Read committed entries, beginning with the one that holds ``from_llsn``.

        Returns at least one entry, otherwise at most ``bytes_max``, and perhaps fewer than there are.
        """
        committed_end = self.committed_end
        if from_llsn > committed_end:
            raise NotYetCommitted(f"LLSN {from_llsn} is not committed here, only up to {committed_end}: wait for it")

        def read() -> EntryRange:
            # Take the commits first: while entries are read, a trim may remove both.
            contexts = self._commits.contexts
            found = self._log.read(from_llsn, min(to_llsn, committed_end), bytes_max)
            first, last = found.frames[0].header.first_llsn, found.frames[-1].header.last_llsn
            return EntryRange(found.data, found.frames, tuple(contexts.covering(first, last)))

        return self._read(read, from_llsn)

    def locate(self, from_llsn: LLSN, to_llsn: LLSN, bytes_max: int, count_max: int) -> Located | None:
        """Return where these entries are, at most ``count_max``. None if they are in no file, or one is damaged."""

        def locate() -> Located | None:
            contexts = self._commits.contexts
            segment = self._log.segment_of(from_llsn)
            to_committed = min(to_llsn, self.committed_end)
            start, end, headers = segment.located(from_llsn, to_committed, bytes_max, count_max)
            if not headers:
                return None
            commits = contexts.covering(headers[0].first_llsn, headers[-1].last_llsn)
            return Located(str(segment.path), start, end, headers, commits)

        return self._read(locate, from_llsn)

    def entry_at(self, llsn: LLSN) -> Entry:
        """Return the entry that holds this LLSN, committed or not."""
        if llsn > self._log.end_llsn:
            raise NotYetCommitted(f"LLSN {llsn} is not here, only up to {self._log.end_llsn}")
        return self._read(lambda: self._log.frame_of(llsn), llsn).entry

    def entries(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        to_llsn = min(to_llsn, self._log.end_llsn)
        while from_llsn <= to_llsn:
            frames = self._read(partial(self._log.read, from_llsn, to_llsn, ENTRIES_BYTES), from_llsn).frames
            for frame in frames:
                yield frame.entry
            from_llsn = LLSN(frames[-1].header.last_llsn + 1)

    def heads(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        """Return the same entries with empty bodies, which are not read. Damaged trimmed entries are left out."""
        to_llsn = min(to_llsn, self._log.end_llsn)
        while from_llsn <= to_llsn:
            places = self._read(partial(self._places, from_llsn, to_llsn), from_llsn)
            for place in places:
                if place.header is not None:
                    yield place.header.entry(b"")
                elif place.last_llsn >= self._first_live():
                    raise DamagedEntries(str(self._directory), place.first_llsn, place.last_llsn, "wrong header")
            from_llsn = LLSN(places[-1].last_llsn + 1)

    def _places(self, from_llsn: LLSN, to_llsn: LLSN) -> list[EntryPlace]:
        return list(islice(self._log.places(from_llsn, to_llsn), HEADS_AT_ONCE))

    @property
    def _trimmed_before(self) -> GLSN:
        return (self.hard_state or HardState()).trimmed_before

    def _first_live(self) -> LLSN:
        """The first LLSN that is not trimmed, whether its files are removed or not."""
        live = self._read(lambda: first_llsn_at_or_after(self._commits.contexts, self._trimmed_before))
        return LLSN(self.committed_end + 1) if live is None else live

    def running_before(self, llsn: LLSN) -> RunningEventTime:
        """Return event time before the entry that begins with this LLSN."""
        if llsn == self._log.end_llsn + 1:
            return self._log.running
        return self._read(lambda: self._log.frame_of(llsn), llsn).header.running

    def from_glsn(self, glsn: GLSN) -> LLSN | None:
        """Return the first LLSN at or after this GLSN, or None if there is none yet. Raises ``Trimmed``."""
        trimmed_before = self._trimmed_before
        if glsn < trimmed_before:
            raise Trimmed(glsn, trimmed_before)
        llsn = self._read(lambda: first_llsn_at_or_after(self._commits.contexts, glsn))
        if llsn is not None and llsn < self.first_llsn:
            raise Trimmed(glsn, self._read(self._first_left))
        return llsn

    def from_time(self, time: CutTime) -> GLSN | None:
        """Return the first record that was committed at or after this time and is not trimmed."""
        glsn = self._read(lambda: first_glsn_at_or_after_time(self._commits.contexts, time))
        return None if glsn is None else max(glsn, self._read(self._first_left))

    @property
    def size_bytes(self) -> int:
        """Size of all entries in bytes."""
        return self._read(lambda: self._log.size_bytes)

    def within(self, bytes_max: int) -> GLSN | None:
        """Return the first committed record of the newest files that together have at most about ``bytes_max`` bytes.

        None if nothing is committed.
        """
        llsn = max(self._read(lambda: self._log.first_within(bytes_max)), self.first_llsn)
        return None if llsn > self.committed_end else self._read(lambda: glsn_of_llsn(self._commits.contexts, llsn))

    def bytes_through(self, llsns: Sequence[LLSN]) -> list[int]:
        """Return about how many bytes the entries up to each of these LLSNs take. Only differences are meaningful."""
        return self._read(lambda: self._log.bytes_through(llsns))

    def _first_left(self) -> GLSN:
        """Return the GLSN after the last removed record, or the GLSN that was trimmed up to if that is larger."""
        hard_state = self.hard_state or HardState()
        gone = glsn_of_llsn(self._commits.contexts, LLSN(self.first_llsn - 1))
        return GLSN(max(hard_state.trimmed_before, (gone or hard_state.base_glsn) + 1))

    def verify(self, check: FrameCheck | None = None) -> list[StorageFinding]:
        """Read everything and check that it is consistent. ``check`` also checks the content of each entry."""
        self._guard.check()
        findings = verify(self._log, self._commits, self._small.findings(), check)
        # Trimmed entries may share a segment with others, but no replica has a copy of them and no reader needs them.
        first = self.first_llsn
        return [finding for finding in findings if finding.last_llsn is None or finding.last_llsn >= first]

    def check_files(self) -> list[StorageFinding]:
        """Return faults of small files, headers, marks and indexes. Entries and commits are not read."""
        self._guard.check()
        return self._read(lambda: check_files(self._log, self._commits, self._small.findings()))
