"""Proofs of identity among simulated processes. The guards of the real servers decide which messages a sender may send.

The distribution of keys is not simulated: every server knows the keys of all others. A forger has none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, get_args

from cutwater.core import messages as m
from cutwater.errors import CutwaterError
from cutwater.protocol import metadata_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.method_access import METADATA_ACCESS, STORAGE_NODE_ACCESS
from cutwater.testing.simulator import protocol as p
from cutwater.types import ClusterId
from cutwater.wire.identity.access_guard import Guard
from cutwater.wire.identity.handshake import Peer
from cutwater.wire.identity.server_book import ServerBook
from cutwater.wire.identity.server_keys import ProvenServer
from cutwater.wire.messages import PeerLimits

Address = tuple[str, int]

FORGER = "forger"
"""Claims to be the storage node of its number, and proves a key of its own; with number 0, it proves nothing."""

_KINDS = {"sn": STORAGE_NODE, "mr": METADATA_NODE}
_TABLES = {"sn": STORAGE_NODE_ACCESS, "mr": METADATA_ACCESS}
_LIMITS = PeerLimits(1, 1, 1, 1)

_METHODS: dict[str, dict[type, tuple[str, Callable[[Any], Any]]]] = {
    "sn": {
        **{order: ("leader_says", lambda message: message) for order in get_args(m.LeaderMessage)},
        m.Replicate: ("replicate", lambda message: message),
        m.SyncRequest: ("sync", lambda message: message),
        p.CopyCall: ("copy", lambda message: message),
        p.FetchCall: ("fetch", lambda message: message),
    },
    "mr": {
        p.ReportMessage: ("report", lambda message: message.report),
        p.ComplaintMessage: ("complaint", lambda message: message),
        m.GroupOutcome: ("group_outcome", lambda message: message),
        p.Relay: ("report_up", lambda message: message.message),
        p.SimHeartbeat: ("heartbeat", lambda message: metadata_api.Heartbeat(message.leader_epoch, message.leader)),
    },
}


class Proofs:
    def __init__(self) -> None:
        self._book = ServerBook()
        self._peers: dict[Address, Peer] = {}
        self._guards = {
            (kind, name): Guard(name, access, self._book, log_seconds=inf)
            for kind, table in _TABLES.items()
            for name, access in table.items()
        }

    def enrol(self, address: Address) -> None:
        """Register a new process. If it is a server, all others know its key."""
        kind = _KINDS.get(address[0])
        if kind is not None:
            self._book.note(kind, {address[1]: f"key of {address}"})

    def admits(self, source: Address, target: Address, message: object) -> bool:
        """Whether the source may send this message."""
        said = message.body if isinstance(message, p.SimCall) else message
        found = _METHODS.get(target[0], {}).get(type(said))
        if found is None:
            return True
        name, argument = found
        guard, peer = self._guards[target[0], name], self._peer(source)
        try:
            guard.check(peer)
            guard.check_argument(peer, argument(said))
        except CutwaterError:
            return False
        return True

    def _peer(self, source: Address) -> Peer:
        if source not in self._peers:
            kind, number = _KINDS.get(source[0], STORAGE_NODE), source[1]
            is_proven = source[0] in _KINDS or (source[0] == FORGER and number > 0)
            server = ProvenServer(kind, str(number), f"key of {source}") if is_proven else None
            self._peers[source] = Peer(ClusterId(1), kind, str(number), 2, _LIMITS, server=server)
        return self._peers[source]
