"""``cutwater cursor``: shows and changes the positions of consumers."""

from __future__ import annotations

from typing import Annotated

import typer

from cutwater.cli.framework.client import open_client
from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.target import LogTarget
from cutwater.cli.framework.times import parse_glsn
from cutwater.cli.io.output import show
from cutwater.errors import NotFound

app = noun("Cursors: how far consumers have come, kept in the cluster.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cursor.")]


@command(app)
def get(name: NameArgument, log: LogTarget) -> None:
    """Print the last GLSN that the consumer has processed."""
    with open_client(log) as client:
        glsn = client.cursor(name).get()
    if glsn is None:
        raise NotFound(f"there is no cursor {name!r}: `cutwater cursor commit {name} GLSN` makes one")
    show({"cursor": name, "glsn": glsn}, str(glsn))


@command(app)
def commit(
    name: NameArgument,
    glsn: Annotated[
        int, typer.Argument(metavar="GLSN", parser=parse_glsn, help="The last position that is done with.")
    ],
    log: LogTarget,
) -> None:
    """Note that everything up to a position is processed. Durable when it returns."""
    with open_client(log) as client:
        client.cursor(name).commit(glsn)
    show({"cursor": name, "glsn": glsn}, f"cursor {name!r} is at GLSN {glsn}")


@command(app)
def drop(name: NameArgument, log: LogTarget) -> None:
    """Forget a cursor."""
    with open_client(log) as client:
        client.cursor(name).drop()
    show({"cursor": name}, f"cursor {name!r} is forgotten")
