"""A producer that moves from one log stream to another and back, as the metadata repository and a replica see it.

An older holder of the name can do no more harm (docs/producers.md). A producer changes streams only by a decision of
the metadata repository, after the first stream is sealed and the fate of every sequence is known.
"""

from __future__ import annotations

import pytest

from cutwater.core.messages import SyncBegin, SyncEnd, SyncEntries, UnsealReplica
from cutwater.core.order import decisions as d
from cutwater.core.order.cut import Candidate, make_cut
from cutwater.core.order.request_handling import Surroundings, decide
from cutwater.core.order.state import LogStream, OrderState
from cutwater.core.producer_session import AskMetadata, Fate, ProducerSession, SessionEffect
from cutwater.core.replica.events import Commit
from cutwater.core.replica.sync_ranges import plan_sync
from cutwater.core.requests import Description, ProducerGrant
from cutwater.errors import ProducerFenced
from cutwater.types import (
    GLSN,
    LLSN,
    CutTime,
    Epoch,
    LeaderEpoch,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    Sequence,
    StorageNodeId,
    TopicId,
)
from tests.unit.replica_bench import (
    HEAD,
    MIDDLE,
    STREAM,
    Bench,
    append,
    batch,
    exclude,
    fence,
    learn,
    seal,
    tag,
)

P = ProducerId("p")
OTHER = LogStreamId(2)


class Cluster:
    """Two streams of one topic in the metadata repository, and the first one's replica."""

    def __init__(self) -> None:
        self.state = OrderState()
        self.state.apply(d.AddNode(HEAD))
        self.state.apply(d.CreateTopic(TopicId(1), "orders", 1))
        for stream in (STREAM, OTHER):
            self.state.apply(d.CreateStream(stream, TopicId(1), (HEAD,), GLSN(0), CutTime(0)))
        self.replica = Bench(HEAD)
        self.replica.do(seal(0, epoch=0))
        self.unseal(OTHER)
        self.unseal(STREAM)

    @property
    def stream(self) -> LogStream:
        return self.state.streams[STREAM]

    def unseal(self, stream: LogStreamId) -> None:
        of = self.state.streams[stream]
        self.state.apply(d.Unseal(stream, Epoch(of.epoch + 1), of.committed_end, (HEAD,)))
        if stream == STREAM:
            self.replica.do(self.unseal_message(HEAD))

    def unseal_message(self, node: StorageNodeId) -> UnsealReplica:
        """As the leader makes it."""
        of = self.stream
        return UnsealReplica(STREAM, LeaderEpoch(1), of.epoch, of.start, (node,), of.departed)

    def seal(self, stream: LogStreamId) -> None:
        of = self.state.streams[stream]
        self.state.apply(d.Seal(stream, of.epoch, of.committed_end, of.members, "test"))
        if stream == STREAM:
            self.replica.do(seal(of.committed_end, epoch=of.epoch))

    def open_producer(self, epoch: int) -> None:
        self.state.apply(
            d.OpenProducer(P, ProducerEpoch(epoch), self.state.producers[P].stream if epoch > 1 else STREAM, epoch)
        )

    def move(self, to: LogStreamId, *, epoch: int, last: int) -> None:
        self.state.apply(d.MoveProducer(P, ProducerEpoch(epoch), to, Sequence(last)))

    def first_fence(self) -> None:
        """The first holder's fence is LLSN 1."""
        self.replica.do(append(1, fence()))
        self.cut()

    def cut(self) -> None:
        """Commit what the replica has."""
        self.replica.sync()
        of, state = self.stream, self.state
        candidate = Candidate(STREAM, of.epoch, of.committed_end, (self.replica.replica.durable_end,))
        before, time = state.high_watermark, CutTime(state.cut_time + 1)
        (part,) = make_cut(before, time, [candidate])
        state.apply(d.Cut(part.context.high_watermark, before, time, state.revision, (part,)))
        self.replica.do(Commit(before, part.context.high_watermark, state.revision, part.context))
        self.replica.sync()

    def ask(self, effect: SessionEffect) -> ProducerGrant:
        """The leader carries out what a session asks of it."""
        assert isinstance(effect, AskMetadata)
        around = Surroundings(lambda node: True, lambda stream, node: True, Description, self.state.cut_time)
        decided, answer = decide(effect.request, self.state, around)
        for decision in decided:
            self.state.apply(decision)
        assert isinstance(answer, ProducerGrant)
        return answer

    def send(self, waiter: int, sequence: int, *, epoch: int, to: Bench | None = None) -> None:
        target = to or self.replica
        target.do(append(waiter, batch(producer=tag(sequence, epoch=epoch)), epoch=self.stream.epoch))


