"""The SQLite database of the metadata store: all statements, blocking, for one thread at a time.

::

    records (name, data)      identity, leader, snapshot, member/ID
    batches (first, data)     decisions as they were appended, by the index of the first of them

Only stored data decides whether a write is accepted: every write reads the leader and the last decision in its own
transaction. Nothing is remembered between calls, so the epoch would fence a second process even without the lock.

``synchronous=FULL`` syncs the write-ahead log to disk with every commit. Opening writes the whole log again, copies it
into the database and syncs both, because an earlier process may leave data behind that can be read but is not on disk.
It syncs the names of both before anything is committed, because SQLite copies its log even if the name may be lost.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cutwater.core.order.decisions import Decision
from cutwater.core.order.state import Snapshot
from cutwater.errors import CutwaterError, InvalidArgument, Unavailable, WrongIdentity
from cutwater.format.errors import DiskFull, NewerFormat, StorageBroken
from cutwater.metadata.stores.encoding import (
    Header,
    LeaderRecord,
    MemberRecord,
    StoredKind,
    StoreIdentity,
    decode_batch,
    decode_leader,
    decode_record,
    decode_snapshot,
    encode_batch,
    encode_record,
    encode_snapshot,
    header_of,
)
from cutwater.metadata.stores.sqlite_engine import SqliteEngine, StandardSqlite
from cutwater.metadata.stores.store_errors import DamagedStore, StoreLocked
from cutwater.metadata.stores.store_interface import NO_LEADER, LeaderInfo, LoadedState
from cutwater.metadata.stores.store_rules import elsewhere, loaded, not_stored, require_leader, too_late
from cutwater.runtime import system
from cutwater.storage.files import Lock, StorageFiles, is_full
from cutwater.types import ClusterId, DecisionIndex, LeaderEpoch, MetadataNodeId

APPLICATION_ID = 0x4357_4D44
SCHEMA_VERSION = 1
BUSY_SECONDS = 2.0
"""How long to wait for a lock that another program, such as a backup, holds on the database."""
JOURNAL_BYTES_MAX = 16 * 1024 * 1024
"""Size to which the write-ahead log is cut back after a large snapshot."""

HOLDER_BYTES_MAX = 32
"""A lock file holds the number of a process, which has fewer digits."""

_MEMBER, _MEMBER_END = "member/", "member0"
_NEVER_CLOSED: list[object] = []
"""Connections that must not copy their log into the database any more. They end with the process."""
_SCHEMA = (
    "CREATE TABLE records (name TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE batches (first INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_SETTINGS = (
    "PRAGMA synchronous = FULL",
    # Only macOS knows these; its plain fsync does not reach the disk.
    "PRAGMA fullfsync = ON",
    "PRAGMA checkpoint_fullfsync = ON",
    "PRAGMA cell_size_check = ON",
    "PRAGMA trusted_schema = OFF",
    f"PRAGMA journal_size_limit = {JOURNAL_BYTES_MAX}",
)


class SqliteDatabase:
    """An open database. After a disk error it stays broken: only opening it again shows what is stored."""

    def __init__(
        self, path: Path, cluster: ClusterId, engine: SqliteEngine | None = None, *, is_guest: bool = False
    ) -> None:
        """``is_guest``: another process has locked the database, and stays its owner. A guest leaves the write-ahead
        log to the owner, and relies on the leader epoch alone."""
        engine = engine or system.made(StandardSqlite)
        self._is_guest = is_guest
        self.path = path
        self._files = engine.files
        self._broken: str | None = None
        self._is_open = False
        self._is_patient = True
        self._decoded: tuple[bytes, LeaderInfo] | None = None
        """The leader's record and its decoded form. Every write reads the record, and it rarely changes."""
        self._check_place()
        was_used = self._files.exists(_lock_path(path)) and not is_guest
        self._lock = None if is_guest else _locked(self._files, path)
        try:
            with self._errors_mapped():
                if was_used:
                    self._write_log_again()
                self._connection = engine.connect(path, BUSY_SECONDS)
            try:
                with self._errors_mapped():
                    self._set_up(cluster)
            except BaseException:
                with suppress(OSError):
                    self._close_connection()
                raise
            self._is_open = True
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        try:
            self._close_connection()
        except (sqlite3.Error, OSError) as error:
            raise self._mapped(error) from error
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _close_connection(self) -> None:
        """Close the connection. SQLite then copies its log into the database, also after a failed sync."""
        if self._broken is not None:
            try:
                self._write_log_again()
            except BaseException:
                # SQLite would copy the log when the connection is collected.
                _NEVER_CLOSED.append(self._connection)
                raise
        self._connection.close()

    # Operations of the store.

    def leader(self) -> LeaderInfo:
        with self._errors_mapped():
            self._wait_for_locks(True)
            return self._leader()

    def acquire(self, node: MetadataNodeId, address: str, seen: LeaderEpoch) -> LeaderInfo:
        with self._transaction():
            leader = self._leader()
            if leader.epoch != seen:
                raise too_late(leader, seen)
            info = LeaderInfo(LeaderEpoch(seen + 1), node, address)
            self._put("leader", encode_record(LeaderRecord(node, address), info.epoch))
        return info

    def announce(self, node: MetadataNodeId, key: str) -> None:
        data = encode_record(MemberRecord(node, key))
        with self._transaction():
            if self._record(f"{_MEMBER}{node}") != data:
                self._put(f"{_MEMBER}{node}", data)

    def members(self) -> dict[MetadataNodeId, str]:
        with self._transaction("DEFERRED"):
            rows = self._connection.execute(
                "SELECT name, data FROM records WHERE name >= ? AND name < ?", (_MEMBER, _MEMBER_END)
            ).fetchall()
        found = [decode_record(data, self._where(name), MemberRecord) for name, data in rows]
        return {member.node: member.key for member in found}

    def load(self) -> LoadedState:
        with self._transaction("DEFERRED"):
            stored = self._record("snapshot")
            snapshot = decode_snapshot(stored, self._where("snapshot")) if stored else Snapshot()
            rows = self._connection.execute("SELECT first, data FROM batches ORDER BY first").fetchall()
            leader = self._leader()
        batches = []
        for first, data in rows:
            batch = decode_batch(data, self._where(f"decision {first}"))
            if batch.first != first:
                raise DamagedStore(self._where(f"decision {first}"), f"it is decision {batch.first}")
            batches.append(batch)
        return loaded(leader, snapshot, batches, str(self.path))

    def append(
        self,
        epoch: LeaderEpoch,
        after: DecisionIndex,
        decisions: tuple[Decision, ...],
        *,
        is_patient: bool = True,
    ) -> None:
        with self._transaction("IMMEDIATE" if decisions else "DEFERRED", is_patient=is_patient):
            require_leader(self._leader(), epoch)
            last = self._newest()
            end = last.end if last else DecisionIndex(0)
            if not decisions:
                if end != after:
                    raise elsewhere(end, after)
                return
            data = encode_batch(epoch, DecisionIndex(after + 1), decisions)
            if end == after:
                self._connection.execute("INSERT INTO batches VALUES (?, ?)", (after + 1, data))
            elif self._batch(DecisionIndex(after + 1)) != data or end != after + len(decisions):
                raise elsewhere(end, after)

    def trim(self, epoch: LeaderEpoch, snapshot: Snapshot) -> None:
        data = encode_snapshot(epoch, snapshot)
        with self._transaction():
            require_leader(self._leader(), epoch)
            last = self._newest()
            end = last.end if last else DecisionIndex(0)
            if snapshot.index > end:
                raise not_stored(snapshot, end)
            stored = self._record("snapshot")
            if stored and header_of(stored, self._where("snapshot"), StoredKind.SNAPSHOT).index >= snapshot.index:
                return
            if snapshot.index > 0:
                self._put("snapshot", data)
                self._connection.execute(
                    "DELETE FROM batches WHERE first < (SELECT max(first) FROM batches WHERE first <= ?)",
                    (snapshot.index,),
                )

    # Rows.

    def _leader(self) -> LeaderInfo:
        stored = self._record("leader")
        if stored is not None:
            if self._decoded is None or self._decoded[0] != stored:
                self._decoded = stored, decode_leader(stored, self._where("leader"))
            return self._decoded[1]
        if self._newest() is not None:
            raise DamagedStore(str(self.path), "it holds decisions, but no leader")
        return NO_LEADER

    def _newest(self) -> Header | None:
        row = self._connection.execute("SELECT first, data FROM batches ORDER BY first DESC LIMIT 1").fetchone()
        return header_of(row[1], self._where(f"decision {row[0]}"), StoredKind.DECISIONS) if row else None

    def _batch(self, first: DecisionIndex) -> bytes | None:
        row = self._connection.execute("SELECT data FROM batches WHERE first = ?", (first,)).fetchone()
        return row[0] if row else None

    def _record(self, name: str) -> bytes | None:
        row = self._connection.execute("SELECT data FROM records WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def _put(self, name: str, data: bytes) -> None:
        self._connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (name, data))

    def _where(self, what: str) -> str:
        return f"{self.path}: {what}"

    # Opening.

    def _check_place(self) -> None:
        if self._files.is_dir(self.path):
            raise InvalidArgument(f"{self.path} is a directory: name a file in it, such as {self.path / 'metadata.db'}")
        if not self._files.is_dir(self.path.parent):
            raise InvalidArgument(f"{self.path.parent} is no directory: make it, or name another place")

    def _set_up(self, cluster: ClusterId) -> None:
        if not self._is_guest and self._pragma("page_count") == 0:
            self._write_first_page()
        mode = self._pragma("journal_mode = WAL")
        if mode != "wal":
            raise InvalidArgument(
                f"{self.path} cannot have a write-ahead log (it says {mode}): put it on a local file system"
            )
        for setting in _SETTINGS:
            self._connection.execute(setting)
        with self._transaction():
            self._check_kind()
            if not self._is_guest:
                # The first page had it; a database with a log does not use it.
                self._files.unlink(self.path.with_name(self.path.name + "-journal"))
            self._sync_names()
            if self._pragma("user_version") == 0:
                for statement in _SCHEMA:
                    self._connection.execute(statement)
                self._put("identity", encode_record(StoreIdentity(cluster)))
        if self._is_guest:
            self._connection.execute("PRAGMA wal_autocheckpoint = 0")
        else:
            self._checkpoint()
        found = self._pragma("quick_check(1)")
        if found != "ok":
            raise DamagedStore(str(self.path), str(found))
        stored = self._record("identity")
        if stored is None:
            raise DamagedStore(str(self.path), "it does not name its cluster")
        identity = decode_record(stored, self._where("identity"), StoreIdentity)
        if identity.cluster != cluster:
            raise WrongIdentity(
                f"{self.path} holds the decisions of cluster {identity.cluster}, not of cluster {cluster}: "
                "name the database of this cluster"
            )

    def _write_first_page(self) -> None:
        """Write the first page of a new database, which a rollback journal guards, since there is no log yet.

        The journal keeps its name until the database has a log, so that the name is durable before it is needed.
        """
        self._pragma("journal_mode = PERSIST")
        with self._transaction():
            self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._sync_names()

    def _sync_names(self) -> None:
        """Make the names of the database and of its log or journal durable, once both are there and before a commit.

        SQLite syncs the name of its log too, but ignores that this failed. A power cut in the middle of copying the log
        would then leave a part of a transaction, and no log to complete it from.
        """
        self._files.sync_dir(self.path.parent)

    def _checkpoint(self) -> None:
        """Make durable what a killed process left in the write-ahead log, before anything relies on it."""
        busy, *_ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise Unavailable(f"{self.path} is being read by another program: stop it, and try again")

    def _write_log_again(self) -> None:
        """Write the content of the write-ahead log once more and sync it, before SQLite copies it into the database.

        After a failed sync, the system takes for written what it could not write, and later syncs succeed without it.
        A power cut in the middle of copying would then leave a part of a transaction. This comes before SQLite has the
        log open: a connection copies it also when it is closed because of an error.
        """
        path = self.path.with_name(self.path.name + "-wal")
        if self._files.exists(path):
            log = self._files.open(path)
            if size := log.size():
                log.pwritev([log.pread(size, 0)], 0)
                log.sync_all()

    def _check_kind(self) -> None:
        version = self._pragma("user_version")
        application = self._pragma("application_id")
        tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != APPLICATION_ID and (application or version or tables):
            raise InvalidArgument(f"{self.path} is a database of another program: name another file")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise NewerFormat(str(self.path), version, SCHEMA_VERSION)

    def _pragma(self, text: str) -> object:
        return self._connection.execute(f"PRAGMA {text}").fetchone()[0]

    # Transactions and errors.

    def _wait_for_locks(self, is_patient: bool) -> None:
        """Set whether the following statements wait for locks of other programs."""
        if is_patient is not self._is_patient:
            self._connection.execute(f"PRAGMA busy_timeout = {round(BUSY_SECONDS * 1_000) if is_patient else 0}")
            self._is_patient = is_patient

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE", *, is_patient: bool = True) -> Iterator[None]:
        with self._errors_mapped():
            self._wait_for_locks(is_patient)
            self._connection.execute(f"BEGIN {kind}")
            try:
                yield
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def _errors_mapped(self) -> Iterator[None]:
        if self._broken is not None:
            raise StorageBroken(f"{self._broken}: restart the metadata node when the disk is well again")
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise self._mapped(error) from error

    def _mapped(self, error: sqlite3.Error | OSError) -> CutwaterError:
        if isinstance(error, OSError):
            what = error.strerror or str(error)
            if is_full(error) and not self._is_open:
                return _full(str(self.path), what)
            is_denied = not self._is_open and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            return _unusable(str(self.path), what) if is_denied else self._breaks(what)
        name = getattr(error, "sqlite_errorname", "")
        what = f"{error} ({name or type(error).__name__})"
        for prefix, meaning in (_MEANINGS if self._is_open else _MEANINGS | _MEANINGS_AT_OPENING).items():
            if name.startswith(prefix):
                return meaning(str(self.path), what)
        return self._breaks(what)

    def _breaks(self, what: str) -> StorageBroken:
        """Mark the database as broken: after a failed write or sync its content is unknown, so nothing is written."""
        self._broken = f"{self.path} failed: {what}"
        return StorageBroken(f"{self._broken}: restart the metadata node when the disk is well again")


