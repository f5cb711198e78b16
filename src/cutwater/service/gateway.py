"""Connections to the cluster, one per token: each request acts with the rights of its caller, and with no others.

The service has a token of its own. It shows it beside that of the caller, so that the audit names both; it gives no
rights. A connection without a token of a caller shows no certificate either: the credentials of the service must never
stand for a stranger.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Struct

from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.credentials import Access, FollowedToken
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.convert.encoding import Limits
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import WhoAmI, WhoAmIRequest
from cutwater.core.access.principals import token_id
from cutwater.core.requests import Catalog, CatalogRequest
from cutwater.errors import CutwaterError, PermissionDenied, Unavailable
from cutwater.protocol.errors import Unauthenticated
from cutwater.runtime import system
from cutwater.service.http.http_problems import HttpRefusal
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint

_log = logging.getLogger(__name__)

CLIENTS_MAX = 512
"""Number of tokens with open connections. Beyond it, the one that was used longest ago is closed."""
IDLE_SECONDS = 300.0
REFUSED_MAX = 4_096
REFUSED_SECONDS = 5.0
"""How long a token that the cluster refused is refused without asking again."""
MODE_SECONDS = 2.0
MODE_TIMEOUT_MS = 5_000
CALL_SECONDS = 15.0
ROLE = "service"


class GatewayOptions(Struct, frozen=True):
    """How the cluster is reached. ``own`` is the token of the service. ``needs_principal``: serve no cluster without
    access control, since callers on other machines could do everything."""

    addresses: tuple[str, ...]
    tls: ssl.SSLContext | None = None
    own: FollowedToken | None = None
    needs_principal: bool = False
    clients_max: int = CLIENTS_MAX
    idle_seconds: float = IDLE_SECONDS


class PooledCluster:
    """The connections of one token. ``users`` counts the requests that use them."""

    def __init__(self, key: bytes, addresses: tuple[str, ...], access: Access) -> None:
        self.key, self.access = key, access
        self.repository = Repository(Endpoint(ANY_CLUSTER, ROLE), addresses, access)
        self.users = 0
        self.used_at = system.monotonic()
        self.is_dropped = False
        self._log: AsyncClient | None = None
        self._opening = asyncio.Lock()

    async def log(self) -> AsyncClient:
        """Return the client for records, which needs the catalog first."""
        async with self._opening:
            if self._log is None:
                await self.repository.ask(CatalogRequest(), Catalog, timeout_ms=MODE_TIMEOUT_MS)
                self._log = AsyncClient(self.repository, self.access, CALL_SECONDS, None, Limits())
            return self._log

    async def close(self) -> None:
        if self._log is not None:
            await self._log.close()
        self.repository.close()


class Gateway:
    """See the module."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._known: OrderedDict[bytes, PooledCluster] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self._own = PooledCluster(b"", options.addresses, Access(options.tls, token_file=options.own))
        self._mode: AccessMode | None = None
        self._mode_at = -MODE_SECONDS
        self._failed: tuple[float, CutwaterError] | None = None
        """When the question for the mode failed last, and why."""
        self._asking = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.Task[None] | None = None
        self.trouble = ""
        """Why the cluster did not answer last; empty if it did."""

    def start(self) -> None:
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep_for_ever())

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        for pooled in list(self._known.values()):
            self._drop(pooled)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._own.close()

    @property
    def clients(self) -> int:
        return len(self._known)

    # The mode of access control.

    async def mode(self) -> AccessMode:
        """Return the mode of access control, at most two seconds old. Raises while the cluster does not answer."""
        if self._mode is not None and system.monotonic() - self._mode_at < MODE_SECONDS:
            return self._mode
        begun = system.monotonic()
        async with self._asking:
            if self._failed is not None and self._failed[0] >= begun:
                # It was asked for while this waited. Requests must not wait in a row for a cluster that is away.
                raise self._failed[1]
            if self._mode is None or system.monotonic() - self._mode_at >= MODE_SECONDS:
                try:
                    self._mode = await self._ask_mode()
                except CutwaterError as error:
                    self._failed = system.monotonic(), error
                    self.trouble = error.message
                    raise
                self.trouble, self._mode_at, self._failed = "", system.monotonic(), None
            return self._mode

    async def _ask_mode(self) -> AccessMode:
        try:
            found = await self._own.repository.ask(WhoAmIRequest(), WhoAmI, timeout_ms=MODE_TIMEOUT_MS)
        except (PermissionDenied, Unauthenticated) as error:
            raise Unavailable(
                f"the cluster does not accept this service, and so no request of it: {error.message}. Its operator "
                "gives it a token of its own: `cutwater token create NAME --save FILE` and --own-token-file FILE"
            ) from error
        if found.mode is not AccessMode.OFF and not found.token:
            raise Unavailable(
                "access control is on, and this service has no token of its own, by which the audit names it: make one "
                "with `cutwater token create NAME --save FILE`, and start the service with --own-token-file FILE"
            )
        return found.mode

    # Connections.

    @asynccontextmanager
    async def lease(self, token: str) -> AsyncIterator[PooledCluster]:
        """Yield the connections for the token of a caller, which is empty if it showed none."""
        mode = await self.mode()
        if mode is AccessMode.OFF and self._options.needs_principal:
            raise HttpRefusal(
                403,
                "access_control_is_off",
                "this service can be reached from other machines, and the cluster has no access control, so everyone "
                "could do everything: `cutwater cluster secure` turns it on",
            )
        if token:
            check_token_form(token)
        elif mode is not AccessMode.OFF:
            raise HttpRefusal(
                401,
                "unauthenticated",
                "access control is on: show a token of the cluster, as `Authorization: Bearer cwt_...`, or begin a "
                "session with one",
            )
        key = hashlib.sha256(token.encode()).digest()
        self._check_refused(key)
        pooled = self._pooled(key, token)
        pooled.users += 1
        try:
            yield pooled
        except Unauthenticated as error:
            self._note_refused(key, error.message)
            self._drop(pooled)
            raise
        finally:
            pooled.users -= 1
            pooled.used_at = system.monotonic()
            if pooled.is_dropped and not pooled.users:
                self._close_soon(pooled)

    def _pooled(self, key: bytes, token: str) -> PooledCluster:
        pooled = self._known.get(key)
        if pooled is None:
            if len(self._known) >= self._options.clients_max:
                self._drop_oldest()
            access = Access(self._options.tls, token, gateway=self._options.own if token else None)
            pooled = self._known[key] = PooledCluster(key, self._options.addresses, access)
        self._known.move_to_end(key)
        return pooled

    def _drop_oldest(self) -> None:
        """Close the connections that were used longest ago, and are not in use."""
        for pooled in self._known.values():
            if not pooled.users:
                self._drop(pooled)
                return
        raise HttpRefusal(429, "too_many_callers", "requests with too many different tokens are under way: try later")

    def _drop(self, pooled: PooledCluster) -> None:
        if pooled.is_dropped:
            return
        pooled.is_dropped = True
        self._known.pop(pooled.key, None)
        if not pooled.users:
            self._close_soon(pooled)

    def _close_soon(self, pooled: PooledCluster) -> None:
        task = asyncio.get_running_loop().create_task(pooled.close())
        self._closing.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.info("connections of a caller did not close in order: %s", task.exception())

    def forget(self, token: str) -> None:
        """Close the connections of a token that has ended."""
        pooled = self._known.get(hashlib.sha256(token.encode()).digest())
        if pooled is not None:
            self._drop(pooled)

    def _check_refused(self, key: bytes) -> None:
        found = self._refused.get(key)
        if found is None:
            return
        until, why = found
        if system.monotonic() < until:
            raise HttpRefusal(401, "unauthenticated", why)
        del self._refused[key]

    def _note_refused(self, key: bytes, why: str) -> None:
        self._refused[key] = system.monotonic() + REFUSED_SECONDS, why
        if len(self._refused) > REFUSED_MAX:
            self._refused.popitem(last=False)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self._options.idle_seconds))
            now = system.monotonic()
            for pooled in list(self._known.values()):
                if not pooled.users and now - pooled.used_at >= self._options.idle_seconds:
                    self._drop(pooled)


def check_token_form(token: str) -> None:
    """Refuse what is no token of the cluster, before it is sent anywhere. The message does not repeat it."""
    if token_id(token) is None:
        raise HttpRefusal(
            401, "unauthenticated", "this is no token of the cluster (cwt_...): ask an administrator for one"
        )
