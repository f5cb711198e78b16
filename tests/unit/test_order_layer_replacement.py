"""Repair that restores the target: other nodes for the dead, other streams for the lost, and words for operators."""

from __future__ import annotations

from msgspec import structs
from order_driver import LS1, LS2, N1, N2, N3, N4, FakeNodes, sends, stores
from test_order_layer_repair import QUIET, append, cluster, is_whole

from cutwater.admin.status_text import why_dead
from cutwater.core import requests as r
from cutwater.core.messages import CreateReplica
from cutwater.core.order import decisions as d
from cutwater.core.order.events import NodeGone, NodeUnreachable, PeerComplaint
from cutwater.core.order.planning.placement import substitute
from cutwater.core.order.state import Node, OrderState
from cutwater.errors import InvalidArgument, OrderLayerLostMemory, Refused, Unavailable, WrongIdentity
from cutwater.types import GLSN, MILLISECOND, SECOND, ReplicaState, Retention, StorageNodeId

HASTY = structs.replace(QUIET, replace_node_after_us=4 * SECOND, replace_stream_after_us=3 * SECOND)
FOUR = (N1, N2, N3, N4)


def members(nodes: FakeNodes) -> tuple[StorageNodeId, ...]:
    return nodes.leader.state.streams[LS1].members


def test_a_dead_nodes_place_is_given_to_another_while_the_stream_runs() -> None:
    """Re-replicates with a learner while the stream runs."""
    nodes = cluster(nodes=FOUR, options=HASTY)
    append(nodes, LS1, 5)
    (free,) = set(FOUR) - set(members(nodes))
    dead = members(nodes)[1]
    nodes.silent.add(dead)
    nodes.rounds(130)
    assert dead not in members(nodes)
    assert len(members(nodes)) == 2
    append(nodes, LS1, 3)
    nodes.rounds(150)
    stream = nodes.leader.state.streams[LS1]
    assert free in stream.replicas
    assert dead not in stream.replicas
    assert is_whole(nodes, LS1)
    assert stream.committed_end == 8


def test_a_spare_node_is_brought_in_for_a_replica_that_is_damaged() -> None:
    """At once, not when the node has been dead for long: it lives. It keeps its place until there are enough copies,
    because what it has may be what another one lacks."""
    nodes = cluster(nodes=(N1, N2, N3), replication=2)
    append(nodes, LS1, 5)
    (spare,) = {N1, N2, N3} - set(members(nodes))
    sound, damaged = members(nodes)
    nodes.damaged.add((damaged, LS1))
    nodes.rounds(130)
    append(nodes, LS1, 2)
    stream = nodes.leader.state.streams[LS1]
    assert set(stream.members) == set(stream.replicas) == {sound, spare}
    assert stream.committed_end == 7
    events = nodes.leader.answer(r.EventsRequest())
    assert isinstance(events, r.Events)
    reasons = [event.reason for event in events.events if event.reason]
    assert f"the copy on storage node {damaged} is damaged" in reasons
    assert f"there are 2 copies without storage node {damaged}" in reasons


def test_a_spare_node_that_dies_is_replaced_too() -> None:
    nodes = cluster(nodes=FOUR, replication=2, options=HASTY)
    append(nodes, LS1, 5)
    sound, damaged = members(nodes)
    nodes.damaged.add((damaged, LS1))
    while len(nodes.leader.state.streams[LS1].replicas) < 3:
        nodes.round()
    (spare,) = set(nodes.leader.state.streams[LS1].replicas) - {sound, damaged}
    nodes.silent.add(spare)
    (last,) = set(FOUR) - {sound, damaged, spare}
    nodes.rounds(500)
    assert set(members(nodes)) == set(nodes.leader.state.streams[LS1].replicas) == {sound, last}


def test_a_replica_that_is_repaired_in_a_moment_needs_no_spare_node() -> None:
    nodes = cluster(nodes=(N1, N2, N3), replication=2)
    append(nodes, LS1, 5)
    before = set(members(nodes))
    nodes.damaged.add((members(nodes)[1], LS1))
    nodes.rounds(10)
    nodes.damaged.clear()
    nodes.rounds(150)
    assert set(members(nodes)) == set(nodes.leader.state.streams[LS1].replicas) == before


def test_a_damaged_replica_that_is_back_first_keeps_its_place() -> None:
    nodes = cluster(nodes=(N1, N2, N3), replication=2)
    append(nodes, LS1, 5)
    before = set(members(nodes))
    (spare,) = {N1, N2, N3} - before
    nodes.damaged |= {(members(nodes)[1], LS1), (spare, LS1)}
    nodes.rounds(60)
    assert spare in nodes.leader.state.streams[LS1].replicas
    nodes.damaged = {(spare, LS1)}
    nodes.rounds(150)
    assert set(members(nodes)) == set(nodes.leader.state.streams[LS1].replicas) == before


