"""Renews the certificates of a local cluster while it runs: those of the servers, of its owner, and the authorities.

Servers read their files again when they get SIGHUP, all of them at once. A server that shows a new certificate has
therefore read what was written before it, too: that is how each step is confirmed before the next one begins.

Two authorities at a time are trusted while they are rotated. ``begin`` makes new ones, which everybody trusts beside
the old ones; certificates are still those of the old ones, so that clients can get the new file first. ``finish`` gives
everybody a certificate of the new ones, and then only these are trusted.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cryptography.x509 import Certificate, load_der_x509_certificate
from msgspec import Struct

from cutwater.admin import local_cluster, private_authority
from cutwater.admin.certificate_builder import Authority, AuthorityKind, issue_client, issue_server
from cutwater.admin.cluster_certificates import CERTIFICATES, HOSTS, OWNER, authority_file, certificate_place
from cutwater.admin.private_authority import CertificatePaths, authority_paths
from cutwater.errors import InvalidArgument, Unavailable
from cutwater.wire.addresses import parse_address
from cutwater.wire.identity.certificate_files import read_certificates
from cutwater.wire.identity.server_certificates import ServerName
from cutwater.wire.identity.tls_watch import LOOK_SECONDS

CONFIRM_SECONDS_MAX = 30.0
CONNECT_SECONDS_MAX = 5.0
_ORDER = (AuthorityKind.CLIENTS, AuthorityKind.SERVERS)


class KnownCertificate(Struct, frozen=True):
    """A certificate of a local cluster. ``until``: in seconds since 1970."""

    name: str
    file: str
    until: float


class Renewal(Struct, frozen=True):
    """``servers`` use their new certificates. ``stopped`` do not run, and read them when they start. ``authority`` is
    the file that clients trust."""

    servers: list[str]
    stopped: list[str]
    authority: str


def list_certificates(directory: Path) -> list[KnownCertificate]:
    folder = _folder(directory)[1]
    return [
        KnownCertificate(f"{path.stem}{_of_several(place, found)}", str(path), one.not_valid_after_utc.timestamp())
        for path in sorted(folder.glob("*.pem"))
        for found in [read_certificates(path)]
        for place, one in enumerate(found)
    ]


def renew(directory: Path) -> Renewal:
    """Give all servers and the owner new certificates of the authorities that issue now."""
    cluster, folder = _folder(directory)
    servers = private_authority.load_authority(folder, AuthorityKind.SERVERS)
    _issue_owner(folder, private_authority.load_authority(folder, AuthorityKind.CLIENTS))
    return _renew_servers(directory, cluster, servers)


def begin_authority(directory: Path) -> Renewal:
    """Make new authorities, and let all servers trust them beside the old ones."""
    cluster, folder = _folder(directory)
    old = private_authority.load_authority(folder, AuthorityKind.SERVERS)
    kinds = [kind for kind in _ORDER if not private_authority.is_rotating(folder, kind)]
    if AuthorityKind.SERVERS not in kinds:
        raise InvalidArgument(
            "new authorities exist beside the old ones already: when all clients trust them, `cutwater cluster "
            f"certificates renew --authority finish --dir {directory}` goes on"
        )
    for kind in kinds:
        private_authority.begin_rotation(folder, kind)
    # Clients that do not know the new authority yet go on: the certificates are of the old one.
    return _renew_servers(directory, cluster, old)


def finish_authority(directory: Path) -> Renewal:
    """Give everybody certificates of the new authorities, and then let servers trust only these."""
    cluster, folder = _folder(directory)
    # These are the last ones that ``begin`` makes, and the last ones that this function ends.
    if not private_authority.is_rotating(folder, AuthorityKind.SERVERS):
        raise InvalidArgument(
            f"there are no new authorities: `cutwater cluster certificates renew --authority begin --dir {directory}` "
            "makes them"
        )
    # If ``begin`` was interrupted, servers find the new authorities by themselves in this time.
    youngest = max(authority_paths(folder, kind).certificate.stat().st_mtime for kind in AuthorityKind)
    time.sleep(max(0.0, min(2 * LOOK_SECONDS, youngest + 2 * LOOK_SECONDS - time.time())))
    renew(directory)
    for kind in _ORDER:
        private_authority.end_rotation(folder, kind)
    return _renew_servers(directory, cluster, private_authority.load_authority(folder, AuthorityKind.SERVERS))


def _folder(directory: Path) -> tuple[local_cluster.LocalCluster, Path]:
    cluster = local_cluster.load(directory)
    if not cluster.has_tls:
        raise InvalidArgument(
            f"the cluster in {directory} has no certificates: `cutwater cluster secure --dir {directory}` makes them, "
            "and turns access control on"
        )
    return cluster, directory / CERTIFICATES


def _of_several(place: int, found: list[Certificate]) -> str:
    return f" ({'new' if place == 0 else 'old'})" if len(found) > 1 else ""


def _issue_owner(folder: Path, clients: Authority) -> None:
    issued = issue_client(clients, OWNER, now=private_authority.now())
    private_authority.write_issued(CertificatePaths(*certificate_place(folder, OWNER)), issued, replace=True)


def _renew_servers(directory: Path, cluster: local_cluster.LocalCluster, authority: Authority) -> Renewal:
    """Issue a certificate for each server, one after another, and wait until each shows its own."""
    renewed, stopped = [], []
    for name, member, place in _servers(directory, cluster):
        issued = issue_server(authority, name, HOSTS, now=private_authority.now())
        private_authority.write_issued(place, issued, replace=True)
        if not local_cluster.is_up(member):
            stopped.append(str(name))
            continue
        _confirm(directory, name, member, place)
        renewed.append(str(name))
    return Renewal(renewed, stopped, str(authority_file(directory)))


def _servers(
    directory: Path, cluster: local_cluster.LocalCluster
) -> Iterator[tuple[ServerName, local_cluster.ClusterMember, CertificatePaths]]:
    for member in cluster.nodes:
        name = local_cluster.server_name(cluster, member)
        yield name, member, CertificatePaths(*certificate_place(directory / CERTIFICATES, name))


def _confirm(directory: Path, name: ServerName, member: local_cluster.ClusterMember, place: CertificatePaths) -> None:
    """Let a server read its files, and wait until it shows the certificate in them."""
    wanted = read_certificates(place.certificate)[0].serial_number
    deadline = time.monotonic() + CONFIRM_SECONDS_MAX
    with suppress(ProcessLookupError):
        os.kill(member.pid, signal.SIGHUP)
    while _shown(member.address) != wanted:
        if not local_cluster.is_up(member):
            # It reads its files when it starts.
            return
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{name} does not use its new certificate, {place.certificate}: its log in {directory} says why. Run "
                "the command again when that is repaired; servers that have new certificates already go on with them"
            )
        time.sleep(0.05)


def _shown(address: str) -> int | None:
    """Return the serial number of the certificate that a server shows to new connections; None if it does not answer.
    Nothing is sent to it, so it need not be trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection(parse_address(address), timeout=CONNECT_SECONDS_MAX) as plain,
            context.wrap_socket(plain) as tls,
        ):
            data = tls.getpeercert(binary_form=True)
    except OSError:
        return None
    return load_der_x509_certificate(data).serial_number if data else None
