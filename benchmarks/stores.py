"""Measures storing a decision: SQLite and etcd, next to a bare ``fdatasync`` of 4 KiB on the same disk.

The decision is a cut of 64 log streams, one append in flight, as the leader of the metadata repository does it. Rounds
of all of them alternate, because the speed of a shared disk varies. ``make bench`` includes ``lines()``; run alone, it
prints them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

from msgspec import Struct

from benchmarks.local_etcd import MISSING, LocalEtcd
from cutwater.admin.local_etcd import find_etcd
from cutwater.core.order import decisions as d
from cutwater.core.order.cut import Candidate, make_cut
from cutwater.core.order.state import OrderState
from cutwater.metadata.stores.encoding import encode_batch
from cutwater.metadata.stores.open_store import open_store
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.runtime.event_loop import run
from cutwater.types import (
    GLSN,
    LLSN,
    ClusterId,
    CutTime,
    DecisionIndex,
    Epoch,
    LeaderEpoch,
    LogStreamId,
    MetadataNodeId,
    Revision,
    StorageNodeId,
    TopicId,
)

STREAMS = 64
ROUNDS = 5
COUNT = 100
NODES = tuple(StorageNodeId(n) for n in (1, 2, 3))
EPOCH = LeaderEpoch(1)
TIMEOUT_MS = 30_000
"""Long, because figures of a disk that stalled for a while are better than none."""


class Figures(Struct):
    """Seconds that each call took, and processor seconds of all calls."""

    name: str
    seconds: list[float]
    cpu: float = 0.0

    def row(self, reference: float) -> str:
        ordered = sorted(self.seconds)
        middle = median(ordered)
        tail = f"{ordered[len(ordered) * 99 // 100] * 1e6:.0f} µs" if len(ordered) >= 100 else ""
        return (
            f"| {self.name} | {middle * 1e6:.0f} µs | {tail} | {middle / reference:.2f} "
            f"| {len(ordered) / sum(ordered):.0f} | {self.cpu / len(ordered) * 1e6:.0f} µs |"
        )


class Subject:
    """A store under measurement: a leader that makes one cut after the other."""

    def __init__(self, name: str, store: MetadataStore) -> None:
        self.store = store
        self.state = OrderState(None, _opening())
        self.appends = Figures(f"{name}: append of one cut", [])
        self.confirms = Figures(f"{name}: empty append", [])
        self.trims = Figures(f"{name}: trim after {ROUNDS * COUNT} cuts", [])
        self.loads = Figures(f"{name}: load of {ROUNDS * COUNT} cuts", [])

    async def start(self) -> None:
        await self.store.acquire(MetadataNodeId(1), "127.0.0.1:1", LeaderEpoch(0))
        await self.store.append(EPOCH, DecisionIndex(0), tuple(_opening()), timeout_ms=TIMEOUT_MS)

    async def round(self) -> None:
        for _ in range(COUNT):
            cut, after = _cut(self.state), self.state.index
            self.state.apply(cut)
            await _timed(self.appends, self.store.append(EPOCH, after, (cut,), timeout_ms=TIMEOUT_MS))
        for _ in range(COUNT // 2):
            await _timed(self.confirms, self.store.append(EPOCH, self.state.index, (), timeout_ms=TIMEOUT_MS))

    async def finish(self) -> None:
        await _timed(self.loads, self.store.load(timeout_ms=TIMEOUT_MS))
        await _timed(self.trims, self.store.trim(EPOCH, self.state.snapshot()))

    def figures(self) -> list[Figures]:
        return [self.appends, self.confirms, self.loads, self.trims]


async def _timed(figures: Figures, call: Awaitable[object]) -> None:
    started, cpu = time.perf_counter(), time.process_time()
    await call
    figures.seconds.append(time.perf_counter() - started)
    figures.cpu += time.process_time() - cpu


def _opening() -> list[d.Decision]:
    streams = [LogStreamId(n) for n in range(1, STREAMS + 1)]
    return [
        *(d.AddNode(node) for node in NODES),
        d.CreateTopic(TopicId(1), "bench", len(NODES)),
        *(d.CreateStream(stream, TopicId(1), NODES, GLSN(0), CutTime(1)) for stream in streams),
        *(d.Unseal(stream, Epoch(1), LLSN(0), NODES) for stream in streams),
    ]


def _cut(state: OrderState) -> d.Cut:
    candidates = [
        Candidate(stream.stream, Epoch(1), stream.committed_end, (LLSN(stream.committed_end + 2),) * len(NODES))
        for stream in state.streams.values()
    ]
    time_of_cut = CutTime(state.cut_time + 1_000)
    commits = make_cut(state.high_watermark, time_of_cut, candidates)
    return d.Cut(commits[0].context.high_watermark, state.high_watermark, time_of_cut, Revision(1), commits)


def _fdatasyncs(figures: Figures, path: Path, *, in_place: bool) -> None:
    """Measure ``fdatasync``. Extending a file costs more than overwriting it, which SQLite's log mostly does."""
    block = os.urandom(4096)
    with path.open("r+b" if in_place else "ab", buffering=0) as file:
        for _ in range(COUNT):
            started, cpu = time.perf_counter(), time.process_time()
            file.write(block)
            os.fdatasync(file.fileno())
            figures.seconds.append(time.perf_counter() - started)
            figures.cpu += time.process_time() - cpu


