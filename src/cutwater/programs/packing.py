"""Packs a program as a zip: a Python file, a directory or a wheel. The same content always gives the same bytes.

Files are stored without compression, in the order of their names, and without times, owners and modes: compressors
differ between versions, and the SHA-256 of the archive is the name of the program.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from cutwater.errors import InvalidArgument, NotFound
from cutwater.programs.archive_rules import ARCHIVE_BYTES_MAX, FILES_MAX, check_member, too_large, too_many_files
from cutwater.programs.unpacking import open_archive, read_member

LEFT_OUT = frozenset(
    """
    __pycache__ .git .hg .svn .venv .mypy_cache .pytest_cache .ruff_cache .tox .nox .ipynb_checkpoints .DS_Store
    """.split()
)
"""Files and directories that are no part of a program, wherever they are in it. Virtual environments of other names
are left out too."""
VENV_MARK = "pyvenv.cfg"
COMPILED = (".pyc", ".pyo")
WHEEL = ".whl"
MADE_AT = (1980, 1, 1, 0, 0, 0)
"""The time of each file in the archive: the first that the format knows."""
UNIX = 3
MODE = (stat.S_IFREG | 0o644) << 16


class PackedProgram(Struct, frozen=True):
    """A program as a zip. ``sha256`` is that of ``data``, and names the program."""

    sha256: str
    data: bytes
    files: int

    def __repr__(self) -> str:
        return f"PackedProgram(sha256={self.sha256!r}, {len(self.data)} bytes, files={self.files})"


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pack_program(path: str | os.PathLike[str]) -> PackedProgram:
    """Pack a Python file, a directory with files, or a wheel.

    Links are refused, because they may lead out of the directory. So are other things that are not plain files.
    """
    place = Path(path)
    try:
        mode = place.stat().st_mode
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise NotFound(f"{place} cannot be packed: {why}; name a Python file, a directory or a wheel") from error
    if stat.S_ISDIR(mode):
        return _packed(_files_of(place), f"the directory {place}")
    if not stat.S_ISREG(mode):
        raise InvalidArgument(f"{place} is neither a file nor a directory: name a Python file, a directory or a wheel")
    if place.suffix == WHEEL:
        return _packed(_content_of_wheel(place), f"the wheel {place}")
    if place.suffix != ".py":
        raise InvalidArgument(
            f"{place} is no program: it is a Python file (.py), a directory with one, or a wheel ({WHEEL})"
        )
    return _packed([(place.name, _read(place, place.resolve()))], str(place))


def _packed(files: Iterable[tuple[str, bytes]], what: str) -> PackedProgram:
    content: dict[str, bytes] = {}
    size = 0
    for name, data in files:
        check_member(name)
        content[name] = data
        size += len(data)
        if len(content) > FILES_MAX:
            raise too_many_files(len(content), " or more")
        if size > ARCHIVE_BYTES_MAX:
            raise too_large(what, ARCHIVE_BYTES_MAX)
    if not content:
        raise InvalidArgument(f"{what} has no files")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED, allowZip64=False) as writer:
        for name in sorted(content, key=str.encode):
            info = zipfile.ZipInfo(name, MADE_AT)
            info.create_system, info.external_attr = UNIX, MODE
            writer.writestr(info, content[name])
    data = archive.getvalue()
    if len(data) > ARCHIVE_BYTES_MAX:
        raise too_large(f"the archive of {what}", ARCHIVE_BYTES_MAX)
    return PackedProgram(sha256_of(data), data, len(content))


def _files_of(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the paths in a directory, with '/', and the contents."""
    waiting = [root]
    while waiting:
        directory = waiting.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            raise InvalidArgument(f"{directory} cannot be read: {error.strerror}") from error
        for entry in entries:
            if entry.name in LEFT_OUT or entry.name.endswith(COMPILED):
                continue
            place = Path(entry.path)
            if entry.is_symlink():
                raise InvalidArgument(
                    f"{place} is a symbolic link, which may lead out of the program: put a copy of the file there"
                )
            if entry.is_dir(follow_symlinks=False):
                if not (place / VENV_MARK).exists():
                    waiting.append(place)
            elif entry.is_file(follow_symlinks=False):
                yield place.relative_to(root).as_posix(), _read(place, place)
            else:
                raise InvalidArgument(f"{place} is no plain file (a socket, a pipe or a device): move it elsewhere")


def _read(shown: Path, path: Path) -> bytes:
    """Read a plain file. What takes its place meanwhile is not followed, and does not block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidArgument(f"{shown} is no plain file any more: pack the program when nothing changes it")
            data = file.read(ARCHIVE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidArgument(f"{shown} cannot be read: {error.strerror}") from error
    if len(data) > ARCHIVE_BYTES_MAX:
        raise too_large(str(shown), ARCHIVE_BYTES_MAX)
    return data


def _content_of_wheel(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Yield what an installation of the wheel puts on the path of modules."""
    data = _read(wheel, wheel.resolve())
    seen: set[str] = set()
    with open_archive(data, str(wheel)) as archive:
        for member in archive.members:
            name = _installed_name(member.filename)
            if not name or name.endswith(COMPILED):
                continue
            if name in seen:
                raise InvalidArgument(f"the wheel {wheel} has two files for {name}: build it again")
            seen.add(name)
            yield name, read_member(archive, member)


def _installed_name(name: str) -> str:
    """Return where an installation puts a file; empty if it is nothing that can be imported."""
    first, _, rest = name.partition("/")
    if not first.endswith(".data"):
        return name
    scheme, _, inside = rest.partition("/")
    return inside if scheme in ("purelib", "platlib") else ""
