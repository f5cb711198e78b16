"""Channels from a metadata node to storage nodes: connections on which their reports arrive, and followers that relay
reports.

A message may get lost with a connection; the next report shows what is missing. So nothing is queued here except
messages that may wait, and those only briefly: a storage node that is woken for every cut takes the processor from
work that clients wait for, although no client waits for what it does then (ADR 0033).
"""

from __future__ import annotations

import asyncio

from msgspec import UNSET, structs

from cutwater.core.messages import CommitMessage, LeaderMessage, UnsealReplica
from cutwater.errors import CutwaterError
from cutwater.protocol import storage_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.metadata_api import RELAY_DOWN, RelayDown
from cutwater.types import Revision, StorageNodeId
from cutwater.wire.connection import Connection
from cutwater.wire.identity.server_book import ServerBook
from cutwater.wire.options import WireOptions

FRESH_SECONDS = 1.0
"""A channel on which nothing arrived for this long is no longer used, if there is another."""
SILENT_SECONDS_MAX = 2 * WireOptions().ping_ms / 1_000
"""A storage node of which a follower relays nothing for this long has no contact through it. A connection of its own
would be given up after as long; that to the follower stays."""
WAIT_SECONDS = 0.005
"""How long a message that may wait is held back for others. Adds up to this much read latency on that node."""
WAITING_MAX = 64
"""Maximum number of messages that wait for one node."""

TOLD_AT_ONCE_MAX = 16
TELL_SECONDS_PER_NODE = 0.001
"""Many nodes are told new addresses together with later ones: each message names all nodes, and when many join, each of
them is news."""


