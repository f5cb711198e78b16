"""How a client gets a connection: where to, whom it believes, and how it shows who it is."""

from __future__ import annotations

import ssl

from msgspec import Struct

from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.handshake import Endpoint


class Access(Struct, frozen=True):
    """``insecure``: a token may be sent in the clear to another machine."""

    tls: ssl.SSLContext | None = None
    token: str = ""
    insecure: bool = False


ANYONE = Access()


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
