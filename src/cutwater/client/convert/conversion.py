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
from cutwater.client.convert.schemas import HEADERS, KEY_VALUE, TIMESTAMP, TopicSchema, describe
from cutwater.client.convert.times import Time, time_us
from cutwater.client.convert.value_rule import ARROW_ERRORS, NO_VALUE, check_arrow
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
    if schema.is_typed:
        given = [
            name for name, value in (("key", key), ("timestamp", timestamp), ("headers", headers)) if value is not None
        ]
        if given:
            raise InvalidArgument(
                f"topic {schema.topic!r} has a schema, so {given[0]}= has no place: give {describe(schema.newest)}"
            )
        return _from_columns(schema, _columns_of(schema, records), {})
    extra = {"key": key, "timestamp": timestamp, "headers": headers}
    if isinstance(records, _PLAIN):
        records = [records]
    if _is_rows_or_frame(records):
        return _from_columns(schema, _columns_of(schema, records), extra, now_us)
    values = _binary("value", records)
    return _key_value(values, extra, now_us)


# Key and value.


def _key_value(values: pa.Array, extra: Mapping[str, Any], now_us: int) -> pa.RecordBatch:
    count = len(values)
    if not count:
        raise _empty()
    arrays = [
        _optional_binary("key", extra["key"], count),
        values,
        _timestamps(extra["timestamp"], count, now_us),
        _header_maps(extra["headers"], count),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=KEY_VALUE)


def _binary(name: str, values: Any, *, nullable: bool = False) -> pa.Array:
    if (found := _arrow_in(values)) is not None:
        array = _ARROW.column(name, found, pa.binary())
    else:
        values = _listed(name, values)
        try:
            array = pa.array(values, pa.binary())
        except ARROW_ERRORS:
            raise _no_bytes(name, values) from None
    if array.null_count and not nullable:
        raise InvalidRecord("bytes are wanted, not None; an empty value is b''", column=name, row=_first_null(array))
    return array


def _no_bytes(name: str, values: list[Any]) -> InvalidRecord:
    """Find the value that Arrow refused, and return an error with a way out."""
    for row, value in enumerate(values):
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                return InvalidRecord(f"this text cannot be stored as UTF-8: {error}", column=name, row=row)
        elif value is not None and not isinstance(value, _PLAIN):
            way_out = "a topic of rows needs a schema" if name == "value" else "write str(...).encode()"
            return InvalidRecord(f"bytes or str are wanted, not {short(value)}; {way_out}", column=name, row=row)
    return InvalidRecord("they have too many bytes for one batch: append them in parts", column=name)


def _optional_binary(name: str, given: Any, count: int) -> pa.Array:
    if given is None:
        return pa.nulls(count, pa.binary())
    if isinstance(given, _PLAIN):
        return pa.repeat(_binary(name, [given])[0], count)
    return _of_length(name, _binary(name, given, nullable=True), count)


def _timestamps(given: Any, count: int, now_us: int) -> pa.Array:
    if given is None:
        return pa.repeat(pa.scalar(now_us, TIMESTAMP), count)
    if isinstance(given, datetime | int | str | bytes) or not isinstance(given, Iterable):
        return pa.repeat(pa.scalar(time_us(given), TIMESTAMP), count)
    if (found := _arrow_in(given)) is not None:
        array = _ARROW.column("timestamp", found, TIMESTAMP)
    else:
        times = [
            now_us if time is None else time_us(time, row=row) for row, time in enumerate(_listed("timestamp", given))
        ]
        array = pa.array(times, TIMESTAMP)
    if array.null_count:
        array = array.fill_null(pa.scalar(now_us, TIMESTAMP))
    return _of_length("timestamp", array, count)


def _header_maps(given: Any, count: int) -> pa.Array:
    if given is None:
        return no_values(count, HEADERS)
    if (found := _arrow_in(given)) is not None:
        return _of_length("headers", _ARROW.column("headers", found, HEADERS), count)
    if isinstance(given, Mapping):
        given = [given] * count
    rows = _listed("headers", given)
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
    pairs = [None if one is None else list(one.items()) for one in rows]
    try:
        array = pa.array(pairs, HEADERS)
    except ARROW_ERRORS:
        # This raises an error that names the text that cannot be stored.
        array = PythonConversion().column("headers", pairs, HEADERS)
    return _of_length("headers", array, count)


