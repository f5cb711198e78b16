"""Peers that misbehave: what they cost is bounded, they are told what was wrong, and others notice nothing."""

from __future__ import annotations

import asyncio
import os
import random
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import msgpack
from wire_kit import OF_BYTES

from cutwater.errors import CutwaterError, DeadlineExceeded, ProtocolViolation, ResourceExhausted
from cutwater.protocol.errors import ConnectionLost, FrameTooLarge, MalformedFrame, from_wire, to_wire
from cutwater.protocol.methods import Method, Notice, StreamMethod
from cutwater.wire.calls.handlers import LATER, Later, Methods, ReplyWithBody
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.calls.outbox import FLUSH_BYTES
from cutwater.wire.calls.streams import SharedCredit, StreamSender
from cutwater.wire.codec import encode_frame
from cutwater.wire.connection import Connection
from cutwater.wire.messages import FIXED, FrameKind, GoAway, PeerLimits
from cutwater.wire.options import ListenerOptions, WireOptions
from cutwater.wire.states import ConnectionState
from tests.memory_network import Faults

ECHO = Method[None, None]("echo", None, None)
GIVE = Method[int, None]("give", int, None)
GIVE_IN_A_TASK = Method[int, None]("give_in_a_task", int, None)
HOLD = Method[None, None]("hold", None, None)
FLOOD = StreamMethod[int, None]("flood", int, None)
TELL = Notice[int]("tell", int)
KIB = 1024
GENEROUS = PeerLimits(1 << 24, 1 << 20, 10_000, 1 << 30)
CURT = WireOptions(linger_ms_max=50)


class Server:
    def __init__(self) -> None:
        self.methods = methods = Methods()
        self.held: list[Call[None]] = []
        self.flooded = 0
        methods.answers(ECHO)(lambda call: ReplyWithBody(None, call.body))
        methods.answers(GIVE)(lambda call: ReplyWithBody(None, bytes(call.argument)))
        methods.answers(GIVE_IN_A_TASK)(self.give_in_a_task)
        methods.answers(HOLD)(self.hold)
        methods.streams_to(FLOOD)(self.flood)

    async def give_in_a_task(self, call: Call[int]) -> ReplyWithBody[None]:
        await asyncio.sleep(0.01)
        return ReplyWithBody(None, bytes(call.argument))

    def hold(self, call: Call[None]) -> Later:
        self.held.append(call)
        call.on_cancel(call.answer)
        return LATER

    async def flood(self, call: Call[int], out: StreamSender[None]) -> None:
        while True:
            await out.send(None, bytes(call.argument))
            self.flooded += 1


def request(number: int, method: str, argument: Any = None, body: bytes = b"", timeout_ms: int = 60_000) -> bytes:
    return encode_frame(FrameKind.REQUEST, number, msgpack.encode((method, timeout_ms, argument)), body)


async def greeted(network: Any, listener: Any, *, reading: bool = True) -> Any:
    """A peer that has greeted and will misbehave from now on."""
    before = listener.gate.snapshot().connections
    raw = await network.raw(listener, reading=reading)
    raw.send(encode_frame(FrameKind.HELLO, 0, msgpack.encode(("cutwater", 1, 1, 1, "raw", "r", "", GENEROUS))))
    async with asyncio.timeout(5):
        while listener.gate.snapshot().connections == before:
            await asyncio.sleep(0.002)
    return raw


def served_by(listener: Any) -> Connection:
    """The listener's end of the connection of the peer that misbehaves."""
    (connection,) = [one for one in listener.gate.connections if one.peer is not None and one.peer.role == "raw"]
    return connection


