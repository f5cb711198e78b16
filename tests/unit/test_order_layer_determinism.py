"""Two leaders fed the same inputs give the same cuts. And what holds whatever happens.

Random lives of a small cluster: appends, dead and returning nodes, complaints, requests, a store that is slow, a leader
that sleeps. Everything that one leader sees is also shown to a second one, which must want the same done, effect by
effect.
"""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from order_driver import LS1, LS2, N1, N2, N3, RUNNING, SEALING, FakeNodes, Leader

from cutwater.core import requests as r
from cutwater.core.messages import LeaderHello
from cutwater.core.order import decisions as d
from cutwater.core.order.events import Alarm, Compact, OrderEffect, OrderEvent, PeerComplaint, Reply, Store, Stored
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.state import OrderState
from cutwater.errors import ResourceExhausted
from cutwater.types import GLSN, SECOND, Instant, ProducerId

NODES = (N1, N2, N3)

actions = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([LS1, LS2]), st.integers(1, 3)),
    st.tuples(st.just("rounds"), st.integers(1, 8), st.sampled_from([20, 300, 900])),
    st.tuples(st.just("sleep"), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("complain"), st.sampled_from(NODES), st.sampled_from(NODES)),
    st.tuples(st.just("die"), st.sampled_from(NODES), st.just(0)),
    st.tuples(st.just("return"), st.sampled_from(NODES), st.just(0)),
    st.tuples(st.just("restart"), st.sampled_from(NODES), st.sampled_from([LS1, LS2])),
    st.tuples(st.just("ask"), st.integers(0, 6), st.just(0)),
    st.tuples(st.just("slow"), st.integers(0, 5), st.just(0)),
)

REQUESTS: list[r.Request] = [
    r.SealRequest(LS1),
    r.UnsealRequest(LS1),
    r.SealRequest(LS2),
    r.UnsealRequest(LS2),
    r.TrimRequest("topic", GLSN(3)),
    r.OpenProducerRequest(ProducerId("p"), "topic", 1),
    r.CommitCursorRequest("c", GLSN(1)),
]


OPTIONS = OrderOptions(compact_every_decisions=8)


class Watched(Leader):
    """Notes everything that goes in and comes out, and that nothing leaves while a write is in flight but what says
    nothing of the state. A write takes as long as ``slowness`` other events."""

    def __init__(self) -> None:
        super().__init__(options=OPTIONS)
        self.inputs: list[tuple[OrderEvent, Instant]] = []
        self.outputs: list[list[OrderEffect]] = []
        self.in_flight = False
        self.slowness = 0
        self._writing: tuple[Store, int] | None = None

    def run(self, event: OrderEvent) -> list[OrderEffect]:
        effects = self.raw(event)
        self._begin(effects)
        while self._writing is not None:
            store, left = self._writing
            if left > 0:
                self._writing = (store, left - 1)
                break
            self._writing = None
            effects = effects + self.confirm(store)
            self._begin(effects)
        return effects

    def _begin(self, effects: list[OrderEffect]) -> None:
        if self._writing is None and self.in_flight:
            store = effects[-1]
            assert isinstance(store, Store)
            self._writing = (store, self.slowness)

    def raw(self, event: OrderEvent) -> list[OrderEffect]:
        if isinstance(event, Stored):
            self.in_flight = False
        effects = super().raw(event)
        self.inputs.append((event, self.now))
        self.outputs.append(effects)
        if self.in_flight:
            for effect in effects:
                refused = isinstance(effect, Reply) and isinstance(effect.outcome, ResourceExhausted)
                assert refused or isinstance(getattr(effect, "message", None), LeaderHello)
        for effect in effects:
            if isinstance(effect, Compact):
                assert effect.snapshot.index == len(self.stored), "what is compacted is stored"
        places = [i for i, effect in enumerate(effects) if isinstance(effect, Store)]
        assert places in ([], [len(effects) - 1])
        self.in_flight = self.in_flight or bool(places)
        return effects


