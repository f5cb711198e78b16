"""Runs a pipeline on Spark: one query with one source, one stateful operator per level, and one sink."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import structs
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from cutwater.client.client import Client, connect
from cutwater.client.cluster.topics import Topic
from cutwater.client.convert.schemas import KEY_VALUE
from cutwater.core.jobs.checkpoint_stores import check_checkpoint_store
from cutwater.core.names import check_topic_name
from cutwater.durations import Duration, milliseconds
from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, NotFound, Refused
from cutwater.jobs.checkpoint_hold import Hold
from cutwater.jobs.job_file import require_parallelism
from cutwater.jobs.places import root_of
from cutwater.jobs.spark_conf import refuse_open_ui
from cutwater.pipeline.clocks.clock_steps import DRAIN_FIRINGS, check_drain_firings
from cutwater.pipeline.graph import SinkNode, SourceNode
from cutwater.pipeline.keyed_state.keys import SLICES_DEFAULT
from cutwater.pipeline.local.run_checks import check_sink, check_writes, topic_for
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.rows import RowType
from cutwater.pipeline.stream import Pipeline
from cutwater.savepoints.evolution import Restoration
from cutwater.savepoints.files import for_spark, is_local
from cutwater.savepoints.savepoint import Path, Savepoint
from cutwater.schema_text import shown
from cutwater.spark.options import TOKEN_FILE, Where, where_of
from cutwater.spark.pipeline.envelope import COLUMNS
from cutwater.spark.pipeline.error_translation import translated
from cutwater.spark.pipeline.operator import LevelProcessor, left_timers, observed
from cutwater.spark.pipeline.program import Program, pickled
from cutwater.spark.pipeline.sink import FORMAT as SINK_FORMAT
from cutwater.spark.pipeline.sink import PipelineSink
from cutwater.spark.pipeline.source import FORMAT as SOURCE_FORMAT
from cutwater.spark.pipeline.source import RECORDS_MAX, PipelineSource, SourceRunOptions
from cutwater.spark.pipeline.state import forget
from cutwater.spark.pipeline.transform import Transforms, check_transforms
from cutwater.spark.savepoint.checkpoints import Checkpoint
from cutwater.spark.savepoint.files import files_at, require_store
from cutwater.spark.savepoint.savepoint_restore import Beginning, beginning, initial_state, wish_of
from cutwater.spark.savepoint.savepoints import TIMEOUT_SECONDS, absolute, settings, take_savepoint
from cutwater.spark.savepoint.succession import begin_from, fence
from cutwater.spark.session.log_holder import servers_of
from cutwater.spark.session.session import (
    LATE_WORKER,
    MANAGER,
    REMOTE_MANAGER,
    STARTS_MAX,
    check_session_conf,
    provide_format,
    session,
)
from cutwater.spark.session.session import start as start_query
from cutwater.spark.session.token_safety import file_of, refuse_unprotected, settings_of, why_no_tokens

OPEN_SECONDS = 60.0
RETAIN_MIN = 2
FINISH_SECONDS = 600.0
"""How long a micro-batch may take that must be finished before a savepoint."""
_PARTITIONS = "spark.sql.shuffle.partitions"
_RETAINED = "spark.sql.streaming.minBatchesToRetain"

Until = Literal["now"] | int | datetime


@dataclass(frozen=True)
class Query:
    """Everything needed to start the query of a pipeline, or to start it again."""

    spark: SparkSession
    program: Program
    transforms: Transforms
    where: Where
    options: SourceRunOptions
    sink: str
    checkpoint: str
    trigger_ms: int | None
    retain: int | None
    begin: Beginning

    def translated(self) -> AbstractContextManager[None]:
        """Return a context in which Spark is called: it translates Spark's errors to Cutwater errors."""
        return translated(self.program.name, self.checkpoint)

    def start(self) -> StreamingQuery:
        spark, program = self.spark, self.program
        reader = spark.readStream.format(SOURCE_FORMAT).options(**self.where.options())
        rows = self.transforms.after(reader.option("given", pickled(program, self.options)).load(), 0)
        for level in range(len(program.plan.levels)):
            processor, state = LevelProcessor(program, level), initial_state(spark, self.begin, program, level)
            grouped = None if state is None else state.groupBy("slice")
            rows = rows.groupBy("slice").transformWithState(processor, COLUMNS, "Append", "None", grouped)
            rows = self.transforms.after(observed(rows, program.plan, level), level + 1)
        writer = (
            rows.writeStream.format(SINK_FORMAT)
            .queryName(program.name)
            .options(**self.where.options())
            .option("given", self.sink)
            .option("checkpointLocation", for_spark(self.checkpoint))
            .outputMode("append")
        )
        if self.options.until is not None:
            writer = writer.trigger(availableNow=True)
        elif self.trigger_ms is not None:
            writer = writer.trigger(processingTime=f"{self.trigger_ms} milliseconds")
        given = {_PARTITIONS: str(program.parallelism)}
        if not is_local(self.checkpoint):
            given[MANAGER] = REMOTE_MANAGER
        if self.retain is not None:
            given[_RETAINED] = str(self.retain)
        with settings(spark, given):
            return start_query(writer)


