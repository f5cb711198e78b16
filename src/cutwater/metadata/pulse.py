"""Heartbeats of the leader to its followers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from msgspec import structs

from cutwater.errors import CutwaterError
from cutwater.metadata.node_channels import Ways
from cutwater.protocol import metadata_api as api
from cutwater.protocol import storage_api
from cutwater.wire.connection import Connection


class Pulse:
    """``announced`` returns what this node tells its followers, without addresses, or None if it should not."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        ways: Ways,
        announced: Callable[[], api.Heartbeat | None],
    ) -> None:
        self._loop, self._seconds, self._ways, self._announced = loop, seconds, ways, announced
        self.followers: dict[Connection, storage_api.Addresses | None] = {}
        """The followers, each with the addresses that it was told."""
        self._beaten_at = 0.0
        self._slept_at = loop.time()
        self._held_up_at = -inf

    async def beat_for_ever(self) -> None:
        while True:
            self._slept_at = self._loop.time()
            await asyncio.sleep(self._seconds)
            self._held_up_at = self.held_up_at
            self.beat()

    @property
    def held_up_at(self) -> float:
        """When this node's event loop was last found to be late by more than a heartbeat: with long work, or without a
        processor. It heard nothing while it was."""
        now = self._loop.time()
        return now if now - self._slept_at > 2 * self._seconds else self._held_up_at

    def beat_if_due(self) -> None:
        """Send a heartbeat amid a long turn of the event loop: many large reports may arrive at once."""
        if self._loop.time() - self._beaten_at >= self._seconds:
            self.beat()

    def beat(self) -> None:
        self._beaten_at = self._loop.time()
        heartbeat = self._announced()
        if heartbeat is None:
            return
        for connection, told in list(self.followers.items()):
            servers = self._ways.servers
            news = servers if told != servers else None
            try:
                connection.notify(api.HEARTBEAT, structs.replace(heartbeat, servers=news), is_alone=True)
            except CutwaterError:
                continue
            self.followers[connection] = servers