def live(todo: list[tuple[str, int, int]]) -> tuple[Watched, FakeNodes]:
    leader = Watched()
    nodes = FakeNodes(leader)
    for node in NODES:
        leader.answer(r.AddNodeRequest(node))
    nodes.round()
    leader.answer(r.CreateTopicRequest("topic", 2, 3))
    nodes.rounds(4)
    for what, one, other in todo:
        match what:
            case "append":
                members = leader.state.streams[one].members  # type: ignore[index]
                if all(nodes.replicas[n, one].state is RUNNING and n not in nodes.silent for n in members):  # type: ignore[index]
                    nodes.append(one, other)  # type: ignore[arg-type]
            case "rounds":
                nodes.rounds(one, other)
            case "sleep":
                leader.pass_time(one * SECOND)
            case "complain":
                nodes.take(leader.run(PeerComplaint(LS1, one, other)))  # type: ignore[arg-type]
            case "die":
                nodes.silent.add(one)  # type: ignore[arg-type]
            case "return":
                nodes.silent.discard(one)  # type: ignore[arg-type]
            case "restart":
                replica = nodes.replicas[one, other]  # type: ignore[index]
                replica.state, replica.sealed_at = SEALING, None
            case "ask":
                nodes.take(leader.run(leader.ask(REQUESTS[one])))
            case "slow":
                leader.slowness = one
    return leader, nodes


lives = st.lists(actions, max_size=25)


@settings(max_examples=60)
@given(lives)
def test_the_same_inputs_give_the_same_effects(todo: list[tuple[str, int, int]]) -> None:
    first, _ = live(todo)
    second = Leader(options=OPTIONS)
    for (event, now), expected in zip(first.inputs, first.outputs, strict=True):
        second.now = now
        assert [repr(effect) for effect in second.raw(event)] == [repr(effect) for effect in expected]
    assert second.state.snapshot() == first.state.snapshot()


@settings(max_examples=60)
@given(lives)
def test_what_always_holds(todo: list[tuple[str, int, int]]) -> None:
    leader, nodes = live([*todo, ("slow", 0, 0), ("rounds", 8, 20)])
    assert leader.layer.halted is None
    assert not [effect for effects in leader.outputs for effect in effects if isinstance(effect, Alarm)]

    cuts = [decision for decision in leader.stored if isinstance(decision, d.Cut)]
    given_out = [glsn for cut in cuts for glsn in range(cut.prev_high_watermark + 1, cut.high_watermark + 1)]
    assert given_out == list(range(1, leader.state.high_watermark + 1)), "dense"
    records = [c.context.first_glsn + i for cut in cuts for c in cut.commits for i in range(c.context.count)]
    ticks = [cut.high_watermark for cut in cuts if cut.is_tick]
    assert sorted(records + ticks) == given_out, "unique"
    assert all(a.time < b.time for a, b in itertools.pairwise(cuts))

    for effect in (effect for effects in leader.outputs for effect in effects):
        if isinstance(effect, Compact):
            resumed = OrderState(effect.snapshot, leader.stored[effect.snapshot.index :])
            assert resumed.streams == leader.state.streams, "a snapshot and the rest equal the whole sequence"

    replayed = OrderState(None, leader.stored)
    for lsid, stream in leader.state.streams.items():
        assert replayed.streams[lsid] == stream
        kept, all_of_them = leader.state.histories[lsid].contexts(), replayed.histories[lsid].contexts()
        assert all_of_them[len(all_of_them) - len(kept) :] == kept, "history is a suffix of what was stored"
        for node in stream.members:
            assert nodes.replicas[node, lsid].end >= stream.committed_end, "a committed record is on every disk"


@settings(max_examples=40)
@given(lives)
def test_after_the_fault_heals_appends_succeed(todo: list[tuple[str, int, int]]) -> None:
    """'after the fault heals, appends succeed within seconds' and 'replicas converge'."""
    leader, nodes = live(todo)
    leader.slowness = 0
    nodes.silent.clear()
    for lsid in (LS1, LS2):
        nodes.take(leader.run(leader.ask(r.UnsealRequest(lsid))))
    nodes.rounds(250)
    for lsid in (LS1, LS2):
        stream = leader.state.streams[lsid]
        assert stream.is_open, leader.layer.explanations
        nodes.append(lsid, 1)
        before = stream.committed_end
        nodes.rounds(2)
        assert stream.committed_end == before + 1
    for _ in range(40):
        nodes.rounds(1, 1_000)
    for lsid in (LS1, LS2):
        stream = leader.state.streams[lsid]
        assert sorted(stream.members) == [1, 2, 3], leader.layer.explanations
        assert {nodes.replicas[node, lsid].committed for node in NODES} == {stream.committed_end}
