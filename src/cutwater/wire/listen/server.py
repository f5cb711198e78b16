"""Listens for connections over TCP or TLS. A ``Gate`` decides which of them are accepted."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from cutwater.errors import InvalidArgument
from cutwater.protocol.errors import CannotListen
from cutwater.runtime import system
from cutwater.wire import inprocess_transport
from cutwater.wire.addresses import is_loopback
from cutwater.wire.client import check_port
from cutwater.wire.connection import Connection
from cutwater.wire.identity.auth import Authenticator
from cutwater.wire.identity.handshake import Endpoint, Peer
from cutwater.wire.listen.gate import IN_PROCESS, Gate
from cutwater.wire.options import ListenerOptions
from cutwater.wire.states import ConnectionState

_log = logging.getLogger(__name__)

ACCEPT_AGAIN_SECONDS = 0.1
"""Pause after ``accept`` failed, usually because the process has too many open files."""


class Listener:
    """Accepts connections. ``listen`` makes it. ``port`` is the given port, or the chosen one if that was 0."""

    def __init__(
        self, gate: Gate, sockets: list[socket.socket], tls: ssl.SSLContext | None, *, is_nearby: bool = False
    ) -> None:
        self.gate = gate
        self.host: str = sockets[0].getsockname()[0]
        self.port: int = sockets[0].getsockname()[1]
        self._sockets = sockets
        self._tls = tls
        self._close_door: Callable[[], None] | None = None
        if is_nearby:
            self._close_door = inprocess_transport.open_door(self.host, self.port, lambda: gate.enter(IN_PROCESS))
        self._attaching: set[asyncio.Task[None]] = set()
        self._accepting = [asyncio.create_task(self._accept(sock)) for sock in sockets]

    async def close(self, *, timeout_ms: int = 5_000) -> None:
        """Accept no more connections, let the open ones finish, and close."""
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
                sock, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                # The peer has closed the connection already.
                continue
            except OSError as error:
                _log.warning("%s:%s cannot accept a connection: %s", self.host, self.port, error)
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self.gate.relieve()
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            sock.setblocking(False)
            connection = self.gate.enter(address[0])
            task = loop.create_task(self._attach(sock, connection))
            if self._tls is not None:
                self.gate.attaching(connection, task.cancel)
            self._attaching.add(task)
            task.add_done_callback(self._attaching.discard)

    async def _attach(self, sock: socket.socket, connection: Connection) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            timeout = connection.options.handshake_ms_max / 1_000 if self._tls is not None else None
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, sock, ssl=self._tls, ssl_handshake_timeout=timeout
            )
            self.gate.attached(connection)
        except (OSError, ssl.SSLError, UnicodeDecodeError) as error:
            # A certificate may have names that are no text.
            self.gate.failed(connection, error)
            sock.close()
        except BaseException:
            connection.abort()
            sock.close()
            raise
        if connection.state is ConnectionState.CLOSED:
            sock.close()


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Wait until a connection comes in. ``loop.sock_accept`` could lose an accepted connection if it is cancelled."""
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
    trusts_process: bool = False,
    is_server: Callable[[Peer], bool] | None = None,
) -> Listener:
    """Listen on all addresses of ``host``.

    Listening beyond this machine needs TLS and authentication, unless ``insecure``; a TLS context that demands client
    certificates authenticates too. ``is_nearby``: peers on the same event loop need no socket, and with
    ``trusts_process`` no credential either. ``is_server`` says whether a peer is a server of the cluster, for which
    connections are reserved.
    """
    check_port(host, port)
    if not insecure:
        _check_exposure(host, tls, authenticate)
    gate = Gate(
        endpoint,
        options or ListenerOptions(),
        authenticate,
        on_open,
        trusts_process=trusts_process,
        is_server=is_server,
    )
    return Listener(gate, await _bind(host, port, gate.options.backlog), tls, is_nearby=is_nearby)


def _check_exposure(host: str, tls: ssl.SSLContext | None, authenticate: Authenticator | None) -> None:
    is_mutual = tls is not None and tls.verify_mode is ssl.CERT_REQUIRED
    if not is_loopback(host) and (tls is None or (authenticate is None and not is_mutual)):
        missing = "TLS" if tls is None else "authentication"
        raise InvalidArgument(
            f"listening on {host or 'all addresses'} without {missing} would let anyone on the network in: "
            "give certificates and tokens, listen on 127.0.0.1, or say that this is insecure"
        )


async def _bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    try:
        return await system.listen(host, port, backlog)
    except OSError as error:
        where, what = error.filename or f"{host}:{port}", f"[Errno {error.errno}] {error.strerror}"
        raise CannotListen(
            f"cannot listen on {where}: {what}: stop the process that uses it, or choose another address"
        ) from error