@asynccontextmanager
async def _subject(name: str, url: str) -> AsyncIterator[Subject]:
    store = await open_store(url, cluster=ClusterId(1))
    try:
        subject = Subject(name, store)
        await subject.start()
        yield subject
    finally:
        await store.close()


async def _measure(folder: Path, etcd_url: str | None) -> list[Figures]:
    longer = Figures("4 KiB at the end of a file and `fdatasync` (reference)", [])
    in_place = Figures("4 KiB over what was there and `fdatasync`", [])
    async with AsyncExitStack() as stack:
        subjects = [await stack.enter_async_context(_subject("SQLite", f"sqlite:{folder / 'metadata.db'}"))]
        if etcd_url is not None:
            subjects.append(await stack.enter_async_context(_subject("etcd, 3 members here", etcd_url)))
        for _ in range(ROUNDS):
            _fdatasyncs(longer, folder / "reference", in_place=False)
            _fdatasyncs(in_place, folder / "reference", in_place=True)
            for subject in subjects:
                await subject.round()
        for subject in subjects:
            await subject.finish()
    return [longer, in_place, *(figures for subject in subjects for figures in subject.figures())]


def lines() -> list[str]:
    """Return a section of the benchmark report, in Markdown."""
    # Beside the other files of a run: the folder of temporary files may be in memory.
    folder = Path(tempfile.mkdtemp(prefix="bench-stores-", dir="."))
    try:
        if find_etcd() is None:
            print(f"etcd is not measured: {MISSING}")
            figures = run(_measure(folder, None))
        else:
            with LocalEtcd(folder, members=3) as etcd:
                figures = run(_measure(folder, etcd.url("bench")))
    finally:
        shutil.rmtree(folder)
    reference = median(figures[0].seconds)
    size = len(encode_batch(EPOCH, DecisionIndex(1), (_cut(OrderState(None, _opening())),)))
    return [
        "## Metadata stores",
        "",
        f"One cut of {STREAMS} log streams ({size} bytes) at a time, with nothing else in flight; an empty append asks "
        "the store whether the leader still leads. All on one disk, so the three members of etcd are in each other's "
        "way. CPU is that of this process, without the servers'.",
        "",
        "| what | median | 99 % | in `fdatasync`s | per second | CPU |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(one.row(reference) for one in figures),
        "",
        *([] if len(figures) > 6 else [f"etcd was not measured: {MISSING}.", ""]),
    ]


def main() -> int:
    print("\n".join(lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
