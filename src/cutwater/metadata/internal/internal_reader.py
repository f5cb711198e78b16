"""Reads internal topics for a metadata node, leader or not: it asks the leader where records are, and storage nodes for
them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from cutwater.core.requests import Catalog, StreamInfo, TopicInfo
from cutwater.errors import CutwaterError, DeadlineExceeded, Malformed, ProtocolViolation, Trimmed, Unavailable
from cutwater.format.entry_codec import frames_in
from cutwater.metadata.retention import Connect
from cutwater.protocol.methods import Body, Method, Received
from cutwater.protocol.storage_api import FIND, READ, FindArguments, ReadAnswerHeader, ReadArguments
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, BatchKind, CommitContext, CutTime, StorageNodeId
from cutwater.wire.connection import Connection

_log = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")

READ_BYTES = 1024 * 1024
"""Bytes that are asked for at a time. One entry comes whole, however large it is."""
ASK_MS_MAX = 5_000
RETRY_SECONDS_MIN = 0.02
RETRY_SECONDS_MAX = 0.5


class InternalRow(NamedTuple):
    glsn: GLSN
    key: bytes
    value: bytes


class RowBatch(NamedTuple):
    """Some rows, in order. ``through``: the position up to which there is nothing else."""

    rows: list[InternalRow]
    through: GLSN


class InternalReader:
    """See the module. ``ask_catalog`` asks the leader, ``connect`` connects to a storage node."""

    def __init__(self, ask_catalog: Callable[[], Awaitable[Catalog]], connect: Connect) -> None:
        self._ask_catalog, self._connect = ask_catalog, connect
        self._connections: dict[StorageNodeId, Connection] = {}
        self._connecting = asyncio.Lock()
        self._is_loaded = False

    def close(self) -> None:
        for connection in self._connections.values():
            connection.abort()
        self._connections = {}

    async def topic(self, name: str) -> TopicInfo | None:
        catalog = await self._ask_catalog()
        return next((topic for topic in catalog.topics if topic.name == name), None)

    async def find(self, topic: str, time: CutTime, deadline: Deadline) -> GLSN:
        """Return the first position of a topic that was committed at or after a time; its end if there is none."""
        catalog = await self._ask_catalog()
        first = GLSN(catalog.high_watermark + 1)
        for stream in _streams(catalog, topic):
            found = (await self._ask(catalog, stream, FIND, FindArguments(stream.stream, time), deadline)).value
            if found.glsn is not None:
                first = min(first, found.glsn)
            elif found.complete_through < stream.last_glsn:
                first = min(first, GLSN(found.complete_through + 1))
        return first

    async def size_bytes(self, topic: str, deadline: Deadline) -> int:
        """Return the size of what one copy of a topic stores."""
        catalog = await self._ask_catalog()
        arguments = [FindArguments(stream.stream, CutTime(0)) for stream in _streams(catalog, topic)]
        found = [
            await self._ask(catalog, stream, FIND, asked, deadline)
            for stream, asked in zip(_streams(catalog, topic), arguments, strict=True)
        ]
        return sum(answer.value.size_bytes for answer in found)

    async def rows(self, topic: str, first: GLSN, last: GLSN, deadline: Deadline) -> AsyncGenerator[RowBatch, None]:
        """Yield the rows of a topic at positions from ``first`` to ``last``, one log stream after the other; an
        internal topic has one, unless that was sealed for good. Raises ``Trimmed`` if the range begins too early."""
        await self._load()
        catalog = await self._ask_catalog()
        for stream in _streams(catalog, topic):
            at, end = max(first, GLSN(stream.created_at + 1)), min(last, stream.last_glsn)
            while at <= end:
                arguments = ReadArguments(stream.stream, at, READ_BYTES)
                received = await self._ask(catalog, stream, READ, arguments, deadline)
                through = received.value.complete_through
                if through < at:
                    # The replica is behind the catalog.
                    await self._pause(deadline, RETRY_SECONDS_MIN, topic)
                    continue
                rows = [row for row in _rows(topic, received.value, received.body) if at <= row.glsn <= end]
                yield RowBatch(rows, min(through, end))
                at = GLSN(through + 1)

    async def _load(self) -> None:
        """Load what reads rows. A metadata node seldom needs it, and it takes longer than a heartbeat may be late."""
        if not self._is_loaded:
            await asyncio.get_running_loop().run_in_executor(None, _plain_form)
            self._is_loaded = True

    async def _ask(
        self, catalog: Catalog, stream: StreamInfo, method: Method[Q, A], arguments: Q, deadline: Deadline
    ) -> Received[A]:
        addresses = {node.node: node.address for node in catalog.nodes}
        wait = RETRY_SECONDS_MIN
        trouble: CutwaterError = Unavailable(f"log stream {stream.stream} has no replica")
        while True:
            for node in dict.fromkeys((*stream.chain, *stream.replicas)):
                try:
                    connection = await self._connected(node, addresses.get(node, ""))
                    return await connection.call(method, arguments, timeout_ms=deadline.left_ms(ASK_MS_MAX))
                except Trimmed:
                    raise
                except CutwaterError as error:
                    trouble = error
            if deadline.left <= wait:
                raise trouble
            await self._pause(deadline, wait, f"log stream {stream.stream}")
            wait = min(wait * 2, RETRY_SECONDS_MAX)

    async def _pause(self, deadline: Deadline, seconds: float, what: str) -> None:
        if deadline.left <= seconds:
            raise DeadlineExceeded(f"{what} was not read, after {deadline.seconds:g} s")
        await deadline.pause(seconds)

    async def _connected(self, node: StorageNodeId, address: str) -> Connection:
        async with self._connecting:
            connection = self._connections.get(node)
            if connection is None or connection.is_closed:
                if not address:
                    raise Unavailable(f"the address of storage node {node} is not known")
                connection = self._connections[node] = await self._connect(node, address)
            return connection


def _streams(catalog: Catalog, topic: str) -> list[StreamInfo]:
    numbers = {known.topic for known in catalog.topics if known.name == topic}
    return [stream for stream in catalog.streams if stream.topic in numbers and stream.last_glsn]


def _plain_form() -> Any:
    from cutwater.format.bodies import BodyForm  # noqa: PLC0415

    return BodyForm()


def _rows(topic: str, header: ReadAnswerHeader, body: Body) -> Iterator[InternalRow]:
    from cutwater.format.bodies import BadBody, read_checked  # noqa: PLC0415

    if not len(body):
        return
    form = _plain_form()
    commits = iter(header.commits)
    commit: CommitContext | None = next(commits, None)
    for frame in frames_in(body):
        found = frame.header
        while commit is not None and commit.last_llsn < found.first_llsn:
            commit = next(commits, None)
        if commit is None or found.first_llsn < commit.first_llsn:
            raise ProtocolViolation(f"log stream {header.stream}: LLSN {found.first_llsn} came without its commit")
        if found.kind is not BatchKind.DATA:
            continue
        first = commit.glsn_of(found.first_llsn)
        try:
            rows = read_checked(frame.body, form, found.count, found.time_min, found.time_max)
        except BadBody as error:
            raise Malformed(first, GLSN(first + found.count - 1), topic, str(error)) from None
        pairs = zip(rows.column("key").to_pylist(), rows.column("value").to_pylist(), strict=True)
        for place, (key, value) in enumerate(pairs):
            yield InternalRow(GLSN(first + place), key or b"", value)
