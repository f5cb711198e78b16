"""What was given to a producer and is not yet part of a numbered batch; and how long its callers will wait for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import itertools
from collections import deque
from contextlib import suppress
from math import inf

from cutwater.client.coalescing import part_of
from cutwater.client.deadlines import Deadline
from cutwater.client.parts import Part
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded
from cutwater.types import Ack

Outcome = asyncio.Future[Ack] | concurrent.futures.Future[Ack]
"""Whichever its caller can wait for."""


class Sent:
    """Records that were given with one call. ``future`` gets their outcome, once."""

    __slots__ = ("count", "deadline", "future", "is_numbered", "part", "size")

    def __init__(self, part: Part, count: int, size: int, deadline: Deadline, future: Outcome) -> None:
        self.part, self.count, self.size, self.deadline, self.future = part, count, size, deadline, future
        self.is_numbered = False
        """Part of a batch that has a number: it may appear, whatever happens."""


def settle(group: list[Sent], ack: Ack) -> None:
    """The batch that these are made into is in the log."""
    offset = 0
    for sent in group:
        if not sent.future.done():
            with suppress(concurrent.futures.InvalidStateError):
                # Another thread may have cancelled it just now.
                sent.future.set_result(part_of(ack, offset, sent.count))
        offset += sent.count


class ProducerBuffer:
    """``bytes`` counts what is here and what the producer has under way, which gives it back when it is settled."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0
        self.unheard: CutwaterError | None = None
        """The first failure since the last flush."""
        self._queue: deque[Sent] = deque()
        self._deadlines: list[tuple[float, int, Sent]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> itertools.chain[Sent]:
        return itertools.chain(self._queue)

    def has_room(self, size: int) -> bool:
        """One that is larger than all the room is let in alone."""
        return not self.bytes or self.bytes + size <= self._bytes_max

    def add(self, sent: Sent) -> None:
        self._queue.append(sent)
        self.bytes += sent.size
        while self._deadlines and self._deadlines[0][2].future.done():
            # Those that are settled would otherwise be kept until their deadline.
            heapq.heappop(self._deadlines)
        heapq.heappush(self._deadlines, (sent.deadline.at, next(self._numbers), sent))

    def next_group(self, bytes_max: int) -> list[Sent]:
        """What shall travel together; perhaps nothing, because callers have given up meanwhile."""
        group: list[Sent] = []
        size = 0
        while self._queue and (not group or size + self._queue[0].size <= bytes_max):
            sent = self._queue.popleft()
            if sent.future.done():
                self.bytes -= sent.size
                continue
            group.append(sent)
            size += sent.size
        return group

    def fail(self, group: list[Sent], error: CutwaterError) -> None:
        for sent in group:
            self.bytes -= sent.size
            self._tell(sent, error)

    def fail_all(self, error: CutwaterError) -> None:
        queue, self._queue = self._queue, deque()
        self.fail(list(queue), error)

    def _tell(self, sent: Sent, error: CutwaterError) -> None:
        if sent.future.done():
            return
        self.unheard = self.unheard or error
        with suppress(concurrent.futures.InvalidStateError):
            sent.future.set_exception(error)
        if isinstance(sent.future, asyncio.Future):
            # Nobody need look at each future: whoever flushes or closes hears of failures too.
            sent.future.exception()

    def expire(self, now: float, name: str) -> float:
        """Tell those whose time is up, and return whose is next. What has a number stays: it may still appear."""
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].future.done()):
            sent = heapq.heappop(self._deadlines)[2]
            seconds = f"{sent.deadline.seconds:g} s"
            if sent.is_numbered:
                self._tell(
                    sent,
                    AppendUnknown(
                        f"no answer came within {seconds}, so whether it is in the log is not known yet; "
                        f"producer {name!r} goes on trying"
                    ),
                )
            else:
                self._tell(sent, DeadlineExceeded(f"producer {name!r} could not send it within {seconds}"))
        return self._deadlines[0][0] if self._deadlines else inf
