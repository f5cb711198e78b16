"""The entries of a replica: segment files in LLSN order. Only the last one is written to.

The name of a file contains its generation and its first LLSN, so opening a replica reads only the last file and the
names of the others. A full segment is synced as a whole before the next one is created. So every segment but the last
is complete, and a crash can tear only the last one.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from cutwater.errors import Damaged
from cutwater.format.entry_codec import EntryFrame, RunningEventTime
from cutwater.format.errors import DamagedEntries
from cutwater.storage.files import StorageFiles
from cutwater.storage.format import FileHeader
from cutwater.storage.replica.open_files import OpenFiles
from cutwater.storage.replica.segment import EntryPlace, Frames, Segment
from cutwater.types import LLSN, Entry

SUFFIX = ".entries"
HINTS_MAX = 256


class SegmentOptions(Struct, frozen=True):
    segment_bytes: int = 64 * 1024 * 1024
    """A segment ends before its entries would need more than this, unless a single entry does."""
    index_interval_bytes: int = 32 * 1024
    """Distance between index points, which is the most that a reader has to walk to find an LLSN."""
    commits_per_file: int = 65_536
    room_ahead_bytes: int = 1024 * 1024
    """How much longer than its entries a segment becomes when small writes extend it; see ADR 0010."""


def file_name(generation: int, first_llsn: LLSN, suffix: str) -> str:
    return f"{generation:010d}-{first_llsn:020d}{suffix}"


def parse_name(name: str, suffix: str) -> tuple[int, LLSN] | None:
    """Return generation and first LLSN, or None if the file has another kind of name."""
    if not name.endswith(suffix):
        return None
    generation, dash, llsn = name.removesuffix(suffix).partition("-")
    if not dash or not generation.isdecimal() or not llsn.isdecimal():
        return None
    return int(generation), LLSN(int(llsn))


class SegmentLog:
    def __init__(self, files: StorageFiles, directory: Path, generation: int, options: SegmentOptions) -> None:
        """Make an object without files. Call ``create`` or ``recover`` next."""
        self._files, self._directory, self._options = files, directory, options
        self.generation = generation
        self._firsts: list[LLSN] = []
        self._last: Segment
        self._closed: OpenFiles[Segment] = OpenFiles()
        self._hints: dict[LLSN, int] = {}
        """First LLSN of the entry after a read → its offset. The next read of the same reader will ask for it."""

    def create(self, first_llsn: LLSN, running: RunningEventTime) -> None:
        self._last = self._create_segment(first_llsn, running)
        self._firsts = [first_llsn]

    def recover(self, firsts: Sequence[LLSN], committed_end: LLSN) -> None:
        """Open the segments that begin with these LLSNs."""
        self._firsts = list(firsts)
        path = self._path(firsts[-1])
        self._last = Segment.recover(self._files, path, self.generation, firsts[-1], committed_end)

    # Beginning and end.

    @property
    def first_llsn(self) -> LLSN:
        return self._firsts[0]

    @property
    def end_llsn(self) -> LLSN:
        return self._last.end.llsn

    @property
    def durable_llsn(self) -> LLSN:
        return self._last.durable.llsn

    @property
    def running(self) -> RunningEventTime:
        return self._last.running

    @property
    def lost(self) -> LLSN | None:
        return self._last.lost

    @property
    def firsts(self) -> Sequence[LLSN]:
        """The first LLSN of each segment."""
        return self._firsts

    @property
    def size_bytes(self) -> int:
        closed = sum(self._files.open(self._path(first)).size() for first in self._firsts[:-1])
        return closed + self._last.end.offset

    def first_within(self, bytes_max: int) -> LLSN:
        """Return where the newest segments begin that fit into ``bytes_max`` together. The last one always counts."""
        firsts, left = self._firsts, bytes_max - self._last.end.offset
        first = firsts[-1]
        for before in reversed(firsts[:-1]):
            left -= self._files.open(self._path(before)).size()
            if left < 0:
                break
            first = before
        return first

    def bytes_through(self, llsns: Sequence[LLSN]) -> list[int]:
        """Return about where each of these LLSNs ends, counted over all files. It is as exact as the index."""
        firsts = list(self._firsts)
        starts = [0]
        for first in firsts[:-1]:
            starts.append(starts[-1] + self._files.open(self._path(first)).size())
        found = []
        for llsn in llsns:
            i = bisect_right(firsts, llsn) - 1
            found.append(0 if i < 0 else starts[i] + self.segment_of(llsn).offset_after(llsn))
        return found

    # Writing.

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries without syncing, and begin a new segment when one is full."""
        bytes_max, room_ahead_bytes = self._options.segment_bytes, self._options.room_ahead_bytes
        taken = self._last.append(entries, bytes_max, room_ahead_bytes)
        while taken < len(entries):
            self.roll()
            taken += self._last.append(entries[taken:], bytes_max, room_ahead_bytes)

    def sync(self) -> None:
        self._last.sync()

    def mark(self) -> None:
        self._last.mark()

    def close(self) -> None:
        self._last.finish()

    def roll(self) -> None:
        """Close the last segment, which makes all of it durable including its mark, and begin the next."""
        last = self._last
        last.finish()
        following = self._create_segment(LLSN(last.end.llsn + 1), last.running)
        self._closed.put(last.first_llsn, last)
        # This order lets readers find every LLSN in one segment or the other.
        self._firsts = [*self._firsts, following.first_llsn]
        self._last = following

    def _create_segment(self, first_llsn: LLSN, running: RunningEventTime) -> Segment:
        options = self._options
        points = -(-options.segment_bytes // options.index_interval_bytes)
        header = FileHeader(self.generation, first_llsn, points, options.index_interval_bytes, running)
        return Segment.create(self._files, self._path(first_llsn), header)

    def truncate(self, end: LLSN) -> None:
        """Durably remove the entries above ``end``: newest files first, so that a crash leaves no hole."""
        self._hints.clear()
        while self._last.first_llsn > end + 1:
            removed = self._last
            before = self._open_closed(self._firsts[-2], LLSN(removed.first_llsn - 1))
            with suppress(DamagedEntries):
                # As the last one it could not be opened without a mark.
                before.heal_header(before.first_llsn)
            self._files.unlink(removed.path)
            self._files.sync_dir(self._directory)
            self._closed.forget(before.first_llsn)
            before.go_on(removed.marked.header.running)
            # This order lets readers find every LLSN in one segment or the other.
            self._last = before
            self._firsts = self._firsts[:-1]
        if end < self._last.end.llsn or self._last.lost is not None:
            self._last.truncate(end)

    def roll_if_all_below(self, llsn: LLSN) -> None:
        """Begin a new segment if nothing in the last one is needed any more, so that it can be removed."""
        if self._last.first_llsn <= self._last.end.llsn < llsn:
            self.roll()

    def entry_start(self, llsn: LLSN) -> LLSN:
        """Return where the entry that holds this LLSN begins, or where its segment begins if damage hides it."""
        if llsn > self.end_llsn:
            return llsn
        try:
            return self.segment_of(llsn).place_of(llsn).first_llsn
        except (Damaged, FileNotFoundError):
            return self._firsts[bisect_right(self._firsts, llsn) - 1]

    def forget_before(self, first_llsn: LLSN) -> None:
        """Remove the segments that lie completely before this LLSN. The manifest does not count them any more."""
        keep = bisect_right(self._firsts, first_llsn) - 1
        gone, self._firsts = self._firsts[:keep], self._firsts[keep:]
        for first in gone:
            self._closed.forget(first)
            self._files.unlink(self._path(first))

    # Reading.

    def read(self, llsn: LLSN, to_llsn: LLSN, bytes_max: int) -> Frames:
        """Read at least one frame. All frames are of one segment."""
        segment = self.segment_of(llsn)
        hint = self._hints.pop(llsn, None)
        found = segment.read(llsn, to_llsn, bytes_max, hint)
        if len(self._hints) >= HINTS_MAX:
            self._hints.clear()
        following = LLSN(found.frames[-1].header.last_llsn + 1)
        if following <= segment.end.llsn:
            self._hints[following] = found.end
        return found

    def frame_of(self, llsn: LLSN) -> EntryFrame:
        return self.segment_of(llsn).frame_of(llsn)

    def places(self, llsn: LLSN, to_llsn: LLSN) -> Iterator[EntryPlace]:
        """Yield the places that hold these LLSNs, intact and damaged."""
        while llsn <= to_llsn:
            for place in self.segment_of(llsn).places(llsn):
                if place.first_llsn > to_llsn:
                    return
                if place.last_llsn >= llsn:
                    yield place
                    llsn = LLSN(place.last_llsn + 1)

    def repair(self, entry: Entry, running: RunningEventTime | None) -> bool:
        return self.segment_of(entry.first_llsn).repair(entry, running)

    def segment_of(self, llsn: LLSN) -> Segment:
        """Return the segment that holds this LLSN, or would hold it.

        Raises ``FileNotFoundError`` if it was trimmed meanwhile, as opening any removed file does.
        """
        last, firsts = self._last, self._firsts
        if llsn >= last.first_llsn:
            return last
        i = bisect_right(firsts, llsn) - 1
        if i < 0:
            raise FileNotFoundError(errno.ENOENT, "trimmed meanwhile", str(self._path(llsn)))
        return self._open_closed(firsts[i], LLSN(firsts[i + 1] - 1))

    def _open_closed(self, first_llsn: LLSN, end_llsn: LLSN) -> Segment:
        path = self._path(first_llsn)
        return self._closed.get(
            first_llsn, lambda: Segment.open_closed(self._files, path, self.generation, first_llsn, end_llsn)
        )

    def _path(self, first_llsn: LLSN) -> Path:
        return self._directory / file_name(self.generation, first_llsn, SUFFIX)
