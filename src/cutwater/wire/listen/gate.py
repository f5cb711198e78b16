"""Decides which connections a listener accepts, and how long a peer may take to greet. Knows no sockets (ADR 0037).

A connection is *waiting* from the moment it is accepted until its handshake is done, TLS included, and *open* after
that. The two have separate room, so connections that show no credential never take a place from those that did.

- waiting: at most ``handshakes_max``, of these ``handshakes_per_address_max`` from one address, each for at most
  ``handshake_ms_max``. A new connection is never refused here: it takes the place of the oldest waiting connection
  of the address that has most of them. An honest peer is done within milliseconds, so silent peers are dropped.
- open: ``connections_max`` clients, and beyond that ``server_connections_reserved`` servers of the cluster. An address
  with many clients must leave ``other_connections_reserved`` places free for others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from cutwater.errors import CutwaterError, DeadlineExceeded, ResourceExhausted
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.wire.connection import Connection
from cutwater.wire.identity.auth import ANONYMOUS, Authenticator, Credentials, PeerIdentity
from cutwater.wire.identity.handshake import Endpoint, Peer
from cutwater.wire.options import Budget, ListenerOptions
from cutwater.wire.states import ConnectionState

_log = logging.getLogger(__name__)

LOG_SECONDS = 1.0
"""Refused connections are logged at most once in this time, so that a flood of them does not fill a disk."""

IN_PROCESS = ""
"""The address of a connection from the same event loop. It has no limit per address and is never evicted."""

TLS_FAILED, CLOSED = "tls", "closed"
"""Why a connection was not let in, if there is no error with a code."""

SERVER_ROLES = frozenset({STORAGE_NODE, METADATA_NODE})
"""Roles of servers. A peer that claims one gets the room of a server until it has proved that it is one."""
_IPV6_NETWORK_BITS = 64


def address_key(host: str) -> str:
    """Return the unit of limits per address: an IPv4 address, or the /64 network of an IPv6 address.

    One host owns the whole network.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False).network_address)


class GateSnapshot(Struct, frozen=True):
    """Numbers of connections by state, and the bytes that they hold together."""

    connections: int
    handshakes: int
    refusals: int
    refused_total: int
    evicted_total: int
    late_total: int
    bytes: int
    not_let_in: dict[str, int]
    """Connections that ended before their handshake was done, by the code of the error. ``tls``: TLS failed."""


class _Guest:
    """A connection and the address it comes from."""

    __slots__ = ("address", "connection", "cut", "is_server", "timer")

    def __init__(self, connection: Connection, address: str) -> None:
        self.connection, self.address = connection, address
        self.is_server = False
        self.timer: asyncio.TimerHandle | None = None
        self.cut: Callable[[], object] | None = None
        """Aborts a TLS handshake that is under way. If it is None, the peer can be told why it is dropped."""


class Strangers:
    """Logs connections that were refused, with the number of refusals since the last line."""

    def __init__(self) -> None:
        self._count = 0
        self._logged = float("-inf")

    def note(self, address: str, reason: str) -> None:
        self._count += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged < LOG_SECONDS:
            return
        more = f" ({self._count - 1} others before)" if self._count > 1 else ""
        _log.info("a connection from %s was not let in%s: %s", address or "this process", more, reason)
        self._logged, self._count = now, 0


