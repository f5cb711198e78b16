"""Seal, unseal and who counts (docs/protocol.md), held against whole lists of effects."""

from __future__ import annotations

import pytest
from order_driver import (
    E0,
    E1,
    E2,
    LEADER,
    LEARNING,
    LS1,
    LS2,
    LS3,
    N1,
    N2,
    N3,
    N4,
    RUNNING,
    SEALED,
    SEALING,
    START,
    T1,
    Leader,
    cluster_of,
    plain,
    sends,
    stores,
    ur,
)

from cutwater.core import requests as r
from cutwater.core.messages import (
    CommitMessage,
    CreateReplica,
    ExcludeReplica,
    LearnFrom,
    SealReplica,
    TrimReplica,
    UnsealReplica,
)
from cutwater.core.order import decisions as d
from cutwater.core.order.cut import StreamCommit
from cutwater.core.order.events import Alarm, Reply, Send, Store
from cutwater.core.order.options import OrderOptions
from cutwater.errors import ImpossibleReport
from cutwater.types import (
    GLSN,
    LLSN,
    MILLISECOND,
    SECOND,
    CommitContext,
    CutTime,
    DecisionIndex,
    Incarnation,
    LogStreamId,
    NodeState,
    ReplicaState,
    Revision,
    StorageNodeId,
    UncommitReport,
)

NODES = (N1, N2, N3)
CLUSTER = cluster_of({LS1: NODES}, cuts=[{LS1: 4}], nodes=(N1, N2, N3, N4))
SEALED_CLUSTER = [*CLUSTER, d.Seal(LS1, E1, LLSN(4), NODES, "a test")]
HELD_CLUSTER = [*CLUSTER, d.Seal(LS1, E1, LLSN(4), NODES, "a test", held=True)]
FINAL_CLUSTER = [*CLUSTER, d.Seal(LS1, E1, LLSN(4), NODES, "a test", final=True)]
LAST = DecisionIndex(len(CLUSTER))
REVISION = Revision(7)
QUIET = OrderOptions(tick_us_min=10**12, tick_us_max=10**12)


def at(end: int, state: ReplicaState = RUNNING, *, committed: int = 4, epoch: int = 1) -> UncommitReport:
    return ur(LS1, committed=committed, end=end, hwm=4, state=state, epoch=epoch)


def lead(decisions: list[d.Decision], options: OrderOptions = QUIET) -> Leader:
    return Leader(decisions, options=options)


def meet(leader: Leader) -> Leader:
    """The leader hears of every node, none of which is ready to open yet."""
    for node in NODES:
        leader.run(leader.report(node, at(4, SEALING)))
    return leader


def opened(leader: Leader) -> tuple[int, tuple[StorageNodeId, ...]]:
    stream = leader.state.streams[LS1]
    return stream.epoch, stream.members if stream.is_open else ()


# Seal.


def test_a_seal_is_one_last_cut_then_the_stored_position_then_messages() -> None:
    """'the MR makes one last cut, stores the sealed position L (last committed LLSN/GLSN), and only then talks to
    storage nodes.'"""
    leader = lead(CLUSTER)
    for node in NODES:
        leader.raw(leader.report(node, at(4)))
    (first,) = leader.raw(leader.ask(r.AddNodeRequest(N1)))
    assert isinstance(first, Store)
    for node in NODES:
        leader.raw(leader.report(node, at(6)))
    assert leader.raw(leader.ask(r.SealRequest(LS1))) == []
    reply, second = leader.confirm(first)
    assert reply == Reply(1, r.Done())
    assert isinstance(second, Store)
    context = CommitContext(E1, LLSN(5), GLSN(5), 2, GLSN(6), GLSN(4), CutTime(START.wall))
    commits = (StreamCommit(LS1, context),)
    assert second.decisions == (
        d.Cut(GLSN(6), GLSN(4), CutTime(START.wall), REVISION, commits),
        d.Seal(LS1, E1, LLSN(6), NODES, "sealed by an operator", held=True, at=CutTime(START.wall)),
    )
    assert leader.confirm(second) == [
        *[Send(node, CommitMessage(GLSN(4), GLSN(6), REVISION, commits, ()), may_wait=node != N1) for node in NODES],
        *[Send(node, SealReplica(LS1, LEADER, E1, LLSN(6))) for node in NODES],
        Reply(2, r.SealedAt(E1, LLSN(6), GLSN(6))),
    ]


