"""Counts the bytes that the values of a column have when they are read one by one.

Most columns have the bytes that they are stored in. Values of views, runs and dense unions may share bytes: a body of a
few hundred bytes can contain the same text in millions of rows. Columns are never expanded to count them. ``_upto``
computes sums only at the places where values begin or end.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyarrow import types

_VIEWS: Final = {pa.binary_view().id, pa.string_view().id}
_LIST_VIEWS: Final = {pa.list_view(pa.null()).id, pa.large_list_view(pa.null()).id}
_LISTS: Final = {pa.list_(pa.null()).id, pa.large_list(pa.null()).id, pa.map_(pa.int8(), pa.null()).id}
_TEXTS: Final = {pa.binary().id, pa.string().id}
_LARGE_TEXTS: Final = {pa.large_binary().id, pa.large_string().id}
RUNS_VALUES_MAX: Final = 1 << 24
"""Runs are counted value by value. Columns with more values are rejected."""


class TooMany(Exception):
    """A column of runs has more values than can be counted."""


def is_shared(kind: pa.DataType) -> bool:
    """Return whether values of a column of this type may share bytes."""
    kind = stored_type(kind)
    is_one = kind.id in _VIEWS | _LIST_VIEWS or types.is_run_end_encoded(kind)
    is_one = is_one or (types.is_union(kind) and kind.mode == "dense")
    return is_one or any(is_shared(kind.field(i).type) for i in range(kind.num_fields))


def seen_bytes(column: Any) -> float:
    """Return the bytes of a column, which must be valid. Raises ``TooMany``."""
    return float(_upto(column, pa.array([len(column)], pa.int64()))[0].as_py())


def stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the storage type of an extension type; any other type as it is."""
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind


def _upto(values: Any, at: pa.Array) -> pa.Array:
    """Return how many bytes the values before each of these places have, as floats, since there may be very many."""
    while isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    kind = values.type
    if not len(values) or types.is_null(kind):
        return _times(at, 0.0)
    if kind.id in _TEXTS | _LARGE_TEXTS:
        size, buffer = pa.int64() if kind.id in _LARGE_TEXTS else pa.int32(), values.buffers()[1]
        offsets = pa.Array.from_buffers(size, len(values) + 1, [None, buffer], offset=values.offset)
        return _less(pc.take(offsets, at), offsets[0])
    if kind.id in _LISTS:
        places = pc.take(values.offsets, at).cast(pa.int64())
        return _less(_upto(values.values, places), _upto(values.values, values.offsets[:1].cast(pa.int64()))[0])
    if types.is_fixed_size_list(kind):
        inside = values.values.slice(values.offset * kind.list_size)
        return _upto(inside, pc.multiply(at, pa.scalar(kind.list_size, pa.int64())))
    if types.is_struct(kind):
        found = _times(at, 0.0)
        for i in range(kind.num_fields):
            found = pc.add(found, _upto(values.field(i), at))
        return found
    if kind.id in _VIEWS:
        # Each value has sixteen bytes, which begin with its length.
        start, end = 16 * values.offset, 16 * (values.offset + len(values))
        lengths = memoryview(values.buffers()[1])[start:end].cast("i")[::4]
        return _summed(values, pa.array(lengths, pa.int32()), at)
    if kind.id in _LIST_VIEWS:
        starts = values.offsets.cast(pa.int64())
        counts = values.sizes.cast(pa.int64())
        inside = pc.subtract(_upto(values.values, pc.add(starts, counts)), _upto(values.values, starts))
        # A list element counts even if its value takes no bytes.
        return _summed(values, pc.add(inside, counts.cast(pa.float64())), at)
    if types.is_run_end_encoded(kind):
        return _of_runs(values, at)
    if types.is_union(kind):
        return _of_union(values, at)
    return _times(at, kind.bit_width / 8)


def _of_runs(values: Any, at: pa.Array) -> pa.Array:
    ends, sizes = values.run_ends.cast(pa.int64()), _each(values.values)
    if len(at) == 1 and at[0].as_py() == len(values) == ends[-1].as_py() and not values.offset:
        # The whole column, as nearly always: no work per value is needed.
        lengths = pc.subtract(ends, pa.concat_arrays([pa.array([0], pa.int64()), ends[:-1]]))
        total = pc.sum(pc.multiply(lengths.cast(pa.float64()), sizes))
        return pa.array([total.as_py()], pa.float64())
    if len(values) > RUNS_VALUES_MAX:
        raise TooMany(f"one of its columns has {len(values)} values in runs, and at most {RUNS_VALUES_MAX} may be")
    runs = pa.RunEndEncodedArray.from_arrays(values.run_ends, sizes)
    return _summed(None, pc.run_end_decode(runs).slice(values.offset, len(values)), at)


def _of_union(values: Any, at: pa.Array) -> pa.Array:
    kind, codes = values.type, values.type_codes
    sizes = pa.repeat(pa.scalar(0.0), len(values))
    for i, code in enumerate(kind.type_codes):
        inside, is_here = values.field(i), pc.equal(codes, pa.scalar(code, pa.int8()))
        if not len(inside):
            continue
        mine = _each(inside)
        if kind.mode == "dense":
            mine = pc.take(mine, pc.if_else(is_here, values.offsets, pa.scalar(0, pa.int32())))
        sizes = pc.if_else(is_here, mine, sizes)
    return _summed(None, sizes, at)


def _each(values: Any) -> pa.Array:
    """Return the bytes of each value."""
    places = pa.array(range(len(values) + 1), pa.int64())
    sums = _upto(values, places)
    return pc.subtract(sums[1:], sums[:-1])


def _summed(values: Any, sizes: pa.Array, at: pa.Array) -> pa.Array:
    """Return the sums of sizes before these places. Nulls have size 0."""
    sizes = sizes.cast(pa.float64())
    if values is not None and values.null_count:
        sizes = pc.if_else(values.is_valid(), sizes, pa.scalar(0.0))
    sums = pa.concat_arrays([pa.array([0.0]), pc.cumulative_sum(sizes)])
    return pc.take(sums, at)


def _times(at: pa.Array, width: float) -> pa.Array:
    return pc.multiply(at.cast(pa.float64()), pa.scalar(width))


def _less(numbers: pa.Array, start: pa.Scalar) -> pa.Array:
    return pc.subtract(numbers.cast(pa.float64()), start.cast(pa.float64()))
