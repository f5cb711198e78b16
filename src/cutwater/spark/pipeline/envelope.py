"""Defines what travels between the stages of a pipeline: few large rows, each with some records for one slice, as
Arrow.

A row is (slice key, node, input, data). ``node`` and ``input`` name the operator or sink for which the records wait, by
its order in the program. ``data`` is an Arrow stream with the payload and the reserved column. Three kinds of row are
different. Rows with ``node`` = ``TICK`` carry steps of the clocks. Rows with ``node`` = ``LATE`` have, in place of the
slice key, the number of rows that the operator ``input`` has dropped in this slice so far. Rows with ``node`` =
``LEFT`` have the number of timers that were left when the input ended. The last two kinds are counted and not sent on.
A stage passes on unopened rows that are not for its level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.pipeline.clocks.clock_steps import Steps, Ticks
from cutwater.pipeline.records import Records
from cutwater.pipeline.rows import RESERVED_COLUMN, RowType

TICK: Final = -1
LATE: Final = -2
LEFT: Final = -3
LATE_SENT: Final = -4
COLUMNS: Final = "slice int, node int, input int, data binary"
SCHEMA: Final = pa.schema(
    [
        pa.field("slice", pa.int32()),
        pa.field("node", pa.int32()),
        pa.field("input", pa.int32()),
        pa.field("data", pa.binary()),
    ]
)


BLOB_BYTES_MAX: Final = 16 << 20
"""Bytes of records in one row for Spark, which copies whole rows. A single record may be larger."""


def in_pieces(batch: pa.RecordBatch) -> Iterator[bytes]:
    """Yield a batch as one Arrow stream, or as several if it is large. The receiver sorts the records anyway."""
    pieces = max(1, -(-batch.nbytes // BLOB_BYTES_MAX))
    rows = max(1, -(-batch.num_rows // pieces))
    for first in range(0, batch.num_rows, rows):
        yield packed(batch.slice(first, rows))


def packed(batch: pa.RecordBatch) -> bytes:
    """Return a batch as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def unpacked(data: bytes | pa.Buffer) -> pa.Table:
    with pa.ipc.open_stream(data) as stream:
        return stream.read_all()


def merged_table(parts: Sequence[pa.Table]) -> pa.Table:
    """Merge the records of several parts in the order of their positions. Each part is already in order."""
    filled = [part for part in parts if part.num_rows]
    if len(filled) <= 1:
        return (filled or list(parts))[0]
    table = pa.concat_tables(filled)
    moments, paths = table.column(RESERVED_COLUMN).combine_chunks().flatten()[:2]
    if not paths.buffers()[2]:
        return table.take(pa.array(np.argsort(moments.to_numpy(), kind="stable")))
    by = pa.table({"moment": moments, "path": paths})
    return table.take(pc.sort_indices(by, sort_keys=[("moment", "ascending"), ("path", "ascending")]))


def merged_records(parts: Iterable[bytes], rows: RowType) -> Records:
    return Records.from_arrow(merged_table([unpacked(part) for part in parts]), rows)


class _Clock(Struct, frozen=True, array_like=True):
    """Steps of one clock: its topics, or None for cut time, and arrays of 64-bit integers as bytes. A clock of several
    topics is their minimum."""

    topics: tuple[str, ...] | None
    before: int | None
    moments: bytes
    values: bytes
    firings: int = 0
    """How many timers that are registered while the input ends fire; only set for cut time."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Clock]).decode


def packed_steps(
    watermarks: Mapping[frozenset[str], tuple[int | None, Sequence[int], Sequence[int]]],
    times: tuple[int | None, Sequence[int], Sequence[int]] | None = None,
    firings: int = 0,
) -> bytes:
    """Pack some steps of clocks: value before the range if known, moments, values. ``Ticks`` are merged from many of
    these."""
    clocks = [_packed_clock(tuple(sorted(topics)), *steps) for topics, steps in watermarks.items()]
    if times is not None:
        clocks.append(_packed_clock(None, *times, firings))
    return _encode(clocks)


def _packed_clock(
    topics: tuple[str, ...] | None, before: int | None, moments: Sequence[int], values: Sequence[int], firings: int = 0
) -> _Clock:
    return _Clock(topics, before, np.array(moments, np.int64).tobytes(), np.array(values, np.int64).tobytes(), firings)


def packed_ticks(ticks: Ticks) -> bytes:
    watermarks = {topics: (steps.before, steps.moments, steps.values) for topics, steps in ticks.watermarks.items()}
    return packed_steps(watermarks, (ticks.times.before, ticks.times.moments, ticks.times.values), ticks.firings)


def merged_ticks(parts: Iterable[bytes]) -> Ticks:
    """Merge all steps of a range. Each clock only rises, so of the steps from several parts, only the rising ones
    count."""
    found: dict[tuple[str, ...] | None, list[_Clock]] = {}
    for part in parts:
        for clock in _decode(part):
            found.setdefault(clock.topics, []).append(clock)
    merged = {topics: _merged_steps(clocks) for topics, clocks in found.items()}
    firings = max((clock.firings for clock in found.get(None, ())), default=0)
    times = merged.pop(None, Steps())
    watermarks = {frozenset(topics): steps for topics, steps in merged.items() if topics is not None}
    return Ticks(watermarks, times, firings)


def _merged_steps(clocks: Sequence[_Clock]) -> Steps:
    before = next(clock.before for clock in clocks if clock.before is not None)
    moments = np.concatenate([np.frombuffer(clock.moments, np.int64) for clock in clocks])
    values = np.concatenate([np.frombuffer(clock.values, np.int64) for clock in clocks])
    order = np.lexsort((values, moments))
    moments, values = moments[order], values[order]
    # Several parts may have a step at one moment: the highest value counts.
    is_last = np.append(moments[1:] != moments[:-1], True)[: len(moments)]
    moments, values = moments[is_last], values[is_last]
    highest = np.maximum.accumulate(np.concatenate(([np.int64(before)], values)))
    rises = highest[1:] > highest[:-1]
    return Steps(before, moments[rises].tolist(), values[rises].tolist())
