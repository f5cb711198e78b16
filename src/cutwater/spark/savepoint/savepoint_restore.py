"""Decides where a pipeline begins: at the given start, at its checkpoint, or at a savepoint.

A savepoint starts a *new* query. The first micro-batch gets the state of the savepoint as Spark's initial state: tasks
read the Parquet files, convert the rows to the form that the program has now, and send each slice its rows.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession

from cutwater.client.client import Client
from cutwater.client.publish.runs import Run, RunStart
from cutwater.errors import AlreadyExists, BatchDiffers, InvalidArgument, Refused
from cutwater.pipeline.clocks.clock import ClockSnapshot
from cutwater.pipeline.clocks.watermarks import Watermark
from cutwater.pipeline.graph import SourceNode
from cutwater.pipeline.keyed_state.chunks import BROADCAST_GROUP, SORTED, chunk_schema
from cutwater.pipeline.keyed_state.keys import slice_of
from cutwater.pipeline.operators.keyed_operator import OperatorSpec
from cutwater.savepoints.clocks import migrated
from cutwater.savepoints.evolution import Restoration, evolved_chunk, restoration
from cutwater.savepoints.files import is_local
from cutwater.savepoints.manifest import Manifest
from cutwater.savepoints.program import PARTITIONS, OperatorInfo, ProgramInfo, described
from cutwater.savepoints.savepoint import Path, Savepoint
from cutwater.savepoints.savepoint import open_savepoint as open_here
from cutwater.spark.pipeline.envelope import packed
from cutwater.spark.pipeline.offsets import PipelineOffset, require_same_topics
from cutwater.spark.pipeline.operator import SENT
from cutwater.spark.pipeline.program import Program
from cutwater.spark.savepoint.checkpoints import ANEW, CHANGED, FORMAT, Checkpoint, Note, Origin, require_same_program
from cutwater.spark.savepoint.files import files_at
from cutwater.spark.savepoint.savepoints import absolute, frame, open_savepoint, versions
from cutwater.types import GLSN, BatchNumber, InputRange

_log = logging.getLogger(__name__)

INITIAL_COLUMNS: Final = "slice int, uid string, dropped_late bigint, data binary"
INITIAL_SCHEMA: Final = pa.schema(
    [("slice", pa.int32()), ("uid", pa.string()), ("dropped_late", pa.int64()), ("data", pa.binary())]
)
LOADED_BYTES: Final = 64 << 20
"""Approximate bytes of an operator's state that a task holds while it cuts the state into slices."""


class Wish(Struct, frozen=True):
    """What the user who starts a pipeline says about a savepoint. ``job_epoch`` is the assignment that starts it, 0 if
    it runs without a job."""

    savepoint: str | None = None
    replay_output: bool = False
    allow_non_restored_state: bool = False
    job_epoch: int = 0


class Beginning(Struct, frozen=True):
    """How a run begins. ``offset``: where the first micro-batch begins, if a savepoint decides it. ``savepoint``: the
    savepoint whose state the first micro-batch gets; None when that is done. ``restoration``: what happened to that
    state. ``start``: what the log needs to decide whether the run may publish under its name."""

    offset: PipelineOffset | None = None
    savepoint: Savepoint | None = None
    restoration: Restoration | None = None
    start: RunStart = RunStart()


def beginning(
    spark: SparkSession, client: Client, program: Program, place: str, wish: Wish, begin: str = "earliest"
) -> Beginning:
    """Check the checkpoint. If it is new, write a note of what begins now. ``begin`` is where a new one starts to
    read."""
    checkpoint, info = Checkpoint(place, files_at(spark, place)), described(program.plan)
    note = checkpoint.note()
    checkpoint.check()
    savepoint = None if wish.savepoint is None else open_savepoint(spark, absolute(wish.savepoint))
    if savepoint is not None:
        _require_new(checkpoint, note, savepoint)
    if note is None or (note.origin is None and not checkpoint.planned()):
        # If nothing is planned yet, nothing depends on the old note.
        _require_in_step(client, checkpoint, program.name, wish.job_epoch)
        origin = None if savepoint is None else _origin(client, program, info, savepoint, wish)
        if origin is None:
            _start(client, checkpoint, program.name, _begin(client, checkpoint, begin), wish)
        note = Note(
            FORMAT, 1, program.name, program.slices, program.parallelism, client.cluster_key(), info, versions(), origin
        )
        checkpoint.write(note)
    else:
        _require_same_log(client, place, note)
        _require_in_step(client, checkpoint, note.pipeline, wish.job_epoch)
        require_same_program(place, note.program, info, _way_out(client, checkpoint, program.name))
        planned = checkpoint.planned()
        if planned:
            _require_same_topics(client, program, checkpoint.offset(planned[-1]))
        old = checkpoint.follow_move()
        if old is not None:
            _log.warning("the checkpoint %s was moved or copied from %s: its files name the new place now", place, old)
    if note.origin is None or checkpoint.committed():
        offset = None if note.origin is None else _offset(note.origin, note.slices)
        start = _start(client, checkpoint, program.name, _begin(client, checkpoint, begin), wish)
        return Beginning(offset, start=start)
    offset = _offset(note.origin, note.slices)
    savepoint = savepoint or open_savepoint(spark, note.origin.savepoint)
    if savepoint.manifest.id != note.origin.id:
        raise Refused(
            f"the checkpoint {place} was started from the savepoint {note.origin.id}, but {savepoint.path} is another "
            "one now: start with a new checkpoint"
        )
    savepoint.verify()
    # Since the first attempt another run may have published, for example from the earlier checkpoint.
    start = _after(savepoint, replay=note.origin.may_replay or wish.replay_output)
    client.check_run(program.name, checkpoint.key or _any_key(), start=start, job_epoch=wish.job_epoch)
    return Beginning(offset, savepoint, _fitted(savepoint, info, wish), start)


