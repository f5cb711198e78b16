"""Reports, cuts and the store (docs/protocol.md), held against whole lists of effects."""

from __future__ import annotations

import pytest
from order_driver import (
    E1,
    LEADER,
    LS1,
    LS2,
    LS3,
    N1,
    N2,
    N3,
    N4,
    SEALED,
    SEALING,
    START,
    Leader,
    cluster_of,
    plain,
    sends,
    stores,
    ur,
)

from cutwater.core import requests as r
from cutwater.core.messages import CommitMessage, LeaderHello, SealReplica
from cutwater.core.order import decisions as d
from cutwater.core.order.cut import StreamCommit
from cutwater.core.order.events import Alarm, Compact, Reply, Send, StepDown, Store, Stored, StoreRefused, Wake
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.state import OrderState
from cutwater.errors import (
    ImpossibleReport,
    LeaderFenced,
    NotFound,
    NotLeader,
    OrderLayerLostMemory,
    ResourceExhausted,
    Unavailable,
)
from cutwater.types import (
    GLSN,
    LLSN,
    SECOND,
    CommitContext,
    CutTime,
    DecisionIndex,
    LogStreamId,
    Revision,
    StorageNodeId,
    UncommitReport,
)

NODES = (N1, N2, N3)
CLUSTER = cluster_of({LS1: (N1, N2, N3), LS2: (N2, N3, N1)}, cuts=[{LS1: 4, LS2: 6}], high_watermark=10)
LAST = DecisionIndex(len(CLUSTER))
REVISION = Revision(8)


@pytest.fixture
def leader() -> Leader:
    """At HWM 10: LS1 is committed to LLSN 4, LS2 to 6, both open in epoch 1 on three nodes."""
    return Leader(CLUSTER)


def ls1(more: int) -> UncommitReport:
    return ur(LS1, committed=4, end=4 + more, hwm=10)


def ls2(more: int) -> UncommitReport:
    return ur(LS2, committed=6, end=6 + more, hwm=10)


def context(first_llsn: int, first_glsn: int, count: int, *, hwm: int, prev: int, time: int) -> CommitContext:
    return CommitContext(E1, LLSN(first_llsn), GLSN(first_glsn), count, GLSN(hwm), GLSN(prev), CutTime(time))


def to_all(message: CommitMessage) -> list[Send]:
    """At once to the heads of what is committed, for which clients wait; a little later to the others."""
    heads = {{LS1: N1, LS2: N2}[commit.stream] for commit in message.commits}
    return [Send(node, message, may_wait=node not in heads) for node in NODES]


def everybody(leader: Leader, *reports: UncommitReport) -> list[object]:
    """All nodes say the same; what follows from the last of them, after nothing followed from the others."""
    assert [leader.run(leader.report(node, *reports)) for node in NODES[:-1]] == [[], []]
    return plain(leader.run(leader.report(NODES[-1], *reports)))


# The cut.


def test_the_worked_example(leader: Leader) -> None:
    """'HWM 10, LS1 reports 3,3,3 and LS2 reports 2,4,3 uncommitted → LS1 gets 11–13, LS2 gets 14–15, HWM 15.'"""
    assert leader.run(leader.report(N1, ls1(3), ls2(2))) == []
    assert leader.run(leader.report(N2, ls1(3), ls2(4))) == []
    commits = (
        StreamCommit(LS1, context(5, 11, 3, hwm=15, prev=10, time=START.wall)),
        StreamCommit(LS2, context(7, 14, 2, hwm=15, prev=10, time=START.wall)),
    )
    message = CommitMessage(GLSN(10), GLSN(15), REVISION, commits, ())
    assert leader.run(leader.report(N3, ls1(3), ls2(3))) == [
        Store(LEADER, LAST, (d.Cut(GLSN(15), GLSN(10), CutTime(START.wall), REVISION, commits),)),
        *to_all(message),
    ]


def test_a_node_where_someone_follows_hears_of_cuts_at_once(leader: Leader) -> None:
    for node in NODES[:-1]:
        assert leader.run(leader.report(node, ls1(1), ls2(0))) == []
    effects = leader.run(leader.report(N3, ls1(1), ls2(0), is_followed=True))
    assert [(send.node, send.may_wait) for send in sends(effects)] == [(N1, False), (N2, True), (N3, False)]


