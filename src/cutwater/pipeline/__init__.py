"""Event-time pipelines over the log: what they mean, independent of where they run. See ``docs/pipelines.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from cutwater.pipeline.windowing.aggregates import Aggregator
    from cutwater.pipeline.windowing.windows import Global, Session, Sliding, Trigger, Tumbling

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

_MODULES = {
    "clocks.watermarks": ("Watermark",),
    "context": ("Context",),
    "functions": ("BatchFunction", "BroadcastFunction", "CoProcessFunction", "PartitionFunction", "ProcessFunction"),
    "keyed_state.state": ("BroadcastState", "ListState", "MapState", "ValueState"),
    "local.local_runner": ("TestResult", "Timer"),
    "operators.partition_operator": ("OperatorListState", "UnionListState"),
    "rows": ("Row",),
    "stream": ("Pipeline", "Stream"),
    "values": ("to_datetime",),
    "windowing.aggregates": ("Aggregator",),
    "windowing.windows": ("Global", "Session", "Sliding", "Trigger", "Tumbling"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that using one name does not load the others."""
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = found = getattr(__import__(f"{__name__}.{module}", fromlist=[name]), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
