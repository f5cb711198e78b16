"""Pipelines without Spark: source, operators and sink are called as Spark calls them, in one process, with crashes
where Spark could crash. And what ``Pipeline.test`` has to be told of a real log, so that it can be compared.
"""

from __future__ import annotations

import random
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

import cutwater
from cutwater.client.client import Client
from cutwater.client.publish.runs import RunStart
from cutwater.pipeline import Pipeline
from cutwater.pipeline.graph import SourceNode
from cutwater.protocol.scan_api import NOTHING
from cutwater.spark.options import Where
from cutwater.spark.pipeline.envelope import LATE, LATE_SENT, LEFT, envelope_batch
from cutwater.spark.pipeline.offsets import PipelineOffset
from cutwater.spark.pipeline.operator import LevelProcessor
from cutwater.spark.pipeline.program import Program
from cutwater.spark.pipeline.runner import checked, connected, plain_topics, provide_sinks
from cutwater.spark.pipeline.sink import PipelineWriter
from cutwater.spark.pipeline.source import RECORDS_MAX, PipelineReader, RangePart, SourceRunOptions
from cutwater.spark.pipeline.state import NO_QUERY, forget
from cutwater.spark.pipeline.transform import after_break, check_transforms, rounds_of
from cutwater.spark.session.worker_connections import link_to
from cutwater.spark.sink.sink import Staged, stage_unless_decided
from cutwater.types import MILLISECOND


def program_of(
    pipeline: Pipeline, client: Client, parallelism: int, slices: int, spark: SparkSession | None = None
) -> Program:
    """The pipeline with the schemas of its topics. Creates the missing topics of sinks, as a run does."""
    program = checked(pipeline, client, parallelism, slices)
    check_transforms(pipeline.graph, program.plan, spark)
    provide_sinks(program.plan, client)
    return program


class _Value:
    def __init__(self, store: dict[Any, Any]) -> None:
        self._store = store

    def get(self) -> Any:
        return self._store.get("manifest")

    def update(self, value: Any) -> None:
        self._store["manifest"] = value


class _Map:
    def __init__(self, store: dict[Any, Any]) -> None:
        self._store = store

    def getValue(self, key: Any) -> Any:  # noqa: N802
        return self._store[key]

    def updateValue(self, key: Any, value: Any) -> None:  # noqa: N802
        self._store[key] = value

    def removeKey(self, key: Any) -> None:  # noqa: N802
        del self._store[key]


class InOneProcess:
    """One query: offsets, state and published batches are what a checkpoint and the log keep; the rest may be lost."""

    def __init__(
        self,
        pipeline: Pipeline,
        servers: str,
        *,
        rows_max: int | None = None,
        parallelism: int = 2,
        slices: int = 16,
        drain: bool = True,
        follow: bool = False,
        start: str = "earliest",
        until: int | None = None,
        after: int | None = None,
        begins_empty: bool = False,
    ) -> None:
        """``follow``: it has no end, and ``step`` takes one micro-batch. ``after``: the position of a savepoint without
        clocks, in place of ``start``. ``begins_empty``: as for a job.
        """
        self._where = Where(servers=servers)
        client = self._client = connected(self._where)
        self._pipeline, self._program = pipeline, program_of(pipeline, client, parallelism, slices)
        end = None if follow else until or int(client.tail())
        begin = None if after is None else PipelineOffset(after, slices)
        self._options = SourceRunOptions(
            start, rows_max or RECORDS_MAX, end, drain and not follow, begin, begins_empty=begins_empty
        )
        self._key = f"one process {random.random()}"
        self._offset: dict[str, Any] | None = None
        self.state: dict[tuple[int, int], dict[Any, Any]] = {}
        self.batch = 0
        self._start()

    def _start(self) -> None:
        self._reader = PipelineReader(self._program, self._where, self._options)
        plain = plain_topics(self._program, self._client)
        self._writer = PipelineWriter(self._program, self._where, plain, RunStart(replay=True))
        if self._options.until is not None:
            self._reader.prepareForTriggerAvailableNow()
        if self._offset is None:
            self._offset = self._reader.initialOffset()

    def close(self) -> None:
        self._reader.stop()
        self._client.close()
        forget(NO_QUERY)

    def go_on(self, *, drain: bool, slices: int | None = None) -> None:
        """Another run from the same checkpoint, to the end that the log has now."""
        if slices is not None:
            self._program = program_of(self._pipeline, self._client, 1, slices)
        self._reader.stop()
        until = int(self._client.tail())
        self._options = msgspec.structs.replace(self._options, until=until, drain=drain)
        self._start()
        self.run()

    def step(self) -> bool:
        """A micro-batch, if there is anything new."""
        end = _json(self._reader.latestOffset(self._offset, self._reader.getDefaultReadLimit()))
        if end == self._offset:
            return False
        self.state = self._micro_batch(end, deepcopy(self.state), publishes=True)
        self._offset, self.batch = end, self.batch + 1
        return True

    @property
    def offset(self) -> dict[str, Any]:
        assert self._offset is not None
        return self._offset

    def planned_again(self, start: dict[str, Any]) -> list[RangePart]:
        """The ranges between an offset and the present one, after a restart."""
        self._reader.stop()
        self._start()
        return [part for part in self._reader.partitions(start, self.offset) if isinstance(part, RangePart)]

    def run(self, choice: random.Random | None = None) -> None:
        """To the end of the input; with ``choice``, with crashes."""
        limit = self._reader.getDefaultReadLimit() or ReadAllAvailable()
        while True:
            end = _json(self._reader.latestOffset(self._offset, limit))
            if end == self._offset:
                return
            crashes = choice.choice([0, 0, 0, 1, 2]) if choice is not None else 0
            for _ in range(crashes):
                self._micro_batch(end, deepcopy(self.state), publishes=choice.random() < 0.5)  # type: ignore[union-attr]
                self._reader.stop()
                self._start()
            self.state = self._micro_batch(end, deepcopy(self.state), publishes=True)
            self._offset, self.batch = end, self.batch + 1

    def _micro_batch(
        self, end: dict[str, Any], state: dict[tuple[int, int], dict[Any, Any]], *, publishes: bool
    ) -> dict[tuple[int, int], dict[Any, Any]]:
        assert self._offset is not None
        parts = self._reader.partitions(self._offset, end)
        rows = [row for part in parts for batch in self._reader.read(part) for row in batch.to_pylist()]
        rows = self._past_breaks(rows, 0)
        for level in range(len(self._program.plan.levels)):
            by_slice: dict[int, list[Any]] = {}
            for row in rows:
                by_slice.setdefault(row["slice"], []).append(SimpleNamespace(**row))
            rows = []
            for key, own in by_slice.items():
                kept = state.setdefault((level, key), {})
                rows += self._level(level, key, own, kept)
            rows = self._past_breaks(rows, level + 1)
        staged = self._stage(rows)
        if publishes:
            self._writer.commit([staged], self.batch)
        return state

    def _past_breaks(self, rows: list[dict[str, Any]], boundary: int) -> list[dict[str, Any]]:
        """What becomes of the rows in the chains that begin there."""
        for orders, _ in rounds_of(self._program.plan)[boundary]:
            made = after_break(self._program, orders, self._envelopes(rows))
            rows = [row for batch in made for row in batch.to_pylist()]
        return rows

    def _envelopes(self, rows: list[dict[str, Any]]) -> Any:
        return envelope_batch([(row["slice"], row["node"], row["input"], bytes(row["data"])) for row in rows])

    def _level(self, level: int, key: int, rows: list[Any], kept: dict[Any, Any]) -> list[dict[str, Any]]:
        processor = LevelProcessor(self._program, level)
        handle = SimpleNamespace(getValueState=lambda *_: _Value(kept), getMapState=lambda *_: _Map(kept))
        processor.init(handle)
        made = [row.asDict() for row in processor.handleInputRows((key,), iter(rows), None)]
        # Spark counts these, and they go nowhere.
        return [row for row in made if row["node"] not in (LATE, LATE_SENT, LEFT)]

    def _stage(self, rows: list[dict[str, Any]]) -> Staged:
        batch = self._envelopes(rows)
        # One log serves many runs of one program.
        run = self._client.open_run(self._pipeline.name, self._key, start=RunStart(replay=True))
        return stage_unless_decided(run, self.batch, iter([batch]), self._writer.staged)


