"""Operations on a cluster, as calls. Each is durable when it returns, or raises and says why not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from cutwater.admin.access_calls import AccessCalls
from cutwater.admin.damage import Damage, find_damage
from cutwater.admin.jobs import JobCalls
from cutwater.client.cluster.credentials import ANYONE, Access, admin_connection, metadata_node, storage_node
from cutwater.client.cluster.metadata_client import SCHEME, Repository, no_such_topic
from cutwater.core import requests as r
from cutwater.errors import CutwaterError, NotFound, Refused, Unavailable
from cutwater.protocol import metadata_api, storage_api
from cutwater.protocol.methods import Method
from cutwater.runtime.deadlines import Deadline
from cutwater.types import (
    GLSN,
    BatchNumber,
    DecisionIndex,
    LogStreamId,
    MetadataNodeId,
    RunId,
    StorageNodeId,
)
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint
from cutwater.wire.identity.server_certificates import Wants

if TYPE_CHECKING:
    from cutwater.client.read.range_reader import Ranges

A = TypeVar("A")

TIMEOUT_MS = 10_000
POLL_SECONDS = 0.05
NODE_MS_MAX = 2_000
"""How long one storage node may take to say what is staged there."""
LOOK_MS_MAX = 1_000
"""How long one metadata node may take to describe itself."""


StorageNodeStatus = storage_api.NodeSelfDescription
"""A storage node's description of itself."""


class MetadataStatus(Struct, frozen=True):
    """A node of the metadata repository; without a number if it does not answer."""

    address: str
    node: MetadataNodeId | None = None
    leads: bool = False
    trouble: str = ""


class NodeShare(Struct, frozen=True):
    """The staged parts that one storage node holds; ``trouble`` if it did not answer."""

    node: StorageNodeId
    parts: int = 0
    bytes: int = 0
    trouble: str = ""


class RunStatus(r.RunDescription, frozen=True):
    """A run and its staged parts. ``staged`` counts every copy."""

    staged: tuple[NodeShare, ...] = ()

    @property
    def staged_bytes(self) -> int:
        return sum(share.bytes for share in self.staged)


