"""``cutwater topic``: shows and manages topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.exit_codes import Settings
from cutwater.cli.framework.target import LogTarget, ReplicationOption
from cutwater.cli.framework.times import IdleOption, WatermarkOption, parse_declared
from cutwater.cli.io.output import show, table, text
from cutwater.core.text import counted
from cutwater.durations import milliseconds, shown
from cutwater.errors import InvalidArgument
from cutwater.types import GLSN, MILLISECOND, REPLICATION_DEFAULT, SECOND, Retention

app = noun("Topics: names for sets of log streams.")

NameArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
AheadOption = Annotated[
    str | None,
    typer.Option(
        "--event-time-ahead-max",
        metavar="DURATION",
        help="Refuse records whose event time or declared watermark is further ahead of the log's clock, such as '1h'. "
        "One such record would move the watermark for ever. By default, and with '0s', there is no limit.",
    ),
]


def _ahead_ms(given: str | None) -> int | None:
    return None if given is None else milliseconds(given, "--event-time-ahead-max")


def _retention(hours: float, size: int) -> Retention:
    return Retention(round(hours * 3_600 * SECOND), size)


@command(app)
def create(
    name: NameArgument,
    streams: Annotated[int, typer.Option(help="How many log streams take appends.")] = 1,
    replication: ReplicationOption = None,
    schema: Annotated[
        str | None, typer.Option(metavar="COLUMNS", help="Typed records, such as 'user string, at timestamp'.")
    ] = None,
    event_time: Annotated[str, typer.Option(metavar="COLUMN", help="The column that is the event time.")] = "",
    retention_hours: Annotated[
        float, typer.Option(min=0, help="How long records are kept at least; 0 is for ever.")
    ] = 0.0,
    retention_bytes: Annotated[
        int, typer.Option(min=0, help="How many bytes of one copy are kept; 0 means no limit.")
    ] = 0,
    event_time_ahead_max: AheadOption = None,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Accept an existing topic of this name.")] = False,
    *,
    log: LogTarget,
) -> None:
    """Create a topic. Returns when it takes appends."""
    ahead_ms = _ahead_ms(event_time_ahead_max)
    with log.client(may_create=True) as client:
        created = client.create_topic(
            name,
            streams=streams,
            replication=replication,
            schema=schema,
            event_time=event_time,
            retention=_retention(retention_hours, retention_bytes),
            event_time_ahead_max=ahead_ms,
            exist_ok=exist_ok,
        )
    told = (
        f"topic {name!r} takes appends in log stream{'s' if len(created.streams) > 1 else ''} {text(created.streams)}"
    )
    is_asked = replication is not None or exist_ok or log.nearest == "path"
    if not is_asked and created.replication < REPLICATION_DEFAULT:
        told += (
            f"\nits records have {_copies(created.replication)}, as there are no more storage nodes: `cutwater topic "
            f"change {name} --replication {REPLICATION_DEFAULT}` lets more be made as soon as there are"
        )
    show({"topic": name, "streams": created.streams, "replication": created.replication}, told)


def _copies(count: int) -> str:
    return "one copy" if count == 1 else f"{count} copies"


@command(app, "list", timeout=10.0)
def list_topics(
    every: Annotated[bool, typer.Option("--all", help="Also those that the cluster made for itself.")] = False,
    *,
    log: LogTarget,
) -> None:
    """Show all topics of users."""
    catalog = log.administer(lambda admin: admin.catalog())
    topics = [topic for topic in catalog.topics if every or not topic.is_internal]
    counts: dict[int, int] = {}
    for stream in catalog.streams:
        counts[stream.topic] = counts.get(stream.topic, 0) + stream.committed_end
    if Settings.is_json:
        more = ({"columns": _columns(t.schemas), "records_ever": counts.get(t.topic, 0)} for t in topics)
        show([msgspec.to_builtins(t) | told for t, told in zip(topics, more, strict=True)], "")
        return
    rows = [
        (t.name, t.streams, t.replication, counts.get(t.topic, 0), t.trimmed_before, "typed" if t.schemas else "bytes")
        for t in sorted(topics, key=lambda t: t.name)
    ]
    columns = ["topic", "streams", "replication", "positions ever", "trimmed before", "records are"]
    show(None, table(columns, rows))


@command(app, timeout=10.0)
def describe(name: NameArgument, log: LogTarget) -> None:
    """Show a topic and its log streams."""
    topic, streams = log.administer(lambda admin: admin.topic(name))
    rows = [(s.stream, s.is_open, s.epoch, s.members, s.missing, s.committed_end, s.last_glsn) for s in streams]
    columns = ["log stream", "open", "epoch", "members", "missing", "positions", "last GLSN"]
    title = (
        f"topic {topic.name!r}: {counted(topic.streams, 'log stream')}, replication {topic.replication}, "
        f"trimmed before GLSN {topic.trimmed_before}, retention {_words(topic.retention)}"
    )
    if topic.event_time_ahead_us:
        title += f", event times at most {shown(topic.event_time_ahead_us // MILLISECOND)} ahead"
    described = _columns(topic.schemas)
    if described is not None:
        title += f"\nrecords are: {described}"
        title += f"; event time is {topic.event_time}" if topic.event_time else ""
    told = msgspec.to_builtins(topic) | {"columns": described}
    show({"topic": told, "streams": streams}, table(columns, rows, title))


def _columns(schemas: Sequence[bytes]) -> str | None:
    """Return the columns of the newest schema; None for keys and values."""
    if not schemas:
        return None
    # Imports Arrow, which takes long and is not needed without typed topics.
    from cutwater.client.convert.schemas import decode_schema  # noqa: PLC0415
    from cutwater.schema_text import shown_columns  # noqa: PLC0415

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
        int | None, typer.Option(help="How many log streams take appends; surplus ones are sealed permanently.")
    ] = None,
    retention_hours: Annotated[float | None, typer.Option(min=0, help="How long records are kept.")] = None,
    retention_bytes: Annotated[int | None, typer.Option(min=0, help="How many bytes are kept.")] = None,
    event_time_ahead_max: AheadOption = None,
    replication: Annotated[
        int | None,
        typer.Option(min=1, help="Copies of every record; they are added or removed one after another, later."),
    ] = None,
    *,
    log: LogTarget,
) -> None:
    """Change how many log streams and copies a topic has, how long its records are kept, or which event times it takes.
    Returns when new log streams take appends."""
    retention, ahead_ms = None, _ahead_ms(event_time_ahead_max)
    if retention_hours is not None or retention_bytes is not None:
        retention = _retention(retention_hours or 0.0, retention_bytes or 0)
    with log.client() as client:
        changed = client.change_topic(
            name, streams=streams, retention=retention, event_time_ahead_max=ahead_ms, replication=replication
        )
    having = f"log stream{'s' if len(changed.streams) > 1 else ''} {text(changed.streams)}"
    told = f"topic {name!r} is changed, and has {having}"
    if replication is not None:
        nodes = len(log.administer(lambda admin: admin.catalog()).nodes)
        first = min(changed.streams, default=0)
        told += f"; it gets {_copies(replication)}, `cutwater stream describe {first}` shows how far that is"
        if replication > nodes:
            told += (
                f"\nwarning: there {'is' if nodes == 1 else 'are'} {counted(nodes, 'storage node')}, so there are "
                f"{_copies(nodes)} for now; the rest is made as soon as storage nodes are added (`cutwater sn add`)"
            )
    show({"topic": name, "streams": changed.streams, "replication": changed.replication}, told)


@command(app, timeout=10.0)
def delete(name: NameArgument, log: LogTarget) -> None:
    """Delete a topic and all its records."""
    log.administer(lambda admin: admin.delete_topic(name))
    show({"topic": name}, f"topic {name!r} is deleted")


@command(app, timeout=10.0)
def trim(
    name: NameArgument,
    before: Annotated[int, typer.Option(min=1, help="The first GLSN to keep.")],
    log: LogTarget,
) -> None:
    """Remove the records of a topic before a position."""
    log.administer(lambda admin: admin.trim(name, GLSN(before)))
    show({"topic": name, "before": before}, f"topic {name!r} is trimmed before GLSN {before}")


@command(app, timeout=10.0)
def declare(
    name: NameArgument,
    watermark: WatermarkOption = None,
    idle: IdleOption = False,
    stream: Annotated[int | None, typer.Option(min=1, help="Only in this log stream, otherwise in all.")] = None,
    *,
    log: LogTarget,
) -> None:
    """Declare a watermark, idleness or both for a topic, without a record. Idleness ends with the next entry."""
    declared = parse_declared(watermark, idle)
    if declared is None:
        raise InvalidArgument("nothing is declared: give --watermark TIME, --idle or both")
    with log.client() as client:
        acks = client.declare(name, watermark=declared.watermark, idle=declared.idle, stream=stream)
    what = [f"the watermark {declared.watermark.isoformat()}"] if declared.watermark is not None else []
    said = " and ".join([*what, "idleness"] if idle else what)
    where = ", ".join(f"log stream {ack.stream} (GLSN {ack.glsn})" for ack in sorted(acks, key=lambda ack: ack.stream))
    told = {"topic": name, "watermark": declared.watermark, "idle": idle, "declared": acks}
    show(told, f"declared {said} in {where} of topic {name!r}")
