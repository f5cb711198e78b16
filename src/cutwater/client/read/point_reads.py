"""Asks replicas single questions: the record at a position, and the position of a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar

from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.cluster.hedging import first_answer
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.errors import ClientClosed
from cutwater.client.read.lasting_damage import LastingDamage
from cutwater.client.read.records import ColumnLayout, Record, runs_of
from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.core.requests import StreamInfo
from cutwater.errors import (
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    NoRecordHere,
    NotFound,
    NotYetCommitted,
    Trimmed,
    Unavailable,
)
from cutwater.protocol.errors import ConnectionLost
from cutwater.protocol.storage_api import (
    EVENT_TIME,
    FIND,
    READ,
    EventTimeAnswer,
    EventTimeArguments,
    FindArguments,
    ReadArguments,
)
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, BatchKind, CutTime, EventTime, LogStreamId, StorageNodeId
from cutwater.wire.connection import Connection

ASK_MS_MAX = 5_000
RETRY_SECONDS_MIN = 0.005
RETRY_SECONDS_MAX = 0.2

T = TypeVar("T")


class PointReads:
    def __init__(self, catalogs: Catalogs, nodes: Nodes) -> None:
        self._catalogs, self._nodes = catalogs, nodes

    async def read(self, glsn: GLSN, stream: LogStreamId | None, deadline: Deadline) -> Record:
        view = self._catalogs.view
        if glsn > view.catalog.high_watermark:
            view = await self._catalogs.fresh(deadline)
        if glsn > view.catalog.high_watermark:
            raise NotYetCommitted(f"GLSN {glsn} is not given out yet: the log ends at {view.catalog.high_watermark}")
        asked = [info for info in self._known(view, stream) if info.created_at < glsn <= info.last_glsn]
        found = await asyncio.gather(
            *(self.ask(info, self._run_at(info.stream, glsn, deadline), deadline) for info in asked),
            return_exceptions=True,
        )
        for run in found:
            if isinstance(run, CommittedBatch):
                return await self._record(run, glsn, deadline)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, Trimmed):
                raise error
        trimmed = [
            (error.first_left, view.names[info.topic])
            for info, error in zip(asked, found, strict=True)
            if isinstance(error, Trimmed)
        ]
        if not asked:
            topics = view.catalog.topics
            trimmed = [(topic.trimmed_before, topic.name) for topic in topics if topic.trimmed_before > glsn]
        if trimmed:
            # With several topics, the record may have been in any of them; naming one could be wrong.
            first_left, name = min(trimmed)
            raise Trimmed(glsn, first_left, name if len({name for _, name in trimmed}) == 1 else "")
        raise no_record(glsn)

    async def find(self, time: CutTime, streams: Iterable[StreamInfo], view: CatalogView, deadline: Deadline) -> GLSN:
        """Return the first position in these log streams that was committed at or after the time; after the end if
        there is none."""
        end = view.catalog.high_watermark
        if time > view.catalog.cut_time:
            return GLSN(end + 1)
        asked = [info for info in streams if info.last_glsn]
        found = await asyncio.gather(*(self.ask(info, self._from(info, time, deadline), deadline) for info in asked))
        return min((glsn for glsn in found if glsn is not None), default=GLSN(end + 1))

    async def event_time(self, info: StreamInfo, at: GLSN, deadline: Deadline) -> EventTimeAnswer:
        """Return how far the event time of this log stream had come after a position."""
        needed = min(at, info.last_glsn)

        async def ask(connection: Connection) -> EventTimeAnswer:
            arguments = EventTimeArguments(info.stream, at)
            answer = (await connection.call(EVENT_TIME, arguments, timeout_ms=deadline.left_ms(ASK_MS_MAX))).value
            if answer.complete_through < needed:
                raise Unavailable(f"a replica of log stream {info.stream} has not come to GLSN {needed} yet")
            return answer

        return await self.ask(info, ask, deadline)

    def _known(self, view: CatalogView, stream: LogStreamId | None) -> list[StreamInfo]:
        if stream is None:
            return list(view.catalog.streams)
        info = view.streams.get(stream)
        if info is None:
            raise NotFound(f"there is no log stream {stream}")
        return [info]

    async def _record(self, run: CommittedBatch, glsn: GLSN, deadline: Deadline) -> Record:
        if run.batch.kind is not BatchKind.DATA:
            raise what_it_is(run)
        for is_last in (False, True):
            view = self._catalogs.view
            info = view.streams.get(run.stream)
            if info is not None:
                layout = ColumnLayout(view.schema(view.topics[view.names[info.topic]]))
                if layout.knows(run) or is_last:
                    at = glsn - run.first_glsn
                    return layout.records(run, at, at + 1)[0]
            if not is_last:
                await self._catalogs.fresh(deadline)
        raise NotFound(f"the topic of GLSN {glsn} was deleted")

    def _run_at(
        self, stream: LogStreamId, glsn: GLSN, deadline: Deadline
    ) -> Callable[[Connection], Awaitable[CommittedBatch | None]]:
        async def ask(connection: Connection) -> CommittedBatch | None:
            arguments = ReadArguments(stream, glsn, 1)
            received = await connection.call(READ, arguments, timeout_ms=deadline.left_ms(ASK_MS_MAX))
            for run in runs_of(received.value, received.body):
                if run.first_glsn <= glsn <= run.last_glsn:
                    return run
                if run.first_glsn > glsn:
                    return None
            if received.value.complete_through < glsn:
                raise Unavailable(f"a replica of log stream {stream} has not come to GLSN {glsn} yet")
            return None

        return ask

    def _from(
        self, info: StreamInfo, time: CutTime, deadline: Deadline
    ) -> Callable[[Connection], Awaitable[GLSN | None]]:
        async def ask(connection: Connection) -> GLSN | None:
            arguments = FindArguments(info.stream, time)
            answer = (await connection.call(FIND, arguments, timeout_ms=deadline.left_ms(ASK_MS_MAX))).value
            if answer.glsn is None and answer.complete_through < info.last_glsn:
                raise Unavailable(f"a replica of log stream {info.stream} has not come to GLSN {info.last_glsn} yet")
            return answer.glsn

        return ask

    async def ask(self, info: StreamInfo, ask: Callable[[Connection], Awaitable[T]], deadline: Deadline) -> T:
        """Return the answer of any replica. If one cannot answer, ask the next; if none can, ask again until the time
        is up, or until it is certain that the only replica is damaged."""
        wait, damage = RETRY_SECONDS_MIN, LastingDamage()
        last: CutwaterError = Unavailable(f"log stream {info.stream} has no replica")
        while True:
            info = self._catalogs.view.streams.get(info.stream, info)
            askers = [
                partial(self._ask_node, info, node, ask, deadline)
                for node in dict.fromkeys((*info.chain, *info.replicas))
            ]
            if askers:
                try:
                    return await first_answer(askers, final=(Trimmed, InvalidArgument, ClientClosed))
                except CutwaterError as error:
                    if isinstance(error, Trimmed | InvalidArgument | ClientClosed):
                        raise
                    last = error
                    if lasting := damage.take(error, len(askers), deadline.now):
                        raise lasting from None
            if deadline.left <= wait:
                raise last
            await deadline.pause(wait)
            wait = min(wait * 2, RETRY_SECONDS_MAX)
            try:
                await self._catalogs.fresh(deadline)
            except CutwaterError as error:
                last = error

    async def _ask_node(
        self,
        info: StreamInfo,
        node: StorageNodeId,
        ask: Callable[[Connection], Awaitable[T]],
        deadline: Deadline,
    ) -> T:
        try:
            connection = await self._nodes.connection(self._catalogs.view.address(node), deadline)
            return await ask(connection)
        except (ConnectionLost, DeadlineExceeded):
            self._nodes.unreachable(info.stream, node)
            raise


def no_record(glsn: GLSN) -> NoRecordHere:
    return NoRecordHere(
        f"GLSN {glsn} holds no record of a topic: it marks time, a producer's beginning, or a deleted topic"
    )


def what_it_is(run: CommittedBatch) -> NoRecordHere:
    """Return an error that says what a position without a record holds."""
    batch = run.batch
    if batch.kind is BatchKind.FENCE:
        what = "it marks a producer's beginning"
    else:
        said = [f"the watermark {_shown(batch.declared)}"] if batch.declared is not None else []
        what = f"it declares {' and '.join([*said, 'idleness'] if batch.idle else said)}"
    return NoRecordHere(f"GLSN {run.first_glsn} in log stream {run.stream} holds no record: {what}")


def _shown(time: EventTime) -> str:
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time)).isoformat()
    except OverflowError:
        return f"{time} µs"
