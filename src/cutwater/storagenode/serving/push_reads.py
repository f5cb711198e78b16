"""Pushes records to subscribed readers as they are committed. Commits wake it, never a clock.

A reader that is behind gets full messages, one after another, as fast as it takes them. A reader that has caught up
gets each commit as soon as it can be found in the files, or several at once if they come faster than they are sent. If
a commit concerns other log streams only, the reader is told that this one is complete up to there, so that it does not
wait; such messages are held back briefly after others were sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from cutwater.core.read.commit_index import last_context_at
from cutwater.errors import Unavailable
from cutwater.protocol import storage_api as api
from cutwater.storagenode.memory_budget import MemoryBudget
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.serving.picking import Needs, within
from cutwater.storagenode.serving.reading import (
    ReadPart,
    indexed,
    indexed_end,
    read_part,
    require_not_trimmed,
    until_indexed,
)
from cutwater.types import GLSN, LLSN
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.calls.streams import StreamSender
from cutwater.wire.connection import Connection

QUIET_SECONDS_MIN = 0.001
QUIET_SECONDS_PER_STREAM = 0.0001
"""Minimum interval between messages without records, by the number of log streams that a connection follows. Each
message costs the reader a little; this limits their share of its time."""


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
        return await driver.in_reader(lambda: _event_time(driver, call.argument))

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
                self._node.counters.read_bytes += part.bytes
                has_more = part.last_llsn < indexed_end(driver)
                await sender.send(
                    part.header, part.body, backlog_items=int(has_more), backlog_bytes=part.bytes * has_more
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
        require_not_trimmed(driver, from_glsn)
        end = indexed_end(driver)
        # A commit after ``end`` was read is either found here, or read later from there on.
        llsn = await driver.in_reader(lambda: driver.storage.from_glsn(from_glsn))
        return LLSN(end + 1) if llsn is None else llsn

    def _require_readable(self, driver: ReplicaDriver) -> None:
        if self._node.driver(driver.stream) is not driver:
            # It was replaced by a new replica, so this one gets no more events.
            raise Unavailable(f"log stream {driver.stream} was replaced here: follow it again")
        driver.require_readable()


def _find(driver: ReplicaDriver, asked: api.FindArguments) -> api.FindAnswer:
    through, storage = indexed(driver).complete_through, driver.storage
    glsn = storage.within(asked.bytes_max) if asked.bytes_max else storage.from_time(asked.time)
    return api.FindAnswer(glsn, through, storage.size_bytes)


def _event_time(driver: ReplicaDriver, asked: api.EventTimeArguments) -> api.EventTimeAnswer:
    found, storage = indexed(driver), driver.storage
    end = found.end
    next_llsn = storage.from_glsn(GLSN(asked.at + 1))
    # A batch also begins after the last commit: commits never divide a batch.
    is_inside = next_llsn is not None and next_llsn <= end
    first = storage.entry_at(next_llsn).first_llsn if is_inside and next_llsn is not None else LLSN(end + 1)
    running = storage.running_before(first)
    commit = last_context_at(storage.contexts, asked.at)
    # A declaration takes effect at the end of its batch, so not at a position within it.
    idle = running.idle and not (is_inside and next_llsn != first)
    return api.EventTimeAnswer(running.time_max, running.declared, commit, found.complete_through, idle)


def _read_on(driver: ReplicaDriver, llsn: LLSN, arguments: api.ReadArguments) -> ReadPart | Needs[ReadPart]:
    return read_part(driver, indexed(driver), llsn, arguments)


async def _within(news: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return