def test_without_a_free_node_the_dead_keep_their_place() -> None:
    nodes = cluster(options=HASTY)
    append(nodes, LS1, 5)
    nodes.silent.add(N2)
    nodes.rounds(400)
    assert set(nodes.leader.state.streams[LS1].replicas) == {N1, N2, N3}
    nodes.silent.clear()
    nodes.rounds(200)
    assert is_whole(nodes, LS1)


def test_the_number_of_streams_that_take_appends_is_kept() -> None:
    """Keeps the number of active log streams per topic, opens replacements where enough healthy nodes exist."""
    nodes = cluster(nodes=FOUR, streams=2, replication=1, options=HASTY)
    lost = nodes.leader.state.streams[LS1].members[0]
    nodes.silent.add(lost)
    nodes.rounds(400)
    state = nodes.leader.state
    assert not state.streams[LS1].is_open, "it has no other copy"
    still_open = [s for s in state.streams.values() if s.is_open]
    assert len(still_open) == 2
    assert all(lost not in s.members for s in still_open)


def test_a_stream_sealed_for_good_is_replaced_and_one_sealed_by_an_operator_is_not() -> None:
    nodes = cluster(streams=2, options=HASTY)
    nodes.take(nodes.leader.run(nodes.leader.ask(r.SealRequest(LS1))))
    nodes.rounds(300)
    assert len(nodes.leader.state.streams) == 2
    nodes.take(nodes.leader.run(nodes.leader.ask(r.SealRequest(LS2, final=True))))
    nodes.rounds(50)
    (created,) = set(nodes.leader.state.streams) - {LS1, LS2}
    assert is_whole(nodes, created)


def test_who_accuses_two_peers_is_left_out_itself() -> None:
    """If both ends live and only their link is cut, repair leaves one of them out: the one that sees nobody."""
    nodes = cluster(options=HASTY)
    append(nodes, LS1, 2)
    head, second, third = members(nodes)
    for peer in (second, third):
        nodes.take(nodes.leader.run(PeerComplaint(LS1, head, peer)))
        nodes.replicas[head, LS1].state = ReplicaState.SEALING
        nodes.rounds(40, ms=15)
    assert set(members(nodes)) == {second, third}


def test_substitutes_never_meet_a_replica_of_the_same_stream() -> None:
    load = {N1: 4, N3: 2, N4: 9}
    assert substitute((N1, N2), {N2}, 2, load) == (N1, N3)
    assert substitute((N1, N2, N3, N4), {N2}, 4, load) == (N1, N2, N3, N4), "nobody is free"
    assert substitute((N1,), set(), 3, load) == (N1, N3, N4)
    assert substitute((N2, N1), {N2, N1}, 2, {N4: 0}) == (N4, N1), "who has no substitute keeps its place"


# The catalog.


def test_a_node_with_another_key_is_not_the_node() -> None:
    """'a node whose keys do not match the cluster's refuses to start or to be added'."""
    leader = cluster().leader
    assert leader.answer(r.AddNodeRequest(N4, "h:1", "key", ("/a",))) == r.Done()
    assert leader.answer(r.JoinRequest(N4, "h:2", "key", ("/a", "/b"), asked_at="h:1")) == r.Joined(known=True)
    assert leader.state.nodes[N4].address == "h:2"
    assert isinstance(leader.answer(r.AddNodeRequest(N4, "h:2", "other")), WrongIdentity)
    assert isinstance(leader.answer(r.JoinRequest(N4, "h:2", "other", ())), WrongIdentity)
    index = leader.state.index
    assert leader.answer(r.AddNodeRequest(N4, "h:2", "key", ("/a", "/b"))) == r.Done()
    assert leader.state.index == index, "nothing new"


