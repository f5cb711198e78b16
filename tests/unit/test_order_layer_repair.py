"""Dead nodes and repair (docs/protocol.md), with fake storage nodes that report and obey."""

from __future__ import annotations

import pytest
from order_driver import (
    E1,
    LEADER,
    LEARNING,
    LS1,
    LS2,
    N1,
    N2,
    N3,
    N4,
    RUNNING,
    SEALED,
    SEALING,
    FakeNodes,
    Leader,
    cluster_of,
    sends,
    stores,
    ur,
)

from cutwater.core import requests as r
from cutwater.core.messages import CommitMessage, ExcludeReplica, LearnFrom, SealReplica
from cutwater.core.order import decisions as d
from cutwater.core.order.events import OrderEffect, PeerComplaint, Send, Store, Wake
from cutwater.core.order.options import FINISHED_STREAMS_EVERY_WAKES, OrderOptions
from cutwater.core.order.planning.repair import RepairPlan, StreamView, plan_sealed
from cutwater.core.order.state import OrderState
from cutwater.types import LLSN, MILLISECOND, SECOND, CutTime, DecisionIndex, LogStreamId, StorageNodeId

NODES = (N1, N2, N3)
QUIET = OrderOptions(tick_us_min=10**12, tick_us_max=10**12)


def cluster(
    *, nodes: tuple[StorageNodeId, ...] = NODES, streams: int = 1, replication: int = 3, options: OrderOptions = QUIET
) -> FakeNodes:
    """A topic whose streams are open on all their replicas."""
    leader = Leader(options=options)
    found = FakeNodes(leader, nodes)
    for node in nodes:
        assert leader.answer(r.AddNodeRequest(node)) == r.Done()
    found.round()
    assert isinstance(leader.answer(r.CreateTopicRequest("orders", streams, replication)), r.Created)
    found.rounds(6)
    assert all(is_whole(found, lsid) for lsid in leader.state.streams)
    found.seen.clear()
    return found


def is_whole(nodes: FakeNodes, lsid: LogStreamId) -> bool:
    """Open on all its replicas, all of which run and have all that is committed."""
    stream = nodes.leader.state.streams[lsid]
    return (
        stream.is_open
        and stream.members == stream.replicas
        and all(nodes.replicas[node, lsid].state is RUNNING for node in stream.members)
        and {nodes.replicas[node, lsid].committed for node in stream.members} == {stream.committed_end}
    )


def append(nodes: FakeNodes, lsid: LogStreamId, count: int) -> None:
    """Append and see it committed."""
    before = nodes.leader.state.streams[lsid].committed_end
    nodes.append(lsid, count)
    nodes.rounds(2)
    assert nodes.leader.state.streams[lsid].committed_end == before + count


# A dead storage node.


def test_a_silent_node_seals_only_its_own_streams() -> None:
    """'A dead storage node seals only its own log streams; the others go on.'"""
    decisions = cluster_of({LS1: (N1, N2), LS2: (N2, N3)}, cuts=[{LS1: 4}])
    leader = Leader(decisions, options=QUIET)
    ls1, ls2 = ur(LS1, committed=4, end=4, hwm=4), ur(LS2, end=0)
    for node, reports in ((N1, [ls1]), (N2, [ls1, ls2]), (N3, [ls2])):
        leader.run(leader.report(node, *reports))
    assert leader.wake_during(1_999 * MILLISECOND) == []
    leader.run(leader.report(N1, ls1))
    leader.run(leader.report(N2, ls1, ls2))
    leader.pass_time(MILLISECOND)
    seal = d.Seal(LS2, E1, LLSN(0), (N2, N3), "storage node 3 is silent", at=CutTime(leader.now.wall))
    assert leader.run(Wake()) == [
        Store(LEADER, DecisionIndex(len(decisions)), (seal,)),
        *[Send(node, SealReplica(LS2, LEADER, E1, LLSN(0))) for node in (N2, N3)],
    ]
    more = ur(LS1, committed=4, end=5, hwm=4)
    leader.run(leader.report(N1, more))
    effects = leader.run(leader.report(N2, more, ur(LS2, end=0, state=SEALED)))
    assert [send.node for send in sends(effects, CommitMessage)] == [N1, N2]


