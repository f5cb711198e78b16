"""Holds records that were given to a producer and are not yet in a numbered batch, with the deadlines of their
callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import itertools
from collections import deque
from contextlib import suppress
from math import inf

from msgspec import Struct

from cutwater.client.append.declarations import Declared
from cutwater.client.append.plain_arrow import AppendRecords, shares
from cutwater.client.produce.sent_future import SentFuture, settle_together
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded
from cutwater.types import Ack

Outcome = asyncio.Future[Ack] | SentFuture
"""A future of the kind that the caller can wait for."""


class Sent(Struct, eq=False):
    """Records that were given with one call. ``future`` gets their outcome, once. ``at`` is their deadline in event
    loop time, ``seconds`` after they were given."""

    part: AppendRecords | None
    """None if only a declaration was given."""
    count: int
    size: int
    at: float
    seconds: float
    future: Outcome
    is_numbered: bool = False
    """Whether it is part of a numbered batch: from then on it may appear in any case."""
    declared: Declared | None = None
    """What its batch declares. A declaration takes effect at the end of a batch, so this one is the last of it."""
    piece: object = None
    """Shares a batch only with sends of the same piece: they come from a batch that was refused."""


def settle(group: list[Sent], ack: Ack) -> None:
    """Give the sends of a batch that is in the log their acknowledgements."""
    together, acks = list[SentFuture](), list[Ack]()
    for sent, part in zip(group, shares(ack, group), strict=True):
        future = sent.future
        if isinstance(future, SentFuture):
            together.append(future)
            acks.append(part)
        elif not future.done():
            future.set_result(part)
    if together:
        settle_together(together, acks)


class ProducerBuffer:
    """Sends that wait to be numbered. ``bytes`` also counts the batches that the producer has in flight; they are
    subtracted when they are settled."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0
        self.unheard: CutwaterError | None = None
        """The first failure since the last flush."""
        self._queue: deque[Sent] = deque()
        self._in_order: deque[Sent] = deque()
        """Sends by deadline. Most are given the same time, so they come in this order."""
        self._others: list[tuple[float, int, Sent]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> itertools.chain[Sent]:
        return itertools.chain(self._queue)

    def has_room(self, size: int) -> bool:
        """Return whether a send fits. One that is larger than the whole buffer is accepted while the buffer is
        empty."""
        return not self.bytes or self.bytes + size <= self._bytes_max

    def add(self, given: list[Sent]) -> None:
        # Otherwise settled sends would be kept until their deadline.
        self._forget_settled()
        self._queue.extend(given)
        last = self._in_order[-1].at if self._in_order else -inf
        for sent in given:
            self.bytes += sent.size
            if sent.at >= last:
                self._in_order.append(sent)
                last = sent.at
            else:
                heapq.heappush(self._others, (sent.at, next(self._numbers), sent))

    def put_back(self, group: list[Sent]) -> None:
        """Put sends that had a number, and are certainly not in the log, back to the front of the queue. Callers that
        gave up were told that the producer goes on trying, so it does. The deadline error of the others is exact from
        now on."""
        for sent in group:
            sent.is_numbered = sent.future.done()
        self._queue.extendleft(reversed(group))

    def _forget_settled(self) -> None:
        while self._in_order and self._in_order[0].future.done():
            self._in_order.popleft()
        while self._others and self._others[0][2].future.done():
            heapq.heappop(self._others)

    def next_group(self, bytes_max: int) -> list[Sent]:
        """Take the sends of the next batch; empty if their callers have given up meanwhile. A declaration without a
        record goes alone, one with a record is the last of its group."""
        self._drop_settled()
        group: list[Sent] = []
        size = 0
        while self._queue and (not group or size + self._queue[0].size <= bytes_max):
            following = self._queue[0]
            if group and (following.part is None or following.piece is not group[0].piece):
                break
            sent = self._queue.popleft()
            group.append(sent)
            size += sent.size
            self._drop_settled()
            if sent.declared is not None:
                break
        return group

    def _drop_settled(self) -> None:
        """Drop sends at the front whose callers have given up or have an outcome: they need no room any more."""
        while self._queue and self._queue[0].future.done() and not self._queue[0].is_numbered:
            self.bytes -= self._queue.popleft().size

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
            # A caller need not check each future: flush and close raise failures too.
            sent.future.exception()

    def expire(self, now: float, name: str, hindrance: str) -> float:
        """Fail the sends whose deadline has passed, and return the next deadline. A numbered send stays: it may still
        appear."""
        while True:
            self._forget_settled()
            waiting = [*itertools.islice(self._in_order, 1), *(sent for _, _, sent in self._others[:1])]
            first = min(waiting, key=lambda sent: sent.at, default=None)
            if first is None or first.at > now:
                self._drop_settled()
                return inf if first is None else first.at
            self._tell(first, _late(first, name, hindrance))


def _late(sent: Sent, name: str, hindrance: str) -> CutwaterError:
    if not sent.is_numbered:
        why = hindrance and f": {hindrance}"
        return DeadlineExceeded(f"producer {name!r} could not send it within {sent.seconds:g} s{why}")
    return AppendUnknown(
        f"no answer came within {sent.seconds:g} s, so whether it is in the log is not known yet; "
        f"producer {name!r} goes on trying"
    )