class PipelineRun:
    """A pipeline that runs or has run."""

    def __init__(self, query: Query, hold: Hold | None = None) -> None:
        """``hold`` is released when the query is known to have ended."""
        self.name, self.checkpoint = query.program.name, query.checkpoint
        self._plan, self._hold = query, hold
        with query.translated():
            self._query = query.start()
        self._id, self._starts = str(self._query.id), 1

    @property
    def is_active(self) -> bool:
        return bool(self._query.isActive)

    @property
    def progress(self) -> Mapping[str, Any] | None:
        """What Spark reports about the last micro-batch."""
        found: Mapping[str, Any] | None = self._query.lastProgress
        return found

    @property
    def left_timers(self) -> dict[str, int]:
        """After a drained run: how many timers did not fire, by uid, because their keys had reached the limit."""
        return left_timers(self.progress or {})

    @property
    def restoration(self) -> Restoration | None:
        """What happened to the state of the savepoint that this run started from. None if it started without one, or
        went on from a checkpoint."""
        return self._plan.begin.restoration

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended. Returns False if ``timeout`` seconds pass first. Raises the error that ended
        the run, if any."""
        try:
            is_over = self._wait(timeout)
        except CutwaterError as error:
            self._let_go(error)
            raise
        if is_over:
            self._let_go()
        return is_over

    def _let_go(self, error: BaseException | None = None, *, is_stopped: bool = False) -> None:
        if self._hold is not None:
            self._hold.let_go(error, is_stopped=is_stopped)

    def _wait(self, timeout: float | None) -> bool:
        with self._plan.translated():
            deadline = None if timeout is None else time.monotonic() + timeout
            try:
                while not self._ended(None if deadline is None else deadline - time.monotonic()):
                    if deadline is not None and time.monotonic() >= deadline:
                        return False
                return True
            finally:
                if not self.is_active:
                    forget(self._id)

    def _ended(self, timeout: float | None) -> bool:
        """Wait for the end. If the query ended only because a Python process of the driver started too slowly, start it
        again from the checkpoint: Spark's limit for such processes cannot be set."""
        try:
            if timeout is None:
                self._query.awaitTermination()
                return True
            return bool(self._query.awaitTermination(max(1, round(timeout))))
        except StreamingQueryException as error:
            if LATE_WORKER not in str(error) or self._starts >= STARTS_MAX:
                raise
        self._starts += 1
        self._query = self._plan.start()
        return False

    def savepoint(self, target: Path, *, batch: int | None = None, timeout: float = TIMEOUT_SECONDS) -> Savepoint:
        """Write a savepoint of the last finished micro-batch, or of a retained one. The pipeline keeps running.
        ``timeout`` is in seconds."""
        return take_savepoint(self.checkpoint, target, spark=self._plan.spark, batch=batch, timeout=timeout)

    def stop(self, savepoint: Path | None = None, *, timeout: float = TIMEOUT_SECONDS) -> Savepoint | None:
        """Stop after the current micro-batch or in the middle of it: this makes no difference to the output. With
        ``savepoint``, a new directory, the savepoint covers everything that is in the output; writing it may take
        ``timeout`` seconds."""
        try:
            with self._plan.translated():
                self._query.stop()
                forget(self._id)
            if savepoint is None:
                return None
            self._finish_planned()
            return self.savepoint(savepoint, timeout=timeout)
        finally:
            self._let_go(is_stopped=True)

    def _finish_planned(self) -> None:
        """Finish the micro-batch that is planned and that Spark has not recorded as done.

        Its rows may be published already, or the commit may still be on its way to the log, from a process that has not
        noticed the end of the query. It is impossible to know which. When the micro-batch is finished, it makes no
        difference: the first decision stands, and the state is kept.
        """
        kept = Checkpoint(self.checkpoint, files_at(self._plan.spark, self.checkpoint))
        done, planned = kept.committed(), kept.planned()
        if not planned or done[-1:] == planned[-1:]:
            return
        end = kept.offset(planned[-1])
        if done and end.ended and not self._is_published(kept.key, planned[-1]):
            # The input would end with this micro-batch, and no run could start from the savepoint.
            return
        # The input ends only where a run says so, and not where this one happens to be stopped.
        options = structs.replace(self._plan.options, until=end.glsn, drain=False)
        try:
            last = PipelineRun(replace(self._plan, options=options))
            if last.wait(FINISH_SECONDS):
                return
            last.stop()
        except CutwaterError:
            # A micro-batch that fails was never committed, so the run that starts from the savepoint can do it.
            if done and not self._is_published(kept.key, planned[-1]):
                return
            raise
        raise DeadlineExceeded(
            f"pipeline {self.name!r} is stopped, but its last micro-batch was not finished in {FINISH_SECONDS:g} "
            "seconds, so there is no savepoint: run it again, then stop it anew"
        )

    def _is_published(self, key: str | None, batch: int) -> bool:
        with connected(self._plan.where) as client:
            return any(run.key == key and run.last_batch >= batch for run in client.find_runs(self.name))


