"""The storage node on the network: answers clients and peers, and keeps connections to the servers it talks to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, structs

from cutwater.access.client_credentials import ClientCredentials
from cutwater.core.audit.audit_requests import AUDIT_PRODUCER
from cutwater.core.messages import (
    CatchUp,
    CommitMessage,
    LeaderMessage,
    Replicate,
    SyncRequest,
    UnsealReplica,
)
from cutwater.core.producer_session import Fate
from cutwater.core.requests import Catalog, StagedAnswer
from cutwater.errors import CutwaterError, Refused, ResourceExhausted
from cutwater.protocol import scan_api
from cutwater.protocol import storage_api as api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.method_access import STORAGE_NODE_ACCESS
from cutwater.runtime.threads import to_the_end
from cutwater.storage.part_files import StagingFiles
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.disk_space import RESERVE_BYTES, RoomWatch
from cutwater.storagenode.memory_budget import BUDGET_BYTES, MemoryBudget, release_unused
from cutwater.storagenode.metadata_links import MetadataLinks
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.node_access import NodeNames, StorageAccess
from cutwater.storagenode.peer_connections import Peers
from cutwater.storagenode.publish.part_store import ASK_SECONDS, STAGED_BYTES_MAX, PartStore
from cutwater.storagenode.publish.publishing import Publishing
from cutwater.storagenode.repair.damage_repair import Mender, damage_of, verified
from cutwater.storagenode.repair.scrubbing import Scrubber, ScrubOptions
from cutwater.storagenode.repair.stuck_replicas import StuckReplicas, stuck_replicas
from cutwater.storagenode.repair.syncing import Syncing
from cutwater.storagenode.replica.replica_stores import VolumeStores
from cutwater.storagenode.report_writer import BASE_REPLICAS_MIN
from cutwater.storagenode.serving.push_reads import Following
from cutwater.storagenode.serving.reading import Reading
from cutwater.storagenode.serving.scanning import Scanning
from cutwater.storagenode.validation.content_checks import ContentChecks
from cutwater.storagenode.validation.entry_validation import check_batch
from cutwater.storagenode.validation.topic_forms import KnownTopics
from cutwater.types import Entry, Incarnation, LogStreamId, MetadataNodeId, Revision, StorageNodeId
from cutwater.wire.addresses import format_address
from cutwater.wire.calls.handlers import LATER, Later, Methods
from cutwater.wire.calls.incoming_calls import Call, Notification
from cutwater.wire.connection import Connection
from cutwater.wire.identity.auth import Authenticator
from cutwater.wire.identity.handshake import Endpoint, Peer
from cutwater.wire.identity.server_book import ServerBook
from cutwater.wire.identity.server_keys import ServerKey, load_or_make
from cutwater.wire.identity.tls import Tls
from cutwater.wire.listen.gate import GateSnapshot
from cutwater.wire.listen.server import Listener, listen
from cutwater.wire.options import MIB, ListenerOptions, WireOptions

_log = logging.getLogger(__name__)

PEER_OPTIONS = WireOptions(send_bytes_max=512 * MIB)
"""More data may wait for peers than for clients: entries are sent as notices, and a refused one seals its log stream.
The limit on what heads accept (``node.APPEND_BYTES_MAX``) bounds what waits."""

STAGED_ASK_MS_MAX = 10_000
CATALOG_ASK_MS_MAX = 2_000
VERIFY_WAIT_SECONDS = 60.0
VERIFY_RETRY_MS = 1_000


class NodeOptions(Struct, frozen=True):
    """Addresses and limits of a storage node. ``advertise`` is the address that others are told, if it differs from the
    one that the node listens on."""

    host: str
    port: int
    metadata: tuple[str, ...]
    advertise: str = ""
    tls: Tls | None = None
    insecure: bool = False
    reserve_bytes: int = RESERVE_BYTES
    segments: SegmentOptions = SegmentOptions()
    staged_bytes_max: int = STAGED_BYTES_MAX
    """Limit of bytes that are staged here and not published yet."""
    staged_ask_seconds: float = ASK_SECONDS
    memory_bytes_max: int = BUDGET_BYTES
    """Memory for decompression, for all requests together."""
    is_nearby: bool = False
    """Servers and clients on the same event loop connect without a socket."""
    listener: ListenerOptions = ListenerOptions()
    scrub: ScrubOptions = ScrubOptions()
    authenticate: Authenticator | None = None
    """For a server without TLS. Connections from the same event loop need no credential."""
    may_wait_for_disk: bool = False
    """Whether the event loop may sync by itself. Must be False where work with deadlines shares the event loop."""
    base_replicas_min: int = BASE_REPLICAS_MIN
    """With at least this many replicas, the node reports only what has changed, if the leader can take that."""


class StorageNodeServer:
    """A storage node on the network. The volumes must be locked for it. ``fatal`` is set, with the reason, when the
    node cannot continue. ``key`` is read from the volumes by default. ``threads`` wait for disks; by default they are
    those of the event loop, which must then have no other work, since that work may in turn wait for this server."""

    def __init__(
        self,
        options: NodeOptions,
        volumes: NodeVolumes,
        *,
        threads: Executor | None = None,
        incarnation: Incarnation | None = None,
        key: ServerKey | None = None,
    ) -> None:
        self.options, self.volumes = options, volumes
        self._threads = threads
        self.fatal: asyncio.Future[CutwaterError] = asyncio.get_running_loop().create_future()
        self._key = key or load_or_make(volumes.server_key_files)
        self._book = ServerBook()
        self._servers_revision = Revision(0)
        """The revision of the catalog that the known keys and addresses of storage nodes come from."""
        self._book.note(METADATA_NODE, volumes.identity.metadata_keys)
        stores = VolumeStores(volumes, options.segments)
        self.node = StorageNode(
            volumes.identity.node,
            incarnation or volumes.next_incarnation(),
            self,
            stores,
            threads,
            options.base_replicas_min,
        )
        self.room = RoomWatch(
            lambda: volumes.volumes,
            options.reserve_bytes,
            self.node.set_state,
            lambda: self.node.backlog_bytes,
            self.node.in_thread,
        )
        self.take_room, self.disk_is_full = self.room.take, self.room.found_full
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self._metadata = MetadataLinks(self.node, volumes, self._book, self._spawn, self._joined, self._turned_away)
        self.tell_metadata = self._metadata.tell
        self._syncing = Syncing(self.node)
        self.memory = MemoryBudget(options.memory_bytes_max)
        self._verify_lock = asyncio.Lock()
        self.topics = KnownTopics(lambda request: self._metadata.ask(request, Catalog, timeout_ms=CATALOG_ASK_MS_MAX))
        name = f"checks of storage node {volumes.identity.node}"
        self.content = ContentChecks(self.topics, self.node.replicas, self.memory, name)
        staged_files = StagingFiles(volumes.staging, volumes.files)
        self.staging = PartStore(
            self.node,
            staged_files,
            self.room,
            self.topics,
            self.memory,
            options.staged_bytes_max,
        )
        names = NodeNames(self.topics, self.staging)
        self.access = StorageAccess(self.node, volumes, self._metadata, self._book, names, self._connections)
        self.staging.owner_of = self.access.owner_of
        quotas = self.access.control.quotas
        quotas.staged_by = lambda principal: self.staging.staged_by[principal]
        self.staging.room_to_stage, self.staging.check_quota = quotas.room_to_stage, quotas.check_staged
        self._methods = Methods(STORAGE_NODE_ACCESS, self._book, self.access.control)
        self._client_tls = options.tls.client if options.tls else None
        peer_endpoint = self._endpoint(PEER_OPTIONS)
        self.peers = Peers(peer_endpoint, self._client_tls, self._book, self.node.peer_lost, self._spawn)
        self._mender = Mender(self.node, self.peers, self._spawn)
        self.mend = self._mender.mend
        self.scrubber = Scrubber(self.node, options.scrub)
        self._publishing = Publishing(self.node, self.staging, staged_files, self.peers, self.room, self._spawn)
        self.publish, self.feed_group = self._publishing.publish, self._publishing.feed
        self._register(self._methods)

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.port)

    @property
    def address(self) -> str:
        """The address at which others reach this node."""
        return self.options.advertise or format_address(self.options.host, self.port)

    @property
    def gate(self) -> GateSnapshot | None:
        """The connections to this node, counted by kind."""
        return self._listener.gate.snapshot() if self._listener is not None else None

    @property
    def public_key(self) -> str:
        """The key with which others verify the identity of this storage node."""
        return self._key.public

    @property
    def metadata_joined(self) -> int:
        """How many metadata nodes know this node and get its reports now."""
        return self._metadata.joined

    @property
    def damage(self) -> tuple[api.DamageStatus, ...]:
        """Known damage of replicas, without leftovers of replaced ones."""
        return tuple(damage for damage in self._mender.damage if damage.stream not in self.node.leftovers)

    @property
    def stuck(self) -> dict[LogStreamId, str]:
        """Replicas that cannot serve and are not being repaired, and why."""
        return stuck_replicas(self.node, self.damage)

    async def start(self) -> None:
        options = self.options
        judged_as_ever = options.tls.authenticate if options.tls else options.authenticate
        self.room.look()
        try:
            self.node.start()
            self.staging.start(self.volumes.staged)
            self._listener = await listen(
                self._endpoint(WireOptions()),
                options.host,
                options.port,
                tls=options.tls.server if options.tls else None,
                authenticate=ClientCredentials(self.access.copy, judged_as_ever, self.access.use.note),
                trusts_process=True,
                insecure=options.insecure,
                options=options.listener,
                on_open=self._connected,
                is_server=self._book.knows,
                is_nearby=options.is_nearby,
            )
        except BaseException:
            self.node.stop_reporting()
            await self.node.stop(1.0)
            raise
        self._metadata.connect(self._endpoint(WireOptions()), options.metadata, self._client_tls, self.address)
        self._spawn(self.room.watch())
        for work in self.access.works():
            self._spawn(work)
        self._spawn(self._mender.try_again_for_ever())
        self._spawn(self.scrubber.scrub_for_ever())
        self._spawn(StuckReplicas(self.node, lambda: self.damage).watch_for_ever())
        self._spawn(
            self.staging.tidy_for_ever(
                lambda request: self._metadata.ask(request, StagedAnswer, timeout_ms=STAGED_ASK_MS_MAX),
                options.staged_ask_seconds,
            )
        )

    async def stop(self, *, timeout_ms: int = 5_000) -> bool:
        """Accept nothing new, answer requests in progress, and make everything durable. Returns whether that was
        possible in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1_000
        if self._listener is not None:
            await self._listener.close(timeout_ms=max(1, timeout_ms // 2))
        self.access.control.quotas.stop()
        self.node.stop_reporting()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._metadata.close()
        await self.peers.close()
        self._publishing.stop()
        self.staging.stop()
        self.content.stop()
        self.topics.stop()
        return await self.node.stop(max(0.1, deadline - loop.time()))

    def describe(self) -> api.NodeSelfDescription:
        identity = self.volumes.identity
        return api.NodeSelfDescription(
            identity.cluster,
            identity.node,
            "",
            identity.cluster_key,
            self.address,
            self.room.rooms,
            version("cutwater"),
            self.node.incarnation,
        )

    def _endpoint(self, options: WireOptions) -> Endpoint:
        identity = self.volumes.identity
        name, advertised = str(identity.node), self.options.advertise
        return Endpoint(identity.cluster, STORAGE_NODE, name, self._methods, options, self._key, advertised)

    def _connected(self, connection: Connection) -> None:
        self.access.control.quotas.join(connection)
        server = connection.peer.server if connection.peer is not None else None
        if server is not None and server.kind == STORAGE_NODE:
            self.peers.heard_from(server.name)

    def _connections(self) -> tuple[Connection, ...]:
        return self._listener.gate.connections if self._listener is not None else ()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.get_running_loop().create_task(cast(Coroutine[Any, Any, None], work))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("something in the background failed, which is a bug", exc_info=task.exception())

    # Methods for the node (``node.Outside``).

    def replicate(self, peer: StorageNodeId, message: Replicate, *, is_first: bool) -> None:
        body = message.entry.batch.body
        self.peers.require(peer).notify(api.REPLICATE, _with_body(message, b""), body, is_alone=is_first)

    def flush_peers(self) -> None:
        self.peers.flush()

    def begin_sync(self, source: StorageNodeId, request: SyncRequest) -> None:
        self._spawn(self._syncing.learn(self.peers.require(source), request))

    def may_wait_for_disk(self) -> bool:
        # With several disks, one that hangs must not block the others.
        return self.options.may_wait_for_disk and len(self.volumes.volumes) == 1

    # Membership in the cluster.

    def _joined(self) -> None:
        self.node.report_soon()
        self.topics.refresh()
        self.access.copy.ask_soon()

    def _turned_away(self, error: CutwaterError) -> None:
        if not self.fatal.done():
            self.fatal.set_result(error)

    # Requests.

    def _register(self, methods: Methods) -> None:
        reading = Reading(self.node, self.memory)
        methods.answers(api.APPEND)(self._append)
        methods.answers(api.READ)(reading.read)
        methods.answers(api.COPY)(reading.copy)
        following = Following(self.node, self.memory)
        methods.streams_to(api.FOLLOW)(following.serve)
        methods.answers(api.FIND)(following.find)
        control = self.access.control
        # A path would outlive the right to read the topic.
        scanning = Scanning(self.node, self.memory, self.topics, lambda: not control.is_on)
        methods.answers(scan_api.MEASURE)(scanning.measure)
        methods.answers(scan_api.HEADS)(scanning.heads)
        methods.answers(scan_api.GROUPS)(scanning.groups)
        methods.answers(scan_api.SCAN)(scanning.scan)
        methods.answers(api.EVENT_TIME)(following.event_time)
        methods.answers(api.FATE)(self._fate)
        methods.answers(api.STATUS)(self._status)
        methods.answers(api.DESCRIBE)(lambda call: self.describe())
        methods.answers(api.VERIFY)(self._verify)
        methods.answers(api.STAGE)(self.staging.stage)
        methods.answers(api.FINISH_PART)(self.staging.finish_part)
        methods.answers(api.DISCARD_PART)(self.staging.discard_part)
        methods.answers(api.FETCH)(self.staging.fetch)
        methods.answers(api.KEEP_UP)(self._publishing.keep_up)
        methods.answers(api.STAGED)(lambda call: self.staging.summary())
        methods.answers(api.VERIFY_STAGED)(self.staging.verify)
        methods.answers(api.ADD_VOLUME)(self._add_volume)
        methods.answers(api.REMOVE_VOLUME)(self._remove_volume)
        methods.streams_to(api.SYNC)(self._syncing.serve)
        methods.hears(api.REPLICATE)(self._replicate)
        methods.hears(api.ENTRY_REFUSED)(self._entry_refused)
        methods.hears(api.LEADER_SAYS)(self._leader_says)
        methods.hears(api.ADDRESSES)(self._learn_addresses)
        methods.hears(api.ACCESS_CHANGED)(self._access_changed)

    def _append(self, call: Call[api.AppendArguments]) -> Later:
        tag = call.argument.batch.producer
        if tag is not None and tag.producer == AUDIT_PRODUCER:
            self._check_audit(call.connection.peer)
        # Only this node can mark the batch as checked, and it gets no place in the log before it is checked.
        batch = structs.replace(call.argument.batch, body=bytes(call.body), checked=True)
        check_batch(batch)
        arguments = call.argument
        self.content.append(arguments.stream, batch, call, lambda batch: self.node.append(arguments, batch, call))
        return LATER

    def _check_audit(self, peer: Peer | None) -> None:
        """Raise unless a metadata node appends: the fence of a client, with a large epoch, would end the audit for
        good, and while access control is off every client may append."""
        server = peer.server if peer is not None else None
        if server is None or server.kind != METADATA_NODE or not self._book.is_known(server):
            raise Refused(f"producer {AUDIT_PRODUCER!r} belongs to the cluster itself: choose another name")

    def _replicate(self, notification: Notification[Replicate]) -> None:
        message = notification.argument

        def refuse(reason: str) -> None:
            refused = api.EntryRefused(message.stream, message.entry.epoch, self.node.node, reason)
            # The sender finds out otherwise what cannot be sent now.
            with suppress(CutwaterError):
                notification.connection.notify(api.ENTRY_REFUSED, refused)

        self.node.replicate(_with_body(message, bytes(notification.body), _sender(notification)), refuse)

    def _entry_refused(self, notification: Notification[api.EntryRefused]) -> None:
        refused = notification.argument
        self.node.replicate_failed(refused.stream, refused.node, refused.epoch, refused.reason)

    def _leader_says(self, notification: Notification[LeaderMessage]) -> None:
        # Only a metadata node that this node has joined may give orders.
        if self._metadata.has_joined(notification.connection):
            message = notification.argument
            if isinstance(message, CommitMessage | CatchUp) and message.revision > self.topics.revision:
                self.topics.refresh(message.revision)
            elif isinstance(message, UnsealReplica):
                self.topics.expect(message.stream)
            self.node.leader_says(message)

    def _learn_addresses(self, notification: Notification[api.Addresses]) -> None:
        if self._metadata.has_joined(notification.connection):
            told = notification.argument
            if told.revision < self._servers_revision:
                # It comes from a metadata node that has been cut off from the others for a while.
                return
            self._servers_revision = told.revision
            self.node.cadence.nodes = len(told.storage_nodes)
            self._book.note(STORAGE_NODE, told.keys, is_all=True)
            # A peer without a noted key could not prove its identity.
            others = {
                peer: at for peer, at in told.storage_nodes.items() if peer in told.keys and peer != self.node.node
            }
            self.peers.learn(others)
            if told.metadata_keys.items() - self.volumes.identity.metadata_keys.items():
                self._spawn(self._learn_metadata_keys(told.metadata_keys))

    def _access_changed(self, notification: Notification[Revision]) -> None:
        if self._metadata.has_joined(notification.connection):
            self.access.copy.nudge(notification.argument)

    async def _learn_metadata_keys(self, keys: dict[MetadataNodeId, str]) -> None:
        if self.volumes.identity.cluster_key is not None:
            await self._metadata.trust(self.volumes.identity.cluster_key, keys)

    def _fate(self, call: Call[api.FateArguments]) -> Fate:
        asked = call.argument
        return self.node.driver(asked.stream).replica.fate(asked.stream_epoch, asked.producer)

    def _status(self, call: Call[None]) -> api.NodeStatus:
        replicas = tuple(
            api.ReplicaStatus(
                stream,
                driver.replica.state,
                driver.replica.trusted,
                driver.replica.hard_state.epoch,
                driver.replica.first_llsn,
                driver.replica.committed_end,
                driver.replica.durable_end,
                driver.replica.complete_through,
                driver.problem if not driver.replica.trusted else "",
                driver.replica.learner.source if driver.replica.learner is not None else None,
            )
            for stream, driver in sorted(self.node.replicas.items())
        )
        leftovers = self.node.leftovers
        unreadable = tuple(sorted(stream for stream in self.node.unreadable if stream not in leftovers))
        problems = {stream: self.node.unreadable[stream] for stream in unreadable}
        return api.NodeStatus(
            self.node.node, self.node.state, replicas, unreadable, self.damage, tuple(sorted(leftovers)), problems
        )

    async def _verify(self, call: Call[LogStreamId]) -> tuple[api.VerifyFinding, ...]:
        """Verify a replica. Damage is repaired afterwards, if a peer has an intact copy."""
        stream = call.argument
        driver = self.node.driver(stream)
        check = await self.content.check_of(stream)
        async with self._verifying():
            findings = await to_the_end(self.node.in_thread(partial(verified, driver, check)))
        for finding, _ in findings:
            if not finding.is_content:
                self.node.damage_met(stream, damage_of(finding))
        return tuple(
            api.VerifyFinding(stream, f.where, f.what, f.is_content, f.first_llsn, f.last_llsn, behind)
            for f, behind in findings
        )

    @asynccontextmanager
    async def _verifying(self) -> AsyncIterator[None]:
        """Allow one verification at a time: it decompresses each batch of a replica, which may take long. So it has
        memory for one batch in addition to the memory of readers."""
        try:
            async with asyncio.timeout(VERIFY_WAIT_SECONDS):
                await self._verify_lock.acquire()
        except TimeoutError:
            raise ResourceExhausted(
                f"storage node {self.node.node} verifies one replica at a time, and has not been done with others for "
                f"{VERIFY_WAIT_SECONDS:g} s: try again when they are verified",
                retry_ms=VERIFY_RETRY_MS,
            ) from None
        try:
            yield
        finally:
            release_unused()
            self._verify_lock.release()

    async def _add_volume(self, call: Call[str]) -> api.NodeSelfDescription:
        before = self.volumes.staged
        found = await self.node.in_thread(partial(self.volumes.add, Path(call.argument)))
        await self.node.in_thread(partial(load_or_make, self.volumes.server_key_files))
        await self.node.take_in(found)
        await self.staging.look_into([path for path in self.volumes.staged if path not in before])
        _log.warning("volume %s is used from now on, with %s replicas on it", call.argument, len(found))
        return await self._tell_volumes()

    async def _remove_volume(self, call: Call[str]) -> api.NodeSelfDescription:
        await self.node.in_thread(partial(self.volumes.take_away, Path(call.argument)))
        _log.warning("volume %s is not used any more", call.argument)
        return await self._tell_volumes()

    async def _tell_volumes(self) -> api.NodeSelfDescription:
        """Report the current volumes; they are in the catalog when this returns."""
        await self.room.look_aside()
        await self._metadata.introduce()
        return self.describe()


def _with_body(message: Replicate, body: bytes, sender: StorageNodeId | None = None) -> Replicate:
    entry = message.entry
    batch = structs.replace(entry.batch, body=body)
    return Replicate(message.stream, Entry(entry.first_llsn, entry.epoch, batch), sender)


def _sender(notification: Notification[Any]) -> StorageNodeId:
    """Return the storage node that sent a notification; only storage nodes may call such methods."""
    peer = notification.connection.peer
    assert peer is not None
    assert peer.server is not None
    return StorageNodeId(int(peer.server.name))
