"""From whatever a caller has to one Arrow record batch of the topic's schema; whatever does not fit is named by column
and row.

Values keep their meaning: an Arrow or pandas column of another type is converted only if no value is changed by it.
Text is stored as UTF-8 where bytes are wanted, and a timestamp column without a time zone counts as UTC; a Python
``datetime`` without one is refused, because it usually means local time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.client.errors import InvalidRecord
from cutwater.client.schemas import HEADERS, KEY_VALUE, TIMESTAMP, TopicSchema, describe
from cutwater.errors import InvalidArgument
from cutwater.storage.projection import no_values

Value = bytes | bytearray | memoryview | str
Time = datetime | int
Headers = Mapping[str, Value]

Records = Any
"""One record or several: bytes, a list of bytes, dicts, an Arrow array, batch or table, a DataFrame of pandas or
Polars."""

_ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)
_PLAIN = (bytes, str, bytearray, memoryview)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIMES = range(-62_135_596_800_000_000, 253_402_300_800_000_000)
"""Microseconds since 1970 that a ``datetime`` can tell."""
SHOWN_MAX = 60
"""Of a value that is wrong, so many characters are shown."""


def to_batch(
    schema: TopicSchema,
    records: Records,
    *,
    key: Value | Sequence[Value | None] | pa.Array | None = None,
    timestamp: Time | Sequence[Time | None] | pa.Array | None = None,
    headers: Headers | Sequence[Headers | None] | pa.Array | None = None,
    now_us: int,
) -> pa.RecordBatch:
    """``now_us`` is the event time of records that have none."""
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


def check_arrow(data: pa.Array | pa.ChunkedArray | pa.RecordBatch | pa.Table) -> None:
    """Refuse what is not what it says it is, such as values that begin where their memory has ended: it could be
    stored, and never be read."""
    try:
        data.validate(full=True)
    except pa.ArrowException as error:
        raise InvalidRecord(
            f"this Arrow data does not hold together: {error}. Make it anew, as by pa.array()"
        ) from None


def time_us(time: Any, name: str = "timestamp", row: int | None = None) -> int:
    """Microseconds since 1970 of what a caller gave as a time."""
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise _no_zone(time, name, row)
        delta = time - _EPOCH
        found = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
        if found not in TIMES:
            raise InvalidRecord(f"{time} is not within the years 1 to 9999 in UTC", column=name, row=row)
        return found
    if isinstance(time, int) and not isinstance(time, bool):
        if time not in TIMES:
            raise InvalidRecord(
                f"{time} µs is no time of the years 1 to 9999: an integer is microseconds since 1970 (of "
                "nanoseconds, take // 1_000). Or give a datetime with a time zone",
                column=name,
                row=row,
            )
        return time
    raise _no_time(time, name, row)


def _no_zone(time: datetime, name: str, row: int | None) -> InvalidRecord:
    return InvalidRecord(
        f"{time} has no time zone: write datetime(..., tzinfo=UTC), or call astimezone()", column=name, row=row
    )


def _no_time(given: Any, name: str, row: int | None, unit: str = "us") -> InvalidRecord:
    units, factor = _UNITS[unit]
    way_out = ""
    if isinstance(given, str):
        way_out = ": parse text with datetime.fromisoformat(...), and see that it has a time zone"
    elif isinstance(given, date):
        way_out = f": write datetime({given.year}, {given.month}, {given.day}, tzinfo=UTC) for its beginning"
    elif isinstance(given, Real) and not isinstance(given, bool):
        way_out = f": write int(seconds{factor}) for seconds, or datetime.fromtimestamp(seconds, UTC)"
    return InvalidRecord(
        f"a time is a datetime with a time zone or an int, {units} since 1970, not {_short(given)}{way_out}",
        column=name,
        row=row,
    )


_UNITS = {
    "s": ("seconds", ""),
    "ms": ("milliseconds", " * 1_000"),
    "us": ("microseconds", " * 1_000_000"),
    "ns": ("nanoseconds", " * 1_000_000_000"),
}
"""Of Arrow → what one is called, and how seconds become it."""


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
        array = _cast(name, found, pa.binary())
    else:
        values = _listed(name, values)
        try:
            array = pa.array(values, pa.binary())
        except _ARROW_ERRORS:
            raise _no_bytes(name, values) from None
    if array.null_count and not nullable:
        raise InvalidRecord("bytes are wanted, not None; an empty value is b''", column=name, row=_first_null(array))
    return array


def _no_bytes(name: str, values: list[Any]) -> InvalidRecord:
    """Which of them Arrow could not take, and what to do about it."""
    for row, value in enumerate(values):
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                return InvalidRecord(f"this text cannot be stored as UTF-8: {error}", column=name, row=row)
        elif value is not None and not isinstance(value, _PLAIN):
            way_out = "a topic of rows needs a schema" if name == "value" else "write str(...).encode()"
            return InvalidRecord(f"bytes or str are wanted, not {_short(value)}; {way_out}", column=name, row=row)
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
        array = _cast("timestamp", found, TIMESTAMP)
        _check_times("timestamp", array)
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
        return _of_length("headers", _cast("headers", found, HEADERS), count)
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
                f"headers are a dict of str to bytes, such as {{'from': b'web'}}, not {_short(one)}",
                column="headers",
                row=row,
            )
    array = pa.array([None if one is None else list(one.items()) for one in rows], HEADERS)
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
    raise InvalidArgument(_WANTED[name].format(_short(values)))


_WANTED = {
    "key": (
        "key= is bytes or str, one for all records, or a list with one for each, not {}: turn it into bytes, such as "
        "with str(...).encode()"
    ),
    "timestamp": (
        "timestamp= is a datetime with a time zone or an int, microseconds since 1970, one for all records, or a list "
        "with one for each, not {}"
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
"""What a caller may give by which name."""


def _short(value: Any) -> str:
    """What was given, in a message."""
    return f"{_cut_off(repr(value))} ({type(value).__name__})"


def _cut_off(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"


# Columns.


def _is_rows_or_frame(records: Any) -> bool:
    if isinstance(records, pa.RecordBatch | pa.Table | Mapping) or _is_frame(records):
        return True
    return isinstance(records, list | tuple) and bool(records) and isinstance(records[0], Mapping)


def _is_frame(records: Any) -> bool:
    return hasattr(records, "columns") and (hasattr(records, "__arrow_c_stream__") or _is_pandas(records))


def _is_pandas(records: Any) -> bool:
    return type(records).__module__.partition(".")[0] == "pandas"


def _arrow_in(column: Any) -> pa.Array | pa.ChunkedArray | None:
    """Arrow data that holds together, also what a pandas series is made of; None if it is anything else."""
    if _is_pandas(column) and str(getattr(column.dtype, "storage", "")).startswith("pyarrow"):
        column = pa.array(column.array)
    elif not isinstance(column, pa.Array | pa.ChunkedArray):
        return None
    check_arrow(column)
    return column


Columns = dict[str, Any]
"""Name → an Arrow column, a pandas series, or a list of Python values."""


def _columns_of(schema: TopicSchema, records: Any) -> tuple[int, Columns]:
    """How many rows there are, and their columns, not yet of the types that the schema demands."""
    if isinstance(records, Mapping | bytes | bytearray | memoryview | str):
        # One record: if it is not a dict, the error below says what the topic wants.
        records = [records]
    if isinstance(records, pa.RecordBatch | pa.Table):
        _check_names(schema, records.schema.names)
        check_arrow(records)
        return records.num_rows, dict(zip(records.schema.names, records.columns, strict=True))
    if _is_pandas(records) and hasattr(records, "columns"):
        names = list(records.columns)
        _check_names(schema, names)
        columns = {name: records[name] for name in names}
        return len(records), {
            name: column if (found := _arrow_in(column)) is None else found for name, column in columns.items()
        }
    if _is_frame(records):
        table = pa.table(records)
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
            array = _converted(field, columns[name])
            _check_times(name, array)
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
                raise InvalidRecord("there is no value, and one is demanded", column=name, row=_first_null(array))
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema.newest)


def _extra_column(name: str, given: Any, count: int, now_us: int) -> pa.Array:
    if name == "key":
        return _optional_binary(name, given, count)
    return _timestamps(given, count, now_us) if name == "timestamp" else _header_maps(given, count)


def _converted(field: pa.Field, column: Any) -> pa.Array:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return _cast(field.name, column, field.type)
    if isinstance(column, list):
        if any(_vague_time(kind, values) is not None for kind, values in _leaves(field.type, column)):
            raise _vague(field, column)
        if _has_fraction(field.type, column):
            row = next(row for row, value in enumerate(column) if _has_fraction(field.type, [value]))
            other = "give a datetime" if pa.types.is_temporal(field.type) else "let the column be double"
            raise InvalidRecord(
                f"{_shown(column, row)} cannot be {field.type} without being changed: round it, or {other}",
                column=field.name,
                row=row,
            )
        return _tried(field, len(column), lambda start, end: pa.array(column[start:end], field.type), column)
    return _tried(
        field,
        len(column),
        lambda start, end: _one_chunk(pa.Array.from_pandas(column.iloc[start:end], type=field.type)),
        column.iloc,
    )


def _check_times(name: str, times: pa.Array) -> None:
    """Refuse what no ``datetime`` or ``timedelta`` can tell: whoever reads records would stop at it, and never get to
    those after it."""
    if not _has_times(times.type) or _untold(times) is None:
        return
    low, high = 0, len(times)
    while high - low > 1:
        middle = (low + high) // 2
        if _untold(times.slice(low, middle - low)) is None:
            low = middle
        else:
            high = middle
    value, kind = _untold(times.slice(low, 1)) or (0, times.type)
    if pa.types.is_duration(kind):
        wanted = "no duration of at most 999,999,999 days: count in that unit, or give a timedelta"
    elif pa.types.is_time(kind):
        wanted = "no time of a day: count from midnight in that unit, or give a time"
    else:
        wanted = "no time of the years 1 to 9999: count from 1970 in that unit, or give a datetime with a time zone"
    raise InvalidRecord(f"{value} as {kind} is {wanted}", column=name, row=low)


@lru_cache(maxsize=256)
def _has_times(kind: pa.DataType) -> bool:
    """Whether there are any in a column of this type that may be too early, too late or too long. Nanoseconds, in 64
    bits, are those of the years 1677 to 2262."""
    if pa.types.is_timestamp(kind):
        return bool(kind.unit != "ns")
    if pa.types.is_duration(kind) or pa.types.is_time(kind):
        return _numbers(kind) is not None
    return pa.types.is_date(kind) or any(_has_times(kind.field(i).type) for i in range(kind.num_fields))


def _numbers(kind: pa.DataType) -> range | None:
    """Which numbers are durations or times of a day; None if all of them are."""
    second = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[kind.unit]
    if pa.types.is_time(kind):
        return range(86_400 * second)
    return range(-999_999_999 * 86_400 * second, 1_000_000_000 * 86_400 * second) if second <= 1_000 else None


def _untold(times: pa.Array) -> tuple[int, pa.DataType] | None:
    """One of them, as a number, that Python cannot tell; a time has a ``datetime`` in its own zone and in UTC."""
    kind = times.type
    if pa.types.is_nested(kind):
        inside = (_untold(part) for part in _inside(times) if _has_times(part.type))
        return next((found for found in inside if found is not None), None)
    if pa.types.is_duration(kind) or pa.types.is_time(kind):
        numbers = _numbers(kind)
        found = pc.min_max(times.view(pa.int32() if kind.bit_width == 32 else pa.int64())).as_py()
        wrong = [one for one in (found["min"], found["max"]) if one is not None and numbers and one not in numbers]
        return (wrong[0], kind) if wrong else None
    found = pc.min_max(times)
    for extreme in (found["min"], found["max"]):
        try:
            time = extreme.as_py()
            if isinstance(time, datetime) and time.tzinfo is not None:
                time.astimezone(UTC)
        except OverflowError:
            return extreme.value, kind
        except LookupError:
            # This machine does not know the zone; others may.
            return _untold(times.view(pa.timestamp(kind.unit, "UTC")))
    return None


def _inside(column: pa.Array) -> list[pa.Array]:
    """What the values of a nested column consist of. Unions and runs are not looked into."""
    if pa.types.is_struct(column.type):
        return list(column.flatten())
    if pa.types.is_map(column.type):
        start, end = column.offsets[0].as_py(), column.offsets[len(column)].as_py()
        return [part.slice(start, end - start) for part in (column.keys, column.items)]
    return [column.flatten()] if hasattr(column, "flatten") else []


def _has_fraction(kind: pa.DataType, values: Sequence[Any]) -> bool:
    """Whether there is a number in the place of a whole one, or of a time, that is neither. Arrow would cut it off."""
    for leaf, given in _leaves(kind, values):
        if not (pa.types.is_integer(leaf) or pa.types.is_temporal(leaf)):
            continue
        # Which types there are is found out quickly, and usually none of them can have a fraction.
        if not any(issubclass(own, Real | Decimal) and not issubclass(own, Integral) for own in set(map(type, given))):
            continue
        if any(isinstance(value, Real | Decimal) and value != value // 1 for value in given):
            return True
    return False


def _vague_time(kind: pa.DataType, values: Sequence[Any]) -> Any:
    """The first that Arrow would take for a time, and that may mean another one; None if there is none."""
    if not pa.types.is_timestamp(kind):
        return None
    if not any(issubclass(own, datetime | str | float) for own in set(map(type, values))):
        return None
    for time in values:
        # Arrow would take a whole number of seconds for one of a smaller unit.
        if isinstance(time, str | float):
            return time
        if isinstance(time, datetime) and time.tzinfo is None and kind.tz is not None:
            return time
    return None


def _vague(field: pa.Field, column: list[Any]) -> InvalidRecord:
    """The error for the first row with such a time."""
    for row, one in enumerate(column):
        for kind, values in _leaves(field.type, [one]):
            time = _vague_time(kind, values)
            if isinstance(time, datetime):
                return _no_zone(time, field.name, row)
            if time is not None:
                return _no_time(time, field.name, row, kind.unit)
    raise AssertionError("no time of this column is vague")


def _leaves(kind: pa.DataType, values: Sequence[Any]) -> Iterator[tuple[pa.DataType, Sequence[Any]]]:
    """The values of a column, with what they consist of if they are nested; what has another form than its type is left
    out, and Arrow will refuse it. Unions are not looked into."""
    if not pa.types.is_nested(kind):
        yield kind, values
    elif pa.types.is_struct(kind):
        rows = [value for value in values if isinstance(value, Mapping)]
        others = [value for value in values if isinstance(value, tuple) and len(value) == kind.num_fields]
        pairs = [pair for value in values if isinstance(value, list) for pair in _pairs(value)]
        for i, field in enumerate(kind):
            members = [row.get(field.name) for row in rows] + [value[i] for value in others]
            yield from _leaves(field.type, members + [value for name, value in pairs if name == field.name])
    elif pa.types.is_map(kind):
        pairs = [pair for value in values for pair in _pairs(value)]
        yield from _leaves(kind.key_type, [key for key, _ in pairs])
        yield from _leaves(kind.item_type, [item for _, item in pairs])
    elif pa.types.is_run_end_encoded(kind):
        yield from _leaves(kind.value_type, values)
    elif not pa.types.is_union(kind):
        lists = [value for value in values if isinstance(value, Iterable) and not isinstance(value, Iterator)]
        yield from _leaves(kind.value_type, [item for value in lists for item in value])


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """Of a dict, or of a list of them."""
    if isinstance(value, Mapping):
        return list(value.items())
    given = value if isinstance(value, list | tuple) else ()
    return [(pair[0], pair[1]) for pair in given if isinstance(pair, list | tuple) and len(pair) == 2]


def _cast(name: str, column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    column = _one_chunk(column)
    if column.type.equals(kind):
        return column
    return _tried(
        pa.field(name, kind), len(column), lambda start, end: column.slice(start, end - start).cast(kind), column
    )


def _one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def _tried(field: pa.Field, count: int, convert: Callable[[int, int], pa.Array], column: Any) -> pa.Array:
    """Convert a whole column; if that fails, find the first row that is to blame."""
    try:
        return convert(0, count)
    except _ARROW_ERRORS as error:
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            try:
                convert(low, middle)
                low = middle
            except _ARROW_ERRORS:
                high = middle
        raise _unfit(field, column, low, error) from error


def _unfit(field: pa.Field, column: Any, row: int, error: Exception) -> InvalidRecord:
    """What is wanted, where Arrow does not say it in words of Python."""
    value, name, kind = column[row], field.name, field.type
    if isinstance(value, pa.Scalar):
        pass
    elif pa.types.is_timestamp(kind) and isinstance(value, str | float | date):
        return _no_time(value, name, row, kind.unit)
    elif pa.types.is_string(kind) and not isinstance(value, str | bytes):
        return InvalidRecord(f"text is wanted, not {_short(value)}: write str(...)", column=name, row=row)
    elif pa.types.is_date(kind) and isinstance(value, str):
        return InvalidRecord(
            f"a date is wanted, not {_short(value)}: write date.fromisoformat(...)", column=name, row=row
        )
    return InvalidRecord(f"{_shown(column, row)} cannot be {kind} without being changed: {error}", column=name, row=row)


def _shown(column: Any, row: int) -> str:
    value = column[row]
    try:
        return _cut_off(repr(value.as_py() if isinstance(value, pa.Scalar) else value))
    except OverflowError:
        # A time far beyond those that Python knows.
        return f"{value.value} ({value.type})"


def _first_null(array: pa.Array) -> int:
    return int(array.is_null().index(True).as_py())


def _empty() -> InvalidArgument:
    return InvalidArgument("there is no record to append: a batch has at least one")