def _require_same_topics(client: Client, program: Program, offset: PipelineOffset) -> None:
    require_same_topics(program.name, offset, {topic.name: int(topic.number) for topic in client.topics()})


def _offset(origin: Origin, slices: int) -> PipelineOffset:
    return PipelineOffset(origin.glsn, slices, origin.clock, topics=origin.topics, trimmed=origin.trimmed)


def _begin(client: Client, checkpoint: Checkpoint, begin: str) -> int | None:
    """Return the position after which a checkpoint without a savepoint reads on, or None if it cannot be known."""
    done, planned = checkpoint.committed(), checkpoint.planned()
    if done:
        return checkpoint.offset(done[-1]).glsn
    if planned:
        return checkpoint.offset(planned[0]).since
    if begin == "earliest":
        return 0
    if begin == "latest":
        return int(client.tail())
    if int(begin) - 1 > client.tail():
        raise InvalidArgument(
            f"start is {begin}, but the log ends at GLSN {client.tail()}: give at most {client.tail() + 1}"
        )
    return int(begin) - 1


def _start(client: Client, checkpoint: Checkpoint, name: str, position: int | None, wish: Wish) -> RunStart:
    """Return the start of a run without a savepoint, if the log accepts it. This opens no run and fences none."""
    start = RunStart(
        position=None if position is None else GLSN(position),
        replay=wish.replay_output,
        what=f"the checkpoint {checkpoint.path}",
    )
    client.check_run(name, checkpoint.key or _any_key(), start=start, job_epoch=wish.job_epoch)
    return start


def _after(savepoint: Savepoint, *, replay: bool) -> RunStart:
    made = savepoint.manifest
    return RunStart(
        GLSN(made.glsn), made.run.key, BatchNumber(made.run.batch), replay, f"the savepoint {savepoint.path}"
    )


def _any_key() -> str:
    """Return a key for a question about a checkpoint that has no key yet."""
    return uuid.uuid4().hex


def _fitted(savepoint: Savepoint, info: ProgramInfo, wish: Wish) -> Restoration:
    # What the note contains was allowed when it was written.
    allowed = wish.allow_non_restored_state or wish.savepoint is None
    return restoration(savepoint.manifest, info, allow_non_restored_state=allowed)


def _require_same_log(client: Client, place: str, note: Note) -> None:
    key = client.cluster_key()
    if note.log and note.log != key:
        raise Refused(
            f"the positions in the checkpoint {place} are those of another log: it was made on the cluster {note.log}, "
            f"and this one is {key}. Run with the original log, or a copy of its data. {ANEW}"
        )