def test_what_is_stored_is_announced_before_the_turn_that_follows(leader: Leader) -> None:
    """Clients wait for heads, which therefore come first, whatever else the leader has to do."""
    *_, store = [leader.raw(leader.report(node, ls1(0), ls2(1))) for node in NODES][-1]
    assert isinstance(store, Store)
    assert leader.raw(leader.ask(r.DescribeRequest())) == []
    stored = Stored(DecisionIndex(store.after + 1))
    announced = leader.layer.take(stored, leader.now)
    assert [(send.node, send.may_wait) for send in sends(announced)] == [(N2, False), (N1, True), (N3, True)]
    assert len(sends(announced)) == len(announced)
    (following,) = leader.layer.turn(leader.now)
    assert isinstance(following, Store)


def test_a_report_from_which_nothing_follows_needs_no_turn(leader: Leader) -> None:
    everybody(leader, ls1(0), ls2(0))
    for node in NODES[:-1]:
        assert leader.layer.take(leader.report(node, ls1(1), ls2(0)), leader.now) == ()
        assert not leader.layer.has_news
    assert leader.layer.turn(leader.now) == []
    assert leader.layer.take(leader.report(NODES[-1], ls1(1), ls2(0)), leader.now) == ()
    assert leader.layer.has_news
    assert len(stores(leader.layer.turn(leader.now))) == 1


def test_a_report_from_which_something_follows_has_its_turn_also_when_others_share_it(leader: Leader) -> None:
    everybody(leader, ls1(0), ls2(0))
    leader.layer.take(leader.report(N1, ur(LS1, committed=4, end=4, hwm=10, state=SEALING), ls2(0)), leader.now)
    leader.layer.take(leader.report(N2, ls1(1), ls2(0)), leader.now)
    assert leader.layer.has_news
    (seal,) = stores(leader.layer.turn(leader.now))
    assert isinstance(seal, d.Seal)


def test_who_got_nothing_is_told_so(leader: Leader) -> None:
    """'a stream with nothing new never holds up the others': the commit message names the quiet streams."""
    *_, to_n3 = everybody(leader, ls1(1), ls2(0))
    commits = (StreamCommit(LS1, context(5, 11, 1, hwm=11, prev=10, time=START.wall)),)
    assert to_n3 == Send(N3, CommitMessage(GLSN(10), GLSN(11), REVISION, commits, (LS2,)), may_wait=True)


def test_nothing_is_cut_before_all_have_reported(leader: Leader) -> None:
    """'over *all* replicas of the current epoch, nothing if one has not reported.'"""
    assert leader.run(leader.report(N1, ls1(3), ls2(3))) == []
    assert leader.run(leader.report(N2, ls1(3), ls2(3))) == []
    leader.run(leader.report(N3, ls2(1)))
    assert (leader.state.streams[LS1].committed_end, leader.state.streams[LS2].committed_end) == (4, 7)


def test_empty_cuts_are_not_stored(leader: Leader) -> None:
    """'Empty cuts are not stored.'"""
    for _ in range(3):
        assert everybody(leader, ls1(0), ls2(0)) == []
    assert leader.run(Wake()) == []
    assert leader.state.index == LAST


# Which reports count.


def test_older_and_repeated_reports_are_ignored(leader: Leader) -> None:
    """'Only the newest report of the current epoch counts'."""
    assert leader.run(leader.report(N1, ls1(0), ls2(0), sequence=5)) == []
    assert leader.run(leader.report(N2, ls1(3), ls2(0))) == []
    assert leader.run(leader.report(N3, ls1(3), ls2(0))) == []
    assert leader.run(leader.report(N1, ls1(3), ls2(0), sequence=5)) == []
    assert leader.run(leader.report(N1, ls1(3), ls2(0), sequence=4)) == []
    assert stores(leader.run(leader.report(N1, ls1(3), ls2(0), sequence=6))) != []


def test_a_new_incarnation_voids_the_reports_of_the_earlier_ones(leader: Leader) -> None:
    """'a new incarnation void[s] all earlier ones'."""
    leader.run(leader.report(N1, ls1(3), ls2(0)))
    leader.run(leader.report(N1, ls2(0), incarnation=2))
    leader.run(leader.report(N2, ls1(3), ls2(0)))
    assert stores(leader.run(leader.report(N3, ls1(3), ls2(0)))) == []
    assert leader.run(leader.report(N1, ls1(3), ls2(0), incarnation=1, sequence=99)) == []
    assert leader.state.index == LAST


