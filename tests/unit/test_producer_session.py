"""The client's side of a named producer: the rules for outcomes (docs/producers.md)."""

from __future__ import annotations

from contextlib import suppress

import pytest

from cutwater.core.producer_session import (
    IN_FLIGHT_BATCHES_MAX,
    AskFate,
    AskMetadata,
    Fate,
    Phase,
    ProducerSession,
    SendBatch,
    SessionEffect,
    Settled,
)
from cutwater.core.replica.deduplication import WINDOW_BATCHES_MAX, Deduplicator, Remembered
from cutwater.core.requests import MoveProducerRequest, OpenProducerRequest, ProducerGrant
from cutwater.errors import ProducerFenced, ProtocolViolation, ResourceExhausted
from cutwater.types import (
    GLSN,
    LLSN,
    Ack,
    Batch,
    BatchKind,
    Entry,
    Epoch,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    Sequence,
)
from tests.unit.replica_bench import batch, context, fence, tag

P = ProducerId("p")
FIRST, SECOND = LogStreamId(1), LogStreamId(2)


def grant(epoch: int = 1, stream: LogStreamId = FIRST, last_sequence: int = 0) -> ProducerGrant:
    return ProducerGrant(ProducerEpoch(epoch), stream, Sequence(last_sequence))


def sends(stream: LogStreamId, *batches: Batch) -> list[SessionEffect]:
    return [SendBatch(stream, of) for of in batches]


def numbered(sequence: int, body: bytes, *, epoch: int = 1) -> Batch:
    return batch(1, body, producer=tag(sequence, epoch=epoch))


def ack(glsn: int, *, stream: LogStreamId = FIRST) -> Ack:
    return Ack(GLSN(glsn), LLSN(glsn), stream, 1)


def ready(*bodies: bytes, last_sequence: int = 0) -> ProducerSession:
    """A session that has opened in the first stream and sent these batches."""
    session = ProducerSession(P, "orders", 7)
    session.start()
    session.granted(grant())
    fenced_in(session, last_sequence)
    for body in bodies:
        session.submit(batch(1, body))
    return session


def remembered(sequence: int, glsn: int | None, *, epoch: int = 1, kind: BatchKind = BatchKind.DATA) -> Remembered:
    """What a replica knows of our batch with this number; the bodies are a, b, c and so on."""
    position = None if glsn is None else GLSN(glsn)
    checksum = batch(1, bytes([ord("a") - 1 + sequence])).checksum if kind is BatchKind.DATA else 0
    return Remembered(Sequence(sequence), ProducerEpoch(epoch), kind, LLSN(sequence + 1), 1, checksum, position)


def fate(last: int, *batches: Remembered, epoch: int = 4) -> Fate:
    return Fate(FIRST, Epoch(epoch), Sequence(last), batches)


def wish(last: int, *, epoch: int = 1, stream_epoch: int = 4) -> MoveProducerRequest:
    return MoveProducerRequest(P, 7, ProducerEpoch(epoch), Epoch(stream_epoch), Sequence(last))


def move(last: int, *, epoch: int = 1, stream_epoch: int = 4) -> AskMetadata:
    return AskMetadata(wish(last, epoch=epoch, stream_epoch=stream_epoch))


def fenced_in(session: ProducerSession, last: int = 0, *, epoch: int = 1) -> list[SessionEffect]:
    return session.fence_committed(tag(0, epoch=epoch), Sequence(last))


# "Opening it bumps its epoch in the MR and commits a fence in its stream before the last sequence is returned".


def test_a_session_opens_in_the_metadata_repository_then_with_a_fence() -> None:
    session = ProducerSession(P, "orders", 7)
    assert session.start() == [AskMetadata(OpenProducerRequest(P, "orders", 7))]
    assert session.granted(grant(3, last_sequence=5)) == sends(FIRST, fence(5, epoch=3))
    assert session.phase is Phase.FENCING
    assert fenced_in(session, 8, epoch=3) == []
    assert (session.phase, session.last_sequence) == (Phase.READY, 8)


