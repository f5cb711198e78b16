"""Checks of ``cutwater doctor`` about access control: its mode, tokens that may be forgotten, and the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cutwater.admin.access_calls import is_unused
from cutwater.admin.doctor import Check, Verdict
from cutwater.admin.local_cluster import LocalCluster
from cutwater.admin.operations import Admin
from cutwater.client.cluster.credentials import Access
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import TokenInfo, WhoAmI
from cutwater.core.text import counted
from cutwater.errors import CutwaterError

TIMEOUT_MS = 3_000
NAMED_MAX = 3


async def check_access(cluster: LocalCluster, access: Access) -> list[Check]:
    """Ask the cluster. Returns nothing while access control is off, or if the cluster does not answer."""
    try:
        async with Admin(cluster.addresses, timeout_ms=TIMEOUT_MS, access=access) as admin:
            who = await admin.control.who_am_i()
            if who.mode is AccessMode.OFF:
                return []
            found = [_mode(who), _store(cluster)]
            if not who.is_admin:
                advice = "give the token of an administrator to check more"
                return [*found, Check("tokens", Verdict.NOTE, f"not shown to {who.principal or 'this client'}", advice)]
            return [*found, *check_tokens(await admin.control.tokens())]
    except CutwaterError as error:
        return [Check("access control", Verdict.NOTE, f"cannot be asked: {error.message}")]


def _mode(who: WhoAmI) -> Check:
    if who.mode is AccessMode.PERMISSIVE:
        advice = "nothing is denied yet: `cutwater cluster access enforced` when the rules are complete"
        return Check("access control", Verdict.WARNING, "permissive", advice)
    return Check("access control", Verdict.OK, str(who.mode))


def _store(cluster: LocalCluster) -> Check:
    """Write access to the store is the access of an administrator."""
    name = "metadata store"
    if cluster.etcd:
        return Check(
            name,
            Verdict.WARNING,
            "etcd without TLS and login: every process that reaches it can make itself an administrator",
            "for trials only; a cluster that others use needs etcd with TLS and a login (docs/access.md)",
        )
    if cluster.metadata:
        return Check(name, Verdict.OK, "SQLite, in the cluster's directory")
    advice = "with etcd, demand TLS and a login there (docs/access.md); a SQLite file is for its owner only"
    return Check(name, Verdict.NOTE, "not known here; write access to it is the access of an administrator", advice)


def check_tokens(tokens: Sequence[TokenInfo]) -> Iterator[Check]:
    lasting = [token.id for token in tokens if not token.expires]
    unused = [token.id for token in tokens if is_unused(token)]
    if lasting:
        advice = "`cutwater token create --expires 90d` makes one that ends by itself"
        yield Check("tokens", Verdict.NOTE, f"{_named(lasting)} without expiry", advice)
    if unused:
        advice = "`cutwater token revoke ID` if they are not needed"
        yield Check("tokens", Verdict.NOTE, f"{_named(unused)} never used", advice)
    if not lasting and not unused:
        yield Check("tokens", Verdict.OK, f"{counted(len(tokens), 'token')}, all of them used, and all expire")


def _named(tokens: Sequence[str]) -> str:
    more = ", …" if len(tokens) > NAMED_MAX else ""
    return f"{counted(len(tokens), 'token')} ({', '.join(tokens[:NAMED_MAX])}{more})"
