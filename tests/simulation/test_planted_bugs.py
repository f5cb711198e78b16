"""The tester is tested: each planted bug is found within 100 seeds, and the same seeds are clean without it."""

from __future__ import annotations

import pytest
from planted_bugs import BUGS, planted

from cutwater.testing.simulator.cluster import Result, simulate

SEEDS_MAX = 100


def first_violation(name: str) -> Result | None:
    bug = BUGS[name]
    with planted(bug):
        for seed in range(SEEDS_MAX):
            result = simulate(seed, bug.options)
            if result.violation is not None:
                return result
    return None


def test_there_are_enough_planted_bugs() -> None:
    assert len(BUGS) >= 16


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """A check that cannot fail is no check: with the bug a guarantee breaks; without it, on that seed, none does."""
    found = first_violation(name)
    assert found is not None, f"{name} ({BUGS[name].what}) was not found within {SEEDS_MAX} seeds"
    # A patch that no longer fits the code would crash, and prove nothing.
    assert found.guarantee != "crash", found.violation
    print(f"{name}: found with seed {found.seed}: {found.violation}")
    clean = simulate(found.seed, BUGS[name].options)
    assert clean.violation is None, f"{name}: the profile fails without the bug, seed {found.seed}: {clean.violation}"


def test_planting_leaves_no_trace() -> None:
    """After the block the shipped code is back."""
    owners = {
        (owner, attribute): getattr(owner, attribute) for bug in BUGS.values() for owner, attribute, _ in _patches(bug)
    }
    for bug in BUGS.values():
        with planted(bug):
            pass
    assert {key: getattr(*key) for key in owners} == owners


def _patches(bug):
    return [(owner, name, wrong) for owner, name, wrong in bug.patches() if hasattr(owner, name)]
