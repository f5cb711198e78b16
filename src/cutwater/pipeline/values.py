"""Converts values of a declared type: what a user's function may write, and the one Python form that each value then
has.

Payload and state travel as Arrow between workers and stay in memory within one. Both must look the same to a function.
So a value is converted, as soon as a function writes it, to the form that Arrow would return: an integer in a
``double`` becomes a float, a ``datetime`` gets the zone UTC, a ``float`` loses the digits that it cannot hold. A value
that does not fit is refused at once, while the call that produced it can still be undone. So is an integer in a
``timestamp``: pipelines count milliseconds and appends count microseconds, and no check can tell them apart.
"""

from __future__ import annotations

import decimal
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from typing import Any, Final, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.durations import ARROW_TIMES, integer_is_no_time
from cutwater.errors import InvalidArgument
from cutwater.schema_text import shown

Converter: TypeAlias = Callable[[Any], Any]

UTC: Final = timezone.utc  # noqa: UP017 - the type that Python prints
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LOCAL_EPOCH: Final = datetime(1970, 1, 1)
_MILLISECOND: Final = timedelta(milliseconds=1)
_FLOAT32: Final = struct.Struct("<f")

TIME_MS_MAX: Final = 4 * 10**15
"""Event times are at most this many milliseconds, some 126,000 years, away from 1970. So they fit into 64-bit integers
in microseconds, with room for additions and subtractions."""


def to_milliseconds(value: Any) -> int:
    """Convert an event time to integer milliseconds, rounded down. Integers are already milliseconds."""
    if type(value) is int:
        if not -TIME_MS_MAX <= value <= TIME_MS_MAX:
            raise InvalidArgument(far_off(value))
        return value
    if isinstance(value, datetime):
        return (value - (EPOCH if value.tzinfo else _LOCAL_EPOCH)) // _MILLISECOND
    raise InvalidArgument(f"an event time is an integer in milliseconds since 1970 or a datetime, not {value!r}")


def far_off(time_ms: int) -> str:
    """Describe what is wrong with an event time that is too large."""
    return (
        f"the event time {time_ms} is too far off: an integer is milliseconds since 1970, from {-TIME_MS_MAX} to "
        f"{TIME_MS_MAX}; are these microseconds or nanoseconds?"
    )


def to_datetime(time_ms: int) -> datetime:
    """Convert milliseconds since 1970, such as ``ctx.watermark``, to a ``datetime`` in UTC, for ``timestamp``s."""
    try:
        return EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        raise InvalidArgument(
            f"{time_ms} ms since 1970 is no time of the years 1 to 9999. A watermark is beyond these years before the "
            "first event time is known, and at the end of the input: compare ctx.watermark with a time in milliseconds "
            "first, or use ctx.event_time"
        ) from None


def from_milliseconds(kind: pa.DataType | None) -> Converter:
    """Return the function that converts a time in milliseconds to a value of this type."""
    if kind is None or not pa.types.is_timestamp(kind):
        return _as_is
    return to_datetime if kind.tz else lambda time_ms: to_datetime(time_ms).replace(tzinfo=None)


def check_times(given: pa.DataType, kind: pa.DataType) -> None:
    """Refuse a column of integers for one of times, also inside nested types: Arrow would take the integers as counts
    of the unit that the column of times happens to have."""
    if pa.types.is_timestamp(kind):
        if pa.types.is_integer(given):
            raise _integer_time(f"a {shown(given)}", kind, ARROW_TIMES)
    elif pa.types.is_struct(kind) and pa.types.is_struct(given):
        for field in kind:
            if (index := given.get_field_index(field.name)) >= 0:
                check_times(given.field(index).type, field.type)
    elif pa.types.is_map(kind) and pa.types.is_map(given):
        check_times(given.key_type, kind.key_type)
        check_times(given.item_type, kind.item_type)
    elif pa.types.is_nested(kind) and hasattr(kind, "value_type") and hasattr(given, "value_type"):
        check_times(given.value_type, kind.value_type)


