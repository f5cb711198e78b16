"""``cutwater cursor``: how far consumers have come."""

from __future__ import annotations

from typing import Annotated

import typer

from cutwater.cli.client import open_client
from cutwater.cli.exits import ends_well
from cutwater.cli.options import DebugOption, Output, OutputOption
from cutwater.cli.servers import DirOption, PathOption, ServersOption, TimeoutOption
from cutwater.cli.tables import show
from cutwater.errors import NotFound

app = typer.Typer(help="Cursors: how far consumers have come, kept in the cluster.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cursor.")]


@app.command()
@ends_well
def get(
    name: NameArgument,
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Print the last GLSN that the consumer is done with."""
    with open_client(servers, directory, path, timeout) as client:
        glsn = client.cursor(name).get()
    if glsn is None:
        raise NotFound(f"there is no cursor {name!r}: `cutwater cursor commit {name} GLSN` makes one")
    show(output, {"cursor": name, "glsn": glsn}, str(glsn))


@app.command()
@ends_well
def commit(
    name: NameArgument,
    glsn: Annotated[int, typer.Argument(metavar="GLSN", min=1, help="The last position that is done with.")],
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Note that everything up to a position is done with. Durable when it returns."""
    with open_client(servers, directory, path, timeout) as client:
        client.cursor(name).commit(glsn)
    show(output, {"cursor": name, "glsn": glsn}, f"cursor {name!r} is at GLSN {glsn}")


@app.command()
@ends_well
def drop(
    name: NameArgument,
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Forget a cursor."""
    with open_client(servers, directory, path, timeout) as client:
        client.cursor(name).drop()
    show(output, {"cursor": name}, f"cursor {name!r} is forgotten")
