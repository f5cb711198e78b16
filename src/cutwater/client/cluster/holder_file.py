"""``holder.json`` in the directory of an embedded log: which process has it open, where that listens, and the secret
that it wants to see. Only processes that can read the directory can read the secret and connect (ADR 0037).

Where such a log is served is written ``cutwater://127.0.0.1:PORT/DIRECTORY``: clients look for the secret there, so it
need not travel. This is apart from ``cutwater.embedded``, since Spark's processes only connect.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from cutwater.client.cluster.credentials import Access
from cutwater.client.cluster.metadata_client import SCHEME
from cutwater.errors import Refused

HOLDER_FILE = "holder.json"


class HolderFile(Struct, frozen=True):
    """``started``: when the process was, because pids are used again. ``token``: empty in logs that are held open by an
    earlier version, which lets in everyone. ``server_keys``: public keys of its servers; None of an earlier version."""

    pid: int
    servers: str
    started: int = 0
    token: str = ""
    server_keys: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        """Without the secret: this gets into messages and logs."""
        return f"{type(self).__name__}(pid={self.pid}, servers={self.servers!r}, started={self.started})"


H = TypeVar("H", bound=HolderFile)


def read_holder(directory: Path, kind: type[H]) -> H | None:
    """What the file says; None if there is none, or it is not whole."""
    try:
        return msgspec.json.decode((directory / HOLDER_FILE).read_bytes(), type=kind)
    except PermissionError as error:
        raise Refused(
            f"{directory} is open in a process of another user, and this user may not read {HOLDER_FILE} there, which "
            "has the secret that lets in: run as that user, or let that user give the directory to a group (`chmod "
            "0750`) and open the log again"
        ) from error
    except (OSError, msgspec.MsgspecError):
        return None


def url_of(address: str, directory: Path) -> str:
    """Where the log in this directory is served."""
    return SCHEME + address + quote(str(directory.absolute()))


def directory_of(servers: str) -> Path | None:
    """The directory of an embedded log that is served there; None if it is a cluster."""
    path = servers.removeprefix(SCHEME).partition("/")[2]
    return Path("/" + unquote(path)) if path.strip("/") else None


def with_secret(servers: str, access: Access) -> Access:
    """The access for these servers: for those of an embedded log, with the secret and the keys in its directory. A log
    that was closed has none; then no server at its address is believed."""
    directory = directory_of(servers)
    if directory is None or access.token:
        return access
    holder = read_holder(directory, HolderFile)
    if holder is None or holder.servers != servers:
        # A log that was opened again listens elsewhere, and its secret is not for whatever listens here now.
        return replace(access, server_keys=())
    return replace(access, token=holder.token, server_keys=holder.server_keys)
