"""What is handed to a transport, and when: one piece per turn, large parts as they are, and nobody hogs the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from cutwater.protocol.errors import FrameTooLarge
from cutwater.wire.calls.outbox import FLUSH_BYTES, JOIN_BYTES_MAX, Outbox
from cutwater.wire.calls.streams import StreamSender
from cutwater.wire.codec import FrameDecoder, encode_frame
from cutwater.wire.messages import FIXED_BYTES, FrameKind, WireFrame


class Transport:
    """Keeps what is written, as if nothing were ever sent."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.keeps = False

    def write(self, data: Any) -> None:
        self.pieces.append(data)

    def get_write_buffer_size(self) -> int:
        return sum(len(piece) for piece in self.pieces) if self.keeps else 0

    def frames(self) -> list[WireFrame]:
        decoder = FrameDecoder(1 << 24, 1 << 20)
        decoder.feed(b"".join(self.pieces))
        return list(iter(decoder.next_frame, None))


class Bench:
    def __init__(self, high: int = 1_000_000, bytes_max: int = 10_000_000) -> None:
        self.transport = Transport()
        self.settled = 0
        self.overflown: list[int] = []
        self.outbox = Outbox(
            asyncio.get_running_loop(), high, bytes_max, 1 << 20, self.on_settled, self.overflown.append
        )
        self.outbox.frame_bytes_max, self.outbox.header_bytes_max = 1 << 24, 1 << 20
        self.outbox.attach(self.transport)  # type: ignore[arg-type]

    def on_settled(self) -> None:
        self.settled += 1


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__ = test.__name__
    return run


@in_a_loop
async def test_a_turn_is_one_write() -> None:
    bench = Bench()
    for i in range(10):
        bench.outbox.send(FrameKind.RESPONSE, i, b"\xc0", b"x" * i)
    assert bench.transport.pieces == []
    await asyncio.sleep(0)
    assert len(bench.transport.pieces) == 1
    assert [(frame.call, bytes(frame.body)) for frame in bench.transport.frames()] == [(i, b"x" * i) for i in range(10)]


@in_a_loop
async def test_who_says_that_it_will_flush_does() -> None:
    bench = Bench()
    bench.outbox.will_flush = True
    bench.outbox.send(FrameKind.PING, 1, b"")
    await asyncio.sleep(0)
    assert bench.transport.pieces == []
    bench.outbox.flush()
    assert bench.transport.pieces == [encode_frame(FrameKind.PING, 1, b"")]
    bench.outbox.flush()
    assert len(bench.transport.pieces) == 1


@in_a_loop
async def test_large_parts_are_not_copied() -> None:
    bench = Bench()
    large, view = bytes(JOIN_BYTES_MAX + 1), memoryview(bytes(JOIN_BYTES_MAX + 2))
    bench.outbox.send(FrameKind.RESPONSE, 1, b"\xc0", b"small")
    bench.outbox.send(FrameKind.RESPONSE, 2, b"\xc0", [b"a", large, b"b", b"c", view])
    bench.outbox.send(FrameKind.RESPONSE, 3, b"\xc0", b"small")
    await asyncio.sleep(0)
    pieces = bench.transport.pieces
    assert len(pieces) == 5
    assert pieces[1] is large
    assert pieces[3] is view
    assert pieces[2] == b"bc"
    assert [len(frame.body) for frame in bench.transport.frames()] == [5, len(large) + len(view) + 3, 5]


@in_a_loop
async def test_views_of_wider_items_count_in_bytes() -> None:
    bench = Bench()
    bench.outbox.send(FrameKind.RESPONSE, 1, b"\xc0", memoryview(bytes(80)).cast("Q"))
    await asyncio.sleep(0)
    assert [len(frame.body) for frame in bench.transport.frames()] == [80]


@in_a_loop
async def test_much_does_not_wait_for_the_end_of_the_turn() -> None:
    bench = Bench()
    for _ in range(3):
        bench.outbox.send(FrameKind.RESPONSE, 1, b"\xc0", bytes(FLUSH_BYTES // 2))
    assert len(bench.transport.pieces) > 0


@in_a_loop
async def test_what_the_peer_does_not_take_is_not_sent() -> None:
    bench = Bench()
    bench.outbox.frame_bytes_max, bench.outbox.header_bytes_max = 100, 50
    with pytest.raises(FrameTooLarge, match="a message of 101 bytes"):
        bench.outbox.send(FrameKind.RESPONSE, 1, b"\xc0", bytes(100))
    with pytest.raises(FrameTooLarge, match="a header of 51 bytes"):
        bench.outbox.send(FrameKind.RESPONSE, 1, bytes(51))
    await asyncio.sleep(0)
    assert bench.transport.pieces == []


@in_a_loop
async def test_too_much_is_noticed_before_the_transport_says_so() -> None:
    bench = Bench(high=400_000, bytes_max=900_000)
    bench.transport.keeps = True
    bench.outbox.send(FrameKind.RESPONSE, 1, b"\xc0", bytes(300_000))
    assert not bench.outbox.is_busy
    assert not bench.outbox.is_full
    bench.outbox.send(FrameKind.RESPONSE, 1, b"\xc0", bytes(300_000))
    assert bench.outbox.is_busy
    assert bench.outbox.is_full
    assert bench.outbox.size > 600_000
    await asyncio.sleep(0)
    assert not bench.outbox.is_busy
    assert not bench.outbox.is_full
    assert bench.settled == 1
    bench.outbox.pause()
    assert bench.outbox.is_busy
    assert bench.outbox.is_full


@in_a_loop
async def test_what_exceeds_all_limits_is_told_when_no_one_is_in_the_middle_of_anything() -> None:
    bench = Bench(high=400_000, bytes_max=900_000)
    bench.transport.keeps = True
    for _ in range(5):
        bench.outbox.send(FrameKind.RESPONSE, 1, b"\xc0", bytes(400_000))
    assert bench.overflown == []
    assert len(bench.transport.frames()) == 3, "nothing more is taken"
    await asyncio.sleep(0)
    assert len(bench.overflown) == 1
    assert bench.outbox.size == 0


@in_a_loop
async def test_the_position_counts_what_was_ever_sent() -> None:
    bench = Bench()
    for _ in range(3):
        bench.outbox.send(FrameKind.PING, 1, b"")
    assert bench.outbox.position == bench.outbox.size == 3 * FIXED_BYTES
    await asyncio.sleep(0)
    assert (bench.outbox.position, bench.outbox.size) == (3 * FIXED_BYTES, 0)


@in_a_loop
async def test_after_the_end_nothing_is_kept() -> None:
    bench = Bench()
    bench.outbox.send(FrameKind.PING, 1, b"")
    bench.outbox.detach()
    bench.outbox.send(FrameKind.PING, 2, b"")
    await asyncio.sleep(0)
    assert bench.transport.pieces == []
    assert bench.outbox.size == 0


@in_a_loop
async def test_a_handler_with_much_to_send_lets_others_have_a_turn() -> None:
    bench = Bench()
    sender: StreamSender[int] = StreamSender(bench.outbox, 1, 10**9, 10**12, 60_000)
    turns: list[int] = []
    sent = 0

    async def other() -> None:
        while True:
            turns.append(sent)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for i in range(500):
        await sender.send(i, bytes(10_000))
        sent += 10_000
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    steps = [later - earlier for earlier, later in pairwise(turns)]
    assert len(turns) > 10
    assert max(steps) <= FLUSH_BYTES + 20_000
