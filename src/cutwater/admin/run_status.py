"""The status of runs for operators: what they have published, what is staged for them, what is held up and why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import asdict

from cutwater.client.cluster.credentials import ANYONE, Access, admin_connection
from cutwater.core.requests import Description, NodeDescription, RunDescription
from cutwater.errors import CutwaterError
from cutwater.protocol.storage_api import STAGED, StagedInfo
from cutwater.types import StorageNodeId

NODE_MS_MAX = 2_000


class NodeShare(Struct, frozen=True):
    """The staged parts that one storage node holds; ``trouble`` if it did not answer."""

    node: StorageNodeId
    parts: int = 0
    bytes: int = 0
    trouble: str = ""


class RunStatus(RunDescription, frozen=True):
    """A run and its staged parts. ``staged`` counts every copy."""

    staged: tuple[NodeShare, ...] = ()

    @property
    def staged_bytes(self) -> int:
        return sum(share.bytes for share in self.staged)


async def describe_runs(description: Description, *, timeout_ms: int, access: Access = ANYONE) -> tuple[RunStatus, ...]:
    """Return all known runs, the newest last. Storage nodes are asked at the same time, with a shorter time limit than
    the metadata repository."""
    node_ms = min(timeout_ms, NODE_MS_MAX)
    found = await asyncio.gather(*(_staged_on(node, node_ms, access) for node in description.nodes))
    shares = list(zip(description.nodes, found, strict=True))
    return tuple(_status(run, shares) for run in sorted(description.runs, key=lambda run: run.run))


async def _staged_on(node: NodeDescription, timeout_ms: int, access: Access) -> tuple[StagedInfo, ...] | str:
    try:
        async with admin_connection(node.address, access, timeout_ms=timeout_ms) as connection:
            return (await connection.call(STAGED, None, timeout_ms=timeout_ms)).value
    except CutwaterError as error:
        return error.message


def _status(run: RunDescription, shares: Sequence[tuple[NodeDescription, tuple[StagedInfo, ...] | str]]) -> RunStatus:
    staged = []
    for node, found in shares:
        if isinstance(found, str):
            staged.append(NodeShare(node.node, trouble=found))
            continue
        own = [info for info in found if info.run == run.run]
        if own:
            staged.append(NodeShare(node.node, sum(info.parts for info in own), sum(info.bytes for info in own)))
    return RunStatus(**asdict(run), staged=tuple(staged))
