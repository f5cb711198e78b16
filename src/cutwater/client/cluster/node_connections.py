"""Connections to storage nodes: one per node, made at first use and kept as long as it works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cutwater.client.cluster.credentials import Access, open_connection, storage_node
from cutwater.client.errors import ClientClosed
from cutwater.errors import CutwaterError, DeadlineExceeded
from cutwater.runtime.deadlines import Deadline
from cutwater.types import LogStreamId, StorageNodeId
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.states import ConnectionState

CONNECT_MS_MAX = 3_000
COMPLAIN_SECONDS = 0.5
"""Minimum interval between complaints about the same storage node."""

NodesAt = Callable[[str], Sequence[StorageNodeId]]
Complain = Callable[[LogStreamId, StorageNodeId], Coroutine[Any, Any, None]]


class Nodes:
    """Connections by address. ``complain`` reports a silent node to the metadata repository, which probes it at
    once. ``nodes_at`` returns the nodes that have an address, as far as is known."""

    def __init__(self, endpoint: Endpoint, access: Access, complain: Complain, nodes_at: NodesAt) -> None:
        self._endpoint, self._access, self._complain, self._nodes_at = endpoint, access, complain, nodes_at
        self._complained: dict[StorageNodeId, float] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._open: dict[str, Connection] = {}
        self._left: dict[Connection, None] = {}
        self._connecting: dict[str, asyncio.Task[Connection]] = {}
        self._is_closed = False

    def ready(self, address: str) -> Connection | None:
        """Return the connection to this address, if there is one that can be used at once."""
        connection = self._open.get(address)
        return connection if connection is not None and connection.state is ConnectionState.OPEN else None

    async def connection(self, address: str, deadline: Deadline) -> Connection:
        """Return a connection to this address; make one if necessary. If this raises, nothing was sent to the node."""
        ready = self.ready(address)
        if ready is not None:
            return ready
        if self._is_closed:
            raise ClientClosed("this client was closed: make another one")
        task = self._connecting.get(address)
        if task is None:
            wants = storage_node(address, *self._nodes_at(address))
            connecting = open_connection(self._endpoint, address, self._access, wants=wants, timeout_ms=CONNECT_MS_MAX)
            task = self._connecting[address] = asyncio.get_running_loop().create_task(connecting)
            task.add_done_callback(lambda done: self._connected(address, done))
        try:
            # Several callers may wait for the same connection; one that gives up must not cancel it for the others.
            async with asyncio.timeout_at(deadline.at):
                return await asyncio.shield(task)
        except TimeoutError:
            raise DeadlineExceeded(f"{address} could not be connected to within {deadline.seconds:g} s") from None

    def drop(self, address: str, connection: Connection) -> None:
        """Drop a connection that was lost, or takes no more calls because its peer is closing, unless it has been
        replaced already. The next caller gets a new one. Earlier requests are still answered."""
        if self._open.get(address) is not connection:
            return
        del self._open[address]
        if connection.state is not ConnectionState.CLOSED:
            self._left[connection] = None
            connection.closed.add_done_callback(lambda _: self._left.pop(connection, None))

    def unreachable(self, stream: LogStreamId, node: StorageNodeId) -> None:
        """Report that a connection to this node was lost or could not be made."""
        now = asyncio.get_running_loop().time()
        if not self._is_closed and now - self._complained.get(node, -COMPLAIN_SECONDS) >= COMPLAIN_SECONDS:
            self._complained[node] = now
            task = asyncio.get_running_loop().create_task(self._complain(stream, node))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def close(self) -> None:
        self._is_closed = True
        tasks: list[asyncio.Task[Any]] = [*self._connecting.values(), *self._telling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in (*self._open.values(), *self._left):
            connection.abort()
        self._open.clear()

    def _connected(self, address: str, task: asyncio.Task[Connection]) -> None:
        del self._connecting[address]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            if self._is_closed:
                task.result().abort()
            else:
                if (before := self._open.get(address)) is not None:
                    self.drop(address, before)
                self._open[address] = task.result()
        elif not isinstance(error, CutwaterError):
            raise error
