"""Finds out whether a client reaches no server because of TLS. Waiting does not help then: its user has to act."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from cutwater.errors import CutwaterError
from cutwater.protocol.errors import ConnectionLost, Untrusted
from cutwater.wire.addresses import parse_address

PATIENCE_SECONDS = 10.0
"""How long TLS may fail before that is certain: servers may be restarted with other certificates meanwhile."""
PROBE_SECONDS_MAX = 2.0
ALERT, HANDSHAKE = 0x15, 0x16
"""The first byte of a record of TLS that answers a client's first one."""


class TlsTrouble:
    """Failures to connect since a server was last reached. ``has_tls``: the client uses TLS."""

    def __init__(self, has_tls: bool) -> None:
        self._has_tls = has_tls
        self._failures: dict[str, CutwaterError] = {}
        self._since: float | None = None

    def connected(self) -> None:
        self._failures.clear()
        self._since = None

    def failed(self, address: str, error: CutwaterError) -> None:
        is_candidate = isinstance(error, Untrusted) or (isinstance(error, ConnectionLost) and error.ended_greeting)
        if is_candidate and self._since is None:
            self._since = asyncio.get_running_loop().time()
        self._failures.pop(address, None)
        if is_candidate:
            self._failures[address] = error

    async def certain(self) -> Untrusted | None:
        """Return the error to end with; None while it is not certain that TLS is why no server can be reached."""
        if self._since is None or asyncio.get_running_loop().time() - self._since < PATIENCE_SECONDS:
            return None
        for address, error in list(self._failures.items()):
            if isinstance(error, Untrusted):
                return error
            if not self._has_tls and await speaks_tls(address):
                return Untrusted(
                    f"{address} speaks TLS, and this client does not: name the authority of its servers (tls=, "
                    "--tls-ca), or the directory of a local cluster (--dir)"
                )
        # A server that only closes connections may be starting, or be full.
        self.connected()
        return None


async def speaks_tls(address: str) -> bool:
    """Return whether the server at this address certainly answers in TLS. Shows it no credentials."""
    host, port = parse_address(address)
    try:
        async with asyncio.timeout(PROBE_SECONDS_MAX):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_first_bytes(host))
                answer = await reader.read(1)
            finally:
                writer.transport.abort()
    except OSError:
        return False
    return answer in (bytes([ALERT]), bytes([HANDSHAKE]))


def _first_bytes(host: str) -> bytes:
    """Return what a client of TLS says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname=host).do_handshake()
    return said.read()
