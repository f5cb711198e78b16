"""Converts the records of a caller to one Arrow record batch of the topic's schema. Errors name the column and the row.

Values keep their meaning: an Arrow or pandas column of another type is converted only if that changes no value. Text is
stored as UTF-8 where bytes are wanted, and a timestamp column without a time zone counts as UTC. A Python ``datetime``
without a time zone is refused, because it usually means local time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.convert.arrow_cast import ArrowConversion
from cutwater.client.convert.error_text import short
from cutwater.client.convert.python_to_arrow import PythonConversion
from cutwater.client.convert.schemas import TIMESTAMP, TopicSchema, describe
from cutwater.client.convert.times import Time, is_missing, time_us
from cutwater.client.convert.value_rule import ARROW_ERRORS, check_arrow
from cutwater.client.errors import InvalidRecord
from cutwater.errors import InvalidArgument
from cutwater.format.projection import no_values

Value = bytes | bytearray | memoryview | str
Headers = Mapping[str, Value]

Records = Any
"""One record or several: bytes, a list of bytes, dicts, an Arrow array, batch or table, a DataFrame of pandas or
Polars."""

_PLAIN = (bytes, str, bytearray, memoryview)
_ARROW = ArrowConversion()


def to_batch(
    schema: TopicSchema,
    records: Records,
    *,
    key: Value | Sequence[Value | None] | pa.Array | None = None,
    timestamp: Time | Sequence[Time | None] | pa.Array | None = None,
    headers: Headers | Sequence[Headers | None] | pa.Array | None = None,
    now_us: int,
) -> pa.RecordBatch:
    """Convert records to a batch. ``now_us`` is the event time of records that have none."""
    extra = {"key": key, "timestamp": timestamp, "headers": headers}
    extra = {name: given for name, given in extra.items() if given is not None}
    if schema.is_typed:
        if extra:
            raise InvalidArgument(_no_place(schema, next(iter(extra))))
        return _from_columns(schema, _columns_of(schema, records), now_us)
    if isinstance(records, _PLAIN):
        records = [records]
    if _is_rows_or_frame(records):
        count, columns = _columns_of(schema, records)
    else:
        values = _arrow_or_list("value", records)
        count, columns = len(values), {"value": values}
    for name, given in extra.items():
        if name in columns:
            raise InvalidArgument(f"{name}= was given, and the records have a column {name!r} too: leave one out")
        columns[name] = _extra_column(name, given, count)
    return _from_columns(schema, (count, columns), now_us)


def _no_place(schema: TopicSchema, name: str) -> str:
    if name != "timestamp":
        way_out = "give it in a column of the records"
    elif schema.event_time:
        way_out = f"event time is the column {schema.event_time!r} of the records"
    else:
        way_out = "the topic has no column of event time, so the time of the append counts"
    return (
        f"topic {schema.topic!r} has a schema, so {name}= has no place: {way_out}; there are {describe(schema.newest)}"
    )


# Key and value.


def _extra_column(name: str, given: Any, count: int) -> pa.Scalar | pa.Array | pa.ChunkedArray | list[Any]:
    """Return what was given besides the records: one for each of them, or a scalar for all."""
    if name == "key" and isinstance(given, _PLAIN):
        return PythonConversion().column(name, [given], pa.binary())[0]
    if name == "timestamp" and (isinstance(given, datetime | str | bytes) or not isinstance(given, Iterable)):
        return pa.scalar(time_us(given), TIMESTAMP)
    if name == "headers" and isinstance(given, Mapping):
        given = [given] * count
    found = _arrow_or_list(name, given)
    if len(found) != count:
        raise InvalidArgument(
            f"{count} records, but {len(found)} in {name}=: give one for each, or a single one for all"
        )
    if name == "timestamp" and isinstance(found, list):
        for row, time in enumerate(found):
            # A column would take it as null, and so as a record without a time.
            if time is not None and is_missing(time):
                raise InvalidRecord(f"{time} is no time: write None, or leave it out", column=name, row=row)
    return _header_pairs(found) if name == "headers" and isinstance(found, list) else found


def _header_pairs(rows: list[Any]) -> list[Any]:
    for row, one in enumerate(rows):
        is_good = one is None or (
            isinstance(one, Mapping)
            and all(isinstance(name, str) and isinstance(value, _PLAIN) for name, value in one.items())
        )
        if not is_good:
            raise InvalidRecord(
                f"headers are a dict of str to bytes, such as {{'from': b'web'}}, not {short(one)}",
                column="headers",
                row=row,
            )
    return [None if one is None else list(one.items()) for one in rows]


def _arrow_or_list(name: str, values: Any) -> pa.Array | pa.ChunkedArray | list[Any]:
    return _listed(name, values) if (found := _arrow_in(values)) is None else found


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, list):
        return values
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        return list(values)
    raise InvalidArgument(_WANTED[name].format(short(values)))


_WANTED = {
    "key": (
        "key= is bytes or str, one for all records, or a list with one for each, not {}: turn it into bytes, such as "
        "with str(...).encode()"
    ),
    "timestamp": (
        "timestamp= is a datetime with a time zone, one for all records, or a list with one for each, not {}"
    ),
    "headers": (
        "headers= is a dict of str to bytes, such as {{'from': b'web'}}, one for all records, or a list with one for "
        "each, not {}"
    ),
    "value": (
        "{} cannot be appended. Give bytes, a list of bytes, dicts, an Arrow array, batch or table, or a DataFrame of "
        "pandas or Polars"
    ),
}
"""Error texts by argument name: what a caller may give."""


# Columns.


def _is_rows_or_frame(records: Any) -> bool:
    if isinstance(records, pa.RecordBatch | pa.Table | Mapping) or _is_frame(records):
        return True
    return isinstance(records, list | tuple) and bool(records) and isinstance(records[0], Mapping)


def _is_frame(records: Any) -> bool:
    # Asks the class, because a lazy frame would start computing to return its columns.
    return hasattr(type(records), "columns") and (hasattr(records, "__arrow_c_stream__") or _is_of("pandas", records))


def _is_of(package: str, records: Any) -> bool:
    """Return whether the class or one of its base classes comes from the package."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(records).__mro__)


