"""SQLite on a simulated disk: the shipped database code and a real SQLite over any ``StorageFiles``.

The SQLite of ``apsw`` takes its file operations from Python, so every write and sync of it can fail, be torn or be lost
as those of the storage do. It is another build of SQLite than Python's own, always of the same version, so that a seed
means the same on every machine.

Two things differ from a database on a file system. One connection holds all locks of SQLite, because a write-ahead log
without that needs shared memory; the lock file of the store guards the database anyway. Locks of other programs are
injected before a transaction begins (``hold``).
"""

from __future__ import annotations

import errno
import itertools
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import apsw

from cutwater.metadata.stores.sqlite_engine import SqliteConnection
from cutwater.storage.files import File, StorageFiles

SECTOR_BYTES = 4096
CHECKPOINT_PAGES = 1_000
"""SQLite's own default for ``wal_autocheckpoint``."""
JULIAN_DAY = 2_460_000.5
"""The time that SQLite is told; nothing stored depends on it."""
_JOURNALS = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL

_TEXTS = {
    apsw.SQLITE_BUSY: "database is locked",
    apsw.SQLITE_FULL: "database or disk is full",
    apsw.SQLITE_IOERR: "disk I/O error",
    apsw.SQLITE_CANTOPEN: "unable to open database file",
}

T = TypeVar("T")

_numbers = itertools.count(1)


class DiskSqlite:
    """Implements ``SqliteEngine`` for one simulated process. Call ``kill`` when the process dies.

    ``wait`` is called with the seconds that a statement waits for a lock; a simulation charges them to the process.
    """

    def __init__(
        self, files: StorageFiles, random: Random, wait: Callable[[float], object] = lambda seconds: None
    ) -> None:
        self.files = files
        self._random, self._wait = random, wait
        self._held_seconds = 0.0
        self._vfs = _FilesVfs(f"cutwater-{next(_numbers)}", files)

    def connect(self, path: Path, busy_seconds: float) -> SqliteConnection:
        _seed_sqlite(self._random)
        with _standard_errors(self._vfs):
            connection = apsw.Connection(str(path), vfs=self._vfs.name)
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        return _DiskConnection(self, self._vfs, connection, busy_seconds)

    def kill(self) -> None:
        """Let nothing of the process reach the disk any more, not even when its connection is collected."""
        self._vfs.death = self._vfs.death or SystemExit("the process is dead")

    def hold(self, seconds: float) -> None:
        """Another program locks the database for so long. 0 releases the lock."""
        self._held_seconds = seconds

    def begin(self, patience_seconds: float) -> None:
        """Wait until no other program has a lock, or raise that one has."""
        while self._held_seconds > 0:
            if patience_seconds <= 0:
                raise _standard_error(apsw.SQLITE_BUSY)
            seconds = min(self._held_seconds, patience_seconds, 0.05)
            self._wait(seconds)
            self._held_seconds = max(0.0, self._held_seconds - seconds)
            patience_seconds -= seconds


class _DiskConnection:
    """Implements ``SqliteConnection``."""

    def __init__(self, engine: DiskSqlite, vfs: _FilesVfs, connection: apsw.Connection, busy_seconds: float) -> None:
        self._engine, self._vfs, self._connection = engine, vfs, connection
        self._patience_seconds = busy_seconds
        self._checkpoint_pages = CHECKPOINT_PAGES
        connection.set_wal_hook(self._committed)

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> _Rows:
        setting, _, value = statement.partition(" = ")
        if setting == "PRAGMA busy_timeout":
            self._patience_seconds = int(value) / 1_000
        elif setting == "PRAGMA wal_autocheckpoint":
            # The setting would replace the hook.
            self._checkpoint_pages = int(value)
            return _Rows([(self._checkpoint_pages,)])
        elif statement == "BEGIN IMMEDIATE":
            self._engine.begin(self._patience_seconds)
        with _standard_errors(self._vfs):
            return _Rows(self._connection.execute(statement, values).fetchall())

    def _committed(self, connection: apsw.Connection, name: str, pages: int) -> int:
        """Move the log into the database when it is long. Like SQLite's own hook, this ignores errors: the transaction
        is committed. ``apsw`` would raise them."""
        if pages >= self._checkpoint_pages:
            with suppress(apsw.Error):
                connection.wal_checkpoint(name, apsw.SQLITE_CHECKPOINT_PASSIVE)
        return apsw.SQLITE_OK

    def close(self) -> None:
        # SQLite closes a connection also if the files fail meanwhile, and does not say so.
        with _standard_errors(self._vfs), suppress(apsw.Error):
            self._connection.close()


class _Rows:
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows


class _FilesVfs(apsw.VFS):
    """Passes the file operations of SQLite on to files. ``death`` is what ended the process during one of them."""

    def __init__(self, name: str, files: StorageFiles) -> None:
        super().__init__(name, "")
        self.name, self.files = name, files
        self.death: BaseException | None = None

    def do(self, call: Callable[[], T], failure: int, when_dead: T) -> T:
        """Call the files; raise failures as SQLite knows them. Nothing is called after a death: SQLite then finishes
        what it was doing without a file, and the connection raises what ended the process."""
        if self.death is not None:
            return when_dead
        try:
            return call()
        except OSError as error:
            raise apsw.exception_for(apsw.SQLITE_FULL if error.errno == errno.ENOSPC else failure) from None
        except BaseException as error:
            self.death = error
            return when_dead

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> Any:
        if name is None:
            raise apsw.exception_for(apsw.SQLITE_CANTOPEN)
        path = Path(name.filename() if isinstance(name, apsw.URIFilename) else name)

        def opened() -> _DiskFile | None:
            file = self.files.open(path) if self.files.exists(path) else self.files.create(path)
            may_be_new = bool(flags[0] & apsw.SQLITE_OPEN_CREATE and flags[0] & _JOURNALS)
            return _DiskFile(self, file, may_be_new=may_be_new)

        flags[1] = flags[0]
        file = self.do(opened, apsw.SQLITE_CANTOPEN, None)
        if file is None:
            raise apsw.exception_for(apsw.SQLITE_CANTOPEN)
        return file

    def xDelete(self, filename: str, syncdir: bool) -> None:
        def delete() -> None:
            self.files.unlink(Path(filename))
            if syncdir:
                self.files.sync_dir(Path(filename).parent)

        self.do(delete, apsw.SQLITE_IOERR_DELETE, None)

    def xAccess(self, pathname: str, flags: int) -> bool:
        return self.do(lambda: self.files.exists(Path(pathname)), apsw.SQLITE_IOERR_ACCESS, False)

    def xFullPathname(self, name: str) -> str:
        return name

    def xSleep(self, microseconds: int) -> int:
        return microseconds

    def xCurrentTime(self) -> float:
        return JULIAN_DAY

    def xCurrentTimeInt64(self) -> int:
        return int(JULIAN_DAY * 86_400_000)


class _SeedVfs(apsw.VFS):
    """SQLite takes the seed of its random numbers, which end up in its log, from the default one."""

    def __init__(self, random: Random) -> None:
        super().__init__("cutwater-seed", "", makedefault=True)
        self._random = random

    def xRandomness(self, numbytes: int) -> bytes:
        return self._random.randbytes(numbytes)

    def xCurrentTimeInt64(self) -> int:
        return int(JULIAN_DAY * 86_400_000)


def _seed_sqlite(random: Random) -> None:
    vfs = _SeedVfs(random)
    try:
        apsw.randomness(0)
        apsw.randomness(1)
    finally:
        vfs.unregister()


class _DiskFile:
    """A file as SQLite uses it.

    ``may_be_new``: the first sync of a log also syncs its name, whether or not the file was there before. As on a file
    system, SQLite ignores that the name could not be synced.
    """

    def __init__(self, vfs: _FilesVfs, file: File, *, may_be_new: bool) -> None:
        self._vfs, self._file, self._may_be_new = vfs, file, may_be_new

    def xRead(self, amount: int, offset: int) -> bytes:
        return self._vfs.do(lambda: self._file.pread(amount, offset), apsw.SQLITE_IOERR_READ, b"")

    def xWrite(self, data: bytes, offset: int) -> None:
        self._vfs.do(lambda: self._file.pwritev([bytes(data)], offset), apsw.SQLITE_IOERR_WRITE, None)

    def xTruncate(self, newsize: int) -> None:
        self._vfs.do(lambda: self._file.truncate(newsize), apsw.SQLITE_IOERR_TRUNCATE, None)

    def xSync(self, flags: int) -> None:
        self._vfs.do(self._sync, apsw.SQLITE_IOERR_FSYNC, None)

    def _sync(self) -> None:
        self._file.sync_all()
        if self._may_be_new:
            self._may_be_new = False
            with suppress(OSError):
                self._vfs.files.sync_dir(self._file.path.parent)

    def xFileSize(self) -> int:
        return self._vfs.do(self._file.size, apsw.SQLITE_IOERR_FSTAT, 0)

    def xClose(self) -> None:
        pass

    def xLock(self, level: int) -> None:
        pass

    def xUnlock(self, level: int) -> None:
        pass

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, op: int, pointer: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return SECTOR_BYTES

    def xDeviceCharacteristics(self) -> int:
        # As on a file system: a torn write leaves the bytes around it as they were.
        return apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE


@contextmanager
def _standard_errors(vfs: _FilesVfs) -> Iterator[None]:
    """Raise errors of ``apsw`` as those of the module ``sqlite3``, and what ended the process as it is."""
    try:
        yield
    except apsw.Error as error:
        if vfs.death is None:
            raise _standard_error(getattr(error, "extendedresult", apsw.SQLITE_ERROR), str(error)) from error
    if vfs.death is not None:
        raise vfs.death


def _standard_error(code: int, text: str = "") -> sqlite3.Error:
    names = apsw.mapping_extended_result_codes if code > 255 else apsw.mapping_result_codes
    error = sqlite3.OperationalError(text or _TEXTS.get(code & 255, "error of SQLite"))
    error.sqlite_errorcode, error.sqlite_errorname = code, str(names[code])
    return error
