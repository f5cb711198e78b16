"""The disk of a simulated machine, as the parts of the log find it that take their files from ``system.made``."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cutwater.metadata.stores.encoding import decode_batch, decode_leader
from cutwater.metadata.stores.sqlite_engine import SqliteConnection, SqliteEngine
from cutwater.runtime.local_files import MachineFiles
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.fault_files import FaultFiles
from cutwater.testing.virtual.store import SharedStore
from cutwater.types import DecisionIndex


class SimMachineFiles(MachineFiles):
    """Directories and secrets on a simulated disk, which has no users; None is a machine without files."""

    def __init__(self, disk: FaultFiles | None) -> None:
        self._disk = disk

    def _files(self, path: Path | str) -> FaultFiles:
        if self._disk is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return self._disk

    def is_dir(self, path: Path) -> bool:
        return self._disk is not None and self._disk.is_dir(path)

    def exists(self, path: Path) -> bool:
        return self._disk is not None and self._disk.exists(path)

    def names(self, path: Path) -> list[str]:
        return self._files(path).names(path)

    def read(self, path: Path) -> bytes:
        file = self._files(path).open(path)
        return file.pread(file.size(), 0)

    def read_into(self, path: str, data: memoryview, offset: int) -> int:
        found = self._files(path).open(Path(path)).pread(len(data), offset)
        data.cast("B")[: len(found)] = found
        return len(found)

    def read_secret(self, path: Path, what: str, way_out: str) -> bytes:
        return self.read(path)

    def create_secret(self, path: Path, data: bytes, *, is_lasting: bool) -> None:
        files = self._files(path)
        if files.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        file = files.create(path)
        file.pwritev([data], 0)
        if is_lasting:
            file.sync_all()

    def replace(self, source: Path, target: Path) -> None:
        self._files(source).rename(source, target)

    def unlink(self, path: Path) -> None:
        self._files(path).unlink(path)

    def make_dir(self, path: Path, *, is_own: bool) -> None:
        files = self._files(path)
        if not files.is_dir(path):
            files.make_one_dir(path)

    def sync_dir(self, path: Path) -> None:
        self._files(path).sync_dir(path)

    def close_to_others(self, path: Path) -> None:
        pass


class WatchedSqlite:
    """Implements ``SqliteEngine`` by another one, and notes what the database has, as ``WatchedStore`` does."""

    def __init__(self, inner: SqliteEngine, store: SharedStore, found: list[Violation]) -> None:
        self._inner, self._store, self._found = inner, store, found
        self.files = inner.files

    def connect(self, path: Path, busy_seconds: float) -> SqliteConnection:
        return _WatchedConnection(self._inner.connect(path, busy_seconds), self._store, self._found)


class _WatchedConnection:
    def __init__(self, inner: SqliteConnection, store: SharedStore, found: list[Violation]) -> None:
        self._inner, self._store, self._found = inner, store, found
        self._batches: list[bytes] = []
        self._leader: bytes | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def in_transaction(self) -> bool:
        return self._inner.in_transaction

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        rows = self._inner.execute(statement, values)
        if statement == "INSERT INTO batches VALUES (?, ?)":
            self._batches.append(values[1])
        elif statement == "INSERT OR REPLACE INTO records VALUES (?, ?)" and values[0] == "leader":
            self._leader = values[1]
        elif statement == "COMMIT":
            # It counts when the time is over that the disk has charged.
            self._loop.call_soon_threadsafe(self._has, self._batches, self._leader)
            self._batches, self._leader = [], None
        elif statement in ("ROLLBACK", "BEGIN IMMEDIATE"):
            self._batches, self._leader = [], None
        elif statement == "SELECT first, data FROM batches ORDER BY first":
            found = rows.fetchall()
            self._loop.call_soon_threadsafe(self._has, [data for _, data in found], None)
            return _Fetched(found)
        return rows

    def _has(self, batches: list[bytes], leader: bytes | None) -> None:
        if leader is not None:
            self._store.heard(decode_leader(leader, "leader").epoch)
        for data in batches:
            batch = decode_batch(data, "decisions")
            try:
                self._store.confirmed(DecisionIndex(batch.first - 1), batch.decisions)
            except Violation as violation:
                self._found.append(violation)

    def close(self) -> None:
        self._inner.close()


class _Fetched:
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def fetchone(self) -> Any:
        return self._rows[0] if self._rows else None

    def fetchall(self) -> list[Any]:
        return self._rows
