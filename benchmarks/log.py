"""The log as its clients see it, each figure next to bare chains (``benchmarks.chain``) measured in turn with it.

It measures a local cluster of three storage nodes with replication 3 and one metadata node on SQLite, then the embedded
log, all on this machine and with fsync on. Rounds of Cutwater and of the reference alternate and medians are taken,
because the speed of a shared machine varies. Each row also shows what was busy meanwhile.

``python -m benchmarks.log [--quick]`` prints the section alone. The long run of small records has as many records as
the promise about it, unless ``--quick`` or ``CUTWATER_BENCH_RECORDS`` shortens it; it needs 4 GB of disk space.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from msgspec import Struct

from benchmarks import clients
from benchmarks.chain import Chain, chain
from benchmarks.clients import Worker
from benchmarks.usage import Busy, Watch
from cutwater.admin import local_cluster
from cutwater.admin.load_test import AppendLoad, Figures
from cutwater.admin.local_cluster import LocalCluster
from cutwater.admin.operations import Admin
from cutwater.client.async_client import AsyncClient
from cutwater.runtime import processes
from cutwater.runtime.event_loop import run

NODES = 3
CLIENTS_MAX = 2
MANY_STREAMS = 64
START_SECONDS = 0.4
"""How long clients have to connect before all begin at once."""
FEW_RECORDS = 100_000
MANY_RECORDS = 100_000_000
RECORDS_VARIABLE = "CUTWATER_BENCH_RECORDS"
BATCHES_PER_SECOND = 3_000_000
RECORDS_PER_SECOND = 200_000
BYTES_PER_RECORD = 100

LARGE, SMALL, MANY = "large-batches", "small", "many-streams"
"""Topics. Records that are read later have their own topic, so that they are all alike. Small appends have a topic for
each case, which is deleted afterwards, as the files of the chains are."""
MEMORY_BYTES = 1536 * 1024 * 1024
"""Upper bound of what all processes together write in a round."""


class Size(Struct, frozen=True):
    """How much is measured."""

    rounds: int = 5
    seconds: float = 1.0
    read_seconds: float = 3.0
    many_records: int = MANY_RECORDS


QUICK = Size(rounds=1, seconds=0.5, read_seconds=1.0, many_records=1_000_000)


class Case(Struct, frozen=True):
    """Appends of ``rows`` records (0: one plain value) by some client processes, and the messages of the bare chain."""

    name: str
    rows: int
    in_flight: int
    clients: int
    chain_in_flight: int
    target: float
    """Target ratio to the bare chain's rate, or to its latency for one append at a time."""

    @property
    def message_bytes(self) -> int:
        return max(self.rows, 1) * BYTES_PER_RECORD

    @property
    def is_latency(self) -> bool:
        return self.in_flight * self.clients == 1


BATCHES = (
    Case("batches of 10,000 records (1 MB), 4 in flight per client", 10_000, 4, 2, 8, 0.5),
    Case("batches of 100 records (10 KB), 32 in flight per client", 100, 32, 2, 64, 0.5),
)
CLUSTER = (
    *BATCHES,
    Case("96 single records at once", 0, 96, 1, 64, 2.0),
    Case("one single record at a time", 0, 1, 1, 1, 2.5),
)
EMBEDDED = (
    Case("batches of 10,000 records (1 MB), 8 threads", 10_000, 8, 1, 8, 0.5),
    Case("batches of 100 records (10 KB), 64 threads", 100, 64, 1, 64, 0.5),
    Case("96 single records at once, 96 threads", 0, 96, 1, 64, 0.5),
    Case("one single record at a time, a thread", 0, 1, 1, 1, 2.0),
)
SENT = (
    Case("batches of 100 records (10 KB), 64 in flight, a producer", 100, 64, 1, 64, 0.5),
    Case("96 single records at once, a producer", 0, 96, 1, 64, 0.5),
)
ON_LOOP = (
    Case("batches of 100 records (10 KB), 64 in flight, asyncio", 100, 64, 1, 64, 0.5),
    Case("96 single records at once, asyncio", 0, 96, 1, 64, 0.5),
    Case("one single record at a time, asyncio", 0, 1, 1, 1, 2.0),
)


