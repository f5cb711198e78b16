"""Defines the bytes of keys, and the key group that these bytes belong to.

The encoding is part of the savepoint format, and is plain enough to be written in any language:

*   a key of one column is one *component*; a key of several columns is the byte 7, then each component escaped as in a
    path (00 becomes 00 FF, and 00 00 ends it);
*   a component is a tag byte and a body: 0 null (no body); 1 boolean (one byte); 2 integer (64 bits, big-endian, with
    the sign bit turned round); 3 string (UTF-8); 4 binary; 5 date (days since 1970, as an integer); 6 timestamp
    (microseconds since 1970, as an integer); 8 timestamp without a zone (likewise).

Within one type, bytes sort as values do. The key group is CRC-32 (IEEE 802.3) of the bytes, modulo the operator's
``max_parallelism``. A slice is a contiguous range of key groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from zlib import crc32

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument
from cutwater.pipeline.position import key_part
from cutwater.pipeline.rows import Row, RowType, reader
from cutwater.pipeline.values import EPOCH
from cutwater.schema_text import shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_PARALLELISM: Final = 128
SLICES_DEFAULT: Final = 16

Groups = TypeVar("Groups", int, "NDArray[np.int64]")
"""One key group, or many."""

KeySpec: TypeAlias = str | Sequence[str] | Callable[[Row], Any]
"""A column, several columns, or a function that returns the key of a row."""

_SIGN: Final = 1 << 63
_DAY_ZERO: Final = date(1970, 1, 1).toordinal()
_COMPOSITE: Final = b"\x07"
_MICROSECOND: Final = timedelta(microseconds=1)
_FUNCTION_KEY_TYPES: Final = frozenset({str, int, bytes, date, datetime, type(None)})
_LOCAL_EPOCH: Final = EPOCH.replace(tzinfo=None)


def key_bytes(key: Any) -> bytes:
    """Return the bytes of a key. A key of several columns is a tuple."""
    if type(key) is str:
        return b"\x03" + key.encode()
    if isinstance(key, tuple):
        return _COMPOSITE + b"".join(key_part(_component(part)) for part in key)
    return _component(key)


def _component(value: Any) -> bytes:
    if value is None:
        return b"\x00"
    if isinstance(value, bool):
        return b"\x01\x01" if value else b"\x01\x00"
    if isinstance(value, int):
        return b"\x02" + _integer(value)
    if isinstance(value, str):
        return b"\x03" + value.encode()
    if isinstance(value, bytes):
        return b"\x04" + value
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return b"\x08" + _integer((value - _LOCAL_EPOCH) // _MICROSECOND)
        return b"\x06" + _integer((value - EPOCH) // _MICROSECOND)
    if isinstance(value, date):
        return b"\x05" + _integer(value.toordinal() - _DAY_ZERO)
    raise InvalidArgument(
        f"{value!r} cannot be a key: keys are strings, integers, booleans, bytes, dates, timestamps, or tuples of these"
    )


def _integer(value: int) -> bytes:
    if not -_SIGN <= value < _SIGN:
        raise InvalidArgument(f"{value} cannot be a key: integers have at most 64 bits")
    return (value + _SIGN).to_bytes(8, "big")


def key_of_bytes(data: bytes) -> Any:
    """Return the key that has these bytes."""
    if data[0] == 3:
        return data[1:].decode()
    if data[:1] != _COMPOSITE:
        return _component_of_bytes(data)
    parts, start, at = [], 1, 1
    while at < len(data):
        if data[at : at + 2] == b"\x00\x00":
            parts.append(_component_of_bytes(data[start:at].replace(b"\x00\xff", b"\x00")))
            start = at = at + 2
        else:
            at += 2 if data[at] == 0 else 1
    return tuple(parts)


def _component_of_bytes(data: bytes) -> Any:
    tag, body = data[0], data[1:]
    if tag == 0:
        return None
    if tag == 1:
        return body == b"\x01"
    if tag == 3:
        return body.decode()
    if tag == 4:
        return body
    value = int.from_bytes(body, "big") - _SIGN
    if tag == 5:
        return date.fromordinal(value + _DAY_ZERO)
    if tag in (6, 8):
        return (EPOCH if tag == 6 else _LOCAL_EPOCH) + value * _MICROSECOND
    return value


def key_group(data: bytes, max_parallelism: int = MAX_PARALLELISM) -> int:
    return crc32(data) % max_parallelism


def slice_of(group: Groups, slices: int, max_parallelism: int = MAX_PARALLELISM) -> Groups:
    """Return the slice that holds a key group when there are ``slices`` slices."""
    return group * slices // max_parallelism


def _strict(function: Callable[[Row], Any]) -> Callable[[Row], Any]:
    """Wrap a user's key function so that it returns only types that are distinguishable: in Python, ``1``, ``1.0`` and
    ``True`` are one key, but they have different bytes, so they must not mix."""

    def read(row: Row) -> Any:
        key = function(row)
        kind = type(key)
        if kind in _FUNCTION_KEY_TYPES or (kind is tuple and _FUNCTION_KEY_TYPES.issuperset(map(type, key))):
            return key
        raise InvalidArgument(
            f"the key function gave {key!r}: give a str, int, bytes, date, datetime or None, or a tuple of these"
        )

    return read


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [None]


class KeyReader:
    """Reads the key of a row, and knows the names of the key's columns in results."""

    def __init__(self, spec: KeySpec, asker: str) -> None:
        if isinstance(spec, str):
            spec = (spec,)
        self._asker = asker
        self.function: Callable[[Row], Any] | None = None
        self.columns: tuple[str, ...] = ("key",)
        if callable(spec):
            self.function = spec
        elif spec and all(isinstance(name, str) for name in _listed(spec)):
            self.columns = tuple(spec)
        else:
            raise InvalidArgument(f"{asker}: key is {spec!r}; give a column, a list of columns, or a function of a row")

    def bind(self, rows: RowType | None) -> Callable[[Row], Any]:
        """Return the function that reads the key of a row of this type. The columns must exist."""
        if self.function is not None:
            return _strict(self.function)
        if rows is not None:
            for name in self.columns:
                self._require_type(name, rows.type_of(name, f"key of {self._asker}"))
        return reader(*self.columns)

    def fields(self, rows: RowType | None) -> list[pa.Field] | None:
        """Return the key's columns in a result, or None if their types are not known."""
        if rows is None or self.function is not None:
            return None
        return [pa.field(name, rows.type_of(name, f"key of {self._asker}")) for name in self.columns]

    def values(self, key: Any) -> tuple[Any, ...]:
        """Return a key as the values of its columns."""
        return key if len(self.columns) > 1 else (key,)

    def _require_type(self, name: str, kind: pa.DataType) -> None:
        is_a = pa.types
        if not (
            is_a.is_string(kind) or is_a.is_binary(kind) or is_a.is_boolean(kind) or is_a.is_signed_integer(kind)
            or is_a.is_date32(kind) or is_a.is_timestamp(kind) or is_a.is_null(kind)
        ):  # fmt: skip
            raise InvalidArgument(
                f"{self._asker}: the column {name!r} of type {shown(kind)} cannot be a key: "
                "keys are strings, integers, booleans, bytes, dates or timestamps"
            )