def moved_away() -> Cluster:
    """The second holder opened the name, but was moved away before its fence was in the stream. It has used number 1
    elsewhere; the first holder still has a number 1 of its own that never got here."""
    cluster = Cluster()
    cluster.open_producer(1)
    cluster.first_fence()
    cluster.open_producer(2)
    cluster.seal(STREAM)
    cluster.move(OTHER, epoch=3, last=0)
    cluster.unseal(STREAM)
    return cluster


def moved_back() -> Cluster:
    """… and was moved back, and is expected, but its fence has not come. The stream was sealed once more."""
    cluster = moved_away()
    cluster.seal(OTHER)
    cluster.move(STREAM, epoch=4, last=1)
    cluster.seal(STREAM)
    return cluster


def test_an_older_holder_is_shut_out_of_a_stream_that_the_name_has_left() -> None:
    cluster = moved_away()
    with pytest.raises(ProducerFenced):
        cluster.send(9, 1, epoch=1)


@pytest.mark.parametrize("restarted", [False, True])
def test_an_older_holder_does_not_slip_in_before_the_fence_of_the_one_that_comes_back(restarted: bool) -> None:
    """Guarantee 9: number 1 is in the log once."""
    cluster = moved_back()
    cluster.unseal(STREAM)
    if restarted:
        cluster.replica.crash()
        cluster.seal(STREAM)
        cluster.unseal(STREAM)
    with pytest.raises(ProducerFenced):
        cluster.send(9, 1, epoch=1)


def test_an_older_holder_does_not_slip_in_through_a_replica_that_learned() -> None:
    """Deduplication state “travels with sync”: the newly admitted replica may become the head."""
    cluster = moved_back()
    source, learner = cluster.replica, Bench(MIDDLE)
    learner.do(exclude(epoch=cluster.stream.epoch))
    learner.do(learn(epoch=cluster.stream.epoch, source=HEAD))
    plan = plan_sync(source.replica.extent, learner.replica.extent)
    learner.do(SyncBegin(STREAM, 1, plan, GLSN(0)))
    learner.do(SyncEntries(STREAM, 1, tuple(source.disk.entries)))
    dedup = source.replica.dedup.checkpoint(LLSN(1))
    learner.do(SyncEnd(STREAM, 1, tuple(source.disk.contexts), dedup, GLSN(1)))
    learner.sync()
    learner.do(seal(1, epoch=cluster.stream.epoch))
    cluster.unseal(STREAM)
    learner.do(cluster.unseal_message(MIDDLE))
    with pytest.raises(ProducerFenced):
        cluster.send(9, 1, epoch=1, to=learner)


@pytest.mark.parametrize("reopened", [False, True])
def test_the_one_that_comes_back_goes_on_with_its_own_numbers(reopened: bool) -> None:
    """Also when the stream is sealed and opened again afterwards."""
    cluster = moved_back()
    cluster.unseal(STREAM)
    cluster.replica.do(append(3, fence(1, epoch=4), epoch=cluster.stream.epoch))
    if reopened:
        cluster.cut()
        cluster.replica.crash()
        cluster.seal(STREAM)
        cluster.unseal(STREAM)
    cluster.send(4, 2, epoch=4)
    assert cluster.replica.replica.written_end == 3


def test_a_session_whose_opening_was_repeated_is_not_taken_for_an_older_holder() -> None:
    """“No answer for a while: do the present step again. Nothing here is done twice by it.” Both requests arrive, and
    both answers. When its stream is sealed the session may move like any other: nobody else has opened the name."""
    cluster = Cluster()
    session = ProducerSession(P, "orders", 7)
    grants = [cluster.ask(effect) for effect in (*session.start(), *session.retry())]
    for grant in grants:
        session.granted(grant)
    session.fence_committed(tag(0, epoch=1), Sequence(0))
    home = cluster.state.streams[session.stream]
    cluster.seal(home.stream)
    session.stream_closed(home.stream, home.epoch)
    (move,) = session.fate_known(Fate(home.stream, home.epoch, Sequence(0), ()))
    assert cluster.ask(move).stream != home.stream
