"""Access rules as data: the roles of servers, and which peers may call a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

STORAGE_NODE = "storage node"
METADATA_NODE = "metadata repository"
"""The roles of servers in the handshake."""


class MethodAccess(Struct, frozen=True):
    """The peers that may call a method: the servers that are named, or clients if none are.

    ``subject`` returns the number of the server for which the argument speaks; it must be the caller's own.
    ``is_admission``: the caller asks to become known, so any key that it has proved to hold is enough, and the handler
    decides. ``is_internal``: refused over the wire. ``client_subject``: clients may call it too, if the argument speaks
    for this number.
    """

    servers: tuple[str, ...] = ()
    subject: Callable[[Any], int] | None = None
    is_admission: bool = False
    is_internal: bool = False
    client_subject: int | None = None

    @property
    def is_for_clients(self) -> bool:
        return not self.servers and not self.is_internal
