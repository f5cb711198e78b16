"""Decides at the end of each turn of the event loop how the writers write what the turn brought.

This happens after messages of the turn were sent: an entry goes down the chain before it goes to the disk, and a busy
writer thread competes with this one.

Usually each replica's writer uses its own thread. If only one writer has work, and little of it, and no other is busy,
the event loop writes by itself if the disk is quick (``storage.sync_latency``, ADR 0028): no caller waits longer than
for the thread, and what arrives meanwhile goes into the next sync, as it would there. A node with several disks always
uses threads, because one disk that hangs must not block the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cutwater.runtime import system
from cutwater.storage.sync_latency import Pace
from cutwater.storagenode.replica.writer import Writer

HERE_BYTES_MAX = 32 * 1024
"""Larger writes use a thread, so that the next entries are received and forwarded meanwhile."""


class HandingOver:
    """Hands writes over to writers. ``may_wait`` tells whether the event loop may wait for the disk at all; ``flush``
    sends messages to peers; ``report`` sends the report that is due when entries are durable."""

    def __init__(self, may_wait: Callable[[], bool], flush: Callable[[], None], report: Callable[[], None]) -> None:
        self._may_wait, self._flush, self._report = may_wait, flush, report
        self._loop = asyncio.get_running_loop()
        self._due: list[Writer] = []
        self._busy: list[Writer] = []
        """Writers whose threads were given work that may not be finished yet."""
        self._pace = Pace()

    @property
    def is_due(self) -> bool:
        """Whether this turn of the event loop has already brought something to write."""
        return bool(self._due)

    def soon(self, writer: Writer) -> None:
        """Schedule the writer for the end of this turn of the event loop."""
        if not self._due:
            self._loop.call_soon(self._now)
        if writer not in self._due:
            self._due.append(writer)

    def _now(self) -> None:
        self._flush()
        due, self._due = self._due, []
        if len(due) == 1 and self._can_be_here(due[0]):
            begun = system.monotonic()
            due[0].write_here(self._report)
            self._pace.observe(begun)
            return
        for writer in due:
            writer.hand_over()
            if writer not in self._busy:
                self._busy.append(writer)

    def _can_be_here(self, writer: Writer) -> bool:
        if not self._may_wait() or writer.backlog_bytes > HERE_BYTES_MAX or not writer.is_idle:
            return False
        self._busy = [other for other in self._busy if not other.is_idle]
        return not self._busy and self._pace.is_quick
