"""Runs PySpark code between the stages of a pipeline: unpacks records from their envelopes for it, and packs its output
into new ones.

Spark runs an operator or a source twice if it feeds two branches of a plan. After the source and before any operator, a
shuffle precedes the branches. Spark makes only one of it, so everything before it runs once. After an operator this
does not work, because Spark numbers each operator separately. So code on data frames is accepted there only if all
records go to it, so that nothing branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from cutwater.errors import InvalidArgument, Refused
from cutwater.pipeline.graph import Graph, Port, RowNode, SourceNode, TransformNode
from cutwater.pipeline.plan import Destination, Plan
from cutwater.pipeline.records import Records
from cutwater.pipeline.rows import RESERVED_COLUMN, RowType
from cutwater.spark.pipeline.envelope import COLUMNS, unpacked
from cutwater.spark.pipeline.error_translation import told
from cutwater.spark.pipeline.program import Program
from cutwater.spark.pipeline.routing import envelopes
from cutwater.spark.pipeline.source import envelope_batch
from cutwater.spark.pipeline.transform_check import applied, called, check, frame_schema
from cutwater.spark.session.session import session
from cutwater.spark.source.schema import arrow_schema

Round = tuple[list[int], bool]
"""Code that runs side by side, by its order in the program, and whether other records bypass it. Unchained row
functions have separate rounds: they pass on records of others, so nothing branches for them."""


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
                frame = frame.mapInArrow(_unchained(self._program, orders), COLUMNS)
            elif has_others:
                frame = frame.repartition(self._program.parallelism, "slice")
                rest = frame.mapInArrow(_passing(orders), COLUMNS)
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
        given = frame.mapInArrow(_unpacking(program, order, schema), schema)
        made, joins = applied(node, given, where)
        if joins:
            # A join may have scattered the rows of one record.
            made = made.repartition(program.parallelism, f"{RESERVED_COLUMN}.moment")
        return made.mapInArrow(_packing(program, order, joins), COLUMNS)


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


# ---------------------------------------------------------------------------------------------------------- in workers


def _passing(orders: list[int]) -> Any:
    """Make a filter that Spark cannot recognise as one: otherwise Spark would move it to before the branches."""

    def passing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.filter(pa.array([node not in orders for node in batch.column("node").to_pylist()], pa.bool_()))

    return passing


def _unchained(program: Program, orders: list[int]) -> Any:
    """Make a function that runs row functions in their own worker, next to the worker that their records come from."""

    def unchained(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with told():
            for batch in batches:
                yield from after_break(program, orders, batch)

    return unchained


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


def _unpacking(program: Program, order: int, schema: StructType) -> Any:
    def unpacking(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wanted = arrow_schema(schema)
        for batch in batches:
            for node, data in zip(batch.column("node").to_pylist(), batch.column("data"), strict=True):
                if node == order:
                    yield from _cast(unpacked(data.as_buffer()), wanted).to_batches()

    return unpacking


def _packing(program: Program, order: int, joins: bool) -> Any:
    def packing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with told():
            plan = program.plan
            node = plan.graph.nodes[order]
            assert isinstance(node, TransformNode), "code on data frames is a transform"
            parts = list(batches)
            if not parts:
                return
            records = _records(pa.Table.from_batches(parts), _declared(node), joins)
            arrived: dict[Destination, list[Records]] = {}
            plan.push(Port(order), records, arrived)
            # Sinks take rows in any slice; so they spread.
            context = TaskContext.get()
            home = 0 if context is None else context.partitionId() % program.slices
            for envelope in envelopes(program, arrived, home):
                yield envelope_batch([envelope])

    return packing


def _declared(node: TransformNode) -> RowType:
    assert node.rows is not None, "a run has schemas everywhere"
    return node.rows


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
