"""TLS: the certificates that this process shows, and the authority whose certificates it trusts.

Each server of a cluster has a certificate, and trusts the certificates of one authority: mutual TLS. Clients do the
same. Where servers know tokens, a client may show a token instead of a certificate.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.runtime.permissions import check_secret
from cutwater.wire.identity.auth import Authenticator, CertificateOrToken, PeerIdentity

TOKEN_LENGTH_MIN = 16


class TlsFiles(Struct, frozen=True):
    """Certificate and key of this process, and the authority whose certificates it trusts. PEM files."""

    certificate: Path
    key: Path
    authority: Path


class Tls(Struct, frozen=True):
    """TLS settings of a server, as a listener and as a client of other servers."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    authenticate: Authenticator


def load_tls(files: TlsFiles, tokens: Mapping[str, PeerIdentity] | None = None) -> Tls:
    """Load certificates for mutual TLS. With ``tokens``, a connecting peer may show one of them instead."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(server, files.authority, files.certificate, files.key)
    # The authenticator refuses a peer without a certificate, since it can say why: with TLS 1.3, a client that TLS
    # itself refuses only sees that the connection was closed. A certificate of another authority fails in TLS.
    server.verify_mode = ssl.CERT_OPTIONAL
    client = client_tls(files.authority, files.certificate, files.key)
    return Tls(server, client, CertificateOrToken(tokens or {}))


def client_tls(authority: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Return a TLS context for a client.

    It trusts servers that have a certificate of this authority for the name they are reached by. It shows them a
    certificate if one is given.
    """
    if (certificate is None) != (key is None):
        raise InvalidArgument("a certificate and its private key belong together: give both, or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, authority, certificate, key)
    return context


def _load(context: ssl.SSLContext, authority: Path, certificate: Path | None, key: Path | None) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise InvalidArgument(f"{authority} cannot be used as an authority for TLS: {_why(error)}") from error
    if certificate is None:
        return
    if key is not None:
        check_secret(key, "a private key for TLS")
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise InvalidArgument(
            f"{certificate} and {key} cannot be used as certificate and private key for TLS: {_why(error)}"
        ) from error


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
