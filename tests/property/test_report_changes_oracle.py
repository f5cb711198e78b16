"""A leader that gets reports of changes decides the same, and says the same, as one that gets whole reports (ADR 0049).

Both leaders see the same random history: reports are lost, repeated and delayed, storage nodes restart, fall silent and
lose replicas, and leaders change. The one with whole reports is the oracle: nothing about it is new.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
from msgspec import UNSET, UnsetType, structs

sys.path.append(str(Path(__file__).parent.parent / "unit"))

from order_driver import LS1, LS2, LS3, N1, N2, N3, RUNNING, SEALING, FakeNodes, FakeReplica, Leader, cluster_of, plain

from cutwater.core.messages import CommitMessage, CreateReplica, LeaderHello
from cutwater.core.order.events import OrderEffect, OrderEvent, ReportArrived, Send, Wake
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.planning.reports import is_whole
from cutwater.core.order.state import OrderState
from cutwater.storagenode.report_writer import MemberLists, NodeCondition, ReportWriter
from cutwater.types import GLSN, MILLISECOND, Incarnation, LeaderEpoch, NodeState, Report, StorageNodeId, UncommitReport

NODES = (N1, N2, N3)
STREAMS = {LS1: NODES, LS2: (N2, N3), LS3: (N3, N1)}
STEPS = 800
"""Every new leader makes cuts only when all streams have reported to it, so a short history has few."""


class Histories:
    """Two leaders on one history, and the storage nodes, which obey the one that gets reports of changes."""

    def __init__(self, random: Random, list_min: int) -> None:
        self.random, self.options = random, OrderOptions(member_list_min=list_min)
        self.lists = {node: MemberLists() for node in NODES}
        self.referred = 0
        decisions = cluster_of(STREAMS)
        self.mine, self.oracle = (Leader(decisions, options=self.options) for _ in range(2))
        self.nodes = FakeNodes(self.mine, NODES)
        for stream, chain in STREAMS.items():
            for node in chain:
                replica = self.nodes.replicas[node, stream] = FakeReplica(0)
                replica.state, replica.epoch = RUNNING, 1
        self.epoch = self.mine.layer.leader_epoch
        self.heard = dict.fromkeys(NODES, self.epoch)
        self.incarnations = dict.fromkeys(NODES, 1)
        self.writers = {node: ReportWriter(node, Incarnation(1), 1) for node in NODES}
        self.ways: list[tuple[Report, tuple[UncommitReport, ...]]] = []
        self.partial = 0

    def both(self, mine: OrderEvent, oracle: OrderEvent) -> None:
        effects, expected = self.mine.run(mine), self.oracle.run(oracle)
        assert plain(_told(effects)) == plain(_told(expected))
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, LeaderHello) and self.random.random() < 0.8:
                self.hear(effect.node, effect.message)
        for effect in effects:
            if isinstance(effect, Send) and self.random.random() < 0.9 and self.is_there(effect):
                self.nodes.take([self.in_full(effect)])

    def in_full(self, send: Send) -> Send:
        """Name the streams that a message about a cut refers to, as the node does that holds the list."""
        message, lists = send.message, self.lists[send.node]
        if not isinstance(message, CommitMessage):
            return send
        committed = [commit.stream for commit in message.commits]
        if not isinstance(message.names, UnsetType):
            lists.learn(message.names, (*committed, *message.quiet))
        elif not isinstance(message.others_of, UnsetType):
            self.referred += 1
            return structs.replace(
                send, message=structs.replace(message, quiet=tuple(lists.others(message.others_of, committed)))
            )
        return send

    def is_there(self, send: Send) -> bool:
        """Whether the message is about a replica that its receiver has, or may create."""
        stream = getattr(send.message, "stream", None)
        is_created = isinstance(send.message, CreateReplica)
        return stream is None or is_created or (send.node, stream) in self.nodes.replicas

    def hear(self, node: StorageNodeId, hello: LeaderHello) -> None:
        self.writers[node].hear(hello)
        self.heard[node] = max(self.heard[node], hello.leader_epoch)

    def write(self, node: StorageNodeId) -> None:
        said = tuple(self.nodes._reports(node))
        condition = NodeCondition(
            self.heard[node], NodeState.READY, self.mine.state.high_watermark, members=self.lists[node].name
        )
        report = self.writers[node].write(said, condition)
        self.partial += not is_whole(report)
        self.ways += [(report, said)] * self.random.choice((0, 1, 1, 1, 2))

    def arrive(self) -> None:
        report, said = self.ways.pop(self.random.randrange(min(2, len(self.ways))))
        book = self.mine.layer._book
        is_mine = report.leader_epoch == self.epoch
        if is_mine and book.is_new(report) and not book.is_complete(report):
            self.mine.run(ReportArrived(report))
            return
        whole = structs.replace(report, uncommit_reports=said, base=UNSET)
        self.both(ReportArrived(report), ReportArrived(whole))

    def restart(self, node: StorageNodeId) -> None:
        self.incarnations[node] += 1
        self.writers[node], self.lists[node] = (
            ReportWriter(node, Incarnation(self.incarnations[node]), 1),
            MemberLists(),
        )
        for (at, _), replica in self.nodes.replicas.items():
            if at == node:
                replica.state = SEALING

    def change_leader(self) -> None:
        self.epoch = LeaderEpoch(self.epoch + 1)
        for leader in (self.mine, self.oracle):
            state = OrderState(None, leader.stored)
            leader.layer = OrderLayer(self.epoch, state, leader.now, self.options)

    def step(self) -> None:
        chance, node = self.random.random(), self.random.choice(NODES)
        if chance < 0.25:
            stream = self.random.choice(list(STREAMS))
            chain = self.mine.state.streams[stream].members
            if all(self.nodes.replicas[member, stream].state is RUNNING for member in chain):
                for member in chain[: self.random.randint(1, len(chain))]:
                    self.nodes.replicas[member, stream].end += 1
                ends = [self.nodes.replicas[member, stream] for member in chain]
                for replica in ends:
                    replica.end = max(replica.end, ends[-1].end)
        elif chance < 0.50:
            # Fewer are written than can arrive, or all of them would name leaders of long ago.
            self.write(node)
        elif chance < 0.85:
            if self.ways:
                self.arrive()
        elif chance < 0.97:
            us = self.random.choice((20, 50, 50, 400)) * MILLISECOND
            for leader in (self.mine, self.oracle):
                leader.pass_time(us)
            self.both(Wake(), Wake())
        elif chance < 0.99:
            self.restart(node)
        else:
            self.change_leader()


def _told(effects: list[OrderEffect]) -> list[OrderEffect]:
    """What a leader decides and says, without what it says about the reports themselves."""
    return [e for e in effects if not (isinstance(e, Send) and isinstance(e.message, LeaderHello))]


@pytest.mark.parametrize("list_min", [1, 10**6])
@pytest.mark.parametrize("block", range(4))
def test_the_leader_decides_as_if_every_report_were_whole(block: int, list_min: int) -> None:
    partial = cuts = seals = referred = 0
    for seed in range(5 * block, 5 * block + 5):
        histories = Histories(Random(f"changes/{seed}"), list_min)
        for step in range(STEPS):
            try:
                histories.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {step} (block {block}): {error}") from error
        partial, referred = partial + histories.partial, referred + histories.referred
        kinds = [type(decision).__name__ for decision in histories.mine.stored]
        cuts, seals = cuts + kinds.count("Cut"), seals + kinds.count("Seal")
        assert histories.mine.stored == histories.oracle.stored, f"seed {seed}"
    assert partial > 100, "reports of changes were tried"
    assert (referred > 10) == (list_min == 1), "messages referred to lists of members"
    assert cuts > 50, "cuts were made from them"
    assert seals > 10, "streams were sealed, so reports were voided"
    assert GLSN(0) < histories.mine.state.high_watermark
