"""Background scrub: reads all data of a node piece by piece, and starts the repair of damaged data.

So damage in data without readers is found while peers still have intact copies. One pass covers all replicas that are
members: small files, headers and indexes, commit contexts, then committed entries, all with their checksums. It is slow
on purpose: both its bytes per second and its share of one core are limited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec import Struct

from cutwater.errors import CutwaterError, Damaged, Trimmed
from cutwater.format.errors import DamagedEntries, DamagedFile
from cutwater.runtime import system
from cutwater.storage.format import CONTEXT_BYTES
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.repair.damage_repair import damage_of
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.serving.reading import indexed_end
from cutwater.types import LLSN, LogStreamId, ReplicaState

_log = logging.getLogger(__name__)

CHUNK_BYTES = 1024 * 1024
CONTEXTS_AT_ONCE = 4_096
CPU_SHARE = 0.02
"""Maximum share of one core for the scrub: entries may be small, and each one is checked."""
PAUSE_SECONDS_MAX = 60.0

T = TypeVar("T")


class ScrubOptions(Struct, frozen=True):
    bytes_per_second: int = 8 * 1024 * 1024
    """Read rate; 0 turns the scrub off."""
    first_after_seconds: float = 60.0
    every_seconds: float = 3_600.0
    """Pause between two passes."""


class ScrubProgress(Struct):
    """Counts of this process, for metrics and status."""

    passes: int = 0
    bytes: int = 0
    findings: int = 0
    replicas_done: int = 0
    """Replicas of the current pass that are done."""
    replicas: int = 0


class Scrubber:
    """Finds damage. What a read meets is passed on for repair by ``ReplicaDriver.in_reader``, and only counted here."""

    def __init__(self, node: StorageNode, options: ScrubOptions) -> None:
        self._node, self._options = node, options
        self.progress = ScrubProgress()

    async def scrub_for_ever(self) -> None:
        if not self._options.bytes_per_second:
            return
        await asyncio.sleep(self._options.first_after_seconds)
        while True:
            await self.scrub()
            await asyncio.sleep(self._options.every_seconds)

    async def scrub(self) -> None:
        """Make one pass over all replicas that are members."""
        streams = [stream for stream, driver in self._node.replicas.items() if self._counts(stream, driver)]
        progress = self.progress
        progress.replicas, progress.replicas_done = len(streams), 0
        for stream in streams:
            driver = self._node.replicas.get(stream)
            if driver is not None and self._counts(stream, driver):
                try:
                    await self._scrub_replica(stream, driver)
                except Damaged:
                    progress.findings += 1
                except CutwaterError as error:
                    # It is being reopened, learned or removed; the next pass checks it again.
                    _log.debug("log stream %s could not be scrubbed: %s", stream, error.message)
            progress.replicas_done += 1
        progress.passes += 1

    def _counts(self, stream: LogStreamId, driver: ReplicaDriver) -> bool:
        """Whether the replica is a trusted member; leftovers of a replaced one are not scrubbed."""
        replica = driver.replica
        is_member = bool(replica.hard_state.chain) or replica.state is ReplicaState.SEALED
        return replica.trusted and is_member and stream not in self._node.leftovers

    async def _scrub_replica(self, stream: LogStreamId, driver: ReplicaDriver) -> None:
        storage, progress = driver.storage, self.progress
        try:
            for finding in await self._in_reader(driver, storage.check_files):
                progress.findings += 1
                self._node.damage_met(stream, damage_of(finding))
        except Damaged:
            progress.findings += 1
        at = 0
        while at < len(storage.contexts):
            try:
                at = await self._step(driver, partial(_read_contexts, storage, at))
            except Damaged:
                # The repair finds all damaged commit contexts.
                progress.findings += 1
                break
        llsn = int(storage.first_llsn)
        while llsn <= indexed_end(driver):
            try:
                llsn = await self._step(driver, partial(_read_entries, storage, LLSN(llsn), indexed_end(driver)))
            except DamagedEntries as error:
                progress.findings += 1
                llsn = max(error.last_llsn, llsn) + 1
            except Trimmed:
                llsn = max(int(storage.first_llsn), llsn + 1)

    async def _step(self, driver: ReplicaDriver, job: Callable[[], tuple[int, int]]) -> int:
        """Do one piece of the work; return where the next one begins."""
        following, size = await self._in_reader(driver, job)
        self.progress.bytes += size
        await asyncio.sleep(size / self._options.bytes_per_second)
        return following

    async def _in_reader(self, driver: ReplicaDriver, job: Callable[[], T]) -> T:
        """Run a job in a thread, then pause to leave the core to other work."""
        spent = 0.0

        def timed() -> T:
            nonlocal spent
            begun = system.thread_time()
            try:
                return job()
            finally:
                spent = system.thread_time() - begun

        try:
            return await driver.in_reader(timed)
        finally:
            await asyncio.sleep(min(spent / CPU_SHARE, PAUSE_SECONDS_MAX))


def _read_contexts(storage: SegmentStorage, start: int) -> tuple[int, int]:
    """Return where the next piece begins, and the number of bytes read; as ``_read_entries`` does."""
    contexts = storage.contexts
    end = min(len(contexts), start + CONTEXTS_AT_ONCE)
    for i in range(start, end):
        contexts[i]
    return end, (end - start) * CONTEXT_BYTES


def _read_entries(storage: SegmentStorage, llsn: LLSN, end: LLSN) -> tuple[int, int]:
    with suppress(DamagedFile):
        found = storage.read(llsn, end, CHUNK_BYTES)
        return found.last_llsn + 1, len(found.data)
    # The commits of these entries cannot be read, which was reported before: the entries may be damaged as well.
    size, last = 0, LLSN(end)
    for entry in storage.entries(llsn, end):
        size, last = size + len(entry.batch.body), entry.last_llsn
        if size >= CHUNK_BYTES:
            break
    return last + 1, size
