"""Checks that the PySpark code of a ``transform`` can run in a pipeline: rows in, rows out, each record on its own.

The check calls the code with a streaming data frame that has no rows, and inspects the plan that Spark has analysed.
Nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from cutwater.errors import CutwaterError, InvalidArgument, Refused
from cutwater.pipeline.failures import place
from cutwater.pipeline.graph import TransformNode
from cutwater.pipeline.records import POSITION
from cutwater.pipeline.rows import RESERVED_COLUMN, RowType
from cutwater.spark.source.schema import NoSuchType, spark_type

_STATELESS: Final = frozenset({"Project", "Filter", "Generate", "SubqueryAlias", "View", "ResolvedHint", "Join"})
_INSTEAD: Final = {
    "Aggregate": "use window(…) or process(…), whose state a pipeline keeps",
    "Window": "use window(…) or process(…), whose state a pipeline keeps",
    "Deduplicate": "use process(…) with a ValueState of what was seen",
    "DeduplicateWithinWatermark": "use process(…) with a ValueState and ttl=",
    "Distinct": "use process(…) with a ValueState of what was seen",
    "GlobalLimit": "use process(…) with a ValueState that counts",
    "LocalLimit": "use process(…) with a ValueState that counts",
    "Offset": "use process(…) with a ValueState that counts",
    "Sort": "leave it out: rows have the order of the log",
    "Union": "use Stream.union, which keeps the order of the log",
    "Sample": "use filter on a hash of a column, which gives the same rows again",
    "Repartition": "leave it out: run(parallelism=…) says how many tasks there are",
    "RepartitionByExpression": "leave it out: run(parallelism=…) says how many tasks there are",
    "EventTimeWatermark": "use watermark= of the source",
    "MapInArrow": "use transform(arrow=…), which is a function of Arrow tables",
    "MapInPandas": "use transform(arrow=…), which is a function of Arrow tables",
}
_CLOCKS: Final = frozenset({"CurrentTimestamp", "CurrentDate", "CurrentTime", "LocalTimestamp", "Now"})
_STREAM_SIDE: Final = {
    "Inner": (0, 1),
    "Cross": (0, 1),
    "LeftOuter": (0,),
    "LeftSemi": (0,),
    "LeftAnti": (0,),
    "RightOuter": (1,),
}
"""The sides of a join on which the stream may be, so that no row comes from static data alone."""


def frame_schema(rows: RowType, where: str) -> StructType:
    """Return the Spark schema of a stream's columns and the reserved column."""
    fields = []
    for field in rows.schema:
        try:
            fields.append(pa.field(field.name, spark_type(field.type)))
        except NoSuchType as error:
            raise InvalidArgument(
                f"{where}: the column {field.name!r} is {field.type}, and Spark has no {error}: use "
                "transform(arrow=…), which runs without it, or leave the column out"
            ) from None
    return from_arrow_schema(pa.schema([*fields, pa.field(RESERVED_COLUMN, POSITION)]))


def empty_stream(spark: SparkSession, schema: StructType) -> DataFrame:
    """Make a streaming data frame with these columns, for analysis only."""
    columns = [F.lit(None).cast(field.dataType).alias(field.name) for field in schema]
    return spark.readStream.format("rate").load().select(*columns)


def check(node: TransformNode, rows: RowType, pipeline: str, spark: SparkSession) -> bool:
    """Refuse code that needs earlier records, or whose output is not as declared. Returns whether it joins."""
    where = f"pipeline {pipeline!r}, {node.label}"
    given = empty_stream(spark, frame_schema(rows, where))
    _, joins = applied(node, given, where)
    return joins


