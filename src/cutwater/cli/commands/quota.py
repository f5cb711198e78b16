"""``cutwater quota``: limits on what principals and groups may use of the whole cluster."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from msgspec import structs

from cutwater.cli.commands.token import unconfirmed
from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.io.output import show, table
from cutwater.errors import InvalidArgument

app = noun("Quotas: what principals and groups may use of the whole cluster.")

SubjectArgument = Annotated[str, typer.Argument(metavar="SUBJECT", help="A principal, or group:NAME.")]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_AMOUNT = re.compile(r"(\d+)\s*([kmg]i?)?b?", re.IGNORECASE)


def parse_amount(text: str | None, option: str) -> int | None:
    """Parse a number, with a unit for bytes: 500k, 20MB, 1GiB."""
    if text is None:
        return None
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(f"{option} is {text!r}: write a number, such as 500000, 500kB, 20MB or 1GiB")
    return int(found[1]) * _UNITS[(found[2] or "").lower()]


@command(app, "set")
def set_quota(
    subject: SubjectArgument,
    bytes_in: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Bytes per second that it may send, such as 20MB or 1GiB.")
    ] = None,
    bytes_out: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Bytes per second that it may receive.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests per second.")] = None,
    connections: Annotated[int | None, typer.Option(min=1, help="Open connections.")] = None,
    subscriptions: Annotated[int | None, typer.Option(min=1, help="Subscriptions at a time.")] = None,
    staged: Annotated[str | None, typer.Option(metavar="BYTES", help="Bytes that are staged for publishing.")] = None,
    *,
    log: ClusterTarget,
) -> None:
    """Set all limits of a principal, or of all members of a group together. Limits that are left out do not hold."""
    limits = {
        "bytes_in_per_s": parse_amount(bytes_in, "--bytes-in"),
        "bytes_out_per_s": parse_amount(bytes_out, "--bytes-out"),
        "requests_per_s": requests,
        "connections": connections,
        "subscriptions": subscriptions,
        "staged_bytes": parse_amount(staged, "--staged"),
    }
    given = {name: limit for name, limit in limits.items() if limit is not None}
    changed = log.administer(lambda admin: admin.control.set_quota(subject, **given))
    told = ", ".join(f"{name} {limit}" for name, limit in given.items())
    json = {"subject": subject, "limits": given, "unconfirmed": changed.unconfirmed}
    show(json, f"{subject} may use: {told}{unconfirmed(changed.unconfirmed)}")


@command(app)
def remove(subject: SubjectArgument, log: ClusterTarget) -> None:
    """Remove all limits of a principal or group."""
    changed = log.administer(lambda admin: admin.control.remove_quota(subject))
    show({"subject": subject}, f"{subject} has no quota of its own any more{unconfirmed(changed.unconfirmed)}")


@command(app, "list")
def list_quotas(log: ClusterTarget) -> None:
    """Show all quotas."""
    found = log.administer(lambda admin: admin.control.quotas())
    show(found, table(["subject", "may use"], [(quota.subject, quota.limits) for quota in found]))


@command(app, "show")
def show_quota(subject: SubjectArgument, log: ClusterTarget) -> None:
    """Show the quota of a principal or group, and what it uses of it now in the whole cluster."""
    found, use = log.administer(lambda admin: admin.control.quota_use(subject))
    limits = {name: limit for name, limit in structs.asdict(found.limits).items() if limit is not None}
    if use is None:
        json = {"subject": found.subject, "limits": limits, "used": None}
        show(json, f"{found.subject} may use: {found.limits}; quotas hold while access control is enforced")
        return
    used = {name: getattr(use.used, name) or 0 for name in limits}
    rows = [(name, used[name], limit, f"{100 * used[name] / limit:.0f} %") for name, limit in limits.items()]
    show({"subject": found.subject, "limits": limits, "used": used}, table(["limit", "used", "of", "part"], rows))
