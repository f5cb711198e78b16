"""What becomes of calls of send() when batches are withdrawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from cutwater.client.append.plain_arrow import AppendRecords
from cutwater.client.produce.producer_buffer import ProducerBuffer, Sent
from cutwater.client.produce.producer_flights import IN_FLIGHT_MAX, ProducerFlights
from cutwater.core.producer_session import Settled, Withdrawn
from cutwater.errors import AppendUnknown, DeadlineExceeded, InvalidArgument
from cutwater.runtime.event_loop import run
from cutwater.types import GLSN, LLSN, Ack, LogStreamId, Sequence

REFUSAL = InvalidArgument("too far ahead")


class Bench:
    def __init__(self) -> None:
        self.buffer = ProducerBuffer(1 << 20)
        self.flights = ProducerFlights(self.buffer, "p")
        self.last = 0

    def give(self, count: int, *, at: float = 100.0) -> list[Sent]:
        loop = asyncio.get_running_loop()
        given = [Sent(cast(AppendRecords, object()), 1, 10, at, 30.0, loop.create_future()) for _ in range(count)]
        self.buffer.add(given)
        return given

    def depart(self, bytes_max: int = 1 << 20) -> list[list[Sent]]:
        """Everything that waits, as batches."""
        groups = []
        while group := self.buffer.next_group(bytes_max):
            self.last += 1
            self.flights.add(Sequence(self.last), group)
            groups.append(group)
        return groups

    def withdraw(self, first: int, *refused: int) -> None:
        for sequence in refused:
            flight = self.flights.get(Sequence(sequence))
            assert flight is not None
            flight.refusal = REFUSAL
        sequences = tuple(Sequence(number) for number in range(first, self.last + 1))
        self.last = first - 1
        self.flights.withdraw(Withdrawn(sequences, frozenset(map(Sequence, refused))))

    def settle(self) -> None:
        for number in range(1, self.last + 1):
            flight = self.flights.get(Sequence(number))
            count = len(flight.sent) if flight is not None else 0
            self.flights.settle(Settled(Sequence(number), Ack(GLSN(number), LLSN(number), LogStreamId(1), count)))


def with_bench(test: Callable[[Bench], None]) -> None:
    async def main() -> None:
        test(Bench())

    run(main())


def test_a_refused_batch_is_sent_again_in_smaller_ones_until_the_guilty_call_is_alone() -> None:
    def test(bench: Bench) -> None:
        before, given, after = bench.give(3), bench.give(100), []
        guilty = given[70]
        bench.depart()
        rounds = 0
        while guilty in bench.flights:
            refused = next(n for n in range(1, bench.last + 1) if guilty in bench.flights.get(Sequence(n)).sent)  # type: ignore[union-attr]
            bench.withdraw(refused, refused)
            if not rounds:
                after = bench.give(5)
            bench.depart()
            rounds += 1
        assert rounds == 4, f"pieces of 103, 13, 2 and 1, as there are {IN_FLIGHT_MAX} of each"
        assert guilty.future.exception() is REFUSAL
        assert list(bench.flights) == [s for s in (*before, *given, *after) if s is not guilty]
        bench.settle()
        assert all(sent.future.result() for sent in (*before, *given, *after) if sent is not guilty)
        assert bench.buffer.bytes == 0

    with_bench(test)


def test_what_came_behind_a_refused_batch_is_the_next_again() -> None:
    def test(bench: Bench) -> None:
        given = bench.give(4)
        bench.depart(bytes_max=10)
        later = bench.give(1)
        bench.withdraw(2, 2, 4)
        assert [sent.future.done() for sent in given] == [False, True, False, True]
        assert list(bench.buffer) == [given[2], *later]
        assert bench.depart() == [[given[2], *later]]
        bench.settle()
        assert bench.buffer.bytes == 0

    with_bench(test)


def test_what_was_told_to_be_unknown_is_still_tried_and_what_was_taken_back_is_not_unknown() -> None:
    def test(bench: Bench) -> None:
        (first,), (impatient,), (patient,) = bench.give(1), bench.give(1, at=50.0), bench.give(1)
        bench.depart(bytes_max=10)
        bench.buffer.expire(60.0, "p", "")
        assert isinstance(impatient.future.exception(), AppendUnknown)
        bench.withdraw(1, 1)
        assert first.future.exception() is REFUSAL
        bench.buffer.expire(110.0, "p", "")
        assert isinstance(patient.future.exception(), DeadlineExceeded), "it will never appear"
        assert bench.depart() == [[impatient]]

    with_bench(test)
