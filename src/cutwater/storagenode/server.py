"""The storage node on the network: answers clients and peers, and keeps links to those that it talks to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from cutwater.core.commit_index import context_of_llsn
from cutwater.core.messages import Replicate, SyncBegin, SyncEnd, SyncEntries, SyncFailed, SyncRequest
from cutwater.core.producer_session import Fate
from cutwater.core.sync import plan_sync
from cutwater.errors import CutwaterError, InvalidArgument, NotSealed, Trimmed, Unavailable
from cutwater.storage.checksum import crc32c
from cutwater.storage.frames import frames_in
from cutwater.storage.interface import ReplicaStorage
from cutwater.storagenode.links import Link
from cutwater.storagenode.node import Outside, StorageNode
from cutwater.storagenode.replica_driver import ReplicaDriver
from cutwater.types import (
    GLSN,
    LLSN,
    ClusterId,
    CommitContext,
    Entry,
    Incarnation,
    LogStreamId,
    ReplicaState,
    Report,
    StorageNodeId,
)
from cutwater.wire import storage_api as api
from cutwater.wire.connection import Connection
from cutwater.wire.handshake import Endpoint
from cutwater.wire.methods import LATER, Later, Methods, Reply
from cutwater.wire.server import Listener, listen
from cutwater.wire.serving import Call, Notification
from cutwater.wire.streams import StreamSender

SYNC_PART_BYTES = 1024 * 1024
SYNC_MS_MAX = 600_000
READ_BYTES_MAX = 8 * 1024 * 1024
READ_WAIT_SECONDS = 0.001
READ_WAITS_MAX = 50
"""How long a read waits for commits that are just being written; what is not there then is read the next time."""

_contexts_encoder = msgspec.msgpack.Encoder()
_contexts_decoder = msgspec.msgpack.Decoder(tuple[CommitContext, ...])


class NodeOptions(Struct, frozen=True):
    """How a storage node is started. ``storage`` opens the files of a log stream."""

    cluster: ClusterId
    node: StorageNodeId
    incarnation: Incarnation
    host: str
    port: int
    metadata: tuple[str, ...]
    streams: tuple[LogStreamId, ...]
    storage: Callable[[LogStreamId], ReplicaStorage]
    directory: Path | None = None


class StorageNodeServer(Outside):
    """Made by ``start``; ``port`` is where it listens."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self.node = StorageNode(options.node, options.incarnation, self, options.storage)
        self._peers: dict[StorageNodeId, Link] = {}
        self._metadata: list[Link] = []
        self._addresses: dict[StorageNodeId, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self._endpoint = Endpoint(options.cluster, "storage node", str(options.node), self._methods())

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.port)

    async def start(self) -> None:
        options = self.options
        self.node.start(list(options.streams))
        self._listener = await listen(self._endpoint, options.host, options.port)
        self._metadata = [
            Link(self._endpoint, address, lambda connection: self.node.report_soon(), lambda: None)
            for address in options.metadata
        ]

    async def stop(self, *, timeout_ms: int = 5_000) -> None:
        """Take nothing new, let what was asked be answered, make everything durable."""
        if self._listener is not None:
            await self._listener.close(timeout_ms=timeout_ms)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in (*self._metadata, *self._peers.values()):
            await link.close()
        await asyncio.to_thread(self.node.stop, timeout_ms / 1_000)

    # What the node wants (``node.Outside``).

    def send_report(self, report: Report) -> None:
        for link in self._metadata:
            if link.connection is not None:
                _tell(lambda link=link: link.require().notify(api.REPORT, report))  # type: ignore[misc]

    def send_complaint(self, complaint: api.Complaint) -> None:
        for link in self._metadata:
            if link.connection is not None:
                _tell(lambda link=link: link.require().notify(api.COMPLAINT, complaint))  # type: ignore[misc]

    def replicate(self, peer: StorageNodeId, message: Replicate) -> None:
        batch = message.entry.batch
        bare = structs.replace(message, entry=structs.replace(message.entry, batch=structs.replace(batch, body=b"")))
        self._peer(peer).require().notify(api.REPLICATE, bare, batch.body)

    def begin_sync(self, source: StorageNodeId, request: SyncRequest) -> None:
        connection = self._peer(source).require()
        self._spawn(self._sync_from(connection, request))

    def _peer(self, peer: StorageNodeId) -> Link:
        link = self._peers.get(peer)
        address = self._addresses.get(peer)
        if link is None or (address is not None and link.address != address):
            if address is None:
                raise Unavailable(f"the address of storage node {peer} is not known yet")
            if link is not None:
                self._spawn(link.close())
            lost = f"the connection to storage node {peer} broke"
            link = self._peers[peer] = Link(
                self._endpoint, address, lambda connection: None, lambda: self.node.peer_lost(peer, lost)
            )
        return link

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What is asked of it.

    def _methods(self) -> Methods:
        methods = Methods()
        methods.answers(api.APPEND)(self._append)
        methods.answers(api.READ)(self._read)
        methods.answers(api.FATE)(self._fate)
        methods.answers(api.STATUS)(self._status)
        methods.answers(api.VERIFY)(self._verify)
        methods.streams_to(api.SYNC)(self._sync_to)
        methods.hears(api.REPLICATE)(self._replicate)
        methods.hears(api.ENTRY_REFUSED)(self._entry_refused)
        methods.hears(api.LEADER_SAYS)(lambda notification: self.node.leader_says(notification.argument))
        methods.hears(api.ADDRESSES)(self._learn_addresses)
        return methods

    def _append(self, call: Call[api.AppendArguments]) -> Later:
        body = bytes(call.body)
        if crc32c(body) != call.argument.batch.checksum:
            raise InvalidArgument("the checksum of the batch does not fit its bytes: they were damaged on the way")

        def settled(outcome: api.AppendAnswer | CutwaterError) -> None:
            if isinstance(outcome, CutwaterError):
                call.fail(outcome)
            else:
                call.answer(outcome)

        self.node.append(call.argument, body, settled)
        return LATER

    def _replicate(self, notification: Notification[Replicate]) -> None:
        message = notification.argument
        batch = structs.replace(message.entry.batch, body=bytes(notification.body))
        reason = self.node.replicate(structs.replace(message, entry=structs.replace(message.entry, batch=batch)))
        if reason is not None:
            refused = api.EntryRefused(message.stream, message.entry.epoch, self.options.node, reason)
            _tell(lambda: notification.connection.notify(api.ENTRY_REFUSED, refused))

    def _entry_refused(self, notification: Notification[api.EntryRefused]) -> None:
        refused = notification.argument
        self.node.replicate_failed(refused.stream, refused.node, refused.epoch, refused.reason)

    def _learn_addresses(self, notification: Notification[api.Addresses]) -> None:
        self._addresses.update(notification.argument.storage_nodes)
        for peer in self._addresses:
            if peer != self.options.node:
                self._peer(peer)

    async def _read(self, call: Call[api.ReadArguments]) -> Reply[api.ReadAnswerHeader]:
        driver = self._readable(call.argument.stream)
        for _ in range(READ_WAITS_MAX):
            # The writer is about to write commits that are already acknowledged.
            if _indexed_end(driver) >= driver.replica.committed_end:
                break
            await asyncio.sleep(READ_WAIT_SECONDS)
        return await asyncio.to_thread(self._read_now, driver, call.argument)

    def _read_now(self, driver: ReplicaDriver, arguments: api.ReadArguments) -> Reply[api.ReadAnswerHeader]:
        replica, storage = driver.replica, driver.storage
        # In this order: what was complete before is still complete after the read.
        through, revision, committed_end = replica.complete_through, replica.revision, replica.committed_end
        indexed_end = _indexed_end(driver)
        if indexed_end < committed_end:
            # Nothing is known to be complete beyond what can be found.
            last = storage.last_commit
            committed_end = indexed_end
            through = min(through, last.high_watermark if last is not None else GLSN(0))
        trimmed_before = replica.hard_state.trimmed_before
        if arguments.from_glsn < trimmed_before:
            raise Trimmed(arguments.from_glsn, trimmed_before)
        llsn = storage.from_glsn(arguments.from_glsn)
        if llsn is None or llsn > committed_end:
            return Reply(api.ReadAnswerHeader(arguments.stream, (), through, revision))
        part = storage.read(llsn, committed_end, min(arguments.bytes_max, READ_BYTES_MAX))
        if part.last_llsn < committed_end:
            context = context_of_llsn(part.commits, part.last_llsn)
            through = min(through, context.glsn_of(part.last_llsn) if context else GLSN(0))
        return Reply(api.ReadAnswerHeader(arguments.stream, part.commits, through, revision), part.data)

    def _readable(self, stream: LogStreamId) -> ReplicaDriver:
        driver = self.node.driver(stream)
        if not driver.replica.trusted or driver.replica.state is ReplicaState.LEARNING:
            raise Unavailable(f"storage node {self.options.node} is still learning log stream {stream}: ask another")
        return driver

    def _fate(self, call: Call[api.FateArguments]) -> Fate:
        asked = call.argument
        replica = self.node.driver(asked.stream).replica
        if replica.state is not ReplicaState.SEALED or replica.hard_state.epoch != asked.stream_epoch:
            raise NotSealed(f"log stream {asked.stream} is not sealed in epoch {asked.stream_epoch} here: ask another")
        last, batches = replica.dedup.fate(asked.producer)
        return Fate(asked.stream, asked.stream_epoch, last, batches)

    def _status(self, call: Call[None]) -> api.NodeStatus:
        return api.NodeStatus(
            self.options.node,
            tuple(
                api.ReplicaStatus(
                    stream,
                    d.replica.state,
                    d.replica.trusted,
                    d.replica.hard_state.epoch,
                    d.replica.first_llsn,
                    d.replica.committed_end,
                    d.replica.durable_end,
                    d.replica.complete_through,
                )
                for stream, d in sorted(self.node.replicas.items())
            ),
        )

    async def _verify(self, call: Call[LogStreamId]) -> tuple[api.VerifyFinding, ...]:
        storage = self.node.driver(call.argument).storage
        findings = await asyncio.to_thread(storage.verify)
        return tuple(api.VerifyFinding(call.argument, finding.where, finding.what) for finding in findings)

    # Sync.

    async def _sync_to(self, call: Call[SyncRequest], sender: StreamSender[api.SyncItem]) -> None:
        """Give a learner the committed records that it lacks, entries first and commits last."""
        request = call.argument
        driver = self._readable(request.stream)
        replica, storage = driver.replica, driver.storage
        # All of one moment: what is committed later is for the next sync.
        plan = plan_sync(replica.extent, request.extent)
        dedup = replica.dedup.checkpoint(plan.copy.end)
        trimmed_before = replica.hard_state.trimmed_before
        before = context_of_llsn(storage.contexts, LLSN(plan.copy.first - 1))
        base_glsn = before.high_watermark if before else replica.hard_state.base_glsn
        await sender.send(SyncBegin(request.stream, request.attempt, plan, base_glsn))
        llsn = plan.copy.first
        while llsn <= plan.copy.end:
            part = await asyncio.to_thread(storage.read, llsn, plan.copy.end, SYNC_PART_BYTES)
            await sender.send(SyncEntries(request.stream, request.attempt, ()), part.data)
            llsn = LLSN(part.last_llsn + 1)
        contexts = await asyncio.to_thread(_contexts_of, storage, plan.copy.first, plan.copy.end)
        end = SyncEnd(request.stream, request.attempt, (), dedup, trimmed_before)
        await sender.send(end, _contexts_encoder.encode(contexts))

    async def _sync_from(self, connection: Connection, request: SyncRequest) -> None:
        driver = self.node.driver(request.stream)
        reason = "the source ended before it had sent everything"
        try:
            stream = connection.open_stream(api.SYNC, request, timeout_ms=SYNC_MS_MAX)
            async for item in stream:
                value = item.value
                if isinstance(value, SyncEntries):
                    value = structs.replace(value, entries=_entries_of(bytes(item.body)))
                elif isinstance(value, SyncEnd):
                    value = structs.replace(value, contexts=_contexts_decoder.decode(item.body))
                driver.feed(value)
        except CutwaterError as error:
            reason = error.message
        driver.feed(SyncFailed(request.stream, request.attempt, reason))


def _indexed_end(driver: ReplicaDriver) -> LLSN:
    """The last LLSN whose commit is in the files, where reads look for it."""
    last = driver.storage.last_commit
    return last.last_llsn if last is not None else driver.replica.hard_state.base_llsn


def _entries_of(data: bytes) -> tuple[Entry, ...]:
    """The entries of a part, each verified."""
    return tuple(frame.entry for frame in frames_in(data))


def _contexts_of(storage: ReplicaStorage, first: LLSN, end: LLSN) -> list[CommitContext]:
    contexts = storage.contexts
    found = []
    for i in range(len(contexts) - 1, -1, -1):
        context = contexts[i]
        if context.last_llsn < first:
            break
        if context.last_llsn <= end:
            found.append(context)
    found.reverse()
    return found


def _tell(send: Callable[[], None]) -> None:
    """What cannot be told now is told again with the next report, or found out otherwise."""
    try:
        send()
    except CutwaterError:
        return
