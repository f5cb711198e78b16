"""How often a batch is sent, where, and what its callers are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from msgspec import field

from cutwater.client.append.sender import Shipment, Shipping
from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.errors import ClientClosed
from cutwater.core.requests import Catalog, CatalogRequest, NodeInfo, StreamInfo, TopicInfo
from cutwater.errors import AppendUnknown, CutwaterError, InvalidArgument, StreamSealed, Unavailable
from cutwater.protocol.errors import ConnectionLost
from cutwater.protocol.methods import Received
from cutwater.protocol.storage_api import AppendAnswer
from cutwater.runtime.deadlines import Deadline
from cutwater.types import (
    GLSN,
    LLSN,
    Ack,
    Batch,
    CutTime,
    Epoch,
    EventTime,
    LogStreamId,
    Revision,
    Sequence,
    StorageNodeId,
    TopicId,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

TOPIC = TopicInfo(TopicId(1), "t", GLSN(1), 1, 1)
NODE = StorageNodeId(1)


def stream(number: int, *, is_open: bool = True) -> StreamInfo:
    return StreamInfo(
        LogStreamId(number),
        TopicId(1),
        Epoch(1),
        is_open,
        False,
        (NODE,),
        (NODE,),
        LLSN(0),
        GLSN(0),
        GLSN(0),
        CutTime(0),
    )


class Head:
    """The only storage node. ``answers`` are what it says to the next batches, None for nothing at all; otherwise it
    takes them. ``breaks`` is raised in the middle of sending."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.answers: list[CutwaterError | None] = []
        self.breaks: Exception | None = None
        self.cancelled: list[int] = []

    def begin(self, method: Any, arguments: Any, body: Any, *, timeout_ms: int, on_answer: Callable[..., None]) -> int:
        if self.breaks is not None:
            raise self.breaks
        self.taken.append(arguments.stream)
        answer = self.answers.pop(0) if self.answers else Received(self._ack(arguments.stream), b"")
        if answer is not None:
            asyncio.get_running_loop().call_soon(on_answer, answer)
        return len(self.taken)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def _ack(self, stream: LogStreamId) -> AppendAnswer:
        return AppendAnswer(Ack(GLSN(1), LLSN(1), stream, 1), Sequence(0), Revision(1))


class Cluster:
    """Both the metadata repository and the connections to storage nodes."""

    trouble = ""

    def __init__(self, *streams: StreamInfo) -> None:
        self.head, self.is_connected, self.dropped = Head(), True, 0
        self.streams = streams
        self.catalogs = Catalogs(cast(Any, self))
        self.catalogs.take(self.catalog())
        self.shipping = Shipping(self.catalogs, cast(Any, self))

    def catalog(self) -> Catalog:
        nodes = (NodeInfo(NODE, "somewhere:1"),)
        return Catalog(Revision(1), GLSN(0), CutTime(0), (TOPIC,), self.streams, nodes)

    async def ask(self, request: object, answer: type, *, timeout_ms: int) -> Catalog:
        if not isinstance(request, CatalogRequest):
            raise Unavailable("it only knows the catalog")
        return self.catalog()

    def ready(self, address: str) -> Any:
        return self.head if self.is_connected else None

    async def connection(self, address: str, deadline: Deadline) -> Any:
        await asyncio.sleep(0)
        self.is_connected = True
        return self.head

    def drop(self, address: str, connection: Any) -> None:
        self.dropped += 1
        self.is_connected = False

    def unreachable(self, stream: LogStreamId, node: StorageNodeId) -> None:
        pass


@asynccontextmanager
async def running(*streams: StreamInfo) -> AsyncIterator[Cluster]:
    cluster = Cluster(*streams)
    yield cluster
    await cluster.shipping.close()
    await cluster.catalogs.close()


class Batched(Shipment, eq=False, kw_only=True):
    outcomes: list[Ack | Exception] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    fails_at: int = 0
    """Which of the attempts cannot be encoded."""

    def load(self) -> Batch:
        self.loads.append(1)
        if len(self.loads) == self.fails_at:
            raise MemoryError("there is none")
        return Batch(1, b"x", 0, EventTime(0), EventTime(0))

    def end(self, outcome: Ack | Exception) -> None:
        self.outcomes.append(outcome)


