"""The numbered batches of a producer that have no outcome yet, and what becomes of the calls of send() in them."""

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
        """What the head said of its content, if it refused an attempt."""


class ProducerFlights:
    """``name`` is the producer's, for messages. Settled sends give their room back to the buffer."""

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
        """Nothing of these is in the log. A call whose batch was refused and held nothing else hears of it; the others
        go back to where they waited, and those of a batch that was refused in several smaller ones, so that in the end
        only the guilty ones fail."""
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
        """The producer ends: whether these are in the log remains unknown, unless they were never sent."""
        for sequence, flight in list(self._flights.items()):
            if with_open_calls or not flight.open_calls:
                self.fail(sequence, _unknown(self._name, failure) if flight.attempts else failure)

    def fail(self, sequence: Sequence, error: CutwaterError) -> None:
        flight = self._flights.pop(sequence, None)
        if flight is not None:
            self._buffer.fail(flight.sent, error)


def _in_pieces(group: list[Sent]) -> list[Sent]:
    """As many as can be under way together, so that one round of sending tells which of them are guilty."""
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
