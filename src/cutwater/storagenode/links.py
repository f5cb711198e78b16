"""Connections that a storage node keeps to others: made when needed, made again when lost, never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cutwater.errors import CutwaterError, InvalidArgument, Unavailable
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.handshake import Endpoint

CONNECT_MS_MAX = 2_000
RECONNECT_SECONDS_MIN = 0.02
RECONNECT_SECONDS_MAX = 1.0


def parse_address(address: str) -> tuple[str, int]:
    """``HOST:PORT``, with brackets around a host that contains colons."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise InvalidArgument(f"{address!r} is not an address: write HOST:PORT, for example 127.0.0.1:7001")
    return host.strip("[]"), int(port)


class Link:
    """A connection to one address that is kept up as long as it is not closed.

    ``connection`` is None while there is none. ``on_up`` and ``on_down`` are told when that changes.
    """

    def __init__(
        self, endpoint: Endpoint, address: str, on_up: Callable[[Connection], None], on_down: Callable[[], None]
    ) -> None:
        self.address = address
        self.connection: Connection | None = None
        self._endpoint = endpoint
        self._host, self._port = parse_address(address)
        self._on_up, self._on_down = on_up, on_down
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def require(self) -> Connection:
        if self.connection is None:
            raise Unavailable(f"there is no connection to {self.address} now: try again")
        return self.connection

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self.connection is not None:
            self.connection.abort()

    async def _keep(self) -> None:
        wait = RECONNECT_SECONDS_MIN
        while True:
            try:
                connection = await connect(self._endpoint, self._host, self._port, timeout_ms=CONNECT_MS_MAX)
            except CutwaterError:
                await asyncio.sleep(wait)
                wait = min(wait * 2, RECONNECT_SECONDS_MAX)
                continue
            wait = RECONNECT_SECONDS_MIN
            self.connection = connection
            self._on_up(connection)
            try:
                await asyncio.shield(connection.closed)
            finally:
                self.connection = None
            self._on_down()