class Round(Struct, frozen=True):
    """Figures of one round: ``rate`` in records per second, latencies of single appends in seconds."""

    records: int
    rate: float
    latencies: list[float]
    busy: Busy

    @property
    def cpu_us(self) -> float:
        """Processor time of all processes per record. Unlike the rate, it hardly depends on other load."""
        return self.busy.total().cpu / self.records * 1e6


Measure = Callable[[float], Round]
"""Measures one round of this many seconds."""


def of_figures(figures: Figures, watch: Watch) -> Round:
    rate = figures.records / (figures.ended - figures.begun)
    return Round(figures.records, rate, figures.latencies, watch.stop())


def of_chain(bare: Chain, case: Case, folder: Path) -> Measure:
    message = os.urandom(case.message_bytes)
    each = max(case.rows, 1)

    def measure(seconds: float) -> Round:
        watch = Watch({"client": [os.getpid()], "chain": bare.pids}, folder)
        found = bare.run(message, case.chain_in_flight, seconds)
        return of_figures(Figures(found.messages * each, found.begun, found.ended, found.latencies), watch)

    return measure


@contextmanager
def chains(folder: Path, length: int) -> Iterator[tuple[Chain, Chain]]:
    """Run both chains, in order and overlapping. Their files are removed afterwards, to save disk space."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        chain(Path(name, "in-order"), length, overlaps=False) as in_order,
        chain(Path(name, "overlapping"), length, overlaps=True) as overlapping,
    ):
        yield in_order, overlapping


def in_turn(measures: Sequence[Measure], size: Size, folder: Path) -> list[list[Round]]:
    """Run rounds of each, alternating. A different one begins each time, and each finds memory ready."""
    found: list[list[Round]] = [[] for _ in measures]
    for first in range(size.rounds):
        for at in range(len(measures)):
            which = (first + at) % len(measures)
            have_memory_at_hand(folder)
            found[which].append(measures[which](size.seconds))
    return found


def have_memory_at_hand(folder: Path) -> None:
    """Make memory ready before a round. In a virtual machine, memory that was free for some seconds may have been
    returned to the host, and getting it back costs several times the write itself: 1.4 ms/MB of a file instead of the
    usual 0.3. The next measurement must not pay for that."""
    megabyte, path = os.urandom(1024 * 1024), folder / "memory"
    with path.open("wb", buffering=0) as file:
        for _ in range(MEMORY_BYTES // len(megabyte)):
            file.write(megabyte)
    path.unlink()


def middle_round(rounds: list[Round]) -> Round:
    return sorted(rounds, key=lambda one: one.rate)[len(rounds) // 2]


class Row(Struct, frozen=True):
    what: str
    figure: str
    reference: str
    ratio: str
    target: str
    overlapping: str
    cpu: str
    busy: Busy

    def told(self) -> str:
        load = f"{os.getloadavg()[0]:.1f}"
        busy, limit = self.busy.told(), self.busy.limit()
        compared = (self.figure, self.reference, self.ratio, self.target, self.overlapping)
        return f"| {' | '.join((self.what, *compared, self.cpu, busy, limit, load))} |"


def compared(case: Case, ours: list[Round], theirs: list[Round], overlapping: list[Round] | None = None) -> str:
    """Return a row of the table."""
    ours_us, theirs_us = (median(one.cpu_us for one in rounds) for rounds in (ours, theirs))
    ratio = _ratio(case, ours, theirs)
    return Row(
        case.name,
        _figure(case, ours),
        _figure(case, theirs),
        f"{ratio:.2f}",
        f"{'≤' if case.is_latency else '≥'} {case.target:g}: {_met(_is_met(case, ratio))}",
        _beside(case, ours, overlapping) if overlapping else "",
        f"{ours_us:.2f} / {theirs_us:.2f} µs",
        middle_round(ours).busy,
    ).told()


def _is_met(case: Case, ratio: float) -> bool:
    return ratio <= case.target if case.is_latency else ratio >= case.target


def _beside(case: Case, ours: list[Round], overlapping: list[Round]) -> str:
    ratio = _ratio(case, ours, overlapping)
    return f"{_figure(case, overlapping)}: {ratio:.2f}{'' if _is_met(case, ratio) else ', not as wanted'}"


def _latencies(rounds: list[Round]) -> list[float]:
    return sorted(latency for one in rounds for latency in one.latencies)


def _ratio(case: Case, ours: list[Round], theirs: list[Round]) -> float:
    if case.is_latency:
        return median(_latencies(ours)) / median(_latencies(theirs))
    return middle_round(ours).rate / middle_round(theirs).rate


def _figure(case: Case, rounds: list[Round]) -> str:
    return _latency(_latencies(rounds)) if case.is_latency else _rate(middle_round(rounds).rate)


def against(what: str, rounds: list[Round], target: float) -> str:
    """Return a row for a figure that has a target of its own."""
    middle = middle_round(rounds)
    return Row(
        what,
        _rate(middle.rate),
        "",
        "",
        f"≥ {_rate(target)}: {_met(middle.rate >= target)}",
        "",
        f"{median(one.cpu_us for one in rounds):.2f} µs",
        middle.busy,
    ).told()


def _met(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def _rate(rate: float) -> str:
    return f"{rate / 1e6:.2f} M/s" if rate >= 1e6 else f"{rate / 1e3:.1f} k/s"


def _latency(ordered: list[float]) -> str:
    return f"{median(ordered) * 1e3:.2f} ms, 99 %: {ordered[len(ordered) * 99 // 100] * 1e3:.1f}"


# A cluster.


class Cluster:
    """The running cluster, and the processes of its clients."""

    def __init__(self, cluster: LocalCluster, workers: list[Worker], folder: Path) -> None:
        self._cluster, self._workers, self._folder = cluster, workers, folder
        self.heads: dict[str, int] = {}

    def _watch(self, topic: str, workers: list[Worker]) -> Watch:
        head = self.heads.get(topic)
        nodes = self._cluster.storage_nodes
        watched: dict[str, list[int]] = {"clients": [worker.pid for worker in workers]}
        if head is None:
            watched["storage nodes"] = [node.pid for node in nodes]
        else:
            watched["head"] = [node.pid for node in nodes if node.id == head]
            watched["backups"] = [node.pid for node in nodes if node.id != head]
        watched["metadata"] = [node.pid for node in self._cluster.metadata]
        return Watch(watched, self._folder)

    def appending(self, load: AppendLoad, count: int) -> Measure:
        def measure(seconds: float) -> Round:
            start_at = time.monotonic() + START_SECONDS
            workers = self._workers[:count]
            jobs = [worker.begin(clients.append, self._cluster.servers, load, start_at, seconds) for worker in workers]
            time.sleep(START_SECONDS)
            watch = self._watch(load.topic, workers)
            return of_figures(clients.together([outcome() for outcome in jobs]), watch)

        return measure

    def reading(self, topic: str, *, as_batches: bool) -> Measure:
        def measure(seconds: float) -> Round:
            # Read in a process that has appended nothing, so that it has no data cached.
            reader = self._workers[-1]
            watch = self._watch(topic, [reader])
            return of_figures(reader.call(clients.read, self._cluster.servers, topic, as_batches, seconds), watch)

        return measure


@contextmanager
def running_cluster(folder: Path) -> Iterator[LocalCluster]:
    cluster = local_cluster.start(folder / "cluster", storage_nodes=NODES, metadata=1)
    try:
        yield cluster
    finally:
        processes.stop([member.pid for member in cluster.processes()], 10.0)


async def _create(cluster: LocalCluster, name: str) -> int:
    """Create a topic with one log stream; return its head."""
    async with await AsyncClient.connect(cluster.servers) as log, Admin(cluster.addresses) as admin:
        created = await log.create_topic(name, streams=1, replication=NODES)
        chains = {stream.stream: stream.chain for stream in (await admin.catalog()).streams}
        return chains[created.streams[0]][0]


async def _delete(cluster: LocalCluster, name: str) -> None:
    async with Admin(cluster.addresses, timeout_ms=30_000) as admin:
        await admin.delete_topic(name)


@contextmanager
def topic_for(case: Case, cluster: LocalCluster) -> Iterator[tuple[str, int]]:
    """Yield the name of the topic and its head."""
    if case.rows >= 10_000:
        yield LARGE, run(_create(cluster, LARGE))
        return
    name = f"{SMALL}-{case.rows}-{case.in_flight}"
    yield name, run(_create(cluster, name))
    run(_delete(cluster, name))


async def make_many(cluster: LocalCluster) -> None:
    async with await AsyncClient.connect(cluster.servers) as log:
        await log.create_topic(MANY, streams=MANY_STREAMS, replication=NODES)


def cluster_rows(folder: Path, size: Size) -> list[str]:
    rows = []
    with ExitStack() as stack:
        local = stack.enter_context(running_cluster(folder))
        workers = stack.enter_context(clients.workers(CLIENTS_MAX + 1))
        cluster = Cluster(local, workers, folder)
        for case in CLUSTER:
            with chains(folder, NODES) as bare, topic_for(case, local) as (topic, head):
                cluster.heads[topic] = head
                ours = cluster.appending(AppendLoad(topic, case.rows, case.in_flight), case.clients)
                found = in_turn([ours, *(of_chain(one, case, folder) for one in bare)], size, folder)
            by = f", {case.clients} client processes" if case.clients > 1 else ""
            rows.append(compared(_named(case, case.name + by), *found))
        # Created only now, so that these streams do not burden the cases before.
        run(make_many(local))
        one = AppendLoad(LARGE, 10_000, 32)
        many = AppendLoad(MANY, 10_000, 32)
        on_one, on_many = in_turn([cluster.appending(load, CLIENTS_MAX) for load in (one, many)], size, folder)
        rows.append(
            compared(
                _named(BATCHES[0], f"{MANY_STREAMS} log streams, 1 MB batches (reference: one)", 0.7), on_many, on_one
            )
        )
        for as_batches, target in ((True, BATCHES_PER_SECOND), (False, RECORDS_PER_SECOND)):
            rounds = [cluster.reading(LARGE, as_batches=as_batches)(size.read_seconds) for _ in range(size.rounds)]
            rows.append(
                against(f"subscribe to 1 MB batches, as {'batches' if as_batches else 'records'}", rounds, target)
            )
    return rows


def _named(case: Case, name: str, target: float | None = None) -> Case:
    return Case(
        name,
        case.rows,
        case.in_flight,
        case.clients,
        case.chain_in_flight,
        case.target if target is None else target,
    )


# Embedded.


Job = Callable[[str, AppendLoad, float], Figures]
IN_THREADS = clients.open_embedded, clients.close_embedded
ON_A_LOOP = clients.open_on_loop, clients.close_on_loop
WAYS = (
    *((case, IN_THREADS, clients.append_embedded) for case in EMBEDDED),
    *((case, IN_THREADS, clients.send_embedded) for case in SENT),
    *((case, ON_A_LOOP, clients.append_on_loop) for case in ON_LOOP),
)


def embedded_rows(folder: Path, size: Size) -> list[str]:
    """Measure each case with a log of its own, which is removed afterwards as the chains' files are."""
    found = []
    with clients.workers(1) as (worker,):
        for case, (open_log, close_log), job in WAYS:
            with tempfile.TemporaryDirectory(dir=folder) as path, chains(folder, 1) as bare:
                worker.call(open_log, path, {SMALL: 1})
                ours = _embedded(worker, job, path, case, folder)
                references = [of_chain(one, case, folder) for one in bare]
                found.append(compared(case, *in_turn([ours, *references], size, folder)))
                worker.call(close_log, path)
    return found