def test_the_stream_reopens_on_the_survivors_at_once() -> None:
    """'the stream reopens on the survivors at once (new epoch, marked under-replicated)': no patience is due to the
    dead."""
    nodes = cluster()
    append(nodes, LS1, 3)
    nodes.silent.add(N3)
    nodes.rounds(105)
    stream = nodes.leader.state.streams[LS1]
    assert (stream.is_open, stream.epoch, stream.members, stream.replicas) == (True, 2, (N1, N2), NODES)
    seals = [x for x in stores(nodes.seen) if isinstance(x, d.Seal)]
    unseals = [x for x in stores(nodes.seen) if isinstance(x, d.Unseal)]
    assert [len(seals), len(unseals)] == [1, 1]
    append(nodes, LS1, 2)


def test_any_two_of_three_nodes_may_be_dead() -> None:
    """'with RF 3 any two nodes may be dead, the log still takes appends, and nothing acknowledged is lost.'"""
    nodes = cluster(streams=3)
    append(nodes, LS1, 3)
    nodes.silent |= {N1, N3}
    nodes.rounds(120)
    for lsid, stream in nodes.leader.state.streams.items():
        assert (stream.is_open, stream.members) == (True, (N2,))
        append(nodes, lsid, 1)
    assert nodes.replicas[N2, LS1].committed == 4


def test_a_stream_waits_for_min_replication() -> None:
    """'as long as `min_replication` (default 1) of them remain'."""
    nodes = cluster(options=OrderOptions(min_replication=2, tick_us_min=10**12, tick_us_max=10**12))
    nodes.silent |= {N1, N3}
    nodes.rounds(200)
    assert not nodes.leader.state.streams[LS1].is_open
    nodes.silent = {N3}
    nodes.rounds(10)
    assert nodes.leader.state.streams[LS1].members == (N1, N2)
    append(nodes, LS1, 1)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "while records come"])
def test_a_node_that_returns_learns_and_joins_again(busy: bool) -> None:
    """'re-replicates with a learner while the stream runs', 'admitted by a short seal at exactly L'."""
    nodes = cluster(streams=2)
    append(nodes, LS1, 3)
    nodes.silent.add(N3)
    nodes.rounds(120)
    append(nodes, LS1, 5)
    nodes.silent.clear()
    for _ in range(200):
        head = nodes.leader.state.streams[LS1].members[0]
        if busy and nodes.leader.state.streams[LS1].is_open and nodes.replicas[head, LS1].state is RUNNING:
            nodes.append(LS1, 1)
        nodes.round()
    nodes.rounds(3)
    assert is_whole(nodes, LS1)
    assert is_whole(nodes, LS2)
    append(nodes, LS1, 1)


def test_a_replica_is_replaced_while_it_is_dead() -> None:
    """'only when sealed, and only if at least one member of the new set holds every committed record.'"""
    nodes = cluster(nodes=(N1, N2, N3, N4))
    leader = nodes.leader
    append(nodes, LS1, 3)
    dead = leader.state.streams[LS1].replicas[2]
    spare = next(node for node in nodes.nodes if node not in leader.state.streams[LS1].replicas)
    nodes.silent.add(dead)
    nodes.rounds(120)
    append(nodes, LS1, 2)
    nodes.take(leader.run(leader.ask(r.SealRequest(LS1))))
    nodes.rounds(3)
    assert leader.answer(r.ReplaceRequest(LS1, dead, spare)) == r.Done()
    assert leader.answer(r.UnsealRequest(LS1)) == r.Done()
    nodes.rounds(100)
    assert spare in leader.state.streams[LS1].members
    assert is_whole(nodes, LS1)
    append(nodes, LS1, 1)


@pytest.mark.parametrize("replication", [2, 3])
@pytest.mark.parametrize("held_back", [False, True], ids=["at once", "the new one takes its time"])
def test_a_replaced_replica_stays_until_the_new_one_is_complete(replication: int, held_back: bool) -> None:
    nodes = cluster(nodes=(N1, N2, N3, N4), replication=replication)
    leader = nodes.leader
    append(nodes, LS1, 3)
    stream = leader.state.streams[LS1]
    old = stream.replicas[-1]
    new = next(node for node in nodes.nodes if node not in stream.replicas)
    if held_back:
        nodes.silent.add(new)
    nodes.take(leader.run(leader.ask(r.SealRequest(LS1))))
    nodes.rounds(3)
    assert leader.answer(r.ReplaceRequest(LS1, old, new)) == r.Done()
    assert leader.answer(r.UnsealRequest(LS1)) == r.Done()
    if held_back:
        nodes.rounds(120)
        assert set(stream.members) == {*stream.replicas} - {new}, "the old one goes on meanwhile"
        append(nodes, LS1, 2)
        nodes.silent.clear()
    nodes.rounds(100)
    assert is_whole(nodes, LS1)
    assert new in stream.members
    assert (old in stream.replicas, len(stream.replicas), stream.leaving) == (False, replication, ())
    assert [x for x in sends(nodes.seen, ExcludeReplica) if x.node == old][-1].message.replaced, "it knows that it left"
    append(nodes, LS1, 1)


