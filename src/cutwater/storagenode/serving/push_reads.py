"""Pushes records to subscribed readers as they are committed. Commits wake it, never a clock.

A reader that is behind gets full messages, one after another, as fast as it takes them. A reader that has caught up
gets each commit as soon as it can be found in the files, or several at once if they come faster than they are sent. If
a commit concerns other log streams only, the reader is told that this one is complete up to there, so that it does not
wait; such messages are held back briefly after others were sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from cutwater.core.read.commit_index import context_of_llsn, last_context_at
from cutwater.errors import Damaged, Trimmed, Unavailable
from cutwater.format.entry_codec import EntryFrame
from cutwater.protocol import storage_api as api
from cutwater.protocol.methods import Payload
from cutwater.storagenode.memory_budget import MemoryBudget
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.serving.picking import READ_BYTES_MAX, Needs, memory_needed, within
from cutwater.storagenode.serving.reading import indexed_end, pick_columns, until_indexed
from cutwater.types import GLSN, LLSN, CommitContext, Revision
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.calls.streams import StreamSender
from cutwater.wire.connection import Connection

QUIET_SECONDS_MIN = 0.001
QUIET_SECONDS_PER_STREAM = 0.0001
"""Minimum interval between messages without records, by the number of log streams that a connection follows. Each
message costs the reader a little; this limits their share of its time."""


class _Part(Struct, frozen=True):
    """Some entries, and the number of committed records that were not read yet."""

    header: api.ReadAnswerHeader
    body: Payload
    size: int
    last_llsn: LLSN
    left: int


class Following:
    def __init__(self, node: StorageNode, memory: MemoryBudget) -> None:
        self._node, self._memory = node, memory
        self._streams: Counter[Connection] = Counter()
        """How many log streams each connection follows."""

    async def serve(self, call: Call[api.ReadArguments], sender: StreamSender[api.ReadAnswerHeader]) -> None:
        """Push records until the reader disconnects or this replica can no longer be read."""
        arguments = call.argument
        driver = self._node.driver(arguments.stream)
        news = asyncio.Event()
        driver.watch(news.set)
        self._streams[call.connection] += 1
        try:
            await self._follow(call, driver, news, sender)
        except Damaged as error:
            self._node.damage_met(arguments.stream, error)
            raise
        finally:
            driver.unwatch(news.set)
            self._streams[call.connection] -= 1
            if not self._streams[call.connection]:
                del self._streams[call.connection]

    async def find(self, call: Call[api.FindArguments]) -> api.FindAnswer:
        driver = self._node.driver(call.argument.stream)
        driver.require_readable()
        await until_indexed(driver)
        return await driver.in_reader(lambda: _find(driver, call.argument))

    async def event_time(self, call: Call[api.EventTimeArguments]) -> api.EventTimeAnswer:
        driver = self._node.driver(call.argument.stream)
        driver.require_readable()
        try:
            return await driver.in_reader(lambda: _event_time(driver, call.argument))
        except Damaged as error:
            self._node.damage_met(call.argument.stream, error)
            raise

    async def _follow(
        self,
        call: Call[api.ReadArguments],
        driver: ReplicaDriver,
        news: asyncio.Event,
        sender: StreamSender[api.ReadAnswerHeader],
    ) -> None:
        arguments, loop = call.argument, asyncio.get_running_loop()
        next_llsn = await self._start(driver, arguments.from_glsn)
        told, told_at = GLSN(0), 0.0
        while True:
            news.clear()
            self._require_readable(driver)
            if next_llsn <= indexed_end(driver):
                found = await driver.in_reader(partial(_read_on, driver, next_llsn, arguments))
                part = await within(self._memory, driver.in_reader, found)
                self._node.counters.reads += 1
                self._node.counters.read_bytes += part.size
                await sender.send(
                    part.header, part.body, backlog_items=int(part.left > 0), backlog_bytes=part.size * (part.left > 0)
                )
                next_llsn = LLSN(part.last_llsn + 1)
                told, told_at = part.header.complete_through, loop.time()
                continue
            replica = driver.replica
            if replica.committed_end < next_llsn and replica.complete_through > told:
                pace = max(QUIET_SECONDS_MIN, QUIET_SECONDS_PER_STREAM * self._streams[call.connection])
                wait = told_at + pace - loop.time()
                if wait <= 0:
                    told, told_at = replica.complete_through, loop.time()
                    await sender.send(api.ReadAnswerHeader(arguments.stream, (), told, replica.revision))
                    continue
                await _within(news, wait)
                continue
            await news.wait()

    async def _start(self, driver: ReplicaDriver, from_glsn: GLSN) -> LLSN:
        """Return the first LLSN to send."""
        self._require_readable(driver)
        trimmed_before = driver.replica.hard_state.trimmed_before
        if from_glsn < trimmed_before:
            raise Trimmed(from_glsn, trimmed_before)
        end = indexed_end(driver)
        # A commit after ``end`` was read is either found here, or read later from there on.
        llsn = await driver.in_reader(lambda: driver.storage.from_glsn(from_glsn))
        return LLSN(end + 1) if llsn is None else llsn

    def _require_readable(self, driver: ReplicaDriver) -> None:
        if self._node.driver(driver.stream) is not driver:
            # It was replaced by a new replica, so this one gets no more events.
            raise Unavailable(f"log stream {driver.stream} was replaced here: follow it again")
        driver.require_readable()


def complete_through(driver: ReplicaDriver) -> GLSN:
    """Return the position up to which all committed records can be found in the files."""
    replica = driver.replica
    # Read in this order, because commits continue: the complete position must not exceed the committed end.
    through, committed_end, last = replica.complete_through, replica.committed_end, driver.storage.last_commit
    if indexed_end(driver) >= committed_end:
        return through
    return min(through, last.high_watermark if last is not None else GLSN(0))


def _find(driver: ReplicaDriver, asked: api.FindArguments) -> api.FindAnswer:
    through, storage = complete_through(driver), driver.storage
    glsn = storage.within(asked.bytes_max) if asked.bytes_max else storage.from_time(asked.time)
    return api.FindAnswer(glsn, through, storage.size_bytes)


def _event_time(driver: ReplicaDriver, asked: api.EventTimeArguments) -> api.EventTimeAnswer:
    through, storage, end = complete_through(driver), driver.storage, indexed_end(driver)
    next_llsn = storage.from_glsn(GLSN(asked.at + 1))
    # A batch also begins after the last commit: commits never divide a batch.
    is_inside = next_llsn is not None and next_llsn <= end
    first = storage.entry_at(next_llsn).first_llsn if is_inside and next_llsn is not None else LLSN(end + 1)
    running = storage.running_before(first)
    commit = last_context_at(storage.contexts, asked.at)
    # A declaration takes effect at the end of its batch, so not at a position within it.
    idle = running.idle and not (is_inside and next_llsn != first)
    return api.EventTimeAnswer(running.time_max, running.declared, commit, through, idle)


def _read_on(driver: ReplicaDriver, llsn: LLSN, arguments: api.ReadArguments) -> _Part | Needs[_Part]:
    replica = driver.replica
    # Read in this order: what was complete before is still complete after the read.
    through, revision, committed_end = complete_through(driver), replica.revision, indexed_end(driver)
    part = driver.storage.read(llsn, committed_end, min(max(arguments.bytes_max, 1), READ_BYTES_MAX))

    def answer(frames: Sequence[EntryFrame], body: Payload) -> _Part:
        return _part(driver, llsn, arguments, part.commits, frames, body, (through, revision, committed_end))

    if not arguments.projection:
        return answer(part.frames, part.data)
    needed = memory_needed(part.frames, arguments.projection)

    def pick() -> _Part:
        return answer(*pick_columns(part.frames, arguments.projection))

    return Needs(needed, pick) if needed else pick()


def _part(
    driver: ReplicaDriver,
    llsn: LLSN,
    arguments: api.ReadArguments,
    contexts: Sequence[CommitContext],
    frames: Sequence[EntryFrame],
    body: Payload,
    seen: tuple[GLSN, Revision, LLSN],
) -> _Part:
    """Build a part. ``seen``: before the read, the position up to which it was complete, the revision, and the
    committed end."""
    through, revision, committed_end = seen
    last_llsn = frames[-1].header.last_llsn
    commits = tuple(context for context in contexts if context.first_llsn <= last_llsn)
    # A trim may end within a batch, so the requested position counts, not the beginning of its batch. The position
    # where this search began does not count either, because the commit of the requested position may not have been
    # found then: the reader skips what lies before.
    asked, trimmed_before = context_of_llsn(commits, llsn), driver.replica.hard_state.trimmed_before
    wanted = max(asked.glsn_of(llsn), arguments.from_glsn) if asked is not None else trimmed_before
    if wanted < trimmed_before:
        raise Trimmed(wanted, trimmed_before)
    if last_llsn < committed_end:
        context = context_of_llsn(commits, last_llsn)
        through = min(through, context.glsn_of(last_llsn) if context else GLSN(0))
    size = sum(frame.header.frame_bytes for frame in frames)
    header = api.ReadAnswerHeader(arguments.stream, commits, through, revision)
    return _Part(header, body, size, last_llsn, committed_end - last_llsn)


async def _within(news: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return
