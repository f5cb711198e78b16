"""``cutwater read``, ``tail`` and ``find`` print positions, and the records there. ``cutwater cursor`` is about the
positions of consumers.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from cutwater.cli.framework.command import command, noun, verbs
from cutwater.cli.framework.target import LogTarget
from cutwater.cli.framework.times import parse_glsn, parse_time
from cutwater.cli.io.output import show
from cutwater.cli.io.record_output import RecordOutput, RecordOutputOption, write_records
from cutwater.errors import NotFound

app = verbs()
cursor_app = noun("Cursors: how far consumers have come, kept in the cluster.")
app.add_typer(cursor_app, name="cursor")


@command(app)
def read(
    glsn: Annotated[int, typer.Argument(metavar="GLSN", parser=parse_glsn, help="The position.")],
    stream: Annotated[
        int | None, typer.Option(min=1, help="The log stream of the record, if known: this finds it faster.")
    ] = None,
    output: RecordOutputOption = RecordOutput.TEXT,
    *,
    log: LogTarget,
) -> None:
    """Print the record at a position."""
    with log.client() as client:
        write_records([client.read(glsn, stream=stream)], output)


@command(app)
def tail(log: LogTarget) -> None:
    """Print the highest GLSN that is given out.

    Prints 0 if none is. It never goes back. The clock of the log takes a GLSN now and then, so it grows even without
    records.
    """
    with log.client() as client:
        glsn = client.tail()
    show({"glsn": glsn}, str(glsn))


@command(app)
def find(
    time: Annotated[
        str, typer.Argument(metavar="@TIME", help="Such as @2026-01-31T12:00:00Z, or @-5m for five minutes ago.")
    ],
    topics: Annotated[list[str] | None, typer.Argument(metavar="TOPIC", help="Only in these topics.")] = None,
    *,
    log: LogTarget,
) -> None:
    """Print the first GLSN that was committed at or after a time.

    Prints one above the end of the log if there is none.
    """
    at = parse_time(time, datetime.now(UTC))
    with log.client() as client:
        glsn = client.find(at, topics or None)
    show({"glsn": glsn, "time": at}, str(glsn))


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cursor.")]


@command(cursor_app)
def get(name: NameArgument, log: LogTarget) -> None:
    """Print the last GLSN that the consumer has processed."""
    with log.client() as client:
        glsn = client.cursor(name).get()
    if glsn is None:
        raise NotFound(f"there is no cursor {name!r}: `cutwater cursor commit {name} GLSN` makes one")
    show({"cursor": name, "glsn": glsn}, str(glsn))


@command(cursor_app)
def commit(
    name: NameArgument,
    glsn: Annotated[
        int, typer.Argument(metavar="GLSN", parser=parse_glsn, help="The last position that is done with.")
    ],
    log: LogTarget,
) -> None:
    """Note that everything up to a position is processed. Durable when it returns."""
    with log.client() as client:
        client.cursor(name).commit(glsn)
    show({"cursor": name, "glsn": glsn}, f"cursor {name!r} is at GLSN {glsn}")


@command(cursor_app)
def drop(name: NameArgument, log: LogTarget) -> None:
    """Forget a cursor."""
    with log.client() as client:
        client.cursor(name).drop()
    show({"cursor": name}, f"cursor {name!r} is forgotten")
