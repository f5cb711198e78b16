"""The number of copies of a topic changes while its log streams run; internal topics get theirs by themselves."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_driver import LS1, LS2, N1, N2, N3, N4, RUNNING, SEALING, FakeNodes, Leader, cluster_of, ur
from test_order_layer_repair import QUIET, append, cluster, is_whole

from cutwater.core import requests as r
from cutwater.core.internal_topics import AUDIT, PROGRAMS
from cutwater.core.messages import LearnFrom
from cutwater.core.names import check_not_reserved
from cutwater.core.order import decisions as d
from cutwater.core.order.events import Send
from cutwater.core.order.planning.repair import RepairPlan, StreamView, plan_open
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.errors import AlreadyExists, InvalidArgument, Refused, Unavailable
from cutwater.types import GLSN, LLSN, SECOND, Epoch, LogStreamId, Retention, StorageNodeId, TopicId, UncommitReport

FOUR = (N1, N2, N3, N4)
BOTH = r.MakeInternalTopicsRequest((AUDIT, PROGRAMS))


def change(nodes: FakeNodes, replication: int, name: str = "orders") -> None:
    assert nodes.leader.answer(r.ChangeTopicRequest(name, replication=replication)) == r.Done()


def copies(nodes: FakeNodes, lsid: LogStreamId = LS1) -> int:
    return len(nodes.leader.state.streams[lsid].members)


def described(nodes: FakeNodes, lsid: LogStreamId = LS1) -> r.StreamDescription:
    found = nodes.leader.answer(r.DescribeRequest())
    assert isinstance(found, r.Description)
    return next(stream for stream in found.streams if stream.stream == lsid)


def steps(nodes: FakeNodes, rounds: int, lsid: LogStreamId = LS1) -> list[tuple[StorageNodeId, ...]]:
    """The chains that the log stream has while time passes, each once in a row."""
    seen = [nodes.leader.state.streams[lsid].members]
    for _ in range(rounds):
        nodes.round()
        stream = nodes.leader.state.streams[lsid]
        if stream.is_open and stream.members != seen[-1]:
            seen.append(stream.members)
    return seen


def test_copies_are_added_one_after_another_while_the_stream_runs() -> None:
    nodes = cluster(nodes=FOUR, replication=1)
    append(nodes, LS1, 5)
    change(nodes, 3)
    learning: list[set[StorageNodeId]] = []
    for _ in range(400):
        nodes.round()
        stream = nodes.leader.state.streams[LS1]
        learning.append(set(stream.replicas) - set(stream.members))
        if stream.is_open and all(nodes.replicas[n, LS1].state is RUNNING for n in stream.members):
            nodes.append(LS1, 1)
    assert max(map(len, learning)) == 1, "one copy is made at a time"
    nodes.rounds(5)
    assert copies(nodes) == 3
    assert is_whole(nodes, LS1)
    assert nodes.leader.state.streams[LS1].committed_end > 200, "appends went on"
    learned = [e for e in nodes.seen if isinstance(e, Send) and isinstance(e.message, LearnFrom)]
    assert len({e.node for e in learned}) == 2


def test_a_chain_never_shrinks_while_copies_are_added() -> None:
    nodes = cluster(nodes=FOUR, replication=2)
    append(nodes, LS1, 5)
    change(nodes, 4)
    chains = steps(nodes, 400)
    assert [len(chain) for chain in chains] == [2, 3, 4]
    assert all(set(before) < set(after) for before, after in pairwise(chains))


def test_copies_are_removed_one_after_another() -> None:
    nodes = cluster(nodes=FOUR, replication=4)
    append(nodes, LS1, 5)
    change(nodes, 1)
    chains = steps(nodes, 600)
    assert [len(chain) for chain in chains] == [4, 3, 2, 1]
    append(nodes, LS1, 5)
    assert is_whole(nodes, LS1)
    assert nodes.leader.state.streams[LS1].replicas == chains[-1]
    assert described(nodes).next_step == ""


def test_no_copy_goes_while_a_member_is_dead() -> None:
    """Three copies, of which two are wanted: if one dies, the other two stay; and its place is taken away."""
    nodes = cluster(nodes=(N1, N2, N3), replication=3)
    append(nodes, LS1, 5)
    nodes.silent.add(N2)
    change(nodes, 2)
    nodes.rounds(200)
    stream = nodes.leader.state.streams[LS1]
    assert set(stream.members) == set(stream.replicas) == {N1, N3}
    append(nodes, LS1, 1)


def plan_with(third: UncommitReport | None, *, usable: bool = True, admit: bool = True) -> RepairPlan:
    """What to do with an open stream of three members, two of which are wanted, if this is known of the third."""
    members = (N1, N2, N3)
    state = OrderState(None, cluster_of({LS1: members}, cuts=[{LS1: 4}]))
    view = StreamView(
        state.streams[LS1],
        state.histories[LS1],
        report=lambda node: third if node == N3 else ur(LS1, committed=4, end=4, hwm=4),
        alive=lambda node: True,
        usable=lambda node: usable or node != N3,
        fallback=lambda node: True,
        invalid=lambda node: False,
        is_unheard=lambda node: False,
        replace_after_us=60 * SECOND,
        turn=0,
    )
    return plan_open(view, admit=admit, wanted=2)


def test_a_copy_leaves_only_if_all_members_run_and_are_complete() -> None:
    whole = ur(LS1, committed=4, end=4, hwm=4)
    assert plan_with(whole).leave == N3
    assert "let storage node 3 go: 2 copies are wanted" in plan_with(whole).why
    for troubled in (
        plan_with(whole, usable=False),
        plan_with(None),
        plan_with(ur(LS1, committed=3, end=3, hwm=3)),
        plan_with(ur(LS1, committed=4, end=4, hwm=4, state=SEALING)),
        plan_with(ur(LS1, committed=4, end=4, hwm=4, epoch=0)),
    ):
        assert troubled.leave is None
        assert "when all members run; storage node 3 cannot be used now" in troubled.why
    waiting = plan_with(whole, admit=False)
    assert (waiting.leave, waiting.why) == (None, "2 copies are wanted, and storage node 3 leaves soon")


def test_a_seal_for_another_reason_takes_away_one_member_at_most() -> None:
    """A stream that was sealed when fewer copies were asked for opens without one of them, not with one of them."""
    nodes = cluster(nodes=FOUR, replication=4)
    append(nodes, LS1, 5)
    nodes.leader.answer(r.SealRequest(LS1))
    change(nodes, 1)
    nodes.rounds(50)
    assert copies(nodes) == 4, "an operator's seal is left alone"
    nodes.leader.answer(r.UnsealRequest(LS1))
    assert [len(chain) for chain in steps(nodes, 600)] == [3, 2, 1]


def replace(nodes: FakeNodes, old: StorageNodeId, new: StorageNodeId) -> None:
    """Replace a replica of the first log stream, and let it open again."""
    nodes.take(nodes.leader.run(nodes.leader.ask(r.SealRequest(LS1))))
    nodes.rounds(3)
    nodes.leader.answer(r.ReplaceRequest(LS1, old, new))
    nodes.leader.answer(r.UnsealRequest(LS1))


def test_a_replaced_member_leaves_when_fewer_copies_are_wanted() -> None:
    """Three copies, one of them of a replaced member whose successor is dead. When two are wanted, the replaced member
    is the surplus one. Storm seeds 710018, 710022 and 710042 kept it for ever."""
    nodes = cluster(nodes=FOUR, replication=3)
    append(nodes, LS1, 5)
    stream = nodes.leader.state.streams[LS1]
    first, second, old = stream.replicas
    (new,) = {*FOUR} - {*stream.replicas}
    nodes.silent.add(new)
    replace(nodes, old, new)
    nodes.rounds(120)
    assert (stream.members, stream.leaving) == ((first, second, old), (old,))
    change(nodes, 2)
    assert steps(nodes, 200) == [(first, second, old), (first, second)]
    assert (stream.replicas, stream.leaving) == ((first, second), ())
    append(nodes, LS1, 1)
    assert is_whole(nodes, LS1)
    assert described(nodes).next_step == ""


def test_a_surplus_replaced_member_is_told() -> None:
    """A stream with enough other members is not well as long as the replaced one is there."""
    members = (N1, N2, N3)
    well: list[d.Decision] = [
        *cluster_of({LS1: members}),
        d.Seal(LS1, Epoch(1), LLSN(0), members, "for a test"),
        d.Unseal(LS1, Epoch(2), LLSN(0), members, "they hold every record"),
    ]
    fewer = d.ChangeTopic(TopicId(1), 1, Retention(), replication=2)
    replaced = d.AssignReplicas(LS1, members, leaving=(N3,))
    told = [described(FakeNodes(Leader(decisions))).reason for decisions in (well, [*well, replaced, fewer])]
    assert told == ["", "they hold every record"]


def test_a_replaced_member_leaves_while_another_one_is_still_needed() -> None:
    """Two of three members were replaced, and their successors are dead. When two copies are wanted, one of the
    replaced members goes, and the other stays until a successor is complete."""
    five = (*FOUR, StorageNodeId(5))
    nodes = cluster(nodes=five, replication=3)
    append(nodes, LS1, 5)
    stream = nodes.leader.state.streams[LS1]
    staying, *replaced = stream.replicas
    successors = [node for node in five if node not in stream.replicas]
    nodes.silent |= {*successors}
    for old, new in zip(replaced, successors, strict=True):
        replace(nodes, old, new)
        nodes.rounds(120)
    assert (stream.members, stream.leaving) == ((staying, *replaced), tuple(replaced))
    change(nodes, 2)
    assert steps(nodes, 300) == [(staying, *replaced), (staying, replaced[0])]
    nodes.silent.remove(successors[0])
    nodes.rounds(200)
    assert is_whole(nodes, LS1)
    assert (stream.members, stream.leaving) == ((staying, successors[0]), ())


def test_a_finished_log_stream_gets_and_loses_copies_too() -> None:
    nodes = cluster(nodes=FOUR, replication=2)
    append(nodes, LS1, 5)
    nodes.leader.answer(r.SealRequest(LS1, final=True))
    nodes.rounds(20)
    change(nodes, 3)
    nodes.rounds(200)
    assert copies(nodes) == 3
    change(nodes, 1)
    seen = [copies(nodes)]
    for _ in range(200):
        nodes.round()
        seen.append(copies(nodes))
    assert seen[0] == 2
    assert set(seen) == {2, 1}
    assert seen == sorted(seen, reverse=True)
    stream = nodes.leader.state.streams[LS1]
    assert stream.members == stream.replicas


def test_more_copies_than_nodes_are_made_when_there_are_nodes() -> None:
    nodes = cluster(nodes=(N1, N2), replication=1)
    append(nodes, LS1, 5)
    change(nodes, 3)
    nodes.rounds(200)
    assert copies(nodes) == 2
    assert nodes.leader.state.topics[TopicId(1)].replication == 3
    told = described(nodes)
    assert (told.wanted, told.next_step) == (
        3,
        "one more copy is made as soon as other storage nodes can be used",
    )
    assert isinstance(nodes.leader.answer(r.AddStreamRequest("orders")), r.Created), "on the nodes that there are"
    assert nodes.leader.answer(r.ChangeTopicRequest("orders", streams=3)) == r.Done()
    nodes.rounds(50)
    assert sum(s.is_open for s in nodes.leader.state.streams.values()) == 3
    nodes.leader.answer(r.AddNodeRequest(N3))
    nodes.nodes.append(N3)
    nodes.rounds(300)
    assert {copies(nodes, lsid) for lsid in nodes.leader.state.streams} == {3}


def test_what_happens_next_is_said() -> None:
    nodes = cluster(nodes=FOUR, replication=1)
    append(nodes, LS1, 5)
    change(nodes, 3)
    told = {described(nodes).next_step}
    for _ in range(100):
        nodes.round()
        told.add(described(nodes).next_step)
    assert any("; then one more copy is made" in words for words in told), told
    nodes.rounds(200)
    change(nodes, 2)
    told = {described(nodes).next_step}
    for _ in range(100):
        nodes.round()
        told.add(described(nodes).next_step)
    assert any("2 copies are wanted" in words for words in told), told


def test_what_cannot_be_a_number_of_copies_is_refused_and_the_same_again_changes_nothing() -> None:
    leader = cluster(nodes=FOUR).leader
    for wrong in (0, -1, 65):
        assert isinstance(leader.answer(r.ChangeTopicRequest("orders", replication=wrong)), InvalidArgument)
    index = leader.state.index
    assert leader.answer(r.ChangeTopicRequest("orders", replication=3)) == r.Done()
    assert leader.state.index == index
    assert leader.answer(r.ChangeTopicRequest("orders", replication=4)) == r.Done()
    assert leader.state.topics[TopicId(1)].replication == 4
    assert leader.answer(r.ChangeTopicRequest("orders", retention=Retention(SECOND))) == r.Done()
    assert leader.state.topics[TopicId(1)].replication == 4, "what is not said stays"
    events = leader.answer(r.EventsRequest())
    assert isinstance(events, r.Events)
    assert any("replication 4" in event.what for event in events.events)


def test_decisions_without_the_new_fields_are_read() -> None:
    """As earlier versions wrote them, in the same bytes."""
    change = d.ChangeTopic(TopicId(1), 2, Retention())
    data = msgspec.to_builtins(change)
    assert "replication" not in data
    assert msgspec.convert(data, d.ChangeTopic) == change
    create = d.CreateTopic(TopicId(1), "t", 1)
    data = msgspec.to_builtins(create)
    assert "is_internal" not in data
    assert msgspec.convert(data, d.CreateTopic) == create
    state = OrderState(None, [create, change])
    (topic,) = state.snapshot().topics
    assert "internal" not in msgspec.to_builtins(topic)
    assert state.topics[TopicId(1)].replication == 1


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.one_of(
            st.tuples(st.just("change"), st.integers(1, 4)),
            st.tuples(st.just("die"), st.sampled_from(FOUR)),
            st.tuples(st.just("return"), st.sampled_from(FOUR)),
            st.tuples(st.just("rounds"), st.integers(1, 120)),
            st.tuples(st.just("append"), st.integers(1, 5)),
            st.tuples(st.just("replace"), st.integers(0, 3)),
        ),
        max_size=12,
    ),
)
def test_changes_under_failures_end_with_the_wanted_copies(begin: int, life: list[tuple[str, int]]) -> None:
    """One node at a time is dead. A chain loses at most one member by an epoch change, unless a node died, and an open
    stream has as many copies as were wanted all the while, or one less for the dead one."""
    nodes = cluster(nodes=FOUR, replication=begin)
    least, wanted = begin, begin
    for what, value in life:
        if what == "change":
            change(nodes, value)
            wanted, least = value, min(least, value)
        elif what == "die":
            nodes.silent = {StorageNodeId(value)}
        elif what == "return":
            nodes.silent.discard(StorageNodeId(value))
        elif what == "replace":
            stream = nodes.leader.state.streams[LS1]
            old, spare = stream.replicas[value % len(stream.replicas)], {*FOUR} - {*stream.replicas}
            replace(nodes, old, min(spare, default=old))
        elif what == "append":
            stream = nodes.leader.state.streams[LS1]
            if stream.is_open and all(
                node not in nodes.silent and nodes.replicas[node, LS1].state is RUNNING for node in stream.members
            ):
                nodes.append(LS1, value)
        else:
            for _ in range(value):
                nodes.round()
                stream = nodes.leader.state.streams[LS1]
                assert len(stream.members) >= max(1, least - 1)
                holders = [nodes.replicas[node, LS1] for node in stream.members]
                assert all(replica.end >= stream.committed_end for replica in holders)
    nodes.silent.clear()
    for _ in range(15):
        nodes.rounds(100)
        if copies(nodes) == wanted and is_whole(nodes, LS1):
            break
    assert copies(nodes) == wanted
    assert is_whole(nodes, LS1)


# Internal topics.


def with_topic_of_earlier_version(name: str, *, schema: bytes = b"") -> Leader:
    decisions: list[d.Decision] = [d.AddNode(N1), d.CreateTopic(TopicId(1), name, 1, schema=schema)]
    leader = Leader(decisions, options=QUIET)
    FakeNodes(leader, (N1,)).rounds(2)
    return leader


def internal(nodes: FakeNodes) -> dict[str, r.TopicInfo]:
    catalog = nodes.leader.answer(r.CatalogRequest())
    assert isinstance(catalog, r.Catalog)
    return {topic.name: topic for topic in catalog.topics if topic.is_internal}


def test_internal_topics_are_made_once_and_stay_over_a_change_of_leaders() -> None:
    nodes = cluster(nodes=FOUR)
    made = nodes.leader.answer(BOTH)
    assert made == r.InternalTopics((TopicId(2), TopicId(3)))
    index = nodes.leader.state.index
    assert nodes.leader.answer(BOTH) == made
    assert nodes.leader.state.index == index, "asked again, nothing is decided"
    found = internal(nodes)
    assert {t.name: (t.streams, t.replication, t.retention) for t in found.values()} == {
        "_audit": (1, 3, Retention(90 * 24 * 3_600 * SECOND)),
        "_programs": (1, 3, Retention()),
    }
    nodes.rounds(10)
    assert is_whole(nodes, LS2)
    assert copies(nodes, LS2) == 3
    stored: Snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(nodes.leader.state.snapshot()), type=Snapshot)
    for successor in (Leader(snapshot=stored), Leader(nodes.leader.stored)):
        index = successor.state.index
        assert successor.answer(BOTH) == made
        assert successor.state.index == index
        assert successor.state.topics[TopicId(2)].is_internal


def test_an_internal_topic_gets_more_copies_by_itself() -> None:
    """On one node nothing is missing; with each node that comes there is one copy more, and three at most."""
    nodes = cluster(nodes=(N1,), replication=1)
    assert nodes.leader.answer(r.MakeInternalTopicsRequest((AUDIT,))) == r.InternalTopics((TopicId(2),))
    nodes.rounds(20)
    append(nodes, LS2, 3)
    told = described(nodes, LS2)
    assert (told.wanted, told.members, told.next_step) == (1, (N1,), "")
    for expected, node in ((2, N2), (3, N3), (3, N4)):
        nodes.leader.answer(r.AddNodeRequest(node))
        nodes.nodes.append(node)
        nodes.rounds(150)
        assert copies(nodes, LS2) == expected
        assert is_whole(nodes, LS2)
        assert copies(nodes, LS1) == 1, "other topics stay as they are"


def test_without_a_usable_node_an_internal_topic_waits() -> None:
    leader = Leader(options=QUIET)
    assert isinstance(leader.answer(BOTH), Unavailable)
    assert leader.state.topics == {}


def test_a_users_topic_in_the_way_is_reported_before_anything_changes() -> None:
    for schema, command in ((b"s", "--format ndjson"), (b"", "--create")):
        leader = with_topic_of_earlier_version("_programs", schema=schema)
        index = leader.state.index
        refused = leader.answer(BOTH)
        assert isinstance(refused, Refused)
        assert "'_programs'" in refused.message
        assert f"cutwater append programs {command}" in refused.message
        assert "cutwater topic delete _programs" in refused.message
        assert leader.state.index == index, "_audit is not made either"
        assert leader.answer(r.DeleteTopicRequest("_programs")) == r.Done()
        assert leader.answer(BOTH) == r.InternalTopics((TopicId(2), TopicId(3)))


def test_other_reserved_names_are_reported_and_stay_usable() -> None:
    leader = with_topic_of_earlier_version("_mine")
    assert leader.answer(BOTH) == r.InternalTopics((TopicId(2), TopicId(3)), ("_mine",))
    assert leader.answer(r.TrimRequest("_mine", GLSN(1))) == r.Done()
    assert leader.answer(r.ChangeTopicRequest("_mine", streams=2)) == r.Done()
    assert isinstance(leader.answer(r.CreateTopicRequest("_mine", 1, 1)), AlreadyExists)
    assert leader.answer(r.DeleteTopicRequest("_mine")) == r.Done()


def test_users_create_no_reserved_names() -> None:
    leader = cluster().leader
    for name in ("_", "_audit", "__x"):
        refused = leader.answer(r.CreateTopicRequest(name, 1, 1))
        assert isinstance(refused, InvalidArgument)
        assert "reserved" in refused.message
        with pytest.raises(InvalidArgument, match="begins with a letter or a digit"):
            check_not_reserved(name)
    check_not_reserved("a_b_")


def test_operators_cannot_delete_or_reshape_internal_topics() -> None:
    leader = cluster().leader
    leader.answer(BOTH)
    for request in (
        r.DeleteTopicRequest("_audit"),
        r.ChangeTopicRequest("_audit", streams=2),
        r.AddStreamRequest("_audit"),
    ):
        refused = leader.answer(request)
        assert isinstance(refused, Refused), request
        assert "internal" in refused.message
    keep = Retention(SECOND)
    assert leader.answer(r.ChangeTopicRequest("_audit", retention=keep, replication=2)) == r.Done()
    leader.answer(BOTH)
    assert leader.state.topics[TopicId(2)].retention == keep, "asked again, it stays as operators want it"
    assert leader.state.wanted(TopicId(2)) == 2


def test_only_reserved_names_are_internal() -> None:
    leader = cluster().leader
    wrong = r.MakeInternalTopicsRequest((msgspec.structs.replace(AUDIT, name="audit"),))
    assert isinstance(leader.answer(wrong), InvalidArgument)
