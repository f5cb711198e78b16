"""Decides whether a server is the one that it claims to be, for a metadata node (ADR 0036).

The keys of storage nodes are decisions; the leader knows them and tells the followers. The keys of metadata nodes are
in the store: a process that can write there counts as a metadata node. A storage node whose key was never noted is
asked for it at its own address.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

from cutwater.core.order.state import Node
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import Unproven
from cutwater.types import ClusterId, MetadataNodeId, StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint, Expect
from cutwater.wire.identity.server_book import ServerBook
from cutwater.wire.identity.server_keys import ProvenServer, ServerKey

_log = logging.getLogger(__name__)

CONNECT_MS_MAX = 500
ENROL_MS_MAX = 2_000
LOOK_SECONDS = 1.0
"""Minimum time between two looks into the store for an unknown key, which any client can present. A new metadata node
waits at most this long for its turn."""


class ServerTrust:
    """The servers that one metadata node trusts. ``book`` has their current keys."""

    def __init__(
        self, cluster: ClusterId, node: MetadataNodeId, key: ServerKey, store: MetadataStore, tls: ssl.SSLContext | None
    ) -> None:
        self.book = ServerBook()
        self._node, self._key, self._store, self._tls = node, key, store, tls
        # This endpoint proves nothing, because the server that it connects to may be any server.
        self._stranger = Endpoint(cluster, "metadata repository, as a client", str(node))
        self._refreshing = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._look_at = 0.0
        """When the next look for an unknown key may begin."""
        self._looks_begun = 0
        self._looked = 0
        """The number of the last look that succeeded."""

    async def announce(self) -> None:
        """Store this node's key. Must be called before this node leads or follows."""
        await self._store.announce(self._node, self._key.public)
        await self.refresh()

    async def refresh(self) -> dict[MetadataNodeId, str]:
        """Read the keys of all metadata nodes from the store."""
        async with self._refreshing:
            found = await self._store.members()
        if found.get(self._node) != self._key.public:
            _log.warning("another process announced itself as metadata node %s: only one may have this id", self._node)
        self.book.note(METADATA_NODE, found, is_all=True)
        return found

    async def is_member(self, server: ProvenServer) -> bool:
        """Whether the key of a metadata node is known here or, if not, in the store."""
        if not self.book.is_known(server):
            await self._look_after(self._looks_begun)
        return self.book.is_known(server)

    async def _look_after(self, asked_at: int) -> None:
        """Look into the store, at most once in ``LOOK_SECONDS`` however often unknown servers ask. All callers that
        wait share the next look. A look that began before the call does not count: the key may be stored since."""
        async with self._looking:
            if self._looked > asked_at:
                return
            loop = asyncio.get_running_loop()
            await asyncio.sleep(self._look_at - loop.time())
            self._look_at = loop.time() + LOOK_SECONDS
            self._looks_begun += 1
            await self.refresh()
            self._looked = self._looks_begun

    def expect_metadata(self, node: MetadataNodeId) -> Expect:
        return self._expect(METADATA_NODE, int(node))

    def expect_storage(self, node: StorageNodeId) -> Expect | None:
        """Return a check for the node's key, or None if its key was not noted yet."""
        return self._expect(STORAGE_NODE, int(node)) if self.book.has(STORAGE_NODE, str(node)) else None

    def _expect(self, kind: str, number: int) -> Expect:
        def expect(server: ProvenServer | None) -> None:
            if server is None:
                raise Unproven(f"{kind} {number} does not prove itself: if it is of an earlier version, upgrade it")
            if (server.kind, server.name) != (kind, str(number)) or not self.book.is_known(server):
                raise Unproven(
                    f"{server} answers with a key that is not the one of {kind} {number}: check its address, and that "
                    "it was started with its own files"
                )

        return expect

    async def check_joining(self, known: Node, key: str) -> None:
        """Verify the key of a joining storage node that is in the catalog without a key, by asking for the key at its
        address in the catalog. So no other server can take the node's place by joining first."""
        if not known.address:
            raise Unproven(
                f"storage node {known.node} was added without its address, so it cannot be asked for its key: add it "
                "with `cutwater sn add ADDRESS`"
            )
        answering = await self._server_at(known.address)
        if answering != ProvenServer(STORAGE_NODE, str(known.node), key):
            raise Unproven(
                f"storage node {known.node} joins with another key than the server at {known.address}, its address in "
                f"the catalog, which is {answering}: start it there once, or remove it and add it again"
            )

    async def _server_at(self, address: str) -> ProvenServer:
        # Any server may answer, but its proof is wanted.
        connection = await self._dial(self._stranger, address, ENROL_MS_MAX, lambda server: None)
        connection.abort()
        if connection.peer is None or connection.peer.server is None:
            raise Unproven(f"the server at {address} does not prove itself: if it is of an earlier version, upgrade it")
        return connection.peer.server

    async def connect(self, endpoint: Endpoint, address: str, expect: Expect | None) -> Connection:
        """Connect to a server that must pass ``expect``; without it, connect as a client that proves nothing."""
        return await self._dial(endpoint if expect is not None else self._stranger, address, CONNECT_MS_MAX, expect)

    async def _dial(self, endpoint: Endpoint, address: str, timeout_ms: int, expect: Expect | None) -> Connection:
        host, port = parse_address(address)
        return await connect(
            endpoint, host, port, timeout_ms=timeout_ms, tls=self._tls, server_hostname=host, expect=expect
        )
