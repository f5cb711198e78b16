"""One segment file: frames of contiguous LLSNs behind a header, a mark and a sparse index.

From an index point on, readers walk from header to header. At a damaged header they walk back from the next point, by
the trailers, and so know exactly which entries they cannot read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from cutwater.format.entry_codec import (
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    TRAILER_BYTES,
    EntryFrame,
    FrameHeader,
    RunningEventTime,
    Trailer,
    decode_header,
    decode_trailer,
    encode_frame,
)
from cutwater.format.errors import DamagedEntries, DamagedFile
from cutwater.storage.files import File, StorageFiles, is_full, lenient_pread, make_readable
from cutwater.storage.format import SEGMENT, FileHeader
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.storage.replica.segment_index import Point, SegmentIndex
from cutwater.types import LLSN, Entry

READ_AHEAD_BYTES = 8 * 1024
SMALL_SHARE = 4
"""A write is small if at least this many like it fit into the room that it makes."""


class EntryPlace(Struct, frozen=True):
    """The place of an entry. Without a header the place is damaged, and may hold more than one entry."""

    offset: int
    end: int
    first_llsn: LLSN
    last_llsn: LLSN
    header: FrameHeader | None
    trailer: Trailer | None = None
    """The trailer of a damaged place, if the place is known to be one frame."""


class Frames(Struct, frozen=True):
    """Consecutive frames in one buffer, and the offset at which the next one begins."""

    data: memoryview
    frames: tuple[EntryFrame, ...]
    end: int


class SegmentEnd(NamedTuple):
    """The end of the entries in a file. Both fields change together, or a reader might see one without the other."""

    llsn: LLSN
    offset: int


class Segment:
    """One segment file. One thread writes it; others may read what is durable meanwhile."""

    def __init__(self, marked: MarkedFile) -> None:
        header = marked.header
        self.marked, self._file = marked, marked.file
        self.index = SegmentIndex(marked)
        self.first_llsn = header.first_llsn
        self.data_start = header.data_start
        self.end = self.durable = SegmentEnd(LLSN(header.first_llsn - 1), header.data_start)
        self.running = header.running
        """Event time after the last entry."""
        self.lost: LLSN | None = None
        """The first LLSN that was missing when the file was opened."""
        self._unmarked: tuple[SegmentEnd, RunningEventTime] | None = None
        """The end that is durable and not noted in the file yet."""

    @property
    def path(self) -> Path:
        return self._file.path

    # Creating and opening.

    @classmethod
    def create(cls, files: StorageFiles, path: Path, header: FileHeader) -> Segment:
        return cls(MarkedFile.create(files, path, SEGMENT, header))

    @classmethod
    def open_closed(cls, files: StorageFiles, path: Path, generation: int, first_llsn: LLSN, end_llsn: LLSN) -> Segment:
        """Open a segment that is not the last one, so all of it was synced.

        Its mark says where it ends. If the mark is damaged, the length of the file does.
        """
        try:
            segment = cls(MarkedFile.open(files, path, SEGMENT, generation, first_llsn))
        except FileNotFoundError:
            raise
        except DamagedFile as error:
            raise DamagedEntries(str(path), first_llsn, end_llsn, error.what) from error
        except OSError as error:
            raise DamagedEntries(str(path), first_llsn, end_llsn, f"they cannot be read: {error}") from error
        mark, offset = segment.marked.newest, segment._file.size()
        if mark is not None and mark.llsn == end_llsn and mark.offset <= offset:
            offset = mark.offset
        segment.end = segment.durable = SegmentEnd(end_llsn, offset)
        segment.index.load(segment.end.offset)
        return segment

    @classmethod
    def recover(
        cls, files: StorageFiles, path: Path, generation: int, first_llsn: LLSN, committed_end: LLSN
    ) -> Segment:
        """Open the last segment.

        Everything up to its mark, or up to ``committed_end``, was durable once. If any of it is missing, it is lost,
        and nothing is cut. Above that, intact frames are kept and the torn rest is removed.
        """
        segment = cls(MarkedFile.open(files, path, SEGMENT, generation, first_llsn))
        mark, size = segment.marked.mark, segment._file.size()
        segment.index.load(min(mark.offset, size))
        start = (mark.llsn, mark.offset, mark.running) if mark.offset <= size else segment._last_point()
        segment._scan(start, size)
        segment.marked.rewrite(0, min(segment.data_start, size))
        floor = max(mark.llsn, committed_end)
        if segment.end.llsn < floor:
            segment.lost = LLSN(segment.end.llsn + 1)
            return segment
        segment._settle(size)
        return segment

    def _last_point(self) -> tuple[LLSN, int, RunningEventTime]:
        for llsn, offset in reversed(self.index.points):
            header = decode_header(self._file.pread(HEADER_BYTES_MAX, offset))
            if header is not None and header.first_llsn == llsn:
                return LLSN(llsn - 1), offset, header.running
        return LLSN(self.first_llsn - 1), self.data_start, self.marked.header.running

    def _scan(self, start: tuple[LLSN, int, RunningEventTime], size: int) -> None:
        """Find the intact frames from here on, and their index points."""
        llsn, offset, running = start
        while offset < size:
            frame = _frame_at(self._file, offset, LLSN(llsn + 1), size)
            if frame is None:
                break
            if self.index.is_due(offset, self.index.slots_used):
                self.index.add([(frame.header.first_llsn, offset)])
            offset += frame.header.frame_bytes
            llsn, running = frame.header.last_llsn, frame.header.running.after(frame.header)
        self.end, self.running = SegmentEnd(llsn, offset), running

    def _settle(self, size: int) -> None:
        """Make what was found durable, since it may never have been synced. Then cut off the rest."""
        mark = self.marked.mark
        self.index.rewrite_from(mark.offset)
        self.marked.rewrite(mark.offset, self.end.offset)
        self.marked.sync_all()
        if self.end.offset < size:
            self.marked.cut(self.end.offset, self.end.llsn, self.running)
        elif self.end.offset > mark.offset or self.marked.torn:
            self.marked.set_mark(self.end.offset, self.end.llsn, self.running)
        self.durable = self.end

    def offset_after(self, llsn: LLSN) -> int:
        """Return about where the entry with this LLSN ends: at the next index point, or at the end."""
        point = self.index.after(llsn)
        return self.end.offset if point is None else point[1]

    def _point_before(self, llsn: LLSN) -> Point:
        """Return the last index point at or before this LLSN, or the beginning of the file."""
        return self.index.before(llsn) or (self.first_llsn, self.data_start)

    # Writing.

    def append(self, entries: Sequence[Entry], bytes_max: int, room_ahead_bytes: int) -> int:
        """Write entries without syncing, as many as fit into ``bytes_max``. The first entry of a segment always fits.

        Returns the number of entries written. If there is no room, nothing of them is left.
        """
        buffers: list[bytes] = []
        points: list[Point] = []
        (llsn, offset), running = self.end, self.running
        index, start, taken = self.index, self.data_start, 0
        for entry in entries:
            assert entry.first_llsn == llsn + 1, (entry.first_llsn, llsn)
            batch = entry.batch
            header, trailer = encode_frame(entry, running)
            end = offset + len(header) + len(batch.body) + TRAILER_BYTES
            if end - start > bytes_max and offset > start:
                break
            if index.is_due(offset, index.slots_used + len(points)):
                points.append((entry.first_llsn, offset))
            buffers += (header, batch.body, trailer)
            offset, llsn, running = end, LLSN(llsn + batch.count), running.after(batch)
            taken += 1
        if not taken:
            return 0
        self.marked.extend(buffers, self.end.offset, offset, self._room_end(offset, room_ahead_bytes))
        try:
            index.write_next(points)
        except OSError as error:
            if is_full(error):
                index.clear_rest()
                self.marked.undo(self.end.offset)
            raise
        index.add(points)
        self.end, self.running = SegmentEnd(llsn, offset), running
        return taken

    def _room_end(self, offset: int, room_ahead_bytes: int) -> int:
        """Return how long to make the file for entries up to ``offset``, if it must grow. It is at most as long as a
        full one.

        Large writes make no room ahead, because they would spend more on zeros than they save.
        """
        if offset <= self.marked.size or (offset - self.end.offset) * SMALL_SHARE > room_ahead_bytes:
            return offset
        header = self.marked.header
        return min(offset + room_ahead_bytes, self.data_start + header.points * header.interval)

    def sync(self) -> None:
        """Make everything written durable. Call ``mark`` afterwards."""
        if self.end != self.durable:
            self.marked.sync_data()
            self.durable = self.end
            self._unmarked = self.end, self.running

    def mark(self) -> None:
        """Note in the file how far the last sync made it durable."""
        if self._unmarked is not None:
            (llsn, offset), running = self._unmarked
            self.marked.set_mark(offset, llsn, running)
            self._unmarked = None

    def truncate(self, end: LLSN) -> None:
        """Durably remove the entries above ``end``, and everything else that lies there."""
        assert self.first_llsn - 1 <= end <= self.end.llsn
        offset, running = self._end_of(end)
        self.marked.sync_data()
        # The mark goes first, or it would point to removed data. Then the index, which counts only below the mark.
        self._unmarked = None
        self.marked.set_mark(offset, end, running)
        self.marked.sync_data()
        self.index.cut(offset)
        self.marked.shorten(offset)
        self.marked.sync_all()
        self.end = self.durable = SegmentEnd(end, offset)
        self.running, self.lost = running, None

    def finish(self) -> None:
        """Shorten the file to the end of its entries, and make everything durable, including the mark."""
        self.sync()
        self.mark()
        self.marked.finish(self.end.offset)

    def go_on(self, running: RunningEventTime) -> None:
        """Make a closed segment, complete and durable, the last one again."""
        self.running = running
        self.marked.set_mark(self.end.offset, self.end.llsn, running)

    def _end_of(self, end: LLSN) -> tuple[int, RunningEventTime]:
        """Return where the entry that ends with this LLSN ends, and event time there."""
        if end == self.end.llsn:
            return self.end.offset, self.running
        running = self.marked.header.running
        before: EntryPlace | None = None
        for place in self.places(LLSN(max(end, self.first_llsn))):
            if place.first_llsn == end + 1:
                if place.header is not None:
                    return place.offset, place.header.running
                if before is None or before.header is not None:
                    return place.offset, running
            if place.last_llsn > end:
                break
            before = place
            if place.header is not None:
                running = place.header.running.after(place.header)
        damaged = before if before is not None and before.header is None else place
        what = f"so the offset or event time after LLSN {end} is unknown"
        raise DamagedEntries(str(self.path), damaged.first_llsn, damaged.last_llsn, what)

    # Reading.

    def places(self, llsn: LLSN) -> Iterator[EntryPlace]:
        """Yield the places, intact and damaged, from the index point before this LLSN on, without gaps."""
        end = self.end
        expected, offset = self._point_before(llsn)
        reader = _Reader(self._file)
        while offset < end.offset:
            header = decode_header(reader.read(HEADER_BYTES_MAX, offset))
            if _fits(header, expected, offset, end):
                assert header is not None
                place = EntryPlace(offset, offset + header.frame_bytes, expected, header.last_llsn, header)
            else:
                place = self._damaged_place(offset, expected, end)
            yield place
            offset, expected = place.end, LLSN(place.last_llsn + 1)
        if expected <= end.llsn:
            # The file is shorter than it was.
            yield EntryPlace(offset, offset, expected, end.llsn, None)

    def _damaged_place(self, offset: int, expected: LLSN, file_end: SegmentEnd) -> EntryPlace:
        """Find how far the damage goes that begins at this offset, by walking back from the next known place."""
        llsn, end = self.index.after_offset(offset) or (LLSN(file_end.llsn + 1), file_end.offset)
        while True:
            trailer = decode_trailer(lenient_pread(self._file, TRAILER_BYTES, end - TRAILER_BYTES))
            start = end - trailer.frame_bytes if trailer else offset
            if trailer is None or start < offset or not expected <= trailer.first_llsn < llsn:
                return EntryPlace(offset, end, expected, LLSN(llsn - 1), None)
            if start == offset:
                return EntryPlace(offset, end, expected, LLSN(llsn - 1), None, trailer)
            llsn, end = trailer.first_llsn, start

    def place_of(self, llsn: LLSN) -> EntryPlace:
        """Return the place that holds this LLSN, damaged or not."""
        return next(place for place in self.places(llsn) if llsn <= place.last_llsn)

    def read(self, llsn: LLSN, to_llsn: LLSN, bytes_max: int, hint: int | None = None) -> Frames:
        """Read intact frames, beginning with the one that holds ``llsn``: at least one, otherwise at most
        ``bytes_max``.

        ``hint`` is the ``end`` of the read that ended just before ``llsn``.
        """
        offset, expected = hint, llsn
        if offset is None:
            place = self.place_of(llsn)
            if place.header is None:
                # This raises. The place may begin before ``llsn``, even if it can be read the next time.
                self.frame_at(place)
            offset, expected = place.offset, place.first_llsn
        file_end = self.end
        size = min(max(bytes_max, READ_AHEAD_BYTES), file_end.offset - offset)
        data = memoryview(lenient_pread(self._file, size, offset))
        frames: list[EntryFrame] = []
        at = 0
        while expected <= to_llsn and at < len(data):
            header = decode_header(data, at)
            if header is None or not _fits(header, expected, offset + at, file_end):
                break
            if at + header.frame_bytes > (bytes_max if frames else len(data)):
                break
            frame = EntryFrame(header, data[at : at + header.frame_bytes])
            if frame.problem is not None:
                break
            frames.append(frame)
            at += header.frame_bytes
            expected = LLSN(header.last_llsn + 1)
        if frames:
            return Frames(data[:at], tuple(frames), offset + at)
        place = self.place_of(llsn)
        frame = self.frame_at(place)
        return Frames(frame.data, (frame,), place.end)

    def located(
        self, llsn: LLSN, to_llsn: LLSN, bytes_max: int, count_max: int
    ) -> tuple[int, int, Sequence[FrameHeader]]:
        """Find the frames from the one that holds ``llsn`` on, as many as ``read`` would return, at most ``count_max``.

        Returns where they begin and end, and their headers; none if damage is in the way. Only the headers are read.
        """
        start = end = 0
        found: list[FrameHeader] = []
        for place in self.places(llsn):
            if place.last_llsn < llsn:
                continue
            if place.header is None or place.first_llsn > to_llsn or len(found) == count_max:
                break
            if not found:
                start = place.offset
            elif place.end - start > bytes_max:
                break
            found.append(place.header)
            end = place.end
        return start, end, found

    def frame_of(self, llsn: LLSN) -> EntryFrame:
        """Return the intact frame that holds this LLSN. Raises if it is damaged."""
        return self.frame_at(self.place_of(llsn))

    def frame_at(self, place: EntryPlace) -> EntryFrame:
        """Return the intact frame at this place. Raises if it is damaged."""
        problem: str | None = "the header is wrong"
        if place.header is not None:
            data = lenient_pread(self._file, place.end - place.offset, place.offset)
            header = decode_header(data)
            if header == place.header:
                frame = EntryFrame(header, memoryview(data))
                problem = frame.problem
                if problem is None:
                    return frame
        try:
            self._file.pread(place.end - place.offset, place.offset)
        except OSError as error:
            problem = f"they cannot be read: {error}"
        raise DamagedEntries(str(self.path), place.first_llsn, place.last_llsn, problem or "")

    # Repair.

    def heal_index(self, from_llsn: LLSN) -> bool:
        """Rewrite the index durably from the frames if it is damaged. Returns whether it did so.

        If an entry is damaged too, the entry must be repaired first, unless it ends before ``from_llsn``: then it is
        trimmed, and no copy of it may exist.
        """
        if not self.index.problems():
            return False
        points: list[Point] = []
        for place in self.places(self.first_llsn):
            if place.header is None:
                if place.last_llsn >= from_llsn:
                    return False
            elif self.index.is_due(place.offset, len(points)):
                points.append((place.first_llsn, place.offset))
        self.index.heal(points)
        return True

    def heal_header(self, from_llsn: LLSN) -> bool:
        """Durably rewrite damaged copies of the header and damaged marks. Returns whether there were any.

        If both marks of a closed segment are wrong, its entries say where it ends. Then all of them must be intact from
        ``from_llsn`` on. The others are trimmed. Raises ``DamagedEntries`` for those that must be repaired first.
        """
        if self.marked.newest is None:
            self._restore_mark(from_llsn)
        return self.marked.heal()

    def _restore_mark(self, from_llsn: LLSN) -> None:
        end = self.end.llsn
        for place in self.places(max(from_llsn, self.first_llsn)):
            if place.last_llsn < from_llsn:
                continue
            if place.first_llsn > end:
                break
            header = self.frame_at(place).header
            if header.last_llsn == end:
                # It was synced as a whole before the next segment was created.
                self.marked.restore_mark(place.end, end, header.running.after(header))
                self.end = self.durable = SegmentEnd(end, place.end)
                return
        raise DamagedEntries(str(self.path), end, end, "no entry ends with this LLSN")

    def repair(self, entry: Entry, running: RunningEventTime | None) -> bool:
        """Replace a damaged entry durably with an intact copy. Returns False if the copy does not belong there.

        ``running`` is event time before the entry, if the copy says it.
        """
        before: RunningEventTime | None = self.marked.header.running
        places = self.places(LLSN(max(entry.first_llsn - 1, self.first_llsn)))
        for place in places:
            if place.header is not None:
                before = place.header.running
            if place.last_llsn >= entry.first_llsn:
                break
            before = place.header.running.after(place.header) if place.header is not None else None
        else:
            return False
        if place.first_llsn != entry.first_llsn:
            return self._repair_last(entry, running, place, next(places, None))
        running = before or running
        if running is None:
            # The entry before this one is damaged too, and must be repaired first.
            return False
        header, trailer = encode_frame(entry, running)
        size = len(header) + len(entry.batch.body) + len(trailer)
        if not _replaces(place, entry, header, size):
            return False
        return self._put(place.offset, [header, entry.batch.body, trailer])

    def _repair_last(
        self, entry: Entry, running: RunningEventTime | None, place: EntryPlace, following: EntryPlace | None
    ) -> bool:
        """Repair the last of several damaged entries, whose place is known from where they end.

        The first ones may be trimmed, and then no replica has a copy of them.
        """
        if place.header is not None or entry.last_llsn != place.last_llsn or running is None:
            return False
        expected = following.header.running if following is not None and following.header is not None else None
        if expected is not None and expected != running.after(entry.batch):
            return False
        header, trailer = encode_frame(entry, running)
        offset = place.end - len(header) - len(entry.batch.body) - len(trailer)
        return offset > place.offset and self._put(offset, [header, entry.batch.body, trailer])

    def _put(self, offset: int, frame: Sequence[bytes]) -> bool:
        make_readable(self._file, sum(map(len, frame)), offset)
        self._file.pwritev(frame, offset)
        self.marked.sync_data()
        return True


def _frame_at(file: File, offset: int, expected: LLSN, size: int) -> EntryFrame | None:
    """Return the intact frame at this offset with this LLSN, or None."""
    header = decode_header(file.pread(HEADER_BYTES_MAX, offset))
    if header is None or header.first_llsn != expected or header.frame_bytes > min(size - offset, FRAME_BYTES_MAX):
        return None
    frame = EntryFrame(header, memoryview(file.pread(header.frame_bytes, offset)))
    return frame if decode_header(frame.data) == header and frame.problem is None else None


def _fits(header: FrameHeader | None, expected: LLSN, offset: int, end: SegmentEnd) -> bool:
    return (
        header is not None
        and header.first_llsn == expected
        and header.last_llsn <= end.llsn
        and offset + header.frame_bytes <= end.offset
    )


def _replaces(place: EntryPlace, entry: Entry, header: bytes, size: int) -> bool:
    """Return whether the frame that begins with ``header`` is the one that was here before the damage."""
    if place.header is not None:
        return decode_header(header) == place.header
    if place.trailer is not None:
        header_crc = int.from_bytes(header[-4:], "little")
        return size == place.end - place.offset and header_crc == place.trailer.header_crc
    if entry.last_llsn == place.last_llsn:
        return size == place.end - place.offset
    return entry.last_llsn < place.last_llsn and size < place.end - place.offset


class _Reader:
    """Reads small pieces, and reads ahead a little where they are close to each other."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._start = 0
        self._data = memoryview(b"")

    def read(self, size: int, offset: int) -> memoryview:
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            ahead = size if at > READ_AHEAD_BYTES else max(size, READ_AHEAD_BYTES)
            self._start, at = offset, 0
            self._data = memoryview(lenient_pread(self._file, ahead, offset))
        return self._data[at : at + size]
