"""``cutwater token``: makes, shows and revokes tokens, by which clients prove for which principal they act."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cutwater.admin.access_calls import LAST_EXPIRY_US, NEVER, CreatedToken, last_used_us, under_parents
from cutwater.admin.cluster_security import check_new
from cutwater.admin.kept_tokens import make_kept
from cutwater.admin.operations import Admin
from cutwater.admin.status_text import time_of
from cutwater.admin.token_import import files_for, import_tokens
from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.framework.times import parse_time
from cutwater.cli.io.output import show, table
from cutwater.core.text import counted
from cutwater.durations import milliseconds
from cutwater.errors import CutwaterError, InvalidArgument

app = noun("Tokens: how clients prove for which principal they act.")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the token, the 16 digits after 'cwt_'.")]
ExpiresOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="When it ends: how long from now, such as '90d', or as 2026-01-31T12:00Z."),
]
SaveOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Put the token into this new file (0600) instead of printing it."),
]


def unconfirmed(servers: tuple[str, ...]) -> str:
    """Return a sentence about servers that do not act by a change yet; empty if there are none."""
    if not servers:
        return ""
    return f"\nnot confirmed yet by {', '.join(servers)}: without contact to the leader they refuse clients soon"


@command(app)
def create(
    principal: Annotated[str, typer.Argument(metavar="PRINCIPAL", help="For which principal it is; any new name.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'RIGHTS RESOURCE'",
            help="Limit the token to these rights of its principal, such as 'append,describe topic:orders'. May be "
            "repeated.",
        ),
    ] = None,
    expires: ExpiresOption = None,
    save: SaveOption = None,
    *,
    log: ClusterTarget,
) -> None:
    """Make a token for a principal. It is shown once, and stored nowhere in the cluster."""
    until = parse_expiry(expires, datetime.now(UTC)) if expires is not None else NEVER

    async def make(admin: Admin, text: str = "") -> CreatedToken:
        return await admin.control.create_token(principal, scopes=scope or (), expires_us=until, text=text)

    made = _made(log, make, save)
    show(_fields(made, save), _told_of(made, save))


def _made(log: ClusterTarget, make: Callable[..., Awaitable[CreatedToken]], save: Path | None) -> CreatedToken:
    """Make a token, and put it into the file, if one is named."""
    if save is None:
        return log.administer(make)
    check_new(save)
    return log.administer(lambda admin: make_kept(save, partial(make, admin)))


def _fields(made: CreatedToken, save: Path | None) -> dict[str, Any]:
    told = {"id": made.id, "principal": made.principal, "expires": _expiry(made.expires)}
    told |= {"file": str(save)} if save is not None else {"token": made.token}
    return told | {"unconfirmed": made.unconfirmed}


def _told_of(made: CreatedToken, save: Path | None) -> str:
    until = f", until {time_of(made.expires)} UTC" if made.expires else ""
    told = f"token {made.id} for {made.principal}{until}"
    if save is not None:
        return f"{told} is in {save}: use it with --token-file {save}{unconfirmed(made.unconfirmed)}"
    return f"{told}; it is shown only now, so keep it:{unconfirmed(made.unconfirmed)}\n{made.token}"


def parse_expiry(text: str, now: datetime, option: str = "--expires") -> int:
    """Return when a token ends, in microseconds since 1970."""
    given = text.strip()
    if given[:1].isdigit() and given[-1:].isalpha() and "T" not in given and "Z" not in given:
        until_us = round(now.timestamp() * 1_000) * 1_000 + milliseconds(given, option, least=1) * 1_000
    else:
        try:
            until_us = round(parse_time(given, now).timestamp() * 1_000_000)
        except InvalidArgument:
            raise InvalidArgument(
                f"--expires is {text!r}: write how long from now, such as '90d' or '12h', or a time such as "
                "2026-01-31T12:00Z; a token without --expires does not end"
            ) from None
    if until_us <= now.timestamp() * 1_000_000:
        raise InvalidArgument(f"{option} is {text!r}, which is past: give a later time, or how long from now ('90d')")
    if until_us > LAST_EXPIRY_US:
        raise InvalidArgument(f"{option} is {text!r}, which is after the year 9999: a token without it does not end")
    return until_us


def _expiry(until_us: int) -> datetime | None:
    return datetime.fromtimestamp(until_us / 1_000_000, UTC) if until_us else None


@command(app)
def rotate(
    identifier: IdArgument,
    old_ends: Annotated[
        str,
        typer.Option(metavar="TIME", help="When the old token ends: how long from now, or a time."),
    ] = "1d",
    expires: ExpiresOption = None,
    save: SaveOption = None,
    *,
    log: ClusterTarget,
) -> None:
    """Make a token that takes the place of this one, with another id and secret.

    It has the same principal and scopes. Both work until the old one ends, so programs can change over meanwhile.
    """
    now = datetime.now(UTC)
    until = parse_expiry(expires, now) if expires is not None else NEVER
    ends = parse_expiry(old_ends, now, "--old-ends")

    async def make(admin: Admin, text: str = "") -> CreatedToken:
        return await admin.control.rotate_token(identifier, ends, expires_us=until, text=text)

    made = _made(log, make, save)
    old = log.administer(lambda admin: admin.control.token(identifier))
    told = _fields(made, save) | {"old": identifier, "old_ends": _expiry(old.expires)}
    show(told, f"{_told_of(made, save)}\ntoken {identifier} works until {time_of(old.expires)} UTC")


@command(app, "import")
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file that servers were given as --tokens.")],
    save_in: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the new tokens are put: a file NAME.token (0600) for each name.")
    ],
    expires: ExpiresOption = None,
    *,
    log: ClusterTarget,
) -> None:
    """Make a token of the cluster for each name in a file of tokens, and so a principal of that name.

    The tokens in the file stay as they are, and are stored nowhere. A name whose new file is there already is left
    out, so the command can be run again.
    """
    files = files_for(file, save_in)
    until = parse_expiry(expires, datetime.now(UTC)) if expires is not None else NEVER
    done = log.administer(lambda admin: import_tokens(admin.control, files, expires_us=until))
    told = [{"principal": made.principal, "id": made.id, "file": str(files[made.principal])} for made in done.made]
    lines = [f"token {made.id} for {made.principal} is in {files[made.principal]}" for made in done.made]
    lines += [f"{name} was left out: {files[name]} is there" for name in done.left_out]
    lines.append(
        "next: `cutwater acl allow NAME RIGHTS RESOURCE` for each; `cutwater audit search` shows what would be"
    )
    lines.append("denied; and then `cutwater cluster access enforced`")
    show({"made": told, "left_out": done.left_out}, "\n".join(lines))


@command(app, "list")
def list_tokens(
    principal: Annotated[str, typer.Argument(metavar="[PRINCIPAL]", help="Only those of this principal.")] = "",
    *,
    log: ClusterTarget,
) -> None:
    """Show tokens, without their secrets, which nobody can show. Children follow the token with which they end."""
    found = under_parents(log.administer(lambda admin: admin.control.tokens(principal)))
    rows = [
        (
            f"  {t.id}" if t.parent else t.id,
            t.principal,
            t.scopes or "all rights",
            _when(t.expires, "never"),
            t.creator,
            _day(last_used_us(t)),
        )
        for t in found
    ]
    show(found, table(["token", "principal", "limited to", "expires", "made by", "last used"], rows))


@command(app)
def describe(identifier: IdArgument, log: ClusterTarget) -> None:
    """Show a token, without its secret."""
    found = log.administer(lambda admin: admin.control.token(identifier))
    child = f", a child of token {found.parent}, with which it ends" if found.parent else ""
    lines = [
        f"token {found.id} of {found.principal}{child}",
        f"  limited to: {'; '.join(map(str, found.scopes)) or 'nothing, it has all rights of its principal'}",
        f"  made:       {_when(found.created, 'at an unknown time')} by {found.creator or 'an unknown principal'}",
        f"  expires:    {_when(found.expires, 'never')}",
        f"  last used:  {_day(last_used_us(found))}",
    ]
    show(msgspec.to_builtins(found), "\n".join(lines))


@command(app)
def revoke(
    identifiers: Annotated[list[str], typer.Argument(metavar="ID…", help="The ids of the tokens.")], log: ClusterTarget
) -> None:
    """Revoke tokens. Returns when all servers that are in contact refuse them; connections that use them end."""
    behind: set[str] = set()
    done: list[str] = []

    async def work(admin: Admin) -> None:
        for identifier in identifiers:
            behind.update((await admin.control.revoke_token(identifier)).unconfirmed)
            done.append(identifier)

    try:
        log.administer(work)
    except CutwaterError as error:
        if done:
            error.message += f" (revoked before: {', '.join(done)})"
        raise
    left = tuple(sorted(behind))
    show({"revoked": done, "unconfirmed": left}, f"{counted(len(done), 'token')} revoked{unconfirmed(left)}")


def _when(at_us: int, otherwise: str) -> str:
    return f"{time_of(at_us)} UTC" if at_us else otherwise


def _day(at_us: int) -> str:
    return time_of(at_us)[:10] if at_us else "never"
