"""Deduplication against a dumb oracle that keeps every batch for ever and searches the whole list."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from cutwater.core.replica import deduplication as module
from cutwater.core.replica.deduplication import Deduplicator, Departure, Remembered
from cutwater.errors import ProducerFenced, SequenceExpired, SequenceGap, SequenceReused
from cutwater.types import LLSN, Batch, BatchKind, Entry, Epoch, ProducerEpoch, ProducerId
from tests.unit.replica_bench import batch, context, fence, tag

WINDOW = 4
"""Small, so that overflow is common."""
NAMES = ("p", "q")


class Kept(Struct):
    """One tagged entry as the oracle remembers it."""

    name: str
    epoch: int
    sequence: int
    is_fence: bool
    llsn: int
    count: int
    checksum: int
    glsn: int | None = None
    crowded: int = 0
    """The most batches of its producer that ever followed it when a commit came."""


class Oracle:
    def __init__(self) -> None:
        self.batches: list[Kept] = []
        self.departed: dict[str, int] = {}

    def of(self, name: str) -> list[Kept]:
        return [kept for kept in self.batches if kept.name == name]

    def last_sequence(self, name: str) -> int:
        return max((kept.sequence for kept in self.of(name)), default=0)

    def epoch(self, name: str) -> int:
        return max((kept.epoch for kept in self.of(name)), default=0)

    def may_be_forgotten(self, kept: Kept) -> bool:
        return kept.glsn is not None and kept.crowded >= WINDOW

    def must_be_forgotten(self, kept: Kept) -> bool:
        later = [k for k in self.of(kept.name) if k.glsn is not None and k.llsn > kept.llsn]
        return kept.glsn is not None and len(later) >= WINDOW

    def expect(self, of: Batch) -> list[object]:
        """All answers that would be right: an error's class, None for a new batch, or the batch that came before."""
        assert of.producer is not None
        name, epoch, sequence = of.producer.producer, of.producer.epoch, of.producer.sequence
        mine = self.of(name)
        if epoch < max(self.epoch(name), self.departed.get(name, 0)):
            return [ProducerFenced]
        if of.kind is BatchKind.FENCE:
            found: list[object] = []
            for kept in mine:
                if kept.is_fence and kept.epoch == epoch:
                    if not self.must_be_forgotten(kept):
                        found.append(kept)
                    if not self.may_be_forgotten(kept):
                        return found
            return [*found, None]
        if epoch > self.epoch(name):
            return [SequenceGap]
        if sequence > self.last_sequence(name):
            return [None if sequence == self.last_sequence(name) + 1 else SequenceGap]
        for kept in mine:
            if kept.sequence == sequence and not kept.is_fence:
                answer: object = kept if kept.checksum == of.checksum else SequenceReused
                forgotten = [SequenceExpired] if self.may_be_forgotten(kept) else []
                return [*forgotten] if self.must_be_forgotten(kept) else [answer, *forgotten]
        return [SequenceExpired]

    def record(self, of: Batch, llsn: int) -> None:
        assert of.producer is not None
        name, sequence = str(of.producer.producer), int(of.producer.sequence)
        is_fence = of.kind is BatchKind.FENCE
        if is_fence:
            sequence = max(sequence, self.last_sequence(name))
        self.batches.append(Kept(name, of.producer.epoch, sequence, is_fence, llsn, of.count, of.checksum))

    def commit(self, first: int, end: int, glsn: int) -> None:
        for kept in self.batches:
            if first <= kept.llsn <= end:
                kept.glsn = glsn + kept.llsn - first
        for kept in self.batches:
            later = [k for k in self.of(kept.name) if k.llsn > kept.llsn]
            kept.crowded = max(kept.crowded, len(later))

    def truncate(self, end: int) -> None:
        self.batches = [kept for kept in self.batches if kept.llsn <= end]


