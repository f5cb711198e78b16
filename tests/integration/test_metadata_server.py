"""Nodes of the metadata repository among themselves: real sockets, the real order layer, a store in memory."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import pytest

from cutwater.core import requests as r
from cutwater.core.order import decisions as d
from cutwater.errors import CutwaterError, DeadlineExceeded, NotFound, Refused, Unavailable, WrongIdentity
from cutwater.metadata.pulse import Pulse
from cutwater.metadata.server import MetadataOptions, MetadataServer
from cutwater.metadata.stores.memory_store import MemoryData, MemoryStore
from cutwater.metadata.stores.store_interface import LoadedState
from cutwater.protocol import metadata_api as api
from cutwater.protocol import storage_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import Unproven
from cutwater.types import ClusterId, Incarnation, MetadataNodeId, StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint, Expect
from cutwater.wire.identity.server_keys import ServerKey
from cutwater.wire.listen.server import listen

pytestmark = pytest.mark.asyncio

CLUSTER = ClusterId(1)
N1 = StorageNodeId(1)


class Repository:
    """Several nodes on one store."""

    def __init__(self, nodes: int) -> None:
        self.data = MemoryData()
        self.servers = [
            MetadataServer(MetadataOptions(CLUSTER, MetadataNodeId(i + 1)), MemoryStore(self.data))
            for i in range(nodes)
        ]
        self._connections: list[Connection] = []

    @property
    def leaders(self) -> list[MetadataServer]:
        return [server for server in self.servers if server.leads]

    @property
    def follower(self) -> MetadataServer:
        return next(server for server in self.servers if not server.leads)

    async def connection(
        self, server: MetadataServer, endpoint: Endpoint | None = None, expect: Expect | None = None
    ) -> Connection:
        host, port = parse_address(server.address)
        endpoint = endpoint or Endpoint(CLUSTER, "test")
        connection = await connect(endpoint, host, port, timeout_ms=2_000, expect=expect)
        self._connections.append(connection)
        return connection

    async def ask(self, server: MetadataServer, request: r.Request, timeout_ms: int = 5_000) -> r.Answer:
        connection = await self.connection(server)
        return (await connection.call(api.ASK, request, timeout_ms=timeout_ms)).value

    async def close(self) -> None:
        for connection in self._connections:
            connection.abort()
        for server in self.servers:
            await server.stop(timeout_ms=500)


@asynccontextmanager
async def repository(nodes: int) -> AsyncIterator[Repository]:
    found = Repository(nodes)
    try:
        for server in found.servers:
            await server.start()
        # A leader first stores the cluster's key, and tests that stop the store must not stop that.
        await until(lambda: len(found.leaders) == 1 and found.leaders[0]._reachable.is_set())
        yield found
    finally:
        await found.close()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_one_leads_and_anyone_may_be_asked() -> None:
    async with repository(3) as nodes:
        assert await nodes.ask(nodes.follower, r.AddNodeRequest(N1, "127.0.0.1:1", "key")) == r.Done()
        for server in nodes.servers:
            catalog = await nodes.ask(server, r.CatalogRequest())
            assert isinstance(catalog, r.Catalog)
            assert catalog.nodes == (r.NodeInfo(N1, "127.0.0.1:1"),)
            connection = await nodes.connection(server)
            told = (await connection.call(api.WHO_LEADS, None, timeout_ms=1_000)).value
            assert told.leader == nodes.leaders[0].options.node


async def test_errors_come_through_a_follower_as_they_are() -> None:
    async with repository(2) as nodes:
        with pytest.raises(NotFound, match="there is no topic 'x'; topics: none"):
            await nodes.ask(nodes.follower, r.DeleteTopicRequest("x"))


async def test_when_the_leader_goes_another_takes_over_and_knows_everything() -> None:
    async with repository(3) as nodes:
        (first,) = nodes.leaders
        await nodes.ask(first, r.AddNodeRequest(N1, "a:1", "key"))
        await first.stop(timeout_ms=200)
        await until(lambda: bool(nodes.leaders))
        (second,) = nodes.leaders
        assert second is not first
        for server in nodes.servers:
            if server is not first:
                catalog = await nodes.ask(server, r.CatalogRequest())
                assert isinstance(catalog, r.Catalog)
                assert len(catalog.nodes) == 1
        assert nodes.data.leader.epoch == 2


async def test_a_leader_that_was_deposed_without_noticing_decides_nothing_more() -> None:
    """Fenced. The other leader comes about behind its back, as when the network is cut between them."""
    async with repository(1) as nodes:
        (old,) = nodes.leaders
        assert old.term is not None
        old_term = old.term
        # Connected before, so that it is asked before it can have noticed anything.
        connection = await nodes.connection(old)
        nodes.data.leader = type(nodes.data.leader)(
            nodes.data.leader.epoch.__class__(9), MetadataNodeId(7), "127.0.0.1:9"
        )
        with pytest.raises(CutwaterError):
            await connection.call(api.ASK, r.AddNodeRequest(N1, "a:1", "key"), timeout_ms=1_000)
        await until(old_term.over.done)
        stored = nodes.data.load()
        assert stored.snapshot.index == 0
        assert not any(isinstance(decision, d.AddNode) for decision in stored.decisions)


async def test_a_leader_without_its_store_is_silent_and_goes_on_when_the_store_is_back() -> None:
    async with repository(1) as nodes:
        nodes.data.running.clear()
        with pytest.raises(DeadlineExceeded):
            await nodes.ask(nodes.servers[0], r.AddNodeRequest(N1, "a:1", "key"), timeout_ms=1_500)
        nodes.data.running.set()
        catalog = await nodes.ask(nodes.servers[0], r.CatalogRequest())
        assert isinstance(catalog, r.Catalog)
        assert len(catalog.nodes) == 1, (
            "it was written when that was possible, and the caller was told that it is unknown"
        )


async def test_a_request_that_nobody_waits_for_any_more_ends_with_the_term_in_silence() -> None:
    """Whoever asked hung up, and then the node stops: there is nobody left to be told, and no log to fill with it."""
    told: list[dict[str, Any]] = []
    async with repository(1) as nodes:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        (server,) = nodes.servers
        nodes.data.running.clear()
        connection = await nodes.connection(server)
        asking = asyncio.create_task(connection.call(api.ASK, r.AddNodeRequest(N1, "a:1", "key"), timeout_ms=5_000))
        await until(lambda: server.term is not None and bool(server.term._waiting))
        connection.abort()
        await asyncio.gather(asking, return_exceptions=True)
        await server.stop(timeout_ms=200)
    gc.collect()
    assert told == []


class Node:
    """A storage node as far as it greets, proves itself and joins."""

    def __init__(self, repository: Repository, number: int = 1, key: ServerKey | None = None) -> None:
        self.key = key or ServerKey.generate()
        self.endpoint = Endpoint(CLUSTER, STORAGE_NODE, str(number), key=self.key)
        self._repository, self._number = repository, StorageNodeId(number)

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[str]:
        listener = await listen(self.endpoint, "127.0.0.1", port)
        try:
            yield f"127.0.0.1:{listener.port}"
        finally:
            await listener.close(timeout_ms=100)

    async def join(
        self, server: MetadataServer, address: str, key: str = "key", cluster_key: str | None = None
    ) -> storage_api.JoinAnswer:
        connection = await self.connection(server)
        arguments = storage_api.JoinArguments(self._number, key, cluster_key, address, Incarnation(1), ("/v",))
        return (await connection.call(storage_api.JOIN, arguments, timeout_ms=3_000)).value

    async def connection(self, server: MetadataServer) -> Connection:
        return await self._repository.connection(server, self.endpoint, expect=lambda server: None)


async def test_a_storage_node_joins_through_anyone_and_only_with_its_keys() -> None:
    """A node whose keys do not match the cluster's refuses to start or to be added."""
    async with repository(2) as nodes:
        node = Node(nodes)
        async with node.listening() as address:
            first = await node.join(nodes.follower, address)
            assert (first.known, first.metadata_keys) == (False, {})
            await nodes.ask(nodes.follower, r.AddNodeRequest(N1, address, "", ("/v",)))
            again = await node.join(nodes.follower, address, "key", first.cluster_key)
            keys = {
                server.options.node: server._endpoint.key.public for server in nodes.servers if server._endpoint.key
            }
            assert again == storage_api.JoinAnswer(first.cluster_key, known=True, metadata_keys=keys)
        with pytest.raises(WrongIdentity, match="belongs to another cluster"):
            await node.join(nodes.follower, address, "key", "another")
        with pytest.raises(WrongIdentity, match="has another key"):
            await node.join(nodes.follower, address, "stolen", first.cluster_key)
        # Its key was noted, so it need not be asked any more, wherever it is.
        await node.join(nodes.follower, "b:2", "key", first.cluster_key)
        catalog = await nodes.ask(nodes.follower, r.CatalogRequest())
        assert isinstance(catalog, r.Catalog)
        assert catalog.nodes == (r.NodeInfo(N1, "b:2"),)


