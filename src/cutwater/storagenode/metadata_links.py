"""Connections to the metadata repository: the node introduces itself on each before it sends anything else.

A node that was not added yet reports nothing and asks again. Keys that do not match stop the node: it, or the server
it talks to, is not the one that its operator expects.

A metadata node must prove its identity. The first time, the storage node trusts the servers at the addresses that its
operator gave, and stores their keys. From then on it trusts only these keys and those that their owners tell it
(ADR 0036).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import UnsetType

from cutwater.core.requests import Request
from cutwater.errors import CutwaterError, Unavailable, WrongIdentity
from cutwater.protocol.access import METADATA_NODE
from cutwater.protocol.access_copy import AccessAsk, AccessNews, Bytes
from cutwater.protocol.errors import Unproven, WrongCluster
from cutwater.protocol.metadata_api import ACCESS, ASK
from cutwater.protocol.methods import Notice, Received
from cutwater.protocol.storage_api import JOIN, JoinAnswer, JoinArguments
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.peer_connections import Link
from cutwater.types import Incarnation, MetadataNodeId
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_book import ServerBook
from cutwater.wire.identity.server_keys import ProvenServer

_log = logging.getLogger(__name__)

A = TypeVar("A")

JOIN_MS_MAX = 2_000
JOIN_AGAIN_SECONDS = 1.0
ACCESS_MS_MAX = 1_000
COVERED_BY = 2


class MetadataLinks:
    """``on_joined`` is called when a metadata node knows this node; ``on_turned_away`` when keys do not match, so that
    the node cannot continue."""

    def __init__(
        self,
        node: StorageNode,
        volumes: NodeVolumes,
        book: ServerBook,
        spawn: Callable[[Awaitable[None]], None],
        on_joined: Callable[[], None],
        on_turned_away: Callable[[CutwaterError], None],
    ) -> None:
        self._node, self._volumes, self._book, self._spawn = node, volumes, book, spawn
        self._on_joined, self._on_turned_away = on_joined, on_turned_away
        self.on_secured: Callable[[], None] = lambda: None
        """Called before this node has joined a cluster whose access control is on."""
        self._address = ""
        """The address at which others reach this node."""
        self._joined: dict[Connection, None] = {}
        self._tells_access: Connection | None = None
        """The connection on which the last question about access control was answered. It is asked first, or one that
        hangs would make every change of the rules late."""
        self._was_joined = False
        """Whether this node may have reported since it was started."""
        self._troubles: dict[str, str] = {}
        self._links: list[Link] = []

    def connect(
        self, endpoint: Endpoint, addresses: Sequence[str], tls: ssl.SSLContext | None, own_address: str
    ) -> None:
        self._address = own_address
        self._links = [self._link(endpoint, address, tls) for address in addresses]

    def tell(self, notice: Notice[Any], argument: object) -> bool:
        """Send a notice to the metadata repository; return whether any of its nodes is connected. A notice that cannot
        be sent now is repeated with the next report, or its content is found out otherwise."""
        told = self._covering()
        for connection in told:
            try:
                connection.notify(notice, argument, is_alone=True)
            except CutwaterError as error:
                _log.debug("%s cannot be told to %r: %s", notice.name, connection, error.message)
        return bool(told)

    def _covering(self) -> Collection[Connection]:
        """Return the connections to at most two metadata nodes that hear from this node. One may die without a report
        being lost; more would only relay the same. Storage nodes begin at different ones, which divides the work."""
        if len(self._joined) <= COVERED_BY:
            return tuple(self._joined)
        found = sorted(self._joined, key=lambda connection: connection.peer.name if connection.peer else "")
        start = self._node.node
        return [found[(start + i) % len(found)] for i in range(COVERED_BY)]

    async def ask(self, request: Request, expected: type[A], *, timeout_ms: int) -> A:
        """Ask the metadata repository through any of its nodes."""
        for connection in self._covering():
            try:
                answer = (await connection.call(ASK, request, timeout_ms=timeout_ms)).value
            except CutwaterError as error:
                _log.debug("%r does not answer: %s", connection, error.message)
                continue
            if isinstance(answer, expected):
                return answer
        raise Unavailable("no node of the metadata repository answers now")

    async def access(self, asked: AccessAsk, body: Bytes) -> Received[AccessNews]:
        """Ask the leader for the rules of access control and for shares of quotas, through any metadata node."""
        for connection in sorted(self._joined, key=lambda connection: connection is not self._tells_access):
            try:
                answer = await connection.call(ACCESS, asked, body, timeout_ms=ACCESS_MS_MAX)
            except CutwaterError as error:
                _log.debug("%r does not tell the rules of access control: %s", connection, error.message)
                continue
            self._tells_access = connection
            return answer
        raise Unavailable("no node of the metadata repository tells the rules of access control now")

    def has_joined(self, connection: Connection) -> bool:
        """Whether this connection leads to a metadata node that knows this storage node."""
        return connection in self._joined

    @property
    def joined(self) -> int:
        return len(self._joined)

    async def introduce(self) -> None:
        """Introduce the node again because something about it changed; the change is stored when this returns."""
        trouble = "it cannot be reached"
        for connection in list(self._joined):
            try:
                await connection.call(JOIN, self._introduction(), timeout_ms=JOIN_MS_MAX)
                return
            except CutwaterError as error:
                trouble = error.message
        raise Unavailable(f"it is done here, but the metadata repository does not know it yet ({trouble}): ask again")

    def _introduction(self) -> JoinArguments:
        identity = self._volumes.identity
        volumes = tuple(str(volume) for volume in self._volumes.volumes)
        return JoinArguments(
            identity.node, identity.node_key, identity.cluster_key, self._address, self._node.incarnation, volumes
        )

    async def trust(self, cluster_key: str, metadata_keys: Mapping[MetadataNodeId, str]) -> None:
        """Remember the cluster and the keys of its metadata nodes."""
        await self._node.in_thread(partial(self._volumes.adopt, cluster_key, metadata_keys))
        self._book.note(METADATA_NODE, self._volumes.identity.metadata_keys)

    async def _be_newer_than(self, heard: Incarnation | UnsetType) -> None:
        """Take a later number if an earlier start had this one or a later one: the disk is as it was some time before.
        The leader would ignore all reports as those of an earlier start."""
        if isinstance(heard, UnsetType):
            return
        if heard > self._node.incarnation or (heard == self._node.incarnation and not self._was_joined):
            later = await self._node.in_thread(partial(self._volumes.pass_incarnation, heard))
            # Joins of two metadata nodes may end in any order.
            self._node.incarnation = max(self._node.incarnation, later)
            what = (
                "the metadata repository has heard of start %s of this node, so its volumes are older: this is start %s"
            )
            _log.warning(what, heard, self._node.incarnation)

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links))

    def _link(self, endpoint: Endpoint, address: str, tls: ssl.SSLContext | None) -> Link:
        return Link(
            endpoint,
            address,
            tls,
            expect=lambda server: self._check(address, server),
            on_up=lambda connection: self._spawn(self._join(address, connection)),
            on_down=self._forget_closed,
            on_trouble=lambda error: self._trouble(address, error),
        )

    def _check(self, address: str, server: ProvenServer | None) -> None:
        if server is None or server.kind != METADATA_NODE:
            raise Unproven(
                f"the server at {address} has not proved to be a metadata node: check --metadata; if it is a metadata "
                "node of an earlier version, upgrade it"
            )
        if self._book.keys(METADATA_NODE) and not self._book.is_known(server):
            raise Unproven(
                f"{server} at {address} has another key than the metadata nodes that this storage node knows. A new "
                "one is believed as soon as one of the known ones tells its key; if all of them were replaced, start "
                "this storage node once with --forget-metadata-keys"
            )

    def _forget_closed(self) -> None:
        self._joined = {connection: None for connection in self._joined if not connection.is_closed}

    def _trouble(self, address: str, error: CutwaterError) -> None:
        if isinstance(error, WrongCluster):
            self._on_turned_away(error)
        elif self._troubles.get(address) != error.code:
            self._troubles[address] = error.code
            _log.warning("the metadata repository at %s does not answer: %s", address, error.message)

    async def _join(self, address: str, connection: Connection) -> None:
        """Ask until the node is known there, while the connection lasts."""
        closed = connection.closed
        while not connection.is_closed:
            try:
                received = await connection.call(JOIN, self._introduction(), timeout_ms=JOIN_MS_MAX)
                answer: JoinAnswer = received.value
                self._volumes.check_cluster_key(answer.cluster_key)
                if answer.known:
                    await self.trust(answer.cluster_key, answer.metadata_keys)
                    await self._be_newer_than(answer.heard)
                    if answer.secured is True:
                        self.on_secured()
            except WrongIdentity as error:
                self._on_turned_away(error)
                return
            except CutwaterError as error:
                self._trouble(address, error)
            else:
                if connection.is_closed:
                    return
                if answer.known:
                    _log.info("the metadata repository at %s knows this storage node", address)
                    self._troubles.pop(address, None)
                    self._joined[connection] = None
                    self._was_joined = True
                    self._on_joined()
                    return
                if self._troubles.get(address) != "unknown":
                    self._troubles[address] = "unknown"
                    _log.warning("the metadata repository at %s does not know this storage node yet: add it", address)
            await asyncio.wait({closed}, timeout=JOIN_AGAIN_SECONDS)
