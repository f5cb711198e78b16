"""Access to methods as data: the roles of servers, which peers may call a method, and which rights clients need."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from cutwater.protocol.needs import NameLookup, Need, Question

STORAGE_NODE = "storage node"
METADATA_NODE = "metadata repository"
"""The roles of servers in the handshake."""


class ClientAnswers(enum.Enum):
    """What access control does with a call besides asking for its rights."""

    ALL = "all"
    """Nothing: a client with the rights gets the whole answer."""
    FILTERED = "filtered"
    """The answer shows only what the client may describe."""
    OPEN = "open"
    """Every client may ask: the answer tells nothing about topics or principals."""
    CARRIED = "carried"
    """The handler judges, at the leader: by the row of the request in the argument, if it is one."""


class MethodAccess(Struct, frozen=True):
    """The peers that may call a method: the servers that are named, or clients if none are.

    ``subject`` returns the number of the server for which the argument speaks; it must be the caller's own.
    ``is_admission``: the caller asks to become known, so any key that it has proved to hold is enough, and the handler
    decides. ``is_internal``: refused over the wire. ``client_subject``: clients may call it too, if the argument speaks
    for this number.

    A client needs the rights in ``needs``. ``free``: of rows for clients, the servers that need no rights. All others
    are judged as clients without credentials. ``answers``: what else access control does.

    Of a client under a quota, calls that bring data (``brings_data``) wait until they may send more, and begin in
    order; other calls wait until they may receive more. ``has_answer_limit``: the field ``bytes_max`` of the argument
    limits the answer.
    """

    servers: tuple[str, ...] = ()
    subject: Callable[[Any], int] | None = None
    is_admission: bool = False
    is_internal: bool = False
    client_subject: int | None = None
    needs: tuple[Need, ...] = ()
    answers: ClientAnswers = ClientAnswers.ALL
    free: tuple[str, ...] = (METADATA_NODE,)
    brings_data: bool = False
    has_answer_limit: bool = False

    @property
    def is_for_clients(self) -> bool:
        return not self.servers and not self.is_internal

    def is_free_for(self, server: str) -> bool:
        """Whether a server of this kind needs no rights. The kind of a client is empty."""
        return server in (self.free if self.is_for_clients else self.servers)

    def questions(self, argument: Any, names: NameLookup) -> list[Question]:
        """Return the rights that a client needs for a call with this argument, and on what."""
        return [question for need in self.needs for question in need.questions(argument, names)]
