"""Reads the certificates of a server and of its authorities, and checks that they belong together.

Only servers do that: a client takes what the library of TLS says, and need not load another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.wire.identity.certificate_names import shown
from cutwater.wire.identity.server_certificates import SCHEME, ServerName, ServersAuthority

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

SECONDS_PER_DAY = 86_400
SOON_DAYS = 30
"""A certificate that expires within this time is reported every day."""


class TlsFiles(Struct, frozen=True):
    """Certificate and key of this process, and the authority whose certificates it trusts. PEM files.

    ``client_authority`` is for servers: clients have certificates of that authority, and ``authority`` is the servers'
    own. None: ``authority`` is for both.
    """

    certificate: Path
    key: Path
    authority: Path
    client_authority: Path | None = None

    def absolute(self) -> TlsFiles:
        """Return the same files, to be found after the process has changed its directory as well."""
        client = None if self.client_authority is None else self.client_authority.absolute()
        return TlsFiles(self.certificate.absolute(), self.key.absolute(), self.authority.absolute(), client)

    @property
    def paths(self) -> tuple[Path, ...]:
        found = (self.certificate, self.key, self.authority, self.client_authority)
        return tuple(path for path in found if path is not None)


class CertificateExpiry(Struct, frozen=True):
    """When a certificate ends: of several in one file, the one that ends first. ``until`` is in seconds since 1970."""

    which: str
    path: Path
    subject: str
    since: float
    until: float

    @property
    def date(self) -> str:
        return datetime.fromtimestamp(self.until, UTC).strftime("%Y-%m-%d %H:%M UTC")


class InspectedCertificates(Struct, frozen=True):
    """The certificates of a server. ``servers`` is None if servers and clients share one authority."""

    own: Certificate
    servers: ServersAuthority | None
    expiries: tuple[CertificateExpiry, ...]


def inspect(files: TlsFiles) -> InspectedCertificates:
    """Read the certificates of a server. Raises if they do not belong together."""
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415

    try:
        return _inspect(files)
    except (ValueError, UnsupportedAlgorithm) as error:
        # The library reads parts of a certificate only when they are asked for.
        what = ", ".join(map(str, files.paths))
        raise InvalidArgument(f"a certificate among {what} cannot be used for TLS: {error}") from error


def _inspect(files: TlsFiles) -> InspectedCertificates:
    own, authority = read_certificates(files.certificate)[0], read_certificates(files.authority)
    expiries = [_expiry("own", files.certificate, [own]), _expiry("authority", files.authority, authority)]
    if files.client_authority is None:
        return InspectedCertificates(own, None, tuple(expiries))
    clients = read_certificates(files.client_authority)
    expiries.append(_expiry("client_authority", files.client_authority, clients))
    if {_public(found) for found in authority} & {_public(found) for found in clients}:
        raise InvalidArgument(
            f"{files.authority} and {files.client_authority} hold the same authority: then each client could have the "
            "certificate of a server. Make an authority for servers and another one for clients, or give --tls-ca alone"
        )
    servers = ServersAuthority(authority)
    if not servers.has_issued(own):
        raise InvalidArgument(
            f"{files.certificate} was not issued by an authority in {files.authority}: other servers would refuse it. "
            "Put the certificate of the authority that issued it into that file"
        )
    return InspectedCertificates(own, servers, tuple(expiries))


def check_own_name(certificate: Certificate, path: Path, name: ServerName, *, is_required: bool) -> None:
    """Raise if the certificate is for another server than this one."""
    from cryptography.x509 import (  # noqa: PLC0415
        ExtensionNotFound,
        SubjectAlternativeName,
        UniformResourceIdentifier,
    )

    try:
        names = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
        found = [uri for uri in names.get_values_for_type(UniformResourceIdentifier) if uri.startswith(SCHEME)]
    except ExtensionNotFound:
        found = []
    except ValueError as error:
        raise InvalidArgument(f"the names in {path} cannot be read: {error}") from error
    if found != [name.uri] and (found or is_required):
        told = " and ".join(map(shown, found)) or "no server"
        raise InvalidArgument(
            f"{path} is a certificate for {told}, and this is {name}: give the certificate that has the URI "
            f"{name.uri} as a subject alternative name"
        )


def check_valid_now(certificate: CertificateExpiry, now: float) -> None:
    if not certificate.since <= now < certificate.until:
        what = f"has expired on {certificate.date}" if now >= certificate.until else "is not valid yet"
        raise InvalidArgument(f"{certificate.path} {what}: check the clock of this machine, or renew the certificate")


def read_certificates(path: Path) -> list[Certificate]:
    from cryptography.x509 import load_pem_x509_certificates  # noqa: PLC0415

    try:
        return load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be used for TLS: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} cannot be used for TLS: certificates in PEM form are wanted: {error}") from error


def _expiry(which: str, path: Path, certificates: Sequence[Certificate]) -> CertificateExpiry:
    first = min(certificates, key=lambda found: found.not_valid_after_utc)
    since = max(found.not_valid_before_utc for found in certificates).timestamp()
    return CertificateExpiry(which, path, first.subject.rfc4514_string(), since, first.not_valid_after_utc.timestamp())


def _public(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization as s  # noqa: PLC0415

    return certificate.public_key().public_bytes(s.Encoding.DER, s.PublicFormat.SubjectPublicKeyInfo)


class ExpiryReports:
    """Decides when the end of a certificate is reported: each day, from 30 days before it."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, float], float] = {}

    def due(self, expiries: Sequence[CertificateExpiry], now: float) -> list[str]:
        """Return what is to be logged now."""
        told: list[str] = []
        for found in expiries:
            key, left = (found.which, found.until), found.until - now
            if left > SOON_DAYS * SECONDS_PER_DAY or now < self._reported.get(key, -inf) + SECONDS_PER_DAY:
                continue
            self._reported[key] = now
            when = f"expires soon, on {found.date}" if left > 0 else f"has expired on {found.date}"
            told.append(f"the certificate {found.subject} in {found.path} {when}: renew it")
        return told
