"""How far one cluster goes: the shipped leader and a follower, each a process, on etcd, with virtual storage nodes.

``virtual_nodes`` says what is real about those. Most log streams are idle, and a few take one append after the other,
so every cut could pay for the idle ones. Each size is measured in phases: all nodes join, nothing is appended, appends,
the leader is killed, and the state is read back and stored as a snapshot.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from msgspec import Struct

from benchmarks.local_etcd import LocalEtcd
from benchmarks.usage import Busy, Watch
from benchmarks.virtual_nodes import CLUSTER, Fleet, address_of, node_key
from cutwater.core.order import decisions as d
from cutwater.core.order.state import OrderState
from cutwater.metadata.stores.open_store import open_store
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.runtime import processes
from cutwater.runtime.event_loop import allow_descriptors, run
from cutwater.types import (
    GLSN,
    LLSN,
    CutTime,
    DecisionIndex,
    Epoch,
    LeaderEpoch,
    LogStreamId,
    MetadataNodeId,
    StorageNodeId,
    TopicId,
)
from cutwater.wire.identity.server_keys import ServerKey

Size = tuple[int, int]
SIZES: Sequence[Size] = ((10, 100), (100, 1_000), (100, 10_000), (300, 10_000), (1_000, 20_000))
QUICK: Sequence[Size] = ((10, 100), (100, 1_000), (100, 10_000))
REPLICATION = 3
ACTIVE = 100
"""Log streams that take appends, at most."""
SEEDER = MetadataNodeId(99)
SEED_BATCH = 500
START_SECONDS_MAX, START_SECONDS_PER_NODE = 60.0, 0.1
DEAD_AFTER_SECONDS, DEAD_AFTER_PER_NODE = 4.0, 0.03
"""All virtual nodes start at once and share a processor, so they take long to join. Until then they must not count as
dead."""


class Phases(Struct, frozen=True):
    """How long each phase lasts, in seconds."""

    idle: float = 4.0
    load: float = 8.0
    failover_max: float = 60.0


class ScaleFigures(Struct):
    """What was measured for one size. Times are in seconds."""

    nodes: int
    streams: int
    start: float = 0.0
    sealed: int = 0
    """Streams that were not open on all their replicas after the start."""
    idle: Busy | None = None
    idle_bytes: float = 0.0
    load: Busy | None = None
    load_bytes: float = 0.0
    cuts: float = 0.0
    """Cuts per second."""
    interval: float = 0.0
    """Mean time between two cuts."""
    wait: float = 0.0
    leader_bytes: int = 0
    """Resident memory of the leader's process."""
    failover: float = 0.0
    copied: float = 0.0
    stored: float = 0.0
    loaded: float = 0.0
    trouble: str = ""

    @property
    def limit(self) -> str:
        if self.trouble:
            return self.trouble
        assert self.load is not None
        return self.load.limit()


def chains_of(nodes: int, streams: int) -> dict[LogStreamId, tuple[StorageNodeId, ...]]:
    copies = min(REPLICATION, nodes)
    return {
        LogStreamId(s): tuple(StorageNodeId((s + i) % nodes + 1) for i in range(copies)) for s in range(1, streams + 1)
    }