@pytest.mark.parametrize("spoken", [(N1,), (N1, N2), (N2, N3)])
def test_seal_and_unseal_void_what_was_said_before(leader: Leader, spoken: tuple[int, ...]) -> None:
    """'seal, unseal … void all earlier ones': all have to speak again in the new epoch."""
    for node in NODES:
        if node in spoken:
            leader.run(leader.report(node, ls1(3)))
    leader.answer(r.SealRequest(LS1))
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=10, state=SEALED)))
    leader.answer(r.UnsealRequest(LS1))
    assert (leader.state.streams[LS1].epoch, leader.state.streams[LS1].is_open) == (2, True)
    for node in NODES:
        assert leader.state.streams[LS1].committed_end == 4
        leader.run(leader.report(node, ur(LS1, committed=4, end=5, hwm=10, epoch=2)))
    assert leader.state.streams[LS1].committed_end == 5


def test_a_report_of_another_epoch_does_not_count(leader: Leader) -> None:
    """'Only the newest report of the current epoch counts'."""
    leader.run(leader.report(N3, ur(LS1, committed=4, end=7, hwm=10, epoch=0, state=SEALED)))
    leader.run(leader.report(N1, ls1(3)))
    leader.run(leader.report(N2, ls1(3)))
    assert leader.state.streams[LS1].committed_end == 4


def test_a_replica_that_is_sealing_gets_its_stream_sealed(leader: Leader) -> None:
    """'A replica that says SEALING while its stream is open gets the stream sealed.' The others go on."""
    effects = leader.run(leader.report(N2, ur(LS1, committed=4, end=6, hwm=10, state=SEALING), ls2(0)))
    why = "the replica on storage node 2 stopped: it was restarted, or a write or a link failed there"
    assert plain(effects) == [
        Store(LEADER, LAST, (d.Seal(LS1, E1, LLSN(4), (N1, N2, N3), why, at=CutTime(START.wall)),)),
        *[Send(node, SealReplica(LS1, LEADER, E1, LLSN(4))) for node in NODES],
    ]
    assert leader.state.streams[LS2].is_open


def test_a_durable_end_that_shrank_is_an_alarm(leader: Leader) -> None:
    """'A durable end that shrinks below what was committed is an alarm: that replica is quarantined … never
    believed.' The stream is sealed without it as a survivor; another stream is cut in the same write."""
    for node in (N1, N2):
        leader.run(leader.report(node, ls1(2), ls2(1)))
    effects = leader.run(leader.report(N3, ur(LS1, committed=2, end=3, hwm=5), ls2(1)))
    assert (Alarm, ImpossibleReport) in plain(effects)
    cut, seal = stores(effects)
    assert isinstance(cut, d.Cut)
    assert [commit.stream for commit in cut.commits] == [LS2]
    assert isinstance(seal, d.Seal)
    assert (seal.stream, seal.sealed_at, seal.survivors) == (LS1, 4, (N1, N2))
    assert sends(effects, SealReplica) == [Send(node, SealReplica(LS1, LEADER, E1, LLSN(4))) for node in NODES]


def test_an_alarm_waits_for_the_store(leader: Leader) -> None:
    """'Held until the store has confirmed that this leader leads: what alarms a deposed one is mostly its own past.'"""
    (store,) = leader.raw(leader.report(N3, ur(LS1, committed=2, end=3, hwm=5), ls2(0)))
    assert isinstance(store, Store)
    assert leader.raw(Wake()) == []
    assert (Alarm, ImpossibleReport) in plain(leader.confirm(store))


IMPOSSIBLE = [
    pytest.param(ur(LS1, committed=2, end=3, hwm=5), ImpossibleReport, id="a replica that lost records"),
    pytest.param(ur(LS1, committed=4, end=4, hwm=11), OrderLayerLostMemory, id="a replica that knows more"),
]


@pytest.mark.parametrize(("impossible", "alarm"), IMPOSSIBLE)
def test_an_alarm_does_not_leave_with_a_write_that_was_under_way_before(
    leader: Leader, impossible: UncommitReport, alarm: type
) -> None:
    """The store has confirmed that this leader led when the write began; whether it does now, only the next one says,
    which is empty if there is nothing else to write."""
    (first,) = leader.raw(leader.ask(r.AddNodeRequest(N4)))
    assert isinstance(first, Store)
    assert leader.raw(leader.report(N3, impossible, ls2(0))) == []
    reply, second = leader.confirm(first)
    assert reply == Reply(1, r.Done())
    assert isinstance(second, Store)
    assert second.after == LAST + 1
    assert [type(x) for x in second.decisions] == ([d.Seal] if alarm is ImpossibleReport else [])
    assert (Alarm, alarm) in plain(leader.confirm(second))


