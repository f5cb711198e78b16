"""Sync between storage nodes: the source sends committed entries, then their commits; the destination learns them.

A sync consists of rounds. One round copies as many commits as easily fit into memory. It is complete in itself, as if
the source had nothing more; then the learner is told to learn again. So neither side ever holds more than one round,
and a completed round is not lost when the next one fails.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from functools import partial
from operator import attrgetter
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from cutwater.core.messages import SyncBegin, SyncEnd, SyncEntries, SyncFailed, SyncRequest
from cutwater.core.read.commit_index import context_of_llsn
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.sync_ranges import Extent, missing_entries, plan_sync
from cutwater.errors import CutwaterError, Damaged, Refused
from cutwater.format.entry_codec import NO_TIME, RunningEventTime, frames_in
from cutwater.format.errors import DamagedEntries
from cutwater.protocol import storage_api as api
from cutwater.storage.format import DEDUP, decode_struct, encode_struct
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.types import GLSN, LLSN, CommitContext
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.calls.streams import StreamSender
from cutwater.wire.connection import Connection

PART_BYTES = 1024 * 1024
ITEM_MS_MAX = 60_000
"""How long a learner waits for the next part."""
ROUND_CONTEXTS_MAX = 32_768
ROUND_LLSNS_MAX = 262_144
"""Limit for rounds of more than one commit. A learner remembers each entry, and an entry may hold only one record."""
CONTEXTS_AT_ONCE = 8_192
DEDUP_BYTES_MAX = 1024 * 1024 * 1024
BACKLOG_BYTES_MAX = 16 * 1024 * 1024
"""How far a learner's disk may fall behind before it takes the next part."""
BACKLOG_LOOK_SECONDS = 0.005

_encode = msgspec.msgpack.Encoder().encode
_decode_contexts = msgspec.msgpack.Decoder(tuple[CommitContext, ...]).decode
_decode_running = msgspec.msgpack.Decoder(RunningEventTime).decode
_last_llsn = attrgetter("last_llsn")


class _Round(Struct, frozen=True):
    """The content of one round: these commits, which follow the one that ends at ``base_glsn``."""

    contexts: list[CommitContext]
    end: LLSN
    base_glsn: GLSN | None


