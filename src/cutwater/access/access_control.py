"""Authorises calls of clients at one server, and ends what has lost its right (ADR 0052).

Metadata nodes need no rights, and storage nodes none for what they do themselves: each row of the table names the
servers that are free. Other calls of a storage node are judged like calls of a client without credentials. A
client is its principal, from the handshake; ``Caller`` also describes a client of another metadata node, which passed
its request on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from cutwater.access.access_copy import AccessCopy
from cutwater.access.denial_counts import Denial, DenialCounts
from cutwater.access.quota_control import QuotaControl
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import AccessVerdict, Missing
from cutwater.core.access.access_view import NOBODY, AccessView
from cutwater.core.access.denials import denied
from cutwater.core.access.principals import CertificateNames
from cutwater.core.access.rights import CLUSTER, Resource, Right
from cutwater.errors import CutwaterError, PermissionDenied, Unavailable
from cutwater.protocol.access import ClientAnswers, MethodAccess
from cutwater.protocol.errors import Unauthenticated
from cutwater.protocol.needs import NameLookup
from cutwater.runtime import system
from cutwater.wire.connection import Connection
from cutwater.wire.identity.auth import PeerIdentity
from cutwater.wire.identity.handshake import Peer
from cutwater.wire.identity.server_book import ServerBook

_log = logging.getLogger(__name__)

WATCHED = frozenset((Right.READ, Right.DESCRIBE))
"""Calls that need only these rights are ended when the rights are taken away. Others have been accepted, and their
outcome would be unknown: appends and the like are finished."""


class Caller(Struct, frozen=True):
    """The caller of a method. ``name`` is the common name of its certificate, if it has one. ``server``: the kind of
    server of the cluster that it has proved to be; empty for clients. ``is_judged``: its credentials were judged while
    access control was on. ``via`` is the principal of the gateway that calls for it, if one does."""

    principal: str = NOBODY
    token: str = ""
    name: str = ""
    address: str = ""
    server: str = ""
    is_judged: bool = True
    via: str = ""


class AccessControl:
    """See the module. ``copy`` has the rules. ``connections`` returns the open connections of the server. ``limits``:
    which limits of quotas hold at this server, None for all."""

    def __init__(
        self,
        copy: AccessCopy,
        book: ServerBook,
        names: NameLookup,
        connections: Callable[[], Iterable[Connection]] = lambda: (),
        limits: tuple[str, ...] | None = None,
    ) -> None:
        self.copy, self.names = copy, names
        self.denials = DenialCounts()
        self.book, self._connections = book, connections
        self.quotas = QuotaControl(copy, connections, book.knows, limits)
        self.is_on = copy.is_on
        """Read for every call, so it is an attribute."""
        copy.on_change = self._changed

    def caller(self, peer: Peer | None) -> Caller:
        if peer is None:
            return Caller()
        if peer.server is not None and self.book.knows(peer):
            return Caller(name=str(peer.server), address=peer.address, server=peer.server.kind)
        one = peer.identity
        return Caller(one.principal, one.token, one.name, peer.address, is_judged=one.is_judged, via=one.via)

    # Calls.

    def judge(
        self, peer: Peer | None, method: str, access: MethodAccess, argument: Any, *, is_under_way: bool = False
    ) -> None:
        """Raise unless the peer may call the method with this argument. Of ``CARRIED`` calls the handler judges.
        ``is_under_way``: the call was allowed before."""
        if access.answers is ClientAnswers.CARRIED:
            return
        view, identity = self.copy.view, peer.identity if peer is not None else _UNKNOWN
        if peer is not None and peer.server is not None and self.book.knows(peer):
            if access.is_free_for(peer.server.kind):
                return
            identity = _UNKNOWN
        principal, token, names = identity.principal, identity.token, self.names
        is_allowed = principal != NOBODY and (
            view.mode is not AccessMode.ENFORCED or system.monotonic() < self.copy.lease_until
        )
        if is_allowed and token in view.expiring:
            is_allowed = view.is_current(token, system.wall_time_ns() // 1_000)
        if is_allowed:
            for need in access.needs:
                for right, resource in need.questions(argument, names):
                    is_allowed = is_allowed and view.decide(principal, right, resource, token).is_allowed
        if not is_allowed:
            self.judge_caller(self.caller(peer), method, access, argument, is_under_way=is_under_way)

    def judge_caller(
        self, caller: Caller, method: str, access: MethodAccess, argument: Any, *, is_under_way: bool = False
    ) -> None:
        """The same for a caller that may be connected to another metadata node. Says why, and records denials."""
        if not self.is_on or access.is_free_for(caller.server):
            return
        copy = self.copy
        view = copy.view
        if not copy.is_valid:
            raise copy.stale()
        if not caller.is_judged and not caller.server and view.mode is AccessMode.ENFORCED:
            # The server to which it is connected may not have ended the connection yet.
            raise _turned_on()
        if caller.token and not view.is_current(caller.token, system.wall_time_ns() // 1_000):
            verdict = view.decide(caller.principal, Right.DESCRIBE, CLUSTER, caller.token)
            self._deny(_without(verdict, f"token {caller.token} was revoked or has expired"), caller, method)
            # Permissive: what is enforced nevertheless is not for a token that does not hold.
            caller = replace(caller, principal=NOBODY, token="")
        is_asked = False
        for need in access.needs:
            for right, resource in need.questions(argument, self.names):
                is_asked = True
                verdict = view.decide(caller.principal, right, resource, caller.token)
                if not verdict.is_allowed:
                    is_hidden = need.is_by_number and not self._may_know(view, verdict)
                    if is_hidden and not (caller.server or is_under_way) and view.enforces(right, resource):
                        need.conceal(argument, self.names)
                    self._deny(verdict, caller, method, is_hidden=is_hidden)
        if caller.principal == NOBODY and not is_asked:
            self._deny(view.decide(NOBODY, Right.DESCRIBE, CLUSTER), caller, method)

    def judge_again(
        self, peer: Peer | None, method: str, access: MethodAccess, argument: Any, *, is_stream: bool
    ) -> None:
        """Raise if a call that is being served has lost its right, and may be ended."""
        rights = {right for need in access.needs for right, _ in need.questions(argument, self.names)}
        if is_stream or rights <= WATCHED:
            self.judge(peer, method, access, argument, is_under_way=True)

    def _deny(self, verdict: AccessVerdict, caller: Caller, method: str, *, is_hidden: bool = False) -> None:
        """Record a denial, and raise it if its right is enforced now. ``is_hidden``: the caller must not learn whether
        the resource exists."""
        view = self.copy.view
        is_enforced = view.enforces(Right(verdict.right), verdict.resource)
        if is_enforced and not caller.is_judged and not caller.server:
            # It may have shown a token at which nobody has looked.
            raise _turned_on()
        if is_enforced or caller.is_judged:
            self.denials.note(Denial(verdict, method, caller.address, is_enforced, caller.via))
        if not is_enforced:
            return
        if caller.server:
            raise PermissionDenied(
                f"{caller.name} needs the right {verdict.right} on {verdict.resource} for {method}, and storage nodes "
                "have no rights: ask as a principal, with a token or a client certificate",
                principal="",
                right=verdict.right,
                resource=str(verdict.resource),
            )
        if verdict.missing is Missing.CREDENTIALS and caller.name:
            raise PermissionDenied(
                f"{caller.name!r} stands for no principal, so it has no rights: an administrator can add a rule that "
                "maps its certificate, or give it a token of the cluster (cwt_...)",
                principal="",
                right=verdict.right,
                resource=verdict.resource.kind if is_hidden else str(verdict.resource),
            )
        if verdict.missing is Missing.TOKEN:
            # The connection is ended for the same reason, now or in a moment: one reason has one error.
            raise Unauthenticated(f"{verdict.why}: use another one")
        if is_hidden:
            kind, name = verdict.resource.kind, caller.principal or "a client without credentials"
            raise PermissionDenied(
                f"{name} lacks the right {verdict.right} on the {kind} that this number stands for, or there is none "
                f"with this number: an administrator can give the right if the {kind} exists",
                principal=caller.principal,
                right=verdict.right,
                resource=kind,
            )
        raise denied(verdict)

    def _may_know(self, view: AccessView, verdict: AccessVerdict) -> bool:
        """Whether the caller may learn the name of the resource, which it named by a number."""
        resource: Resource = verdict.resource
        return view.decide(verdict.principal, Right.DESCRIBE, resource, verdict.token).is_allowed

    # Connections and calls that go on.

    def _changed(self, before: AccessView) -> None:
        self.is_on = self.copy.is_on
        self.sweep()
        self.quotas.changed()

    def sweep(self) -> None:
        """Judge credentials that were shown before the rules were known. End connections whose credentials do not hold
        and, if the rules are in force, calls that have lost their right."""
        if not self.is_on:
            return
        is_enforced = self.copy.view.mode is AccessMode.ENFORCED
        now = system.wall_time_ns() // 1_000
        has_found = False
        for connection in list(self._connections()):
            peer = connection.peer
            if peer is None or self.book.knows(peer):
                continue
            if (peer.identity.again is not None or not peer.identity.is_judged) and self.copy.is_valid:
                identity = _judged_again(peer.identity, is_enforced=is_enforced)
                if identity is None:
                    connection.fail(_turned_on())
                    continue
                has_found |= identity.principal != peer.identity.principal
                connection.peer = peer = replace(peer, identity=identity)
            problem = self._problem(peer.identity, now)
            if problem is not None:
                connection.fail(problem)
            elif is_enforced:
                connection.recheck()
        if has_found:
            self.quotas.changed()

    def _problem(self, identity: PeerIdentity, now: int) -> CutwaterError | None:
        view = self.copy.view
        if identity.token:
            for token in (identity.token, identity.via_token):
                if token and not view.is_current(token, now):
                    return Unauthenticated(f"token {token} was revoked or has expired: use another one")
            return None
        if identity.names is not None:
            principal = view.principal_of(CertificateNames(*identity.names)) or NOBODY
            if principal != identity.principal:
                return Unavailable("the rules for certificates have changed: connect again")
        return None


_UNKNOWN = PeerIdentity("", is_judged=True)


def _judged_again(identity: PeerIdentity, *, is_enforced: bool) -> PeerIdentity | None:
    """Judge credentials that were shown before the rules were known. Returns None if they stand for no principal and
    the rules are in force: the client may have others by now, so it is told to connect again."""
    found = replace(identity, is_judged=True)
    if identity.again is not None:
        try:
            found = identity.again()
        except CutwaterError:
            return None
    return None if is_enforced and found.principal == NOBODY else found


def _turned_on() -> Unavailable:
    return Unavailable("access control was turned on: connect again, with a token or a client certificate")


def _without(verdict: AccessVerdict, why: str) -> AccessVerdict:
    return AccessVerdict(
        verdict.principal, verdict.right, verdict.resource, False, None, why, verdict.token, Missing.TOKEN
    )