class Admin:
    """Talks to the metadata repository at any of these addresses; ``async with`` closes it."""

    def __init__(self, servers: tuple[str, ...], *, timeout_ms: int = TIMEOUT_MS, access: Access = ANYONE) -> None:
        self._repository = Repository(Endpoint(ANY_CLUSTER, "admin"), servers, access)
        self._timeout_ms, self.access = timeout_ms, access
        self.control = AccessCalls(self._ask)
        """Calls about access control."""
        self.jobs = JobCalls(self._repository.ask, timeout=timeout_ms / 1_000)
        """Calls about jobs and agents."""

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._repository.close()

    async def _ask(self, request: r.Request, expected: type[A], *, idempotent: bool = True) -> A:
        return await self._repository.ask(request, expected, timeout_ms=self._timeout_ms, idempotent=idempotent)

    # Reading the state.

    async def describe(self) -> r.Description:
        return await self._ask(r.DescribeRequest(), r.Description)

    async def catalog(self) -> r.Catalog:
        return await self._ask(r.CatalogRequest(), r.Catalog)

    async def events(self, after: int = 0) -> r.Events:
        """Return the events after this decision, as far back as they are known."""
        return await self._ask(r.EventsRequest(DecisionIndex(after)), r.Events)

    async def stream(self, stream: LogStreamId) -> r.StreamDescription:
        description = await self.describe()
        for found in description.streams:
            if found.stream == stream:
                return found
        known = ", ".join(str(found.stream) for found in description.streams) or "none"
        raise NotFound(f"there is no log stream {stream}; log streams: {known}")

    async def stream_with_damage(self, stream: LogStreamId) -> tuple[r.StreamDescription, tuple[Damage, ...]]:
        """Return a log stream, and the damage that storage nodes know in their replicas of it."""
        described = await self.stream(stream)
        found = await find_damage(await self.describe(), timeout_ms=self._timeout_ms, access=self.access)
        return described, tuple(damage for damage in found if damage.stream == stream)

    async def topic(self, name: str) -> tuple[r.TopicInfo, tuple[r.StreamDescription, ...]]:
        catalog, description = await self.catalog(), await self.describe()
        for found in catalog.topics:
            if found.name == name:
                return found, tuple(stream for stream in description.streams if stream.topic == name)
        raise no_such_topic(name, catalog)

    async def runs(self) -> tuple[RunStatus, ...]:
        return await _describe_runs(await self.describe(), self._timeout_ms, self.access)

    async def run(self, run: RunId) -> RunStatus:
        found = {status.run: status for status in await self.runs()}
        if run not in found:
            known = ", ".join(map(str, found)) or "none"
            raise NotFound(f"there is no run {run}, or it was forgotten; runs: {known}")
        return found[run]

    async def drop_run(self, run: RunId) -> tuple[r.GroupDescription, ...]:
        """End a run whose decided rows are lost permanently. Returns what will never be published."""
        lost = (await self.run(run)).unpublished
        await self._ask(r.DropRunRequest(run), r.Done, idempotent=False)
        return lost

    async def forget_output(self, name: str) -> r.OutputDescription:
        """Let new runs publish under a name as if nothing had been published under it. Returns what was published."""
        known = {output.name: output for output in (await self.describe()).outputs}
        await self._ask(r.ForgetOutputRequest(name), r.Done, idempotent=False)
        return known.get(name) or r.OutputDescription(name, RunId(0), BatchNumber(-1), GLSN(0), None, None)

    async def ranges(self) -> Ranges:
        """Return a reader of the log. The caller closes it."""
        # Imports Arrow, which most commands do not need.
        from cutwater.client.read.range_reader import Ranges  # noqa: PLC0415

        servers = SCHEME + ",".join(self._repository.addresses)
        return await Ranges.connect(servers, self.access, timeout=self._timeout_ms / 1_000)

    # Metadata nodes.

    async def status(self) -> tuple[r.Description, tuple[MetadataStatus, ...]]:
        """Return the cluster as the leader sees it, and the metadata nodes, of which one is the leader."""
        return await self.describe(), await self.metadata_nodes()

    async def metadata_nodes(self) -> tuple[MetadataStatus, ...]:
        """Return what the metadata nodes at the known addresses say of themselves."""
        return tuple(await asyncio.gather(*map(self._metadata_node, self._repository.addresses)))

    async def _metadata_node(self, address: str) -> MetadataStatus:
        timeout_ms = min(self._timeout_ms, LOOK_MS_MAX)
        try:
            wants = metadata_node(address)
            told = await _ask_node(address, metadata_api.WHO_LEADS, wants, timeout_ms=timeout_ms, access=self.access)
        except CutwaterError as error:
            return MetadataStatus(address, trouble=error.message)
        return MetadataStatus(address, told.node, told.leader_epoch > 0 and told.node == told.leader)

    # Storage nodes.

    async def add_storage_node(self, address: str) -> StorageNodeId:
        """Add the storage node that listens there to the cluster; return its number when it may be used."""
        found = await describe_storage_node(address, timeout_ms=self._timeout_ms, access=self.access)
        description = await self.describe()
        if found.cluster != description.cluster:
            raise Refused(
                f"the storage node at {address} was started for cluster {found.cluster}, and this is cluster "
                f"{description.cluster}: start it with the other --cluster-id"
            )
        if found.cluster_key not in (None, description.cluster_key):
            raise Refused(
                f"the storage node at {address} holds data of another cluster that also has the id {found.cluster}: "
                "start it with other volumes"
            )
        paths = tuple(volume.path for volume in found.volumes)
        await self._ask(r.AddNodeRequest(found.node, found.address, "", paths), r.Done)
        await self._until_alive(found.node)
        return found.node

    async def _until_alive(self, node: StorageNodeId) -> None:
        """Wait until a node reports. It learns within a second that it belongs to the cluster."""
        deadline = Deadline(self._timeout_ms / 1_000)
        while not deadline.is_over:
            description = await self.describe()
            if any(found.node == node and found.is_alive for found in description.nodes):
                return
            await asyncio.sleep(POLL_SECONDS)
        raise Unavailable(f"storage node {node} was added but does not report: check its --metadata")

    async def remove_storage_node(self, node: StorageNodeId) -> None:
        await self._ask(r.RemoveNodeRequest(node), r.Done, idempotent=False)

    async def add_volume(self, node: StorageNodeId, path: str) -> storage_api.NodeSelfDescription:
        """Let a running storage node use one more directory of its machine, now and after a restart."""
        return await self._change_volumes(metadata_api.ChangeVolumes(node, path))

    async def remove_volume(self, node: StorageNodeId, path: str) -> storage_api.NodeSelfDescription:
        """Remove one volume from a running storage node. Refused while the volume holds any data."""
        return await self._change_volumes(metadata_api.ChangeVolumes(node, path, is_removal=True))

    async def _change_volumes(self, change: metadata_api.ChangeVolumes) -> storage_api.NodeSelfDescription:
        """Ask a metadata node, which asks the storage node: storage nodes accept this only from metadata nodes."""
        description = await self.describe()
        if all(found.node != change.node for found in description.nodes):
            known = ", ".join(str(found.node) for found in description.nodes) or "none"
            raise NotFound(f"there is no storage node {change.node}; storage nodes: {known}")
        return await self._repository.call(metadata_api.CHANGE_VOLUMES, change, timeout_ms=self._timeout_ms)

    # Topics.

    async def delete_topic(self, name: str) -> None:
        await self._ask(r.DeleteTopicRequest(name), r.Done, idempotent=False)

    async def change_replication(self, name: str, replication: int) -> None:
        """Set how many copies of its records a topic has. Copies are added and removed later, one after another."""
        await self._ask(r.ChangeTopicRequest(name, replication=replication), r.Done)

    async def trim(self, name: str, before: GLSN) -> None:
        await self._ask(r.TrimRequest(name, before), r.Done)

    # Log streams.

    async def add_stream(self, topic: str) -> LogStreamId:
        created = await self._ask(r.AddStreamRequest(topic), r.Created, idempotent=False)
        await self._until_open(created.streams)
        return created.streams[0]

    async def _until_open(self, streams: tuple[LogStreamId, ...]) -> None:
        deadline = Deadline(self._timeout_ms / 1_000)
        while True:
            catalog = await self.catalog()
            closed = [s.stream for s in catalog.streams if s.stream in streams and not s.is_open]
            if not closed:
                return
            if deadline.is_over:
                raise Unavailable(f"log streams {closed} were created but do not take appends yet")
            await asyncio.sleep(POLL_SECONDS)

    async def seal(self, stream: LogStreamId) -> r.SealedAt:
        """Stop appends until ``unseal``."""
        return await self._ask(r.SealRequest(stream), r.SealedAt)

    async def finalize(self, stream: LogStreamId) -> r.SealedAt:
        """Stop appends permanently. Repair opens another log stream in its place."""
        return await self._ask(r.SealRequest(stream, final=True), r.SealedAt)

    async def unseal(self, stream: LogStreamId) -> None:
        await self._ask(r.UnsealRequest(stream), r.Done)
        await self._until_open((stream,))

    async def sync(self, stream: LogStreamId, node: StorageNodeId) -> None:
        """Let a replica that does not count learn from a peer at once."""
        await self._ask(r.LearnRequest(stream, node), r.Done)

    async def replace_replica(self, stream: LogStreamId, old: StorageNodeId, new: StorageNodeId) -> None:
        """Move a replica. Allowed only while the log stream is sealed and another replica holds every committed
        record. A complete replica stays until the new one is complete too."""
        await self._ask(r.ReplaceRequest(stream, old, new), r.Done, idempotent=False)


