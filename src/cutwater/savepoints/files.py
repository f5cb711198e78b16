"""Defines the file operations that savepoints need, and implements them for this machine.

A savepoint on another file system is accessed through Spark: ``spark.savepoint.files`` implements the same operations
with Hadoop.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Protocol

import pyarrow.parquet as pq  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.core.jobs.checkpoint_stores import LOCAL, scheme_of
from cutwater.runtime.local_files import make_directory
from cutwater.runtime.permissions import open_file


class FileSummary(Struct, frozen=True):
    """What reading a whole file tells about it. ``rows`` is −1 if it is not a complete Parquet file."""

    bytes: int
    sha256: str
    rows: int


class Files(Protocol):
    """Operations on files, by paths with ``/``. A missing file raises ``FileNotFoundError``."""

    def list(self, path: str) -> list[str]:
        """Return the sorted names in a directory; none if the directory does not exist."""

    def entries(self, path: str) -> Mapping[str, bool]:
        """Return the names in a directory, and whether each is a directory. Empty if the directory does not exist."""

    def exists(self, path: str) -> bool: ...

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file atomically. It is durable when this returns. Missing parent directories are made."""

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with its contents. It need not exist."""

    def copy(self, source: str, target: str) -> None:
        """Copy a file that is never changed, or link it. Missing parent directories are made. ``keep`` makes the
        copies durable."""

    def keep(self, path: str) -> None:
        """Make all copies in a directory durable."""

    def settle(self, paths: Iterable[str]) -> Mapping[str, FileSummary]:
        """Make files durable that other processes have written, and read them."""

    def look(self, paths: Iterable[str]) -> Mapping[str, FileSummary]:
        """Read files. Missing files are left out."""

    def qualified(self, path: str) -> str:
        """Return a path as Spark writes it into its own files."""


class LocalFiles:
    """Files on this machine."""

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(local(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def entries(self, path: str) -> Mapping[str, bool]:
        try:
            with os.scandir(local(path)) as found:
                return {entry.name: entry.is_dir() for entry in found}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def exists(self, path: str) -> bool:
        return os.path.exists(local(path))

    def read(self, path: str) -> bytes:
        return Path(local(path)).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        place = Path(local(path))
        if not place.parent.is_dir():
            make_directory(place.parent)
        unfinished = place.with_name(f".{place.name}.unfinished")
        with open(unfinished, "wb", opener=open_file) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(place)
        for directory in (place.parent, place.parent.parent):
            _sync(str(directory))

    def delete(self, path: str) -> None:
        place = Path(local(path))
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)

    def copy(self, source: str, target: str) -> None:
        place = Path(local(target))
        make_directory(place.parent)
        place.unlink(missing_ok=True)
        try:
            os.link(local(source), place)
        except FileNotFoundError:
            raise
        except OSError:
            # Another file system, or one without links.
            shutil.copyfile(local(source), place)
            _sync(str(place))

    def keep(self, path: str) -> None:
        for directory, _, _ in os.walk(local(path)):
            _sync(directory)

    def settle(self, paths: Iterable[str]) -> Mapping[str, FileSummary]:
        paths = list(paths)
        places = [local(path) for path in paths]
        for place in places:
            _sync(place)
        for directory in sorted({str(above) for place in places for above in list(Path(place).parents)[:3]}):
            _sync(directory)
        return self.look(paths)

    def look(self, paths: Iterable[str]) -> Mapping[str, FileSummary]:
        return {path: _seen(local(path)) for path in paths if os.path.exists(local(path))}

    def qualified(self, path: str) -> str:
        return f"file:{local(path)}"


def local(path: str) -> str:
    """Return a local path, also if it is written in Hadoop's form."""
    return path.removeprefix("file://").removeprefix("file:") if path.startswith("file:") else path


def for_spark(path: str) -> str:
    """Return a path as Spark has to be told it. Without a scheme, it would be on Hadoop's default file system."""
    return f"file:{path}" if is_local(path) and not path.startswith("file:") else path


def is_local(path: str) -> bool:
    return scheme_of(path) == LOCAL


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seen(path: str) -> FileSummary:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileSummary(file.tell(), digest.hexdigest(), rows_of(path))


def rows_of(source: str | bytes) -> int:
    """Return how many rows a Parquet file has, by path or content; −1 if it is not a Parquet file."""
    try:
        return int(pq.read_metadata(source if isinstance(source, str) else BytesIO(source)).num_rows)
    except Exception:
        return -1
