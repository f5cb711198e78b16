"""What is left of a deleted topic: nothing, in the metadata repository and on storage nodes."""

from __future__ import annotations

import pytest
from order_driver import LS1, LS2, N1, N2, N3, ORDERS, SEALED, SEALING, Leader, cluster_of, sends, stores, ur

from cutwater.core import requests as r
from cutwater.core.messages import CommitMessage, CreateReplica, DropReplica, SealReplica
from cutwater.core.order import decisions as d
from cutwater.core.order.events import Reply, Send, Store
from cutwater.types import SECOND, LogStreamId

NODES = (N1, N2, N3)
LS3 = LogStreamId(3)


@pytest.fixture
def leader() -> Leader:
    return Leader(cluster_of({LS1: NODES, LS2: NODES}, cuts=[{LS1: 4, LS2: 6}]))


def delete(leader: Leader) -> None:
    assert leader.answer(r.DeleteTopicRequest(ORDERS)) == r.Done()


def test_nothing_is_remembered_of_it(leader: Leader) -> None:
    """Metadata is bounded by what exists."""
    leader.run(leader.report(N1, ur(LS1, committed=4, end=5), ur(LS2, committed=6, end=6, state=SEALING)))
    delete(leader)
    state = leader.state
    assert (state.topics, state.streams, state.histories, state.producers) == ({}, {}, {}, {})
    for _ in range(20):
        leader.wake_after(SECOND)
    assert leader.layer.explanations == {}
    assert leader.layer.halted is None


def test_replicas_of_it_are_removed_wherever_they_are_heard_of(leader: Leader) -> None:
    """Running, invalid, or on a node that was away for long: also after a change of leaders."""
    delete(leader)
    again = Leader(leader.stored)
    for of in (leader, again):
        told = of.run(of.report(N2, ur(LS1, committed=3, end=9, hwm=3), invalid=(LS2,)))
        assert sends(told) == [Send(N2, DropReplica(LS1)), Send(N2, DropReplica(LS2))]
        assert of.layer.halted is None
        assert sends(of.run(of.report(N2))) == []


def test_a_stream_that_is_newer_than_any_is_still_a_sign_of_lost_memory(leader: Leader) -> None:
    delete(leader)
    leader.run(leader.report(N1, ur(LS3, end=1)))
    assert leader.layer.halted is not None


def test_nobody_is_told_before_the_deletion_is_stored(leader: Leader) -> None:
    (store,) = leader.raw(leader.ask(r.DeleteTopicRequest(ORDERS)))
    assert isinstance(store, Store)
    assert leader.raw(leader.report(N1, ur(LS1, committed=4, end=4))) == []
    effects = leader.confirm(store)
    assert DropReplica(LS1) in [send.message for send in sends(effects)]


def test_what_is_announced_with_it_concerns_it_no_more(leader: Leader) -> None:
    """The last cut, the seals and the deletion are one write; when it is stored there is no stream to speak of."""
    (store,) = leader.raw(leader.ask(r.CatalogRequest()))
    assert isinstance(store, Store)
    for node in NODES:
        leader.raw(leader.report(node, ur(LS1, committed=4, end=5), ur(LS2, committed=6, end=6)))
    leader.raw(leader.ask(r.CreateTopicRequest("other", 1, 1)))
    leader.raw(leader.ask(r.DeleteTopicRequest(ORDERS)))
    leader.raw(leader.ask(r.DeleteTopicRequest("other")))
    (write,) = (effect for effect in leader.confirm(store) if isinstance(effect, Store))
    kinds = [type(decision) for decision in write.decisions]
    assert kinds[0] is d.Cut
    assert kinds.count(d.DeleteTopic) == 2
    effects = leader.confirm(write)
    messages = [send.message for send in sends(effects)]
    assert not [m for m in messages if isinstance(m, (SealReplica, CreateReplica, CommitMessage))]
    assert [effect.outcome for effect in effects if isinstance(effect, Reply)][-2:] == [r.Done(), r.Done()]


def test_what_was_wanted_for_it_is_not_decided_any_more(leader: Leader) -> None:
    """A seal that a report asked for while the deletion was under way."""
    (store,) = leader.raw(leader.ask(r.CatalogRequest()))
    assert isinstance(store, Store)
    leader.raw(leader.report(N1, ur(LS1, committed=4, end=4, state=SEALING), invalid=(LS2,)))
    leader.raw(leader.ask(r.DeleteTopicRequest(ORDERS)))
    decided = stores(leader.confirm(store))
    assert [type(decision) for decision in decided] == [d.Seal, d.Seal, d.DeleteTopic]


def test_a_removed_replica_may_come_again_and_is_removed_again(leader: Leader) -> None:
    """An order to create it was under way for long."""
    delete(leader)
    told = leader.run(leader.report(N3, ur(LS1, end=0, epoch=0, state=SEALED)))
    assert sends(told) == [Send(N3, DropReplica(LS1))]
