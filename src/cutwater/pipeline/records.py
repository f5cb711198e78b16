"""Holds records in a pipeline: rows with their positions and event times, in lists or as Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import isnan
from typing import Any, Final, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument
from cutwater.pipeline.context import KeyEntry
from cutwater.pipeline.position import number
from cutwater.pipeline.rows import RESERVED_COLUMN, Row, RowType
from cutwater.pipeline.values import check_times, converter, decoded, encoded

Entries: TypeAlias = Iterable[KeyEntry | None]
"""The entry of each record's key; None if it is looked up when the record is processed."""

Arrival: TypeAlias = tuple[int, int, bytes, int, Row, KeyEntry | None]
"""Number of the input, moment, path, event time, row, entry of its key."""

POSITION: Final = pa.struct(
    [pa.field("moment", pa.int64()), pa.field("path", pa.binary()), pa.field("time", pa.int64())]
)


@dataclass(slots=True, eq=False)
class Records:
    """Records of one stream, in the order of their positions. Moments, paths, times and rows are parallel lists."""

    moments: list[int] = field(default_factory=list)
    paths: list[bytes] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.moments)

    def append(self, when: int, path: bytes, time: int, row: Row) -> None:
        self.moments.append(when)
        self.paths.append(path)
        self.times.append(time)
        self.rows.append(row)

    def branch(self, index: int) -> Records:
        """Return the same records for the ``index``-th of several consumers."""
        part = number(index)
        return Records(self.moments, [path + part for path in self.paths], self.times, self.rows)

    def pick(self, indexes: Sequence[int]) -> Records:
        return Records(
            [self.moments[i] for i in indexes],
            [self.paths[i] for i in indexes],
            [self.times[i] for i in indexes],
            [self.rows[i] for i in indexes],
        )

    @classmethod
    def merged(cls, parts: Iterable[Records]) -> Records:
        """Merge the records of several streams or slices in the order of their positions."""
        filled = [part for part in parts if len(part)]
        if len(filled) <= 1:
            return filled[0] if filled else cls()
        whole = cls()
        for part in filled:
            whole.moments += part.moments
            whole.paths += part.paths
            whole.times += part.times
            whole.rows += part.rows
        return whole.in_order()

    def in_order(self) -> Records:
        places = list(zip(self.moments, self.paths, strict=True))
        return self.pick(sorted(range(len(places)), key=places.__getitem__))

    def by_content(self) -> Records:
        """Sort records of which several have the same position, in an order that depends only on their rows."""
        places = list(zip(self.moments, self.paths, map(_content, self.rows), strict=True))
        return self.pick(sorted(range(len(places)), key=places.__getitem__))

    def numbered(self) -> Records:
        """Number records that have the same position, in their current order, so that they are distinct."""
        counts: dict[tuple[int, bytes], int] = {}
        paths = []
        for place in zip(self.moments, self.paths, strict=True):
            counts[place] = counts.get(place, -1) + 1
            paths.append(place[1] + number(counts[place]))
        return Records(self.moments, paths, self.times, self.rows).in_order()

    def to_arrow(self, rows: RowType) -> pa.RecordBatch:
        """Return the payload columns, and the reserved column with positions and times."""
        position = pa.StructArray.from_arrays(
            [pa.array(self.moments, pa.int64()), pa.array(self.paths, pa.binary()), pa.array(self.times, pa.int64())],
            fields=list(POSITION),
        )
        names = [*rows.names, RESERVED_COLUMN]
        return pa.RecordBatch.from_arrays([*rows.to_arrays(self.rows), position], names=names)

    @classmethod
    def returned(cls, made: pa.RecordBatch | pa.Table, rows: RowType) -> Records:
        """Convert the result of a function of whole columns to records of the declared types."""
        arrays = []
        for name, kind in zip(rows.names, rows.schema.types, strict=True):
            try:
                arrays.append(_in_type(made.column(name), kind))
            except InvalidArgument as error:
                raise InvalidArgument(f"the column {name!r}: {error.message}") from None
        table = pa.Table.from_arrays([*arrays, made.column(RESERVED_COLUMN)], names=[*rows.names, RESERVED_COLUMN])
        return cls.from_arrow(table, rows).numbered()

    @classmethod
    def from_arrow(cls, batch: pa.RecordBatch | pa.Table, rows: RowType) -> Records:
        position = batch.column(RESERVED_COLUMN)
        if isinstance(position, pa.ChunkedArray):
            position = position.combine_chunks()
        moments, paths, times = (column.to_pylist() for column in position.flatten())
        payload = [batch.column(name) for name in rows.names]
        return cls(moments, paths, times, rows.from_columns(payload))


def _content(row: Row) -> tuple[Any, ...]:
    """Return a sort key for rows of one type: nulls first, then NaN, then values; nested values compare as text."""
    return tuple(_comparable(value) for value in row)


def _comparable(value: Any) -> tuple[Any, ...]:
    if value is None or (isinstance(value, float) and isnan(value)):
        return (0,) if value is None else (1,)
    return 2, repr(value) if isinstance(value, dict | list | tuple) else value


def arrivals(inputs: Sequence[Records], entries: Sequence[Entries]) -> Iterable[Arrival]:
    """Return the records of an operator's inputs in processing order: by position, then by input."""
    streams: list[Iterable[Arrival]] = [
        zip(repeat(index), part.moments, part.paths, part.times, part.rows, own)
        for index, (part, own) in enumerate(zip(inputs, entries, strict=True))
        if len(part)
    ]
    if len(streams) <= 1:
        return streams[0] if streams else ()
    return sorted((arrival for stream in streams for arrival in stream), key=_place)


def missing_columns(made: pa.RecordBatch | pa.Table, rows: RowType) -> list[str]:
    """Return the columns that are missing in the result of a function of whole columns."""
    return sorted({*rows.names, RESERVED_COLUMN} - set(made.schema.names))


def _in_type(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Convert a column to this type. Times may lose digits that the type lacks."""
    check_times(column.type, kind)
    try:
        return column.cast(options=pc.CastOptions(kind, allow_time_truncate=True))
    except pa.ArrowException:
        # Arrow checks what the column's type could hold, such as 19 digits for a decimal of 10. The values decide.
        values, check = decoded(column), converter(kind)
        for value in values:
            check(value)
        return encoded(values, kind)


def _place(arrival: Arrival) -> tuple[Any, ...]:
    return arrival[1], arrival[2], arrival[0]
