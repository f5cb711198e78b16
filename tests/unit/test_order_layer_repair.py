"""Dead nodes and repair: the sentences of DESIGN §4, with fake storage nodes that report and obey."""

from __future__ import annotations

import pytest
from order_driver import (
    E1,
    LEADER,
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

from cutwater.core import decisions as d
from cutwater.core import requests as r
from cutwater.core.messages import CommitMessage, SealReplica
from cutwater.core.order import OrderOptions
from cutwater.core.order_events import OrderEffect, PeerComplaint, Send, Store, Wake
from cutwater.types import LLSN, MILLISECOND, SECOND, DecisionIndex, LogStreamId, StorageNodeId

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
    leader.pass_time(1_999 * MILLISECOND)
    assert leader.run(Wake()) == []
    leader.run(leader.report(N1, ls1))
    leader.run(leader.report(N2, ls1, ls2))
    leader.pass_time(MILLISECOND)
    seal = d.Seal(LS2, E1, LLSN(0), (N2, N3), "storage node 3 is silent")
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


def test_what_is_missing_is_explained() -> None:
    """'explains every state it leaves a stream in (`cutwater stream describe` says why, since when, what is missing and
    what happens next)'."""
    nodes = cluster()
    nodes.silent.add(N3)
    nodes.rounds(120)
    assert nodes.leader.state.streams[LS1].members == (N1, N2)
    assert "3" in nodes.leader.layer.explanations[LS1]


def test_a_leader_that_slept_does_not_take_its_own_silence_for_death() -> None:
    """A node is dead 'when the leader's own probes fail for `node_dead_after`'. A leader that stood still for longer
    finds the reports of that time behind its own alarm clock."""
    nodes = cluster()
    nodes.rounds(10)
    nodes.leader.pass_time(10 * SECOND)
    nodes.rounds(3)
    assert [x for x in stores(nodes.seen) if isinstance(x, d.Seal)] == []


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
    """Who is left out comes back in when nobody else is left."""
    leader, _ = sealed_by_a_link()
    for node in (N1, N3):
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=4, epoch=2, state=SEALING)))
    assert not leader.state.streams[LS1].is_open
    leader.pass_time(900 * MILLISECOND)
    leader.run(leader.report(N2, ur(LS1, committed=4, end=4, hwm=4, epoch=2, state=SEALED)))
    leader.pass_time(99 * MILLISECOND)
    leader.run(PeerComplaint(LS1, N1, N2))
    leader.wake_after(2_500 * MILLISECOND)
    leader.run(leader.report(N2, ur(LS1, committed=4, end=4, hwm=4, epoch=2, state=SEALED)))
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