def run_pipeline(
    pipeline: Pipeline,
    *,
    until: Until | None = None,
    drain: bool = False,
    drain_firings: int = DRAIN_FIRINGS,
    available_now: bool = False,
    parallelism: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    trigger: Duration | None = None,
    start: str | int = "earliest",
    max_records_per_trigger: int | None = None,
    slices: int | None = None,
    spark: SparkSession | None = None,
    conf: Mapping[str, str] | None = None,
    token: str | os.PathLike[str] = "",
    tls_ca: str | os.PathLike[str] | None = None,
    tls_certificate: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    wait: bool = True,
    from_savepoint: Path | Savepoint | None = None,
    replay_output: bool = False,
    allow_non_restored_state: bool = False,
    retain: int | None = None,
    job_epoch: int = 0,
    succeeds: str | os.PathLike[str] | None = None,
) -> PipelineRun:
    """Run a pipeline, and return when it ends; with ``wait=False`` return at once.

    ``until`` is the last position, "now" for the current end of the log, or a time of the log's clock. With ``drain``
    the input ends there: the watermark becomes the maximum, and the run is finished permanently. Of the timers that
    functions register while it drains, ``drain_firings`` per key and operator fire. Without ``drain``, and with
    ``available_now``, which means ``until="now"``, the run pauses there, and another run goes on from its checkpoint.
    ``parallelism`` is the number of tasks that work at once, and ``slices`` the number of slices that state is cut
    into. A checkpoint keeps the numbers that it was made with and refuses others; a start from a savepoint can change
    them.

    ``from_savepoint`` starts a new checkpoint with the state and at the position of a savepoint. If output is already
    published under this name, a new checkpoint starts only with ``replay_output``, or at a ``start`` beyond the input
    of that output. ``allow_non_restored_state`` drops state that belongs to no operator of the program. ``retain`` is
    the number of micro-batches that a checkpoint keeps, to take savepoints from.

    ``job_epoch`` is the assignment of the job with this name that runs the pipeline: drivers of earlier assignments are
    refused by the log from then on. Each assignment has a checkpoint of its own, which begins from the one that it
    ``succeeds``, after the last batch that the log has decided.

    ``spark`` is a session to run in. Without it, one is made on this machine; ``conf`` are settings of Spark for it.

    ``token`` is the token, or the ``pathlib.Path`` of a file with it. ``tls_ca`` is the authority of the servers;
    ``tls_certificate`` and ``tls_key`` are for a client without a token. All are files that each task reads.
    """
    if available_now and (until is not None or drain):
        raise InvalidArgument("available_now is until='now' without drain: give one or the other")
    if drain and until is None:
        raise InvalidArgument("drain ends the input at a position: say which, with until=…")
    check_drain_firings(drain_firings)
    _check_until(until)
    trigger_ms = None if trigger is None else milliseconds(trigger, "trigger")
    check_writes(pipeline.name, pipeline.graph)
    _warn_of_loops(pipeline)
    rows_max = RECORDS_MAX if max_records_per_trigger is None else max_records_per_trigger
    if rows_max < 1:
        raise InvalidArgument(f"max_records_per_trigger is {rows_max}: it must be at least 1")
    until = "now" if available_now else until
    _check_sizes(parallelism, slices)
    _check_start(start)
    if retain is not None and retain < RETAIN_MIN:
        raise InvalidArgument(f"retain is {retain}: a checkpoint keeps at least {RETAIN_MIN} micro-batches")
    wish = wish_of(from_savepoint, replay_output, allow_non_restored_state, job_epoch)
    check_session_conf(conf or {}, spark)
    settings = settings_of(spark) if token and spark is not None else {"spark.master": "local"}
    where = where_of_run(pipeline, file_of(token, settings), (tls_ca, tls_certificate, tls_key))
    if where.token():
        refuse_open_ui(conf or {})
    began_with = None if wish.savepoint is None else absolute(wish.savepoint)
    if checkpoint is not None:
        check_checkpoint_store(os.fspath(checkpoint))
    if checkpoint is None:
        hold = Hold(pipeline.name, None, began_with, root_of(log_key(where), pipeline.name))
    else:
        hold = Hold(pipeline.name, absolute(checkpoint), began_with)
    try:
        if spark is None and not is_local(hold.place):
            # Only Spark can read the settings of this checkpoint.
            spark = session(f"cutwater {pipeline.name}", master=f"local[{parallelism or '*'}]", config=conf)
        with translated(pipeline.name, hold.place), connected(where) as client:
            if spark is not None:
                require_store(spark, hold.place)
            kept = Checkpoint(hold.place, files_at(spark, hold.place))
            if succeeds is not None:
                begin_from(client, pipeline.name, kept, absolute(succeeds), job_epoch)
            tasks, pieces = sizes_of(kept, parallelism, slices)
            program = checked(pipeline, client, tasks, pieces)
            end = until_position(client, until)
            spark = spark or session(f"cutwater {pipeline.name}", master=f"local[{tasks}]", config=conf)
            if where.token():
                refuse_unprotected(where, why_no_tokens(settings_of(spark)))
            provide_format(spark, PipelineSource)
            provide_format(spark, PipelineSink)
            check_transforms(pipeline.graph, program.plan, spark)
            begin = beginning(spark, client, program, hold.place, wish, str(start))
            if job_epoch:
                fence(client, program.name, kept, begin.start, job_epoch)
            # All checks have passed, so topics can be created now.
            provide_sinks(program.plan, client)
            # The first micro-batch of a job is what tells that it has come up, also while there is no input.
            options = SourceRunOptions(
                str(start), rows_max, end, drain, begin.offset, drain_firings, begins_empty=job_epoch > 0
            )
            sink = pickled(program, plain_topics(program, client), begin.start, job_epoch)
        transforms = Transforms(pipeline.graph, program)
        query = Query(spark, program, transforms, where, options, sink, hold.place, trigger_ms, retain, begin)
        run = PipelineRun(query, hold)
    except BaseException as error:
        hold.let_go(error, has_begun=False)
        raise
    if wait:
        run.wait()
    return run


