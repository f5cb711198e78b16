"""Retention: turns how long, or how much, a topic keeps into trim positions.

The order layer knows positions, not bytes, and only recent times. So the leader asks the storage nodes where the
records begin that are to be kept, and then decides a trim like any other. Nothing here is urgent or exact: storage
nodes remove whole segments anyway. If a log stream cannot be asked, its topic is not trimmed this time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cutwater.core.order_state import LogStream, OrderState, Topic
from cutwater.core.requests import Answer, Request, TrimRequest
from cutwater.errors import CutwaterError, Unavailable
from cutwater.types import GLSN, CutTime, StorageNodeId
from cutwater.wire.connection import Connection
from cutwater.wire.storage_api import FIND, FindArguments

_log = logging.getLogger(__name__)

ASK_MS_MAX = 5_000

Connect = Callable[[str], Awaitable[Connection]]
Decide = Callable[[Request], Awaitable[Answer]]


class Retention:
    """``connect`` opens a connection to an address; ``decide`` has a request decided."""

    def __init__(self, state: OrderState, connect: Connect, decide: Decide) -> None:
        self._state, self._connect, self._decide = state, connect, decide
        self._connections: dict[StorageNodeId, Connection] = {}

    async def enforce_for_ever(self, every_seconds: float) -> None:
        try:
            while True:
                await asyncio.sleep(every_seconds)
                await self.enforce()
        finally:
            for connection in self._connections.values():
                connection.abort()

    async def enforce(self) -> None:
        """Trim every topic that keeps more than it should."""
        for topic in [t for t in self._state.topics.values() if t.retention.time_us or t.retention.bytes]:
            try:
                before = await self._first_kept(topic)
                if before > topic.trimmed_before:
                    await self._decide(TrimRequest(topic.name, before))
            except CutwaterError as error:
                _log.info("topic %s is not trimmed now: %s", topic.name, error.message)

    async def _first_kept(self, topic: Topic) -> GLSN:
        """Everything of the topic below this position is older, or more, than what is to be kept."""
        # Whatever is appended while the storage nodes are asked lies above this.
        end = GLSN(self._state.high_watermark + 1)
        streams = self._state.streams_of(topic.topic)
        kept = [end]
        if topic.retention.time_us:
            since = CutTime(self._state.cut_time - topic.retention.time_us)
            kept.append(min([await self._ask(s, FindArguments(s.stream, since), end) for s in streams], default=end))
        if topic.retention.bytes:
            share = max(1, topic.retention.bytes // max(1, len(streams)))
            sized = [await self._ask(s, FindArguments(s.stream, CutTime(0), share), end) for s in streams]
            kept.append(min(sized, default=end))
        # Both bounds hold: what exceeds either is removed.
        return max(kept[1:], default=GLSN(1))

    async def _ask(self, stream: LogStream, arguments: FindArguments, end: GLSN) -> GLSN:
        if stream.committed_end == 0:
            return end
        for node in stream.members:
            try:
                connection = await self._connected(node)
                answer = (await connection.call(FIND, arguments, timeout_ms=ASK_MS_MAX)).value
            except CutwaterError:
                continue
            return end if answer.glsn is None else answer.glsn
        raise Unavailable(f"no replica of log stream {stream.stream} answers")

    async def _connected(self, node: StorageNodeId) -> Connection:
        connection = self._connections.get(node)
        if connection is None or connection.closed.done():
            known = self._state.nodes.get(node)
            if known is None or not known.address:
                raise Unavailable(f"the address of storage node {node} is not known")
            connection = self._connections[node] = await self._connect(known.address)
        return connection
