"""Takes savepoints from the checkpoints of pipelines, including running ones, and makes savepoints from data frames.

Tasks read the state of a micro-batch through Spark's own ``statestore`` source, partition by partition, and write it as
Parquet. So a savepoint may be larger than any machine's memory, and may be on any file system that Hadoop knows. The
driver writes only the manifest, after everything else is in place.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final
from uuid import uuid4

import pyarrow as pa  # type: ignore[import-untyped]
import pyspark
from msgspec.structs import replace
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

import cutwater
from cutwater.errors import CutwaterError, DeadlineExceeded, Refused, Unavailable
from cutwater.pipeline.clocks.clock_steps import MAX_TIME, NO_TIME
from cutwater.pipeline.clocks.rule_one import current
from cutwater.pipeline.stream import Pipeline
from cutwater.runtime.deadlines import check_timeout
from cutwater.savepoints import savepoint as places
from cutwater.savepoints import writing
from cutwater.savepoints.evolution import restoration
from cutwater.savepoints.files import Files, for_spark, is_local, local
from cutwater.savepoints.manifest import (
    FORMAT,
    STATE,
    VERSION,
    FileInfo,
    Manifest,
    OperatorState,
    RunPoint,
)
from cutwater.savepoints.program import OperatorInfo
from cutwater.savepoints.savepoint import Path, Savepoint, directory_of
from cutwater.savepoints.tables import compacted, table_schema, to_table
from cutwater.savepoints.writing import finish, now
from cutwater.spark.pipeline.operator import SENT
from cutwater.spark.pipeline.program import balanced_keys
from cutwater.spark.pipeline.state import SliceManifest, StoredChunk, decode_manifest
from cutwater.spark.savepoint.checkpoints import Checkpoint, FinishedBatch, Note, Origin
from cutwater.spark.savepoint.files import files_at
from cutwater.spark.session.session import session

ROWS_PER_FILE: Final = 500_000
ROWS_PER_BATCH: Final = 20_000
PIECES_PER_BATCH: Final = 8
_OF_SPARK: Final = (PySparkException, Py4JError)
"""Spark's own errors, and Java errors that PySpark has no class for, for example a missing file of the state store."""
_FOREIGN: Final = (*_OF_SPARK, OSError)
TIMEOUT_SECONDS: Final = 3_600.0
"""Default limit for taking a savepoint."""
TRIES: Final = 3
"""How often to try a newer micro-batch because the running pipeline removed the one that was being read."""

REPEAT_SECONDS: Final = 0.5
"""Cancelling is repeated at this interval, because between two jobs there is nothing to cancel."""


