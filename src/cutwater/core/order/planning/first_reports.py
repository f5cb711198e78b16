"""Checks that a new leader's store is current, by comparing it with what replicas report, before the leader uses it.

A store that was rolled back (an old backup, a disk that lost its last writes) looks like any other. Replicas know more:
the report of a member reveals it, and the leader halts. So after a start or a takeover, requests, cuts, repairs and
publishing wait until a member of every open log stream has reported nothing newer than the store. Every stream counts:
all streams share the GLSNs, so a lost cut of one stream may have given out numbers that another would get. If no member
of a stream can report any more, the stream is sealed and no longer counts, so the wait ends by itself.

Two kinds of requests are answered at once: those by which storage nodes join, and those by which operators look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set

from cutwater.core.access.access_requests import AccessRequest
from cutwater.core.order.events import Asked
from cutwater.core.order.state import OrderState
from cutwater.core.requests import AddNodeRequest, DescribeRequest, EventsRequest, FoundClusterRequest, JoinRequest
from cutwater.core.text import listed
from cutwater.errors import Unavailable
from cutwater.types import Instant, LogStreamId, StorageNodeId

AT_ONCE = (FoundClusterRequest, AddNodeRequest, JoinRequest, EventsRequest, DescribeRequest, AccessRequest)
"""Requests that depend on no report. A token must be revocable while a log stream has no live member."""
STREAMS_NAMED_MAX = 8


class FirstReports:
    """Tracks, for one leader, the streams without a report. It begins with all streams that the store calls open."""

    def __init__(self, state: OrderState, wait_us: int) -> None:
        self._state, self._wait_us = state, wait_us
        self._missing = {stream.stream for stream in state.streams.values() if stream.is_open}
        self._looked_at = state.revision
        self.waiting: deque[tuple[Asked, int]] = deque()
        """Requests that wait, each with its deadline."""

    @property
    def are_missing(self) -> bool:
        return bool(self._missing)

    @property
    def missing(self) -> tuple[LogStreamId, ...]:
        """Log streams of which no member has reported yet."""
        return tuple(sorted(self._missing))

    def hear(self, stream: LogStreamId) -> None:
        """Note that a member of the stream reported nothing newer than the store."""
        self._missing.discard(stream)

    def look(self) -> None:
        """Forget streams that were sealed or deleted since the last look."""
        if self._looked_at == self._state.revision:
            return
        self._looked_at = self._state.revision
        streams = self._state.streams
        self._missing = {lsid for lsid in self._missing if lsid in streams and streams[lsid].is_open}

    def hopeless(
        self, alive: Set[StorageNodeId], distrusted: Mapping[LogStreamId, Set[StorageNodeId]]
    ) -> list[LogStreamId]:
        """Return the streams of which no member can report any more."""
        if not distrusted and alive >= self._state.nodes.keys():
            return []
        streams, none = self._state.streams, frozenset[StorageNodeId]()
        return [s for s in self.missing if alive.isdisjoint(set(streams[s].members) - distrusted.get(s, none))]

    def holds(self, asked: Asked, now: Instant) -> bool:
        """Whether the request has to wait. If so, it is kept."""
        if not self._missing or isinstance(asked.request, AT_ONCE):
            return False
        self.waiting.append((asked, now.monotonic + self._wait_us))
        return True

    def take_waiting(self) -> list[Asked]:
        waiting, self.waiting = self.waiting, deque()
        return [asked for asked, _ in waiting]

    def take_overdue(self, now: Instant) -> list[Asked]:
        """Remove and return the requests that waited too long. Once no stream is missing, the next turn answers all."""
        overdue = []
        while self._missing and self.waiting and self.waiting[0][1] <= now.monotonic:
            overdue.append(self.waiting.popleft()[0])
        return overdue

    def error(self) -> Unavailable:
        named = listed([str(lsid) for lsid in self.missing[:STREAMS_NAMED_MAX]])
        more = len(self._missing) - STREAMS_NAMED_MAX
        streams = f"log streams {named}" if len(self._missing) > 1 else f"log stream {named}"
        return Unavailable(
            f"the leader of the metadata repository has just begun, and no replica of {streams}"
            f"{f' and {more} more' if more > 0 else ''} has reported yet, so it cannot know that its store is current: "
            "try again, or start the storage nodes that hold them (`cutwater health` names what is missing)"
        )
