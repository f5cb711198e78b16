"""The sparse index of a segment: every few KiB, a point says where the frame of an LLSN begins.

Points lie in the segment file itself, so they are synced together with their frames and need no file of their own. They
are hints: a reader checks the header that a point leads to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter

from cutwater.format.errors import StorageBroken
from cutwater.storage.files import lenient_pread, make_readable
from cutwater.storage.format import HEADER_BYTES, POINT_BYTES, decode_point, encode_point
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.types import LLSN

Point = tuple[LLSN, int]
"""An LLSN, and the offset of the frame that begins with it."""

_llsn = itemgetter(0)
_offset = itemgetter(1)


class SegmentIndex:
    """One thread changes it; others may search it meanwhile."""

    def __init__(self, marked: MarkedFile) -> None:
        self._marked, self._file, self._header = marked, marked.file, marked.header
        self._data_start = marked.header.data_start
        self._points: list[Point] = []
        self.slots_used = 0
        """More than there are points if some were damaged."""

    def load(self, limit: int) -> None:
        """Load the points below ``limit``. Damaged points are skipped, but keep their slots."""
        area = lenient_pread(self._file, self._header.points * POINT_BYTES, HEADER_BYTES).rstrip(b"\0")
        for slot in range(-(-len(area) // POINT_BYTES)):
            point = decode_point(area[slot * POINT_BYTES : (slot + 1) * POINT_BYTES].ljust(POINT_BYTES, b"\0"))
            last_llsn, last_offset = self._points[-1] if self._points else (0, self._data_start - 1)
            if point is not None and last_offset < point[1] < limit and point[0] > last_llsn:
                self._points.append(point)
                self.slots_used = slot + 1

    # Searching.

    @property
    def points(self) -> Sequence[Point]:
        return self._points

    def before(self, llsn: LLSN) -> Point | None:
        """Return the last point at or before this LLSN."""
        i = bisect_right(self._points, llsn, key=_llsn) - 1
        return self._points[i] if i >= 0 else None

    def after(self, llsn: LLSN) -> Point | None:
        """Return the first point above this LLSN."""
        i = bisect_right(self._points, llsn, key=_llsn)
        return self._points[i] if i < len(self._points) else None

    def after_offset(self, offset: int) -> Point | None:
        i = bisect_right(self._points, offset, key=_offset)
        return self._points[i] if i < len(self._points) else None

    # Writing. Nothing is synced.

    def is_due(self, offset: int, slot: int) -> bool:
        """Return whether the frame at this offset gets a point in this slot, the next free one."""
        return slot < self._header.points and offset >= self._data_start + slot * self._header.interval

    def write_next(self, points: Sequence[Point]) -> None:
        """Write points into the next slots. They do not count before ``add``."""
        if points:
            area = b"".join(encode_point(*point) for point in points)
            self._file.pwritev([area], HEADER_BYTES + self.slots_used * POINT_BYTES)

    def clear_rest(self) -> None:
        """Clear what a failed ``write_next`` left."""
        try:
            self._write(self.slots_used)
        except OSError as error:
            raise StorageBroken(f"{self._file.path} cannot be written ({error}): reopen and cut back") from error

    def add(self, points: Sequence[Point]) -> None:
        self._points += points
        self.slots_used += len(points)

    def cut(self, offset: int) -> None:
        """Remove the points at or above this offset."""
        self.replace([point for point in self._points if point[1] < offset])

    def rewrite_from(self, offset: int) -> None:
        """Write the points at or above this offset, and clear the rest of the index."""
        above = sum(1 for point in self._points if point[1] >= offset)
        self._write(self.slots_used - above)

    def replace(self, points: list[Point]) -> None:
        self._points, self.slots_used = points, len(points)
        self._write(0)

    def _write(self, first: int) -> None:
        """Write the slots from this one on, and clear the rest of the index if it is not empty."""
        count = self.slots_used - first
        points = b"".join(encode_point(*point) for point in self._points[len(self._points) - count :])
        room = (self._header.points - first) * POINT_BYTES
        offset = HEADER_BYTES + first * POINT_BYTES
        wanted = points.ljust(room, b"\0")
        if lenient_pread(self._file, room, offset) != wanted:
            self._file.pwritev([wanted], offset)

    # Repair.

    def heal(self, points: list[Point]) -> None:
        """Replace the index durably with these points."""
        make_readable(self._file, self._data_start - HEADER_BYTES, HEADER_BYTES)
        self.replace(points)
        padding = HEADER_BYTES + self._header.points * POINT_BYTES
        self._file.pwritev([bytes(self._data_start - padding)], padding)
        self._marked.sync_data()

    def problems(self, starts: Mapping[int, LLSN] | None = None, end: int = 0) -> list[tuple[str, LLSN | None]]:
        """Return faults of the index on disk, and the LLSN that each one concerns, if it is known.

        ``starts`` are the LLSNs of all frames below the offset ``end``, by their offsets, to compare points with.
        """
        try:
            area = self._file.pread(self._data_start - HEADER_BYTES, HEADER_BYTES)
        except OSError as error:
            return [(f"the index cannot be read: {error}", None)]
        room = self._header.points * POINT_BYTES
        found: list[tuple[str, LLSN | None]] = []
        for at in range(0, len(area[:room].rstrip(b"\0")), POINT_BYTES):
            slot, number = area[at : at + POINT_BYTES], at // POINT_BYTES
            if not any(slot):
                continue
            point = decode_point(slot.ljust(POINT_BYTES, b"\0"))
            if point is None:
                found.append((f"index point {number} is wrong", None))
            elif starts is not None and point[1] < end and starts.get(point[1]) != point[0]:
                found.append((f"index point {number} leads nowhere", point[0]))
        if any(area[room:]):
            found.append(("there is something between the index and the entries", None))
        return found
