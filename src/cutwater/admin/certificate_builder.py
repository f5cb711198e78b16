"""Builds the certificates of a private authority: of the authority itself, of servers and of clients. Pure.

There are two authorities. The servers' one issues certificates that name one server of one cluster, the clients' one
those that name a principal. Keys are ECDSA on the curve P-256, which every library of TLS supports. Time is an
argument; only serial numbers and new keys are random.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.wire.identity.server_certificates import SCHEME, ServerName

AUTHORITY_DAYS = 3_650
LEAF_DAYS = 365
COMMON_NAME_CHARS_MAX = 64
"""The limit of X.509."""
_EARLIER = timedelta(minutes=5)
"""Certificates are valid a little before they were made: clocks of other machines may be behind."""
_ORGANIZATION = "Cutwater"


class AuthorityKind(StrEnum):
    SERVERS = "servers"
    CLIENTS = "clients"


class Authority(Struct, frozen=True):
    """An authority that can issue certificates."""

    kind: AuthorityKind
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def __repr__(self) -> str:
        """Leave out the key."""
        return f"Authority({self.kind}, {self.certificate.subject.rfc4514_string()})"


class IssuedCertificate(Struct, frozen=True):
    """A certificate and its private key, both in PEM form."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        """Leave out the key."""
        return "IssuedCertificate(...)"


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def build_authority(kind: AuthorityKind, *, now: datetime, days: int = AUTHORITY_DAYS) -> Authority:
    """Make an authority. Its name has a random part, so that the old and the new one of a rotation differ."""
    key, serial = new_key(), x509.random_serial_number()
    name = _name(f"{_ORGANIZATION} {kind} authority {serial:x}"[:COMMON_NAME_CHARS_MAX], organization=_ORGANIZATION)
    certificate = (
        _builder(name, name, key.public_key(), serial, now, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(is_authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(kind, certificate, key)


def issue_server(
    authority: Authority, server: ServerName, hosts: Sequence[str], *, now: datetime, days: int = LEAF_DAYS
) -> IssuedCertificate:
    """Issue the certificate of one server. ``hosts``: the names and addresses at which others reach it."""
    if authority.kind is not AuthorityKind.SERVERS:
        raise InvalidArgument(f"the {authority.kind} authority issues no certificates of servers: use the servers' one")
    if not hosts:
        raise InvalidArgument("a server is reached at a name or an address: give one or more of them as hosts")
    names = [x509.UniformResourceIdentifier(server.uri), *map(_host, hosts)]
    # A server is also a client of other servers.
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return _issue(authority, server.uri, names, usages, now, days)


def issue_client(
    authority: Authority,
    principal: str,
    *,
    now: datetime,
    days: int = LEAF_DAYS,
    dns: Iterable[str] = (),
    emails: Iterable[str] = (),
    uris: Iterable[str] = (),
) -> IssuedCertificate:
    """Issue the certificate of a client. The principal is its common name; others are alternative names."""
    if authority.kind is not AuthorityKind.CLIENTS:
        raise InvalidArgument(f"the {authority.kind} authority issues no certificates of clients: use the clients' one")
    if principal != principal.strip() or not principal.isprintable() or not 0 < len(principal) <= COMMON_NAME_CHARS_MAX:
        raise InvalidArgument(
            f"{principal!r} cannot be the name of a client: 1 to {COMMON_NAME_CHARS_MAX} characters are allowed that "
            "can be printed, without spaces at an end"
        )
    uris = tuple(uris)
    if any(uri.lower().startswith(SCHEME) for uri in uris):
        raise InvalidArgument(f"URIs with {SCHEME} are names of servers: a client has others")
    try:
        names: list[x509.GeneralName] = [
            *map(x509.DNSName, dns),
            *map(x509.RFC822Name, emails),
            *map(x509.UniformResourceIdentifier, uris),
        ]
    except ValueError as error:
        raise InvalidArgument(f"an alternative name of {principal!r} cannot be used: {error}") from error
    return _issue(authority, principal, names, [ExtendedKeyUsageOID.CLIENT_AUTH], now, days)


def _issue(
    authority: Authority,
    common: str,
    names: Sequence[x509.GeneralName],
    usages: Sequence[x509.ObjectIdentifier],
    now: datetime,
    days: int,
) -> IssuedCertificate:
    issuer, key = authority.certificate, new_key()
    if now >= issuer.not_valid_after_utc:
        raise InvalidArgument(
            f"the {authority.kind} authority has expired on {issuer.not_valid_after_utc:%Y-%m-%d}: make a new one"
        )
    subject = _name(common, organization="")
    serial = x509.random_serial_number()
    builder = _builder(subject, issuer.subject, key.public_key(), serial, now, days, issuer)
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(is_authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    return IssuedCertificate(certificate.public_bytes(s.Encoding.PEM), key_pem(key))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    serial: int,
    now: datetime,
    days: int,
    authority: x509.Certificate | None = None,
) -> x509.CertificateBuilder:
    """Return what all certificates have. One ends no later than the certificate of its authority."""
    if days < 1:
        raise InvalidArgument(f"a certificate is valid for 1 day or more, not for {days}")
    since, until = now - _EARLIER, now + timedelta(days=days)
    if authority is not None:
        since, until = max(since, authority.not_valid_before_utc), min(until, authority.not_valid_after_utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(since)
        .not_valid_after(until)
    )


def _name(common: str, *, organization: str) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if organization:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    try:
        name = x509.DNSName(host)
    except ValueError as error:
        raise InvalidArgument(f"{host!r} is no name of a host: {error}") from error
    if not host or set(host) & set(" /:*"):
        raise InvalidArgument(f"{host!r} is no name of a host, and no address: give it without a port or a scheme")
    return name


def kind_of(certificate: x509.Certificate) -> AuthorityKind | None:
    """Return which authority this is the certificate of, or None if it is not of one that was made here."""
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (x509.ExtensionNotFound, ValueError):
        return None
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not constraints.ca or len(names) != 1:
        return None
    common = str(names[0].value)
    for kind in AuthorityKind:
        if common.startswith(f"{_ORGANIZATION} {kind} authority "):
            return kind
    return None


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def certificates_pem(certificates: Iterable[x509.Certificate]) -> bytes:
    return b"".join(found.public_bytes(s.Encoding.PEM) for found in certificates)