def _require_in_step(client: Client, checkpoint: Checkpoint, name: str, job_epoch: int) -> None:
    """Refuse a checkpoint that is behind its log or ahead of it: one of the two is an old copy.

    Spark plans a micro-batch in the checkpoint before it runs the micro-batch. It records the micro-batch as done after
    the log has decided on it, even if it has no rows. So the last decided batch is the last one that is done or
    planned. If a batch that the log has decided were planned again, the log would take it for a repeated one, and its
    rows would be lost.

    An earlier driver may still run. So the step that comes first in a micro-batch is read last.
    """
    key = checkpoint.key
    if key is None:
        return
    last_done = max(checkpoint.committed(), default=-1)
    run = next((run for run in client.find_runs(name) if run.key == key), None)
    decided = -1 if run is None else run.last_batch
    planned = checkpoint.planned()
    last_planned = max(planned, default=-1)
    if decided > last_planned:
        what = f"the last one that is planned there is {last_planned}" if planned else "none is planned there"
        raise Refused(
            f"the checkpoint {checkpoint.path} is an old copy: micro-batch {decided} of it is in the log, and {what}. "
            "Go on with the checkpoint that was used last, or start from a savepoint with a new one (--from-savepoint, "
            f"--checkpoint; from_savepoint=…, checkpoint=… in Python). {ANEW}"
        )
    if run is not None and run.last_input is not None and decided in planned:
        _require_same_input(checkpoint, run, run.last_input)
    read, tail = checkpoint.offset(last_planned).glsn if planned else 0, int(client.tail())
    if decided < last_done and read <= tail:
        # Not every finished run can be found by its name. If the run is finished, this call raises the right error.
        client.check_run(name, key, start=RunStart(replay=True), job_epoch=job_epoch)
    if decided < last_done or read > tail:
        known = f"{decided} is the last one in the log" if decided >= 0 else "the log has none of them"
        what = f"micro-batch {last_done} is done there, and {known}" if decided < last_done else ""
        if read > tail:
            what = f"it has read up to GLSN {read}, and the log ends at {tail}"
        raise Refused(
            f"the checkpoint {checkpoint.path} is ahead of this log: {what}. The log is an old copy of the one that "
            "the checkpoint was made with, and input would be skipped. Run with the original log; or, if this copy "
            f"shall go its own way, give the pipeline a checkpoint of its own. {ANEW}"
        )


def _require_same_input(checkpoint: Checkpoint, run: Run, decided: InputRange) -> None:
    """Refuse a checkpoint in which the last decided batch ends elsewhere than it was decided."""
    end = checkpoint.offset(run.last_batch).glsn
    if end != decided.through:
        given = f"the input up to GLSN {end}"
        raise BatchDiffers(run.run, BatchNumber(run.last_batch), decided.after, decided.through, given)


def _way_out(client: Client, checkpoint: Checkpoint, name: str) -> str:
    """Describe what to do with a changed program."""
    if checkpoint.committed():
        return CHANGED
    if any(run.key == checkpoint.key and run.last_batch >= 0 for run in client.find_runs(name)):
        return (
            "its first micro-batch is published and not finished. Run the program as it was until that is done, then "
            "start the changed one from a savepoint"
        )
    return (
        "no micro-batch of it was finished, so there is nothing to keep. Remove that directory, or name another one "
        "with checkpoint=… (--checkpoint)"
    )


def _require_new(checkpoint: Checkpoint, note: Note | None, savepoint: Savepoint) -> None:
    if note is None and checkpoint.key is None and not checkpoint.planned():
        return
    if note is not None and note.origin is not None and note.origin.id == savepoint.manifest.id:
        return
    raise AlreadyExists(
        f"the checkpoint {checkpoint.path} already belongs to a pipeline that was not started from {savepoint.path}: a "
        "savepoint starts a new query, so name a new directory with --checkpoint (checkpoint=… in Python); or leave "
        "--from-savepoint (from_savepoint=…) out, to go on from the checkpoint"
    )


def _origin(client: Client, program: Program, info: ProgramInfo, savepoint: Savepoint, wish: Wish) -> Origin:
    """Check everything that can be wrong with this start, before anything is written."""
    made = savepoint.manifest
    clock, topics = _require_fit(client, program, info, savepoint, wish)
    start = _after(savepoint, replay=wish.replay_output)
    client.check_run(program.name, _any_key(), start=start, job_epoch=wish.job_epoch)
    trimmed = {topic: first for topic, first in made.trimmed.items() if topic in _watermarks(program)}
    return Origin(savepoint.path, made.id, made.glsn, clock, wish.replay_output, topics, trimmed)


def _watermarks(program: Program) -> dict[str, Watermark | None]:
    return {node.topic: node.watermark for node in program.plan.graph.of_type(SourceNode)}


def _require_fit(
    client: Client, program: Program, info: ProgramInfo, savepoint: Savepoint, wish: Wish
) -> tuple[ClockSnapshot | None, dict[str, int]]:
    """Check that a program can go on from a savepoint. Returns its clocks and topics, as the program has them."""
    made = savepoint.manifest
    if made.ended:
        raise Refused(
            f"{savepoint.path} was taken after the input of {made.pipeline!r} had ended: every timer has fired, and "
            "nothing can come after that. Start from an earlier savepoint, or without one"
        )
    savepoint.verify()
    _require_log(client, savepoint)
    _fitted(savepoint, info, wish)
    watermarks = _watermarks(program)
    before = tuple(state.operator for state in made.operators)
    clock = migrated(made.clock, watermarks, info.operators, before)
    topics = {topic: number for topic, number in made.topics.items() if topic in watermarks}
    _require_same_topics(client, program, PipelineOffset(made.glsn, made.slices, topics=topics))
    return clock, topics


