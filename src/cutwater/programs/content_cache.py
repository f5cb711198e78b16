"""A directory of things that are made once, used by several processes, and named by a hash of what they are made of.

An entry is made in a directory of its own and gets its name by one rename, so it is there as a whole or not at all.
Each user of an entry holds a shared lock on a file beside it, which ends with the process; only an entry that nobody
holds is removed, the one that was used longest ago first. A second lock lets one process at a time make an entry, so
two do not do the same work.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, Unavailable
from cutwater.runtime.daemon_executor import DaemonExecutor
from cutwater.runtime.local_files import make_directory

L = TypeVar("L", bound="CacheLease | None")
THREADS_MAX = 32
_THREADS = DaemonExecutor(THREADS_MAX, "cache")
"""Threads of their own: one that makes an entry, or waits for another, may take minutes. The threads of the event loop
are few, and end the processes of jobs."""

LOCK, MAKING = ".lock", ".making"
TEMPORARY, LEFT = ".new-", ".old-"
LOOK_SECONDS = 0.05
LOCK_MODE = 0o600
OPEN_DIRECTORY_MODE = 0o755


class CacheLease:
    """The use of an entry, until ``release`` or the end of the process."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> CacheLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


async def leased(use: Callable[[threading.Event], L]) -> L:
    """Take an entry in a thread. If the caller is cancelled meanwhile, the event is set, and what the thread still
    takes is released."""
    given_up = threading.Event()
    work = asyncio.get_running_loop().run_in_executor(_THREADS, use, given_up)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        given_up.set()
        work.add_done_callback(_release)
        raise


def _release(work: asyncio.Future[L]) -> None:
    if not work.cancelled() and work.exception() is None and (lease := work.result()) is not None:
        lease.release()


