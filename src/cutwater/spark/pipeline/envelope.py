"""Defines what travels between the stages of a pipeline: few large rows, each with some records for one slice, as
Arrow.

A row is (slice key, node, input, data). ``node`` and ``input`` name the operator or sink for which the records wait, by
its order in the program. ``data`` is an Arrow stream with the payload and the reserved column. Five kinds of row are
different. Rows with ``node`` = ``TICK`` carry steps of the clocks. One row with ``node`` = ``RANGE`` in each
micro-batch tells the sink which range of the log was read. Rows with ``node`` = ``LATE`` or ``LATE_SENT`` have, in
place of the slice key, the number of rows that the operator ``input`` has dropped or sent to ``.late`` in this slice so
far. Rows with ``node`` = ``LEFT`` have the number of timers that were left when the input ended. The last three kinds
are counted and not sent on.
A stage passes on unopened rows that are not for its level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.pipeline.clocks.clock_steps import Steps, Ticks
from cutwater.pipeline.keyed_state.keys import key_bytes, slice_of
from cutwater.pipeline.operators.executor import routed
from cutwater.pipeline.operators.keyed_operator import OperatorSpec
from cutwater.pipeline.plan import Destination
from cutwater.pipeline.position import RECORD, moment
from cutwater.pipeline.records import POSITION, Records
from cutwater.pipeline.rows import RESERVED_COLUMN, RowType
from cutwater.spark.pipeline.program import Program
from cutwater.types import InputRange

if TYPE_CHECKING:
    from numpy.typing import NDArray

TICK: Final = -1
LATE: Final = -2
LEFT: Final = -3
LATE_SENT: Final = -4
RANGE: Final = -5
COLUMNS: Final = "slice int, node int, input int, data binary"
SCHEMA: Final = pa.schema([("slice", pa.int32()), ("node", pa.int32()), ("input", pa.int32()), ("data", pa.binary())])
Envelope = tuple[int, int, int, bytes]
_TEXT: Final = crc32(b"\x03")
_BYTES: Final = crc32(b"\x04")
"""The CRC-32 of the byte with which ``keys.key_bytes`` begins a text, and other bytes."""

BLOB_BYTES_MAX: Final = 16 << 20
"""Bytes of records in one row for Spark, which copies whole rows. A single record may be larger."""


def in_envelopes(key: int, destination: Destination, batch: pa.RecordBatch) -> Iterator[Envelope]:
    """Yield a batch for a slice as one row, or as several if it is large. The receiver sorts the records anyway."""
    pieces = max(1, -(-batch.nbytes // BLOB_BYTES_MAX))
    rows = max(1, -(-batch.num_rows // pieces))
    for first in range(0, batch.num_rows, rows):
        yield key, *destination, packed(batch.slice(first, rows))


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


def merged_records(parts: Iterable[bytes], rows: RowType) -> Records:
    """Merge the records of several parts in the order of their positions. Each part is already in order."""
    return Records.from_arrow(_merged_table([unpacked(part) for part in parts]), rows)


def _merged_table(parts: Sequence[pa.Table]) -> pa.Table:
    filled = [part for part in parts if part.num_rows]
    if len(filled) <= 1:
        return (filled or list(parts))[0]
    table = pa.concat_tables(filled)
    moments, paths = table.column(RESERVED_COLUMN).combine_chunks().flatten()[:2]
    if not paths.buffers()[2]:
        return table.take(pa.array(np.argsort(moments.to_numpy(), kind="stable")))
    by = pa.table({"moment": moments, "path": paths})
    return table.take(pc.sort_indices(by, sort_keys=[("moment", "ascending"), ("path", "ascending")]))


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
    clocks: Iterable[tuple[frozenset[str] | None, int | None, Sequence[int], Sequence[int]]], firings: int = 0
) -> bytes:
    """Pack some steps of clocks: topics, value before the range if known, moments, values. ``Ticks`` are merged from
    many of these."""
    return _encode(
        [
            _Clock(
                None if topics is None else tuple(sorted(topics)),
                before,
                np.array(moments, np.int64).tobytes(),
                np.array(values, np.int64).tobytes(),
                firings if topics is None else 0,
            )
            for topics, before, moments, values in clocks
        ]
    )


def packed_ticks(ticks: Ticks) -> bytes:
    clocks = [*ticks.watermarks.items(), (None, ticks.times)]
    return packed_steps(((topics, own.before, own.moments, own.values) for topics, own in clocks), ticks.firings)


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


def packed_range(read: InputRange) -> bytes:
    return msgspec.msgpack.encode(read)


def unpacked_range(data: bytes | pa.Buffer) -> InputRange:
    return msgspec.msgpack.decode(data, type=InputRange)


# ------------------------------------------------------------------------------------------------------- to the slices


def envelope_batch(rows: Sequence[Envelope]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(SCHEMA)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def envelopes(program: Program, arrived: Mapping[Destination, list[Records]], index: int) -> Iterator[Envelope]:
    """Yield records that wait for later levels, by slice. Records for sinks and for code on Spark stay in slice
    ``index``."""
    plan = program.plan
    for destination, parts in arrived.items():
        records = Records.merged(parts)
        if not len(records):
            continue
        node, number_of_input = destination
        rows = plan.rows_for(destination)
        assert rows is not None, "a run has schemas everywhere"
        if node not in plan.specs:
            yield from in_envelopes(program.keys[index], destination, records.to_arrow(rows))
            continue
        for target, part in enumerate(routed(plan.specs[node], number_of_input, records, program.slices)):
            if len(part):
                yield from in_envelopes(program.keys[target], destination, part.to_arrow(rows))


def positions(glsns: NDArray[np.int64], times_ms: NDArray[np.int64], path: bytes = b"") -> pa.StructArray:
    """Return the reserved column of records that come from a source, all with the same path."""
    size = len(glsns)
    ends = np.arange(size + 1, dtype=np.int32) * np.int32(len(path))
    paths = pa.Array.from_buffers(pa.binary(), size, [None, pa.py_buffer(ends), pa.py_buffer(path * size)])
    moments = pa.array(glsns * moment(1, RECORD))
    return pa.StructArray.from_arrays([moments, paths, pa.array(times_ms)], fields=list(POSITION))


def by_slice(
    batch: pa.RecordBatch, spec: OperatorSpec, index: int, slices: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the records of one input of an operator, by slice, in order."""
    if not batch.num_rows:
        return
    if spec.keys[index] is None and not spec.partitions:
        yield from zip(range(slices), repeat(batch))
        return
    numbers = _slice_numbers(batch, spec, index, slices)
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], np.arange(slices + 1))
    sorted_batch = batch.take(pa.array(order))
    for number in range(slices):
        first, last = int(ends[number]), int(ends[number + 1])
        if last > first:
            yield number, sorted_batch.slice(first, last - first)


