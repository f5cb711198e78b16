"""The calls of send() that have no outcome yet: those that wait, and those in numbered batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from itertools import chain

from msgspec import Struct

from cutwater.client.append.batcher import AppendOutcome, AppendQueue, QueuedAppend, shares
from cutwater.client.append.declarations import Declared, required
from cutwater.client.convert.times import Time
from cutwater.client.errors import InvalidRecord
from cutwater.client.produce.sent_future import SentFuture, settle_together
from cutwater.core.producer_session import Settled, Withdrawn
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded, ResourceExhausted
from cutwater.types import Ack
from cutwater.types import Sequence as SequenceNumber

IN_FLIGHT_MAX = 8
DECLARATION_BYTES = 128
"""Approximate room that a declaration takes."""


class Flight(Struct, eq=False):
    """A numbered batch."""

    group: list[SentAppend]
    attempts: int = 0
    open_calls: int = 0
    refusal: CutwaterError | None = None
    """The head's error about its content, if the head refused an attempt."""


class SentAppend(QueuedAppend, eq=False, kw_only=True):
    """What was given with one call of send()."""

    declared: Declared | None = None
    """What its batch declares. A declaration takes effect at the end of a batch, so this call is the last of it."""
    is_numbered: bool = False
    """Whether it is part of a numbered batch: from then on it may appear in any case."""
    piece: object = None
    """Shares a batch only with calls of the same piece: they come from a batch that was refused."""


