"""Whether a leader's memory is current: what the store gave it is held against what replicas know, before it is used.

A store that was rolled back (an old backup, a disk that lost its last writes) looks like any other. Replicas know more:
a report of one that was a member shows it, and the leader halts. So after a start or a takeover requests, cuts, repairs
and publishing wait until a member of every open log stream has reported nothing newer than the store. Every one counts:
GLSNs belong to all streams, so a lost cut of one stream may have given out the numbers that another would get. A stream
is sealed meanwhile if no member of it can tell any more, and does not count then: so the wait ends by itself.

Requests that are answered at once: those by which storage nodes join, and those by which operators look.
"""

from __future__ import annotations

from collections import deque

from cutwater.core.order.events import Asked
from cutwater.core.order.state import OrderState
from cutwater.core.requests import AddNodeRequest, DescribeRequest, EventsRequest, FoundClusterRequest, JoinRequest
from cutwater.core.text import listed
from cutwater.errors import Unavailable
from cutwater.types import Instant, LogStreamId

AT_ONCE = (FoundClusterRequest, AddNodeRequest, JoinRequest, EventsRequest, DescribeRequest)
STREAMS_NAMED_MAX = 8


class FirstReports:
    """One leader's: it begins with all streams that are open by the store's word."""

    def __init__(self, state: OrderState, wait_us: int) -> None:
        self._state, self._wait_us = state, wait_us
        self._missing = {stream.stream for stream in state.streams.values() if stream.is_open}
        self.are_missing = bool(self._missing)
        self.waiting: deque[tuple[Asked, int]] = deque()
        """Requests, and until when each of them waits."""

    @property
    def missing(self) -> tuple[LogStreamId, ...]:
        """Log streams without a report of any member yet."""
        return tuple(sorted(self._missing))

    def hear(self, stream: LogStreamId) -> None:
        """A member reported nothing newer than the store."""
        self._missing.discard(stream)
        self.are_missing = bool(self._missing)

    def look(self) -> None:
        """Streams that were sealed or deleted do not count any more."""
        streams = self._state.streams
        self._missing = {lsid for lsid in self._missing if lsid in streams and streams[lsid].is_open}
        self.are_missing = bool(self._missing)

    def holds(self, asked: Asked, now: Instant) -> bool:
        """Whether the request has to wait; then it is kept."""
        if not self._missing or isinstance(asked.request, AT_ONCE):
            return False
        self.waiting.append((asked, now.monotonic + self._wait_us))
        return True

    def take_waiting(self) -> list[Asked]:
        waiting, self.waiting = self.waiting, deque()
        return [asked for asked, _ in waiting]

    def take_overdue(self, now: Instant) -> list[Asked]:
        """The requests that waited too long. Once nothing is missing, the next turn answers all of them instead."""
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