@pytest.mark.parametrize(("impossible", "alarm"), IMPOSSIBLE)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "while a write is in flight"])
def test_a_deposed_leader_raises_no_alarm(leader: Leader, impossible: UncommitReport, alarm: type, busy: bool) -> None:
    """'a deposed one is alarmed by its own past'."""
    if busy:
        leader.raw(leader.ask(r.AddNodeRequest(N4)))
    leader.raw(leader.report(N3, impossible, ls2(0)))
    effects = plain(leader.raw(StoreRefused("epoch 8 leads")))
    assert effects[0] == StepDown("epoch 8 leads")
    assert (Alarm, alarm) not in effects


def test_a_node_that_knows_a_later_leader_is_reason_to_ask_the_store(leader: Leader) -> None:
    """'fenced by the leader's epoch'. Mostly this leader has been deposed and steps down in silence; if it has
    not, the store has lost an epoch that it gave out."""
    hello, store = leader.raw(leader.report(N1, ls1(1), ls2(1), leader_epoch=LEADER + 1))
    assert hello == Send(N1, LeaderHello(LEADER))
    assert store == Store(LEADER, LAST, ())
    assert isinstance(store, Store)
    assert plain(leader.confirm(store)) == [(Alarm, OrderLayerLostMemory)]
    for node in NODES:
        assert leader.run(leader.report(node, ls1(1), ls2(1))) == []


def test_the_alarm_is_raised_once_however_long_the_store_takes(leader: Leader) -> None:
    """Memory and queues are bounded. A node reports many times a second; a store may stand still for an hour."""
    bad = ur(LS1, committed=2, end=3, hwm=5)
    (first,) = leader.raw(leader.ask(r.AddNodeRequest(N4)))
    assert isinstance(first, Store)
    for _ in range(10):
        assert leader.raw(leader.report(N3, bad, ls2(0))) == []
    *_, second = leader.confirm(first)
    assert isinstance(second, Store)
    assert plain(leader.confirm(second)).count((Alarm, ImpossibleReport)) == 1


def test_the_alarm_is_raised_once(leader: Leader) -> None:
    bad = ur(LS1, committed=2, end=3, hwm=5)
    assert (Alarm, ImpossibleReport) in plain(leader.run(leader.report(N3, bad)))
    assert (Alarm, ImpossibleReport) not in plain(leader.run(leader.report(N3, bad)))


def test_a_member_that_comes_back_with_nothing_is_quarantined(leader: Leader) -> None:
    """The same sentence for a replica that has forgotten its epoch too: it counts for nothing, so it is no survivor."""
    effects = leader.run(leader.report(N3, ur(LS1, end=0, epoch=0, state=SEALING), ls2(0), incarnation=2))
    assert (Alarm, ImpossibleReport) in plain(effects)
    assert leader.state.streams[LS1].members == (N1, N2)


@pytest.mark.parametrize(
    "impossible",
    [
        pytest.param(ur(LS1, committed=4, end=4, hwm=11), id="a high watermark above the own one"),
        pytest.param(ur(LS3, end=0, epoch=0, state=SEALING), id="a stream that was never created"),
        pytest.param(ur(LS1, committed=4, end=4, hwm=10, epoch=2), id="an epoch that was never opened"),
        pytest.param(ur(LS1, committed=4, end=4, hwm=10, state=SEALED), id="sealed, but never told so"),
        pytest.param(ur(LS1, committed=5, end=5, hwm=10), id="a commit that was never made"),
    ],
)
def test_a_replica_that_knows_more_stops_all_cuts(leader: Leader, impossible: UncommitReport) -> None:
    """'A report with an HWM above the order layer's own stops all cuts (the order layer lost its memory).' The store is
    asked first whether this leader still leads: a deposed one has every reason to know less."""
    effects = leader.run(leader.report(N1, impossible, ls2(1)))
    assert effects[0] == Store(LEADER, LAST, ())
    assert [e for e in plain(effects) if not isinstance(e, Store)] == [(Alarm, OrderLayerLostMemory)]
    for node in (N2, N3):
        assert leader.run(leader.report(node, ls1(1), ls2(1))) == []
    assert stores(leader.wake_after(60 * SECOND)) == []
    assert (leader.state.index, leader.state.high_watermark) == (LAST, 10)


