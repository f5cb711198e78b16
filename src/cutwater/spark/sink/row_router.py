"""Converts the rows of a query to rows of topics: the topic of each row, the columns to store, the order of rows.

A query that copies a topic need not drop the columns that the log itself adds for readers. Any other column that the
topic does not have is an error, because its values would be lost unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyspark.sql.types import StructType

from cutwater.client.cluster.topics import Topic
from cutwater.client.convert.schemas import HEADERS, KEY_VALUE, RESERVED, describe
from cutwater.errors import InvalidArgument
from cutwater.spark.options import WriteOptions
from cutwater.spark.source.schema import arrow_schema

TOPIC = "topic"
SIGN = np.uint64(1 << 63)
KAFKA_HEADERS = "array<struct<key string, value binary>>"

Outgoing = tuple[str, pa.RecordBatch, pa.Array | None]
"""A topic, rows for it, and their positions if they have any."""


class Router:
    """Divides batches of a query among topics, whole columns at once. ``find`` returns a topic by its name."""

    def __init__(self, options: WriteOptions, find: Callable[[str], Topic]) -> None:
        self._options, self._find = options, find
        self._ignored = ignored_by(options)
        self._topics: dict[str, Topic] = {}

    def divide(self, batch: pa.RecordBatch) -> Iterator[Outgoing]:
        if not batch.num_rows:
            return
        positions = None
        if self._options.position:
            positions = positions_of(self._options.position, _column(batch, self._options.position))
        if self._options.topic:
            yield self._options.topic, self._rows(self._options.topic, batch), positions
            return
        names = _column(batch, TOPIC)
        if names.null_count:
            raise InvalidArgument("column 'topic' is null in a row: each row says for which topic it is")
        distinct = names.unique().to_pylist()
        for name in distinct:
            if len(distinct) == 1:
                yield name, self._rows(name, batch), positions
            else:
                own = pc.equal(names, name)
                yield name, self._rows(name, batch.filter(own)), None if positions is None else positions.filter(own)

    def _rows(self, name: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = self._find(name)
        columns = columns_of(topic)
        kept = {}
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if field.name in columns.names:
                kept[field.name] = headers_of(column) if columns.field(field.name).type.equals(HEADERS) else column
            elif field.name not in self._ignored and (self._options.topic or column.null_count < len(column)):
                raise unknown_column(field.name, topic, batch.schema.names)
        return pa.RecordBatch.from_arrays(list(kept.values()), names=list(kept))


def ignored_by(options: WriteOptions) -> frozenset[str]:
    """Return the columns that are not stored unless the topic has a column of that name."""
    return RESERVED | {"timestamp", options.position}


def columns_of(topic: Topic) -> pa.Schema:
    """Return the columns that a row of the topic may have."""
    return KEY_VALUE if topic.schema is None else topic.schema


def unknown_column(name: str, topic: Topic, given: Sequence[str]) -> InvalidArgument:
    return InvalidArgument(
        f"column {name!r} does not exist in topic {topic.name!r}: drop it, or add it to the topic's schema first\n"
        f"  topic: {describe(columns_of(topic))}\n  query: {', '.join(given)}"
    )


def check_query(options: WriteOptions, schema: StructType) -> None:
    """Check everything about a query that can be checked without the log."""
    names = schema.fieldNames()
    if options.position and options.position not in names:
        raise InvalidArgument(
            f"option 'positionColumn' is {options.position!r}, which is no column of the query: {', '.join(names)}"
        )
    if not options.topic and TOPIC not in names:
        raise InvalidArgument(
            f"no topic to write to was given: give option 'topic', or a column 'topic' besides {', '.join(names)}"
        )
    given = arrow_schema(schema)
    if not options.topic and not pa.types.is_string(given.field(TOPIC).type):
        raise InvalidArgument(f"column 'topic' is {given.field(TOPIC).type}: names of topics are strings")
    if options.position:
        positions_of(options.position, pa.array([], given.field(options.position).type))


def check_columns(options: WriteOptions, schema: StructType, topic: Topic) -> None:
    """Check that rows of the query fit the topic. Each value is checked when it is written."""
    given, wanted = arrow_schema(schema), columns_of(topic)
    empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in given], schema=given)
    for field in given:
        if field.name not in wanted.names and field.name not in ignored_by(options):
            raise unknown_column(field.name, topic, given.names)
    for field in wanted:
        if field.name in given.names:
            column = empty.column(given.get_field_index(field.name))
            try:
                (headers_of(column) if field.type.equals(HEADERS) else column).cast(field.type)
            except pa.ArrowException:
                allowed = f"{field.type} or {KAFKA_HEADERS}" if field.type.equals(HEADERS) else str(field.type)
                raise InvalidArgument(
                    f"column {field.name!r} of the query is {column.type}, and topic {topic.name!r} has {allowed} "
                    "there: cast it"
                ) from None
        elif not field.nullable and not (topic.schema is None and field.name == "timestamp"):
            raise InvalidArgument(
                f"the query has no column {field.name!r}, and topic {topic.name!r} demands it\n"
                f"  topic: {describe(wanted)}\n  query: {', '.join(given.names)}"
            )


def headers_of(column: pa.Array) -> pa.Array:
    """Return headers as a map. Kafka's sink has them as an array of keys and values."""
    if not pa.types.is_list(column.type) or not pa.types.is_struct(column.type.value_type):
        return column
    pairs = column.values
    if pairs.type.num_fields != 2:
        return column
    keys, values = pairs.field(0), pairs.field(1)
    offsets = column.offsets
    if column.null_count:
        # A null offset means that the row has no map.
        missing = pa.concat_arrays([column.is_null(), pa.array([False])])
        offsets = pc.if_else(missing, pa.scalar(None, offsets.type), offsets)
    return pa.MapArray.from_arrays(offsets, keys, values)


def positions_of(name: str, column: pa.Array) -> pa.Array:
    """Return bytes that sort like the values. Integers and times sort by value, text and bytes sort bytewise."""
    if column.null_count:
        raise InvalidArgument(f"column {name!r} is null in a row, and rows are sorted by it: option 'positionColumn'")
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return column.cast(pa.binary())
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        column = column.cast(pa.timestamp("us")).view(pa.int64())
    elif not pa.types.is_signed_integer(kind):
        raise InvalidArgument(
            f"column {name!r} is {kind}, and rows cannot be sorted by it (option 'positionColumn'): an integer, a "
            "date, a timestamp, a string or binary is wanted"
        )
    numbers = column.cast(pa.int64()).to_numpy(zero_copy_only=False).view(np.uint64) ^ SIGN
    data = pa.py_buffer(numbers.astype(">u8").tobytes())
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(8), len(column), [None, data]).cast(pa.binary())


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    return batch.column(batch.schema.get_field_index(name))