@asynccontextmanager
async def undisturbed(connection: Connection) -> AsyncIterator[None]:
    """Calls of someone else go on all the time, and each is answered before its deadline."""
    answered = 0

    async def work() -> None:
        nonlocal answered
        while True:
            received = await connection.call(ECHO, None, b"x" * 100, timeout_ms=5_000)
            assert len(received.body) == 100
            answered += 1
            await asyncio.sleep(0.002)

    task = asyncio.create_task(work())
    try:
        yield
        enough = answered + 5
        async with asyncio.timeout(10):
            while answered < enough and not task.done():
                await asyncio.sleep(0.002)
    finally:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ----------------------------------------------------------------------------------------------------- slow readers


async def test_a_reader_that_does_not_read_stops_only_itself(network: Any) -> None:
    """It asks for 200 MB and takes nothing: after a megabyte or so it is not even listened to."""
    options = WireOptions(send_high_bytes=256 * KIB, send_low_bytes=64 * KIB)
    server = Server()
    listener = await network.listen(server.methods, options=options)
    friend = await network.connect(listener)
    raw = await greeted(network, listener, reading=False)
    served = served_by(listener)
    most = 0
    async with undisturbed(friend):
        raw.send(b"".join(request(i, "give", 100 * KIB) for i in range(1, 2_001)))
        for _ in range(60):
            await asyncio.sleep(0.005)
            snapshot = served.snapshot()
            most = max(most, snapshot.send_bytes + snapshot.receive_bytes)
    # What may be there: up to the mark, what a flush adds to it, one answer more, and what was received already.
    assert options.send_high_bytes < most < options.send_high_bytes + FLUSH_BYTES + 100 * KIB + 2 * 64 * KIB
    assert served.snapshot().served == 0
    before = served.snapshot().frames
    raw.transport.resume_reading()
    await raw.until(lambda frames: len(frames) > before + 10)
    assert served.snapshot().frames > before, "it goes on as soon as it reads"


async def test_a_transport_that_complains_late_is_not_flooded_meanwhile(memory: Any) -> None:
    memory.faults = Faults(pauses_late=True)
    await test_a_reader_that_does_not_read_stops_only_itself(memory)


async def test_answers_that_pile_up_beyond_all_limits_end_the_connection(network: Any) -> None:
    """Handlers that are tasks have begun before any answer is there, so stopping to read does not help."""
    options = WireOptions(send_high_bytes=64 * KIB, send_low_bytes=KIB, send_bytes_max=4_096 * KIB)
    server = Server()
    listener = await network.listen(server.methods, options=options)
    friend = await network.connect(listener)
    raw = await greeted(network, listener, reading=False)
    served = served_by(listener)
    async with undisturbed(friend):
        raw.send(b"".join(request(i, "give_in_a_task", 200 * KIB) for i in range(1, 201)))
        await asyncio.wait_for(served.closed, 5)
    assert isinstance(served.error, ResourceExhausted)
    assert "wait to be read" in str(served.error)


async def test_refusals_that_are_not_read_end_the_connection(network: Any) -> None:
    """A side that asks something itself must keep reading, so a flood of requests meets refusals, and then the end."""
    options = WireOptions(
        calls_max=2, send_high_bytes=KIB, send_low_bytes=KIB, send_bytes_max=200 * KIB, frame_bytes_max=KIB,
        header_bytes_max=KIB, call_bytes_max=KIB,
    )  # fmt: skip
    server = Server()
    listener = await network.listen(server.methods, options=options)
    raw = await greeted(network, listener, reading=False)
    served = served_by(listener)
    asked = asyncio.create_task(served.call(ECHO, None, timeout_ms=60_000))
    most = number = 0
    while served.state is ConnectionState.OPEN:
        raw.send(b"".join(request(number + i, "hold") for i in range(1, 1_001)))
        number += 1_000
        await asyncio.sleep(0.002)
        most = max(most, served.snapshot().send_bytes)
        assert number < 1_000_000
    assert most < 200 * KIB + FLUSH_BYTES + 64 * KIB
    assert isinstance(served.error, ResourceExhausted)
    with pytest.raises(ConnectionLost):
        await asked


