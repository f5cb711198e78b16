"""How a client asks the metadata repository: what it leaves behind, and what it says when its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from cutwater.client.cluster import metadata_client
from cutwater.client.cluster.metadata_client import Repository
from cutwater.core.order.options import OrderOptions
from cutwater.core.requests import Answer, CursorAt, ReadCursorRequest, Request
from cutwater.errors import DeadlineExceeded, InvalidArgument, Unavailable
from cutwater.protocol.access import STORAGE_NODE
from cutwater.protocol.errors import MalformedFrame
from cutwater.protocol.metadata_api import ASK
from cutwater.types import GLSN, MILLISECOND, ClusterId
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.listen.server import Listener, listen

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

CLUSTER = ClusterId(7)
REQUEST = ReadCursorRequest("c")
ANSWER = CursorAt(GLSN(5))


@asynccontextmanager
async def asking(answer: Callable[[], Awaitable[Answer]]) -> AsyncIterator[tuple[Repository, Listener]]:
    """A client of two addresses that are one and the same metadata node."""

    async def handle(call: Call[Request]) -> Answer:
        return await answer()

    methods = Methods()
    methods.answers(ASK)(handle)
    listener = await listen(Endpoint(CLUSTER, "metadata", "1", methods), "127.0.0.1", 0)
    asks = Repository(Endpoint(CLUSTER, "client"), (f"127.0.0.1:{listener.port}",) * 2)
    try:
        yield asks, listener
    finally:
        asks.close()
        await listener.close(timeout_ms=500)


async def test_connections_that_are_left_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_client, "ATTEMPT_MS_MAX", 50)
    count = 0

    async def answer() -> Answer:
        nonlocal count
        count += 1
        if count < 4:
            await asyncio.Event().wait()
        return ANSWER

    async with asking(answer) as (asks, listener):
        assert await asks.ask(REQUEST, CursorAt, timeout_ms=20_000) == ANSWER
        async with asyncio.timeout(20):
            while asks._left or len(listener.gate.connections) > 1:
                await asyncio.sleep(0.01)


async def test_a_connection_that_is_left_still_answers_what_was_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_client, "ATTEMPT_MS_MAX", 50)
    gate, count = asyncio.Event(), 0

    async def answer() -> Answer:
        nonlocal count
        count += 1
        if count <= 2:
            await gate.wait()
        return ANSWER

    async with asking(answer) as (asks, _):
        patient = asyncio.create_task(asks.ask(REQUEST, CursorAt, timeout_ms=20_000, idempotent=False))
        while not count:
            await asyncio.sleep(0.01)
        assert await asks.ask(REQUEST, CursorAt, timeout_ms=20_000) == ANSWER
        assert len(asks._left) == 1
        gate.set()
        assert await patient == ANSWER


async def test_when_the_time_is_up_the_last_reason_is_told() -> None:
    count = 0

    async def answer() -> Answer:
        nonlocal count
        count += 1
        if count == 1:
            raise Unavailable("the disk of storage node 3 is on fire: ask again")
        await asyncio.Event().wait()
        raise AssertionError

    async with asking(answer) as (asks, _):
        with pytest.raises(DeadlineExceeded, match="storage node 3 is on fire"):
            await asks.ask(REQUEST, CursorAt, timeout_ms=300)


async def test_a_leader_explains_before_a_client_takes_it_for_dead() -> None:
    assert OrderOptions().publish_wait_us < metadata_client.ATTEMPT_MS_MAX * MILLISECOND


async def test_whoever_asks_a_storage_node_is_told_so() -> None:
    listener = await listen(Endpoint(CLUSTER, STORAGE_NODE, "1", Methods()), "127.0.0.1", 0)
    asks = Repository(Endpoint(CLUSTER, "client"), (f"127.0.0.1:{listener.port}",))
    try:
        with pytest.raises(InvalidArgument, match=f"127.0.0.1:{listener.port} is a storage node, and clients ask meta"):
            await asks.ask(REQUEST, CursorAt, timeout_ms=5_000)
    finally:
        asks.close()
        await listener.close(timeout_ms=500)


async def test_whoever_asks_something_else_is_told_so() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/html\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    asks = Repository(Endpoint(CLUSTER, "client"), (address,))
    try:
        with pytest.raises(MalformedFrame, match=f"{address} is no Cutwater server"):
            await asks.ask(REQUEST, CursorAt, timeout_ms=5_000)
    finally:
        asks.close()
        server.close()
        await server.wait_closed()