async def seed(
    store: MetadataStore,
    chains: dict[LogStreamId, tuple[StorageNodeId, ...]],
    keys: dict[StorageNodeId, ServerKey],
) -> None:
    """Store the decisions that made the cluster, as a leader would have."""
    epoch = await store.acquire(SEEDER, "127.0.0.1:1", LeaderEpoch(0))
    decisions: list[d.Decision] = [
        d.AddNode(node, address_of(node), node_key(node), (), key.public) for node, key in keys.items()
    ]
    decisions.append(d.CreateTopic(TopicId(1), "scale", REPLICATION, len(chains)))
    decisions += [d.CreateStream(s, TopicId(1), chain, GLSN(0), CutTime(1)) for s, chain in chains.items()]
    decisions += [d.Unseal(s, Epoch(1), LLSN(0), chain) for s, chain in chains.items()]
    state = OrderState()
    for begin in range(0, len(decisions), SEED_BATCH):
        batch = tuple(decisions[begin : begin + SEED_BATCH])
        await store.append(epoch, DecisionIndex(begin), batch)
        for decision in batch:
            state.apply(decision)
        if (begin // SEED_BATCH) % 8 == 7:
            await store.trim(epoch, state.snapshot())
    await store.trim(epoch, state.snapshot())


class MetadataProcesses:
    """Two metadata nodes. The first one leads."""

    def __init__(self, folder: Path, store: str, dead_after: float) -> None:
        self._folder, self._store, self._dead_after = folder, store, dead_after
        self.pids: list[int] = []
        self.addresses: list[str] = []

    async def start(self) -> None:
        for number in (1, 2):
            arguments = (self._store, str(number), str(self._folder), str(self._dead_after))
            command = [sys.executable, "-m", "benchmarks.scale_metadata", *arguments]
            self.pids.append(processes.start(command, self._folder / f"metadata{number}.log"))
            address = self._folder / f"metadata{number}.address"
            async with asyncio.timeout(START_SECONDS_MAX):
                while not address.exists() or not address.read_text():
                    await asyncio.sleep(0.05)
            self.addresses.append(address.read_text())

    def kill_leader(self) -> None:
        os.kill(self.pids[0], signal.SIGKILL)
        os.waitpid(self.pids[0], 0)
        self.pids.pop(0)

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids = []


async def measure(folder: Path, url: str, size: Size, phases: Phases) -> ScaleFigures:
    nodes, streams = size
    dead_after = DEAD_AFTER_SECONDS + DEAD_AFTER_PER_NODE * nodes
    figures = ScaleFigures(nodes, streams)
    chains = chains_of(nodes, streams)
    keys = {StorageNodeId(n): ServerKey.generate() for n in range(1, nodes + 1)}
    store = await open_store(url, cluster=CLUSTER)
    servers, fleet = MetadataProcesses(folder, url, dead_after), Fleet(chains, keys)
    try:
        await seed(store, chains, keys)
        await servers.start()
        await _measure_running(servers, fleet, figures, phases, folder)
        if not figures.trouble:
            await _measure_failover(servers, fleet, figures, phases)
    finally:
        fleet.close()
        servers.end()
        await _measure_snapshot(store, figures)
        await store.close()
    return figures


async def _measure_running(
    servers: MetadataProcesses, fleet: Fleet, figures: ScaleFigures, phases: Phases, folder: Path
) -> None:
    begun = time.monotonic()
    seconds_max = START_SECONDS_MAX + START_SECONDS_PER_NODE * figures.nodes
    try:
        async with asyncio.timeout(seconds_max):
            await fleet.join(servers.addresses)
            while len(fleet.cuts) < 1 or fleet.running < len(fleet.chains):
                await asyncio.sleep(0.1)
    except TimeoutError:
        figures.sealed = len(fleet.chains) - fleet.running
        figures.trouble = f"{figures.sealed} streams were not open {seconds_max:.0f} s after the start"
        return
    figures.start = time.monotonic() - begun
    await asyncio.sleep(1.0)
    watched = {"leader": [servers.pids[0]], "follower": [servers.pids[1]], "virtual nodes": [os.getpid()]}
    watch, before = Watch(watched, folder), fleet.bytes()
    await asyncio.sleep(phases.idle)
    figures.idle = watch.stop()
    figures.idle_bytes = (fleet.bytes() - before) / figures.idle.seconds
    fleet.begin(spread(list(fleet.chains), ACTIVE))
    await asyncio.sleep(1.0)
    fleet.cuts.clear()
    fleet.waits.clear()
    watch, before = Watch(watched, folder), fleet.bytes()
    await asyncio.sleep(phases.load)
    figures.load = watch.stop()
    figures.load_bytes = (fleet.bytes() - before) / figures.load.seconds
    figures.leader_bytes = resident_bytes(servers.pids[0])
    figures.cuts = len(fleet.cuts) / figures.load.seconds
    figures.interval = 1 / figures.cuts if figures.cuts else 0.0
    figures.wait = median(fleet.waits) if fleet.waits else 0.0


async def _measure_failover(servers: MetadataProcesses, fleet: Fleet, figures: ScaleFigures, phases: Phases) -> None:
    """Kill the leader, and wait for cuts of the next one."""
    before = len(fleet.cuts)
    servers.kill_leader()
    try:
        async with asyncio.timeout(phases.failover_max):
            while len(fleet.cuts) < before + 20:
                await asyncio.sleep(0.05)
    except TimeoutError:
        figures.trouble = f"no cuts within {phases.failover_max:.0f} s after the leader was killed"
        return
    figures.failover = max(b - a for a, b in pairwise(fleet.cuts[max(0, before - 1) :]))


async def _measure_snapshot(store: MetadataStore, figures: ScaleFigures) -> None:
    """Load everything as a new leader does, and store a snapshot as a leader does now and then."""
    begun = time.monotonic()
    loaded = await store.load(timeout_ms=60_000)
    state = OrderState(loaded.snapshot, loaded.decisions)
    figures.loaded = time.monotonic() - begun
    epoch = await store.acquire(SEEDER, "127.0.0.1:1", loaded.leader.epoch)
    begun = time.monotonic()
    snapshot = state.snapshot()
    figures.copied = time.monotonic() - begun
    begun = time.monotonic()
    await store.trim(epoch, snapshot)
    figures.stored = time.monotonic() - begun


def spread(streams: list[LogStreamId], count: int) -> list[LogStreamId]:
    """Return ``count`` streams, evenly spread over all, and over all nodes."""
    step = max(1, len(streams) // count) + 1
    return streams[::step][:count]


def resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def etcd() -> Iterator[tuple[Path, LocalEtcd]]:
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-", dir=".") as name:
        folder = Path(name).resolve()
        servers = LocalEtcd(folder).start()
        try:
            yield folder, servers
        finally:
            servers.close()


def figures_of(sizes: Sequence[Size], phases: Phases | None = None) -> Iterator[ScaleFigures]:
    allow_descriptors()
    for size in sizes:
        with etcd() as (folder, servers):
            yield run(measure(folder, servers.url("scale"), size, phases or Phases()))


def row(f: ScaleFigures) -> str:
    if f.load is None or f.idle is None:
        return f"| {f.nodes:,} × {f.streams:,} |" + " – |" * 11 + f" {f.limit} |"
    per_cut = f.load.spent["leader"].cpu / max(1.0, f.cuts * f.load.seconds)
    return (
        f"| {f.nodes:,} × {f.streams:,} | {f.start:.1f} s | {f.idle.cores('leader'):.2f} | {f.idle_bytes / 1e6:.2f} "
        f"| {f.interval * 1e3:.1f} ms | {f.wait * 1e3:.1f} ms | {per_cut * 1e3:.1f} ms "
        f"| {f.load.cores('leader'):.2f} + {f.load.cores('follower'):.2f} | {f.load_bytes / 1e6:.2f} "
        f"| {f.leader_bytes / 1e6:.0f} MB | {f.loaded:.2f} / {f.copied * 1e3:.0f} ms / {f.stored:.2f} "
        f"| {f.failover:.2f} s | {f.limit} |"
    )


HEAD = (
    "| nodes × streams | start | idle: leader's cores | idle: MB/s | cut interval | append waits "
    "| leader's CPU per cut | load: cores leader + follower | load: MB/s | leader's memory "
    "| load / copy / store a snapshot (s) | failover | first limit |",
    "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
)


def lines(*, quick: bool = False) -> Iterator[str]:
    yield "## Scale"
    yield ""
    yield (
        "The shipped leader and one follower, each a process, on one etcd, with virtual storage nodes in a third "
        "process: shipped connections, messages and reports, but no disks, and nothing is sent between storage nodes. "
        f"{REPLICATION} replicas; {ACTIVE} log streams take one append after the other, and the others are idle. The "
        "cut interval is a mean, and the time that an append waits for its cut a median, of one run on loopback. "
        "[Scale](explanation/scale.md) has the arithmetic."
    )
    yield ""
    yield from HEAD
    for figures in figures_of(QUICK if quick else SIZES):
        yield row(figures)
    yield ""


if __name__ == "__main__":
    wanted = [(int(a), int(b)) for a, _, b in (text.partition("x") for text in sys.argv[1:])]
    print("\n".join(HEAD))
    for found in figures_of(wanted or QUICK):
        print(row(found), flush=True)
        if found.load is not None:
            print("   ", found.load.told(), flush=True)
