"""The programs that an agent has unpacked, by their SHA-256. Each use compares the files with the archive anew.

An entry has the archive itself and its files. The archive is compared with the hash that names it, and the files with
the archive, so neither a torn write nor a changed file is ever run.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from threading import Event

from cutwater.errors import CutwaterError, Damaged
from cutwater.programs.content_cache import CacheLease, ContentCache, leased
from cutwater.programs.packing import sha256_of
from cutwater.programs.unpacking import FILE_MODE, is_unpacked, unpack_program

CACHE_BYTES_MAX = 4 * 1024**3
ARCHIVE, FILES = "program.zip", "files"

Fetch = Callable[[str], Awaitable[bytes]]
"""Returns the archive of a program, by its SHA-256, from where programs are stored."""


class UnpackedProgram:
    """A program that is in use. ``directory`` has its files, and is what goes on the path of modules."""

    def __init__(self, lease: CacheLease) -> None:
        self._lease = lease

    @property
    def directory(self) -> Path:
        return self._lease.path / FILES

    @property
    def archive(self) -> Path:
        """The zip, for machines that have no such directory."""
        return self._lease.path / ARCHIVE

    def release(self) -> None:
        self._lease.release()


class ProgramCache:
    """See the module. ``is_for_all_users``: jobs run as other users than this process."""

    def __init__(self, root: Path, *, bytes_max: int = CACHE_BYTES_MAX, is_for_all_users: bool = False) -> None:
        self._cache = ContentCache(root, bytes_max=bytes_max, is_for_all_users=is_for_all_users)

    async def use(self, sha256: str, fetch: Fetch, *, seconds: float) -> UnpackedProgram:
        """Return a program that is unpacked and intact; fetch it if it is not there. Release it when no process runs
        it any more."""
        lease = await leased(lambda _: self._cache.taken(sha256, lambda entry: _is_intact(sha256, entry)))
        if lease is not None:
            return UnpackedProgram(lease)
        data = await fetch(sha256)
        if sha256_of(data) != sha256:
            raise Damaged(f"what was fetched as program {sha256} has another hash: fetch it again")

        def make(entry: Path) -> None:
            (entry / ARCHIVE).write_bytes(data)
            (entry / ARCHIVE).chmod(FILE_MODE)
            (entry / FILES).mkdir()
            unpack_program(data, entry / FILES)

        def use(given_up: Event) -> CacheLease:
            def check(entry: Path) -> bool:
                return _is_intact(sha256, entry)

            return self._cache.use(sha256, make, check, seconds=seconds, given_up=given_up)

        return UnpackedProgram(await leased(use))


def _is_intact(sha256: str, entry: Path) -> bool:
    """Return whether an entry is what its name says."""
    try:
        data = (entry / ARCHIVE).read_bytes()
        return sha256_of(data) == sha256 and is_unpacked(data, entry / FILES) and _has_no_compiled(entry / FILES)
    except (OSError, CutwaterError):
        return False


def _has_no_compiled(files: Path) -> bool:
    """Remove what Python compiled. It would be run instead of the files that were compared."""
    for found in list(files.rglob("__pycache__")):
        shutil.rmtree(found)
    return True
