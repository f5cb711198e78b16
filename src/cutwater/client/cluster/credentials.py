"""How a client connects: the address, the servers that it trusts, and its own credentials."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct

from cutwater.client.errors import ClientClosed
from cutwater.errors import InvalidArgument
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import ConnectionLost, Unproven
from cutwater.runtime.local_files import read_secret
from cutwater.types import ClusterId
from cutwater.wire.addresses import is_loopback, parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint, Expect
from cutwater.wire.identity.server_certificates import ServerName, Wants
from cutwater.wire.identity.server_keys import ProvenServer
from cutwater.wire.identity.tls import client_tls

_log = logging.getLogger(__name__)


class FollowedToken:
    """A file with the token, which each new connection reads, so it may be replaced meanwhile. While it is missing
    or empty, the last token counts: that may be so for a moment while the file is replaced, and must not end a
    producer. A token is taken away by revoking it."""

    def __init__(self, path: Path) -> None:
        self._path, self._last = path, ""

    def __repr__(self) -> str:
        return f"FollowedToken({str(self._path)!r})"

    def read(self) -> str:
        found = _token_in(self._path)
        if not found and self._last:
            _log.warning("%s, the file with the token, is missing or holds none: the last token is used", self._path)
            return self._last
        self._last = found or read_token_file(self._path)
        return self._last


class Access(Struct, frozen=True):
    """Credentials, and how servers are verified. ``insecure``: a token may be sent unencrypted to another machine.
    ``end``: called when no server can be reached; returns why none ever will be, or an empty text. ``server_keys``:
    public keys of an embedded log. Its servers must prove that they hold one of them, which a process that took over
    the port of an ended log cannot. None: no proof is wanted. ``token_file`` is in the place of ``token``. ``gateway``:
    the file with the token of a gateway, which connects for the caller with ``token``."""

    tls: ssl.SSLContext | None = None
    token: str = ""
    insecure: bool = False
    end: Callable[[], str] | None = None
    server_keys: tuple[str, ...] | None = None
    token_file: FollowedToken | None = None
    gateway: FollowedToken | None = None

    @property
    def has_token(self) -> bool:
        return bool(self.token) or self.token_file is not None

    def shown_token(self) -> str:
        """Return the token to show now; empty if there is none."""
        return self.token if self.token or self.token_file is None else self.token_file.read()

    def __repr__(self) -> str:
        """Leave out the token: this text gets into messages and logs."""
        return f"Access(tls={self.tls!r}, insecure={self.insecure!r}, token_file={self.token_file!r})"


ANYONE = Access()


def tls_context(
    ca: str | os.PathLike[str],
    *,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> ssl.SSLContext:
    """Make a context for ``connect(..., tls=)`` from PEM files: trust servers that have a certificate of the authority
    ``ca``, and show them ``certificate``, with its private key. A client that shows a token instead needs only the
    authority. The files are read again whenever a connection is made, so they may be replaced meanwhile::

        tls = cutwater.tls_context("ca.pem", certificate="me.pem", key="me.key")
        log = cutwater.connect("cutwater://db1.example:7001", tls=tls)
    """
    return client_tls(Path(ca), None if certificate is None else Path(certificate), None if key is None else Path(key))


def check_tls(given: object) -> ssl.SSLContext | None:
    if given is None or isinstance(given, ssl.SSLContext):
        return given
    raise InvalidArgument(
        f"tls= is a context of TLS and not {given!r}: make one with cutwater.tls_context, such as "
        'tls=cutwater.tls_context("ca.pem")'
    )


def token_access(tls: ssl.SSLContext | None, token: object, insecure: bool) -> Access:
    """Return the access with a token, or with a file that has it."""
    if isinstance(token, str):
        # Read from a file, it often ends with a line feed.
        return Access(tls, token.strip(), insecure)
    if not isinstance(token, os.PathLike):
        # The message does not repeat the value: it may be a secret.
        raise InvalidArgument(
            "token= is neither a text nor a path: give the token itself, or the pathlib.Path of a file with it"
        )
    # The program may change its directory before it connects again.
    return Access(tls, insecure=insecure, token_file=FollowedToken(Path(os.fspath(token)).absolute()))


def read_token_file(path: Path) -> str:
    """Read a file with one token, which other users must not be able to read."""
    found = _token_in(path)
    if found is None:
        raise InvalidArgument(f"{path}, the file with the token, does not exist")
    if not found:
        # The message does not repeat the text: it may be a secret.
        raise InvalidArgument(f"{path} holds no token: write one into it, in one line, and nothing else")
    return found


def _token_in(path: Path) -> str | None:
    """Return the token in a file, an empty text if it holds none, and None if there is no such file."""
    data = read_secret(path, "a file with a token", "revoke the token and make another one")
    if data is None:
        return None
    try:
        text = data.decode("ascii").strip()
    except UnicodeDecodeError:
        return ""
    return "" if any(character.isspace() for character in text) else text


def storage_node(address: str, *numbers: int) -> Wants:
    """Want one of these storage nodes, or any if no number is known. Another one may have taken over the address, and
    the catalog that is known here may be old: so the error is retriable."""

    def wants(shown: ServerName) -> None:
        if shown.kind == STORAGE_NODE and (not numbers or shown.number in numbers):
            return
        wanted = f"storage node {' or '.join(map(str, numbers))}" if numbers else "a storage node"
        raise ConnectionLost(
            f"{address} shows the certificate of {shown}, and {wanted} is wanted there: nothing was sent to it",
            outcome_unknown=False,
        )

    return wants


def metadata_node(address: str) -> Wants:
    """Want any metadata node: users name addresses, not numbers."""

    def wants(shown: ServerName) -> None:
        if shown.kind != METADATA_NODE:
            raise not_a_metadata_node(address)

    return wants


def not_a_metadata_node(address: str) -> InvalidArgument:
    return InvalidArgument(
        f"{address} is a storage node, and clients ask metadata nodes first: name their addresses, which "
        "`cutwater mr start` prints, and `cutwater cluster status --dir DIR` for a local cluster"
    )


async def open_connection(
    endpoint: Endpoint, address: str, access: Access, *, wants: Wants, timeout_ms: int
) -> Connection:
    host, port = parse_address(address)
    try:
        return await connect(
            endpoint,
            host,
            port,
            timeout_ms=timeout_ms,
            tls=access.tls,
            server_hostname=host if access.tls is not None else None,
            token=access.shown_token(),
            gateway="" if access.gateway is None else access.gateway.read(),
            insecure=access.insecure,
            expect=None if access.server_keys is None else _expects(address, access.server_keys),
            wants=_of_cluster(endpoint.cluster, address, wants),
        )
    except (ConnectionLost, Unproven) as error:
        if access.end is not None and (why := access.end()):
            raise ClientClosed(why) from error
        if not isinstance(error.__cause__, ConnectionRefusedError):
            raise
        told = f"{error.message}. No server listens there: the server does not run, or listens elsewhere"
        if is_loopback(host):
            told += "; if it was an embedded log, the process that had opened it has closed it, or ended"
        raise ConnectionLost(told, outcome_unknown=False) from error


@asynccontextmanager
async def admin_connection(address: str, access: Access, *, wants: Wants, timeout_ms: int) -> AsyncIterator[Connection]:
    """Connect to a server for a few calls of an operator, whatever cluster it belongs to."""
    endpoint = Endpoint(ANY_CLUSTER, "admin")
    connection = await open_connection(endpoint, address, access, wants=wants, timeout_ms=timeout_ms)
    try:
        yield connection
    finally:
        connection.abort()


def _of_cluster(cluster: ClusterId, address: str, wants: Wants) -> Wants:
    def wanted(shown: ServerName) -> None:
        if cluster not in (ANY_CLUSTER, shown.cluster):
            raise Unproven(
                f"{address} shows the certificate of {shown}, and a server of cluster {cluster} is wanted there: check "
                "the address"
            )
        wants(shown)

    return wanted


def _expects(address: str, keys: tuple[str, ...]) -> Expect:
    def expect(server: ProvenServer | None) -> None:
        if server is None or server.key not in keys:
            raise Unproven(
                f"the server at {address} is not the embedded log that is wanted: the process that had it open has "
                "closed it, or ended, and another one listens there now. Open the log by its path again"
            )

    return expect