def _locked(files: StorageFiles, database: Path) -> Lock:
    """Lock the database for this process, until it releases the lock or ends in any way."""
    path = _lock_path(database)
    try:
        lock = files.lock(path)
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be locked ({error.strerror}): check the permissions of its directory"
        ) from error
    if lock is None:
        raise StoreLocked(str(database), _holder(files, path))
    return lock


def _lock_path(database: Path) -> Path:
    return database.with_name(database.name + ".lock")


def _holder(files: StorageFiles, path: Path) -> int:
    """Return the process that wrote the lock file last; 0 if it has not written its id yet."""
    try:
        return int(files.open(path).pread(HOLDER_BYTES_MAX, 0))
    except (OSError, ValueError):
        return 0


def _full(path: str, what: str) -> CutwaterError:
    return DiskFull(f"{path}: no room ({what}): nothing was written; make room, and try again")


def _busy(path: str, what: str) -> CutwaterError:
    return Unavailable(f"{path}: another program holds a lock on it ({what}): let it finish, or stop it")


def _unusable(path: str, what: str) -> CutwaterError:
    return InvalidArgument(f"{path} cannot be opened or written ({what}): check its permissions and its file system")


_Meanings = dict[str, Callable[[str, str], CutwaterError]]

_MEANINGS: _Meanings = {
    "SQLITE_FULL": _full,
    "SQLITE_BUSY": _busy,
    "SQLITE_LOCKED": _busy,
    "SQLITE_CORRUPT": DamagedStore,
    "SQLITE_NOTADB": DamagedStore,
}
_MEANINGS_AT_OPENING: _Meanings = {
    "SQLITE_CANTOPEN": _unusable,
    "SQLITE_READONLY": _unusable,
    "SQLITE_PERM": _unusable,
    "SQLITE_AUTH": _unusable,
}
