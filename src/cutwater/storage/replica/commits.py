"""Commit contexts on disk: fixed-size records in files of equal length, so the position of the n-th one can be
computed.

For readers this is a sequence of commit contexts. The binary searches of ``core.read.commit_index`` run on it as on a
list; each step reads and checks one record. Only the last commit context is kept in memory.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import overload

from cutwater.errors import InvalidArgument
from cutwater.format.entry_codec import NO_TIME
from cutwater.format.errors import DamagedFile
from cutwater.storage.files import StorageFiles, lenient_pread, make_readable
from cutwater.storage.format import COMMITS, CONTEXT_BYTES, HEADER_BYTES, FileHeader, decode_context, encode_context
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.storage.replica.open_files import OpenFiles
from cutwater.storage.replica.segment_log import SegmentOptions, file_name
from cutwater.types import LLSN, CommitContext

SUFFIX = ".commits"
BLOCK_RECORDS = 64
BLOCK_BYTES = BLOCK_RECORDS * CONTEXT_BYTES
"""Size of one read. A search or a reader usually asks for neighbouring records next."""
ROOM_AHEAD_BYTES = 16 * 1024
"""How much longer than its records a file becomes, up to its full length; see ADR 0010."""

_last_llsn = attrgetter("last_llsn")


class CommitLog:
    """The commit contexts of a replica. One thread writes; others may read through ``contexts`` meanwhile."""

    def __init__(self, files: StorageFiles, directory: Path, generation: int, options: SegmentOptions) -> None:
        self._files, self._directory = files, directory
        self._generation, self._per_file = generation, options.commits_per_file
        self._shape: tuple[tuple[LLSN, ...], int] = ((), 0)
        """The first LLSN of each file, and the number of records in the last one; the others are full.

        Both change together, or readers would miscount.
        """
        self._file: MarkedFile | None = None
        self._durable_count = 0
        self.lost = ""
        """Describes the newest commits that could not be read when the files were opened."""
        self.last: CommitContext | None = None
        self.durable: CommitContext | None = None
        self._closed: OpenFiles[MarkedFile] = OpenFiles()

    def recover(self, firsts: Sequence[LLSN], first_llsn: LLSN) -> None:
        """Open the files that begin with these LLSNs. Some may be left from a trim.

        Above the mark of the last file, intact records are kept and the torn rest is removed.
        """
        self._shape = (tuple(firsts), 0)
        self.forget_before(first_llsn)
        if not firsts:
            return
        try:
            self._file = file = self._open(firsts[-1])
            size, marked = file.file.size(), self._records_below(file.mark.offset)
            if marked > self._per_file or file.header.points:
                raise DamagedFile(file.file.path, f"it should have {marked} commit contexts and has {size} bytes")
        except DamagedFile as error:
            # The file stays in place until commits with the same LLSNs are written and replace it.
            self.lost = f"{error.path} is damaged ({error.what})"
            self._leave_last_file()
            return
        there = self._readable(file, min(marked, self._records_below(size)))
        if there < marked:
            # Nothing is changed: every start must notice the loss again, until a source has sent these commits.
            self.lost = f"{file.file.path} is damaged (commit contexts {there} to {marked - 1} are wrong)"
            self._shape = (self._firsts, there)
            self.last = self.durable = self.contexts[-1] if len(self.contexts) else None
            self._durable_count = there
            return
        self._shape = (self._firsts, marked)
        self.last = self.contexts[-1] if len(self.contexts) else None
        self._scan(file)
        if not self._count:
            # The file was made for a commit that did not survive.
            self._remove_last_file()
            return
        end = HEADER_BYTES + self._count * CONTEXT_BYTES
        # The records may have been written or cut off without a sync.
        file.rewrite(0, HEADER_BYTES)
        file.rewrite(HEADER_BYTES + marked * CONTEXT_BYTES, end)
        file.sync_all()
        if size > end:
            file.cut(end, self._end_llsn, NO_TIME)
        elif self._count > marked or file.torn:
            file.set_mark(end, self._end_llsn, NO_TIME)
        self._durable_count, self.durable = self._count, self.last

    def _readable(self, file: MarkedFile, count: int) -> int:
        """Return how many of the first ``count`` records there are, up to the last readable one."""
        while count > 0:
            record = file.file.pread(CONTEXT_BYTES, HEADER_BYTES + (count - 1) * CONTEXT_BYTES)
            if decode_context(record, count - 1) is not None:
                break
            count -= 1
        return max(count, 0)

    @property
    def _file_bytes(self) -> int:
        """Length of a full file."""
        return HEADER_BYTES + self._per_file * CONTEXT_BYTES

    @property
    def _firsts(self) -> tuple[LLSN, ...]:
        return self._shape[0]

    @property
    def _count(self) -> int:
        return self._shape[1]

    def _scan(self, file: MarkedFile) -> None:
        while self._count < self._per_file:
            record = file.file.pread(CONTEXT_BYTES, HEADER_BYTES + self._count * CONTEXT_BYTES)
            context = decode_context(record, self._count)
            if context is None or (self.last is not None and not follows(self.last, context)):
                return
            self.last = context
            self._shape = (self._firsts, self._count + 1)

    def _records_below(self, offset: int) -> int:
        return (offset - HEADER_BYTES) // CONTEXT_BYTES

    @property
    def _end_llsn(self) -> LLSN:
        return self.last.last_llsn if self.last else LLSN(0)

    # Writing.

    def write(self, contexts: Sequence[CommitContext]) -> None:
        """Write commit contexts without syncing."""
        start = 0
        while start < len(contexts):
            file = self._file_for(contexts[start])
            firsts, count = self._shape
            offset = HEADER_BYTES + count * CONTEXT_BYTES
            last, records = self.last, []
            for context in contexts[start : start + self._per_file - count]:
                assert last is None or follows(last, context), (last, context)
                records.append(_encode(context, count))
                last, count = context, count + 1
            end = HEADER_BYTES + count * CONTEXT_BYTES
            file.extend(records, offset, end, min(end + ROOM_AHEAD_BYTES, self._file_bytes))
            self._shape, self.last = (firsts, count), last
            start += len(records)

    def _file_for(self, context: CommitContext) -> MarkedFile:
        """Return the file for the next record. It is a new one if the last one is full."""
        firsts, count = self._shape
        if self._file is not None and count < self._per_file:
            if count or firsts[-1] == context.first_llsn:
                return self._file
            # The file was made for a commit that never came, so its name would be wrong.
            self._remove_last_file()
        self.sync()
        self.close()
        header = FileHeader(self._generation, context.first_llsn)
        file = MarkedFile.create(self._files, self._path(context.first_llsn), COMMITS, header)
        if self._file is not None:
            self._closed.put(self._firsts[-1], self._file)
        self._file, self._durable_count = file, 0
        self._shape = ((*self._firsts, context.first_llsn), 0)
        return file

    def sync(self) -> None:
        if self._file is not None and self._count > self._durable_count:
            self._file.sync_data()
            self._file.set_mark(HEADER_BYTES + self._count * CONTEXT_BYTES, self._end_llsn, NO_TIME)
        self._durable_count, self.durable = self._count, self.last

    def close(self) -> None:
        """Shorten the file to the end of its records, and make the mark durable too."""
        if self._file is not None:
            self._file.finish(HEADER_BYTES + self._count * CONTEXT_BYTES)

    def cut_back(self, end: LLSN) -> None:
        """Durably remove the commits above ``end``: newest files first, so that a crash leaves no hole."""
        keep = bisect_left(self.contexts, end + 1, key=_last_llsn)
        while self._file is not None and keep <= (len(self._firsts) - 1) * self._per_file:
            self._remove_last_file()
        if self._file is None:
            return
        self._shape = (self._firsts, keep - (len(self._firsts) - 1) * self._per_file)
        self.last = self.contexts[-1] if len(self.contexts) else None
        self._file.cut(HEADER_BYTES + self._count * CONTEXT_BYTES, self._end_llsn, NO_TIME)
        self._durable_count, self.durable = self._count, self.last

    def _remove_last_file(self) -> None:
        if len(self._firsts) > 1:
            # As the last one it could not be opened without a mark.
            self._open_closed(self._firsts[-2]).heal()
        self._files.unlink(self._path(self._firsts[-1]))
        self._files.sync_dir(self._directory)
        self._leave_last_file()

    def _leave_last_file(self) -> None:
        """Go on with the file before the last one, which is full."""
        firsts = self._firsts[:-1]
        if not firsts:
            self._file, self._shape, self._durable_count = None, ((), 0), 0
            self.last = self.durable = None
            return
        self._file = self._open_closed(firsts[-1])
        self._closed.forget(firsts[-1])
        self._shape, self._durable_count = (firsts, self._per_file), self._per_file
        self.last = self.durable = self.contexts[-1]

    def forget_before(self, first_llsn: LLSN) -> None:
        """Remove files that are not needed when the entries begin at ``first_llsn``, but never the last file.

        The commit of the record before ``first_llsn`` is still needed, because it says where the log stream stood.
        Entries are removed only after their commits are durable. So a file that begins below ``first_llsn`` has a
        durable commit, and the last file is always kept.
        """
        keep = sum(1 for following in self._firsts[1:] if following < first_llsn)
        gone = self._firsts[:keep]
        self._shape = (self._firsts[keep:], self._count)
        for first in gone:
            self._closed.forget(first)
            self._files.unlink(self._path(first))

    # Reading.

    @property
    def contexts(self) -> ContextView:
        """A view of all commit contexts as they are now."""
        return ContextView(self, *self._shape, self._per_file)

    def read_block(self, first_llsn: LLSN, number: int) -> bytes:
        """Read some consecutive records of one file, without checking them."""
        file = self._file
        if file is None or file.header.first_llsn != first_llsn:
            file = self._open_closed(first_llsn)
        return lenient_pread(file.file, BLOCK_BYTES, HEADER_BYTES + number * BLOCK_BYTES)

    def damaged(self, first_llsn: LLSN, number: int) -> DamagedFile:
        return DamagedFile(self._path(first_llsn), f"commit context {number} is wrong")

    def missing(self, first_llsn: LLSN) -> DamagedFile:
        return DamagedFile(self._path(first_llsn), "the file of commits before it is missing")

    def check_reach(self, first_llsn: LLSN) -> None:
        """Raise if the commits do not reach back to this LLSN, where the entries begin."""
        try:
            first = self.contexts[0] if len(self.contexts) else None
        except DamagedFile:
            # A reader that needs it will get an error, and it can be repaired.
            return
        if first is not None and first.first_llsn > first_llsn:
            raise self.missing(first.first_llsn)

    def repair(self, context: CommitContext) -> bool:
        """Replace a damaged commit context durably with this copy. Returns False if it fits in no damaged place."""
        view = self.contexts
        for number, first in enumerate(self._firsts):
            count = self._count if number == len(self._firsts) - 1 else self._per_file
            for i in range(count):
                try:
                    view[number * self._per_file + i]
                except DamagedFile:
                    if self._belongs(number * self._per_file + i, context):
                        file = self._file if number == len(self._firsts) - 1 else self._open_closed(first)
                        assert file is not None
                        make_readable(file.file, CONTEXT_BYTES, HEADER_BYTES + i * CONTEXT_BYTES)
                        file.file.pwritev([_encode(context, i)], HEADER_BYTES + i * CONTEXT_BYTES)
                        file.sync_data()
                        return True
        return False

    def _belongs(self, i: int, context: CommitContext) -> bool:
        """Return whether this context adjoins its neighbours, or the one of them that is intact.

        The name of a file is the first LLSN of its first context.
        """
        view, expected = self.contexts, []
        if i % self._per_file == 0:
            expected.append(self._firsts[i // self._per_file] == context.first_llsn)
        with suppress(IndexError, DamagedFile):
            expected.append(view[i + 1].first_llsn == context.last_llsn + 1)
        if i:
            with suppress(DamagedFile):
                expected.append(view[i - 1].last_llsn + 1 == context.first_llsn)
        return bool(expected) and all(expected)

    def files(self) -> Iterator[tuple[LLSN, MarkedFile, int]]:
        """Yield first LLSN, file and number of durable records of each file, oldest first."""
        file, durable_count, firsts = self._file, self._durable_count, self._firsts
        for first in firsts:
            if file is not None and first == file.header.first_llsn:
                yield first, file, durable_count
                return
            yield first, self._open_closed(first), self._per_file

    def _open(self, first_llsn: LLSN) -> MarkedFile:
        return MarkedFile.open(self._files, self._path(first_llsn), COMMITS, self._generation, first_llsn)

    def _open_closed(self, first_llsn: LLSN) -> MarkedFile:
        return self._closed.get(first_llsn, lambda: self._open_full(first_llsn))

    def _open_full(self, first_llsn: LLSN) -> MarkedFile:
        file = self._open(first_llsn)
        if file.file.size() < self._file_bytes:
            raise DamagedFile(file.file.path, "it is too short")
        following = next((first for first in self._firsts if first > first_llsn), None)
        if file.newest is None and following is not None:
            # It was full and synced before the next file was created.
            file.restore_mark(self._file_bytes, LLSN(following - 1), NO_TIME)
        return file

    def _path(self, first_llsn: LLSN) -> Path:
        return self._directory / file_name(self._generation, first_llsn, SUFFIX)


class ContextView(Sequence[CommitContext]):
    """The commit contexts of a replica at one moment. Each is read and checked when it is accessed."""

    def __init__(self, log: CommitLog, firsts: tuple[LLSN, ...], count: int, per_file: int) -> None:
        self._log, self._firsts, self._per_file = log, firsts, per_file
        self._length = max(len(firsts) - 1, 0) * per_file + count
        self._block: tuple[int, int, bytes] = (-1, -1, b"")
        """File, number and content of the last block that was read."""

    def __len__(self) -> int:
        return self._length

    @property
    def first_llsn(self) -> LLSN | None:
        """The first LLSN of the first context, known also if that is damaged; None if there are no contexts."""
        return self._firsts[0] if self._length else None

    @overload
    def __getitem__(self, index: int) -> CommitContext: ...
    @overload
    def __getitem__(self, index: slice) -> list[CommitContext]: ...
    def __getitem__(self, index: int | slice) -> CommitContext | list[CommitContext]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        at = index + self._length if index < 0 else index
        if not 0 <= at < self._length:
            raise IndexError(index)
        context = self._record(at)
        if at and at % self._per_file == 0:
            self._check_goes_on(at, context)
        return context

    def _check_goes_on(self, at: int, context: CommitContext) -> None:
        """Raise if a file is missing before this context, which is the first one of its file."""
        try:
            end = self._record(at - 1).last_llsn
        except DamagedFile:
            # The damaged record raises its own error when it is read.
            return
        if end + 1 != context.first_llsn:
            raise self._log.missing(context.first_llsn)

    def _record(self, at: int) -> CommitContext:
        file, number = divmod(at, self._per_file)
        block, place = divmod(number, BLOCK_RECORDS)
        if self._block[:2] != (file, block):
            self._block = (file, block, self._log.read_block(self._firsts[file], block))
        start = place * CONTEXT_BYTES
        context = decode_context(self._block[2][start : start + CONTEXT_BYTES], number)
        if context is None:
            raise self._log.damaged(self._firsts[file], number)
        return context

    def covering(self, first: LLSN, last: LLSN) -> list[CommitContext]:
        """Return the commits that contain any of these LLSNs."""
        found: list[CommitContext] = []
        for i in range(bisect_left(self, first, key=_last_llsn), self._length):
            context = self[i]
            if context.first_llsn > last:
                break
            found.append(context)
        return found


def follows(before: CommitContext, after: CommitContext) -> bool:
    """Return whether the two can be consecutive commits of one log stream."""
    return (
        after.first_llsn == before.last_llsn + 1
        and after.first_glsn > before.last_glsn
        and after.high_watermark > before.high_watermark
        and after.time > before.time
    )


def _encode(context: CommitContext, number: int) -> bytes:
    try:
        return encode_context(context, number)
    except struct.error as error:
        raise InvalidArgument(f"{context} has a number out of range: {error}") from error
