"""Cut time and ticks (docs/protocol.md)."""

from __future__ import annotations

import pytest
from order_driver import (
    LAST_CUT_TIME,
    LEADER,
    LS1,
    LS2,
    N1,
    N2,
    N3,
    SEALED,
    SEALING,
    START,
    Leader,
    cluster_of,
    sends,
    stores,
    ur,
)

from cutwater.core import requests as r
from cutwater.core.messages import CommitMessage
from cutwater.core.order import decisions as d
from cutwater.core.order.events import OrderEffect, Send, Store, Wake
from cutwater.core.order.options import OrderOptions
from cutwater.types import GLSN, MILLISECOND, SECOND, CutTime, DecisionIndex, Instant, Revision

NODES = (N1, N2, N3)
CLUSTER = cluster_of({LS1: NODES}, cuts=[{LS1: 4}], high_watermark=10)
LAST = DecisionIndex(len(CLUSTER))
REVISION = Revision(6)
PATIENT = OrderOptions(node_dead_after_us=10**12)
"""Nobody is declared dead, so that silence is silence of producers only."""


def ticks_within(leader: Leader, seconds: int, step_ms: int = 100) -> list[float]:
    """After how many seconds from the start ticks came; nothing else is decided."""
    found = []
    for _ in range(seconds * 1_000 // step_ms):
        for decision in stores(leader.wake_after(step_ms * MILLISECOND)):
            assert isinstance(decision, d.Cut)
            assert decision.is_tick
            found.append((leader.now.monotonic - START.monotonic) / SECOND)
    return found


def cut_one(leader: Leader, end: int) -> d.Cut:
    """Every replica has the record at LLSN ``end``: the cut that follows."""
    effects: list[OrderEffect] = []
    for node in NODES:
        effects += leader.run(leader.report(node, ur(LS1, committed=4, end=end, hwm=10)))
    (cut,) = stores(effects)
    assert isinstance(cut, d.Cut)
    return cut


def test_a_tick_is_a_cut_without_records_that_takes_one_glsn() -> None:
    """'while nothing is appended the MR makes *ticks*, cuts without records that take one GLSN of their own'."""
    leader = Leader(CLUSTER, options=PATIENT)
    time = CutTime(START.wall + SECOND)
    tick = d.Cut(GLSN(11), GLSN(10), time, REVISION, ())
    assert leader.wake_after(SECOND) == [
        Store(LEADER, LAST, (tick,)),
        *[Send(node, CommitMessage(GLSN(10), GLSN(11), REVISION, (), (LS1,)), may_wait=True) for node in NODES],
    ]
    assert (leader.state.high_watermark, leader.state.cut_time) == (11, time)


def test_ticks_come_after_1_2_4_and_at_most_30_seconds_of_silence() -> None:
    """'after 1, 2, 4 … at most 30 s of silence'."""
    ticks = ticks_within(Leader(CLUSTER, options=PATIENT), 125)
    gaps = [b - a for a, b in zip([0.0, *ticks], ticks, strict=False)]
    assert gaps == [1, 2, 4, 8, 16, 30, 30, 30]


def test_an_append_makes_the_ticks_frequent_again() -> None:
    leader = Leader(CLUSTER, options=PATIENT)
    assert ticks_within(leader, 10) == [1, 3, 7]
    assert not cut_one(leader, 5).is_tick
    assert ticks_within(leader, 4) == [11, 13]


def test_there_is_no_tick_while_records_come() -> None:
    leader = Leader(CLUSTER, options=PATIENT)
    for end in range(5, 15):
        leader.pass_time(900 * MILLISECOND)
        assert not cut_one(leader, end).is_tick
        assert leader.run(Wake()) == []


def test_requests_are_no_appends() -> None:
    """'while nothing is appended the MR makes ticks', also when it has other things to decide all the time."""
    leader = Leader(CLUSTER, options=PATIENT)
    ticks = []
    (store,) = leader.raw(leader.ask(r.CommitCursorRequest("busy", GLSN(1))))
    for _ in range(35):
        leader.pass_time(100 * MILLISECOND)
        leader.raw(leader.ask(r.CommitCursorRequest("busy", GLSN(1))))
        assert isinstance(store, Store)
        *_, store = leader.confirm(store)
        assert isinstance(store, Store)
        if isinstance(store.decisions[0], d.Cut):
            ticks.append((leader.now.monotonic - START.monotonic) / SECOND)
        assert [type(x) for x in store.decisions if not isinstance(x, d.Cut)] == [d.CommitCursor]
    assert ticks == [1, 3]


def test_a_tick_is_decided_before_requests_of_the_same_write() -> None:
    """As any cut: a stream that is created in the same write starts above the tick, at a later time."""
    leader = Leader(CLUSTER, options=PATIENT)
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=10)))
    leader.pass_time(SECOND)
    tick, _, create = stores(leader.run(leader.ask(r.AddStreamRequest("orders"))))
    assert tick == d.Cut(GLSN(11), GLSN(10), CutTime(START.wall + SECOND), REVISION, ())
    assert isinstance(create, d.CreateStream)
    assert create.high_watermark == 11
    assert create.time > tick.time


