"""The fold of decisions: replay, snapshots, and what it refuses."""

from __future__ import annotations

import msgspec
import pytest
from order_driver import CREATED_TIME, E0, E1, E2, LAST_CUT_TIME, LS1, LS2, LS3, N1, N2, N3, N4, ORDERS, T1, cluster_of

from cutwater.core.order import decisions as d
from cutwater.core.order.cut import StreamCommit
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.core.read.time_marks import BLOCK_MARKS
from cutwater.core.replica.deduplication import Departure
from cutwater.errors import ContradictoryCommand
from cutwater.types import (
    GLSN,
    LLSN,
    SECOND,
    CommitContext,
    CutTime,
    Epoch,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    Revision,
    Sequence,
    TopicId,
)

NODES = (N1, N2, N3)
CLUSTER = cluster_of({LS1: NODES, LS2: NODES}, cuts=[{LS1: 2, LS2: 2}, {LS1: 1, LS2: 5}, {LS1: 2, LS2: 4}])
BILLING = ProducerId("billing")
LATER = CutTime(LAST_CUT_TIME + SECOND)


def commit(
    stream: LogStreamId = LS1, first_llsn: int = 6, first_glsn: int = 17, count: int = 2, hwm: int = 18, epoch: int = 1
) -> StreamCommit:
    context = CommitContext(Epoch(epoch), LLSN(first_llsn), GLSN(first_glsn), count, GLSN(hwm), GLSN(16), LATER)
    return StreamCommit(stream, context)


def cut(*commits: StreamCommit, hwm: int = 18, prev: int = 16, time: int = LATER) -> d.Cut:
    return d.Cut(GLSN(hwm), GLSN(prev), CutTime(time), Revision(8), commits)


LIFE: list[d.Decision] = [
    *CLUSTER,
    d.OpenProducer(BILLING, ProducerEpoch(1), LS1, 1),
    d.CommitCursor("reader", GLSN(9)),
    d.Trim(T1, GLSN(3)),
    d.Seal(LS1, E1, LLSN(5), NODES, "a test", held=True),
    d.MoveProducer(BILLING, ProducerEpoch(2), LS2, Sequence(7)),
    d.OpenProducer(BILLING, ProducerEpoch(3), LS2, 2),
    d.DropSurvivor(LS1, N3, "a test"),
    d.AddNode(N4),
    d.AssignReplicas(LS1, (N1, N2, N4, N3), leaving=(N3,)),
    d.AssignReplicas(LS1, (N1, N2, N4)),
    d.Release(LS1),
    d.Unseal(LS1, E2, LLSN(5), (N1, N2)),
    d.CreateTopic(TopicId(2), "other", 1),
    d.CreateStream(LS3, TopicId(2), (N4,), GLSN(16), LATER),
    cut(commit(epoch=2)),
    d.Seal(LS3, E0, LLSN(0), (N4,), "deleted", final=True),
    d.DeleteTopic(TopicId(2)),
]
"""Every kind of decision once at least; RemoveNode comes in a test of its own."""


@pytest.mark.parametrize("at", range(len(LIFE) + 1))
def test_a_snapshot_and_the_rest_equal_the_whole_sequence(at: int) -> None:
    """'Loading it equals replaying all decisions up to there', including the commit history, also through the bytes
    in which both are stored."""
    whole = OrderState(None, LIFE)
    part = OrderState(None, LIFE[:at])
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(part.snapshot()), type=Snapshot)
    assert stored == part.snapshot()
    rest = msgspec.msgpack.decode(msgspec.msgpack.encode(LIFE[at:]), type=list[d.Decision])
    assert rest == LIFE[at:]
    resumed = OrderState(stored, rest)
    assert resumed.snapshot() == whole.snapshot()
    assert resumed.index == len(LIFE)
    for lsid, history in whole.histories.items():
        assert resumed.histories[lsid].contexts() == history.contexts()


def test_a_snapshot_is_a_copy() -> None:
    """A snapshot is written while the leader goes on: it must not change under the writer's hands."""
    state = OrderState(None, CLUSTER)
    snapshot = state.snapshot()
    before = msgspec.msgpack.encode(snapshot)
    for decision in LIFE[len(CLUSTER) :]:
        state.apply(decision)
    assert msgspec.msgpack.encode(snapshot) == before
    one, other = OrderState(snapshot), OrderState(snapshot)
    one.apply(d.Seal(LS1, E1, LLSN(5), NODES, "a test"))
    assert other.streams[LS1].is_open