def replace(nodes: FakeNodes, old: StorageNodeId, new: StorageNodeId) -> None:
    """Replace a replica of the first log stream, which stays sealed."""
    nodes.take(nodes.leader.run(nodes.leader.ask(r.SealRequest(LS1))))
    nodes.rounds(3)
    assert nodes.leader.answer(r.ReplaceRequest(LS1, old, new)) == r.Done()
    nodes.rounds(10)


def seals(nodes: FakeNodes) -> list[d.Seal]:
    return [decision for decision in stores(nodes.seen) if isinstance(decision, d.Seal)]


def test_a_replaced_replica_that_is_not_needed_is_not_let_in() -> None:
    """Two replicas were replaced one after the other, and the last new node is dead. The stream runs on the first of
    them. It must not be sealed again and again for the second one, which would not become a member."""
    nodes = cluster(nodes=(N1, N2, N3, N4), replication=2)
    append(nodes, LS1, 3)
    stream = nodes.leader.state.streams[LS1]
    other, first = stream.replicas
    second, new = (node for node in nodes.nodes if node not in stream.replicas)
    replace(nodes, first, second)
    nodes.silent.add(new)
    replace(nodes, second, new)
    assert (stream.replicas, stream.leaving) == ((other, new, first, second), (first, second))
    nodes.take(nodes.leader.run(nodes.leader.ask(r.UnsealRequest(LS1))))
    nodes.rounds(120)
    assert stream.members == (other, first)
    nodes.seen.clear()
    nodes.rounds(500)
    assert seals(nodes) == []
    nodes.silent.clear()
    nodes.rounds(100)
    assert is_whole(nodes, LS1)
    assert (stream.replicas, stream.leaving) == ((other, new), ())


def test_a_replaced_replica_that_is_needed_is_waited_for() -> None:
    """One of three nodes is dead, so the replaced replica is still needed. Its report comes last."""
    nodes = cluster(nodes=(N1, N2, N3, N4))
    append(nodes, LS1, 3)
    stream = nodes.leader.state.streams[LS1]
    other, dead, old = stream.replicas
    (new,) = {*nodes.nodes} - {*stream.replicas}
    nodes.nodes = [other, dead, new, old]
    nodes.silent.add(dead)
    nodes.rounds(120)
    replace(nodes, old, new)
    nodes.take(nodes.leader.run(nodes.leader.ask(r.UnsealRequest(LS1))))
    nodes.rounds(10)
    assert stream.members == (other, new, old)
    nodes.seen.clear()
    nodes.take(nodes.leader.run(nodes.leader.ask(r.SealRequest(LS1))))
    nodes.take(nodes.leader.run(nodes.leader.ask(r.UnsealRequest(LS1))))
    nodes.rounds(500)
    assert stream.members == (other, new, old)
    assert len(seals(nodes)) == 1, "there is no reason to seal it again"
    nodes.silent.clear()
    nodes.rounds(200)
    assert is_whole(nodes, LS1)
    assert (set(stream.members), stream.leaving) == ({other, dead, new}, ())


