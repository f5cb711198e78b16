"""A cluster with access control, in this process: metadata nodes on one store, storage nodes, and principals."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cutwater.admin.certificate_builder import AuthorityKind
from cutwater.admin.free_ports import free_addresses
from cutwater.admin.local_admin import ask_as_local_admin
from cutwater.admin.private_authority import CertificatePaths
from cutwater.client.async_client import AsyncClient
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.principals import Scope, make_token, token_hash, token_id
from cutwater.core.access.rights import parse_pattern
from cutwater.core.order.options import OrderOptions
from cutwater.core.requests import AddNodeRequest
from cutwater.metadata.server import MetadataOptions, MetadataServer
from cutwater.metadata.stores.memory_store import MemoryData, MemoryStore
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.metadata_api import ASK
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.server import NodeOptions, StorageNodeServer
from cutwater.types import ClusterId, CutTime, MetadataNodeId, StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.certificate_files import TlsFiles
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_certificates import ServerName
from cutwater.wire.identity.server_keys import ServerKey
from cutwater.wire.identity.tls import Tls, client_tls, load_tls
from tests.certificate_kit import CertificateKit
from tests.marked_secrets import MARK

CLUSTER = ClusterId(9)
ORDER = OrderOptions(node_dead_after_us=1_000_000, reopen_patience_us=300_000, retry_us_min=50_000)
ROOT = "root"


class AccessCluster:
    """See the module. ``root`` is the token of the administrator, once access control is on."""

    def __init__(self, directory: Path, metadata: int, lease_seconds: float, kit: CertificateKit | None = None) -> None:
        self.kit = kit
        self.directory, self.lease_seconds = directory, lease_seconds
        self.data = MemoryData()
        self.keys = [ServerKey.generate() for _ in range(metadata)]
        self.metadata: list[MetadataServer] = []
        self.addresses = free_addresses(metadata)
        self.nodes: dict[int, StorageNodeServer] = {}
        self.node_addresses: dict[int, str] = {}
        self.root = ""

    @property
    def servers(self) -> str:
        return "cutwater://" + ",".join(self.addresses)

    @property
    def leader(self) -> MetadataServer:
        return next(server for server in self.metadata if server.leads)

    @property
    def follower(self) -> MetadataServer:
        return next(server for server in self.metadata if not server.leads)

    async def start(self, nodes: int) -> None:
        for number in range(1, len(self.keys) + 1):
            await self.start_metadata(number, MemoryStore(self.data))
        await until(lambda: sum(server.leads for server in self.metadata) == 1, "one leads")
        await until(lambda: all(server.leads or server._upstream for server in self.metadata), "the others follow")
        for number in range(1, nodes + 1):
            self.node_addresses[number] = free_addresses(1)[0]
            await self.add_node(number)
            await self.start_node(number)
        await until(lambda: all(n.metadata_joined == len(self.keys) for n in self.nodes.values()), "all have joined")

    async def start_metadata(self, number: int, store: MemoryStore) -> None:
        options = MetadataOptions(
            CLUSTER,
            MetadataNodeId(number),
            port=parse_address(self.addresses[number - 1])[1],
            order=ORDER,
            key=self.keys[number - 1],
            access_lease_seconds=self.lease_seconds,
            tls=self.tls_of(METADATA_NODE, number),
        )
        self.metadata.append(MetadataServer(options, store))
        await self.metadata[-1].start()

    async def add_node(self, number: int) -> None:
        """Add a storage node in the leader's process: with TLS, a client without a certificate could not."""
        loop = asyncio.get_running_loop()
        request = AddNodeRequest(StorageNodeId(number), self.node_addresses[number])
        await self.leader.adopt(request, loop.time() + 10)

    async def start_node(self, number: int) -> None:
        volume = self.directory / f"sn{number}"
        volume.mkdir(exist_ok=True)
        volumes = NodeVolumes([volume], CLUSTER, StorageNodeId(number))
        port = parse_address(self.node_addresses[number])[1]
        tls = self.tls_of(STORAGE_NODE, number)
        options = NodeOptions("127.0.0.1", port, tuple(self.addresses), tls=tls, reserve_bytes=0)
        server = StorageNodeServer(options, volumes)
        await server.start()
        self.nodes[number] = server

    async def stop_node(self, number: int) -> None:
        server = self.nodes.pop(number)
        try:
            await server.stop(timeout_ms=500)
        finally:
            server.volumes.release()

    async def stop_metadata(self) -> None:
        for server in self.metadata:
            await server.stop(timeout_ms=200)
        self.metadata = []

    async def close(self) -> None:
        for number in list(self.nodes):
            await self.stop_node(number)
        await self.stop_metadata()

    # Access control.

    async def secure(self, mode: AccessMode = AccessMode.ENFORCED) -> q.AccessChanged:
        """Make an administrator, and turn access control on, with the key of the first metadata node."""
        self.root, request = new_token(ROOT)
        rule = q.AllowRequest(ROOT, ("cluster-admin",), parse_pattern("cluster"))
        for one in (rule, request, q.SetAccessModeRequest(mode)):
            tls = self.metadata[0].options.tls
            answer = await ask_as_local_admin(
                self.addresses, CLUSTER, MetadataNodeId(1), self.keys[0], one, tls=tls.client if tls else None
            )
            assert isinstance(answer, q.AccessChanged)
        return answer

    async def principal(
        self, name: str, *grants: tuple[str, str], scopes: tuple[Scope, ...] = (), expires: int = 0
    ) -> str:
        """Return a token of this principal, which gets these rights: pairs of rights, with commas, and a pattern."""
        for rights, pattern in grants:
            await self.admin(q.AllowRequest(name, tuple(rights.split(",")), parse_pattern(pattern)))
        token, request = new_token(name, scopes, expires)
        await self.admin(request)
        return token

    async def admin(self, request: Any) -> Any:
        return await self.ask(request, self.root)

    async def ask(self, request: Any, token: str = "", server: MetadataServer | None = None) -> Any:
        connection = await self.connection((server or self.leader).address, token)
        try:
            return (await connection.call(ASK, request, timeout_ms=10_000)).value
        finally:
            connection.abort()

    async def connection(
        self, address: str, token: str = "", endpoint: Endpoint | None = None, tls: ssl.SSLContext | None = None
    ) -> Connection:
        host, port = parse_address(address)
        if self.kit is not None and tls is None:
            tls = self.client_tls()
        return await connect(
            endpoint or Endpoint(CLUSTER, "test"),
            host,
            port,
            timeout_ms=5_000,
            token=token,
            tls=tls,
            server_hostname=host if tls is not None else None,
        )

    def tls_of(self, kind: str, number: int) -> Tls | None:
        return None if self.kit is None else load_tls(self.kit.server(ServerName(CLUSTER, kind, number)))

    def client_tls(self, place: CertificatePaths | TlsFiles | None = None) -> ssl.SSLContext:
        """Return a context that trusts the servers, and shows this certificate, if there is one."""
        assert self.kit is not None
        servers = self.kit.bundle(AuthorityKind.SERVERS)
        return client_tls(servers) if place is None else client_tls(servers, place.certificate, place.key)

    @asynccontextmanager
    async def client(self, token: str, **options: Any) -> AsyncIterator[AsyncClient]:
        client = await AsyncClient.connect(self.servers, token=token, **options)
        try:
            yield client
        finally:
            await client.close()


def new_token(principal: str, scopes: tuple[Scope, ...] = (), expires: int = 0) -> tuple[str, q.CreateTokenRequest]:
    token = make_token(secrets.token_bytes(8), MARK + secrets.token_bytes(32 - len(MARK)))
    found = token_id(token)
    assert found is not None
    return token, q.CreateTokenRequest(found, token_hash(token), principal, scopes, CutTime(expires))


@asynccontextmanager
async def access_cluster(
    directory: Path,
    *,
    nodes: int = 1,
    metadata: int = 1,
    lease_seconds: float = 10.0,
    mode: AccessMode | None = None,
    kit: CertificateKit | None = None,
) -> AsyncIterator[AccessCluster]:
    cluster = AccessCluster(directory, metadata, lease_seconds, kit)
    try:
        async with asyncio.timeout(100):
            await cluster.start(nodes)
            if mode is not None:
                answer = await cluster.secure(mode)
                assert answer.unconfirmed == ()
            yield cluster
    finally:
        await cluster.close()


async def until(holds: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {what}") from None
