"""Describes known damage of storage nodes: the records or file, whether another copy exists, and the way out.

Replicas that the cluster no longer counts are left over from a node that was replaced. They are safe to remove, and
errors in them are not reported as faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from msgspec import Struct

from cutwater.client.cluster.credentials import ANYONE, Access, admin_connection, storage_node
from cutwater.core.requests import Description, NodeDescription
from cutwater.core.text import counted
from cutwater.errors import CutwaterError
from cutwater.protocol.storage_api import STATUS, DamageStatus, NodeStatus, ReplicaStatus
from cutwater.types import GLSN, LogStreamId, ReplicaState, StorageNodeId

CONNECT_MS_MAX = 1_000
TOLD_MAX = 5


class Damage(Struct, frozen=True):
    """The faults of one replica, one line each."""

    node: StorageNodeId
    stream: LogStreamId
    lines: tuple[str, ...]


async def find_damage(description: Description, *, timeout_ms: int, access: Access = ANYONE) -> list[Damage]:
    """Return the damage of all replicas that count, on nodes that are alive and answer; other nodes are reported
    elsewhere."""
    alive = [node for node in description.nodes if node.is_alive]
    found = await asyncio.gather(*(_ask(node, timeout_ms, access) for node in alive))
    return [damage for status in found if status is not None for damage in _of_node(status, description)]


def replicas_of(description: Description) -> set[tuple[StorageNodeId, LogStreamId]]:
    """Return the replicas that count."""
    return {(node, stream.stream) for stream in description.streams for node in stream.replicas}


def holders_of(description: Description, stream: LogStreamId) -> tuple[StorageNodeId, ...]:
    """Return the storage nodes with a replica that counts."""
    return next((found.replicas for found in description.streams if found.stream == stream), ())


def no_copy(description: Description, stream: LogStreamId, place: str = "", next_glsn: GLSN | None = None) -> str:
    """Return the ways out for damage of a log stream that no other storage node holds, the cheapest first. ``place``:
    the option that commands about this log need. ``next_glsn``: the first position after the damage, if known."""
    topic = next((found.topic for found in description.streams if found.stream == stream), "")
    where = f" {place}" if place else ""
    behind = ""
    if next_glsn is not None:
        behind = (
            f"let readers start behind it, `cutwater subscribe {topic} --start {next_glsn}{where}`; give up all "
            f"records before that, `cutwater topic trim {topic} --before {next_glsn}{where}`; "
        )
    return (
        "no other storage node holds a copy: stop the process that has the files open, restore the damaged one from a "
        f"backup and start again; or {behind}{'or ' if behind else ''}give up all records of topic {topic!r}, "
        f"`cutwater topic delete {topic}{where}`"
    )


async def _ask(node: NodeDescription, timeout_ms: int, access: Access) -> NodeStatus | None:
    try:
        wants, connect_ms = storage_node(node.address, node.node), min(timeout_ms, CONNECT_MS_MAX)
        async with admin_connection(node.address, access, wants=wants, timeout_ms=connect_ms) as connection:
            return (await connection.call(STATUS, None, timeout_ms=timeout_ms)).value
    except CutwaterError:
        return None


def _of_node(status: NodeStatus, description: Description) -> Iterator[Damage]:
    untrusted = {replica.stream: replica for replica in status.replicas if not replica.trusted}
    concerned = {*status.unreadable, *untrusted, *(damage.stream for damage in status.damage)}
    for described in sorted(description.streams, key=lambda described: described.stream):
        stream, is_only = described.stream, described.replicas == (status.node,)
        if stream not in concerned or status.node not in described.replicas:
            continue
        lines = []
        if stream in status.unreadable:
            happens = "" if is_only else "; it is learned anew from a peer"
            why = f" ({status.problems[stream]})" if stream in status.problems else ""
            lines.append(f"its files cannot be opened{why}{happens}")
        if stream in untrusted:
            lines.append(_untrusted(untrusted[stream], is_only))
        places = [damage for damage in status.damage if damage.stream == stream]
        lines += [_place(damage, is_only) for damage in places[:TOLD_MAX]]
        if len(places) > TOLD_MAX:
            lines.append(f"and {counted(len(places) - TOLD_MAX, 'more damaged place')}")
        if is_only:
            lines.append(no_copy(description, stream))
        yield Damage(status.node, stream, tuple(lines))


def _untrusted(replica: ReplicaStatus, is_only_copy: bool) -> str:
    if replica.state is ReplicaState.LEARNING and replica.source is not None:
        happens = f"it learns from storage node {replica.source}"
    elif is_only_copy:
        happens = "it serves none of it, because it cannot know whether that is all"
    else:
        happens = "it waits for a peer that has everything, to learn from it"
    kept = f"it keeps what is committed, up to LLSN {replica.committed_end}"
    return f"it cannot be trusted ({replica.problem}); {kept}, and {happens}"


def _place(damage: DamageStatus, is_only_copy: bool) -> str:
    what = damage.what
    if damage.first_llsn:
        what = f"LLSN {damage.first_llsn} to {damage.last_llsn} cannot be read ({damage.what})"
    if is_only_copy:
        return what
    if damage.trouble:
        return f"{what}; a repair failed and is tried again: {damage.trouble}"
    return f"{what}; an intact copy is fetched from a peer"
