"""Who may call what, and what each credential gets: one table, from the tables that servers enforce.

``docs/access-table.md`` is written from it, by ``python -m tests.access_table``, and
``tests/integration/test_access_table.py`` makes every call of the table on real servers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cutwater.protocol import metadata_api, scan_api, storage_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE, ClientAnswers, MethodAccess
from cutwater.protocol.method_access import METADATA_ACCESS, REQUEST_ACCESS, STORAGE_NODE_ACCESS
from cutwater.protocol.methods import Method, Notice, StreamMethod

PAGE = Path(__file__).resolve().parents[1] / "docs" / "access-table.md"
COMMAND = "python -m tests.access_table"

METHODS: dict[str, Any] = {
    one.name: one
    for module in (storage_api, scan_api, metadata_api)
    for one in vars(module).values()
    if isinstance(one, Method | StreamMethod | Notice) and one.name != "follow"
}
FOLLOWS = {STORAGE_NODE: storage_api.FOLLOW, METADATA_NODE: metadata_api.FOLLOW}
"""Both kinds of servers have a method of this name."""


class Row(NamedTuple):
    """A method of a kind of server, or a request that its ``ask`` carries."""

    server: str
    name: str
    access: MethodAccess
    request: type | None = None

    @property
    def method(self) -> Any:
        if self.request is not None:
            return metadata_api.ASK
        return FOLLOWS[self.server] if self.name == "follow" else METHODS[self.name]


def rows() -> Iterator[Row]:
    """Every method of both kinds of servers, and every request to the metadata repository."""
    for name, access in STORAGE_NODE_ACCESS.items():
        yield Row(STORAGE_NODE, name, access)
    for name, access in METADATA_ACCESS.items():
        if name != metadata_api.ASK.name:
            yield Row(METADATA_NODE, name, access)
    for request, access in REQUEST_ACCESS.items():
        yield Row(METADATA_NODE, request.__name__, access, request)


class Outcome(enum.StrEnum):
    """What a caller gets. The names are codes of errors, except for the first three."""

    ANSWERED = "answered"
    FILTERED = "answered, with what it may describe"
    MAY = "may"
    DENIED = "permission_denied"
    UNPROVEN = "unproven"
    UNAVAILABLE = "unavailable"
    WRONG_IDENTITY = "wrong_identity"


class Stranger(NamedTuple):
    """Credentials with which no server lets a caller in, whatever it would call. ``codes`` of the error that it gets;
    ``reason`` under which the servers count it."""

    name: str
    codes: tuple[str, ...]
    reason: str
    words: str


STRANGERS = (
    Stranger("no credentials, over TLS", ("unauthenticated",), "unauthenticated", "give one"),
    Stranger("a certificate of another authority", ("untrusted", "connection_lost"), "tls", "certificate"),
    Stranger("a certificate that has expired", ("untrusted", "connection_lost"), "tls", "certificate"),
    Stranger("a token that has expired", ("unauthenticated",), "unauthenticated", "ask an administrator"),
    Stranger("a token that was revoked", ("unauthenticated",), "unauthenticated", "check which one is given"),
    Stranger("a certificate of a client, as storage node 1", ("unproven",), "unproven", "never a server's"),
    Stranger("the certificate of node 2, as storage node 1", ("unproven",), "unproven", "its own certificate"),
)


class Caller(enum.StrEnum):
    """Credentials with which a server lets a caller in, and judges each call."""

    NOBODY = "nobody"
    OTHER = "other"
    NODE_2_AS_1 = "node 2 as 1"
    NODE_2 = "node 2"


HEADINGS = {
    Caller.NOBODY: "no credentials, without TLS",
    Caller.OTHER: "principal without the right",
    Caller.NODE_2_AS_1: "node 2's key as node 1, without TLS",
    Caller.NODE_2: "storage node 2",
}


def expected(row: Row, caller: Caller) -> Outcome:
    """What a caller gets that speaks for storage node 1, if the argument names a server."""
    access = row.access
    if access.is_for_clients or (access.client_subject is not None and caller in (Caller.NOBODY, Caller.OTHER)):
        return _as_client(access, caller)
    if STORAGE_NODE not in access.servers or caller in (Caller.NOBODY, Caller.OTHER):
        return Outcome.UNPROVEN
    if access.is_admission and caller is Caller.NODE_2_AS_1:
        return Outcome.WRONG_IDENTITY
    return Outcome.MAY if caller is Caller.NODE_2 and access.subject is None else Outcome.UNPROVEN


def _as_client(access: MethodAccess, caller: Caller) -> Outcome:
    if caller is Caller.NODE_2 and access.is_free_for(STORAGE_NODE):
        return Outcome.ANSWERED
    if caller is Caller.OTHER:
        if access.answers is ClientAnswers.OPEN:
            return Outcome.ANSWERED
        if access.answers is ClientAnswers.FILTERED:
            return Outcome.FILTERED
    return Outcome.DENIED


def who(access: MethodAccess) -> str:
    """Who may call a method, and with which right."""
    if access.is_internal:
        return "the leader itself"
    if not access.is_for_clients:
        servers = " or ".join(access.servers)
        own = " for itself" if access.subject is not None else ""
        joins = ", to be admitted" if access.is_admission else ""
        needs = "; or a client with " + _needs(access) if access.needs else ""
        return f"a {servers}{own}{joins}{needs}"
    free = ", or a storage node" if STORAGE_NODE in access.free else ""
    if access.answers is ClientAnswers.OPEN:
        return f"every principal{free}"
    if access.answers is ClientAnswers.FILTERED:
        return f"every principal, which is shown what it may describe{free}"
    return f"a client with {_needs(access)}{free}"


def _needs(access: MethodAccess) -> str:
    return " and ".join(f"`{need.text}`" for need in access.needs)


def page() -> str:
    """The text of ``docs/access-table.md``."""
    parts = [_HEAD]
    parts += [f'| {one.name} | {_codes(one.codes)} | `reason="{one.reason}"` |' for one in STRANGERS]
    parts.append(_CALLS)
    found = list(rows())
    for title, wanted in (
        ("Methods of storage nodes", [row for row in found if row.server == STORAGE_NODE]),
        ("Methods of metadata nodes", [row for row in found if row.server == METADATA_NODE and row.request is None]),
        ("Requests to the metadata repository", [row for row in found if row.request is not None]),
    ):
        parts += ["", f"## {title}", ""]
        parts.append("| " + " | ".join(["call", "who may", *HEADINGS.values()]) + " |")
        parts.append("| --- " * (2 + len(HEADINGS)) + "|")
        for row in wanted:
            cells = [f"`{row.name}`", who(row.access), *(_cell(expected(row, caller)) for caller in HEADINGS)]
            parts.append("| " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"


def _cell(outcome: Outcome) -> str:
    is_code = outcome not in (Outcome.ANSWERED, Outcome.FILTERED, Outcome.MAY)
    return f"`{outcome}`" if is_code else str(outcome)


def _codes(codes: tuple[str, ...]) -> str:
    return " or ".join(f"`{code}`" for code in codes)


_HEAD = f"""# What each caller gets

