"""What operators and clients ask of the leader: each answer, and each error path with its typed error."""

from __future__ import annotations

import msgspec
import pytest
from order_driver import (
    E1,
    LS1,
    LS2,
    LS3,
    N1,
    N2,
    N3,
    N4,
    ORDERS,
    SEALED,
    SEALING,
    T1,
    Leader,
    cluster_of,
    stores,
    ur,
)

from cutwater.core import requests as r
from cutwater.core.names import NAME_LENGTH_MAX
from cutwater.core.order import decisions as d
from cutwater.core.order import request_handling
from cutwater.core.order.events import NodeGone
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.request_handling import STREAMS_PER_TOPIC_MAX, Surroundings, decide
from cutwater.core.order.state import OrderState
from cutwater.core.replica.deduplication import Departure
from cutwater.errors import (
    AlreadyExists,
    CutwaterError,
    InvalidArgument,
    LastCopy,
    NotFound,
    NotSealed,
    ProducerFenced,
    Refused,
    Unavailable,
)
from cutwater.types import (
    GLSN,
    LLSN,
    SECOND,
    BatchNumber,
    CutTime,
    Epoch,
    LogStreamId,
    NodeState,
    Part,
    ProducerEpoch,
    ProducerId,
    RunId,
    Sequence,
    StorageNodeId,
    TopicId,
)

NODES = (N1, N2, N3)
BILLING = ProducerId("billing")
CLUSTER = cluster_of({LS1: NODES, LS2: (N2, N3, N1)}, cuts=[{LS1: 4, LS2: 6}], nodes=(N1, N2, N3, N4))
QUIET = OrderOptions(tick_us_min=10**12, tick_us_max=10**12)


@pytest.fixture
def leader() -> Leader:
    """LS1 is committed to LLSN 4 (GLSN 4), LS2 to 6 (GLSN 10). All nodes have reported, node 4 holds nothing."""
    leader = Leader(CLUSTER, options=QUIET)
    for node in (*NODES, N4):
        speak(leader, node)
    return leader


def speak(leader: Leader, node: StorageNodeId) -> None:
    """The node reports its replicas, which are exactly where their streams are."""
    reports = [
        ur(s.stream, committed=s.committed_end, end=s.committed_end, epoch=s.epoch)
        if s.is_open
        else ur(s.stream, committed=s.committed_end, end=s.committed_end, epoch=s.epoch, state=SEALED)
        for s in leader.state.streams_on(node)
    ]
    leader.run(leader.report(node, *reports))


def error(outcome: r.Answer | CutwaterError) -> type:
    assert isinstance(outcome, CutwaterError), outcome
    assert outcome.message
    return type(outcome)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (r.RemoveNodeRequest(StorageNodeId(9)), NotFound),
        (r.RemoveNodeRequest(N1), Refused),
        (r.CreateTopicRequest(ORDERS, 1, 1), AlreadyExists),
        (r.CreateTopicRequest("", 1, 1), InvalidArgument),
        (r.CreateTopicRequest("x" * (NAME_LENGTH_MAX + 1), 1, 1), InvalidArgument),
        (r.CreateTopicRequest("or ders", 1, 1), InvalidArgument),
        (r.CreateTopicRequest("örders", 1, 1), InvalidArgument),
        (r.CreateTopicRequest("a/b", 1, 1), InvalidArgument),
        (r.CreateTopicRequest("-o", 1, 1), InvalidArgument),
        (r.CreateTopicRequest("..", 1, 1), InvalidArgument),
        (r.CreateTopicRequest("t\n", 1, 1), InvalidArgument),
        (r.CommitCursorRequest("a\x1b[2J", GLSN(10)), InvalidArgument),
        (r.CreateTopicRequest("new", 0, 1), InvalidArgument),
        (r.CreateTopicRequest("new", STREAMS_PER_TOPIC_MAX + 1, 1), InvalidArgument),
        (r.CreateTopicRequest("new", 1, 0), InvalidArgument),
        (r.CreateTopicRequest("new", 1, 5), Unavailable),
        (r.DeleteTopicRequest("nowhere"), NotFound),
        (r.AddStreamRequest("nowhere"), NotFound),
        (r.SealRequest(LogStreamId(9)), NotFound),
        (r.UnsealRequest(LogStreamId(9)), NotFound),
        (r.ReplaceRequest(LogStreamId(9), N1, N4), NotFound),
        (r.ReplaceRequest(LS1, N1, N4), NotSealed),
        (r.ReplaceRequest(LS1, N1, N2), InvalidArgument),
        (r.ReplaceRequest(LS1, N4, N4), InvalidArgument),
        (r.ReplaceRequest(LS1, N1, StorageNodeId(9)), InvalidArgument),
        (r.TrimRequest("nowhere", GLSN(1)), NotFound),
        (r.TrimRequest(ORDERS, GLSN(12)), InvalidArgument),
        (r.OpenProducerRequest(BILLING, "nowhere", 1), NotFound),
        (r.MoveProducerRequest(BILLING, 1, ProducerEpoch(1), E1, Sequence(1)), NotFound),
        (r.OpenProducerRequest(ProducerId(""), ORDERS, 2), InvalidArgument),
        (r.OpenProducerRequest(ProducerId("x" * (NAME_LENGTH_MAX + 1)), ORDERS, 3), InvalidArgument),
        (r.CommitCursorRequest("c", GLSN(11)), InvalidArgument),
        (r.CommitCursorRequest("", GLSN(10)), InvalidArgument),
        (r.CommitCursorRequest("x" * (NAME_LENGTH_MAX + 1), GLSN(10)), InvalidArgument),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, type) else value.__name__,
)
def test_refused(leader: Leader, request_: r.Request, expected: type) -> None:
    """Errors 'with stable codes … and messages that say what to do'; nothing is decided."""
    before = leader.state.snapshot()
    assert error(leader.answer(request_)) is expected
    assert leader.state.snapshot() == before


