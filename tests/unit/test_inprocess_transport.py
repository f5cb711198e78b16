"""Frames change hands by reference, but nothing that could change; each side is held to its limits, and both ends learn
of the end of the other one, also when they do not read."""

from __future__ import annotations

import asyncio

import pytest

from cutwater.errors import CutwaterError, ResourceExhausted
from cutwater.protocol.errors import FrameTooLarge, MalformedFrame
from cutwater.protocol.methods import Method
from cutwater.types import ClusterId
from cutwater.wire.calls.handlers import LATER, Later, Methods, ReplyWithBody
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.calls.outbox import lasting
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.inprocess_transport import TURN_BYTES_MAX, FrameQueue, InProcessTransport
from cutwater.wire.listen.server import Listener, listen
from cutwater.wire.messages import FIXED_BYTES, FrameKind, WireFrame
from cutwater.wire.options import WireOptions

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

KIB = 1024
MIB = 1024 * KIB


class End(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self.inbox = FrameQueue()
        self.got: list[WireFrame] = []
        self.is_lost = self.is_writing_paused = False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True

    def frames_received(self) -> None:
        self.got += iter(self.inbox.next_frame, None)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        self.is_writing_paused = False


def pair() -> tuple[tuple[InProcessTransport, End], tuple[InProcessTransport, End]]:
    loop = asyncio.get_running_loop()
    ends = [(InProcessTransport(loop, end, ("here", 1)), end) for end in (End(), End())]
    (near, _), (far, _) = ends
    near.peer, far.peer = far, near
    for transport, end in ends:
        transport.inbox.limit(16 * MIB, lambda kind, call, size: True)
        end.inbox = transport.inbox
    return ends[0], ends[1]


def write(transport: InProcessTransport, body: bytes) -> None:
    transport.write_frame(FrameKind.NOTIFY, 0, b"\x92\xa1x\xc0", body)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_who_does_not_read_learns_that_the_other_side_has_closed() -> None:
    (near, _), (far, other) = pair()
    far.pause_reading()
    near.close()
    await turns()
    assert other.is_lost


async def test_nothing_is_kept_for_a_side_that_has_closed() -> None:
    (near, _), (far, other) = pair()
    far.pause_reading()
    write(near, b"the last words")
    near.close()
    for _ in range(3):
        write(far, bytes(MIB))
        await turns()
    assert near.inbox.waiting_bytes == 0
    assert not other.is_lost, "it has yet to read something"
    far.resume_reading()
    await turns()
    assert [frame.body for frame in other.got] == [b"the last words"]
    assert other.is_lost


async def test_who_waits_to_write_does_not_wait_for_a_side_that_has_closed() -> None:
    (near, _), (far, other) = pair()
    near.pause_reading()
    write(near, b"the last words")
    far.pause_reading()
    write(far, bytes(MIB))
    assert other.is_writing_paused
    near.close()
    await turns()
    assert not other.is_writing_paused
    assert not other.is_lost
    far.resume_reading()
    await turns()
    assert other.is_lost


async def test_who_only_stops_writing_may_still_read() -> None:
    (near, one), (far, other) = pair()
    far.pause_reading()
    near.write_eof()
    await turns()
    assert not other.is_lost
    write(far, b"answer")
    await turns()
    assert [frame.body for frame in one.got] == [b"answer"]


# What changes hands.


async def test_what_cannot_change_is_not_copied() -> None:
    whole = bytes(100 * KIB)
    assert lasting([whole]) is whole
    view = memoryview(whole)[: 80 * KIB]
    assert lasting([view]) is view
    assert lasting([]) == b""


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([bytearray(b"x" * 100_000)], id="a bytearray"),
        pytest.param([memoryview(bytearray(b"x" * 100_000)).toreadonly()], id="a read-only view of one"),
        pytest.param([memoryview(b"x" * 1_000_000)[:100_000]], id="a little of much"),
        pytest.param([memoryview(b"x" * 200_000)[::2]], id="every other byte"),
        pytest.param([memoryview(b"x" * 1_000)], id="a small view"),
        pytest.param([bytearray(b"x" * 50_000), b"x" * 50_000], id="pieces"),
    ],
)
async def test_everything_else_is(pieces: list[bytes | bytearray | memoryview]) -> None:
    body = lasting(pieces)
    assert type(body) is bytes
    assert body == b"x" * sum(len(piece) for piece in pieces)


async def test_a_turn_has_an_end() -> None:
    queue = FrameQueue()
    queue.limit(16 * MIB, lambda kind, call, size: True)
    for call in range(10):
        queue.put(FrameKind.RESPONSE, call, b"\xc0", bytes(MIB))
    queue.begin_turn()
    assert len(list(iter(queue.next_frame, None))) == TURN_BYTES_MAX // MIB
    queue.begin_turn()
    assert queue.next_frame() is not None
    assert queue.frames == TURN_BYTES_MAX // MIB + 1
    assert queue.waiting_bytes == (10 - queue.frames) * (FIXED_BYTES + 1 + MIB)


