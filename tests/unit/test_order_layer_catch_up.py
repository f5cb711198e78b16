"""What replicas that are behind are told, and how long it is remembered (docs/protocol.md)."""

from __future__ import annotations

import pytest
from order_driver import (
    E1,
    E2,
    LEADER,
    LS1,
    LS2,
    N1,
    N2,
    N3,
    SEALED,
    SEALING,
    FakeNodes,
    Leader,
    cluster_of,
    sends,
    ur,
)

from cutwater.core import requests as r
from cutwater.core.messages import CatchUp, LearnFrom, SealReplica
from cutwater.core.order import decisions as d
from cutwater.core.order.events import Send, Store, Wake
from cutwater.core.order.options import OrderOptions
from cutwater.types import GLSN, LLSN, MILLISECOND, SECOND, CommitContext, Revision, UncommitReport

NODES = (N1, N2, N3)
CLUSTER = cluster_of(
    {LS1: NODES, LS2: NODES}, cuts=[{LS1: 2, LS2: 2}, {LS1: 1, LS2: 5}, {LS1: 2, LS2: 4}], high_watermark=16
)
REVISION = Revision(8)
QUIET = OrderOptions(node_dead_after_us=10**12, tick_us_min=10**12, tick_us_max=10**12)
"""Nobody dies and time stands still, so that only what a test does happens."""


@pytest.fixture
def leader() -> Leader:
    """'cuts (HWM 4, 10, 16)': LS1 got [1,2], [5] and [11,12]."""
    return Leader(CLUSTER, options=QUIET)


def ls2() -> UncommitReport:
    return ur(LS2, committed=11, end=11, hwm=16)


def ranges(contexts: tuple[CommitContext, ...]) -> list[list[int]]:
    return [list(range(c.first_glsn, c.last_glsn + 1)) for c in contexts]


def kept(leader: Leader) -> list[list[int]]:
    """What is still remembered when the leader has woken: it does not forget at every report."""
    leader.run(Wake())
    return ranges(leader.state.histories[LS1].contexts())


def catch_up(leader: Leader, committed: int) -> CatchUp:
    contexts = tuple(c for c in leader.state.histories[LS1].contexts() if c.first_llsn > committed)
    return CatchUp(LS1, contexts, LLSN(5), GLSN(16), REVISION)


@pytest.mark.parametrize(
    ("hwm", "committed", "uncommitted", "expected"),
    [
        pytest.param(4, 2, 3, [[5], [11, 12]], id="HWM 4 with 3 uncommitted gets [5] and [11,12]"),
        pytest.param(10, 3, 2, [[11, 12]], id="HWM 10 with 2 gets [11,12]"),
        pytest.param(0, 0, 5, [[1, 2], [5], [11, 12]], id="HWM 0 with 5 gets all"),
        pytest.param(16, 5, 0, [], id="current"),
        pytest.param(12, 5, 0, [], id="current, whatever its HWM"),
    ],
)
def test_a_report_is_answered_with_every_later_range(
    leader: Leader, hwm: int, committed: int, uncommitted: int, expected: list[list[int]]
) -> None:
    """'a replica of LS1 that reports HWM 4 with 3 uncommitted gets ranges [5] and [11,12] and ends at HWM 16; one that
    reports HWM 10 with 2 gets [11,12]. A replica whose committed LLSN equals the stream's is current'."""
    behind = ur(LS1, hwm=hwm, committed=committed, end=committed + uncommitted)
    message = catch_up(leader, committed)
    assert leader.run(leader.report(N1, behind, ls2(), applied=4)) == [
        Send(N1, message),
        Send(N1, CatchUp(LS2, (), LLSN(11), GLSN(16), REVISION)),
    ]
    assert ranges(message.contexts) == expected


def test_who_has_heard_of_every_cut_needs_no_answer(leader: Leader) -> None:
    """A replica may have applied a cut and not yet have it on disk: that is no reason to repeat it."""
    assert leader.run(leader.report(N1, ur(LS1, hwm=4, committed=2, end=5), ls2(), applied=16)) == []


def test_a_lost_commit_is_made_up_for(leader: Leader) -> None:
    """A commit message may get lost. Who has not heard of a cut for a while is told again, in answer to its report."""
    for node in NODES:
        leader.run(leader.report(node, ur(LS1, hwm=16, committed=5, end=6), ls2()))
    stuck = ur(LS1, hwm=16, committed=5, end=6)
    assert leader.state.high_watermark == 17
    assert leader.run(leader.report(N2, stuck, ls2(), applied=16)) == [], "it may still be on its way"
    for _ in range(2):
        leader.wake_after(20 * MILLISECOND)
    (to_ls1, to_ls2) = sends(leader.run(leader.report(N2, stuck, ls2(), applied=16)))
    assert isinstance(to_ls1.message, CatchUp)
    assert ranges(to_ls1.message.contexts) == [[17]]
    assert to_ls2 == Send(N2, CatchUp(LS2, (), LLSN(11), GLSN(17), REVISION))


# How long a range is kept.


def test_a_range_is_kept_until_every_replica_of_an_open_stream_has_it_on_disk(leader: Leader) -> None:
    """'A range is kept until every replica of an open stream … has durably applied it'."""
    everything = [[1, 2], [5], [11, 12]]
    leader.run(leader.report(N1, ur(LS1, hwm=16, committed=5, end=5), ls2()))
    leader.run(leader.report(N2, ur(LS1, hwm=16, committed=5, end=5), ls2()))
    assert kept(leader) == everything
    leader.run(leader.report(N3, ur(LS1, hwm=4, committed=2, end=5), ls2()))
    assert kept(leader) == [[5], [11, 12]]
    leader.run(leader.report(N3, ur(LS1, hwm=16, committed=5, end=5), ls2()))
    assert kept(leader) == []


