"""Changes access control with a metadata node's own private key, from its disk: while access control is off, nothing
else may change it (ADR 0050, ADR 0052).

The caller proves to be that metadata node, and asks as ``LOCAL_ADMIN``. While access control is on, that principal has
no rights.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

from cutwater.core.access.principals import LOCAL_ADMIN
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.requests import Answer, Request
from cutwater.errors import CutwaterError, NotLeader
from cutwater.protocol import metadata_api as api
from cutwater.protocol.access import METADATA_NODE
from cutwater.protocol.errors import ConnectionLost, Unproven
from cutwater.runtime import system
from cutwater.types import ClusterId, MetadataNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ProvenServer, ServerKey

RETRY_SECONDS = 0.1
CONNECT_MS_MAX = 2_000


async def ask_as_local_admin(
    addresses: Sequence[str],
    cluster: ClusterId,
    node: MetadataNodeId,
    key: ServerKey,
    request: Request,
    *,
    tls: ssl.SSLContext | None = None,
    timeout_ms: int = 10_000,
) -> Answer:
    """Ask the leader, which is at one of these addresses, as the holder of this metadata node's key."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1_000
    endpoint = Endpoint(cluster, METADATA_NODE, str(node), key=key)
    while True:
        trouble: CutwaterError = NotLeader("the metadata repository has no leader now: try again")
        for address in addresses:
            try:
                return await _ask(endpoint, address, request, tls, max(1, int((deadline - loop.time()) * 1_000)))
            except NotLeader as error:
                trouble = error
            except ConnectionLost as error:
                if error.outcome_unknown:
                    raise
                trouble = error
        if loop.time() + RETRY_SECONDS > deadline:
            raise trouble
        await asyncio.sleep(RETRY_SECONDS)


async def _ask(
    endpoint: Endpoint, address: str, request: Request, tls: ssl.SSLContext | None, timeout_ms: int
) -> Answer:
    host, port = parse_address(address)
    connection = await connect(
        endpoint,
        host,
        port,
        timeout_ms=min(timeout_ms, CONNECT_MS_MAX),
        tls=tls,
        server_hostname=host if tls is not None else None,
        expect=_expect_metadata,
    )
    try:
        origin = RequestOrigin(LOCAL_ADMIN, system.token_hex(8))
        return (await connection.call(api.ASK_LEADER_AS, api.RequestOf(request, origin), timeout_ms=timeout_ms)).value
    finally:
        connection.abort()


def _expect_metadata(server: ProvenServer | None) -> None:
    if server is None or server.kind != METADATA_NODE:
        raise Unproven("the server has not proved to be a metadata node: check the address")
