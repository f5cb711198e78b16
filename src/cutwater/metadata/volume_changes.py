"""Passes changes of volumes on to storage nodes, which take them from metadata nodes only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cutwater.errors import NotFound
from cutwater.metadata.server_trust import ServerTrust
from cutwater.protocol import storage_api
from cutwater.protocol.metadata_api import ChangeVolumes
from cutwater.wire.identity.handshake import Endpoint


class VolumeChanges:
    """``servers`` returns the known addresses."""

    def __init__(self, trust: ServerTrust, servers: Callable[[], storage_api.Addresses]) -> None:
        self._trust, self._servers = trust, servers

    async def make(self, endpoint: Endpoint, asked: ChangeVolumes, deadline: float) -> storage_api.NodeSelfDescription:
        address = self._servers().storage_nodes.get(asked.node)
        expect = self._trust.expect_storage(asked.node)
        if address is None or expect is None:
            raise NotFound(f"no storage node {asked.node} has joined the cluster as far as is known here")
        change = storage_api.REMOVE_VOLUME if asked.is_removal else storage_api.ADD_VOLUME
        connection = await self._trust.connect(endpoint, address, expect)
        try:
            timeout_ms = max(1, int((deadline - asyncio.get_running_loop().time()) * 1_000))
            return (await connection.call(change, asked.path, timeout_ms=timeout_ms)).value
        finally:
            connection.abort()