def _slice_numbers(batch: pa.RecordBatch, spec: OperatorSpec, index: int, slices: int) -> NDArray[np.int64]:
    if spec.partitions:
        glsns: NDArray[np.int64] = batch.column(RESERVED_COLUMN).field(0).to_numpy() // moment(1, RECORD)
        groups = glsns % spec.partitions
    else:
        groups = _hashes(batch, spec, index).astype(np.int64) % spec.groups
    return slice_of(groups, slices, spec.groups)


def _hashes(batch: pa.RecordBatch, spec: OperatorSpec, index: int) -> NDArray[np.uint32]:
    """Return the CRC-32 of the keys' bytes, as ``keys.key_bytes`` writes them."""
    names = key_columns(spec, index)
    assert names is not None, "only keys that are columns are read without making rows"
    size = batch.num_rows
    if len(names) == 1:
        column = batch.column(names[0])
        if column.null_count == 0 and (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
            start = _TEXT if pa.types.is_string(column.type) else _BYTES
            data = column.cast(pa.binary()).to_pylist()
            return np.fromiter(map(crc32, data, repeat(start)), np.uint32, size)
        keys = column.to_pylist()
    else:
        keys = list(zip(*(batch.column(name).to_pylist() for name in names), strict=True))
    return np.fromiter((crc32(key_bytes(key)) for key in keys), np.uint32, size)


def key_columns(spec: OperatorSpec, index: int) -> tuple[str, ...] | None:
    """Return the columns of a key that needs no function, or None."""
    read_key = spec.keys[index]
    if not isinstance(read_key, attrgetter | itemgetter):
        return None
    return tuple(read_key.__reduce__()[1])
