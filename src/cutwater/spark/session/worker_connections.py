"""Keeps connections of this process to logs for the next task, because Spark reuses its Python workers."""

from __future__ import annotations

import os
from collections import OrderedDict

from cutwater.client.async_client import AsyncClient
from cutwater.client.convert.encoding import Compression
from cutwater.client.loop_thread import LoopThread
from cutwater.client.read.range_reader import Ranges
from cutwater.spark.options import Where

LINKS_MAX = 4


class WorkerConnection:
    """A connection to a log and the event loop that it runs on."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self._clients: dict[Compression | None, AsyncClient] = {}
        self.loop = LoopThread("cutwater spark")
        try:
            self.ranges = self.loop.run(Ranges.connect(where.servers, where.access(), timeout=where.timeout))
        except BaseException:
            self.loop.close()
            raise
        self.loop.at_end(self._close)

    def client(self, compression: Compression | None = None) -> AsyncClient:
        """Return a client for writing. Its calls may take as long as the options say."""
        client = self._clients.get(compression)
        if client is None:
            client = self._clients[compression] = self.loop.run(self._connect(compression))
        return client

    async def _connect(self, compression: Compression | None) -> AsyncClient:
        access = self.where.access()
        return await AsyncClient.connect(
            self.where.servers,
            timeout=self.where.timeout,
            compression=compression,
            token=self.where.token(),
            tls=access.tls,
            insecure=access.insecure,
        )

    def close(self) -> None:
        try:
            self.loop.run(self._close())
        finally:
            self.loop.close()

    async def _close(self) -> None:
        for client in self._clients.values():
            await client.close()
        await self.ranges.close()


_links: OrderedDict[tuple[int, Where], WorkerConnection] = OrderedDict()


def link_to(where: Where) -> WorkerConnection:
    """Return the connection to this log, or make a new one. ``where`` must name servers."""
    # A forked process inherits the links of its parent, but not their threads.
    key = (os.getpid(), where)
    link = _links.get(key)
    if link is None:
        link = _links[key] = WorkerConnection(where)
    _links.move_to_end(key)
    while len(_links) > LINKS_MAX:
        (process, _), oldest = _links.popitem(last=False)
        if process == os.getpid():
            oldest.close()
    return link