def test_topics(leader: Leader) -> None:
    created = leader.answer(r.CreateTopicRequest("x" * NAME_LENGTH_MAX, 3, 2))
    assert created == r.Created(TopicId(2), (LS3, LogStreamId(4), LogStreamId(5)))
    assert isinstance(created, r.Created)
    placed = [leader.state.streams[lsid].replicas for lsid in created.streams]
    assert all(len(set(replicas)) == 2 for replicas in placed), "never two replicas on one node"
    assert N4 in placed[0], "the least loaded node comes first"


def test_a_topic_needs_enough_live_nodes(leader: Leader) -> None:
    """A node that is silent, or has never reported, is not one to place a replica on."""
    assert isinstance(leader.answer(r.CreateTopicRequest("four", 1, 4)), r.Created)
    leader.answer(r.AddNodeRequest(StorageNodeId(5)))
    assert error(leader.answer(r.CreateTopicRequest("five", 1, 5))) is Unavailable
    leader.wake_during(SECOND)
    for node in (*NODES, StorageNodeId(5)):
        speak(leader, node)
    leader.wake_during(SECOND)
    assert error(leader.answer(r.CreateTopicRequest("five", 1, 5))) is Unavailable
    assert isinstance(leader.answer(r.CreateTopicRequest("live", 1, 4)), r.Created)


def test_the_leader_chooses_the_usual_replication(leader: Leader) -> None:
    """A client that may not see the storage nodes counts none of them, and one of an earlier version says nothing."""
    usual = r.CreateTopicRequest("usual", 2, 1, is_replication_usual=True)
    made = leader.answer(usual)
    assert isinstance(made, r.Created)
    assert [len(set(leader.state.streams[stream].replicas)) for stream in made.streams] == [3, 3]
    assert leader.state.topics[made.topic].replication == 3
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(r.CreateTopicRequest("old", 1, 2)))
    assert "is_replication_usual" not in sent
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=r.CreateTopicRequest)
    made = leader.answer(old)
    assert isinstance(made, r.Created)
    assert leader.state.topics[made.topic].replication == 2
    # Nodes that are dead do not count.
    leader.wake_during(SECOND)
    for node in (N1, N4):
        speak(leader, node)
    leader.wake_during(SECOND)
    made = leader.answer(r.CreateTopicRequest("fewer", 1, 1, is_replication_usual=True))
    assert isinstance(made, r.Created)
    assert leader.state.topics[made.topic].replication == 2


