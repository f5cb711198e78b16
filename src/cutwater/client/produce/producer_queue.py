"""The calls of send() that have no outcome yet: those that wait, and those in numbered batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from cutwater.client.append.batcher import AppendQueue, QueuedAppend, shares
from cutwater.client.produce.sent_future import SentFuture, settle_together
from cutwater.core.producer_session import Settled, Withdrawn
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded
from cutwater.types import Ack
from cutwater.types import Sequence as SequenceNumber

IN_FLIGHT_MAX = 8


class Flight(Struct, eq=False):
    """A numbered batch."""

    group: list[QueuedAppend]
    attempts: int = 0
    open_calls: int = 0
    refusal: CutwaterError | None = None
    """The head's error about its content, if the head refused an attempt."""


class ProducerQueue(AppendQueue[QueuedAppend]):
    """The queue of a producer. ``name`` is the producer's, for messages; ``hindrance`` returns why nothing can be sent
    now, if that is known."""

    def __init__(self, name: str, bytes_max: int, hindrance: Callable[[], str], on_change: Callable[[], None]) -> None:
        super().__init__(bytes_max)
        self._name, self._hindrance, self._on_change = name, hindrance, on_change
        self.flights: dict[SequenceNumber, Flight] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def sent(self) -> Iterable[QueuedAppend]:
        return (append for flight in self.flights.values() for append in flight.group)

    def everything(self) -> list[QueuedAppend]:
        """Return all calls without an outcome, in their order."""
        return [*self.sent(), *self._queue]

    def unknown(self) -> list[QueuedAppend]:
        """Return calls in flight, and calls that are sent again although their callers were told *unknown*."""
        return [append for append in self.everything() if append.is_numbered]

    def number(self, sequence: SequenceNumber, group: list[QueuedAppend]) -> None:
        for append in group:
            append.is_numbered = True
        self.flights[sequence] = Flight(group)

    def settled(self, settled: Settled) -> None:
        flight = self.flights.pop(settled.sequence, None)
        # Without one, it was given up before, when the producer ended.
        if flight is not None:
            self.settle(flight.group, settled.ack)

    def settle(self, group: Sequence[QueuedAppend], ack: Ack) -> None:
        futures = [append.outcome for append in group if isinstance(append.outcome, SentFuture)]
        if len(futures) < len(group):
            super().settle(group, ack)
            return
        self._release(group)
        settle_together(futures, shares(ack, group))

    def withdraw(self, withdrawn: Withdrawn) -> None:
        """Handle batches that are certainly not in the log. If a refused batch held a single call, that call fails. All
        other calls go back to the front of the queue, those of a refused batch in several smaller pieces, so that in
        the end only the calls at fault fail. Callers that gave up were told that the producer goes on trying, so it
        does. The deadline error of the others is exact from now on."""
        again: list[QueuedAppend] = []
        for sequence in withdrawn.sequences:
            flight = self.flights.pop(sequence, None)
            if flight is None:
                continue
            refusal = flight.refusal if sequence in withdrawn.refused else None
            if refusal is None:
                again += flight.group
            elif len(flight.group) == 1:
                self.fail(flight.group, refusal)
            else:
                again += _in_pieces(flight.group)
        for append in again:
            append.is_numbered = append.outcome.done()
        self._queue.extendleft(reversed(again))

    def give_up(self, failure: CutwaterError, *, with_open_calls: bool) -> None:
        """Fail everything, because the producer ends. The outcome of batches remains unknown, unless they were never
        sent; batches with open calls may still get one."""
        self.fail_queue(failure)
        for sequence, flight in list(self.flights.items()):
            if with_open_calls or not flight.open_calls:
                self.fail_flight(sequence, _unknown(self._name, failure) if flight.attempts else failure)

    def fail_flight(self, sequence: SequenceNumber, error: CutwaterError) -> None:
        flight = self.flights.pop(sequence, None)
        if flight is not None:
            self.fail(flight.group, error)

    def close(self) -> None:
        self._watch.stop()

    def _changed(self) -> None:
        self._on_change()

    def _late(self, append: QueuedAppend) -> CutwaterError:
        if not append.is_numbered:
            why = (hindrance := self._hindrance()) and f": {hindrance}"
            return DeadlineExceeded(f"producer {self._name!r} could not send it within {append.seconds:g} s{why}")
        return AppendUnknown(
            f"no answer came within {append.seconds:g} s, so whether it is in the log is not known yet; "
            f"producer {self._name!r} goes on trying"
        )


def _in_pieces(group: list[QueuedAppend]) -> list[QueuedAppend]:
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