def test_batches_are_numbered_from_the_last_sequence_that_the_fence_told() -> None:
    session = ready(last_sequence=41)
    assert session.submit(batch(1, b"a")) == (42, sends(FIRST, numbered(42, b"a")))
    assert session.submit(batch(1, b"b")) == (43, sends(FIRST, numbered(43, b"b")))
    assert session.unsettled == (42, 43)


def test_nothing_is_submitted_before_the_name_is_opened() -> None:
    with pytest.raises(ResourceExhausted):
        ProducerSession(P, "orders", 7).submit(batch())


def test_no_number_of_an_earlier_holder_is_used_again() -> None:
    """Which numbers are taken is known only when the fence is committed. A batch that the user hands over before gets
    none yet: under number 1 the stream would answer it with the position of the earlier holder's batch 1."""
    session = ProducerSession(P, "orders", 7)
    session.granted(grant(2))
    with suppress(ResourceExhausted):
        session.submit(batch(1, b"early"))
    effects = fenced_in(session, 41, epoch=2)
    _, later = session.submit(batch(1, b"late"))
    numbers = [
        effect.batch.producer.sequence
        for effect in [*effects, *later]
        if isinstance(effect, SendBatch) and effect.batch.producer is not None
    ]
    assert min(numbers) == 42


def test_a_batch_of_an_earlier_holder_does_not_settle_one_of_ours() -> None:
    """The stream is sealed before our fence is in it. What it tells of number 1 is not about our first batch."""
    session = ProducerSession(P, "orders", 7)
    session.granted(grant(2))
    with suppress(ResourceExhausted):
        session.submit(batch(1, b"early"))
    session.stream_closed(FIRST, Epoch(4))
    effects = session.fate_known(fate(41, remembered(1, 7, epoch=1)))
    assert not [effect for effect in effects if isinstance(effect, Settled)]


def test_a_grant_that_is_older_than_ours_is_ignored() -> None:
    session = ProducerSession(P, "orders", 7)
    session.granted(grant(2))
    assert session.granted(grant(1)) == []
    fenced_in(session, epoch=2)
    assert session.submit(batch(1, b"a"))[1] == sends(FIRST, numbered(1, b"a", epoch=2))


# "it retries on the same stream with the same (producer, sequence) and gets the same GLSN."


def test_a_retry_repeats_what_is_unsettled_in_order_on_the_same_stream() -> None:
    session = ready(b"a", b"b", b"c")
    assert session.acked(Sequence(2), ack(12)) == [Settled(Sequence(2), ack(12))]
    assert session.retry() == sends(FIRST, numbered(1, b"a"), numbered(3, b"c"))
    assert session.retry() == sends(FIRST, numbered(1, b"a"), numbered(3, b"c"))


def test_a_batch_is_settled_once() -> None:
    session = ready(b"a")
    session.acked(Sequence(1), ack(11))
    assert session.acked(Sequence(1), ack(11)) == []
    assert session.acked(Sequence(9), ack(19)) == []
    assert session.retry() == []


def test_a_retry_repeats_the_present_step_whatever_it_is() -> None:
    """“No answer for a while: do the present step again.” A lost message must not stop a session for ever."""
    session = ProducerSession(P, "orders", 7)
    assert session.retry() == session.start()
    fencing = session.granted(grant())
    assert session.retry() == fencing
    fenced_in(session)
    _, sending = session.submit(batch(1, b"a"))
    assert session.retry() == sending
    settling = session.stream_closed(FIRST, Epoch(4))
    assert session.retry() == settling
    moving = session.fate_known(fate(0))
    assert moving == [move(0)]
    assert session.retry() == moving


def test_fewer_batches_are_under_way_than_a_replica_remembers() -> None:
    session = ready()
    for _ in range(IN_FLIGHT_BATCHES_MAX):
        session.submit(batch())
    with pytest.raises(ResourceExhausted):
        session.submit(batch())
    session.acked(Sequence(1), ack(11))
    session.submit(batch())


