"""``cutwater doctor``: checks whether this machine, and a cluster, are fit for Cutwater."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cutwater.admin import local_cluster
from cutwater.admin.doctor import Check, Verdict, check_machine
from cutwater.admin.local_cluster import LocalCluster
from cutwater.cli.framework.command import command, verbs
from cutwater.cli.framework.exit_codes import UNHEALTHY
from cutwater.cli.framework.target import LogTarget
from cutwater.cli.io.output import show, table
from cutwater.errors import CutwaterError

app = verbs()


@command(app)
def doctor(
    disk: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIRECTORY", help="A directory on the disk to measure; by default that of --path or --dir, or here."
        ),
    ] = None,
    *,
    log: LogTarget,
) -> None:
    """Check whether this machine, and a cluster, are fit for Cutwater.

    Exit code 0 unless something essential is wrong, then 3.
    """
    checks = list(check_machine(disk or log.disk or Path()))
    if log.nearest is not None:
        checks += _check_cluster(log)
    rows = [(check.verdict, check.name, check.found, check.advice or "-") for check in checks]
    show(checks, table(["", "what", "found", "what to do"], rows))
    if any(check.verdict is Verdict.WRONG for check in checks):
        raise typer.Exit(UNHEALTHY)


def _check_cluster(log: LogTarget) -> Iterator[Check]:
    try:
        with log.serving() as url:
            # A cluster that is not known to be local has no processes to check, and is asked in the same way.
            cluster, place = LocalCluster(url, [], []), None
            if log.local is not None:
                cluster, place = local_cluster.load(log.local), log.local
            wrong = asyncio.run(local_cluster.health(cluster, place, log.access(url)))
    except CutwaterError as error:
        yield Check("cluster", Verdict.WRONG, "cannot be asked", error.message)
        return
    more = "`cutwater cluster status` and `cutwater stream describe` say more"
    if log.nearest == "path":
        more = f"`cutwater verify --path {log.path}` reads everything and names what is damaged"
    for what in wrong:
        yield Check("cluster", Verdict.WRONG, what, more)
    if not wrong:
        advice = "`cutwater verify` reads all records, and finds damage that no reader has met"
        yield Check("cluster", Verdict.OK, f"all is well with {url}", advice)
