"""Prepares a test that starts from a savepoint: its position in the log, its clocks, and its whole state."""

from __future__ import annotations

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.errors import Refused
from cutwater.pipeline.graph import SourceNode
from cutwater.pipeline.keyed_state.chunks import chunk_schema
from cutwater.pipeline.local.local_runner import LocalStart
from cutwater.pipeline.plan import Plan
from cutwater.savepoints.clocks import migrated
from cutwater.savepoints.evolution import evolved_chunk, restoration
from cutwater.savepoints.program import OperatorInfo, ProgramInfo, described
from cutwater.savepoints.savepoint import Path, Savepoint, open_savepoint


def local_start(given: Path | Savepoint, plan: Plan, *, allow_non_restored_state: bool = False) -> LocalStart:
    """Return what a run would begin with. Refuses what a run refuses, as far as that is known without its log."""
    savepoint = given if isinstance(given, Savepoint) else open_savepoint(given)
    made, info = savepoint.manifest, described(plan)
    if made.ended:
        raise Refused(
            f"{savepoint.path} was taken after the input of {made.pipeline!r} had ended: every timer has fired, and "
            "nothing can come after that. Start from an earlier savepoint, or without one"
        )
    savepoint.verify()
    fitted = restoration(made, info, allow_non_restored_state=allow_non_restored_state)
    state = {
        before.uid: _chunk(savepoint, plan, info, before) for before in fitted.operators if made.by_uid[before.uid].rows
    }
    watermarks = {node.topic: node.watermark for node in plan.graph.of_type(SourceNode)}
    clock = migrated(made.clock, watermarks, info.operators, tuple(own.operator for own in made.operators))
    streams: dict[str, list[int]] = {}
    for source in clock.sources if clock is not None else ():
        streams[source.topic] = [int(stream.log_stream_id) for stream in source.clock.streams]
    late = {before.uid: made.by_uid[before.uid].dropped_late for before in fitted.operators}
    return LocalStart(made.glsn, clock, streams, state, late)


def _chunk(savepoint: Savepoint, plan: Plan, info: ProgramInfo, before: OperatorInfo) -> pa.Table:
    spec = next(spec for spec in plan.specs.values() if spec.uid == before.uid)
    schema = chunk_schema(spec.states)
    whole = savepoint.table(before.uid).combine_chunks().to_batches()[0]
    chunk = evolved_chunk(whole, before, info.by_uid[before.uid], schema, spec.hashed_groups)
    return pa.Table.from_batches([chunk])