def _warn_of_loops(pipeline: Pipeline) -> None:
    """Warn if a pipeline writes to a topic that it reads, because it reads its own output again."""
    read = {node.topic for node in pipeline.graph.of_type(SourceNode)}
    for topic in sorted(read & {node.topic for node in pipeline.graph.of_type(SinkNode)}):
        warnings.warn(
            f"pipeline {pipeline.name!r} writes to the topic {topic!r}, which it reads: it reads its own output again, "
            "without an end unless a filter stops it. Write to another topic, unless this is meant",
            stacklevel=4,
        )


def _check_sizes(parallelism: int | None, slices: int | None) -> None:
    for name, given in (("parallelism", parallelism), ("slices", slices)):
        if given is not None and given < 1:
            raise InvalidArgument(f"{name} is {given}: it must be at least 1")
    if parallelism is not None and parallelism > (slices or SLICES_DEFAULT):
        raise InvalidArgument(
            f"parallelism is {parallelism}: it must be from 1 to the number of slices, {slices or SLICES_DEFAULT}"
        )


def _check_start(start: object) -> None:
    is_position = str(start).isdecimal() and int(str(start)) >= 1 and not isinstance(start, bool)
    if start not in ("earliest", "latest") and not is_position:
        raise InvalidArgument(f"start is {start!r}: give 'earliest', 'latest' or a GLSN from 1 on")


