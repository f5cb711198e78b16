"""Event-time pipelines over the log: what they mean, independent of where they run. See ``docs/pipelines.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutwater.pipeline.aggregates import Aggregator
    from cutwater.pipeline.clocks.watermarks import Watermark
    from cutwater.pipeline.context import Context
    from cutwater.pipeline.functions import (
        BatchFunction,
        BroadcastFunction,
        CoProcessFunction,
        PartitionFunction,
        ProcessFunction,
    )
    from cutwater.pipeline.keyed_state.state import BroadcastState, ListState, MapState, ValueState
    from cutwater.pipeline.local.local_runner import TestResult, Timer
    from cutwater.pipeline.operators.partition_operator import OperatorListState, UnionListState
    from cutwater.pipeline.rows import Row
    from cutwater.pipeline.stream import Pipeline, Stream
    from cutwater.pipeline.values import to_datetime
    from cutwater.pipeline.windows import Global, Session, Sliding, Trigger, Tumbling

__all__ = [
    "Aggregator",
    "BatchFunction",
    "BroadcastFunction",
    "BroadcastState",
    "CoProcessFunction",
    "Context",
    "Global",
    "ListState",
    "MapState",
    "OperatorListState",
    "PartitionFunction",
    "Pipeline",
    "ProcessFunction",
    "Row",
    "Session",
    "Sliding",
    "Stream",
    "TestResult",
    "Timer",
    "Trigger",
    "Tumbling",
    "UnionListState",
    "ValueState",
    "Watermark",
    "to_datetime",
]

_WHERE = {
    "Aggregator": "cutwater.pipeline.aggregates",
    "BatchFunction": "cutwater.pipeline.functions",
    "BroadcastFunction": "cutwater.pipeline.functions",
    "BroadcastState": "cutwater.pipeline.keyed_state.state",
    "CoProcessFunction": "cutwater.pipeline.functions",
    "Context": "cutwater.pipeline.context",
    "Global": "cutwater.pipeline.windows",
    "ListState": "cutwater.pipeline.keyed_state.state",
    "MapState": "cutwater.pipeline.keyed_state.state",
    "OperatorListState": "cutwater.pipeline.operators.partition_operator",
    "PartitionFunction": "cutwater.pipeline.functions",
    "Pipeline": "cutwater.pipeline.stream",
    "ProcessFunction": "cutwater.pipeline.functions",
    "Row": "cutwater.pipeline.rows",
    "Session": "cutwater.pipeline.windows",
    "Sliding": "cutwater.pipeline.windows",
    "Stream": "cutwater.pipeline.stream",
    "TestResult": "cutwater.pipeline.local.local_runner",
    "Timer": "cutwater.pipeline.local.local_runner",
    "Trigger": "cutwater.pipeline.windows",
    "Tumbling": "cutwater.pipeline.windows",
    "UnionListState": "cutwater.pipeline.operators.partition_operator",
    "ValueState": "cutwater.pipeline.keyed_state.state",
    "Watermark": "cutwater.pipeline.clocks.watermarks",
    "to_datetime": "cutwater.pipeline.values",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that using one name does not load the others."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(__import__(_WHERE[name], fromlist=[name]), name)
    return found
