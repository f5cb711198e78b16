"""Makes a token of which the text is put into a file, so that no interruption leaves a token that nobody has.

The text is written first, into a file beside the wanted one, and then the cluster is asked to make a token with it. A
command that was killed in between, and is run again, goes on with that text: the same request again changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from cutwater.admin.access_calls import CreatedToken, new_token
from cutwater.admin.cluster_security import check_new, save_token
from cutwater.core.access.principals import token_id
from cutwater.errors import AlreadyExists, CutwaterError, InvalidArgument
from cutwater.runtime import system
from cutwater.runtime.local_files import MachineFiles

Make = Callable[[str], Awaitable[CreatedToken]]
"""Asks the cluster to make a token with this text."""


async def make_kept(path: Path, make: Make) -> CreatedToken:
    """Make a token and put it into a new file (0600)."""
    check_new(path)
    begun = path.with_name(f".{path.name}.begun")
    text = _read(begun) if begun.exists() else new_token()
    if not begun.exists():
        save_token(begun, text)
    try:
        made = await make(text)
    except CutwaterError as error:
        if error.retriable:
            error.message += f". If it was made, its text is in {begun}: run the same command again, which goes on"
        elif isinstance(error, AlreadyExists):
            error.message += f". A command that was interrupted made it, with the text in {begun}: run that one again"
        else:
            begun.unlink()
        raise
    _rename(begun, path)
    return made


def _read(begun: Path) -> str:
    text = begun.read_text().strip()
    if token_id(text) is None:
        raise InvalidArgument(f"{begun} was begun by another command and contains no token: remove it")
    return text


def _rename(begun: Path, path: Path) -> None:
    try:
        # Unlike a renaming, this replaces no file that was made meanwhile.
        os.link(begun, path)
    except OSError as error:
        raise InvalidArgument(
            f"the token was made, and is in {begun}; {path} cannot be made: {error.strerror or error}"
        ) from error
    begun.unlink()
    system.made(MachineFiles).sync_dir(path.parent)
