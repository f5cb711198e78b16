"""Directories and secrets of this machine, for the parts of the log that are not storage.

``MachineFiles`` has the few operations that they need, and ``system.made`` returns it, or the files of a simulated
machine. Everything that has to survive a crash is above it: which names are synced, and in which order.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from cutwater.errors import InvalidArgument
from cutwater.runtime import permissions, system

SECRET_BYTES_MAX = 64 * 1024


class MachineFiles:
    """The file system. A simulated one overrides all methods."""

    def is_dir(self, path: Path) -> bool:
        return path.is_dir()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def names(self, path: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(os.listdir(path))

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def read_into(self, path: str, data: memoryview, offset: int) -> int:
        """Fill ``data`` from this offset of a file on. Returns how many bytes there were."""
        # Opening something that is not a plain file must not block.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.preadv(file, [data], offset)
        finally:
            os.close(file)

    def read_secret(self, path: Path, what: str, way_out: str) -> bytes:
        """Read a file that no other user can read; see ``read_secret``."""
        with open(path, "rb") as file:
            permissions.check_mode(os.fstat(file.fileno()), path, what, way_out)
            return file.read(SECRET_BYTES_MAX)

    def create_secret(self, path: Path, data: bytes, *, is_lasting: bool) -> None:
        """Create a file for the owner; see ``write_secret``. ``is_lasting``: its content is durable on return."""
        shared = not is_lasting and permissions.is_for_group(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, permissions.SECRET_MODE)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, permissions.FILE_MODE if shared else permissions.SECRET_MODE)
            file.write(data)
            if is_lasting:
                file.flush()
                os.fsync(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        """Rename atomically, and replace the target. Durable after ``sync_dir``."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists. Durable after ``sync_dir``."""
        path.unlink(missing_ok=True)

    def make_dir(self, path: Path, *, is_own: bool) -> None:
        """Make a directory, if it does not exist, for the owner or as the umask says. Durable after ``sync_dir``."""
        path.mkdir(mode=permissions.DIRECTORY_MODE if is_own else 0o777, exist_ok=True)

    def sync_dir(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close_to_others(self, path: Path) -> None:
        """Deny access to users that are neither the owner nor in the group of a directory or file."""
        permissions.close_to_others(path)


def make_directory(path: Path) -> None:
    """Make a directory for the owner, durably, with parents as the umask says. An existing one is closed to others."""
    if not make_if_missing(path):
        system.made(MachineFiles).close_to_others(path)


def make_if_missing(path: Path) -> bool:
    """Make a directory as ``make_directory`` does, and leave the modes of an existing one. Returns whether it is new.

    A process that died may have made the last directory that exists, and not synced its name. So that is done first.
    """
    files = system.made(MachineFiles)
    missing: list[Path] = []
    last = path
    while not files.is_dir(last) and last != last.parent:
        missing.append(last)
        last = last.parent
    _sync_name(files, last)
    for directory in reversed(missing):
        files.make_dir(directory, is_own=directory == path)
        _sync_name(files, directory)
    return bool(missing)


def _sync_name(files: MachineFiles, path: Path) -> None:
    """Make the name of a directory durable. A parent that this user may not read belongs to others, who made it."""
    with suppress(PermissionError):
        files.sync_dir(path.parent)


def write_secret(path: Path, data: bytes, *, is_lasting: bool = False) -> None:
    """Write a secret, all of it or nothing: for the owner, and for the group if the group may read the directory.

    ``is_lasting``: a private key, which is for the owner alone, and durable on return.
    """
    files = system.made(MachineFiles)
    temporary = path.with_name(f"{path.name}.new")
    files.unlink(temporary)
    files.create_secret(temporary, data, is_lasting=is_lasting)
    files.replace(temporary, path)
    if is_lasting:
        files.sync_dir(path.parent)


def read_secret(path: Path, what: str, way_out: str) -> bytes | None:
    """Read a secret that no other user can read. Returns None if there is no such file.

    ``way_out`` says what to do if others may have read it.
    """
    try:
        return system.made(MachineFiles).read_secret(path, what, way_out)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidArgument(f"{path}, {what}, cannot be read: {error.strerror}") from error
