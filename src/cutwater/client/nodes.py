"""Connections to storage nodes: one per node, made when first needed and kept as long as it works."""

from __future__ import annotations

import asyncio

from cutwater.client.access import Access, open_connection
from cutwater.client.deadlines import Deadline
from cutwater.client.errors import ClientClosed
from cutwater.errors import CutwaterError, DeadlineExceeded
from cutwater.wire.connection import Connection
from cutwater.wire.handshake import Endpoint
from cutwater.wire.states import State

CONNECT_MS_MAX = 3_000


class Nodes:
    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        self._endpoint, self._access = endpoint, access
        self._open: dict[str, Connection] = {}
        self._connecting: dict[str, asyncio.Task[Connection]] = {}
        self._is_closed = False

    def ready(self, address: str) -> Connection | None:
        """The connection to this address, if there is one that can be used at once."""
        connection = self._open.get(address)
        return connection if connection is not None and connection.state is State.OPEN else None

    async def connection(self, address: str, deadline: Deadline) -> Connection:
        """If this raises, nothing was sent to the node."""
        ready = self.ready(address)
        if ready is not None:
            return ready
        if self._is_closed:
            raise ClientClosed("this client was closed: make another one")
        task = self._connecting.get(address)
        if task is None:
            task = self._connecting[address] = asyncio.get_running_loop().create_task(self._connect(address))
            task.add_done_callback(lambda done: self._connected(address, done))
        try:
            # Several may wait for the same connection; whoever gives up does not take it from the others.
            async with asyncio.timeout_at(deadline.at):
                return await asyncio.shield(task)
        except TimeoutError:
            raise DeadlineExceeded(f"{address} could not be connected to within {deadline.seconds:g} s") from None

    def drop(self, connection: Connection) -> None:
        """It takes no more calls, because its peer is closing: the next one who asks gets another one."""
        for address, known in list(self._open.items()):
            if known is connection:
                del self._open[address]

    async def close(self) -> None:
        self._is_closed = True
        for task in self._connecting.values():
            task.cancel()
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        for connection in self._open.values():
            connection.abort()
        self._open.clear()

    async def _connect(self, address: str) -> Connection:
        return await open_connection(self._endpoint, address, self._access, timeout_ms=CONNECT_MS_MAX)

    def _connected(self, address: str, task: asyncio.Task[Connection]) -> None:
        del self._connecting[address]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            if self._is_closed:
                task.result().abort()
            else:
                self._open[address] = task.result()
        elif not isinstance(error, CutwaterError):
            raise error