@pytest.mark.parametrize("is_known", [False, True], ids=["not enrolled yet", "enrolled"])
async def test_nobody_else_takes_the_place_of_a_storage_node(is_known: bool) -> None:
    """Neither by being quicker, nor by asking to be added elsewhere; whatever its token may be."""
    async with repository(2) as nodes:
        node, thief = Node(nodes), Node(nodes)
        async with node.listening() as address, thief.listening() as elsewhere:
            await nodes.ask(nodes.follower, r.AddNodeRequest(N1, address))
            if is_known:
                assert (await node.join(nodes.leaders[0], address)).known
            for server in nodes.servers:
                for claimed in (address, elsewhere):
                    with pytest.raises((Unproven, WrongIdentity)):
                        await thief.join(server, claimed, "")
                with pytest.raises(Refused, match="belongs to the cluster already"):
                    await nodes.ask(server, r.AddNodeRequest(N1, elsewhere, server_key=thief.key.public))
                await nodes.ask(server, r.AddNodeRequest(N1, "", server_key=thief.key.public))
                if is_known:
                    # What the node of an embedded log may say of itself, even by somebody who knows the node key.
                    renewal = r.AddNodeRequest(N1, "", "key", (), thief.key.public, renews=True)
                    await nodes.ask(server, renewal)
                with pytest.raises(Unproven, match="alone decides"):
                    await nodes.ask(server, r.JoinRequest(N1, elsewhere, "", (), thief.key.public))
            catalog = await nodes.ask(nodes.follower, r.CatalogRequest())
            assert isinstance(catalog, r.Catalog)
            assert catalog.nodes == (r.NodeInfo(N1, address),)
            assert (await node.join(nodes.follower, address)).known


