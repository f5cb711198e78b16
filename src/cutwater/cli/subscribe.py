"""``cutwater subscribe``: records on standard output, in the order of the log."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from cutwater.cli.client import open_client
from cutwater.cli.exits import ends_well
from cutwater.cli.options import DebugOption
from cutwater.cli.record_output import RecordOutput, RecordOutputOption, write_records
from cutwater.cli.servers import DirOption, PathOption, ServersOption, TimeoutOption
from cutwater.cli.times import Start, parse_position, parse_start
from cutwater.client.client import Client
from cutwater.errors import InvalidArgument

app = typer.Typer()


@app.callback()
def records() -> None:
    """One command, which keeps its name."""


@app.command()
@ends_well
def subscribe(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC", help="Names of topics.")],
    start: Annotated[
        str, typer.Option(metavar="earliest|latest|GLSN|@TIME", help="Where to begin; @-5m is five minutes ago.")
    ] = "earliest",
    stop: Annotated[
        str | None, typer.Option(metavar="GLSN|@TIME", help="Where to end; that position is not printed any more.")
    ] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after so many records.")] = None,
    follow: Annotated[
        bool | None,
        typer.Option("--follow/--no-follow", "-f", help="Wait for more at the end of the log; so does --start latest."),
    ] = None,
    pattern: Annotated[
        bool, typer.Option("--pattern", help="TOPIC is one regular expression; it must fit the whole name.")
    ] = False,
    output: RecordOutputOption = RecordOutput.TEXT,
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 30.0,
    debug: DebugOption = False,
) -> None:
    """Print the records of topics, in the order of the log.

    Prints what there is and ends, as cat does; with --follow it waits for more, as tail -f does.
    """
    now = datetime.now(UTC)
    begin = parse_start(start, now)
    end = None if stop is None else parse_position(stop, now)
    follows = begin == "latest" if follow is None else follow
    wanted = _pattern(topics) if pattern else topics
    with open_client(servers, directory, path, timeout) as client:
        _print(client, wanted, begin, end, count, follows, output)


def _pattern(topics: list[str]) -> re.Pattern[str]:
    if len(topics) != 1:
        raise InvalidArgument(f"--pattern takes one regular expression, not {len(topics)}: join them with |")
    try:
        return re.compile(topics[0])
    except re.error as error:
        raise InvalidArgument(f"{topics[0]!r} is no regular expression: {error}") from None


def _print(
    client: Client,
    topics: list[str] | re.Pattern[str],
    start: Start,
    stop: int | datetime | None,
    count: int | None,
    follow: bool,
    output: RecordOutput,
) -> None:
    left = count
    with client.subscribe(topics, start=start, stop=stop, follow=follow) as subscription:
        while found := subscription.take():
            if left is not None:
                found = found[:left]
                left -= len(found)
            write_records(found, output)
            if left == 0:
                return