def test_only_a_node_with_the_public_key_that_was_noted_changes_what_is_known_of_it() -> None:
    leader = cluster().leader
    assert leader.answer(r.AddNodeRequest(N4, "h:1")) == r.Done()
    assert leader.answer(r.JoinRequest(N4, "h:1", "key", ("/a",), "public", "h:1")) == r.Joined(known=True)
    noted = Node(N4, "h:1", "key", ("/a",), "public")
    assert leader.state.nodes[N4] == noted
    for request in (
        r.AddNodeRequest(N4, "h:1", "key", ("/a",), "another"),
        r.JoinRequest(N4, "h:2", "key", ("/a",), "another"),
        r.JoinRequest(N4, "h:2", "key", ("/a",)),
    ):
        assert isinstance(leader.answer(request), WrongIdentity), request
    # Anyone may ask to add a node, with nothing but what everyone can know; that moves none.
    assert isinstance(leader.answer(r.AddNodeRequest(N4, "h:2")), Refused)
    assert leader.answer(r.AddNodeRequest(N4)) == r.Done()
    assert leader.answer(r.AddNodeRequest(N4, "h:1", "", ("/b",))) == r.Done()
    assert leader.state.nodes[N4] == noted
    assert leader.answer(r.JoinRequest(N4, "h:2", "key", ("/b",), "public")) == r.Joined(known=True)
    assert leader.state.nodes[N4] == Node(N4, "h:2", "key", ("/b",), "public")
    assert OrderState(leader.state.snapshot(), ()).nodes[N4].server_key == "public"
    # A new key is for the same data only, and only if one is said.
    for key in ("", "other data"):
        renewal = r.AddNodeRequest(N4, "", key, (), "another", renews=True)
        assert isinstance(leader.answer(renewal), WrongIdentity)
    assert leader.answer(r.AddNodeRequest(N4, "", "key", (), "", renews=True)) == r.Done()
    assert leader.state.nodes[N4].server_key == "public"
    assert leader.answer(r.AddNodeRequest(N4, "", "key", (), "another", renews=True)) == r.Done()
    assert leader.state.nodes[N4] == Node(N4, "h:2", "key", ("/b",), "another")
    assert isinstance(leader.answer(r.JoinRequest(N4, "h:2", "key", ("/b",), "public")), WrongIdentity)
    # Who was removed is a stranger.
    assert leader.answer(r.RemoveNodeRequest(N4)) == r.Done()
    assert leader.answer(r.AddNodeRequest(N4, "h:3")) == r.Done()
    assert leader.state.nodes[N4] == Node(N4, "h:3")


def test_a_key_is_noted_only_if_it_was_asked_for_where_the_node_listens() -> None:
    """A node may be added, or removed and added elsewhere, between the question for its key and the decision."""
    leader = cluster().leader
    thief = r.JoinRequest(N4, "h:6", "", (), "thief")
    assert leader.answer(thief) == r.Joined(known=False)
    for address, asked in (("h:1", ""), ("h:1", "h:6"), ("", ""), ("", "h:6")):
        assert leader.answer(r.AddNodeRequest(N4, address)) == r.Done()
        refused = leader.answer(structs.replace(thief, asked_at=asked))
        assert isinstance(refused, Unavailable), (address, asked, refused)
        assert leader.state.nodes[N4] == Node(N4, address)
        assert leader.answer(r.RemoveNodeRequest(N4)) == r.Done()


def test_topics_change_and_say_so() -> None:
    leader = cluster().leader
    week = Retention(time_us=7 * 24 * 3_600 * SECOND)
    assert leader.answer(r.ChangeTopicRequest("orders", streams=2, retention=week)) == r.Done()
    (topic,) = (t for t in leader.state.topics.values() if t.name == "orders")
    assert (topic.streams, topic.retention) == (2, week)
    assert isinstance(leader.answer(r.ChangeTopicRequest("orders", streams=0)), InvalidArgument)
    assert isinstance(leader.answer(r.ChangeTopicRequest("orders", retention=Retention(-1))), InvalidArgument)
    assert isinstance(leader.answer(r.ChangeTopicRequest("orders", schema=b"s")), Refused), "it is not a typed topic"
    leader.answer(r.CreateTopicRequest("typed", 1, 1, schema=b"one", event_time="at"))
    assert leader.answer(r.ChangeTopicRequest("typed", schema=b"two", schema_after=1)) == r.Done()
    assert leader.answer(r.ChangeTopicRequest("typed", schema=b"two", schema_after=1)) == r.Done(), "asked again"
    assert isinstance(leader.answer(r.ChangeTopicRequest("typed", schema=b"three", schema_after=1)), Refused)
    catalog = leader.answer(r.CatalogRequest())
    assert isinstance(catalog, r.Catalog)
    (typed,) = (t for t in catalog.topics if t.name == "typed")
    assert (typed.schemas, typed.event_time) == ((b"one", b"two"), "at")