def test_a_node_whose_disk_is_full_gets_no_new_replicas(leader: Leader) -> None:
    """Disk full: the node turns read-only for appends."""
    leader.run(leader.report(N4, node_state=NodeState.READ_ONLY))
    assert error(leader.answer(r.CreateTopicRequest("four", 1, 4))) is Unavailable
    created = leader.answer(r.CreateTopicRequest("three", 2, 3))
    assert isinstance(created, r.Created)
    assert all(N4 not in leader.state.streams[lsid].replicas for lsid in created.streams)
    leader.run(leader.report(N4))
    assert isinstance(leader.answer(r.CreateTopicRequest("four", 1, 4)), r.Created)


def around(*usable: StorageNodeId, ready: tuple[StorageNodeId, ...] = (), time: int = 5) -> Surroundings:
    def describe() -> r.Description:
        raise AssertionError("nobody asked")

    return Surroundings(lambda node: node in usable, lambda _, node: node in ready, describe, CutTime(time))


@pytest.mark.parametrize("request_", [r.CreateTopicRequest("new", 2, 2), r.AddStreamRequest(ORDERS)])
def test_new_streams_go_to_nodes_that_can_be_used_and_are_as_old_as_now(request_: r.Request) -> None:
    """Idleness counts from a stream's creation. A request is judged by the surroundings alone."""
    state = OrderState(None, CLUSTER)
    decisions, _ = decide(request_, state, around(N1, N3, N4, time=77))
    created = [x for x in decisions if isinstance(x, d.CreateStream)]
    assert created
    for create in created:
        assert (create.time, create.high_watermark) == (77, 10)
        assert N2 not in create.replicas
    with pytest.raises(Unavailable):
        decide(request_, state, around(N2))


def test_a_deleted_topic_is_sealed_for_good_and_its_name_is_free(leader: Leader) -> None:
    assert leader.answer(r.DeleteTopicRequest(ORDERS)) == r.Done()
    assert all(s.final and not s.is_open for s in leader.state.streams.values())
    catalog = leader.answer(r.CatalogRequest())
    assert isinstance(catalog, r.Catalog)
    assert (catalog.topics, catalog.streams) == ((), ())
    assert error(leader.answer(r.AddStreamRequest(ORDERS))) is NotFound
    created = leader.answer(r.CreateTopicRequest(ORDERS, 1, 1))
    assert created == r.Created(TopicId(2), (LS3,)), "numbers are never used again"


def test_a_node_can_go_once_it_holds_nothing(leader: Leader) -> None:
    assert leader.answer(r.AddNodeRequest(N4)) == r.Done(), "it is there already"
    assert leader.answer(r.RemoveNodeRequest(N4)) == r.Done()
    assert N4 not in leader.state.nodes
    with pytest.raises(NotFound, match="add it first"):
        leader.run(leader.report(N4))
    assert leader.answer(r.AddNodeRequest(N4)) == r.Done()


def test_a_node_may_leave_a_finished_stream_to_others_that_hold_it(leader: Leader) -> None:
    for lsid in (LS1, LS2):
        leader.answer(r.SealRequest(lsid, final=True))
    for node in NODES:
        speak(leader, node)
    assert leader.answer(r.RemoveNodeRequest(N1)) == r.Done()
    assert d.AssignReplicas(LS1, (N2, N3), at=CutTime(leader.now.wall)) in leader.stored


def test_a_node_does_not_leave_a_finished_stream_to_the_dead(leader: Leader) -> None:
    """Of a replacement: 'only if at least one member of the new set holds every committed record'; as much holds
    when the set only shrinks. Nobody has heard of the others since the seal: they may be gone for ever."""
    for lsid in (LS1, LS2):
        leader.answer(r.SealRequest(lsid, final=True))
    leader.pass_time(60 * SECOND)
    speak(leader, N1)
    assert error(leader.answer(r.RemoveNodeRequest(N1))) is LastCopy


def test_a_node_does_not_leave_a_finished_stream_to_one_that_is_not_ready(leader: Leader) -> None:
    """It asks who is known to be sealed exactly at the end: one of those that are left is enough."""
    for lsid in (LS1, LS2):
        leader.answer(r.SealRequest(lsid, final=True))
    short = [ur(LS1, committed=3, end=4, state=SEALING), ur(LS2, committed=6, end=6, state=SEALED)]
    leader.run(leader.report(N2, *short))
    assert error(leader.answer(r.RemoveNodeRequest(N1))) is LastCopy
    speak(leader, N3)
    assert leader.answer(r.RemoveNodeRequest(N1)) == r.Done()


