"""Creates, opens, renews and removes the directories of replicas, off the event loop.

This takes many syncs, and the other replicas continue meanwhile. One log stream has at most one job at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from cutwater.errors import CutwaterError, Unavailable
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.replica.replica_stores import VolumeStores
from cutwater.types import GLSN, LogStreamId, StorageNodeId

_log = logging.getLogger(__name__)

JOBS_AT_ONCE_MAX = 4
"""How many replicas are created, renewed or removed at the same time."""
WRITER_SECONDS_MAX = 60.0
"""How long a job waits for the last writes of a replica that is gone."""
RETRY_SECONDS_MIN = 0.05
RETRY_SECONDS_MAX = 2.0
"""The leader asks again after each report, hundreds of times a second. A job that failed is not repeated so often."""


class Owner(Protocol):
    """What a storage node does with the results. All calls but ``tell`` are made on the event loop."""

    def tell(self, job: Callable[[], None]) -> None:
        """Call something on the event loop soon, from any thread."""

    def begin(self, stream: LogStreamId, storage: SegmentStorage) -> None:
        """Take over a directory that was created or opened."""

    def still_unreadable(self, stream: LogStreamId, error: CutwaterError) -> None: ...

    def directory_done(self, stream: LogStreamId, error: CutwaterError | None) -> None:
        """Note that a job has ended."""


class DirectoryWork:
    def __init__(self, node: StorageNodeId, stores: VolumeStores, owner: Owner) -> None:
        self.under_way: dict[LogStreamId, asyncio.Future[None]] = {}
        self.abandoned: dict[LogStreamId, ReplicaDriver] = {}
        """Replicas that are gone, but whose last writes may still be on their way to their directories."""
        self._failed: dict[LogStreamId, tuple[float, float]] = {}
        """Log streams whose last job failed: how long the wait is, and when a job may begin again."""
        self._node, self._stores, self._owner = node, stores, owner
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(JOBS_AT_ONCE_MAX, thread_name_prefix=f"chores of storage node {node}")
        self._is_over = False

    def end(self) -> None:
        """Begin no job any more. Those under way go on."""
        self._is_over = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def create(self, stream: LogStreamId, high_watermark: GLSN) -> None:
        def job() -> None:
            self._opened(stream, self._stores.create(stream, high_watermark))

        self._begin(stream, job)

    def open(self, stream: LogStreamId) -> None:
        """Open a replica that could not be opened before."""
        driver = self.abandoned.get(stream)

        def job() -> None:
            try:
                self._let_finish(stream, driver)
                # Nothing lies there if the replica was set aside, and could not be created anew.
                storage = self._stores.open(stream) if stream in self._stores.streams() else None
            except CutwaterError as error:
                self._owner.tell(partial(self._owner.still_unreadable, stream, error))
            else:
                if storage is not None:
                    self._opened(stream, storage)

        self._begin(stream, job)

    def renew(self, stream: LogStreamId) -> None:
        """Replace unreadable files by an empty replica, because a peer can serve as the source of a sync."""
        driver = self.abandoned.get(stream)

        def job() -> None:
            self._let_finish(stream, driver)
            # The directory is missing if an earlier attempt set it aside and then failed to create a new one.
            if stream in self._stores.streams():
                aside = self._stores.set_aside(stream)
                what = "log stream %s is learned anew; what could not be opened is kept in %s"
                _log.warning(what, stream, aside, extra={"stream": stream})
            self._opened(stream, self._stores.create(stream, GLSN(0)))

        self._begin(stream, job)

    def erase(self, stream: LogStreamId) -> None:
        """Remove the files of a log stream permanently. This may take a while."""
        driver = self.abandoned.get(stream)

        def job() -> None:
            self._let_finish(stream, driver)
            if stream in self._stores.streams():
                self._stores.remove(stream)
            self._owner.tell(lambda: self._erased(stream))

        self._begin(stream, job)

    def _erased(self, stream: LogStreamId) -> None:
        self.abandoned.pop(stream, None)

    def _opened(self, stream: LogStreamId, storage: SegmentStorage) -> None:
        self._owner.tell(lambda: self._owner.begin(stream, storage))

    def _begin(self, stream: LogStreamId, job: Callable[[], None]) -> None:
        _, again_at = self._failed.get(stream, (0.0, 0.0))
        if not self._is_over and self._loop.time() >= again_at:
            future = self.under_way[stream] = self._loop.run_in_executor(self._threads, job)
            future.add_done_callback(partial(self._done, stream))

    def _done(self, stream: LogStreamId, future: asyncio.Future[None]) -> None:
        if self.under_way.get(stream) is future:
            del self.under_way[stream]
        error = None if future.cancelled() else future.exception()
        if error is None:
            self._failed.pop(stream, None)
        else:
            wait = min(2 * self._failed.get(stream, (RETRY_SECONDS_MIN / 2, 0.0))[0], RETRY_SECONDS_MAX)
            self._failed[stream] = (wait, self._loop.time() + wait)
        if error is not None and not isinstance(error, CutwaterError):
            _log.error("unforeseen failure with log stream %s", stream, exc_info=error, extra={"stream": stream})
            error = None
        self._owner.directory_done(stream, error)

    def _let_finish(self, stream: LogStreamId, driver: ReplicaDriver | None) -> None:
        """Wait for the last writes of a replica that is gone. Files are found by their names, so these writes would go
        into the files that replace them."""
        if driver is not None and not driver.writer.join(WRITER_SECONDS_MAX):
            name = f"log stream {stream} on storage node {self._node}"
            raise Unavailable(f"{name} is still being written to: its disk does not answer")
