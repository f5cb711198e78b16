"""Clusters of shipped servers and clients keep their promises under virtual time, and every run can be replayed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cutwater.testing.virtual.options import SHIPPED_PROFILES, ShippedOptions
from cutwater.testing.virtual.simulation import simulate_shipped
from tests.soak import rounds

SHIPPED_SEEDS = rounds(8, 400)
STORM_SEEDS = rounds(2, 100)


@pytest.mark.parametrize("seed", range(SHIPPED_SEEDS))
def test_random_faults(seed: int) -> None:
    check("shipped", seed)


@pytest.mark.parametrize("seed", range(STORM_SEEDS))
def test_everything_at_once(seed: int) -> None:
    check("shipped-storm", seed)


def check(profile: str, seed: int) -> None:
    result = simulate_shipped(seed, SHIPPED_PROFILES[profile](seed))
    assert result.violation is None, f"{result.violation}\nreplay it: make simulate SEED={seed} PROFILE={profile}"


def test_a_quiet_cluster_acknowledges_everything() -> None:
    result = simulate_shipped(1, ShippedOptions(seconds=2.0))
    assert result.violation is None
    assert (result.appends["unknown"], result.appends["fail"], result.seals) == (0, 0, 0)
    assert result.appends["ok"] > 100


def test_the_same_seed_gives_the_same_trace() -> None:
    """In fresh processes with different hash seeds for texts, and different addresses of objects."""
    seed = 2
    program = [sys.executable, "-m", "cutwater.testing.simulate", "--profile", "shipped", "--seed", str(seed)]
    traces = {simulate_shipped(seed, SHIPPED_PROFILES["shipped"](seed)).trace_hash}
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        told = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environment, check=False)
        traces.add(told.stdout.splitlines()[-1])
    assert len(traces) == 1
