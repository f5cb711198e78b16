"""Where a pipeline begins: at the start it is told, where its checkpoint stands, or at a savepoint.

A savepoint starts a *new* query. Its state comes to the first micro-batch as Spark's initial state: tasks read the
Parquet files, bring the rows into the form that the program has now, and send each slice its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession

from cutwater.client.client import Client
from cutwater.errors import AlreadyExists, InvalidArgument, Refused
from cutwater.pipeline.chunks import BROADCAST_GROUP, SORTED, chunk_schema
from cutwater.pipeline.graph import SourceNode
from cutwater.pipeline.keyed import OperatorSpec
from cutwater.savepoints.clocks import migrated
from cutwater.savepoints.evolution import Restoration, evolved, restoration
from cutwater.savepoints.files import is_local
from cutwater.savepoints.manifest import Manifest
from cutwater.savepoints.program import PARTITIONS, OperatorInfo, ProgramInfo, described
from cutwater.savepoints.savepoint import Path, Savepoint
from cutwater.savepoints.savepoint import open_savepoint as open_here
from cutwater.savepoints.tables import as_type, to_chunk
from cutwater.spark.checkpoints import ANEW, CHANGED, FORMAT, Checkpoint, Note, Origin, require_same_program
from cutwater.spark.files import files_at
from cutwater.spark.output_guard import OutputGuard
from cutwater.spark.pipeline_envelope import packed
from cutwater.spark.pipeline_planning import Offset
from cutwater.spark.pipeline_program import Program
from cutwater.spark.savepoints import absolute, frame, open_savepoint, versions

INITIAL_COLUMNS: Final = "slice int, uid string, dropped_late bigint, data binary"
INITIAL_SCHEMA: Final = pa.schema(
    [
        pa.field("slice", pa.int32()),
        pa.field("uid", pa.string()),
        pa.field("dropped_late", pa.int64()),
        pa.field("data", pa.binary()),
    ]
)
LOADED_BYTES: Final = 64 << 20
"""About how much of an operator's state a task has in its hands while it cuts it into slices."""


class Wish(Struct, frozen=True):
    """What whoever starts a pipeline says about a savepoint."""

    savepoint: str | None = None
    replay_output: bool = False
    allow_non_restored_state: bool = False


class Beginning(Struct, frozen=True):
    """``offset``: where the first micro-batch begins, if a savepoint says so. ``savepoint``: whose state the first
    micro-batch gets; None once that is done. ``restoration``: what became of that state. ``guard``: what the first
    micro-batch must not repeat.
    """

    offset: Offset | None = None
    savepoint: Savepoint | None = None
    restoration: Restoration | None = None
    guard: OutputGuard | None = None


def beginning(spark: SparkSession, client: Client, program: Program, place: str, wish: Wish) -> Beginning:
    """Look at the checkpoint, and note there what begins now, if it is new."""
    checkpoint, info = Checkpoint(place, files_at(spark, place)), described(program.plan)
    note = checkpoint.note()
    savepoint = None if wish.savepoint is None else open_savepoint(spark, absolute(wish.savepoint))
    if savepoint is not None:
        _require_new(checkpoint, note, savepoint)
    if note is None or (note.origin is None and not checkpoint.planned()):
        # Where nothing is planned yet, nothing hangs on what was noted.
        origin = None if savepoint is None else _origin(client, program, info, savepoint, wish)
        note = Note(
            FORMAT, 1, program.name, program.slices, program.parallelism, client.cluster_key(), info, versions(), origin
        )
        checkpoint.write(note)
    else:
        _require_same_log(client, place, note)
        require_same_program(place, note.program, info, _way_out(client, checkpoint, program.name))
    if note.origin is None:
        return Beginning()
    offset = Offset(note.origin.glsn, note.slices, note.origin.clock)
    if checkpoint.committed():
        return Beginning(offset)
    savepoint = savepoint or open_savepoint(spark, note.origin.savepoint)
    if savepoint.manifest.id != note.origin.id:
        raise Refused(
            f"the checkpoint {place} was started from the savepoint {note.origin.id}, but {savepoint.path} is another "
            "one now: start with a new checkpoint"
        )
    savepoint.verify()
    guard = None
    if not (note.origin.may_replay or wish.replay_output):
        # Between the first attempt and this one others may have gone on, from the checkpoint of before, say.
        guard = _guard(program.name, savepoint)
        guard.require_nothing_beyond(client.find_runs(program.name), checkpoint.key)
    return Beginning(offset, savepoint, _fitted(savepoint, info, wish), guard)


