"""Watches appends that have no answer yet. Silence is evidence, and a catalog with another epoch ends the waiting.

A storage node that hangs keeps its connections, so only its silence shows that it hangs. When an append gets no answer
for ``SLOW_SECONDS``, or reaches its deadline, the client reports the node to the metadata repository, which then probes
the node. The client also fetches the catalog until the node has answered or has been left out. Meanwhile new appends
prefer other log streams. When the catalog shows that the epoch of an append has ended, ``core.append_fate`` tells what
became of it: if it certainly was not taken, it may be sent again; otherwise it is *unknown*.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import Struct

from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.cluster.node_connections import Nodes
from cutwater.core.append_fate import AppendFate, fate_of
from cutwater.core.requests import StreamInfo
from cutwater.errors import AppendUnknown, CutwaterError, StreamSealed
from cutwater.protocol.storage_api import AppendAnswer
from cutwater.runtime.deadlines import SLOW_SECONDS
from cutwater.types import LLSN, LogStreamId

LOOK_SECONDS = 0.1
"""Interval of the check for appends without an answer."""
AVOIDED_SECONDS = 1.0
"""For this long after the last evidence, new appends prefer other log streams."""


class Pending(Struct, eq=False):
    """An append, or a connection for one, that waits for its head. ``known_end`` is None if nothing was sent yet.
    ``end`` is called at most once: with ``StreamSealed`` if the append certainly was not taken, else with
    ``AppendUnknown``."""

    info: StreamInfo
    known_end: LLSN | None
    since: float
    end: Callable[[CutwaterError], None]
    on_slow: Callable[[], None] | None = None
    is_slow: bool = False
    ended_at: float | None = None
    """When the end of its epoch was first noticed."""


class PendingAppends:
    def __init__(self, catalogs: Catalogs, nodes: Nodes) -> None:
        self._catalogs, self._nodes = catalogs, nodes
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Pending, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.avoided: dict[LogStreamId, float] = {}
        """Log streams whose heads do not answer, and the time until which each is avoided."""
        self._ends: dict[LogStreamId, LLSN] = {}
        """The LLSN up to which each log stream is committed, as known from acknowledgements."""
        catalogs.listeners[self._take_catalog] = None

    def add(self, pending: Pending) -> None:
        self._waiting[pending] = None
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def discard(self, pending: Pending) -> None:
        """Stop watching an append that has its answer or whose caller has given up."""
        self._waiting.pop(pending, None)

    def blame(self, info: StreamInfo) -> None:
        """Avoid and report the head of a log stream, which has not answered in time."""
        self.avoided[info.stream] = self._loop.time() + AVOIDED_SECONDS
        self._nodes.unreachable(info.stream, info.chain[0])
        self._catalogs.look()

    def taken(self, answer: AppendAnswer) -> None:
        """Note that an append is in the log."""
        ack = answer.ack
        stream, end = ack.stream, ack.llsn + ack.count - 1
        if end > self._ends.get(stream, 0):
            self._ends[stream] = LLSN(end)
        if self.avoided:
            self.avoided.pop(stream, None)
        if answer.revision != self._catalogs.view.catalog.revision:
            self._catalogs.heard(answer.revision)

    def known_end(self, info: StreamInfo) -> LLSN:
        """Return an LLSN of the log stream that is certainly committed."""
        return max(info.committed_end, self._ends.get(info.stream, info.committed_end))

    def is_avoided(self, stream: LogStreamId) -> bool:
        until = self.avoided.get(stream)
        if until is not None and until <= self._loop.time():
            del self.avoided[stream]
            return False
        return until is not None

    def close(self) -> None:
        self._catalogs.listeners.pop(self._take_catalog, None)
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        slow = [pending for pending in self._waiting if pending.since <= now - SLOW_SECONDS]
        for pending in slow:
            self.blame(pending.info)
            self._settle(pending, self._catalogs.view)
        for pending in slow:
            if not pending.is_slow and pending in self._waiting:
                pending.is_slow = True
                if pending.on_slow is not None:
                    pending.on_slow()
        if self._waiting:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _take_catalog(self, view: CatalogView) -> None:
        self._ends = {stream: end for stream, end in self._ends.items() if stream in view.streams}
        for pending in list(self._waiting):
            self._settle(pending, view)

    def _settle(self, pending: Pending, view: CatalogView) -> None:
        """End the waiting if the epoch is over. A healthy head soon answers, and knows more than the catalog. So unless
        the append certainly was not taken, keep waiting while its head has not been silent for long, or is still in the
        chain and the end of the epoch was noticed only recently."""
        sent, info = pending.info, view.streams.get(pending.info.stream)
        known_end = LLSN(1 << 62) if pending.known_end is None else pending.known_end
        fate = fate_of(info, sent.epoch, known_end)
        if fate is AppendFate.PENDING:
            return
        error: CutwaterError
        if fate is AppendFate.ABSENT or pending.known_end is None:
            error = StreamSealed(
                f"log stream {sent.stream} was sealed before storage node {sent.chain[0]} had taken the append"
            )
        elif self._may_still_answer(pending, info):
            return
        else:
            error = AppendUnknown(
                f"storage node {sent.chain[0]} has not answered, and log stream {sent.stream} has ended the epoch in "
                "which the append was sent, so whether it is in the log is not known: read the log, or use a "
                "producer, which finds out"
            )
        self._waiting.pop(pending, None)
        pending.end(error)

    def _may_still_answer(self, pending: Pending, info: StreamInfo | None) -> bool:
        now = self._loop.time()
        if pending.ended_at is None:
            pending.ended_at = now
        is_member = info is not None and pending.info.chain[0] in info.chain
        return now - (pending.ended_at if is_member else pending.since) < SLOW_SECONDS