def check_restores(
    client: Client, program: Program, savepoint: Savepoint, *, allow_non_restored_state: bool
) -> Restoration:
    """Return what a savepoint restores in a program. Raises what a start from it would raise, except about output that
    is published already. Starts nothing, and writes nothing."""
    info = described(program.plan)
    wish = Wish(savepoint.path, replay_output=True, allow_non_restored_state=allow_non_restored_state)
    _require_fit(client, program, info, savepoint, wish)
    return _fitted(savepoint, info, wish)


def _require_log(client: Client, savepoint: Savepoint) -> None:
    made = savepoint.manifest
    key, tail = client.cluster_key(), int(client.tail())
    if made.log and key != made.log:
        raise Refused(
            f"the positions in {savepoint.path} are those of another log: it was taken on the cluster {made.log}, and "
            f"this one is {key}. Run it on that cluster, or on a copy of its data"
        )
    if made.glsn > tail:
        raise Refused(
            f"{savepoint.path} is at GLSN {made.glsn}, and the log ends at {tail}: this is an older copy of the log"
        )


# -------------------------------------------------------------------------------------------------------- initial state


def initial_state(spark: SparkSession, begin: Beginning, program: Program, level: int) -> DataFrame | None:
    """Return the state of a level that its slices get in the first micro-batch, or None if there is none."""
    if begin.savepoint is None or begin.restoration is None:
        return None
    manifest, specs = begin.savepoint.manifest, program.plan.levels[level]
    before = {operator.uid: operator for operator in begin.restoration.operators}
    parts = [
        _rows(spark, begin.savepoint, program, spec, before[spec.uid])
        for spec in specs
        if spec.uid in before and manifest.by_uid[spec.uid].rows
    ]
    late = _late(manifest, specs, program)
    if late:
        parts.append(spark.createDataFrame(late, INITIAL_COLUMNS))
    if not parts:
        return None
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionAll(part)
    return whole


def _late(manifest: Manifest, specs: Sequence[OperatorSpec], program: Program) -> list[Any]:
    """Return rows that carry the counts of late rows before the savepoint. One slice adds them, like counts from before
    a restart."""
    kept = {spec.uid: manifest.by_uid[spec.uid] for spec in specs if spec.uid in manifest.by_uid}
    dropped = [(program.keys[0], uid, own.dropped_late, None) for uid, own in kept.items() if own.dropped_late]
    sent = [(program.keys[0], SENT + uid, own.late_sent, None) for uid, own in kept.items() if own.late_sent]
    return [*dropped, *sent]


def _rows(
    spark: SparkSession, savepoint: Savepoint, program: Program, spec: OperatorSpec, before: OperatorInfo
) -> DataFrame:
    rows = frame(spark, savepoint.path, spec.uid)
    if before.layout == PARTITIONS:
        # One task must see all of it to divide it again.
        rows = rows.coalesce(1)
    return rows.mapInArrow(partial(_cut, program, spec.order, before), INITIAL_COLUMNS)


def _cut(
    program: Program, order: int, before: OperatorInfo, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Convert rows of a savepoint to chunks of slices. Runs in a task."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= LOADED_BYTES and before.layout != PARTITIONS:
            yield _chunks(program, order, before, held)
            held, size = [], 0
    if held:
        yield _chunks(program, order, before, held)


def _chunks(program: Program, order: int, before: OperatorInfo, held: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    spec = program.plan.specs[order]
    schema = chunk_schema(spec.states)
    after = described(program.plan).by_uid[spec.uid]
    whole = pa.Table.from_batches(held).combine_chunks().to_batches()[0]
    chunk = evolved_chunk(whole, before, after, schema, spec.hashed_groups)
    groups = chunk.column("key_group").to_numpy()
    hashes = chunk.column("key_hash").to_numpy()
    slices = slice_of(groups.astype(np.int64), program.slices, spec.groups)
    found: list[tuple[int, bytes]] = []
    for number in range(program.slices):
        own = np.flatnonzero((slices == number) | (groups == BROADCAST_GROUP))
        if len(own):
            chosen = own[np.argsort(hashes[own], kind="stable")]
            found.append((program.keys[number], packed(chunk.take(pa.array(chosen)).replace_schema_metadata(SORTED))))
    rows = [{"slice": key, "uid": spec.uid, "dropped_late": 0, "data": data} for key, data in found]
    return pa.RecordBatch.from_pylist(rows, schema=INITIAL_SCHEMA)


def wish_of(
    savepoint: Path | Savepoint | None, replay_output: bool, allow_non_restored_state: bool, job_epoch: int = 0
) -> Wish:
    if savepoint is None and allow_non_restored_state:
        raise InvalidArgument("allow_non_restored_state is about a savepoint: give from_savepoint=…")
    path = savepoint.path if isinstance(savepoint, Savepoint) else savepoint
    if path is not None and is_local(os.fspath(path)):
        # An error that can be found at once need not wait for Spark.
        open_here(path)
    return Wish(None if path is None else os.fspath(path), replay_output, allow_non_restored_state, job_epoch)
