"""The embedded log keeps its promises under virtual time, and every run can be replayed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from cutwater.testing.virtual.options import PROFILES, ShippedOptions
from cutwater.testing.virtual.simulation import simulate_shipped
from tests.soak import rounds

SEEDS = rounds(8, 500)
BUSY = ShippedOptions(
    embedded=True,
    storage_nodes=1,
    metadata_nodes=1,
    replication=1,
    store="sqlite",
    seconds=4.0,
    timeout=1.0,
    typed_topic=True,
    rivals_every=0.2,
    kill_every=1.0,
    restart_every=1.0,
    power_every=2.0,
    cursors_every=0.2,
    declare_every=0.3,
    scans_every=0.3,
    trim_every=0.5,
)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_faults(seed: int) -> None:
    result = simulate_shipped(seed, PROFILES["embedded"](seed))
    assert result.violation is None, f"{result.violation}\nreplay it: make simulate SEED={seed} PROFILE=embedded"


def test_all_that_an_embedded_log_is_used_for_happens() -> None:
    done: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    for seed in range(2):
        result = simulate_shipped(seed, BUSY)
        assert result.violation is None
        done.update(result.operations)
        struck.update(result.struck)
    expected = {"append", "produce", "subscribe", "read", "tail", "cursor", "scan", "declare", "watermark"}
    expected |= {"open", "connect by path", "connect by address", "refused alone", "open alone", "close"}
    expected |= {"refused without the secret", "told of the end"}
    assert expected <= done.keys()
    assert {"kill", "restart", "cut power"} <= struck.keys()


def test_the_same_seed_gives_the_same_trace() -> None:
    """In fresh processes with different hash seeds for texts, and different addresses of objects."""
    seed = 5
    program = [sys.executable, "-m", "cutwater.testing.simulate", "--profile", "embedded", "--seed", str(seed)]
    traces = {simulate_shipped(seed, PROFILES["embedded"](seed)).trace_hash}
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        told = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environment, check=False)
        traces.add(told.stdout.splitlines()[-1])
    assert len(traces) == 1
