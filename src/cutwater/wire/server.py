"""Listen for connections over TCP or TLS.

``Gate`` decides who gets in, and knows no sockets; ``Listener`` is a gate with sockets. Everyone beyond a limit is told
so; when many have to be told at once, the others wait to be accepted. Those who are in notice nothing of it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import Struct

from cutwater.errors import CutwaterError, InvalidArgument, ResourceExhausted, Unavailable
from cutwater.wire import nearby
from cutwater.wire.auth import Authenticator
from cutwater.wire.client import check_port, is_loopback
from cutwater.wire.connection import Connection
from cutwater.wire.errors import CannotListen
from cutwater.wire.handshake import Endpoint
from cutwater.wire.options import Budget, ListenerOptions
from cutwater.wire.states import State

_log = logging.getLogger(__name__)

ACCEPT_AGAIN_SECONDS = 0.1
"""After accepting failed, usually because the process has too many open files."""


class GateSnapshot(Struct, frozen=True):
    """Who is in, and what they hold together."""

    connections: int
    handshakes: int
    refusals: int
    refused_total: int
    bytes: int


class Gate:
    """Lets connections in, up to the limits. ``on_open`` is told of each one that has greeted."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: ListenerOptions,
        authenticate: Authenticator | None,
        on_open: Callable[[Connection], None] | None,
    ) -> None:
        self.endpoint = endpoint
        self.options = options
        self.budget = Budget(options.bytes_max)
        self._authenticate = authenticate
        self._on_open = on_open
        self._greeting: set[Connection] = set()
        self._open: set[Connection] = set()
        self._refusals: set[Connection] = set()
        self._refused_total = 0
        self._room = asyncio.Event()
        """Set whenever someone left."""
        self._is_closing = False

    @property
    def connections(self) -> frozenset[Connection]:
        """Those that have greeted."""
        return frozenset(self._open)

    def snapshot(self) -> GateSnapshot:
        return GateSnapshot(
            len(self._open),
            len(self._greeting),
            len(self._refusals),
            self._refused_total,
            self.budget.used,
        )

    async def enter(self) -> Connection:
        """A connection for someone who knocks. It may be one that only says no; if there are too many of those already,
        this waits, at most as long as a connection may take to hear that it is refused."""
        while (refusal := self._objection()) is not None and len(self._refusals) >= self.options.refusals_max:
            self._room.clear()
            await self._room.wait()
        if refusal is None:
            connection = Connection(
                self.endpoint,
                authenticate=self._authenticate,
                budget=self.budget,
                on_open=self._greeted,
                on_closed=self._left,
            )
            self._greeting.add(connection)
            return connection
        self._refused_total += 1
        connection = Connection(self.endpoint, refusal=refusal, on_closed=self._left)
        self._refusals.add(connection)
        return connection

    def _objection(self) -> CutwaterError | None:
        options = self.options
        if self._is_closing:
            return Unavailable("this listener is closing: connect elsewhere")
        if len(self._open) + len(self._greeting) >= options.connections_max:
            return ResourceExhausted(
                f"this listener has {options.connections_max} connections already", retry_ms=options.retry_ms
            )
        if len(self._greeting) >= options.handshakes_max:
            return ResourceExhausted(
                f"{options.handshakes_max} others are just connecting to this listener", retry_ms=options.retry_ms
            )
        return None

    def _greeted(self, connection: Connection) -> None:
        self._greeting.discard(connection)
        self._open.add(connection)
        if self._on_open is not None:
            self._on_open(connection)

    def _left(self, connection: Connection) -> None:
        self._greeting.discard(connection)
        self._open.discard(connection)
        self._refusals.discard(connection)
        self._room.set()

    async def close_all(self, timeout_ms: int) -> None:
        """Close every connection; those that have greeted may finish what they do."""
        self._is_closing = True
        strangers = [*self._greeting, *self._refusals]
        for connection in strangers:
            connection.abort()
        closing = [connection.close(timeout_ms=timeout_ms) for connection in self._open]
        await asyncio.gather(*closing, *(connection.closed for connection in strangers), return_exceptions=True)


