"""TLS: whose certificates are believed, and what is shown to others.

Servers of a cluster each have a certificate, and believe those of one authority: mutual TLS. Clients do the same, or,
where servers know tokens, show one of these instead of a certificate.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.runtime.permissions import check_secret
from cutwater.wire.identity.auth import Authenticator, CertificateOrToken, Identity

TOKEN_LENGTH_MIN = 16


class TlsFiles(Struct, frozen=True):
    """Certificate and key of this process, and the authority whose certificates it believes; PEM files."""

    certificate: Path
    key: Path
    authority: Path


class Tls(Struct, frozen=True):
    """How a server shows who it is and whom it believes, as listener and as client of other servers."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    authenticate: Authenticator


def load_tls(files: TlsFiles, tokens: Mapping[str, Identity] | None = None) -> Tls:
    """Both sides show a certificate and want to see one; with ``tokens``, whoever connects may show one of them
    instead."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(server, files.authority, files.certificate, files.key)
    # Who shows no certificate is refused by the authenticator, which can say why: with TLS 1.3 all that a client hears
    # of a refusal by TLS itself is that the connection was closed. A certificate of another authority fails in TLS.
    server.verify_mode = ssl.CERT_OPTIONAL
    client = client_tls(files.authority, files.certificate, files.key)
    return Tls(server, client, CertificateOrToken(tokens or {}))


def client_tls(authority: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Believes servers with a certificate of this authority for the name they are reached by, and shows them a
    certificate if there is one."""
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
    """Errors of OpenSSL are errors of the operating system, too, but say little."""
    return f"{error}; PEM files are wanted" if isinstance(error, ssl.SSLError) else str(error.strerror or error)


def read_tokens(path: Path) -> dict[str, Identity]:
    """A name and a token in each line; empty lines and those that begin with # are left out."""
    check_secret(path, "a file of tokens")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"{path} cannot be read as a file of tokens: {error}") from error
    found: dict[str, Identity] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        # What is wrong is not repeated here: it may be a secret.
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
        found[token] = Identity(name)
    if not found:
        raise InvalidArgument(f"{path} has no token: write a name and a token into each line")
    return found
