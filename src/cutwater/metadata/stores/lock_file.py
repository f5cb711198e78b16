"""A lock file that is held while a process uses a resource, and that names the process."""

from __future__ import annotations

import os
from pathlib import Path

from cutwater.errors import InvalidArgument
from cutwater.metadata.stores.store_errors import StoreLocked
from cutwater.storage.files import OsFiles


class LockFile:
    """Holds the lock from construction until ``release``, or until the process ends in any way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            lock = OsFiles().lock(path)
        except OSError as error:
            raise InvalidArgument(
                f"{path} cannot be locked ({error.strerror}): check the permissions of its directory"
            ) from error
        if lock is None:
            raise StoreLocked(str(path.with_suffix("")), _holder(path))
        self._lock = lock
        path.write_text(f"{os.getpid()}\n", encoding="ascii")

    def release(self) -> None:
        self._lock.release()


def _holder(path: Path) -> int:
    """Return the process that wrote the file last; 0 if it has not written its id yet."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