async def test_nobody_joins_quicker_than_a_node_that_is_just_being_added() -> None:
    """The thief's join was looked at before the node was in the catalog, and is decided after it."""
    async with repository(1) as nodes:
        (server,) = nodes.servers
        node, thief = Node(nodes), Node(nodes)
        async with node.listening() as address:
            nodes.data.running.clear()
            asked = (
                nodes.ask(server, r.AddNodeRequest(StorageNodeId(2), "127.0.0.1:1")),  # is being stored
                nodes.ask(server, r.AddNodeRequest(N1, address)),  # waits for that
                thief.join(server, "127.0.0.1:6", ""),  # was looked at, and waits too
            )
            tasks = []
            for coroutine in asked:
                tasks.append(asyncio.create_task(coroutine))
                await until(lambda: server.term is not None and len(server.term._waiting) == len(tasks))
            nodes.data.running.set()
            *_, joining = tasks
            with pytest.raises(Unavailable, match=f"its key was not yet fetched from {address}: ask again"):
                await joining
            assert server.term is not None
            assert server.term.layer.state.nodes[N1].server_key == ""
            assert (await node.join(server, address)).known
            assert server.term.layer.state.nodes[N1].server_key == node.key.public


async def test_a_node_without_an_address_cannot_be_asked_for_its_key() -> None:
    async with repository(1) as nodes:
        await nodes.ask(nodes.servers[0], r.AddNodeRequest(N1))
        with pytest.raises(Unproven, match=r"without its address.*cutwater sn add"):
            await Node(nodes).join(nodes.servers[0], "127.0.0.1:1")


async def test_a_second_node_with_the_same_number_is_no_member_any_more() -> None:
    """Whoever announced itself last under a number is that metadata node."""
    async with repository(2) as nodes:
        follower = nodes.follower
        await until(lambda: follower._upstream is not None)
        await MemoryStore(nodes.data).announce(follower.options.node, ServerKey.generate().public)
        await nodes.leaders[0].trust.refresh()
        connection = await nodes.connection(nodes.leaders[0], follower._endpoint, expect=lambda server: None)
        with pytest.raises(Unproven, match="only one node may have this id"):
            await connection.call(api.MEET, api.Follow(follower.options.node), timeout_ms=2_000)


