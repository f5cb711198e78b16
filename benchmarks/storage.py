"""Measures the files of a replica: writing next to a bare loop of ``write`` and ``fdatasync``, opening, reading.

Calls of both alternate, because the speed of a shared disk varies. ``make bench`` includes ``lines()``; run alone, it
prints them. A replica is opened in a process of its own, as after a restart.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median

from cutwater.core.replica.deduplication import Deduplicator
from cutwater.core.replica.opening import open_replica
from cutwater.core.replica.recovery import HardState
from cutwater.format.checksum import crc32c
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.storage.replica.small_files import ReplicaIdentity
from cutwater.storagenode.replica.replica_driver import CHECKPOINT_EVERY_ENTRIES
from cutwater.types import (
    GLSN,
    LLSN,
    Batch,
    ClusterId,
    CommitContext,
    CutTime,
    Entry,
    Epoch,
    EventTime,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    ProducerTag,
    Sequence,
    StorageNodeId,
)

IDENTITY = ReplicaIdentity(ClusterId(1), StorageNodeId(1), LogStreamId(1))
LARGE_BYTES = 1_000_000
LARGE_COUNT = 150
SMALL_BYTES = 4_000
SMALL_COUNT = 600
BATCHES = 100_000
BATCH_RECORDS = 1_000
RECORD_BYTES = 10
BATCHES_PER_COMMIT_SYNC = 200
PRODUCERS = 100
OPENINGS = 5
RATIO_TARGET = 0.7
LOOKUPS = 2_000
PART_BYTES = 1 << 20
OPEN_SECONDS_MAX = 120


# Writing.


class _Bare:
    """The least that durable appending can cost."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def append(self, body: bytes, checksum: int) -> None:
        os.write(self._descriptor, body)
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class _Replica:
    def __init__(self, path: Path, options: SegmentOptions | None = None) -> None:
        self._storage = SegmentStorage(path, IDENTITY, options)

    def append(self, body: bytes, checksum: int) -> None:
        entry = _entry(LLSN(self._storage.end + 1), BATCH_RECORDS, body, checksum)
        self._storage.write([entry])
        self._storage.sync()

    def close(self) -> None:
        self._storage.close()


def _entry(llsn: LLSN, count: int, body: bytes, checksum: int, producer: ProducerTag | None = None) -> Entry:
    return Entry(llsn, Epoch(1), Batch(count, body, checksum, EventTime(llsn), EventTime(llsn), producer=producer))


def _writes(directory: Path, size: int, count: int) -> dict[str, list[float]]:
    """Return the seconds of each durable append of this size: to a bare file, to a replica, and to a replica that
    allocates no space ahead."""
    targets: dict[str, _Bare | _Replica] = {
        "bare": _Bare(directory / f"bare-{size}"),
        "replica": _Replica(directory / f"replica-{size}"),
        "no room": _Replica(directory / f"no-room-{size}", SegmentOptions(room_ahead_bytes=0)),
    }
    body = Random(1).randbytes(size)
    checksum = crc32c(body)
    seconds: dict[str, list[float]] = {name: [] for name in targets}
    for _ in range(count):
        for name, target in targets.items():
            started = time.perf_counter()
            target.append(body, checksum)
            seconds[name].append(time.perf_counter() - started)
    for target in targets.values():
        target.close()
    return seconds


# A large replica.


def make_replica(directory: Path, batches: int) -> None:
    """Write batches of small records, each with a commit of its own, from many producers in turn. The last checkpoint
    of deduplication is as old as it can be."""
    storage = SegmentStorage(directory, IDENTITY)
    storage.save_hard_state(HardState(epoch=Epoch(1), chain=(StorageNodeId(1),)))
    body = Random(1).randbytes(BATCH_RECORDS * RECORD_BYTES)
    checksum, dedup = crc32c(body), Deduplicator()
    checkpoint_at = batches - CHECKPOINT_EVERY_ENTRIES
    for start in range(0, batches, BATCHES_PER_COMMIT_SYNC):
        numbers = range(start, min(start + BATCHES_PER_COMMIT_SYNC, batches))
        entries = [_entry(_first_llsn(i), BATCH_RECORDS, body, checksum, _tag(i)) for i in numbers]
        storage.write(entries)
        storage.sync(contexts=False)
        contexts = [_context(i) for i in numbers]
        storage.write_contexts(contexts)
        storage.sync(entries=False)
        for entry, context in zip(entries, contexts, strict=True):
            dedup.record(entry)
            dedup.commit(context)
        if start < checkpoint_at <= start + BATCHES_PER_COMMIT_SYNC:
            storage.save_dedup(dedup.checkpoint(entries[-1].last_llsn))
    storage.close()


def _first_llsn(number: int) -> LLSN:
    return LLSN(number * BATCH_RECORDS + 1)


def _tag(number: int) -> ProducerTag:
    producer, sequence = number % PRODUCERS, number // PRODUCERS + 1
    return ProducerTag(ProducerId(f"producer-{producer}"), ProducerEpoch(1), Sequence(sequence))


def _context(number: int) -> CommitContext:
    """Return the commit of a batch. Other log streams get as many GLSNs as this one."""
    llsn = _first_llsn(number)
    first_glsn = 2 * number * BATCH_RECORDS + 1
    high_watermark = first_glsn + 2 * BATCH_RECORDS - 1
    return CommitContext(
        Epoch(1),
        llsn,
        GLSN(first_glsn),
        BATCH_RECORDS,
        GLSN(high_watermark),
        GLSN(first_glsn - 1),
        CutTime(number + 1),
    )