def sizes_of(checkpoint: Checkpoint, parallelism: int | None, slices: int | None) -> tuple[int, int]:
    """Return parallelism and slices: those that the checkpoint was made with, or else the requested ones."""
    note = checkpoint.note()
    if note is None or (note.origin is None and not checkpoint.planned()):
        slices = slices or SLICES_DEFAULT
        return parallelism or min(os.cpu_count() or 1, slices), slices
    require_parallelism(checkpoint.path, note.parallelism, parallelism)
    if slices not in (None, note.slices):
        raise Refused(
            f"state in the checkpoint {checkpoint.path} is cut into {note.slices} slices, not {slices}: leave slices "
            "out, or start from a savepoint, which can be cut anew"
        )
    return note.parallelism, note.slices


Files = tuple[str | os.PathLike[str] | None, ...]


def where_of_run(pipeline: Pipeline, token_file: str, tls: Files = (), application: int = 0) -> Where:
    """Return the log of a pipeline, and files with the credentials for it: authority, certificate and key. An embedded
    log stays open for the process ``application``, by default this one."""
    if not pipeline.log:
        raise InvalidArgument(
            f"pipeline {pipeline.name!r} does not say which log it reads: Pipeline({pipeline.name!r}, log='./data') or "
            "log='cutwater://host:port'"
        )
    servers = pipeline.log
    if "://" not in servers:
        servers = servers_of(servers, application or os.getpid(), OPEN_SECONDS)
    names = ("tls.ca", "tls.certificate", "tls.key")
    files = {name: os.path.abspath(path) for name, path in zip(names, tls, strict=False) if path}
    return where_of({"servers": servers, TOKEN_FILE: token_file, **files})


def connected(where: Where) -> Client:
    tls, token = where.access().tls, where.token()
    return connect(where.servers, token=token, tls=tls, insecure=where.insecure, timeout=where.timeout)


def log_key(where: Where) -> str:
    """Return the key of the cluster, by which its checkpoints are found."""
    with connected(where) as client:
        return client.cluster_key()


# ------------------------------------------------------------------------------------------------------------- binding


def checked(pipeline: Pipeline, client: Client, parallelism: int, slices: int) -> Program:
    """Return the pipeline with the schemas of its topics, without creating anything. Refuses every error that can be
    found without Spark, so that the user need not wait for Spark to start."""
    topics = {topic.name: topic for topic in client.topics()}
    rows: dict[str, RowType] = {}
    event_times: dict[str, str] = {}
    for node in pipeline.graph.of_type(SourceNode):
        topic = topics.get(node.topic)
        if topic is None:
            raise _no_source(pipeline, node.topic, client)
        rows[node.topic] = _source_rows(pipeline.name, node, topic)
        event_times[node.topic] = topic.event_time or ("timestamp" if topic.schema is None else "")
    program = Program(
        pipeline.name, pipeline.graph, rows, parallelism=parallelism, slices=slices, event_times=event_times
    )
    program.plan.require_schemas()
    check_transforms(pipeline.graph, program.plan, None)
    _missing_sinks(program.plan, topics)
    return program


def _no_source(pipeline: Pipeline, topic: str, client: Client) -> NotFound:
    try:
        client.topic(topic)
        why = "it was made a moment ago: start again"
    except NotFound as error:
        # It says whether there may be one that the caller may not see.
        why = error.message
    return NotFound(f"pipeline {pipeline.name!r} reads the topic {topic!r}, which does not exist: {why}")


