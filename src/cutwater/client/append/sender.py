"""Sends appends without a producer: each has a definite outcome, and none is ever sent twice.

An append is *acknowledged*, *failed* (it will never appear), or *unknown* (``AppendUnknown``). As long as a failure is
certain, because nothing was sent or the storage node refused the batch, the same batch may be tried again, on another
log stream too, until the caller's deadline. Once a batch may have arrived, it is not sent again, unless it turns out
that it certainly was not taken: see ``client.append.pending``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from msgspec import Struct, structs

from cutwater.client.append.pending import Pending, PendingAppends
from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.errors import ClientClosed
from cutwater.core.requests import Description, StreamInfo, TopicInfo
from cutwater.errors import (
    AppendUnknown,
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ReadOnly,
    Refused,
    ResourceExhausted,
    SequenceError,
    StreamSealed,
    Unavailable,
    WrongEpoch,
)
from cutwater.protocol.errors import ConnectionLost
from cutwater.protocol.methods import Received
from cutwater.protocol.storage_api import APPEND, AppendAnswer, AppendArguments
from cutwater.runtime.deadlines import Deadline
from cutwater.types import LLSN, Ack, Batch, LogStreamId, TopicId
from cutwater.wire.connection import Connection

RETRY_SECONDS_MIN = 0.005
RETRY_SECONDS_MAX = 0.5


def is_definite(error: CutwaterError) -> bool:
    """Return whether an append that failed with this error, at a storage node or before it, will never appear."""
    if isinstance(error, ConnectionLost):
        return not error.outcome_unknown
    refused = (Refused, InvalidArgument, NotFound, ReadOnly, ResourceExhausted, SequenceError)
    # A closing node, or one without an open replica of the log stream, answers plain ``Unavailable`` before it takes
    # anything.
    return isinstance(error, refused) or type(error) is Unavailable


def may_go_elsewhere(error: CutwaterError) -> bool:
    """Return whether another log stream, or the same one a little later, may take an append refused with this error."""
    return isinstance(error, StreamSealed | WrongEpoch | NotFound | Unavailable) or type(error) is Refused


class Shipment(Struct, eq=False):
    """A batch that is being sent. ``may_have_arrived`` decides between *failed* and *unknown* at the deadline, and
    ``trouble`` says why the batch was not appended so far. ``failed`` are the log streams that did not take it.
    ``is_slow``: its head has not answered for a while; ``on_slow`` is called when that begins."""

    may_have_arrived: bool = False
    trouble: str = ""
    failed: frozenset[LogStreamId] = frozenset()
    is_slow: bool = False
    on_slow: Callable[[], None] | None = None


Load = Callable[[], Batch]
"""Encodes a batch, anew for each attempt: an append whose caller was meanwhile told that nothing was appended must not
be in it any more."""


class Shipping:
    """Sends batches to the heads of log streams."""

    def __init__(self, catalogs: Catalogs, nodes: Nodes) -> None:
        self._catalogs, self._nodes = catalogs, nodes
        self._pending = PendingAppends(catalogs, nodes)
        self._loop = asyncio.get_running_loop()
        self._random = Random()
        self._turns: dict[TopicId, int] = {}
        self._reasons: dict[TopicId, str] = {}
        """Why a topic took no appends when the leader was last asked."""

    def begin(
        self,
        shipment: Shipment,
        topic: TopicInfo,
        pin: LogStreamId | None,
        load: Load,
        timeout_ms: int,
        on_outcome: Callable[[Ack | CutwaterError], None],
    ) -> bool:
        """Try the first step of ``ship`` at once, without a task and in fewer turns of the event loop. Returns whether
        the batch was sent. If so, ``on_outcome`` is called with the outcome, and ``ship`` goes on if it
        ``may_retry``."""
        try:
            info = self._choose(topic, pin, shipment.failed)
            if isinstance(info, CutwaterError):
                return False
            address = self._catalogs.view.address(info.chain[0])
            connection = self._nodes.ready(address)
            if connection is None:
                return False
            batch = load()
            arguments = _arguments(info, batch)
        except CutwaterError:
            # Nothing was sent, so ``ship`` will meet the same error and handle it.
            return False

        # If sending fails halfway, it is not known what has left.
        shipment.may_have_arrived = True
        try:
            self._dispatch(shipment, info, address, connection, arguments, batch, timeout_ms, on_outcome)
        except CutwaterError as error:
            shipment.may_have_arrived = False
            if isinstance(error, ConnectionLost):
                # The connection takes no more calls, because its peer is closing: ``ship`` makes another one.
                self._nodes.drop(address, connection)
            return False
        self._next_turn(topic, pin)
        return True

    def _dispatch(
        self,
        shipment: Shipment,
        info: StreamInfo,
        address: str,
        connection: Connection,
        arguments: AppendArguments,
        batch: Batch,
        timeout_ms: int,
        on_outcome: Callable[[Ack | CutwaterError], None],
    ) -> Callable[[], None]:
        """Send a batch, and call ``on_outcome`` unless the returned function, which cancels, is called first. If this
        raises, nothing was sent."""

        def answered(outcome: Received[AppendAnswer] | CutwaterError) -> None:
            waiting.discard(pending)
            if isinstance(outcome, Received):
                answer = outcome.value
                waiting.taken(answer)
                on_outcome(answer.ack)
            else:
                on_outcome(self._failed(shipment, info, address, connection, outcome))

        def end(error: CutwaterError) -> None:
            connection.cancel(number)
            shipment.may_have_arrived = shipment.may_have_arrived and not is_definite(error)
            on_outcome(error)

        def slow() -> None:
            shipment.is_slow = True
            if shipment.on_slow is not None:
                shipment.on_slow()

        def cancel() -> None:
            waiting.discard(pending)
            connection.cancel(number)

        waiting = self._pending
        shipment.is_slow = False
        pending = Pending(info, waiting.known_end(info), self._loop.time(), end, slow)
        waiting.add(pending)
        try:
            number = connection.begin(APPEND, arguments, batch.body, timeout_ms=timeout_ms, on_answer=answered)
        except BaseException:
            waiting.discard(pending)
            raise
        return cancel

    async def ship(
        self,
        shipment: Shipment,
        topic: TopicInfo,
        pin: LogStreamId | None,
        load: Load,
        if_llsn: LLSN | None,
        deadline: Deadline,
        error: CutwaterError | None = None,
    ) -> Ack:
        """Send to the log stream ``pin``, or to any open one of the topic. ``error``: how an earlier attempt failed."""
        wait = RETRY_SECONDS_MIN
        if pin is not None and pin not in self._catalogs.view.streams:
            await self._catalogs.fresh(deadline)
        while True:
            if error is not None:
                shipment.trouble = error.message
                if deadline.left <= wait:
                    raise error
                await self._look_again(topic, error, wait, deadline)
                wait = min(wait * 2, RETRY_SECONDS_MAX)
            info = self._choose(topic, pin, shipment.failed)
            if isinstance(info, CutwaterError):
                error = info
                continue
            self._next_turn(topic, pin)
            try:
                return await self._send(shipment, topic, pin, info, load, if_llsn, deadline)
            except CutwaterError as caught:
                if not may_retry(shipment, caught):
                    raise
                error = caught

    async def _send(
        self,
        shipment: Shipment,
        topic: TopicInfo,
        pin: LogStreamId | None,
        info: StreamInfo,
        load: Load,
        if_llsn: LLSN | None,
        deadline: Deadline,
    ) -> Ack:
        address, connection = "", None
        outcome: asyncio.Future[Ack | CutwaterError] = self._loop.create_future()
        try:
            address = self._catalogs.view.address(info.chain[0])
            connection = self._nodes.ready(address)
            if connection is None:
                connection = await self._connected(topic, pin, info, address, deadline)
            # There is no await from here until the batch is sent, so no append in it can be given up in between.
            batch = load()
            arguments = _arguments(info, batch, if_llsn)
            shipment.may_have_arrived = True
            timeout_ms, tell = deadline.left_ms(), partial(_tell, outcome)
            cancel = self._dispatch(shipment, info, address, connection, arguments, batch, timeout_ms, tell)
        except CutwaterError as error:
            failure = self._failed(shipment, info, address, connection, error)
            if failure is error:
                raise
            raise failure from error
        try:
            found = await outcome
        except asyncio.CancelledError:
            cancel()
            raise
        if isinstance(found, Ack):
            return found
        raise found

    async def _connected(
        self, topic: TopicInfo, pin: LogStreamId | None, info: StreamInfo, address: str, deadline: Deadline
    ) -> Connection:
        """Connect to the head, unless the log stream gets another head meanwhile. If connecting is slow, give up in
        favour of another log stream, if there is one. Nothing is sent here."""
        given_up: asyncio.Future[CutwaterError] = self._loop.create_future()

        def give_up(error: CutwaterError) -> None:
            if not given_up.done():
                given_up.set_result(error)

        def slow() -> None:
            if self.has_way_around(topic, pin):
                give_up(Unavailable(f"storage node {info.chain[0]} at {address} does not answer"))

        pending = Pending(info, None, self._loop.time(), give_up, slow)
        self._pending.add(pending)
        connecting = self._loop.create_task(self._nodes.connection(address, deadline))
        try:
            either: tuple[asyncio.Future[Any], ...] = connecting, given_up
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            raise given_up.result()
        finally:
            self._pending.discard(pending)
            connecting.cancel()

    def _failed(
        self, shipment: Shipment, info: StreamInfo, address: str, connection: Connection | None, error: CutwaterError
    ) -> CutwaterError:
        """Return the error that the callers get when an attempt failed."""
        if isinstance(error, ConnectionLost):
            if connection is not None:
                self._nodes.drop(address, connection)
            self._nodes.unreachable(info.stream, info.chain[0])
        elif isinstance(error, DeadlineExceeded):
            self._pending.blame(info)
        if shipment.may_have_arrived and not is_definite(error):
            return unknown(error)
        shipment.may_have_arrived = False
        shipment.failed |= {info.stream}
        return error

    def _choose(
        self, topic: TopicInfo, pin: LogStreamId | None, failed: frozenset[LogStreamId]
    ) -> StreamInfo | CutwaterError:
        """Choose an open log stream, or return why there is none now. Raises if there never will be one. Log streams
        take turns, and a turn lasts until ``_next_turn``: if ``begin`` cannot send at once, ``ship`` connects to the
        same log stream, instead of going to the next one, which may have a connection already."""
        view = self._catalogs.view
        if topic.topic not in view.names:
            raise NotFound(f"topic {topic.name!r} was deleted")
        if pin is not None:
            info = view.streams.get(pin)
            if info is None or info.topic != topic.topic:
                known = ", ".join(str(info.stream) for info in view.streams_of(topic.topic)) or "none"
                raise NotFound(f"topic {topic.name!r} has no log stream {pin}; it has: {known}")
            if info.final:
                raise StreamSealed(f"log stream {pin} is sealed for good: append to another one of {topic.name!r}")
            if not info.is_open or not info.chain:
                return StreamSealed(f"log stream {pin} takes no appends now: wait, or append to another one")
            return info
        streams = [info for info in view.streams_of(topic.topic) if info.is_open and info.chain]
        if failed:
            # A log stream that has just failed is tried again when there is no other.
            streams = [info for info in streams if info.stream not in failed] or streams
        if self._pending.avoided:
            streams = [info for info in streams if not self._pending.is_avoided(info.stream)] or streams
        if not streams:
            why = self._reasons.get(topic.topic, "all are sealed")
            return Unavailable(f"no log stream of topic {topic.name!r} takes appends now: {why}")
        turn = self._turns.get(topic.topic)
        if turn is None:
            turn = self._turns[topic.topic] = self._random.randrange(1 << 16)
        return streams[turn % len(streams)]

    def has_way_around(self, topic: TopicInfo, pin: LogStreamId | None) -> bool:
        """Return whether an append that names no log stream can go to one whose head is not known to be silent."""
        streams = self._catalogs.view.streams_of(topic.topic) if pin is None else ()
        return any(info.is_open and info.chain and not self._pending.is_avoided(info.stream) for info in streams)

    def close(self) -> None:
        self._pending.close()

    def _next_turn(self, topic: TopicInfo, pin: LogStreamId | None) -> None:
        if pin is None:
            self._turns[topic.topic] += 1

    async def _look_again(self, topic: TopicInfo, error: CutwaterError, wait: float, deadline: Deadline) -> None:
        """Wait a little and fetch the catalog again; it may have changed by then."""
        if isinstance(error, ResourceExhausted):
            await deadline.pause(max(wait, error.retry_ms / 1_000))
            return
        await deadline.pause(wait)
        try:
            view = await self._catalogs.fresh(deadline)
            if not any(info.is_open for info in view.streams_of(topic.topic)):
                self._reasons[topic.topic] = _why_sealed(topic.name, await self._catalogs.description(deadline))
        except ClientClosed:
            raise
        except CutwaterError as failure:
            # The storage nodes may well take appends while the metadata repository cannot be reached.
            self._reasons[topic.topic] = f"the metadata repository was asked why, and {failure.message}"


def _tell(waiting: asyncio.Future[Ack | CutwaterError], outcome: Ack | CutwaterError) -> None:
    if not waiting.done():
        waiting.set_result(outcome)


def may_retry(shipment: Shipment, error: CutwaterError) -> bool:
    """Return whether a batch may be sent again. ``error`` is the one that the callers would get."""
    return not shipment.may_have_arrived and may_go_elsewhere(error)


def _arguments(info: StreamInfo, batch: Batch, if_llsn: LLSN | None = None) -> AppendArguments:
    return AppendArguments(info.stream, info.epoch, structs.replace(batch, body=b""), if_llsn)


def _why_sealed(topic: str, description: Description) -> str:
    """Describe what the leader knows: which storage nodes are silent, and what it will do with the first sealed log
    stream."""
    silent = ", ".join(str(node.node) for node in description.nodes if not node.is_alive)
    told = [f"storage nodes that do not answer: {silent} (start them again)"] if silent else []
    for stream in description.streams:
        if stream.topic == topic and not stream.is_open and not stream.final:
            what = f"log stream {stream.stream} is sealed{f' because {stream.reason}' if stream.reason else ''}"
            told.append(what + (f", next: {stream.next_step}" if stream.next_step else ""))
            break
    return "; ".join(told) or "all are sealed"


def unknown(error: Exception) -> AppendUnknown:
    why = error.message if isinstance(error, CutwaterError) else repr(error)
    failure = AppendUnknown(
        f"whether the append is in the log is not known ({why}): read the log, or use a producer, which finds out"
    )
    failure.__cause__ = error
    return failure