This page is written by a program, from the tables that servers enforce (`protocol/method_access.py`): `{COMMAND}`
writes it again. A test makes every call on this page on real servers, with access control on, and compares what it
gets. Each refusal has a code and says what to do ([operating.md](operating.md#exit-codes)); none takes longer than its
deadline.
[access.md](access.md) explains rights and principals.

## Callers that are not let in

A server with TLS and access control ends these connections before any call. `cutwater_sn_connections_not_let_in_total`
and `cutwater_mr_connections_not_let_in_total` count them. A certificate that TLS itself refuses can only be answered by
closing the connection, so the code depends on when the client notices.

| credentials | the client gets | counted under |
| --- | --- | --- |"""

_CALLS = """
## Callers that are let in

Each call is judged. `permission_denied` names principal, right and resource, and is in the audit ([audit.md](audit.md))
and in `calls_denied_total`. `unproven` is for calls that only servers make, and is counted in `calls_unproven_total`.
*May* means that storage nodes make this call. A call about a number that its caller may not describe is first told to
try again, like one about a number that the server does not know. The columns:

- **no credentials, without TLS**: a client on the loopback address of a cluster without TLS.
- **principal without the right**: a token whose principal has rights on other resources only.
- **node 2's key as node 1, without TLS**: a process that holds the private key of storage node 2 and says that it is
  storage node 1. With TLS, it is not let in.
- **storage node 2**: a process with its key and certificate. Where the argument names a server, it names node 1."""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