def open_once(directory: Path, batches: int) -> tuple[float, float]:
    """Return the seconds to open the files, and the seconds until there is a replica that may report."""
    started = time.perf_counter()
    storage = SegmentStorage(directory, IDENTITY)
    opened = time.perf_counter()
    opening = open_replica(IDENTITY.node, IDENTITY.stream, storage)
    ready = time.perf_counter()
    assert not opening.problem, opening.problem
    assert opening.replica.committed_end == batches * BATCH_RECORDS
    storage.close()
    return opened - started, ready - started


def _open_elsewhere(directory: Path, batches: int) -> tuple[float, float]:
    program = [sys.executable, "-m", "benchmarks.storage", "--open", str(directory), str(batches)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=OPEN_SECONDS_MAX)
    files, replica = map(float, done.stdout.split())
    return files, replica


# Reading.


def _seconds(what: Callable[[], None]) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def _read_rates(directory: Path) -> tuple[float, float]:
    """Return bytes per second of reading everything in parts: bare, and as verified ranges with their commits."""
    storage = SegmentStorage(directory, IDENTITY)
    total = 0

    def ranges() -> None:
        nonlocal total
        llsn = storage.first_llsn
        while llsn <= storage.committed_end:
            part = storage.read(llsn, storage.committed_end, PART_BYTES)
            total += len(part.data)
            llsn = LLSN(part.last_llsn + 1)

    def bare() -> None:
        for path in sorted(directory.glob("*.entries")):
            with path.open("rb", buffering=0) as file:
                while file.read(PART_BYTES):
                    pass

    bare_seconds, range_seconds = _seconds(bare), _seconds(ranges)
    storage.close()
    return total / bare_seconds, total / range_seconds


def _lookup_seconds(directory: Path, batches: int) -> float:
    """Return the time to find the place of a GLSN, anywhere in the log."""
    storage = SegmentStorage(directory, IDENTITY)
    rng = Random(1)
    wanted = [GLSN(rng.randrange(1, batches * BATCH_RECORDS)) for _ in range(LOOKUPS)]

    def look() -> None:
        for glsn in wanted:
            storage.from_glsn(glsn)

    seconds = _seconds(look) / LOOKUPS
    storage.close()
    return seconds


# The report.


@contextmanager
def _here() -> Iterator[Path]:
    """Yield a directory on the disk of the working directory, because temporary files are often kept in memory."""
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as directory:
        yield Path(directory)


def _write_lines(size: int, seconds: dict[str, list[float]]) -> list[str]:
    bare = seconds["bare"]
    names = {"bare": "`write` and `fdatasync` (reference)", "replica": "replica", "no room": "replica, plain append"}
    lines = []
    for name, title in names.items():
        mine = seconds[name]
        rate, ratio = size * len(mine) / sum(mine) / 1e6, sum(bare) / sum(mine)
        figures = f"{median(mine) * 1e6:.0f} µs | {rate:.1f} MB/s | {ratio:.2f} | disk"
        lines.append(f"| {title}, {size // 1000} KB at a time | {figures} |")
    return lines


def lines(batches: int = BATCHES) -> list[str]:
    """Return a section of the benchmark report, in Markdown."""
    with _here() as directory:
        written = [
            *_write_lines(LARGE_BYTES, _writes(directory, LARGE_BYTES, LARGE_COUNT)),
            *_write_lines(SMALL_BYTES, _writes(directory, SMALL_BYTES, SMALL_COUNT)),
        ]
    with _here() as directory:
        made = _seconds(lambda: make_replica(directory / "replica", batches))
        opened = [_open_elsewhere(directory / "replica", batches) for _ in range(OPENINGS)]
        bare_rate, range_rate = _read_rates(directory / "replica")
        lookup = _lookup_seconds(directory / "replica", batches)
    files, replica = median(one[0] for one in opened), median(one[1] for one in opened)
    millions = batches * BATCH_RECORDS / 1e6
    return [
        "## Storage",
        "",
        f"Durable appends of one batch each, in turn with the reference; the target at {LARGE_BYTES // 1000} KB is "
        f"{RATIO_TARGET}. Why a replica makes room ahead of small writes is in ADR 0010.",
        "",
        "| what | median | throughput | ratio of throughput | limit |",
        "| --- | ---: | ---: | ---: | --- |",
        *written,
        "",
        f"A replica with {millions:.0f} million records of {RECORD_BYTES} bytes in {batches} batches of {PRODUCERS} "
        f"producers, each with a commit of its own, made in {made:.0f} s; {CHECKPOINT_EVERY_ENTRIES} entries "
        "came after the last checkpoint of deduplication.",
        "",
        "| what | figure | ratio | limit |",
        "| --- | ---: | ---: | --- |",
        f"| opening its files, in a new process | {files * 1e3:.0f} ms | | disk |",
        f"| opening the replica, deduplication and all | {replica * 1e3:.0f} ms | | CPU |",
        f"| reading all of its files, bare (reference) | {bare_rate / 1e6:.0f} MB/s | 1 | memory |",
        f"| reading all of it in verified ranges, with commits | {range_rate / 1e6:.0f} MB/s "
        f"| {range_rate / bare_rate:.2f} | CPU |",
        f"| from a GLSN to its place | {lookup * 1e6:.0f} µs | | CPU |",
        "",
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.storage", description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", type=int, default=BATCHES, help="of the large replica (default: %(default)s)")
    parser.add_argument(
        "--open", nargs=2, metavar=("DIRECTORY", "BATCHES"), help="open a replica and say how long it took"
    )
    options = parser.parse_args(arguments)
    if options.open:
        directory, batches = options.open
        print(*open_once(Path(directory), int(batches)))
    else:
        print("\n".join(lines(options.batches)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