def _guard(name: str, savepoint: Savepoint) -> OutputGuard:
    return OutputGuard(name, savepoint.path, savepoint.manifest.run)


def _fitted(savepoint: Savepoint, info: ProgramInfo, wish: Wish) -> Restoration:
    # What is noted was allowed when it was noted.
    allowed = wish.allow_non_restored_state or wish.savepoint is None
    return restoration(savepoint.manifest, info, allow_non_restored_state=allowed)


def _require_same_log(client: Client, place: str, note: Note) -> None:
    key = client.cluster_key()
    if note.log and note.log != key:
        raise Refused(
            f"the positions in the checkpoint {place} are those of another log: it was made on the cluster {note.log}, "
            f"and this one is {key}. Run with the log of before, or a copy of its data. {ANEW}"
        )


def _way_out(client: Client, checkpoint: Checkpoint, name: str) -> str:
    """What to do with a changed program."""
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
    """Check everything that can be wrong with starting here, before anything is written."""
    made = savepoint.manifest
    if made.ended:
        raise Refused(
            f"{savepoint.path} was taken after the input of {made.pipeline!r} had ended: every timer has fired, and "
            "nothing can come after that. Start from an earlier savepoint, or without one"
        )
    savepoint.verify()
    _require_log(client, savepoint)
    _fitted(savepoint, info, wish)
    if not wish.replay_output:
        _guard(program.name, savepoint).require_nothing_beyond(client.find_runs(program.name), None)
    watermarks = {node.topic: node.watermark for node in program.plan.graph.of_type(SourceNode)}
    before = tuple(state.operator for state in made.operators)
    clock = migrated(made.clock, watermarks, info.operators, before)
    return Origin(savepoint.path, made.id, made.glsn, clock, wish.replay_output)


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
    """The state of a level as its slices get it in the first micro-batch; None if there is none."""
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
    counts = {spec.uid: manifest.by_uid[spec.uid].dropped_late for spec in specs if spec.uid in manifest.by_uid}
    return [(program.keys[0], uid, count, None) for uid, count in counts.items() if count]


def _rows(
    spark: SparkSession, savepoint: Savepoint, program: Program, spec: OperatorSpec, before: OperatorInfo
) -> DataFrame:
    rows = frame(spark, savepoint.path, spec.uid)
    if before.layout == PARTITIONS:
        # To be divided anew, it has to be seen whole.
        rows = rows.coalesce(1)
    return rows.mapInArrow(partial(_cut, program, spec.order, before), INITIAL_COLUMNS)


def _cut(
    program: Program, order: int, before: OperatorInfo, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """In a task: rows of a savepoint as chunks of slices."""
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
    table = evolved(whole, before, after)
    exact = [
        as_type(column, schema.field(name).type) if name in schema.names and name.startswith("state_") else column
        for name, column in zip(table.schema.names, table.columns, strict=True)
    ]
    chunk = to_chunk(pa.RecordBatch.from_arrays(exact, names=table.schema.names), schema, spec.hashed_groups)
    groups = chunk.column("key_group").to_numpy()
    hashes = chunk.column("key_hash").to_numpy()
    slices = groups.astype(np.int64) * program.slices // spec.groups
    found: list[tuple[int, bytes]] = []
    for number in range(program.slices):
        own = np.flatnonzero((slices == number) | (groups == BROADCAST_GROUP))
        if len(own):
            chosen = own[np.argsort(hashes[own], kind="stable")]
            found.append((program.keys[number], packed(chunk.take(pa.array(chosen)).replace_schema_metadata(SORTED))))
    keys, data = zip(*found, strict=True) if found else ((), ())
    columns = [
        pa.array(keys, pa.int32()),
        pa.array([spec.uid] * len(keys), pa.string()),
        pa.array([0] * len(keys), pa.int64()),
        pa.array(data, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=INITIAL_SCHEMA)


def wish_of(savepoint: Path | Savepoint | None, replay_output: bool, allow_non_restored_state: bool) -> Wish:
    if savepoint is None and (replay_output or allow_non_restored_state):
        raise InvalidArgument("replay_output and allow_non_restored_state are about a savepoint: give from_savepoint=…")
    path = savepoint.path if isinstance(savepoint, Savepoint) else savepoint
    if path is not None and is_local(os.fspath(path)):
        # What can be told at once need not wait for Spark.
        open_here(path)
    return Wish(None if path is None else os.fspath(path), replay_output, allow_non_restored_state)
