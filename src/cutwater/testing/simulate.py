"""Run simulated clusters: ``python -m cutwater.testing.simulate --seed 7`` or ``--seeds 2000``.

The last line is the hash of the trace in hex, or of all traces if there are many: the same seed gives the same hash.
The exit status is 1 if a guarantee was violated; every violation is printed with the command that replays it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from cutwater.testing.virtual.options import PROFILES, changed
from cutwater.testing.virtual.shrink import shrink, told
from cutwater.testing.virtual.simulation import ShippedResult, simulate_shipped

SEEDS_PER_TASK = 5
PROGRESS_SECONDS = 10.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="cutwater.testing.simulate",
        description=__doc__.split("\n\n")[0],
        epilog="With make: make simulate SEED=7, or make simulate SEEDS=200 PROFILE=storm JOBS=2 FIRST=1000.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run this seed and print details")
    which.add_argument("--seeds", type=int, help="run this many seeds")
    parser.add_argument("--first", type=int, default=0, help="with --seeds: the first one (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument(
        "--profile",
        choices=sorted(PROFILES),
        default="random",
        help="which faults (default: random)",
    )
    parser.add_argument("--trace", metavar="FILE", help="with --seed: write all events to this file")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="change an option of each cluster; may be repeated",
    )
    parser.add_argument("--shrink", action="store_true", help="with --seed: reduce the run if it fails")
    options = parser.parse_args(arguments)
    try:
        if options.seed is not None:
            return run_one(options.seed, options.profile, options.trace, options.set, is_shrunk=options.shrink)
        if options.seeds < 1 or options.jobs < 1:
            parser.error("--seeds and --jobs must be at least 1")
        seeds = range(options.first, options.first + options.seeds)
        return run_many(seeds, options.profile, options.jobs, options.set)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run_one(seed: int, profile: str, trace: str | None, changes: Sequence[str] = (), *, is_shrunk: bool = False) -> int:
    log: list[str] | None = [] if trace else None
    result = simulate_profile(seed, profile, log, changes)
    if trace and log is not None:
        Path(trace).write_text("\n".join(log) + "\n")
    print(f"seed {seed}: {result.events} events, {result.cuts} cuts to GLSN {result.high_watermark}, ", end="")
    print(f"leader epoch {result.leaders}, {result.seals} seals")
    print("appends: " + ", ".join(f"{count} {outcome}" for outcome, count in result.appends.items() if count))
    print("cluster and faults: " + ", ".join(f"{name}={value}" for name, value in result.options.faults().items()))
    if result.violation:
        _print_violation(result, profile, changes)
        if is_shrunk:
            print("\n".join(told(shrink(result))))
    else:
        print("no violation: all guarantees hold")
    print(result.trace_hash)
    return 1 if result.violation else 0


def simulate_profile(
    seed: int, profile: str, log: list[str] | None = None, changes: Sequence[str] = ()
) -> ShippedResult:
    """Run one cluster of a profile, with some of its options changed."""
    return simulate_shipped(seed, changed(PROFILES[profile](seed), changes), log)


def run_many(seeds: range, profile: str, jobs: int, changes: Sequence[str] = ()) -> int:
    started = time.monotonic()
    digest = blake2b(digest_size=16)
    bad = events = acknowledged = done = 0
    next_word = 0.0
    for result in _results(seeds, profile, jobs, changes):
        digest.update(result.trace_hash.encode())
        events += result.events
        acknowledged += result.appends["ok"]
        done += 1
        if result.violation:
            bad += 1
            _print_violation(result, profile, changes)
        seconds = time.monotonic() - started
        if seconds >= next_word:
            next_word = seconds + PROGRESS_SECONDS
            print(f"{done} of {len(seeds)} clusters, {bad} violations, {seconds:.0f} s", flush=True)
    print(f"{done} clusters, {events} events, {acknowledged} appends acknowledged, {bad} violations", end=" ")
    print(f"in {time.monotonic() - started:.0f} s")
    print(digest.hexdigest())
    return 1 if bad else 0


def _results(seeds: range, profile: str, jobs: int, changes: Sequence[str]) -> Iterator[ShippedResult]:
    """Yield results in the order of the seeds, regardless of which process finishes first."""
    tasks = [(seed, profile, changes) for seed in seeds]
    if jobs == 1:
        yield from map(_simulate, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_simulate, tasks, chunksize=SEEDS_PER_TASK)


def _simulate(task: tuple[int, str, Sequence[str]]) -> ShippedResult:
    seed, profile, changes = task
    return simulate_profile(seed, profile, changes=changes)


def _print_violation(result: ShippedResult, profile: str, changes: Sequence[str]) -> None:
    print(f"VIOLATION with seed {result.seed}: {result.violation}")
    command = f"make simulate SEED={result.seed}" + ("" if profile == "random" else f" PROFILE={profile}")
    sets = [f"--set {shlex.quote(change)}" for change in changes]
    print(f"replay it: {command}{_arguments(sets)}")
    print(f"reduce it: {command}{_arguments([*sets, '--shrink'])}", flush=True)


def _arguments(words: Sequence[str]) -> str:
    """Return what ``make`` passes on to the simulator, as a part of its command."""
    text = " ".join(words)
    return f' ARGS="{text}"' if " " in text else f" ARGS={text}" if text else ""


if __name__ == "__main__":
    sys.exit(main())
