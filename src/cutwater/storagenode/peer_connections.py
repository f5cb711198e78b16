"""Connections to other storage nodes: opened when needed, reopened when lost, never waited for."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator

from cutwater.errors import CutwaterError, Unavailable
from cutwater.protocol.errors import Unproven
from cutwater.types import StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint, Expect
from cutwater.wire.identity.server_book import ServerBook
from cutwater.wire.identity.server_keys import ProvenServer

_log = logging.getLogger(__name__)

CONNECT_MS_MAX = 2_000
RECONNECT_SECONDS_MIN = 0.02
RECONNECT_SECONDS_MAX = 1.0


class Link:
    """Keeps a connection to one address open until it is closed. The server there must be the expected one.

    ``connection`` is None while there is none. ``on_up`` and ``on_down`` are called when that changes, and
    ``on_trouble`` after every failed attempt.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        address: str,
        tls: ssl.SSLContext | None,
        *,
        expect: Expect,
        on_up: Callable[[Connection], None],
        on_down: Callable[[], None],
        on_trouble: Callable[[CutwaterError], None],
    ) -> None:
        self.address = address
        self.connection: Connection | None = None
        self._endpoint, self._tls, self._expect = endpoint, tls, expect
        self._host, self._port = parse_address(address)
        self._on_up, self._on_down, self._on_trouble = on_up, on_down, on_trouble
        self._hurry = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def require(self) -> Connection:
        if self.connection is None:
            raise Unavailable(f"there is no connection to {self.address} now: try again")
        return self.connection

    def hurry(self) -> None:
        """Make the next attempt at once, because the other side is probably back."""
        self._hurry.set()

    async def close(self) -> None:
        # Read it now: the task clears it when it ends.
        connection = self.connection
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if connection is not None:
            connection.abort()

    async def _keep(self) -> None:
        wait = RECONNECT_SECONDS_MIN
        while True:
            try:
                connection = await connect(
                    self._endpoint,
                    self._host,
                    self._port,
                    timeout_ms=CONNECT_MS_MAX,
                    tls=self._tls,
                    expect=self._expect,
                )
            except CutwaterError as error:
                self._on_trouble(error)
                await self._pause(wait)
                wait = min(wait * 2, RECONNECT_SECONDS_MAX)
                continue
            wait = RECONNECT_SECONDS_MIN
            self.connection = connection
            self._on_up(connection)
            try:
                await connection.closed
            finally:
                self.connection = None
            self._on_down()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        except TimeoutError:
            pass
        self._hurry.clear()


class Peers:
    """Links to the other storage nodes; the metadata repository provides their addresses."""

    def __init__(
        self,
        endpoint: Endpoint,
        tls: ssl.SSLContext | None,
        book: ServerBook,
        on_lost: Callable[[StorageNodeId, str], None],
        spawn: Callable[[Awaitable[None]], None],
    ) -> None:
        self._endpoint, self._tls, self._book = endpoint, tls, book
        self._on_lost, self._spawn = on_lost, spawn
        self._links: dict[StorageNodeId, Link] = {}

    def learn(self, addresses: dict[StorageNodeId, str]) -> None:
        """Take new addresses. Connections are opened before they are needed."""
        for peer, address in addresses.items():
            link = self._links.get(peer)
            if link is not None and link.address == address:
                continue
            if link is not None:
                self._spawn(link.close())
            self._links[peer] = self._link(peer, address)

    def _link(self, peer: StorageNodeId, address: str) -> Link:
        def lost() -> None:
            self._on_lost(peer, f"the connection to storage node {peer} broke")

        def up(connection: Connection) -> None:
            _log.info("connected to storage node %s at %s", peer, address)

        def trouble(error: CutwaterError) -> None:
            _log.debug("storage node %s cannot be reached: %s", peer, error.message)

        def expect(server: ProvenServer | None) -> None:
            if server is None or server.name != str(peer) or not self._book.is_known(server):
                raise Unproven(f"the server at {address} has not proved to be storage node {peer}")

        return Link(self._endpoint, address, self._tls, expect=expect, on_up=up, on_down=lost, on_trouble=trouble)

    def require(self, peer: StorageNodeId) -> Connection:
        link = self._links.get(peer)
        if link is None:
            raise Unavailable(f"the address of storage node {peer} is not known yet")
        return link.require()

    def flush(self) -> None:
        """Send what was queued in this turn of the event loop."""
        for link in self._links.values():
            if link.connection is not None:
                link.connection.flush()

    def heard_from(self, name: str) -> None:
        """Note that this storage node connected here. If it could not be reached before, it can be now."""
        link = self._links.get(StorageNodeId(int(name))) if name.isdecimal() else None
        if link is not None and link.connection is None:
            link.hurry()

    def connected(self, first: tuple[StorageNodeId, ...]) -> Iterator[tuple[StorageNodeId, Connection]]:
        """Yield all peers that are connected now, beginning with ``first``."""
        for peer in dict.fromkeys((*first, *self._links)):
            link = self._links.get(peer)
            if link is not None and link.connection is not None:
                yield peer, link.connection

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))
