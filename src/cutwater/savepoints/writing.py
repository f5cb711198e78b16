"""Makes savepoints from tables, without Spark. A pipeline can start with state that it has not made itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from io import BytesIO
from typing import Any
from uuid import uuid4

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from msgspec.structs import replace

from cutwater.errors import InvalidArgument
from cutwater.pipeline.clocks.clock_steps import NO_TIME
from cutwater.pipeline.graph import SourceNode
from cutwater.pipeline.keyed_state.keys import key_bytes, key_group
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.rows import RowType
from cutwater.pipeline.stream import Pipeline
from cutwater.pipeline.values import check_times
from cutwater.savepoints.files import Files
from cutwater.savepoints.manifest import (
    FORMAT,
    NAME,
    UNFINISHED,
    VERSION,
    FileInfo,
    Manifest,
    OperatorState,
    RunPoint,
    encoded,
)
from cutwater.savepoints.program import KEYED, OperatorInfo, ProgramInfo, described
from cutwater.savepoints.savepoint import Path, Savepoint, begin, directory_of, open_savepoint, place_of
from cutwater.savepoints.tables import PREFIX, as_type, key_fields, shown_keys, table_schema
from cutwater.schema_text import parse_type, shown

TIMERS = ("event_timers", "processing_timers")
_MISFITS = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError)


def new_savepoint(
    target: Path,
    pipeline: Pipeline,
    *,
    glsn: int,
    states: Mapping[str, pa.Table],
    schemas: Mapping[str, pa.Schema] | None = None,
    files: Files | None = None,
) -> Savepoint:
    """Make a savepoint for a pipeline that has not run. ``states`` are tables by uid. The pipeline reads the log after
    ``glsn``.

    A table has the columns of the operator's key (``key`` if a function makes it), a column for each state by its name,
    and ``event_timers`` and ``processing_timers`` (lists of milliseconds) if there are any. ``schemas`` are those of
    topics for which the program declares none.
    """
    program = _described(pipeline, schemas or {})
    unknown = [uid for uid in states if uid not in program.by_uid]
    if unknown:
        known = ", ".join(program.by_uid) or "none"
        raise InvalidArgument(f"pipeline {pipeline.name!r} has no operator {unknown[0]!r}: it has {known}")
    tables = {uid: _bootstrapped(program.by_uid[uid], table) for uid, table in states.items()}
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        id="",
        pipeline=pipeline.name,
        created="",
        glsn=glsn,
        watermark_ms=NO_TIME,
        clock=None,
        ended=False,
        slices=1,
        parallelism=1,
        run=RunPoint(pipeline.name, "", -1),
        log="",
        sources=program.sources,
        sinks=program.sinks,
        operators=tuple(OperatorState(operator, 0, 0, ()) for operator in program.operators),
        versions={},
    )
    return write_savepoint(target, manifest, tables, files=files)


def edited_savepoint(
    source: Savepoint, target: Path, tables: Mapping[str, pa.Table], *, files: Files | None = None
) -> Savepoint:
    """Copy a savepoint, and replace the rows of some operators: ``tables`` by uid, with the columns that
    ``Savepoint.table`` returns. Each row is a key. Its ``key_bytes`` decide, and ``key`` must agree with them."""
    for uid in tables:
        source.operator(uid)
    whole = {uid: tables[uid] if uid in tables else source.table(uid) for uid in source.manifest.by_uid}
    return write_savepoint(target, source.manifest, whole, files=files)


def copied_savepoint(source: Savepoint, target: Path, *, files: Files | None = None) -> Savepoint:
    """Copy a savepoint with the same files and the same position. The copy is a separate savepoint with a new id."""
    made = source.manifest
    place, files = place_of(target, files)
    begin(place, files, {"pipeline": made.pipeline, "created": now()})
    for file in made.files:
        files.write(f"{place}/{file.path}", source.content(file))
    return finish(place, files, replace(made, id=uuid4().hex, created=now()), made.operators)


def write_savepoint(
    target: Path, manifest: Manifest, tables: Mapping[str, pa.Table], *, files: Files | None = None
) -> Savepoint:
    """Write tables, as ``Savepoint.table`` returns them, under a manifest, as a separate savepoint with a new id."""
    checked = {
        state.operator.uid: _checked(state.operator, tables[state.operator.uid])
        for state in manifest.operators
        if state.operator.uid in tables
    }
    place, files = place_of(target, files)
    begin(place, files, {"pipeline": manifest.pipeline, "created": now()})
    operators = [_written(place, files, state, checked.get(state.operator.uid)) for state in manifest.operators]
    return finish(place, files, replace(manifest, id=uuid4().hex, created=now()), operators)


def _checked(operator: OperatorInfo, table: pa.Table) -> pa.Table:
    """Return a table whose rows can be loaded: each key appears once, and ``key`` agrees with ``key_bytes``."""
    schema = table_schema(operator)
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise InvalidArgument(f"the table for {operator.uid!r} lacks the column {missing[0]!r}: {schema.names}")
    try:
        columns = [as_type(table[field.name], field.type) for field in schema]
    except _MISFITS as error:
        raise InvalidArgument(f"the table for {operator.uid!r} does not have the types of its state: {error}") from None
    data, keys = columns[1], columns[2]
    if data.null_count or len(pc.unique(data)) < len(data):
        raise InvalidArgument(f"the table for {operator.uid!r} has a key twice, or none: key_bytes tells keys apart")
    if not shown_keys(data, operator).equals(keys):
        raise InvalidArgument(
            f"the table for {operator.uid!r} has a key that is not what its key_bytes say: a new key needs both"
        )
    for name in TIMERS:
        index = schema.get_field_index(name)
        columns[index] = _ascending(columns[index])
    return pa.table(columns, schema=schema)


def _ascending(times: pa.Array) -> pa.Array:
    if times.null_count == len(times):
        return times
    rows = times.to_pylist()
    return pa.array([None if row is None else sorted({at for at in row if at is not None}) for row in rows], times.type)


def finish(place: str, files: Files, manifest: Manifest, operators: Sequence[OperatorState]) -> Savepoint:
    """Do the last step of every savepoint: writing the manifest makes it one."""
    files.write(f"{place}/{NAME}", encoded(replace(manifest, operators=tuple(operators))))
    files.delete(f"{place}/{UNFINISHED}")
    return open_savepoint(place, files=files)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _written(place: str, files: Files, state: OperatorState, table: pa.Table | None) -> OperatorState:
    if table is None or not table.num_rows:
        return replace(state, rows=0, files=())
    path = f"{directory_of(state.operator.uid)}/part-0.parquet"
    data = BytesIO()
    pq.write_table(table, data, compression="zstd")
    files.write(f"{place}/{path}", data.getvalue())
    seen = files.settle([f"{place}/{path}"])[f"{place}/{path}"]
    info = FileInfo(path, seen.bytes, seen.rows, seen.sha256)
    return replace(state, rows=seen.rows, files=(info,))


def _described(pipeline: Pipeline, schemas: Mapping[str, pa.Schema]) -> ProgramInfo:
    rows = {
        node.topic: RowType(schemas[node.topic]) if node.topic in schemas else node.rows
        for node in pipeline.graph.of_type(SourceNode)
    }
    return described(Plan(pipeline.name, pipeline.graph, rows))


def _bootstrapped(operator: OperatorInfo, table: pa.Table) -> pa.Table:
    if operator.layout != KEYED:
        raise InvalidArgument(
            f"the state of {operator.uid!r}, a {operator.kind}, cannot be made from a table: only keyed functions' can"
        )
    keys = [field.name for field in key_fields(operator)]
    known = [*keys, *TIMERS, *(state.name for state in operator.states)]
    wrong = [name for name in table.column_names if name not in known]
    missing = [name for name in keys if name not in table.column_names]
    if wrong or missing:
        raise InvalidArgument(
            f"the table for {operator.uid!r} has the columns {', '.join(table.column_names)}: it needs "
            f"{', '.join(keys)} for the key, and may have {', '.join(known[len(keys) :])}"
        )
    table = _with_key_types(operator, table)
    data = _bytes(table, keys)
    schema = table_schema(operator)
    size = table.num_rows
    columns: dict[str, Any] = {
        "key_group": pa.array([key_group(own, operator.max_parallelism) for own in data], pa.int32()),
        "key_bytes": pa.array(data, pa.binary()),
    }
    columns["key"] = shown_keys(columns["key_bytes"], operator)
    for name in TIMERS:
        columns[name] = table[name] if name in table.column_names else pa.nulls(size, schema.field(name).type)
    for state in operator.states:
        kind = parse_type(state.stored)
        column = table[state.name] if state.name in table.column_names else pa.nulls(size, kind)
        columns[f"{PREFIX}{state.name}"] = _cast(operator, state.name, column, kind, "the state is kept as")
    return pa.table([columns[field.name] for field in schema], schema=schema)


def _with_key_types(operator: OperatorInfo, table: pa.Table) -> pa.Table:
    """Convert the key's columns to the types that the program declares, because the bytes of a key depend on them."""
    for field in key_fields(operator) if operator.key else ():
        cast = _cast(operator, field.name, table[field.name], field.type, "the key is")
        table = table.set_column(table.column_names.index(field.name), field, cast)
    return table


def _cast(operator: OperatorInfo, name: str, column: Any, kind: pa.DataType, what: str) -> Any:
    where = f"the column {name!r} for {operator.uid!r}"
    try:
        check_times(column.type, kind)
        return column.cast(kind)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error.message}") from None
    except _MISFITS:
        raise InvalidArgument(
            f"{where} is {shown(column.type)}: {what} {shown(kind)}, and not every value is one"
        ) from None


def _bytes(table: pa.Table, keys: Sequence[str]) -> list[bytes]:
    columns = [table[name].to_pylist() for name in keys]
    found = [key_bytes(key) for key in (columns[0] if len(keys) == 1 else zip(*columns, strict=True))]
    if len(set(found)) < len(found):
        raise InvalidArgument(f"a key ({', '.join(keys)}) is in the table more than once: give each key one row")
    return found
