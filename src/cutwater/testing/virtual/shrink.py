"""Reduces a failing run of the simulator: fewer faults, a shorter history, fewer clients and nodes.

A smaller run draws other random numbers, so the same seed may pass although the fault is still there. Each candidate is
therefore tried with a few seeds, and counts if one of them violates the same guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct, structs

from cutwater.testing.virtual.options import ShippedOptions
from cutwater.testing.virtual.simulation import ShippedResult, simulate_shipped

SEEDS_PER_CANDIDATE = 3
RUNS_MAX = 600
TIMELINE_LINES = 60
SMALLEST: dict[str, int | float] = {
    "seconds": 0.5,
    "storage_nodes": 1,
    "metadata_nodes": 1,
    "streams": 1,
    "replication": 1,
    "appenders": 0,
    "producers": 0,
    "subscribers": 0,
    "padding_bytes_max": 0,
}
"""Options that are lowered step by step, and where that ends."""

Simulate = Callable[[int, ShippedOptions], ShippedResult]


class Shrunk(Struct, frozen=True):
    """The smallest run that was found, and the number of runs that it took."""

    result: ShippedResult
    runs: int


def shrink(failing: ShippedResult, run: Simulate = simulate_shipped, runs_max: int = RUNS_MAX) -> Shrunk:
    """Return the smallest run that violates the same guarantee. It may be the given one."""
    assert failing.violation is not None
    best, runs = failing, 0
    tried = {failing.options}
    is_smaller = True
    while is_smaller and runs < runs_max:
        is_smaller = False
        for change in _changes(best.options):
            options = _with(best.options, change)
            if options in tried:
                continue
            tried.add(options)
            for seed in range(best.seed, best.seed + SEEDS_PER_CANDIDATE):
                if runs >= runs_max:
                    break
                runs += 1
                result = run(seed, options)
                if result.guarantee == failing.guarantee:
                    # The other changes are tried on top of this one.
                    best, is_smaller = result, True
                    break
    return Shrunk(best, runs)


def told(shrunk: Shrunk) -> list[str]:
    """Return the reduced run for people: its command, and what happened in it."""
    result = shrunk.result
    sets = " ".join(f"--set {name}={value}" for name, value in result.options.faults().items())
    lines: list[str] = []
    again = simulate_shipped(result.seed, result.options, lines)
    assert again.trace_hash == result.trace_hash, "the same seed and options give the same run"
    hidden = max(0, len(lines) - TIMELINE_LINES)
    return [
        f"reduced in {shrunk.runs} runs: {result.violation}",
        f'replay it: make simulate SEED={result.seed} PROFILE=quiet ARGS="{sets}"',
        "what happened, with the virtual seconds:",
        *([f"  ... {hidden} earlier events, see --trace"] if hidden else []),
        *(f"  {line}" for line in lines[hidden:]),
    ]


def _changes(options: ShippedOptions) -> Iterator[dict[str, object]]:
    """Yield changes that make a run smaller, the large ones first."""
    quiet = ShippedOptions()
    faults = [name for name in options.faults() if name not in SMALLEST]
    if len(faults) > 2:
        for half in (faults[: len(faults) // 2], faults[len(faults) // 2 :]):
            yield {name: getattr(quiet, name) for name in half}
    yield {"seconds": max(SMALLEST["seconds"], options.seconds / 2)}
    for name in faults:
        yield {name: getattr(quiet, name)}
    for name, least in SMALLEST.items():
        value = getattr(options, name)
        if value > least and name != "seconds":
            yield {name: least}
            if value - 1 > least:
                yield {name: value - 1}


def _with(options: ShippedOptions, changes: dict[str, object]) -> ShippedOptions:
    changed = structs.replace(options, **changes)
    return structs.replace(changed, replication=min(changed.replication, changed.storage_nodes))
