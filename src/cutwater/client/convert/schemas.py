"""The form of a topic's records: key and value, or rows of an Arrow schema that may grow.

A batch names its schema by number: 0 for key and value, otherwise the place in the topic's list of schemas, from 1. A
new schema must leave every column as it is, and may only add columns that may be null. So a batch of an older schema is
read as one of the newest, with nulls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.errors import IncompatibleSchema
from cutwater.core.requests import TopicInfo
from cutwater.errors import Damaged, InvalidArgument
from cutwater.format import projection
from cutwater.schema_text import parse_schema

TIMESTAMP = projection.TIMESTAMP
HEADERS, KEY_VALUE = projection.HEADERS, projection.KEY_VALUE
KEY_VALUE_NUMBER = 0
EVENT_TIME_OF_KEY_VALUE = "timestamp"

RESERVED = frozenset({"topic", "stream", "glsn", "llsn", "ingested_at", "watermark"})
"""Columns that readers get in addition to those of the schema."""

SchemaLike: TypeAlias = str | pa.Schema | Mapping[str, pa.DataType] | Sequence[tuple[str, pa.DataType] | pa.Field]


class TopicSchema:
    """The schemas of one topic, and the name of its event time column; an empty name if there is none."""

    __slots__ = ("event_time", "topic", "versions")

    def __init__(self, topic: str, versions: Sequence[pa.Schema] = (), event_time: str = "") -> None:
        self.topic = topic
        self.versions = tuple(versions)
        self.event_time = event_time if self.versions else EVENT_TIME_OF_KEY_VALUE

    @classmethod
    def of(cls, info: TopicInfo) -> TopicSchema:
        return cls(info.name, [decode_schema(data) for data in info.schemas], info.event_time)

    @property
    def is_typed(self) -> bool:
        return bool(self.versions)

    @property
    def number(self) -> int:
        """The number of the schema that a new batch names."""
        return len(self.versions)

    @property
    def newest(self) -> pa.Schema:
        return self.versions[-1] if self.versions else KEY_VALUE

    def numbered(self, number: int) -> pa.Schema | None:
        """Return the schema that a batch names with this number; None if it is not known here."""
        if number == KEY_VALUE_NUMBER:
            return KEY_VALUE
        return self.versions[number - 1] if 0 < number <= len(self.versions) else None


def encode_schema(schema: pa.Schema) -> bytes:
    data: bytes = schema.serialize().to_pybytes()
    return data


def decode_schema(data: bytes) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise Damaged(f"the catalog has a schema that cannot be read: {error}") from error


def new_schema(given: SchemaLike, event_time: str, old: pa.Schema | None = None) -> pa.Schema:
    """Return the schema of a topic that is to be created, without metadata that concerns only its maker, such as that
    of pandas. Columns of the old schema were accepted before: their time zones, for instance, are not checked again."""
    try:
        if isinstance(given, str):
            schema = parse_schema(given)
        else:
            schema = given if isinstance(given, pa.Schema) else pa.schema(given)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise InvalidArgument(
            "schema= is a pyarrow.Schema, what pyarrow.schema() takes, or a text such as 'user string, at timestamp', "
            f"not {type(given).__name__}: {error}"
        ) from error
    schema = schema.remove_metadata()
    if not len(schema):
        raise InvalidArgument("a schema has at least one column; without one, records have a key and a value")
    for field in schema:
        if schema.names.count(field.name) > 1:
            raise InvalidArgument(f"column {field.name!r} is there twice: names of columns are unique")
        if field.name in RESERVED or not field.name:
            raise InvalidArgument(
                f"a column cannot be named {field.name!r}: the log itself gives readers {', '.join(sorted(RESERVED))}"
            )
        if field.name == "timestamp" and event_time != "timestamp":
            raise InvalidArgument(
                "readers get event time as column 'timestamp': say event_time='timestamp', or rename the column"
            )
        _check_type(field.name, field.type, is_new=old is None or old.get_field_index(field.name) < 0)
    if event_time:
        _check_event_time(schema, event_time)
    return schema


def grown_schema(topic: TopicSchema, given: SchemaLike) -> pa.Schema:
    """Return the next schema of a topic; raise if readers of the present one could not use it."""
    if not topic.is_typed:
        raise IncompatibleSchema(
            f"topic {topic.topic!r} has records of key and value and cannot get a schema: create another topic"
        )
    old, new = topic.newest, new_schema(given, topic.event_time, topic.newest)
    for field in old:
        index = new.get_field_index(field.name)
        if index < 0:
            raise _incompatible(topic, new, f"column {field.name!r} is gone")
        after = new.field(index)
        if not after.type.equals(field.type):
            raise _incompatible(topic, new, f"column {field.name!r} was {field.type} and would be {after.type}")
        if field.nullable != after.nullable:
            was, would_be = ("null", "not null") if field.nullable else ("not null", "null")
            raise _incompatible(topic, new, f"column {field.name!r} was {was} and would be {would_be}")
    for field in new:
        if old.get_field_index(field.name) < 0 and not field.nullable:
            raise _incompatible(topic, new, f"the new column {field.name!r} must be nullable, older records lack it")
    return new


def _incompatible(topic: TopicSchema, new: pa.Schema, what: str) -> IncompatibleSchema:
    return IncompatibleSchema(
        f"topic {topic.topic!r}: {what}. Only nullable columns may be added; for anything else create another topic\n"
        f"  present: {describe(topic.newest)}\n  given:   {describe(new)}"
    )


def describe(schema: pa.Schema) -> str:
    """Return the columns as one line of text."""
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)


def _check_event_time(schema: pa.Schema, event_time: str) -> None:
    index = schema.get_field_index(event_time)
    if index < 0:
        raise InvalidArgument(f"event_time={event_time!r} is no column of the schema: {describe(schema)}")
    if not pa.types.is_timestamp(schema.field(index).type):
        raise InvalidArgument(
            f"event_time={event_time!r} is {schema.field(index).type}: it must be a timestamp, such as {TIMESTAMP}"
        )


def _check_type(name: str, kind: pa.DataType, *, is_new: bool) -> None:
    """Refuse types that a column cannot have. Columns that are not new were accepted before, with looser rules."""
    what = f"column {name!r} is {kind}"
    if pa.types.is_dictionary(kind):
        # A stored batch is a single message, and dictionaries need a second one.
        raise InvalidArgument(f"{what}: use {kind.value_type}, and compression if it repeats itself")
    if isinstance(kind, pa.BaseExtensionType):
        raise InvalidArgument(f"column {name!r} is of extension type {kind}: use its storage type, {kind.storage_type}")
    if is_new:
        # Arrow cannot build unions and run-end encoded columns from rows, nor cast other columns to them. List views
        # may share values, so that a small batch becomes a large one for its readers.
        if pa.types.is_union(kind):
            raise InvalidArgument(f"{what}: use a struct with a member for each of its types")
        if pa.types.is_run_end_encoded(kind):
            raise InvalidArgument(f"{what}: use {kind.value_type}, and compression if it repeats itself")
        if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
            raise InvalidArgument(f"{what}: use a list of {kind.value_type}, which holds the same")
        if pa.types.is_timestamp(kind):
            try:
                pa.scalar(0, kind).as_py()
            except (LookupError, ValueError, OSError):
                # A program that reads records as Python values would fail at the first record.
                raise InvalidArgument(
                    f"{what}: this machine knows no time zone {kind.tz!r}. Give one of the IANA database, such as "
                    f"pa.timestamp({kind.unit!r}, 'Europe/Berlin'), or 'UTC', or one such as '+02:00'"
                ) from None
    for i in range(kind.num_fields):
        _check_type(name, kind.field(i).type, is_new=is_new)