def test_a_node_may_leave_a_finished_stream_to_one_that_has_learned_it() -> None:
    """'only if at least one member of the new set holds every committed record': storage nodes 2 and 3 were not among
    the survivors, have learned since, and are sealed at the end. A finished stream is never opened again, so there is
    no other way in which they could come to count, and storage node 1 could never go."""
    decisions = cluster_of({LS1: NODES}, cuts=[{LS1: 4}], nodes=(*NODES, N4))
    decisions.append(d.Seal(LS1, E1, LLSN(4), (N1,), "a test", final=True))
    leader = Leader(decisions, options=QUIET)
    for node in NODES:
        speak(leader, node)
    assert leader.answer(r.RemoveNodeRequest(N1)) == r.Done()
    assert N1 not in leader.state.streams[LS1].replicas


def test_a_replaced_copy_of_a_finished_stream_goes_when_the_new_one_is_complete() -> None:
    decisions = cluster_of({LS1: NODES}, cuts=[{LS1: 4}], nodes=(*NODES, N4))
    decisions.append(d.Seal(LS1, E1, LLSN(4), (N1,), "a test", final=True))
    leader = Leader(decisions, options=QUIET)
    for node in NODES:
        speak(leader, node)
    assert leader.answer(r.ReplaceRequest(LS1, N1, N4)) == r.Done()
    stream = leader.state.streams[LS1]
    assert (stream.replicas, stream.leaving) == ((N4, N2, N3, N1), (N1,))
    speak(leader, N4)
    leader.run(NodeGone(N2))
    leader.wake_during(SECOND)
    assert (stream.leaving, set(stream.members)) == ((N1,), {N1, N2, N3, N4}), "storage node 2 may never come back"
    speak(leader, N2)
    leader.wake_during(SECOND)
    assert (stream.replicas, stream.leaving) == ((N4, N2, N3), ())
    assert set(stream.members) == {N2, N3, N4}


def test_a_stream_that_is_not_finished_is_moved_first() -> None:
    """Also by the one node that has it: what to do is to replace it, and there it is asked for another copy."""
    leader = Leader(cluster_of({LS1: (N1,)}, cuts=[{LS1: 4}]), options=QUIET)
    speak(leader, N1)
    assert error(leader.answer(r.RemoveNodeRequest(N1))) is Refused
    leader.answer(r.SealRequest(LS1))
    speak(leader, N1)
    assert error(leader.answer(r.RemoveNodeRequest(N1))) is Refused
    assert error(leader.answer(r.ReplaceRequest(LS1, N1, N2))) is LastCopy


def test_the_last_copy_is_not_removed() -> None:
    leader = Leader(cluster_of({LS1: (N1,)}, cuts=[{LS1: 4}]), options=QUIET)
    speak(leader, N1)
    leader.answer(r.SealRequest(LS1, final=True))
    speak(leader, N1)
    assert error(leader.answer(r.RemoveNodeRequest(N1))) is LastCopy


@pytest.mark.parametrize("holders", [(N3,), (N3, N4)], ids=["the only holder", "the other one is gone"])
def test_who_holds_the_last_copy_of_decided_rows_stays_until_they_are_published(
    holders: tuple[StorageNodeId, ...],
) -> None:
    leader = Leader(cluster_of({LS1: (N1,)}), options=QUIET)
    speak(leader, N1)
    leader.answer(r.OpenRunRequest("query", "k"))
    part = Part(T1, LS1, holders, "a", 1, 1, 3, 10)
    leader.run(leader.ask(r.PublishRequest(RunId(1), BatchNumber(0), (part,))))
    assert error(leader.answer(r.RemoveNodeRequest(N3))) is LastCopy
    assert leader.answer(r.RemoveNodeRequest(N2)) == r.Done(), "it holds nothing of it"
    leader.state.apply(d.GroupPublished(RunId(1), BatchNumber(0), T1, GLSN(1), 3))
    assert leader.answer(r.RemoveNodeRequest(N3)) == r.Done()


def test_who_holds_decided_rows_that_others_hold_too_may_go() -> None:
    leader = Leader(cluster_of({LS1: (N1,)}), options=QUIET)
    speak(leader, N1)
    leader.answer(r.OpenRunRequest("query", "k"))
    part = Part(T1, LS1, (N2, N3), "a", 1, 1, 3, 10)
    leader.run(leader.ask(r.PublishRequest(RunId(1), BatchNumber(0), (part,))))
    assert leader.answer(r.RemoveNodeRequest(N3)) == r.Done()
    assert error(leader.answer(r.RemoveNodeRequest(N2))) is LastCopy


