"""Permissions of the files that Cutwater makes (ADR 0037).

Directories of logs, clusters, jobs, checkpoints and savepoints are for their owner (0700). Files in them are for the
owner, and for a group that may read the directory (0640); the umask takes away more. Files with a secret are for the
owner (0600). A directory that every user can access, made by hand or by an earlier version, is closed to others when
Cutwater opens it, if it belongs to this user. A directory that the owner opened to a group (``chmod 0750``) stays as it
is.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from cutwater.errors import InvalidArgument

_log = logging.getLogger(__name__)

DIRECTORY_MODE = 0o700
FILE_MODE = 0o640
SECRET_MODE = 0o600
_OTHERS = 0o007
_GROUP_AND_OTHERS = 0o077
_GROUP_READS_DIRECTORY = 0o050


def close_to_others(path: Path) -> None:
    """Deny access to users that are neither the owner nor in the group of a directory or file.

    A directory that every user could use was not given to its group on purpose, so the group loses access too. If it
    belongs to another user, only log a warning.
    """
    try:
        found = path.stat()
    except OSError:
        return
    mode = stat.S_IMODE(found.st_mode)
    if not mode & _OTHERS:
        return
    wanted = DIRECTORY_MODE if stat.S_ISDIR(found.st_mode) else mode & FILE_MODE
    if found.st_uid == os.geteuid():
        try:
            path.chmod(wanted)
        except OSError as error:
            _log.warning("%s can be read by every user (mode %04o), and that cannot be changed: %s", path, mode, error)
        else:
            _log.info("%s could be used by every user (mode %04o): its mode is %04o now", path, mode, wanted)
        return
    _log.warning(
        "%s can be used by every user of this machine (mode %04o), and belongs to user %s: let that user run "
        "`chmod %o %s`",
        path,
        mode,
        found.st_uid,
        wanted,
        path,
    )


def open_file(path: str, flags: int) -> int:
    """Open a file that its owner and group may read, for the argument ``opener`` of ``open``."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def write_file(path: Path, data: bytes) -> None:
    """Write the file, or replace its content."""
    with open(path, "wb", opener=open_file) as file:
        file.write(data)


def is_for_group(directory: Path) -> bool:
    """Return whether the group may read a directory that is closed to others."""
    return directory.stat().st_mode & (_GROUP_READS_DIRECTORY | _OTHERS) == _GROUP_READS_DIRECTORY


def check_secret(path: Path, what: str, way_out: str = "replace it") -> None:
    """Refuse a file with a secret that other users can read. ``way_out`` says what to do if they may have read it."""
    with suppress(OSError):
        # If this fails, reading the file gives a better error.
        check_mode(path.stat(), path, what, way_out)


def check_mode(found: os.stat_result, path: Path, what: str, way_out: str) -> None:
    """Raise if other users can use the file. A file of another user, such as root, may be readable by a group.

    That is how such a file is given to this process.
    """
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        return
    allowed = SECRET_MODE if found.st_uid == os.geteuid() else FILE_MODE
    if mode & _GROUP_AND_OTHERS & ~allowed:
        raise InvalidArgument(
            f"{path}, {what}, can be used by other users of this machine (mode {mode:04o}): run "
            f"`chmod {allowed:o} {path}`. If others may have read it, {way_out}"
        )
