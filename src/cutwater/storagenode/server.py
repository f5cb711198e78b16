"""The storage node on the network: answers clients and peers, and keeps links to those that it talks to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, structs

from cutwater.core.messages import GroupOutcome, LeaderMessage, PublishGroup, Replicate, SyncRequest
from cutwater.core.producer_session import Fate
from cutwater.core.requests import StagedAnswer, StagedRequest
from cutwater.errors import CutwaterError, Damaged, Unavailable
from cutwater.storage.errors import DamagedEntries, DamagedFile
from cutwater.storage.segment_log import SegmentOptions
from cutwater.storage.staging import StagingFiles
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.checking import check_batch
from cutwater.storagenode.following import Following
from cutwater.storagenode.links import Peers
from cutwater.storagenode.mending import Mender
from cutwater.storagenode.metadata_links import MetadataLinks
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.publishing import Publishing
from cutwater.storagenode.reading import Reading
from cutwater.storagenode.replica_driver import ReplicaDriver
from cutwater.storagenode.room import RESERVE_BYTES, RoomWatch
from cutwater.storagenode.scanning import Scanning
from cutwater.storagenode.staging import ASK_SECONDS, STAGED_BYTES_MAX, Staging
from cutwater.storagenode.stores import VolumeStores
from cutwater.storagenode.syncing import Syncing
from cutwater.types import Entry, Incarnation, LogStreamId, Report, StorageNodeId
from cutwater.wire import scan_api
from cutwater.wire import storage_api as api
from cutwater.wire.addresses import format_address
from cutwater.wire.connection import Connection
from cutwater.wire.handshake import Endpoint
from cutwater.wire.methods import LATER, Later, Methods
from cutwater.wire.options import MIB, WireOptions
from cutwater.wire.server import Listener, listen
from cutwater.wire.serving import Call, Notification
from cutwater.wire.tls import Tls

_log = logging.getLogger(__name__)

PEER_OPTIONS = WireOptions(send_bytes_max=512 * MIB)
"""Towards peers more may wait than towards clients: entries come as notices, and one that is refused seals its stream.
What waits is bounded by what heads take (``node.APPEND_BYTES_MAX``)."""

STAGED_ASK_MS_MAX = 10_000

STOP_SECONDS_MORE = 1.0
"""How long the end of a node is waited for beyond its time, if it does not come to begin."""


class NodeOptions(Struct, frozen=True):
    """How a storage node is reached, and whom it talks to. ``advertise`` is the address that others are told, if it is
    not the one that it listens on."""

    host: str
    port: int
    metadata: tuple[str, ...]
    advertise: str = ""
    tls: Tls | None = None
    insecure: bool = False
    reserve_bytes: int = RESERVE_BYTES
    segments: SegmentOptions = SegmentOptions()
    staged_bytes_max: int = STAGED_BYTES_MAX
    """What may be staged here and not be published yet."""
    staged_ask_seconds: float = ASK_SECONDS
    is_nearby: bool = False
    """Those on the same event loop connect without a socket."""
    may_wait_for_disk: bool = False
    """Whether the event loop may sync by itself. Not where others share it, who could be kept from their deadlines."""


class StorageNodeServer:
    """Made with volumes that are locked for it. ``fatal`` is set when it makes no sense to go on, with the reason.
    ``threads`` are for what waits for disks; those of the event loop if not said, which must have no other work then,
    since whatever that waits for may wait for this server."""

    def __init__(
        self,
        options: NodeOptions,
        volumes: NodeVolumes,
        *,
        threads: Executor | None = None,
        incarnation: Incarnation | None = None,
    ) -> None:
        self.options, self.volumes = options, volumes
        self._threads = threads
        self.fatal: asyncio.Future[CutwaterError] = asyncio.get_running_loop().create_future()
        stores = VolumeStores(volumes, options.segments)
        self.node = StorageNode(volumes.identity.node, incarnation or volumes.next_incarnation(), self, stores, threads)
        self.room = RoomWatch(
            lambda: volumes.volumes,
            options.reserve_bytes,
            self.node.set_state,
            lambda: self.node.backlog_bytes,
            self.node.in_thread,
        )
        self.take_room = self.room.take
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self._metadata: MetadataLinks | None = None
        self._syncing = Syncing(self.node)
        staged_files = StagingFiles(volumes.staging)
        self.staging = Staging(self.node, staged_files, self.room.has, self.disk_is_full, options.staged_bytes_max)
        self._methods = self._table()
        self._client_tls = options.tls.client if options.tls else None
        peer_endpoint = self._endpoint(PEER_OPTIONS)
        self.peers = Peers(peer_endpoint, self._client_tls, self.node.peer_lost, self._spawn)
        self._mender = Mender(self.node, self.peers, self._spawn)
        self._publishing = Publishing(self.node, self.staging, staged_files, self.peers, self.room.has, self._spawn)
        self._methods.answers(api.KEEP_UP)(self._publishing.keep_up)

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.port)

    @property
    def address(self) -> str:
        """Where others reach this node."""
        return self.options.advertise or format_address(self.options.host, self.port)

    @property
    def connections(self) -> int:
        return len(self._listener.gate.connections) if self._listener is not None else 0

    @property
    def metadata_joined(self) -> int:
        """How many metadata repositories know this node and hear its reports now."""
        return self._metadata.joined if self._metadata is not None else 0

    async def start(self) -> None:
        options = self.options
        self.room.look()
        try:
            self.node.start()
            self.staging.start(self.volumes.staged)
            self._listener = await listen(
                self._endpoint(WireOptions()),
                options.host,
                options.port,
                tls=options.tls.server if options.tls else None,
                authenticate=options.tls.authenticate if options.tls else None,
                insecure=options.insecure,
                on_open=self._connected,
                is_nearby=options.is_nearby,
            )
        except BaseException:
            self.node.stop_reporting()
            self.node.stop(1.0)
            raise
        self._metadata = MetadataLinks(
            self._endpoint(WireOptions()), options.metadata, self._client_tls, self, self._spawn
        )
        self._spawn(self.room.watch())
        self._spawn(self.staging.tidy_for_ever(self._ask_staged, options.staged_ask_seconds))

    async def stop(self, *, timeout_ms: int = 5_000) -> bool:
        """Take nothing new, let what was asked be answered, make everything durable; whether that was possible in
        time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1_000
        if self._listener is not None:
            await self._listener.close(timeout_ms=max(1, timeout_ms // 2))
        self.node.stop_reporting()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._metadata is not None:
            await self._metadata.close()
        await self.peers.close()
        self._publishing.stop()
        self.staging.stop()
        left = max(0.1, deadline - loop.time())
        stopping = loop.run_in_executor(self._threads, self.node.stop, left)
        # It keeps this time by itself, once there is a thread for it.
        await asyncio.wait({stopping}, timeout=left + STOP_SECONDS_MORE)
        if not stopping.done():
            stopping.cancel()
            return False
        return stopping.result()

    def describe(self) -> api.NodeDescription:
        identity = self.volumes.identity
        return api.NodeDescription(
            identity.cluster,
            identity.node,
            identity.node_key,
            identity.cluster_key,
            self.address,
            self.room.rooms,
            version("cutwater"),
            self.node.incarnation,
        )

    def _endpoint(self, options: WireOptions) -> Endpoint:
        identity = self.volumes.identity
        return Endpoint(identity.cluster, api.STORAGE_NODE, str(identity.node), self._methods, options)

    def _connected(self, connection: Connection) -> None:
        peer = connection.peer
        if peer is not None and peer.role == api.STORAGE_NODE:
            self.peers.heard_from(peer.name)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.get_running_loop().create_task(cast(Coroutine[Any, Any, None], work))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("something in the background failed, which is a bug", exc_info=task.exception())

    # What the node wants (``node.Outside``).

    def send_report(self, report: Report) -> None:
        if self._metadata is not None and self._metadata.tell(api.REPORT, report):
            self.node.counters.reports += 1

    def send_complaint(self, complaint: api.Complaint) -> None:
        if self._metadata is not None:
            self._metadata.tell(api.COMPLAINT, complaint)

    def replicate(self, peer: StorageNodeId, message: Replicate, *, is_first: bool) -> None:
        body = message.entry.batch.body
        self.peers.require(peer).notify(api.REPLICATE, _with_body(message, b""), body, is_alone=is_first)

    def flush_peers(self) -> None:
        self.peers.flush()

    def begin_sync(self, source: StorageNodeId, request: SyncRequest) -> None:
        self._spawn(self._syncing.learn(self.peers.require(source), request))

    def publish(self, group: PublishGroup) -> None:
        self._publishing.publish(group)

    def feed_group(self, driver: ReplicaDriver, group: PublishGroup) -> None:
        self._publishing.feed(driver, group)

    def send_outcome(self, outcome: GroupOutcome) -> None:
        if self._metadata is not None:
            self._metadata.tell(api.GROUP_OUTCOME, outcome)

    async def _ask_staged(self, request: StagedRequest) -> StagedAnswer:
        if self._metadata is None:
            raise Unavailable("the metadata repository is not known yet")
        return await self._metadata.ask(request, StagedAnswer, timeout_ms=STAGED_ASK_MS_MAX)

    def mend(self, stream: LogStreamId, error: Damaged) -> None:
        self._mender.mend(stream, error)

    def may_wait_for_disk(self) -> bool:
        # Of several disks, one that hangs must not hold up the others.
        return self.options.may_wait_for_disk and len(self.volumes.volumes) == 1

    def disk_is_full(self) -> None:
        self.room.found_full()

    # Its place in the cluster (``metadata_links.Joining``).

    def introduce(self) -> api.JoinArguments:
        identity = self.volumes.identity
        volumes = tuple(str(volume) for volume in self.volumes.volumes)
        return api.JoinArguments(
            identity.node, identity.node_key, identity.cluster_key, self.address, self.node.incarnation, volumes
        )

    async def adopt(self, answer: api.JoinAnswer) -> None:
        self.volumes.check_cluster_key(answer.cluster_key)
        if answer.known:
            await self.node.in_thread(partial(self.volumes.adopt_cluster_key, answer.cluster_key))

    def joined(self) -> None:
        self.node.report_soon()

    def turned_away(self, error: CutwaterError) -> None:
        if not self.fatal.done():
            self.fatal.set_result(error)

    # What is asked of it.

    def _table(self) -> Methods:
        reading = Reading(self.node)
        methods = Methods()
        methods.answers(api.APPEND)(self._append)
        methods.answers(api.READ)(reading.read)
        methods.answers(api.COPY)(reading.copy)
        following = Following(self.node)
        methods.streams_to(api.FOLLOW)(following.serve)
        methods.answers(api.FIND)(following.find)
        scanning = Scanning(self.node)
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
        methods.answers(api.STAGED)(lambda call: self.staging.summary())
        methods.answers(api.VERIFY_STAGED)(self.staging.verify)
        methods.answers(api.ADD_VOLUME)(self._add_volume)
        methods.answers(api.REMOVE_VOLUME)(self._remove_volume)
        methods.streams_to(api.SYNC)(self._syncing.serve)
        methods.hears(api.REPLICATE)(self._replicate)
        methods.hears(api.ENTRY_REFUSED)(self._entry_refused)
        methods.hears(api.LEADER_SAYS)(self._leader_says)
        methods.hears(api.ADDRESSES)(self._learn_addresses)
        return methods

    def _append(self, call: Call[api.AppendArguments]) -> Later:
        batch = structs.replace(call.argument.batch, body=bytes(call.body))
        check_batch(batch)
        self.node.append(call.argument, batch, call)
        return LATER

    def _replicate(self, notification: Notification[Replicate]) -> None:
        message = notification.argument

        def refuse(reason: str) -> None:
            refused = api.EntryRefused(message.stream, message.entry.epoch, self.node.node, reason)
            _tell(lambda: notification.connection.notify(api.ENTRY_REFUSED, refused))

        self.node.replicate(_with_body(message, bytes(notification.body)), refuse)

    def _entry_refused(self, notification: Notification[api.EntryRefused]) -> None:
        refused = notification.argument
        self.node.replicate_failed(refused.stream, refused.node, refused.epoch, refused.reason)

    def _leader_says(self, notification: Notification[LeaderMessage]) -> None:
        # Nobody else may give orders: over these connections the keys of both sides were compared.
        if self._metadata is not None and self._metadata.has_joined(notification.connection):
            self.node.leader_says(notification.argument)

    def _learn_addresses(self, notification: Notification[api.Addresses]) -> None:
        if self._metadata is not None and self._metadata.has_joined(notification.connection):
            addresses = notification.argument.storage_nodes
            self.peers.learn({peer: address for peer, address in addresses.items() if peer != self.node.node})

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
            )
            for stream, driver in sorted(self.node.replicas.items())
        )
        return api.NodeStatus(self.node.node, self.node.state, replicas, tuple(sorted(self.node.unreadable)))

    async def _verify(self, call: Call[LogStreamId]) -> tuple[api.VerifyFinding, ...]:
        """What is found damaged is repaired afterwards, if a peer has it."""
        stream = call.argument
        storage = self.node.driver(stream).storage
        findings = await self.node.in_thread(storage.verify)
        for finding in findings:
            if finding.first_llsn is not None:
                last_llsn = finding.last_llsn or finding.first_llsn
                self.node.damage_met(stream, DamagedEntries(finding.where, finding.first_llsn, last_llsn, finding.what))
            else:
                self.node.damage_met(stream, DamagedFile(Path(finding.where), finding.what))
        return tuple(api.VerifyFinding(stream, finding.where, finding.what) for finding in findings)

    async def _add_volume(self, call: Call[str]) -> api.NodeDescription:
        before = self.volumes.staged
        found = await self.node.in_thread(partial(self.volumes.add, Path(call.argument)))
        await self.node.take_in(found)
        await self.staging.look_into([path for path in self.volumes.staged if path not in before])
        _log.warning("volume %s is used from now on, with %s replicas on it", call.argument, len(found))
        return await self._tell_volumes()

    async def _remove_volume(self, call: Call[str]) -> api.NodeDescription:
        await self.node.in_thread(partial(self.volumes.take_away, Path(call.argument)))
        _log.warning("volume %s is not used any more", call.argument)
        return await self._tell_volumes()

    async def _tell_volumes(self) -> api.NodeDescription:
        """Which volumes there are now is in the catalog when this returns."""
        await self.room.look_aside()
        if self._metadata is not None:
            await self._metadata.introduce()
        return self.describe()


def _with_body(message: Replicate, body: bytes) -> Replicate:
    entry = message.entry
    return Replicate(message.stream, Entry(entry.first_llsn, entry.epoch, structs.replace(entry.batch, body=body)))


def _tell(send: Callable[[], None]) -> None:
    """What cannot be told now is found out otherwise."""
    try:
        send()
    except CutwaterError:
        return