async def test_notices_to_a_peer_that_does_not_read_are_refused(network: Any) -> None:
    """They pile up to half of what may wait; then who tells is told, and the connection stays."""
    options = WireOptions(send_high_bytes=64 * KIB, send_low_bytes=KIB, send_bytes_max=2_000 * KIB, retry_ms=44)
    listener = await network.listen(Server().methods, options=options)
    friend = await network.connect(listener)
    raw = await greeted(network, listener, reading=False)
    served = served_by(listener)
    told = 0

    async def tell_until_refused() -> ResourceExhausted:
        nonlocal told
        while True:
            try:
                served.notify(TELL, told, bytes(20 * KIB))
            except ResourceExhausted as error:
                return error
            told += 1
            assert told < 10_000
            assert served.snapshot().send_bytes <= 1_000 * KIB + 2 * FLUSH_BYTES
            await asyncio.sleep(0)

    async with undisturbed(friend):
        refused = await tell_until_refused()
        assert refused.retry_ms == 44
        assert "tell: " in str(refused)
        assert "reads too slowly" in str(refused)
        with pytest.raises(ResourceExhausted, match="reads too slowly"):
            await served.call(ECHO, None, timeout_ms=1_000)
        assert served.state is ConnectionState.OPEN
        raw.transport.resume_reading()
        await raw.until(lambda frames: len(frames) > told)
        served.notify(TELL, told)
        await raw.until(lambda frames: len(frames) > told + 1)
    assert [msgpack.decode(frame.header.argument) for frame in raw.frames[1:]] == list(range(told + 1))


async def test_a_loop_that_tells_without_a_pause_is_refused_too(network: Any) -> None:
    """The transport has no turn in which to say that it cannot keep up."""
    options = WireOptions(send_high_bytes=64 * KIB, send_low_bytes=KIB, send_bytes_max=2_000 * KIB)
    listener = await network.listen(options=options)
    await greeted(network, listener, reading=False)
    served = served_by(listener)

    def tell() -> None:
        for i in range(10_000):
            served.notify(TELL, i, bytes(20 * KIB))

    with pytest.raises(ResourceExhausted, match="reads too slowly"):
        tell()
    assert served.snapshot().send_bytes <= 1_000 * KIB + 2 * FLUSH_BYTES
    assert served.state is ConnectionState.OPEN


async def test_a_call_that_is_one_too_much_ends_at_once(network: Any) -> None:
    """What waits exceeds all limits in the middle of a call: it ends with the connection, not at its deadline."""
    options = WireOptions(send_high_bytes=64 * KIB, send_low_bytes=KIB, send_bytes_max=8_000 * KIB)
    listener = await network.listen(options=options)
    await greeted(network, listener, reading=False)
    served = served_by(listener)
    calls = [asyncio.create_task(served.call(ECHO, None, bytes(15_000 * KIB), timeout_ms=60_000)) for _ in range(2)]
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert [type(outcome) for outcome in outcomes] == [ConnectionLost, ConnectionLost]
    assert isinstance(served.error, ResourceExhausted)
    assert served.snapshot().calls == 0


async def test_a_peer_that_says_why_it_goes_and_then_hangs_is_not_waited_for(network: Any) -> None:
    """It neither reads nor closes, so what was written to it can never be delivered."""
    options = WireOptions(send_high_bytes=64 * KIB, send_low_bytes=KIB, linger_ms_max=50)
    listener = await network.listen(options=options)
    raw = await greeted(network, listener, reading=False)
    served = served_by(listener)
    for i in range(500):
        served.notify(TELL, i, bytes(20 * KIB))
    raw.send(encode_frame(FrameKind.GOAWAY, 0, msgpack.encode(GoAway(to_wire(DeadlineExceeded("enough"))))))
    await asyncio.wait_for(served.closed, 5)
    assert isinstance(served.error, DeadlineExceeded)


