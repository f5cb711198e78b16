"""Opens and unpacks the archive of a program. Its bytes may come from anybody.

Everything is checked before the first file is written: the number of entries before the table of contents is even read,
names, kinds and sizes before any content. What content really has is counted again while it is unpacked.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import IO

from cutwater.errors import InvalidArgument
from cutwater.programs.archive_rules import (
    ARCHIVE_BYTES_MAX,
    FILES_MAX,
    UNPACKED_BYTES_MAX,
    check_member,
    too_large,
    too_many_files,
)

FILE_MODE = 0o444
DIRECTORY_MODE = 0o555
"""Nothing is written into an unpacked program, also not by its own processes: it is compared with its archive."""
READ_BYTES = 256 * 1024
COMPILED = "__pycache__"
_END = struct.Struct("<4s4H2LH")
_END_MARK = b"PK\x05\x06"
_LARGE_MARK = b"PK\x06\x07"
_LARGE_BYTES = 20
_ENTRY_BYTES = 46
_ENTRY_MARK = b"PK\x01\x02"
_LENGTHS = struct.Struct("<3H")
_LENGTHS_AT = 28
_NOT_HERE = 0xFFFF
_ENCRYPTED = 0x1
_KNOWN_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_BROKEN = (
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
    OSError,
    struct.error,
    zlib.error,
)


class ProgramArchive:
    """A checked archive. ``members`` are its files, without directories, in the order of the archive."""

    def __init__(self, opened: zipfile.ZipFile, members: tuple[zipfile.ZipInfo, ...], what: str) -> None:
        self.opened, self.members, self.what = opened, members, what

    @property
    def names(self) -> set[str]:
        return {member.filename for member in self.members}

    def __enter__(self) -> ProgramArchive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.opened.close()


def open_archive(data: bytes, what: str = "the program") -> ProgramArchive:
    """Open an archive, after checking all that can be checked without unpacking it."""
    if len(data) > ARCHIVE_BYTES_MAX:
        raise too_large(what, ARCHIVE_BYTES_MAX)
    checked = _check_contents(data, what)
    try:
        opened = zipfile.ZipFile(io.BytesIO(data))
    except _BROKEN as error:
        raise _broken(what, error) from error
    if (len(opened.infolist()), opened.start_dir) != checked:
        raise _broken(what, "it has two tables of contents")
    members = [info for info in opened.infolist() if not _is_directory(info, what)]
    _check_members(members, what)
    return ProgramArchive(opened, tuple(members), what)


def _broken(what: str, error: object) -> InvalidArgument:
    return InvalidArgument(f"{what} is no zip that can be read ({error}): pack it again")


def _check_contents(data: bytes, what: str) -> tuple[int, int]:
    """Check the table of contents without building it: an archive of a few MiB may list a million files. Returns the
    number of its entries, and where it begins."""
    at = data.rfind(_END_MARK, max(0, len(data) - _END.size - _NOT_HERE))
    if at < 0 or at + _END.size > len(data):
        raise _broken(what, "it has no end")
    _, disk, first_disk, here, entries, size, start, comment = _END.unpack_from(data, at)
    if disk or first_disk or here != entries or at + _END.size + comment != len(data):
        raise _broken(what, "its end is not the end of the file")
    if entries == _NOT_HERE or start + size != at:
        raise _broken(what, "its table of contents does not lie before its end")
    if data[max(0, at - _LARGE_BYTES) : at].startswith(_LARGE_MARK):
        # It leads to another table of contents, which is read instead of this one.
        raise _broken(what, "it is in the form for more than 4 GiB (ZIP64)")
    if entries > FILES_MAX:
        raise too_many_files(entries)
    found, place = 0, start
    while place < at:
        if data[place : place + len(_ENTRY_MARK)] != _ENTRY_MARK or place + _ENTRY_BYTES > at or found == entries:
            raise _broken(what, "its table of contents is damaged")
        place += _ENTRY_BYTES + sum(_LENGTHS.unpack_from(data, place + _LENGTHS_AT))
        found += 1
    if place != at or found != entries:
        raise _broken(what, "its table of contents is damaged")
    return entries, start


def _is_directory(info: zipfile.ZipInfo, what: str) -> bool:
    if info.is_dir():
        check_member(info.filename.rstrip("/"))
        if info.file_size:
            raise _broken(what, f"the directory {info.filename!r} has content")
    return info.is_dir()


def _check_members(members: list[zipfile.ZipInfo], what: str) -> None:
    names: set[str] = set()
    size = 0
    for info in members:
        check_member(info.filename)
        if info.filename != info.orig_filename:
            raise InvalidArgument(f"{what} has a file with the name {info.orig_filename[:120]!r}: rename it")
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            named = "a symbolic link" if kind == stat.S_IFLNK else "no plain file"
            raise InvalidArgument(f"{info.filename!r} in {what} is {named}: put a copy of the file there")
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _KNOWN_METHODS:
            raise InvalidArgument(
                f"{info.filename!r} in {what} is encrypted, or compressed in another way than 'deflate': pack it again"
            )
        if info.filename in names:
            raise InvalidArgument(f"{what} has the file {info.filename!r} twice: pack it again")
        names.add(info.filename)
        size += info.file_size
        if size > UNPACKED_BYTES_MAX:
            raise too_large(f"{what}, unpacked,", UNPACKED_BYTES_MAX)
    for name in names:
        parts = name.split("/")
        if any("/".join(parts[:depth]) in names for depth in range(1, len(parts))):
            raise InvalidArgument(f"{name!r} in {what} lies below another file: pack it again")


def read_member(archive: ProgramArchive, info: zipfile.ZipInfo) -> bytes:
    """Return the content of a file, which has exactly the size and the checksum that the archive says."""
    try:
        with archive.opened.open(info) as source:
            return _whole(source, info, archive.what)
    except _BROKEN as error:
        raise _broken(archive.what, f"{info.filename}: {error}") from error


def _whole(source: IO[bytes], info: zipfile.ZipInfo, what: str) -> bytes:
    # The size was counted in the check; content that is longer is not unpacked any further.
    data = source.read(info.file_size)
    if len(data) != info.file_size or source.read(1):
        raise _broken(what, f"{info.filename} has another size than the archive says")
    return data


def unpack_program(data: bytes, directory: Path) -> int:
    """Unpack an archive into an empty directory. Returns the number of bytes of its files.

    Files and directories can be read by everyone who can reach the directory, and written by nobody.
    """
    size = 0
    made = {directory}
    with open_archive(data) as archive:
        for info in archive.members:
            content = read_member(archive, info)
            path = directory.joinpath(*info.filename.split("/"))
            path.parent.mkdir(parents=True, exist_ok=True)
            made.update(parent for parent in path.parents if parent.is_relative_to(directory))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(path, flags, FILE_MODE), "wb") as file:
                os.fchmod(file.fileno(), FILE_MODE)
                file.write(content)
            size += len(content)
    for place in made:
        place.chmod(DIRECTORY_MODE)
    return size


def is_unpacked(data: bytes, directory: Path) -> bool:
    """Return whether a directory has exactly the files of an archive, besides what Python compiled for root, which
    may write anywhere."""
    found: dict[str, Path] = {}
    try:
        for parent, directories, files in os.walk(directory, onerror=_raise):
            if any((Path(parent) / name).is_symlink() for name in (*directories, *files)):
                return False
            if COMPILED in directories:
                directories.remove(COMPILED)
            for name in files:
                path = Path(parent) / name
                found[path.relative_to(directory).as_posix()] = path
        with open_archive(data) as archive:
            if archive.names != found.keys():
                return False
            return all(_has_content(archive, info, found[info.filename]) for info in archive.members)
    except OSError:
        return False


def _raise(error: OSError) -> None:
    raise error


def _has_content(archive: ProgramArchive, info: zipfile.ZipInfo, path: Path) -> bool:
    if path.stat().st_size != info.file_size:
        return False
    with path.open("rb") as stored, archive.opened.open(info) as source:
        while piece := source.read(READ_BYTES):
            if stored.read(len(piece)) != piece:
                return False
    return True
