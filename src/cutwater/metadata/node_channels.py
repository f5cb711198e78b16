"""Channels from a metadata node to storage nodes: connections on which their reports arrive, and followers that relay
reports.

A message may get lost with a connection; the next report shows what is missing. So nothing is queued here except
messages that may wait, and those only briefly: a storage node that is woken for every cut takes the processor from
work that clients wait for, although no client waits for what it does then (ADR 0033).
"""

from __future__ import annotations

import asyncio

from cutwater.core.messages import CommitMessage, LeaderMessage
from cutwater.errors import CutwaterError
from cutwater.protocol import storage_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.metadata_api import RELAY_DOWN, RelayDown
from cutwater.types import StorageNodeId
from cutwater.wire.connection import Connection
from cutwater.wire.identity.server_book import ServerBook

FRESH_SECONDS = 1.0
"""A channel on which nothing arrived for this long is no longer used, if there is another."""
WAIT_SECONDS = 0.005
"""How long a message that may wait is held back for others. Adds up to this much read latency on that node."""
WAITING_MAX = 64
"""Maximum number of messages that wait for one node."""


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
        """Connections that have been sent the current addresses."""

    def hear(self, node: StorageNodeId, connection: Connection, *, is_relay: bool) -> None:
        """Note that a report of the storage node arrived on this connection."""
        if is_relay:
            self._relays.add(connection)
        elif connection not in self._told:
            self._tell_addresses(connection)
        if node not in self._heard:
            self._heard[node] = {}
        self._heard[node][connection] = self._loop.time()

    def lose(self, connection: Connection) -> list[StorageNodeId]:
        """Forget a closed connection. Returns the storage nodes at its other end."""
        is_relay = connection in self._relays
        self._relays.discard(connection)
        self._told.pop(connection, None)
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
        for message in self._waiting.pop(node):
            self._send(node, message, is_alone=False)

    def _send(self, node: StorageNodeId, message: LeaderMessage, *, is_alone: bool) -> None:
        """Send now. ``is_alone``: each node gets only one commit message, and appends wait for it."""
        ways = self._heard.get(node)
        if not ways:
            return
        for connection in tuple(ways) if len(ways) == 1 else self._fresh(ways):
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
            try:
                connection.notify(storage_api.LEADER_SAYS, message)
            except CutwaterError:
                continue

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
        for connection in list(self._told):
            self._tell_addresses(connection)

    def _tell_addresses(self, connection: Connection) -> None:
        self._told[connection] = None
        try:
            connection.notify(storage_api.ADDRESSES, self._servers)
        except CutwaterError:
            self._told.pop(connection, None)