async def test_a_stuck_reader_is_given_up(network: Any) -> None:
    options = WireOptions(send_high_bytes=64 * KIB, send_low_bytes=KIB, ping_ms=60)
    server = Server()
    listener = await network.listen(server.methods, options=options)
    raw = await greeted(network, listener, reading=False)
    served = served_by(listener)
    raw.send(b"".join(request(i, "give", 100 * KIB) for i in range(1, 200)))
    await asyncio.wait_for(served.closed, 5)
    assert isinstance(served.error, ConnectionLost)
    assert "has not been heard of" in str(served.error)


async def test_a_stream_to_a_reader_that_does_not_read_is_bounded(network: Any) -> None:
    """With credit beyond all measure, the transport still says when to stop."""
    options = WireOptions(send_high_bytes=256 * KIB, send_low_bytes=64 * KIB)
    server = Server()
    listener = await network.listen(server.methods, options=options)
    friend = await network.connect(listener)
    raw = await greeted(network, listener, reading=False)
    served = served_by(listener)
    most = 0
    async with undisturbed(friend):
        header = msgpack.encode(("flood", 0, 50 * KIB, 2**62, 2**62))
        raw.send(encode_frame(FrameKind.STREAM_OPEN, 1, header))
        for _ in range(60):
            await asyncio.sleep(0.005)
            most = max(most, served.snapshot().send_bytes)
    assert most < options.send_high_bytes + 2 * 50 * KIB + FLUSH_BYTES
    flooded = server.flooded
    await asyncio.sleep(0.02)
    assert server.flooded == flooded


# ------------------------------------------------------------------------------------------------------- bad frames


@pytest.mark.parametrize(
    ("data", "error"),
    [
        pytest.param(FIXED.pack(20 * KIB * KIB, 0, 1, FrameKind.REQUEST, 0), FrameTooLarge, id="oversized"),
        pytest.param(FIXED.pack(0, 2 * KIB * KIB, 1, FrameKind.REQUEST, 0), FrameTooLarge, id="oversized header"),
        pytest.param(b"\xff" * 1_000, MalformedFrame, id="garbage"),
        pytest.param(bytes(1_000), MalformedFrame, id="zeros"),
        pytest.param(random.Random(1).randbytes(100_000), CutwaterError, id="noise"),
    ],
)
@pytest.mark.parametrize("network", OF_BYTES, indirect=True)
async def test_bytes_that_are_no_frames_end_the_connection(network: Any, data: bytes, error: type) -> None:
    await check_ends(network, data, error)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        pytest.param(encode_frame(FrameKind.REQUEST, 1, b"\xc1"), MalformedFrame, id="broken header"),
        pytest.param(encode_frame(FrameKind.RESPONSE, 77, b"\xc0"), ProtocolViolation, id="an answer to nothing"),
        pytest.param(encode_frame(FrameKind.STREAM_END, 77, b""), ProtocolViolation, id="the end of nothing"),
        pytest.param(request(1, "hold") + request(1, "hold"), ProtocolViolation, id="a call made twice"),
    ],
)
async def test_bad_frames_end_the_connection_of_who_sent_them(network: Any, data: bytes, error: type) -> None:
    await check_ends(network, data, error)


async def check_ends(network: Any, data: bytes, error: type) -> None:
    server = Server()
    listener = await network.listen(server.methods, options=CURT)
    friend = await network.connect(listener)
    raw = await greeted(network, listener)
    async with undisturbed(friend):
        raw.send(data)
        reason = await raw.farewell()
        await asyncio.sleep(0.02)
    assert isinstance(reason, error)
    assert listener.gate.snapshot().connections == 1


async def test_what_an_oversized_frame_announces_is_not_allocated(tcp: Any) -> None:
    listener = await tcp.listen(Server().methods, options=CURT)
    raw = await greeted(tcp, listener)
    tracemalloc.start()
    try:
        raw.send(FIXED.pack(1 << 30, 0, 1, FrameKind.REQUEST, 0) + bytes(1_000))
        reason = await raw.farewell()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(reason, FrameTooLarge)
    assert (reason.size, reason.limit) == (1 << 30, 16 << 20)
    assert most < 1 << 20


