"""What those who read large ranges in parallel ask of a storage node, besides the records themselves: how much lies
where, and what the headers of batches say. None of it reads a body.
"""

from __future__ import annotations

import sys
from array import array
from typing import Final

from msgspec import Struct

from cutwater.types import GLSN, LLSN, CutTime, EventTime, LogStreamId
from cutwater.wire.frames import Body
from cutwater.wire.methods import Method

NOTHING: Final = -(2**63)
"""In a packed head: no such value."""

UNKNOWN: Final = LLSN(-1)

POSITIONS_MAX: Final = 8_192
HEADS_MAX: Final = 65_536


class MeasureArguments(Struct, frozen=True):
    """How much of a stream lies at or below each of these positions, which do not fall."""

    stream: LogStreamId
    positions: tuple[GLSN, ...]


class MeasureAnswer(Struct, frozen=True):
    """Per position the last LLSN at or below it, exact up to ``complete_through``, or ``UNKNOWN`` if that was forgotten
    after a trim; and about how many bytes the entries up to there take, of which only differences mean something."""

    llsns: tuple[LLSN, ...]
    bytes: tuple[int, ...]
    complete_through: GLSN


class HeadsArguments(Struct, frozen=True):
    """The headers of the committed batches that have records from ``from_glsn`` to ``to_glsn``, at most so many."""

    stream: LogStreamId
    from_glsn: GLSN
    to_glsn: GLSN
    heads_max: int = HEADS_MAX


class EventTimeBefore(Struct, frozen=True):
    """What the stream had said before the first of the heads: the largest event time, the largest declared watermark,
    and when its last commit was, trimmed or not; None where there was none."""

    time_max: EventTime | None
    declared: EventTime | None
    committed: CutTime | None


class HeadsAnswer(Struct, frozen=True):
    """The body is the heads, packed. Nothing else lies at or below ``complete_through``."""

    before: EventTimeBefore
    complete_through: GLSN


COLUMNS: Final = ("first_llsn", "first_glsn", "count", "time", "time_max", "declared")
"""What is told of each batch, as 64-bit integers; ``time`` is that of its cut. A fence has no ``time_max``."""


def pack(columns: list[array[int]]) -> bytes:
    """One column after the other, little-endian."""
    assert len(columns) == len(COLUMNS)
    if sys.byteorder == "big":
        for column in columns:
            column.byteswap()
    return b"".join(column.tobytes() for column in columns)


def unpack(data: Body) -> tuple[array[int], ...]:
    values = array("q")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    count = len(values) // len(COLUMNS)
    return tuple(values[i * count : (i + 1) * count] for i in range(len(COLUMNS)))


MEASURE: Method[MeasureArguments, MeasureAnswer] = Method("measure", MeasureArguments, MeasureAnswer)
HEADS: Method[HeadsArguments, HeadsAnswer] = Method("heads", HeadsArguments, HeadsAnswer)
