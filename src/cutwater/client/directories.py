"""Whether a directory may become ours: nobody's files get in between those of a log by a mistyped path."""

from __future__ import annotations

import re
from pathlib import Path

from cutwater.client.repository import SCHEME
from cutwater.errors import InvalidArgument

SHOWN_MAX = 3
"""So many of the files that are in the way are named."""
_NOBODYS = re.compile(r"\..*|lost\+found")
"""Hidden files, which tools leave everywhere, and what a new file system has."""


def check_may_hold(directory: Path, what: str, own: re.Pattern[str], mark: str) -> None:
    """Refuse a directory with other files that is not already ``what``, which has the file ``mark``. One that was left
    when it was half made has nothing but names that match ``own``."""
    if (directory / mark).exists():
        return
    if shown := other_files(directory, own):
        raise InvalidArgument(
            f"{directory} is no {what}, but holds other files ({shown}): name an empty directory or a new one, such as "
            f"{directory / 'cutwater'}"
        )


def check_no_address(path: Path) -> None:
    """Whoever says where a cluster listens, in the place of a directory, is told what takes that."""
    scheme = SCHEME.rstrip("/")
    # A path has lost one of the slashes.
    if str(path).startswith(f"{scheme}/"):
        url = SCHEME + str(path).removeprefix(scheme).lstrip("/")
        raise InvalidArgument(
            f"{url!r} is where a cluster listens, and not a directory: use cutwater.connect, or --servers with "
            "a command"
        )


def other_files(directory: Path, own: re.Pattern[str]) -> str:
    """The names of some files that are in the way, and none of ``own``; nothing if there are none."""
    strange = sorted(
        path.name for path in directory.iterdir() if not own.fullmatch(path.name) and not _NOBODYS.fullmatch(path.name)
    )
    return ", ".join(strange[:SHOWN_MAX]) + (", …" if len(strange) > SHOWN_MAX else "")
