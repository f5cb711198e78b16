"""The SQLite library and the files under it: what ``sqlite_database`` needs of the machine.

``StandardSqlite`` is the one that Python has. ``cutwater.testing.stores`` has one on simulated disks.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from cutwater.runtime.permissions import FILE_MODE, close_to_others
from cutwater.storage.files import OsFiles, StorageFiles


class SqliteRows(Protocol):
    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class SqliteConnection(Protocol):
    """A connection in autocommit mode, for one thread at a time. Errors are those of the module ``sqlite3``."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, statement: str, values: Sequence[Any] = ..., /) -> SqliteRows: ...

    def close(self) -> None: ...


class SqliteEngine(Protocol):
    @property
    def files(self) -> StorageFiles: ...

    def connect(self, path: Path, busy_seconds: float) -> SqliteConnection:
        """Open or create a database. A statement waits this long for locks of other programs."""


class StandardSqlite:
    """Implements ``SqliteEngine`` with the SQLite of Python and the file system."""

    def __init__(self) -> None:
        self.files: StorageFiles = OsFiles()

    def connect(self, path: Path, busy_seconds: float) -> SqliteConnection:
        # Restrict the mode of the database first: SQLite gives its write-ahead log and shared memory the same mode.
        with suppress(OSError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        for name in ("", "-wal", "-shm"):
            close_to_others(path.with_name(path.name + name))
        return sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
