"""Makes tokens of the cluster in the place of those in a file of tokens (``--tokens`` of servers)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from msgspec import Struct

from cutwater.admin.access_calls import NEVER, AccessCalls, CreatedToken
from cutwater.admin.kept_tokens import make_kept
from cutwater.core.access.principals import check_principal
from cutwater.errors import InvalidArgument
from cutwater.runtime.local_files import make_directory
from cutwater.wire.identity.tls import read_tokens


class ImportedTokens(Struct, frozen=True):
    """The new tokens, whose texts are in ``files`` by principal, and the principals that had a file already."""

    made: list[CreatedToken]
    left_out: list[str]
    files: dict[str, Path]


def files_for(file: Path, directory: Path) -> dict[str, Path]:
    """Return the new file for each name in a file of tokens. Raises if a name cannot be that of a principal."""
    names = sorted({identity.name for identity in read_tokens(file).values()})
    for name in names:
        check_principal(name)
        if "/" in name:
            raise InvalidArgument(f"{name!r} cannot be the name of a file: make its token with `cutwater token create`")
    return {name: directory / f"{name}.token" for name in names}


async def import_tokens(control: AccessCalls, files: dict[str, Path], *, expires_us: int = NEVER) -> ImportedTokens:
    """Make a token for each principal whose file does not exist, and put it there."""
    missing = {name: path for name, path in files.items() if not path.exists()}
    for directory in {path.parent for path in missing.values()}:
        make_directory(directory)
    made = []
    for name, path in missing.items():
        made.append(await make_kept(path, partial(_create, control, name, expires_us)))
    return ImportedTokens(made, sorted(files.keys() - missing.keys()), files)


async def _create(control: AccessCalls, name: str, expires_us: int, text: str) -> CreatedToken:
    return await control.create_token(name, expires_us=expires_us, text=text)
