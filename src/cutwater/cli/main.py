"""``cutwater``: the root of the command line."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from cutwater.cli import cluster, mr, sn, stream, topic
from cutwater.cli.options import DebugOption

app = typer.Typer(
    name="cutwater",
    help="One totally ordered, replicated log. Every option can also be set in the environment, as CUTWATER_*; what is "
    "said on the command line counts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(cluster.app, name="cluster")
app.add_typer(topic.app, name="topic")
app.add_typer(stream.app, name="stream")
app.add_typer(sn.app, name="sn")
app.add_typer(mr.app, name="mr")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"cutwater {version('cutwater')}")
        raise typer.Exit


@app.callback()
def root(
    debug: DebugOption = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    app()