def test_a_deleted_topic_does_not_hold_its_nodes() -> None:
    """What was deleted needs no copy, so its node can be removed."""
    leader = Leader(cluster_of({LS1: (N1,)}, cuts=[{LS1: 4}]), options=QUIET)
    speak(leader, N1)
    leader.answer(r.DeleteTopicRequest(ORDERS))
    assert leader.answer(r.RemoveNodeRequest(N1)) == r.Done()


def test_replace_needs_someone_who_holds_everything(leader: Leader) -> None:
    """'Replace a replica: only when sealed, and only if at least one member of the new set holds every committed
    record.'"""
    leader.answer(r.SealRequest(LS1))
    assert error(leader.answer(r.ReplaceRequest(LS1, N3, N4))) is LastCopy, "nobody has said that it is sealed"
    speak(leader, N3)
    assert error(leader.answer(r.ReplaceRequest(LS1, N3, N4))) is LastCopy, "only the one that is to go has"
    speak(leader, N2)
    assert leader.answer(r.ReplaceRequest(LS1, N3, N4)) == r.Done()
    stream = leader.state.streams[LS1]
    assert (stream.replicas, stream.leaving) == ((N1, N2, N4, N3), (N3,)), "a complete copy stays for now"
    assert error(leader.answer(r.ReplaceRequest(LS1, N3, N4))) is InvalidArgument, "it leaves already"
    assert error(leader.answer(r.RemoveNodeRequest(N3))) is Refused
    assert leader.answer(r.ReplaceRequest(LS1, N4, N3)) == r.Done(), "not after all"
    assert (stream.replicas, stream.leaving) == ((N1, N2, N3), ())


def test_a_member_that_has_yet_to_report_after_the_seal_is_complete(leader: Leader) -> None:
    leader.answer(r.SealRequest(LS1))
    speak(leader, N2)
    assert leader.answer(r.ReplaceRequest(LS1, N3, N4)) == r.Done()
    stream = leader.state.streams[LS1]
    assert (stream.replicas, stream.members, stream.leaving) == ((N1, N2, N4, N3), NODES, (N3,))


def test_a_copy_that_is_not_complete_is_replaced_at_once() -> None:
    decisions = cluster_of({LS1: NODES}, cuts=[{LS1: 4}], nodes=(*NODES, N4))
    decisions.append(d.Seal(LS1, E1, LLSN(4), (N1, N2), "a test", held=True))
    leader = Leader(decisions, options=QUIET)
    speak(leader, N2)
    assert leader.answer(r.ReplaceRequest(LS1, N3, N4)) == r.Done()
    stream = leader.state.streams[LS1]
    assert (stream.replicas, stream.members, stream.leaving) == ((N1, N2, N4), (N1, N2), ())


def test_seal_and_unseal(leader: Leader) -> None:
    assert leader.answer(r.UnsealRequest(LS1)) == r.Done(), "it is open"
    sealed = r.SealedAt(E1, LLSN(4), GLSN(4))
    assert leader.answer(r.SealRequest(LS1)) == sealed
    index = leader.state.index
    assert leader.answer(r.SealRequest(LS1)) == sealed
    assert leader.state.index == index, "asked again, decided once"
    assert leader.answer(r.SealRequest(LS1, final=True)) == sealed
    assert leader.answer(r.SealRequest(LS1)) == sealed
    assert error(leader.answer(r.UnsealRequest(LS1))) is Refused


def test_trim_is_monotone(leader: Leader) -> None:
    """Trim is 'monotone'; asking for less than was trimmed changes nothing."""
    assert leader.answer(r.TrimRequest(ORDERS, GLSN(5))) == r.Done()
    assert leader.answer(r.TrimRequest(ORDERS, GLSN(3))) == r.Done()
    assert leader.answer(r.TrimRequest(ORDERS, GLSN(5))) == r.Done()
    assert leader.state.topics[T1].trimmed_before == 5
    assert leader.answer(r.TrimRequest(ORDERS, GLSN(11))) == r.Done(), "everything"
    assert leader.state.topics[T1].trimmed_before == 11