class Bench:
    """A deduplicator and the oracle side by side, and the log that both saw."""

    def __init__(self) -> None:
        self.dedup, self.oracle = Deduplicator(), Oracle()
        self.tail: list[Entry] = []
        self.end = self.committed = 0

    def send(self, of: Batch) -> None:
        assert of.producer is not None
        answer: object
        try:
            answer = self.dedup.find(of.producer, of.kind, of.checksum)
        except (ProducerFenced, SequenceExpired, SequenceGap, SequenceReused) as error:
            answer = type(error)
        expected = self.oracle.expect(of)
        assert any(same(answer, right) for right in expected), (of, answer, expected)
        if answer is None:
            entry = Entry(LLSN(self.end + 1), Epoch(1), of)
            self.oracle.record(of, entry.first_llsn)
            self.dedup.record(entry)
            self.tail.append(entry)
            self.end = entry.last_llsn

    def commit(self, batches: int) -> None:
        covered, self.tail = self.tail[:batches], self.tail[batches:]
        if covered:
            first, end = self.committed + 1, covered[-1].last_llsn
            self.dedup.commit(context(first, end - first + 1, glsn=first + 100))
            self.oracle.commit(first, end, first + 100)
            self.committed = end

    def truncate(self, batches: int) -> None:
        self.tail = self.tail[:batches]
        self.end = self.tail[-1].last_llsn if self.tail else self.committed
        self.dedup.truncate(LLSN(self.end))
        self.oracle.truncate(self.end)

    def restore(self) -> None:
        """As after a restart: the checkpoint, who has left, and the uncommitted tail from the files."""
        self.dedup = Deduplicator(self.dedup.checkpoint(LLSN(self.committed)))
        self.dedup.depart(self.departures())
        for entry in self.tail:
            self.dedup.record(entry)

    def depart(self, name: str, openings: int) -> None:
        """The stream is sealed at its committed end, and the producer goes on elsewhere, perhaps opened anew."""
        self.truncate(0)
        self.oracle.departed[name] = max(1, self.oracle.epoch(name)) + openings + 1
        self.dedup.depart(self.departures())

    def departures(self) -> list[Departure]:
        return [Departure(ProducerId(name), ProducerEpoch(epoch)) for name, epoch in self.oracle.departed.items()]


def same(answer: object, right: object) -> bool:
    if isinstance(answer, Remembered) and isinstance(right, Kept):
        seen = (answer.sequence, answer.epoch, answer.first_llsn, answer.count, answer.checksum, answer.glsn)
        return seen == (right.sequence, right.epoch, right.llsn, right.count, right.checksum, right.glsn)
    return answer is right


def step(bench: Bench, what: int, name: str, number: int) -> None:
    last, epoch = bench.oracle.last_sequence(name), max(1, bench.oracle.epoch(name))
    match what:
        case 0 | 1 | 2 | 3:
            bench.send(data(last + 1, epoch, name))
        case 4:
            bench.send(data(max(1, last - number), epoch, name))
        case 5:
            bench.send(data(max(1, last - number), epoch, name, b"other"))
        case 6:
            bench.send(data(last + 2 + number % 2, epoch, name))
        case 7:
            bench.send(data(max(1, last + 1 - number), max(1, epoch - 1 + 2 * (number % 2)), name))
        case 8:
            bench.send(fence(0, epoch=epoch + number % 2, producer=name))
        case 9:
            # Back from another stream, where the numbers went on.
            elsewhere = max(epoch, bench.oracle.departed.get(name, 0))
            bench.send(fence(last + number, epoch=elsewhere + 1, producer=name))
        case 10 | 11 | 12:
            bench.commit(number + 1)
        case 13:
            bench.truncate(number)
        case 14 | 15:
            bench.restore()
        case 16:
            bench.depart(name, number % 2)


def data(sequence: int, epoch: int, name: str, body: bytes | None = None) -> Batch:
    """A sequence and its bytes belong together, unless the bytes are given."""
    body = b"%d" % sequence if body is None else body
    return batch(1 + sequence % 3, body, producer=tag(sequence, epoch=epoch, producer=name))


steps = st.lists(st.tuples(st.integers(0, 16), st.sampled_from(NAMES), st.integers(0, 7)), min_size=20, max_size=100)


@given(steps)
def test_every_answer_is_the_oracles(made: list[tuple[int, str, int]]) -> None:
    with mock.patch.object(module, "WINDOW_BATCHES_MAX", WINDOW):
        bench = Bench()
        for name in NAMES:
            bench.send(fence(producer=name))
        for what, name, number in made:
            step(bench, what, name, number)
            for of in NAMES:
                assert bench.dedup.fate(ProducerId(of))[0] == bench.oracle.last_sequence(of)


@given(steps)
def test_a_restored_state_is_the_same_state(made: list[tuple[int, str, int]]) -> None:
    with mock.patch.object(module, "WINDOW_BATCHES_MAX", WINDOW):
        bench = Bench()
        for name in NAMES:
            bench.send(fence(producer=name))
        for what, name, number in made:
            step(bench, what, name, number)
        before = bench.dedup.checkpoint(LLSN(bench.committed))
        fates = [bench.dedup.fate(ProducerId(name)) for name in NAMES]
        bench.restore()
        assert bench.dedup.checkpoint(LLSN(bench.committed)) == before
        assert [bench.dedup.fate(ProducerId(name)) for name in NAMES] == fates
