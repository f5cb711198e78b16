"""Locks files, so that a process can own a directory. A lock ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cutwater.errors import InvalidArgument, Refused
from cutwater.runtime.local_files import make_directory
from cutwater.runtime.permissions import FILE_MODE

LOCK_FILE = "cutwater.lock"


class FileLock:
    """A lock that is held from construction until ``release``."""

    def __init__(self, path: Path, what: str, way_out: str) -> None:
        """The error says that another process uses ``what``, and gives the ``way_out``."""
        self._fd = -1
        try:
            make_directory(path.parent)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise InvalidArgument(f"{path.parent} cannot be used: {error}; name a directory to write to") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "of which nothing is known"
            self.release()
            raise Refused(f"{what} is in use by process {holder}: {way_out}") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def lock_checkpoint(checkpoint: str) -> FileLock | None:
    """Lock a checkpoint, because two processes that go on with one checkpoint would corrupt it. Returns None if it is
    not on a local file system."""
    parts = urlsplit(checkpoint)
    if parts.scheme not in ("", "file"):
        return None
    path = Path(unquote(parts.path) if parts.scheme else checkpoint)
    return FileLock(
        path / LOCK_FILE,
        f"checkpoint {checkpoint}",
        "stop that one first (`cutwater pipeline stop` if it is a job), or run with another checkpoint",
    )
