"""Measures the pure core and the simulator. The reference for ordering is one ``fdatasync`` of 4 KiB, because every
append waits for one anyway.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import msgspec

from benchmarks import order
from cutwater.core.order import decisions as d
from cutwater.core.order.cut import Candidate, make_cut
from cutwater.core.order.events import ReportArrived, Store, Stored
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.state import OrderState
from cutwater.core.read.watermark import BoundedOutOfOrderness, WatermarkClock
from cutwater.core.replica.deduplication import Deduplicator
from cutwater.core.replica.events import Append, Commit, CommitDurable, EntriesDurable
from cutwater.core.replica.recovery import HardState, Valid
from cutwater.core.replica.replica import Replica
from cutwater.testing.virtual.options import random_options
from cutwater.testing.virtual.simulation import simulate_shipped
from cutwater.types import (
    GLSN,
    LLSN,
    SECOND,
    Batch,
    CommitContext,
    CutTime,
    DecisionIndex,
    Epoch,
    EventTime,
    Incarnation,
    Instant,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    ReplicaState,
    Report,
    Revision,
    StorageNodeId,
    TopicId,
    UncommitReport,
)

ROUNDS = 5
STREAMS = 64
NODES = tuple(StorageNodeId(n) for n in (1, 2, 3))


def micros_per(rounds_of: Callable[[int], None], count: int) -> float:
    """Return the microseconds of processor time for one of ``count``: the median of several rounds."""
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        rounds_of(count)
        times.append((time.process_time() - started) / count * 1e6)
    return median(times)


def fdatasync_micros() -> float:
    """Return the wall time of appending 4 KiB and ``fdatasync``, in the current directory."""
    block = os.urandom(4096)
    times = []
    with tempfile.NamedTemporaryFile(dir=".") as file:
        for _ in range(200):
            started = time.perf_counter()
            file.write(block)
            file.flush()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - started) * 1e6)
    return median(times)


def batch(i: int) -> Batch:
    return Batch(1, b"x" * 100, i, EventTime(i), EventTime(i))


def head_replica(count: int) -> None:
    """Run the whole life of a batch at the head of a chain of three: append, durable, commit, commit durable."""
    replica = Replica(
        NODES[0],
        LogStreamId(1),
        HardState(epoch=Epoch(1), chain=NODES),
        Valid(LLSN(0), GLSN(0), LLSN(0)),
        first_llsn=LLSN(1),
        tail=(),
        dedup=Deduplicator(),
    )
    replica.state = ReplicaState.RUNNING
    for i in range(1, count + 1):
        replica.handle(Append(i, Epoch(1), batch(i)))
        replica.handle(EntriesDurable(0, LLSN(i)))
        replica.report()
        context = CommitContext(Epoch(1), LLSN(i), GLSN(i), 1, GLSN(i), GLSN(i - 1), CutTime(i))
        replica.handle(Commit(GLSN(i - 1), GLSN(i), Revision(1), context))
        replica.handle(CommitDurable(0, context))


def bare_cut(count: int) -> None:
    candidates = [
        Candidate(LogStreamId(s), Epoch(1), LLSN(10), (LLSN(12), LLSN(13), LLSN(12))) for s in range(1, STREAMS + 1)
    ]
    for _ in range(count):
        make_cut(GLSN(100), CutTime(1), candidates)


def order_layer(count: int) -> None:
    """Run turns of the leader: reports of three nodes with all streams, one cut, its announcement."""
    streams = [LogStreamId(s) for s in range(1, STREAMS + 1)]
    decisions: list[d.Decision] = [*(d.AddNode(n) for n in NODES), d.CreateTopic(TopicId(1), "t", 3)]
    decisions += [d.CreateStream(s, TopicId(1), NODES, GLSN(0), CutTime(1)) for s in streams]
    decisions += [d.Unseal(s, Epoch(1), LLSN(0), NODES) for s in streams]
    state = OrderState(None, decisions)
    layer = OrderLayer(LeaderEpoch(1), state, Instant(0, 10), OrderOptions(tick_us_min=10**15))
    for i in range(1, count + 1):
        now = Instant(i * 1_000, i * 1_000 + 10)
        index = DecisionIndex(0)
        for node in NODES:
            reports = tuple(
                UncommitReport(s, Epoch(1), ReplicaState.RUNNING, state.high_watermark, LLSN(i), 1) for s in streams
            )
            report = Report(node, Incarnation(1), i, LeaderEpoch(1), NodeState.READY, reports, state.high_watermark)
            for effect in layer.handle(ReportArrived(report), now):
                if isinstance(effect, Store):
                    index = DecisionIndex(effect.after + len(effect.decisions))
        layer.handle(Stored(index), now)
    assert state.high_watermark == count * STREAMS


def watermark_clock(count: int) -> None:
    """Process records in batches of 100, round robin over 64 streams."""
    clock = WatermarkClock()
    strategy = BoundedOutOfOrderness(5 * SECOND)
    for s in range(1, STREAMS + 1):
        clock.add_stream(LogStreamId(s), strategy, CutTime(0))
    times = [EventTime(i) for i in range(100)]
    for i in range(count // 100):
        clock.seen(LogStreamId(i % STREAMS + 1), GLSN(i * 100 + 1), 100, CutTime(i + 1), max(times))


def running_maximum(count: int) -> None:
    """Compute the least that a watermark can cost: the running maximum of the same event times, and nothing else."""
    times = list(range(100))
    for _ in range(count // 100):
        highest, out = 0, []
        for t in times:
            out.append(highest)
            highest = t if t > highest else highest


def encode_cut(count: int) -> None:
    commits = make_cut(
        GLSN(100),
        CutTime(1),
        [Candidate(LogStreamId(s), Epoch(1), LLSN(10), (LLSN(12),) * 3) for s in range(1, STREAMS + 1)],
    )
    cut = d.Cut(commits[0].context.high_watermark, GLSN(100), CutTime(1), Revision(1), commits)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(d.Cut)
    for _ in range(count):
        decoder.decode(encoder.encode(cut))


def simulator() -> tuple[float, float]:
    """Return simulated events per second, and clusters per second, on one core."""
    started = time.perf_counter()
    results = [simulate_shipped(seed, random_options(seed)) for seed in range(40)]
    seconds = time.perf_counter() - started
    return sum(result.events for result in results) / seconds, len(results) / seconds


def lines() -> list[str]:
    sync = fdatasync_micros()
    head = micros_per(head_replica, 2_000)
    cut, turn, coded = micros_per(bare_cut, 300), micros_per(order_layer, 100), micros_per(encode_cut, 300)
    clock, least = micros_per(watermark_clock, 100_000), micros_per(running_maximum, 100_000)
    events, clusters = simulator()
    rows = [
        ("`fdatasync` of 4 KiB (reference)", f"{sync:.0f} µs", "1", "disk"),
        ("head replica: one batch from append to durable commit", f"{head:.1f} µs", f"{head / sync:.3f}", "CPU"),
        (f"the cut alone, {STREAMS} streams × 3 replicas", f"{cut:.1f} µs", f"{cut / sync:.3f}", "CPU"),
        (
            f"leader's turn: 3 reports of {STREAMS} streams, cut, messages",
            f"{turn:.0f} µs",
            f"{turn / sync:.3f}",
            "CPU",
        ),
        (f"that cut encoded and decoded, {STREAMS} streams", f"{coded:.1f} µs", f"{coded / sync:.3f}", "CPU"),
    ]
    return [
        "## Ordering",
        "",
        "| what | time | in `fdatasync`s | limit |",
        "| --- | ---: | ---: | --- |",
        *(f"| {what} | {figure} | {ratio} | {limit} |" for what, figure, ratio, limit in rows),
        "",
        "No cost depends on the number of records in a batch: bodies are never looked at.",
        "",
        *order.lines(),
        "## Event time",
        "",
        "| what | per record | ratio | limit |",
        "| --- | ---: | ---: | --- |",
        f"| running maximum in a bare loop (reference) | {least * 1e3:.0f} ns | 1 | CPU |",
        f"| exact watermark per record, {STREAMS} streams, batches of 100 | {clock * 1e3:.0f} ns "
        f"| {clock / least:.2f} | CPU |",
        "",
        "## Simulator",
        "",
        f"{events / 1e3:.0f} thousand events per second and core, {clusters:.1f} whole clusters per second and core",
        "with random faults, checks included; limited by CPU.",
        "",
    ]
