"""Turns lines of JSON into records: as they are in a topic of bytes, as rows in a topic with a schema."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.cli.io.inputs import InputRecords
from cutwater.cli.io.json_columns import conversions, decoder, mismatch, shown
from cutwater.errors import InvalidArgument


class Rows:
    """Converts pieces of input. ``key_field``: the field of each object that is the record's key, instead of one
    ``key`` for all."""

    def __init__(self, schema: pa.Schema | None, key: str | None, key_field: str | None) -> None:
        self._is_typed = schema is not None
        self._key, self._key_field = key, key_field
        self._decode = decoder(schema)
        self._convert = {} if schema is None else conversions(schema)
        self._types = {} if schema is None else {field.name: field.type for field in schema}
        if self._is_typed and (key is not None or key_field is not None):
            option = "--key" if key_field is None else "--key-field"
            raise InvalidArgument(f"the topic has a schema, so its records have no key: leave out {option}")

    def of(self, piece: InputRecords) -> tuple[InputRecords, list[Any], Any]:
        """Return the piece without empty lines, its records, and their keys."""
        kept = [row for row, line in enumerate(piece.records) if line.strip()]
        piece = InputRecords(
            [piece.records[row].strip() for row in kept], [piece.places[row] for row in kept], piece.source
        )
        found = [self._decoded(piece, row) for row in range(len(kept))]
        if self._is_typed:
            return piece, [self._converted(piece, row, value) for row, value in enumerate(found)], self._key
        keys = [self._key_of(piece, row, value) for row, value in enumerate(found)] if self._key_field else self._key
        return piece, list(piece.records), keys

    def mismatch(self, record: Any, column: str) -> str:
        """Return what a column wants, in words of JSON, if it got a value of another kind; empty otherwise."""
        if column not in self._types or not isinstance(record, dict):
            return ""
        return mismatch(self._types[column], record.get(column))

    def _decoded(self, piece: InputRecords, row: int) -> Any:
        try:
            return self._decode(piece.records[row])
        except msgspec.DecodeError as error:
            why = str(error)
        except UnicodeDecodeError as error:
            why = f"byte 0x{error.object[error.start]:02x} is not UTF-8, which JSON is written in"
        except RecursionError:
            why = "it is nested too deeply"
        except ArithmeticError:
            why = "a number in it has an exponent that is too large"
        raise InvalidArgument(f"{piece.place(row)}: this is not JSON: {why}")

    def _key_of(self, piece: InputRecords, row: int, value: Any) -> str:
        found = value.get(self._key_field) if isinstance(value, dict) else None
        if isinstance(found, str):
            return found
        if isinstance(found, int | float):
            return msgspec.json.encode(found).decode()
        raise InvalidArgument(
            f"{piece.place(row)}: a text or a number is wanted as field {self._key_field!r}, not {shown(found)}"
        )

    def _converted(self, piece: InputRecords, row: int, value: Any) -> Any:
        """Convert texts in the place of values that JSON does not have, such as times and bytes."""
        if not isinstance(value, dict):
            raise InvalidArgument(
                f"{piece.place(row)}: an object with the columns of the topic is wanted, not {shown(value)}"
            )
        for name, convert in self._convert.items():
            if value.get(name) is not None:
                try:
                    value[name] = convert(value[name])
                except ValueError as error:
                    raise InvalidArgument(f"{piece.place(row)}, column {name!r}: {error}") from None
        return value
