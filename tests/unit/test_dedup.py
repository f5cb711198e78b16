"""Producer deduplication, rule by rule (docs/producers.md).

“Deduplication state (sequence → LLSN, GLSN, checksum) covers uncommitted entries, is truncated with the tail,
checkpointed, outlives trim, and travels with sync. A gap, or the same sequence with other bytes, is an error; so is
leaving the deduplication window.”
"""

from __future__ import annotations

import pytest

from cutwater.core.replica.deduplication import WINDOW_BATCHES_MAX, Deduplicator, Departure, Remembered
from cutwater.errors import ProducerFenced, SequenceExpired, SequenceGap, SequenceReused
from cutwater.types import GLSN, LLSN, Batch, BatchKind, Entry, Epoch, ProducerEpoch, ProducerId, Sequence
from tests.unit.replica_bench import batch, context, fence, tag


class Stream:
    """A deduplicator fed like that of a head: look for an earlier arrival, and only then record."""

    def __init__(self, dedup: Deduplicator | None = None, end: int = 0) -> None:
        self.dedup = dedup or Deduplicator()
        self.end = self.committed = end

    def send(self, of: Batch) -> Remembered | None:
        """The earlier arrival, or None if it was new and is now in the stream."""
        assert of.producer is not None
        known = self.dedup.find(of.producer, of.kind, of.checksum)
        if known is None:
            self.record(of)
        return known

    def record(self, of: Batch) -> None:
        self.dedup.record(Entry(LLSN(self.end + 1), Epoch(1), of))
        self.end += of.count

    def commit(self) -> None:
        if self.end > self.committed:
            self.dedup.commit(context(self.committed + 1, self.end - self.committed, glsn=self.committed + 101))
        self.committed = self.end

    def truncate(self) -> None:
        self.dedup.truncate(LLSN(self.committed))
        self.end = self.committed

    def restored(self) -> Stream:
        return Stream(Deduplicator(self.dedup.checkpoint(LLSN(self.committed))), self.committed)


def numbered(sequence: int, body: bytes | None = None, *, epoch: int = 1, count: int = 1, producer: str = "p") -> Batch:
    body = b"%d" % sequence if body is None else body
    return batch(count, body, producer=tag(sequence, epoch=epoch, producer=producer))


def opened(*sequences: int) -> Stream:
    """A producer's fence at LLSN 1, then batches of one record with these sequences, all committed."""
    stream = Stream()
    stream.send(fence())
    for sequence in sequences:
        stream.send(numbered(sequence))
    stream.commit()
    return stream


P = ProducerId("p")


def departure(epoch: int) -> Departure:
    return Departure(P, ProducerEpoch(epoch))


def test_a_producer_begins_with_a_fence() -> None:
    """“Opening it bumps its epoch in the MR and commits a fence in its stream”."""
    stream = Stream()
    with pytest.raises(SequenceGap) as caught:
        stream.send(numbered(1))
    assert caught.value.expected == 1
    stream.send(fence())
    assert stream.send(numbered(1)) is None


def test_a_repeated_batch_is_found_with_its_position() -> None:
    stream = opened(1, 2)
    known = stream.send(numbered(1))
    assert known is not None
    assert (known.first_llsn, known.glsn, known.count, known.sequence) == (2, 102, 1, 1)


def test_it_covers_uncommitted_entries() -> None:
    stream = opened()
    stream.send(numbered(1, count=3))
    known = stream.send(numbered(1, count=3))
    assert known is not None
    assert (known.first_llsn, known.glsn, known.last_llsn) == (2, None, 4)
    stream.commit()
    known = stream.send(numbered(1, count=3))
    assert known is not None
    assert known.glsn == 102


def test_it_is_truncated_with_the_tail() -> None:
    stream = opened(1)
    stream.send(numbered(2))
    stream.send(numbered(3))
    stream.truncate()
    assert stream.dedup.fate(P)[0] == 1
    with pytest.raises(SequenceGap):
        stream.send(numbered(3))
    assert stream.send(numbered(2, b"anew")) is None


def test_it_is_checkpointed_without_the_uncommitted_tail() -> None:
    stream = opened(1, 2)
    stream.send(numbered(3))
    again = stream.restored()
    assert again.dedup.checkpoint(LLSN(3)) == stream.dedup.checkpoint(LLSN(3))
    assert again.dedup.fate(P)[0] == 2
    known = again.send(numbered(2))
    assert known is not None
    assert known.glsn == 103
    assert again.send(numbered(3)) is None


def test_a_gap_is_an_error_that_says_what_is_next() -> None:
    stream = opened(1, 2)
    with pytest.raises(SequenceGap) as caught:
        stream.send(numbered(4))
    assert caught.value.expected == 3


@pytest.mark.parametrize("committed", [False, True])
def test_the_same_sequence_with_other_bytes_is_an_error(committed: bool) -> None:
    stream = opened(1)
    stream.send(numbered(2))
    if committed:
        stream.commit()
    with pytest.raises(SequenceReused):
        stream.send(numbered(2, b"other"))


def test_leaving_the_window_is_an_error() -> None:
    stream = opened(*range(1, WINDOW_BATCHES_MAX + 11))
    assert stream.send(numbered(11)) is not None
    with pytest.raises(SequenceExpired):
        stream.send(numbered(10))
    with pytest.raises(SequenceExpired):
        stream.restored().send(numbered(10))
    assert stream.restored().send(numbered(11)) is not None


