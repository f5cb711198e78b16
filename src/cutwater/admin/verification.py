"""Every replica of a cluster, checked by the storage node that holds it: checksums of everything that is on disk.

What is found damaged is repaired by the node from a peer, if one has an intact copy; it was never served meanwhile.
"""

from __future__ import annotations

import asyncio

from msgspec import Struct

from cutwater.client.access import ANYONE, Access, open_connection
from cutwater.core.requests import Description, NodeDescription
from cutwater.errors import CutwaterError
from cutwater.types import LogStreamId, StorageNodeId
from cutwater.wire.connection import Connection
from cutwater.wire.handshake import ANY_CLUSTER, Endpoint
from cutwater.wire.storage_api import STATUS, VERIFY, VERIFY_STAGED

CONNECT_MS_MAX = 5_000


class Finding(Struct, frozen=True):
    """Something that is wrong with a replica. Without ``stream``, it is about the storage node as a whole; without
    ``node``, about what the log stream holds, wherever that is stored. ``is_damage``: it was looked at and is not as it
    should be; otherwise it could not be looked at."""

    node: StorageNodeId | None
    stream: LogStreamId | None
    where: str
    what: str
    is_damage: bool = True


class Verification(Struct, frozen=True):
    replicas: int
    """How many were looked at."""
    findings: tuple[Finding, ...]
    groups: int = 0
    """How many groups of runs were held against what was decided, see ``admin.published``."""


async def verify(description: Description, *, timeout_ms: int, access: Access = ANYONE) -> Verification:
    """All storage nodes at the same time, each replica by replica; ``timeout_ms`` is for one replica."""
    checked = await asyncio.gather(*(_verify_node(node, timeout_ms, access) for node in description.nodes))
    findings = [finding for part in checked for finding in part.findings]
    return Verification(sum(part.replicas for part in checked), tuple(findings))


async def _verify_node(node: NodeDescription, timeout_ms: int, access: Access) -> Verification:
    findings: list[Finding] = []
    replicas = 0
    try:
        endpoint = Endpoint(ANY_CLUSTER, "admin")
        connection = await open_connection(endpoint, node.address, access, timeout_ms=min(timeout_ms, CONNECT_MS_MAX))
    except CutwaterError as error:
        return Verification(0, (_unseen(node, None, error),))
    try:
        status = (await connection.call(STATUS, None, timeout_ms=timeout_ms)).value
        for stream in status.unreadable:
            findings.append(Finding(node.node, stream, "", "its files cannot be opened; it waits for a peer"))
        for replica in status.replicas:
            if not replica.trusted:
                findings.append(
                    Finding(
                        node.node, replica.stream, "", "its data is not complete; it waits for a peer to learn from"
                    )
                )
            found = await _verify_replica(connection, node, replica.stream, timeout_ms)
            findings += found
            replicas += not any(not finding.is_damage for finding in found)
        staged = (await connection.call(VERIFY_STAGED, None, timeout_ms=timeout_ms)).value
        findings += [Finding(node.node, None, finding.where, finding.what) for finding in staged]
    except CutwaterError as error:
        findings.append(_unseen(node, None, error))
    finally:
        connection.abort()
    return Verification(replicas, tuple(findings))


async def _verify_replica(
    connection: Connection, node: NodeDescription, stream: LogStreamId, timeout_ms: int
) -> list[Finding]:
    try:
        found = (await connection.call(VERIFY, stream, timeout_ms=timeout_ms)).value
    except CutwaterError as error:
        return [_unseen(node, stream, error)]
    return [Finding(node.node, finding.stream, finding.where, finding.what) for finding in found]


def _unseen(node: NodeDescription, stream: LogStreamId | None, error: CutwaterError) -> Finding:
    return Finding(node.node, stream, node.address, f"could not be verified: {error.message}", is_damage=False)
