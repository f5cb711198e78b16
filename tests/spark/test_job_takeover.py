"""Jobs outlive what they run on: agents, machines, drivers, JVMs, the leader. Every row is published exactly once."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.soak import IS_SOAK, rounds
from tests.spark.takeover_kit import FAULTS, takeovers

SEED = int(os.environ.get("CUTWATER_SEED", "0")) or random.randrange(1, 1_000_000)


@pytest.mark.timeout(900)
def test_a_job_goes_on_when_its_agent_is_killed_and_when_its_machine_is_paused(tmp_path: Path) -> None:
    with takeovers(tmp_path, 1) as job:
        job.fault("kill_agent")
        job.fault("pause_machine")
        job.judge()


@pytest.mark.timeout(7_200)
@pytest.mark.skipif(not IS_SOAK, reason="a campaign: make soak runs it")
@pytest.mark.parametrize("number", range(rounds(1, 10)))
def test_a_job_survives_any_five_faults(tmp_path: Path, number: int) -> None:
    seed = SEED + number
    print(f"replay: CUTWATER_SOAK=1 CUTWATER_SEED={seed} pytest {__file__} -k five_faults -x -s")
    with takeovers(tmp_path, seed) as job:
        for name in random.Random(seed).choices(FAULTS, k=5):
            job.fault(name)
        job.judge()
