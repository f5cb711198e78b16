"""``cutwater audit``: who changed what, and what was denied."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Literal

import typer

from cutwater.admin.audit_search import AuditQuery, AuditRecords, check_operation, in_words, search_audit, tail_audit
from cutwater.cli.framework.command import Bundle, command, noun
from cutwater.cli.framework.exit_codes import Settings
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.framework.times import parse_time
from cutwater.client.convert.json_values import encode

app = noun("The audit: changes, and denied calls.")


@dataclass(frozen=True)
class AuditOptions(Bundle):
    """Which records a command prints."""

    principal: Annotated[str | None, typer.Option(help="Only those of this principal.")] = None
    operation: Annotated[
        str | None, typer.Option(metavar="create-topic|append|…", help="Only those of this operation.")
    ] = None
    resource: Annotated[
        str | None, typer.Option(metavar="KIND:NAME[*]", help="Only those on this resource, or with this prefix.")
    ] = None
    outcome: Annotated[
        Literal["done", "denied", "would-be-denied"] | None, typer.Option(help="Only those that ended like this.")
    ] = None


NO_SELECTION = AuditOptions()
SinceOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="From this time on: 2026-01-31T12:00Z, or -5m for five minutes ago.")
]


@command(app)
def search(
    since: SinceOption = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before this time.")] = None,
    *,
    selection: AuditOptions = NO_SELECTION,
    log: ClusterTarget,
) -> None:
    """Print the records that the audit has, in the order of the log. With `-o json`, one object in each line."""
    query = _query(since, until, selection)
    with log.client() as client:
        _print(search_audit(client, query, who=partial(_who, log)))


@command(app)
def tail(since: SinceOption = None, *, selection: AuditOptions = NO_SELECTION, log: ClusterTarget) -> None:
    """Print new records of the audit as they come, until interrupted."""
    query = _query(since, None, selection)
    with log.client() as client:
        _print(tail_audit(client, query, who=partial(_who, log)))


def _who(log: ClusterTarget) -> str:
    return log.administer(lambda admin: admin.control.who_am_i()).principal


def _query(since: str | None, until: str | None, selection: AuditOptions) -> AuditQuery:
    now = datetime.now(UTC)
    check_operation(selection.operation)
    return AuditQuery(
        None if since is None else parse_time(since, now),
        None if until is None else parse_time(until, now),
        selection.principal,
        selection.operation,
        selection.resource,
        selection.outcome,
    )


def _print(records: AuditRecords) -> None:
    # The subscription ends before its client, also if nobody reads what is printed any more.
    with closing(records):
        for record in records:
            print(encode(record).decode() if Settings.is_json else in_words(record), flush=True)
