"""A leader that has just begun answers clients only when a replica of every open stream has reported nothing newer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from order_driver import LEARNING, LS1, LS2, N1, N2, N3, RUNNING, SEALING, Leader, cluster_of, stores, ur

from cutwater.core import requests as r
from cutwater.core.order import decisions as d
from cutwater.core.order.events import NodeGone, Reply, Store, StoreRefused, Wake
from cutwater.core.order.options import OrderOptions
from cutwater.errors import NotLeader, OrderLayerLostMemory, ResourceExhausted, Unavailable
from cutwater.types import GLSN, MILLISECOND, SECOND, ReplicaState, RunId, StorageNodeId

NODES = (N1, N2, N3)
STALE = cluster_of({LS1: (N1,), LS2: (N2,)}, cuts=[{LS1: 2, LS2: 3}, {LS1: 1}])
"""LS1 is committed to 3, LS2 to 3, the high watermark is 6."""
CURRENT = (ur(LS1, committed=3, end=3, hwm=6), ur(LS2, committed=3, end=3, hwm=5))
HELD = [
    pytest.param(r.CatalogRequest(), id="tail and catalog"),
    pytest.param(r.ReadCursorRequest("c"), id="cursor"),
    pytest.param(r.ClockRequest(GLSN(0)), id="clock"),
    pytest.param(r.CommitCursorRequest("c", GLSN(1)), id="commit of a cursor"),
    pytest.param(r.CreateTopicRequest("other", 1, 1), id="new topic"),
    pytest.param(r.StagedRequest(N1, ()), id="which staged parts may go"),
    pytest.param(r.DropRunRequest(RunId(1)), id="drop a run"),
    pytest.param(r.SealRequest(LS1), id="seal"),
    pytest.param(r.UnsealRequest(LS1), id="unseal"),
    pytest.param(r.ReplaceRequest(LS1, N1, N3), id="replace"),
    pytest.param(r.RemoveNodeRequest(N3), id="remove a node"),
]


def begun(**options: int) -> Leader:
    return Leader(STALE, is_new=True, options=OrderOptions(**options))


def both(leader: Leader) -> list:
    return leader.run(leader.report(N1, CURRENT[0])) + leader.run(leader.report(N2, CURRENT[1]))


def replies(effects: list) -> list[Reply]:
    return [effect for effect in effects if isinstance(effect, Reply)]


def outcomes(effects: list) -> list[object]:
    return [effect.outcome for effect in replies(effects)]


@pytest.mark.parametrize("request_", HELD)
def test_a_request_waits_for_a_report_of_every_open_stream(request_: r.Request) -> None:
    leader = begun()
    assert replies(leader.run(leader.ask(request_))) == []
    assert replies(leader.run(leader.report(N1, CURRENT[0]))) == []
    assert len(replies(leader.run(leader.report(N2, CURRENT[1])))) == 1


@pytest.mark.parametrize("request_", HELD)
def test_what_a_replica_knows_more_is_found_before_anybody_is_told(request_: r.Request) -> None:
    """The store was rolled back: what is asked meanwhile is refused, and never answered with the past."""
    leader = begun()
    leader.run(leader.ask(request_))
    effects = leader.run(leader.report(N1, ur(LS1, committed=4, end=4, hwm=7)))
    effects += leader.run(leader.ask(request_))
    assert [type(outcome) for outcome in outcomes(effects)] == [OrderLayerLostMemory] * 2


def test_the_catalog_is_answered_with_the_reports() -> None:
    leader = begun()
    assert outcomes(leader.run(leader.ask(r.CatalogRequest()))) == []
    (catalog,) = outcomes(both(leader))
    assert isinstance(catalog, r.Catalog)
    assert catalog.high_watermark == 6
    (again,) = outcomes(leader.run(leader.ask(r.CatalogRequest())))
    assert isinstance(again, r.Catalog)


def test_waiting_is_bounded_and_the_error_names_what_is_missing() -> None:
    leader = begun(first_reports_wait_us=300 * MILLISECOND)
    leader.run(leader.report(N1, CURRENT[0]))
    assert replies(leader.run(leader.ask(r.CatalogRequest()))) == []
    assert replies(leader.wake_after(299 * MILLISECOND)) == []
    (error,) = outcomes(leader.wake_after(2 * MILLISECOND))
    assert isinstance(error, Unavailable)
    assert error.retriable
    assert "no replica of log stream 2 has reported" in error.message


def test_a_request_that_is_overdue_when_the_last_report_came_is_answered() -> None:
    """The report came while a write was in flight, and so did the wake: nothing is missing that could be named."""
    leader = begun(first_reports_wait_us=300 * MILLISECOND)
    leader.run(leader.ask(r.CatalogRequest()))
    store = leader.raw(leader.ask(r.DescribeRequest()))[-1]
    assert isinstance(store, Store)
    for node, report in zip((N1, N2), CURRENT, strict=True):
        leader.raw(leader.report(node, report))
    leader.pass_time(SECOND)
    leader.raw(Wake())
    effects = leader.confirm(store)
    while isinstance(effects[-1], Store):
        effects = effects[:-1] + leader.confirm(effects[-1])
    assert any(isinstance(outcome, r.Catalog) for outcome in outcomes(effects))


def test_no_more_wait_than_fit() -> None:
    leader = begun(requests_max=3)
    for _ in range(3):
        assert replies(leader.run(leader.ask(r.CatalogRequest()))) == []
    (error,) = outcomes(leader.run(leader.ask(r.CatalogRequest())))
    assert isinstance(error, ResourceExhausted)


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(ur(LS2, end=0, epoch=0, state=LEARNING), id="one that learns"),
        pytest.param(None, id="none at all"),
    ],
)
def test_a_replica_that_may_know_less_does_not_count(report) -> None:
    leader = Leader(cluster_of({LS1: (N1, N2), LS2: (N1, N2)}, cuts=[{LS1: 3, LS2: 3}], nodes=NODES), is_new=True)
    leader.run(leader.ask(r.CatalogRequest()))
    found = ur(LS1, committed=3, end=3, hwm=6)
    effects = leader.run(leader.report(N1, *(ur for ur in (found, report) if ur is not None)))
    # A member that learns gets its stream sealed, which ends the wait after it is stored.
    if report is None:
        assert replies(effects) == []
    # A node that is no member of a stream says nothing of it.
    leader = Leader(cluster_of({LS1: (N1, N2)}, nodes=NODES), is_new=True)
    leader.run(leader.ask(r.CatalogRequest()))
    assert replies(leader.run(leader.report(N3, ur(LS1, end=0, epoch=0, state=SEALING)))) == []


def test_a_stream_that_is_sealed_without_its_nodes_does_not_hold_others_up() -> None:
    """All nodes of LS2 are dead: the leader seals it, and clients of LS1 go on."""
    decisions = cluster_of({LS1: (N1,), LS2: (N2,)}, cuts=[{LS1: 3, LS2: 3}])
    leader = Leader(decisions, is_new=True)
    leader.run(leader.report(N1, ur(LS1, committed=3, end=3, hwm=6)))
    leader.run(leader.ask(r.CatalogRequest()))
    answered = []
    for _ in range(30):
        leader.run(leader.report(N1, ur(LS1, committed=3, end=3, hwm=6)))
        answered += outcomes(leader.wake_after(100 * MILLISECOND))
    (catalog,) = answered
    assert isinstance(catalog, (r.Catalog, Unavailable))
    (catalog,) = outcomes(leader.run(leader.ask(r.CatalogRequest())))
    assert isinstance(catalog, r.Catalog)
    assert [stream.is_open for stream in catalog.streams] == [True, False]


def test_operators_see_what_the_leader_waits_for() -> None:
    leader = begun()
    (description,) = outcomes(leader.run(leader.ask(r.DescribeRequest())))
    assert isinstance(description, r.Description)
    assert description.unheard == (LS1, LS2)
    assert len(outcomes(leader.run(leader.ask(r.EventsRequest())))) == 1
    both(leader)
    (description,) = outcomes(leader.run(leader.ask(r.DescribeRequest())))
    assert isinstance(description, r.Description)
    assert description.unheard == ()


def test_no_position_is_given_out_before() -> None:
    """A tick takes a GLSN, which a rolled-back store may have given out before."""
    leader = begun()
    leader.run(leader.report(N1, CURRENT[0]))
    high_watermark = leader.state.high_watermark
    effects = leader.wake_after(SECOND + MILLISECOND)
    assert not any(isinstance(effect, Store) and effect.decisions for effect in effects)
    assert leader.state.high_watermark == high_watermark
    both(leader)
    leader.wake_after(MILLISECOND)
    assert leader.state.high_watermark == high_watermark + 1


ROLLED_BACK = cluster_of({LS1: (N1,), LS2: (N2,)}, cuts=[{LS1: 2, LS2: 3}, {LS1: 1}, {LS2: 2}])
"""What the store of STALE had decided besides: GLSN 7 and 8 belong to LS2."""


@pytest.mark.parametrize("state", [SEALING, RUNNING])
def test_nothing_is_decided_before_the_halt_and_the_newest_store_goes_on(state: ReplicaState) -> None:
    """A cut, a seal or an unseal of LS1, which has a tail, would be one that the newest store knows nothing of."""
    first, second = ur(LS1, committed=3, end=5, hwm=6, state=state), ur(LS2, committed=5, end=5, hwm=8, state=SEALING)
    leader = begun()
    effects = leader.run(leader.report(N1, first))
    for _ in range(3):
        effects += leader.wake_after(20 * MILLISECOND)
    effects += leader.run(leader.report(N2, second, applied=0))
    assert leader.layer.halted is not None
    assert stores(effects) == []
    newest = Leader(ROLLED_BACK, is_new=True)
    newest.run(newest.report(N1, first, applied=0))
    newest.run(newest.report(N2, second, applied=0))
    assert newest.layer.halted is None
    assert newest.state.high_watermark == 10


def test_what_moved_meanwhile_is_cut_with_the_last_report() -> None:
    leader = begun()
    assert stores(leader.run(leader.report(N1, ur(LS1, committed=3, end=5, hwm=6)))) == []
    cut, *_ = stores(leader.run(leader.report(N2, CURRENT[1])))
    assert isinstance(cut, d.Cut)
    assert [(commit.stream, commit.context.last_llsn) for commit in cut.commits] == [(LS1, 5)]
    assert cut.high_watermark == 8


def test_what_is_to_be_repaired_is_repaired_after_the_last_report() -> None:
    leader = begun()
    assert stores(leader.run(leader.report(N1, ur(LS1, committed=3, end=3, hwm=6, state=SEALING)))) == []
    (seal,) = stores(leader.run(leader.report(N2, CURRENT[1])))
    assert isinstance(seal, d.Seal)
    assert seal.stream == LS1


def test_one_member_of_a_stream_is_enough() -> None:
    """A dead one does not hold the others up."""
    leader = Leader(cluster_of({LS1: (N1, N2), LS2: (N3, N2)}, cuts=[{LS1: 3, LS2: 3}]), is_new=True)
    leader.run(leader.report(N1, ur(LS1, committed=3, end=3, hwm=6)))
    leader.run(leader.report(N3, ur(LS2, committed=3, end=3, hwm=6)))
    assert not leader.layer.first_reports.are_missing


@pytest.mark.parametrize("damaged", [N1, N2])
def test_a_stream_is_sealed_unheard_only_if_no_member_can_tell(damaged: StorageNodeId) -> None:
    """One member has lost its data and the other has yet to speak: it may know of later decisions."""
    leader = Leader(cluster_of({LS1: (N1, N2)}, cuts=[{LS1: 3}]), is_new=True)
    other = N2 if damaged is N1 else N1
    assert stores(leader.run(leader.report(damaged, invalid=(LS1,)))) == []
    leader.run(leader.report(other, ur(LS1, committed=4, end=4, hwm=4), applied=0))
    assert leader.layer.halted is not None
    alone = Leader(cluster_of({LS1: (N1, N2)}, cuts=[{LS1: 3}]), is_new=True)
    alone.run(alone.report(damaged, invalid=(LS1,)))
    effects = alone.run(NodeGone(other))
    assert [type(decision) for decision in stores(effects)][:1] == [d.Seal]
    assert not alone.layer.first_reports.are_missing


def test_a_replica_that_has_lost_entries_does_not_vouch_for_the_store() -> None:
    leader = Leader(cluster_of({LS1: (N1, N2)}, cuts=[{LS1: 3}]), is_new=True)
    leader.run(leader.report(N1, ur(LS1, committed=1, end=1, hwm=1)))
    assert leader.layer.first_reports.missing == (LS1,)


def test_no_group_is_published_before() -> None:
    calls = []
    leader = begun()
    leader.layer.publisher = SimpleNamespace(
        is_busy=True,
        messages=lambda *_: calls.append("messages") or [],
        decide=lambda *_: calls.append("decide") or [],
        take_overdue=lambda now: [],
        take_ready=lambda decision: [],
    )
    leader.run(leader.report(N1, CURRENT[0]))
    leader.wake_after(20 * MILLISECOND)
    assert calls == []
    leader.run(leader.report(N2, CURRENT[1]))
    leader.wake_after(20 * MILLISECOND)
    assert set(calls) == {"messages", "decide"}


def test_who_waits_is_told_when_the_leader_is_deposed() -> None:
    leader = begun()
    leader.run(leader.ask(r.CatalogRequest()))
    assert [type(outcome) for outcome in outcomes(leader.raw(StoreRefused("another one leads")))] == [NotLeader]


def test_an_empty_cluster_answers_at_once() -> None:
    leader = Leader(is_new=True)
    (catalog,) = outcomes(leader.run(leader.ask(r.CatalogRequest())))
    assert isinstance(catalog, r.Catalog)
