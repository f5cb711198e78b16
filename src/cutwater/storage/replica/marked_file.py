"""A file that records how far it was synced.

It consists of a header that never changes, two marks that are written in turn, the header again, and data.

After each sync the new mark is written but not synced. The next sync makes it durable at no extra cost. So after a
power cut or a crash of the process, the mark is at most one sync behind. Data above the mark may be torn. Data below it
was once on disk, so if it is wrong now, it is damaged.

A file that is still written to may be longer than its data: zeros make room for later writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cutwater.format.checksum import Buffer
from cutwater.format.entry_codec import RunningEventTime
from cutwater.format.errors import DamagedFile, StorageBroken
from cutwater.storage.files import File, StorageFiles, is_full, lenient_pread, make_readable, replace
from cutwater.storage.format import (
    HEADER_BYTES,
    SECTOR_BYTES,
    FileHeader,
    SyncMark,
    decode_header,
    decode_mark,
    encode_header,
    encode_mark,
)
from cutwater.types import LLSN

MARKS = 2
REWRITE_BYTES = 1 << 20
COPIES = (0, 3)
"""The sectors that hold the header."""
POINTS_MAX = 1 << 16


class MarkedFile:
    def __init__(self, file: File, magic: bytes, header: FileHeader, mark: SyncMark | None) -> None:
        self.file, self.magic, self.header = file, magic, header
        self.newest = mark
        """The last mark that was set, or None if neither mark can be read."""
        self.size = file.size()
        """Size of the file, including the room ahead of the data."""
        self.torn = False
        """Whether one of the two marks could not be read when the file was opened. Setting a mark replaces it."""

    @classmethod
    def create(cls, files: StorageFiles, path: Path, magic: bytes, header: FileHeader) -> MarkedFile:
        """Create a file. It gets its name when it is complete, so a wrong header is damage, never a half-made file."""
        mark = SyncMark(1, header.data_start, LLSN(header.first_llsn - 1), header.running)
        sector = encode_header(magic, header)
        empty = sector + encode_mark(mark) + bytes(SECTOR_BYTES) + sector
        replace(files, path, empty.ljust(header.data_start, b"\0"))
        return cls(files.open(path), magic, header, mark)

    @classmethod
    def open(cls, files: StorageFiles, path: Path, magic: bytes, generation: int, first_llsn: LLSN) -> MarkedFile:
        """Open a file. Its header must match its name."""
        file = files.open(path)
        start = file.pread(HEADER_BYTES, 0)
        header = _either_header(start, magic, path)
        if (header.generation, header.first_llsn) != (generation, first_llsn):
            raise DamagedFile(path, f"its header says generation {header.generation}, LLSN {header.first_llsn}")
        if header.points > POINTS_MAX:
            raise DamagedFile(path, f"implausible index size: {header.points} points")
        marks = [_mark_in(start, i, header) for i in range(MARKS)]
        newest = max((mark for mark in marks if mark is not None), key=lambda mark: mark.sequence, default=None)
        marked = cls(file, magic, header, newest)
        marked.torn = any(mark is None and any(_slot(start, i)) for i, mark in enumerate(marks))
        return marked

    @property
    def mark(self) -> SyncMark:
        if self.newest is None:
            raise DamagedFile(self.file.path, "both of its marks are wrong")
        return self.newest

    def set_mark(self, offset: int, llsn: LLSN, running: RunningEventTime) -> None:
        """Note how far the file is durable. Call this only after the sync that made it so."""
        mark = SyncMark(self.mark.sequence + 1, offset, llsn, running)
        self.file.pwritev([encode_mark(mark)], SECTOR_BYTES * (1 + (mark.sequence - 1) % MARKS))
        self.newest, self.torn = mark, False

    def restore_mark(self, offset: int, llsn: LLSN, running: RunningEventTime) -> None:
        """Take note of what the mark of a closed file must say if both of its marks are wrong. ``heal`` writes it.

        All below ``offset`` must have been synced. A mark that can be read again now does not count more than this one.
        """
        start = lenient_pread(self.file, HEADER_BYTES, 0)
        marks = [_mark_in(start, i, self.header) for i in range(MARKS)]
        sequence = max((mark.sequence for mark in marks if mark is not None), default=0)
        self.newest, self.torn = SyncMark(sequence, offset, llsn, running), True

    def extend(self, buffers: Sequence[Buffer], offset: int, end: int, room_end: int) -> None:
        """Write data at the end, from ``offset`` to ``end``.

        If the file must grow, it is extended with zeros up to ``room_end``. So most later syncs need not wait for the
        file system to note a new length. If there is no room on the disk for the zeros, only the data is written. If
        there is no room for the data either, nothing of it is left.
        """
        size, zeros = self.size, b""
        if end > size:
            size = max(end, room_end)
            zeros = bytes(size - end)
        try:
            self.file.pwritev([*buffers, zeros] if zeros else buffers, offset)
        except OSError as error:
            if not is_full(error):
                raise
            if not zeros:
                self.undo(offset)
                raise
            self.shorten(offset)
            self.extend(buffers, offset, end, end)
        else:
            self.size = size

    def shorten(self, size: int) -> None:
        self.file.truncate(size)
        self.size = size

    def undo(self, offset: int) -> None:
        """Durably remove what a write left above ``offset`` for which there was no room.

        Otherwise a crash could bring a part of it back, next to what was written in its place.
        """
        try:
            self.shorten(offset)
        except OSError as error:
            raise StorageBroken(f"{self.file.path} cannot be shortened ({error}): reopen and cut back") from error
        self.sync_all()

    def finish(self, offset: int) -> None:
        """Durably cut off the room ahead, and make the mark durable too."""
        if self.size > offset:
            self.shorten(offset)
        self.sync_all()

    def sync_data(self) -> None:
        """Make data durable.

        A failure is final: the system may have dropped what it could not write, and report the next sync as a success.
        """
        self._sync(self.file.sync_data)

    def sync_all(self) -> None:
        self._sync(self.file.sync_all)

    def _sync(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except OSError as error:
            raise StorageBroken(f"{self.file.path} cannot be synced ({error}): reopen and cut back") from error

    def cut(self, offset: int, llsn: LLSN, running: RunningEventTime) -> None:
        """Durably remove what lies above ``offset``. What lies below must be durable already.

        The mark goes first, or it would point to removed data.
        """
        self.set_mark(offset, llsn, running)
        self.sync_all()
        self.shorten(offset)
        self.sync_all()

    def rewrite(self, start: int, end: int) -> None:
        """Write existing data once more, unchanged. It is durable after a sync.

        A process may have died of a failed sync. Then the operating system still returns what it could not write,
        and would not write it again by itself.
        """
        while start < end:
            data = self.file.pread(min(end - start, REWRITE_BYTES), start)
            self.file.pwritev([data], start)
            start += len(data)

    def heal(self) -> bool:
        """Durably rewrite damaged copies of the header and damaged marks. Returns whether there were any."""
        if not self.header_problems():
            return False
        mark = self.mark
        make_readable(self.file, HEADER_BYTES, 0)
        for copy in COPIES:
            self.file.pwritev([encode_header(self.magic, self.header)], copy * SECTOR_BYTES)
        # The two marks are written in turn, so at least one of them is good at any time.
        for _ in range(MARKS):
            self.set_mark(mark.offset, mark.llsn, mark.running)
            self.sync_data()
        return True

    def header_problems(self) -> list[str]:
        """Return what is wrong with the header and the marks on disk now."""
        start = lenient_pread(self.file, HEADER_BYTES, 0)
        expected = encode_header(self.magic, self.header)
        problems = [f"copy {copy} of the header is wrong" for copy in COPIES if _sector(start, copy) != expected]
        for i in range(MARKS):
            if any(_slot(start, i)) and _mark_in(start, i, self.header) is None:
                problems.append(f"mark {i} is wrong")
        if not any(any(_slot(start, i)) for i in range(MARKS)):
            # A new file has one mark.
            problems.append("both of its marks are missing")
        return problems


def _mark_in(start: bytes, i: int, header: FileHeader) -> SyncMark | None:
    mark = decode_mark(_slot(start, i))
    if mark is None or mark.offset < header.data_start or mark.llsn < header.first_llsn - 1:
        return None
    return mark


def _either_header(start: bytes, magic: bytes, path: Path) -> FileHeader:
    try:
        return decode_header(_sector(start, COPIES[0]), magic, path)
    except DamagedFile:
        return decode_header(_sector(start, COPIES[1]), magic, path)


def _slot(start: bytes, i: int) -> bytes:
    return _sector(start, 1 + i)


def _sector(start: bytes, i: int) -> bytes:
    return start[SECTOR_BYTES * i : SECTOR_BYTES * (i + 1)]
