"""Keeps files open that are no longer written to."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from cutwater.types import LLSN

OPEN_FILES_MAX = 16

F = TypeVar("F")


class OpenFiles(Generic[F]):
    """The most recently used files, by their first LLSN. Any thread may use it.

    A reader that still uses a file keeps it open, even if it is not among them any more.
    """

    def __init__(self) -> None:
        self._files: dict[LLSN, F] = {}
        self._lock = Lock()

    def get(self, first_llsn: LLSN, open_file: Callable[[], F]) -> F:
        with self._lock:
            file = self._files.pop(first_llsn, None)
            if file is not None:
                self._files[first_llsn] = file
                return file
        file = open_file()
        self.put(first_llsn, file)
        return file

    def put(self, first_llsn: LLSN, file: F) -> None:
        with self._lock:
            self._files[first_llsn] = file
            while len(self._files) > OPEN_FILES_MAX:
                del self._files[next(iter(self._files))]

    def forget(self, first_llsn: LLSN) -> None:
        with self._lock:
            self._files.pop(first_llsn, None)
