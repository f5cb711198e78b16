"""``cutwater topic``: names for sets of log streams."""

from __future__ import annotations

from typing import Annotated

import typer

from cutwater.cli.exits import ends_well
from cutwater.cli.options import DebugOption, Output, OutputOption
from cutwater.cli.servers import DirOption, PathOption, ServersOption, TimeoutOption, with_admin
from cutwater.cli.tables import show, table, text
from cutwater.types import GLSN, SECOND, Retention

app = typer.Typer(help="Topics: names for sets of log streams.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
HoursOption = Annotated[
    float, typer.Option("--retention-hours", min=0, help="How long records are kept at least; 0 is for ever.")
]
BytesOption = Annotated[
    int, typer.Option("--retention-bytes", min=0, help="How many bytes of one copy are kept; 0 is without bound.")
]


def _retention(hours: float, size: int) -> Retention:
    return Retention(round(hours * 3_600 * SECOND), size)


@app.command()
@ends_well
def create(
    name: NameArgument,
    streams: Annotated[int, typer.Option(help="How many log streams take appends.")] = 1,
    replication: Annotated[
        int | None, typer.Option(help="Copies of every record; three, or as many as there are nodes, if not said.")
    ] = None,
    retention_hours: HoursOption = 0.0,
    retention_bytes: BytesOption = 0,
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Create a topic. Returns when it takes appends."""
    created = with_admin(
        servers,
        directory,
        timeout,
        lambda admin: admin.create_topic(
            name, streams=streams, replication=replication, retention=_retention(retention_hours, retention_bytes)
        ),
        path=path,
        may_create=True,
    )
    show(output, created, f"topic {name!r} takes appends in log streams {text(created.streams)}")


@app.command("list")
@ends_well
def list_topics(
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """All topics."""
    catalog = with_admin(servers, directory, timeout, lambda admin: admin.catalog(), path=path)
    counts: dict[int, int] = {}
    for stream in catalog.streams:
        counts[stream.topic] = counts.get(stream.topic, 0) + stream.committed_end
    rows = [
        (t.name, t.streams, t.replication, counts.get(t.topic, 0), t.trimmed_before, "typed" if t.schemas else "bytes")
        for t in sorted(catalog.topics, key=lambda t: t.name)
    ]
    columns = ["topic", "streams", "replication", "records ever", "trimmed before", "records are"]
    show(output, catalog.topics, table(columns, rows))


@app.command()
@ends_well
def describe(
    name: NameArgument,
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """A topic and its log streams."""
    topic, streams = with_admin(servers, directory, timeout, lambda admin: admin.topic(name), path=path)
    rows = [(s.stream, s.is_open, s.epoch, s.members, s.missing, s.committed_end, s.last_glsn) for s in streams]
    columns = ["log stream", "open", "epoch", "members", "missing", "records", "last GLSN"]
    title = (
        f"topic {topic.name!r}: {topic.streams} log streams, replication {topic.replication}, trimmed before GLSN "
        f"{topic.trimmed_before}, retention {_words(topic.retention)}"
    )
    show(output, {"topic": topic, "streams": streams}, table(columns, rows, title))


def _words(retention: Retention) -> str:
    parts = []
    if retention.time_us:
        parts.append(f"{retention.time_us / SECOND / 3_600:g} hours")
    if retention.bytes:
        parts.append(f"{retention.bytes} bytes")
    return " or ".join(parts) or "for ever"


@app.command()
@ends_well
def change(
    name: NameArgument,
    streams: Annotated[int | None, typer.Option(help="How many log streams shall take appends.")] = None,
    retention_hours: Annotated[float | None, typer.Option(min=0, help="How long records are kept.")] = None,
    retention_bytes: Annotated[int | None, typer.Option(min=0, help="How many bytes are kept.")] = None,
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Change how many log streams a topic has, or how long its records are kept."""
    retention = None
    if retention_hours is not None or retention_bytes is not None:
        retention = _retention(retention_hours or 0.0, retention_bytes or 0)
    with_admin(
        servers,
        directory,
        timeout,
        lambda admin: admin.change_topic(name, streams=streams, retention=retention),
        path=path,
    )
    show(output, {"topic": name}, f"topic {name!r} is changed")


@app.command()
@ends_well
def delete(
    name: NameArgument,
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Delete a topic and all its records."""
    with_admin(servers, directory, timeout, lambda admin: admin.delete_topic(name), path=path)
    show(output, {"topic": name}, f"topic {name!r} is deleted")


@app.command()
@ends_well
def trim(
    name: NameArgument,
    before: Annotated[int, typer.Option(min=1, help="The first GLSN to keep.")],
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Forget the records of a topic before a position."""
    with_admin(servers, directory, timeout, lambda admin: admin.trim(name, GLSN(before)), path=path)
    show(output, {"topic": name, "before": before}, f"topic {name!r} is trimmed before GLSN {before}")