def test_opening_a_producer_bumps_its_epoch(leader: Leader) -> None:
    """Opening it bumps its epoch in the MR; it stays in its stream."""
    assert leader.answer(r.OpenProducerRequest(BILLING, ORDERS, 4)) == r.ProducerGrant(
        ProducerEpoch(1), LS1, Sequence(0)
    )  # fmt: skip
    assert leader.answer(r.OpenProducerRequest(BILLING, ORDERS, 5)) == r.ProducerGrant(
        ProducerEpoch(2), LS1, Sequence(0)
    )  # fmt: skip
    other = leader.answer(r.OpenProducerRequest(ProducerId("other"), ORDERS, 6))
    assert other == r.ProducerGrant(ProducerEpoch(1), LS2, Sequence(0)), "the stream with the fewest producers"


def test_a_producer_belongs_to_one_topic(leader: Leader) -> None:
    leader.answer(r.CreateTopicRequest("other", 1, 1))
    leader.answer(r.OpenProducerRequest(BILLING, ORDERS, 7))
    assert error(leader.answer(r.OpenProducerRequest(BILLING, "other", 8))) is InvalidArgument
    leader.answer(r.SealRequest(LS1, final=True))
    leader.answer(r.SealRequest(LS2, final=True))
    assert error(leader.answer(r.OpenProducerRequest(BILLING, "other", 9))) is InvalidArgument, (
        "its topic is still there"
    )


def open_topic(leader: Leader, name: str) -> LogStreamId:
    """A new topic of one stream, which is open."""
    created = leader.answer(r.CreateTopicRequest(name, 1, 1))
    assert isinstance(created, r.Created)
    (lsid,) = created.streams
    (node,) = leader.state.streams[lsid].replicas
    speak(leader, node)
    assert leader.state.streams[lsid].is_open
    return lsid


@pytest.mark.parametrize("name", ["other", ORDERS], ids=["another topic", "a new topic of the old name"])
def test_the_name_of_a_deleted_topics_producer_is_free(leader: Leader, name: str) -> None:
    """With the topic all is gone that the name ever produced. An older holder is known by its session."""
    leader.answer(r.OpenProducerRequest(BILLING, ORDERS, 10))
    leader.answer(r.SealRequest(LS1))
    leader.answer(r.MoveProducerRequest(BILLING, 10, ProducerEpoch(1), E1, Sequence(7)))
    leader.answer(r.DeleteTopicRequest(ORDERS))
    assert error(leader.answer(r.OpenProducerRequest(BILLING, ORDERS, 11))) is NotFound
    lsid = open_topic(leader, name)
    stale = r.MoveProducerRequest(BILLING, 10, ProducerEpoch(2), E1, Sequence(9))
    assert error(leader.answer(stale)) is NotFound
    for epoch, session in ((1, 12), (2, 13)):
        grant = r.ProducerGrant(ProducerEpoch(epoch), lsid, Sequence(0))
        assert leader.answer(r.OpenProducerRequest(BILLING, name, session)) == grant
    assert error(leader.answer(stale)) is ProducerFenced
    assert OrderState(None, leader.stored).producers == leader.state.producers


def test_a_deleted_topics_producer_waits_for_an_open_stream(leader: Leader) -> None:
    leader.answer(r.OpenProducerRequest(BILLING, ORDERS, 14))
    leader.answer(r.DeleteTopicRequest(ORDERS))
    assert isinstance(leader.answer(r.CreateTopicRequest("other", 1, 1)), r.Created)
    assert error(leader.answer(r.OpenProducerRequest(BILLING, "other", 15))) is Unavailable
    assert leader.state.producers == {}


def test_a_producer_moves_only_from_a_sealed_stream(leader: Leader) -> None:
    """'It changes streams only by an MR decision, after the first stream is sealed and the fate of every sequence
    is known.'"""

    def move(epoch: int = 1, stream_epoch: int = 1, session: int = 16) -> r.Answer | CutwaterError:
        request = r.MoveProducerRequest(BILLING, session, ProducerEpoch(epoch), Epoch(stream_epoch), Sequence(7))
        return leader.answer(request)

    leader.answer(r.OpenProducerRequest(BILLING, ORDERS, 16))
    assert error(move()) is NotSealed
    leader.answer(r.SealRequest(LS1))
    assert error(move(epoch=2)) is ProducerFenced
    assert error(move(session=15)) is ProducerFenced
    assert error(move(stream_epoch=0)) is NotSealed
    moved = r.ProducerGrant(ProducerEpoch(2), LS2, Sequence(7))
    assert move() == moved, "under a new epoch, so that the stream it leaves knows its older self"
    assert move() == moved, "asked again after the first answer was lost"
    assert error(move(session=15)) is ProducerFenced, "somebody else's question is not this one asked again"
    assert leader.state.streams[LS1].departed == (Departure(BILLING, ProducerEpoch(2)),)
    leader.answer(r.SealRequest(LS2))
    assert error(move(epoch=2)) is Unavailable, "no stream is open"