def converter(kind: pa.DataType) -> Converter:
    """Return a function that converts a value to the one form of its type, or refuses it. Null stays null."""
    for holds, make in _CONVERTERS:
        if holds(kind):
            return make(kind)
    raise InvalidArgument(f"values of type {kind} are not supported: use one of Spark SQL's types")


def copier(kind: pa.DataType) -> Converter | None:
    """Return a function that copies a value so deeply that the copy may be changed, or None if values are immutable."""
    return _rebuilder(kind, dict) if pa.types.is_nested(kind) else None


def decoder(kind: pa.DataType) -> Converter | None:
    """Return a function that converts a value from Arrow to its one form, or None: only maps and instants differ."""
    changes = _contains(kind, lambda own: pa.types.is_map(own) or pa.types.is_timestamp(own))
    return converter(kind) if changes else None


def encoder(kind: pa.DataType) -> Converter | None:
    """Return a function that converts a value to the form that Arrow takes, or None: only maps differ."""
    return _rebuilder(kind, list) if _contains(kind, pa.types.is_map) else None


def _contains(kind: pa.DataType, wanted: Callable[[pa.DataType], bool]) -> bool:
    if pa.types.is_struct(kind):
        return any(_contains(field.type, wanted) for field in kind)
    return wanted(kind) or (pa.types.is_list(kind) and _contains(kind.value_type, wanted))


def _rebuilder(kind: pa.DataType, make_map: type[dict[Any, Any]] | type[list[Any]]) -> Converter:
    """Return a function that makes all containers in a value anew, and maps as ``make_map`` makes them of pairs."""
    if pa.types.is_map(kind):
        of_item = _rebuilder(kind.item_type, make_map)
        return lambda value: None if value is None else make_map([(key, of_item(item)) for key, item in value.items()])
    if pa.types.is_list(kind):
        of_value = _rebuilder(kind.value_type, make_map)
        return lambda value: None if value is None else [of_value(item) for item in value]
    if pa.types.is_struct(kind):
        fields = {field.name: _rebuilder(field.type, make_map) for field in kind}
        return lambda value: None if value is None else {name: fields[name](item) for name, item in value.items()}
    return _as_is


def encoded(values: Iterable[Any], kind: pa.DataType) -> pa.Array:
    """Convert values in their one form to an Arrow array."""
    encode = encoder(kind)
    return pa.array(list(values) if encode is None else list(map(encode, values)), kind)