def batch(*, seconds: float = 30.0, pin: int | None = None, fails_at: int = 0) -> Batched:
    where = None if pin is None else LogStreamId(pin)
    return Batched(topic=TOPIC, pin=where, deadline=Deadline(seconds), fails_at=fails_at)


async def outcome(cluster: Cluster, sent: Batched) -> Ack | Exception:
    cluster.shipping.send(sent)
    async with asyncio.timeout(20):
        while not sent.outcomes:
            await asyncio.sleep(0.001)
    (found,) = sent.outcomes
    return found


async def test_log_streams_take_turns_and_nothing_is_sent_twice() -> None:
    async with running(stream(1), stream(2)) as cluster:
        for _ in range(4):
            assert isinstance(await outcome(cluster, batch()), Ack)
        assert sorted(cluster.head.taken) == [1, 1, 2, 2]


async def test_what_was_refused_is_tried_again_elsewhere_unless_that_is_hopeless() -> None:
    async with running(stream(1), stream(2)) as cluster:
        cluster.head.answers = [StreamSealed("sealed")]
        assert isinstance(await outcome(cluster, batch()), Ack)
        first, second = cluster.head.taken
        assert first != second
        hopeless = InvalidArgument("malformed")
        cluster.head.answers = [hopeless]
        assert await outcome(cluster, batch()) is hopeless
        assert len(cluster.head.taken) == 3


async def test_what_is_not_connected_is_connected_first() -> None:
    async with running(stream(1)) as cluster:
        cluster.is_connected = False
        sent = batch()
        assert isinstance(await outcome(cluster, sent), Ack)
        assert len(sent.loads) == 1


async def test_a_connection_that_takes_no_more_calls_is_replaced() -> None:
    async with running(stream(1)) as cluster:
        cluster.head.breaks = ConnectionLost("it is closing", outcome_unknown=False)
        cluster.shipping.send(sent := batch())
        assert (cluster.dropped, sent.may_have_arrived) == (1, False)
        cluster.head.breaks = None
        async with asyncio.timeout(20):
            while not sent.outcomes:
                await asyncio.sleep(0.001)
        assert cluster.head.taken == [1]


async def test_what_may_have_arrived_is_not_sent_again() -> None:
    async with running(stream(1), stream(2)) as cluster:
        cluster.head.answers = [ConnectionLost("gone", outcome_unknown=True)]
        assert isinstance(await outcome(cluster, batch()), AppendUnknown)
        cluster.head.answers = [ConnectionLost("gone", outcome_unknown=False)]
        assert isinstance(await outcome(cluster, batch()), Ack)
        assert len(cluster.head.taken) == 3


@pytest.mark.parametrize("refusals", [0, 1])
async def test_what_nobody_foresaw_is_told(refusals: int) -> None:
    """At the first attempt, or at the second one."""
    async with running(stream(1)) as cluster:
        cluster.head.answers = [StreamSealed("sealed")] * refusals
        assert isinstance(await outcome(cluster, batch(fails_at=1 + refusals)), MemoryError)
    async with running(stream(1)) as cluster:
        cluster.is_connected = not refusals
        cluster.head.breaks = OSError("gone")
        found = await outcome(cluster, batch())
        assert isinstance(found, AppendUnknown)
        assert "OSError('gone')" in str(found)


async def test_without_an_open_log_stream_it_waits_until_its_time_is_up() -> None:
    async with running(stream(1, is_open=False)) as cluster:
        found = await outcome(cluster, batch(seconds=0.05))
        assert isinstance(found, Unavailable)
        assert "it only knows the catalog" in str(found)
        assert not cluster.head.taken


async def test_closing_and_cancelling_end_what_is_under_way() -> None:
    async with running(stream(1)) as cluster:
        cluster.head.answers = [None, None]
        in_flight, cancelled, waits = batch(), batch(), batch(pin=9)
        for sent in (in_flight, cancelled, waits):
            cluster.shipping.send(sent)
        cluster.shipping.cancel(cancelled)
        cluster.shipping.cancel(cancelled)
        assert cluster.head.cancelled == [2]
        await cluster.shipping.close()
        assert [type(found) for found in (*in_flight.outcomes, *waits.outcomes)] == [AppendUnknown, ClientClosed]
        assert cluster.head.cancelled == [2, 1]
        assert not cancelled.outcomes