async def test_noise_after_the_end_is_not_kept(network: Any) -> None:
    """Who goes on sending after it was told off is not listened to, and cut off after a while."""
    listener = await network.listen(options=WireOptions(linger_ms_max=100))
    raw = await greeted(network, listener)
    served = served_by(listener)
    raw.send(encode_frame(FrameKind.REQUEST, 1, b"\xc1"))
    async with asyncio.timeout(5):
        while not raw.gone.done():
            raw.send(bytes(10_000))
            assert served.snapshot().receive_bytes == 0
            await asyncio.sleep(0.01)
    assert served.state is ConnectionState.CLOSED


async def test_what_the_peer_need_not_know_of_is_ignored(network: Any) -> None:
    server = Server()
    listener = await network.listen(server.methods)
    raw = await greeted(network, listener)
    raw.send(encode_frame(FrameKind.CANCEL, 99, b""))
    raw.send(encode_frame(FrameKind.CREDIT, 99, msgpack.encode((1, 1))))
    raw.send(encode_frame(FrameKind.PONG, 99, b""))
    raw.send(encode_frame(FrameKind.PING, 42, b""))
    await raw.until(lambda frames: any(frame.kind == FrameKind.PONG and frame.call == 42 for frame in frames))


async def test_items_without_credit_end_the_connection(network: Any) -> None:
    """Here the listener asks the bad peer for a stream, with room for two items."""
    listener = await network.listen(options=CURT)
    raw = await greeted(network, listener)
    stream = served_by(listener).open_stream(FLOOD, 1, credit=SharedCredit(2, 1_000))
    await raw.until(lambda frames: any(frame.kind == FrameKind.STREAM_OPEN for frame in frames))
    item = encode_frame(FrameKind.STREAM_ITEM, 1, msgpack.encode((0, 0, None)))
    raw.send(item * 3)
    assert "without credit" in str(await raw.farewell())
    assert await stream.receive(timeout_ms=1_000) is not None
    assert await stream.receive(timeout_ms=1_000) is not None
    with pytest.raises(ConnectionLost):
        await stream.receive(timeout_ms=1_000)


@pytest.mark.parametrize("network", OF_BYTES, indirect=True)
async def test_a_message_that_never_ends_is_not_waited_for(network: Any) -> None:
    options = WireOptions(ping_ms=40, frame_ms_max=120, linger_ms_max=50)
    listener = await network.listen(options=options)
    raw = await greeted(network, listener)
    raw.send(FIXED.pack(1_000_000, 0, 1, FrameKind.REQUEST, 0))
    async with asyncio.timeout(5):
        while not any(frame.kind == FrameKind.GOAWAY for frame in raw.frames):
            raw.send(b"x")
            await asyncio.sleep(0.01)
    assert isinstance(await raw.farewell(), DeadlineExceeded)


# ---------------------------------------------------------------------------------------------------------- too much


async def test_more_requests_than_are_served_at_a_time_are_refused(network: Any) -> None:
    server = Server()
    listener = await network.listen(server.methods, options=WireOptions(calls_max=4, retry_ms=33))
    raw = await greeted(network, listener)
    raw.send(b"".join(request(i, "hold") for i in range(1, 11)))
    await raw.until(lambda frames: len(frames) >= 7)
    errors = [frame for frame in raw.frames if frame.kind == FrameKind.ERROR]
    assert [frame.call for frame in errors] == [5, 6, 7, 8, 9, 10]
    error = from_wire(errors[0].header)
    assert isinstance(error, ResourceExhausted)
    assert error.retry_ms == 33
    for call in server.held:
        call.answer()
    raw.send(request(11, "echo"))
    await raw.until(lambda frames: frames[-1].call == 11)
    assert raw.frames[-1].kind == FrameKind.RESPONSE
    assert served_by(listener).snapshot().refused == 6


