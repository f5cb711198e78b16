"""Asks the metadata repository: any of its nodes that answers, within the caller's time."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, TypeVar

from cutwater.client.cluster.credentials import ANYONE, Access, metadata_node, not_a_metadata_node, open_connection
from cutwater.client.cluster.tls_trouble import TlsTrouble
from cutwater.core.requests import Catalog, Request
from cutwater.errors import (
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    NotAnswered,
    NotFound,
    NotLeader,
    QuotaExceeded,
    Unavailable,
)
from cutwater.protocol.access import STORAGE_NODE
from cutwater.protocol.errors import ConnectionLost, Untrusted
from cutwater.protocol.metadata_api import ASK
from cutwater.protocol.methods import Method, Received
from cutwater.protocol.storage_api import A_CLIENT, COMPLAINT, Complaint
from cutwater.runtime import system
from cutwater.runtime.deadlines import Deadline
from cutwater.runtime.local_files import MachineFiles
from cutwater.runtime.redaction import without_secrets
from cutwater.types import ClusterId, LogStreamId, StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint
from cutwater.wire.states import ConnectionState

A = TypeVar("A")

CONNECT_MS_MAX = 2_000
ATTEMPT_MS_MAX = 3_000
"""A leader answers sooner than this (``OrderOptions.publish_wait_us``), so a node that does not is in trouble."""
CALL_MS_MAX = 15_000
"""The same for methods that read records."""
LEFT_MS_MAX = 30_000
"""How long an abandoned connection may take to answer earlier requests."""
RETRY_SECONDS_MIN = 0.02
RETRY_SECONDS_MAX = 0.5
REFUSED_SECONDS_MAX = 0.6
REFUSED_AGAIN_SECONDS = 0.2
SCHEME = "cutwater://"


def parse_servers(url: str) -> tuple[str, ...]:
    """Return the addresses in ``cutwater://host:port,host:port``; that of an embedded log ends with its directory."""
    given: object = url
    if not isinstance(given, str) or not url.startswith(SCHEME):
        raise InvalidArgument(
            f"{without_secrets(repr(url))} does not name a cluster: write {SCHEME}HOST:PORT[,HOST:PORT…]"
        )
    addresses = tuple(part for part in url.removeprefix(SCHEME).partition("/")[0].split(",") if part)
    for address in addresses:
        parse_address(address)
    if not addresses:
        raise InvalidArgument(f"{url!r} names no server: write {SCHEME}HOST:PORT[,HOST:PORT…]")
    return addresses


def check_no_path(given: object) -> None:
    """Refuse a directory in the place of a cluster, and say how a directory is opened."""
    if isinstance(given, str) and "://" not in given:
        is_path = given.startswith(".") or os.sep in given or system.made(MachineFiles).exists(Path(given))
    else:
        is_path = isinstance(given, os.PathLike)
    if is_path:
        raise InvalidArgument(
            f"{str(given)!r} is a path, and a cluster is named by {SCHEME}HOST:PORT[,HOST:PORT…]: a log in a directory "
            "is opened by cutwater.open"
        )


