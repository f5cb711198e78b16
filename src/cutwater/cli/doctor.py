"""``cutwater doctor``: whether this machine, and a cluster, are fit for Cutwater."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cutwater.admin import local_cluster
from cutwater.admin.checkup import Check, Verdict, check_machine
from cutwater.admin.local_cluster import LocalCluster
from cutwater.cli.exits import UNHEALTHY, ends_well
from cutwater.cli.options import DebugOption, Output, OutputOption
from cutwater.cli.servers import DirOption, PathOption, ServersOption, nearest, serving
from cutwater.cli.tables import show, table
from cutwater.errors import CutwaterError

app = typer.Typer()

OPEN_SECONDS = 30.0


@app.callback()
def this_machine() -> None:
    """One command, which keeps its name."""


@app.command()
@ends_well
def doctor(
    disk: Annotated[
        Path | None,
        typer.Argument(metavar="DIRECTORY", help="Whose disk to measure; otherwise that of --path, --dir, or here."),
    ] = None,
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Whether this machine, and a cluster, are fit for Cutwater.

    Exit code 0 unless something essential is wrong, then 3.
    """
    checks = list(check_machine(disk or path or directory or Path()))
    if nearest(servers, directory, path) is not None:
        checks += _check_cluster(servers, directory, path)
    rows = [(check.verdict, check.name, check.found, check.advice or "-") for check in checks]
    show(output, checks, table(["", "what", "found", "what to do"], rows))
    if any(check.verdict is Verdict.WRONG for check in checks):
        raise typer.Exit(UNHEALTHY)


def _check_cluster(servers: str | None, directory: Path | None, path: Path | None) -> Iterator[Check]:
    try:
        with serving(servers, directory, path, OPEN_SECONDS) as url:
            # One that is not known to be local has no processes to look at, and is asked in the same way.
            cluster, place = LocalCluster(url, [], []), None
            if directory is not None and nearest(servers, directory, path) == "directory":
                cluster, place = local_cluster.load(directory), directory
            wrong = asyncio.run(local_cluster.health(cluster, place))
    except CutwaterError as error:
        yield Check("cluster", Verdict.WRONG, "cannot be asked", error.message)
        return
    for what in wrong:
        yield Check("cluster", Verdict.WRONG, what, "cutwater cluster status and stream describe say more")
    if not wrong:
        yield Check("cluster", Verdict.OK, f"all is well with {url}")
