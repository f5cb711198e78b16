"""Writes the format ``cutwater``. Spark calls everything here, in processes of its choice.

Tasks stage their rows, and no reader sees them. When all tasks of a batch are done, the driver lets the log decide that
these are the rows of the batch. From then on the log publishes them by itself. A decision about a batch is final: if
Spark forgets it, and computes and commits the batch again, nothing more is published.
"""

from __future__ import annotations

import concurrent.futures
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from cutwater.client.cluster.topics import Topic
from cutwater.client.convert.encoding import Compression
from cutwater.client.publish.runs import Run, RunStart
from cutwater.core.access.denials import quoted
from cutwater.errors import InvalidArgument, PermissionDenied, ProtocolViolation, Refused
from cutwater.spark.options import Where, WriteOptions
from cutwater.spark.plain_errors import plainly
from cutwater.spark.session.worker_connections import WorkerConnection, link_to
from cutwater.spark.sink.row_router import Router, check_columns, check_query
from cutwater.types import InputRange, Part
from cutwater.wire.options import MIB

QUERY_ID = "sql.streaming.queryId"
"""Spark makes this id with a checkpoint and stores it there: it is the same after a restart, and another one for a new
checkpoint."""
BATCH_ID = "streaming.sql.batchId"
ONLY_BATCH = 0
PIECE_BYTES = 64 * MIB
"""Approximate bytes of one part. A task holds two in memory, one that grows and one that is being sent; when they are
sorted, three for a moment."""
PUBLISHED_BYTES_PER_SECOND_MIN = 4 * MIB
"""A large batch gets more time than the options say, as if it were published at this rate."""


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """Message of a successful task to the driver."""

    run: Run
    batch: int
    parts: tuple[Part, ...]
    position: int | None = None
    """The last log position that a row comes from, if known."""
    topics: tuple[str, ...] = ()
    """The topics of the parts, for errors: the log names no topic to a client that may no longer describe it."""
    read: InputRange | None = None
    """The range of the log that the micro-batch reads, if this task knows it. One task of a pipeline does."""


Stage = Callable[[Iterator[pa.RecordBatch], Run, int], Staged]
"""A function that stages the rows of a task for a batch of a run."""


class TaskStaging:
    """The rows of a batch that one attempt of a task stages. In each piece, rows with positions are sorted by them.

    If a storage node loses a piece while it is staged, the piece is staged again on other nodes. So the rows are kept
    until the piece is finished.
    """

    def __init__(self, link: WorkerConnection, run: Run, batch: int, *, compression: Compression | None = None) -> None:
        self._link, self._run, self._batch = link, run, batch
        self._client = link.client(compression)
        self._growing: dict[str, _Piece] = {}
        self._bytes = 0
        self._under_way: concurrent.futures.Future[Part | None] | None = None
        self._parts: list[Part] = []
        self.topics: set[str] = set()

    def __enter__(self) -> TaskStaging:
        return self

    def __exit__(self, *_: object) -> None:
        if self._under_way is not None:
            self._under_way.cancel()

    def add(self, topic: str, rows: pa.RecordBatch, positions: pa.Array | None = None) -> None:
        """Add rows of a topic, with the topic's columns. ``positions`` are bytes, one value per row, in any order.
        Either all rows of a topic have positions, or none has."""
        if not rows.num_rows:
            return
        self.topics.add(topic)
        piece = self._growing.setdefault(topic, _Piece())
        piece.add(rows, positions)
        self._bytes += rows.nbytes
        while self._bytes >= PIECE_BYTES:
            self._stage(max(self._growing, key=lambda name: self._growing[name].bytes))

    def finish(self) -> tuple[Part, ...]:
        """Stage the rest and return all parts. They are durable on the storage nodes that they name."""
        while self._growing:
            self._stage(next(iter(self._growing)))
        self._wait()
        return tuple(self._parts)

    def _stage(self, topic: str) -> None:
        piece = self._growing.pop(topic)
        self._bytes -= piece.bytes
        rows, positions = piece.sorted()
        self._wait()
        work = self._client.stage(self._run, self._batch, topic, rows, positions=positions)
        self._under_way = self._link.loop.begin(work)

    def _wait(self) -> None:
        if self._under_way is not None:
            part = self._link.loop.wait(self._under_way)
            self._under_way = None
            if part is not None:
                self._parts.append(part)


class _Piece:
    """Rows of one topic that will become a part."""

    def __init__(self) -> None:
        self._rows: list[pa.RecordBatch] = []
        self._positions: list[pa.Array] = []
        self.bytes = 0

    def add(self, rows: pa.RecordBatch, positions: pa.Array | None) -> None:
        self._rows.append(rows)
        if positions is not None:
            self._positions.append(positions)
        self.bytes += rows.nbytes

    def sorted(self) -> tuple[pa.Table, pa.Array | None]:
        rows = pa.Table.from_batches(self._rows)
        if not self._positions:
            return rows, None
        positions = pa.concat_arrays(self._positions)
        order = pc.array_sort_indices(positions)
        return rows.take(order), positions.take(order)