def test_forgotten_ranges_stay_forgotten_in_a_snapshot() -> None:
    state = OrderState(None, CLUSTER)
    assert state.trim_history(LS1, LLSN(3)) == 2
    resumed = OrderState(state.snapshot())
    assert resumed.snapshot() == state.snapshot()
    assert resumed.histories[LS1].after(LLSN(3)) == state.histories[LS1].after(LLSN(3))
    assert resumed.histories[LS1].after(LLSN(0)) is None


def test_a_snapshot_with_an_empty_history_still_knows_who_is_behind() -> None:
    state = OrderState(None, CLUSTER)
    state.trim_history(LS1, LLSN(5))
    resumed = OrderState(state.snapshot())
    assert resumed.histories[LS1].after(LLSN(5)) == ()
    assert resumed.histories[LS1].after(LLSN(3)) is None


def test_what_decisions_make_of_a_stream() -> None:
    state = OrderState(None, LIFE)
    stream = state.streams[LS1]
    assert (stream.epoch, stream.is_open, stream.held, stream.start) == (2, True, False, 5)
    assert (stream.replicas, stream.members) == ((N1, N2, N4), (N1, N2))
    assert (stream.committed_end, stream.last_glsn) == (7, 18)
    assert stream.departed == (Departure(BILLING, ProducerEpoch(2)),)
    assert (state.producers[BILLING].epoch, state.producers[BILLING].stream) == (3, LS2)
    assert OrderState(None, LIFE[:-1]).streams[LS3].created_at == 16
    assert state.topic_named("other") is None
    assert set(state.streams) == {LS1, LS2}
    assert state.was_deleted(LS3)
    assert not state.was_deleted(LogStreamId(4))


def test_the_revision_follows_the_catalog_only() -> None:
    """'a reader knows which streams exist' by the revision; cuts and cursors do not change that."""
    state = OrderState(None, CLUSTER)
    revision = state.revision
    for decision in (cut(commit()), d.CommitCursor("c", GLSN(1)), d.OpenProducer(BILLING, ProducerEpoch(1), LS1, 1)):
        state.apply(decision)
    assert state.revision == revision
    state.apply(d.CreateStream(LS3, T1, NODES, GLSN(18), LATER))
    assert state.revision == revision + 1


def test_a_stream_is_as_old_as_its_decision_says() -> None:
    """Idleness counts from a stream's creation, which need not be at a cut."""
    state = OrderState(None, LIFE[:-1])
    assert state.streams[LS1].created_time == CREATED_TIME
    assert state.streams[LS3].created_time == LATER
    assert OrderState(state.snapshot()).streams[LS3].created_time == LATER


OTHER_TOPIC: list[d.Decision] = [
    d.CreateTopic(TopicId(2), "other", 1),
    d.CreateStream(LS3, TopicId(2), (N1,), GLSN(16), LATER),
    d.Unseal(LS3, E1, LLSN(0), (N1,)),
]
MOVED_BILLING: list[d.Decision] = [
    d.OpenProducer(BILLING, ProducerEpoch(1), LS1, 1),
    d.Seal(LS1, E1, LLSN(5), NODES, "a test", final=True),
    d.MoveProducer(BILLING, ProducerEpoch(2), LS2, Sequence(7)),
    d.Seal(LS2, E1, LLSN(11), NODES, "a test", final=True),
]


def test_the_producers_of_a_deleted_topic_are_forgotten() -> None:
    """Nothing that they did counts any more, so their names begin anew."""
    others = ProducerId("other's")
    before = [*CLUSTER, *OTHER_TOPIC, *MOVED_BILLING, d.OpenProducer(others, ProducerEpoch(1), LS3, 1)]
    state = OrderState(None, [*before, d.DeleteTopic(T1)])
    assert set(state.producers) == {others}
    state.apply(d.OpenProducer(BILLING, ProducerEpoch(1), LS3, 2))
    producer = state.producers[BILLING]
    assert (producer.epoch, producer.stream, producer.last_sequence) == (1, LS3, 0)
    assert OrderState(state.snapshot()).producers == state.producers