def test_log_streams_that_are_too_many_are_sealed_for_good() -> None:
    """First those that take no appends, then the newest; and no others are made in their place."""
    nodes = cluster(streams=3)
    append(nodes, LS1, 5)
    leader = nodes.leader
    leader.answer(r.SealRequest(LS1))
    assert leader.answer(r.ChangeTopicRequest("orders", streams=1)) == r.Done()
    nodes.rounds(20)
    assert {s.stream: (s.is_open, s.final) for s in leader.state.streams.values()} == {
        LS1: (False, True),
        LS2: (True, False),
        3: (False, True),
    }
    assert leader.state.streams[LS1].committed_end == 5
    assert leader.state.streams[LS1].reason == "topic 'orders' shall have 1 log stream"
    index = leader.state.index
    assert leader.answer(r.ChangeTopicRequest("orders", streams=1)) == r.Done(), "asked again"
    assert leader.state.index == index, "nothing new"


def test_of_log_streams_that_take_no_appends_one_is_kept_that_will_by_itself() -> None:
    nodes = cluster(streams=2)
    leader = nodes.leader
    leader.answer(r.SealRequest(LS1))
    nodes.take(leader.run(NodeUnreachable(N2)))
    assert not any(s.is_open for s in leader.state.streams.values())
    assert leader.answer(r.ChangeTopicRequest("orders", streams=1)) == r.Done()
    nodes.rounds(100)
    assert {s.stream: (s.is_open, s.final) for s in leader.state.streams.values()} == {
        LS1: (False, True),
        LS2: (True, False),
    }


def test_cursors_are_read_and_dropped() -> None:
    leader = cluster().leader
    assert leader.answer(r.ReadCursorRequest("c")) == r.CursorAt(None)
    leader.answer(r.CommitCursorRequest("c", leader.state.high_watermark))
    assert leader.answer(r.ReadCursorRequest("c")) == r.CursorAt(leader.state.high_watermark)
    leader.answer(r.DropCursorRequest("c"))
    assert leader.answer(r.ReadCursorRequest("c")) == r.CursorAt(None)


def test_every_decision_but_cuts_is_an_event_with_its_reason() -> None:
    nodes = cluster()
    append(nodes, LS1, 1)
    nodes.silent.add(N2)
    nodes.rounds(130)
    events = nodes.leader.answer(r.EventsRequest())
    assert isinstance(events, r.Events)
    told = [(event.kind, event.reason) for event in events.events]
    assert ("Seal", "storage node 2 is silent") in told
    assert told[-1][0] == "Unseal"
    assert "storage nodes 1 and 3 hold every record; storage node 2 is dead: it joins again" in told[-1][1]
    assert [e.index for e in events.events] == sorted(e.index for e in events.events)
    later = nodes.leader.answer(r.EventsRequest(events.events[-2].index))
    assert isinstance(later, r.Events)
    assert later.events == events.events[-1:]
    copy = OrderState(nodes.leader.state.snapshot())
    assert tuple(copy.events) == events.events, "they outlive a leader"


def test_a_description_says_what_is_missing_and_what_happens_next() -> None:
    nodes = cluster()
    append(nodes, LS1, 1)
    whole = nodes.leader.answer(r.DescribeRequest())
    assert isinstance(whole, r.Description)
    assert [(s.missing, s.reason, s.next_step) for s in whole.streams] == [((), "", "")]
    assert all(n.is_alive for n in whole.nodes)
    nodes.silent.add(N2)
    nodes.rounds(130)
    hurt = nodes.leader.answer(r.DescribeRequest())
    assert isinstance(hurt, r.Description)
    assert [(s.is_open, s.missing) for s in hurt.streams] == [(True, (N2,))]
    assert "storage node 2 is dead: it joins again when it is back" in hurt.streams[0].next_step
    assert (hurt.streams[0].wanted, hurt.nodes[1].state) == (3, None)
    assert [n.is_alive for n in hurt.nodes] == [True, False, True]
    assert hurt.nodes[1].silent_us is not None
    assert hurt.nodes[1].silent_us > 2_000 * MILLISECOND


def test_a_replica_is_told_to_learn_when_an_operator_asks() -> None:
    leader = cluster().leader
    assert isinstance(leader.answer(r.LearnRequest(LS1, N1)), Refused), "it is complete"
    assert isinstance(leader.answer(r.LearnRequest(LS1, N4)), InvalidArgument)


def test_a_cluster_is_founded_once() -> None:
    leader = cluster().leader
    effects = leader.run(leader.ask(r.FoundClusterRequest(leader.state.cluster, "k1")))
    assert [type(x) for x in stores(effects)] == [d.FoundCluster]
    assert stores(leader.run(leader.ask(r.FoundClusterRequest(leader.state.cluster, "k2")))) == []
    assert leader.state.cluster_key == "k1"
    assert sends(effects, CreateReplica) == []


def described(nodes: FakeNodes) -> r.Description:
    found = nodes.leader.answer(r.DescribeRequest())
    assert isinstance(found, r.Description)
    return found


