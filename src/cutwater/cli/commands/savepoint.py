"""``cutwater savepoint``: shows what savepoints hold, whether they are intact, and how they differ. The commands need
Spark only for savepoints on a file system that only Spark can reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import typer

from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.exit_codes import Settings
from cutwater.cli.io.output import show, table
from cutwater.cli.io.pipeline_output import size, time_of_ms
from cutwater.client.convert.json_values import encode
from cutwater.core.text import counted
from cutwater.errors import InvalidArgument
from cutwater.savepoints.diffs import Difference
from cutwater.savepoints.diffs import diff as difference
from cutwater.savepoints.evolution import WINDOW_FIELDS
from cutwater.savepoints.files import Files, LocalFiles, is_local
from cutwater.savepoints.lookups import rows_of_key, uids_of
from cutwater.savepoints.program import WINDOW, OperatorInfo, StateInfo
from cutwater.savepoints.savepoint import Savepoint, delete_savepoint, list_savepoints, open_savepoint
from cutwater.savepoints.tables import PREFIX, key_fields

app = noun("Savepoints: the state of pipelines in files.")

ROWS_SHOWN = 20

PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="Directory of a savepoint.")]


@contextmanager
def _files(*paths: str) -> Iterator[Files]:
    if all(map(is_local, paths)):
        yield LocalFiles()
        return
    # A JVM is started only if it is needed.
    from cutwater.spark.savepoint.files import HadoopFiles  # noqa: PLC0415
    from cutwater.spark.session.session import session  # noqa: PLC0415

    spark = session("cutwater savepoint", master="local[1]")
    try:
        yield HadoopFiles(spark)
    finally:
        spark.stop()


@command(app, name="list")
def list_all(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory with savepoints.")] = "savepoints",
) -> None:
    """Show the savepoints in a directory, oldest first, including incomplete ones."""
    with _files(directory) as files:
        found = list_savepoints(directory, files=files)
    if Settings.is_json:
        show([_listed(name, one) for name, one in found.items()], "")
        return
    rows: list[tuple[object, ...]] = []
    for name, one in found.items():
        if isinstance(one, str):
            rows.append((name, None, None, None, None, None, one))
        else:
            made = one.manifest
            rows.append((name, made.pipeline, made.created, made.glsn, _rows(one), size(made.bytes), "whole"))
    show(None, table(["savepoint", "pipeline", "created", "GLSN", "keys", "size", "state"], rows))


def _listed(name: str, one: Savepoint | str) -> dict[str, Any]:
    if isinstance(one, str):
        return {"name": name, "whole": False, "why": one}
    made = one.manifest
    told = {"name": name, "whole": True, "path": one.path, "pipeline": made.pipeline, "created": made.created}
    return told | {"glsn": made.glsn, "keys": _rows(one), "bytes": made.bytes, "id": made.id}


def _rows(savepoint: Savepoint) -> int:
    return sum(state.rows for state in savepoint.manifest.operators)


@command(app)
def describe(path: PathArgument) -> None:
    """Show the pipeline of a savepoint, its position in the log, and the state of its operators."""
    with _files(path) as files:
        found = open_savepoint(path, files=files)
    made = found.manifest
    if Settings.is_json:
        show(made, "")
        return
    lines = [
        f"savepoint {found.path} of pipeline {made.pipeline!r}, taken at {made.created}",
        f"  position:    GLSN {made.glsn}{', the end of the input' if made.ended else ''}",
        f"  watermark:   {time_of_ms(made.watermark_ms)}",
        f"  parallelism: {made.parallelism}, {counted(made.slices, 'slice')}",
        f"  output:      batch {made.run.batch} of run {made.run.name!r}",
        f"  reads:       {', '.join(f'{source.topic} ({source.watermark})' for source in made.sources)}",
        f"  writes:      {', '.join(f'{sink.topic} ({sink.uid})' for sink in made.sinks)}",
        f"  made by:     {', '.join(f'{name} {version}' for name, version in made.versions.items())}",
    ]
    show(None, "\n".join(lines))
    rows = []
    for state in made.operators:
        own = state.operator
        states = [f"{one.name}: {one}" for one in own.states]
        rows.append((own.uid, own.kind, own.key or None, states, state.rows, size(sum(f.bytes for f in state.files))))
    show(None, table(["operator", "kind", "key", "states", "keys", "size"], rows))


@command(app)
def inspect(
    path: PathArgument,
    uid: Annotated[str | None, typer.Option(help="One operator; by default all of them.")] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="Only this key; repeat the option for each of its columns.")
    ] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="The most keys to show.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.parquet|FILE.json", help="Write the rows to this file; by default all.")
    ] = None,
) -> None:
    """Show state as a table, one row per key: its timers and its states; for a window operator one row per open window.

    JSON and files contain everything as it is stored, with times in milliseconds since 1970.
    """
    if out is not None and out.suffix not in (".parquet", ".json"):
        raise InvalidArgument(f"{out} can be written as .parquet or .json, by how its name ends")
    with _files(path) as files:
        found = open_savepoint(path, files=files)
        uids = uids_of(found, uid)
        if len(uids) != 1 and (out is not None or key):
            raise InvalidArgument(f"say which operator, with --uid: {', '.join(uids) or 'this savepoint has none'}")
        tables = {one: rows_of_key(found, one, key or ()) for one in uids}
    if out is not None:
        _write(next(iter(tables.values())).slice(0, count), out)
        show({"written": str(out)}, f"wrote {out}")
        return
    shown = ROWS_SHOWN if count is None and not Settings.is_json else count
    if Settings.is_json:
        show({one: rows.slice(0, shown).to_pylist() for one, rows in tables.items()}, "")
        return
    for one, rows in tables.items():
        more = f"; the first {shown}" if shown is not None and rows.num_rows > shown else ""
        show(None, f"operator {one!r}: {counted(rows.num_rows, 'key')}{more}")
        show(None, _shown(found.operator(one).operator, rows.slice(0, shown)))


def _shown(operator: OperatorInfo, rows: pa.Table) -> Any:
    """Make a table for people: with formatted times, and a line for each window, with the program's names of its
    aggregates."""
    names = [field.name for field in key_fields(operator)]
    is_window = operator.layout == WINDOW
    columns = ["window start", "window end", *operator.aggregates] if is_window else [s.name for s in operator.states]
    lines = []
    for row in rows.to_pylist():
        own = row["key"] or dict.fromkeys(names)
        key = [own[name] for name in names]
        timers = [time_of_ms(at) for at in (row["event_timers"] or []) + (row["processing_timers"] or [])]
        if is_window:
            lines += [(*key, timers, *_window(pane)) for pane in row[f"{PREFIX}{operator.states[0].name}"] or []]
        else:
            lines.append((*key, timers, *(_value(row[f"{PREFIX}{s.name}"], s) for s in operator.states)))
    return table([*names, "timers", *columns], lines)


def _window(pane: dict[str, Any]) -> Iterator[Any]:
    """Yield the columns of a window. Its stored form has the accumulators last, in the order of the aggregates."""
    values = list(pane.values())
    yield from map(time_of_ms, values[:2])
    yield from map(_plain, values[len(WINDOW_FIELDS) :])


def _value(value: Any, state: StateInfo) -> Any:
    return _plain(value if state.ttl_ms is None else _timed(value))


def _timed(value: Any) -> Any:
    """Format a value of a state with a ttl, which is stored with the time of its last change."""
    if isinstance(value, list | tuple):
        return [_timed(item) for item in value]
    if isinstance(value, dict) and value.keys() == {"at", "value"}:
        return value | {"at": time_of_ms(value["at"])}
    return value


def _plain(value: Any) -> Any:
    return encode(value).decode() if isinstance(value, dict | list | bytes) else value


def _write(rows: pa.Table, out: Path) -> None:
    try:
        if out.suffix == ".parquet":
            pq.write_table(rows, out)
        else:
            out.write_bytes(b"".join(encode(row) + b"\n" for row in rows.to_pylist()))
    except OSError as error:
        raise InvalidArgument(f"{out} cannot be written: {error}") from error


@command(app)
def verify(path: PathArgument) -> None:
    """Compare every file of a savepoint with its checksum. Exit code 20 if one is damaged."""
    with _files(path) as files:
        found = open_savepoint(path, files=files)
        found.verify()
    made = found.manifest
    told = {"intact": True, "files": len(made.files), "bytes": made.bytes}
    show(told, f"{found.path} is intact: {counted(len(made.files), 'file')}, {size(made.bytes)}")


@command(app)
def diff(
    first: PathArgument,
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Directory of another savepoint.")],
) -> None:
    """Show what has changed from one savepoint to another: operators, states, and keys."""
    with _files(first, second) as files:
        found = difference(open_savepoint(first, files=files), open_savepoint(second, files=files))
    show(found, "\n".join(_told(found)))


def _told(found: Difference) -> Iterator[str]:
    yield f"GLSN {found.glsn:+}, watermark {found.watermark_ms:+} ms"
    yield from (f"- operator {uid!r}" for uid in found.only_first)
    yield from (f"+ operator {uid!r}" for uid in found.only_second)
    for own in found.operators:
        yield f"~ operator {own.uid!r}: {counted(own.added, 'key')} added, {own.removed} removed, {own.changed} changed"
        yield from (f"    {one}" for one in (*own.states, *own.examples))
    if found.is_empty:
        yield "the same state"


@command(app)
def delete(path: PathArgument) -> None:
    """Remove a savepoint, whole, damaged or half-written, permanently. Nothing else is removed."""
    with _files(path) as files:
        delete_savepoint(path, files=files)
    show({"deleted": path}, f"deleted {path}")