def test_a_seal_that_a_replica_asks_for_has_its_last_cut_too() -> None:
    """'the MR makes one last cut': by the newest reports of the current epoch, all replicas hold LLSN 6 on disk when
    one of them fails, so 6 is where the epoch ends, and the waiters of 5 and 6 need not be told of a failure."""
    leader = lead(CLUSTER)
    leader.run(leader.report(N1, at(6)))
    leader.run(leader.report(N3, at(7)))
    effects = leader.run(leader.report(N2, at(6, SEALING)))
    context = CommitContext(E1, LLSN(5), GLSN(5), 2, GLSN(6), GLSN(4), CutTime(START.wall))
    why = "the replica on storage node 2 stopped: it was restarted, or a write or a link failed there"
    assert stores(effects) == [
        d.Cut(GLSN(6), GLSN(4), CutTime(START.wall), REVISION, (StreamCommit(LS1, context),)),
        d.Seal(LS1, E1, LLSN(6), NODES, why, at=CutTime(START.wall)),
    ]


def test_nothing_is_cut_after_a_seal() -> None:
    """'After seal nothing beyond L ever commits in that epoch'."""
    leader = lead(CLUSTER)
    leader.answer(r.SealRequest(LS1))
    for node in NODES:
        effects = leader.run(leader.report(node, at(9)))
        assert sends(effects)[0] == Send(node, SealReplica(LS1, LEADER, E1, LLSN(4)))
    assert leader.state.streams[LS1].committed_end == 4


def test_who_missed_the_seal_is_told_again_until_it_is_sealed() -> None:
    leader = lead(HELD_CLUSTER)
    assert Send(N1, SealReplica(LS1, LEADER, E1, LLSN(4))) in leader.run(leader.report(N1, at(6, SEALING)))
    assert Send(N1, SealReplica(LS1, LEADER, E1, LLSN(4))) in leader.run(leader.report(N1, at(6)))
    assert sends(leader.run(leader.report(N1, at(4, SEALED)))) == []


def test_a_survivor_that_turns_out_to_hold_less_is_dropped() -> None:
    """'A durable end that shrinks … never believed', also in a stream that is sealed already."""
    leader = lead(HELD_CLUSTER)
    effects = leader.run(leader.report(N2, at(3, SEALING, committed=3)))
    assert (Alarm, ImpossibleReport) in plain(effects)
    assert [(type(x), x.node) for x in stores(effects) if isinstance(x, d.DropSurvivor)] == [(d.DropSurvivor, N2)]
    assert leader.state.streams[LS1].members == (N1, N3)


def test_a_quarantined_replica_has_no_say_in_the_last_cut() -> None:
    """'never believed', also if the stream would be due for a cut in the very same write."""
    leader = lead(CLUSTER)
    for node in NODES:
        leader.raw(leader.report(node, at(4)))
    (first,) = leader.raw(leader.ask(r.AddNodeRequest(N1)))
    assert isinstance(first, Store)
    for node, end in ((N1, 6), (N2, 6)):
        leader.raw(leader.report(node, at(end)))
    leader.raw(leader.report(N3, at(3, committed=3)))
    *_, second = leader.confirm(first)
    assert isinstance(second, Store)
    assert [(type(x), getattr(x, "survivors", None)) for x in second.decisions] == [(d.Seal, (N1, N2))]


@pytest.mark.parametrize("how", ["says nothing of it", "calls it invalid", "is learning"])
def test_a_member_that_cannot_be_trusted_does_not_survive(how: str) -> None:
    """'Recovery … invalid: never reports, waits for sync': the stream is sealed without it."""
    leader = lead(CLUSTER)
    for node in NODES:
        leader.run(leader.report(node, at(4)))
    reports = (at(4, LEARNING),) if how == "is learning" else ()
    invalid = (LS1,) if how == "calls it invalid" else ()
    effects = leader.run(leader.report(N3, *reports, invalid=invalid))
    effects += leader.wake_after(20 * MILLISECOND)
    assert [x.survivors for x in stores(effects) if isinstance(x, d.Seal)] == [(N1, N2)]


# Unseal.