def test_a_replaced_replica_does_not_fill_the_place_of_a_copy_that_is_wanted() -> None:
    """The stream was created on two nodes, because there were no three. One of them is replaced, and the third place is
    filled as soon as that is possible."""
    nodes = cluster(nodes=(N1, N2, N3, N4), replication=3)
    leader = nodes.leader
    nodes.silent |= {N3, N4}
    nodes.rounds(120)
    nodes.take(leader.run(leader.ask(r.SealRequest(LS1, final=True))))
    nodes.rounds(20 * FINISHED_STREAMS_EVERY_WAKES)
    stream = leader.state.streams[LS2]
    assert stream.members == stream.replicas == (N1, N2)
    nodes.take(leader.run(leader.ask(r.SealRequest(LS2))))
    nodes.silent = {N4}
    nodes.round()
    assert leader.answer(r.ReplaceRequest(LS2, N2, N3)) == r.Done()
    assert leader.answer(r.UnsealRequest(LS2)) == r.Done()
    nodes.rounds(20 * FINISHED_STREAMS_EVERY_WAKES)
    assert stream.members == stream.replicas == (N1, N3, N2), "the replaced one is needed"
    assert [found.next_step for found in described(nodes) if found.stream == LS2] == [
        "one more copy is made as soon as other storage nodes can be used"
    ]
    nodes.silent.clear()
    nodes.rounds(20 * FINISHED_STREAMS_EVERY_WAKES)
    assert stream.members == stream.replicas == (N1, N3, N4)
    assert stream.leaving == ()


def test_a_replaced_replica_that_is_missed_is_named_as_dead() -> None:
    """An operator who waits for it has to know that it is dead."""
    nodes = cluster(nodes=(N1, N2, N3), replication=2)
    append(nodes, LS1, 3)
    other, old = nodes.leader.state.streams[LS1].replicas
    (new,) = {*nodes.nodes} - {other, old}
    nodes.silent.add(new)
    replace(nodes, old, new)
    nodes.silent = {other, old}
    nodes.rounds(120)
    (found,) = described(nodes)
    assert (
        f"storage node {old} is dead, was replaced and leaves when enough others hold every record" in found.next_step
    )


def described(nodes: FakeNodes) -> tuple[r.StreamDescription, ...]:
    description = nodes.leader.answer(r.DescribeRequest())
    assert isinstance(description, r.Description)
    return description.streams


def test_what_is_missing_is_explained() -> None:
    """'explains every state it leaves a stream in (`cutwater stream describe` says why, since when, what is missing and
    what happens next)'."""
    nodes = cluster()
    nodes.silent.add(N3)
    nodes.rounds(120)
    assert nodes.leader.state.streams[LS1].members == (N1, N2)
    told = "it takes appends meanwhile; storage node 3 is dead: it joins again when it is back, and another one takes"
    assert nodes.leader.layer.explanations[LS1].startswith(told)
    nodes.silent.clear()
    nodes.replicas[N3, LS1].state = LEARNING
    nodes.rounds(2)
    told = "it takes appends meanwhile; storage node 3 copies what it lacks from a peer (0 records so far)"
    assert nodes.leader.layer.explanations[LS1].startswith(told)


def test_a_leader_that_slept_does_not_take_its_own_silence_for_death() -> None:
    """A node is dead 'when the leader's own probes fail for `node_dead_after`'. A leader that stood still for longer
    finds the reports of that time behind its own alarm clock."""
    nodes = cluster()
    nodes.rounds(10)
    nodes.leader.pass_time(10 * SECOND)
    nodes.rounds(3)
    assert [x for x in stores(nodes.seen) if isinstance(x, d.Seal)] == []


def test_who_is_silent_after_the_leader_slept_is_dead_all_the_same() -> None:
    """The grace is one `node_dead_after` and no more."""
    nodes = cluster()
    nodes.rounds(10)
    nodes.silent.add(N3)
    nodes.leader.pass_time(10 * SECOND)
    nodes.rounds(100)
    assert nodes.leader.state.streams[LS1].members == NODES
    nodes.rounds(5)
    assert nodes.leader.state.streams[LS1].members == (N1, N2)


@pytest.mark.parametrize("first", ["it wakes", "a report"])
def test_a_leader_that_slept_does_not_open_a_stream_without_the_others(first: str) -> None:
    """The same for a stream that was sealed when the leader fell asleep: the others are alive and on their way, their
    reports lie behind the first one. What has waited longer than anyone's patience is the leader itself; opening on
    one replica leaves what is appended now with one copy. Reports may well be read before the alarm clock."""
    leader = Leader(cluster_of({LS1: NODES}, cuts=[{LS1: 4}]), options=QUIET)
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=4)))
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=4, state=SEALING)))
    leader.wake_during(100 * MILLISECOND)
    leader.pass_time(10 * SECOND)
    if first == "it wakes":
        leader.run(Wake())
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=4, state=SEALED)))
    assert (leader.state.streams[LS1].epoch, leader.state.streams[LS1].members) == (2, NODES)