class Syncing:
    def __init__(self, node: StorageNode) -> None:
        self._node = node

    # The source.

    async def serve(self, call: Call[SyncRequest], sender: StreamSender[api.SyncItem]) -> None:
        """Send a learner the committed records that it lacks: entries first, commits last."""
        stream = call.argument.stream
        driver = self._node.driver(stream)
        driver.require_readable()
        self._node.counters.syncs_served += 1
        request, attempt = call.argument, call.argument.attempt
        replica, storage = driver.replica, driver.storage
        # All of this is of one moment: later commits belong to the next round.
        own, trimmed_before = replica.extent, replica.hard_state.trimmed_before
        dedup = replica.dedup.checkpoint(own.end)
        part = await driver.in_reader(lambda: _next_round(storage, own, request.extent))
        if part.end < own.end:
            # This is not exactly the state at that place, which does not matter: before the learner is a member,
            # another round has replaced it by the right one.
            dedup = replica.dedup.checkpoint(part.end)
        plan = plan_sync(Extent(own.first, part.end), request.extent)
        running = NO_TIME
        if plan.restart_at is not None:
            try:
                running = await driver.in_writer(lambda: storage.running_before(plan.copy.first))
            except Damaged as error:
                self._node.damage_met(stream, error)
                raise
        base_glsn = replica.hard_state.base_glsn if part.base_glsn is None else part.base_glsn
        await sender.send(SyncBegin(stream, attempt, plan, base_glsn), _encode(running))
        llsn = plan.copy.first
        while llsn <= plan.copy.end:
            try:
                found = await driver.in_reader(partial(storage.read, llsn, plan.copy.end, PART_BYTES))
            except DamagedEntries as error:
                # The learner may still have the entries that cannot be read here.
                missing = missing_entries(part.contexts, max(llsn, error.first_llsn), error.last_llsn)
                if not missing or missing[0].first_llsn != llsn or missing[-1].last_llsn != error.last_llsn:
                    raise
                await sender.send(SyncEntries(stream, attempt, (), missing))
                llsn = LLSN(error.last_llsn + 1)
                continue
            await sender.send(SyncEntries(stream, attempt, ()), found.data)
            self._node.counters.sync_sent_bytes += len(found.data)
            llsn = LLSN(found.last_llsn + 1)
        for start in range(0, len(part.contexts), CONTEXTS_AT_ONCE):
            await sender.send(api.SyncContexts(), _encode(part.contexts[start : start + CONTEXTS_AT_ONCE]))
        data = memoryview(await self._node.in_thread(partial(encode_struct, DEDUP, dedup)))
        for start in range(0, len(data), PART_BYTES):
            await sender.send(api.SyncDedup(), data[start : start + PART_BYTES])
        nothing = DedupCheckpoint(dedup.upto, ())
        await sender.send(SyncEnd(stream, attempt, (), nothing, trimmed_before, part.end < own.end))

    # The destination.

    async def learn(self, connection: Connection, request: SyncRequest) -> None:
        driver = self._node.replicas.get(request.stream)
        if driver is None:
            return
        self._node.counters.syncs_begun += 1
        reason = "the source ended before it had sent everything"
        try:
            await self._receive(connection, request, driver)
        except CutwaterError as error:
            reason = error.message
        except msgspec.MsgspecError as error:
            reason = f"what the source sent cannot be decoded: {error}"
        except BaseException as error:
            reason = f"it was broken off: {error!r}"
            raise
        finally:
            # In every case: a replica that is not told waits forever. If the end was taken before, this changes
            # nothing.
            driver.feed(SyncFailed(request.stream, request.attempt, reason))

    async def _receive(self, connection: Connection, request: SyncRequest, driver: ReplicaDriver) -> None:
        async with connection.open_stream(api.SYNC, request) as stream:
            parts = _Parts()
            while (item := await stream.receive(timeout_ms=ITEM_MS_MAX)) is not None:
                learner = driver.replica.learner
                if learner is None or learner.attempt != request.attempt:
                    return
                self._node.counters.sync_received_bytes += len(item.body)
                self._take(driver, parts, item.value, bytes(item.body))
                await self._let_the_disk_keep_up(driver)

    async def _let_the_disk_keep_up(self, driver: ReplicaDriver) -> None:
        while driver.is_busy or driver.writer.backlog_bytes > BACKLOG_BYTES_MAX:
            if self._node.replicas.get(driver.stream) is not driver:
                raise Refused("the replica that was to learn is gone")
            await asyncio.sleep(BACKLOG_LOOK_SECONDS)

    def _take(self, driver: ReplicaDriver, parts: _Parts, item: api.SyncItem, body: bytes) -> None:
        match item:
            case SyncBegin():
                driver.begin_sync(item, _decode_running(body))
            case SyncEntries():
                self._node.require_room(len(body))
                driver.feed(structs.replace(item, entries=tuple(frame.entry for frame in frames_in(body))))
            case api.SyncContexts():
                parts.take_contexts(_decode_contexts(body))
            case api.SyncDedup():
                parts.take_dedup(body)
            case SyncEnd():
                driver.feed(structs.replace(item, contexts=tuple(parts.contexts), dedup=parts.dedup()))
            case SyncFailed():
                driver.feed(item)


class _Parts:
    """Collects data that arrives in parts and is needed as a whole."""

    def __init__(self) -> None:
        self.contexts: list[CommitContext] = []
        self._dedup = bytearray()

    def take_contexts(self, contexts: tuple[CommitContext, ...]) -> None:
        if len(self.contexts) + len(contexts) > ROUND_CONTEXTS_MAX:
            raise Refused(f"the source sends more than {ROUND_CONTEXTS_MAX} commits at once")
        self.contexts += contexts

    def take_dedup(self, data: bytes) -> None:
        if len(self._dedup) + len(data) > DEDUP_BYTES_MAX:
            raise Refused(f"the source sends more than {DEDUP_BYTES_MAX} bytes of deduplication")
        self._dedup += data

    def dedup(self) -> DedupCheckpoint:
        path = Path("what the source sent of deduplication")
        return decode_struct(bytes(self._dedup), DEDUP, path, DedupCheckpoint)


def _next_round(storage: SegmentStorage, own: Extent, destination: Extent) -> _Round:
    """Return the commits that the destination needs next."""
    contexts = storage.contexts
    # If there is a gap between what the destination has and what is here, it begins anew.
    first = max(LLSN(destination.end + 1), own.first)
    before = context_of_llsn(contexts, LLSN(first - 1))
    # A destination that begins anew has to know when the log stream last spoke before what is left of it. An empty one
    # may have begun anew in a sync that was broken off.
    is_wanted = before is not None and (destination.empty or destination.end < before.last_llsn)
    earlier = [before] if before is not None and is_wanted and before.last_llsn < first else []
    at = bisect_left(contexts, first, key=_last_llsn)
    most = ROUND_CONTEXTS_MAX - len(earlier)
    found = [context for context in contexts[at : at + most] if context.last_llsn <= own.end]
    found = found[: max(1, bisect_left(found, first + ROUND_LLSNS_MAX, key=_last_llsn))]
    # A commit may be applied but not yet in the files.
    end = found[-1].last_llsn if found else min(LLSN(first - 1), own.end)
    return _Round([*earlier, *found], end, before.high_watermark if before else None)
