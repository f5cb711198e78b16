"""The shipped stores keep their promises while etcd and disks fail, and planted bugs in them are found.

A failure shows its seed and what happened. To have it again:
STORE_SEED=n python -m pytest tests/integration/stores/test_store_faults.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random

import pytest

from cutwater.errors import CutwaterError
from cutwater.format.errors import StorageBroken
from cutwater.metadata.stores.sqlite_database import SqliteDatabase
from cutwater.testing.disk_faults import ProcessDied
from cutwater.testing.fault_files import FaultFiles
from tests.integration.stores.etcd_nodes import run_nodes
from tests.integration.stores.planted_store_bugs import ETCD_BUGS, SQLITE_BUGS, Patches, planted
from tests.integration.stores.sqlite_faults import (
    ALL_ERRORS,
    CLUSTER,
    DATABASE,
    FAILED_SYNCS,
    SqliteProfile,
    StoreViolation,
    run_lives,
)

SEED = os.environ.get("STORE_SEED")
FIRST = int(SEED) if SEED else time.time_ns() % 1_000_000
ETCD_RUNS = 1 if SEED else 8
SQLITE_RUNS = 1 if SEED else 25
SEEDS_MAX = 200
OPENING_OPERATIONS_MAX = 60
"""More file operations than it takes to make a database."""


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


def test_a_power_cut_does_not_damage_a_database_whose_names_could_not_be_synced() -> None:
    """It did: SQLite ignores that the name of its log or journal was not synced. When the power went while it wrote the
    database, a part of that was left, and no log or journal."""
    pytest.importorskip("apsw")
    operations = range(1, OPENING_OPERATIONS_MAX)
    outcomes = {lose_power_while_opening(operation, seed) for operation in operations for seed in range(12)}
    assert outcomes == {ProcessDied, StorageBroken}


def lose_power_while_opening(operation: int, seed: int) -> type[Exception] | None:
    """Make a database where no name can be synced, until the process dies at a file operation; then the power goes.

    Return how the first opening ended. The second one, on a disk that is well, must find nothing damaged.
    """
    from cutwater.testing.stores.sqlite_disk import DiskSqlite

    files = FaultFiles()
    files.make_dir(DATABASE.parent)
    files.fail_sync = lambda path: path == DATABASE.parent
    files.die_at = files.calls + operation
    engine = DiskSqlite(files, Random(seed))
    outcome: type[Exception] | None = None
    try:
        SqliteDatabase(DATABASE, CLUSTER, engine)
    except (ProcessDied, StorageBroken) as error:
        outcome = type(error)
    engine.kill()
    files.crash(Random(seed))
    files.fail_sync = lambda path: False
    try:
        database = SqliteDatabase(DATABASE, CLUSTER, DiskSqlite(files, Random(seed)))
    except CutwaterError as error:
        pytest.fail(f"the process died at operation {operation}, then the power went (seed {seed}): {error}")
    assert not database.load().decisions
    database.close()
    return outcome


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
