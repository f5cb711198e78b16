"""Three replicas of one log stream, a dumb order layer, and everything in any order: losses, repetitions, power cuts.

The order layer here is a few lines: cut to the minimum of what all members reported, seal at what was cut, reopen when
all are sealed. What must hold is in the words of docs/guarantees.md: unique, dense, durable, no phantom, sealed never
grows, replicas converge; and a report never includes what a power cut could take back.
"""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from cutwater.core.messages import CatchUp, Replicate
from cutwater.core.replica.events import (
    Acked,
    Append,
    AppendFailed,
    Commit,
    Forward,
    RefuseEntry,
    ReplicaEffect,
    ReplicateFailed,
)
from cutwater.errors import ProtocolViolation, Refused
from cutwater.types import (
    GLSN,
    LLSN,
    Ack,
    CommitContext,
    CutTime,
    Epoch,
    ReplicaState,
    Revision,
    StorageNodeId,
    UncommitReport,
)
from tests.unit.replica_bench import CHAIN, HEAD, STREAM, Bench, batch, seal, unseal


class Cluster:
    def __init__(self) -> None:
        self.nodes = {node: Bench(node) for node in CHAIN}
        self.links: dict[StorageNodeId, deque[Replicate]] = {node: deque() for node in CHAIN}
        self.reports: dict[StorageNodeId, UncommitReport] = {}
        self.epoch, self.is_open = 0, False
        self.committed_end = self.high_watermark = 0
        self.contexts: list[CommitContext] = []
        self.sent: dict[int, bytes] = {}
        self.acked: dict[int, Ack] = {}
        self.failed: set[int] = set()
        for node in CHAIN:
            self.tell_seal(node)
        self.reopen()

    # What the parts do.

    def carry_out(self, node: StorageNodeId, effects: list[ReplicaEffect]) -> None:
        for effect in effects:
            match effect:
                case Forward():
                    self.links[effect.peer].append(effect.message)
                case Acked():
                    assert effect.waiter not in self.acked, "answered once"
                    assert effect.waiter not in self.failed
                    self.acked[effect.waiter] = effect.ack
                case AppendFailed():
                    assert effect.waiter not in self.acked
                    self.failed.add(effect.waiter)
                case RefuseEntry():
                    self.break_link(node)
        self.check(node)

    def break_link(self, node: StorageNodeId) -> None:
        """What was on its way to this node is lost, and the one before it notices."""
        self.links[node].clear()
        if node != HEAD:
            before = StorageNodeId(node - 1)
            failed = ReplicateFailed(node, self.nodes[before].replica.hard_state.epoch, "link broke")
            self.carry_out(before, self.nodes[before].do(failed))

    def append(self, count: int) -> None:
        waiter = len(self.sent) + 1
        body = b"%d" % waiter
        try:
            effects = self.nodes[HEAD].do(Append(waiter, Epoch(self.epoch), batch(count, body)))
        except Refused:
            return
        self.sent[waiter] = body
        self.carry_out(HEAD, effects)

    def deliver(self, node: StorageNodeId) -> None:
        if self.links[node]:
            message = self.links[node].popleft()
            try:
                self.carry_out(node, self.nodes[node].do(message))
            except Refused:
                self.break_link(node)

    def crash(self, node: StorageNodeId, *, kept: bool) -> None:
        """``kept``: what was not synced happened to reach the disk all the same, but nobody heard of it."""
        bench = self.nodes[node]
        before = bench.replica.report()
        self.links[node].clear()
        if kept:
            bench.disk.sync()
        bench.crash()
        after = bench.replica.report()
        assert before is not None
        assert after is not None
        assert after.durable_end >= before.durable_end, "what was reported is still there"
        assert after.committed_end >= before.committed_end
        assert after.high_watermark >= before.high_watermark
        assert after.state is ReplicaState.SEALING
        self.check(node)

    # The order layer.

    def report(self, node: StorageNodeId) -> None:
        report = self.nodes[node].replica.report()
        assert report is not None
        if report.epoch == self.epoch:
            self.reports[node] = report

    def cut(self) -> None:
        if not self.is_open or len(self.reports) < len(CHAIN):
            return
        end = min(report.durable_end for report in self.reports.values())
        count = end - self.committed_end
        if count > 0:
            context = CommitContext(
                Epoch(self.epoch),
                LLSN(self.committed_end + 1),
                GLSN(self.high_watermark + 1),
                count,
                GLSN(self.high_watermark + count),
                GLSN(self.high_watermark),
                CutTime(self.high_watermark + count),
            )
            self.contexts.append(context)
            self.committed_end, self.high_watermark = end, self.high_watermark + count

    def tell_commit(self, node: StorageNodeId, which: int) -> None:
        if self.contexts:
            context = self.contexts[which % len(self.contexts)]
            event = Commit(context.prev_high_watermark, context.high_watermark, Revision(1), context)
            self.carry_out(node, self.nodes[node].do(event))

    def catch_up(self, node: StorageNodeId) -> None:
        later = tuple(c for c in self.contexts if c.last_llsn > self.nodes[node].replica.durable_committed_end)
        event = CatchUp(STREAM, later, LLSN(self.committed_end), GLSN(self.high_watermark), Revision(1))
        self.carry_out(node, self.nodes[node].do(event))

    def decide_seal(self) -> None:
        if self.is_open:
            self.cut()
            self.is_open = False
            self.reports.clear()

    def tell_seal(self, node: StorageNodeId) -> None:
        if not self.is_open:
            self.carry_out(node, self.nodes[node].do(seal(self.committed_end, epoch=self.epoch)))

    def reopen(self) -> None:
        """The head opens last; a node that crashes in between leaves the rest to the next seal."""
        sealed = [n for n, b in self.nodes.items() if b.replica.state is ReplicaState.SEALED]
        if self.is_open or len(sealed) < len(CHAIN):
            return
        self.epoch, self.is_open = self.epoch + 1, True
        self.reports.clear()
        for node in reversed(CHAIN):
            self.carry_out(node, self.nodes[node].do(unseal(self.committed_end, epoch=self.epoch)))

    # What must hold.

    def check(self, node: StorageNodeId) -> None:
        bench = self.nodes[node]
        durable_committed, committed, durable, written = bench.numbers()
        assert durable_committed <= committed <= durable <= written
        assert durable <= bench.disk.end, "a report never includes what a power cut could take back"
        ends = {0, *(e.last_llsn for e in bench.disk.entries)}
        assert {durable_committed, committed, durable} <= ends, "all ends fall on batch boundaries"
        if bench.replica.state is ReplicaState.SEALED:
            assert (durable_committed, written) == (bench.replica.hard_state.sealed_at,) * 2

    def heal(self) -> None:
        self.decide_seal()
        for node, bench in self.nodes.items():
            bench.sync()
            self.tell_seal(node)
            self.catch_up(node)
            bench.sync()
            assert bench.replica.state is ReplicaState.SEALED, node
            assert bench.numbers() == (self.committed_end,) * 4

    def check_log(self) -> None:
        first, *others = (bench.disk for bench in self.nodes.values())
        for other in others:
            assert other.entries == first.entries, "byte-identical on every replica"
        assert all(bench.disk.contexts == self.contexts for bench in self.nodes.values()), "one cut sequence"
        there = {e.first_llsn: e.batch for e in first.entries}
        assert sum(of.count for of in there.values()) == self.committed_end, "dense"
        for waiter, ack in self.acked.items():
            assert there[ack.llsn].body == self.sent[waiter], "after an ack, the record is there"
            assert there[ack.llsn].count == ack.count
        bodies = [of.body for of in there.values()]
        assert len(bodies) == len(set(bodies)), "an unknown appears at most once"
        assert not {self.sent[waiter] for waiter in self.failed} & set(bodies), "a definite failure never appears"


