"""Describes the records of a source as a pipeline sees them: the columns to read, and the event time of each record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.convert.schemas import TIMESTAMP
from cutwater.core.read.watermark import ascending
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.errors import PipelineFailed
from cutwater.pipeline.failures import located
from cutwater.pipeline.graph import SourceNode
from cutwater.pipeline.rows import LOG_TIME, Row
from cutwater.pipeline.values import TIME_MS_MAX, far_off, to_milliseconds
from cutwater.spark.options import Where
from cutwater.spark.pipeline.program import Program
from cutwater.spark.source.read_task import ReadPartition, Scan
from cutwater.types import GLSN, MILLISECOND

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SourceRows:
    """The rows of one source of a pipeline."""

    def __init__(self, program: Program, topic: str) -> None:
        plan = program.plan
        (node,) = (node for node in plan.graph.of_type(SourceNode) if node.topic == topic)
        rows = program.rows_of(topic)
        self.rows = rows
        self.event_times = EventTimes(plan.name, node, program.event_time_of(topic))
        self._skips_malformed = node.skips_malformed

    def part(
        self, where: Where, topic: TopicInfo, info: StreamInfo, first: int, last: int, *, times_only: bool = False
    ) -> ReadPartition:
        """Return the part of a log stream that a task reads: the columns of the rows, and GLSN and time of each
        record."""
        fields = [pa.field("glsn", pa.int64()), pa.field(LOG_TIME, TIMESTAMP)]
        wanted = [self.event_times.column] if times_only else self.rows.names
        own = [self.rows.schema.field(name) for name in wanted if name not in ("glsn", LOG_TIME)]
        scan = Scan(where, pa.schema([*own, *fields]), True, ascending(), True, self._skips_malformed)
        return ReadPartition(scan, topic, info.stream, GLSN(first), GLSN(last), None)


class EventTimes:
    """Finds the event time of a record: the log's own, another column, or a function."""

    def __init__(self, pipeline: str, node: SourceNode, topic_column: str) -> None:
        self._pipeline, self._node = pipeline, node
        given = node.event_time
        self.column = given if isinstance(given, str) and given not in (topic_column, LOG_TIME) else LOG_TIME
        self.is_column = self.column != LOG_TIME

    def of_batch(self, batch: pa.RecordBatch, glsns: pa.Array, rows: Sequence[Row] | None = None) -> NDArray[np.int64]:
        """Return event times in milliseconds, rounded down."""
        if callable(self._node.event_time):
            assert rows is not None, "a function needs rows"
            return np.array(
                [self._called(glsn, row) for glsn, row in zip(glsns.to_pylist(), rows, strict=True)], np.int64
            )
        column = batch.column(self.column)
        if column.null_count:
            glsn = glsns.to_pylist()[column.is_null().to_pylist().index(True)]
            raise self._failed(glsn, f"the column {self.column!r}, which is event time, is null")
        if pa.types.is_timestamp(column.type):
            return self._near(column.cast(TIMESTAMP, safe=False).view(pa.int64()).to_numpy() // MILLISECOND, glsns)
        assert pa.types.is_integer(column.type), "the plan has refused other types"
        return self._near(column.cast(pa.int64()).to_numpy(), glsns)

    def _near(self, times: NDArray[np.int64], glsns: pa.Array) -> NDArray[np.int64]:
        """Return these times. Refuses times so large that sums with them would overflow."""
        if len(times) and not -TIME_MS_MAX <= times.min() <= times.max() <= TIME_MS_MAX:
            at = int(np.flatnonzero((times < -TIME_MS_MAX) | (times > TIME_MS_MAX))[0])
            raise self._failed(glsns[at].as_py(), far_off(int(times[at])))
        return times

    def _called(self, glsn: int, row: Row) -> int:
        function = self._node.event_time
        assert callable(function)
        return int(run_function(self._pipeline, self._node, glsn, row, lambda: to_milliseconds(function(row))))

    def _failed(self, glsn: int, what: str) -> PipelineFailed:
        return PipelineFailed(
            f"{what}. Without a time a record has no place: filter such records before they are appended",
            pipeline=self._pipeline,
            uid=self._node.label,
            glsn=GLSN(glsn),
        )


def run_function(pipeline: str, node: SourceNode, glsn: int, row: Row, call: Callable[[], Any]) -> Any:
    """Call a user's function of event time or watermark. If it fails, name the record."""
    try:
        return call()
    except PipelineFailed:
        raise
    except Exception as error:
        raise PipelineFailed(
            f"{located(error)}, in the function of event_time or watermark, on the record "
            f"{row._asdict()!r}. Without a time a record has no place: repair the function",
            pipeline=pipeline,
            uid=node.label,
            glsn=GLSN(glsn),
        ) from error
