"""How a client gets a connection: where to, whom it believes, and how it shows who it is."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from msgspec import Struct

from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.handshake import Endpoint
from cutwater.wire.tls import client_tls


class Access(Struct, frozen=True):
    """``insecure``: a token may be sent in the clear to another machine."""

    tls: ssl.SSLContext | None = None
    token: str = ""
    insecure: bool = False

    def __repr__(self) -> str:
        """Without the token: this gets into messages and logs."""
        return f"Access(tls={self.tls!r}, insecure={self.insecure!r})"


ANYONE = Access()


def tls_context(
    ca: str | os.PathLike[str],
    *,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> ssl.SSLContext:
    """For ``connect(..., tls=)``, from PEM files: believe servers that have a certificate of the authority ``ca``, and
    show them ``certificate``, with its private key. Where a token is shown instead, the authority is enough::

        tls = cutwater.tls_context("ca.pem", certificate="me.pem", key="me.key")
        log = cutwater.connect("cutwater://db1.example:7001", tls=tls)
    """
    return client_tls(Path(ca), None if certificate is None else Path(certificate), None if key is None else Path(key))


async def open_connection(endpoint: Endpoint, address: str, access: Access, *, timeout_ms: int) -> Connection:
    host, port = parse_address(address)
    return await connect(
        endpoint,
        host,
        port,
        timeout_ms=timeout_ms,
        tls=access.tls,
        server_hostname=host if access.tls is not None else None,
        token=access.token,
        insecure=access.insecure,
    )
