"""``cutwater topic``: names for sets of log streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from cutwater.cli.client import open_client
from cutwater.cli.commands import command, noun
from cutwater.cli.exits import Settings
from cutwater.cli.servers import Log
from cutwater.cli.tables import show, table, text
from cutwater.core.words import counted
from cutwater.types import GLSN, SECOND, Retention

app = noun("Topics: names for sets of log streams.")

NameArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
HoursOption = Annotated[
    float, typer.Option("--retention-hours", min=0, help="How long records are kept at least; 0 is for ever.")
]
BytesOption = Annotated[
    int, typer.Option("--retention-bytes", min=0, help="How many bytes of one copy are kept; 0 is without bound.")
]


def _retention(hours: float, size: int) -> Retention:
    return Retention(round(hours * 3_600 * SECOND), size)


@command(app)
def create(
    name: NameArgument,
    streams: Annotated[int, typer.Option(help="How many log streams take appends.")] = 1,
    replication: Annotated[
        int | None, typer.Option(help="Copies of every record; three, or as many as there are nodes, if not said.")
    ] = None,
    schema: Annotated[
        str | None, typer.Option(metavar="COLUMNS", help="Typed records, such as 'user string, at timestamp'.")
    ] = None,
    event_time: Annotated[str, typer.Option(metavar="COLUMN", help="The column that is the event time.")] = "",
    retention_hours: HoursOption = 0.0,
    retention_bytes: BytesOption = 0,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Be content with one of this name that exists.")] = False,
    *,
    log: Log,
) -> None:
    """Create a topic. Returns when it takes appends."""
    with open_client(log, may_create=True) as client:
        created = client.create_topic(
            name,
            streams=streams,
            replication=replication,
            schema=schema,
            event_time=event_time,
            retention=_retention(retention_hours, retention_bytes),
            exist_ok=exist_ok,
        )
    show(
        {"topic": name, "streams": created.streams},
        f"topic {name!r} takes appends in log stream{'s' if len(created.streams) > 1 else ''} {text(created.streams)}",
    )


@command(app, "list", timeout=10.0)
def list_topics(log: Log) -> None:
    """All topics."""
    catalog = log.administer(lambda admin: admin.catalog())
    counts: dict[int, int] = {}
    for stream in catalog.streams:
        counts[stream.topic] = counts.get(stream.topic, 0) + stream.committed_end
    if Settings.is_json:
        more = ({"columns": _columns(t.schemas), "records_ever": counts.get(t.topic, 0)} for t in catalog.topics)
        show([msgspec.to_builtins(t) | told for t, told in zip(catalog.topics, more, strict=True)], "")
        return
    rows = [
        (t.name, t.streams, t.replication, counts.get(t.topic, 0), t.trimmed_before, "typed" if t.schemas else "bytes")
        for t in sorted(catalog.topics, key=lambda t: t.name)
    ]
    columns = ["topic", "streams", "replication", "records ever", "trimmed before", "records are"]
    show(None, table(columns, rows))


@command(app, timeout=10.0)
def describe(name: NameArgument, log: Log) -> None:
    """A topic and its log streams."""
    topic, streams = log.administer(lambda admin: admin.topic(name))
    rows = [(s.stream, s.is_open, s.epoch, s.members, s.missing, s.committed_end, s.last_glsn) for s in streams]
    columns = ["log stream", "open", "epoch", "members", "missing", "records", "last GLSN"]
    title = (
        f"topic {topic.name!r}: {counted(topic.streams, 'log stream')}, replication {topic.replication}, "
        f"trimmed before GLSN {topic.trimmed_before}, retention {_words(topic.retention)}"
    )
    described = _columns(topic.schemas)
    if described is not None:
        title += f"\nrecords are: {described}"
        title += f"; event time is {topic.event_time}" if topic.event_time else ""
    told = msgspec.to_builtins(topic) | {"columns": described}
    show({"topic": told, "streams": streams}, table(columns, rows, title))


def _columns(schemas: Sequence[bytes]) -> str | None:
    """Of the newest schema; None for keys and values."""
    if not schemas:
        return None
    # Arrow comes with these, which is much to load for those who have no typed topics.
    from cutwater.client.schemas import decode_schema  # noqa: PLC0415
    from cutwater.ddl import shown_columns  # noqa: PLC0415

    return shown_columns(decode_schema(schemas[-1]))


def _words(retention: Retention) -> str:
    parts = []
    if retention.time_us:
        parts.append(f"{retention.time_us / SECOND / 3_600:g} hours")
    if retention.bytes:
        parts.append(f"{retention.bytes} bytes")
    return " or ".join(parts) or "for ever"


@command(app, timeout=10.0)
def change(
    name: NameArgument,
    streams: Annotated[
        int | None, typer.Option(help="How many log streams shall take appends; those too many are sealed for good.")
    ] = None,
    retention_hours: Annotated[float | None, typer.Option(min=0, help="How long records are kept.")] = None,
    retention_bytes: Annotated[int | None, typer.Option(min=0, help="How many bytes are kept.")] = None,
    *,
    log: Log,
) -> None:
    """Change how many log streams a topic has, or how long its records are kept. Returns when new ones take appends."""
    retention = None
    if retention_hours is not None or retention_bytes is not None:
        retention = _retention(retention_hours or 0.0, retention_bytes or 0)
    with open_client(log) as client:
        changed = client.change_topic(name, streams=streams, retention=retention)
    having = f"log stream{'s' if len(changed.streams) > 1 else ''} {text(changed.streams)}"
    show({"topic": name, "streams": changed.streams}, f"topic {name!r} is changed, and has {having}")


@command(app, timeout=10.0)
def delete(name: NameArgument, log: Log) -> None:
    """Delete a topic and all its records."""
    log.administer(lambda admin: admin.delete_topic(name))
    show({"topic": name}, f"topic {name!r} is deleted")


@command(app, timeout=10.0)
def trim(
    name: NameArgument,
    before: Annotated[int, typer.Option(min=1, help="The first GLSN to keep.")],
    log: Log,
) -> None:
    """Forget the records of a topic before a position."""
    log.administer(lambda admin: admin.trim(name, GLSN(before)))
    show({"topic": name, "before": before}, f"topic {name!r} is trimmed before GLSN {before}")