def _of_length(name: str, array: pa.Array, count: int) -> pa.Array:
    if len(array) != count:
        raise InvalidArgument(
            f"{count} records, but {len(array)} in {name}=: give one for each, or a single one for all"
        )
    return array


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
    return hasattr(type(records), "columns") and (hasattr(records, "__arrow_c_stream__") or _is_pandas(records))


def _is_pandas(records: Any) -> bool:
    return _is_of(records, "pandas")


def _is_of(records: Any, package: str) -> bool:
    """Return whether the class or one of its base classes comes from the package."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(records).__mro__)


def _arrow_in(column: Any) -> pa.Array | pa.ChunkedArray | None:
    """Return validated Arrow data, including the Arrow storage of a pandas series; None for anything else."""
    if _is_pandas(column) and str(getattr(column.dtype, "storage", "")).startswith("pyarrow"):
        column = pa.array(column.array)
    elif not isinstance(column, pa.Array | pa.ChunkedArray):
        return None
    check_arrow(column)
    return column


Columns = dict[str, Any]
"""Name → an Arrow column, a pandas series, or a list of Python values."""


def _columns_of(schema: TopicSchema, records: Any) -> tuple[int, Columns]:
    """Return the number of rows, and their columns, not yet cast to the types of the schema."""
    if isinstance(records, Mapping | bytes | bytearray | memoryview | str):
        # One record. If it is not a dict, the error below says what the topic wants.
        records = [records]
    if isinstance(records, pa.RecordBatch | pa.Table):
        _check_names(schema, records.schema.names)
        check_arrow(records)
        return records.num_rows, dict(zip(records.schema.names, records.columns, strict=True))
    if _is_pandas(records) and hasattr(records, "columns"):
        names = list(records.columns)
        _check_names(schema, names)
        columns = {name: records[name] for name in names} | _index_columns(schema, records)
        return len(records), {
            name: column if (found := _arrow_in(column)) is None else found for name, column in columns.items()
        }
    if _is_frame(records):
        if _is_of(records, "polars"):
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


def _from_columns(
    schema: TopicSchema, given: tuple[int, Columns], extra: Mapping[str, Any], now_us: int = 0
) -> pa.RecordBatch:
    count, columns = given
    if not count:
        raise _empty()
    arrays = []
    for field in schema.newest:
        name = field.name
        if extra.get(name) is not None:
            if name in columns:
                raise InvalidArgument(f"{name}= was given, and the records have a column {name!r} too: leave one out")
            columns[name] = _extra_column(name, extra[name], count, now_us)
        if name in columns:
            array = _ARROW.column(name, _arrow_column(field, columns[name]), field.type)
        elif not schema.is_typed and name == "timestamp":
            array = _timestamps(None, count, now_us)
        elif field.nullable:
            array = no_values(count, field.type)
        else:
            raise InvalidRecord(
                f"it is missing, and topic {schema.topic!r} demands it: {describe(schema.newest)}", column=name
            )
        if array.null_count and (not field.nullable or name == schema.event_time):
            if not schema.is_typed and name == "timestamp":
                array = array.fill_null(pa.scalar(now_us, TIMESTAMP))
            else:
                raise InvalidRecord(NO_VALUE, column=name, row=_first_null(array))
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema.newest)


def _extra_column(name: str, given: Any, count: int, now_us: int) -> pa.Array:
    if name == "key":
        return _optional_binary(name, given, count)
    return _timestamps(given, count, now_us) if name == "timestamp" else _header_maps(given, count)


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


def _first_null(array: pa.Array) -> int:
    return int(array.is_null().index(True).as_py())


def _empty() -> InvalidArgument:
    return InvalidArgument("there is no record to append: a batch has at least one")
