"""The certificates of a local cluster: its private authorities, and what they issue for servers and for its owner.

They lie in ``certificates`` in the cluster's directory. Making them again adds what is missing, replaces certificates
that expire soon, and keeps the rest. ``admin.token`` beside them, if it exists, is that of the first administrator.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

from cutwater.client.cluster.credentials import Access, read_token_file
from cutwater.core.access.principals import token_id
from cutwater.errors import InvalidArgument
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.runtime import system
from cutwater.runtime.local_files import MachineFiles
from cutwater.wire.identity.server_certificates import ServerName
from cutwater.wire.identity.tls import client_tls

CERTIFICATES = "certificates"
ADMIN_TOKEN = "admin.token"
OWNER = "admin"
"""The name in the owner's certificate, and of the first administrator."""
HOSTS = ("127.0.0.1", "localhost", "::1")
_PREFIXES = {METADATA_NODE: "mr", STORAGE_NODE: "sn"}


def authority_file(directory: Path) -> Path:
    """Return the file of the servers' authority, which clients trust."""
    return directory / CERTIFICATES / "servers-ca.pem"


def make_certificates(directory: Path, servers: Iterable[ServerName]) -> None:
    """Make what is missing of the authorities, the servers' certificates and the owner's, or expires soon."""
    # The library takes long to load, and only this function needs it.
    from cutwater.admin import certificate_builder, private_authority  # noqa: PLC0415
    from cutwater.admin.certificate_builder import AuthorityKind  # noqa: PLC0415

    folder = directory / CERTIFICATES
    if not any(folder.glob("*-ca.*")):
        # All of it or nothing, so that an interruption leaves no half of an authority.
        whole = folder.with_name(f"{CERTIFICATES}.new")
        shutil.rmtree(whole, ignore_errors=True)
        private_authority.make_authorities(whole)
        whole.rename(folder)
        system.made(MachineFiles).sync_dir(directory)
    now = private_authority.now()
    for server in servers:
        place = certificate_place(folder, server)
        if not _lasts(place, now):
            # The keys of the authorities are needed only to issue, so they may be kept elsewhere.
            authority = private_authority.load_authority(folder, AuthorityKind.SERVERS)
            issued = certificate_builder.issue_server(authority, server, HOSTS, now=now)
            private_authority.write_issued(private_authority.CertificatePaths(*place), issued, replace=True)
    place = certificate_place(folder, OWNER)
    if not _lasts(place, now):
        authority = private_authority.load_authority(folder, AuthorityKind.CLIENTS)
        issued = certificate_builder.issue_client(authority, OWNER, now=now)
        private_authority.write_issued(private_authority.CertificatePaths(*place), issued, replace=True)


def server_flags(directory: Path, server: ServerName) -> list[str]:
    """Return the options of a server that uses its certificate."""
    folder = directory / CERTIFICATES
    certificate, key = certificate_place(folder, server)
    return [
        *("--tls-certificate", str(certificate), "--tls-key", str(key)),
        *("--tls-ca", str(authority_file(directory)), "--tls-client-ca", str(folder / "clients-ca.pem")),
    ]


def owner_access(directory: Path, token: str = "") -> Access:
    """Return the credentials of the cluster's owner, or of the holder of ``token``, if it is given."""
    certificate, key = certificate_place(directory / CERTIFICATES, OWNER)
    return Access(client_tls(authority_file(directory), certificate, key), token or admin_token(directory))


def node_access(directory: Path, metadata_node: int) -> Access:
    """Return TLS as this metadata node uses it."""
    certificate, key = certificate_place(directory / CERTIFICATES, f"{_PREFIXES[METADATA_NODE]}{metadata_node}")
    return Access(client_tls(authority_file(directory), certificate, key))


def admin_token(directory: Path) -> str:
    """Return the token in the cluster's directory; empty if there is none."""
    path = directory / ADMIN_TOKEN
    return read_token_file(path) if path.exists() else ""


def token_id_in(path: Path) -> str:
    """Return the id of the token in a file; empty if it is not a token of a cluster."""
    return token_id(read_token_file(path)) or ""


def certificate_place(folder: Path, owner: ServerName | str) -> tuple[Path, Path]:
    """Return the files of the certificate and the key of a server, or of the client with this name."""
    name = owner if isinstance(owner, str) else f"{_PREFIXES[owner.kind]}{owner.number}"
    return folder / f"{name}.pem", folder / f"{name}.key"


def _lasts(place: tuple[Path, Path], now: datetime) -> bool:
    """Return whether a certificate and its key exist and belong together, and it does not expire soon."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    from cutwater.wire.identity.certificate_files import SOON_DAYS, read_certificates  # noqa: PLC0415

    if not all(path.exists() for path in place):
        return False
    certificate = read_certificates(place[0])[0]
    try:
        key = load_pem_private_key(place[1].read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{place[1]} is no private key in PEM form, or is damaged: {error}") from error
    if key.public_key() != certificate.public_key():
        # Renewing it was interrupted between the two files.
        return False
    return certificate.not_valid_after_utc > now + timedelta(days=SOON_DAYS)