def test_a_batch_whose_answer_is_lost_is_never_left_behind_the_window() -> None:
    """“Fewer than a replica remembers, so a repeated batch is always recognised.” It is the distance that counts: here
    every other batch is answered and only the first one is not."""
    session = ready(b"first")
    try:
        for _ in range(WINDOW_BATCHES_MAX + 1):
            sequence, _ = session.submit(batch())
            session.acked(sequence, ack(sequence))
    except ResourceExhausted:
        pass
    assert session.last_sequence - min(session.unsettled) < WINDOW_BATCHES_MAX


# "It changes streams only by an MR decision, after the first stream is sealed and the fate of every sequence is known."


def test_a_session_moves_after_it_knows_the_fate_of_every_batch() -> None:
    session = ready(b"a", b"b", b"c")
    assert session.stream_closed(FIRST, Epoch(4)) == [AskFate(FIRST, Epoch(4))]
    assert session.phase is Phase.SETTLING
    known = fate(2, remembered(0, 10, kind=BatchKind.FENCE), remembered(1, 11), remembered(2, 12))
    assert session.fate_known(known) == [
        Settled(Sequence(1), Ack(GLSN(11), LLSN(2), FIRST, 1)),
        Settled(Sequence(2), Ack(GLSN(12), LLSN(3), FIRST, 1)),
        move(2),
    ]
    assert session.phase is Phase.MOVING
    assert session.granted(grant(2, SECOND, 2)) == sends(SECOND, fence(2, epoch=2))
    assert fenced_in(session, 2, epoch=2) == sends(SECOND, numbered(3, b"c", epoch=2))
    assert session.submit(batch(1, b"d")) == (4, sends(SECOND, numbered(4, b"d", epoch=2)))


def test_nothing_is_sent_elsewhere_before_the_decision() -> None:
    session = ready(b"a")
    session.stream_closed(FIRST, Epoch(4))
    assert session.submit(batch(1, b"b")) == (2, [])
    assert session.granted(grant(2, SECOND)) == []
    session.fate_known(fate(0))
    assert session.submit(batch(1, b"c")) == (3, [])
    assert fenced_in(session, epoch=2) == []
    session.granted(grant(2, SECOND))
    assert session.submit(batch(1, b"d")) == (4, [])
    assert fenced_in(session, epoch=1) == []
    assert fenced_in(session, epoch=2) == sends(
        SECOND,
        numbered(1, b"a", epoch=2),
        numbered(2, b"b", epoch=2),
        numbered(3, b"c", epoch=2),
        numbered(4, b"d", epoch=2),
    )


def test_what_is_taken_along_is_what_the_new_stream_takes() -> None:
    """The fence in the second stream makes its deduplication expect exactly the first unsettled batch."""
    session = ready(b"a", b"b", b"c")
    session.stream_closed(FIRST, Epoch(4))
    (*_, ask) = session.fate_known(fate(1, remembered(1, 11)))
    assert ask == move(1)
    stream = Deduplicator()
    (sent,) = session.granted(grant(2, SECOND, 1))
    assert isinstance(sent, SendBatch)
    stream.record(Entry(LLSN(1), Epoch(1), sent.batch))
    stream.commit(context(1, 1))
    for llsn, effect in enumerate(fenced_in(session, stream.fate(P)[0], epoch=2), 2):
        assert isinstance(effect, SendBatch)
        assert effect.batch.producer is not None
        assert stream.find(effect.batch.producer, effect.batch.kind, effect.batch.checksum) is None
        stream.record(Entry(LLSN(llsn), Epoch(1), effect.batch))
    assert stream.fate(P)[0] == 3


def test_a_fence_that_was_lost_with_the_stream_takes_the_numbers_along() -> None:
    """Two streams in a row are sealed; the second holds nothing of ours, not even the fence."""
    session = ready(b"a", b"b")
    session.stream_closed(FIRST, Epoch(4))
    session.fate_known(fate(1, remembered(1, 11)))
    session.granted(grant(2, SECOND, 1))
    session.stream_closed(SECOND, Epoch(7))
    assert session.fate_known(Fate(SECOND, Epoch(7), Sequence(0), ())) == [move(1, epoch=2, stream_epoch=7)]


def test_a_move_with_nothing_unsettled_keeps_the_last_number() -> None:
    session = ready(b"a", last_sequence=6)
    session.acked(Sequence(7), ack(11))
    session.stream_closed(FIRST, Epoch(4))
    assert session.fate_known(fate(7, remembered(7, 11))) == [move(7)]


def test_the_seal_of_another_stream_and_a_fate_that_nobody_asked_for_are_ignored() -> None:
    session = ready(b"a")
    assert session.stream_closed(SECOND, Epoch(4)) == []
    assert session.fate_known(fate(0)) == []
    session.stream_closed(FIRST, Epoch(4))
    assert session.fate_known(Fate(SECOND, Epoch(4), Sequence(0), ())) == []
    assert session.phase is Phase.SETTLING


def test_an_uncommitted_batch_in_a_sealed_stream_is_an_alarm() -> None:
    session = ready(b"a")
    session.stream_closed(FIRST, Epoch(4))
    with pytest.raises(ProtocolViolation):
        session.fate_known(fate(1, remembered(1, None)))


@pytest.mark.parametrize("settled_first", [False, True])
def test_a_session_whose_stream_opens_again_stays_there(settled_first: bool) -> None:
    """The move is refused: what is unsettled is repeated where deduplication recognises it."""
    session = ready(b"a", b"b")
    session.stream_closed(FIRST, Epoch(4))
    if settled_first:
        session.fate_known(fate(1, remembered(1, 11)))
        assert session.move_refused(wish(1)) == sends(FIRST, fence())
    else:
        assert session.stream_reopened(FIRST) == sends(FIRST, fence())
    again = fenced_in(session)
    left = (numbered(2, b"b"),) if settled_first else (numbered(1, b"a"), numbered(2, b"b"))
    assert again == sends(FIRST, *left)


def test_a_late_answer_from_the_old_stream_still_settles() -> None:
    """It was committed there, and an ack is an ack; the batch is not sent again."""
    session = ready(b"a")
    session.stream_closed(FIRST, Epoch(4))
    assert session.acked(Sequence(1), ack(11)) == [Settled(Sequence(1), ack(11))]
    assert session.fate_known(fate(1, remembered(1, 11))) == [move(1)]


# "… so an older holder of the name can do no more harm."


def test_a_fenced_session_does_nothing_any_more() -> None:
    session = ready(b"a")
    session.fenced(tag(1, epoch=1))
    assert session.phase is Phase.FENCED
    assert session.retry() == []
    assert session.granted(grant(2, SECOND)) == []
    assert fenced_in(session) == []
    assert session.stream_closed(FIRST, Epoch(4)) == []
    assert session.stream_reopened(FIRST) == []
    assert session.fate_known(fate(0)) == []
    assert session.move_refused(wish(0)) == []
    assert session.unsettled == (1,), "its outcome is unknown, and the caller can see that"


def test_a_fenced_session_takes_no_more_batches() -> None:
    session = ready()
    session.fenced(tag(1, epoch=1))
    with pytest.raises(ProducerFenced):
        session.submit(batch())


def test_a_name_that_was_opened_before_our_fence_was_in_the_stream_is_fenced() -> None:
    session = ProducerSession(P, "orders", 7)
    session.granted(grant())
    session.fenced(tag(0, epoch=1))
    assert session.phase is Phase.FENCED
    assert session.granted(grant(3)) == []


def test_the_metadata_repository_says_that_the_name_was_opened_again() -> None:
    session = moving(b"a")
    session.fenced(wish(0))
    assert session.phase is Phase.FENCED


def test_a_zombie_learns_from_the_fate_that_its_name_was_opened_again() -> None:
    """The newer holder has used the same numbers for other batches: none of them is ours."""
    session = ready(b"a", b"b")
    session.stream_closed(FIRST, Epoch(4))
    newer = (remembered(0, 10, epoch=2, kind=BatchKind.FENCE), remembered(1, 11, epoch=2))
    assert session.fate_known(fate(1, *newer)) == []
    assert session.phase is Phase.FENCED


# Late answers.


def moving(*bodies: bytes) -> ProducerSession:
    """A session that has asked to leave the first stream, which holds none of its batches."""
    session = ready(*bodies)
    session.stream_closed(FIRST, Epoch(4))
    session.fate_known(fate(0))
    assert session.phase is Phase.MOVING
    return session


def test_the_stream_that_is_left_may_refuse_what_it_gets_late() -> None:
    """Our own move is decided, and we have not heard of it: the first stream knows us as someone older already."""
    session = moving(b"a")
    session.fenced(tag(1, epoch=1))
    assert session.phase is Phase.MOVING
    session.granted(grant(2, SECOND))
    session.fenced(tag(1, epoch=1))
    session.fenced(wish(0))
    assert fenced_in(session, epoch=2) == sends(SECOND, numbered(1, b"a", epoch=2))


def test_a_refusal_of_an_earlier_move_does_not_undo_a_later_one() -> None:
    """The second move may be decided already; going back to the stream would be taken for an older self."""
    session = moving(b"a")
    session.move_refused(wish(0))
    session.stream_closed(FIRST, Epoch(5))
    assert session.fate_known(fate(0, epoch=5)) == [move(0, stream_epoch=5)]
    assert session.move_refused(wish(0)) == []
    assert session.retry() == [move(0, stream_epoch=5)]
    assert session.granted(grant(2, SECOND)) == sends(SECOND, fence(epoch=2))


def test_the_fate_in_an_earlier_epoch_of_the_stream_is_not_the_last_word() -> None:
    """What was sent since then may be in the log."""
    session = ready(b"a")
    session.stream_closed(FIRST, Epoch(4))
    session.stream_reopened(FIRST)
    fenced_in(session)
    assert session.stream_closed(FIRST, Epoch(5)) == [AskFate(FIRST, Epoch(5))]
    assert session.fate_known(fate(0, epoch=4)) == []
    assert session.fate_known(fate(1, remembered(1, 11), epoch=5)) == [
        Settled(Sequence(1), Ack(GLSN(11), LLSN(2), FIRST, 1)),
        move(1, stream_epoch=5),
    ]


def test_the_fence_of_an_earlier_stay_does_not_open_the_stream_again() -> None:
    """There and back again: under the new epoch the stream has not taken a fence yet."""
    session = moving(b"a")
    session.granted(grant(2, SECOND))
    session.stream_closed(SECOND, Epoch(1))
    session.fate_known(Fate(SECOND, Epoch(1), Sequence(0), ()))
    session.granted(grant(3, FIRST))
    assert fenced_in(session, epoch=1) == []
    assert session.retry() == sends(FIRST, fence(epoch=3))


def test_a_grant_that_skips_an_epoch_is_not_the_answer_to_a_move() -> None:
    """A repeated opening that arrived late has taken the name back from someone who may have used our numbers."""
    session = moving(b"a")
    assert session.granted(grant(3, SECOND)) == []
    session.fenced(wish(0))
    assert session.phase is Phase.FENCED


def test_a_repeated_opening_that_is_answered_late_is_taken_over_before_anything_is_sent() -> None:
    session = ProducerSession(P, "orders", 7)
    session.granted(grant(1))
    assert session.granted(grant(3, SECOND, 5)) == sends(SECOND, fence(5, epoch=3))
    fenced_in(session, 5, epoch=3)
    assert session.granted(grant(5)) == [], "now there may be batches under way"


def test_a_stream_that_opens_again_after_the_move_was_asked_for_is_left_all_the_same() -> None:
    """Whether the move is decided is for the metadata repository to say."""
    session = moving(b"a")
    assert session.stream_reopened(FIRST) == []
    assert session.stream_closed(FIRST, Epoch(5)) == []
    assert session.phase is Phase.MOVING
