"""Serves committed records: ranges for readers, single entries for peers that repair damage."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import cast

from msgspec import Struct, structs

from cutwater.core.read.commit_index import context_of_llsn
from cutwater.errors import NotYetCommitted, Trimmed
from cutwater.format.checksum import Buffer, crc32c
from cutwater.format.entry_codec import EntryFrame, encode_frame
from cutwater.protocol import storage_api as api
from cutwater.protocol.methods import Payload
from cutwater.protocol.scan_api import UNKNOWN
from cutwater.storagenode.memory_budget import MemoryBudget
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.serving.picking import READ_BYTES_MAX, Needs, Room, inflated, memory_needed, picked, within
from cutwater.types import GLSN, LLSN, BatchKind, CommitContext, Revision
from cutwater.wire.calls.handlers import ReplyWithBody
from cutwater.wire.calls.incoming_calls import Call

READ_WAIT_SECONDS = 0.001
READ_WAITS_MAX = 50
"""How long a read waits for commits that are being written; later ones are read the next time."""


class Reading:
    """Serves reads. Damaged data is never served: the reader is told to try again or elsewhere, and a repair begins."""

    def __init__(self, node: StorageNode, memory: MemoryBudget) -> None:
        self._node, self._memory = node, memory

    async def read(self, call: Call[api.ReadArguments]) -> ReplyWithBody[api.ReadAnswerHeader]:
        arguments = call.argument
        driver = self._node.driver(arguments.stream)
        driver.require_readable()
        await until_indexed(driver)
        found = await driver.in_reader(lambda: _read(driver, arguments))
        part = await within(self._memory, driver.in_reader, found)
        count_read(self._node, part.body)
        return ReplyWithBody(part.header, part.body)

    async def copy(self, call: Call[api.CopyArguments]) -> ReplyWithBody[api.CopyAnswer]:
        stream, llsn = call.argument.stream, call.argument.llsn
        driver = self._node.driver(stream)
        if call.argument.commits_only:
            # That it has no such commit counts only if it has everything else.
            driver.require_readable()
        else:
            # A replica that must learn may serve copies too: up to its own committed LLSN, its data is valid.
            driver.require_committed()
        if llsn > indexed_end(driver):
            raise NotYetCommitted(f"log stream {stream} is committed to LLSN {indexed_end(driver)} here, not to {llsn}")
        if call.argument.commits_only:
            found = await driver.in_reader(lambda: driver.storage.contexts.covering(llsn, llsn), is_copy=True)
            return ReplyWithBody(api.CopyAnswer(tuple(found)), b"")
        part = await driver.in_reader(lambda: driver.storage.read(llsn, llsn, 1), is_copy=True)
        return ReplyWithBody(api.CopyAnswer(part.commits), part.data)


async def until_indexed(driver: ReplicaDriver) -> None:
    """Wait briefly for commits that are acknowledged but still being written, before a read."""
    for _ in range(READ_WAITS_MAX):
        if indexed_end(driver) >= driver.replica.committed_end:
            return
        await asyncio.sleep(READ_WAIT_SECONDS)


def indexed_end(driver: ReplicaDriver) -> LLSN:
    """Return the last LLSN whose commit is in the files, where reads look for it."""
    return _end_of(driver.storage.last_commit, driver)


def _end_of(last: CommitContext | None, driver: ReplicaDriver) -> LLSN:
    return last.last_llsn if last is not None else driver.replica.hard_state.base_llsn


class FoundEntries(Struct, frozen=True):
    """The committed entries from a position on: the first LLSN, or None if there are none, and the last one.
    ``complete_through`` holds for an answer that reaches the last one."""

    first: LLSN | None
    end: LLSN
    complete_through: GLSN
    revision: Revision

    def complete(self, commits: Sequence[CommitContext], last_llsn: LLSN) -> GLSN:
        """Return the position up to which an answer that ends with this LLSN is complete."""
        if last_llsn >= self.end:
            return self.complete_through
        context = context_of_llsn(commits, last_llsn)
        return min(self.complete_through, context.glsn_of(last_llsn) if context else GLSN(0))


def indexed(driver: ReplicaDriver, first: LLSN | None = None) -> FoundEntries:
    """Return the committed entries that can be found in the files."""
    replica = driver.replica
    # Read in this order, because commits continue: what was complete before is still complete after the read.
    through, revision, end = replica.complete_through, replica.revision, replica.committed_end
    # Read it once: more commits may be written at any moment, and both values below must be of the same commit.
    last = driver.storage.last_commit
    if _end_of(last, driver) < end:
        # Nothing beyond what can be found is known to be complete.
        end = _end_of(last, driver)
        through = min(through, last.high_watermark if last is not None else GLSN(0))
    return FoundEntries(first, end, through, revision)


def find(driver: ReplicaDriver, from_glsn: GLSN, to_glsn: GLSN | None) -> FoundEntries:
    found, storage = indexed(driver), driver.storage
    through, end = found.complete_through, found.end
    require_not_trimmed(driver, from_glsn)
    if to_glsn is not None:
        through = min(through, to_glsn)
        end = min(end, last_llsn_at(storage.contexts, through))
    first = storage.from_glsn(from_glsn)
    return FoundEntries(first if first is not None and first <= end else None, end, through, found.revision)


def require_not_trimmed(driver: ReplicaDriver, glsn: GLSN) -> None:
    trimmed_before = driver.replica.hard_state.trimmed_before
    if glsn < trimmed_before:
        raise Trimmed(glsn, trimmed_before)


def last_llsn_at(contexts: Sequence[CommitContext], glsn: GLSN) -> LLSN:
    """Return the last LLSN at or below this GLSN; ``UNKNOWN`` if that was forgotten after a trim."""
    i = bisect_right(contexts, glsn, key=attrgetter("first_glsn")) - 1
    if i < 0:
        return LLSN(0) if not contexts or contexts[0].first_llsn == 1 else UNKNOWN
    found = contexts[i]
    return found.last_llsn if glsn >= found.last_glsn else LLSN(found.first_llsn + glsn - found.first_glsn)


class ReadPart(Struct, frozen=True):
    """Some entries for a reader. ``bytes`` is their size as they are stored."""

    header: api.ReadAnswerHeader
    body: Payload
    bytes: int
    last_llsn: LLSN


def _read(driver: ReplicaDriver, arguments: api.ReadArguments) -> ReadPart | Needs[ReadPart]:
    found = find(driver, arguments.from_glsn, None)
    if found.first is None:
        header = api.ReadAnswerHeader(arguments.stream, (), found.complete_through, found.revision)
        return ReadPart(header, b"", 0, found.end)
    return read_part(driver, found, found.first, arguments)


def read_part(
    driver: ReplicaDriver, found: FoundEntries, llsn: LLSN, asked: api.ReadArguments
) -> ReadPart | Needs[ReadPart]:
    """Read some of the found entries, from this LLSN on."""
    part = driver.storage.read(llsn, found.end, min(max(asked.bytes_max, 1), READ_BYTES_MAX))

    def answer(frames: Sequence[EntryFrame], body: Payload) -> ReadPart:
        last_llsn = frames[-1].header.last_llsn
        commits = tuple(context for context in part.commits if context.first_llsn <= last_llsn)
        # A trim may end within a batch, so the requested position counts, not the beginning of its batch. The position
        # where this search began does not count either, because the commit of the requested position may not have been
        # found then: the reader skips what lies before.
        commit = context_of_llsn(commits, llsn)
        if commit is not None:
            require_not_trimmed(driver, max(commit.glsn_of(llsn), asked.from_glsn))
        header = api.ReadAnswerHeader(asked.stream, commits, found.complete(commits, last_llsn), found.revision)
        return ReadPart(header, body, sum(frame.header.frame_bytes for frame in frames), last_llsn)

    if not asked.projection:
        return answer(part.frames, part.data)
    needed = memory_needed(part.frames, asked.projection)

    def pick() -> ReadPart:
        return answer(*pick_columns(part.frames, asked.projection))

    return Needs(needed, pick) if needed else pick()


def pick_columns(
    frames: Sequence[EntryFrame], projection: Mapping[int, api.Columns]
) -> tuple[Sequence[EntryFrame], list[Buffer]]:
    """Return as many frames as an answer can hold, each with the wanted columns only."""
    pieces: list[Buffer] = []
    room = Room()
    for number, frame in enumerate(frames):
        wanted = projection.get(frame.header.schema)
        parts: list[Buffer] = [frame.data]
        inflated_bytes = 0
        if wanted is not None and frame.header.kind is BatchKind.DATA:
            parts, inflated_bytes = _picked(frame, wanted), inflated(frame.body)
        if not room.take(sum(map(len, parts)), inflated_bytes):
            return frames[:number], pieces
        pieces += parts
    return frames, pieces


def _picked(frame: EntryFrame, wanted: api.Columns) -> list[Buffer]:
    """Encode a frame with the wanted columns. A malformed batch stays as it is, and is not marked as checked."""
    body = picked(frame, wanted)
    if body is None:
        return [frame.data]
    entry = frame.header.entry(b"")
    batch = structs.replace(entry.batch, body=cast(bytes, body), checksum=crc32c(body), checked=True)
    header, trailer = encode_frame(structs.replace(entry, batch=batch), frame.header.running)
    return [header, body, trailer]


def count_read(node: StorageNode, body: Payload) -> None:
    pieces = body if isinstance(body, list | tuple) else (body,)
    node.counters.reads += 1
    node.counters.read_bytes += sum(memoryview(piece).nbytes for piece in pieces)