def test_the_window_is_a_function_of_the_log_alone() -> None:
    """“The state is a pure function of the entries of one log stream and of their commits, so every replica has the
    same and any of them may become head.” The head has far more uncommitted entries when a commit arrives than the last
    replica of the chain; after the rest was truncated both must know the same."""
    head, last = opened(*range(1, 11)), opened(*range(1, 11))
    for sequence in range(11, 11 + WINDOW_BATCHES_MAX + 40):
        head.record(numbered(sequence))
    head.dedup.commit(context(12, 1, glsn=112))
    head.dedup.truncate(LLSN(12))
    last.send(numbered(11))
    last.commit()
    assert head.dedup.checkpoint(LLSN(12)) == last.dedup.checkpoint(LLSN(12))


def test_an_older_epoch_is_fenced_also_by_an_uncommitted_fence() -> None:
    """“… so an older holder of the name can do no more harm.”"""
    stream = opened(1)
    stream.send(fence(epoch=2))
    with pytest.raises(ProducerFenced):
        stream.send(numbered(2))
    with pytest.raises(ProducerFenced):
        stream.send(numbered(1))
    with pytest.raises(ProducerFenced):
        stream.send(fence())
    stream.truncate()
    assert stream.send(numbered(2)) is None


def test_a_batch_of_an_epoch_that_was_not_opened_here_is_refused() -> None:
    with pytest.raises(SequenceGap):
        opened(1).send(numbered(2, epoch=2))


def test_a_new_epoch_goes_on_where_the_older_one_ended_and_may_repeat_it() -> None:
    """It “resolves unknown outcomes”: what the older holder sent has its old place."""
    stream = opened(1, 2)
    stream.send(fence(epoch=2))
    stream.commit()
    assert stream.dedup.fate(P)[0] == 2
    known = stream.send(numbered(2, epoch=2))
    assert known is not None
    assert known.glsn == 103
    assert stream.send(numbered(3, epoch=2)) is None


def test_a_repeated_fence_is_the_same_fence() -> None:
    stream = opened(1)
    known = stream.send(fence())
    assert known is not None
    assert (known.kind, known.first_llsn, known.glsn, known.sequence) == (BatchKind.FENCE, 1, 101, 0)


def test_a_fence_takes_over_the_numbering_of_the_stream_before() -> None:
    stream = Stream()
    stream.send(fence(7))
    with pytest.raises(SequenceGap):
        stream.send(numbered(9))
    with pytest.raises(SequenceExpired):
        stream.send(numbered(7))
    assert stream.send(numbered(8)) is None


def test_a_fence_never_takes_the_numbering_back() -> None:
    stream = opened(1, 2, 3)
    stream.send(fence(1, epoch=2))
    assert stream.dedup.fate(P)[0] == 3


def test_a_fence_that_was_forgotten_may_come_again() -> None:
    """It takes a position and changes nothing else."""
    stream = opened(*range(1, WINDOW_BATCHES_MAX + 2))
    assert stream.send(fence()) is None
    assert stream.send(numbered(WINDOW_BATCHES_MAX + 1)) is not None
    assert stream.send(numbered(WINDOW_BATCHES_MAX + 2)) is None


def test_one_producer_knows_nothing_of_another() -> None:
    stream = opened(1)
    stream.send(fence(producer="q", epoch=9))
    assert stream.send(numbered(1, epoch=9, producer="q")) is None
    assert stream.send(numbered(2)) is None
    stream.commit()
    assert stream.dedup.fate(ProducerId("q"))[0] == 1
    assert stream.dedup.fate(ProducerId("nobody")) == (Sequence(0), ())


def test_a_departed_producer_comes_back_with_a_later_epoch() -> None:
    """A move raises the epoch like an opening, so what is older than the departure is of a former self."""
    stream = opened(1)
    stream.dedup.depart([departure(2)])
    for late in (numbered(1), numbered(2), fence(), fence(4)):
        with pytest.raises(ProducerFenced):
            stream.send(late)
    with pytest.raises(SequenceGap):
        stream.send(numbered(5, epoch=3))
    assert stream.send(fence(4, epoch=3)) is None
    assert stream.send(numbered(5, epoch=3)) is None
    stream.truncate()
    with pytest.raises(ProducerFenced):
        stream.send(numbered(2))


def test_a_producer_that_left_is_away_also_where_it_never_was() -> None:
    stream = Stream()
    stream.dedup.depart([departure(2)])
    with pytest.raises(ProducerFenced):
        stream.send(fence())
    stream.send(fence(3, epoch=3))
    assert stream.send(numbered(4, epoch=3)) is None


def test_a_producer_that_came_back_long_ago_is_not_away() -> None:
    """Its fence was forgotten with the window, but not its epoch."""
    stream = opened(1)
    stream.dedup.depart([departure(2)])
    stream.send(fence(4, epoch=3))
    for sequence in range(5, WINDOW_BATCHES_MAX + 10):
        stream.send(numbered(sequence, epoch=3))
    stream.commit()
    again = stream.restored()
    again.dedup.depart([departure(2)])
    for of_stream in (stream, again):
        assert of_stream.send(numbered(WINDOW_BATCHES_MAX + 10, epoch=3)) is None
        with pytest.raises(ProducerFenced):
            of_stream.send(numbered(2))


def test_untagged_entries_leave_no_trace() -> None:
    stream = Stream()
    stream.record(batch())
    stream.commit()
    assert stream.dedup.checkpoint(LLSN(1)).producers == ()


def test_what_is_told_of_a_producers_fate() -> None:
    stream = opened(1)
    last, batches = stream.dedup.fate(P)
    checksum = numbered(1).checksum
    assert last == 1
    assert batches == (
        Remembered(Sequence(0), ProducerEpoch(1), BatchKind.FENCE, LLSN(1), 1, 0, GLSN(101)),
        Remembered(Sequence(1), ProducerEpoch(1), BatchKind.DATA, LLSN(2), 1, checksum, GLSN(102)),
    )