def decoded(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return the values of an Arrow array in their one form."""
    decode = decoder(column.type)
    return column.to_pylist() if decode is None else list(map(decode, column.to_pylist()))


def _as_is(value: Any) -> Any:
    return value


def _refused(value: Any, kind: pa.DataType, hint: str = "") -> InvalidArgument:
    return InvalidArgument(f"{value!r} is not a value of type {shown(kind)}{hint and ': ' + hint}")


def _integer_time(what: object, kind: pa.DataType, other_way: str = "another datetime") -> InvalidArgument:
    ways = f"ctx.event_time or to_datetime(ms) of cutwater.pipeline, or {other_way}"
    without = "" if kind.tz else f"; a {shown(kind)} has no zone, so add .replace(tzinfo=None)"
    return InvalidArgument(integer_is_no_time(what, ways) + without)


def _plain(
    exact: type, also: type | tuple[type, ...], make: Converter, hint: str
) -> Callable[[pa.DataType], Converter]:
    """Return what makes converters to one Python type: values of ``exact`` stay, values of ``also`` are converted."""

    def of_kind(kind: pa.DataType) -> Converter:
        def convert(value: Any) -> Any:
            if type(value) is exact or value is None:
                return value
            if isinstance(value, also) and not isinstance(value, bool | datetime):
                return make(value)
            raise _refused(value, kind, hint)

        return convert

    return of_kind


_text: Final = _plain(str, str, str, "decode bytes and format other values before")
_bytes: Final = _plain(bytes, (bytes, bytearray, memoryview), bytes, "encode text before")
_boolean: Final = _plain(bool, (), bool, "")
_double: Final = _plain(float, (int, float), float, "give an integer or a float")
_date: Final = _plain(date, date, _as_is, "give a datetime.date")


def _integer(kind: pa.DataType) -> Converter:
    signed = pa.types.is_signed_integer(kind)
    low = -(1 << (kind.bit_width - 1)) if signed else 0
    high = (1 << (kind.bit_width - signed)) - 1

    def convert(value: Any) -> Any:
        if value is None or (type(value) is int and low <= value <= high):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return int(value)
        raise _refused(value, kind, f"give an integer from {low} to {high}")

    return convert


def _float(kind: pa.DataType) -> Converter:
    to_double = _double(kind)

    def convert(value: Any) -> Any:
        if value is None:
            return None
        try:
            return _FLOAT32.unpack(_FLOAT32.pack(to_double(value)))[0]
        except OverflowError:
            raise _refused(value, kind, "too large; use double") from None

    return convert


def _decimal(kind: pa.DataType) -> Converter:
    step = decimal.Decimal(1).scaleb(-kind.scale)
    context = decimal.Context(prec=kind.precision, rounding=decimal.ROUND_HALF_UP)

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, int | decimal.Decimal) or isinstance(value, bool):
            raise _refused(value, kind, "give a Decimal or an integer")
        try:
            return decimal.Decimal(value).quantize(step, context=context)
        except decimal.InvalidOperation:
            raise _refused(value, kind, f"it has more than {kind.precision} digits") from None

    return convert


def _timestamp(kind: pa.DataType) -> Converter:
    zone = UTC if kind.tz else None

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, datetime):
            if (value.tzinfo is None) == (zone is None):
                return value if value.tzinfo is zone else value.astimezone(zone)
            raise _refused(value, kind, "it must have a time zone" if zone else "it must not have a time zone")
        if isinstance(value, int):
            raise _integer_time(value, kind)
        raise _refused(value, kind, "give a datetime")

    return convert


def _list(kind: pa.DataType) -> Converter:
    of_value = converter(kind.value_type)

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
            raise _refused(value, kind, "give a list")
        return [of_value(item) for item in value]

    return convert


def _map(kind: pa.DataType) -> Converter:
    of_key, of_item = converter(kind.key_type), converter(kind.item_type)

    def convert(value: Any) -> Any:
        if value is None:
            return None
        pairs = value.items() if isinstance(value, Mapping) else value
        if isinstance(pairs, str | bytes):
            raise _refused(value, kind, "give a dict")
        made = {of_key(key): of_item(item) for key, item in pairs}
        if None in made:
            raise _refused(value, kind, "the keys of a map are never null")
        return made

    return convert


def _struct(kind: pa.DataType) -> Converter:
    fields = {field.name: converter(field.type) for field in kind}

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if hasattr(value, "_asdict"):
            value = value._asdict()
        if not isinstance(value, Mapping) or not fields.keys() >= value.keys():
            raise _refused(value, kind, f"give a dict with the fields {', '.join(fields)}")
        return {name: of_field(value.get(name)) for name, of_field in fields.items()}

    return convert


_CONVERTERS: Final[Sequence[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], Converter]]]] = (
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), _text),
    (lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind), _bytes),
    (pa.types.is_boolean, _boolean),
    (pa.types.is_integer, _integer),
    (pa.types.is_float32, _float),
    (pa.types.is_float64, _double),
    (pa.types.is_decimal128, _decimal),
    (pa.types.is_date32, _date),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_map, _map),
    (lambda kind: pa.types.is_list(kind) or pa.types.is_large_list(kind), _list),
    (pa.types.is_struct, _struct),
    (pa.types.is_null, lambda kind: _as_is),
)