def _arrow_in(column: Any) -> pa.Array | pa.ChunkedArray | None:
    """Return validated Arrow data, including the Arrow storage of a pandas series; None for anything else."""
    if _is_of("pandas", column) and str(getattr(column.dtype, "storage", "")).startswith("pyarrow"):
        column = pa.array(column.array)
    elif not isinstance(column, pa.Array | pa.ChunkedArray):
        return None
    check_arrow(column)
    return column


Columns = dict[str, Any]
"""Name → an Arrow column, a pandas series, a list of Python values, or a checked scalar for all rows."""


def _columns_of(schema: TopicSchema, records: Any) -> tuple[int, Columns]:
    """Return the number of rows, and their columns, not yet cast to the types of the schema."""
    if isinstance(records, Mapping | bytes | bytearray | memoryview | str):
        # One record. If it is not a dict, the error below says what the topic wants.
        records = [records]
    if isinstance(records, pa.RecordBatch | pa.Table):
        _check_names(schema, records.schema.names)
        check_arrow(records)
        return records.num_rows, dict(zip(records.schema.names, records.columns, strict=True))
    if _is_of("pandas", records) and hasattr(records, "columns"):
        names = list(records.columns)
        _check_names(schema, names)
        columns = {name: records[name] for name in names} | _index_columns(schema, records)
        return len(records), {
            name: column if (found := _arrow_in(column)) is None else found for name, column in columns.items()
        }
    if _is_frame(records):
        if _is_of("polars", records):
            for name, kind in records.schema.items():
                if str(kind) == "Object":
                    # Polars would export the memory addresses of the objects.
                    raise InvalidRecord("its type is Object, of which there are no values to store", column=name)
        try:
            table = pa.table(records)
        except ARROW_ERRORS as error:
            raise InvalidRecord(
                f"this {type(records).__name__} has a column that Arrow does not know: {error}"
            ) from error
        return _columns_of(schema, table)
    rows = _listed("value", records)
    known = frozenset(schema.newest.names)
    for row, one in enumerate(rows):
        if not isinstance(one, Mapping):
            raise InvalidRecord(
                f"a dict with the columns of topic {schema.topic!r} is wanted, not {type(one).__name__}: "
                f"{describe(schema.newest)}",
                row=row,
            )
        if not known.issuperset(one):
            unknown = next(name for name in one if name not in known)
            raise InvalidRecord(
                f"topic {schema.topic!r} has no such column: {describe(schema.newest)}", column=str(unknown), row=row
            )
    present = {name for one in rows for name in one}
    return len(rows), {name: [one.get(name) for one in rows] for name in schema.newest.names if name in present}


