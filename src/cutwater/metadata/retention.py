"""Retention: turns the time or the size that a topic keeps into trim positions.

The order layer knows positions, not bytes, and only recent times. So the leader asks the storage nodes for the first
record to keep, and then decides a trim like any other. Nothing here is urgent or exact: storage nodes remove whole
segments anyway. If no replica of a log stream answers, its topic is not trimmed this time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cutwater.core.order.state import LogStream, OrderState, TopicState
from cutwater.core.requests import Answer, Request, TrimRequest
from cutwater.errors import CutwaterError, Unavailable
from cutwater.protocol.storage_api import FIND, FindAnswer, FindArguments
from cutwater.types import GLSN, CutTime, StorageNodeId
from cutwater.wire.connection import Connection

_log = logging.getLogger(__name__)

ASK_MS_MAX = 5_000

Connect = Callable[[StorageNodeId, str], Awaitable[Connection]]
Decide = Callable[[Request], Awaitable[Answer]]


class RetentionTrimmer:
    """Enforces retention. ``connect`` connects to a storage node; ``decide`` submits a request to the leader."""

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

    async def _first_kept(self, topic: TopicState) -> GLSN:
        """Return the position below which all records of the topic exceed its retention."""
        # Records that are appended while the storage nodes are asked lie above this.
        end = GLSN(self._state.high_watermark + 1)
        streams = [s for s in self._state.streams_of(topic.topic) if s.last_glsn >= topic.trimmed_before]
        if not streams:
            return topic.trimmed_before
        since = CutTime(self._state.cut_time - topic.retention.time_us) if topic.retention.time_us else CutTime(0)
        found = [await self._ask(s, FindArguments(s.stream, since)) for s in streams]
        before = min(_first(answer, end) for answer in found)
        total = sum(answer.size_bytes for answer in found)
        if 0 < topic.retention.bytes < total:
            # Each log stream keeps its share. What exceeds either bound is removed.
            shares = [max(1, topic.retention.bytes * answer.size_bytes // total) for answer in found]
            asked = [FindArguments(s.stream, CutTime(0), share) for s, share in zip(streams, shares, strict=True)]
            sized = [await self._ask(s, arguments) for s, arguments in zip(streams, asked, strict=True)]
            before = max(before, min(_first(answer, end) for answer in sized))
        return before

    async def _ask(self, stream: LogStream, arguments: FindArguments) -> FindAnswer:
        for node in dict.fromkeys((*stream.members, *stream.replicas)):
            try:
                connection = await self._connected(node)
                return (await connection.call(FIND, arguments, timeout_ms=ASK_MS_MAX)).value
            except CutwaterError:
                continue
        raise Unavailable(f"no replica of log stream {stream.stream} answers")

    async def _connected(self, node: StorageNodeId) -> Connection:
        connection = self._connections.get(node)
        if connection is None or connection.is_closed:
            known = self._state.nodes.get(node)
            if known is None or not known.address:
                raise Unavailable(f"the address of storage node {node} is not known")
            connection = self._connections[node] = await self._connect(node, known.address)
        return connection


def _first(answer: FindAnswer, end: GLSN) -> GLSN:
    """Return the first record to keep, as one replica knows it; it may not know the newest records yet."""
    return min(end, GLSN(answer.complete_through + 1)) if answer.glsn is None else answer.glsn
