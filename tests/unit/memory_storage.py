"""``SegmentStorage`` without files: the simplest form of its contract, which the tests of storage compare it with.

A ``MemoryReplica`` takes the place of the disk, a ``MemoryStorage`` that of the open files on it. Unsynced data is lost
only on a call of ``lose_unsynced``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from cutwater.core.read.commit_index import first_glsn_at_or_after_time, first_llsn_at_or_after, glsn_of_llsn
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import FoundFiles, HardState
from cutwater.errors import NotYetCommitted, Trimmed
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import (
    NO_TIME,
    EntryFrame,
    RunningEventTime,
    decode_header,
    encode_frame,
)
from cutwater.format.errors import DamagedEntries, StorageBroken, TrimmedEntries
from cutwater.storage.replica.commits import follows
from cutwater.storage.results import EntryRange, FrameCheck, Located, StorageFinding, malformed
from cutwater.types import GLSN, LLSN, CommitContext, CutTime, Entry


class MemoryReplica:
    """What would be on disk."""

    def __init__(self) -> None:
        self.hard_state: HardState | None = None
        self.dedup: DedupCheckpoint | None = None
        self.first_llsn = LLSN(1)
        self.base_running = NO_TIME
        """Event time before the first entry."""
        self.frames: list[EntryFrame] = []
        self.contexts: list[CommitContext] = []
        self.frames_synced = 0
        self.contexts_synced = 0

    def lose_unsynced(self) -> None:
        """Drop everything that was not synced, as a power cut may do."""
        del self.frames[self.frames_synced :]
        del self.contexts[self.contexts_synced :]

    def end_of(self, count: int) -> LLSN:
        """Return where the first ``count`` entries end."""
        return self.frames[count - 1].header.last_llsn if count else LLSN(self.first_llsn - 1)


class MemoryStorage:
    """Has the methods of ``SegmentStorage``."""

    def __init__(self, memory: MemoryReplica | None = None) -> None:
        self.memory = memory or MemoryReplica()
        self._closed = False
        # Opening makes existing data durable.
        self.memory.frames_synced = len(self.memory.frames)
        self.memory.contexts_synced = len(self.memory.contexts)

    # State.

    @property
    def first_llsn(self) -> LLSN:
        return self.memory.first_llsn

    @property
    def end(self) -> LLSN:
        return self.memory.end_of(len(self.memory.frames))

    @property
    def durable_end(self) -> LLSN:
        return self.memory.end_of(self.memory.frames_synced)

    @property
    def last_commit(self) -> CommitContext | None:
        return self.memory.contexts[-1] if self.memory.contexts else None

    @property
    def durable_commit(self) -> CommitContext | None:
        return self.memory.contexts[self.memory.contexts_synced - 1] if self.memory.contexts_synced else None

    @property
    def committed_end(self) -> LLSN:
        if self.memory.contexts:
            return self.memory.contexts[-1].last_llsn
        return self.memory.hard_state.base_llsn if self.memory.hard_state else LLSN(0)

    @property
    def hard_state(self) -> HardState | None:
        return self.memory.hard_state

    @property
    def dedup(self) -> DedupCheckpoint | None:
        return self.memory.dedup

    @property
    def contexts(self) -> Sequence[CommitContext]:
        self._check()
        return tuple(self.memory.contexts)

    def find(self) -> FoundFiles:
        self._check()
        tail: list[Entry] = []
        damaged: LLSN | None = None
        for frame in self.memory.frames[self._index(LLSN(self.committed_end + 1)) :]:
            if frame.problem is not None:
                damaged = damaged or frame.header.first_llsn
                continue
            tail.append(frame.header.entry(b""))
        memory = self.memory
        found = (memory.hard_state, self.last_commit, memory.first_llsn, self.end, tuple(tail), damaged)
        return FoundFiles(*found, lacks_dedup=memory.dedup is None and self.first_llsn > 1)

    def _check(self) -> None:
        if self._closed:
            raise StorageBroken("the storage was closed: open it again")

    def _index(self, llsn: LLSN) -> int:
        """Return the index of the entry that holds this LLSN, or of the first one after it."""
        return bisect_left(self.memory.frames, llsn, key=lambda frame: frame.header.last_llsn)

    # Writing.

    def write(self, entries: Sequence[Entry]) -> None:
        self._check()
        for entry in entries:
            if crc32c(entry.batch.body) != entry.batch.checksum:
                raise DamagedEntries("before it was written", entry.first_llsn, entry.last_llsn, "wrong checksum")
        for entry in entries:
            assert entry.first_llsn == self.end + 1, (entry.first_llsn, self.end)
            self.memory.frames.append(_frame(entry, self.running_before(entry.first_llsn)))

    def write_contexts(self, contexts: Sequence[CommitContext]) -> None:
        self._check()
        for context in contexts:
            assert context.last_llsn <= self.durable_end, (context, self.durable_end)
            assert self.last_commit is None or follows(self.last_commit, context), (self.last_commit, context)
            self.memory.contexts.append(context)

    def sync(self, *, entries: bool = True, contexts: bool = True, marks: bool = True) -> None:
        self._check()
        if entries:
            self.memory.frames_synced = len(self.memory.frames)
        if contexts:
            self.memory.contexts_synced = len(self.memory.contexts)

    def mark(self) -> None:
        self._check()

    def save_hard_state(self, hard_state: HardState) -> None:
        self._check()
        self.memory.hard_state = hard_state

    def save_dedup(self, checkpoint: DedupCheckpoint) -> None:
        self._check()
        self.memory.dedup = checkpoint

    def truncate(self, end: LLSN) -> None:
        self._check()
        assert self.last_commit is None or end >= self.last_commit.last_llsn, (end, self.last_commit)
        del self.memory.frames[self._index(LLSN(end + 1)) :]
        self.memory.frames_synced = len(self.memory.frames)

    def restart(self, first_llsn: LLSN, running: RunningEventTime = NO_TIME, keep_end: LLSN | None = None) -> None:
        self._check()
        memory = self.memory
        kept = [] if keep_end is None else list(self.entries(first_llsn, keep_end))
        memory.first_llsn, memory.base_running = first_llsn, running
        memory.frames.clear()
        memory.contexts.clear()
        memory.contexts_synced = 0
        self.write(kept)
        memory.frames_synced = len(memory.frames)

    def drop_before(self, before: GLSN, upto: LLSN) -> LLSN:
        self._check()
        memory, durable = self.memory, self.durable_commit
        if durable is None or upto < memory.first_llsn:
            return memory.first_llsn
        upto = min(upto, durable.last_llsn)
        llsn = first_llsn_at_or_after(memory.contexts, before)
        if llsn is None or llsn > upto:
            llsn = LLSN(upto + 1)
        count = self._index(llsn)
        if count:
            memory.base_running = self.running_before(LLSN(memory.frames[count - 1].header.last_llsn + 1))
            memory.first_llsn = LLSN(memory.frames[count - 1].header.last_llsn + 1)
            del memory.frames[:count]
            memory.frames_synced -= count
        return memory.first_llsn

    def cut_back(self, end: LLSN | None, committed_end: LLSN | None) -> None:
        self._closed = False
        memory = self.memory
        if end is None or committed_end is None:
            return
        del memory.contexts[bisect_left(memory.contexts, committed_end + 1, key=lambda c: c.last_llsn) :]
        memory.contexts_synced = len(memory.contexts)
        self.truncate(min(end, self.end))

    def repair(self, entry: Entry, running: RunningEventTime | None = None) -> bool:
        self._check()
        i = self._index(entry.first_llsn)
        if i == len(self.memory.frames) or self.memory.frames[i].header.first_llsn != entry.first_llsn:
            return False
        found = self.memory.frames[i].header
        copy = _frame(entry, found.running)
        if copy.problem is not None or copy.header != found:
            return False
        self.memory.frames[i] = copy
        return True

    def repair_context(self, context: CommitContext) -> bool:
        """Return False, as commit contexts in memory cannot be damaged."""
        self._check()
        return False

    def repair_headers(self) -> int:
        self._check()
        return 0

    def repair_marks(self) -> None:
        self._check()

    def close(self) -> None:
        if not self._closed:
            self.sync()
        self._closed = True

    # Reading.

    def read(self, from_llsn: LLSN, to_llsn: LLSN, bytes_max: int) -> EntryRange:
        self._check()
        committed_end = self.committed_end
        if from_llsn > committed_end:
            raise NotYetCommitted(f"LLSN {from_llsn} is not committed here, only up to {committed_end}: wait for it")
        self._check_trimmed(from_llsn)
        found: list[EntryFrame] = []
        size = 0
        for frame in self.memory.frames[self._index(from_llsn) :]:
            size += frame.header.frame_bytes
            beyond = frame.header.first_llsn > min(to_llsn, committed_end)
            if found and (beyond or size > bytes_max or frame.problem is not None):
                break
            found.append(_sound(frame))
        first, last = found[0].header.first_llsn, found[-1].header.last_llsn
        commits = [c for c in self.memory.contexts if c.last_llsn >= first and c.first_llsn <= last]
        return EntryRange(memoryview(b"".join(frame.data for frame in found)), tuple(found), tuple(commits))

    def _check_trimmed(self, llsn: LLSN) -> None:
        if llsn < self.memory.first_llsn:
            raise TrimmedEntries(llsn, self.memory.first_llsn, self._first_left())

    def _first_left(self) -> GLSN:
        hard_state = self.memory.hard_state or HardState()
        gone = glsn_of_llsn(self.memory.contexts, LLSN(self.memory.first_llsn - 1))
        return GLSN(max(hard_state.trimmed_before, (gone or hard_state.base_glsn) + 1))

    def entry_at(self, llsn: LLSN) -> Entry:
        self._check()
        if llsn > self.end:
            raise NotYetCommitted(f"LLSN {llsn} is not here, only up to {self.end}")
        self._check_trimmed(llsn)
        return _sound(self.memory.frames[self._index(llsn)]).entry

    def entries(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        self._check()
        while from_llsn <= min(to_llsn, self.end):
            entry = self.entry_at(from_llsn)
            yield entry
            from_llsn = LLSN(entry.last_llsn + 1)

    def locate(self, from_llsn: LLSN, to_llsn: LLSN, bytes_max: int, count_max: int) -> Located | None:
        return None

    def heads(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        self._check()
        self._check_trimmed(from_llsn)
        for frame in self.memory.frames[self._index(from_llsn) :]:
            if frame.header.first_llsn > to_llsn:
                return
            yield frame.header.entry(b"")

    def running_before(self, llsn: LLSN) -> RunningEventTime:
        self._check()
        i = self._index(llsn)
        if i < len(self.memory.frames):
            return self.memory.frames[i].header.running
        if not self.memory.frames:
            return self.memory.base_running
        last = self.memory.frames[-1].header
        return last.running.after(last)

    def from_glsn(self, glsn: GLSN) -> LLSN | None:
        self._check()
        trimmed_before = self.memory.hard_state.trimmed_before if self.memory.hard_state else GLSN(1)
        if glsn < trimmed_before:
            raise Trimmed(glsn, trimmed_before)
        llsn = first_llsn_at_or_after(self.memory.contexts, glsn)
        if llsn is not None and llsn < self.memory.first_llsn:
            raise Trimmed(glsn, self._first_left())
        return llsn

    def from_time(self, time: CutTime) -> GLSN | None:
        self._check()
        glsn = first_glsn_at_or_after_time(self.memory.contexts, time)
        return None if glsn is None else max(glsn, self._first_left())

    @property
    def size_bytes(self) -> int:
        return sum(frame.header.frame_bytes for frame in self.memory.frames)

    def within(self, bytes_max: int) -> GLSN | None:
        self._check()
        llsn, left = LLSN(self.end + 1), bytes_max
        for frame in reversed(self.memory.frames):
            left -= frame.header.frame_bytes
            if left < 0 and llsn <= self.committed_end:
                break
            llsn = frame.header.first_llsn
        return None if llsn > self.committed_end else glsn_of_llsn(self.memory.contexts, llsn)

    def bytes_through(self, llsns: Sequence[LLSN]) -> list[int]:
        self._check()
        ends = list(accumulate((frame.header.frame_bytes for frame in self.memory.frames), initial=0))
        firsts = [frame.header.first_llsn for frame in self.memory.frames]
        return [ends[bisect_right(firsts, llsn)] for llsn in llsns]

    def check_files(self) -> list[StorageFinding]:
        self._check()
        return []

    def verify(self, check: FrameCheck | None = None) -> list[StorageFinding]:
        self._check()
        findings = []
        for frame in self.memory.frames:
            header = frame.header
            if frame.problem is not None:
                findings.append(StorageFinding("memory", frame.problem, header.first_llsn, header.last_llsn))
            elif check is not None and (problem := check(frame)):
                findings.append(malformed("memory", problem, header))
            i = bisect_right(self.memory.contexts, header.first_llsn, key=lambda c: c.first_llsn) - 1
            context = self.memory.contexts[i] if i >= 0 else None
            if context is not None and header.first_llsn <= context.last_llsn < header.last_llsn:
                findings.append(
                    StorageFinding("memory", "a commit ends within this entry", header.first_llsn, header.last_llsn)
                )
        return findings


def _frame(entry: Entry, running: RunningEventTime) -> EntryFrame:
    header, trailer = encode_frame(entry, running)
    decoded = decode_header(header)
    assert decoded is not None
    return EntryFrame(decoded, memoryview(b"".join((header, entry.batch.body, trailer))))


def _sound(frame: EntryFrame) -> EntryFrame:
    problem = frame.problem
    if problem is not None:
        raise DamagedEntries("memory", frame.header.first_llsn, frame.header.last_llsn, problem)
    return frame