def test_the_head_opens_last() -> None:
    """'Unseal opens a new epoch …, with the replica list in chain order; the head opens last.'"""
    leader = meet(lead(SEALED_CLUSTER))
    unseal = UnsealReplica(LS1, LEADER, E2, LLSN(4), NODES)
    assert leader.run(leader.report(N1, at(4, SEALED))) == []
    assert leader.run(leader.report(N2, at(4, SEALED))) == []
    opened = d.Unseal(LS1, E2, LLSN(4), NODES, "storage nodes 1, 2 and 3 hold every record", at=CutTime(START.wall))
    assert leader.run(leader.report(N3, at(4, SEALED))) == [
        Store(LEADER, DecisionIndex(LAST + 1), (opened,)),
        Send(N2, unseal),
        Send(N3, unseal),
    ]
    assert leader.run(leader.report(N1, at(4, SEALED))) == []
    assert leader.run(leader.report(N2, at(4, epoch=2))) == []
    assert leader.run(leader.report(N1, at(4, SEALED))) == []
    assert leader.run(leader.report(N3, at(4, epoch=2))) == [Send(N1, unseal)]
    assert leader.run(leader.report(N1, at(4, SEALED))) == [Send(N1, unseal)], "in case it got lost"
    assert leader.run(leader.report(N1, at(4, epoch=2))) == []
    assert leader.run(leader.report(N2, at(4, epoch=2))) == []


def test_a_chain_of_one_opens_at_once() -> None:
    leader = lead([*cluster_of({LS1: (N1,)}, cuts=[{LS1: 4}]), d.Seal(LS1, E1, LLSN(4), (N1,), "a test")])
    effects = leader.run(leader.report(N1, at(4, SEALED)))
    assert sends(effects) == [Send(N1, UnsealReplica(LS1, LEADER, E2, LLSN(4), (N1,)))]


def test_who_missed_the_unseal_is_told_again() -> None:
    leader = lead([*SEALED_CLUSTER, d.Unseal(LS1, E2, LLSN(4), NODES)])
    unseal = UnsealReplica(LS1, LEADER, E2, LLSN(4), NODES)
    assert leader.run(leader.report(N3, at(4, SEALED))) == [Send(N3, unseal)]
    assert leader.run(leader.report(N1, at(4, SEALED))) == []
    assert leader.run(leader.report(N2, at(4, epoch=2))) == []
    assert leader.run(leader.report(N3, at(4, epoch=2))) == [Send(N1, unseal)]


def test_who_is_outside_the_newest_epoch_is_told_so() -> None:
    """'A replica outside the newest epoch's list first truncates durably to its own committed LLSN'."""
    leader = lead([*SEALED_CLUSTER, d.Unseal(LS1, E2, LLSN(4), (N1, N2))])
    for state in (RUNNING, SEALING, SEALED):
        assert leader.run(leader.report(N3, at(4, state))) == [Send(N3, ExcludeReplica(LS1, LEADER, E2))]
    assert leader.run(leader.report(N3, at(4, SEALING, epoch=2))) == []


@pytest.mark.parametrize(
    "not_ready",
    [
        pytest.param(at(4, SEALING), id="sealing"),
        pytest.param(at(4, SEALED, committed=3), id="commits not on disk"),
        pytest.param(at(3, SEALING, committed=3), id="behind"),
        pytest.param(at(4, RUNNING), id="has not heard of the seal"),
        pytest.param(at(4, SEALED, epoch=0), id="sealed in another epoch"),
        pytest.param(at(4, LEARNING), id="learning"),
    ],
)
def test_only_who_is_sealed_exactly_at_the_end_joins_the_new_epoch(not_ready: UncommitReport) -> None:
    """'At L: SEALED.' The others get a short time, then the stream opens without them."""
    leader = meet(lead(SEALED_CLUSTER))
    leader.run(leader.report(N1, at(4, SEALED)))
    leader.run(leader.report(N2, at(4, SEALED)))
    leader.run(leader.report(N3, not_ready))
    assert opened(leader) == (1, ())
    leader.wake_after(499 * MILLISECOND)
    assert opened(leader) == (1, ())
    effects = leader.wake_after(MILLISECOND)
    assert opened(leader) == (2, (N1, N2))
    assert Send(N3, ExcludeReplica(LS1, LEADER, E2)) in effects


def test_a_new_leader_waits_for_the_others_to_speak() -> None:
    """The same under a leader to whom nobody has spoken yet: the first to report is not the only one alive, and one
    copy is not what the producers were promised."""
    leader = lead(SEALED_CLUSTER)
    for node in NODES:
        assert opened(leader) == (1, ())
        leader.run(leader.report(node, at(4, SEALED)))
    assert opened(leader) == (2, NODES)


