"""Bugs that the simulator must find, each one wrong line in the right place, and the profile made for it.

A bug is switched on for the length of a ``with`` block, in tests only: it replaces methods by wrong ones, so the
shipped code has no trace of it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from cutwater.testing.virtual import simulation
from cutwater.testing.virtual.options import ShippedOptions
from cutwater.testing.virtual.simulation import ShippedResult, simulate_shipped
from tests.soak import IS_SOAK

Patch = tuple[object, str, object]
SEEDS_MAX = 200


@dataclass(frozen=True)
class PlantedBug:
    """``seed`` is the first one that finds the bug: the suite begins with it, and `make soak` with 0."""

    what: str
    seed: int
    options: ShippedOptions
    patches: Callable[[], list[Patch]]


@contextmanager
def planted(patches: list[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, wrong in patches:
            stack.enter_context(mock.patch.object(owner, name, wrong))
        yield


def unasserted(owner: type, *names: str) -> list[Patch]:
    """Return patches that leave the assertions out of these methods: a checker must find what they would find first."""
    patches: list[Patch] = []
    for name in names:
        function = getattr(owner, name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        code: dict[str, Any] = {}
        exec(
            compile(_Unasserted().visit(tree), inspect.getsourcefile(function) or name, "exec"),
            function.__globals__,
            code,
        )
        patches.append((owner, name, code[name]))
    return patches


class _Unasserted(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)


def plant(bug: Callable[[], list[Patch]], seed: int, what: str, **changes: Any) -> tuple[str, PlantedBug]:
    """Return a bug and its profile: a small cluster for a short time, with these changes."""
    usual: dict[str, Any] = {
        "storage_nodes": 2,
        "metadata_nodes": 1,
        "replication": 2,
        "seconds": 1.0,
        "producers": 0,
        "append_pause": 0.02,
        "down_seconds_max": 0.3,
        "reads_every": 0.1,
    }
    return bug.__name__, PlantedBug(what, seed, ShippedOptions(**(usual | changes)), bug)


def simulate_bug(bug: PlantedBug, seed: int) -> ShippedResult:
    """Run the profile of a bug. What hangs does so for less time than in other simulations."""
    with (
        mock.patch.object(simulation, "APPEND_AGAIN_SECONDS", 10.0),
        mock.patch.object(simulation, "CONVERGE_SECONDS", 15.0),
        mock.patch.object(simulation, "SETTLE_SECONDS", 15.0),
    ):
        return simulate_shipped(seed, bug.options)


def first_violation(bug: PlantedBug) -> ShippedResult | None:
    """Return the first run that a checker objects to. The suite begins with the seed that is known to find the bug, so
    it needs only one run, unless a change has made other runs of the same seeds."""
    seeds = [seed for seed in range(SEEDS_MAX) if IS_SOAK or seed != bug.seed]
    with planted(bug.patches()):
        for seed in seeds if IS_SOAK else [bug.seed, *seeds]:
            result = simulate_bug(bug, seed)
            # A patch that no longer fits the code crashes, and proves nothing. Neither does an assertion of the code.
            if result.violation is not None and result.guarantee not in ("crash", "assertion"):
                return result
    return None


def check_found(name: str, bug: PlantedBug) -> None:
    """A check that cannot fail is no check: with the bug a guarantee breaks; without it, on that seed, none does."""
    found = first_violation(bug)
    assert found is not None, f"{name} ({bug.what}) was not found within {SEEDS_MAX} seeds"
    print(f"{name}: found with seed {found.seed}: {found.violation}")
    clean = simulate_bug(bug, found.seed)
    assert clean.violation is None, f"{name}: the profile fails without the bug, seed {found.seed}: {clean.violation}"


def check_no_trace(bugs: dict[str, PlantedBug]) -> None:
    """After the block the shipped code is back."""
    patches = [patch for bug in bugs.values() for patch in bug.patches() if hasattr(patch[0], patch[1])]
    before = [getattr(owner, name) for owner, name, _ in patches]
    for bug in bugs.values():
        with planted([patch for patch in bug.patches() if hasattr(patch[0], patch[1])]):
            pass
    assert [getattr(owner, name) for owner, name, _ in patches] == before