async def describe_storage_node(
    address: str, *, timeout_ms: int = TIMEOUT_MS, access: Access = ANYONE
) -> storage_api.NodeSelfDescription:
    """Return a storage node's description of itself, whether or not it belongs to a cluster."""
    wants = storage_node(address)
    return await _ask_node(address, storage_api.DESCRIBE, wants, timeout_ms=timeout_ms, access=access)


async def _ask_node(address: str, method: Method[None, A], wants: Wants, *, timeout_ms: int, access: Access) -> A:
    async with admin_connection(address, access, wants=wants, timeout_ms=timeout_ms) as connection:
        return (await connection.call(method, None, timeout_ms=timeout_ms)).value


async def _describe_runs(description: r.Description, timeout_ms: int, access: Access) -> tuple[RunStatus, ...]:
    """Return all known runs, the newest last. Storage nodes are asked at the same time, with a shorter time limit than
    the metadata repository."""
    node_ms = min(timeout_ms, NODE_MS_MAX)
    found = await asyncio.gather(*(_staged_on(node, node_ms, access) for node in description.nodes))
    shares = list(zip(description.nodes, found, strict=True))
    return tuple(_status(run, shares) for run in sorted(description.runs, key=lambda run: run.run))


async def _staged_on(
    node: r.NodeDescription, timeout_ms: int, access: Access
) -> tuple[storage_api.StagedInfo, ...] | str:
    try:
        wants = storage_node(node.address, node.node)
        return await _ask_node(node.address, storage_api.STAGED, wants, timeout_ms=timeout_ms, access=access)
    except CutwaterError as error:
        return error.message


def _status(
    run: r.RunDescription, shares: Sequence[tuple[r.NodeDescription, tuple[storage_api.StagedInfo, ...] | str]]
) -> RunStatus:
    staged = []
    for node, found in shares:
        if isinstance(found, str):
            staged.append(NodeShare(node.node, trouble=found))
            continue
        own = [info for info in found if info.run == run.run]
        if own:
            staged.append(NodeShare(node.node, sum(info.parts for info in own), sum(info.bytes for info in own)))
    return RunStatus(**asdict(run), staged=tuple(staged))
