"""Refuses what a run refuses independent of the contents of its log. ``Pipeline.test`` raises the same errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument
from cutwater.pipeline.graph import Graph, SinkNode, TransformNode
from cutwater.pipeline.local.spark_import import elsewhere, on_spark
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.rows import LOG_TIME, RowType
from cutwater.pipeline.values import check_times


def check_writes(name: str, graph: Graph) -> None:
    if not any(graph.of_type(SinkNode)):
        raise InvalidArgument(f"pipeline {name!r} has no sink: nothing would come of it")


def check_sink(topic: str, declared: pa.Schema, rows: RowType) -> str:
    """Return what is wrong with writing these rows to a topic with this schema, or an empty text."""
    given = (*rows.names, LOG_TIME)
    missing = [field.name for field in declared if field.name not in given and not field.nullable]
    unknown = [name for name in rows.names if name not in declared.names]
    if unknown:
        return f"the topic {topic!r} has no column {unknown[0]!r}: it has {', '.join(declared.names)}"
    if missing:
        return f"the topic {topic!r} needs the column {missing[0]!r}, which the rows do not have: {rows}"
    for field in rows.schema:
        try:
            check_times(field.type, declared.field(field.name).type)
        except InvalidArgument as error:
            return f"the column {field.name!r} of the topic {topic!r}: {error.message}"
    return ""


def topic_for(rows: RowType, plain: Sequence[str]) -> tuple[pa.Schema | None, str]:
    """Return schema and event-time column of a new topic for rows. ``plain``: columns of topics without a schema."""
    if set(rows.names) <= set(plain):
        return None, ""
    return rows.schema, "timestamp" if "timestamp" in rows.names else ""


def check_runnable(plan: Plan) -> None:
    """Refuse what a run would refuse, as far as that can be known without its log."""
    check_writes(plan.name, plan.graph)
    has_code = any(node.is_on_spark for node in plan.graph.of_type(TransformNode))
    transforms: Any = on_spark("pipeline.transform", plan.name) if has_code else None
    plan.require_schemas()
    _check_sinks(plan)
    if transforms is not None:
        transforms.check_transforms(plan.graph, plan, None)


def _check_sinks(plan: Plan) -> None:
    """Refuse rows that no topic can take. Only a run knows the rest about a topic, which may already exist."""
    schemas: Any = elsewhere("client.convert.schemas")
    names: Any = elsewhere("core.names")
    for node in plan.graph.of_type(SinkNode):
        rows = plan.rows_at(node.inputs[0])
        assert rows is not None, "schemas are there everywhere"
        try:
            names.check_topic_name(node.topic)
            schema, event_time = topic_for(rows, schemas.KEY_VALUE.names)
            if schema is not None:
                schemas.new_schema(schema, event_time)
            elif wrong := check_sink(node.topic, schemas.KEY_VALUE, rows):
                raise InvalidArgument(wrong)
        except InvalidArgument as error:
            raise InvalidArgument(f"pipeline {plan.name!r}, {node.label}: {error.message}") from None