def _embedded(worker: Worker, job: Job, path: str, case: Case, folder: Path) -> Measure:
    def measure(seconds: float) -> Round:
        watch = Watch({"process": [worker.pid]}, folder)
        return of_figures(worker.call(job, path, AppendLoad(SMALL, case.rows, case.in_flight), seconds), watch)

    return measure


def small_records(folder: Path, size: Size) -> list[str]:
    """Compare the cost of a record in a log of few records and in one of many."""
    count = int(os.environ.get(RECORDS_VARIABLE, size.many_records))
    path = str(folder / "small")
    with clients.workers(1) as (worker,):
        topics = [f"few{i}" for i in range(max(3, size.rounds))]
        worker.call(clients.open_embedded, path, dict.fromkeys([*topics, "many"], 1))
        few = []
        for topic in topics:
            found = worker.call(clients.fill_embedded, path, AppendLoad(topic, 10_000, 4, value_bytes=8), FEW_RECORDS)
            few.append((found.ended - found.begun) / found.records * 1e9)
        watch = Watch({"process": [worker.pid]}, folder)
        found = worker.call(clients.fill_embedded, path, AppendLoad("many", 10_000, 4, value_bytes=8), count)
        busy = watch.stop()
        many = (found.ended - found.begun) / found.records * 1e9
        worker.call(clients.close_embedded, path)
    ratio = many / median(few)
    return [
        Row(
            f"{count:,} records of 8 bytes, batches of 10,000 (reference: {FEW_RECORDS:,})",
            f"{many:.0f} ns each",
            f"{median(few):.0f} ns each",
            f"{ratio:.2f}",
            f"≤ 1.2: {_met(ratio <= 1.2)}",
            "",
            f"{busy.total().cpu / count * 1e6:.2f} µs",
            busy,
        ).told()
    ]


