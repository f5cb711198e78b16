"""Defines the columns of a query's rows: those of the log and those of its topics, as types that Spark has.

Spark has fewer types than Arrow. Each Arrow type becomes the Spark type that holds all of its values, except that times
are truncated to microseconds. A type without an equivalent in Spark is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec.structs import replace
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from cutwater.client.cluster.catalog_cache import CatalogView
from cutwater.client.convert.schemas import TIMESTAMP, TopicSchema, describe
from cutwater.client.read.records import AFTER, BEFORE
from cutwater.errors import InvalidArgument
from cutwater.spark.options import ReadOptions

WATERMARK = pa.field("watermark", TIMESTAMP)

_SAME = frozenset(map(str, (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())))
_WIDENED: dict[str, pa.DataType] = {
    "uint8": pa.int16(),
    "uint16": pa.int32(),
    "uint32": pa.int64(),
    "uint64": pa.decimal128(20, 0),
    "halffloat": pa.float32(),
    "null": pa.null(),
}
_KINDS: tuple[tuple[Callable[[pa.DataType], bool], pa.DataType], ...] = (
    (pa.types.is_string, pa.string()),
    (pa.types.is_large_string, pa.string()),
    (pa.types.is_string_view, pa.string()),
    (pa.types.is_binary, pa.binary()),
    (pa.types.is_large_binary, pa.binary()),
    (pa.types.is_fixed_size_binary, pa.binary()),
    (pa.types.is_binary_view, pa.binary()),
    (pa.types.is_date, pa.date32()),
    (pa.types.is_time, pa.time64("ns")),
    (pa.types.is_duration, pa.duration("us")),
)
DECIMAL_DIGITS_MAX = 38


class NoSuchType(Exception):
    """Spark has no equivalent of this type."""


def spark_type(kind: pa.DataType) -> pa.DataType:
    """Return the Arrow type that Spark accepts in place of this one."""
    if str(kind) in _SAME:
        return kind
    if str(kind) in _WIDENED:
        return _WIDENED[str(kind)]
    for is_such, instead in _KINDS:
        if is_such(kind):
            return instead
    if pa.types.is_timestamp(kind):
        return TIMESTAMP if kind.tz is not None else pa.timestamp("us")
    if pa.types.is_decimal(kind) and kind.precision <= DECIMAL_DIGITS_MAX and 0 <= kind.scale <= kind.precision:
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_struct(kind):
        return pa.struct([_field(kind.field(i)) for i in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(spark_type(kind.key_type), _field(kind.item_field))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_field(kind.value_field))
    raise NoSuchType(str(kind))


def _field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, spark_type(field.type), field.nullable)


def columns_of(topic: TopicSchema, options: ReadOptions) -> pa.Schema:
    """Return the columns that rows of this topic have in the query, as Arrow types that Spark accepts."""
    own = [field for field in topic.newest if field.name != "timestamp"]
    if not topic.is_typed and not options.headers:
        own = [field for field in own if field.name != "headers"]
    fields = {field.name: field for field in (*BEFORE, *own, *AFTER, WATERMARK)}
    names = list(options.columns or fields)
    found = []
    for name in names:
        if name not in fields:
            hint = " with includeHeaders=true also headers" if not topic.is_typed and not options.headers else ""
            raise InvalidArgument(
                f"option 'columns' names {name!r}, which topic {topic.topic!r} does not have: choose among "
                f"{', '.join(fields)}{hint and f';{hint}'}"
            )
        try:
            found.append(_field(fields[name]))
        except NoSuchType as error:
            raise InvalidArgument(
                f"column {name!r} of topic {topic.topic!r} is {fields[name].type}, and Spark has no {error}: leave it "
                "out with option 'columns'"
            ) from None
    return pa.schema(found)


def schema_of(options: ReadOptions, view: CatalogView) -> StructType:
    """Return the schema of the query. All its topics must have this schema."""
    topics = options.selection().topics(view)
    if not topics:
        names = ", ".join(sorted(view.topics)) or "none"
        raise InvalidArgument(
            f"option 'subscribePattern' is {options.pattern!r}: it matches no topic yet, so its columns are not known; "
            f"topics: {names}"
        )
    first, *others = topics
    columns = columns_of(view.schema(first), options)
    for other in others:
        check_same(columns, first.name, view.schema(other), options)
    return from_arrow_schema(columns)


def check_same(columns: pa.Schema, first: str, other: TopicSchema, options: ReadOptions) -> None:
    theirs = columns_of(other, options)
    if not columns.equals(theirs):
        raise InvalidArgument(
            f"topics {first!r} and {other.topic!r} do not have the same columns, so one query cannot read both: choose "
            "columns that both have with option 'columns', or read them in two queries and unite them\n"
            f"  {first}: {describe(columns)}\n  {other.topic}: {describe(theirs)}"
        )


def check_schema(given: StructType, topic: TopicSchema, options: ReadOptions) -> None:
    """Check that rows of a topic, which may be newer than the query, have the schema of the query. Columns that were
    added since are left out."""
    wanted = arrow_schema(given)
    if options.columns is None:
        known = set(columns_of(topic, options).names)
        options = replace(options, columns=tuple(name for name in wanted.names if name in known))
    found = arrow_schema(from_arrow_schema(columns_of(topic, options)))
    if not _nullable(wanted).equals(_nullable(found)):
        raise InvalidArgument(
            f"topic {topic.topic!r} does not have the columns of this query; it needs a query of its own, or option "
            f"'columns'\n  query: {describe(wanted)}\n  {topic.topic}: {describe(found)}"
        )


def arrow_schema(given: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of the batches of a query."""
    return to_arrow_schema(given, timezone="UTC")


def _nullable(schema: pa.Schema) -> pa.Schema:
    """Make all columns nullable, because Spark may have done so."""
    return pa.schema([field.with_nullable(True) for field in schema])
