"""Both ends of a connection without sockets learn of the end of the other one, also when they do not read."""

from __future__ import annotations

import asyncio

import pytest

from cutwater.wire.nearby import NearTransport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

MIB = 1024 * 1024


class End(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self.buffer = bytearray(64 * 1024)
        self.got = 0
        self.is_lost = self.is_writing_paused = False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, count: int) -> None:
        self.got += count

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        self.is_writing_paused = False


def pair() -> tuple[tuple[NearTransport, End], tuple[NearTransport, End]]:
    loop = asyncio.get_running_loop()
    ends = [(NearTransport(loop, end, ("here", 1)), end) for end in (End(), End())]
    (near, _), (far, _) = ends
    near.peer, far.peer = far, near
    return ends[0], ends[1]


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
    near.write(b"the last words")
    near.close()
    for _ in range(3):
        far.write(bytes(MIB))
        await turns()
    assert near._inbox_bytes == 0
    assert not other.is_lost, "it has yet to read something"
    far.resume_reading()
    await turns()
    assert other.got == len(b"the last words")
    assert other.is_lost


async def test_who_waits_to_write_does_not_wait_for_a_side_that_has_closed() -> None:
    (near, _), (far, other) = pair()
    near.pause_reading()
    near.write(b"the last words")
    far.pause_reading()
    far.write(bytes(MIB))
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
    far.write(b"answer")
    await turns()
    assert one.got == len(b"answer")