class _Writer:
    """Common part of the batch and the stream writer. Spark sends it to tasks, so it holds no connection."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        self.options = options
        if overwrite:
            raise InvalidArgument(
                "mode 'overwrite' and output mode 'complete' take back what was written before, and a log only grows: "
                "use mode or output mode 'append'"
            )
        check_query(options, schema)
        if options.topic:
            check_columns(options, schema, _topic(link_to(options.where), options.topic))

    def stage(self, batches: Iterator[pa.RecordBatch], run: Run, batch: int) -> Staged:
        options, link = self.options, link_to(self.options.where)
        router = Router(options, lambda name: _topic(link, name))
        with TaskStaging(link, run, batch, compression=options.compression) as staging:
            for rows in batches:
                for topic, own, positions in router.divide(rows):
                    staging.add(topic, own, positions)
            return Staged(run, batch, staging.finish(), topics=tuple(sorted(staging.topics)))


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes one batch. It is made once, on the driver; tasks and the commit have copies of it."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        link = link_to(options.where)
        self.run = link.loop.run(link.client().open_run(options.name, uuid.uuid4().hex, once=True))

    @plainly
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return self.stage(iterator, self.run, ONLY_BATCH)

    @plainly
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        publish_staged(self.options.where, messages, ONLY_BATCH)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: rows that are staged and not decided are invisible and expire."""


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes a stream. It is made for each batch and again for its commit. Only tasks are told which query they belong
    to."""

    @plainly
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        start = RunStart(replay=self.options.replay)
        return stage_once(self.options.where, self.options.name, iterator, self.stage, start)

    @plainly
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        publish_staged(self.options.where, messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: rows that are staged and not decided are invisible and expire."""


def stage_once(
    where: Where,
    name: str,
    batches: Iterator[pa.RecordBatch],
    stage: Stage,
    start: RunStart,
    pass_by: Stage | None = None,
    job_epoch: int = 0,
) -> Staged:
    """Stage the rows of a task, unless the micro-batch is already decided: then ``pass_by`` takes them. The log refuses
    a new checkpoint whose output already exists, as far as ``start`` tells, and a driver of an earlier assignment of
    the job than the last one."""
    context = TaskContext.get()
    key = context.getLocalProperty(QUERY_ID) if context is not None else None
    number = context.getLocalProperty(BATCH_ID) if context is not None else None
    if key is None or number is None:
        raise ProtocolViolation(f"Spark did not name the query and the batch of this task: {key}, {number}")
    link = link_to(where)
    run = link.loop.run(link.client().open_run(name, key, start=start, job_epoch=job_epoch))
    return stage_unless_decided(run, int(number), batches, stage, pass_by)


def stage_unless_decided(
    run: Run, batch: int, batches: Iterator[pa.RecordBatch], stage: Stage, pass_by: Stage | None = None
) -> Staged:
    if run.last_batch > batch:
        raise Refused(
            f"batch {run.last_batch} of this checkpoint was published before, and now comes batch {batch}: the "
            "checkpoint is an old copy, or another query runs with it. Start the query with a new checkpoint, at "
            "the position from which on its rows are wanted"
        )
    if run.last_batch == batch:
        # The rows of this batch are decided. The new ones are computed all the same, because operators before this one
        # may have state, which they store at the end of their input.
        return (pass_by or _passed_by)(batches, run, batch)
    return stage(batches, run, batch)


def _passed_by(batches: Iterator[pa.RecordBatch], run: Run, batch: int) -> Staged:
    for _ in batches:
        pass
    return Staged(run, batch, ())


def publish_staged(where: Where, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
    """Let the log decide on the rows that all tasks have staged. Runs on the driver."""
    staged = [message for message in messages if isinstance(message, Staged)]
    if len(staged) != len(messages):
        raise ProtocolViolation(f"{len(messages) - len(staged)} tasks of batch {batch} have staged nothing: {messages}")
    if not staged:
        # A query without partitions has no rows.
        return
    run = staged[0].run
    reads = {message.read for message in staged if message.read is not None}
    same = (run.run, run.job_epoch, batch)
    if len(reads) > 1 or any((one.run.run, one.run.job_epoch, one.batch) != same for one in staged):
        raise ProtocolViolation(f"tasks of batch {batch} have staged rows of others: {staged}")
    positions = [message.position for message in staged if message.position is not None]
    parts = tuple(part for message in staged for part in message.parts)
    link = link_to(where)
    # Returns when all of it is in the log; retries until then, or until the time is up.
    seconds = where.timeout + sum(part.bytes for part in parts) / PUBLISHED_BYTES_PER_SECOND_MIN
    position, read = max(positions, default=None), next(iter(reads), None)
    try:
        link.loop.run(link.client().publish(run, batch, parts, position=position, read=read, timeout=seconds))
    except PermissionDenied as error:
        topics = {topic for message in staged for topic in message.topics}
        raise _naming(error, topics, run, link) from None


def _naming(error: PermissionDenied, topics: set[str], run: Run, link: WorkerConnection) -> PermissionDenied:
    """Return the error with the names of what the principal may no longer use. The log does not name what a client may
    not describe, but a batch knows its own topics and its run."""
    if error.resource == "topic":
        known = link.loop.run(link.ranges.view(link.where.timeout)).topics
        resources = [f"topic:{name}" for name in sorted(topics - set(known)) or sorted(topics)]
    elif error.resource == "run" and run.name:
        resources = [f"run:{run.name}"]
    else:
        return error
    who, right = error.principal, error.right
    commands = ", ".join(f"`cutwater acl allow {quoted(who)} {right} {quoted(resource)}`" for resource in resources)
    return PermissionDenied(
        f"{who} lacks the right {right} on {', '.join(resources)}: no rule gives it any more, so nothing of this batch "
        f"is published; an administrator can, with {commands}",
        principal=who,
        right=right,
        resource=", ".join(resources),
    )


def _topic(link: WorkerConnection, name: str) -> Topic:
    return link.loop.run(link.client().topic(name))
