"""A file that is locked while a process uses what it stands for, and says which process that is."""

from __future__ import annotations

import os
from pathlib import Path

from cutwater.errors import InvalidArgument
from cutwater.metadata.stores.store_errors import StoreLocked
from cutwater.storage.files import OsFiles


class LockFile:
    """Held from its making until ``release``, or until the process ends, however it ends."""

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
    """The process that wrote the file last; 0 if it has not come to that yet."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