async def test_a_queue_has_the_limits_of_its_reader() -> None:
    queue = FrameQueue()
    queue.put(FrameKind.RESPONSE, 1, b"\xc0", b"")
    queue.begin_turn()
    assert queue.next_frame() is None, "there is no reader yet"
    asked: list[tuple[int, int, int]] = []

    def admit(kind: int, call: int, size: int) -> bool:
        asked.append((kind, call, size))
        return False

    queue.limit(100 * KIB, admit)
    first = queue.next_frame()
    assert first is not None
    assert not first.skipped
    queue.put(FrameKind.REQUEST, 2, b"\xc0", bytes(50 * KIB))
    second = queue.next_frame()
    assert second is not None
    assert (second.skipped, second.body) == (True, b"")
    assert asked == [(FrameKind.REQUEST, 2, 50 * KIB + 1)]
    queue.put(FrameKind.REQUEST, 3, b"\xc0", bytes(100 * KIB))
    with pytest.raises(FrameTooLarge, match="a message of"):
        queue.next_frame()
    queue.put(FrameKind.REQUEST, 4, bytes(101 * KIB), b"")
    with pytest.raises(FrameTooLarge, match="a header of"):
        queue.next_frame()
    queue.put(FrameKind.REQUEST, 5, b"\xc1", b"")
    with pytest.raises(MalformedFrame):
        queue.next_frame()


ECHO = Method[None, None]("echo", None, None)
HOLD = Method[None, None]("hold", None, None)


class Near:
    """A listener and who connects to it, on this loop."""

    def __init__(self, options: WireOptions | None = None) -> None:
        self.options = options or WireOptions()
        self.bodies: list[object] = []
        self.held: list[Call[None]] = []

    async def __aenter__(self) -> Near:
        methods = Methods()
        methods.answers(ECHO)(self._echo)
        methods.answers(HOLD)(self._hold)
        endpoint = Endpoint(ClusterId(1), "server", "s", methods, self.options)
        self.listener: Listener = await listen(endpoint, "127.0.0.1", 0, is_nearby=True)
        client = Endpoint(ClusterId(1), "client", "c", Methods(), WireOptions())
        self.connection = await connect(client, "127.0.0.1", self.listener.port, timeout_ms=5_000)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close(timeout_ms=1_000)
        await self.listener.close(timeout_ms=1_000)

    def _echo(self, call: Call[None]) -> ReplyWithBody[None]:
        self.bodies.append(call.body)
        return ReplyWithBody(None, call.body)

    def _hold(self, call: Call[None]) -> Later:
        self.held.append(call)
        return LATER

    @property
    def served(self) -> Connection:
        (connection,) = self.listener.gate.connections
        return connection


async def test_a_body_is_the_same_object_on_both_sides() -> None:
    async with Near() as near:
        body = bytes(MIB)
        received = await near.connection.call(ECHO, None, body, timeout_ms=5_000)
        assert near.bodies == [body]
        assert near.bodies[0] is body
        assert received.body is body


async def test_who_changes_a_buffer_after_it_was_sent_changes_nothing() -> None:
    async with Near() as near:
        body = bytearray(b"x" * MIB)
        answer = asyncio.ensure_future(near.connection.call(ECHO, None, body, timeout_ms=5_000))
        await asyncio.sleep(0)
        body[:] = b"y" * MIB
        assert (await answer).body == b"x" * MIB
        assert near.bodies == [b"x" * MIB]


async def test_bytes_by_reference_count_as_any_others() -> None:
    """The second request finds no room on the other side, is refused, and the connection goes on."""
    async with Near(WireOptions(frame_bytes_max=600 * KIB, header_bytes_max=KIB, call_bytes_max=700 * KIB)) as near:
        outcomes: list[CutwaterError | None] = []

        async def hold() -> None:
            try:
                await near.connection.call(HOLD, None, bytes(500 * KIB), timeout_ms=5_000)
            except CutwaterError as error:
                outcomes.append(error)
            else:
                outcomes.append(None)

        first = asyncio.ensure_future(hold())
        await turns()
        assert near.served.snapshot().served_bytes > 500 * KIB
        assert near.listener.gate.snapshot().bytes > 500 * KIB
        # The caller keeps to what it was told; the other side must not rely on that.
        near.connection._calling.bytes = 0
        await hold()
        assert isinstance(outcomes[0], ResourceExhausted)
        near.held[0].answer()
        await first
        assert outcomes[1] is None
        assert near.listener.gate.snapshot().bytes == 0
        with pytest.raises(FrameTooLarge):
            await near.connection.call(ECHO, None, bytes(600 * KIB), timeout_ms=5_000)
        await near.connection.call(ECHO, None, bytes(100), timeout_ms=5_000)
