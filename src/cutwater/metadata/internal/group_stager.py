"""Publishes records in an internal topic as one group, for the leader itself. As clients do, it stages a part and
publishes a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from cutwater.core.order.state import LogStream, OrderState
from cutwater.core.publish.staged import PartSize, StagedPart
from cutwater.core.requests import (
    Answer,
    OpenRunRequest,
    PublishAnswer,
    PublishedGroup,
    PublishRequest,
    Request,
    RunAnswer,
)
from cutwater.errors import CutwaterError, ResourceExhausted, Unavailable
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import staged_frame
from cutwater.format.plain_bodies import values_body
from cutwater.metadata.retention import Connect
from cutwater.protocol.methods import Method
from cutwater.protocol.storage_api import DISCARD_PART, FINISH_PART, STAGE, FinishArguments, StageArguments
from cutwater.runtime import system
from cutwater.runtime.deadlines import Deadline
from cutwater.types import Batch, BatchNumber, EventTime, Part, StorageNodeId
from cutwater.wire.connection import Connection

T = TypeVar("T")

ASK_MS_MAX = 10_000
DISCARD_MS_MAX = 300
PUBLISH_RETRY_SECONDS = 0.05

Decide = Callable[[Request], Awaitable[Answer]]


class GroupStager:
    """See the module. ``connect`` connects to a storage node, ``decide`` submits a request to the leader."""

    def __init__(self, state: OrderState, connect: Connect, decide: Decide) -> None:
        self._state, self._connect, self._decide = state, connect, decide

    async def publish(self, name: str, topic: str, values: Sequence[bytes], deadline: Deadline) -> PublishedGroup:
        """Publish these values, each as a record, by a run of this name. Returns where they are."""
        request = OpenRunRequest(name, f"{name}:{system.token_hex(16)}", once=True)
        run = _expect(await self._decide(request), RunAnswer)
        part = await self._stage(run, topic, values, deadline)
        while True:
            deadline.check(f"{len(values)} records for topic {topic!r} were staged and not published")
            try:
                answer = await self._decide(PublishRequest(run.run, BatchNumber(0), (part,)))
            except Unavailable:
                # The leader waits only so long for a group.
                await deadline.pause(PUBLISH_RETRY_SECONDS)
                continue
            return _expect(answer, PublishAnswer).topics[0]

    async def _stage(self, run: RunAnswer, topic: str, values: Sequence[bytes], deadline: Deadline) -> Part:
        stream = self._open_stream(topic)
        time = system.wall_time_ns() // 1_000
        staged = StagedPart(run.run, BatchNumber(0), run.generation, stream.topic, system.token_hex(16))
        holders: dict[StorageNodeId, Connection] = {}
        try:
            for node in stream.members:
                known = self._state.nodes.get(node)
                if known is None or not known.address:
                    raise Unavailable(f"the address of storage node {node} is not known")
                holders[node] = await self._connect(node, known.address)
            size = PartSize()
            for value in values:
                body = values_body([value], time)
                batch = Batch(1, body, crc32c(body), EventTime(time), EventTime(time))
                frame = staged_frame(batch, size.rows + 1)
                await _tell_all(holders, STAGE, StageArguments(staged, size.bytes), frame, deadline)
                size = PartSize(size.entries + 1, size.rows + 1, size.bytes + sum(map(len, frame)))
            await _tell_all(holders, FINISH_PART, FinishArguments(staged.part, size), (), deadline)
        except CutwaterError:
            calls = [one.call(DISCARD_PART, staged.part, timeout_ms=DISCARD_MS_MAX) for one in holders.values()]
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        finally:
            for connection in holders.values():
                connection.abort()
        return Part(
            stream.topic,
            stream.stream,
            tuple(holders),
            staged.part,
            staged.generation,
            size.entries,
            size.rows,
            size.bytes,
            False,
            run.run,
            BatchNumber(0),
        )

    def _open_stream(self, name: str) -> LogStream:
        topic = self._state.topic_named(name)
        streams = self._state.streams_of(topic.topic) if topic is not None else ()
        for stream in streams:
            if stream.is_open and stream.members:
                return stream
        raise Unavailable(f"topic {name!r} takes no appends now: `cutwater topic describe {name}` says why")


async def _tell_all(
    holders: dict[StorageNodeId, Connection],
    method: Method[Any, Any],
    argument: object,
    body: Sequence[bytes],
    deadline: Deadline,
) -> None:
    calls = [_tell(connection, method, argument, body, deadline) for connection in holders.values()]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _tell(
    connection: Connection, method: Method[Any, Any], argument: object, body: Sequence[bytes], deadline: Deadline
) -> None:
    while True:
        try:
            await connection.call(method, argument, list(body), timeout_ms=deadline.left_ms(ASK_MS_MAX))
            return
        except ResourceExhausted as error:
            if deadline.left * 1_000 <= error.retry_ms:
                raise
            await deadline.pause(error.retry_ms / 1_000)


def _expect(answer: Answer, kind: type[T]) -> T:
    if not isinstance(answer, kind):
        raise Unavailable(f"the leader answered with {type(answer).__name__} instead of {kind.__name__}")
    return answer
