"""Runs PySpark code between the stages of a pipeline: unpacks records from their envelopes for it, and packs its output
into new ones.

Spark runs an operator or a source twice if it feeds two branches of a plan. After the source and before any operator, a
shuffle precedes the branches. Spark makes only one of it, so everything before it runs once. After an operator this
does not work, because Spark numbers each operator separately. So code on data frames is accepted there only if all
records go to it, so that nothing branches.

Code is checked before anything runs: rows in, rows out, each record on its own. The check calls the code with a
streaming data frame that has no rows, and inspects the plan that Spark has analysed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from cutwater.errors import CutwaterError, InvalidArgument, Refused
from cutwater.pipeline.failures import place
from cutwater.pipeline.graph import Graph, Port, RowNode, SourceNode, TransformNode
from cutwater.pipeline.plan import Destination, Plan
from cutwater.pipeline.records import POSITION, Records
from cutwater.pipeline.rows import RESERVED_COLUMN, RowType
from cutwater.spark.pipeline.envelope import COLUMNS, envelope_batch, envelopes, unpacked
from cutwater.spark.pipeline.error_translation import told
from cutwater.spark.pipeline.program import Program
from cutwater.spark.session.session import session
from cutwater.spark.source.schema import NoSuchType, arrow_schema, spark_type

Round = tuple[list[int], bool]
"""Code that runs side by side, by its order in the program, and whether other records bypass it. Unchained row
functions have separate rounds: they pass on records of others, so nothing branches for them."""

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


class Transforms:
    """All code on data frames of a pipeline. ``graph`` is the program's own graph, which still has the functions."""

    def __init__(self, graph: Graph, program: Program) -> None:
        self._nodes = {node.order: node for node in graph.of_type(TransformNode) if node.is_on_spark}
        self._program = program
        self._rounds = rounds_of(program.plan)

    def after(self, frame: DataFrame, boundary: int) -> DataFrame:
        """Apply the code that follows the source (boundary 0) or a level (boundaries from 1 on) to the envelopes."""
        for orders, has_others in self._rounds[boundary]:
            if isinstance(self._program.plan.graph.nodes[orders[0]], RowNode):
                frame = frame.mapInArrow(partial(_unchained, self._program, orders), COLUMNS)
            elif has_others:
                frame = frame.repartition(self._program.parallelism, "slice")
                rest = frame.mapInArrow(partial(_passing, orders), COLUMNS)
                for order in orders:
                    rest = rest.union(self._applied(frame, order))
                frame = rest
            else:
                frame = self._applied(frame, orders[0])
        return frame

    def _applied(self, frame: DataFrame, order: int) -> DataFrame:
        node, program = self._nodes[order], self._program
        rows = program.plan.rows_for((order, 0))
        assert rows is not None, "a run has schemas everywhere"
        where = f"pipeline {program.name!r}, {node.label}"
        schema = frame_schema(rows, where)
        given = frame.mapInArrow(partial(_unpacking, order, schema), schema)
        made, joins = applied(node, given, where)
        if joins:
            # A join may have scattered the rows of one record.
            made = made.repartition(program.parallelism, f"{RESERVED_COLUMN}.moment")
        return made.mapInArrow(partial(_packing, program, order, joins), COLUMNS)


def check_transforms(graph: Graph, plan: Plan, spark: SparkSession | None) -> None:
    """Refuse code that cannot run, before anything runs. Without a session, only its place in the graph is checked."""
    rounds_of(plan)
    for node in graph.of_type(TransformNode):
        rows = plan.rows_for((node.order, 0))
        if node.is_on_spark and spark is not None and rows is not None:
            check(node, rows, plan.name, spark)


def rounds_of(plan: Plan) -> list[list[Round]]:
    """Return for each boundary, source first, which code runs there, in order."""
    waiting = set().union(*(_reached(plan, Port(node.order)) for node in plan.graph.of_type(SourceNode)))
    found = [_rounds(plan, waiting, 0)]
    for boundary, specs in enumerate(plan.levels, 1):
        orders = {spec.order for spec in specs}
        waiting = (waiting - orders).union(*(_reached(plan, port) for port in plan.consumers if port.node in orders))
        found.append(_rounds(plan, waiting, boundary))
    return found


def _reached(plan: Plan, port: Port) -> set[int]:
    """Return the nodes at which records that leave an output wait next."""
    found: set[int] = set()
    for node, _ in plan.consumers.get(port, []):
        if plan.waits(node):
            found.add(node.order)
        else:
            found |= set().union(*(_reached(plan, own) for own in plan.consumers if own.node == node.order))
    return found


def _rounds(plan: Plan, waiting: set[int], boundary: int) -> list[Round]:
    """Return the rounds of one boundary. ``waiting`` has the nodes at which records wait before the rounds, and is
    updated to those after them."""
    rounds: list[Round] = []
    _add_unchained(plan, waiting, rounds)
    while orders := sorted(order for order in waiting if isinstance(plan.graph.nodes[order], TransformNode)):
        others = waiting - set(orders)
        has_others = bool(others) or len(orders) > 1 or boundary < len(plan.levels)
        if has_others and boundary:
            label = plan.graph.nodes[orders[0]].label
            raise Refused(
                f"pipeline {plan.name!r}, {label}: behind an operator code on data frames is taken only where it is "
                "all that follows: on Spark the operator would run once more for what goes another way. Give the same "
                "as transform(arrow=…), which runs in the workers, or put it before the first operator, or into a "
                "pipeline of its own that reads what this one writes"
            )
        rounds.append((orders, has_others))
        waiting.difference_update(orders)
        for order in orders:
            waiting |= _reached(plan, Port(order))
        _add_unchained(plan, waiting, rounds)
    return rounds


