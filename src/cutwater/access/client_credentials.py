"""Turns the credentials of a client into a principal, by the rules that a server knows now.

While access control is off, the credentials are judged as ever: by the file of tokens, or by the authority that issued
the certificate. They are kept, and judged by the rules once these are known (``AccessControl.sweep``): access control
may be turned on later, and a metadata node takes connections before it has read that it is on. Servers prove who they
are with their own keys, after this; their credentials give them no rights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import structs

from cutwater.access.access_copy import AccessCopy
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_view import NOBODY
from cutwater.core.access.principals import TOKEN_PREFIX, CertificateNames, TokenRecord
from cutwater.protocol.errors import Unauthenticated
from cutwater.runtime import system
from cutwater.wire.identity.auth import ANONYMOUS, Authenticator, Credentials, PeerIdentity
from cutwater.wire.identity.certificate_names import certificate_names, check_plain
from cutwater.wire.identity.server_certificates import server_uris


class ClientCredentials:
    """An authenticator. ``before`` judges credentials while access control is off, and keeps out strangers also while
    it is on. ``on_token`` is called with the id of each token that is used."""

    def __init__(
        self, copy: AccessCopy, before: Authenticator | None, on_token: Callable[[str], None] | None = None
    ) -> None:
        self._copy, self._before, self._on_token = copy, before, on_token

    def __call__(self, credentials: Credentials) -> PeerIdentity:
        if not self._copy.is_on:
            return structs.replace(self._as_ever(credentials), again=partial(self, credentials))
        if credentials.token.startswith(f"{TOKEN_PREFIX}_"):
            return self._by_token(credentials)
        if credentials.gateway:
            raise Unauthenticated("a gateway shows the token of its caller beside its own, and this one shows none")
        if credentials.token and self._before is not None and self._copy.view.mode is AccessMode.ENFORCED:
            raise Unauthenticated(
                "this is no token of the cluster (cwt_...), and while access control is on no other one counts, such "
                "as those in a file of a server: ask an administrator for a token of the cluster"
            )
        if not credentials.token and not credentials.certificate and self._before is not None:
            raise Unauthenticated("a token of the cluster (cwt_...) or a client certificate is needed here: give one")
        known = self._as_ever(credentials)
        certificate = credentials.certificate
        if not certificate or server_uris(certificate):
            # The certificate of a server is never a client's.
            return structs.replace(known, is_judged=True)
        names = names_of(certificate)
        principal = self._copy.view.principal_of(names) or NOBODY
        return structs.replace(
            known, principal=principal, is_judged=True, names=(names.common_name, names.alternatives)
        )

    def _as_ever(self, credentials: Credentials) -> PeerIdentity:
        return ANONYMOUS if self._before is None else self._before(credentials)

    def _by_token(self, credentials: Credentials) -> PeerIdentity:
        copy = self._copy
        if not copy.is_valid:
            raise copy.stale()
        found = self._checked(credentials.token)
        via = self._checked(credentials.gateway, "the token of the gateway: ") if credentials.gateway else None
        if found is None or (credentials.gateway and via is None):
            # The token may be newer than the rules that are known here.
            return PeerIdentity("", is_judged=True, again=partial(self, credentials))
        known = PeerIdentity(found.principal, principal=found.principal, token=found.id, is_judged=True)
        return known if via is None else structs.replace(known, via=via.principal, via_token=via.id)

    def _checked(self, token: str, what: str = "") -> TokenRecord | None:
        """Return a token that holds. None if it is not known, and access control is permissive."""
        view = self._copy.view
        found = view.check_token(token, system.wall_time_ns() // 1_000)
        if found.token is None and view.mode is AccessMode.ENFORCED:
            raise Unauthenticated(what + found.problem)
        if found.token is not None and self._on_token is not None:
            self._on_token(found.token.id)
        return found.token


def names_of(certificate: Mapping[str, Any]) -> CertificateNames:
    """Return the names of a certificate in the form of ``ssl.SSLSocket.getpeercert``. Of several common names none
    counts: two programs could take different ones for the name. A name that is not plain does not count either."""
    found = certificate_names(certificate)
    kinds = (("DNS", found.dns), ("email", found.emails), ("URI", found.uris))
    others = tuple(f"{kind}:{name}" for kind, names in kinds for name in names if is_plain(name))
    common = found.common[0] if len(found.common) == 1 and is_plain(found.common[0]) else ""
    return CertificateNames(common, others)


def is_plain(name: str) -> bool:
    try:
        return bool(check_plain(name))
    except Unauthenticated:
        return False
