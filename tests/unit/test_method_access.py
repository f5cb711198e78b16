"""Every method of both servers is in a table that says who may call it, and whoever may not is refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import msgpack, structs

from cutwater.core import requests as r
from cutwater.errors import CutwaterError, InvalidArgument, Unavailable
from cutwater.metadata.server import MetadataOptions, MetadataServer
from cutwater.metadata.stores.memory_store import MemoryStore
from cutwater.protocol import metadata_api, scan_api, storage_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE, MethodAccess
from cutwater.protocol.errors import Unproven
from cutwater.protocol.method_access import METADATA_ACCESS, REQUEST_ACCESS, STORAGE_NODE_ACCESS
from cutwater.protocol.methods import Method, Notice, StreamMethod
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.server import NodeOptions, StorageNodeServer
from cutwater.types import ClusterId, MetadataNodeId, StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.access_guard import Guard
from cutwater.wire.identity.auth import PeerIdentity
from cutwater.wire.identity.handshake import Endpoint, Peer
from cutwater.wire.identity.server_book import ServerBook
from cutwater.wire.identity.server_keys import ProvenServer, ServerKey
from cutwater.wire.messages import PeerLimits

CLUSTER = ClusterId(1)
LIMITS = PeerLimits(1_000, 1_000, 10, 10_000)


class Servers:
    """One server of each kind, in this process, which nobody has joined."""

    def __init__(self, directory: Path) -> None:
        self.metadata = MetadataServer(MetadataOptions(CLUSTER, MetadataNodeId(1)), MemoryStore())
        self.volumes = NodeVolumes([directory], CLUSTER, StorageNodeId(1))
        self.node = StorageNodeServer(NodeOptions("127.0.0.1", 0, ("127.0.0.1:1",), reserve_bytes=0), self.volumes)

    @property
    def methods(self) -> tuple[tuple[Methods, dict[str, MethodAccess]], ...]:
        return (self.metadata._endpoint.methods, METADATA_ACCESS), (self.node._methods, STORAGE_NODE_ACCESS)


def with_servers(directory: Path, test: Callable[[Servers], Awaitable[None]]) -> None:
    async def main() -> None:
        servers = Servers(directory)
        try:
            await servers.metadata.start()
            await servers.node.start()
            async with asyncio.timeout(60):
                await test(servers)
        finally:
            await servers.node.stop(timeout_ms=1_000)
            servers.volumes.release()
            await servers.metadata.stop(timeout_ms=500)

    asyncio.run(main())


def test_the_tables_list_exactly_what_servers_answer(tmp_path: Path) -> None:
    async def test(servers: Servers) -> None:
        for methods, access in servers.methods:
            assert methods.names() == set(access), "entered in the table and not answered, or the other way round"

    with_servers(tmp_path, test)


def test_the_tables_list_everything_that_can_be_described() -> None:
    """Also a method that no server answers yet is entered, so that it cannot be forgotten when one does."""
    described = {
        one.name
        for module in (storage_api, scan_api, metadata_api)
        for one in vars(module).values()
        if isinstance(one, Method | StreamMethod | Notice)
    }
    assert described == set(STORAGE_NODE_ACCESS) | set(METADATA_ACCESS)


def test_the_table_of_requests_lists_every_request() -> None:
    assert set(REQUEST_ACCESS) == set(get_args(r.Request))


def test_nothing_else_is_for_clients() -> None:
    """Written out here, so that nothing that servers say to each other is opened by a slip in the tables."""

    def open_ones(table: dict[str, MethodAccess]) -> set[str]:
        return {name for name, access in table.items() if access.is_for_clients}

    assert open_ones(STORAGE_NODE_ACCESS) == {
        *("append", "read", "follow", "find", "event_time", "fate", "measure", "heads", "groups", "scan"),
        *("stage", "finish_part", "discard_part", "staged", "status", "describe", "verify", "verify_staged"),
    }
    assert open_ones(METADATA_ACCESS) == {"ask", "who_leads", "change_volumes"}
    is_closed = {request for request, access in REQUEST_ACCESS.items() if not access.is_for_clients}
    assert is_closed == {r.FoundClusterRequest, r.JoinRequest, r.StagedRequest}
    assert [name for name, access in METADATA_ACCESS.items() if access.client_subject is not None] == ["complaint"]
    rows = [*STORAGE_NODE_ACCESS.items(), *METADATA_ACCESS.items()]
    assert {name for name, access in rows if access.is_admission} == {"join", "meet"}
    assert {name for name, access in rows if access.subject is not None} == {
        *("entry_refused", "join", "report", "complaint", "group_outcome", "meet", "follow", "heartbeat")
    }


def test_a_method_that_is_not_listed_cannot_be_answered() -> None:
    methods = Methods({"known": MethodAccess()}, ServerBook())
    methods.answers(Method("known", None, None))(lambda call: None)
    for register in (
        lambda: methods.answers(Method("new", None, None))(lambda call: None),
        lambda: methods.hears(Notice("new", None))(lambda notification: None),
    ):
        with pytest.raises(InvalidArgument, match="new is not in the table"):
            register()


async def refused(connection: Connection, methods: Methods, name: str) -> CutwaterError:
    """What is said to someone who calls a method; the argument does not matter, since nobody looks at it."""
    try:
        if name in methods.requests:
            await connection.call(Method(name, Any, Any), None, timeout_ms=5_000)
        elif name in methods.streams:
            async with connection.open_stream(StreamMethod(name, Any, Any), None) as stream:
                async for _ in stream:
                    break
        else:
            connection.notify(Notice(name, Any), None)
            await connection.closed
            assert connection.error is not None
            return connection.error
    except CutwaterError as error:
        return error
    raise AssertionError(f"{name} was not refused")


@pytest.mark.parametrize("claimed", ["client", STORAGE_NODE, METADATA_NODE])
@pytest.mark.parametrize("has_key", [False, True], ids=["no key", "a key of its own"])
def test_whoever_is_no_server_of_the_cluster_may_call_nothing_that_is_for_servers(
    tmp_path: Path, claimed: str, has_key: bool
) -> None:
    """On loopback without TLS, where everyone is let in, whatever it says that it is."""

    async def test(servers: Servers) -> None:
        stranger = Endpoint(CLUSTER, claimed, "2", key=ServerKey.generate() if has_key else None)
        addresses = servers.metadata.address, servers.node.address
        for (methods, table), address in zip(servers.methods, addresses, strict=True):
            for name, access in table.items():
                if access.is_for_clients or access.client_subject is not None:
                    continue
                if access.is_admission and has_key and claimed in access.servers:
                    # It may ask; what it is told is tested with what decides it.
                    continue
                host, port = parse_address(address)
                connection = await connect(stranger, host, port, timeout_ms=5_000, expect=lambda server: None)
                error = await refused(connection, methods, name)
                expected = Unproven if not has_key or claimed not in access.servers else (Unproven, Unavailable)
                assert isinstance(error, expected), (name, error)
                assert "is refused" in error.message
                connection.abort()

    with_servers(tmp_path, test)


def test_every_client_may_ask_what_is_for_clients(tmp_path: Path) -> None:
    async def test(servers: Servers) -> None:
        for (methods, table), address in zip(
            servers.methods, (servers.metadata.address, servers.node.address), strict=True
        ):
            for name, access in table.items():
                if access.is_for_clients and name in methods.requests:
                    connection = await connect(Endpoint(CLUSTER, "client"), *parse_address(address), timeout_ms=5_000)
                    try:
                        await connection.call(Method(name, Any, Any), None, timeout_ms=5_000)
                    except CutwaterError as error:
                        assert not isinstance(error, Unproven), name  # noqa: PT017
                    connection.abort()

    with_servers(tmp_path, test)


# The guard by itself.


def peer(server: ProvenServer | None, role: str = "client") -> Peer:
    return Peer(CLUSTER, role, "1", 2, LIMITS, PeerIdentity("someone"), "there:1", server)


BOOK = ServerBook()
BOOK.note(STORAGE_NODE, {1: "a", 2: "b"})
BOOK.note(METADATA_NODE, {1: "m"})
ONE = ProvenServer(STORAGE_NODE, "1", "a")


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (ONE, None),
        (None, Unproven),
        (ProvenServer(STORAGE_NODE, "1", "b"), Unproven),
        (ProvenServer(STORAGE_NODE, "9", "a"), Unavailable),
        (ProvenServer(METADATA_NODE, "1", "m"), Unproven),
        (ProvenServer("client", "1", "a"), Unproven),
    ],
)
def test_only_the_key_that_is_noted_for_that_server_counts(server: ProvenServer | None, error: Any) -> None:
    guard = Guard("replicate", STORAGE_NODE_ACCESS["replicate"], BOOK)
    if error is None:
        guard.check(peer(server))
        return
    with pytest.raises(error):
        guard.check(peer(server))


def test_a_server_speaks_for_itself_alone() -> None:
    guard = Guard("entry_refused", STORAGE_NODE_ACCESS["entry_refused"], BOOK)
    refusal = msgpack.decode(
        msgpack.encode({"stream": 1, "epoch": 1, "node": 1, "reason": ""}), type=storage_api.EntryRefused
    )
    guard.check_argument(peer(ONE), refusal)
    with pytest.raises(Unproven, match="speaks for number 2"):
        guard.check_argument(peer(ONE), structs.replace(refusal, node=StorageNodeId(2)))


def test_a_client_complains_for_itself_and_not_in_the_name_of_a_storage_node() -> None:
    guard = Guard("complaint", METADATA_ACCESS["complaint"], BOOK)
    theirs = storage_api.Complaint(1, storage_api.A_CLIENT, StorageNodeId(2))  # type: ignore[arg-type]
    forged = structs.replace(theirs, complainer=StorageNodeId(1))
    guard.check(peer(None))
    guard.check_argument(peer(None), theirs)
    with pytest.raises(Unproven):
        guard.check_argument(peer(None), forged)
    guard.check_argument(peer(ONE), forged)
    with pytest.raises(Unproven):
        guard.check_argument(peer(ProvenServer(STORAGE_NODE, "2", "b")), forged)
    # A number alone is nothing: the key must be that of the storage node, and a metadata node may have the same number.
    for stranger in (ProvenServer(STORAGE_NODE, "1", "x"), ProvenServer(METADATA_NODE, "1", "m")):
        with pytest.raises(Unproven):
            guard.check_argument(peer(stranger), forged)


def test_refusals_are_logged_and_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("report", METADATA_ACCESS["report"], BOOK)
    with caplog.at_level(logging.WARNING):
        for _ in range(1_000):
            with pytest.raises(Unproven):
                guard.check(peer(None, STORAGE_NODE))
    (record,) = caplog.records
    assert "report of 'storage node' '1' ('someone') at there:1 refused" in record.message
    assert "earlier version: upgrade it" in record.message
