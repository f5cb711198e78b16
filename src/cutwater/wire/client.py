"""Connects over TCP or TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument
from cutwater.protocol.errors import ConnectionLost, MalformedFrame, Untrusted
from cutwater.wire import inprocess_transport
from cutwater.wire.addresses import format_address, is_loopback
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint, Expect
from cutwater.wire.identity.server_certificates import Wants
from cutwater.wire.states import ConnectionState

PORT_MAX = 65_535
_OTHER_AUTHORITY = frozenset({18, 19, 20, 21})
"""Codes of verification of OpenSSL: self-signed, alone or in the chain, and no certificate of the issuer."""


async def connect(
    endpoint: Endpoint,
    host: str,
    port: int,
    *,
    timeout_ms: int,
    tls: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
    token: str = "",
    gateway: str = "",
    insecure: bool = False,
    expect: Expect | None = None,
    wants: Wants | None = None,
) -> Connection:
    """Return an open connection. Name resolution, TCP, TLS and handshake together take at most ``timeout_ms``.

    A token is not sent unencrypted to another machine, unless ``insecure``. ``gateway`` is the token of a gateway that
    connects for the caller with ``token``. A server on the same event loop is reached
    without a socket if it allows that (``inprocess_transport``). With ``expect``, the other side must prove which
    server it is, and this raises if it is not the expected one. ``wants`` judges the name in the certificate of the
    other side before the token is sent.
    """
    check_port(host, port)
    if (token or gateway) and tls is None and not insecure and not is_loopback(host):
        raise InvalidArgument(f"a token for {host} would travel in the clear: use TLS, or say that this is insecure")
    connection = Connection(
        endpoint, token=token, gateway=gateway, expect=expect, dialled=format_address(host, port), wants=wants
    )
    door = inprocess_transport.door_to(host, port) if tls is None else None

    async def attach() -> None:
        if door is not None:
            inprocess_transport.attach(connection, door, host, port)
            return
        name = server_hostname if tls is not None else None
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: connection, host, port, ssl=tls, server_hostname=name
            )
        except ConnectionResetError as error:
            # Without TLS, a connection that was accepted is not reset before it is attached.
            message = f"{host}:{port} broke off TLS; it may want a client certificate, or not speak TLS at all"
            raise ConnectionLost(message, outcome_unknown=False) from error

    return await greeted(connection, attach, f"{host}:{port}", timeout_ms)


async def greeted(
    connection: Connection, attach: Callable[[], Awaitable[None]], address: str, timeout_ms: int
) -> Connection:
    """Attach a connection to a transport and wait until both sides have greeted each other."""
    is_attached = False
    try:
        async with asyncio.timeout(timeout_ms / 1_000):
            await attach()
            is_attached = True
            await connection.opened
    except TimeoutError:
        connection.abort()
        silent = ": a process listens there, but does not greet, and may be no Cutwater server" if is_attached else ""
        raise DeadlineExceeded(f"{address} could not be connected to within {timeout_ms} ms{silent}") from None
    except ssl.SSLError as error:
        connection.abort()
        raise Untrusted(f"{address}: TLS failed: {error}{_way_out(error)}") from error
    except UnicodeDecodeError as error:
        connection.abort()
        raise Untrusted(f"{address}: TLS failed: the certificate there has a name that is no text: {error}") from error
    except UnicodeError as error:
        connection.abort()
        raise InvalidArgument(f"{address} is no address: {error}") from error
    except OSError as error:
        connection.abort()
        message = f"{address} cannot be reached: {str(error) or type(error).__name__}"
        raise ConnectionLost(message, outcome_unknown=False) from error
    except BaseException:
        connection.abort()
        raise
    if connection.state is ConnectionState.FAILED or connection.state is ConnectionState.CLOSED:
        assert connection.error is not None
        # The caller gets an error instead of the connection, so it must be closed here.
        connection.abort()
        if isinstance(connection.error, MalformedFrame) and connection.peer is None:
            raise MalformedFrame(
                f"{address} is no Cutwater server, as it does not answer as one: check the address and the port"
            ) from connection.error
        raise _definite(connection.error)
    return connection


def _way_out(error: ssl.SSLError) -> str:
    """Return what to do about the usual mistakes, as OpenSSL says only what it met."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _OTHER_AUTHORITY:
        return (
            ". No authority that is trusted here has issued the certificate there: name the file with the authority of "
            "this cluster's servers (--tls-ca, tls_context)"
        )
    if error.reason == "WRONG_VERSION_NUMBER":
        return ". The server may not use TLS: check the address, or connect without TLS"
    return ""


def check_port(host: str, port: int) -> None:
    if not 0 <= port <= PORT_MAX:
        raise InvalidArgument(f"{host}:{port}: a port is a number from 0 to {PORT_MAX}")


def _definite(error: CutwaterError) -> CutwaterError:
    """Mark the outcome as known: no request was sent yet, so nothing can have been done."""
    if not isinstance(error, ConnectionLost):
        return error
    definite = ConnectionLost(error.message, outcome_unknown=False)
    if error.ended_greeting:
        definite.ended_greeting = True
    return definite