class Listener:
    """Made by ``listen``. ``port`` is the one that was given, or chosen if that was 0."""

    def __init__(
        self, gate: Gate, sockets: list[socket.socket], tls: ssl.SSLContext | None, *, is_nearby: bool = False
    ) -> None:
        self.gate = gate
        self.host: str = sockets[0].getsockname()[0]
        self.port: int = sockets[0].getsockname()[1]
        self._sockets = sockets
        self._tls = tls
        self._close_door = nearby.open_door(self.host, self.port, gate.enter) if is_nearby else None
        self._attaching: set[asyncio.Task[None]] = set()
        self._accepting = [asyncio.create_task(self._accept(sock)) for sock in sockets]

    async def close(self, *, timeout_ms: int = 5_000) -> None:
        """Let nobody in any more, let everyone finish, close."""
        if self._close_door is not None:
            self._close_door()
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        for attaching in self._attaching:
            attaching.cancel()
        await asyncio.gather(*self._attaching, return_exceptions=True)
        await self.gate.close_all(timeout_ms)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await _readable(loop, listening)
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                # Whoever knocked is gone again.
                continue
            except OSError as error:
                _log.warning("%s:%s cannot accept a connection: %s", self.host, self.port, error)
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            sock.setblocking(False)
            try:
                connection = await self.gate.enter()
            except BaseException:
                sock.close()
                raise
            task = loop.create_task(self._attach(sock, connection))
            self._attaching.add(task)
            task.add_done_callback(self._attaching.discard)

    async def _attach(self, sock: socket.socket, connection: Connection) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            timeout = connection.greeting_ms_max / 1_000 if self._tls is not None else None
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, sock, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except (OSError, ssl.SSLError) as error:
            _log.info("%s:%s: someone could not be let in: %s", self.host, self.port, error)
            connection.abort()
            sock.close()
        except BaseException:
            connection.abort()
            sock.close()
            raise
        if connection.state is State.CLOSED:
            sock.close()


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Wait until someone knocks. ``loop.sock_accept`` would lose who has just come in if it is cancelled."""
    knocked: asyncio.Future[None] = loop.create_future()

    def knock() -> None:
        if not knocked.done():
            knocked.set_result(None)

    loop.add_reader(sock, knock)
    try:
        await knocked
    finally:
        loop.remove_reader(sock)


async def listen(
    endpoint: Endpoint,
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    authenticate: Authenticator | None = None,
    insecure: bool = False,
    options: ListenerOptions | None = None,
    on_open: Callable[[Connection], None] | None = None,
    is_nearby: bool = False,
) -> Listener:
    """Listen on all addresses of ``host``. Beyond this machine only with TLS and authentication, unless ``insecure``;
    a TLS context that demands client certificates authenticates too. ``is_nearby``: those on the same event loop need
    no socket."""
    check_port(host, port)
    if not insecure:
        _check_exposure(host, tls, authenticate)
    gate = Gate(endpoint, options or ListenerOptions(), authenticate, on_open)
    return Listener(gate, await _bind(host, port, gate.options.backlog), tls, is_nearby=is_nearby)


def _check_exposure(host: str, tls: ssl.SSLContext | None, authenticate: Authenticator | None) -> None:
    is_mutual = tls is not None and tls.verify_mode is ssl.CERT_REQUIRED
    if not is_loopback(host) and (tls is None or (authenticate is None and not is_mutual)):
        missing = "TLS" if tls is None else "authentication"
        raise InvalidArgument(
            f"listening on {host or 'all addresses'} without {missing} would let anyone on the network in: "
            "give certificates and tokens, listen on 127.0.0.1, or say that this is insecure"
        )


async def _addresses(host: str, port: int) -> list[Any]:
    with suppress(socket.gaierror):
        # Of what is an address already, nobody need be asked; so it takes none of the event loop's threads.
        return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=_NUMERIC)
    return await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )


_NUMERIC = socket.AI_PASSIVE | socket.AI_NUMERICHOST


async def _bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    try:
        infos = await _addresses(host, port)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"cannot listen on {host}:{port}: the name has no address: {error}") from error
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(infos):
        try:
            sock = _listening(family, kind, protocol, (address[0], port, *address[2:]), backlog)
        except OSError as error:
            failure = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
            # A name like localhost may have an address of a family that this machine does not have.
            continue
        sockets.append(sock)
        # A port that was chosen for the first address is the port of all.
        port = port or sock.getsockname()[1]
    else:
        if sockets:
            return sockets
    for sock in sockets:
        sock.close()
    where = f"{host or 'all addresses'}:{port}"
    raise CannotListen(f"cannot listen on {where}: {failure}: stop who uses it, or choose another address") from failure


def _listening(family: int, kind: int, protocol: int, address: tuple[Any, ...], backlog: int) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock
