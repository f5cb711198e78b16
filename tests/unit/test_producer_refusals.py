"""A batch that the head refuses for its content (docs/producers.md): it fails for good, and nothing else does.

The check may depend on the time, so of two attempts of one batch one may be refused and the other taken. Only a fence
of the producer's own next epoch ends the doubt.
"""

from __future__ import annotations

from random import Random

import pytest

from cutwater.core.producer_session import (
    AskFate,
    AskMetadata,
    Phase,
    ProducerSession,
    SendBatch,
    SessionEffect,
    Settled,
    Withdrawn,
)
from cutwater.core.replica.deduplication import Deduplicator
from cutwater.core.requests import ProducerGrant, RenewProducerRequest
from cutwater.errors import CutwaterError, InvalidArgument, ProducerFenced, ProtocolViolation, SequenceGap
from cutwater.types import (
    GLSN,
    LLSN,
    Ack,
    BatchKind,
    Entry,
    Epoch,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    Sequence,
)
from tests.unit.replica_bench import batch, context, fence, tag
from tests.unit.test_producer_session import (
    FIRST,
    SECOND,
    P,
    ack,
    fate,
    fenced_in,
    grant,
    move,
    numbered,
    ready,
    remembered,
    sends,
)


def renewal(epoch: int = 1) -> AskMetadata:
    return AskMetadata(RenewProducerRequest(P, 7, ProducerEpoch(epoch)))


def withdrawn(*sequences: int, refused: tuple[int, ...]) -> Withdrawn:
    return Withdrawn(tuple(map(Sequence, sequences)), frozenset(map(Sequence, refused)))


def test_a_refused_batch_is_withdrawn_behind_a_fence_and_so_is_what_follows_it() -> None:
    session = ready(b"a", b"b", b"c", b"d")
    assert session.refused(tag(2)) == [renewal()]
    assert session.phase is Phase.RENEWING
    assert session.refused(tag(4)) == [], "one fence is enough for both"
    assert session.granted(grant(2)) == sends(FIRST, fence(epoch=2))
    assert fenced_in(session, 0, epoch=2) == [
        *sends(FIRST, numbered(1, b"a", epoch=2)),
        withdrawn(2, 3, 4, refused=(2, 4)),
    ]
    assert session.unsettled == (1,)
    assert session.submit(batch(1, b"c")) == (2, sends(FIRST, numbered(2, b"c", epoch=2)))


def test_a_batch_that_the_fence_counts_is_in_the_log_though_an_attempt_was_refused() -> None:
    session = ready(b"a", b"b", b"c")
    session.refused(tag(2))
    session.granted(grant(2))
    assert fenced_in(session, 2, epoch=2) == sends(
        FIRST, numbered(1, b"a", epoch=2), numbered(2, b"b", epoch=2), numbered(3, b"c", epoch=2)
    )
    assert session.refused(tag(2, epoch=2)) == [], "that is known better here"
    assert session.acked(Sequence(2), ack(5)) == [Settled(Sequence(2), ack(5))]


def test_no_further_fence_is_asked_for_before_what_the_last_one_counted_is_settled() -> None:
    """A replica remembers only so many batches, and fences are among them."""
    session = ready(b"a", b"b", b"c")
    session.refused(tag(3))
    session.granted(grant(2))
    fenced_in(session, 1, epoch=2)
    session.submit(batch(1, b"d"))
    assert session.refused(tag(3, epoch=2)) == []
    assert session.acked(Sequence(2), ack(6)) == [Settled(Sequence(2), ack(6))]
    assert session.acked(Sequence(1), ack(5)) == [Settled(Sequence(1), ack(5)), renewal(2)]


def test_an_acknowledgement_overtakes_a_refusal() -> None:
    session = ready(b"a", b"b")
    session.refused(tag(1))
    assert session.acked(Sequence(1), ack(2)) == [Settled(Sequence(1), ack(2))]
    session.granted(grant(2))
    assert fenced_in(session, 1, epoch=2) == sends(FIRST, numbered(2, b"b", epoch=2))


def test_without_a_newer_epoch_nothing_is_withdrawn() -> None:
    """The stream was sealed and is open again before the session asked for anything: attempts of its epoch may still be
    taken behind the fence, which is the old one."""
    session = ready(b"a", b"b")
    session.refused(tag(2))
    session.granted(grant(2))
    fenced_in(session, 1, epoch=2)
    session.submit(batch(1, b"c"))
    session.refused(tag(2, epoch=2))
    session.stream_closed(FIRST, Epoch(4))
    assert session.stream_reopened(FIRST) == sends(FIRST, fence(epoch=2))
    assert fenced_in(session, 1, epoch=2) == sends(FIRST, numbered(1, b"a", epoch=2), numbered(2, b"c", epoch=2))
    assert session.acked(Sequence(1), ack(2)) == [Settled(Sequence(1), ack(2)), renewal(2)]


def test_late_refusals_are_ignored() -> None:
    session = ready(b"a", b"b")
    session.refused(tag(1))
    session.granted(grant(2))
    assert session.refused(tag(2)) == []
    assert fenced_in(session, 0, epoch=2) == [withdrawn(1, 2, refused=(1,))]
    session.submit(batch(1, b"b"))
    assert session.refused(tag(1)) == [], "the number means another batch by now"
    assert session.unsettled == (1,)


def test_a_session_without_an_answer_asks_again_and_waits_for_nothing_else() -> None:
    session = ready(b"a")
    session.refused(tag(1))
    assert session.retry() == [renewal()]
    assert session.stream_closed(FIRST, Epoch(4)) == []
    assert session.granted(grant(3)) == [], "somebody else was in between"
    session.fenced(tag(1))
    assert session.phase is Phase.RENEWING, "only the metadata repository knows"
    session.fenced(RenewProducerRequest(P, 7, ProducerEpoch(1)))
    assert session.phase is Phase.FENCED


def test_the_stream_is_sealed_before_the_fence_is_there() -> None:
    """What was taken under the epoch before is ours as well, and the move ends the doubt as the fence would."""
    session = ready(b"a", b"b", b"c")
    session.refused(tag(2))
    session.granted(grant(2))
    assert session.stream_closed(FIRST, Epoch(4)) == [AskFate(FIRST, Epoch(4))]
    told = fate(1, remembered(0, 1, kind=BatchKind.FENCE), remembered(1, 2))
    assert session.fate_known(told) == [
        Settled(Sequence(1), Ack(GLSN(2), LLSN(2), FIRST, 1)),
        move(1, epoch=2),
    ]
    session.granted(grant(3, SECOND, 1))
    assert fenced_in(session, 1, epoch=3) == [withdrawn(2, 3, refused=(2,))]


# Against a replica's memory, with a network that loses, repeats and delays.


class World:
    """A head whose check says now this and now that of one batch, and the metadata repository."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.session = ProducerSession(ProducerId("p"), "orders", 7)
        self.dedup, self.log = Deduplicator(), list[bytes]()
        self.llsn = 0
        self.epoch = 0
        self.under_way: list[SessionEffect] = []
        self.bodies: dict[Sequence, bytes] = {}
        self.acked: list[tuple[int, bytes]] = []
        self.refused: list[bytes] = []
        self.waiting = [b"%d" % number for number in range(30)]

    def do(self, effects: list[SessionEffect]) -> None:
        for effect in effects:
            match effect:
                case Settled():
                    self.acked.append((effect.ack.glsn, self.bodies.pop(effect.sequence)))
                case Withdrawn():
                    bodies = [(sequence, self.bodies.pop(sequence)) for sequence in effect.sequences]
                    self.refused += [body for sequence, body in bodies if sequence in effect.refused]
                    self.waiting[:0] = [body for sequence, body in bodies if sequence not in effect.refused]
                case AskFate():
                    raise AssertionError("nothing is sealed here")
                case _:
                    self.under_way.append(effect)

    def step(self) -> None:
        if self.session.phase is Phase.READY and len(self.bodies) < 4 and self.waiting:
            body = self.waiting.pop(0)
            sequence, effects = self.session.submit(batch(1, body))
            self.bodies[sequence] = body
            self.do(effects)
        if not self.under_way or self.rng.random() < 0.1:
            self.do(self.session.retry())
            return
        is_next = self.rng.random() < 0.7
        effect = self.under_way.pop(0 if is_next else self.rng.randrange(len(self.under_way)))
        if self.rng.random() < 0.2:
            self.under_way.append(effect)
        is_answered = self.rng.random() < 0.8
        if isinstance(effect, SendBatch):
            self.append(effect, is_answered)
        elif isinstance(effect, AskMetadata):
            asked = effect.request
            self.epoch = max(self.epoch, asked.epoch + 1 if isinstance(asked, RenewProducerRequest) else 1)
            if is_answered:
                self.do(self.session.granted(ProducerGrant(ProducerEpoch(self.epoch), FIRST, Sequence(0))))

    def append(self, effect: SendBatch, is_answered: bool) -> None:
        sent, of = effect.batch, effect.batch.producer
        assert of is not None
        try:
            # As the storage node does: what is committed already is not refused.
            if sent.body.endswith(b"3") and self.rng.random() < 0.8 and not self.dedup.has(sent):
                raise InvalidArgument("too far ahead")
            known = self.dedup.find(of, sent.kind, sent.checksum)
            if known is None:
                self.llsn += 1
                self.dedup.record(Entry(LLSN(self.llsn), Epoch(1), sent))
                self.dedup.commit(context(self.llsn, 1))
                self.log += [sent.body] if sent.kind is BatchKind.DATA else []
                known = self.dedup.fate(of.producer)[1][-1]
        except CutwaterError as error:
            if isinstance(error, SequenceGap | ProducerFenced | InvalidArgument) and is_answered:
                if isinstance(error, InvalidArgument):
                    self.do(self.session.refused(of))
                elif isinstance(error, ProducerFenced):
                    self.session.fenced(of)
            elif is_answered:
                raise ProtocolViolation(f"{error}") from error
            return
        if not is_answered:
            return
        if sent.kind is BatchKind.FENCE:
            self.do(self.session.fence_committed(of, known.sequence))
        else:
            assert known.glsn is not None
            self.do(self.session.acked(of.sequence, Ack(known.glsn, known.first_llsn, LogStreamId(1), 1)))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_gets_lost_each_batch_is_there_once_in_order_or_was_refused(seed: int) -> None:
    world = World(seed)
    world.do(world.session.start())
    for _ in range(20_000):
        if not world.waiting and not world.bodies and world.session.phase is Phase.READY:
            break
        world.step()
    assert (world.waiting, world.bodies) == ([], {})
    for _ in range(len(world.under_way)):
        # What is late does no harm.
        world.step()
    expected = [b"%d" % number for number in range(30) if b"%d" % number not in world.refused]
    assert world.log == expected
    assert [body for _, body in sorted(world.acked)] == expected
    assert world.refused or seed % 10
