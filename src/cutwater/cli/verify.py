"""``cutwater verify``: whether everything that is stored is intact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from msgspec.structs import replace

from cutwater.admin.operations import Admin
from cutwater.admin.published import verify_published
from cutwater.admin.verification import Verification
from cutwater.admin.verification import verify as verify_all
from cutwater.cli.commands import command, verbs
from cutwater.cli.exits import EXIT_CODES
from cutwater.cli.servers import Log
from cutwater.cli.tables import show, table
from cutwater.core.words import counted

app = verbs()


@dataclass(frozen=True)
class AnsweringLog(Log):
    timeout: Annotated[
        float, typer.Option(envvar="CUTWATER_TIMEOUT", min=0.1, help="Seconds until the cluster has to answer.")
    ] = 10.0


@command(app)
def verify(
    replica_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one replica may take.")] = 3_600.0,
    *,
    log: AnsweringLog,
) -> None:
    """Let every storage node check the checksums of all that it holds.

    What runs of Spark have published is held against what was decided, too.

    Exit code 0 if everything is intact, 20 if something is damaged, 34 if something could not be looked at. What is
    damaged is repaired afterwards from an intact copy, if there is one.
    """

    async def work(admin: Admin) -> Verification:
        description = await admin.describe()
        stored = await verify_all(description, timeout_ms=round(replica_timeout * 1_000), access=log.access())
        ranges = await admin.ranges()
        try:
            groups, findings = await verify_published(ranges, admin.describe, timeout=log.timeout)
        finally:
            await ranges.close()
        return replace(stored, findings=(*stored.findings, *findings), groups=groups)

    found = log.administer(work)
    replicas = counted(found.replicas, "replica")
    if not found.findings:
        groups = counted(found.groups, "group")
        show(found, f"all is intact: {replicas}, {groups} that runs have published")
        return
    rows = [(f.node, f.stream, f.what, f.where) for f in found.findings]
    title = f"{counted(len(rows), 'finding')}; {replicas} looked at"
    show(found, table(["storage node", "log stream", "what", "where"], rows, title))
    is_damaged = any(finding.is_damage for finding in found.findings)
    raise typer.Exit(EXIT_CODES["damaged" if is_damaged else "unavailable"])