def test_who_left_a_finished_stream_is_forgotten() -> None:
    """It never opens again, so nobody's older self can get in. Departures would pile up otherwise."""
    left = [
        d.OpenProducer(BILLING, ProducerEpoch(1), LS1, 1),
        d.Seal(LS1, E1, LLSN(5), NODES, "a test", held=True),
        d.MoveProducer(BILLING, ProducerEpoch(2), LS2, Sequence(7)),
    ]
    state = OrderState(None, [*CLUSTER, *left])
    assert state.streams[LS1].departed == (Departure(BILLING, ProducerEpoch(2)),)
    state.apply(FINAL_LS1)
    assert state.streams[LS1].departed == ()
    assert OrderState(None, [*CLUSTER, *MOVED_BILLING]).streams[LS1].departed == ()


def test_a_node_without_replicas_is_removed() -> None:
    state = OrderState(None, [*CLUSTER, d.AddNode(N4), d.RemoveNode(N4)])
    assert set(state.nodes) == {N1, N2, N3}


SEALED_LS1 = d.Seal(LS1, E1, LLSN(5), NODES, "a test")
FINAL_LS1 = d.Seal(LS1, E1, LLSN(5), NODES, "a test", final=True)


@pytest.mark.parametrize(
    ("before", "decision"),
    [
        pytest.param([], cut(commit(), hwm=19, prev=17), id="a cut that does not follow the last"),
        pytest.param([], cut(commit(hwm=16), hwm=16), id="a cut that gives out nothing"),
        pytest.param([], cut(commit(), time=LAST_CUT_TIME), id="a cut whose time stands still"),
        pytest.param([], cut(commit(), time=LAST_CUT_TIME - 1), id="a cut whose time goes back"),
        pytest.param([], cut(commit(first_llsn=7)), id="a cut that leaves out an LLSN"),
        pytest.param([], cut(commit(first_llsn=5)), id="a cut that commits an LLSN again"),
        pytest.param([], cut(commit(epoch=2)), id="a cut of another epoch"),
        pytest.param([SEALED_LS1], cut(commit()), id="a cut of a sealed stream"),
        pytest.param([], cut(commit(hwm=19), hwm=19), id="a cut that leaves out a GLSN at its end"),
        pytest.param([], cut(commit(first_glsn=18, hwm=19), hwm=19), id="a cut that leaves out a GLSN at its begin"),
        pytest.param([], cut(commit(first_glsn=16)), id="a cut that gives out a GLSN again"),
        pytest.param([], cut(commit(), commit(), hwm=20), id="a cut with the same stream twice"),
        pytest.param([], cut(commit(), commit(LS2, 12, 18, 2, 18), hwm=18), id="a cut that gives a GLSN to two"),
        pytest.param([], cut(hwm=18), id="a tick that takes more than one GLSN"),
        pytest.param([SEALED_LS1], SEALED_LS1, id="a seal of a sealed stream"),
        pytest.param([FINAL_LS1], FINAL_LS1, id="a seal of a finished stream"),
        pytest.param([], d.Seal(LS1, E2, LLSN(5), NODES, ""), id="a seal of another epoch"),
        pytest.param([], d.Seal(LS1, E1, LLSN(4), NODES, ""), id="a seal below the committed end"),
        pytest.param([], d.Seal(LS1, E1, LLSN(6), NODES, ""), id="a seal beyond the committed end"),
        pytest.param([], d.Seal(LS1, E1, LLSN(5), (N4,), ""), id="a survivor that was no member"),
        pytest.param([], d.Unseal(LS1, E2, LLSN(5), NODES), id="an unseal of an open stream"),
        pytest.param([FINAL_LS1], d.Unseal(LS1, E2, LLSN(5), NODES), id="an unseal of a finished stream"),
        pytest.param([SEALED_LS1], d.Unseal(LS1, E1, LLSN(5), NODES), id="an unseal without a new epoch"),
        pytest.param([SEALED_LS1], d.Unseal(LS1, E2, LLSN(4), NODES), id="an unseal elsewhere"),
        pytest.param([SEALED_LS1], d.Unseal(LS1, E2, LLSN(5), ()), id="an unseal on nobody"),
        pytest.param([SEALED_LS1], d.Unseal(LS1, E2, LLSN(5), (N1, N4)), id="an unseal on a stranger"),
        pytest.param([], d.DropSurvivor(LS1, N1, ""), id="a survivor of an open stream"),
        pytest.param([], d.AssignReplicas(LS1, (N1,)), id="other replicas for an open stream"),
        pytest.param([], d.RemoveNode(N1), id="removal of a node with replicas"),
        pytest.param([], d.CreateTopic(TopicId(3), "x", 1), id="a topic out of turn"),
        pytest.param([], d.CreateStream(LogStreamId(4), T1, NODES, GLSN(16), LATER), id="a stream out of turn"),
        pytest.param([], d.CreateStream(LS3, T1, NODES, GLSN(15), LATER), id="a stream that starts in the past"),
        pytest.param([], d.CreateStream(LS3, TopicId(9), NODES, GLSN(16), LATER), id="a stream of no topic"),
        pytest.param([], d.DeleteTopic(T1), id="deletion of a topic with open streams"),
        pytest.param([d.Trim(T1, GLSN(5))], d.Trim(T1, GLSN(4)), id="a trim that goes back"),
        pytest.param([], d.OpenProducer(BILLING, ProducerEpoch(2), LS1, 2), id="a producer's epoch out of turn"),
        pytest.param([], d.MoveProducer(BILLING, ProducerEpoch(1), LS2, Sequence(0)), id="a move of nobody"),
        pytest.param(
            [d.OpenProducer(BILLING, ProducerEpoch(1), LS1, 1), SEALED_LS1],
            d.MoveProducer(BILLING, ProducerEpoch(1), LS2, Sequence(0)),
            id="a move without a new epoch",
        ),
        pytest.param(
            [d.OpenProducer(BILLING, ProducerEpoch(1), LS1, 1)],
            d.MoveProducer(BILLING, ProducerEpoch(2), LS2, Sequence(0)),
            id="a move away from an open stream",
        ),
        pytest.param(
            [*OTHER_TOPIC, *MOVED_BILLING],
            d.OpenProducer(BILLING, ProducerEpoch(3), LS3, 2),
            id="a producer that is opened on another topic while its own is there",
        ),
        pytest.param(
            [d.OpenProducer(BILLING, ProducerEpoch(1), LS1, 1)],
            d.OpenProducer(BILLING, ProducerEpoch(2), LS2, 2),
            id="a producer that is opened elsewhere",
        ),
    ],
)
def test_a_decision_that_contradicts_the_earlier_ones_changes_nothing(
    before: list[d.Decision], decision: d.Decision
) -> None:
    """Raises, and changes nothing, if it contradicts the earlier ones: dense, unique, one cut sequence."""
    state = OrderState(None, [*CLUSTER, *before])
    snapshot = state.snapshot()
    with pytest.raises(ContradictoryCommand):
        state.apply(decision)
    assert state.snapshot() == snapshot
    assert state.topic_named(ORDERS) is not None