def step(cluster: Cluster, what: int, node: StorageNodeId, number: int) -> None:
    bench = cluster.nodes[node]
    match what:
        case 0 | 1 | 2 | 3:
            cluster.append(1 + number % 3)
        case 4 | 5 | 6 | 7 | 8:
            for _ in range(number):
                cluster.deliver(node)
        case 9 | 10 | 11 | 12:
            for event in bench.disk.sync():
                cluster.carry_out(node, bench.do(event))
        case 13 | 14 | 15:
            for of in CHAIN[number // 4 :]:
                cluster.report(of)
        case 16 | 17:
            cluster.cut()
        case 18 | 19 | 20:
            cluster.tell_commit(node, -1 - number // 2)
        case 21:
            cluster.catch_up(node)
        case 22:
            if number < 2:
                cluster.decide_seal()
        case 23 | 24:
            cluster.tell_seal(node)
        case 25:
            cluster.reopen()
        case 26:
            if number < 3:
                cluster.crash(node, kept=number == 0)
        case 27:
            if number == 0:
                cluster.break_link(node)
        case 28:
            if number < 3:
                cluster.heal()
                cluster.reopen()
        case 29 | 30 | 31:
            # A good moment: everything arrives and becomes durable, as far as it goes.
            for of in CHAIN:
                while cluster.links[of]:
                    cluster.deliver(of)
                for event in cluster.nodes[of].disk.sync():
                    cluster.carry_out(of, cluster.nodes[of].do(event))
                cluster.report(of)


steps = st.lists(st.tuples(st.integers(0, 31), st.sampled_from(CHAIN), st.integers(0, 5)), min_size=50, max_size=250)


@given(steps)
def test_what_was_acknowledged_is_there_and_what_failed_is_not(made: list[tuple[int, StorageNodeId, int]]) -> None:
    cluster = Cluster()
    try:
        for what, node, number in made:
            step(cluster, what, node, number)
    except ProtocolViolation as error:
        raise AssertionError(f"nobody said what cannot be: {error}") from error
    cluster.heal()
    cluster.check_log()
