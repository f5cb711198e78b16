"""Reads ``holder.json`` in the directory of an embedded log: which process has it open, the address at which that
process listens, and the secret that it demands. Only processes that can read the directory can read the secret and
connect (ADR 0037).

The address of such a log is written ``cutwater://127.0.0.1:PORT/DIRECTORY``: clients read the secret from the
directory, so the secret is not part of the address. This is apart from ``cutwater.embedded``, since Spark's processes
only connect.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from cutwater.client.cluster.credentials import Access
from cutwater.client.cluster.metadata_client import SCHEME
from cutwater.errors import Refused
from cutwater.runtime import system
from cutwater.runtime.local_files import MachineFiles

HOLDER_FILE = "holder.json"


class Holder(Struct, frozen=True):
    """The content of the file. ``started``: when the process started, because pids are reused. ``token``: empty in logs
    that an earlier version holds open, which accepts every client. ``server_keys``: public keys of its servers; None in
    files of an earlier version."""

    pid: int
    servers: str
    started: int = 0
    token: str = ""
    server_keys: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        """Leave out the secret: this text gets into messages and logs."""
        return f"Holder(pid={self.pid}, servers={self.servers!r}, started={self.started})"

    def lives(self) -> bool:
        """Return whether the process that wrote this still runs."""
        return system.lives_on(self.pid, self.started)


def read_holder(directory: Path) -> Holder | None:
    """Return the process that has the log open, or had it and ended without closing it. None if there is no file, or it
    is incomplete."""
    try:
        return msgspec.json.decode(system.made(MachineFiles).read(directory / HOLDER_FILE), type=Holder)
    except PermissionError as error:
        raise Refused(
            f"{directory} is open in a process of another user, and this user may not read {HOLDER_FILE} there, which "
            "has the secret that lets in: run as that user, or let that user give the directory to a group (`chmod "
            "0750`) and open the log again"
        ) from error
    except (OSError, msgspec.MsgspecError):
        return None


def url_of(address: str, directory: Path) -> str:
    """Return the address under which the log in this directory is served."""
    return SCHEME + address + quote(str(directory.absolute()))


def directory_of(servers: str) -> Path | None:
    """Return the directory of the embedded log that is served there; None if it is a cluster."""
    path = servers.removeprefix(SCHEME).partition("/")[2]
    return Path("/" + unquote(path)) if path.strip("/") else None


def with_secret(servers: str, access: Access) -> Access:
    """Return the access for these servers. For an embedded log, add the secret and the keys from its directory. A
    closed log has none; then no server at its address is trusted."""
    directory = directory_of(servers)
    if directory is None or access.has_token:
        return access
    holder = read_holder(directory)
    if holder is None or holder.servers != servers:
        # A reopened log listens elsewhere, and its secret must not go to a process that listens here now.
        return replace(access, server_keys=())
    return replace(access, token=holder.token, server_keys=holder.server_keys)
