"""One segment file: frames of contiguous LLSNs behind a header, a mark and a sparse index.

An index point says where the frame of an LLSN begins. There is one every few KiB. Points lie in the file itself, so
they are synced together with their frames and need no file of their own. They are hints: a reader checks the header
that a point leads to. From a point on, readers walk from header to header. At a damaged header they walk back from the
next point, by the trailers, and so know exactly which entries they cannot read.
"""

from __future__ import annotations

from bisect import bisect_right
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
from cutwater.storage.files import File, StorageFiles, lenient_pread, make_readable
from cutwater.storage.format import HEADER_BYTES, POINT_BYTES, SEGMENT, FileHeader, decode_point, encode_point
from cutwater.storage.marked_file import MarkedFile
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


class Outlines(NamedTuple):
    """Headers of consecutive frames, and the offsets at which these frames begin and end."""

    start: int
    end: int
    found: Sequence[FrameHeader]


class SegmentEnd(NamedTuple):
    """The end of the entries in a file. Both fields change together, or a reader might see one without the other."""

    llsn: LLSN
    offset: int


class Segment:
    """One segment file. One thread writes it; others may read what is durable meanwhile."""

    def __init__(self, marked: MarkedFile) -> None:
        header = marked.header
        self._marked, self._file = marked, marked.file
        self.first_llsn = header.first_llsn
        self.data_start = header.data_start
        self.end = self.durable = SegmentEnd(LLSN(header.first_llsn - 1), header.data_start)
        self.running = header.running
        """Event time after the last entry."""
        self.lost: LLSN | None = None
        """The first LLSN that was missing when the file was opened."""
        self._unmarked: tuple[SegmentEnd, RunningEventTime] | None = None
        """The end that is durable and not noted in the file yet."""
        self._points: list[tuple[LLSN, int]] = []
        self._slots_used = 0

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def marked(self) -> MarkedFile:
        return self._marked

    @property
    def points(self) -> Sequence[tuple[LLSN, int]]:
        return self._points

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
        mark, offset = segment._marked.newest, segment._file.size()
        if mark is not None and mark.llsn == end_llsn and mark.offset <= offset:
            offset = mark.offset
        segment.end = segment.durable = SegmentEnd(end_llsn, offset)
        segment._load_points(segment.end.offset)
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
        mark, size = segment._marked.mark, segment._file.size()
        segment._load_points(min(mark.offset, size))
        start = (mark.llsn, mark.offset, mark.running) if mark.offset <= size else segment._last_point()
        segment._scan(start, size)
        segment._marked.rewrite(0, min(segment.data_start, size))
        floor = max(mark.llsn, committed_end)
        if segment.end.llsn < floor:
            segment.lost = LLSN(segment.end.llsn + 1)
            return segment
        segment._settle(size)
        return segment

    def _last_point(self) -> tuple[LLSN, int, RunningEventTime]:
        for llsn, offset in reversed(self._points):
            header = decode_header(self._file.pread(HEADER_BYTES_MAX, offset))
            if header is not None and header.first_llsn == llsn:
                return LLSN(llsn - 1), offset, header.running
        return LLSN(self.first_llsn - 1), self.data_start, self._marked.header.running

    def _scan(self, start: tuple[LLSN, int, RunningEventTime], size: int) -> None:
        """Find the intact frames from here on, and their index points."""
        llsn, offset, running = start
        while offset < size:
            frame = _frame_at(self._file, offset, LLSN(llsn + 1), size)
            if frame is None:
                break
            if self._is_due(offset):
                self._points.append((frame.header.first_llsn, offset))
                self._slots_used += 1
            offset += frame.header.frame_bytes
            llsn, running = frame.header.last_llsn, frame.header.running.after(frame.header)
        self.end, self.running = SegmentEnd(llsn, offset), running

    def _settle(self, size: int) -> None:
        """Make what was found durable, since it may never have been synced. Then cut off the rest."""
        mark = self._marked.mark
        self._write_points(self._first_slot_at(mark.offset))
        self._marked.rewrite(mark.offset, self.end.offset)
        self._marked.sync_all()
        if self.end.offset < size:
            self._marked.cut(self.end.offset, self.end.llsn, self.running)
        elif self.end.offset > mark.offset or self._marked.torn:
            self._marked.set_mark(self.end.offset, self.end.llsn, self.running)
        self.durable = self.end

    # The index.

    def _load_points(self, limit: int) -> None:
        """Load the points below ``limit``. Damaged points are skipped, but keep their slots."""
        header = self._marked.header
        area = lenient_pread(self._file, header.points * POINT_BYTES, HEADER_BYTES).rstrip(b"\0")
        for slot in range(-(-len(area) // POINT_BYTES)):
            point = decode_point(area[slot * POINT_BYTES : (slot + 1) * POINT_BYTES].ljust(POINT_BYTES, b"\0"))
            last_llsn, last_offset = self._points[-1] if self._points else (0, self.data_start - 1)
            if point is not None and last_offset < point[1] < limit and point[0] > last_llsn:
                self._points.append(point)
                self._slots_used = slot + 1

    def offset_after(self, llsn: LLSN) -> int:
        """Return about where the entry with this LLSN ends: at the next index point, or at the end."""
        i = bisect_right(self._points, llsn, key=lambda point: point[0])
        return self._points[i][1] if i < len(self._points) else self.end.offset

    def _point_before(self, llsn: LLSN) -> tuple[LLSN, int]:
        """Return the last index point at or before this LLSN, or the beginning of the file."""
        i = bisect_right(self._points, llsn, key=lambda point: point[0]) - 1
        return self._points[i] if i >= 0 else (self.first_llsn, self.data_start)

    def _is_due(self, offset: int) -> bool:
        header = self._marked.header
        return self._slots_used < header.points and offset >= self.data_start + self._slots_used * header.interval

    def _first_slot_at(self, offset: int) -> int:
        """Return the first slot whose point belongs, or could belong, to a frame at or above this offset."""
        above = sum(1 for _, point_offset in reversed(self._points) if point_offset >= offset)
        return self._slots_used - above

    def _write_points(self, first: int) -> None:
        """Write the slots from this one on, and clear the rest of the index if it is not empty."""
        header = self._marked.header
        count = self._slots_used - first
        points = b"".join(encode_point(*point) for point in self._points[len(self._points) - count :])
        room = (header.points - first) * POINT_BYTES
        offset = HEADER_BYTES + first * POINT_BYTES
        wanted = points.ljust(room, b"\0")
        if lenient_pread(self._file, room, offset) != wanted:
            self._file.pwritev([wanted], offset)

    # Writing.

    def append(self, entries: Sequence[Entry], bytes_max: int, room_ahead_bytes: int) -> int:
        """Write entries without syncing, as many as fit into ``bytes_max``. The first entry of a segment always fits.

        Returns the number of entries written. If it fails, nothing was written.
        """
        buffers: list[bytes] = []
        points: list[tuple[LLSN, int]] = []
        (llsn, offset), running = self.end, self.running
        start, used, taken = self.data_start, self._slots_used, 0
        for entry in entries:
            assert entry.first_llsn == llsn + 1, (entry.first_llsn, llsn)
            batch = entry.batch
            header, trailer = encode_frame(entry, running)
            end = offset + len(header) + len(batch.body) + TRAILER_BYTES
            if end - start > bytes_max and offset > start:
                break
            if self._is_due(offset):
                points.append((entry.first_llsn, offset))
                self._slots_used += 1
            buffers += (header, batch.body, trailer)
            offset, llsn, running = end, LLSN(llsn + batch.count), running.after(batch)
            taken += 1
        if not taken:
            return 0
        try:
            self._marked.extend(buffers, self.end.offset, offset, self._room_end(offset, room_ahead_bytes))
            if points:
                area = b"".join(encode_point(*point) for point in points)
                self._file.pwritev([area], HEADER_BYTES + used * POINT_BYTES)
        except OSError:
            self._slots_used = used
            self._marked.shorten(self.end.offset)
            raise
        self._points += points
        self.end, self.running = SegmentEnd(llsn, offset), running
        return taken

    def _room_end(self, offset: int, room_ahead_bytes: int) -> int:
        """Return how long to make the file for entries up to ``offset``, if it must grow. It is at most as long as a
        full one.

        Large writes make no room ahead, because they would spend more on zeros than they save.
        """
        if offset <= self._marked.size or (offset - self.end.offset) * SMALL_SHARE > room_ahead_bytes:
            return offset
        header = self._marked.header
        return min(offset + room_ahead_bytes, self.data_start + header.points * header.interval)

    def sync(self) -> None:
        """Make everything written durable. Call ``mark`` afterwards."""
        if self.end != self.durable:
            self._marked.sync_data()
            self.durable = self.end
            self._unmarked = self.end, self.running

    def mark(self) -> None:
        """Note in the file how far the last sync made it durable."""
        if self._unmarked is not None:
            (llsn, offset), running = self._unmarked
            self._marked.set_mark(offset, llsn, running)
            self._unmarked = None

    def truncate(self, end: LLSN) -> None:
        """Durably remove the entries above ``end``, and everything else that lies there."""
        assert self.first_llsn - 1 <= end <= self.end.llsn
        offset, running = self._end_of(end)
        self._marked.sync_data()
        # The mark goes first, or it would point to removed data. Then the index, which counts only below the mark.
        self._unmarked = None
        self._marked.set_mark(offset, end, running)
        self._marked.sync_data()
        self._points = [point for point in self._points if point[1] < offset]
        self._slots_used = len(self._points)
        self._write_points(0)
        self._marked.shorten(offset)
        self._marked.sync_all()
        self.end = self.durable = SegmentEnd(end, offset)
        self.running, self.lost = running, None

    def finish(self) -> None:
        """Shorten the file to the end of its entries, and make everything durable, including the mark."""
        self.sync()
        self.mark()
        self._marked.finish(self.end.offset)

    def go_on(self, running: RunningEventTime) -> None:
        """Make a closed segment, complete and durable, the last one again."""
        self.running = running
        self._marked.set_mark(self.end.offset, self.end.llsn, running)

    def _end_of(self, end: LLSN) -> tuple[int, RunningEventTime]:
        """Return where the entry that ends with this LLSN ends, and event time there."""
        if end == self.end.llsn:
            return self.end.offset, self.running
        running = self._marked.header.running
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
        after = bisect_right(self._points, offset, key=lambda point: point[1])
        llsn, end = self._points[after] if after < len(self._points) else (LLSN(file_end.llsn + 1), file_end.offset)
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
        offset, expected = (hint, llsn) if hint is not None else self._start_of(llsn)
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
        frame, end = self._frame_of(llsn)
        return Frames(frame.data, (frame,), end)

    def located(self, llsn: LLSN, to_llsn: LLSN, bytes_max: int, count_max: int) -> Outlines:
        """Find the frames from the one that holds ``llsn`` on, as many as ``read`` would return, at most ``count_max``.

        Returns none if damage is in the way. Only the headers are read.
        """
        end = self.end
        expected, offset = self._point_before(llsn)
        start = offset
        found: list[FrameHeader] = []
        reader = _Reader(self._file)
        while offset < end.offset and expected <= to_llsn and len(found) < count_max:
            outline = decode_header(reader.read(HEADER_BYTES_MAX, offset))
            if outline is None or not _fits(outline, expected, offset, end):
                break
            following = offset + outline.frame_bytes
            expected = LLSN(outline.last_llsn + 1)
            if expected > llsn:
                if not found:
                    start = offset
                elif following - start > bytes_max:
                    break
                found.append(outline)
            offset = following
        return Outlines(start, offset, found)

    def _start_of(self, llsn: LLSN) -> tuple[int, LLSN]:
        place = self.place_of(llsn)
        return place.offset, place.first_llsn

    def frame_of(self, llsn: LLSN) -> EntryFrame:
        """Return the intact frame that holds this LLSN. Raises if it is damaged."""
        return self._frame_of(llsn)[0]

    def _frame_of(self, llsn: LLSN) -> tuple[EntryFrame, int]:
        place = self.place_of(llsn)
        return self.frame_at(place), place.end

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

    def heal_index(self) -> bool:
        """Rewrite the index durably from the frames if it is damaged. Returns whether it did so.

        If an entry is damaged too, the entry must be repaired first.
        """
        if not self.index_problems():
            return False
        header = self._marked.header
        points: list[tuple[LLSN, int]] = []
        for place in self.places(self.first_llsn):
            if place.header is None:
                return False
            is_due = place.offset >= self.data_start + len(points) * header.interval
            if len(points) < header.points and is_due:
                points.append((place.first_llsn, place.offset))
        self._points, self._slots_used = points, len(points)
        make_readable(self._file, self.data_start - HEADER_BYTES, HEADER_BYTES)
        self._write_points(0)
        padding = HEADER_BYTES + header.points * POINT_BYTES
        self._file.pwritev([bytes(self.data_start - padding)], padding)
        self._marked.sync_data()
        return True

    def index_problems(self) -> list[str]:
        """Return faults of the index on disk that can be found without reading the frames."""
        try:
            area = self._file.pread(self.data_start - HEADER_BYTES, HEADER_BYTES)
        except OSError as error:
            return [f"the index cannot be read: {error}"]
        room = self._marked.header.points * POINT_BYTES
        problems = []
        for at in range(0, len(area[:room].rstrip(b"\0")), POINT_BYTES):
            slot = area[at : at + POINT_BYTES]
            if any(slot) and decode_point(slot) is None:
                problems.append(f"index point {at // POINT_BYTES} is wrong")
        if any(area[room:]):
            problems.append("there is something between the index and the entries")
        return problems

    def repair(self, entry: Entry, running: RunningEventTime | None) -> bool:
        """Replace a damaged entry durably with an intact copy. Returns False if the copy does not belong there.

        ``running`` is event time before the entry, if the copy says it.
        """
        before: RunningEventTime | None = self._marked.header.running
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
        self._marked.sync_data()
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
