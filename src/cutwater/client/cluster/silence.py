"""Waits for a storage node that may hang: reports its silence to the metadata repository, and ends the waiting when the
node has been left out of the log stream."""

from __future__ import annotations

import asyncio
from types import TracebackType

from cutwater.client.cluster.catalog_cache import LOOK_SECONDS, Catalogs
from cutwater.client.cluster.node_connections import Nodes
from cutwater.errors import Unavailable
from cutwater.runtime.deadlines import SLOW_SECONDS
from cutwater.types import LogStreamId, StorageNodeId


class Watched:
    """Guards a call to ``node`` that concerns ``stream``. While there is no answer, it repeatedly reports the node and
    fetches the catalog. It raises ``Unavailable`` once the node is no longer in the chain of the log stream."""

    __slots__ = ("_catalogs", "_is_left_out", "_loop", "_node", "_nodes", "_scope", "_stream", "_timer")

    def __init__(self, catalogs: Catalogs, nodes: Nodes, stream: LogStreamId, node: StorageNodeId) -> None:
        self._catalogs, self._nodes, self._stream, self._node = catalogs, nodes, stream, node
        self._is_left_out = False

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)
        await self._scope.__aenter__()
        self._timer = self._loop.call_later(SLOW_SECONDS, self._look)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            if not self._is_left_out:
                raise
            raise Unavailable(
                f"storage node {self._node} does not answer, and log stream {self._stream} goes on without it"
            ) from None

    def _look(self) -> None:
        self._nodes.unreachable(self._stream, self._node)
        self._catalogs.look()
        info = self._catalogs.view.streams.get(self._stream)
        if info is not None and self._node in info.chain:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)
        else:
            self._is_left_out = True
            self._scope.reschedule(self._loop.time())