def sealed_report(committed: int, end: int = 5) -> UncommitReport:
    return ur(LS1, hwm=16, committed=committed, end=end, state=SEALED if committed == end == 5 else SEALING)


def test_a_sealed_stream_remembers_for_one_replica_at_least(leader: Leader) -> None:
    """'and at least one of a sealed stream': nobody said anything, so all is kept; one has it, and it may go, but not
    before the others had time to ask."""
    leader.answer(r.SealRequest(LS1))
    leader.wake_after(10 * SECOND)
    assert len(kept(leader)) == 3
    leader.run(leader.report(N1, sealed_report(5), ls2()))
    assert kept(leader) == []


def test_the_others_of_a_sealed_stream_have_time_to_ask(leader: Leader) -> None:
    leader.answer(r.SealRequest(LS1))
    leader.wake_after(20 * MILLISECOND)
    leader.run(leader.report(N1, sealed_report(5), ls2()))
    assert len(kept(leader)) == 3
    (seal, commits) = sends(leader.run(leader.report(N2, sealed_report(2), ls2())))
    assert seal == Send(N2, SealReplica(LS1, LEADER, E1, LLSN(5)))
    assert isinstance(commits.message, CatchUp)
    assert ranges(commits.message.contexts) == [[5], [11, 12]]


def test_they_have_that_time_also_while_the_seal_is_being_stored(leader: Leader) -> None:
    """A report that comes while the seal is in flight does not find a stream that has been sealed for long."""
    (store,) = leader.raw(leader.ask(r.SealRequest(LS1)))
    assert isinstance(store, Store)
    leader.raw(leader.report(N1, ur(LS1, hwm=16, committed=5, end=5), ls2()))
    leader.raw(Wake())
    leader.confirm(store)
    leader.run(Wake())
    (_, commits) = sends(leader.run(leader.report(N2, sealed_report(2), ls2())))
    assert isinstance(commits.message, CatchUp)
    assert ranges(commits.message.contexts) == [[5], [11, 12]]


def test_a_replica_whose_ranges_are_forgotten_learns(leader: Leader) -> None:
    """It holds the entries, but nobody knows their GLSNs any more except the other replicas: it must not wait."""
    leader.answer(r.SealRequest(LS1))
    leader.wake_after(SECOND)
    leader.run(leader.report(N1, sealed_report(5), ls2()))
    assert kept(leader) == []
    effects = leader.run(leader.report(N2, sealed_report(2), ls2()))
    effects += leader.run(Wake())
    assert Send(N2, LearnFrom(LS1, LEADER, E1, N1)) in effects


def test_a_new_leader_knows_that_the_ranges_are_forgotten(leader: Leader) -> None:
    """The same after a restart from a snapshot, in which the history is empty."""
    leader.answer(r.SealRequest(LS1))
    leader.wake_after(SECOND)
    leader.run(leader.report(N1, sealed_report(5), ls2()))
    assert kept(leader) == []
    successor = Leader(snapshot=leader.state.snapshot(), options=QUIET)
    successor.run(successor.report(N1, sealed_report(5), ls2()))
    effects = successor.run(successor.report(N2, sealed_report(2), ls2()))
    effects += successor.run(Wake())
    assert Send(N2, LearnFrom(LS1, LEADER, E1, N1)) in effects


@pytest.mark.parametrize(
    "outsider",
    [
        pytest.param(ur(LS1, committed=2, end=2, hwm=2, epoch=2, state=SEALING), id="was left out"),
        pytest.param(ur(LS1, committed=2, end=9, hwm=2, epoch=1, state=SEALING), id="has a tail of an older epoch"),
        pytest.param(ur(LS1, committed=0, end=0, epoch=0, state=SEALING), id="is new"),
    ],
)
def test_nobody_is_told_to_commit_records_that_it_does_not_have(outsider: UncommitReport) -> None:
    """'A commit … applies only at the replica's first uncommitted LLSN', to records that are on its disk. Who is
    outside the newest epoch 'truncates durably to its own committed LLSN', so it has none to commit."""
    decisions = cluster_of({LS1: NODES}, cuts=[{LS1: 2}])
    decisions += [d.Seal(LS1, E1, LLSN(2), NODES, "a test"), d.Unseal(LS1, E2, LLSN(2), (N1, N2))]
    leader = Leader(decisions, options=QUIET)
    for node in (N1, N2):
        leader.run(leader.report(node, ur(LS1, committed=2, end=5, hwm=2, epoch=2)))
    leader.answer(r.SealRequest(LS1))
    assert leader.state.streams[LS1].committed_end == 5
    assert kept(leader)[-1] == [3, 4, 5]
    effects = leader.run(leader.report(N3, outsider))
    assert Send(N3, SealReplica(LS1, LEADER, E2, LLSN(5))) in effects
    assert sends(effects, CatchUp) == []


def test_one_silent_replica_does_not_make_the_history_grow_for_ever() -> None:
    """'one silent replica must not make the history grow for ever (its stream is sealed)'."""
    leader = Leader()
    nodes = FakeNodes(leader)
    for node in NODES:
        leader.answer(r.AddNodeRequest(node))
    nodes.round()
    leader.answer(r.CreateTopicRequest("orders", 1, 3))
    nodes.rounds(5)
    nodes.silent.add(N3)
    for _ in range(300):
        if leader.state.streams[LS1].is_open and nodes.replicas[leader.state.streams[LS1].members[0], LS1].state == 2:
            nodes.append(LS1, 1)
        nodes.round()
    assert leader.state.streams[LS1].committed_end > 100
    assert len(kept(leader)) < 5
