"""System users for jobs: each running job has one for itself, so that jobs cannot read each other's files.

The operator names them. A job may get another one with each attempt, so what it keeps is given to that user first.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from cutwater.errors import InvalidArgument, Unavailable


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


def give(path: Path, user: SystemUser | None) -> None:
    """Let a directory, with all that is in it, belong to a user. None: it stays as it is."""
    if user is None or not path.exists():
        return
    for parent, directories, files in os.walk(path):
        for name in (*directories, *files):
            os.chown(os.path.join(parent, name), user.uid, user.gid, follow_symlinks=False)
    os.chown(path, user.uid, user.gid, follow_symlinks=False)
