"""Measures the cost of leading many log streams: the pure order layer with 64 and with 1,000 streams on ten storage
nodes.

A leader wakes twenty times a second, and gets a report whenever something changes on a storage node, at least ten times
a second from each. So the wake and the turn in which little has changed matter most: they should cost as much as the
change, and as little as possible for streams without changes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

from msgspec import Struct, structs

from cutwater.core.order import decisions as d
from cutwater.core.order.events import ReportArrived, Store, Stored, Wake
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.state import OrderState
from cutwater.types import (
    GLSN,
    LLSN,
    CutTime,
    DecisionIndex,
    Epoch,
    Incarnation,
    Instant,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    ReplicaState,
    Report,
    StorageNodeId,
    TopicId,
    UncommitReport,
)

NODES = tuple(StorageNodeId(n) for n in range(1, 11))
REPLICATION = 3
MANY, FEW = 1_000, 64
ROUNDS = 5
WAKE_US = 50_000


class Figures(Struct):
    """Processor time in microseconds."""

    streams: int
    wake: float
    quiet_report: float
    turn_of_one: float
    turn_of_all: float


class Cluster:
    """A leader, and storage nodes that have everything on disk as soon as it is appended."""

    def __init__(self, streams: int) -> None:
        self.chains = {
            LogStreamId(s): tuple(NODES[(s + i) % len(NODES)] for i in range(REPLICATION))
            for s in range(1, streams + 1)
        }
        decisions: list[d.Decision] = [
            *(d.AddNode(n) for n in NODES),
            d.CreateTopic(TopicId(1), "t", REPLICATION, streams),
        ]
        decisions += [d.CreateStream(s, TopicId(1), on, GLSN(0), CutTime(1)) for s, on in self.chains.items()]
        decisions += [d.Unseal(s, Epoch(1), LLSN(0), on) for s, on in self.chains.items()]
        self.state = OrderState(None, decisions)
        self.now = Instant(10**9, 10**15)
        self.layer = OrderLayer(LeaderEpoch(1), self.state, self.now, OrderOptions(tick_us_min=10**15))
        self.sequence = 0
        self.appended = dict.fromkeys(self.chains, 0)
        self.reports: dict[StorageNodeId, dict[LogStreamId, UncommitReport]] = {n: {} for n in NODES}
        for stream, on in self.chains.items():
            for node in on:
                self.note(stream, node)
        for node in NODES:
            self.report(node)

    def note(self, stream: LogStreamId, node: StorageNodeId) -> None:
        committed = self.state.streams[stream].committed_end
        self.reports[node][stream] = UncommitReport(
            stream,
            Epoch(1),
            ReplicaState.RUNNING,
            self.state.high_watermark,
            LLSN(committed + 1),
            self.appended[stream] - committed,
        )

    def pass_time(self) -> None:
        self.now = Instant(self.now.monotonic + 1_000, self.now.wall + 1_000)

    def report(self, node: StorageNodeId) -> None:
        self.sequence += 1
        own = tuple(self.reports[node].values())
        applied = self.state.high_watermark
        report = Report(node, Incarnation(1), self.sequence, LeaderEpoch(1), NodeState.READY, own, applied)
        self.handle(ReportArrived(report))

    def handle(self, event: ReportArrived | Wake) -> None:
        for effect in self.layer.handle(event, self.now):
            if isinstance(effect, Store):
                self.layer.handle(Stored(DecisionIndex(effect.after + len(effect.decisions))), self.now)

    def append(self, streams: tuple[LogStreamId, ...]) -> None:
        """Append one record to each stream: the reports of its nodes, the cut, and reports that it was applied."""
        for stream in streams:
            self.appended[stream] += 1
        nodes = sorted({node for stream in streams for node in self.chains[stream]})
        for _ in range(2):
            for stream in streams:
                for node in self.chains[stream]:
                    self.note(stream, node)
            for node in nodes:
                self.report(node)
        self.pass_time()


def _micros(what: Callable[[], None], count: int) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(count):
            what()
        times.append((time.process_time() - started) / count * 1e6)
    return median(times)


def measure(streams: int) -> Figures:
    cluster = Cluster(streams)
    everything = tuple(cluster.chains)
    cluster.append(everything)

    def wake() -> None:
        cluster.now = structs.replace(cluster.now, monotonic=cluster.now.monotonic + 1)
        cluster.handle(Wake())

    figures = Figures(
        streams,
        _micros(wake, 100),
        _micros(lambda: cluster.report(NODES[0]), 100),
        _micros(lambda: cluster.append(everything[:1]), 20),
        _micros(lambda: cluster.append(everything), 3),
    )
    assert all(stream.committed_end == cluster.appended[s] for s, stream in cluster.state.streams.items())
    return figures


def lines() -> list[str]:
    """Return a part of the section on ordering, in Markdown."""
    few, many = measure(FEW), measure(MANY)
    rows = (
        ("a wake while nothing happens", few.wake, many.wake),
        ("a report in which nothing has changed", few.quiet_report, many.quiet_report),
        ("a record in one stream: 6 reports, cut, messages", few.turn_of_one, many.turn_of_one),
        ("a record in every stream: 20 reports, cut, messages", few.turn_of_all, many.turn_of_all),
    )
    share = 100 * many.wake / WAKE_US
    return [
        f"The leader with {len(NODES)} storage nodes and replication {REPLICATION}, by the number of log streams, in "
        f"processor time. It wakes every {WAKE_US // 1_000} ms: with {MANY} streams that is {share:.1f} % of a core.",
        "",
        f"| what | {FEW} streams | {MANY} streams |",
        "| --- | ---: | ---: |",
        *(f"| {what} | {one:.0f} µs | {other:.0f} µs |" for what, one, other in rows),
        "",
    ]


if __name__ == "__main__":
    print("\n".join(lines()))
    sys.exit(0)