class Gate:
    """Admits connections, up to the limits. ``on_open`` is called for each connection that has greeted."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: ListenerOptions,
        authenticate: Authenticator | None,
        on_open: Callable[[Connection], None] | None,
        *,
        trusts_process: bool = False,
        is_server: Callable[[Peer], bool] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.options = options
        self.budget = Budget(options.bytes_max)
        self._authenticate = authenticate
        self._trusts_process = trusts_process
        """Connections from the same event loop need no credential."""
        self._is_server = is_server or (lambda peer: False)
        """Whether a peer is a server of the cluster, for which room is reserved. Its own claims do not decide."""
        self._on_open = on_open
        self._waiting: dict[Connection, _Guest] = {}
        """Oldest first."""
        self._open: dict[Connection, _Guest] = {}
        self._refusals: dict[Connection, None] = {}
        """Connections that are being told why they cannot stay."""
        self._waiting_from: Counter[str] = Counter()
        self._clients_from: Counter[str] = Counter()
        self._clients = 0
        self._servers = 0
        self._refused_total = self._evicted_total = self._late_total = 0
        self._not_let_in: Counter[str] = Counter()
        self.strangers = Strangers()

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Connections whose handshake is done, oldest first."""
        return tuple(self._open)

    def snapshot(self) -> GateSnapshot:
        return GateSnapshot(
            len(self._open),
            len(self._waiting),
            len(self._refusals),
            self._refused_total,
            self._evicted_total,
            self._late_total,
            self.budget.used,
            dict(self._not_let_in),
        )

    def enter(self, address: str) -> Connection:
        """Return a connection for a peer from this address. Not called after ``close_all``."""
        key = address_key(address)
        self._make_room(key)
        guest: _Guest
        connection = Connection(
            self.endpoint,
            authenticate=lambda credentials: self._judge(guest, credentials),
            budget=self.budget,
            on_open=self._greeted,
            on_closed=self._left,
        )
        guest = _Guest(connection, key)
        self._waiting[connection] = guest
        self._waiting_from[key] += 1
        loop = asyncio.get_running_loop()
        guest.timer = loop.call_later(self.options.handshake_ms_max / 1_000, self._late, guest)
        return connection

    def attaching(self, connection: Connection, cut: Callable[[], object]) -> None:
        """Note that TLS is being negotiated, until ``attached``. ``cut`` ends it, without telling the peer why."""
        guest = self._waiting.get(connection)
        if guest is not None:
            guest.cut = cut

    def attached(self, connection: Connection) -> None:
        guest = self._waiting.get(connection)
        if guest is not None:
            guest.cut = None

    def failed(self, connection: Connection, error: Exception) -> None:
        """Forget a connection whose TLS handshake failed, or whose peer closed it before it was attached."""
        guest = self._forget_waiting(connection)
        if guest is not None:
            self._not_let_in[TLS_FAILED if isinstance(error, ssl.SSLError) else CLOSED] += 1
            self.strangers.note(guest.address, str(error) or "it closed the connection before it had greeted")
        connection.abort()

    # Room for waiting connections.

    def relieve(self) -> None:
        """Close the oldest waiting connection, if there is one, because the process has no file descriptor left."""
        greediest = self._greediest()
        if greediest is not None:
            self._evicted_total += 1
            guest = self._oldest(greediest)
            self._forget_waiting(guest.connection)
            if guest.cut is not None:
                guest.cut()
            guest.connection.abort()

    def _greediest(self) -> str | None:
        others = ((count, address) for address, count in self._waiting_from.items() if address != IN_PROCESS)
        return max(others, default=(0, None))[1]

    def _make_room(self, key: str) -> None:
        """Drop waiting connections until one more from ``key`` fits.

        The limit of the address itself comes first, so an address that floods the listener drops its own connections.
        """
        options = self.options
        while key != IN_PROCESS and self._waiting_from[key] >= options.handshakes_per_address_max:
            self._evict(key, f"{options.handshakes_per_address_max} connections from one address")
        while len(self._waiting) - self._waiting_from[IN_PROCESS] >= options.handshakes_max:
            greediest = self._greediest()
            assert greediest is not None
            self._evict(greediest, f"{options.handshakes_max} connections")

    def _evict(self, key: str, what: str) -> None:
        guest = self._oldest(key)
        self._evicted_total += 1
        self._drop(
            guest,
            ResourceExhausted(
                f"{what} have not finished their handshake, and the oldest of them makes room for another: "
                "send the handshake at once after connecting",
                retry_ms=self.options.retry_ms,
            ),
        )

    def _oldest(self, key: str) -> _Guest:
        """Return the connection to drop. Connections that were refused already and only linger come first."""
        mine = [guest for guest in self._waiting.values() if guest.address == key]
        return next((guest for guest in mine if guest.connection.state is ConnectionState.FAILED), mine[0])

    def _late(self, guest: _Guest) -> None:
        self._late_total += 1
        self._drop(guest, DeadlineExceeded(f"there was no handshake within {self.options.handshake_ms_max} ms"))

    def _drop(self, guest: _Guest, reason: CutwaterError) -> None:
        """Drop a waiting connection. The peer is told why, if that is possible and few others are being told."""
        self._forget_waiting(guest.connection)
        connection = guest.connection
        self.strangers.note(guest.address, reason.message)
        if guest.cut is not None:
            guest.cut()
            connection.abort()
        elif connection.state is ConnectionState.FAILED or len(self._refusals) >= self.options.refusals_max:
            connection.abort()
        else:
            self._refusals[connection] = None
            connection.fail(reason)

    def _forget_waiting(self, connection: Connection) -> _Guest | None:
        guest = self._waiting.pop(connection, None)
        if guest is None:
            return None
        self._waiting_from[guest.address] -= 1
        if not self._waiting_from[guest.address]:
            del self._waiting_from[guest.address]
        if guest.timer is not None:
            guest.timer.cancel()
        return guest

    # Room for open connections.

    def _judge(self, guest: _Guest, credentials: Credentials) -> PeerIdentity:
        """Return the identity if there is room for one more of its sort. A server has yet to prove that it is one."""
        identity = ANONYMOUS
        if self._authenticate is not None and not (self._trusts_process and guest.address == IN_PROCESS):
            identity = self._authenticate(credentials)
        guest.is_server = credentials.role in SERVER_ROLES
        objection = self._objection(guest)
        if objection is not None:
            self._refused_total += 1
            raise ResourceExhausted(objection, retry_ms=self.options.retry_ms)
        return identity

    def _objection(self, guest: _Guest) -> str | None:
        options = self.options
        clients_max = options.connections_max
        if guest.is_server:
            # Servers use their own room first, and then the room of clients.
            if self._servers < options.server_connections_reserved or self._clients < clients_max:
                return None
            return f"this listener has {clients_max} connections already, and {self._servers} from servers"
        if self._clients >= clients_max:
            return f"this listener has {clients_max} connections already, and keeps the rest for servers of the cluster"
        mine = self._clients_from[guest.address]
        left = clients_max - options.other_connections_reserved
        if guest.address != IN_PROCESS and mine >= options.connections_per_address_max and self._clients >= left:
            return (
                f"this listener has {mine} connections from {guest.address} already, and keeps the last "
                f"{options.other_connections_reserved} of its {clients_max} for other addresses"
            )
        return None

    def _greeted(self, connection: Connection) -> None:
        guest = self._forget_waiting(connection)
        if guest is None:
            # The connection was dropped in the same turn.
            connection.abort()
            return
        guest.is_server = connection.peer is not None and self._is_server(connection.peer)
        # The peer may have claimed to be a server, found room as one, and not proved it.
        objection = self._objection(guest)
        self._open[connection] = guest
        guest.is_server = guest.is_server and self._servers < self.options.server_connections_reserved
        if guest.is_server:
            self._servers += 1
        else:
            self._clients += 1
            self._clients_from[guest.address] += 1
        if objection is not None:
            self._refused_total += 1
            connection.fail(ResourceExhausted(objection, retry_ms=self.options.retry_ms))
            return
        if self._on_open is not None:
            self._on_open(connection)

    def _left(self, connection: Connection) -> None:
        waiting = self._forget_waiting(connection)
        if waiting is not None:
            error = connection.error
            self._not_let_in[error.code if error is not None else CLOSED] += 1
            self.strangers.note(waiting.address, error.message if error is not None else "it was closed")
        self._refusals.pop(connection, None)
        guest = self._open.pop(connection, None)
        if guest is None:
            return
        if guest.is_server:
            self._servers -= 1
            return
        self._clients -= 1
        self._clients_from[guest.address] -= 1
        if not self._clients_from[guest.address]:
            del self._clients_from[guest.address]

    async def close_all(self, timeout_ms: int) -> None:
        """Close every connection. Connections that have greeted may finish their calls."""
        strangers = [*self._waiting, *self._refusals]
        for connection in strangers:
            connection.abort()
        closing = [connection.close(timeout_ms=timeout_ms) for connection in self._open]
        await asyncio.gather(*closing, *(connection.closed for connection in strangers), return_exceptions=True)
