"""Publishes decided groups: gets their staged parts, and hands their entries to the replica at the head.

The metadata repository repeats what to publish until it knows the outcome, so nothing is remembered here. Parts that
this node does not hold are first copied from a node that does. All parts are read completely, so that damaged ones are
found and copied again; the log stream continues meanwhile. Once a group has begun, all other appends wait behind it.
Its entries are read no faster than the disks of the whole chain can write them: nothing of a group is committed before
its end, so there are no acknowledgements to wait for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

from cutwater.core.messages import GroupOutcome, GroupState, PublishGroup
from cutwater.core.publish.staged import PartSize
from cutwater.core.replica.events import GroupEntry, GroupFailed
from cutwater.errors import CutwaterError, Damaged, ReadOnly, Refused, Unavailable
from cutwater.protocol import storage_api as api
from cutwater.runtime.threads import in_thread
from cutwater.storage.part_files import Held, StagingFiles
from cutwater.storagenode.disk_space import RoomWatch
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.peer_connections import Peers
from cutwater.storagenode.publish.group_entries import CHUNK_BYTES, Source, block_sizes, entries_of
from cutwater.storagenode.publish.part_store import PartStore
from cutwater.storagenode.publish.staged_checks import check_binding
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.validation.entry_validation import check_batch
from cutwater.types import GLSN, LLSN, Batch, BatchNumber, Epoch, Part, ReplicaState, RunId, TopicId
from cutwater.wire.calls.incoming_calls import Call

_log = logging.getLogger(__name__)

BACKLOG_BYTES_MAX = 16 * 1024 * 1024
"""Limit of bytes that wait for a disk before more of a group is taken."""
KEEP_UP_BYTES = 8 * 1024 * 1024
"""After this many bytes, the next node of the chain is asked whether it keeps up."""
STEP_BYTES = 1024 * 1024
"""Approximate number of bytes that are read at a time."""
ENTRIES_AT_ONCE = 16
"""Number of entries that are read before checking whether to continue."""
LOOK_SECONDS = 0.002
RETRY_SECONDS = 0.02
PEER_MS_MAX = 10_000
THREADS = 4
"""How many groups are read at the same time."""

Name = tuple[RunId, BatchNumber, TopicId]


class _NotWanted(Exception):
    """The replica refuses the rest of the group, and has already reported why."""


class Publishing:
    def __init__(
        self,
        node: StorageNode,
        staging: PartStore,
        files: StagingFiles,
        peers: Peers,
        room: RoomWatch,
        spawn: Callable[[Awaitable[None]], None],
    ) -> None:
        self._node, self._staging, self._files, self._peers, self._spawn = node, staging, files, peers, spawn
        self._room = room
        self._preparing: set[Name] = set()
        """Groups whose parts are being copied or read."""
        self._loop = asyncio.get_running_loop()
        # Separate from the threads of the staging area, which clients and peers wait for.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"publishing of storage node {node.node}")

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Requests of the metadata repository.

    def publish(self, group: PublishGroup) -> None:
        self._staging.epochs.note(group.run, group.job_epoch)
        driver = self._node.replicas.get(group.stream)
        name = group.run, group.batch, group.topic
        if driver is None or name in self._preparing:
            return
        if driver.replica.wants(group):
            self._preparing.add(name)
            self._spawn(self._prepare(name, driver, group))
        else:
            driver.feed(group)

    async def _prepare(self, name: Name, driver: ReplicaDriver, group: PublishGroup) -> None:
        """Get all parts intact before the group begins: from then on, a failure affects the log stream as a whole."""
        problem = ""
        try:
            for part in group.parts:
                await self._have(part, group)
        except CutwaterError as error:
            problem = error.message
        finally:
            self._preparing.discard(name)
        if not problem or not driver.replica.wants(group):
            driver.feed(group)
            return
        self._node.counters.groups_failed += 1
        _log.error("batch %s of run %s cannot be published now: %s", group.batch, group.run, problem)
        self._node.tell_group(
            GroupOutcome(
                self._node.node,
                group.stream,
                group.epoch,
                group.run,
                group.batch,
                GroupState.PROBLEM,
                LLSN(0),
                0,
                GLSN(0),
                problem,
            )
        )

    async def _have(self, part: Part, group: PublishGroup) -> None:
        held = self._staging.held.get(part.part) or await self._copy(part)
        check_binding(held.part, group)
        if held.size != _size_of(part):
            raise Damaged(f"staged part {part.part} has {held.size} here, and {_size_of(part)} was decided on")
        try:
            await self._read_through(held)
        except Damaged as error:
            _log.error("a staged part is damaged, and is copied anew: %s", error.message)
            self._node.counters.damage_met += 1
            await self._read_through(await self._staging.write_anew(held, partial(self._intact, part)))
            self._node.counters.parts_copied += 1

    async def _read_through(self, held: Held) -> None:
        """Verify a whole part; raises if any of it is damaged. Reads a little at a time, so that the node can stop."""
        sizes, largest = block_sizes(held, self._files), 0
        while some := await in_thread(self._threads, lambda: list(islice(sizes, ENTRIES_AT_ONCE))):
            largest = max(largest, *some)
        self._staging.block_bytes[held.part.part] = largest

    async def _copy(self, part: Part) -> Held:
        """Copy a part from another node that holds it."""
        offset, size = 0, PartSize()
        while offset < part.bytes:
            answer, data = await self._fetch(part, offset, CHUNK_BYTES)
            size = answer.size
            # It was decided on, so it is taken regardless of its content.
            offset = await self._staging.add_decided(answer.part, offset, data, checked=answer.checked)
        held = await self._staging.finish(part.part, size)
        self._node.counters.parts_copied += 1
        return held

    async def _intact(self, part: Part, offset: int) -> bytes:
        """Return frames of a part that is damaged here, and perhaps damaged at other places elsewhere."""
        held, bytes_max = self._staging.require(part.part), CHUNK_BYTES
        while True:
            try:
                return await self._staging.in_thread(lambda: self._files.read(held, offset, bytes_max))  # noqa: B023
            except Damaged:
                pass
            try:
                return (await self._fetch(part, offset, bytes_max))[1]
            except Unavailable:
                if bytes_max == 1:
                    raise
                # More of it can be read one frame at a time.
                bytes_max = 1

    async def _fetch(self, part: Part, offset: int, bytes_max: int) -> tuple[api.FetchAnswer, bytes]:
        """Fetch frames of a part from any other node that holds it."""
        reasons = []
        for peer in part.holders:
            if peer == self._node.node:
                reasons.append(f"storage node {peer} does not have it any more, or it is damaged there")
                continue
            try:
                arguments = api.FetchArguments(part.part, offset, bytes_max)
                received = await self._peers.require(peer).call(api.FETCH, arguments, timeout_ms=PEER_MS_MAX)
                answer: api.FetchAnswer = received.value
                if answer.size != _size_of(part):
                    raise Damaged(f"storage node {peer} has {answer.size} of it, not {_size_of(part)}")
                return answer, bytes(received.body)
            except CutwaterError as error:
                reasons.append(error.message)
        raise Unavailable(f"no holder can provide staged part {part.part}: {'; '.join(reasons)}")

    # Requests of a replica.

    def feed(self, driver: ReplicaDriver, group: PublishGroup) -> None:
        """Feed the entries of this group to a replica that asked for them."""
        self._spawn(self._feed(_Taking(self._node, driver, group)))

    async def _feed(self, taking: _Taking) -> None:
        group, problem = taking.group, "it was broken off"
        try:
            await self._feed_all(taking)
            problem = ""
            self._node.counters.groups_published += 1
        except _NotWanted as refusal:
            problem = ""
            _log.info("log stream %s does not take the rest of a group: %s", group.stream, refusal)
        except CutwaterError as error:
            problem = error.message
            self._node.counters.groups_failed += 1
            _log.error("batch %s of run %s cannot be published now: %s", group.batch, group.run, problem)
        except Exception as error:
            problem = f"unforeseen failure: {error!r}"
            self._node.counters.groups_failed += 1
            _log.exception("batch %s of run %s cannot be published now", group.batch, group.run)
        finally:
            # In every case: a replica that is not told waits forever.
            if problem:
                taking.fail(problem)

    async def _feed_all(self, taking: _Taking) -> None:
        group = taking.group
        sources = [self._source(part) for part in group.parts]
        size = sum(part.bytes for part in group.parts)
        self._require_room(size)
        await self._let_the_chain_keep_up(taking, size)
        entries = entries_of(group, sources, self._files)
        held: Batch | None = None
        since_asked = 0
        try:
            while batches := await in_thread(self._threads, partial(_some, entries)):
                for batch in batches:
                    if held is not None:
                        await self._give(taking, held, last=False)
                    held = batch
                    since_asked += len(batch.body)
                if since_asked >= KEEP_UP_BYTES:
                    since_asked = 0
                    await self._let_the_chain_keep_up(taking)
            assert held is not None, "a group without records was decided on"
            await self._give(taking, held, last=True)
        finally:
            # Remove the files that were kept for a second merge.
            asyncio.get_running_loop().run_in_executor(self._threads, entries.close)

    async def _give(self, taking: _Taking, batch: Batch, *, last: bool) -> None:
        """Give the next entry to the replica as soon as the disk has caught up. Nothing happens between the last check
        and the replica's turn, so no entry of an earlier attempt gets into a group that was begun again."""
        while taking.must_wait:
            taking.check()
            await asyncio.sleep(LOOK_SECONDS)
        taking.give(batch, last=last)

    def _source(self, part: Part) -> Source:
        held, block_bytes = self._staging.held.get(part.part), self._staging.block_bytes.get(part.part)
        if held is None or block_bytes is None:
            raise Unavailable(f"staged part {part.part} is not on storage node {self._node.node} any more")
        return Source(part, held.part, partial(self._files.read, held), block_bytes, held.checked)

    # Flow control: no faster than the disk here and the other nodes of the chain.

    async def _let_the_chain_keep_up(self, taking: _Taking, bytes_to_come: int = 0) -> None:
        """Wait until the rest of the chain has caught up. A node that does not answer delays the group until its log
        stream is sealed because of that."""
        arguments = api.KeepUpArguments(taking.group.stream, taking.group.epoch, bytes_to_come)
        while True:
            taking.check()
            try:
                await self._ask_next(taking.driver, arguments, PEER_MS_MAX)
                return
            except ReadOnly:
                raise
            except CutwaterError:
                await asyncio.sleep(RETRY_SECONDS)

    def _require_room(self, size: int) -> None:
        if not self._room.has(size):
            raise ReadOnly(f"storage node {self._node.node} has no room for {size} bytes: make room on its volumes")

    async def keep_up(self, call: Call[api.KeepUpArguments]) -> None:
        """Answer once little data waits for the disks of this node and of those after it."""
        driver, epoch = self._node.driver(call.argument.stream), call.argument.epoch
        sender, replica = call.connection.peer.server if call.connection.peer is not None else None, driver.replica
        if replica.hard_state.epoch == epoch and (sender is None or sender.name != str(replica.neighbour(-1))):
            raise Refused(f"{sender} is not before storage node {self._node.node} in the chain")
        self._require_room(call.argument.bytes_to_come)
        while driver.is_busy or driver.writer.backlog_bytes > KEEP_UP_BYTES:
            if driver.replica.hard_state.epoch != epoch:
                raise Unavailable(f"log stream {driver.stream} is in another epoch on storage node {self._node.node}")
            await asyncio.sleep(LOOK_SECONDS)
        await self._ask_next(driver, call.argument, max(1, round((call.deadline - self._loop.time()) * 1_000)))

    async def _ask_next(self, driver: ReplicaDriver, arguments: api.KeepUpArguments, timeout_ms: int) -> None:
        chain = driver.replica.hard_state.chain
        if self._node.node not in chain:
            raise Unavailable(f"storage node {self._node.node} is no member of log stream {driver.stream} now")
        for peer in chain[chain.index(self._node.node) + 1 :][:1]:
            await self._peers.require(peer).call(api.KEEP_UP, arguments, timeout_ms=timeout_ms)


