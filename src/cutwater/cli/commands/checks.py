"""``cutwater doctor`` and ``cutwater verify``: check whether a machine and a cluster are fit, and whether everything
that is stored is intact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from cutwater.admin import local_cluster
from cutwater.admin.access_checks import check_access
from cutwater.admin.doctor import Check, Verdict, check_machine
from cutwater.admin.local_cluster import LocalCluster
from cutwater.admin.operations import Admin
from cutwater.admin.publish_audit import verify_published
from cutwater.admin.verification import Finding, Verification, not_verified
from cutwater.admin.verification import verify as verify_all
from cutwater.cli.framework.command import command, verbs
from cutwater.cli.framework.exit_codes import EXIT_CODES, UNHEALTHY, Settings
from cutwater.cli.framework.target import LogTarget
from cutwater.cli.io.output import LIMITED_VIEW, show, table
from cutwater.core.text import counted
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
            access = log.access(url)
            wrong = asyncio.run(local_cluster.health(cluster, place, access))
            is_limited = asyncio.run(local_cluster.is_view_limited(cluster, access))
            about_access = asyncio.run(check_access(cluster, access))
            reserved = asyncio.run(local_cluster.reserved_names(cluster, access))
    except CutwaterError as error:
        yield Check("cluster", Verdict.WRONG, "cannot be asked", error.message)
        return
    more = "`cutwater cluster status` and `cutwater stream describe` say more"
    if log.nearest == "path":
        more = f"`cutwater verify --path {log.path}` reads everything and names what is damaged"
    for what in wrong:
        yield Check("cluster", Verdict.WRONG, what, more)
    for name, way_out in reserved:
        found = "its name is reserved for topics of the cluster itself; it stays usable"
        yield Check(f"topic {name}", Verdict.WARNING, found, way_out)
    if not wrong and is_limited:
        yield Check("cluster", Verdict.WARNING, f"nothing is wrong with what {url} shows", LIMITED_VIEW)
    elif not wrong:
        advice = "`cutwater verify` reads all records, and finds damage that no reader has met"
        yield Check("cluster", Verdict.OK, f"all is well with {url}", advice)
    yield from about_access


@dataclass(frozen=True)
class AnsweringLog(LogTarget):
    timeout: Annotated[
        float, typer.Option(envvar="CUTWATER_TIMEOUT", min=0.1, help="Seconds until the cluster has to answer.")
    ] = 10.0


def _records(finding: Finding) -> str | None:
    if finding.first_llsn is None:
        return None
    last = finding.last_llsn or finding.first_llsn
    return f"{finding.first_llsn}" if last == finding.first_llsn else f"{finding.first_llsn} to {last}"


@command(app)
def verify(
    replica_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one replica may take.")] = 3_600.0,
    *,
    log: AnsweringLog,
) -> None:
    """Let every storage node check the checksums of all its data.

    What runs of Spark have published is compared with what was decided, too.

    Exit code 0 if everything is intact, 20 if something is damaged, 21 if something is intact but holds no records of
    its topic, 34 if something could not be checked. Damage is repaired afterwards from an intact copy, if there is one.
    """

    async def work(admin: Admin) -> Verification:
        description = await admin.describe()
        if description.is_limited:
            raise not_verified((await admin.control.who_am_i()).principal)
        timeout_ms = round(replica_timeout * 1_000)
        stored = await verify_all(description, timeout_ms=timeout_ms, access=admin.access, place=log.as_option)
        ranges = await admin.ranges()
        try:
            groups, findings = await verify_published(ranges, admin.describe, timeout=log.timeout)
        finally:
            await ranges.close()
        return replace(stored, findings=(*stored.findings, *findings), groups=groups)

    found = log.administer(work)
    replicas = counted(found.replicas, "replica")
    for leftover in found.leftovers:
        what = f"log stream {leftover.stream} on storage node {leftover.node}"
        if not Settings.is_json:
            show(None, f"{what}: leftover, safe to remove (other nodes hold the log stream now)")
    if not found.findings:
        groups = counted(found.groups, "group")
        show(found, f"all is intact: {replicas}, {groups} that runs have published")
        return
    rows = [(f.node, f.stream, _records(f), f.what, f.where) for f in found.findings]
    title = f"{counted(len(rows), 'finding')}; {replicas} looked at"
    show(found, table(["storage node", "log stream", "LLSN", "what", "where"], rows, title))
    if not Settings.is_json:
        # Several findings of one log stream often have the same way out.
        for way_out in dict.fromkeys((f.stream, f.way_out) for f in found.findings if f.way_out):
            show(None, f"log stream {way_out[0]}: {way_out[1]}")
    if any(finding.is_damage and not finding.is_content for finding in found.findings):
        code = "damaged"
    else:
        code = "malformed" if any(finding.is_content for finding in found.findings) else "unavailable"
    raise typer.Exit(EXIT_CODES[code])
