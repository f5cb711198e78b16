"""Decides whether a certificate is one of the server that its peer claims to be (ADR 0051).

The certificate of a server names cluster, role and number in a URI: ``cutwater://1/sn/2`` is storage node 2 of cluster
1. It is accepted for this server only. With an authority of their own, servers must have such a certificate, issued
directly by that authority. With one authority for servers and clients, the name is checked if there is one.

This comes in addition to the proof of the server's own key (``server_keys``).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import Unproven
from cutwater.wire.identity.certificate_names import certificate_names, shown

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

SCHEME = "cutwater://"
_SHORT = {STORAGE_NODE: "sn", METADATA_NODE: "mr"}
_NUMBER_MAX = 2**63 - 1
_DIGITS_MAX = len(str(_NUMBER_MAX))


class ServerName(Struct, frozen=True):
    """One server of one cluster. ``kind`` is its role in the handshake."""

    cluster: int
    kind: str
    number: int

    def __post_init__(self) -> None:
        if self.kind not in _SHORT or not 0 < self.cluster <= _NUMBER_MAX or not 0 < self.number <= _NUMBER_MAX:
            raise InvalidArgument(
                f"{self.kind} {self.number} of cluster {self.cluster} is no server: it is a {' or a '.join(_SHORT)}, "
                "and numbers begin with 1"
            )

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of cluster {self.cluster}"

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.cluster}/{_SHORT[self.kind]}/{self.number}"

    @classmethod
    def parse(cls, uri: str) -> ServerName:
        """Parse a URI. There is one spelling for each server: no leading zeros, no upper case, nothing after it."""
        parts = uri.removeprefix(SCHEME).split("/")
        kinds = {short: kind for kind, short in _SHORT.items()}
        if uri.startswith(SCHEME) and len(parts) == 3 and parts[1] in kinds:
            cluster, short, number = parts
            if all(text.isdecimal() and len(text) <= _DIGITS_MAX for text in (cluster, number)):
                found = cls(int(cluster), kinds[short], int(number))
                if found.uri == uri:
                    return found
        raise InvalidArgument(
            f"{shown(uri)} names no server: it is {SCHEME}CLUSTER/sn/NUMBER or {SCHEME}CLUSTER/mr/NUMBER"
        )


Wants = Callable[[ServerName], None]
"""Raises if a certificate is not of the server that a connection was made to."""


class ServersAuthority:
    """The authority that issues certificates of servers, and none for clients. It may be several at a time."""

    def __init__(self, certificates: Sequence[Certificate]) -> None:
        self._certificates = tuple(certificates)

    def has_issued(self, certificate: Certificate) -> bool:
        """Return whether one of these certificates has signed this one, without another one between them."""
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # noqa: PLC0415

        for authority in self._certificates:
            try:
                certificate.verify_directly_issued_by(authority)
            except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
                continue
            return True
        return False

    def has_issued_der(self, data: bytes) -> bool:
        from cryptography.x509 import load_der_x509_certificate  # noqa: PLC0415

        try:
            return self.has_issued(load_der_x509_certificate(data))
        except ValueError:
            return False


class ClusterContext(ssl.SSLContext):
    """A context of TLS that knows the authority of servers. None: one authority for servers and clients."""

    servers: ServersAuthority | None = None


def server_uris(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the URIs of a certificate, in the form of ``ssl.SSLSocket.getpeercert``, that name a server or try to."""
    return tuple(uri for uri in certificate_names(certificate).uris if uri.startswith(SCHEME))


def check_claim(certificate: Mapping[str, Any], cluster: int, role: str, name: str, *, is_required: bool) -> None:
    """Raise if the certificate is not for the server that its peer claims to be.

    ``is_required``: a certificate that names no server is refused, too.
    """
    found = server_uris(certificate)
    if not found and not is_required:
        return
    claimed = f"{SCHEME}{cluster}/{_SHORT.get(role, '?')}/{name}"
    if not found:
        raise Unproven(
            f"{role} {name} shows a certificate that names no server: it needs the URI {claimed} as a subject "
            "alternative name"
        )
    if found != (claimed,):
        raise Unproven(
            f"the peer says that it is {role} {name} of cluster {cluster}, and its certificate is for "
            f"{' and '.join(map(shown, found))}: start each server with its own certificate, here one with the URI "
            f"{claimed} and no other of this kind"
        )


def check_accepted(transport: asyncio.BaseTransport, cluster: int, role: str, name: str, *, offers_key: bool) -> str:
    """Check the certificate of a peer that connected. Returns the URI of the server that it is for, if it is of the
    servers' own authority, else an empty text."""
    tls = transport.get_extra_info("ssl_object")
    if tls is None:
        return ""
    certificate = transport.get_extra_info("peercert") or {}
    authority = _authority(tls)
    is_claim = offers_key or role in _SHORT
    if authority is None:
        if is_claim:
            check_claim(certificate, cluster, role, name, is_required=False)
        return ""
    found = server_uris(certificate)
    if not is_claim and not found:
        return ""
    if is_claim and not certificate:
        raise Unproven(f"{role} {name} shows no certificate: a server needs one of the servers' authority")
    _check_issuer(tls, authority, f"{role} {name}")
    if is_claim:
        check_claim(certificate, cluster, role, name, is_required=True)
    return found[0] if len(found) == 1 else ""


def check_wanted(transport: asyncio.BaseTransport, wants: Wants) -> None:
    """Check for which server the certificate is that a server has shown. Runs before this side says anything, so
    another server of the cluster does not get to see a token. A certificate without a name tells nothing."""
    tls = transport.get_extra_info("ssl_object")
    found = server_uris(transport.get_extra_info("peercert") or {}) if tls is not None else ()
    if not found:
        return
    if len(found) > 1:
        raise Unproven(f"the server shows a certificate for {' and '.join(map(shown, found))}: it is for one server")
    try:
        server = ServerName.parse(found[0])
    except InvalidArgument as error:
        raise Unproven(f"the server shows a certificate whose name cannot be read: {error.message}") from None
    wants(server)


def check_connected(transport: asyncio.BaseTransport, cluster: int, role: str, name: str) -> None:
    """Check the certificate of the server that a connection was made to."""
    tls = transport.get_extra_info("ssl_object")
    if tls is None:
        return
    authority = _authority(tls)
    if authority is not None:
        _check_issuer(tls, authority, f"{role} {name}")
    certificate = transport.get_extra_info("peercert") or {}
    check_claim(certificate, cluster, role, name, is_required=authority is not None)


def _authority(tls: ssl.SSLObject) -> ServersAuthority | None:
    return tls.context.servers if isinstance(tls.context, ClusterContext) else None


def _check_issuer(tls: ssl.SSLObject, authority: ServersAuthority, who: str) -> None:
    if not authority.has_issued_der(tls.getpeercert(binary_form=True) or b""):
        raise Unproven(
            f"{who} shows a certificate that names a server, or speaks as one, and the servers' authority has not "
            "issued it: a certificate of the clients' authority is never a server's. If there is an authority between "
            "them, its certificate has to be in the file of --tls-ca as well"
        )
