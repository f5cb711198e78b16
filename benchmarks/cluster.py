"""Where the time of an append goes: a local cluster of three storage nodes, replication 3, fsync on.

One client appends one record after the other. Every process notes the time of each step (``benchmarks.trace``), and the
steps of each append are combined. Then many clients append at once, for the rate of cuts.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import msgspec

from cutwater.admin import local_cluster
from cutwater.admin.local_cluster import LocalCluster
from cutwater.admin.local_etcd import find_etcd
from cutwater.client.async_client import AsyncClient
from cutwater.runtime import processes

SINGLES = 400
WARM_UP = 50
CONCURRENT = 64
CONCURRENT_SECONDS = 5.0
RECORD = b"x" * 100
TOPIC = "bench"

STEPS = ("request", "head's disk", "chain", "report", "store", "commit", "answer")
"""The steps in order; each ends where the next begins."""


class Notes:
    """The notes of the processes, by kind, each in time order."""

    def __init__(self, folder: Path, heads: set[int]) -> None:
        self.of: dict[str, list[int]] = {}
        for path in folder.glob("*.json"):
            for name, at in msgspec.json.decode(path.read_bytes(), type=list[tuple[str, int]]):
                self.of.setdefault(name, []).append(at)
                if name == "durable" and int(path.stem) in heads:
                    self.of.setdefault("head durable", []).append(at)
        for times in self.of.values():
            times.sort()

    def first(self, name: str, after: int, before: int) -> int | None:
        times = self.of.get(name, [])
        i = bisect_left(times, after)
        return times[i] if i < len(times) and times[i] <= before else None

    def last(self, name: str, after: int, before: int) -> int | None:
        times = self.of.get(name, [])
        i = bisect_left(times, before)
        return times[i - 1] if i > 0 and times[i - 1] >= after else None


def steps(notes: Notes, sent: int, answered: int) -> list[int] | None:
    """Return the duration of each step of one append, in ns; None if a note is missing."""
    store = notes.first("store", sent, answered)
    if store is None:
        return None
    marks = [
        sent,
        notes.first("append", sent, answered),
        notes.first("head durable", sent, store),
        notes.last("durable", sent, store),
        store,
        notes.first("stored", store, answered),
        notes.first("commit", store, answered),
        answered,
    ]
    if any(mark is None for mark in marks):
        return None
    found = [mark for mark in marks if mark is not None]
    return [b - a for a, b in pairwise(found)]


@contextmanager
def traced_cluster(folder: Path, metadata: int) -> Iterator[tuple[LocalCluster, Path]]:
    notes = folder / "notes"
    notes.mkdir()
    program = ("-m", "benchmarks.trace", str(notes))
    cluster = local_cluster.start(folder / "cluster", metadata=metadata, program=program)
    try:
        yield cluster, notes
    finally:
        processes.stop([member.pid for member in cluster.processes()], 10.0)


async def measure(cluster: LocalCluster) -> tuple[list[tuple[int, int]], float]:
    """Return when each single append was sent and answered, and the appends per second with many at once."""
    async with await AsyncClient.connect(cluster.servers) as log:
        await log.create_topic(TOPIC, streams=1, replication=3)
        await one_by_one(log, WARM_UP)
        return await one_by_one(log, SINGLES), await _concurrently(log)


async def one_by_one(log: AsyncClient, count: int) -> list[tuple[int, int]]:
    times = []
    for _ in range(count):
        sent = time.monotonic_ns()
        await log.append(TOPIC, RECORD)
        times.append((sent, time.monotonic_ns()))
    return times


async def _concurrently(log: AsyncClient) -> float:
    count = 0
    begun = time.monotonic()

    async def append_until_the_end() -> None:
        nonlocal count
        while time.monotonic() < begun + CONCURRENT_SECONDS:
            await log.append(TOPIC, RECORD)
            count += 1

    await asyncio.gather(*(append_until_the_end() for _ in range(CONCURRENT)))
    return count / (time.monotonic() - begun)


def figures(metadata: int) -> list[str]:
    """Return a column of the table: milliseconds per step, and rates."""
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-", dir=".") as name:
        folder = Path(name).absolute()
        with traced_cluster(folder, metadata) as (cluster, notes_folder):
            heads = {cluster.storage_nodes[0].pid}
            times, rate = asyncio.run(measure(cluster))
            begun_concurrent = times[-1][1]
        notes = Notes(notes_folder, heads)
    found = [step for sent, answered in times if (step := steps(notes, sent, answered)) is not None]
    if len(found) < SINGLES // 2:
        raise RuntimeError(f"only {len(found)} of {SINGLES} appends left all notes: the head may be another node")
    columns = [f"{median(column) / 1e6:.2f}" for column in zip(*found, strict=True)]
    total = [(answered - sent) / 1e6 for sent, answered in times]
    stored = [at for at in notes.of.get("stored", []) if at > begun_concurrent]
    seconds = (stored[-1] - stored[0]) / 1e9 if len(stored) > 1 else 1.0
    return [
        *columns,
        f"{median(total):.2f}",
        f"{sorted(total)[int(len(total) * 0.99)]:.2f}",
        f"{1_000 / mean(total):.0f}",
        f"{rate:.0f}",
        f"{len(stored) / seconds:.0f}",
    ]


ROWS = (
    *(f"{step}, median ms" for step in STEPS),
    "**one append at a time, median ms**",
    "99th percentile ms",
    "appends/s, one at a time",
    f"appends/s, {CONCURRENT} at a time, of one client",
    "cuts/s meanwhile",
)


def fdatasync_ms() -> float:
    times = []
    with tempfile.NamedTemporaryFile(dir=".") as file:
        for _ in range(200):
            started = time.perf_counter()
            file.write(RECORD)
            file.flush()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - started) * 1e3)
    return median(times)


def lines() -> list[str]:
    """Return a section of the benchmark report, in Markdown."""
    columns = {"SQLite": figures(1)}
    if find_etcd() is not None:
        columns["etcd, 3 + 3 nodes"] = figures(3)
    reference = fdatasync_ms()
    table = [
        f"| | {' | '.join(columns)} |",
        f"| --- | {' | '.join('---:' for _ in columns)} |",
        *(f"| {row} | {' | '.join(column[i] for column in columns.values())} |" for i, row in enumerate(ROWS)),
    ]
    return [
        "## Where an append's time goes",
        "",
        "Three storage nodes, replication 3, one log stream, records of 100 bytes, all on this machine, fsync on.",
        f"For scale: appending 100 bytes and `fdatasync`, bare, in the same run: {reference:.2f} ms. Processes share",
        f"{os.cpu_count()} cores and one disk, on which entries, commits and decisions are synced.",
        "",
        *table,
        "",
        "*request*: from the client to the head. *head's disk*: until the head has it on disk. *chain*: until the last",
        "of the three has. *report*: until the leader has heard of it and the store is free. *store*: until the cut is",
        "durable. *commit*: until the head hears of the cut. *answer*: until the client knows.",
        "",
    ]


def main() -> int:
    print("\n".join(lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
