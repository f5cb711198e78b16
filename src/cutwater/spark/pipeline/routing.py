"""Sends records on to the slices of later levels, and to sinks: as rows, or as whole columns where possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.pipeline.keyed_state.keys import key_bytes
from cutwater.pipeline.operators.executor import routed
from cutwater.pipeline.operators.keyed_operator import OperatorSpec
from cutwater.pipeline.plan import Destination
from cutwater.pipeline.position import RECORD, moment
from cutwater.pipeline.records import POSITION, Records
from cutwater.pipeline.rows import RESERVED_COLUMN
from cutwater.spark.pipeline.envelope import in_pieces
from cutwater.spark.pipeline.program import Program

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TEXT = crc32(b"\x03")
_BYTES = crc32(b"\x04")


def envelopes(
    program: Program, arrived: Mapping[Destination, list[Records]], index: int
) -> Iterator[tuple[int, int, int, bytes]]:
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
            for data in in_pieces(records.to_arrow(rows)):
                yield program.keys[index], node, number_of_input, data
            continue
        for target, part in enumerate(routed(plan.specs[node], number_of_input, records, program.slices)):
            for data in in_pieces(part.to_arrow(rows)) if len(part) else ():
                yield program.keys[target], node, number_of_input, data


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
        glsns = batch.column(RESERVED_COLUMN).field(0).to_numpy() // moment(1, RECORD)
        groups = glsns % spec.partitions
    else:
        groups = _hashes(batch, spec, index).astype(np.int64) % spec.groups
    numbers: NDArray[np.int64] = groups * slices // spec.groups
    return numbers


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