class Ways:
    """The channels to all storage nodes, on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, book: ServerBook | None = None) -> None:
        self._loop = loop
        self._book = book or ServerBook()
        self._waiting: dict[StorageNodeId, list[LeaderMessage]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._heard: dict[StorageNodeId, dict[Connection, float]] = {}
        """The connections on which each storage node was heard, and when."""
        self._relays: set[Connection] = set()
        """The connections that lead to followers, not to the storage node itself."""
        self._servers = storage_api.Addresses({})
        self._told: dict[Connection, None] = {}
        """Connections that have been sent addresses, and get the next ones."""
        self._telling: asyncio.TimerHandle | None = None
        self._untold: dict[Connection, None] = {}
        """Connections that were sent older addresses, and wait for the timer."""

    def hear(self, node: StorageNodeId, connection: Connection, *, is_relay: bool) -> None:
        """Note that a report of the storage node arrived on this connection."""
        if is_relay:
            self._relays.add(connection)
        elif connection not in self._told:
            self._tell_addresses(connection)
        if node not in self._heard:
            self._heard[node] = {}
        self._heard[node][connection] = self._loop.time()

    @property
    def heard(self) -> list[StorageNodeId]:
        """The storage nodes with an open connection of their own, and those of which a follower relayed something
        lately."""
        since = self._loop.time() - SILENT_SECONDS_MAX
        return [
            node
            for node, ways in self._heard.items()
            if any(at > since or connection not in self._relays for connection, at in ways.items())
        ]

    def lose(self, connection: Connection) -> list[StorageNodeId]:
        """Forget a closed connection. Returns the storage nodes at its other end."""
        is_relay = connection in self._relays
        self._relays.discard(connection)
        self._told.pop(connection, None)
        self._untold.pop(connection, None)
        lost = [node for node, ways in self._heard.items() if ways.pop(connection, None) is not None]
        return [] if is_relay else lost

    def send(self, node: StorageNodeId, message: LeaderMessage, *, may_wait: bool = False) -> None:
        """Send on every channel in use: a duplicate does no harm, and a message lost on one channel arrives on another.
        Messages to one node stay in order, including those that may wait."""
        if not may_wait and node not in self._waiting:
            self._send(node, message, is_alone=isinstance(message, CommitMessage))
            return
        waiting = self._waiting.setdefault(node, [])
        waiting.append(message)
        if not may_wait or len(waiting) == WAITING_MAX:
            self._send_waiting(node)
        elif self._alarm is None:
            self._alarm = self._loop.call_later(WAIT_SECONDS, self._wait_no_more)

    def _wait_no_more(self) -> None:
        self._alarm = None
        for node in list(self._waiting):
            self._send_waiting(node)

    def _send_waiting(self, node: StorageNodeId) -> None:
        for message in _merged(self._waiting.pop(node)):
            self._send(node, message, is_alone=False)

    def _send(self, node: StorageNodeId, message: LeaderMessage, *, is_alone: bool) -> None:
        """Send now. ``is_alone``: each node gets only one commit message, and appends wait for it."""
        ways = self._heard.get(node)
        if not ways:
            return
        for connection in tuple(ways) if len(ways) == 1 else self._fresh(ways):
            self._prepare(connection, message)
            try:
                if connection in self._relays:
                    connection.notify(RELAY_DOWN, RelayDown(node, message))
                else:
                    connection.notify(storage_api.LEADER_SAYS, message, is_alone=is_alone)
            except CutwaterError:
                # The connection is lost, or its peer does not read: it is told again when it reports again.
                continue

    def _fresh(self, ways: dict[Connection, float]) -> list[Connection]:
        newest = self._loop.time() - FRESH_SECONDS
        return [connection for connection, at in ways.items() if at >= newest] or list(ways)

    def pass_on(self, node: StorageNodeId, message: LeaderMessage) -> None:
        """Send as a follower: only over its own connections to the storage node."""
        for connection in [way for way in self._heard.get(node, ()) if way not in self._relays]:
            self._prepare(connection, message)
            try:
                connection.notify(storage_api.LEADER_SAYS, message)
            except CutwaterError:
                continue

    def _prepare(self, connection: Connection, message: LeaderMessage) -> None:
        """Tell the addresses first that the message needs: a chain that opens connects to its members."""
        if connection in self._untold and isinstance(message, UnsealReplica):
            self._tell_addresses(connection)

    # Addresses of storage nodes, and keys of servers.

    @property
    def servers(self) -> storage_api.Addresses:
        return self._servers

    def learn(self, servers: storage_api.Addresses) -> None:
        """Tell all connected storage nodes and followers if this is new. All of it is stored."""
        if servers == self._servers:
            return
        self._servers = servers
        self._book.note(STORAGE_NODE, servers.keys, is_all=True)
        self._book.note(METADATA_NODE, servers.metadata_keys)
        self._untold = dict(self._told)
        if len(self._told) < TOLD_AT_ONCE_MAX:
            self._tell_all()
        elif self._telling is None:
            self._telling = self._loop.call_later(TELL_SECONDS_PER_NODE * len(self._told), self._tell_all)

    def _tell_all(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for connection in list(self._untold):
            self._tell_addresses(connection)

    def tell_access(self, revision: Revision) -> None:
        """Tell storage nodes that are connected to this node that there are new rules of access control."""
        for connection in list(self._told):
            try:
                connection.notify(storage_api.ACCESS_CHANGED, revision)
            except CutwaterError:
                continue

    def _tell_addresses(self, connection: Connection) -> None:
        self._told[connection] = None
        self._untold.pop(connection, None)
        try:
            connection.notify(storage_api.ADDRESSES, self._servers)
        except CutwaterError:
            self._told.pop(connection, None)


def _merged(messages: list[LeaderMessage]) -> list[LeaderMessage]:
    """Make one message of successive cuts that have no commits for the node: its streams are complete through all."""
    merged: list[LeaderMessage] = []
    for message in messages:
        last = merged[-1] if merged else None
        if isinstance(last, CommitMessage) and isinstance(message, CommitMessage) and _continues(last, message):
            merged[-1] = structs.replace(message, prev_high_watermark=last.prev_high_watermark)
        else:
            merged.append(message)
    return merged


def _continues(last: CommitMessage, message: CommitMessage) -> bool:
    """Whether both are about the same list of streams, none of which has commits, and no cut lies in between."""
    return (
        not last.commits
        and not message.commits
        and last.others_of is not UNSET
        and last.others_of == message.others_of
        and last.high_watermark == message.prev_high_watermark
    )
