"""What a storage node needs of the storage of one replica. ``SegmentStorage`` keeps it in files, ``MemoryStorage`` does
not; one conformance suite runs on both.

One thread writes: ``write``, ``write_contexts`` and ``sync`` are separate so that it can collect what arrives while a
sync is under way and sync it together. Other threads may read committed entries meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import Found, HardState
from cutwater.format.entry_codec import NO_TIME, Frame, FrameHeader, Outline, Running
from cutwater.types import GLSN, LLSN, CommitContext, CutTime, Entry


class Synced(Struct, frozen=True):
    """Everything that is on disk now: entries up to ``entries_end``, commits up to ``context``."""

    entries_end: LLSN
    context: CommitContext | None


class Range(Struct, frozen=True):
    """Consecutive entries as they are stored: ``data`` is all frames in one buffer, ``frames`` are its parts, and
    ``commits`` are the commit contexts that give them their GLSNs."""

    data: memoryview
    frames: tuple[Frame, ...]
    commits: tuple[CommitContext, ...]

    @property
    def first_llsn(self) -> LLSN:
        return self.frames[0].header.first_llsn

    @property
    def last_llsn(self) -> LLSN:
        return self.frames[-1].header.last_llsn


class Located(Struct, frozen=True):
    """Where consecutive entries lie: in one file, from ``start`` to ``end``, one right after the other. Nobody has
    looked at their bodies."""

    path: str
    start: int
    end: int
    outlines: Sequence[Outline]
    commits: Sequence[CommitContext]


class Finding(Struct, frozen=True):
    """Something that ``verify`` does not like; the LLSNs that are concerned, if it is known which."""

    where: str
    what: str
    first_llsn: LLSN | None = None
    last_llsn: LLSN | None = None
    is_content: bool = False
    """The bytes are as they were written, on all replicas, but make no sense: nothing can repair them."""


FrameCheck = Callable[[Frame], str]
"""Describes the fault of an intact frame's content; empty if it is sound."""


def malformed(where: str, problem: str, header: FrameHeader) -> Finding:
    return Finding(where, f"malformed content: {problem}", header.first_llsn, header.last_llsn, is_content=True)


class ReplicaStorage(Protocol):
    # What is there.

    @property
    def first_llsn(self) -> LLSN:
        """Where the entries begin."""

    @property
    def end(self) -> LLSN:
        """Where they end, synced or not."""

    @property
    def durable_end(self) -> LLSN: ...

    @property
    def last_commit(self) -> CommitContext | None:
        """The last one written, synced or not."""

    @property
    def durable_commit(self) -> CommitContext | None: ...

    @property
    def hard_state(self) -> HardState | None: ...

    @property
    def dedup(self) -> DedupCheckpoint | None: ...

    @property
    def contexts(self) -> Sequence[CommitContext]:
        """All commit contexts that are kept, for the searches of ``core.read.commit_index``."""

    def find(self) -> Found:
        """What opening the files gave, for ``core.replica.recovery.judge``."""

    # Writing. All of it raises ``DiskFull`` if there is no room: then nothing is lost and it may be tried again; and
    # ``StorageBroken`` if anything else fails: then so does every later call, until ``cut_back``.

    def write(self, entries: Sequence[Entry]) -> None:
        """Entries that follow the last one; durable after ``sync``."""

    def write_contexts(self, contexts: Sequence[CommitContext]) -> None:
        """Commits that follow the last one, of durable entries only; durable after ``sync``."""

    def sync(self, *, entries: bool = True, contexts: bool = True, marks: bool = True) -> Synced:
        """``marks``: note in the files how far entries are durable. Whoever leaves that for later calls ``mark``."""

    def mark(self) -> None:
        """Note what ``sync`` did not: a hint for the next opening, for which nobody has to wait."""

    def save_hard_state(self, hard_state: HardState) -> None:
        """Durable when it returns, like everything below."""

    def save_dedup(self, checkpoint: DedupCheckpoint) -> None: ...

    def truncate(self, end: LLSN) -> None:
        """Remove the entries above ``end``, none of which is committed."""

    def restart(self, first_llsn: LLSN, running: Running = NO_TIME, keep_end: LLSN | None = None) -> None:
        """Remove all commit contexts, and all entries but those from ``first_llsn`` to ``keep_end``, which are durable
        then; without such the next entry is ``first_llsn``. ``running`` is event time before it."""

    def drop_before(self, before: GLSN, upto: LLSN) -> LLSN:
        """Remove committed entries below this GLSN and none above ``upto``; where the entries begin now."""

    def cut_back(self, end: LLSN | None, committed_end: LLSN | None) -> None:
        """Open anew and remove whatever is not known to be durable; nothing, if that is not known. The only way on
        after ``StorageBroken``."""

    def repair(self, entry: Entry, running: Running | None = None) -> bool:
        """Put an intact copy in the place of a damaged entry; False if it does not belong there. Where several entries
        in a row are damaged beyond recognition, the first one or the last one can be repaired, one after the other; the
        last one needs the copy's ``running``."""

    def repair_context(self, context: CommitContext) -> bool: ...

    def repair_headers(self) -> int:
        """Repair what can be repaired without a copy from elsewhere; how many files that were."""

    def close(self) -> None: ...

    # Reading. Everything is verified; what is damaged is never returned but raised as ``Damaged``.

    def read(self, from_llsn: LLSN, to_llsn: LLSN, bytes_max: int) -> Range:
        """Committed entries from the one that holds ``from_llsn`` on: at least one, otherwise at most ``bytes_max``,
        and perhaps fewer than there are."""

    def locate(self, from_llsn: LLSN, to_llsn: LLSN, bytes_max: int, count_max: int) -> Located | None:
        """Where these entries are, at most so many; None if they are in no file, or something is damaged."""

    def entry_at(self, llsn: LLSN) -> Entry:
        """The entry that holds this LLSN, committed or not."""

    def entries(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]: ...

    def heads(self, from_llsn: LLSN, to_llsn: LLSN) -> Iterator[Entry]:
        """The same without reading bodies: all entries have empty ones. What is damaged and trimmed is left out."""

    def running_before(self, llsn: LLSN) -> Running:
        """How far event time had come before the entry that begins with this LLSN."""

    def from_glsn(self, glsn: GLSN) -> LLSN | None:
        """Where a reader that starts at this GLSN finds its first record; None if there is none yet; ``Trimmed``."""

    def from_time(self, time: CutTime) -> GLSN | None:
        """The first record that was committed at or after this time and is not trimmed."""

    @property
    def size_bytes(self) -> int:
        """How many bytes all entries that are there take."""

    def within(self, bytes_max: int) -> GLSN | None:
        """The first committed record of the newest ones that fit into about so many bytes, by whole files; None if
        nothing is committed."""

    def bytes_through(self, llsns: Sequence[LLSN]) -> list[int]:
        """About how many bytes the entries up to each of these LLSNs take. Only differences mean something."""

    def check_files(self) -> list[Finding]:
        """Faults of small files, headers, marks and indexes. Entries and commits are not read."""

    def verify(self, check: FrameCheck | None = None) -> list[Finding]:
        """Read everything and check it against everything else; and look into batches, if it is said how."""
