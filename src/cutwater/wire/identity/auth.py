"""Authentication: the credentials that a peer shows, and the identity that a listener derives from them.

An authenticator is a function from ``Credentials`` to a ``PeerIdentity``. It raises ``Unauthenticated`` if it rejects
the credentials. The layers above decide what an identity may do, from ``call.connection.peer``.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from cutwater.protocol.errors import Unauthenticated
from cutwater.wire.identity.certificate_names import certificate_names


class Credentials(Struct, frozen=True):
    """Credentials of a peer. ``certificate`` is in the form of ``ssl.SSLSocket.getpeercert``, verified, or empty.

    ``server`` is the URI of the server that the certificate is for, if the servers' own authority has issued it.
    ``gateway`` is the token of a gateway, which connects for the caller whose ``token`` it shows.
    """

    role: str
    name: str
    token: str
    certificate: Mapping[str, Any]
    address: str
    server: str = ""
    gateway: str = ""

    def __repr__(self) -> str:
        """Leave out the token."""
        return f"Credentials(role={self.role!r}, name={self.name!r}, address={self.address!r})"


class PeerIdentity(Struct, frozen=True):
    """The identity of a peer, as the listener has established it. Without an authenticator, every peer is anonymous.

    ``principal`` is the name that rules of access control give rights to; it is empty if there is none. ``token`` is
    the id of the token that was shown. ``is_judged``: access control was on when the identity was established.
    ``names``: the common name and the other names of the certificate from which the principal was derived, if it was.
    ``via`` is the principal of the gateway that connects for this peer, and ``via_token`` the id of its token.
    ``again`` judges the same credentials once more, if newer rules of access control may know them better.
    """

    name: str
    principal: str = ""
    token: str = ""
    is_judged: bool = False
    names: tuple[str, tuple[str, ...]] | None = None
    again: Callable[[], PeerIdentity] | None = None
    via: str = ""
    via_token: str = ""


ANONYMOUS = PeerIdentity("")

Authenticator = Callable[[Credentials], PeerIdentity]


class TokenAuthenticator:
    """Authenticates by token. All tokens take the same time, so timing reveals nothing about the known ones."""

    def __init__(self, tokens: Mapping[str, PeerIdentity]) -> None:
        if not all(tokens):
            raise ValueError("an empty token would let everyone in")
        self._tokens = {token.encode(): identity for token, identity in tokens.items()}

    def __call__(self, credentials: Credentials) -> PeerIdentity:
        found = None
        shown = credentials.token.encode()
        for token, identity in self._tokens.items():
            if hmac.compare_digest(token, shown):
                found = identity
        if found is None:
            raise Unauthenticated(
                "the token is not known here: check which one is given" if shown else "a token is needed here"
            )
        return found


class CertificateOrToken:
    """Accepts a certificate that TLS has verified. A peer without a certificate needs a token."""

    def __init__(self, tokens: Mapping[str, PeerIdentity]) -> None:
        self._by_token, self._has_tokens = TokenAuthenticator(tokens), bool(tokens)

    def __call__(self, credentials: Credentials) -> PeerIdentity:
        if credentials.certificate:
            # Names the peer in logs; several common names are not one.
            names = certificate_names(credentials.certificate).common
            return PeerIdentity(names[0] if len(names) == 1 else "")
        if not self._has_tokens:
            raise Unauthenticated("a client certificate is needed here: give one, with its private key")
        if not credentials.token:
            raise Unauthenticated("a client certificate or a token is needed here: give one of them")
        return self._by_token(credentials)