def _add_unchained(plan: Plan, waiting: set[int], rounds: list[Round]) -> None:
    """Add rounds for row functions that start their own chain, one after the other."""
    while orders := sorted(order for order in waiting if isinstance(plan.graph.nodes[order], RowNode)):
        rounds.append((orders, True))
        waiting.difference_update(orders)
        waiting |= set().union(*(_reached(plan, port) for port in plan.consumers if port.node in orders))


# ------------------------------------------------------------------------------------------------------------ checking


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


def check(node: TransformNode, rows: RowType, pipeline: str, spark: SparkSession) -> bool:
    """Refuse code that needs earlier records, or whose output is not as declared. Returns whether it joins."""
    where = f"pipeline {pipeline!r}, {node.label}"
    columns = [F.lit(None).cast(field.dataType).alias(field.name) for field in frame_schema(rows, where)]
    _, joins = applied(node, spark.readStream.format("rate").load().select(*columns), where)
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


# ---------------------------------------------------------------------------------------------------------- in workers


def _passing(orders: list[int], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Leave out some envelopes. Spark does not recognise this as a filter, which it would move to before the
    branches."""
    for batch in batches:
        yield batch.filter(pa.array([node not in orders for node in batch.column("node").to_pylist()], pa.bool_()))


def _unchained(program: Program, orders: list[int], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run row functions in their own worker, next to the worker that their records come from."""
    with told():
        for batch in batches:
            yield from after_break(program, orders, batch)


def after_break(program: Program, orders: list[int], batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Run the row functions for which some envelopes wait. The other envelopes stay as they are."""
    plan = program.plan
    nodes = batch.column("node").to_pylist()
    yield batch.filter(pa.array([node not in orders for node in nodes], pa.bool_()))
    for index, order in enumerate(nodes):
        if order not in orders:
            continue
        node, rows = plan.graph.nodes[order], plan.rows_for((order, 0))
        assert isinstance(node, RowNode), "it is a row function"
        assert rows is not None, "a run has schemas everywhere"
        records = Records.from_arrow(unpacked(batch.column("data")[index].as_buffer()), rows)
        arrived: dict[Destination, list[Records]] = {}
        plan.apply(node, records, arrived)
        home = program.slice_of_key(batch.column("slice")[index].as_py())
        for envelope in envelopes(program, arrived, home):
            yield envelope_batch([envelope])


def _unpacking(order: int, schema: StructType, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    wanted = arrow_schema(schema)
    for batch in batches:
        for node, data in zip(batch.column("node").to_pylist(), batch.column("data"), strict=True):
            if node == order:
                yield from _cast(unpacked(data.as_buffer()), wanted).to_batches()


def _packing(program: Program, order: int, joins: bool, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with told():
        plan = program.plan
        node = plan.graph.nodes[order]
        assert isinstance(node, TransformNode), "code on data frames is a transform"
        assert node.rows is not None, "a run has schemas everywhere"
        parts = list(batches)
        if not parts:
            return
        records = _records(pa.Table.from_batches(parts), node.rows, joins)
        arrived: dict[Destination, list[Records]] = {}
        plan.push(Port(order), records, arrived)
        # Sinks take rows in any slice; so they spread.
        context = TaskContext.get()
        home = 0 if context is None else context.partitionId() % program.slices
        for envelope in envelopes(program, arrived, home):
            yield envelope_batch([envelope])


def _records(table: pa.Table, rows: RowType, joins: bool) -> Records:
    """Convert rows to records. Rows that a join makes of one record have no order, so they are sorted by content. Rows
    of an explode keep their order."""
    wanted = pa.schema([*rows.schema, pa.field(RESERVED_COLUMN, table.schema.field(RESERVED_COLUMN).type)])
    records = Records.from_arrow(_cast(table, wanted), rows)
    return (records.by_content() if joins else records).numbered()


def _cast(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """Convert columns to the types of another schema, with the same values."""
    columns = []
    for field in wanted:
        column = table.column(field.name)
        columns.append(column if column.type.equals(field.type) else column.cast(field.type, safe=False))
    return pa.table(columns, names=wanted.names)


# ------------------------------------------------------------------------------------------------------------- in tests


def transformed_locally(plan: Plan, node: TransformNode, records: Records) -> Records:
    """Run the code for ``Pipeline.test``, with the active session or a new one."""
    where = f"pipeline {plan.name!r}, {node.label}"
    rows = plan.rows_for((node.order, 0))
    if rows is None or node.rows is None:
        raise InvalidArgument(
            f"{where}: code on data frames needs columns with types: declare its schema='…', and that of the stream "
            "that it gets"
        )
    spark = SparkSession.getActiveSession() or session("cutwater test", master="local[2]")
    schema = frame_schema(rows, where)
    joins = check(node, rows, plan.name, spark)
    frame = spark.createDataFrame(_cast(pa.Table.from_batches([records.to_arrow(rows)]), arrow_schema(schema)), schema)
    made = called(node, frame, where)
    return _records(made.toArrow(), node.rows, joins)
