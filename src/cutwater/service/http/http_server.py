"""Listens for HTTP: uvicorn, with bounds for connections, for the time until a request has come, and for idleness."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from cutwater.runtime import system
from cutwater.service.http.http_problems import PROBLEM_TYPE, encode_problem, make_problem
from cutwater.service.options import HEADER_BYTES_MAX, HttpLimits
from cutwater.service.service_counters import ServiceCounters

BACKLOG = 256
LINGER_SECONDS = 2.0
"""How long a client may go on sending what is not taken, until its connection is reset."""


class OpenConnections:
    """All connections of one listener. When there are too many, the one that has been idle longest makes room."""

    def __init__(self, limits: HttpLimits, counters: ServiceCounters) -> None:
        self.limits, self.counters = limits, counters
        self._idle: dict[BoundedProtocol, None] = {}
        """Connections without a request in progress, the longest idle first."""
        self.count = 0

    def take(self, connection: BoundedProtocol) -> bool:
        """Return whether a new connection has room."""
        if self.count >= self.limits.connections_max:
            longest = next(iter(self._idle), None)
            if longest is None:
                self.counters.connections_refused += 1
                return False
            self.counters.connections_replaced += 1
            longest.end()
        self.count += 1
        self.counters.connections_taken += 1
        self._idle[connection] = None
        return True

    def busy(self, connection: BoundedProtocol) -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: BoundedProtocol) -> None:
        self._idle.pop(connection, None)
        self._idle[connection] = None

    def gone(self, connection: BoundedProtocol) -> None:
        self._idle.pop(connection, None)
        self.count -= 1


class LingeringTransport:
    """A transport that ends in order while its client still sends. A connection that is closed with bytes unread is
    reset, and then the client may never see the answer, which says why its body is not taken."""

    def __init__(self, transport: asyncio.Transport, connection: BoundedProtocol) -> None:
        self._transport, self._connection = transport, connection
        self.is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_lingering:
            return
        if self._connection.conn.their_state is not h11.SEND_BODY or self._transport.is_closing():
            self._transport.close()
            return
        self.is_lingering = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        # It may have been paused, since nobody took what came.
        self._transport.resume_reading()
        self._connection.loop.call_later(LINGER_SECONDS, self._transport.close)


class BoundedProtocol(H11Protocol):
    """One connection of HTTP/1.1 that does not wait for ever."""

    open_connections: OpenConnections

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], **more: Any) -> None:
        super().__init__(config, server_state, app_state, **more)
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_counted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = LingeringTransport(transport, self)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        if not self.open_connections.take(self):
            problem = make_problem(503, "too_many_connections", "too many connections are open: try again later", "")
            self._say(503, problem.detail, "too_many_connections", [(b"retry-after", b"1")])
            transport.close()
            return
        self._is_counted = True
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_header()
        if self._is_counted:
            self._is_counted = False
            self.open_connections.gone(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_counted or self._lingering.is_lingering:
            return
        if self._header_timer is None and self.conn.their_state is h11.IDLE:
            self._expect_header()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget_header()
            self.open_connections.busy(self)

    def on_response_complete(self) -> None:
        if self._is_counted:
            self.open_connections.idle(self)
        super().on_response_complete()
        if self._is_counted and self.conn.their_state not in (h11.IDLE, h11.DONE):
            self.open_connections.busy(self)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP. The head of a request that is too large is noticed here as well."""
        self.open_connections.counters.refused["malformed_http"] += 1
        is_large = self.conn.trailing_data[0] != b"" and len(self.conn.trailing_data[0]) > HEADER_BYTES_MAX
        status, code = (431, "headers_too_large") if is_large else (400, "malformed_http")
        detail = f"the head of a request has {HEADER_BYTES_MAX} bytes at most" if is_large else "this is no HTTP/1.1"
        self._say(status, detail, code, [])
        self.transport.close()

    def end(self) -> None:
        """Close the connection now; it has no request in progress."""
        self.transport.abort()

    def _say(self, status: int, detail: str, code: str, headers: list[tuple[bytes, bytes]]) -> None:
        body = encode_problem(make_problem(status, code, detail, ""))
        head = [
            (b"content-type", PROBLEM_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"connection", b"close"),
            *headers,
        ]
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (h11.Response(status_code=status, headers=head), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

    def _expect_header(self) -> None:
        seconds = self.open_connections.limits.header_seconds_max
        self._header_timer = self.loop.call_later(seconds, self._header_is_late)

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_is_late(self) -> None:
        self._header_timer = None
        self.open_connections.counters.slow_requests += 1
        self.end()


class BoundedServer(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Serves an application of ASGI at some sockets until it is stopped."""

    def __init__(
        self,
        application: Any,
        sockets: list[socket.socket],
        counters: ServiceCounters,
        *,
        limits: HttpLimits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.connections = OpenConnections(limits or HttpLimits(), counters)
        # What strangers send is counted, and not written into the log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        protocol = type("ListenerProtocol", (BoundedProtocol,), {"open_connections": self.connections})
        config = Config(
            application,
            http=protocol,
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=self.connections.limits.idle_seconds_max,
            timeout_graceful_shutdown=self.connections.limits.stop_seconds,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
        )
        self._server = BoundedServer(config)
        self._sockets = sockets
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(self._sockets))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            await self._serving

    async def stop(self) -> None:
        """Take no further connections, and return when the requests in progress are answered, or the time is up."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


async def listening(host: str, port: int) -> list[socket.socket]:
    return await system.listen(host, port, BACKLOG)
