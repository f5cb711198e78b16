"""The simulator is tested: each planted bug in the job service is found within 200 seeds of its profile by a checker,
not by a crash, and the seed that finds it is clean without the bug."""

from __future__ import annotations

import pytest
from planted_bugs import check_found, check_no_trace
from planted_job_bugs import JOB_BUGS


def test_there_are_enough_planted_bugs() -> None:
    assert len(JOB_BUGS) >= 8


@pytest.mark.parametrize("name", JOB_BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    check_found(name, JOB_BUGS[name])


def test_planting_leaves_no_trace() -> None:
    check_no_trace(JOB_BUGS)