def test_a_new_leader_does_not_wait_for_ever_for_the_others_to_speak() -> None:
    """'as soon as waiting for the others makes no sense': they get the time that anyone gets who is on his way."""
    leader = lead(SEALED_CLUSTER)
    leader.run(leader.report(N1, at(4, SEALED)))
    leader.wake_during(499 * MILLISECOND)
    assert opened(leader) == (1, ())
    leader.wake_after(MILLISECOND)
    assert opened(leader) == (2, (N1,))


def test_a_node_whose_disk_is_full_is_left_out() -> None:
    """Disk full: the node turns read-only for appends …, loses nothing."""
    leader = meet(lead(SEALED_CLUSTER))
    leader.run(leader.report(N3, at(4, SEALED), node_state=NodeState.READ_ONLY))
    leader.run(leader.report(N1, at(4, SEALED)))
    leader.run(leader.report(N2, at(4, SEALED)))
    assert opened(leader) == (2, (N1, N2))


def test_an_operators_seal_holds_until_it_is_lifted() -> None:
    leader = lead(CLUSTER)
    assert leader.answer(r.SealRequest(LS1)) == r.SealedAt(E1, LLSN(4), GLSN(4))
    for node in NODES:
        leader.run(leader.report(node, at(4, SEALED)))
    leader.wake_after(SECOND)
    assert opened(leader) == (1, ())
    assert leader.answer(r.UnsealRequest(LS1)) == r.Done()
    assert opened(leader) == (2, NODES)


def test_sealed_for_good_is_never_opened_again() -> None:
    """Sealed never grows."""
    leader = lead(CLUSTER)
    leader.answer(r.SealRequest(LS1, final=True))
    for _ in range(3):
        for node in NODES:
            leader.run(leader.report(node, at(4, SEALED)))
        leader.wake_after(SECOND)
    assert opened(leader) == (1, ())
    assert leader.state.streams[LS1].final


@pytest.mark.parametrize("cluster", [SEALED_CLUSTER, HELD_CLUSTER, FINAL_CLUSTER], ids=["sealed", "held", "for good"])
def test_a_replica_that_lacks_records_learns_however_the_stream_is_sealed(cluster: list[d.Decision]) -> None:
    """Replicas converge. A stream that is sealed for good needs its copies as much as any other."""
    leader = lead([*cluster, d.DropSurvivor(LS1, N3, "a test")])
    leader.run(leader.report(N3, at(2, SEALING, committed=2)))
    leader.run(leader.report(N1, at(4, SEALED)))
    effects = leader.run(leader.report(N3, at(2, SEALING, committed=2)))
    effects += leader.wake_after(20 * MILLISECOND)
    assert LearnFrom(LS1, LEADER, E1, N1) in [send.message for send in sends(effects, LearnFrom) if send.node == N3]


# New streams and new replicas.


def create_replica(stream: LogStreamId, start: int, report: int = 1) -> CreateReplica:
    return CreateReplica(stream, T1, GLSN(start), Incarnation(1), report)


def test_a_new_stream_starts_at_the_hwm_of_its_creation() -> None:
    """'A new log stream starts at the HWM of its creation (the command that creates a replica carries it).'"""
    leader = lead(CLUSTER)
    for node in NODES:
        leader.run(leader.report(node, at(5)))
    effects = leader.run(leader.ask(r.AddStreamRequest("orders")))
    _, create = stores(effects)
    assert isinstance(create, d.CreateStream)
    assert (create.stream, create.high_watermark, sorted(create.replicas)) == (LS2, 5, [1, 2, 3])
    # The topic has changed, too: members of its log streams hear of the newer catalog.
    news, orders = [], []
    for send in sends(effects):
        (news if isinstance(send.message, CommitMessage) else orders).append(send)
    assert orders == [Send(node, create_replica(LS2, 5)) for node in create.replicas]
    assert {(send.message.high_watermark, send.message.commits) for send in news} == {(5, ())}
    for node in create.replicas:
        fresh = ur(LS2, end=0, hwm=5, epoch=0, state=SEALING)
        assert sends(leader.run(leader.report(node, at(5), fresh)), SealReplica) == [
            Send(node, SealReplica(LS2, LEADER, E0, LLSN(0)))
        ]
    for node in create.replicas:
        leader.run(leader.report(node, at(5), ur(LS2, end=0, hwm=5, epoch=0, state=SEALED)))
    assert (leader.state.streams[LS2].epoch, leader.state.streams[LS2].members) == (1, create.replicas)


