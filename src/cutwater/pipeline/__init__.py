"""Event-time pipelines over the log: what they mean, apart from where they run. See ``docs/pipelines.md``."""

from cutwater.pipeline.aggregates import Aggregator
from cutwater.pipeline.context import Context
from cutwater.pipeline.functions import (
    BatchFunction,
    BroadcastFunction,
    CoProcessFunction,
    PartitionFunction,
    ProcessFunction,
)
from cutwater.pipeline.partitions import OperatorListState, UnionListState
from cutwater.pipeline.rows import Row
from cutwater.pipeline.state import BroadcastState, ListState, MapState, ValueState
from cutwater.pipeline.stream import Pipeline, Stream
from cutwater.pipeline.test_run import TestResult, Timer
from cutwater.pipeline.watermarks import Watermark
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
]
