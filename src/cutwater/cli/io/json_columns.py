"""Converts values of JSON to values of columns: what ``json_values`` writes is read back unchanged.

A conversion raises ``ValueError`` that says what is wanted. No conversion changes a value: what a column cannot hold
exactly is refused.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from math import isinf
from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.convert.error_text import cut_off, whole_numbers
from cutwater.client.convert.json_values import NO_NUMBERS, encode
from cutwater.client.convert.times import UNITS

Conversion = Callable[[Any], Any]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
_PLACES = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_FRACTION = re.compile(r"[.,](\d+)")
_FRACTION_OF_OFFSET = re.compile(r"[+-][\d:]+[.,]\d+$")
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DURATION = re.compile(r"([+-]?)P(?:(\d+)W)?(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:[.,](\d+))?S)?)?", re.ASCII)
_INT64 = range(-(2**63), 2**63)


def decoder(schema: pa.Schema | None) -> Callable[[bytes], Any]:
    """Return a decoder. With a column of decimals, numbers with a fraction become ``Decimal``, so that they stay
    exact."""
    is_exact = schema is not None and any(_has_decimals(field.type) for field in schema)
    return msgspec.json.Decoder(float_hook=Decimal).decode if is_exact else msgspec.json.Decoder().decode


def conversions(schema: pa.Schema) -> dict[str, Conversion]:
    """Return a conversion for each column whose values cannot be used as they are; None is not converted."""
    is_exact = any(_has_decimals(field.type) for field in schema)
    found = {field.name: _conversion(field.type, is_exact) for field in schema}
    return {name: convert for name, convert in found.items() if convert is not None}


def shown(value: Any) -> str:
    """Format a value as in the input."""
    return cut_off(encode(value).decode())


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_binary(kind)) or kind in (pa.binary(), pa.large_binary(), pa.binary_view())


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind) and hasattr(kind, "value_type") and not pa.types.is_run_end_encoded(kind))


def _has_decimals(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind)) or any(_has_decimals(kind.field(i).type) for i in range(kind.num_fields))


def _conversion(kind: pa.DataType, is_exact: bool) -> Conversion | None:
    types = pa.types
    if types.is_struct(kind):
        fields = {field.name: _conversion(field.type, is_exact) for field in kind}
        return _struct({name: convert for name, convert in fields.items() if convert is not None})
    if types.is_map(kind):
        return _map(*(_conversion(part, is_exact) or _same for part in (kind.key_type, kind.item_type)))
    if _is_list(kind):
        convert = _conversion(kind.value_type, is_exact)
        return None if convert is None else _list(convert)
    for is_kind, made in (
        (types.is_timestamp, _timestamp),
        (types.is_date, _date),
        (types.is_time, _time),
        (types.is_duration, _duration),
        (types.is_decimal, _decimal),
        (_is_bytes, _bytes),
        (types.is_interval, _interval),
        (types.is_floating, _float),
    ):
        if is_kind(kind):
            return partial(made, kind)
    # In any other column a number with a fraction is a float, as without decimals.
    return partial(_float, kind) if is_exact else None


def _same(value: Any) -> Any:
    return value


def _struct(fields: dict[str, Conversion]) -> Conversion | None:
    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            for name, inner in fields.items():
                if value.get(name) is not None:
                    value[name] = inner(value[name])
        return value

    return convert if fields else None


def _list(inner: Conversion) -> Conversion:
    def convert(value: Any) -> Any:
        return [None if one is None else inner(one) for one in value] if isinstance(value, list) else value

    return convert


def _map(of_key: Conversion, of_item: Conversion) -> Conversion:
    def convert(value: Any) -> Any:
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not isinstance(pairs, list) or not all(isinstance(one, list | tuple) and len(one) == 2 for one in pairs):
            raise ValueError(f"an object, or a list of pairs, is wanted, not {shown(value)}")
        return [(of_key(key), None if item is None else of_item(item)) for key, item in pairs]

    return convert


def _timestamp(kind: pa.DataType, value: Any) -> datetime | pa.Scalar:
    if not isinstance(value, str):
        raise ValueError(
            f"a time is a text in ISO 8601, such as 2026-01-31T12:00:00Z, not {shown(value)}, whose unit is not known"
        )
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        found = None
    if found is None:
        raise ValueError(f"a time in ISO 8601, such as 2026-01-31T12:00:00Z, is wanted, not {shown(value)}")
    if _FRACTION_OF_OFFSET.search(value, 10):
        # Python ignores the fraction of an offset below a second. Hyphens before the tenth character are the date's.
        raise ValueError(f"the offset in {shown(value)} has fractions of a second: write one such as +02:00, or Z")
    found = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    digits = _digits(value)
    count = _count((found.replace(microsecond=0) - _EPOCH) // _SECOND, digits, kind, value)
    # A ``datetime`` has no nanoseconds.
    return found if len(digits.rstrip("0")) <= 6 else pa.scalar(count, kind)


def _time(kind: pa.DataType, value: Any) -> int:
    try:
        found = time.fromisoformat(value)
    except (TypeError, ValueError):
        found = None
    if found is None or found.tzinfo is not None:
        raise ValueError(f"a time of day, such as 12:30:00, is wanted, not {shown(value)}")
    return _count((found.hour * 60 + found.minute) * 60 + found.second, _digits(value), kind, value)


def _duration(kind: pa.DataType, value: Any) -> int:
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None or not any(found.groups()[1:]):
        raise ValueError(f"a duration in ISO 8601, such as PT1.5S or P1DT12H, is wanted, not {shown(value)}")
    weeks, days, hours, minutes, seconds = (int(number or 0) for number in found.groups()[1:6])
    total = (((weeks * 7 + days) * 24 + hours) * 60 + minutes) * 60 + seconds
    count = _count(total, found[7] or "", kind, value)
    return -count if found[1] == "-" else count


def _digits(text: str) -> str:
    """Return the digits after the point of the seconds, of which Python keeps only six."""
    found = _FRACTION.search(text)
    return found[1] if found is not None else ""


def _count(seconds: int, digits: str, kind: pa.DataType, text: str) -> int:
    """Return seconds, with the digits after their point, in the unit of the column."""
    places = _PLACES[kind.unit]
    found: int = seconds * 10**places + int(digits[:places].ljust(places, "0") or 0)
    if digits[places:].strip("0"):
        units = UNITS[kind.unit]
        raise ValueError(
            f"{shown(text)} has more digits than the {units} of {kind}: round it to {units}, or let the column have a "
            "finer unit"
        )
    if found not in _INT64:
        raise ValueError(f"{shown(text)} is beyond what {kind} can hold: let the column have a coarser unit")
    return found


def _decimal(kind: pa.DataType, value: Any) -> Decimal:
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and _DECIMAL.fullmatch(value)):
        raise ValueError(f'a decimal number, such as 1.25 or "1.25", is wanted, not {shown(value)}')
    exact = Context(prec=kind.precision, Emin=-1_000, Emax=1_000, traps=[Inexact, InvalidOperation])
    try:
        return Decimal(value).quantize(Decimal((0, (1,), -kind.scale)), context=exact)
    except (Inexact, InvalidOperation):
        raise ValueError(
            f"{value} has more digits than {kind}, which has {kind.precision}, {kind.scale} of them after the point: "
            "round it, or let the column have more"
        ) from None


def _parsed(parse: Conversion, wanted: str, kind: pa.DataType, value: Any) -> Any:
    try:
        return parse(value)
    except (TypeError, ValueError):
        raise ValueError(f"{wanted} wanted, not {shown(value)}") from None


_date = partial(_parsed, date.fromisoformat, "a date, such as 2026-01-31, is")
_bytes = partial(_parsed, partial(base64.b64decode, validate=True), 'bytes in base64, such as "YWJj" for abc, are')
_interval = partial(_parsed, pa.MonthDayNano, "months, days and nanoseconds, such as [1, 0, 0], are")


def _float(kind: pa.DataType, value: Any) -> Any:
    if isinstance(value, Decimal):
        found = float(value)
        if isinf(found):
            raise ValueError(f"{value} is beyond the range of a double")
        return found
    if isinstance(value, str | bool) and pa.types.is_floating(kind):
        if value not in NO_NUMBERS:
            names = ", ".join(f'"{name}"' for name in NO_NUMBERS)
            raise ValueError(f"a number, without quotes, or one of {names}, is wanted, not {shown(value)}")
        return NO_NUMBERS[value]
    return value


def mismatch(kind: pa.DataType, value: Any) -> str:
    """Return what is wanted if the value, or one inside it, is of another kind than the column; empty if none is."""
    for is_kind, types, wanted in _KINDS:
        if value is not None and is_kind(kind):
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                return f"{wanted} is wanted, not {shown(value)}"
            if pa.types.is_integer(kind) and not (numbers := whole_numbers(kind))[0] <= value <= numbers[-1]:
                return f"a whole number from {numbers[0]} to {numbers[-1]} is wanted, not {shown(value)}"
            inner = [(field.type, value.get(field.name)) for field in kind] if pa.types.is_struct(kind) else []
            inner += [(kind.value_type, one) for one in value] if _is_list(kind) else []
            return next((told for part, one in inner if (told := mismatch(part, one))), "")
    return ""


_KINDS: tuple[tuple[Callable[[pa.DataType], bool], tuple[type[Any], ...], str], ...] = (
    (_is_text, (str,), "a text, in quotes,"),
    (pa.types.is_boolean, (bool,), "true or false"),
    (pa.types.is_integer, (int, float), "a whole number, without quotes,"),
    (pa.types.is_floating, (int, float), "a number, without quotes,"),
    (pa.types.is_struct, (dict,), "an object"),
    (_is_list, (list,), "a list"),
)
