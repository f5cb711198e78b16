"""Describes the records of a source as a pipeline sees them: the columns to read, and the event time of each record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    """The rows of one source of a pipeline, and the event time of each: the log's own, another column, or that of a
    function."""

    def __init__(self, program: Program, topic: str) -> None:
        self._pipeline = program.name
        (self.node,) = (node for node in program.plan.graph.of_type(SourceNode) if node.topic == topic)
        self.rows = program.rows_of(topic)
        given, own = self.node.event_time, (program.event_time_of(topic), LOG_TIME)
        self._column = given if isinstance(given, str) and given not in own else LOG_TIME
        self.has_own_column = self._column != LOG_TIME
        watermark = self.node.watermark
        self.has_function = callable(given) or (watermark is not None and watermark.function is not None)

    def part(
        self, where: Where, topic: TopicInfo, info: StreamInfo, first: int, last: int, *, times_only: bool = False
    ) -> ReadPartition:
        """Return the part of a log stream that a task reads: the columns of the rows, and GLSN and time of each
        record."""
        fields = [pa.field("glsn", pa.int64()), pa.field(LOG_TIME, TIMESTAMP)]
        wanted = [self._column] if times_only else self.rows.names
        own = [self.rows.schema.field(name) for name in wanted if name not in ("glsn", LOG_TIME)]
        scan = Scan(where, pa.schema([*own, *fields]), True, ascending(), True, self.node.skips_malformed)
        return ReadPartition(scan, topic, info.stream, GLSN(first), GLSN(last), None)

    def event_times(self, batch: pa.RecordBatch, rows: Sequence[Row] | None = None) -> NDArray[np.int64]:
        """Return event times in milliseconds, rounded down."""
        function, glsns = self.node.event_time, batch.column("glsn")
        if callable(function):
            assert rows is not None, "a function needs rows"
            places = zip(glsns.to_pylist(), rows, strict=True)
            found = [self.call(glsn, row, partial(_time_of, function, row)) for glsn, row in places]
            return np.array(found, np.int64)
        column = batch.column(self._column)
        if column.null_count:
            glsn = glsns.to_pylist()[column.is_null().to_pylist().index(True)]
            raise self._failed(glsn, f"the column {self._column!r}, which is event time, is null")
        if pa.types.is_timestamp(column.type):
            times: NDArray[np.int64] = column.cast(TIMESTAMP, safe=False).view(pa.int64()).to_numpy() // MILLISECOND
        else:
            assert pa.types.is_integer(column.type), "the plan has refused other types"
            times = column.cast(pa.int64()).to_numpy()
        # Sums with larger times would overflow.
        if len(times) and not -TIME_MS_MAX <= times.min() <= times.max() <= TIME_MS_MAX:
            at = int(np.flatnonzero((times < -TIME_MS_MAX) | (times > TIME_MS_MAX))[0])
            raise self._failed(glsns[at].as_py(), far_off(int(times[at])))
        return times

    def call(self, glsn: int, row: Row, function: Callable[[], Any]) -> Any:
        """Call a user's function of event time or watermark. If it fails, name the record."""
        try:
            return function()
        except PipelineFailed:
            raise
        except Exception as error:
            raise PipelineFailed(
                f"{located(error)}, in the function of event_time or watermark, on the record "
                f"{row._asdict()!r}. Without a time a record has no place: repair the function",
                pipeline=self._pipeline,
                uid=self.node.label,
                glsn=GLSN(glsn),
            ) from error

    def _failed(self, glsn: int, what: str) -> PipelineFailed:
        return PipelineFailed(
            f"{what}. Without a time a record has no place: filter such records before they are appended",
            pipeline=self._pipeline,
            uid=self.node.label,
            glsn=GLSN(glsn),
        )


def _time_of(function: Callable[[Row], Any], row: Row) -> int:
    return to_milliseconds(function(row))
