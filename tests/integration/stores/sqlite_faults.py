"""A metadata node on SQLite whose disk fails: many lives of one process over one disk, from a seed.

A life opens the database, stores decisions and snapshots, and ends by a kill, a power cut or a disk error, at any file
operation. A checker knows what was confirmed. What the next life loads must be that, and at most the one call whose
outcome is unknown, whole.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from msgspec import Struct

from cutwater.core.order.decisions import CommitCursor, Decision
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.errors import CutwaterError, InvalidArgument, Unavailable
from cutwater.format.errors import DiskFull, StorageBroken
from cutwater.metadata.stores.sqlite_database import SqliteDatabase
from cutwater.metadata.stores.store_interface import LoadedState
from cutwater.testing.disk_faults import DiskFault, DiskFaultRule, ProcessDied
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import GLSN, ClusterId, DecisionIndex, LeaderEpoch, MetadataNodeId

if TYPE_CHECKING:
    from cutwater.testing.stores.sqlite_disk import DiskSqlite

DATABASE = Path("/disk/metadata.db")
CLUSTER = ClusterId(7)
NODE = MetadataNodeId(1)
LIVES = 10
STEPS_MAX = 25
CHECKPOINT_PAGES = 12
"""So often SQLite moves its log into the database: every few appends, instead of every few thousand."""


class SqliteProfile(Struct, frozen=True):
    """How the lives go."""

    errors: tuple[DiskFault, ...]
    error_chances: tuple[float, ...] = (0.003, 0.02, 0.1)
    dies_within: tuple[int, ...] = (40, 300)
    """How many file operations a life has at most, if it has a limit."""


ALL_ERRORS = SqliteProfile((DiskFault.SYNC_ERROR, DiskFault.WRITE_ERROR, DiskFault.READ_ERROR, DiskFault.FULL))
FAILED_SYNCS = SqliteProfile((DiskFault.SYNC_ERROR,), (0.05, 0.1), (40, 60))
FULL_DISKS = SqliteProfile((DiskFault.FULL,))


class StoreViolation(AssertionError):
    """The store broke its promise."""


class SqliteLives:
    """``stored`` and ``epoch`` were confirmed, by a call or by a load; ``maybe`` and ``maybe_epoch`` are those that an
    unknown outcome would make of them."""

    def __init__(self, seed: int, profile: SqliteProfile) -> None:
        self.random, self.profile = Random(seed), profile
        self.files = FaultFiles(Random(self.random.getrandbits(64)))
        self.files.make_dir(DATABASE.parent)
        self.stored: tuple[Decision, ...] = ()
        self.maybe: tuple[Decision, ...] | None = None
        self.epoch = 0
        self.maybe_epoch: int | None = None
        self.loads = 0
        self.timeline: list[str] = []

    def run(self) -> None:
        for number in range(LIVES):
            self._life(number)
            self._end()
        self.files.faults.clear()
        self._life(LIVES, is_calm=True)
        if not self.loads:
            raise StoreViolation("nothing was ever loaded")

    def _life(self, number: int, *, is_calm: bool = False) -> None:
        from cutwater.testing.stores.sqlite_disk import DiskSqlite

        engine = self.engine = DiskSqlite(self.files, Random(self.random.getrandbits(64)))
        if not is_calm:
            trouble = self.random.choice(("error", "error", "death", "death", "both"))
            if trouble != "death":
                fault = self.random.choice(self.profile.errors)
                self.files.faults.add(DiskFaultRule(fault, self.random.choice(self.profile.error_chances)))
                self._note(f"life {number}: {fault}")
            if trouble != "error":
                self.files.die_at = self.files.calls + self.random.randint(
                    1, self.random.choice(self.profile.dies_within)
                )
                self._note(f"life {number}: dies at {self.files.die_at}")
        database: SqliteDatabase | None = None
        try:
            database = SqliteDatabase(DATABASE, CLUSTER, engine)
            database._connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            self._load(database)
            for _ in range(self.random.randint(0, STEPS_MAX)):
                self._step(database, engine)
            if is_calm or self.random.random() < 0.3:
                self._note("closes")
                database.close()
        except ProcessDied:
            self._note("dies")
        except (StorageBroken, DiskFull, Unavailable, InvalidArgument) as error:
            # An invalid argument is a lock file that could not be written.
            if is_calm:
                raise
            self._note(f"stops: {error.code}")
            if database is not None and self.random.random() < 0.3:
                with suppress(StorageBroken, ProcessDied):
                    database.close()
        engine.kill()

    def _end(self) -> None:
        """The process ends, and perhaps the power goes, now or when the next life has begun."""
        self.files.faults.clear()
        if self.random.random() < 0.5:
            self._note("the power goes")
            self.files.crash(self.random)
        else:
            self.files.kill()

    def _load(self, database: SqliteDatabase) -> None:
        loaded = database.load()
        found = _names(loaded)
        candidates = [self.stored] if self.maybe is None else [self.stored, self.maybe]
        expected = [[_name(decision) for decision in decisions] for decisions in candidates]
        if found not in expected:
            raise StoreViolation(f"{found} is stored instead of {' or '.join(map(str, expected))}")
        self.stored = candidates[expected.index(found)]
        if loaded.leader.epoch not in (self.epoch, self.maybe_epoch):
            raise StoreViolation(f"epoch {loaded.leader.epoch} leads instead of {self.epoch} or {self.maybe_epoch}")
        self.epoch = loaded.leader.epoch
        self.maybe = self.maybe_epoch = None
        self.loads += 1
        self._note(f"loads {len(found)} decisions of epoch {self.epoch}")

    def _step(self, database: SqliteDatabase, engine: DiskSqlite) -> None:
        if self.random.random() < 0.05:
            engine.hold(self.random.choice((1, 10)))
        step = self.random.choices((self._acquire, self._append, self._trim, self._load), (1, 10, 2, 1))[0]
        try:
            step(database)
        except StorageBroken:
            raise
        except (DiskFull, Unavailable) as error:
            # Nothing was written, and the store goes on.
            self._note(f"refused: {error.code}")
            self.maybe = self.maybe_epoch = None
            engine.hold(0)
            self._load(database)

    def _acquire(self, database: SqliteDatabase) -> None:
        self.maybe_epoch = self.epoch + 1
        database.acquire(NODE, "here", LeaderEpoch(self.epoch))
        self.epoch, self.maybe_epoch = self.epoch + 1, None
        self._note(f"leads in epoch {self.epoch}")

    def _append(self, database: SqliteDatabase) -> None:
        if not self.epoch:
            return
        after, count = len(self.stored), self.random.choice((1, 1, 2, 5))
        filler = self.random.randbytes(self.random.choice((1, 10, 500, 3_000))).hex()
        more = tuple(CommitCursor(f"{after + n + 1} {filler}", GLSN(after + n + 1)) for n in range(count))
        self.maybe = (*self.stored, *more)
        database.append(LeaderEpoch(self.epoch), DecisionIndex(after), more)
        self.stored, self.maybe = self.maybe, None
        self._note(f"stored {after + 1} to {after + count}")

    def _trim(self, database: SqliteDatabase) -> None:
        if not self.stored:
            return
        state = OrderState()
        for decision in self.stored[: self.random.randint(1, len(self.stored))]:
            state.apply(decision)
        database.trim(LeaderEpoch(self.epoch), state.snapshot())
        self._note(f"trimmed to {state.index}")

    def _note(self, text: str) -> None:
        self.timeline.append(f"{self.files.calls:6} {text}")


def _name(decision: Decision) -> str:
    assert isinstance(decision, CommitCursor)
    return decision.cursor[:20]


def _names(loaded: LoadedState) -> list[str]:
    """The decisions in the snapshot, which keeps the name of each, and after it."""
    kept = sorted(loaded.snapshot.cursors, key=_number) if loaded.snapshot != Snapshot() else []
    return [name[:20] for name in kept] + [_name(decision) for decision in loaded.decisions]


def _number(name: str) -> int:
    return int(name.partition(" ")[0])


def run_lives(seed: int, profile: SqliteProfile = ALL_ERRORS) -> SqliteLives:
    """Run one seed. A violation, and any error that the store should not have raised, tells how to have it again."""
    lives = SqliteLives(seed, profile)
    try:
        lives.run()
    except (AssertionError, CutwaterError) as error:
        lives.engine.kill()
        timeline = "\n".join(lives.timeline)
        raise StoreViolation(
            f"{type(error).__name__}: {error}\n{timeline}\nto have this again: STORE_SEED={seed} python -m pytest "
            "tests/integration/stores/test_store_faults.py"
        ) from error
    return lives
