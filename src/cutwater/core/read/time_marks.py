"""The clock of the log: pairs of a position and its cut time, for readers of topics without appends.

A reader knows the cut times of the records that it reads. While its topics get no records, it needs other positions at
which time advances: *marks*. Every tick is a mark, and so is the first cut that comes ``MARK_EVERY_US`` or more of cut
time after the last mark. Marks follow from the decisions alone, so every reader, at any time, finds the same ones.

Full blocks of marks never change and are kept packed: a few bytes for each mark.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from cutwater.types import GLSN, SECOND, CutTime

MARK_EVERY_US = 10 * SECOND
BLOCK_MARKS = 1_024

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[int]).decode


class TimeMark(Struct, frozen=True, array_like=True):
    """A position and its cut time."""

    glsn: GLSN
    time: CutTime


class MarkBlock(Struct, frozen=True, array_like=True):
    """``BLOCK_MARKS`` marks, packed. The first mark is stored whole. ``packed`` holds the differences between
    consecutive marks, position and time in turn."""

    first: TimeMark
    last_glsn: GLSN
    packed: bytes


class Clock:
    """Collects the marks. The caller passes every cut to ``note``, in order."""

    def __init__(self, blocks: tuple[MarkBlock, ...] = (), recent: tuple[TimeMark, ...] = ()) -> None:
        self._blocks = list(blocks)
        self._recent = list(recent)

    @property
    def blocks(self) -> tuple[MarkBlock, ...]:
        return tuple(self._blocks)

    @property
    def recent(self) -> tuple[TimeMark, ...]:
        return tuple(self._recent)

    def note(self, glsn: GLSN, time: CutTime, *, is_tick: bool) -> None:
        """Note a cut that ends at this position."""
        last = self._recent[-1].time if self._recent else CutTime(-MARK_EVERY_US)
        if not is_tick and time - last < MARK_EVERY_US:
            return
        self._recent.append(TimeMark(glsn, time))
        if len(self._recent) > BLOCK_MARKS:
            # The last mark stays, since ``note`` compares the next cut with it.
            self._blocks.append(_pack(self._recent[:-1]))
            del self._recent[:-1]

    def trim(self, before: GLSN) -> None:
        """Forget blocks that end below ``before``, whose positions no reader can read any more."""
        keep = 0
        while keep < len(self._blocks) and self._blocks[keep].last_glsn < before:
            keep += 1
        del self._blocks[:keep]

    def marks(self, after: GLSN, limit: int) -> list[TimeMark]:
        """Return the first marks above a position, at most ``limit``."""
        found: list[TimeMark] = []
        for mark in self._from(after):
            if mark.glsn > after:
                if len(found) == limit:
                    break
                found.append(mark)
        return found

    def last_until(self, time: CutTime) -> GLSN:
        """Return the position of the last mark up to a time; 0 if there is none. What lies above it was committed
        later, or less than the distance of two marks before."""
        found = GLSN(0)
        for block in reversed(self._blocks):
            if block.first.time <= time:
                found = max((mark.glsn for mark in _unpack(block) if mark.time <= time), default=found)
                break
        return max((mark.glsn for mark in self._recent if mark.time <= time), default=found)

    def _from(self, after: GLSN) -> Iterator[TimeMark]:
        start = bisect_right([block.last_glsn for block in self._blocks], after)
        for block in self._blocks[start:]:
            yield from _unpack(block)
        yield from self._recent


def _pack(marks: list[TimeMark]) -> MarkBlock:
    deltas: list[int] = []
    for i in range(1, len(marks)):
        deltas += (marks[i].glsn - marks[i - 1].glsn, marks[i].time - marks[i - 1].time)
    return MarkBlock(marks[0], marks[-1].glsn, _encode(deltas))


def _unpack(block: MarkBlock) -> Iterator[TimeMark]:
    glsn, time = block.first.glsn, block.first.time
    yield block.first
    deltas = _decode(block.packed)
    for i in range(0, len(deltas), 2):
        glsn, time = GLSN(glsn + deltas[i]), CutTime(time + deltas[i + 1])
        yield TimeMark(glsn, time)
