"""Repair of damage: an intact copy from a peer takes the place of what fails its checksum.

Until then the damaged range is not served. What nobody has a copy of stays damaged for ever, and is never served. What
cannot be put right in place although a peer has it makes the replica one that cannot be opened, which is learned anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from cutwater.errors import CutwaterError, Damaged
from cutwater.storage.errors import DamagedEntries, DamagedFile
from cutwater.storage.files import look_again
from cutwater.storage.frames import Frame, frames_in
from cutwater.storage.interface import ReplicaStorage
from cutwater.storagenode.links import Peers
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.replica_driver import ReplicaDriver
from cutwater.types import LLSN, CommitContext, LogStreamId
from cutwater.wire import storage_api as api

_log = logging.getLogger(__name__)

COPY_MS_MAX = 5_000
REPAIR_SECONDS_MAX = 60.0
WANTED_MAX = 1_024
AGAIN_SECONDS = 1.0
"""How long a log stream waits after a repair that failed."""


class _Copy(Struct, frozen=True):
    frame: Frame
    commits: tuple[CommitContext, ...]


class Mender:
    """One repair at a time for each log stream. What is given up, or is too much, will be met again."""

    def __init__(self, node: StorageNode, peers: Peers, spawn: Callable[[Awaitable[None]], None]) -> None:
        self._node, self._peers, self._spawn = node, peers, spawn
        self._wanted: dict[LogStreamId, dict[tuple[LLSN, LLSN], Damaged]] = {}
        """What is to be repaired, by its LLSNs, the one being repaired first; a log stream is here while someone works
        on it."""
        self._not_before: dict[LogStreamId, float] = {}

    def mend(self, stream: LogStreamId, error: Damaged) -> None:
        """Begin, if nobody has yet."""
        if time.monotonic() < self._not_before.get(stream, 0.0):
            return
        place = (error.first_llsn, error.last_llsn) if isinstance(error, DamagedEntries) else (LLSN(0), LLSN(0))
        wanted = self._wanted.get(stream)
        if wanted is None:
            self._wanted[stream] = {place: error}
            self._spawn(self._work(stream))
        elif len(wanted) < WANTED_MAX:
            wanted.setdefault(place, error)

    async def _work(self, stream: LogStreamId) -> None:
        wanted = self._wanted[stream]
        try:
            while wanted:
                place, error = next(iter(wanted.items()))
                _log.error("log stream %s is damaged: %s", stream, error.message, extra={"stream": stream})
                async with asyncio.timeout(REPAIR_SECONDS_MAX):
                    await self._mend(self._node.driver(stream), error)
                del wanted[place]
        except (CutwaterError, TimeoutError) as failure:
            self._not_before[stream] = time.monotonic() + AGAIN_SECONDS
            _log.warning("log stream %s could not be repaired: %s", stream, failure, extra={"stream": stream})
        finally:
            del self._wanted[stream]

    async def _mend(self, driver: ReplicaDriver, error: Damaged) -> None:
        files = 0
        with suppress(Damaged):
            # What is in them is known here too. Where that did not help, copies of the entries will.
            files = await driver.in_writer(driver.storage.repair_headers)
        if isinstance(error, DamagedEntries):
            copies = await self._mend_entries(driver, error.first_llsn, error.last_llsn)
        else:
            copies = await self._mend_contexts(driver)
        if not driver.replica.trusted:
            driver.reopen()
        if files or copies:
            what = "log stream %s was repaired: %d files by what is known here, %d copies from a peer"
            _log.info(what, driver.stream, files, copies, extra={"stream": driver.stream})

    async def _mend_entries(self, driver: ReplicaDriver, first_llsn: LLSN, llsn: LLSN) -> int:
        """From the last one back: the first ones may be trimmed, and then nobody has a copy of them. How many copies it
        took."""
        storage, copies = driver.storage, 0
        while llsn >= max(first_llsn, storage.first_llsn):
            frame = (await self._fetch(driver, llsn)).frame
            entry, running = frame.entry, frame.header.running
            try:
                await driver.in_writer(partial(storage.repair, entry, running))
                await self._node.in_thread(partial(storage.entry_at, entry.first_llsn))
            except Damaged as error:
                self._node.cannot_open(driver.stream, error)
                raise
            self._node.counters.entries_repaired += 1
            copies += 1
            llsn = LLSN(entry.first_llsn - 1)
        return copies

    async def _mend_contexts(self, driver: ReplicaDriver) -> int:
        """How many copies it took."""
        storage, copies = driver.storage, 0
        search = partial(look_again, partial(first_damaged_commit, storage), Path("commits"))
        while (llsn := await self._node.in_thread(search)) is not None:
            commits = (await self._fetch(driver, llsn)).commits
            repaired = [await driver.in_writer(partial(storage.repair_context, commit)) for commit in commits]
            if not any(repaired):
                error = DamagedFile(Path("commits"), f"the commit of LLSN {llsn} cannot be put in its place")
                self._node.cannot_open(driver.stream, error)
                raise error
            self._node.counters.contexts_repaired += 1
            copies += 1
        return copies

    async def _fetch(self, driver: ReplicaDriver, llsn: LLSN) -> _Copy:
        """An intact copy of a committed entry, from whoever has one."""
        asked = api.CopyArguments(driver.stream, llsn)
        for peer, connection in self._peers.connected(driver.replica.hard_state.chain):
            try:
                received = await connection.call(api.COPY, asked, timeout_ms=COPY_MS_MAX)
                frame = next(frames_in(bytes(received.body)))
            except (CutwaterError, StopIteration) as error:
                _log.debug("storage node %s has no copy of %s: %s", peer, asked, error)
                continue
            if frame.header.first_llsn <= llsn <= frame.header.last_llsn:
                return _Copy(frame, received.value.commits)
        raise Damaged(f"nobody has an intact copy of LLSN {llsn} of log stream {driver.stream} now")


def first_damaged_commit(storage: ReplicaStorage) -> LLSN | None:
    """An LLSN of the first commit context that cannot be read, as far as its neighbours tell; None if all can be."""
    contexts = storage.contexts
    end = LLSN(storage.first_llsn - 1)
    for i in range(len(contexts)):
        try:
            end = contexts[i].last_llsn
        except DamagedFile:
            try:
                return LLSN(contexts[i + 1].first_llsn - 1)
            except (DamagedFile, IndexError):
                return LLSN(end + 1)
    return None
