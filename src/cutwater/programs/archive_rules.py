"""The rules for what the archive of a program may contain: names, numbers and sizes."""

from __future__ import annotations

from cutwater.errors import InvalidArgument

ARCHIVE_BYTES_MAX = 64 * 1024 * 1024
FILES_MAX = 10_000
UNPACKED_BYTES_MAX = 256 * 1024 * 1024
"""Size of all files of an archive. Other tools than this one compress what they pack."""
PATH_BYTES_MAX = 1_024
NAME_BYTES_MAX = 255
"""What file systems take as one name."""


def check_member(name: str) -> None:
    """Raise unless the name of a file in an archive is a plain path below the directory of the archive."""
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts):
        raise InvalidArgument(
            f"{name[:120]!r} is no path below the program: names with '/' between, without '.' or '..'"
        )
    if "\\" in name or not name.isprintable():
        raise InvalidArgument(f"{name[:120]!r} has a backslash or a control character: rename the file")
    if ":" in parts[0]:
        raise InvalidArgument(f"{name[:120]!r} begins like a drive or a URL: rename the file")
    try:
        encoded = [part.encode() for part in parts]
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name[:120]!r} is not valid Unicode: rename the file") from None
    if len(b"/".join(encoded)) > PATH_BYTES_MAX or any(len(part) > NAME_BYTES_MAX for part in encoded):
        raise InvalidArgument(
            f"{name[:120]!r}… is too long: a path has up to {PATH_BYTES_MAX} bytes, and a name in it {NAME_BYTES_MAX}"
        )


def too_many_files(found: int, more: str = "") -> InvalidArgument:
    return InvalidArgument(
        f"the program has {found} files{more}, and {FILES_MAX} is the most: leave out what it does not need"
    )


def too_large(what: str, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"{what} has more than {limit // (1024 * 1024)} MiB, which is the most: leave out data, and read it from "
        "files or from the log instead"
    )
