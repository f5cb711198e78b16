"""Where savepoints lie: a small face of a file system, and the one of this machine.

A savepoint on another file system is reached through Spark: ``spark.savepoint.files`` has the same face over Hadoop's.
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

from cutwater.runtime.permissions import make_directory, open_file

_READ_BYTES = 1 << 20


class Seen(Struct, frozen=True):
    """What is found out about a file by reading all of it. ``rows``: −1 if it is no whole Parquet file."""

    bytes: int
    sha256: str
    rows: int


class Files(Protocol):
    """Paths are texts, below or beside one another with ``/``. What is missing is a ``FileNotFoundError``."""

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; none if there is no such directory."""

    def exists(self, path: str) -> bool: ...

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes) -> None:
        """A whole file, in its place at once and durable when this returns. Directories above it are made."""

    def delete(self, path: str) -> None:
        """A file, or a directory with all that is in it; it need not be there."""

    def settle(self, paths: Iterable[str]) -> Mapping[str, Seen]:
        """Make files durable that others have written, and read them. The answer has the paths as they are given."""

    def look(self, paths: Iterable[str]) -> Mapping[str, Seen]:
        """Read files; those that are missing are left out."""

    def qualified(self, path: str) -> str:
        """A path as Spark writes it into files of its own."""


class LocalFiles:
    """The file system of this machine."""

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(local(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

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

    def settle(self, paths: Iterable[str]) -> Mapping[str, Seen]:
        paths = list(paths)
        places = [local(path) for path in paths]
        for place in places:
            _sync(place)
        for directory in sorted({str(above) for place in places for above in list(Path(place).parents)[:3]}):
            _sync(directory)
        return self.look(paths)

    def look(self, paths: Iterable[str]) -> Mapping[str, Seen]:
        return {path: _seen(local(path)) for path in paths if os.path.exists(local(path))}

    def qualified(self, path: str) -> str:
        return f"file:{local(path)}"


def local(path: str) -> str:
    """A path of this machine, also where it is written as Hadoop does."""
    return path.removeprefix("file://").removeprefix("file:") if path.startswith("file:") else path


def is_local(path: str) -> bool:
    return "://" not in path.removeprefix("file://") and not path.startswith(("hdfs:", "s3a:"))


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seen(path: str) -> Seen:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
            size += len(part)
    return Seen(size, digest.hexdigest(), rows_of(path))


def rows_of(source: str | bytes) -> int:
    """How many rows a Parquet file has, by path or content; −1 if it is none."""
    try:
        return int(pq.read_metadata(source if isinstance(source, str) else BytesIO(source)).num_rows)
    except Exception:
        return -1
