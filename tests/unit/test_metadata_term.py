"""A leader's term: in which order it does what the order layer wants done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
from msgspec import structs
from order_driver import LEADER, LS1, N1, N2, N3, cluster_of, ur

from cutwater.core.messages import CommitMessage, LeaderMessage
from cutwater.core.order.events import NodeGone, NodeUnreachable, ReportArrived, Wake
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.state import OrderState
from cutwater.core.requests import CatalogRequest
from cutwater.errors import NotLeader, Unavailable
from cutwater.metadata.counters import MetadataCounters
from cutwater.metadata.node_channels import Ways
from cutwater.metadata.stores.store_interface import AppendTold, MetadataStore
from cutwater.metadata.term import Term
from cutwater.protocol.errors import ConnectionLost
from cutwater.types import GLSN, Incarnation, NodeState, Report, StorageNodeId
from cutwater.wire.connection import Connection

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

CHAIN = (N1, N2, N3)


class Seen:
    """A store that is quick, and ways to storage nodes; both only remember what was asked of them, and when."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.connected = 0
        self.fails: OSError | None = None

    def begin_append(self, epoch: object, after: object, decisions: object, told: AppendTold) -> bool:
        self.done.append("stored")
        told(None)
        return True

    async def connect(self, node: StorageNodeId, address: str) -> Connection:
        self.connected += 1
        if self.fails is not None:
            raise ConnectionLost(f"{address} cannot be reached", outcome_unknown=False) from self.fails
        return cast(Connection, SimpleNamespace(abort=lambda: None))

    def send(self, node: StorageNodeId, message: LeaderMessage, *, may_wait: bool = False) -> None:
        assert isinstance(message, CommitMessage)
        self.done.append(node)


@pytest_asyncio.fixture
async def begun() -> AsyncIterator[tuple[Term, Seen]]:
    state = OrderState(None, cluster_of({LS1: CHAIN}, cuts=[{LS1: 5}]))
    seen = Seen()
    options = OrderOptions(tick_us_min=10**15, tick_us_max=10**15)
    term = Term(LEADER, state, cast(MetadataStore, seen), cast(Ways, seen), options, MetadataCounters(), seen.connect)
    yield term, seen
    await term.end("the test is over")


def report(node: StorageNodeId, sequence: int, end: int, hwm: int = 5) -> ReportArrived:
    said = ur(LS1, committed=5, end=end, hwm=hwm)
    return ReportArrived(Report(node, Incarnation(1), sequence, LEADER, NodeState.READY, (said,), GLSN(hwm)))


def note_turns(term: Term, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = term.layer.turn

    def noted(now: Any) -> Any:
        seen.done.append("turn")
        return turn(now)

    monkeypatch.setattr(term.layer, "turn", noted)


async def test_what_is_stored_leaves_before_the_leader_has_its_turn(
    begun: tuple[Term, Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    term, seen = begun
    note_turns(term, seen, monkeypatch)
    for node in CHAIN:
        term.hear(report(node, 1, 6))
    assert seen.done == []
    term._turn()
    assert seen.done == ["turn", "stored", *CHAIN, "turn"]


async def test_there_is_no_turn_for_reports_from_which_nothing_follows(
    begun: tuple[Term, Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    term, seen = begun
    for node in CHAIN:
        term.hear(report(node, 1, 5))
    term._turn()
    note_turns(term, seen, monkeypatch)
    for node in CHAIN[:-1]:
        term.hear(report(node, 2, 6))
        term._turn()
    assert seen.done == []
    term.hear(report(CHAIN[-1], 2, 6))
    term._turn()
    assert seen.done == ["turn", "stored", *CHAIN, "turn"]


async def test_what_the_leader_refuses_is_counted_and_the_term_goes_on(begun: tuple[Term, Seen]) -> None:
    term, _ = begun
    term.hear(report(StorageNodeId(9), 1, 5))
    assert (term._counters.refused, term.over.done()) == (1, False)


async def test_a_bug_ends_the_term(begun: tuple[Term, Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    term, _ = begun

    def broken(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(term.layer, "take", broken)
    term.hear(report(N1, 1, 5))
    assert term.over.result() == "a bug: KeyError('x')"


@pytest.mark.parametrize(
    ("cause", "event"), [(ConnectionRefusedError(), NodeGone(N1)), (TimeoutError(), NodeUnreachable(N1)), (None, None)]
)
async def test_a_suspected_node_is_gone_if_it_refuses_and_unreachable_if_it_does_not_answer(
    begun: tuple[Term, Seen], monkeypatch: pytest.MonkeyPatch, cause: OSError | None, event: object
) -> None:
    term, seen = begun
    seen.fails = cause
    fed: list[object] = []
    monkeypatch.setattr(term, "feed", fed.append)
    monkeypatch.setattr(term, "_probe_seconds_max", 0.05)
    monkeypatch.setattr("cutwater.metadata.term.PROBE_SECONDS", 0.01)
    monkeypatch.setitem(term.layer.state.nodes, N1, structs.replace(term.layer.state.nodes[N1], address="there:1"))
    term.probe(N1)
    term.probe(N1)
    await asyncio.gather(*term._probing.values())
    assert [one for one in fed if one != Wake()] == ([] if event is None else [event])
    assert seen.connected == 1 if cause is None else seen.connected >= 1


async def test_a_request_that_waits_when_the_term_ends_has_an_unknown_outcome(
    begun: tuple[Term, Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    term, _ = begun
    monkeypatch.setattr(term, "feed", lambda event: None)
    waiting = asyncio.ensure_future(term.decide(CatalogRequest()))
    await asyncio.sleep(0)
    await term.end("another node leads")
    with pytest.raises(Unavailable, match="may or may not have been done"):
        await waiting
    with pytest.raises(NotLeader, match="ask again"):
        await term.decide(CatalogRequest())
