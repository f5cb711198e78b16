"""The staging area of a storage node: accepts parts, keeps them, and provides them for publishing.

Everything held counts towards a limit, so clients that stage and never publish cannot fill the volumes. A complete
part is removed only when the metadata repository says so; this node asks for that from time to time. A few threads do
all file work; operations on one part are done in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from msgspec import UNSET, structs

from cutwater.core.publish.staged import PartSize, StagedPart
from cutwater.core.requests import StagedAnswer, StagedBatch, StagedRequest
from cutwater.errors import (
    AlreadyExists,
    CutwaterError,
    Damaged,
    InvalidArgument,
    NotFound,
    Refused,
    ResourceExhausted,
    Unavailable,
)
from cutwater.format.checksum import Buffer
from cutwater.format.errors import DiskFull
from cutwater.protocol import storage_api as api
from cutwater.runtime import system
from cutwater.runtime.threads import in_thread
from cutwater.storage.part_files import CannotUse, Held, PartWriter, StagingFiles, check_part
from cutwater.storagenode.disk_space import RoomWatch
from cutwater.storagenode.memory_budget import MemoryBudget
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.publish.run_epochs import RunEpochs
from cutwater.storagenode.publish.staged_checks import PartChecks
from cutwater.storagenode.validation.topic_forms import KnownTopics
from cutwater.types import BatchNumber, RunId, TopicId
from cutwater.wire.calls.handlers import ReplyWithBody
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.identity.handshake import Peer

_log = logging.getLogger(__name__)

STAGED_BYTES_MAX = 64 * 1024 * 1024 * 1024
PARTS_MAX = 65_536
"""Limits the number of files: each part is one."""
TURNED_AWAY_MAX = 1_024
ASK_SECONDS = 60.0
"""Interval at which the metadata repository is asked which parts are no longer needed."""
ASK_SOON_SECONDS = 1.0
"""This interval when there is no room for more parts."""
ASKED_AT_ONCE = 4_096
IDLE_SECONDS_MAX = 600.0
"""An incomplete part to which nothing was added for this long is discarded. No client was told that it is held."""
FETCH_BYTES_MAX = 8 * 1024 * 1024
RETRY_MS = 1_000
RETRY_SOON_MS = 20
THREADS = 4

T = TypeVar("T")
Ask = Callable[[StagedRequest], Awaitable[StagedAnswer]]


class _Writing:
    """A part that is not complete yet."""

    def __init__(self, part: StagedPart) -> None:
        self.part = part
        self.lock = asyncio.Lock()
        self.writer: PartWriter | None = None
        self.checks: PartChecks | None = None
        """Checks of its content; None if the content no longer matters."""
        self.is_decided = False
        """Another node holds it, and it was decided on: no client adds to it."""
        self.is_checked = True
        self.reserved = 0
        """Bytes of this part that count towards the limit."""
        self.touched = system.monotonic()


class _NotChecked(Exception):
    """The content could not be checked now, so it is neither valid nor invalid."""

    def __init__(self, why: CutwaterError) -> None:
        self.why = why


class PartStore:
    """The staging area, on the event loop of the node."""

    def __init__(
        self,
        node: StorageNode,
        files: StagingFiles,
        room: RoomWatch,
        topics: KnownTopics,
        memory: MemoryBudget,
        bytes_max: int = STAGED_BYTES_MAX,
    ) -> None:
        self._topics, self._memory = topics, memory
        self.bytes_max, self.parts_max = bytes_max, PARTS_MAX
        self.bytes = 0
        """Bytes of all parts, including incomplete ones."""
        self.held: dict[str, Held] = {}
        self.epochs = RunEpochs()
        self.block_bytes: dict[str, int] = {}
        """The size in memory of the largest entry, for parts that were read completely before publishing."""
        self._node, self._files, self._room = node, files, room
        self.owner_of: Callable[[Peer | None], str] = lambda peer: ""
        """Returns the principal to which a part of this peer is bound; empty while access control is off."""
        self.staged_by: Counter[str] = Counter()
        """Bytes of all parts by their owners."""
        self.room_to_stage: Callable[[Peer | None, int], Awaitable[None]] = _at_once
        """Returns when the quotas of a peer leave room, or raises."""
        self.check_quota: Callable[[str, int], None] = lambda owner, size: None
        """Raises if the quotas of an owner leave no room."""
        self._is_short = asyncio.Event()
        """Set when data was refused that would fit once published parts are removed."""
        self._writing: dict[str, _Writing] = {}
        self._turned_away: deque[str] = deque(maxlen=TURNED_AWAY_MAX)
        """Parts for which there was no room when they began."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"staging of storage node {node.node}")

    def start(self, directories: Iterable[Path]) -> None:
        """Find the parts that were staged before."""
        self._take_in(*self._files.open(directories))

    async def look_into(self, directories: Iterable[Path]) -> None:
        """Find the parts on volumes that are used from now on."""
        self._take_in(*await self.in_thread(lambda: self._files.open(directories)))

    def _take_in(self, found: list[Held], broken: list[CannotUse]) -> None:
        for held in found:
            if held.part.part not in self.held:
                self.held[held.part.part] = held
                self.epochs.note_part(held.part)
                self._count(held.part, held.size.bytes)
        for one in broken:
            _log.error("a staged part cannot be used: %s", one.why, extra={"path": str(one.path)})

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def topic_of(self, part: str) -> TopicId | None:
        """Return the number of the topic for which a part is staged; None if there is no such part."""
        found = self._writing.get(part) or self.held.get(part)
        return None if found is None else found.part.topic

    @property
    def parts(self) -> int:
        return len(self.held) + len(self._writing)

    # Calls of clients and peers.

    async def stage(self, call: Call[api.StageArguments]) -> api.StageAnswer:
        """Add data at the current end of a part. Repeated data is not taken twice."""
        asked, size = call.argument, len(call.body)
        # What a client says about the owner does not count.
        part = structs.replace(asked.part, owner=self.owner_of(call.connection.peer) or UNSET)
        check_part(part)
        self.epochs.check(part)
        if part.owner:
            await self.room_to_stage(call.connection.peer, size)
        end = await self.add(part, asked.offset, call.body)
        self.epochs.note_part(part)
        self._node.counters.stage_bytes += size
        return api.StageAnswer(end)

    async def finish_part(self, call: Call[api.FinishArguments]) -> None:
        self._check_owner(call.argument.part, call.connection.peer)
        writing = self._writing.get(call.argument.part)
        if writing is not None:
            self.epochs.check(writing.part)
        await self.finish(call.argument.part, call.argument.size)

    async def discard_part(self, call: Call[str]) -> None:
        """Discard a part that its client gives up. Complete parts stay: they may already be decided on."""
        self._check_owner(call.argument, call.connection.peer)
        writing = self._writing.get(call.argument)
        if writing is not None:
            async with writing.lock:
                await self._give_up(writing)

    def _check_owner(self, part: str, peer: Peer | None) -> None:
        found = self._writing.get(part) or self.held.get(part)
        if found is not None and found.part.owner and found.part.owner != self.owner_of(peer):
            raise Refused(f"part {part} was staged by another principal: use a token of that principal")

    async def fetch(self, call: Call[api.FetchArguments]) -> ReplyWithBody[api.FetchAnswer]:
        asked = call.argument
        held = self.require(asked.part)
        data = await self.in_thread(
            lambda: self._files.read(held, asked.offset, min(max(asked.bytes_max, 1), FETCH_BYTES_MAX))
        )
        return ReplyWithBody(api.FetchAnswer(held.part, held.size, held.checked), data)

    async def verify(self, call: Call[None]) -> tuple[api.VerifyFinding, ...]:
        found = []
        for held in list(self.held.values()):
            findings = await self.in_thread(lambda held=held: self._files.verify(held))  # type: ignore[misc]
            if held.part.part in self.held:
                found += [api.VerifyFinding(api.NO_STREAM, finding.where, finding.what) for finding in findings]
        return tuple(found)

    # Calls from inside the node.

    async def add(self, part: StagedPart, offset: int, data: Buffer) -> int:
        """Check the content and add it; return the new end of the part."""
        writing = self._writing_of(part, offset)
        if writing.is_decided:
            raise AlreadyExists(f"part {part.part} is complete elsewhere: nothing can be added to it")
        if writing.checks is None:
            writing.checks = PartChecks(part, self._topics)
        return await self._add(writing, offset, data)

    async def add_decided(self, part: StagedPart, offset: int, data: Buffer, *, checked: bool) -> int:
        """Add data of a decided part that another node holds. An unfinished part of this name is discarded."""
        begun = self._writing.get(part.part)
        if begun is not None and not begun.is_decided:
            async with begun.lock:
                await self._give_up(begun)
        writing = self._writing_of(part, offset)
        writing.is_decided, writing.is_checked = True, checked
        return await self._add(writing, offset, data)

    async def _add(self, writing: _Writing, offset: int, data: Buffer) -> int:
        part = writing.part
        async with writing.lock:
            end = writing.writer.size.bytes if writing.writer is not None else 0
            if offset + len(data) <= end:
                return end
            if self._writing.get(part.part) is not writing or offset < end:
                raise NotFound(f"part {part.part} was given up on storage node {self._node.node}: stage it again")
            if offset > end:
                # Several messages are in flight at a time, and one before this one was refused.
                raise ResourceExhausted(
                    f"part {part.part} has {end} bytes so far, not {offset}", retry_ms=RETRY_SOON_MS
                )
            self._reserve(writing, len(data))
            try:
                is_verified = await self._check(writing, data)
                await self.in_thread(lambda: self._write(writing, data, is_verified=is_verified))
            except _NotChecked as error:
                # Nothing was written. The content can be checked when it is sent again.
                self._reserve(writing, -len(data))
                raise error.why from None
            except InvalidArgument:
                # Nothing was written: a client that sent invalid data may still send valid data.
                self._reserve(writing, -len(data))
                if writing.writer is None or not writing.writer.size.bytes:
                    await self._give_up(writing)
                raise
            except BaseException:
                await self._give_up(writing)
                raise
            writing.touched = system.monotonic()
            return end + len(data)

    async def finish(self, part: str, size: PartSize) -> Held:
        """Complete a part, which must have this size. It is durable when this returns."""
        held = self.held.get(part)
        if held is None:
            writing = self._writing.get(part)
            if writing is None:
                raise NotFound(f"storage node {self._node.node} has no part {part}: stage it again")
            async with writing.lock:
                writer = writing.writer
                if writer is None or writer.size != size:
                    have = PartSize() if writer is None else writer.size
                    raise InvalidArgument(f"part {part} has {have} on storage node {self._node.node}, not {size}")
                held = self.held.get(part) or await self._complete(writing, writer)
        if held.size != size:
            raise InvalidArgument(f"part {part} has {held.size} on storage node {self._node.node}, not {size}")
        return held

    def require(self, part: str) -> Held:
        held = self.held.get(part)
        if held is None:
            raise NotFound(f"storage node {self._node.node} has no staged part {part[:32]!r}: ask another holder")
        return held

    async def write_anew(self, held: Held, fetch: Callable[[int], Awaitable[bytes]]) -> Held:
        """Replace a part that is damaged here. ``fetch`` returns whole, intact frames from an offset. The damaged file
        stays until the new one is durable: parts of it may be intact nowhere else."""
        writing = _Writing(held.part)
        # Repairs are under no quota.
        writing.is_decided = True
        self._reserve(writing, held.size.bytes)
        try:
            new = await self._write_all(held, fetch)
        finally:
            self._reserve(writing, -held.size.bytes)
        if self.held.get(held.part.part) is not held:
            await self._remove([new])
            raise NotFound(f"part {held.part.part} is not needed any more")
        self.held[held.part.part] = new
        if new.path != held.path:
            # The new file is on another volume.
            await self._remove([held])
        return new

    async def _write_all(self, held: Held, fetch: Callable[[int], Awaitable[bytes]]) -> Held:
        writer = await self.in_thread(lambda: self._files.begin(held.part, checked=held.checked))
        try:
            while writer.size.bytes < held.size.bytes:
                data = await fetch(writer.size.bytes)
                await self.in_thread(lambda data=data: writer.append(data))  # type: ignore[misc]
            if writer.size != held.size:
                raise Damaged(f"part {held.part.part} has {writer.size} elsewhere, not {held.size}")
            return await self.in_thread(lambda: writer.finish(held.staged_us))
        except BaseException:
            await self._discard(writer)
            raise

    async def in_thread(self, job: Callable[[], T]) -> T:
        try:
            return await in_thread(self._threads, job)
        except DiskFull:
            self._room.found_full()
            raise

    def _writing_of(self, part: StagedPart, offset: int) -> _Writing:
        writing = self._writing.get(part.part)
        if writing is not None:
            if writing.part != part:
                raise InvalidArgument(f"part {part.part} was begun as another one: each attempt has a name of its own")
            return writing
        if part.part in self.held:
            raise AlreadyExists(f"part {part.part} is complete: nothing can be added to it")
        if self.parts >= self.parts_max or (offset and part.part in self._turned_away):
            # Several messages are in flight at a time: those after a refused first one are repeated too.
            if not offset and part.part not in self._turned_away:
                self._turned_away.append(part.part)
            raise ResourceExhausted(
                f"storage node {self._node.node} holds {self.parts} staged parts of at most {self.parts_max}",
                retry_ms=RETRY_MS if self.parts >= self.parts_max else RETRY_SOON_MS,
            )
        if offset:
            raise NotFound(
                f"storage node {self._node.node} has nothing of part {part.part}, it may have been started anew: stage "
                "it again"
            )
        if part.part in self._turned_away:
            self._turned_away.remove(part.part)
        writing = self._writing[part.part] = _Writing(part)
        return writing

    def _reserve(self, writing: _Writing, size: int) -> None:
        if size > 0:
            self._require_room(size)
            if writing.part.owner and not writing.is_decided:
                self.check_quota(writing.part.owner, size)
        writing.reserved += size
        self._count(writing.part, size)

    def _count(self, part: StagedPart, size: int) -> None:
        self.bytes += size
        if part.owner:
            self.staged_by[part.owner] += size
            if not self.staged_by[part.owner]:
                del self.staged_by[part.owner]

    def _require_room(self, size: int) -> None:
        if self.bytes + size > self.bytes_max:
            raise ResourceExhausted(
                f"storage node {self._node.node} holds {self.bytes} staged bytes of at most {self.bytes_max}; they go "
                "when their batches are published, or expire",
                retry_ms=RETRY_MS,
            )
        self._node.require_room(0)
        # Everything staged is written a second time when it is published, and it is decided on before that.
        if not self._room.has(size + self.bytes + size):
            self._is_short.set()
            raise ResourceExhausted(
                f"storage node {self._node.node} has room for {size} bytes, but not for publishing them with the "
                f"{self.bytes} that are staged: make room on its volumes",
                retry_ms=RETRY_MS,
            )
        self._node.require_room(size)

    async def _check(self, writing: _Writing, data: Buffer) -> bool:
        """Raise unless the content of these frames is valid. Return whether the frames are verified now."""
        checks = writing.checks
        if checks is None:
            return False
        try:
            needed = await checks.prepare(data, self.in_thread)
            async with self._memory.reserved(needed):
                await self.in_thread(lambda: checks.check(data))
            return True
        except Unavailable as error:
            raise _NotChecked(error) from error

    def _write(self, writing: _Writing, data: Buffer, *, is_verified: bool) -> None:
        """Write data. Called in a thread."""
        if writing.writer is None:
            writing.writer = self._files.begin(writing.part, checked=writing.is_checked)
        writing.writer.append(data, is_verified=is_verified)

    async def _complete(self, writing: _Writing, writer: PartWriter) -> Held:
        staged_us = system.wall_time_ns() // 1_000
        try:
            held = await self.in_thread(lambda: writer.finish(staged_us))
        except BaseException:
            await self._give_up(writing)
            raise
        self._writing.pop(held.part.part, None)
        self.held[held.part.part] = held
        self._node.counters.parts_staged += 1
        return held

    async def _give_up(self, writing: _Writing) -> None:
        if self._writing.get(writing.part.part) is not writing:
            return
        del self._writing[writing.part.part]
        self._count(writing.part, -writing.reserved)
        writing.reserved = 0
        if writing.writer is not None:
            await self._discard(writing.writer)

    async def _discard(self, writer: PartWriter) -> None:
        try:
            await self.in_thread(writer.discard)
        except CutwaterError as error:
            _log.warning("what is left of a part cannot be removed before the next start: %s", error.message)

    # Removing parts that are no longer needed.

    async def tidy_for_ever(self, ask: Ask, every_seconds: float = ASK_SECONDS) -> None:
        soon_seconds = min(every_seconds, ASK_SOON_SECONDS)
        while True:
            await asyncio.sleep(soon_seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(every_seconds - soon_seconds):
                    await self._is_short.wait()
            self._is_short.clear()
            try:
                await self.tidy(ask)
            except CutwaterError as error:
                _log.info("staged parts are kept for now: %s", error.message)

    async def tidy(self, ask: Ask) -> None:
        """Remove parts that the metadata repository no longer needs, and parts that were never completed."""
        now = system.monotonic()
        for writing in [one for one in self._writing.values() if now - one.touched > IDLE_SECONDS_MAX]:
            async with writing.lock:
                await self._give_up(writing)
        batches = [StagedBatch(info.run, info.batch, info.generation, info.age_us) for info in self.summary()]
        # Parts that are staged while the answer is on its way were not asked about.
        known = frozenset(self.held)
        for start in range(0, len(batches), ASKED_AT_ONCE):
            asked = tuple(batches[start : start + ASKED_AT_ONCE])
            answer = await ask(StagedRequest(self._node.node, asked))
            for run, epoch in (answer.epochs or {}).items():
                self.epochs.note(run, epoch)
            await self._drop(answer.drop, known)

    def summary(self) -> tuple[api.StagedInfo, ...]:
        """Summarize what is held, by batch. A batch is as old as its newest part: tasks may still add to it."""
        now_us = system.wall_time_ns() // 1_000
        found: dict[tuple[RunId, BatchNumber, int], list[Held]] = {}
        for held in self.held.values():
            found.setdefault(_batch_of(held), []).append(held)
        return tuple(
            api.StagedInfo(
                *key,
                parts=len(some),
                bytes=sum(held.size.bytes for held in some),
                age_us=max(0, now_us - max(held.staged_us for held in some)),
            )
            for key, some in sorted(found.items(), key=lambda item: item[0])
        )

    async def _drop(self, batches: Iterable[StagedBatch], known: Container[str]) -> None:
        """Drop the parts of these batches that are ``known``."""
        named = {(batch.run, batch.batch, batch.generation) for batch in batches}
        doomed = [held for held in self.held.values() if held.part.part in known and _batch_of(held) in named]
        if not doomed:
            return
        for held in doomed:
            del self.held[held.part.part]
            self.block_bytes.pop(held.part.part, None)
            self._count(held.part, -held.size.bytes)
        left = await self._remove(doomed)
        for held in left:
            # Its file still exists and takes up space. The next request asks about it again.
            self.held[held.part.part] = held
            self._count(held.part, held.size.bytes)
        self._node.counters.parts_dropped += len(doomed) - len(left)

    async def _remove(self, parts: list[Held]) -> list[Held]:
        """Remove parts; return those that could not be removed."""
        failed = await self.in_thread(lambda: self._files.drop(parts))
        for held, why in failed:
            _log.warning("a staged part cannot be removed now: %s", why, extra={"path": str(held.path)})
        return [held for held, _ in failed]


async def _at_once(peer: Peer | None, size: int) -> None:
    return


def _batch_of(held: Held) -> tuple[RunId, BatchNumber, int]:
    return held.part.run, held.part.batch, held.part.generation
