"""Binds listening sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from typing import Any

from cutwater.errors import InvalidArgument

_NUMERIC = socket.AI_PASSIVE | socket.AI_NUMERICHOST


async def listening_sockets(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listen on all addresses of ``host``; see ``system.listen``."""
    try:
        infos = await _addresses(host, port)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"cannot listen on {host}:{port}: the name has no address: {error}") from error
    sockets: list[socket.socket] = []
    failure = OSError(errno.EADDRNOTAVAIL, "the name has no address")
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
        # A port that was chosen for the first address is used for all.
        port = port or sock.getsockname()[1]
    else:
        if sockets:
            return sockets
    for sock in sockets:
        sock.close()
    failure.filename = f"{host or 'all addresses'}:{port}"
    raise failure


async def _addresses(host: str, port: int) -> list[Any]:
    with suppress(socket.gaierror):
        # A numeric address needs no name lookup, so this takes none of the event loop's threads.
        return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=_NUMERIC)
    return await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )


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