# Streams that are sealed for good.


def test_a_finished_stream_is_looked_after_now_and_then() -> None:
    """'replicas converge', 'damage is repaired or reported'. A replica that is invalid reports nothing of itself,
    so nobody but the leader's own round finds it; finished streams 'never hurry'."""
    decisions = cluster_of({LS1: NODES}, cuts=[{LS1: 4}])
    decisions.append(d.Seal(LS1, E1, LLSN(4), (N1, N2), "a test", final=True))
    leader = Leader(decisions, options=QUIET)
    for node in (N1, N2):
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=4, state=SEALED)))
    leader.run(leader.report(N3, invalid=(LS1,)))
    told = []
    for wake in range(1, 3 * FINISHED_STREAMS_EVERY_WAKES + 1):
        messages = sends(leader.wake_after(20 * MILLISECOND))
        assert messages in ([], [Send(N3, LearnFrom(LS1, LEADER, E1, N1))])
        told += [wake] * len(messages)
    assert told == [n * FINISHED_STREAMS_EVERY_WAKES for n in (1, 2, 3)]
    assert leader.layer.explanations[LS1] == (
        "it takes no more appends; its records stay readable; storage node 3 has damaged data there and copies a peer's"
    )
    assert stores(leader.wake_during(SECOND)) == []


def test_a_finished_stream_becomes_whole() -> None:
    """'replicas converge', also when a node was away while the stream was finished."""
    nodes = cluster()
    append(nodes, LS1, 3)
    nodes.silent.add(N3)
    nodes.rounds(120)
    append(nodes, LS1, 2)
    nodes.take(nodes.leader.run(nodes.leader.ask(r.SealRequest(LS1, final=True))))
    nodes.rounds(5)
    nodes.silent.clear()
    nodes.rounds(10)
    finished = [x for (_, lsid), x in nodes.replicas.items() if lsid == LS1]
    assert {(x.state, x.committed, x.end) for x in finished} == {(SEALED, 5, 5)}


# Plans.


def plan(
    ready: tuple[StorageNodeId, ...], *, unheard: tuple[StorageNodeId, ...] = (), patient: bool = True
) -> RepairPlan:
    """What to do with a sealed stream of three replicas; who is neither ready nor unheard is dead."""
    state = OrderState(None, [*cluster_of({LS1: NODES}, cuts=[{LS1: 4}]), d.Seal(LS1, E1, LLSN(4), NODES, "a test")])
    view = StreamView(
        state.streams[LS1],
        state.histories[LS1],
        report=lambda node: ur(LS1, committed=4, end=4, hwm=4, state=SEALED) if node in ready else None,
        alive=lambda node: node in ready + unheard,
        usable=lambda node: node in ready,
        fallback=lambda node: node in ready,
        invalid=lambda node: False,
        is_unheard=lambda node: node in unheard,
        replace_after_us=60 * SECOND,
        turn=0,
    )
    return plan_sealed(view, min_replication=1, patient=patient, wanted=len(NODES))


def test_who_was_not_heard_yet_is_waited_for_as_long_as_patience_lasts() -> None:
    assert plan((N1, N2), unheard=(N3,)).chain == ()
    assert "it waits a moment for storage node 3; storage node 3 has yet" in plan((N1, N2), unheard=(N3,)).why
    assert plan((N1, N2), unheard=(N3,), patient=False).chain == (N1, N2)
    assert plan((N1, N2)).chain == (N1, N2), "no patience is due to the dead"
    assert plan(NODES).chain == NODES
    assert plan((), unheard=NODES, patient=False).chain == ()


def test_who_was_not_heard_yet_is_not_told_to_learn() -> None:
    """Nobody knows what it has."""
    assert plan((N1, N2), unheard=(N3,)).learners == ()


# A link that is cut.


def sealed_by_a_link() -> tuple[Leader, list[OrderEffect]]:
    """Storage node 1 could not pass an entry on to storage node 2, said so, and is sealing."""
    leader = Leader(cluster_of({LS1: NODES}, cuts=[{LS1: 4}]), options=QUIET)
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=4)))
    effects = leader.run(PeerComplaint(LS1, N1, N2))
    effects += leader.run(leader.report(N1, ur(LS1, committed=4, end=4, hwm=4, state=SEALING)))
    for node in NODES:
        effects += leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=4, state=SEALED)))
    return leader, effects


