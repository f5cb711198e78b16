"""What those who read large ranges in parallel ask of a storage node: how much lies where, what the headers of batches
say, and the records themselves, with as little as possible to be done for each batch.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from cutwater.protocol.methods import Body, Method
from cutwater.protocol.storage_api import Columns
from cutwater.types import GLSN, LLSN, CutTime, EventTime, LogStreamId

NOTHING: Final = -(2**63)
"""In a packed head: no such value."""

CHECKED: Final = 1 << 40
"""Added to the number of a schema: the batch is sound."""
MALFORMED: Final = 1 << 41
"""Added to the number of a schema: the checksum of the batch is right, but it is not sound. Its rows do not come."""

UNKNOWN: Final = LLSN(-1)

POSITIONS_MAX: Final = 8_192
HEADS_MAX: Final = 65_536
RUNS_MAX: Final = 16_384
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of how much in a file a storage node tells at once, in how many batches: what it answers stays small."""


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
    """The headers of the committed batches that have positions from ``from_glsn`` to ``to_glsn``, at most
    ``heads_max``. ``with_idle`` asks for the column ``idle`` too, which clients did not know before."""

    stream: LogStreamId
    from_glsn: GLSN
    to_glsn: GLSN
    heads_max: int = HEADS_MAX
    with_idle: bool = False


class EventTimeBefore(Struct, frozen=True):
    """What the stream had said before the first of the heads: the largest event time, the largest declared watermark,
    and when its last commit was, trimmed or not; None where there was none. ``idle``: its last entry declares
    idleness."""

    time_max: EventTime | None
    declared: EventTime | None
    committed: CutTime | None
    idle: bool = False


class HeadsAnswer(Struct, frozen=True):
    """The body is the heads, packed. Nothing else lies at or below ``complete_through``. ``with_idle``: the column
    ``idle`` is the last one."""

    before: EventTimeBefore
    complete_through: GLSN
    with_idle: bool = False


COLUMNS: Final = ("first_llsn", "first_glsn", "count", "time", "time_max", "declared")
"""The columns for each batch, as 64-bit integers; ``time`` is that of its cut. Fences and declarations have no
``time_max``. After them, if asked for, comes ``idle``: 1 if the batch declares idleness, otherwise 0."""


class GroupsAnswer(Struct, frozen=True):
    """The answer to ``HeadsArguments`` from one who wants to know what runs have published: the body is what is told of
    each batch that belongs to a group, packed. No other one lies at or below ``complete_through``."""

    complete_through: GLSN


GROUP_COLUMNS: Final = ("first_glsn", "count", "run", "batch", "rows", "decided")
"""Only the last batch of a group says which one that is, how many ``rows`` all of it has, and which decision made it.
Those before it have 0 there."""


class ScanArguments(Struct, frozen=True):
    """The committed records of a stream that have positions from ``from_glsn`` to ``to_glsn``, as many as fit.
    ``projection`` is as in ``ReadArguments``. ``opens_files``: the reader is on the same machine, and would rather be
    told where the records are; of ``file_bytes_max``, if that is more."""

    stream: LogStreamId
    from_glsn: GLSN
    to_glsn: GLSN
    bytes_max: int
    projection: dict[int, Columns] = {}
    opens_files: bool = False
    file_bytes_max: int = 0
    tells_checked: bool = False
    """The reader wants to know of each batch whether it was looked into: see ``CHECKED`` and ``MALFORMED``."""


class ScanAnswer(Struct, frozen=True):
    """The body begins with ``runs`` runs, packed, and ``checksum`` is their CRC32C. What follows are Arrow record
    batches, as stored or with the wanted columns only. No other record lies from ``from_glsn`` to ``complete_through``.
    With ``path``, they are in that file instead, as stored, in the ``bytes`` from ``start`` on; nobody has checked
    them."""

    runs: int
    complete_through: GLSN
    checksum: int
    path: str = ""
    start: int = 0
    bytes: int = 0


RUN_COLUMNS: Final = (
    "first_llsn",
    "first_glsn",
    "count",
    "time",
    "time_min",
    "schema",
    "offset",
    "bytes",
    "checksum",
)
"""What is told of each batch that was appended. ``offset`` and ``bytes`` say where the record batch is that begins with
its rows, counted from the end of the runs, and ``checksum`` is its CRC32C; without ``bytes``, its rows are in the same
one as those of the run before. The schema of a fence or declaration, which has no rows, is ``NOTHING``."""


def pack(columns: Sequence[array[int]]) -> bytes:
    """One column after the other, little-endian."""
    if sys.byteorder == "big":
        for column in columns:
            column.byteswap()
    return b"".join(column.tobytes() for column in columns)


def unpack(data: Body, count: int) -> tuple[array[int], ...]:
    """As many columns as were packed."""
    values = array("q")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    each = len(values) // count
    return tuple(values[i * each : (i + 1) * each] for i in range(count))


MEASURE: Method[MeasureArguments, MeasureAnswer] = Method("measure", MeasureArguments, MeasureAnswer)
HEADS: Method[HeadsArguments, HeadsAnswer] = Method("heads", HeadsArguments, HeadsAnswer)
GROUPS: Method[HeadsArguments, GroupsAnswer] = Method("groups", HeadsArguments, GroupsAnswer)
SCAN: Method[ScanArguments, ScanAnswer] = Method("scan", ScanArguments, ScanAnswer)
