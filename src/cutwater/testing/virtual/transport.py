"""The ends of simulated connections, as far as shipped code uses sockets and transports."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, cast

from cutwater.testing.virtual.processes import SimProcess, current_process

if TYPE_CHECKING:
    from cutwater.testing.virtual.network import Line, SimNetwork

ARRIVED_BYTES_MAX = 256 * 1024
"""Bytes that an end takes before its process reads them."""
HIGH_BYTES, LOW_BYTES = 64 * 1024, 16 * 1024


class SimListener:
    """A listening socket, as far as ``wire.listen.server`` uses one."""

    def __init__(self, network: SimNetwork, host: str, port: int, backlog: int) -> None:
        self._network, self._backlog = network, backlog
        self.address = (host, port)
        self.process = current_process()
        self._waiting: deque[SimSocket] = deque()
        self._on_readable: Callable[[], None] | None = None

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def watch(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        loop, process = self._network.loop, current_process()
        if self._waiting:
            loop.call_soon(callback, *args)
        else:
            self._on_readable = lambda: loop.call_as(process, callback, *args)

    def unwatch(self) -> bool:
        self._on_readable = None
        return True

    def offer(self, sock: SimSocket) -> bool:
        if len(self._waiting) >= self._backlog:
            return False
        self._waiting.append(sock)
        if self._on_readable is not None:
            self._on_readable()
        return True

    def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        if not self._waiting:
            raise BlockingIOError(errno.EAGAIN, "no connection is waiting")
        sock = self._waiting.popleft()
        return sock, sock.transport.peer.address

    def close(self) -> None:
        self._network.forget(self)
        for sock in self._waiting:
            sock.close()


class SimSocket:
    """An accepted socket that has no protocol yet."""

    def __init__(self, transport: SimTransport) -> None:
        self.transport = transport

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *args: object) -> None: ...

    def close(self) -> None:
        self.transport.abort()


class SimTransport(asyncio.Transport):
    """One end of a connection. Bytes that it is given leave in pieces, one after the other."""

    peer: SimTransport

    def __init__(self, network: SimNetwork, address: tuple[str, int], process: SimProcess | None) -> None:
        super().__init__()
        self._network, self._loop = network, network.loop
        self.address, self.process = address, process
        self.line: Line | None = None
        """The line to the host of the other end, once something was sent."""
        self._protocol: asyncio.BufferedProtocol | None = None
        self._unsent: deque[bytes] = deque()
        self._held: list[bytes] = []
        """What follows ``_unsent`` when the disk of the process has answered."""
        self._unsent_bytes = 0
        self._arrived: deque[bytes] = deque()
        self.arrived_bytes = 0
        self._high, self._low = HIGH_BYTES, LOW_BYTES
        self._is_sending = self._is_reading_paused = self._is_writing_paused = False
        self._is_delivering = False
        self._is_closing = self._is_lost = self._has_ended = self._peer_has_ended = False
        self.is_gone = False
        """Whether its host has forgotten it. What arrives here is answered with a reset."""

    # What a protocol uses.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername":
            return self.peer.address
        return self.address if name == "sockname" else default

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.BufferedProtocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return not self._is_reading_paused

    def pause_reading(self) -> None:
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        self._is_reading_paused = False
        self._read_soon()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._has_ended = True
        self._send()

    def write(self, data: Any) -> None:
        assert not self._has_ended or self._is_closing
        if self._is_closing or not data or (self.process is not None and self.process.is_dead):
            return
        self._unsent_bytes += len(data)
        if self._held or (self.process is not None and self.process.waits_for_disk):
            # The caller waits for its disk in this call, so these bytes leave only when that has answered.
            if not self._held:
                self._loop.call_soon(self._release)
            self._held.append(bytes(data))
        else:
            self._unsent.append(bytes(data))
            self._send()
        if self._unsent_bytes > self._high and not self._is_writing_paused:
            self._is_writing_paused = True
            self.get_protocol().pause_writing()

    def _release(self) -> None:
        self._unsent += self._held
        self._held = []
        self._send()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = self._has_ended = True
            self._send()

    def abort(self) -> None:
        if not self._is_lost:
            self._lose(None)
            self._network.deliver(self, self.peer.reset)

    # What the network does.

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.BufferedProtocol, protocol)
        protocol.connection_made(self)
        if self._is_lost:
            protocol.connection_lost(ConnectionResetError(errno.ECONNRESET, "connection reset by peer"))
        elif self._arrived or self._peer_has_ended:
            self._read_soon()

    def reset(self) -> None:
        """Lose the connection: what the other end sent and what was not read is gone."""
        self._arrived.clear()
        self.arrived_bytes = 0
        self._lose(ConnectionResetError(errno.ECONNRESET, "connection reset by peer"))

    def vanish(self) -> None:
        """Forget this end without a word."""
        self.is_gone = self._is_lost = self._is_closing = True
        self._unsent.clear()
        self._network.transports.pop(self, None)

    def orphan(self, random: Random) -> None:
        """Go on sending to some byte, then end, after the process has died; or reset the peer at once."""
        self.is_gone = True
        if random.random() < 0.5:
            self._held = []
            keep = random.randint(0, self._unsent_bytes)
            self._unsent = deque([b"".join(self._unsent)[:keep]] if keep else [])
            self._unsent_bytes = keep
            self._is_closing = self._has_ended = True
            self._send()
        else:
            self.vanish()
            self._network.deliver(self, self.peer.reset)

    @property
    def waits_for_peer(self) -> bool:
        """Whether bytes are under way that the other end has not confirmed."""
        return self._is_sending or bool(self._unsent)

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = self._is_closing = self.is_gone = True
        self._unsent.clear()
        self._held = []
        self._unsent_bytes = 0
        if self._protocol is not None:
            self._loop.call_as(self.process, self._protocol.connection_lost, error)
        self._network.transports.pop(self, None)

    def _send(self) -> None:
        """Give one piece to the line; the next one when that has arrived."""
        if self._is_sending or self._is_lost:
            return
        if self._unsent:
            if self.peer.arrived_bytes >= ARRIVED_BYTES_MAX:
                return
            network = self._network
            # What was written since the last piece leaves together, as with a real socket.
            data = self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent)
            self._unsent.clear()
            if len(data) > 1 and network.random.random() < network.tears:
                size = network.random.randint(1, len(data))
                if size < len(data):
                    self._unsent.append(data[size:])
                    data = data[:size]
            self._is_sending = True
            network.deliver(self, partial(self._arrive, data), len(data))
        elif self._has_ended and not self._held:
            self._has_ended, self._is_sending = False, True
            self._network.deliver(self, self._end)

    def _arrive(self, piece: bytes) -> None:
        peer = self.peer
        if self._network.is_dark(peer.address[0]):
            # It stays on its way; a reset comes when the host has power again.
            return
        self._is_sending = False
        self._loop.trace.note(self._loop.now, piece)
        if peer.is_gone:
            if not self._is_lost:
                self._network.deliver(peer, self.reset)
            return
        peer.take(piece)
        if self._is_lost:
            return
        self._unsent_bytes -= len(piece)
        if self._is_writing_paused and self._unsent_bytes <= self._low and self._protocol is not None:
            self._is_writing_paused = False
            self._loop.call_as(self.process, self._protocol.resume_writing)
        self._send()

    def _end(self) -> None:
        if not self.peer.is_gone:
            self.peer.take(None)
        if self._is_closing:
            self._lose(None)

    def take(self, piece: bytes | None) -> None:
        if piece is None:
            self._peer_has_ended = True
        else:
            self._arrived.append(piece)
            self.arrived_bytes += len(piece)
        self._read_soon()

    def _read_soon(self) -> None:
        if self._protocol is not None and not self._is_delivering:
            self._is_delivering = True
            self._loop.call_as(self.process, self._read)

    def _read(self) -> None:
        self._is_delivering = False
        protocol = self._protocol
        assert protocol is not None
        while self._arrived and not self._is_reading_paused and not self._is_lost:
            piece = self._arrived.popleft()
            buffer: Any = protocol.get_buffer(len(piece))
            size = len(piece)
            if len(buffer) < size:
                size = len(buffer)
                self._arrived.appendleft(piece[size:])
                piece = piece[:size]
            buffer[:size] = piece
            self.arrived_bytes -= size
            protocol.buffer_updated(size)
        if not self._arrived and self._peer_has_ended and not self._is_lost:
            self._peer_has_ended = False
            if not protocol.eof_received():
                self.close()
        self.peer._send()