HEAD = (
    "| what | Cutwater | reference | ratio | target | overlapping: ratio | CPU per record | busy, in cores | limit |"
    " load |",
    "| --- | ---: | ---: | ---: | --- | ---: | ---: | --- | --- | ---: |",
)


def _in_its_own(folder: Path, rows: Callable[[Path, Size], list[str]], size: Size) -> list[str]:
    """Measure in a folder that is removed afterwards, so that all parts together need no more disk space than one."""
    folder.mkdir()
    try:
        return rows(folder, size)
    finally:
        shutil.rmtree(folder)


def lines(*, quick: bool = False) -> list[str]:
    """Return a section of the benchmark report, in Markdown."""
    size = QUICK if quick else Size()
    # Beside the other files of a run: the folder of temporary files may be in memory.
    with tempfile.TemporaryDirectory(prefix="bench-log-", dir=".") as name:
        folder = Path(name).absolute()
        cluster = _in_its_own(folder / "cluster", cluster_rows, size)
        embedded = _in_its_own(folder / "embedded", embedded_rows, size)
        small = _in_its_own(folder / "small", small_records, size)
    return [
        "## The log, as clients see it",
        "",
        f"Records of {BYTES_PER_RECORD} bytes, fsync on, all on this machine ({os.cpu_count()} cores, one disk). The",
        "*reference* is a bare chain of Python processes that receive, check checksums, write, `fdatasync` and then",
        "hand on message by message, without order, recovery or identity; targets are held against it. The",
        "*overlapping* chain is the quickest that we could think of: it hands on all that it has received in one",
        "piece, before it writes it, so that all disks work at the same time. Their rounds alternate with Cutwater's",
        f"({size.rounds} of {size.seconds:g} s each), each after memory was made ready for what it writes, as a host",
        "may have taken back what is free; figures are medians. *Load* is the machine's load average at that moment:",
        "with more than a few, others were at work too. *CPU per record*, of Cutwater / of the reference, all",
        "processes together, depends less on that. Rates are records per second, acknowledged when they are on all",
        "disks and have their positions; *dirtied* are pages of files that were changed, counted whole.",
        "",
        f"### Cluster: {NODES} storage nodes, replication {NODES}, one metadata node on SQLite",
        "",
        *HEAD,
        *cluster,
        "",
        "### Embedded: one process, replication 1; the reference is a chain of one",
        "",
        "For speed, use asyncio (`AsyncClient.open`), or a producer from a thread: then no thread has to be woken",
        "for each record. *Threads* are as many as there are appends in flight, each waiting for its own. Of batches,",
        "the reference has as many in flight, 8 of 1 MB and 64 of 10 KB; of single records it has 64, because they",
        "travel together here and there each is a message.",
        "",
        *HEAD,
        *embedded,
        *small,
        "",
    ]


def main() -> int:
    print("\n".join(lines(quick="--quick" in sys.argv[1:])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
