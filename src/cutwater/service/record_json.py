"""Records as JSON, from Arrow batches. Bytes that are UTF-8 are text; others are base64, under the same name with
``_base64`` after it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.client.convert.json_values import encode
from cutwater.errors import InvalidArgument

OF_EVERY_RECORD = ("glsn", "llsn", "stream", "topic", "timestamp", "ingested_at")


class JsonRecord(Struct, frozen=True, omit_defaults=True):
    """One record, as JSON. A record of a topic with a schema has a ``row``; any other has a value, and may have a key
    and headers. Times are texts in ISO 8601."""

    glsn: int
    llsn: int
    stream: int
    topic: str
    timestamp: str
    ingested_at: str
    key: str | None = None
    key_base64: str = ""
    value: str = ""
    value_base64: str = ""
    headers: dict[str, str] = {}
    row: dict[str, Any] = {}


def json_rows(batch: pa.RecordBatch, *, is_typed: bool) -> Iterator[tuple[int, bytes]]:
    """Yield the position and the JSON of each record of a batch."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError, ArithmeticError) as error:
        raise InvalidArgument(
            f"a value of topic {batch.column('topic')[0]} is none that JSON has here ({error}): read it with a client"
        ) from error
    for row in rows:
        yield row["glsn"], encode(_told(row, is_typed=is_typed))


def _told(row: dict[str, Any], *, is_typed: bool) -> dict[str, Any]:
    told: dict[str, Any] = {name: row.pop(name) for name in OF_EVERY_RECORD}
    if is_typed:
        return {**told, "row": row}
    told |= {"key": None} if row["key"] is None else _named("key", row["key"])
    told |= _named("value", row["value"])
    headers: dict[str, str] = {}
    for name, value in row["headers"] or ():
        headers |= _named(name, value)
    return {**told, "headers": headers} if headers else told


def _named(name: str, value: bytes) -> dict[str, str]:
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}
