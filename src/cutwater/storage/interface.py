"""The interface between a storage node and the storage of one replica.

``SegmentStorage`` implements it with files, ``MemoryStorage`` without. One conformance suite runs on both.

One thread writes. ``write``, ``write_contexts`` and ``sync`` are separate, so that the thread can collect what arrives
while a sync is under way and sync it together. Other threads may read committed entries meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import FoundFiles, HardState
from cutwater.format.entry_codec import NO_TIME, EntryFrame, FrameHeader, RunningEventTime
from cutwater.types import GLSN, LLSN, CommitContext, CutTime, Entry


class Synced(Struct, frozen=True):
    """The durable extent of a replica: entries up to ``entries_end``, commits up to ``context``."""

    entries_end: LLSN
    context: CommitContext | None


class EntryRange(Struct, frozen=True):
    """Consecutive entries as they are stored.

    ``data`` is all frames in one buffer, ``frames`` are its parts, and ``commits`` are the commit contexts that give
    them their GLSNs.
    """

    data: memoryview
    frames: tuple[EntryFrame, ...]
    commits: tuple[CommitContext, ...]

    @property
    def first_llsn(self) -> LLSN:
        return self.frames[0].header.first_llsn

    @property
    def last_llsn(self) -> LLSN:
        return self.frames[-1].header.last_llsn


class Located(Struct, frozen=True):
    """The place of consecutive entries in one file, from ``start`` to ``end``. Their bodies were not checked."""

    path: str
    start: int
    end: int
    outlines: Sequence[FrameHeader]
    commits: Sequence[CommitContext]


class StorageFinding(Struct, frozen=True):
    """A fault that ``verify`` found, with the LLSNs that are affected, if they are known."""

    where: str
    what: str
    first_llsn: LLSN | None = None
    last_llsn: LLSN | None = None
    is_content: bool = False
    """The bytes are as they were written, on all replicas, but their content is malformed. Nothing can repair them."""


FrameCheck = Callable[[EntryFrame], str]
"""Returns the fault in the content of an intact frame, or an empty string if it is sound."""


def malformed(where: str, problem: str, header: FrameHeader) -> StorageFinding:
    return StorageFinding(where, f"malformed content: {problem}", header.first_llsn, header.last_llsn, is_content=True)


class ReplicaStorage(Protocol):
    # State.

    @property
    def first_llsn(self) -> LLSN:
        """The LLSN at which the entries begin."""

    @property
    def end(self) -> LLSN:
        """The LLSN at which the entries end, synced or not."""

    @property
    def durable_end(self) -> LLSN: ...

    @property
    def last_commit(self) -> CommitContext | None:
        """The last commit context that was written, synced or not."""

    @property
    def durable_commit(self) -> CommitContext | None: ...

    @property
    def hard_state(self) -> HardState | None: ...

    @property
    def dedup(self) -> DedupCheckpoint | None: ...

    @property
    def contexts(self) -> Sequence[CommitContext]:
        """All stored commit contexts, for the searches of ``core.read.commit_index``."""

    def find(self) -> FoundFiles:
        """Return what opening the files found, for ``core.replica.recovery.judge``."""

    # Writing. All methods raise ``DiskFull`` if there is no room: then nothing is lost, and the caller may try again.
    # They raise ``StorageBroken`` if anything else fails: then every later call fails too, until ``cut_back``.

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries that follow the last one. They are durable after ``sync``."""

    def write_contexts(self, contexts: Sequence[CommitContext]) -> None:
        """Write commits that follow the last one, of durable entries only. They are durable after ``sync``."""

    def sync(self, *, entries: bool = True, contexts: bool = True, marks: bool = True) -> Synced:
        """Make written data durable.

        ``marks``: note in the files how far entries are durable. Without it, call ``mark`` later.
        """

    def mark(self) -> None:
        """Note how far entries are durable, if ``sync`` did not. It is a hint for the next opening, so it can wait."""

    def save_hard_state(self, hard_state: HardState) -> None:
        """Save the hard state. It is durable on return, as with all methods below."""

    def save_dedup(self, checkpoint: DedupCheckpoint) -> None: ...

    def truncate(self, end: LLSN) -> None:
        """Remove the entries above ``end``, none of which is committed."""

    def restart(self, first_llsn: LLSN, running: RunningEventTime = NO_TIME, keep_end: LLSN | None = None) -> None:
        """Remove all commit contexts, and all entries except those from ``first_llsn`` to ``keep_end``.

        The entries that are kept are durable afterwards. If none is kept, the next entry is ``first_llsn``. ``running``
        is event time before it.
        """

    def drop_before(self, before: GLSN, upto: LLSN) -> LLSN:
        """Remove committed entries below this GLSN, but none above ``upto``. Returns where the entries begin now."""

    def cut_back(self, end: LLSN | None, committed_end: LLSN | None) -> None:
        """Reopen the files, and remove everything above these ends, which are known to be durable.

        If either is None, nothing is removed. After ``StorageBroken``, this is the only call that can succeed.
        """

    def repair(self, entry: Entry, running: RunningEventTime | None = None) -> bool:
        """Replace a damaged entry with an intact copy. Returns False if the copy does not belong there.

        If several entries in a row are damaged beyond recognition, the first or the last one can be repaired, one after
        the other. The last one needs the copy's ``running``.
        """

    def repair_context(self, context: CommitContext) -> bool: ...

    def repair_headers(self) -> int:
        """Repair what needs no copy from elsewhere. Returns the number of repaired files."""

    def close(self) -> None: ...

    # Reading. Everything is verified. Damaged data is never returned; ``Damaged`` is raised instead.

    def read(self, from_llsn: LLSN, to_llsn: LLSN, bytes_max: int) -> EntryRange:
        """Read committed entries, beginning with the one that holds ``from_llsn``.

        Returns at least one entry, otherwise at most ``bytes_max``, and perhaps fewer than there are.
        """

    def locate(self, from_llsn: LLSN, to_llsn: LLSN, bytes_max: int, count_max: int) -> Located | None:
        """Return where these entries are, at most ``count_max``. None if they are in no file, or one is damaged."""

    def entry_at(self, llsn: LLSN) -> Entry:
        """Return the entry that holds this LLSN, committed or not."""

    def entries(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]: ...

    def heads(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        """Return the same entries with empty bodies, which are not read. Damaged trimmed entries are left out."""

    def running_before(self, llsn: LLSN) -> RunningEventTime:
        """Return event time before the entry that begins with this LLSN."""

    def from_glsn(self, glsn: GLSN) -> LLSN | None:
        """Return the first LLSN at or after this GLSN, or None if there is none yet. Raises ``Trimmed``."""

    def from_time(self, time: CutTime) -> GLSN | None:
        """Return the first record that was committed at or after this time and is not trimmed."""

    @property
    def size_bytes(self) -> int:
        """Size of all entries in bytes."""

    def within(self, bytes_max: int) -> GLSN | None:
        """Return the first committed record of the newest files that together have at most about ``bytes_max`` bytes.

        None if nothing is committed.
        """

    def bytes_through(self, llsns: Sequence[LLSN]) -> list[int]:
        """Return about how many bytes the entries up to each of these LLSNs take. Only differences are meaningful."""

    def check_files(self) -> list[StorageFinding]:
        """Return faults of small files, headers, marks and indexes. Entries and commits are not read."""

    def verify(self, check: FrameCheck | None = None) -> list[StorageFinding]:
        """Read everything and check that it is consistent. ``check`` also checks the content of each entry."""
