"""``cutwater verify``: whether everything that is stored is intact."""

from __future__ import annotations

from typing import Annotated

import typer

from cutwater.admin.operations import Admin
from cutwater.admin.verification import Verification
from cutwater.admin.verification import verify as verify_all
from cutwater.cli.exits import EXIT_CODES, ends_well
from cutwater.cli.options import DebugOption, Output, OutputOption
from cutwater.cli.servers import DirOption, PathOption, ServersOption, with_admin
from cutwater.cli.tables import show, table

app = typer.Typer()


@app.callback()
def cluster() -> None:
    """One command, which keeps its name."""


@app.command()
@ends_well
def verify(
    servers: ServersOption = None,
    directory: DirOption = None,
    path: PathOption = None,
    replica_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one replica may take.")] = 3_600.0,
    timeout: Annotated[
        float, typer.Option(envvar="CUTWATER_TIMEOUT", min=0.1, help="Seconds until the cluster has to answer.")
    ] = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Let every storage node check the checksums of all that it holds.

    Exit code 0 if everything is intact, 20 if something is damaged, 34 if something could not be looked at. What is
    damaged is repaired afterwards from an intact copy, if there is one.
    """

    async def work(admin: Admin) -> Verification:
        return await verify_all(await admin.describe(), timeout_ms=round(replica_timeout * 1_000))

    found = with_admin(servers, directory, timeout, work, path=path)
    if not found.findings:
        show(output, found, f"all is intact: {found.replicas} replicas")
        return
    rows = [(f.node, f.stream, f.what, f.where) for f in found.findings]
    title = f"{len(rows)} findings; {found.replicas} replicas were looked at"
    show(output, found, table(["storage node", "log stream", "what", "where"], rows, title))
    is_damaged = any(finding.is_damage for finding in found.findings)
    raise typer.Exit(EXIT_CODES["damaged" if is_damaged else "unavailable"])
