"""Networks to run the same tests on, and how tests of coroutines run here.

``network`` is one of memory, nearby, TCP, TLS (all with uvloop) and TCP with the loop of the standard library. A test
that is a coroutine runs on the loop of its network, is bounded in time, and must leave nothing behind: no task, no
connection, no byte of a budget.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import ssl
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trustme

from cutwater.errors import CutwaterError
from cutwater.protocol.errors import from_wire
from cutwater.runtime.event_loop import new_event_loop
from cutwater.types import ClusterId
from cutwater.wire import inprocess_transport
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.client import connect
from cutwater.wire.codec import FrameDecoder
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.inprocess_transport import InProcessTransport
from cutwater.wire.listen.server import Listener, listen
from cutwater.wire.messages import FIXED, FIXED_BYTES, FrameKind, WireFrame
from cutwater.wire.options import ListenerOptions, WireOptions
from tests.memory_network import Faults, MemoryListener, MemoryNetwork

# Lets the tests of this folder import ``wire_kit`` by name.
sys.path.insert(0, str(Path(__file__).resolve().parent))

TEST_SECONDS_MAX = 20
CONNECT_MS = 5_000


class Raw(asyncio.BufferedProtocol):
    """A peer that need not keep to the protocol: sends any bytes, and reads only if told to."""

    def __init__(self, *, stays: bool) -> None:
        self.transport: Any = None
        self.frames: list[WireFrame] = []
        self.stays = stays
        """Whether it keeps its end open when the other has closed."""
        self.made = asyncio.get_running_loop().create_future()
        self.gone = asyncio.get_running_loop().create_future()
        self._decoder = FrameDecoder(1 << 26, 1 << 20)
        self._buffer = bytearray(65_536)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.made.set_result(None)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._decoder.feed(bytes(self._buffer[:nbytes]))
        self.frames += iter(self._decoder.next_frame, None)

    def eof_received(self) -> bool:
        return self.stays

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set_result(None)

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    async def until(self, condition: Callable[[list[WireFrame]], object]) -> None:
        async with asyncio.timeout(5):
            while not condition(self.frames):
                await asyncio.sleep(0.005)

    async def farewell(self) -> CutwaterError:
        """The reason that the other side gave before it closed."""
        await self.until(lambda frames: any(frame.kind == FrameKind.GOAWAY for frame in frames))
        if not self.stays:
            await asyncio.wait_for(self.gone, 5)
        (error,) = [from_wire(frame.header.error) for frame in self.frames if frame.kind == FrameKind.GOAWAY]
        return error


class NearRaw(Raw):
    """Sends any frames: bytes are cut where they say that a frame ends."""

    def __init__(self, *, stays: bool) -> None:
        super().__init__(stays=stays)
        self._unsent = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(InProcessTransport, transport).inbox.limit(1 << 26, lambda kind, call, size: True)
        super().connection_made(transport)

    def frames_received(self) -> None:
        self.frames += iter(self.transport.inbox.next_frame, None)

    def send(self, data: bytes) -> None:
        self._unsent += data
        while len(self._unsent) >= FIXED_BYTES:
            body_bytes, header_bytes, call, kind, _ = FIXED.unpack_from(self._unsent)
            middle = FIXED_BYTES + header_bytes
            end = middle + body_bytes
            if end > len(self._unsent):
                break
            self.transport.write_frame(kind, call, self._unsent[FIXED_BYTES:middle], self._unsent[middle:end])
            self._unsent = self._unsent[end:]


class Network(ABC):
    """What the tests need of a network. Everything made here is closed after the test."""

    has_bytes = True
    """Whether there can be anything between two sides that is not a frame."""
    loop_factory = staticmethod(new_event_loop)

    def __init__(self) -> None:
        self.listeners: list[Any] = []
        self.connections: list[Connection] = []
        self.raws: list[Raw] = []

    async def listen(
        self,
        methods: Methods | None = None,
        *,
        options: WireOptions | None = None,
        limits: ListenerOptions | None = None,
        cluster: int = 1,
        **more: Any,
    ) -> Any:
        endpoint = Endpoint(ClusterId(cluster), "server", "s1", methods or Methods(), options or WireOptions())
        listener = await self._listen(endpoint, limits, more)
        self.listeners.append(listener)
        return listener

    async def connect(
        self,
        listener: Any,
        methods: Methods | None = None,
        *,
        options: WireOptions | None = None,
        cluster: int = 1,
        timeout_ms: int = CONNECT_MS,
        **more: Any,
    ) -> Connection:
        endpoint = Endpoint(ClusterId(cluster), "client", "c1", methods or Methods(), options or WireOptions())
        connection = await self._connect(listener, endpoint, timeout_ms, more)
        self.connections.append(connection)
        return connection

    async def raw(self, listener: Any, *, reading: bool = True, stays: bool = False) -> Raw:
        raw = Raw(stays=stays) if self.has_bytes else NearRaw(stays=stays)
        await self._raw(listener, raw)
        await raw.made
        if not reading:
            raw.transport.pause_reading()
        self.raws.append(raw)
        return raw

    async def close(self) -> None:
        for raw in self.raws:
            raw.transport.abort()
        for connection in self.connections:
            connection.abort()
        for listener in self.listeners:
            await listener.close(timeout_ms=500)
        async with asyncio.timeout(5):
            for connection in self.connections:
                await connection.closed
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)
        for listener in self.listeners:
            left = listener.gate.snapshot()
            assert (left.connections, left.handshakes, left.refusals, left.bytes) == (0, 0, 0, 0)

    @abstractmethod
    async def _listen(self, endpoint: Endpoint, limits: ListenerOptions | None, more: dict[str, Any]) -> Any: ...

    @abstractmethod
    async def _connect(
        self, listener: Any, endpoint: Endpoint, timeout_ms: int, more: dict[str, Any]
    ) -> Connection: ...

    @abstractmethod
    async def _raw(self, listener: Any, raw: Raw) -> None: ...


class Memory(Network):
    def __init__(self) -> None:
        super().__init__()
        self.net = MemoryNetwork()
        self.faults = Faults()
        self._numbers = itertools.count()

    async def _listen(self, endpoint: Endpoint, limits: ListenerOptions | None, more: dict[str, Any]) -> MemoryListener:
        return self.net.listen(endpoint, f"node-{next(self._numbers)}", options=limits, **more)

    async def _connect(self, listener: Any, endpoint: Endpoint, timeout_ms: int, more: dict[str, Any]) -> Connection:
        more.setdefault("faults", self.faults)
        return await self.net.connect(endpoint, listener.address, timeout_ms=timeout_ms, **more)

    async def _raw(self, listener: Any, raw: Raw) -> None:
        await self.net.attach_raw(listener.address, raw, self.faults)


class Tcp(Network):
    async def _listen(self, endpoint: Endpoint, limits: ListenerOptions | None, more: dict[str, Any]) -> Listener:
        return await listen(endpoint, "127.0.0.1", 0, options=limits, **more)

    async def _connect(self, listener: Any, endpoint: Endpoint, timeout_ms: int, more: dict[str, Any]) -> Connection:
        return await connect(endpoint, "127.0.0.1", listener.port, timeout_ms=timeout_ms, **more)

    async def _raw(self, listener: Any, raw: Raw) -> None:
        await asyncio.get_running_loop().create_connection(lambda: raw, "127.0.0.1", listener.port)


class TcpOnAsyncio(Tcp):
    loop_factory = staticmethod(asyncio.new_event_loop)


class Near(Tcp):
    """Both sides on one loop, without sockets."""

    has_bytes = False

    async def _listen(self, endpoint: Endpoint, limits: ListenerOptions | None, more: dict[str, Any]) -> Listener:
        return await super()._listen(endpoint, limits, {"is_nearby": True, **more})

    async def _raw(self, listener: Any, raw: Raw) -> None:
        door = inprocess_transport.door_to("127.0.0.1", listener.port)
        assert door is not None
        assert isinstance(raw, NearRaw)
        inprocess_transport.attach(raw, door, "127.0.0.1", listener.port)


class Tls(Tcp):
    def __init__(self, certificates: Certificates) -> None:
        super().__init__()
        self.certificates = certificates

    async def _listen(self, endpoint: Endpoint, limits: ListenerOptions | None, more: dict[str, Any]) -> Listener:
        more.setdefault("tls", self.certificates.server())
        return await super()._listen(endpoint, limits, more)

    async def _connect(self, listener: Any, endpoint: Endpoint, timeout_ms: int, more: dict[str, Any]) -> Connection:
        more.setdefault("tls", self.certificates.client())
        return await super()._connect(listener, endpoint, timeout_ms, more)

    async def _raw(self, listener: Any, raw: Raw) -> None:
        await asyncio.get_running_loop().create_connection(
            lambda: raw, "127.0.0.1", listener.port, ssl=self.certificates.client()
        )


class Certificates:
    """An authority, and contexts that trust it."""

    def __init__(self) -> None:
        self.authority = trustme.CA()
        self._server = self.authority.issue_cert("127.0.0.1", "localhost")
        self._client = self.authority.issue_cert("client@example.org", common_name="client-1")

    def server(self, *, mutual: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server.configure_cert(context)
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            self.authority.configure_trust(context)
        return context

    def client(self, *, mutual: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.authority.configure_trust(context)
        if mutual:
            self._client.configure_cert(context)
        return context


@pytest.fixture(scope="session")
def certificates() -> Certificates:
    return Certificates()


@pytest.fixture(scope="session")
def other_certificates() -> Certificates:
    """Of another authority."""
    return Certificates()


@pytest.fixture(params=["memory", "near", "tcp", "tls", "tcp-on-asyncio"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    if request.param == "tls":
        yield Tls(request.getfixturevalue("certificates"))
    else:
        yield {"memory": Memory, "near": Near, "tcp": Tcp, "tcp-on-asyncio": TcpOnAsyncio}[request.param]()


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def tcp() -> Tcp:
    return Tcp()


@pytest.fixture
def tls(certificates: Certificates) -> Tls:
    return Tls(certificates)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on the loop of its network."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    (own,) = [value for value in arguments.values() if isinstance(value, Network)]

    async def bounded() -> None:
        async with asyncio.timeout(TEST_SECONDS_MAX):
            try:
                await pyfuncitem.obj(**arguments)
            finally:
                await own.close()

    with asyncio.Runner(loop_factory=own.loop_factory) as runner:
        runner.run(bounded())
    return True