def test_a_process_that_has_ended_is_not_waited_for() -> None:
    nodes = cluster(options=HASTY)
    append(nodes, LS1, 2)
    gone = members(nodes)[0]
    nodes.silent.add(gone)
    nodes.take(nodes.leader.run(NodeGone(gone)))
    nodes.rounds(4, ms=5)
    assert gone not in members(nodes), "sealed and opened on the others within a few milliseconds"
    (told,) = (node for node in described(nodes).nodes if node.node == gone)
    assert why_dead(told) == "is dead: its connection was lost, and no server listens there any more"
    append(nodes, LS1, 2)
    nodes.silent.clear()
    nodes.rounds(100)
    assert is_whole(nodes, LS1), "when it reports again, it is welcome again"
    assert not any(node.is_gone for node in described(nodes).nodes)
    nodes.silent.add(gone)
    nodes.rounds(400, ms=15)
    (told,) = (node for node in described(nodes).nodes if node.node == gone)
    assert "is dead: it has been silent for" in why_dead(told)


def test_a_node_that_reports_but_cannot_be_reached_is_left_out_for_a_while() -> None:
    nodes = cluster(options=HASTY)
    append(nodes, LS1, 2)
    head = members(nodes)[0]
    nodes.take(nodes.leader.run(NodeUnreachable(head)))
    nodes.rounds(40, ms=15)
    assert set(members(nodes)) == {N1, N2, N3} - {head}
    append(nodes, LS1, 2)
    nodes.rounds(200)
    assert is_whole(nodes, LS1), "after the back-off it is tried again"


def test_a_head_that_refuses_connections_is_not_put_back_at_once() -> None:
    """It reports all the same: a wrong address, or a firewall. Nobody could append there."""
    nodes = cluster(options=HASTY)
    append(nodes, LS1, 2)
    head = members(nodes)[0]
    nodes.take(nodes.leader.run(NodeGone(head)))
    nodes.rounds(20, ms=10)
    assert head not in members(nodes)


def test_a_finished_stream_counts_the_copies_that_took_over() -> None:
    nodes = cluster(nodes=FOUR, replication=2, options=HASTY)
    append(nodes, LS1, 5)
    nodes.take(nodes.leader.run(nodes.leader.ask(r.SealRequest(LS1, final=True))))
    nodes.rounds(30)
    first, second = nodes.leader.state.streams[LS1].replicas
    nodes.silent.add(first)
    nodes.rounds(400)
    stream = nodes.leader.state.streams[LS1]
    assert first not in stream.replicas
    assert set(stream.members) == set(stream.replicas)
    nodes.silent.add(second)
    nodes.rounds(400)
    assert second not in stream.replicas
    assert set(stream.members) == set(stream.replicas)


def test_operators_are_told_how_the_cluster_is_also_when_nothing_is_decided_any_more() -> None:
    nodes = cluster()
    nodes.leader.run(nodes.leader.report(N1, applied=10**6))
    assert nodes.leader.layer.halted is not None
    description = nodes.leader.answer(r.DescribeRequest())
    assert isinstance(description, r.Description)
    assert "has heard of the cut 1000000" in description.halted
    assert isinstance(nodes.leader.answer(r.EventsRequest()), r.Events)
    for refused in (r.CatalogRequest(), r.ReadCursorRequest("c"), r.ClockRequest(GLSN(0)), r.AddNodeRequest(N4)):
        assert isinstance(nodes.leader.answer(refused), OrderLayerLostMemory)


def test_a_topic_with_fewer_copies_than_min_replication_opens_all_the_same() -> None:
    nodes = cluster(replication=1, options=structs.replace(HASTY, min_replication=2))
    assert nodes.leader.state.streams[LS1].is_open


def test_a_stream_with_too_few_copies_gets_more_when_nodes_allow() -> None:
    """'Repair then restores the target': also if the stream never had as many as its topic asks for."""
    nodes = cluster(nodes=(N1, N2), replication=2)
    lone = nodes.leader.state.topics[nodes.leader.state.streams[LS1].topic]
    lone.replication = 3
    append(nodes, LS1, 2)
    short = nodes.leader.answer(r.DescribeRequest())
    assert isinstance(short, r.Description)
    assert short.streams[0].next_step == "one more copy is made as soon as other storage nodes can be used"
    assert nodes.leader.answer(r.AddNodeRequest(N3)) == r.Done()
    nodes.nodes.append(N3)
    nodes.rounds(200)
    assert sorted(nodes.leader.state.streams[LS1].members) == [N1, N2, N3]
    assert is_whole(nodes, LS1)