def applied(node: TransformNode, given: DataFrame, where: str) -> tuple[DataFrame, bool]:
    """Return what the code makes of a streaming data frame, with the declared columns and the reserved one, and whether
    it joins."""
    assert node.rows is not None, "a run has schemas everywhere"
    made = called(node, given, where)
    plan, before = _analysed(made), _analysed(given)
    _require_stateless(plan, before, where)
    _require_reserved(plan, before, where)
    joins = any(step.nodeName() == "Join" for step in _steps(plan, before))
    declared = frame_schema(node.rows, where)
    found = {field.name: field.dataType for field in made.schema}
    for field in declared:
        if field.name not in found:
            raise InvalidArgument(
                f"{where}: the data frame that comes out has no column {field.name!r}, which the declared schema has: "
                f"it has {', '.join(found)}"
            )
        if found[field.name].simpleString() != field.dataType.simpleString():
            raise InvalidArgument(
                f"{where}: the column {field.name!r} that comes out is {found[field.name].simpleString()}, but the "
                f"declared schema says {field.dataType.simpleString()}: declare that, or cast it"
            )
    return made.select(*(F.col(f"`{field.name}`") for field in declared)), joins


def called(node: TransformNode, given: DataFrame, where: str) -> DataFrame:
    assert node.function is not None, "the plan has been checked"
    try:
        made = node.function(given)
    except CutwaterError:
        raise
    except Exception as error:
        at = place(error)
        raise InvalidArgument(
            f"{where}: the function failed on a data frame with the columns {', '.join(given.columns)}: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{at and f' ({at})'}"
        ) from error
    if not isinstance(made, DataFrame):
        raise InvalidArgument(f"{where}: the function returned {made!r}: return a data frame made from the given one")
    return made


def _analysed(frame: DataFrame) -> Any:
    return frame._jdf.queryExecution().analyzed()


def _elements(sequence: Any) -> Iterator[Any]:
    """Yield the elements of a Scala sequence."""
    return (sequence.apply(i) for i in range(sequence.size()))


def _steps(plan: Any, given: Any) -> Iterator[Any]:
    """Yield the plan nodes between the given data frame and the resulting one. Static data is not restricted."""
    if plan.isStreaming() and not plan.equals(given):
        yield plan
        for child in _elements(plan.children()):
            yield from _steps(child, given)


def _require_stateless(plan: Any, given: Any, where: str) -> None:
    if not plan.isStreaming():
        raise InvalidArgument(f"{where}: the data frame that comes out is not made from the one that was given")
    for step in _steps(plan, given):
        name = step.nodeName()
        if name not in _STATELESS:
            instead = _INSTEAD.get(name, "use map, flat_map, process(…) or transform(arrow=…)")
            raise Refused(
                f"{where}: {name} is more than a projection, a filter, an explode or a join with static data, which is "
                f"what a transform may do: {instead}"
            )
        if name == "Join":
            _require_static_join(step, where)
        expressions = list(_elements(step.expressions()))
        if not all(expression.deterministic() for expression in expressions) or _has_clock(expressions):
            raise Refused(
                f"{where}: a column would have another value each time that it is computed, and so would the output "
                "after a crash: use the record's own columns, or ctx.processing_time in process(…)"
            )


def _require_static_join(join: Any, where: str) -> None:
    sides = [side.isStreaming() for side in _elements(join.children())]
    kind = join.joinType().toString()
    if all(sides):
        raise Refused(f"{where}: a transform joins with static data only: use connect(…) to bring two streams together")
    if sides.index(True) not in _STREAM_SIDE.get(kind, ()):
        raise Refused(
            f"{where}: a {kind} join gives rows that belong to no record: only inner, semi and anti joins, and outer "
            "ones that keep all rows of the stream, have a place in the order of the log"
        )


def _has_clock(expressions: list[Any]) -> bool:
    return any(
        expression.getClass().getSimpleName() in _CLOCKS or _has_clock(list(_elements(expression.children())))
        for expression in expressions
    )


def _require_reserved(plan: Any, given: Any, where: str) -> None:
    """Require that the reserved column is the given column itself, not another one of the same name."""
    (own,) = (column for column in _elements(given.output()) if column.name() == RESERVED_COLUMN)
    found = [column for column in _elements(plan.output()) if column.name() == RESERVED_COLUMN]
    if len(found) != 1 or not found[0].exprId().equals(own.exprId()):
        raise InvalidArgument(
            f"{where}: the reserved column {RESERVED_COLUMN}, which has the place of each row, must come out once and "
            f"as it was: select it along, as in df.select('{RESERVED_COLUMN}', …)"
        )
