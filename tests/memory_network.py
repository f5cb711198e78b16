"""Connections without sockets: a network in memory that can inject the faults of real networks.

``MemoryNetwork`` is an alternative to ``server.listen`` and ``client.connect``, and the same ``Connection`` runs on it.
A link behaves as a socket does: it holds a limited number of bytes that were written and not yet read, delivers them in
order and in pieces of any size, and tells both sides when it breaks, unless it breaks silently.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from msgspec import Struct

from cutwater.errors import AlreadyExists
from cutwater.protocol.errors import ConnectionLost
from cutwater.wire.client import greeted
from cutwater.wire.connection import Connection
from cutwater.wire.identity.auth import Authenticator
from cutwater.wire.identity.handshake import Endpoint, Expect
from cutwater.wire.listen.gate import Gate
from cutwater.wire.options import ListenerOptions


class Faults(Struct, frozen=True, kw_only=True):
    """The faults of a link. The same seed gives the same behaviour."""

    seed: int = 0
    chunk_bytes_max: int = 0
    """Deliver pieces of random sizes up to this. 0 means all available bytes in one piece."""
    delay_ms_max: int = 0
    """Delay each piece by a random time up to this."""
    capacity_bytes: int = 256 * 1024
    """Bytes in one direction that may be written and not yet read. Beyond that, the writer keeps the rest."""
    pauses_late: bool = False
    """Tell the writer only in the next turn of the event loop that it has written too much, as uvloop may."""
    break_after_bytes: int = 0
    """Break after this many bytes in one direction. 0 means never."""


class MemoryTransport(asyncio.Transport):
    """One end of a link."""

    def __init__(self, link: MemoryLink, protocol: asyncio.BufferedProtocol, address: str, peer_address: str) -> None:
        super().__init__({"sockname": address, "peername": peer_address})
        self.link = link
        self.protocol = protocol
        self.peer: MemoryTransport
        self.out: Pipe
        """The pipe to the other end."""
        self.is_reading_paused = False
        self.high, self.low = 64 * 1024, 16 * 1024
        self._is_closing = False
        self._is_lost = False
        self._is_writing_paused = False

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return not self.is_reading_paused and not self._is_closing

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False
        self.peer.out.pump()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high if high is not None else 64 * 1024
        self.low = low if low is not None else self.high // 4
        self.check_limits()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self.low, self.high

    def get_write_buffer_size(self) -> int:
        return len(self.out.waiting)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self.out.waiting += data
            self.out.pump()
            if self.link.faults.pauses_late:
                self.link.loop.call_soon(self.check_limits)
            else:
                self.check_limits()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.out.is_ended = True
        self.out.pump()

    def close(self) -> None:
        """Close this end. What was written is still delivered."""
        if not self._is_closing:
            self._is_closing = True
            self.out.is_ended = True
            self.out.on_drained = lambda: self.lose(None)
            self.out.pump()

    def abort(self) -> None:
        self._is_closing = True
        self.lose(None)
        if not self.link.is_silent:
            self.peer.lose(ConnectionResetError("the connection was reset by the peer"))

    def lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self.out.waiting.clear()
            self.link.loop.call_soon(self.protocol.connection_lost, error)

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def check_limits(self) -> None:
        size = len(self.out.waiting)
        if size > self.high and not self._is_writing_paused:
            self._is_writing_paused = True
            self.protocol.pause_writing()
        elif size <= self.low and self._is_writing_paused:
            self._is_writing_paused = False
            self.protocol.resume_writing()


class Pipe:
    """One direction of a link."""

    def __init__(self, link: MemoryLink, sender: MemoryTransport, receiver: MemoryTransport, seed: int) -> None:
        self.link = link
        self.sender, self.receiver = sender, receiver
        self.waiting = bytearray()
        """Bytes that were written and that the writer still holds."""
        self.under_way = bytearray()
        self.is_ended = False
        self.on_drained: Callable[[], None] | None = None
        self._random = random.Random(seed)
        self._is_scheduled = False
        self._is_end_told = False
        self._passed = 0

    def pump(self) -> None:
        """Move bytes into the link as far as there is room, and schedule their delivery."""
        if self.link.is_silent:
            self.waiting.clear()
        room = self.link.faults.capacity_bytes - len(self.under_way)
        if room > 0 and self.waiting:
            self.under_way += self.waiting[:room]
            del self.waiting[:room]
        if self.on_drained is not None and not self.waiting:
            on_drained, self.on_drained = self.on_drained, None
            on_drained()
        if not self._is_scheduled and not self.link.is_stalled and (self.under_way or self.is_ended):
            self._is_scheduled = True
            delay = self._random.random() * self.link.faults.delay_ms_max / 1_000
            self.link.loop.call_later(delay, self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        link, receiver, faults = self.link, self.receiver, self.link.faults
        if link.is_silent or link.is_stalled or receiver.is_lost or receiver.is_reading_paused:
            return
        if self.under_way:
            buffer = receiver.protocol.get_buffer(-1)
            size = min(len(self.under_way), memoryview(buffer).nbytes)
            if faults.chunk_bytes_max:
                size = min(size, self._random.randint(1, faults.chunk_bytes_max))
            memoryview(buffer)[:size] = self.under_way[:size]
            del self.under_way[:size]
            self._passed += size
            receiver.protocol.buffer_updated(size)
            if faults.break_after_bytes and self._passed >= faults.break_after_bytes:
                link.cut()
                return
            self.pump()
            self.sender.check_limits()
        elif self.is_ended and not self.waiting and not self._is_end_told:
            self._is_end_told = True
            if not receiver.protocol.eof_received():
                receiver.close()


class MemoryLink:
    """A connection between two ends, with the means to disturb it."""

    def __init__(
        self,
        client: asyncio.BufferedProtocol,
        server: asyncio.BufferedProtocol,
        address: str,
        number: int,
        faults: Faults,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.faults = faults
        self.is_stalled = False
        self.is_silent = False
        self.client = MemoryTransport(self, client, f"client-{number}", address)
        self.server = MemoryTransport(self, server, address, f"client-{number}")
        self.client.peer, self.server.peer = self.server, self.client
        self.client.out = Pipe(self, self.client, self.server, faults.seed * 2)
        self.server.out = Pipe(self, self.server, self.client, faults.seed * 2 + 1)
        self.loop.call_soon(server.connection_made, self.server)
        self.loop.call_soon(client.connection_made, self.client)

    def cut(self) -> None:
        """Break, and tell both ends."""
        for end in (self.client, self.server):
            end.lose(ConnectionResetError("the connection was cut"))

    def go_silent(self) -> None:
        """Break silently: what is written vanishes, and neither end receives anything again."""
        self.is_silent = True
        for pipe in (self.client.out, self.server.out):
            pipe.under_way.clear()
            pipe.pump()
            pipe.sender.check_limits()

    def stall(self) -> None:
        """Deliver nothing until ``go_on``."""
        self.is_stalled = True

    def go_on(self) -> None:
        self.is_stalled = False
        self.client.out.pump()
        self.server.out.pump()


class MemoryListener:
    """A listener of a ``MemoryNetwork``, made by ``MemoryNetwork.listen``."""

    def __init__(self, network: MemoryNetwork, address: str, gate: Gate) -> None:
        self.gate = gate
        self.address = address
        self._network = network

    async def close(self, *, timeout_ms: int = 5_000) -> None:
        self._network.listeners.pop(self.address, None)
        await self.gate.close_all(timeout_ms)


SOURCE = "somewhere"
"""The source address of connections, if none is given."""


class MemoryNetwork:
    """A network in memory. Addresses are any strings. ``links`` holds all links ever made, oldest first."""

    def __init__(self) -> None:
        self.listeners: dict[str, MemoryListener] = {}
        self.links: list[MemoryLink] = []

    def listen(
        self,
        endpoint: Endpoint,
        address: str,
        *,
        authenticate: Authenticator | None = None,
        options: ListenerOptions | None = None,
        on_open: Callable[[Connection], None] | None = None,
    ) -> MemoryListener:
        if address in self.listeners:
            raise AlreadyExists(f"{address} has a listener already")
        listener = MemoryListener(self, address, Gate(endpoint, options or ListenerOptions(), authenticate, on_open))
        self.listeners[address] = listener
        return listener

    async def connect(
        self,
        endpoint: Endpoint,
        address: str,
        *,
        timeout_ms: int,
        token: str = "",
        faults: Faults | None = None,
        expect: Expect | None = None,
        source: str = SOURCE,
    ) -> Connection:
        async def attach() -> None:
            listener = self.listeners.get(address)
            if listener is None:
                raise ConnectionLost(f"{address} cannot be reached: it has no listener", outcome_unknown=False)
            server = listener.gate.enter(source)
            self.links.append(MemoryLink(connection, server, address, len(self.links), faults or Faults()))

        connection = Connection(endpoint, token=token, expect=expect)
        return await greeted(connection, attach, address, timeout_ms)

    async def attach_raw(
        self,
        address: str,
        protocol: asyncio.BufferedProtocol,
        faults: Faults | None = None,
        source: str = SOURCE,
    ) -> MemoryLink:
        """Connect a protocol that need not follow the rules of Cutwater's protocol."""
        server = self.listeners[address].gate.enter(source)
        link = MemoryLink(protocol, server, address, len(self.links), faults or Faults())
        self.links.append(link)
        return link
