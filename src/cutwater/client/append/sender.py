"""Sends appends without a producer: each has a definite outcome, and none is ever sent twice.

An append is *acknowledged*, *failed* (it will never appear), or *unknown* (``AppendUnknown``). As long as a failure is
certain, because nothing was sent or the storage node refused the batch, the same batch may be tried again, on another
log stream too, until the caller's deadline. Once a batch may have arrived, it is not sent again, unless it turns out
that it certainly was not taken: see ``client.append.pending``.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from math import inf
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
    QuotaExceeded,
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
from cutwater.runtime import system
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


class Shipment(Struct, eq=False, kw_only=True):
    """A batch on its way to the log stream ``pin``, or to any open one of the topic.

    ``may_have_arrived`` decides between *failed* and *unknown* at the deadline, and ``trouble`` says why the batch was
    not appended so far. ``failed`` are the log streams that did not take it. ``is_slow``: its head has not answered for
    a while."""

    topic: TopicInfo
    pin: LogStreamId | None
    deadline: Deadline
    if_llsn: LLSN | None = None
    may_have_arrived: bool = False
    trouble: str = ""
    failed: frozenset[LogStreamId] = frozenset()
    is_slow: bool = False
    wait_seconds: float = RETRY_SECONDS_MIN
    """How long to wait before the next attempt."""
    held_until: float = inf
    """When a quota leaves room at the first of the log streams that failed, by the time of the event loop."""
    stop: Callable[[], object] | None = None
    """Gives the present attempt up."""

    @abstractmethod
    def load(self) -> Batch:
        """Encode the batch, anew for each attempt: an append whose caller was meanwhile told that nothing was appended
        must not be in it any more."""

    @abstractmethod
    def end(self, outcome: Ack | Exception) -> None:
        """Take the outcome, once. An exception that is no ``CutwaterError`` is unexpected."""

    def note_slow(self) -> None:
        """Called when ``is_slow`` begins."""

    def note_quota(self, error: QuotaExceeded) -> None:
        """Note that a quota held it back. The next attempt follows."""


class HeadCalls:
    """Sends messages to the heads of log streams."""

    def __init__(self, catalogs: Catalogs, nodes: Nodes) -> None:
        self._catalogs, self._nodes = catalogs, nodes

    def ready(self, info: StreamInfo) -> Connection | None:
        """Return the connection to the head of a log stream, if there is one that can be used at once."""
        address = self._catalogs.view.addresses.get(info.chain[0])
        return None if address is None else self._nodes.ready(address)

    def post(
        self,
        connection: Connection,
        info: StreamInfo,
        batch: Batch,
        timeout_ms: int,
        on_answer: Callable[[Received[AppendAnswer] | CutwaterError], None],
        if_llsn: LLSN | None = None,
    ) -> Callable[[], None]:
        """Send a batch to the head of a log stream once. Returns a function that cancels the call. If this raises a
        ``CutwaterError``, nothing was sent."""
        arguments = AppendArguments(info.stream, info.epoch, structs.replace(batch, body=b""), if_llsn)
        try:
            number = connection.begin(APPEND, arguments, batch.body, timeout_ms=timeout_ms, on_answer=on_answer)
        except ConnectionLost:
            # The connection takes no more calls, because its peer is closing: the next attempt makes another one.
            self._nodes.drop(self._catalogs.view.address(info.chain[0]), connection)
            raise
        return partial(connection.cancel, number)


class Shipping:
    """Sends batches to the heads of log streams."""

    def __init__(self, catalogs: Catalogs, nodes: Nodes) -> None:
        self._catalogs, self._nodes = catalogs, nodes
        self._heads, self._pending = HeadCalls(catalogs, nodes), PendingAppends(catalogs, nodes)
        self._loop = asyncio.get_running_loop()
        self._random = system.random()
        self._turns: dict[TopicId, int] = {}
        self._reasons: dict[TopicId, str] = {}
        """Why a topic took no appends when the leader was last asked."""
        self._under_way: dict[Shipment, None] = {}
        self._retrying: set[asyncio.Task[None]] = set()

    def send(self, shipment: Shipment) -> None:
        """Send a batch: at once if its head is connected, without a task, and otherwise as soon as possible. Repeat
        this as long as the batch was certainly not taken and there is time."""
        self._under_way[shipment] = None
        try:
            info = self._choose(shipment)
            connection = self._heads.ready(info) if isinstance(info, StreamInfo) else None
            if isinstance(info, StreamInfo) and connection is not None:
                self._dispatch(shipment, info, connection)
                self._next_turn(shipment)
                return
        except CutwaterError:
            # Nothing was sent, so the next attempt will meet the same error and handle it.
            pass
        except Exception as error:
            self._end(shipment, error)
            return
        self._retry(shipment, None)

    def cancel(self, shipment: Shipment) -> None:
        """Give a shipment up. It gets no outcome any more."""
        if shipment in self._under_way:
            self._under_way.pop(shipment, None)
            stop, shipment.stop = shipment.stop, None
            if stop is not None:
                stop()

    async def close(self) -> None:
        for shipment in list(self._under_way):
            self.cancel(shipment)
            shipment.end(_interrupted(shipment))
        await asyncio.gather(*self._retrying, return_exceptions=True)
        self._pending.close()

    def has_way_around(self, topic: TopicInfo, pin: LogStreamId | None) -> bool:
        """Return whether an append that names no log stream can go to one whose head is not known to be silent."""
        streams = self._catalogs.view.streams_of(topic.topic) if pin is None else ()
        return any(info.is_open and info.chain and not self._pending.is_avoided(info.stream) for info in streams)

    # One attempt.

    def _dispatch(self, shipment: Shipment, info: StreamInfo, connection: Connection) -> None:
        """Load and send a batch. There is no await in between, so no append in it can be given up meanwhile."""

        def answered(outcome: Received[AppendAnswer] | CutwaterError) -> None:
            self._pending.discard(pending)
            if isinstance(outcome, Received):
                self._pending.taken(outcome.value)
                self._end(shipment, outcome.value.ack)
            else:
                if isinstance(outcome, ConnectionLost):
                    self._nodes.drop(address, connection)
                self._go_on(shipment, self._failed(shipment, info, outcome))

        def settled(error: CutwaterError) -> None:
            cancel()
            shipment.may_have_arrived = not is_definite(error)
            self._go_on(shipment, error)

        def slow() -> None:
            shipment.is_slow = True
            shipment.note_slow()

        def stop() -> None:
            self._pending.discard(pending)
            cancel()

        batch, address = shipment.load(), self._catalogs.view.address(info.chain[0])
        # If sending fails halfway, it is not known what has left.
        shipment.may_have_arrived, shipment.is_slow = True, False
        pending = Pending(info, self._pending.known_end(info), self._loop.time(), settled, slow)
        self._pending.add(pending)
        try:
            cancel = self._heads.post(connection, info, batch, shipment.deadline.left_ms(), answered, shipment.if_llsn)
        except BaseException as error:
            self._pending.discard(pending)
            shipment.may_have_arrived = not isinstance(error, CutwaterError)
            raise
        shipment.stop = stop

    def _failed(self, shipment: Shipment, info: StreamInfo, error: CutwaterError) -> CutwaterError:
        """Return the error that the callers get when an attempt failed."""
        if isinstance(error, ConnectionLost):
            self._nodes.unreachable(info.stream, info.chain[0])
        elif isinstance(error, DeadlineExceeded):
            self._pending.blame(info)
        if shipment.may_have_arrived and not is_definite(error):
            return unknown(error)
        shipment.may_have_arrived = False
        shipment.failed |= {info.stream}
        return error

    def _go_on(self, shipment: Shipment, error: CutwaterError) -> None:
        if may_retry(shipment, error):
            self._retry(shipment, error)
        else:
            self._end(shipment, error)

    def _end(self, shipment: Shipment, outcome: Ack | Exception) -> None:
        if shipment not in self._under_way:
            return
        self._under_way.pop(shipment, None)
        shipment.stop = None
        if not isinstance(outcome, Ack | CutwaterError) and shipment.may_have_arrived:
            # An unexpected error, such as no memory.
            outcome = unknown(outcome)
        shipment.end(outcome)

    # Further attempts.

    def _retry(self, shipment: Shipment, error: CutwaterError | None) -> None:
        if shipment in self._under_way:
            task = self._loop.create_task(self._deliver(shipment, error))
            self._retrying.add(task)
            task.add_done_callback(self._retrying.discard)
            shipment.stop = task.cancel

    async def _deliver(self, shipment: Shipment, error: CutwaterError | None) -> None:
        """Make further attempts until the batch is sent. ``error``: how the last one failed."""
        try:
            if shipment.pin is not None and shipment.pin not in self._catalogs.view.streams:
                await self._catalogs.fresh(shipment.deadline)
            while True:
                if error is not None:
                    shipment.trouble = error.message
                    if isinstance(error, QuotaExceeded):
                        shipment.note_quota(error)
                        await self._wait_for_quota(shipment, error)
                    elif shipment.deadline.left <= shipment.wait_seconds:
                        raise error
                    else:
                        await self._look_again(shipment, error)
                        shipment.wait_seconds = min(shipment.wait_seconds * 2, RETRY_SECONDS_MAX)
                info = self._choose(shipment)
                if isinstance(info, CutwaterError):
                    error = info
                    continue
                self._next_turn(shipment)
                try:
                    connection = self._heads.ready(info) or await self._connected(shipment, info)
                    self._dispatch(shipment, info, connection)
                    return
                except CutwaterError as caught:
                    error = self._failed(shipment, info, caught)
                    if not may_retry(shipment, error):
                        raise
        except Exception as failure:
            self._end(shipment, failure)
        except BaseException:
            self._end(shipment, _interrupted(shipment))
            raise

    async def _connected(self, shipment: Shipment, info: StreamInfo) -> Connection:
        """Connect to the head, unless the log stream gets another head meanwhile. If connecting is slow, give up in
        favour of another log stream, if there is one. Nothing is sent here."""
        given_up: asyncio.Future[CutwaterError] = self._loop.create_future()
        address = self._catalogs.view.address(info.chain[0])

        def give_up(error: CutwaterError) -> None:
            if not given_up.done():
                given_up.set_result(error)

        def slow() -> None:
            if self.has_way_around(shipment.topic, shipment.pin):
                give_up(Unavailable(f"storage node {info.chain[0]} at {address} does not answer"))

        pending = Pending(info, None, self._loop.time(), give_up, slow)
        self._pending.add(pending)
        connecting = self._loop.create_task(self._nodes.connection(address, shipment.deadline))
        try:
            either: tuple[asyncio.Future[Any], ...] = connecting, given_up
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            raise given_up.result()
        finally:
            self._pending.discard(pending)
            connecting.cancel()

    def _choose(self, shipment: Shipment) -> StreamInfo | CutwaterError:
        """Choose an open log stream, or return why there is none now. Raises if there never will be one. Log streams
        take turns, and a turn lasts until ``_next_turn``: if a batch cannot be sent at once, the next attempt connects
        to the same log stream, instead of going to the next one, which may have a connection already."""
        view, topic, pin, failed = self._catalogs.view, shipment.topic, shipment.pin, shipment.failed
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

    def _next_turn(self, shipment: Shipment) -> None:
        if shipment.pin is None:
            self._turns[shipment.topic.topic] += 1

    async def _wait_for_quota(self, shipment: Shipment, error: QuotaExceeded) -> None:
        """Try the other log streams, since each storage node has its own share of a quota. Then wait until one of them
        leaves room, or raise the error if that is too late."""
        now = self._loop.time()
        shipment.held_until = min(shipment.held_until, now + error.retry_after)
        if shipment.pin is None:
            streams = self._catalogs.view.streams_of(shipment.topic.topic)
            if any(info.is_open and info.chain and info.stream not in shipment.failed for info in streams):
                return
        wait, shipment.held_until = shipment.held_until - now, inf
        shipment.failed = frozenset()
        if shipment.deadline.left <= wait:
            raise error
        await shipment.deadline.pause(max(wait, 0.0))

    async def _look_again(self, shipment: Shipment, error: CutwaterError) -> None:
        """Wait a little and fetch the catalog again; it may have changed by then."""
        topic, wait, deadline = shipment.topic, shipment.wait_seconds, shipment.deadline
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


def may_retry(shipment: Shipment, error: CutwaterError) -> bool:
    """Return whether a batch may be sent again. ``error`` is the one that the callers would get."""
    return not shipment.may_have_arrived and may_go_elsewhere(error)


def _interrupted(shipment: Shipment) -> CutwaterError:
    if shipment.may_have_arrived:
        return AppendUnknown(
            "the client was closed before an answer came: whether the append is in the log is not known"
        )
    return ClientClosed("the client was closed before this append was sent")


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
