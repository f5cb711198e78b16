"""The simulator of shipped code is tested: each planted bug in the shells is found within 200 seeds of its profile, by
a checker and not by a crash, and the seed that finds it is clean without the bug."""

from __future__ import annotations

import pytest
from planted_shell_bugs import SHELL_BUGS, planted_in_shell

from cutwater.testing.virtual.simulation import ShippedResult, simulate_shipped
from tests.soak import IS_SOAK

SEEDS_MAX = 200


def first_violation(name: str, seeds: range) -> ShippedResult | None:
    bug = SHELL_BUGS[name]
    with planted_in_shell(bug):
        for seed in seeds:
            result = simulate_shipped(seed, bug.options)
            if result.violation is not None:
                return result
    return None


def test_there_are_enough_planted_bugs() -> None:
    assert len(SHELL_BUGS) >= 20


@pytest.mark.parametrize("name", SHELL_BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """The suite runs only the seed that is known to find the bug; ``make soak`` searches for it."""
    bug = SHELL_BUGS[name]
    found = first_violation(name, range(SEEDS_MAX) if IS_SOAK else range(bug.seed, bug.seed + 1))
    assert found is not None, (
        f"{name} ({bug.what}) is not found with seed {bug.seed} any more: CUTWATER_SOAK=1 searches for another one"
    )
    # A patch that no longer fits the code would crash, and prove nothing.
    assert found.guarantee != "crash", found.violation
    print(f"{name}: found with seed {found.seed}: {found.violation}")
    clean = simulate_shipped(found.seed, bug.options)
    assert clean.violation is None, f"{name}: the profile fails without the bug, seed {found.seed}: {clean.violation}"


def test_planting_leaves_no_trace() -> None:
    """After the block the shipped code is back."""
    patches = [patch for bug in SHELL_BUGS.values() for patch in bug.patches()]
    before = [getattr(owner, name) for owner, name, _ in patches]
    for bug in SHELL_BUGS.values():
        with planted_in_shell(bug):
            pass
    assert [getattr(owner, name) for owner, name, _ in patches] == before
