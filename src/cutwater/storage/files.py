"""The file layer: the few operations that storage needs, and what each of them promises.

Nothing is durable before a sync says so: data and size of a file after ``sync_data`` or ``sync_all``, names in a
directory after ``sync_dir``. ``cutwater.testing.fault_files`` is the twin that keeps exactly these promises and no
other, so whatever is built on this layer can be tested against every crash that the promises allow.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from cutwater.format.checksum import Buffer
from cutwater.format.errors import DamagedFile
from cutwater.runtime.permissions import DIRECTORY_MODE, FILE_MODE

BLOCK_BYTES = 4096
"""What a disk reads at once, or not at all."""

BUFFERS_MAX = 1024
"""How many buffers the system takes in one call (IOV_MAX)."""

TEMPORARY = ".tmp"
"""Names that end like this were never finished; whoever opens the directory removes them."""

LOOKS_MAX = 16
"""How often a reader looks again. A file that is still missing then was not trimmed."""

T = TypeVar("T")


class File(Protocol):
    """An open file. Positions are always given, so readers need no lock."""

    @property
    def path(self) -> Path: ...

    def size(self) -> int: ...

    def pread(self, size: int, offset: int) -> bytes:
        """At most ``size`` bytes; fewer at the end of the file."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all of the buffers, one after the other, without copying them."""

    def truncate(self, size: int) -> None: ...

    def sync_data(self) -> None:
        """Data, and the size if the file has grown, are on disk (``fdatasync``)."""

    def sync_all(self) -> None:
        """Everything, also after the file was shortened (``fsync``)."""


class Lock(Protocol):
    def release(self) -> None: ...


class Files(Protocol):
    def open(self, path: Path) -> File:
        """An existing file."""

    def create(self, path: Path) -> File:
        """A new file; its name is durable after ``sync_dir``."""

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces the target; durable after ``sync_dir``."""

    def unlink(self, path: Path) -> None:
        """Durable after ``sync_dir``; a missing file is fine."""

    def sync_dir(self, path: Path) -> None: ...

    def names(self, path: Path) -> list[str]:
        """What the directory holds, sorted."""

    def make_dir(self, path: Path) -> None:
        """The directory and its parents, durably; an existing one is fine."""

    def is_dir(self, path: Path) -> bool: ...

    def exists(self, path: Path) -> bool: ...

    def lock(self, path: Path) -> Lock | None:
        """Lock the file, which is made if need be, for this process; None if another one holds it."""


class OsFile:
    """A file of the operating system. It is closed when nobody refers to it any more, so a reader that still holds it
    goes on reading while its name is already gone."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def pread(self, size: int, offset: int) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        while data and len(data) < size:
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        for start in range(0, len(buffers), BUFFERS_MAX):
            some = buffers[start : start + BUFFERS_MAX]
            total = sum(map(len, some))
            written = os.pwritev(self._descriptor, some, offset)
            while written < total:
                # Rare: the call was interrupted, or the disk is nearly full and the next call says so.
                count = os.pwritev(self._descriptor, _after(some, written), offset + written)
                if count == 0:
                    raise OSError(errno.EIO, "nothing was written", str(self.path))
                written += count
            offset += total

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def sync_data(self) -> None:
        os.fdatasync(self._descriptor)

    def sync_all(self) -> None:
        os.fsync(self._descriptor)


def _after(buffers: Sequence[Buffer], written: int) -> list[Buffer]:
    """What is left of the buffers."""
    left: list[Buffer] = []
    for buffer in buffers:
        if written >= len(buffer):
            written -= len(buffer)
        else:
            left.append(memoryview(buffer)[written:])
            written = 0
    return left


class _OsLock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class OsFiles:
    """The real file system."""

    def open(self, path: Path) -> OsFile:
        return OsFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def create(self, path: Path) -> OsFile:
        return OsFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE))

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_dir(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def make_dir(self, path: Path) -> None:
        if not path.is_dir():
            self.make_dir(path.parent)
            path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            self.sync_dir(path.parent)

    def is_dir(self, path: Path) -> bool:
        return path.is_dir()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def lock(self, path: Path) -> _OsLock | None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        return _OsLock(descriptor)


def replace(files: Files, path: Path, data: bytes) -> None:
    """Put a whole file in place: afterwards the new content is durable, and a crash leaves the old or the new one."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        file = files.create(temporary)
        file.pwritev([data], 0)
        file.sync_all()
        files.rename(temporary, path)
    except OSError:
        files.unlink(temporary)
        raise
    files.sync_dir(path.parent)


def lenient_pread(file: File, size: int, offset: int) -> bytes:
    """As ``pread``, with zeros for each block that the disk cannot read: there checksums are wrong, as with any other
    damage, and only there. Not for whoever takes what has no checksum for the end of the file."""
    with suppress(OSError):
        return file.pread(size, offset)
    end = min(offset + size, file.size())
    pieces = []
    while offset < end:
        block_end = min(end, (offset // BLOCK_BYTES + 1) * BLOCK_BYTES)
        try:
            pieces.append(file.pread(block_end - offset, offset))
        except OSError:
            pieces.append(bytes(block_end - offset))
        offset = block_end
    return b"".join(pieces)


def make_readable(file: File, size: int, offset: int) -> None:
    """Before a part of a block is written that the disk cannot read: the system would read it first. The whole block is
    written, with zeros, so what else lies there has to be repaired too. What can be read stays as it is."""
    try:
        file.pread(size, offset)
    except OSError:
        start, end = offset - offset % BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES) * BLOCK_BYTES
        file.pwritev([lenient_pread(file, end - start, start)], start)


def is_full(error: OSError) -> bool:
    """Whether the error says that there is no room, and nothing worse."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def look_again(what: Callable[[], T], directory: Path) -> T:
    """What is read from the files of a replica; once more from the beginning whenever a trim has removed one of them.
    ``what`` has no effects, and looks at nothing that was found before it was called."""
    missing: OSError
    for _ in range(LOOKS_MAX):
        try:
            return what()
        except FileNotFoundError as error:
            missing = error
        except OSError as error:
            raise DamagedFile(directory, f"it cannot be read: {error}") from error
    raise DamagedFile(directory, f"a file is missing: {missing}") from missing
