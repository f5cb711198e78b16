"""TLS: the certificates that this process shows, and the authorities whose certificates it trusts.

Each server of a cluster has a certificate, and so have clients: mutual TLS. Servers have an authority of their own
(ADR 0051), or share one with the clients. Where servers know tokens, a client may show a token instead of a
certificate.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.runtime import system
from cutwater.runtime.permissions import check_secret
from cutwater.wire.identity.auth import Authenticator, CertificateOrToken, PeerIdentity
from cutwater.wire.identity.certificate_files import (
    CertificateExpiry,
    InspectedCertificates,
    TlsFiles,
    check_own_name,
    check_valid_now,
    inspect,
)
from cutwater.wire.identity.server_certificates import ClusterContext, ServerName
from cutwater.wire.identity.tls_reload import FollowingContext, WatchedFiles

TOKEN_LENGTH_MIN = 16
TOKEN_FILE_UNTIL = "2027-06-30"
"""Files of tokens are read by versions until this day. Tokens of the cluster take their place."""


class TlsContexts(Struct, frozen=True):
    """What one reading of the files of a server gives."""

    server: ClusterContext
    client: ClusterContext
    certificates: InspectedCertificates


class ServerCertificates:
    """The certificates of a server, read again whenever their files have changed (``tls_watch``)."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files = files.absolute()
        self._name: ServerName | None = None
        self._watched = WatchedFiles(files.paths, self._make)

    @property
    def contexts(self) -> TlsContexts:
        return self._watched.current

    @property
    def expiries(self) -> tuple[CertificateExpiry, ...]:
        return self.contexts.certificates.expiries

    @property
    def trouble(self) -> str:
        """Why the present files are not in use; empty if they are."""
        return self._watched.trouble

    def claim(self, name: ServerName) -> None:
        """Say which server this is. Raises if its certificate is for another one; so does every later one."""
        self._name = name
        self._check_name(self.contexts.certificates)

    def look(self) -> None:
        """Use the files as they are now, if they have changed and can be used."""
        self._watched.look()

    def _make(self, is_replacement: bool) -> TlsContexts:
        files = self._files
        server = _context(ssl.PROTOCOL_TLS_SERVER, files.authority, files.certificate, files.key)
        client = _context(ssl.PROTOCOL_TLS_CLIENT, files.authority, files.certificate, files.key)
        if files.client_authority is not None:
            _trust(server, files.client_authority)
        # The authenticator refuses a peer without a certificate, since it can say why: with TLS 1.3, a client that TLS
        # itself refuses only sees that the connection was closed. A certificate of another authority fails in TLS.
        server.verify_mode = ssl.CERT_OPTIONAL
        # A session that is taken up again is not verified again.
        server.num_tickets = 0
        server.options |= ssl.OP_NO_TICKET
        certificates = inspect(files)
        server.servers = client.servers = certificates.servers
        self._check_name(certificates)
        if is_replacement:
            check_valid_now(certificates.expiries[0], system.wall_time_ns() / 1e9)
        return TlsContexts(server, client, certificates)

    def _check_name(self, certificates: InspectedCertificates) -> None:
        if self._name is not None:
            is_required = certificates.servers is not None
            check_own_name(certificates.own, self._files.certificate, self._name, is_required=is_required)


class Tls(Struct, frozen=True):
    """TLS settings of a server, as a listener and as a client of other servers."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    authenticate: Authenticator
    certificates: ServerCertificates


def load_tls(files: TlsFiles, tokens: Mapping[str, PeerIdentity] | None = None) -> Tls:
    """Load certificates for mutual TLS. With ``tokens``, a connecting peer may show one of them instead."""
    found = ServerCertificates(files)
    server = FollowingContext(lambda: found.contexts.server)
    client = FollowingContext(lambda: found.contexts.client)
    return Tls(server, client, CertificateOrToken(tokens or {}), found)


def client_tls(authority: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Return a TLS context for a client.

    It trusts servers that have a certificate of this authority for the name they are reached by. It shows them a
    certificate if one is given. Each new connection uses the files as they are then.
    """
    if (certificate is None) != (key is None):
        raise InvalidArgument("a certificate and its private key belong together: give both, or neither")
    # The program may change its directory before it connects again.
    authority = authority.absolute()
    certificate, key = (None if path is None else path.absolute() for path in (certificate, key))
    paths = [path for path in (authority, certificate, key) if path is not None]
    watched = WatchedFiles(paths, lambda is_replacement: _context(ssl.PROTOCOL_TLS_CLIENT, authority, certificate, key))
    return FollowingContext(watched.look)


def listener_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a TLS context for a listener that asks its clients for no certificates. Each new connection uses the files
    as they are then."""
    certificate, key = certificate.absolute(), key.absolute()

    def make(is_replacement: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load(context, certificate, key)
        return context

    return FollowingContext(WatchedFiles([certificate, key], make).look)


def _context(protocol: int, authority: Path, certificate: Path | None, key: Path | None) -> ClusterContext:
    context = ClusterContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _trust(context, authority)
    if certificate is None:
        return context
    _load(context, certificate, key)
    return context


def _load(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    if key is not None:
        check_secret(key, "a private key for TLS")
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_encrypted(key or certificate))
    except OSError as error:
        raise InvalidArgument(
            f"{certificate} and {key} cannot be used as certificate and private key for TLS: {_why(error)}"
        ) from error


def _refuse_encrypted(key: Path) -> str:
    """Keep TLS from asking for the passphrase on the terminal: files are read again at any time, with nobody there."""
    raise InvalidArgument(
        f"{key} is encrypted with a passphrase, and is read again whenever it changes: take the passphrase off, with "
        f"`openssl pkey -in {key} -out NEW`, and give NEW, which only its owner may read"
    )


def _trust(context: ssl.SSLContext, authority: Path) -> None:
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise InvalidArgument(f"{authority} cannot be used as an authority for TLS: {_why(error)}") from error


def _why(error: OSError) -> str:
    """Return the reason as text. OpenSSL errors are OSErrors too, but say little, so they get a hint."""
    return f"{error}; PEM files are wanted" if isinstance(error, ssl.SSLError) else str(error.strerror or error)


def read_tokens(path: Path) -> dict[str, PeerIdentity]:
    """Read a file with a name and a token in each line. Empty lines and lines that begin with # are skipped."""
    check_secret(path, "a file of tokens")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"{path} cannot be read as a file of tokens: {error}") from error
    found: dict[str, PeerIdentity] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        # The messages do not repeat the wrong text: it may be a secret.
        if len(words) != 2:
            raise InvalidArgument(f"{path}, line {number}: a name and a token are wanted, with a space between")
        name, token = words
        if len(token) < TOKEN_LENGTH_MIN:
            raise InvalidArgument(
                f"{path}, line {number}: the token of {name!r} has less than {TOKEN_LENGTH_MIN} characters and could "
                "be guessed: make one with `openssl rand -hex 32`"
            )
        if token in found:
            raise InvalidArgument(f"{path}, line {number}: {name!r} has the same token as {found[token].name!r}")
        found[token] = PeerIdentity(name)
    if not found:
        raise InvalidArgument(f"{path} has no token: write a name and a token into each line")
    return found
