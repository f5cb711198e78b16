"""Asks replicas single questions: the record at a position, and the position of a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar

from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.cluster.silence import first_answer
from cutwater.client.errors import ClientClosed
from cutwater.client.read.records import ColumnLayout, Record, runs_of
from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.core.requests import StreamInfo
from cutwater.errors import (
    CutwaterError,
    Damaged,
    DeadlineExceeded,
    InvalidArgument,
    NoRecordHere,
    NotFound,
    NotYetCommitted,
    PermissionDenied,
    QuotaExceeded,
    Trimmed,
    Unavailable,
)
from cutwater.protocol.errors import ConnectionLost, Unauthenticated
from cutwater.protocol.methods import Method, Received
from cutwater.protocol.storage_api import (
    EVENT_TIME,
    FIND,
    READ,
    EventTimeAnswer,
    EventTimeArguments,
    FindAnswer,
    FindArguments,
    ReadAnswerHeader,
    ReadArguments,
)
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, BatchKind, CutTime, EventTime, LogStreamId, StorageNodeId

ASK_MS_MAX = 5_000
RETRY_SECONDS_MIN = 0.005
RETRY_SECONDS_MAX = 0.2

Q = TypeVar("Q")
A = TypeVar("A")
T = TypeVar("T")
DAMAGED_SECONDS = 1.0
"""How long a reader waits while the only replica is damaged. A decided trim may still remove the damaged place."""
WAY_OUT = (
    "There is no other replica: `cutwater verify` names the first GLSN behind the damage, where readers may start, and "
    "the ways out"
)
NOT_ALLOWED = (PermissionDenied, Unauthenticated)
"""The client lacks a right, or its token is not valid any more: no other replica will serve it."""
FINAL = (Trimmed, InvalidArgument, ClientClosed, *NOT_ALLOWED)
"""Errors that another replica would return, too."""


class LastingDamage:
    """Decides when a reader gives up on damage that it meets at one position: a log stream with one replica has no
    other copy to wait for. Times are those of its event loop."""

    def __init__(self) -> None:
        self._since: float | None = None

    def forget(self) -> None:
        """Forget earlier damage, because something else happened."""
        self._since = None

    def take(self, error: CutwaterError, replicas: int, now: float) -> CutwaterError | None:
        """Return the error to fail with, or None while waiting may help."""
        if not isinstance(error, Damaged) or replicas != 1:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now < self._since + DAMAGED_SECONDS:
            return None
        error.message = f"{error.message}. {WAY_OUT}"
        return error


class Behind(Unavailable):
    """A replica is not far enough yet. Nothing is wrong with it; it only needs a moment."""

    def __init__(self, stream: LogStreamId, glsn: GLSN) -> None:
        super().__init__(f"a replica of log stream {stream} has not come to GLSN {glsn} yet")


class PointReads:
    def __init__(self, catalogs: Catalogs, nodes: Nodes, ask_ms_max: int = ASK_MS_MAX) -> None:
        """``ask_ms_max``: how long one replica may take for an answer."""
        self._catalogs, self._nodes, self._ask_ms_max = catalogs, nodes, ask_ms_max

    async def read(self, glsn: GLSN, stream: LogStreamId | None, deadline: Deadline) -> Record:
        view = self._catalogs.view
        if glsn > view.catalog.high_watermark:
            view = await self._catalogs.fresh(deadline)
        if glsn > view.catalog.high_watermark:
            raise NotYetCommitted(f"GLSN {glsn} is not given out yet: the log ends at {view.catalog.high_watermark}")
        asked = [info for info in self._known(view, stream) if info.created_at < glsn <= info.last_glsn]
        found = await asyncio.gather(
            *(
                self.ask(info, READ, ReadArguments(info.stream, glsn, 1), partial(_run_at, glsn), deadline)
                for info in asked
            ),
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
        hidden = ", or holds a record of a topic that you may not see" if view.catalog.is_limited else ""
        raise NoRecordHere(
            f"GLSN {glsn} holds no record of a topic: it marks time, a producer's beginning, or a deleted topic{hidden}"
        )

    async def find(self, time: CutTime, streams: Iterable[StreamInfo], view: CatalogView, deadline: Deadline) -> GLSN:
        """Return the first position in these log streams that was committed at or after the time; after the end if
        there is none."""
        end = view.catalog.high_watermark
        if time > view.catalog.cut_time:
            return GLSN(end + 1)
        asked = [info for info in streams if info.last_glsn]
        found = await asyncio.gather(
            *(self.ask(info, FIND, FindArguments(info.stream, time), partial(_found, info), deadline) for info in asked)
        )
        return min((glsn for glsn in found if glsn is not None), default=GLSN(end + 1))

    async def event_time(self, info: StreamInfo, at: GLSN, deadline: Deadline) -> EventTimeAnswer:
        """Return how far the event time of this log stream had come after a position."""

        def accept(received: Received[EventTimeAnswer]) -> EventTimeAnswer:
            needed = min(at, info.last_glsn)
            if received.value.complete_through < needed:
                raise Behind(info.stream, needed)
            return received.value

        return await self.ask(info, EVENT_TIME, EventTimeArguments(info.stream, at), accept, deadline)

    def _known(self, view: CatalogView, stream: LogStreamId | None) -> list[StreamInfo]:
        if stream is None:
            return list(view.catalog.streams)
        info = view.streams.get(stream)
        if info is None:
            raise NotFound(f"there is no log stream {stream}")
        return [info]

    async def _record(self, run: CommittedBatch, glsn: GLSN, deadline: Deadline) -> Record:
        if run.batch.kind is not BatchKind.DATA:
            raise _what_it_is(run)
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

    async def ask(
        self,
        info: StreamInfo,
        method: Method[Q, A],
        arguments: Q,
        accept: Callable[[Received[A]], T],
        deadline: Deadline,
    ) -> T:
        """Return what ``accept`` makes of the answer of any replica. It raises if the answer is of no use, such as
        ``Behind``. If one replica cannot answer, ask the next; if none can, ask again until the time is up, or until it
        is certain that the only replica is damaged."""

        async def ask_node(node: StorageNodeId) -> T:
            try:
                connection = await self._nodes.connection(self._catalogs.view.address(node), deadline)
                timeout_ms = deadline.left_ms(self._ask_ms_max)
                return accept(await connection.call(method, arguments, timeout_ms=timeout_ms))
            except (ConnectionLost, DeadlineExceeded):
                self._nodes.unreachable(info.stream, node)
                raise

        wait, damage = RETRY_SECONDS_MIN, LastingDamage()
        last: CutwaterError = Unavailable(f"log stream {info.stream} has no replica")
        while True:
            info = self._catalogs.view.streams.get(info.stream, info)
            askers = [partial(ask_node, node) for node in dict.fromkeys((*info.chain, *info.replicas))]
            if askers:
                try:
                    return await first_answer(askers, final=FINAL)
                except CutwaterError as error:
                    if isinstance(error, FINAL):
                        raise
                    last = error
                    if isinstance(error, QuotaExceeded):
                        wait = max(wait, error.retry_after)
                    if lasting := damage.take(error, len(askers), deadline.now):
                        raise lasting from None
            if deadline.left <= wait:
                raise last
            await deadline.pause(wait)
            wait = min(wait * 2, RETRY_SECONDS_MAX)
            try:
                await self._catalogs.fresh(deadline)
            except NOT_ALLOWED:
                raise
            except CutwaterError as error:
                last = error


def _run_at(glsn: GLSN, received: Received[ReadAnswerHeader]) -> CommittedBatch | None:
    for run in runs_of(received.value, received.body):
        if run.first_glsn <= glsn <= run.last_glsn:
            return run
        if run.first_glsn > glsn:
            return None
    if received.value.complete_through < glsn:
        raise Behind(received.value.stream, glsn)
    return None


def _found(info: StreamInfo, received: Received[FindAnswer]) -> GLSN | None:
    answer = received.value
    if answer.glsn is None and answer.complete_through < info.last_glsn:
        raise Behind(info.stream, info.last_glsn)
    return answer.glsn


def _what_it_is(run: CommittedBatch) -> NoRecordHere:
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