def _index_columns(schema: TopicSchema, frame: Any) -> Columns:
    """Return the named index levels of a pandas frame, as after ``groupby``."""
    found = {}
    for level, name in enumerate(frame.index.names):
        if name is None or name in frame.columns:
            continue
        if name not in schema.newest.names:
            raise InvalidRecord(
                f"it is the index of this frame, and topic {schema.topic!r} has no such column: drop it with "
                f"reset_index(drop=True), or rename it: {describe(schema.newest)}",
                column=str(name),
            )
        if name in found:
            raise InvalidRecord("it is there twice, in the index of this frame", column=str(name))
        found[name] = frame.index.get_level_values(level).to_series()
    return found


def _check_names(schema: TopicSchema, names: Sequence[Any]) -> None:
    for name in names:
        if name not in schema.newest.names:
            raise InvalidRecord(
                f"topic {schema.topic!r} has no such column; drop it, or add it to the schema first\n"
                f"  topic: {describe(schema.newest)}\n  given: {', '.join(map(str, names))}",
                column=str(name),
            )
        if list(names).count(name) > 1:
            raise InvalidRecord("it is there twice", column=str(name))


def _from_columns(schema: TopicSchema, given: tuple[int, Columns], now_us: int) -> pa.RecordBatch:
    count, columns = given
    if not count:
        raise InvalidArgument("there is no record to append: a batch has at least one")
    arrays = []
    for field in schema.newest:
        name = field.name
        # Event time of key and value is optional for callers.
        default = pa.scalar(now_us, TIMESTAMP) if name == "timestamp" and not schema.is_typed else None
        column = columns.get(name, default)
        if isinstance(column, pa.Scalar):
            array = pa.repeat(column, count)
        elif column is not None:
            array = _ARROW.column(name, _arrow_column(field, column), field.type)
        elif field.nullable:
            array = no_values(count, field.type)
        else:
            raise InvalidRecord(
                f"it is missing, and topic {schema.topic!r} demands it: {describe(schema.newest)}", column=name
            )
        if array.null_count and default is not None:
            array = array.fill_null(default)
        elif array.null_count and (not field.nullable or name == schema.event_time):
            if not schema.is_typed:
                text = "bytes are wanted, not None; an empty value is b''"
            elif name == schema.event_time:
                text = f"this is the event time of topic {schema.topic!r}: give every row a time, this one has none"
            else:
                text = "the column may not be null: give every row a value"
            raise InvalidRecord(text, column=name, row=array.is_null().index(True).as_py())
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema.newest)


def _arrow_column(field: pa.Field, column: Any) -> pa.Array | pa.ChunkedArray:
    """Return a column as Arrow data. Values of Python have the type of the field then; other columns keep theirs."""
    name, kind = field.name, field.type
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    if isinstance(column, list):
        return PythonConversion().column(name, column, kind)
    # NumPy numbers are not accepted as text, as Python numbers are not.
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if column.dtype == object or (is_text and column.dtype.kind in "biufmM"):
        return PythonConversion(is_pandas=True).column(name, column.tolist(), kind)
    try:
        found = pa.Array.from_pandas(column)
    except ARROW_ERRORS as error:
        raise InvalidRecord(f"a pandas column of {column.dtype} cannot be {kind}: {error}", column=name) from error
    if isinstance(found.type, pa.BaseExtensionType) and not (pa.types.is_integer(kind) or pa.types.is_struct(kind)):
        # Arrow stores pandas periods as numbers whose meaning only pandas knows.
        return PythonConversion(is_pandas=True).column(name, column.tolist(), kind)
    return found