def test_a_node_that_heard_of_a_later_cut_stops_all_cuts(leader: Leader) -> None:
    """The same for the node's own word on the last cut, which may have been a tick that no replica stores."""
    effects = leader.run(leader.report(N1, ls1(0), ls2(0), applied=11))
    assert (Alarm, OrderLayerLostMemory) in plain(effects)


def test_a_deposed_leader_that_knows_less_steps_down_without_an_alarm(leader: Leader) -> None:
    (store,) = leader.raw(leader.report(N1, ur(LS1, committed=4, end=4, hwm=11)))
    assert store == Store(LEADER, LAST, ())
    assert leader.raw(StoreRefused("epoch 8 leads")) == [StepDown("epoch 8 leads")]


def test_a_report_that_does_not_name_this_leader_is_not_believed(leader: Leader) -> None:
    """It may have been on its way since before decisions that this leader knows: 'only the newest' counts."""
    for node in NODES:
        effects = leader.run(leader.report(node, ls1(3), ls2(3), leader_epoch=LEADER - 1))
        assert effects == [Send(node, LeaderHello(LEADER))]
    stale = leader.report(N1, ur(LS1, committed=2, end=2, hwm=5), ls2(0), leader_epoch=LEADER - 1)
    assert leader.run(stale) == [Send(N1, LeaderHello(LEADER))]
    assert leader.state.index == LAST


def test_a_halted_leader_does_not_let_anyone_wait(leader: Leader) -> None:
    """Errors 'say what to do'. A request that can never be carried out is answered."""
    leader.run(leader.report(N1, ur(LS1, committed=4, end=4, hwm=11)))
    effects = leader.run(leader.ask(r.CreateTopicRequest("other", 1, 1)))
    effects += leader.wake_after(SECOND)
    assert (Reply, 1, OrderLayerLostMemory) in plain(effects)


# One write at a time.