def _json(offset: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a checkpoint."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(offset))
    return made


def placed(log: cutwater.Client, pipeline: Pipeline, until: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """The topics of a pipeline as ``test`` takes them: records, fences and marks of the log's clock at their places."""
    link = link_to(Where(servers=log.servers))
    view = link.loop.run(link.ranges.view(10))
    end = until or view.catalog.high_watermark
    found: dict[str, list[dict[str, Any]]] = {}
    taken: set[int] = set()
    for node in pipeline.graph.of_type(SourceNode):
        rows = found[node.topic] = []
        declared, fences = {}, []
        for info in view.streams_of(view.topics[node.topic].topic):
            heads = link.loop.run(link.ranges.heads(info, 1, end, 10))  # type: ignore[arg-type]
            for _, first, count, cut, most, watermark, idle in zip(*heads.columns, heads.idle, strict=True):
                said: dict[str, Any] = {} if watermark == NOTHING else {"_watermark": watermark // MILLISECOND}
                if idle:
                    said["_idle"] = True
                if most == NOTHING:
                    fences.append({"_stream": int(info.stream), "_glsn": first, "_time": cut // MILLISECOND, **said})
                else:
                    declared[first + count - 1] = said
        for record in log.subscribe(node.topic, follow=False):
            if record.glsn > end:
                break
            place = {"_stream": int(record.stream), "_glsn": int(record.glsn), "_time": record.ingested_us // 1000}
            place |= declared.get(record.glsn, {})
            # A topic without a schema has records, but no row of named columns.
            plain = {"key": record.key, "value": record.value, "timestamp": record.timestamp}
            rows.append({**(record.row or plain), **place})
        rows += fences
        taken |= {row["_glsn"] for row in rows}
    marks = link.loop.run(link.ranges.marks(0, end, 10))  # type: ignore[arg-type]
    first = next(iter(found.values()))
    ticks = {int(mark.glsn): {"_time": mark.time // MILLISECOND} for mark in marks}
    # A run ends at the end of the log, whoever's record is there.
    ticks.setdefault(int(end), {})
    first += [{"_glsn": glsn, **tick} for glsn, tick in ticks.items() if glsn not in taken]
    return {topic: sorted(rows, key=lambda row: row["_glsn"]) for topic, rows in found.items()}


def written(log: cutwater.Client, topic: str) -> list[dict[str, Any]]:
    return [dict(record.row) for record in log.subscribe(topic, follow=False)]
