"""Lines of JSON as records: as they are in a topic of bytes, as rows in a topic with a schema."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.cli.inputs import Piece
from cutwater.errors import InvalidArgument


class Rows:
    """``key_field``: which field of each object is the record's key, instead of one ``key`` for all."""

    def __init__(self, schema: pa.Schema | None, key: str | None, key_field: str | None) -> None:
        self._is_typed = schema is not None
        self._key, self._key_field = key, key_field
        self._convert = {field.name: made for field in schema or () if (made := _conversion(field.type)) is not None}
        if self._is_typed and key_field is not None:
            raise InvalidArgument("the topic has a schema, so its records have no key: leave out --key-field")

    def of(self, piece: Piece) -> tuple[Piece, list[Any], Any]:
        """The piece without empty lines, its records, and their keys."""
        kept = [row for row, line in enumerate(piece.records) if line.strip()]
        piece = Piece([piece.records[row].strip() for row in kept], [piece.places[row] for row in kept], piece.source)
        found = [self._decoded(piece, row) for row in range(len(kept))]
        if self._is_typed:
            return piece, [self._converted(piece, row, value) for row, value in enumerate(found)], self._key
        keys = [self._key_of(piece, row, value) for row, value in enumerate(found)] if self._key_field else self._key
        return piece, list(piece.records), keys

    def _decoded(self, piece: Piece, row: int) -> Any:
        try:
            return msgspec.json.decode(piece.records[row])
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"{piece.place(row)}: this is not JSON: {error}") from None

    def _key_of(self, piece: Piece, row: int, value: Any) -> str:
        found = value.get(self._key_field) if isinstance(value, dict) else None
        if isinstance(found, str):
            return found
        if isinstance(found, int | float):
            return msgspec.json.encode(found).decode()
        raise InvalidArgument(
            f"{piece.place(row)}: a text or a number is wanted as field {self._key_field!r}, not {found!r}"
        )

    def _converted(self, piece: Piece, row: int, value: Any) -> Any:
        """JSON has no times; in a column of times, a text is one."""
        if isinstance(value, dict):
            for name, convert in self._convert.items():
                text = value.get(name)
                if text is None:
                    continue
                if not isinstance(text, str):
                    raise InvalidArgument(
                        f"{piece.place(row)}, column {name!r}: a time is a text in ISO 8601, such as "
                        f"2026-01-31T12:00:00Z, not {text!r}, of which nobody can tell the unit"
                    )
                try:
                    value[name] = convert(text)
                except _TooFine:
                    raise InvalidArgument(
                        f"{piece.place(row)}, column {name!r}: {text!r} is finer than microseconds, and nothing finer "
                        "can be taken from a line: round it"
                    ) from None
                except ValueError:
                    what = (
                        "time in ISO 8601, such as 2026-01-31T12:00:00Z"
                        if convert is _time
                        else "date, such as 2026-01-31"
                    )
                    raise InvalidArgument(
                        f"{piece.place(row)}, column {name!r}: a {what}, is wanted, not {text!r}"
                    ) from None
        return value


def _conversion(kind: pa.DataType) -> Callable[[str], datetime | date] | None:
    if pa.types.is_timestamp(kind):
        return _time
    return date.fromisoformat if pa.types.is_date(kind) else None


class _TooFine(ValueError):
    pass


def _time(text: str) -> datetime:
    # Python would cut it off.
    if re.search(r"[.,]\d{6}\d*[1-9]", text):
        raise _TooFine
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