async def require_listener(addresses: tuple[str, ...], directory: Path | None = None) -> None:
    """Fail soon if no server listens at any of these addresses, so that a command that only reads does not wait until
    the time is up. A metadata node that is being restarted gets a moment. ``directory``: that of a local cluster, if it
    is one."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + REFUSED_SECONDS_MAX
    while all(troubles := await asyncio.gather(*map(_trouble, addresses))):
        if clock() >= deadline:
            raise Unavailable(
                f"no server listens at {', '.join(addresses)} ({troubles[0]}): the cluster does not run, or it listens "
                f"elsewhere. `cutwater cluster restart --dir {directory or 'DIR'}` starts a local one again"
            )
        await asyncio.sleep(REFUSED_AGAIN_SECONDS)


async def _trouble(address: str) -> str:
    """Return why the address certainly cannot be connected to; empty if it can, or if that is not certain."""
    try:
        async with asyncio.timeout(REFUSED_SECONDS_MAX):
            _, writer = await asyncio.open_connection(*parse_address(address))
        writer.close()
    except TimeoutError:
        return ""
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""


class Repository:
    """Keeps one connection, to a node that answers, and connects to another node when it is lost."""

    def __init__(self, endpoint: Endpoint, addresses: tuple[str, ...], access: Access = ANYONE) -> None:
        self._endpoint, self._access = endpoint, access
        self.addresses = addresses
        self._turn = 0
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._left: dict[Connection, asyncio.Task[None]] = {}
        """Abandoned connections, and the tasks that close them."""
        self.trouble = ""
        """Why there is no answer; empty as soon as there is one."""
        self.tls_trouble = TlsTrouble(access.tls is not None)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        for connection in list(self._left):
            connection.abort()

    def _leave(self, connection: Connection | None) -> None:
        """Use another connection from now on. If this one is only closing or slow, it still answers earlier requests
        and is closed afterwards."""
        if connection is None or connection is not self._connection:
            return
        self._connection = None
        if connection.state is not ConnectionState.CLOSED:
            closing = asyncio.get_running_loop().create_task(connection.close(timeout_ms=LEFT_MS_MAX))
            self._left[connection] = closing
            closing.add_done_callback(lambda _: self._left.pop(connection))

    @property
    def cluster(self) -> ClusterId:
        """The cluster's number; 0 before a node has answered."""
        peer = self._connection.peer if self._connection is not None else None
        return peer.cluster if peer is not None else ANY_CLUSTER

    async def ask(self, request: Request, expected: type[A], *, timeout_ms: int, idempotent: bool = True) -> A:
        """Return the answer. An idempotent request is repeated, at another node, until the time is up. Any other
        request is repeated only as long as it certainly has not arrived."""
        answer = await self._answer(ASK, request, timeout_ms, ATTEMPT_MS_MAX, idempotent=idempotent)
        if not isinstance(answer, expected):
            raise Unavailable(f"{type(request).__name__} got {type(answer).__name__}: the server is of another version")
        return answer

    async def call(self, method: Method[Any, A], argument: object, *, timeout_ms: int, idempotent: bool = False) -> A:
        """Call a method that any metadata node executes by itself: once, or again at another node if it is
        idempotent."""
        if idempotent:
            return await self._answer(method, argument, timeout_ms, CALL_MS_MAX, idempotent=True)
        deadline = Deadline(timeout_ms / 1_000)
        connection = await self._connected(deadline)
        received: Received[A] = await connection.call(method, argument, timeout_ms=deadline.left_ms())
        return received.value

    async def _answer(
        self, method: Method[Any, A], argument: object, timeout_ms: int, attempt_ms_max: int, *, idempotent: bool
    ) -> A:
        deadline = Deadline(timeout_ms / 1_000)
        wait = RETRY_SECONDS_MIN
        why = ""
        while True:
            connection = None
            try:
                connection = await self._connected(deadline)
                # A node that does not answer takes only a part of the time, if another one may be asked.
                at_most = attempt_ms_max if idempotent and len(self.addresses) > 1 else None
                received: Received[A] = await connection.call(method, argument, timeout_ms=deadline.left_ms(at_most))
                break
            except CutwaterError as error:
                may_ask_again = idempotent or connection is None or _was_not_done(error)
                if isinstance(error, NotAnswered):
                    # An agent works on it, and no other node knows more. How long to wait for it, the caller decides.
                    raise
                if isinstance(error, QuotaExceeded):
                    wait = max(wait, error.retry_after)
                if not error.retriable or not may_ask_again or deadline.left <= wait:
                    if why and isinstance(error, DeadlineExceeded):
                        # The earlier error says more than that the time is up.
                        raise DeadlineExceeded(f"{error.message}. Before: {why}") from error
                    raise
                self._turn += 1
                self.trouble = error.message
                why = why if isinstance(error, DeadlineExceeded) else error.message
                if isinstance(error, ConnectionLost | NotLeader | DeadlineExceeded):
                    self._leave(connection)
            await asyncio.sleep(wait)
            wait = min(wait * 2, RETRY_SECONDS_MAX)
        self.trouble = ""
        return received.value

    async def complain(self, stream: LogStreamId, node: StorageNodeId, *, timeout_ms: int) -> None:
        """Report that a storage node does not answer; the leader will probe it at once. No caller waits for the
        result."""
        try:
            connection = await self._connected(Deadline(timeout_ms / 1_000))
            connection.notify(COMPLAINT, Complaint(stream, A_CLIENT, node))
        except CutwaterError:
            return

    async def _connected(self, deadline: Deadline) -> Connection:
        async with self._connecting:
            if self._connection is not None and self._connection.state is ConnectionState.OPEN:
                return self._connection
            address = self.addresses[self._turn % len(self.addresses)]
            timeout_ms = deadline.left_ms(CONNECT_MS_MAX)
            try:
                connection = await open_connection(
                    self._endpoint, address, self._access, wants=metadata_node(address), timeout_ms=timeout_ms
                )
            except CutwaterError as error:
                self.tls_trouble.failed(address, error)
                if isinstance(error, Untrusted):
                    # The next request asks another node, which may have a valid certificate.
                    self._turn += 1
                raise
            self.tls_trouble.connected()
            if connection.peer is not None and connection.peer.role == STORAGE_NODE:
                connection.abort()
                raise not_a_metadata_node(address)
            self._connection = connection
            return connection


def no_such_topic(name: str, catalog: Catalog) -> NotFound:
    names = ", ".join(sorted(topic.name for topic in catalog.topics if not topic.is_internal)) or "none"
    told = f"there is no topic {name!r}; topics: {names}"
    if catalog.is_limited:
        told += ". There may be one that you may not see: an administrator gives rights on it with `cutwater acl allow`"
    return NotFound(told)


def _was_not_done(error: CutwaterError) -> bool:
    """Return whether the request certainly had no effect."""
    return isinstance(error, NotLeader | QuotaExceeded) or (
        isinstance(error, ConnectionLost) and not error.outcome_unknown
    )
