"""Streams with credit, the same on every network."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from wire_kit import (
    ASK,
    COUNT,
    ECHO,
    FOREVER,
    Answer,
    Question,
    Server,
    drain,
    pair,
)

from cutwater.errors import (
    DeadlineExceeded,
    ResourceExhausted,
    Trimmed,
    Unavailable,
)
from cutwater.protocol.errors import ConnectionLost, MalformedFrame
from cutwater.protocol.methods import StreamMethod
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.calls.streams import SharedCredit, StreamSender
from cutwater.wire.options import WireOptions


async def test_a_stream_from_beginning_to_end(network: Any) -> None:
    _, connection, _ = await pair(network)
    async with connection.open_stream(COUNT, 500) as stream:
        values = [item.value async for item in stream]
    assert values == list(range(500))
    assert connection.snapshot().calls == 0


async def test_a_stream_ends_with_the_error_of_its_handler(network: Any) -> None:
    _, connection, _ = await pair(network)
    values: list[int] = []
    with pytest.raises(Trimmed):
        await drain(connection.open_stream(COUNT, 13), values)
    assert values == list(range(13))


async def test_a_receiver_that_takes_nothing_is_sent_no_more_than_its_room(network: Any) -> None:
    server, connection, _ = await pair(network)
    room = SharedCredit(5, 100_000)
    async with connection.open_stream(FOREVER, None, credit=room) as stream:
        await server.saw("begun")
        await connection.call(ECHO, None, timeout_ms=5_000)
        assert stream.queued[0] == 5
        assert stream._member.backlog_items in (0, 1)
        taken = [await stream.receive(timeout_ms=2_000) for _ in range(12)]
        assert [item.value for item in taken if item] == list(range(12))
        assert stream.queued[0] <= 5
    await server.saw("begun", "ended after 1")
    assert room.pool.free_items == 5
    assert room.pool.free_bytes == 100_000


async def test_an_item_larger_than_the_room_is_let_through(network: Any) -> None:
    _, connection, _ = await pair(network)
    async with connection.open_stream(COUNT, 4, credit=SharedCredit(4, 600)) as stream:
        assert [item.value async for item in stream] == [0, 1, 2, 3]


async def test_streams_share_their_room(network: Any) -> None:
    server = Server()
    listener = await network.listen(server.methods)
    room = SharedCredit(16, 16_000, 4)
    connections = [await network.connect(listener) for _ in range(2)]
    streams = [connection.open_stream(COUNT, 100, credit=room) for connection in connections for _ in range(2)]

    async def consume(stream: Any) -> list[int]:
        values = []
        async for item in stream:
            values.append(item.value)
            assert sum(one.queued[0] for one in streams) <= 16
            assert sum(one.queued[1] for one in streams) <= 16_000
        return values

    assert await asyncio.gather(*(consume(stream) for stream in streams)) == [list(range(100))] * 4
    assert (room.pool.free_items, room.pool.free_bytes) == (16, 16_000)


async def test_an_item_of_another_type_ends_its_stream_and_gives_its_room_back(network: Any) -> None:
    _, connection, _ = await pair(network)
    room = SharedCredit(8, 8_000, 2)
    with pytest.raises(MalformedFrame, match=r"count: the answer is not as expected"):
        await connection.open_stream(StreamMethod[int, str]("count", int, str), 3, credit=room).receive(
            timeout_ms=2_000
        )
    values: list[int] = []
    await drain(connection.open_stream(COUNT, 20, credit=room), values)
    assert values == list(range(20))
    assert (room.pool.free_items, room.pool.free_bytes) == (8, 8_000)


async def test_a_stream_that_nobody_reads_holds_up_no_other_on_its_connection(network: Any) -> None:
    server, connection, listener = await pair(network)
    stuck = connection.open_stream(FOREVER, None, credit=SharedCredit(4, 10_000))
    await server.saw("begun")
    values: list[int] = []
    await drain(connection.open_stream(COUNT, 2_000), values)
    assert values == list(range(2_000))
    assert (await connection.call(ASK, Question("a", 1), timeout_ms=5_000)).value == Answer("A")
    assert stuck.queued[0] == 4
    (served,) = listener.gate.connections
    assert served.snapshot().send_bytes == 0, "what waits for the stuck one waits in its handler"
    assert server.events == ["begun"]
    stuck.cancel()
    await server.saw("begun", "ended after 1")


async def test_waiting_for_an_item_has_a_deadline_if_wanted(network: Any) -> None:
    methods = Methods()

    @methods.streams_to(FOREVER)
    async def nothing(call: Call[None], out: StreamSender[int]) -> None:
        await asyncio.sleep(60)

    connection = await network.connect(await network.listen(methods))
    async with connection.open_stream(FOREVER, None) as stream:
        with pytest.raises(DeadlineExceeded):
            await stream.receive(timeout_ms=30)
        assert stream.receive_nowait() is None
    with pytest.raises(DeadlineExceeded, match="time of this stream"):
        await connection.open_stream(FOREVER, None, timeout_ms=50).receive()


async def test_a_handler_whose_receiver_takes_nothing_gives_up(network: Any) -> None:
    server, connection, _ = await pair(network, options=WireOptions(stall_ms_max=50))
    stream = connection.open_stream(FOREVER, None, credit=SharedCredit(2, 1_000))
    await server.saw("begun", "ended after 1")
    assert [(await stream.receive(timeout_ms=1_000)).value for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
    with pytest.raises(ResourceExhausted, match="took nothing for 50 ms"):
        await stream.receive(timeout_ms=1_000)


async def test_a_close_ends_streams(network: Any) -> None:
    server, connection, listener = await pair(network)
    stream = connection.open_stream(FOREVER, None)
    await stream.receive(timeout_ms=2_000)
    await listener.close(timeout_ms=5_000)
    with pytest.raises(Unavailable, match="closing"):
        await drain(stream, [])
    assert server.events[-1] == "ended after 1"


async def test_streams_of_the_side_that_closes_do_not_end_as_if_they_were_complete(network: Any) -> None:
    server, connection, _ = await pair(network)
    stream = connection.open_stream(FOREVER, None)
    await stream.receive(timeout_ms=2_000)
    await connection.close()
    with pytest.raises(ConnectionLost, match="closing"):
        await drain(stream, [])
    await server.saw("begun", "ended after 1")