def ticked(state: OrderState, count: int) -> None:
    for _ in range(count):
        hwm = state.high_watermark
        time = CutTime(state.cut_time + SECOND)
        state.apply(d.Cut(GLSN(hwm + 1), hwm, time, state.revision, ()))


def test_marks_of_the_clock_are_kept_only_as_long_as_a_topic_needs_them() -> None:
    """Above its creation and above its trim position; of what lies between, every mark."""
    state = OrderState(Snapshot(), (d.AddNode(N1),))
    ticked(state, 3 * BLOCK_MARKS)
    assert len(state.clock.blocks) == 2
    first, second = TopicId(1), TopicId(2)
    state.apply(d.CreateTopic(first, "a", 1))
    state.apply(d.CreateStream(LS1, first, (N1,), state.high_watermark, state.cut_time))
    assert state.clock.blocks == ()
    begin = state.high_watermark
    ticked(state, 3 * BLOCK_MARKS)
    state.apply(d.CreateTopic(second, "b", 1))
    state.apply(d.CreateStream(LS2, second, (N1,), state.high_watermark, state.cut_time))
    kept = state.clock.marks(begin, 10**9)
    assert [mark.glsn for mark in kept] == list(range(begin + 1, state.high_watermark + 1))
    # The second topic needs less, so what is left when the first one goes is what came after it was created.
    state.apply(d.Seal(LS1, E0, LLSN(0), (N1,), "a test", final=True))
    state.apply(d.DeleteTopic(first))
    assert len(state.clock.blocks) == 0
    ticked(state, 3 * BLOCK_MARKS)
    before = len(state.clock.blocks)
    state.apply(d.Trim(second, state.high_watermark))
    assert (before > 0, state.clock.blocks) == (True, ())