def plain_topics(program: Program, client: Client) -> frozenset[str]:
    """Return the topics of sinks that have no schema."""
    names = {node.topic for node in program.plan.graph.of_type(SinkNode)}
    return frozenset(topic.name for topic in client.topics() if topic.name in names and topic.schema is None)


def _source_rows(pipeline: str, node: SourceNode, topic: Topic) -> RowType:
    own = topic.schema if topic.schema is not None else KEY_VALUE
    if node.rows is None:
        return RowType(own)
    for field in node.rows.schema:
        if field.name not in own.names:
            raise InvalidArgument(
                f"pipeline {pipeline!r}, {node.label}: the declared schema has the column {field.name!r}, which the "
                f"topic does not have: it has {', '.join(own.names)}"
                + ("" if topic.schema is not None else "; give the topic a schema when you create it")
            )
        kind = own.field(field.name).type
        if not _holds(field.type, kind):
            raise InvalidArgument(
                f"pipeline {pipeline!r}, {node.label}: the declared schema says that the column {field.name!r} is "
                f"{shown(field.type)}, but in the topic it is {shown(kind)}, and not every value fits: declare the "
                "topic's own type, or leave the schema out, and convert in a map"
            )
    return node.rows


_ALIKE: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_timestamp,
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
    lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind),
)


def _holds(declared: pa.DataType, own: pa.DataType) -> bool:
    """Report whether every value of the topic's type fits the declared type. Times may lose digits that the declared
    type lacks."""
    if declared.equals(own) or any(is_kind(declared) and is_kind(own) for is_kind in _ALIKE):
        return True
    if pa.types.is_signed_integer(own):
        if pa.types.is_signed_integer(declared):
            return bool(declared.bit_width >= own.bit_width)
        return bool(pa.types.is_float64(declared) and own.bit_width <= 32)
    return bool(pa.types.is_floating(own) and pa.types.is_floating(declared) and declared.bit_width >= own.bit_width)


def provide_sinks(plan: Plan, client: Client) -> None:
    """Create the missing topics of sinks."""
    missing = _missing_sinks(plan, {topic.name: topic for topic in client.topics()})
    for name, schema in missing.items():
        event_time = "timestamp" if schema is not None and "timestamp" in schema.names else ""
        client.create_topic(name, schema=schema, event_time=event_time)


def _missing_sinks(plan: Plan, topics: Mapping[str, Topic]) -> dict[str, pa.Schema | None]:
    """Return the missing topics of sinks with their schemas. Raises if a sink cannot write to its topic."""
    schemas = {name: topic.schema for name, topic in topics.items()}
    missing: dict[str, pa.Schema | None] = {}
    for node in plan.graph.of_type(SinkNode):
        rows = plan.rows_at(node.inputs[0])
        assert rows is not None, "a run has schemas everywhere"
        if node.topic not in schemas:
            check_topic_name(node.topic)
            schemas[node.topic] = missing[node.topic] = topic_for(rows, KEY_VALUE.names)[0]
        own = schemas[node.topic]
        wrong = check_sink(node.topic, own if own is not None else KEY_VALUE, rows)
        if wrong:
            raise InvalidArgument(f"pipeline {plan.name!r}, {node.label}: {wrong}")
    return missing


_UNTIL = "give 'now', a datetime with a time zone, or a GLSN"


def _check_until(until: object) -> None:
    is_time = isinstance(until, datetime) and until.tzinfo is not None
    is_position = isinstance(until, int) and not isinstance(until, bool)
    if until is not None and until != "now" and not is_time and not is_position:
        raise InvalidArgument(f"until is {until!r}: {_UNTIL}")


def until_position(client: Client, until: Until | None) -> int | None:
    """Return the position at which a run ends, or None."""
    if until is None:
        return None
    if until == "now":
        return int(client.tail())
    if isinstance(until, datetime):
        return int(client.find(until)) - 1
    if not 0 <= until <= client.tail():
        raise InvalidArgument(f"until is {until!r}: {_UNTIL}; the log ends at {client.tail()}")
    return until