async def test_a_node_that_knows_a_number_but_not_its_key_is_not_followed() -> None:
    async with repository(2) as nodes:
        (leader,) = nodes.leaders
        stranger = Endpoint(CLUSTER, METADATA_NODE, str(nodes.follower.options.node), key=ServerKey.generate())
        connection = await nodes.connection(leader, stranger, expect=lambda server: None)
        with pytest.raises(Unproven):
            await connection.call(api.MEET, api.Follow(nodes.follower.options.node), timeout_ms=2_000)
        followers = len(leader._pulse.followers)
        connection.notify(api.FOLLOW, api.Follow(nodes.follower.options.node))
        async with asyncio.timeout(5):
            await connection.closed
        assert isinstance(connection.error, Unproven)
        assert len(leader._pulse.followers) == followers


async def test_a_store_of_another_cluster_is_refused() -> None:
    async with repository(1) as nodes:
        await nodes.servers[0].stop(timeout_ms=100)
        other = MetadataServer(MetadataOptions(ClusterId(2), MetadataNodeId(1)), MemoryStore(nodes.data))
        await other.start()
        try:
            async with asyncio.timeout(5):
                error = await other.failed
            assert isinstance(error, WrongIdentity)
            assert "the store belongs to cluster 1, not 2" in error.message
            assert nodes.data.leader.epoch == 1, "nobody was deposed"
        finally:
            await other.stop(timeout_ms=100)


async def test_nobody_is_told_that_a_node_belongs_to_the_cluster_before_that_is_stored() -> None:
    async with repository(1) as nodes:
        (server,) = nodes.servers
        await nodes.ask(server, r.CatalogRequest())
        nodes.data.running.clear()
        node = Node(nodes)
        async with node.listening() as address:
            connection = await node.connection(server)
            request = r.AddNodeRequest(N1, address)
            adding = asyncio.create_task(connection.call(api.ASK, request, timeout_ms=5_000))
            await asyncio.sleep(0.1)
            joining = storage_api.JoinArguments(N1, "key", None, address, Incarnation(1), ())
            with pytest.raises(DeadlineExceeded):
                await connection.call(storage_api.JOIN, joining, timeout_ms=300)
            nodes.data.running.set()
            await adding
            assert (await connection.call(storage_api.JOIN, joining, timeout_ms=2_000)).value.known


class SlowToLoad(MemoryStore):
    """Takes longer to load than followers wait for heartbeats."""

    async def load(self, *, timeout_ms: int = 5_000) -> LoadedState:
        await asyncio.sleep(0.7)
        return await super().load(timeout_ms=timeout_ms)


async def test_a_leader_that_takes_long_to_load_is_not_deposed_meanwhile() -> None:
    data = MemoryData()
    servers = [MetadataServer(MetadataOptions(CLUSTER, MetadataNodeId(i)), SlowToLoad(data)) for i in (1, 2, 3)]
    try:
        for server in servers:
            await server.start()
        await until(lambda: any(server.leads for server in servers))
        await asyncio.sleep(1.5)
        assert [server.leads for server in servers].count(True) == 1
        assert data.leader.epoch <= 2, "at most the race at the very beginning"
    finally:
        for server in servers:
            await server.stop(timeout_ms=300)


async def test_a_bug_ends_the_term_and_nothing_that_was_not_stored_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with repository(1) as nodes:
        (server,) = nodes.servers
        assert server.term is not None
        term = server.term
        monkeypatch.setattr(term.layer, "turn", lambda now: 1 / 0)
        await until(term.over.done)
        await until(lambda: server.leads and server.term is not term)
        assert isinstance(await nodes.ask(server, r.CatalogRequest()), r.Catalog)


async def test_a_follower_that_was_held_up_itself_does_not_depose_the_leader() -> None:
    async with repository(3) as nodes:
        await until(lambda: all(server.leads or server._upstream for server in nodes.servers))
        (leader,) = nodes.leaders
        patience = leader.options.takeover_seconds
        for stall in (1.5 * patience, 0.98 * patience, 2 * patience):
            # No event loop hears or sends anything meanwhile: all three nodes share this one.
            time.sleep(stall)
            await asyncio.sleep(patience)
        assert nodes.leaders == [leader]
        assert nodes.data.leader.epoch == 1


async def test_a_follower_that_is_held_up_for_ever_takes_over_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    async with repository(2) as nodes:
        await until(lambda: all(server.leads or server._upstream for server in nodes.servers))
        (leader,), follower = nodes.leaders, nodes.follower
        monkeypatch.setattr(Pulse, "held_up_at", inf)
        leader._pulse.followers.clear()
        await until(lambda: follower.leads)