def test_nothing_leaves_while_a_write_is_in_flight(leader: Leader) -> None:
    """'each stored durably … before anyone learns of it. One store write is in flight at a time; reports that arrive
    meanwhile go into the next cut'."""
    for node in (N1, N2):
        leader.raw(leader.report(node, ls1(1), ls2(0)))
    (first,) = leader.raw(leader.report(N3, ls1(1), ls2(0)))
    assert isinstance(first, Store)
    for node in NODES:
        assert leader.raw(leader.report(node, ls1(3), ls2(2))) == []
    assert leader.raw(leader.ask(r.CatalogRequest())) == []
    assert leader.raw(leader.ask(r.TrimRequest("nowhere", GLSN(1)))) == []
    leader.pass_time(SECOND // 2)
    assert leader.raw(Wake()) == []

    one = (StreamCommit(LS1, context(5, 11, 1, hwm=11, prev=10, time=START.wall)),)
    half_past = START.wall + SECOND // 2
    two = (
        StreamCommit(LS1, context(6, 12, 2, hwm=15, prev=11, time=half_past)),
        StreamCommit(LS2, context(7, 14, 2, hwm=15, prev=11, time=half_past)),
    )
    assert leader.confirm(first) == [
        *to_all(CommitMessage(GLSN(10), GLSN(11), REVISION, one, (LS2,))),
        Store(LEADER, DecisionIndex(LAST + 1), (d.Cut(GLSN(15), GLSN(11), CutTime(half_past), REVISION, two),)),
    ]
    effects = plain(leader.raw(Stored(DecisionIndex(LAST + 2))))
    assert effects[:3] == to_all(CommitMessage(GLSN(11), GLSN(15), REVISION, two, ()))
    catalog, refusal = effects[3:]
    assert isinstance(catalog, Reply)
    assert isinstance(catalog.outcome, r.Catalog)
    assert catalog.outcome.high_watermark == 15
    assert refusal == (Reply, 2, NotFound)


def test_a_write_carries_all_that_is_due_and_the_cut_comes_first(leader: Leader) -> None:
    """'Cuts, seals, unseals and catalog changes are one sequence of decisions'; seal 'makes one last cut'."""
    everybody(leader, ls1(0), ls2(0))
    (first,) = leader.raw(leader.ask(r.AddNodeRequest(N4)))
    assert isinstance(first, Store)
    for node in NODES:
        leader.raw(leader.report(node, ls1(2), ls2(0)))
    leader.raw(leader.ask(r.SealRequest(LS1)))
    leader.raw(leader.report(N1, ls1(2), ur(LS2, committed=6, end=6, hwm=10, state=SEALING)))
    *_, second = leader.confirm(first)
    assert isinstance(second, Store)
    assert second.after == LAST + 1
    assert [(type(x), getattr(x, "stream", None), getattr(x, "sealed_at", None)) for x in second.decisions] == [
        (d.Cut, None, None),
        (d.Seal, LS1, 6),
        (d.Seal, LS2, 6),
    ]


def test_a_refused_write_ends_the_leader(leader: Leader) -> None:
    """'fenced by the leader's epoch': whoever is refused steps down and does nothing more."""
    (store,) = leader.raw(leader.ask(r.AddNodeRequest(N4)))
    assert isinstance(store, Store)
    assert leader.raw(leader.ask(r.CatalogRequest())) == []
    assert plain(leader.raw(StoreRefused("epoch 8 leads"))) == [
        StepDown("epoch 8 leads"),
        (Reply, 2, NotLeader),
        (Reply, 1, Unavailable),
    ]
    for event in (Wake(), leader.report(N1, ls1(1)), leader.ask(r.CatalogRequest()), Stored(LAST)):
        with pytest.raises(LeaderFenced):
            leader.raw(event)


def test_a_store_that_is_elsewhere_is_an_alarm(leader: Leader) -> None:
    leader.raw(leader.ask(r.AddNodeRequest(N4)))
    with pytest.raises(OrderLayerLostMemory):
        leader.raw(Stored(LAST))


def test_waiting_requests_are_bounded() -> None:
    """Memory and queues are bounded; the excess is told at once, also while a write is in flight."""
    leader = Leader(CLUSTER, options=OrderOptions(requests_max=3, requests_per_turn_max=2))
    (store,) = leader.raw(leader.ask(r.AddNodeRequest(N4)))
    assert isinstance(store, Store)
    for _ in range(3):
        assert leader.raw(leader.ask(r.CatalogRequest())) == []
    assert plain(leader.raw(leader.ask(r.CatalogRequest()))) == [(Reply, 5, ResourceExhausted)]
    effects = leader.confirm(store)
    while isinstance(effects[-1], Store):
        effects = effects[:-1] + leader.confirm(effects[-1])
    assert [e.request_id for e in effects if isinstance(e, Reply)] == [1, 2, 3, 4]


def test_the_store_is_compacted_also_under_load() -> None:
    """Periodic compaction. A leader that always has something to write must come to it as well."""
    leader = Leader(CLUSTER, options=OrderOptions(compact_every_decisions=4))
    for node in NODES:
        effects = leader.raw(leader.report(node, ls1(1), ls2(0)))
    seen: list[object] = []
    for end in range(2, 20):
        assert isinstance(effects[-1], Store)
        in_flight = effects[-1]
        for node in NODES:
            leader.raw(leader.report(node, ls1(end), ls2(0)))
        effects = leader.confirm(in_flight)
        compacted = [e for e in effects if isinstance(e, Compact)]
        seen += compacted
        for compact in compacted:
            assert compact.snapshot.index == in_flight.after + len(in_flight.decisions), "only what is stored"
            assert effects.index(compact) < len(effects) - 1, "before the next write"
            assert OrderState(compact.snapshot).streams == OrderState(None, leader.stored).streams
    assert len(seen) >= 3


def test_the_store_is_compacted_also_while_nothing_is_due() -> None:
    leader = Leader(CLUSTER, options=OrderOptions(compact_every_decisions=4))
    for node in range(10, 14):
        effects = leader.run(leader.ask(r.AddNodeRequest(StorageNodeId(node))))
    (compact,) = [e for e in effects if isinstance(e, Compact)]
    assert compact.snapshot == leader.state.snapshot()
    assert [e for e in leader.run(Wake()) if isinstance(e, Compact)] == [], "once"


def test_a_cut_carries_the_revision_it_was_made_under(leader: Leader) -> None:
    """Every cut carries the catalog revision it was made under; a change in the same write comes after it."""
    everybody(leader, ls1(0), ls2(0))
    (store,) = leader.raw(leader.ask(r.AddStreamRequest("orders")))
    assert isinstance(store, Store)
    for node in NODES:
        leader.raw(leader.report(node, ls1(1), ls2(0)))
    leader.raw(leader.ask(r.AddStreamRequest("orders")))
    *_, second = leader.confirm(store)
    assert isinstance(second, Store)
    cut, _, create = second.decisions
    assert isinstance(cut, d.Cut)
    assert cut.revision == REVISION + 2
    assert isinstance(create, d.CreateStream)
    assert (create.stream, create.high_watermark) == (LogStreamId(4), cut.high_watermark)
    assert leader.state.revision == REVISION + 4
