"""The file layer: the few file operations that storage needs, and what each of them guarantees.

Nothing is durable before a sync: data and size of a file after ``sync_data`` or ``sync_all``, names in a directory
after ``sync_dir``. ``cutwater.testing.fault_files`` implements exactly these guarantees and no others, so code on this
layer can be tested against every crash that they allow.
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
from cutwater.runtime.permissions import DIRECTORY_MODE, FILE_MODE, close_to_others

BLOCK_BYTES = 4096
"""Size of a block. A disk reads a block as a whole or not at all."""

BUFFERS_MAX = 1024
"""Number of buffers that the operating system takes in one call (IOV_MAX)."""

TEMPORARY = ".tmp"
"""Suffix of files that were never finished. Opening the directory removes them."""

LOOKS_MAX = 16
"""How often a reader tries again. A file that is still missing then was not trimmed."""

T = TypeVar("T")


class File(Protocol):
    """An open file. Positions are always given, so readers need no lock."""

    @property
    def path(self) -> Path: ...

    def size(self) -> int: ...

    def pread(self, size: int, offset: int) -> bytes:
        """Read at most ``size`` bytes; fewer at the end of the file."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all of the buffers, one after the other, without copying them."""

    def truncate(self, size: int) -> None: ...

    def sync_data(self) -> None:
        """Make data durable, and the size if the file has grown (``fdatasync``)."""

    def sync_all(self) -> None:
        """Make everything durable, also after the file was shortened (``fsync``)."""


class Lock(Protocol):
    def release(self) -> None: ...


class StorageFiles(Protocol):
    def open(self, path: Path) -> File:
        """Open an existing file."""

    def create(self, path: Path) -> File:
        """Create a file. Its name is durable after ``sync_dir``."""

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically, and replace the target. Durable after ``sync_dir``."""

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists. Durable after ``sync_dir``."""

    def sync_dir(self, path: Path) -> None: ...

    def names(self, path: Path) -> list[str]:
        """Return the names in the directory, sorted."""

    def make_dir(self, path: Path) -> None:
        """Make the directory and its parents durably. An existing directory is no error."""

    def remove_dir(self, path: Path) -> None:
        """Remove an empty directory. Durable after ``sync_dir`` of its parent."""

    def close_to_others(self, path: Path) -> None:
        """Deny access to a directory to users that are neither the owner nor in its group."""

    def is_dir(self, path: Path) -> bool: ...

    def exists(self, path: Path) -> bool: ...

    def real_path(self, path: Path) -> Path:
        """Return the one path, without symbolic links, of a file or directory that may have several."""

    def lock(self, path: Path) -> Lock | None:
        """Lock the file for this process, and create it if needed. The file then contains the id of the process, if it
        could be written. Returns None if another process holds the lock."""


class OsFile:
    """A file of the operating system.

    It is closed when the last reference to it goes, so a reader that still holds it can read on after the file was
    removed.
    """

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
    """Return the part of the buffers that is not written yet."""
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

    def remove_dir(self, path: Path) -> None:
        path.rmdir()

    def close_to_others(self, path: Path) -> None:
        close_to_others(path)

    def is_dir(self, path: Path) -> bool:
        return path.is_dir()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def real_path(self, path: Path) -> Path:
        return Path(os.path.realpath(path))

    def lock(self, path: Path) -> _OsLock | None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        # The process id is only for messages, so a failed write does not matter.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        return _OsLock(descriptor)


def replace(files: StorageFiles, path: Path, data: bytes) -> None:
    """Replace a whole file. Afterwards the new content is durable. A crash leaves the old content or the new."""
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
    """Read as ``pread`` does, but return zeros for each block that the disk cannot read.

    In those blocks, and only there, checksums are wrong, as with any other damage. Do not use it to find the end of a
    file by the first wrong checksum.
    """
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
    """Prepare a write to blocks that the disk may be unable to read.

    The operating system reads a block before it writes a part of it. So an unreadable block is first overwritten with
    zeros as a whole, and its other content must be repaired too. Readable blocks stay as they are.
    """
    try:
        file.pread(size, offset)
    except OSError:
        start, end = offset - offset % BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES) * BLOCK_BYTES
        file.pwritev([lenient_pread(file, end - start, start)], start)


def is_full(error: OSError) -> bool:
    """Return whether the error only says that there is no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def look_again(what: Callable[[], T], directory: Path) -> T:
    """Read from the files of a replica, and start again from the beginning whenever a trim has removed one of them.

    ``what`` must have no side effects, and must not use anything that was found before it was called.
    """
    missing: OSError
    for _ in range(LOOKS_MAX):
        try:
            return what()
        except FileNotFoundError as error:
            missing = error
        except OSError as error:
            raise DamagedFile(directory, f"it cannot be read: {error}") from error
    raise DamagedFile(directory, f"a file is missing: {missing}") from missing
