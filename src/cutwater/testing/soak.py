"""Run seeds of the simulator on all cores for hours: ``python -m cutwater.testing.soak --hours 8``.

Seeds that violate a guarantee are appended to a file, each with the command that replays it. The end prints how many
histories an hour were judged, and how often each fault struck in a history with each operation of clients: a pair that
never occurred was never tested.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from cutwater.testing.virtual.options import PROFILES
from cutwater.testing.virtual.simulation import ShippedResult, simulate_shipped

PROFILES_IN_TURN = ("random", "random", "random", "storm", "embedded")
PROGRESS_SECONDS = 60.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cutwater.testing.soak", description=__doc__.split("\n\n")[0])
    parser.add_argument("--hours", type=float, required=True, help="how long to run; 0.1 is six minutes")
    parser.add_argument("--first", type=int, default=None, help="the first seed (default: taken from the clock)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--failed", default="failed-seeds.txt", help="file for failing seeds (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.hours <= 0 or options.jobs < 1:
        parser.error("--hours must be above 0, and --jobs at least 1")
    first = int(time.time()) if options.first is None else options.first
    print(f"seeds from {first} on, profiles {', '.join(dict.fromkeys(PROFILES_IN_TURN))}, {options.jobs} processes")
    return soak(first, options.hours * 3_600, options.jobs, Path(options.failed))


def soak(first: int, seconds: float, jobs: int, failed: Path) -> int:
    started, next_word = time.monotonic(), PROGRESS_SECONDS
    done = bad = acknowledged = 0
    pairs: Counter[tuple[str, str]] = Counter()
    for profile, result in _results(first, seconds, jobs):
        done += 1
        acknowledged += result.appends["ok"]
        pairs.update((fault, operation) for fault in result.struck for operation in result.operations)
        if result.violation is not None:
            bad += 1
            replay = f"make simulate SEED={result.seed} PROFILE={profile}"
            print(f"VIOLATION: {result.violation}\nreplay it: {replay}", flush=True)
            with failed.open("a") as file:
                file.write(f"{replay}  # {result.violation.splitlines()[0]}\n")
        passed = time.monotonic() - started
        if passed >= next_word:
            next_word = passed + PROGRESS_SECONDS
            print(f"{done} clusters, {bad} violations, {passed / 60:.0f} min", flush=True)
    hours = (time.monotonic() - started) / 3_600
    print(
        f"{done} histories in {hours:.2f} h: {done / hours:,.0f} an hour, {acknowledged} appends acknowledged", end=""
    )
    print(f", {bad} violations" + (f", listed in {failed}" if bad else ""))
    print("\n".join(coverage(pairs)))
    return 1 if bad else 0


def coverage(pairs: Counter[tuple[str, str]]) -> list[str]:
    """Return a table of the histories in which a fault and an operation met."""
    faults = sorted({fault for fault, _ in pairs})
    operations = sorted({operation for _, operation in pairs})
    width = max((len(fault) for fault in faults), default=0)
    lines = ["histories with each fault (rows) and each operation (columns):"]
    lines.append("  ".join([" " * width, *operations]))
    for fault in faults:
        cells = [str(pairs[fault, operation]).rjust(len(operation)) for operation in operations]
        lines.append("  ".join([fault.ljust(width), *cells]))
    return lines


def _results(first: int, seconds: float, jobs: int) -> Iterator[tuple[str, ShippedResult]]:
    """Yield results in the order of the seeds, until the time is over."""
    deadline = time.monotonic() + seconds

    def tasks() -> Iterator[tuple[int, str]]:
        for number in count():
            if time.monotonic() >= deadline:
                return
            yield first + number, PROFILES_IN_TURN[number % len(PROFILES_IN_TURN)]

    if jobs == 1:
        yield from map(_simulate, tasks())
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        # Few seeds at a time, because the pool takes tasks in advance.
        ahead = tasks()
        while batch := [task for task, _ in zip(ahead, range(4 * jobs), strict=False)]:
            yield from pool.imap(_simulate, batch)


def _simulate(task: tuple[int, str]) -> tuple[str, ShippedResult]:
    seed, profile = task
    return profile, simulate_shipped(seed, PROFILES[profile](seed))


if __name__ == "__main__":
    sys.exit(main())