class _Taking:
    """One attempt to give a group to a replica, while the replica wants it. Another attempt may follow in another
    epoch, and this one must not disturb it."""

    def __init__(self, node: StorageNode, driver: ReplicaDriver, group: PublishGroup) -> None:
        self.driver, self.group = driver, group
        self._node, self._replica = node, driver.replica
        self._refusal = ""

    @property
    def must_wait(self) -> bool:
        return self.driver.is_busy or self.driver.writer.backlog_bytes > BACKLOG_BYTES_MAX

    def give(self, batch: Batch, *, last: bool) -> None:
        self.check()
        self.driver.feed(GroupEntry(self.group.tag, batch, last), self._refused)
        self.check()

    def fail(self, problem: str) -> None:
        if not self._objection():
            self.driver.feed(GroupFailed(self.group.tag, problem))

    def check(self) -> None:
        """Raise if the attempt is pointless by now."""
        objection = self._objection()
        if objection:
            raise _NotWanted(objection)

    def _objection(self) -> str:
        if self._node.replicas.get(self.group.stream) is not self.driver:
            return "the replica is no longer here"
        if self.driver.replica is not self._replica:
            return "the replica was opened anew"
        if not _leads(self.driver, self.group.epoch):
            return "it is not the head of this epoch any more"
        return self._refusal

    def _refused(self, error: CutwaterError) -> None:
        self._refusal = error.message


def _leads(driver: ReplicaDriver, epoch: Epoch) -> bool:
    replica = driver.replica
    return replica.state is ReplicaState.RUNNING and replica.is_head and replica.hard_state.epoch == epoch


def _size_of(part: Part) -> PartSize:
    return PartSize(part.entries, part.rows, part.bytes)


def _some(entries: Iterator[Batch]) -> list[Batch]:
    """Return the next few entries; none at the end."""
    found: list[Batch] = []
    size = 0
    for batch in entries:
        check_batch(batch)
        found.append(batch)
        size += len(batch.body)
        if size >= STEP_BYTES:
            break
    return found
