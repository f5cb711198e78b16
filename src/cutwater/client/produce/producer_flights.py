"""The numbered batches of a producer that have no outcome yet, and the outcomes of the calls of send() in them."""

from __future__ import annotations

from collections.abc import Iterator

from cutwater.client.produce.producer_buffer import ProducerBuffer, Sent, settle
from cutwater.core.producer_session import Settled, Withdrawn
from cutwater.errors import AppendUnknown, CutwaterError
from cutwater.types import Sequence

IN_FLIGHT_MAX = 8


class Flight:
    """A numbered batch."""

    __slots__ = ("attempts", "open_calls", "refusal", "sent")

    def __init__(self, sent: list[Sent]) -> None:
        self.sent = sent
        self.attempts = 0
        self.open_calls = 0
        self.refusal: CutwaterError | None = None
        """The head's error about its content, if the head refused an attempt."""


class ProducerFlights:
    """All flights of a producer. ``name`` is the producer's, for messages. Settled sends give their room back to the
    buffer."""

    def __init__(self, buffer: ProducerBuffer, name: str) -> None:
        self._buffer, self._name = buffer, name
        self._flights: dict[Sequence, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Sent]:
        return (sent for flight in self._flights.values() for sent in flight.sent)

    def get(self, sequence: Sequence) -> Flight | None:
        return self._flights.get(sequence)

    def add(self, sequence: Sequence, group: list[Sent]) -> None:
        for sent in group:
            sent.is_numbered = True
        self._flights[sequence] = Flight(group)

    def settle(self, settled: Settled) -> None:
        flight = self._flights.pop(settled.sequence, None)
        if flight is None:
            # It was given up before, when the producer ended.
            return
        self._buffer.bytes -= sum(sent.size for sent in flight.sent)
        settle(flight.sent, settled.ack)

    def withdraw(self, withdrawn: Withdrawn) -> None:
        """Handle batches that are certainly not in the log. If a refused batch held a single call, that call fails. All
        other calls go back to the queue; the calls of a refused batch go back in several smaller pieces, so that in the
        end only the calls at fault fail."""
        again: list[Sent] = []
        for sequence in withdrawn.sequences:
            flight = self._flights.pop(sequence, None)
            if flight is None:
                continue
            refusal = flight.refusal if sequence in withdrawn.refused else None
            if refusal is None:
                again += flight.sent
            elif len(flight.sent) == 1:
                self._buffer.fail(flight.sent, refusal)
            else:
                again += _in_pieces(flight.sent)
        self._buffer.put_back(again)

    def give_up(self, failure: CutwaterError, *, with_open_calls: bool) -> None:
        """Fail these batches, because the producer ends. Their outcome remains unknown, unless they were never sent."""
        for sequence, flight in list(self._flights.items()):
            if with_open_calls or not flight.open_calls:
                self.fail(sequence, _unknown(self._name, failure) if flight.attempts else failure)

    def fail(self, sequence: Sequence, error: CutwaterError) -> None:
        flight = self._flights.pop(sequence, None)
        if flight is not None:
            self._buffer.fail(flight.sent, error)


def _in_pieces(group: list[Sent]) -> list[Sent]:
    """Split a group into as many pieces as can be in flight together, so that one round of sending shows which of them
    are at fault."""
    size = -(-len(group) // IN_FLIGHT_MAX)
    for start in range(0, len(group), size):
        piece = object()
        for sent in group[start : start + size]:
            sent.piece = piece
    return group


def _unknown(name: str, error: CutwaterError) -> AppendUnknown:
    return AppendUnknown(
        f"producer {name!r} ended ({error.message}) before it knew what became of this: read the log to see whether it "
        "is there"
    )