def test_a_cut_link_leaves_one_end_out() -> None:
    """'if both ends live and only their link is cut, repair leaves one of them out, with back-off.'"""
    leader, effects = sealed_by_a_link()
    assert [type(x) for x in stores(effects)] == [d.Seal, d.Unseal]
    assert leader.state.streams[LS1].members == (N1, N3)


def test_a_complaint_is_no_reason_to_lose_the_last_replica() -> None:
    """Who is left out comes back in when nobody else is left, also before the back-off (a second) is over."""
    leader, _ = sealed_by_a_link()
    for node in (N1, N3):
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=4, epoch=2, state=SEALING)))
    leader.run(leader.report(N2, ur(LS1, committed=4, end=4, hwm=4, epoch=2, state=SEALED)))
    leader.wake_during(499 * MILLISECOND)
    assert not leader.state.streams[LS1].is_open, "the others are on their way"
    leader.wake_after(MILLISECOND)
    assert (leader.state.streams[LS1].epoch, leader.state.streams[LS1].members) == (3, (N2,))


def test_a_repeated_complaint_is_one_failure() -> None:
    """Messages may come twice, and several batches fail with one link: the back-off doubles per attempt, not per
    complaint, so a node whose link healed at once is back after the shortest wait."""
    nodes = cluster()
    leader = nodes.leader
    for _ in range(8):
        leader.run(PeerComplaint(LS1, N1, N2))
    nodes.replicas[N1, LS1].state = SEALING
    nodes.rounds(5)
    assert leader.state.streams[LS1].members == (N1, N3)
    nodes.rounds(100)
    assert is_whole(nodes, LS1)


def test_a_link_that_fails_again_is_avoided_for_twice_as_long() -> None:
    """'repair leaves one of them out, with back-off.'"""
    nodes = cluster()
    leader = nodes.leader
    absences = []
    for _ in range(3):
        assert is_whole(nodes, LS1)
        leader.run(PeerComplaint(LS1, N1, N2))
        began = leader.now.monotonic
        nodes.replicas[N1, LS1].state = SEALING
        nodes.rounds(5)
        assert leader.state.streams[LS1].members == (N1, N3)
        while not is_whole(nodes, LS1):
            nodes.round()
        absences.append((leader.now.monotonic - began) / SECOND)
        nodes.rounds(2 * 50)
    assert [round(absence) for absence in absences] == [1, 2, 4]


@pytest.mark.parametrize(
    ("complainer", "peer"), [(N4, N2), (N1, N4), (N3, N2)], ids=["a stranger", "of a stranger", "who was left out"]
)
def test_a_complaint_counts_only_between_members(complainer: StorageNodeId, peer: StorageNodeId) -> None:
    """'A replicate error names the peer': of two that are not both in the chain there can be none."""
    decisions = cluster_of({LS1: NODES}, cuts=[{LS1: 4}], nodes=(*NODES, N4))
    decisions += [d.Seal(LS1, E1, LLSN(4), (N1, N2), "a test")]
    leader = Leader(decisions, options=QUIET)
    assert leader.run(PeerComplaint(LS1, complainer, peer)) == []
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=4, state=SEALED)))
    assert (leader.state.streams[LS1].epoch, leader.state.streams[LS1].members) == (2, NODES)


def test_a_complaint_about_an_unknown_stream_is_nothing() -> None:
    leader = Leader(cluster_of({LS1: NODES}), options=QUIET)
    assert leader.run(PeerComplaint(LS2, N1, N2)) == []


@pytest.mark.parametrize(("incarnation", "members"), [(1, (N1, N3)), (2, NODES)], ids=["the same", "restarted"])
def test_a_node_that_was_restarted_is_not_avoided(incarnation: int, members: tuple[StorageNodeId, ...]) -> None:
    """A new incarnation is a new end of the link."""
    leader = cluster().leader
    leader.run(PeerComplaint(LS1, N1, N2))
    for state in (SEALING, SEALED):
        for node in NODES:
            said = ur(LS1, end=0, state=state)
            leader.run(leader.report(node, said, incarnation=incarnation if node == N2 else 1))
    assert (leader.state.streams[LS1].epoch, leader.state.streams[LS1].members) == (2, members)