def take_savepoint(
    checkpoint: Path,
    target: Path,
    *,
    spark: SparkSession | None = None,
    batch: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Savepoint:
    """Write the state after a micro-batch, by default the last finished one, to the new directory ``target``.

    Any process may call this while the pipeline runs. The checkpoint does not change. After ``timeout`` seconds the
    attempt ends, and opening the half-written savepoint fails.
    """
    check_timeout(timeout)
    spark = spark or session("cutwater savepoint")
    source, place = absolute(checkpoint), absolute(target)
    kept, files = Checkpoint(source, files_at(spark, source)), files_at(spark, place)
    try:
        with TimeLimit(spark, timeout, f"the savepoint {place}") as limit:
            return _taken(spark, kept, place, files, batch, limit)
    except _FOREIGN as error:
        raise Unavailable(
            f"no savepoint of {source} could be written to {place}: {_first_line(error)}. The pipeline is as it was, "
            "and what is half-written is refused: see that the directory can be written to, or name another one"
        ) from None


def _taken(
    spark: SparkSession, kept: Checkpoint, place: str, files: Files, batch: int | None, limit: TimeLimit
) -> Savepoint:
    note = kept.require_note()
    if batch is None and note.origin is not None and not kept.planned():
        return _as_it_began(spark, note, note.origin, place, files)
    point = kept.point(batch)
    places.begin(place, files, {"pipeline": note.pipeline, "created": now(), "versions": versions()})
    for left in reversed(range(TRIES)):
        try:
            states = _written(spark, kept, note, point, place, files)
            break
        except _OF_SPARK as error:
            limit.check()
            files.delete(f"{place}/{STATE}")
            newest = kept.committed()[-1:]
            if batch is not None or not left or newest == [point.batch]:
                raise _unread(kept, point, error) from None
            point = kept.point()
    # A savepoint is complete only with its manifest, which is not written after the time limit.
    limit.check()
    return finish(place, files, _manifest(note, point), states)


def _as_it_began(spark: SparkSession, note: Note, origin: Origin, place: str, files: Files) -> Savepoint:
    """Copy the savepoint that the pipeline was started from, because nothing was done since. Refuses if a start from
    that savepoint needs special permission."""
    began = open_savepoint(spark, origin.savepoint)
    try:
        restoration(began.manifest, note.program)
        is_free = not origin.may_replay
    except Refused:
        is_free = False
    if not is_free or began.manifest.id != origin.id:
        raise Refused(
            f"the pipeline has not finished a micro-batch since it was started from {origin.savepoint}, which is still "
            "its state: start from that one again, or wait for the first micro-batch"
        )
    return writing.copied_savepoint(began, place, files=files)


def _unread(kept: Checkpoint, point: FinishedBatch, error: Exception) -> CutwaterError:
    old = kept.moved_from()
    if old is not None:
        return Refused(
            f"the checkpoint {kept.path} was moved or copied from {old}, and Spark's files in it name the old place. "
            "Run the pipeline with it once, which makes them name the new one, or move it back; then take the "
            "savepoint. The half-written savepoint is refused"
        )
    return Unavailable(
        f"the state after micro-batch {point.batch} of {kept.path} could not be read, or not be written: "
        f"{_first_line(error)}. The pipeline is as it was, and the half-written savepoint is refused: take another "
        "one, with a larger retain if the pipeline removes micro-batches quickly"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:400]


def open_savepoint(spark: SparkSession, path: Path) -> Savepoint:
    """Open a savepoint on any file system that Spark knows."""
    return places.open_savepoint(path, files=files_at(spark, os.fspath(path)))


def frame(spark: SparkSession, path: Path, uid: str) -> DataFrame:
    """Return the state of an operator in a savepoint, one row per key."""
    found = open_savepoint(spark, path)
    state = found.operator(uid)
    schema = from_arrow_schema(table_schema(state.operator))
    files = [for_spark(f"{found.path}/{file.path}") for file in state.files]
    return spark.read.schema(schema).parquet(*files) if files else spark.createDataFrame([], schema)


def new_savepoint(
    spark: SparkSession,
    target: Path,
    pipeline: Pipeline,
    *,
    glsn: int,
    states: Mapping[str, pa.Table | DataFrame],
    schemas: Mapping[str, pa.Schema] | None = None,
) -> Savepoint:
    """Make a savepoint like ``cutwater.savepoints.new_savepoint``, also from data frames, and on any file system. The
    rows of an operator pass through this process."""
    tables = {uid: given.toArrow() if isinstance(given, DataFrame) else given for uid, given in states.items()}
    files = files_at(spark, os.fspath(target))
    return writing.new_savepoint(target, pipeline, glsn=glsn, states=tables, schemas=schemas, files=files)


class TimeLimit:
    """A deadline for work that takes several Spark jobs, which have none themselves. Cancels the jobs that this thread
    starts within the context when the time is up. Jobs of other threads keep running."""

    def __init__(self, spark: SparkSession, seconds: float, what: str) -> None:
        """``what`` is the beginning of the error message, such as "the savepoint"."""
        self._context, self._seconds, self._what = spark.sparkContext, seconds, what
        self._tag = f"cutwater-{uuid4().hex}"
        self._is_late, self._has_ended = threading.Event(), threading.Event()
        self._watch = threading.Thread(target=self._cancel_when_late, name="time limit", daemon=True)

    def __enter__(self) -> TimeLimit:
        self._context.addJobTag(self._tag)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._watch.join()
        self._context.removeJobTag(self._tag)

    def check(self) -> None:
        """Raise if the time is up. Call this first after catching an error of Spark's: it may be a cancelled job."""
        if self._is_late.is_set():
            raise DeadlineExceeded(
                f"{self._what} was not done within {self._seconds:g} s, and was given up: allow for more with timeout= "
                "(--timeout)"
            )

    def _cancel_when_late(self) -> None:
        if self._has_ended.wait(self._seconds):
            return
        self._is_late.set()
        while True:
            # If the JVM is gone, its jobs are gone too.
            with suppress(Exception):
                self._context.cancelJobsWithTag(self._tag)
            if self._has_ended.wait(REPEAT_SECONDS):
                return


# ------------------------------------------------------------------------------------------------------------ the state


def _written(
    spark: SparkSession, kept: Checkpoint, note: Note, point: FinishedBatch, place: str, files: Files
) -> list[OperatorState]:
    late: dict[str, int] = {}
    states: list[OperatorState] = []
    for level in range(note.program.levels):
        # Spark numbers stateful operators from the sink backwards.
        source = _Source(spark, kept.path, note.program.levels - 1 - level, point.batch)
        slices = source.manifests()
        for manifest in slices.values():
            for uid, count in manifest.dropped_late.items():
                late[uid] = late.get(uid, 0) + count
        own = [operator for operator in note.program.operators if operator.level == level]
        states += [_operator(source, operator, slices, note.slices, place, files) for operator in own]
    order = [operator.uid for operator in note.program.operators]
    found = {state.operator.uid: state for state in states}
    return [replace(found[uid], dropped_late=late.get(uid, 0), late_sent=late.get(SENT + uid, 0)) for uid in order]


class _Source:
    """The contents of Spark's state store for one level after a micro-batch."""

    def __init__(self, spark: SparkSession, checkpoint: str, operator: int, batch: int) -> None:
        self.spark = spark
        reader = spark.read.format("statestore").option("operatorId", operator).option("batchId", batch)
        self._reader, self._checkpoint = reader, for_spark(checkpoint)

    def _load(self, name: str) -> DataFrame:
        return self._reader.option("stateVarName", name).load(self._checkpoint)

    def manifests(self) -> dict[int, SliceManifest]:
        rows = self._load("manifest").selectExpr("key.slice", "value.chunks").collect()
        return {row[0]: decode_manifest(bytes(row[1])) for row in rows}

    def pieces(self, chunks: Sequence[StoredChunk]) -> DataFrame:
        rows = self._load("pieces").selectExpr(
            "key.slice as slice", "user_map_key.name as name", "user_map_key.piece as piece",
            "user_map_value.data as data",
        )  # fmt: skip
        return rows.where(rows["name"].isin([chunk.name for chunk in chunks]))


def _operator(
    source: _Source,
    operator: OperatorInfo,
    slices: Mapping[int, SliceManifest],
    count: int,
    place: str,
    files: Files,
) -> OperatorState:
    chunks = {key: own.chunks[operator.uid] for key, own in slices.items() if own.chunks.get(operator.uid)}
    directory = directory_of(operator.uid)
    if not chunks:
        return OperatorState(operator, 0, 0, ())
    first = balanced_keys(count)[0]
    done = source.spark.sparkContext.accumulator(frozenset(), _Union())
    rows = source.pieces([chunk for own in chunks.values() for chunk in own]).mapInArrow(
        partial(_compacted, operator, chunks, first, done), from_arrow_schema(table_schema(operator))
    )
    state = OperatorState(operator, *_saved(source.spark, rows, place, directory, files))
    require_all(operator.uid, set(chunks), done.value)
    return state


class _Union(AccumulatorParam[frozenset[int]]):
    """Collects the slices that tasks have written. A slice written twice counts once."""

    def zero(self, value: frozenset[int]) -> frozenset[int]:
        return frozenset()

    def addInPlace(self, value1: frozenset[int], value2: frozenset[int]) -> frozenset[int]:  # noqa: N802
        return value1 | value2


def require_all(uid: str, wanted: Set[int], done: Set[int]) -> None:
    """Require that all slices were written. A slice from which nothing was read leaves no trace in the output."""
    if wanted - done:
        raise Unavailable(
            f"the state store gave nothing of {uid!r} in {len(wanted - done)} of {len(wanted)} slices, though they "
            "have state: the half-written savepoint is refused. Take another one"
        )


def _saved(
    spark: SparkSession, rows: DataFrame, place: str, directory: str, files: Files
) -> tuple[int, int, tuple[FileInfo, ...]]:
    """Write rows as Parquet. Returns their number and the files."""
    writer = rows.write.option("maxRecordsPerFile", ROWS_PER_FILE).option("compression", "zstd")
    with settings(
        spark,
        {
            "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
            "spark.sql.execution.arrow.maxRecordsPerBatch": str(PIECES_PER_BATCH),
        },
    ):
        writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(
            for_spark(f"{place}/{directory}")
        )
    names = files.list(f"{place}/{directory}")
    for name in names:
        if not name.endswith(".parquet"):
            files.delete(f"{place}/{directory}/{name}")
    paths = [f"{directory}/{name}" for name in names if name.endswith(".parquet")]
    seen = files.settle(f"{place}/{path}" for path in paths)
    found = [(path, seen[f"{place}/{path}"]) for path in paths]
    for path, own in found:
        if not own.rows:
            files.delete(f"{place}/{path}")
    infos = tuple(FileInfo(path, own.bytes, own.rows, own.sha256) for path, own in found if own.rows)
    return sum(info.rows for info in infos), 0, infos


def _compacted(
    operator: OperatorInfo,
    chunks: Mapping[int, Sequence[StoredChunk]],
    first: int,
    done: Accumulator[frozenset[int]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Convert the pieces of some slices to rows. Runs in a task. All pieces of a slice come together, so at most one
    slice is held at a time. ``first`` is the key of the slice that writes broadcast state, of which all slices have a
    copy. ``done`` collects the slices that were written."""
    waiting: dict[int, dict[tuple[str, int], bytes]] = {}
    for batch in batches:
        for key, name, piece, data in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            pieces = waiting.setdefault(key, {})
            pieces[name, piece] = data
            if len(pieces) == sum(chunk.pieces for chunk in chunks[key]):
                rows = to_table(_merged(chunks[key], waiting.pop(key)), operator, with_broadcast=key == first)
                for start in range(0, rows.num_rows, ROWS_PER_BATCH):
                    yield rows.slice(start, ROWS_PER_BATCH)
                done.add(frozenset({key}))
    if waiting:
        raise Refused(
            f"the state store lacks pieces of {operator.uid!r} in {len(waiting)} slices: the micro-batch was removed "
            "while it was read"
        )


def _merged(chunks: Sequence[StoredChunk], pieces: Mapping[tuple[str, int], bytes]) -> pa.RecordBatch:
    found = []
    for chunk in chunks:
        data = b"".join(pieces[chunk.name, i] for i in range(chunk.pieces))
        with pa.ipc.open_stream(data) as stream:
            found.append(stream.read_next_batch())
    return compacted(found)


# --------------------------------------------------------------------------------------------------------- the manifest


def _manifest(note: Note, point: FinishedBatch) -> Manifest:
    offset = point.offset
    clock = current(offset.clock)
    return Manifest(
        format=FORMAT,
        version=VERSION,
        id=uuid4().hex,
        pipeline=note.pipeline,
        created=now(),
        glsn=offset.glsn,
        watermark_ms=MAX_TIME if offset.ended else NO_TIME if clock is None else clock.watermark_ms,
        clock=clock,
        ended=offset.ended,
        slices=note.slices,
        parallelism=note.parallelism,
        run=RunPoint(note.pipeline, point.key, point.batch),
        log=note.log,
        sources=note.program.sources,
        sinks=note.program.sinks,
        operators=(),
        versions=versions(),
        topics=offset.topics,
        trimmed=offset.trimmed,
    )


def versions() -> dict[str, str]:
    return {"cutwater": cutwater.__version__, "spark": pyspark.__version__}


def absolute(path: Path) -> str:
    """Return a path that means the same to every process of Spark."""
    text = os.fspath(path)
    return os.path.abspath(local(text)) if is_local(text) else text.rstrip("/")


@contextmanager
def settings(spark: SparkSession, given: Mapping[str, str]) -> Iterator[None]:
    """Change settings of a session temporarily. A query or a job keeps the settings that it was started with."""
    before = {name: spark.conf.get(name, None) for name in given}
    for name, value in given.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
