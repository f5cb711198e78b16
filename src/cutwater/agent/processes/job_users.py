"""System users for jobs: each running job has one for itself, so that jobs cannot read each other's files.

The operator names them. A job may get another one with each attempt, so what it keeps is given to that user first.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from cutwater.errors import InvalidArgument, Unavailable

PASSABLE = 0o711
"""Mode of directories that processes of other users go through. They cannot list them."""


class SystemUser(Struct, frozen=True):
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def find_users(names: Iterable[str]) -> tuple[SystemUser, ...]:
    """Return these users. Raises if the agent cannot start processes as them, or if two are the same."""
    found: list[SystemUser] = []
    for name in names:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise InvalidArgument(f"--job-users names {name!r}, and this machine has no such user: make it") from None
        if os.geteuid() != 0:
            raise InvalidArgument("--job-users needs an agent that runs as root: it starts processes as other users")
        if entry.pw_uid in (0, os.geteuid()) or entry.pw_uid in [user.uid for user in found]:
            raise InvalidArgument(f"--job-users names {name!r}, which is root, or named twice: name a user of its own")
        groups = tuple(os.getgrouplist(name, entry.pw_gid))
        found.append(SystemUser(name, entry.pw_uid, entry.pw_gid, groups))
    return tuple(found)


class JobUsers:
    """See the module. Without users, every job runs as the user of the agent."""

    def __init__(self, users: tuple[SystemUser, ...]) -> None:
        self._users = users
        self._taken: dict[str, SystemUser] = {}

    @property
    def are_used(self) -> bool:
        return bool(self._users)

    def take(self, key: str) -> SystemUser | None:
        """Return a user that no other process of a job has; None if processes run as the agent's user."""
        if not self._users:
            return None
        if key not in self._taken:
            free = [user for user in self._users if user not in self._taken.values()]
            if not free:
                raise Unavailable(
                    f"all {len(self._users)} system users of --job-users have jobs: name as many as the agent has "
                    "slots, and some more for questions about jobs"
                )
            self._taken[key] = free[0]
        return self._taken[key]

    def release(self, key: str) -> None:
        self._taken.pop(key, None)


class OwnPlace(Struct, frozen=True):
    """A directory that is to belong to the user of a process. ``base`` is the operator's; what is below it may have
    been made by a job, and so may be anything."""

    base: Path
    below: str


def give_place(place: OwnPlace, user: SystemUser) -> None:
    """Make a directory if it does not exist, and let it belong to a user, with all that is in it. Others may go
    through it.

    This runs as root, in directories that jobs write to, perhaps at this moment. So no link is followed, also on the
    way, and a file with several names is refused: it may be one of the system.
    """
    at = os.open(place.base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in place.below.split("/"):
            with suppress(FileExistsError):
                os.mkdir(name, PASSABLE, dir_fd=at)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        os.fchmod(at, PASSABLE)
        for _, directories, files, within in os.fwalk(".", dir_fd=at, follow_symlinks=False):
            for name in (*directories, *files):
                _give(name, within, user)
        os.fchown(at, user.uid, user.gid)
    finally:
        os.close(at)


def _give(name: str, within: int, user: SystemUser) -> None:
    """Give a file or a directory, and exactly the one that was looked at."""
    opened = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        found = os.fstat(opened)
        if stat.S_ISLNK(found.st_mode):
            return
        if not stat.S_ISDIR(found.st_mode) and found.st_nlink > 1:
            raise PermissionError(errno.EPERM, "it has several names (hard links), so it is not given to a job", name)
        os.chown(f"/proc/self/fd/{opened}", user.uid, user.gid)
    finally:
        os.close(opened)