def test_a_move_that_others_overtook_is_refused(leader: Leader) -> None:
    """Between two epochs of one session lies its own move and nothing else; a longer way means that the numbers of its
    batches may be taken."""
    leader.answer(r.OpenProducerRequest(BILLING, ORDERS, 17))
    for session in (18, 17):
        leader.answer(r.OpenProducerRequest(BILLING, ORDERS, session))
    leader.answer(r.SealRequest(LS1))
    late = r.MoveProducerRequest(BILLING, 17, ProducerEpoch(1), E1, Sequence(7))
    assert error(leader.answer(late)) is ProducerFenced


def test_the_holder_of_a_name_gets_its_next_epoch_where_it_is(leader: Leader) -> None:
    def renew(epoch: int = 1, session: int = 19) -> r.Answer | CutwaterError:
        return leader.answer(r.RenewProducerRequest(BILLING, session, ProducerEpoch(epoch)))

    assert error(renew()) is NotFound
    leader.answer(r.OpenProducerRequest(BILLING, ORDERS, 19))
    assert error(renew(session=18)) is ProducerFenced
    assert error(renew(epoch=2)) is ProducerFenced
    renewed = r.ProducerGrant(ProducerEpoch(2), LS1, Sequence(0))
    assert renew() == renewed
    assert renew() == renewed, "asked again after the first answer was lost"
    assert renew(epoch=2) == r.ProducerGrant(ProducerEpoch(3), LS1, Sequence(0))
    assert error(renew()) is ProducerFenced, "too late to be the same question"
    assert OrderState(None, leader.stored).producers == leader.state.producers
    leader.answer(r.OpenProducerRequest(BILLING, ORDERS, 20))
    assert error(renew(epoch=3)) is ProducerFenced, "someone newer has the name and keeps it"
    assert leader.state.producers[BILLING].session == 20


def test_cursors(leader: Leader) -> None:
    assert leader.answer(r.CommitCursorRequest("c", GLSN(10))) == r.Done()
    assert leader.state.cursors == {"c": 10}


def test_the_catalog_tells_all_that_is_stored(leader: Leader) -> None:
    catalog = leader.answer(r.CatalogRequest())
    assert isinstance(catalog, r.Catalog)
    assert (catalog.revision, catalog.high_watermark) == (leader.state.revision, 10)
    assert catalog.topics == (r.TopicInfo(T1, ORDERS, GLSN(1), replication=3, streams=0),)
    assert catalog.nodes == tuple(r.NodeInfo(node, "") for node in (*NODES, N4))
    assert [(s.stream, s.chain, s.is_open, s.committed_end, s.last_glsn) for s in catalog.streams] == [
        (LS1, NODES, True, 4, 4),
        (LS2, (N2, N3, N1), True, 6, 10),
    ]


def test_requests_of_one_turn_see_each_other(leader: Leader) -> None:
    """Many requests become one write; each is judged by what the ones before it decided."""
    (store,) = leader.raw(leader.ask(r.AddNodeRequest(StorageNodeId(8))))
    for _ in range(2):
        leader.raw(leader.ask(r.CreateTopicRequest("same", 1, 1)))
    effects = leader.confirm(store)  # type: ignore[arg-type]
    assert [type(x) for x in stores(effects)] == [d.CreateTopic, d.CreateStream]


def test_a_topic_has_a_bounded_number_of_producers(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_handling, "PRODUCERS_PER_TOPIC_MAX", 2)
    for name in ("a", "b"):
        leader.answer(r.OpenProducerRequest(ProducerId(name), ORDERS, 1))
    assert error(leader.answer(r.OpenProducerRequest(ProducerId("c"), ORDERS, 1))) is Refused
    back = leader.answer(r.OpenProducerRequest(ProducerId("a"), ORDERS, 2))
    assert back == r.ProducerGrant(ProducerEpoch(2), LS1, Sequence(0)), "those that are known may always come back"
