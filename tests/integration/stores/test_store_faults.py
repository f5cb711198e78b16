"""The shipped stores keep their promises while etcd and disks fail, and planted bugs in them are found.

A failure shows its seed and what happened. To have it again:
STORE_SEED=n python -m pytest tests/integration/stores/test_store_faults.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.integration.stores.etcd_nodes import run_nodes
from tests.integration.stores.planted_store_bugs import ETCD_BUGS, SQLITE_BUGS, Patches, planted
from tests.integration.stores.sqlite_faults import ALL_ERRORS, FAILED_SYNCS, SqliteProfile, StoreViolation, run_lives

SEED = os.environ.get("STORE_SEED")
FIRST = int(SEED) if SEED else time.time_ns() % 1_000_000
ETCD_RUNS = 1 if SEED else 8
SQLITE_RUNS = 1 if SEED else 25
SEEDS_MAX = 200


def test_nodes_that_compete_on_a_failing_etcd_lose_nothing_and_do_not_fork() -> None:
    for seed in range(FIRST, FIRST + ETCD_RUNS):
        run_nodes(seed)


@pytest.mark.parametrize("profile", [ALL_ERRORS, FAILED_SYNCS], ids=["all errors", "failed syncs"])
def test_sqlite_on_a_failing_disk_loses_nothing(profile: SqliteProfile) -> None:
    pytest.importorskip("apsw")
    for seed in range(FIRST, FIRST + SQLITE_RUNS):
        run_lives(seed, profile)


def test_a_database_that_could_not_be_opened_after_a_failed_sync_is_not_damaged() -> None:
    """It was: an error while it was opened closed the connection, which copied a log that was not all on disk."""
    pytest.importorskip("apsw")
    run_lives(10138, ALL_ERRORS)


def test_a_seed_means_one_run() -> None:
    pytest.importorskip("apsw")
    assert run_nodes(5).timeline == run_nodes(5).timeline
    lives = [run_lives(5) for _ in range(2)]
    assert lives[0].timeline == lives[1].timeline
    assert [[file.content(path) for path in file.paths()] for file in (lives[0].files,)] == [
        [file.content(path) for path in file.paths()] for file in (lives[1].files,)
    ]


@pytest.mark.parametrize("bug", ETCD_BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_of_the_etcd_store_is_found(bug: Callable[[], Patches]) -> None:
    found_within(bug, run_nodes)


@pytest.mark.parametrize(("bug", "profile"), SQLITE_BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bug_of_the_sqlite_store_is_found(bug: Callable[[], Patches], profile: SqliteProfile) -> None:
    pytest.importorskip("apsw")
    found_within(bug, lambda seed: run_lives(seed, profile))


def found_within(bug: Callable[[], Patches], run: Callable[[int], object]) -> None:
    """Some seed shows the bug, and shows nothing without it."""
    for seed in range(SEEDS_MAX):
        try:
            with planted(bug):
                run(seed)
        except StoreViolation as violation:
            print(f"{bug.__name__}: seed {seed}, {str(violation).splitlines()[0]}")
            run(seed)
            return
    pytest.fail(f"{SEEDS_MAX} seeds do not show the bug")