class ProducerQueue(AppendQueue[SentAppend]):
    """``bytes`` counts calls in flight too. ``name`` is the producer's, for messages; ``hindrance`` returns why nothing
    can be sent now, if that is known."""

    def __init__(self, name: str, bytes_max: int, hindrance: Callable[[], str], on_change: Callable[[], None]) -> None:
        super().__init__()
        self._name, self._bytes_max, self._hindrance, self._on_change = name, bytes_max, hindrance, on_change
        self.flights: dict[SequenceNumber, Flight] = {}
        self.failure: CutwaterError | None = None
        """The first failure since the last flush."""

    def __len__(self) -> int:
        return len(self._queue)

    def has_room(self, size: int) -> bool:
        """Return whether a call fits. One that is larger than the whole queue is accepted while it is empty."""
        return not self.bytes or self.bytes + size <= self._bytes_max

    def everything(self) -> list[SentAppend]:
        """Return all calls without an outcome, in their order."""
        return [*chain.from_iterable(flight.group for flight in self.flights.values()), *self._queue]

    def unknown(self) -> list[SentAppend]:
        """Return calls in flight, and calls that are sent again although their callers were told *unknown*."""
        return [append for append in self.everything() if append.is_numbered]

    def next_group(self, bytes_max: int) -> list[SentAppend]:
        """Take the calls of the next batch; none if their callers have given up meanwhile. A declaration without a
        record goes alone, one with a record is the last of its group."""
        queue, group, size = self._queue, list[SentAppend](), 0
        while queue:
            append = queue[0]
            if append.outcome.done() and not append.is_numbered:
                # Its caller has given up, so it needs no room any more.
                self.release([queue.popleft()])
                continue
            size += append.size
            if group and (size > bytes_max or append.part is None or append.piece is not group[0].piece):
                break
            group.append(queue.popleft())
            if append.declared is not None:
                break
        return group

    def number(self, sequence: SequenceNumber, group: list[SentAppend]) -> None:
        for append in group:
            append.is_numbered = True
        self.flights[sequence] = Flight(group)

    def settled(self, settled: Settled) -> None:
        flight = self.flights.pop(settled.sequence, None)
        # Without one, it was given up before, when the producer ended.
        if flight is not None:
            self.release(flight.group)
            self.settle(flight.group, settled.ack)

    def settle(self, group: Sequence[SentAppend], ack: Ack) -> None:
        futures = [append.outcome for append in group if isinstance(append.outcome, SentFuture)]
        if len(futures) == len(group):
            settle_together(futures, shares(ack, group))
        else:
            super().settle(group, ack)

    def fail(self, group: Iterable[SentAppend], error: Exception) -> None:
        for append in group:
            outcome = append.outcome
            if outcome.done():
                continue
            if isinstance(error, CutwaterError):
                self.failure = self.failure or error
            # Another thread may cancel a future at any time.
            with suppress(InvalidStateError):
                outcome.set_exception(error)
            if isinstance(outcome, asyncio.Future):
                # A caller need not check each future: flush and close raise failures too.
                outcome.exception()

    def refuse(self, group: list[SentAppend], error: CutwaterError) -> None:
        """Fail calls that are in no batch any more."""
        self.release(group)
        self.fail(group, error)

    def withdraw(self, withdrawn: Withdrawn) -> None:
        """Handle batches that are certainly not in the log. If a refused batch held a single call, that call fails. All
        other calls go back to the front of the queue, those of a refused batch in several smaller pieces, so that in
        the end only the calls at fault fail. Callers that gave up were told that the producer goes on trying, so it
        does. The deadline error of the others is exact from now on."""
        again: list[SentAppend] = []
        for sequence in withdrawn.sequences:
            flight = self.flights.pop(sequence, None)
            if flight is None:
                continue
            refusal = flight.refusal if sequence in withdrawn.refused else None
            if refusal is None:
                again += flight.group
            elif len(flight.group) == 1:
                self.refuse(flight.group, refusal)
            else:
                again += _in_pieces(flight.group)
        for append in again:
            append.is_numbered = append.outcome.done()
        self._queue.extendleft(reversed(again))

    def give_up(self, failure: CutwaterError, *, with_open_calls: bool) -> None:
        """Fail everything, because the producer ends. The outcome of batches remains unknown, unless they were never
        sent; batches with open calls may still get one."""
        waiting = list(self._queue)
        self._queue.clear()
        self.refuse(waiting, failure)
        for sequence, flight in list(self.flights.items()):
            if with_open_calls or not flight.open_calls:
                self.fail_flight(sequence, _unknown(self._name, failure) if flight.attempts else failure)

    def fail_flight(self, sequence: SequenceNumber, error: CutwaterError) -> None:
        flight = self.flights.pop(sequence, None)
        if flight is not None:
            self.refuse(flight.group, error)

    def close(self) -> None:
        self._watch.stop()

    def _waiting(self) -> Iterable[tuple[Iterable[SentAppend], Callable[[SentAppend], CutwaterError]]]:
        yield self.everything(), self._late

    def _changed(self) -> None:
        while self._queue and self._queue[0].outcome.done() and not self._queue[0].is_numbered:
            self.bytes -= self._queue.popleft().size
        self._on_change()

    def _late(self, append: SentAppend) -> CutwaterError:
        if not append.is_numbered:
            why = (hindrance := self._hindrance()) and f": {hindrance}"
            return DeadlineExceeded(f"producer {self._name!r} could not send it within {append.seconds:g} s{why}")
        return AppendUnknown(
            f"no answer came within {append.seconds:g} s, so whether it is in the log is not known yet; "
            f"producer {self._name!r} goes on trying"
        )


def _in_pieces(group: list[SentAppend]) -> list[SentAppend]:
    """Split a group into as many pieces as can be in flight together, so that one round of sending shows which of them
    are at fault."""
    size = -(-len(group) // IN_FLIGHT_MAX)
    for start in range(0, len(group), size):
        piece = object()
        for append in group[start : start + size]:
            append.piece = piece
    return group


def _unknown(name: str, error: CutwaterError) -> AppendUnknown:
    return AppendUnknown(
        f"producer {name!r} ended ({error.message}) before it knew what became of this: read the log to see whether it "
        "is there"
    )


def declaration(outcome: AppendOutcome, seconds: float, watermark: Time | None, idle: bool) -> SentAppend:
    return SentAppend(None, 1, DECLARATION_BYTES, seconds, outcome, declared=required(watermark, idle))


def not_encoded(error: Exception) -> CutwaterError:
    what = f"these records could not be made ready ({error!r}), so nothing of them was sent"
    if isinstance(error, MemoryError):
        return ResourceExhausted(f"{what}: send fewer at a time", retry_ms=100)
    return InvalidRecord(what)