class ContentCache:
    """See the module. ``bytes_max`` bounds what is kept besides the entries in use. ``is_for_all_users``: other users
    of the machine may read entries, such as the users of jobs; nobody else writes."""

    def __init__(self, root: Path, *, bytes_max: int, is_for_all_users: bool = False) -> None:
        self.root, self._bytes_max = root, bytes_max
        try:
            make_directory(root)
            if is_for_all_users:
                root.chmod(OPEN_DIRECTORY_MODE)
            self._remove_leftovers()
        except OSError as error:
            raise InvalidArgument(f"{root} cannot be used as a cache: {error.strerror}; name another") from error

    def taken(self, name: str, check: Callable[[Path], bool]) -> CacheLease | None:
        """Return an entry that is there and intact, or None."""
        return self._taken_at(self.root / name, check)

    def use(
        self,
        name: str,
        make: Callable[[Path], None],
        check: Callable[[Path], bool],
        *,
        seconds: float,
        given_up: threading.Event | None = None,
    ) -> CacheLease:
        """Return an entry, after making it if it is missing or no longer what it was. ``make`` fills a new directory.
        ``check`` tells whether an entry is intact. ``seconds`` bounds the wait for another process that makes it;
        ``given_up`` ends it at once."""
        give_up = time.monotonic() + seconds
        path = self.root / name
        if (lease := self._taken_at(path, check)) is not None:
            return lease
        with self._making(path, give_up, given_up):
            if (lease := self._taken_at(path, check)) is not None:
                return lease
            # Locked before it has its name, so it is not removed before it is used.
            lock = self._locked(path)
            try:
                self._make(path, make)
                os.ftruncate(lock, 0)
                os.pwrite(lock, json.dumps({"bytes": _size(path)}).encode(), 0)
            except BaseException as error:
                os.close(lock)
                if isinstance(error, OSError):
                    raise Unavailable(f"{path} cannot be made: {error.strerror or error}") from error
                raise
        self._make_room()
        return CacheLease(path, lock)

    def names(self) -> list[str]:
        """Return the names of all entries."""
        return sorted(
            entry.name for entry in os.scandir(self.root) if not entry.name.startswith(".") and entry.is_dir()
        )

    # Entries.

    def _taken_at(self, path: Path, check: Callable[[Path], bool]) -> CacheLease | None:
        if not path.is_dir():
            return None
        lock = self._locked(path)
        try:
            if path.is_dir() and check(path):
                os.utime(lock)
                return CacheLease(path, lock)
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        return None

    def _make(self, path: Path, make: Callable[[Path], None]) -> None:
        made = self.root / f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}"
        made.mkdir(mode=OPEN_DIRECTORY_MODE)
        try:
            make(made)
            if path.exists():
                # It is damaged. Processes that use it keep what they have opened.
                path.rename(self.root / f"{LEFT}{path.name}-{secrets.token_hex(4)}")
            made.rename(path)
        finally:
            remove_tree(made)
        self._remove_old()

    def _remove_old(self) -> None:
        for entry in list(os.scandir(self.root)):
            if entry.name.startswith(LEFT):
                remove_tree(Path(entry.path))

    def _remove_leftovers(self) -> None:
        """Remove what processes left behind that died while they made or removed an entry."""
        self._remove_old()
        for entry in list(os.scandir(self.root)):
            if entry.name.startswith(TEMPORARY):
                name = entry.name.removeprefix(TEMPORARY).rpartition("-")[0]
                with suppress(CutwaterError), self._making(self.root / name, 0.0):
                    remove_tree(Path(entry.path))

    # Room.

    def _make_room(self) -> None:
        """Remove entries that nobody uses, those that were used longest ago first, until the rest is small enough."""
        known = []
        for name in self.names():
            lock = self._lock_file(self.root / name)
            with suppress(OSError):
                known.append((lock.stat().st_mtime, _noted_size(lock), name))
        total = sum(size for _, size, _ in known)
        for _, size, name in sorted(known):
            if total <= self._bytes_max:
                return
            if self._removed(self.root / name):
                total -= size

    def _removed(self, path: Path) -> bool:
        lock = os.open(self._lock_file(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, LOCK_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = self.root / f"{LEFT}{path.name}-{secrets.token_hex(4)}"
            path.rename(left)
            self._lock_file(path).unlink(missing_ok=True)
        except OSError:
            return False
        finally:
            os.close(lock)
        remove_tree(left)
        return True

    # Locks.

    def _lock_file(self, path: Path) -> Path:
        return path.with_name(f".{path.name}{LOCK}")

    def _locked(self, path: Path) -> int:
        """Return a shared lock on an entry. The file of the lock goes together with the entry, so the lock counts only
        while the file has its name."""
        file = self._lock_file(path)
        while True:
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, LOCK_MODE)
            fcntl.flock(lock, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), file.stat()):
                    return lock
            os.close(lock)

    @contextmanager
    def _making(self, path: Path, give_up: float, given_up: threading.Event | None = None) -> Iterator[None]:
        file = path.with_name(f".{path.name}{MAKING}")
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, LOCK_MODE)
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if given_up is not None and given_up.is_set():
                        raise Unavailable(f"the wait for {path}, which is being made, was given up") from None
                    if time.monotonic() >= give_up:
                        raise DeadlineExceeded(f"another process is still making {path}") from None
                    time.sleep(LOOK_SECONDS)
            yield
        finally:
            os.close(lock)


def remove_tree(path: Path) -> None:
    """Remove a directory, also one that is closed to writing. What cannot be removed stays."""
    if not path.is_dir():
        return
    for parent, directories, _ in os.walk(path):
        for name in (".", *directories):
            place = os.path.join(parent, name)
            if not os.path.islink(place):
                with suppress(OSError):
                    os.chmod(place, 0o700)
    shutil.rmtree(path, ignore_errors=True)


def _size(path: Path) -> int:
    size = 0
    for parent, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


def _noted_size(lock: Path) -> int:
    try:
        return int(json.loads(lock.read_bytes())["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
