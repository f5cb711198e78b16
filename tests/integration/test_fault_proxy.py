"""The proxy that cuts links in other tests does what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cutwater.testing.fault_proxy import FaultProxy

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def echoes() -> AsyncIterator[tuple[FaultProxy, list[bytes]]]:
    heard: list[bytes] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                heard.append(line)
                writer.write(line)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        async with FaultProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
            yield proxy, heard
    finally:
        server.close()
        await server.wait_closed()


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, line: bytes, seconds: float = 5.0) -> bytes:
        self.writer.write(line)
        async with asyncio.timeout(seconds):
            return await self.reader.readline()

    async def hears_nothing(self) -> None:
        with pytest.raises(TimeoutError):
            await self.ask(b"lost\n", 0.2)


async def call(proxy: FaultProxy) -> Caller:
    return Caller(*await asyncio.open_connection("127.0.0.1", proxy.port))


async def test_it_passes_bytes_on() -> None:
    async with echoes() as (proxy, _):
        caller = await call(proxy)
        assert await caller.ask(b"one\n") == b"one\n"
        caller.writer.close()


async def test_held_bytes_arrive_after_healing() -> None:
    async with echoes() as (proxy, heard):
        caller = await call(proxy)
        proxy.hold(to_target=True)
        await caller.hears_nothing()
        assert heard == []
        proxy.heal()
        async with asyncio.timeout(5):
            assert await caller.reader.readline() == b"lost\n"
        caller.writer.close()


async def test_answers_alone_can_be_lost() -> None:
    async with echoes() as (proxy, heard):
        caller = await call(proxy)
        proxy.swallow(from_target=True)
        await caller.hears_nothing()
        assert heard == [b"lost\n"]
        proxy.heal()
        assert await caller.reader.read() == b"", "a connection that lost bytes does not go on"
        caller.writer.close()


async def test_it_refuses_until_it_is_healed() -> None:
    async with echoes() as (proxy, _):
        caller = await call(proxy)
        assert await caller.ask(b"one\n") == b"one\n"
        proxy.refuse()
        with pytest.raises((ConnectionError, AssertionError)):
            assert await caller.ask(b"two\n") == b"two\n"
        other = await call(proxy)
        with pytest.raises((ConnectionError, AssertionError)):
            assert await other.ask(b"three\n") == b"three\n"
        proxy.heal()
        third = await call(proxy)
        assert await third.ask(b"four\n") == b"four\n"
        for done in (caller, other, third):
            done.writer.close()