def test_a_lost_create_is_repeated() -> None:
    leader = lead([*CLUSTER, d.CreateStream(LS2, T1, NODES, GLSN(4), CutTime(START.wall))])
    assert leader.run(leader.report(N1, at(4))) == [Send(N1, create_replica(LS2, 4))]
    assert leader.run(leader.report(N1, at(4))) == [Send(N1, create_replica(LS2, 4, report=2))], "for who says so"


def test_a_new_replica_of_an_existing_stream_must_learn() -> None:
    """'A new replica of an existing stream reports (HWM 0, first LLSN 1, nothing) and is thereby known as one that
    must learn.'"""
    leader = lead(HELD_CLUSTER)
    for node in NODES:
        leader.run(leader.report(node, at(4, SEALED)))
    assert leader.answer(r.ReplaceRequest(LS1, N3, N4)) == r.Done()
    assert leader.state.streams[LS1].replicas == (N1, N2, N4, N3), "N3 stays until N4 has learned"
    assert sends(leader.run(leader.report(N4))) == [Send(N4, create_replica(LS1, 0))]
    effects = leader.run(leader.report(N4, ur(LS1, end=0, epoch=0, state=SEALING)))
    assert Send(N4, SealReplica(LS1, LEADER, E1, LLSN(4))) in effects
    effects = leader.run(leader.report(N4, ur(LS1, end=0, epoch=1, state=SEALING)))
    # Every complete replica may be the source, also the replaced one; the turn decides.
    assert LearnFrom(LS1, LEADER, E1, N3) in [send.message for send in sends(effects, LearnFrom)]
    leader.answer(r.UnsealRequest(LS1))
    leader.run(leader.report(N4, at(4, SEALED)))
    assert opened(leader) == (2, (N1, N2, N4))


def test_a_lost_trim_is_repeated_to_a_running_replica() -> None:
    """Trim is 'durable in the MR before any replica removes a segment; … a later read below it answers *trimmed*'.
    A lost message must not leave a replica, which may run for months, without it."""
    leader = lead([*CLUSTER, d.Trim(T1, GLSN(3))])
    effects = []
    for _ in range(5):
        for node in NODES:
            effects += leader.run(leader.report(node, at(4)))
        effects += leader.wake_after(SECOND // 2)
    assert leader.state.streams[LS1].is_open
    assert Send(N1, TrimReplica(LS1, GLSN(3))) in effects


@pytest.mark.parametrize("state", [RUNNING, SEALING, SEALED])
def test_a_trim_is_repeated_until_the_replica_says_that_it_has_it(state: ReplicaState) -> None:
    """The report tells how far the replica is trimmed, on disk; who has it is not told again."""
    decisions = CLUSTER if state is RUNNING else HELD_CLUSTER
    leader = lead([*decisions, d.Trim(T1, GLSN(3))])
    for trimmed, expected in ((1, [GLSN(3)]), (2, [GLSN(3)]), (3, []), (3, [])):
        report = leader.report(N1, ur(LS1, committed=4, end=4, hwm=4, state=state, trimmed=trimmed))
        assert [send.message.before for send in sends(leader.run(report), TrimReplica)] == expected  # type: ignore[union-attr]


def test_an_invalid_replica_is_told_to_trim() -> None:
    """What it cannot read may be what nobody has any more."""
    leader = lead([*HELD_CLUSTER, d.Trim(T1, GLSN(3))])
    assert sends(leader.run(leader.report(N1, invalid=(LS1,))), TrimReplica) == [Send(N1, TrimReplica(LS1, GLSN(3)))]


def test_a_replica_that_learns_is_not_told_to_trim() -> None:
    """It gets the trim position with what it learns."""
    leader = lead([*HELD_CLUSTER, d.Trim(T1, GLSN(3)), d.DropSurvivor(LS1, N3, "a test")])
    assert sends(leader.run(leader.report(N3, at(2, LEARNING, committed=2)))) == []


def test_a_stream_of_its_own_is_not_touched_by_the_seal_of_another() -> None:
    leader = lead(cluster_of({LS1: NODES, LS2: NODES, LS3: (N1, N2)}, cuts=[{LS1: 4}]))
    leader.run(leader.report(N3, at(4, SEALING), ur(LS2, end=0)))
    assert [s.is_open for s in leader.state.streams.values()] == [False, True, True]