async def test_an_honest_client_is_refused_before_it_sends(network: Any) -> None:
    server = Server()
    options = WireOptions(calls_max=4, frame_bytes_max=50_000, header_bytes_max=1_000, call_bytes_max=60_000)
    listener = await network.listen(server.methods, options=options)
    connection = await network.connect(listener)
    tasks = [asyncio.create_task(connection.call(HOLD, None, timeout_ms=5_000)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="4 calls are on their way"):
        await connection.call(ECHO, None, timeout_ms=1_000)
    async with asyncio.timeout(5):
        while len(server.held) < 4:
            await asyncio.sleep(0.002)
    for call in server.held:
        call.answer()
    await asyncio.gather(*tasks)
    large = asyncio.create_task(connection.call(HOLD, None, bytes(40_000), timeout_ms=5_000))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="bytes of requests are on their way"):
        await connection.call(ECHO, None, bytes(40_000), timeout_ms=1_000)
    async with asyncio.timeout(5):
        while len(server.held) < 5:
            await asyncio.sleep(0.002)
    server.held[4].answer()
    await large
    assert served_snapshot(listener).refused == 0


def served_snapshot(listener: Any) -> Any:
    (connection,) = listener.gate.connections
    return connection.snapshot()


async def test_more_bytes_than_fit_are_passed_over_and_refused(network: Any) -> None:
    """The second large request is refused by its first bytes, and what follows it is served."""
    server = Server()
    options = WireOptions(frame_bytes_max=600 * KIB, header_bytes_max=KIB, call_bytes_max=700 * KIB)
    listener = await network.listen(server.methods, options=options)
    raw = await greeted(network, listener)
    served = served_by(listener)
    raw.send(request(1, "hold", None, bytes(500 * KIB)))
    async with asyncio.timeout(5):
        while not server.held:
            await asyncio.sleep(0.002)
    raw.send(request(2, "hold", None, bytes(500 * KIB)) + request(3, "echo", None, b"after"))
    most = 0
    async with asyncio.timeout(5):
        while len(raw.frames) < 3:
            most = max(most, served.snapshot().receive_bytes)
            await asyncio.sleep(0)
    assert [(frame.kind, frame.call) for frame in raw.frames[1:]] == [(FrameKind.ERROR, 2), (FrameKind.RESPONSE, 3)]
    assert isinstance(from_wire(raw.frames[1].header), ResourceExhausted)
    assert most < 100 * KIB
    assert served.snapshot().served_bytes < 501 * KIB
    server.held[0].answer()
    assert served.snapshot().served_bytes == 0


async def test_connections_share_the_budget_of_their_listener(network: Any) -> None:
    server = Server()
    listener = await network.listen(server.methods, limits=ListenerOptions(bytes_max=1_000 * KIB))
    greedy = await network.connect(listener)
    other = await network.connect(listener)
    held = asyncio.create_task(greedy.call(HOLD, None, bytes(900 * KIB), timeout_ms=10_000))
    async with asyncio.timeout(5):
        while not server.held:
            await asyncio.sleep(0.002)
    assert listener.gate.snapshot().bytes > 900 * KIB
    with pytest.raises(ResourceExhausted, match="no room now"):
        await other.call(ECHO, None, bytes(200 * KIB), timeout_ms=5_000)
    assert (await other.call(ECHO, None, b"small", timeout_ms=5_000)).body == b"small"
    server.held[0].answer()
    await held
    assert len((await other.call(ECHO, None, bytes(200 * KIB), timeout_ms=5_000)).body) == 200 * KIB
    assert listener.gate.snapshot().bytes == 0


