"""Prints records on standard output: a line each, for people, for ``jq``, or as they are.

As JSON, bytes that are UTF-8 are text; others are base64, under the same name with ``_base64`` after it.
"""

from __future__ import annotations

import base64
import enum
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutwater.cli.framework.exit_codes import Settings
from cutwater.client.convert.json_values import encode

if TYPE_CHECKING:
    from cutwater.client.read.records import Record


class RecordOutput(enum.StrEnum):
    TEXT = "text"
    JSON = "json"
    VALUE = "value"
    KEY_VALUE = "key-value"


def _set_output(value: RecordOutput) -> RecordOutput:
    Settings.is_json = value is RecordOutput.JSON
    return value


RecordOutputOption = Annotated[
    RecordOutput,
    typer.Option(
        "--output",
        "-o",
        envvar="CUTWATER_OUTPUT",
        callback=_set_output,
        is_eager=True,
        help="What is printed of a record: everything for people, everything as JSON, its value, or its key, a tab and "
        "its value.",
    ),
]


def write_records(records: Iterable[Record], output: RecordOutput) -> None:
    """Print all records at once and flush, so that a reader at the other end sees them now."""
    line = _LINES[output]
    out = sys.stdout.buffer
    out.write(b"".join([line(record) + b"\n" for record in records]))
    out.flush()


def as_json(record: Record) -> dict[str, Any]:
    """Return the properties of a record as values that JSON has."""
    told: dict[str, Any] = {
        "glsn": record.glsn,
        "llsn": record.llsn,
        "stream": record.stream,
        "topic": record.topic,
        "timestamp": record.timestamp,
        "ingested_at": record.ingested_at,
    }
    if record.row:
        return {**told, "row": record.row}
    told |= {"key": None} if record.key is None else _named("key", record.key)
    told |= _named("value", record.value)
    headers: dict[str, str] = {}
    for name, value in record.headers.items():
        headers |= _named(name, value)
    return {**told, "headers": headers} if headers else told


def _named(name: str, value: bytes) -> dict[str, str]:
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def _json_line(record: Record) -> bytes:
    return encode(as_json(record))


def _value(record: Record) -> bytes:
    return encode(record.row) if record.row else record.value


def _key_value(record: Record) -> bytes:
    return (record.key or b"") + b"\t" + _value(record)


def _text(record: Record) -> bytes:
    key = "-" if record.key is None else _shown(record.key)
    time = record.timestamp.isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
    return f"{record.glsn}\t{time}\t{record.topic}\t{key}\t{_shown(_value(record))}".encode()


def _shown(value: bytes) -> str:
    """Format on one line, without characters that would affect a terminal."""
    text = value.decode(errors="backslashreplace")
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


_LINES: dict[RecordOutput, Callable[[Record], bytes]] = {
    RecordOutput.TEXT: _text,
    RecordOutput.JSON: _json_line,
    RecordOutput.VALUE: _value,
    RecordOutput.KEY_VALUE: _key_value,
}
