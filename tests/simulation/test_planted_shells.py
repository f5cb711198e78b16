"""The simulator of shipped code is tested: each planted bug in the shells is found within 200 seeds of its profile, by
a checker and not by a crash, and the seed that finds it is clean without the bug."""

from __future__ import annotations

import pytest
from planted_shell_bugs import SHELL_BUGS, planted_in_shell, simulate_bug

from cutwater.testing.virtual.simulation import ShippedResult
from tests.soak import IS_SOAK

SEEDS_MAX = 200


def first_violation(name: str) -> ShippedResult | None:
    """Return the first run that a checker objects to. The suite begins with the seed that is known to find the bug, so
    it needs only one run, unless a change has made other runs of the same seeds."""
    bug = SHELL_BUGS[name]
    seeds = [seed for seed in range(SEEDS_MAX) if IS_SOAK or seed != bug.seed]
    with planted_in_shell(bug):
        for seed in seeds if IS_SOAK else [bug.seed, *seeds]:
            result = simulate_bug(bug, seed)
            # A patch that no longer fits the code crashes, and proves nothing.
            if result.violation is not None and result.guarantee != "crash":
                return result
    return None


def test_there_are_enough_planted_bugs() -> None:
    assert len(SHELL_BUGS) >= 20


@pytest.mark.parametrize("name", SHELL_BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = SHELL_BUGS[name]
    found = first_violation(name)
    assert found is not None, f"{name} ({bug.what}) was not found within {SEEDS_MAX} seeds"
    print(f"{name}: found with seed {found.seed}: {found.violation}")
    clean = simulate_bug(bug, found.seed)
    assert clean.violation is None, f"{name}: the profile fails without the bug, seed {found.seed}: {clean.violation}"


def test_planting_leaves_no_trace() -> None:
    """After the block the shipped code is back."""
    patches = [patch for bug in SHELL_BUGS.values() for patch in bug.patches()]
    before = [getattr(owner, name) for owner, name, _ in patches]
    for bug in SHELL_BUGS.values():
        with planted_in_shell(bug):
            pass
    assert [getattr(owner, name) for owner, name, _ in patches] == before
