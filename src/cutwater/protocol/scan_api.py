"""The methods with which a storage node serves parallel readers of large ranges.

They return how much data lies where, the headers of batches, and the records themselves, with as little work per batch
as possible.
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
"""In a packed head: the value is absent."""

CHECKED: Final = 1 << 40
"""Added to the number of a schema: the batch is valid."""
MALFORMED: Final = 1 << 41
"""Added to the number of a schema: the batch has the right checksum, but invalid content. Its rows are omitted."""

UNKNOWN: Final = LLSN(-1)

POSITIONS_MAX: Final = 8_192
HEADS_MAX: Final = 65_536
RUNS_MAX: Final = 16_384
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The most bytes of a file that one answer of a storage node covers. With the limits above, answers stay small."""


class MeasureArguments(Struct, frozen=True):
    """Asks how much of a stream lies at or below each of these positions, which must not decrease."""

    stream: LogStreamId
    positions: tuple[GLSN, ...]


class MeasureAnswer(Struct, frozen=True):
    """The last LLSN at or below each position, and about how many bytes the entries up to there take.

    LLSNs are exact up to ``complete_through``, or ``UNKNOWN`` if they were forgotten after a trim. Only differences of
    bytes are meaningful.
    """

    llsns: tuple[LLSN, ...]
    bytes: tuple[int, ...]
    complete_through: GLSN


class HeadsArguments(Struct, frozen=True):
    """Asks for the headers of the committed batches with positions from ``from_glsn`` to ``to_glsn``, at most
    ``heads_max``.

    ``with_idle`` also asks for the column ``idle``, which older clients do not know.
    """

    stream: LogStreamId
    from_glsn: GLSN
    to_glsn: GLSN
    heads_max: int = HEADS_MAX
    with_idle: bool = False


class EventTimeBefore(Struct, frozen=True):
    """Event time of the stream before the first of the heads.

    These are the largest event time, the largest declared watermark, and the time of its last commit, trimmed or not;
    None where there was none. ``idle``: its last entry declares idleness.
    """

    time_max: EventTime | None
    declared: EventTime | None
    committed: CutTime | None
    idle: bool = False


class HeadsAnswer(Struct, frozen=True):
    """The body is the packed heads. No others lie at or below ``complete_through``.

    ``with_idle``: the last column is ``idle``.
    """

    before: EventTimeBefore
    complete_through: GLSN
    with_idle: bool = False


COLUMNS: Final = ("first_llsn", "first_glsn", "count", "time", "time_max", "declared")
"""The columns for each batch, as 64-bit integers. ``time`` is that of its cut. Fences and declarations have no
``time_max``. If asked for, ``idle`` follows: 1 if the batch declares idleness, otherwise 0.
"""


class GroupsAnswer(Struct, frozen=True):
    """Answer to ``HeadsArguments`` of ``GROUPS``, which lists what runs have published.

    The body describes each batch that belongs to a group, packed. No others lie at or below ``complete_through``.
    """

    complete_through: GLSN


GROUP_COLUMNS: Final = ("first_glsn", "count", "run", "batch", "rows", "decided")
"""Only the last batch of a group says which group it is, how many ``rows`` all of it has, and which decision made it.
The batches before it have 0 there.
"""


class ScanArguments(Struct, frozen=True):
    """Asks for the committed records of a stream with positions from ``from_glsn`` to ``to_glsn``, as many as fit.

    ``projection`` is as in ``ReadArguments``. ``opens_files``: the reader is on the same machine, and prefers to be
    told where the records are. Then the limit is ``file_bytes_max``, if that is more.
    """

    stream: LogStreamId
    from_glsn: GLSN
    to_glsn: GLSN
    bytes_max: int
    projection: dict[int, Columns] = {}
    opens_files: bool = False
    file_bytes_max: int = 0
    tells_checked: bool = False
    """The reader wants to know of each batch whether it was checked: see ``CHECKED`` and ``MALFORMED``."""


class ScanAnswer(Struct, frozen=True):
    """The body begins with ``runs`` packed runs, and ``checksum`` is their CRC32C. Arrow record batches follow, as
    stored or with the wanted columns only. No other record lies from ``from_glsn`` to ``complete_through``.

    With ``path``, the batches are in that file instead, as stored, in the ``bytes`` bytes from ``start`` on. They were
    not checked.
    """

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
"""The columns for each appended batch. ``offset`` and ``bytes`` locate the record batch that begins with its rows,
counted from the end of the runs, and ``checksum`` is its CRC32C. If ``bytes`` is 0, its rows are in the same record
batch as those of the run before. The schema of a fence or declaration, which has no rows, is ``NOTHING``.
"""


def pack(columns: Sequence[array[int]]) -> bytes:
    """Pack one column after the other, little-endian."""
    if sys.byteorder == "big":
        for column in columns:
            column.byteswap()
    return b"".join(column.tobytes() for column in columns)


def unpack(data: Body, count: int) -> tuple[array[int], ...]:
    """Unpack ``count`` columns."""
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