@pytest.mark.parametrize("network", OF_BYTES, indirect=True)
async def test_a_large_request_that_breaks_off_gives_its_room_back(network: Any) -> None:
    listener = await network.listen(Server().methods)
    raw = await greeted(network, listener)
    raw.send(request(1, "echo", None, bytes(500 * KIB))[: 300 * KIB])
    async with asyncio.timeout(5):
        while listener.gate.snapshot().bytes == 0:
            await asyncio.sleep(0.002)
        raw.transport.abort()
        while listener.gate.snapshot().bytes:
            await asyncio.sleep(0.002)


async def test_large_notices_share_the_budget_of_the_listener(network: Any) -> None:
    """There is no answer in which to refuse a notice, so it ends the connection, before anything is allocated."""
    listener = await network.listen(Server().methods, limits=ListenerOptions(bytes_max=500 * KIB), options=CURT)
    friend = await network.connect(listener)
    raw = await greeted(network, listener)
    header = msgpack.encode(("tell", 1))
    async with undisturbed(friend):
        raw.send(encode_frame(FrameKind.NOTIFY, 0, header, bytes(300 * KIB)))
        raw.send(request(1, "echo"))
        await raw.until(lambda frames: len(frames) > 1)
        assert listener.gate.snapshot().bytes == 0, "what was dealt with does not count any more"
        notice = encode_frame(FrameKind.NOTIFY, 0, header, bytes(600 * KIB))
        raw.send(notice[:1_000] if network.has_bytes else notice)
        reason = await raw.farewell()
    assert isinstance(reason, ResourceExhausted)
    assert "no room now for a message of" in str(reason)


# -------------------------------------------------------------------------------------------------- many connections


@pytest.mark.parametrize("network", ["tcp", "memory"], indirect=True)
async def test_a_thousand_connections_beyond_the_limit(network: Any) -> None:
    limits = ListenerOptions(connections_max=50, handshakes_max=110, refusals_max=20, retry_ms=700)
    listener = await network.listen(Server().methods, limits=limits)
    friend = await network.connect(listener)
    refused: list[CutwaterError] = []
    most = 0

    async def intrude() -> None:
        nonlocal most
        try:
            connection = await network.connect(listener, timeout_ms=15_000)
        except CutwaterError as error:
            refused.append(error)
        else:
            assert connection.state is ConnectionState.OPEN
        snapshot = listener.gate.snapshot()
        most = max(most, snapshot.connections + snapshot.handshakes + snapshot.refusals)

    async with undisturbed(friend):
        for _ in range(10):
            await asyncio.gather(*(intrude() for _ in range(100)))
    assert most <= 50 + 110 + 20
    assert len(refused) == 1_000 - 49
    assert {type(error) for error in refused} == {ResourceExhausted}, "each is told, and when to come back"
    assert {error.retry_ms for error in refused if isinstance(error, ResourceExhausted)} == {700}
    for connection in network.connections[1:]:
        connection.abort()
    async with asyncio.timeout(5):
        while listener.gate.snapshot().connections > 1:
            await asyncio.sleep(0.005)
    assert (await network.connect(listener)).state is ConnectionState.OPEN


async def test_the_oldest_of_too_many_handshakes_makes_room_and_is_told(tcp: Any) -> None:
    limits = ListenerOptions(handshakes_max=3, refusals_max=4, retry_ms=700)
    listener = await tcp.listen(Server().methods, limits=limits, options=WireOptions(linger_ms_max=500))
    friend = await tcp.connect(listener)
    async with undisturbed(friend):
        strangers = [await tcp.raw(listener, stays=number < 4) for number in range(10)]
        reasons = [await stranger.farewell() for stranger in strangers[:4]]
        for silent in strangers[4:7]:
            await asyncio.wait_for(silent.gone, 5)
            assert not silent.frames, "no more than refusals_max are told at a time"
        assert not any(stranger.gone.done() for stranger in strangers[7:]), "the newest wait on"
        assert (await tcp.connect(listener)).state is ConnectionState.OPEN, "nobody is kept out meanwhile"
    assert {type(reason) for reason in reasons} == {ResourceExhausted}
    assert {reason.retry_ms for reason in reasons} == {700}
    assert listener.gate.snapshot().evicted_total == 8