def test_a_seal_of_one_stream_does_not_put_off_ticks() -> None:
    """'while nothing is appended the MR makes ticks', in the same write as whatever else is due."""
    leader = Leader(CLUSTER, options=PATIENT)
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=10)))
    leader.pass_time(SECOND)
    effects = leader.run(leader.report(N2, ur(LS1, committed=4, end=4, hwm=10, state=SEALING)))
    assert [type(x) for x in stores(effects)] == [d.Cut, d.Seal]


def test_a_sealed_stream_is_not_told_of_ticks_as_quiet() -> None:
    """Only a member of an open stream is complete through a cut that it got nothing of; 'if sealed', the MR tells."""
    leader = Leader(CLUSTER, options=PATIENT)
    leader.answer(r.SealRequest(LS1))
    effects = leader.wake_after(SECOND)
    assert any(isinstance(x, d.Cut) and x.is_tick for x in stores(effects))
    assert sends(effects, CommitMessage) == []


def test_cut_time_is_the_wall_clock() -> None:
    """'A cut carries a time: the record's ingestion time'."""
    leader = Leader(CLUSTER)
    assert cut_one(leader, 5).time == START.wall
    leader.pass_time(250 * MILLISECOND)
    assert cut_one(leader, 6).time == START.wall + 250 * MILLISECOND


@pytest.mark.parametrize("behind_us", [0, 1, 10 * SECOND, START.wall - 1])
def test_a_new_leader_with_a_slow_clock_goes_on_at_half_speed(behind_us: int) -> None:
    """'Cut time never goes back and never stands still, over leader changes too (behind the last stored time, it
    advances at half speed).'"""
    wall = LAST_CUT_TIME - behind_us
    leader = Leader(CLUSTER, now=Instant(START.monotonic, wall))
    assert cut_one(leader, 5).time == LAST_CUT_TIME + 1
    leader.now = Instant(START.monotonic + 1_000, wall + 1_000)
    expected = wall + 1_000 if wall + 1_000 > LAST_CUT_TIME + 1 else LAST_CUT_TIME + 1 + 500
    assert cut_one(leader, 6).time == expected


def test_a_clock_that_is_set_back_does_not_take_cut_time_with_it() -> None:
    leader = Leader(CLUSTER, options=OrderOptions(tick_us_min=10**12, tick_us_max=10**12))
    times = [cut_one(leader, 5).time]
    leader.now = Instant(START.monotonic + SECOND, START.wall - 100 * SECOND)
    times.append(cut_one(leader, 6).time)
    leader.pass_time(10 * SECOND)
    times.append(cut_one(leader, 7).time)
    leader.pass_time(1_000 * SECOND)
    times.append(cut_one(leader, 8).time)
    assert [time - START.wall for time in times] == [0, 1, 5 * SECOND + 1, 910 * SECOND]


def test_ticks_of_a_slow_clock_move_on_too() -> None:
    leader = Leader(CLUSTER, options=PATIENT, now=Instant(START.monotonic, START.wall - 3_600 * SECOND))
    last = leader.state.cut_time
    for _ in range(5):
        (tick,) = stores(leader.wake_after(30 * SECOND))
        assert isinstance(tick, d.Cut)
        assert tick.time - last == 15 * SECOND
        last = tick.time


def test_the_first_stream_is_not_older_than_the_cluster() -> None:
    """A stream is idle if 'its creation lies more than `idle_after` of cut time before'; 'until then a stream that
    has not spoken holds the watermark back', also one that was created before the first cut."""
    leader = Leader([d.AddNode(N1)], options=PATIENT)
    leader.run(leader.report(N1))
    leader.answer(r.CreateTopicRequest("first", 1, 1))
    created = leader.state.streams[LS1].created_time
    leader.run(leader.report(N1, ur(LS1, end=0, epoch=0, state=SEALING)))
    leader.run(leader.report(N1, ur(LS1, end=0, epoch=0, state=SEALED)))
    (cut,) = stores(leader.run(leader.report(N1, ur(LS1, end=1))))
    assert isinstance(cut, d.Cut)
    assert 0 <= cut.time - created <= SECOND


def test_a_stream_is_created_now_and_not_at_the_last_cut() -> None:
    """The same while nothing was cut for long: its silence counts from when it came to be."""
    leader = Leader(CLUSTER, options=OrderOptions(node_dead_after_us=10**12, tick_us_min=10**12, tick_us_max=10**12))
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=10)))
    leader.pass_time(100 * SECOND)
    leader.answer(r.AddStreamRequest("orders"))
    assert leader.state.cut_time == LAST_CUT_TIME
    assert leader.state.streams[LS2].created_time == START.wall + 100 * SECOND
    catalog = leader.answer(r.CatalogRequest())
    assert isinstance(catalog, r.Catalog)
    assert catalog.streams[-1].created_time == START.wall + 100 * SECOND


def test_creation_does_not_lie_before_the_last_cut() -> None:
    """A clock that is behind does not make a new stream older than what was cut before it was created."""
    leader = Leader(CLUSTER, options=PATIENT, now=Instant(START.monotonic, START.wall - 3_600 * SECOND))
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, committed=4, end=4, hwm=10)))
    leader.answer(r.AddStreamRequest("orders"))
    assert leader.state.streams[LS2].created_time > LAST_CUT_TIME
