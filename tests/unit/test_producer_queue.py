"""What becomes of calls of send() when batches are withdrawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cutwater.client.append.plain_arrow import Single
from cutwater.client.produce.producer_queue import IN_FLIGHT_MAX, ProducerQueue, SentAppend
from cutwater.core.producer_session import Settled, Withdrawn
from cutwater.errors import AppendUnknown, DeadlineExceeded, InvalidArgument
from cutwater.runtime.event_loop import run
from cutwater.types import GLSN, LLSN, Ack, LogStreamId, Sequence

REFUSAL = InvalidArgument("too far ahead")


class Bench:
    def __init__(self) -> None:
        self.queue = ProducerQueue("p", 1 << 20, lambda: "", lambda: None)
        self.last = 0

    def give(self, count: int, *, at: float = 100.0) -> list[SentAppend]:
        loop = asyncio.get_running_loop()
        part = Single(b"x", None, 0)
        given = [SentAppend(part, 1, 10, 30.0, loop.create_future(), loop.time() + at) for _ in range(count)]
        for append in given:
            self.queue.add(append)
        return given

    def in_flight(self) -> list[SentAppend]:
        return [append for flight in self.queue.flights.values() for append in flight.group]

    def expire(self, at: float) -> None:
        self.queue._expire(asyncio.get_running_loop().time() + at)

    def depart(self, bytes_max: int = 1 << 20) -> list[list[SentAppend]]:
        """Everything that waits, as batches."""
        groups = []
        while group := self.queue.next_group(bytes_max):
            self.last += 1
            self.queue.number(Sequence(self.last), group)
            groups.append(group)
        return groups

    def withdraw(self, first: int, *refused: int) -> None:
        for sequence in refused:
            flight = self.queue.flights.get(Sequence(sequence))
            assert flight is not None
            flight.refusal = REFUSAL
        sequences = tuple(Sequence(number) for number in range(first, self.last + 1))
        self.last = first - 1
        self.queue.withdraw(Withdrawn(sequences, frozenset(map(Sequence, refused))))

    def settle(self) -> None:
        for number in range(1, self.last + 1):
            flight = self.queue.flights.get(Sequence(number))
            count = len(flight.group) if flight is not None else 0
            self.queue.settled(Settled(Sequence(number), Ack(GLSN(number), LLSN(number), LogStreamId(1), count)))


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
        while guilty in bench.in_flight():
            refused = next(n for n in range(1, bench.last + 1) if guilty in bench.queue.flights.get(Sequence(n)).group)  # type: ignore[union-attr]
            bench.withdraw(refused, refused)
            if not rounds:
                after = bench.give(5)
            bench.depart()
            rounds += 1
        assert rounds == 4, f"pieces of 103, 13, 2 and 1, as there are {IN_FLIGHT_MAX} of each"
        assert guilty.outcome.exception() is REFUSAL
        assert list(bench.in_flight()) == [s for s in (*before, *given, *after) if s is not guilty]
        bench.settle()
        assert all(sent.outcome.result() for sent in (*before, *given, *after) if sent is not guilty)
        assert bench.queue.bytes == 0

    with_bench(test)


def test_what_came_behind_a_refused_batch_is_the_next_again() -> None:
    def test(bench: Bench) -> None:
        given = bench.give(4)
        bench.depart(bytes_max=10)
        later = bench.give(1)
        bench.withdraw(2, 2, 4)
        assert [sent.outcome.done() for sent in given] == [False, True, False, True]
        assert list(bench.queue._queue) == [given[2], *later]
        assert bench.depart() == [[given[2], *later]]
        bench.settle()
        assert bench.queue.bytes == 0

    with_bench(test)


def test_what_was_told_to_be_unknown_is_still_tried_and_what_was_taken_back_is_not_unknown() -> None:
    def test(bench: Bench) -> None:
        (first,), (impatient,), (patient,) = bench.give(1), bench.give(1, at=50.0), bench.give(1)
        bench.depart(bytes_max=10)
        bench.expire(60.0)
        assert isinstance(impatient.outcome.exception(), AppendUnknown)
        bench.withdraw(1, 1)
        assert first.outcome.exception() is REFUSAL
        bench.expire(110.0)
        assert isinstance(patient.outcome.exception(), DeadlineExceeded), "it will never appear"
        assert bench.depart() == [[impatient]]

    with_bench(test)
