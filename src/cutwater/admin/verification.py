"""Lets storage nodes check every replica of a cluster: the checksums of everything on disk.

A node repairs damage from a peer, if one has an intact copy, and never serves damaged entries meanwhile.
"""

from __future__ import annotations

import asyncio

from msgspec import Struct
from msgspec.structs import replace

from cutwater.admin.damage import holders_of, no_copy, replicas_of
from cutwater.client.cluster.credentials import ANYONE, Access, admin_connection, storage_node
from cutwater.core.access.rights import CLUSTER, Right
from cutwater.core.requests import Description, NodeDescription
from cutwater.core.text import nodes_in_words
from cutwater.errors import CutwaterError, PermissionDenied
from cutwater.protocol.storage_api import STATUS, VERIFY, VERIFY_STAGED
from cutwater.types import GLSN, LLSN, LogStreamId, StorageNodeId
from cutwater.wire.connection import Connection

CONNECT_MS_MAX = 5_000


class Finding(Struct, frozen=True):
    """An error in a replica. Without ``stream``, it concerns the storage node as a whole; without ``node``, the content
    of the log stream, wherever it is stored. ``is_damage``: the check has found an error; otherwise the check could not
    be made."""

    node: StorageNodeId | None
    stream: LogStreamId | None
    where: str
    what: str
    is_damage: bool = True
    is_content: bool = False
    """The bytes are intact, but hold no records of the topic; older versions accepted such batches."""
    first_llsn: LLSN | None = None
    last_llsn: LLSN | None = None
    """The entries concerned, if known."""
    next_glsn: GLSN | None = None
    """The first position after these entries, if they are committed."""
    way_out: str = ""
    """Whether an intact copy exists, and what happens or is to be done."""


class Leftover(Struct, frozen=True):
    """A replica that the cluster no longer counts, because other nodes hold the log stream: safe to remove."""

    node: StorageNodeId
    stream: LogStreamId


class Verification(Struct, frozen=True):
    replicas: int
    """How many replicas were checked."""
    findings: tuple[Finding, ...]
    groups: int = 0
    """How many groups of runs were compared with the decisions, see ``admin.publish_audit``."""
    leftovers: tuple[Leftover, ...] = ()
    """Replicas that were not checked, because they do not count."""


def not_verified(principal: str) -> PermissionDenied:
    """Return the error for a principal that may not see all storage nodes: nothing would be found in the others."""
    right, resource = str(Right.CLUSTER_OPERATE), str(CLUSTER)
    return PermissionDenied(
        f"{principal} lacks the right {right} on {resource}, so it does not see all storage nodes, and nothing was "
        "verified: use the token of an administrator or an operator",
        principal=principal,
        right=right,
        resource=resource,
    )


async def verify(
    description: Description, *, timeout_ms: int, access: Access = ANYONE, place: str = ""
) -> Verification:
    """Verify all storage nodes at the same time, each replica by replica; ``timeout_ms`` applies to one replica.
    ``place``: the option that commands about this log need, such as ``--path DIR``."""
    counted = replicas_of(description)
    checked = await asyncio.gather(*(_verify_node(node, counted, timeout_ms, access) for node in description.nodes))
    found = [finding for part in checked for finding in part.findings]
    # All replicas were checked, so it is known which of them have an intact copy.
    findings = [replace(finding, way_out=_way_out(description, finding, found, place)) for finding in found]
    leftovers = [leftover for part in checked for leftover in part.leftovers]
    return Verification(sum(part.replicas for part in checked), tuple(findings), leftovers=tuple(leftovers))


def _way_out(description: Description, finding: Finding, findings: list[Finding], place: str) -> str:
    if finding.stream is None or not finding.is_damage:
        return ""
    if finding.is_content:
        return 'readers with on_malformed="skip" pass over it'
    others = [node for node in holders_of(description, finding.stream) if node != finding.node]
    if not others and finding.first_llsn is None and finding.where:
        lost = no_copy(description, finding.stream, place)
        return f"headers and index points are rebuilt; of anything else, {lost}"
    if not others:
        return no_copy(description, finding.stream, place, finding.next_glsn)
    intact = [node for node in others if not any(_spoils(other, node, finding) for other in findings)]
    if intact:
        return f"{nodes_in_words(intact)} {'have' if len(intact) > 1 else 'has'} an intact copy: it is repaired from it"
    return (
        f"{nodes_in_words(others)} should have a copy, but no intact one was found: start nodes that do not answer, "
        "or restore the file from a backup"
    )


def _spoils(other: Finding, node: StorageNodeId, finding: Finding) -> bool:
    """Return whether this other finding means that the node has no intact copy of the damaged entries."""
    if other.node != node or other.stream not in (None, finding.stream) or other.is_content:
        return False
    if other.stream is None:
        return not other.is_damage
    if finding.first_llsn is None or other.first_llsn is None:
        return True
    last, other_last = finding.last_llsn or finding.first_llsn, other.last_llsn or other.first_llsn
    return other.first_llsn <= last and finding.first_llsn <= other_last


async def _verify_node(
    node: NodeDescription, counted: set[tuple[StorageNodeId, LogStreamId]], timeout_ms: int, access: Access
) -> Verification:
    findings: list[Finding] = []
    leftovers: list[Leftover] = []
    replicas = 0
    try:
        wants, connect_ms = storage_node(node.address, node.node), min(timeout_ms, CONNECT_MS_MAX)
        async with admin_connection(node.address, access, wants=wants, timeout_ms=connect_ms) as connection:
            status = (await connection.call(STATUS, None, timeout_ms=timeout_ms)).value
            there = {*status.unreadable, *status.leftovers, *(replica.stream for replica in status.replicas)}
            leftovers = [Leftover(node.node, stream) for stream in sorted(there) if (node.node, stream) not in counted]
            ignored = {leftover.stream for leftover in leftovers}
            for stream in sorted(set(status.unreadable) - ignored):
                why = status.problems.get(stream, "it does not say why")
                findings.append(Finding(node.node, stream, "", f"its files cannot be opened: {why}"))
            for replica in status.replicas:
                if replica.stream in ignored:
                    continue
                if not replica.trusted:
                    what = f"it cannot be trusted to be complete: {replica.problem}"
                    findings.append(Finding(node.node, replica.stream, "", what))
                found = await _verify_replica(connection, node, replica.stream, timeout_ms)
                findings += found
                replicas += all(finding.is_damage for finding in found)
            staged = (await connection.call(VERIFY_STAGED, None, timeout_ms=timeout_ms)).value
            findings += [Finding(node.node, None, finding.where, finding.what) for finding in staged]
    except CutwaterError as error:
        findings.append(_unseen(node, None, error))
    return Verification(replicas, tuple(findings), leftovers=tuple(leftovers))


async def _verify_replica(
    connection: Connection, node: NodeDescription, stream: LogStreamId, timeout_ms: int
) -> list[Finding]:
    try:
        found = (await connection.call(VERIFY, stream, timeout_ms=timeout_ms)).value
    except CutwaterError as error:
        return [_unseen(node, stream, error)]
    return [
        Finding(node.node, f.stream, f.where, f.what, True, f.is_content, f.first_llsn, f.last_llsn, f.next_glsn)
        for f in found
    ]


def _unseen(node: NodeDescription, stream: LogStreamId | None, error: CutwaterError) -> Finding:
    return Finding(node.node, stream, node.address, f"could not be verified: {error.message}", is_damage=False)
