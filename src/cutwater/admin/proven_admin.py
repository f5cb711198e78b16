"""Administers access control with the proof of being on the machine of a metadata node.

While access control is off, every client may do everything, so being able to connect proves nothing. The proof is the
private key of a metadata node, which lies on that node's own disk, readable for its owner only (ADR 0036). A process
that holds it connects as that node, and asks the leader as ``LOCAL_ADMIN``.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from cutwater.admin.access_calls import AccessCalls
from cutwater.admin.local_admin import ask_as_local_admin
from cutwater.core.requests import Request
from cutwater.errors import CutwaterError, InvalidArgument, Refused, Unavailable
from cutwater.protocol.access import METADATA_NODE
from cutwater.runtime.local_files import read_secret
from cutwater.types import ClusterId, MetadataNodeId
from cutwater.wire.addresses import is_loopback, parse_address
from cutwater.wire.client import connect
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint
from cutwater.wire.identity.server_keys import ProvenServer, ServerKey

A = TypeVar("A")

CONNECT_MS_MAX = 2_000
ASK_MS_MAX = 10_000


def read_server_key(path: Path) -> ServerKey:
    """Read the private key of a metadata node. Other users must not be able to read it."""
    data = read_secret(path, "the private key of a metadata node", "see docs/operating.md")
    if data is None:
        raise InvalidArgument(
            f"{path}, the private key of a metadata node, does not exist: it lies on the machine of that node, beside "
            "its SQLite file as FILE.key, or where --key-file of `cutwater mr start` says"
        )
    return ServerKey.from_pem(data, path)


async def proven_admin(
    addresses: Sequence[str], key: ServerKey, tls: ssl.SSLContext | None, *, timeout_ms: int = ASK_MS_MAX
) -> AccessCalls:
    """Return calls that are made as the metadata node with this key, which is one of those at ``addresses``."""
    if tls is None and not all(is_loopback(parse_address(address)[0]) for address in addresses):
        raise Refused(
            f"the cluster at {', '.join(addresses)} is not on this machine alone and is used without TLS, so tokens "
            "would travel in the clear: start its servers with certificates first (docs/operating.md, 'Certificates'), "
            "and give --tls-ca, and --tls-certificate and --tls-key of the metadata node, here"
        )
    cluster, node = await _own_node(addresses, key, tls)

    async def ask(request: Request, expected: type[A], *, idempotent: bool = True) -> A:
        answer = await ask_as_local_admin(addresses, cluster, node, key, request, tls=tls, timeout_ms=timeout_ms)
        if not isinstance(answer, expected):
            raise Unavailable(f"{type(request).__name__} got {type(answer).__name__}: upgrade the servers")
        return answer

    return AccessCalls(ask)


async def _own_node(
    addresses: Sequence[str], key: ServerKey, tls: ssl.SSLContext | None
) -> tuple[ClusterId, MetadataNodeId]:
    """Find the metadata node that has this key: each proves which key it holds."""
    troubles = []
    for address in addresses:
        try:
            cluster, server = await _proved(address, tls)
        except CutwaterError as error:
            troubles.append(error.message)
            continue
        if server is not None and (server.kind, server.key) == (METADATA_NODE, key.public):
            return cluster, MetadataNodeId(int(server.name))
        troubles.append(f"{address} is {server}, which has another key" if server else f"{address} proves no key")
    raise Refused(
        "no metadata node at these addresses has this private key, so it proves nothing: name the key file of one of "
        f"them, from its own disk ({'; '.join(troubles)})"
    )


async def _proved(address: str, tls: ssl.SSLContext | None) -> tuple[ClusterId, ProvenServer | None]:
    host, port = parse_address(address)
    connection = await connect(
        Endpoint(ANY_CLUSTER, "admin"),
        host,
        port,
        timeout_ms=CONNECT_MS_MAX,
        tls=tls,
        server_hostname=host if tls is not None else None,
        expect=lambda server: None,
    )
    connection.abort()
    assert connection.peer is not None
    return connection.peer.cluster, connection.peer.server
