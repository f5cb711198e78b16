"""A TCP proxy on loopback that fails as networks do: it refuses, resets, drops one direction or both, and delays.

Placed between two real processes, it lets a test cut the link between them and nothing else::

    async with FaultProxy("127.0.0.1", node_port) as proxy:
        ...                                   # others connect to proxy.address
        proxy.swallow(to_target=True, from_target=True)
        ...
        proxy.heal()

Several clients may connect through one proxy. ``among`` selects those that faults apply to by the first bytes that they
send, so that a link between two nodes can be cut while both talk to all others::

        proxy.among = opened_by("storage node", "2")
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import msgspec

from cutwater.wire.addresses import format_address

CHUNK_BYTES = 64 * 1024
CONNECTIONS_MAX = 1_024


class FaultProxy:
    """A proxy to one target. Starts without faults. Faults apply to existing and to new connections."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: dict[asyncio.StreamWriter, bool] = {}
        """The open connections, and whether faults apply to them."""
        self.among: Callable[[bytes], bool] | None = None
        """Takes the first bytes of a connection and returns whether faults apply to it; None means all connections.
        Must be set before the first connection."""
        self._flows = {True: asyncio.Event(), False: asyncio.Event()}
        """For each direction, True to the target and False from it: set while bytes pass."""
        self._refuses = False
        self._swallowed: dict[bool, bool] = {True: False, False: False}
        self.delay_seconds = 0.0
        self.connections = 0
        """Number of connections accepted so far to which faults apply."""
        for flow in self._flows.values():
            flow.set()

    @property
    def address(self) -> str:
        return format_address("127.0.0.1", self.port)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.break_off()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    # Faults.

    def heal(self) -> None:
        """End all faults. Bytes that were held arrive. Bytes that were swallowed are lost, and their connections are
        reset."""
        was_swallowed = any(self._swallowed.values())
        self._refuses, self._swallowed, self.delay_seconds = False, {True: False, False: False}, 0.0
        for flow in self._flows.values():
            flow.set()
        if was_swallowed:
            self.break_off()

    def break_off(self) -> None:
        """Reset all connections."""
        for writer, is_meant in list(self._writers.items()):
            if is_meant:
                writer.transport.abort()

    def refuse(self) -> None:
        """Reset all connections, and every new one at once."""
        self._refuses = True
        self.break_off()

    def hold(self, *, to_target: bool = False, from_target: bool = False) -> None:
        """Delay bytes, as on a network that is cut and will come back: neither side gets an error."""
        for direction, held in ((True, to_target), (False, from_target)):
            if held:
                self._flows[direction].clear()

    def swallow(self, *, to_target: bool = False, from_target: bool = False) -> None:
        """Drop bytes. ``from_target`` alone loses answers: requests are executed, but their senders get no reply."""
        self._swallowed = {True: to_target, False: from_target}

    # Forwarding.

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        outward: asyncio.StreamWriter | None = None
        self._writers[writer] = self.among is None
        try:
            first = await reader.read(CHUNK_BYTES) if self.among is not None else b""
            is_meant = self._writers[writer] = self.among is None or self.among(first)
            self.connections += is_meant
            if (self._refuses and is_meant) or len(self._writers) > CONNECTIONS_MAX:
                return
            inward, outward = await asyncio.open_connection(*self._target)
            self._writers[outward] = is_meant
            await asyncio.gather(
                self._pump(reader, outward, True, is_meant, first), self._pump(inward, writer, False, is_meant)
            )
        except (OSError, RuntimeError, asyncio.CancelledError):
            # An aborted transport of uvloop raises a RuntimeError.
            return
        finally:
            for end in (writer, outward):
                if end is not None:
                    self._writers.pop(end, None)
                    end.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        to_target: bool,
        is_meant: bool,
        first: bytes = b"",
    ) -> None:
        while data := first or await reader.read(CHUNK_BYTES):
            first = b""
            if is_meant:
                await self._flows[to_target].wait()
                if self._swallowed[to_target]:
                    continue
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def opened_by(role: str, name: str) -> Callable[[bytes], bool]:
    """Return a function that tells whether a connection begins with this greeting."""
    greeting = msgspec.msgpack.encode(role) + msgspec.msgpack.encode(name)
    return lambda data: greeting in data
