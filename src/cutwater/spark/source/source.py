"""Implements the format ``cutwater`` for Spark. Spark calls everything here, in processes of its choice."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec.structs import replace
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from cutwater.client.loop_thread import LoopThread
from cutwater.spark.options import ReadOptions, WriteOptions, read_options, write_options
from cutwater.spark.plain_errors import each_plainly, plainly
from cutwater.spark.session.log_holder import servers_of
from cutwater.spark.session.token_safety import refuse_unprotected
from cutwater.spark.session.worker_connections import WorkerConnection, link_to
from cutwater.spark.sink.sink import BatchWriter, StreamWriter
from cutwater.spark.source.offsets import SourceOffset
from cutwater.spark.source.planning import Planner
from cutwater.spark.source.read_task import ReadPartition, read_part
from cutwater.spark.source.schema import schema_of
from cutwater.types import GLSN

Options = TypeVar("Options", ReadOptions, WriteOptions)


class CutwaterSource(DataSource):
    """The data source. Spark makes one whenever it needs it. An embedded log stays open for the process
    ``application``. ``unprotected`` says why tokens are refused in this application, if they are."""

    application = 0
    unprotected = ""

    @classmethod
    def name(cls) -> str:
        return "cutwater"

    @plainly
    def schema(self) -> StructType:
        # It is not known yet whether this is a batch or a streaming query.
        options = self._reached(read_options(self.options, streaming=None))
        link = link_to(options.where)
        return schema_of(options, link.loop.run(link.ranges.view(options.where.timeout)))

    @plainly
    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self._reached(read_options(self.options, streaming=False)), schema)

    @plainly
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return StreamReader(self._reached(read_options(self.options, streaming=True)), schema)

    @plainly
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(self._reached(write_options(self.options)), schema, overwrite)

    @plainly
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        return StreamWriter(self._reached(write_options(self.options)), schema, overwrite)

    def _reached(self, options: Options) -> Options:
        """Return the options with servers in place of a path."""
        where = options.where
        refuse_unprotected(where, self.unprotected)
        if where.path:
            servers = servers_of(where.path, self.application or os.getppid(), where.timeout)
            where = replace(where, servers=servers, path="")
        return replace(options, where=where)


def source_class(application: int, unprotected: str = "") -> type[DataSource]:
    """Return the data source class for a Spark application that this process has started."""
    return type("CutwaterSource", (CutwaterSource,), {"application": application, "unprotected": unprotected})


class _Reader:
    """Common part of the batch and the stream reader. Spark sends it to tasks, so it holds no connection."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options, self._schema = options, schema

    def planner(self, link: WorkerConnection) -> Planner:
        return Planner(self.options, link.ranges, self._schema)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # If there is nothing to read, Spark makes up a partition.
        return each_plainly(read_part(partition)) if isinstance(partition, ReadPartition) else iter(())


class BatchReader(_Reader, DataSourceReader):
    @plainly
    def partitions(self) -> Sequence[InputPartition]:
        link = link_to(self.options.where)
        planner = self.planner(link)

        async def plan() -> list[ReadPartition]:
            start, stop = await planner.start(), await planner.stop()
            if self.options.start.end == "earliest":
                # Trimming may have moved the beginning above the end.
                stop = max(start, stop)
            return await planner.parts(start, stop)

        return link.loop.run(plan())


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream. In the planner's process it lives as long as the query."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._planner: Planner | None = None
        self._first: SourceOffset | None = None
        self._through: GLSN | None = None

    def _planning(self) -> tuple[Planner, LoopThread]:
        link = link_to(self.options.where)
        if self._planner is None:
            self._planner = self.planner(link)
        return self._planner, link.loop

    @plainly
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the beginning of the query. Spark asks more than once, and the answer must stay the same."""
        planner, loop = self._planning()
        if self._first is None:
            self._first = loop.run(planner.first())
        return self._first.plain()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self.options.rows_max is not None:
            return ReadMaxRows(self.options.rows_max)
        return ReadAllAvailable() if self.options.bytes_max is None else ReadMaxBytes(self.options.bytes_max)

    @plainly
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        planner, loop = self._planning()
        self._through = loop.run(planner.newest())

    @plainly
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        planner, loop = self._planning()
        limited = not isinstance(limit, ReadAllAvailable)
        return loop.run(planner.following(SourceOffset.of(start), self._through, limited=limited)).plain()

    @plainly
    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        planner, loop = self._planning()
        return loop.run(planner.progress())

    @plainly
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        planner, loop = self._planning()
        return loop.run(planner.between(SourceOffset.of(start), SourceOffset.of(end)))

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the checkpoint stores how far the query has come, and the log does not."""

    def stop(self) -> None:
        if self._planner is not None:
            planner, loop = self._planning()
            loop.run(planner.close())
