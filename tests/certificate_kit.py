"""Authorities and certificates for tests, made by the code that ships, and TLS without sockets."""

from __future__ import annotations

import ssl
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as s
from cryptography.x509.oid import NameOID

from cutwater.admin.certificate_builder import (
    AUTHORITY_DAYS,
    Authority,
    AuthorityKind,
    IssuedCertificate,
    build_authority,
    certificates_pem,
    issue_client,
    issue_server,
    key_pem,
    new_key,
)
from cutwater.admin.private_authority import (
    CertificatePaths,
    authority_paths,
    load_authority,
    now,
    write_issued,
)
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.wire.identity.certificate_files import TlsFiles
from cutwater.wire.identity.server_certificates import ServerName

CLUSTER = 1
AGE = timedelta(days=100)
"""Authorities are older than what they issue, so that some of it has expired."""
HOSTS = ("127.0.0.1", "localhost")


def storage(number: int, cluster: int = CLUSTER) -> ServerName:
    return ServerName(cluster, STORAGE_NODE, number)


def metadata(number: int, cluster: int = CLUSTER) -> ServerName:
    return ServerName(cluster, METADATA_NODE, number)


class CertificateKit:
    """A directory with both authorities, and the certificates that tests ask for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700)
        for kind in AuthorityKind:
            made = build_authority(kind, now=now() - AGE, days=AUTHORITY_DAYS + AGE.days)
            place = authority_paths(directory, kind)
            write_issued(place, IssuedCertificate(certificates_pem([made.certificate]), key_pem(made.key)))

    def authority(self, kind: AuthorityKind) -> Authority:
        return load_authority(self.directory, kind)

    def bundle(self, kind: AuthorityKind) -> Path:
        return authority_paths(self.directory, kind).certificate

    def place(self, name: str) -> CertificatePaths:
        return CertificatePaths(self.directory / f"{name}.pem", self.directory / f"{name}.key")

    def write(self, name: str, issued: IssuedCertificate) -> CertificatePaths:
        place = self.place(name)
        write_issued(place, issued, replace=True)
        return place

    def server(self, server: ServerName, name: str = "", *, age_days: int = 0, days: int = 365) -> TlsFiles:
        """The files of a server that has separate authorities. ``age_days``: how long ago it was issued."""
        issued = issue_server(
            self.authority(AuthorityKind.SERVERS), server, HOSTS, now=now() - timedelta(days=age_days), days=days
        )
        return self.files(self.write(name or f"{server.kind}-{server.number}".replace(" ", "-"), issued))

    def files(self, place: CertificatePaths) -> TlsFiles:
        return TlsFiles(
            place.certificate, place.key, self.bundle(AuthorityKind.SERVERS), self.bundle(AuthorityKind.CLIENTS)
        )

    def client(self, principal: str, *, at: datetime | None = None) -> CertificatePaths:
        issued = issue_client(self.authority(AuthorityKind.CLIENTS), principal, now=at or now())
        return self.write(principal, issued)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """TLS between two contexts in memory. Returns the side of the server and that of the client."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        server.wrap_bio(up, down, server_side=True),
        client.wrap_bio(down, up, server_hostname=host),
    )
    waiting = set(sides)
    for _ in range(10):
        for side in sides:
            if side in waiting:
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                waiting.discard(side)
    assert not waiting
    return sides


SAN = x509.ObjectIdentifier("2.5.29.17")
DNS, EMAIL, URI, ADDRESS = 0x82, 0x81, 0x86, 0x87
"""Tags of alternative names."""


def tlv(tag: int, data: bytes) -> bytes:
    assert len(data) < 128
    return bytes([tag, len(data)]) + data


def hostile(authority: Authority, subject: x509.Name, names: bytes | None) -> IssuedCertificate:
    """A certificate that the authority signs without looking. ``names`` are encoded alternative names."""
    key, issuer = new_key(), authority.certificate
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    if names is not None:
        builder = builder.add_extension(x509.UnrecognizedExtension(SAN, tlv(0x30, names)), critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    return IssuedCertificate(certificate.public_bytes(s.Encoding.PEM), key_pem(key))


def common(*names: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
