"""The store in SQLite: kills, locks, damage and disks that fail."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cutwater.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable, WrongIdentity
from cutwater.format.errors import DiskFull, NewerFormat, StorageBroken
from cutwater.metadata.stores import sqlite_store
from cutwater.metadata.stores.open_store import open_store
from cutwater.metadata.stores.sqlite_database import SqliteDatabase
from cutwater.metadata.stores.sqlite_store import CALLS_MAX, SqliteStore
from cutwater.metadata.stores.store_errors import DamagedStore, StoreLocked
from cutwater.types import ClusterId, DecisionIndex, LeaderEpoch
from tests.integration.stores.conftest import CLUSTER, Sqlite
from tests.integration.stores.store_kit import HERE, ONE, START, THERE, TWO, History, cursors

CHILD = Path(__file__).with_name("sqlite_child.py")
KILLS = 20
SEED = int(os.environ.get("STORE_SEED", time.time_ns() % 1_000_000))
E0, E1 = LeaderEpoch(0), LeaderEpoch(1)


@contextmanager
def writer(path: Path, seed: int, file_bytes_max: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(CHILD), str(path), str(seed), str(file_bytes_max)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_was_confirmed_outlives_a_kill(tmp_path: Path) -> None:
    """Every append that was confirmed is there, in its place and once; at most the one under way is more."""
    print(f"to have this again: STORE_SEED={SEED} python -m pytest {__file__}")
    path, random = tmp_path / "metadata.db", Random(SEED)
    confirmed = 0
    for epoch in range(1, KILLS + 1):
        with writer(path, SEED) as process:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert next(lines).split()[0] == "leads"
            for _ in range(random.randint(0, 25)):
                what, index = next(lines).split()
                assert what in ("stored", "trimmed")
                confirmed = max(confirmed, int(index))
            time.sleep(random.random() * 0.02)
            process.kill()
            for line in lines:
                # What it said before it was killed counts as well.
                confirmed = max(confirmed, int(line.split()[1]))
        database = SqliteDatabase(path, CLUSTER)
        loaded = database.load()
        database.close()
        stored = loaded.snapshot.index + len(loaded.decisions)
        history = History(SEED)
        history.next(stored)
        assert loaded.leader.epoch == epoch
        assert confirmed <= stored <= confirmed + 4
        assert loaded.decisions == tuple(history.made[loaded.snapshot.index :])
        confirmed = stored
    assert confirmed > KILLS


def test_a_disk_that_fails_stops_the_store_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    with writer(path, 5, file_bytes_max=150_000) as process:
        assert process.stdout is not None
        said = [line.split() for line in process.stdout]
        assert process.wait(timeout=30) == 0
    assert [what for what in said if what[0] == "failed"] == [["failed", "storage_broken"]] * 3
    confirmed = max(int(index) for what, index in said if what == "stored")
    database = SqliteDatabase(path, CLUSTER)
    loaded = database.load()
    database.close()
    stored, history = loaded.snapshot.index + len(loaded.decisions), History(5)
    history.next(stored)
    assert confirmed <= stored <= confirmed + 4
    assert loaded.decisions == tuple(history.made[loaded.snapshot.index :])


def test_a_full_disk_refuses_and_recovers(tmp_path: Path) -> None:
    database, random = SqliteDatabase(tmp_path / "metadata.db", CLUSTER), Random(1)
    database.acquire(ONE, HERE, E0)
    database.append(E1, START, cursors(1, 5_000, random))
    database._connection.execute("PRAGMA max_page_count = 20")
    with pytest.raises(DiskFull, match="nothing was written; make room"):
        database.append(E1, DecisionIndex(1), cursors(1, 200_000, random))
    database.append(E1, DecisionIndex(1), ())
    assert len(database.load().decisions) == 1
    database._connection.execute("PRAGMA max_page_count = 100000")
    database.append(E1, DecisionIndex(1), cursors(1, 200_000, random))
    assert len(database.load().decisions) == 2
    database.close()


def test_every_commit_is_synced(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "metadata.db", CLUSTER)
    assert (database._pragma("journal_mode"), database._pragma("synchronous")) == ("wal", 2)
    database.close()


async def test_a_second_process_is_told_who_has_it(on_sqlite: Sqlite) -> None:
    with writer(on_sqlite.path, 1) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        with pytest.raises(
            StoreLocked, match=f"metadata.db is in use by process {process.pid}: stop that one"
        ) as caught:
            await on_sqlite.open()
        assert caught.value.pid == process.pid
        process.kill()
    store = await on_sqlite.open()
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        await open_store(f"sqlite:{on_sqlite.path}", cluster=CLUSTER)
    assert (await store.leader()).node == ONE


async def test_the_loop_appends_by_itself_unless_it_would_have_to_wait_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    append = SqliteDatabase.append

    def noted(database: SqliteDatabase, *args: Any, **kwargs: Any) -> None:
        threads.append(threading.current_thread())
        append(database, *args, **kwargs)

    monkeypatch.setattr(SqliteDatabase, "append", noted)
    backend, history = Sqlite(tmp_path / "metadata.db", may_wait=True), History()
    try:
        store = await backend.open()
        await store.acquire(ONE, HERE, E0)
        here = threading.current_thread()
        told: list[Exception | None] = []
        assert store.begin_append(E1, history.state.index, history.next(), told.append)
        assert (threads, told) == ([here], [None])
        # While another program has a lock, the thread waits.
        backend.stall()
        after, decisions = history.state.index, history.next()
        assert not store.begin_append(E1, after, decisions, told.append)
        with pytest.raises(DeadlineExceeded):
            await store.append(E1, after, decisions, timeout_ms=50)
        assert threads[1] is here
        assert threads[2] is not here
        # As long as the thread is busy, the loop keeps away; and so it does from a disk that is slow.
        threads.clear()
        again = asyncio.Event()

        def hear(outcome: Exception | None) -> None:
            told.append(outcome)
            again.set()

        assert store.begin_append(E1, after, decisions, hear)
        assert told == [None]
        backend.resume()
        await asyncio.wait_for(again.wait(), 10)
        assert told == [None, None]
        assert isinstance(store, SqliteStore)
        store._pace.observe(time.monotonic() - 60)
        again.clear()
        assert store.begin_append(E1, history.state.index, history.next(), hear)
        await asyncio.wait_for(again.wait(), 10)
        assert here not in threads
        assert (await store.load()).decisions == tuple(history.made)
    finally:
        await backend.close()


async def test_what_was_begun_is_told_once_also_if_the_disk_does_not_answer_or_the_store_is_closed(
    on_sqlite: Sqlite, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, history = await on_sqlite.open(), History()
    await store.acquire(ONE, HERE, E0)
    on_sqlite.stall()
    monkeypatch.setattr(sqlite_store, "TIMEOUT_MS", 50)
    told: list[Exception | None] = []
    after, decisions = history.state.index, history.next()
    for _ in range(2):
        assert store.begin_append(E1, after, decisions, told.append)
    while len(told) < 2:
        await asyncio.sleep(0.01)
    assert [type(outcome) for outcome in told] == [DeadlineExceeded] * 2
    on_sqlite.resume()
    # The first one was under way; the second one, for which nobody waited any more, was never begun.
    await store.append(E1, after, decisions)
    assert len(told) == 2
    on_sqlite.stall()
    monkeypatch.undo()
    assert store.begin_append(E1, history.state.index, history.next(), told.append)
    await store.close(timeout_ms=100)
    assert type(told[2]) is Unavailable
    on_sqlite.resume()
    assert not store.begin_append(E1, history.state.index, (), told.append)
    assert len(told) == 3


async def test_no_more_calls_wait_than_there_is_room_for(on_sqlite: Sqlite) -> None:
    store = await on_sqlite.open()
    on_sqlite.stall()
    calls = [asyncio.ensure_future(store.acquire(ONE, HERE, E0, timeout_ms=300)) for _ in range(CALLS_MAX + 20)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [result for result in results if isinstance(result, ResourceExhausted)]
    assert 10 <= len(refused) <= 20
    assert all(isinstance(result, DeadlineExceeded) for result in results if result not in refused)
    on_sqlite.resume()
    while True:
        # Nobody waits for what is in the queue, so it is soon empty.
        try:
            assert (await store.leader()).epoch <= 1
            break
        except ResourceExhausted:
            await asyncio.sleep(0.01)


def some_database(path: Path) -> None:
    database, history = SqliteDatabase(path, CLUSTER), History(2)
    database.acquire(TWO, THERE, E0)
    for _ in range(30):
        database.append(E1, history.state.index, history.next(3))
    database.trim(E1, history.state.snapshot())
    for _ in range(10):
        database.append(E1, history.state.index, history.next(3))
    database.close()


@pytest.mark.parametrize("seed", range(8))
def test_damage_is_found_wherever_it_is(tmp_path: Path, seed: int) -> None:
    """A changed byte in the file is found when it is opened or loaded, or it is in no part that is in use."""
    path, random = tmp_path / "metadata.db", Random(seed)
    some_database(path)
    whole = path.read_bytes()
    database = SqliteDatabase(path, CLUSTER)
    intact = database.load()
    database.close()
    found = 0
    for _ in range(25):
        at = random.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << random.randrange(8)]) + whole[at + 1 :])
        try:
            database = SqliteDatabase(path, CLUSTER)
        except (DamagedStore, InvalidArgument, NewerFormat, StorageBroken):
            found += 1
            continue
        try:
            assert database.load() == intact, f"byte {at} was changed, and nobody noticed"
        except DamagedStore:
            found += 1
        finally:
            database.close()
    assert found


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM batches WHERE first = 100", "decision 103 follows decision 99"),
        ("DELETE FROM batches WHERE first < 110", "decisions 91 to 111 are missing"),
        ("DELETE FROM batches", "the snapshot is of decision 90, but the last one is 0"),
        ("DELETE FROM records WHERE name = 'snapshot'", "decisions 1 to 87 are missing"),
        ("UPDATE batches SET first = 101 WHERE first = 100", "decision 101 is damaged .it is decision 100"),
        ("UPDATE batches SET data = substr(data, 1, 40) WHERE first = 100", "decision 100 is damaged .the checksum"),
        ("UPDATE batches SET data = '' WHERE first = 100", "decision 100 is damaged .it is no record"),
        ("DELETE FROM records WHERE name = 'leader'", "it holds decisions, but no leader"),
        (
            "UPDATE batches SET data = (SELECT data FROM records WHERE name = 'leader') WHERE first = 100",
            "decision 100 is damaged .it holds a record of kind 2 instead of 3",
        ),
    ],
)
def test_what_does_not_fit_together_is_damage(tmp_path: Path, statement: str, message: str) -> None:
    path = tmp_path / "metadata.db"
    some_database(path)
    other = sqlite3.connect(path)
    other.execute(statement)
    other.commit()
    other.close()
    database = SqliteDatabase(path, CLUSTER)
    with pytest.raises(DamagedStore, match=message):
        database.load()
    database.close()


async def test_files_that_are_something_else_are_refused(on_sqlite: Sqlite, tmp_path: Path) -> None:
    some_database(on_sqlite.path)
    with pytest.raises(WrongIdentity, match="decisions of cluster 7, not of cluster 8"):
        await open_store(f"sqlite:{on_sqlite.path}", cluster=ClusterId(8))
    text = tmp_path / "text.db"
    text.write_text("a text, and no database\n" * 100)
    with pytest.raises(DamagedStore, match=r"text\.db is damaged \(file is not a database"):
        await open_store(f"sqlite:{text}", cluster=CLUSTER)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE t (a)")
    other.close()
    with pytest.raises(InvalidArgument, match="a database of another program"):
        await open_store(f"sqlite:{foreign}", cluster=CLUSTER)
    with sqlite3.connect(on_sqlite.path) as other:
        other.execute("PRAGMA user_version = 2")
    other.close()
    with pytest.raises(NewerFormat, match="has format version 2; this program reads versions up to 1"):
        await open_store(f"sqlite:{on_sqlite.path}", cluster=CLUSTER)
    with pytest.raises(InvalidArgument, match=r"is a directory: name a file in it, such as .*metadata\.db"):
        await open_store(f"sqlite:{tmp_path}", cluster=CLUSTER)
    with pytest.raises(InvalidArgument, match="missing is no directory: make it"):
        await open_store(f"sqlite:{tmp_path}/missing/metadata.db", cluster=CLUSTER)
