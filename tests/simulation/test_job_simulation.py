"""Jobs go on over everything that dies: users, agents, processes, leaders and storage nodes of simulated clusters."""

from __future__ import annotations

import pytest

from cutwater.testing.virtual.options import PROFILES, ShippedOptions
from cutwater.testing.virtual.simulation import simulate_shipped
from tests.soak import rounds

JOB_SEEDS = rounds(4, 400)


@pytest.mark.parametrize("seed", range(JOB_SEEDS))
def test_random_faults(seed: int) -> None:
    result = simulate_shipped(seed, PROFILES["jobs"](seed))
    assert result.violation is None, f"{result.violation}\nreplay it: make simulate SEED={seed} PROFILE=jobs"


def test_jobs_run_and_operations_end_where_nothing_fails() -> None:
    result = simulate_shipped(1, ShippedOptions(jobs=2, agents=3, job_calls_every=0.1))
    assert result.violation is None
    assert result.operations["batch of a job"] > 20
    assert result.operations["operation"] > 10
