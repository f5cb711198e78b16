"""``cutwater read``, ``tail`` and ``find``: positions, and what is there."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from cutwater.cli.client import open_client
from cutwater.cli.exits import ends_well
from cutwater.cli.options import DebugOption, Output, OutputOption
from cutwater.cli.record_output import RecordOutput, RecordOutputOption, write_records
from cutwater.cli.servers import DirOption, PathOption, ServersOption, TimeoutOption
from cutwater.cli.tables import show
from cutwater.cli.times import parse_time

app = typer.Typer()


@app.command()
@ends_well
def read(
    glsn: Annotated[int, typer.Argument(metavar="GLSN", min=1, help="The position.")],
    stream: Annotated[
        int | None, typer.Option(min=1, help="The log stream it is in, if that is known: it is found faster.")
    ] = None,
    output: RecordOutputOption = RecordOutput.TEXT,
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 30.0,
    debug: DebugOption = False,
) -> None:
    """Print the record at a position."""
    with open_client(servers, directory, path, timeout) as client:
        write_records([client.read(glsn, stream=stream)], output)


@app.command()
@ends_well
def tail(
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """The highest GLSN that is given out.

    0 if none is. It never goes back. Time takes a GLSN of its own now and then, so it grows also without records.
    """
    with open_client(servers, directory, path, timeout) as client:
        glsn = client.tail()
    show(output, {"glsn": glsn}, str(glsn))


@app.command()
@ends_well
def find(
    time: Annotated[
        str, typer.Argument(metavar="@TIME", help="Such as @2026-01-31T12:00:00Z, or @-5m for five minutes ago.")
    ],
    topics: Annotated[list[str] | None, typer.Argument(metavar="TOPIC", help="Only in these topics.")] = None,
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """The first GLSN that was committed at or after a time.

    One above the end of the log if nothing was.
    """
    at = parse_time(time, datetime.now(UTC))
    with open_client(servers, directory, path, timeout) as client:
        glsn = client.find(at, topics or None)
    show(output, {"glsn": glsn, "time": at}, str(glsn))