async def test_strangers_that_say_nothing_keep_nobody_out(tcp: Any) -> None:
    limits = ListenerOptions(connections_max=100, handshakes_max=10, handshake_ms_max=60_000)
    listener = await tcp.listen(Server().methods, limits=limits, options=WireOptions(linger_ms_max=50))
    friend = await tcp.connect(listener)
    async with undisturbed(friend):
        for _ in range(30):
            await tcp.raw(listener)
        for _ in range(20):
            await tcp.connect(listener)
    snapshot = listener.gate.snapshot()
    assert snapshot.connections == 21
    assert snapshot.handshakes <= 10
    assert snapshot.evicted_total >= 20


async def test_strangers_whose_tls_never_ends_keep_nobody_out(tls: Any) -> None:
    """They hold no file descriptor either once they were dropped."""
    limits = ListenerOptions(handshakes_max=10, handshake_ms_max=60_000)
    listener = await tls.listen(Server().methods, limits=limits)
    writers = []
    try:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(40):
            _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writers.append(writer)
            # The beginning of a TLS record that never comes to its end, or nothing at all.
            writer.write(b"\x16\x03\x01\x02\x00\x01" if number % 2 else b"")
        for _ in range(5):
            await tls.connect(listener)
        async with asyncio.timeout(5):
            # 40 of our own, at most 10 of the listener's, and both ends of five connections.
            while len(os.listdir("/proc/self/fd")) > before + 40 + 10 + 10:
                await asyncio.sleep(0.01)
        assert listener.gate.snapshot().evicted_total >= 30
    finally:
        for writer in writers:
            writer.close()


async def test_a_handshake_has_one_deadline_however_slowly_it_comes(tcp: Any) -> None:
    """From the first byte of TCP on: a byte now and then buys no time."""
    listener = await tcp.listen(Server().methods, limits=ListenerOptions(handshake_ms_max=300))
    raw = await tcp.raw(listener, stays=True)
    started = asyncio.get_running_loop().time()
    hello = encode_frame(FrameKind.HELLO, 0, msgpack.encode(("cutwater", 1, 1, 1, "raw", "r", "", GENEROUS)))
    for byte in hello:
        if raw.gone.done() or raw.frames:
            break
        raw.send(bytes([byte]))
        await asyncio.sleep(0.05)
    reason = await raw.farewell()
    assert isinstance(reason, DeadlineExceeded)
    assert asyncio.get_running_loop().time() - started < 2
    assert listener.gate.snapshot().late_total == 1


async def test_tls_that_never_ends_has_the_same_deadline(tls: Any) -> None:
    listener = await tls.listen(Server().methods, limits=ListenerOptions(handshake_ms_max=200))
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    assert listener.gate.snapshot().late_total == 1
    writer.close()


# ----------------------------------------------------------------------------------------------------------- silence


async def test_a_half_open_connection_is_found_over_tcp(tcp: Any) -> None:
    """The peer is there for the operating system, but says nothing and answers no ping."""
    listener = await tcp.listen(options=WireOptions(ping_ms=40))
    raw = await greeted(tcp, listener)
    served = served_by(listener)
    await asyncio.wait_for(served.closed, 5)
    assert any(frame.kind == FrameKind.PING for frame in raw.frames)


async def test_an_idle_connection_stays(network: Any) -> None:
    options = WireOptions(ping_ms=50)
    listener = await network.listen(Server().methods, options=options)
    connection = await network.connect(listener, options=options)
    await asyncio.sleep(0.5)
    assert connection.state is ConnectionState.OPEN
    assert (await connection.call(ECHO, None, b"x", timeout_ms=1_000)).body == b"x"
