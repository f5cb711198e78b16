"""Which servers a metadata node believes. Strangers that prove unknown keys make it read its store, but not more often
than once in a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cutwater.core.order.state import Node
from cutwater.errors import Unavailable
from cutwater.metadata import server_trust
from cutwater.metadata.server_trust import ServerTrust
from cutwater.metadata.stores.memory_store import MemoryData, MemoryStore
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import Unproven
from cutwater.types import ClusterId, MetadataNodeId, StorageNodeId
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ProvenServer, ServerKey
from cutwater.wire.listen.server import listen
from cutwater.wire.options import WireOptions

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

OWN, NEW = MetadataNodeId(1), MetadataNodeId(2)
WAIT_SECONDS = 0.2


class CountingStore(MemoryStore):
    """Counts reads of the keys; ``on_read`` runs after one was answered."""

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.reads = 0
        self.on_read: Callable[[], None] = lambda: None

    async def members(self) -> dict[MetadataNodeId, str]:
        self.reads += 1
        found = dict(await super().members())
        self.on_read()
        await asyncio.sleep(0.01)
        return found


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_trust, "LOOK_SECONDS", WAIT_SECONDS)


def stranger(node: MetadataNodeId = NEW) -> ProvenServer:
    return ProvenServer(METADATA_NODE, str(node), ServerKey.generate().public)


async def made() -> tuple[ServerTrust, CountingStore]:
    store = CountingStore(MemoryData())
    trust = ServerTrust(ClusterId(1), OWN, ServerKey.generate(), store, None)
    await trust.announce()
    store.reads = 0
    return trust, store


async def test_strangers_share_reads_of_the_store() -> None:
    trust, store = await made()
    begun = asyncio.get_running_loop().time()
    for _ in range(3):
        assert not any(await asyncio.gather(*(trust.is_member(stranger()) for _ in range(50))))
    taken = asyncio.get_running_loop().time() - begun
    assert store.reads <= 1 + taken / WAIT_SECONDS
    assert store.reads == 3


async def test_a_new_node_is_known_after_the_next_read_at_the_latest() -> None:
    trust, store = await made()
    server = stranger()
    asked: list[asyncio.Task[bool]] = []

    def announce() -> None:
        # After this read was answered, so that it does not show the new key, and before anybody has seen the answer.
        if not asked:
            store.data.members[NEW] = server.key
            asked.append(asyncio.get_running_loop().create_task(trust.is_member(server)))

    store.on_read = announce
    assert not await trust.is_member(stranger())
    begun = asyncio.get_running_loop().time()
    flood = [asyncio.create_task(trust.is_member(stranger())) for _ in range(50)]
    assert await asked[0]
    assert asyncio.get_running_loop().time() - begun < WAIT_SECONDS + 5.0
    assert store.reads == 2
    assert not any(await asyncio.gather(*flood))
    assert await trust.is_member(server), "and from then on without a read"
    assert store.reads <= 3


async def test_a_read_that_fails_answers_only_the_one_that_made_it() -> None:
    trust, store = await made()
    server = stranger()
    store.data.members[NEW] = server.key

    def fail() -> None:
        if store.reads == 1:
            raise Unavailable("the store is away")

    store.on_read = fail
    outcomes = await asyncio.gather(*(trust.is_member(server) for _ in range(2)), return_exceptions=True)
    assert isinstance(outcomes[0], Unavailable)
    assert outcomes[1] is True


async def test_only_the_server_that_is_wanted_is_talked_to() -> None:
    trust, store = await made()
    one, two, node = (ServerKey.generate().public for _ in range(3))
    store.data.members |= {OWN: one, NEW: two}
    await trust.refresh()
    trust.book.note(STORAGE_NODE, {1: node})
    trust.expect_metadata(NEW)(ProvenServer(METADATA_NODE, "2", two))
    others = (stranger(), ProvenServer(METADATA_NODE, "1", one), ProvenServer(STORAGE_NODE, "1", node))
    for other in (*others, None):
        with pytest.raises(Unproven):
            trust.expect_metadata(NEW)(other)
    expect = trust.expect_storage(StorageNodeId(1))
    assert expect is not None
    expect(ProvenServer(STORAGE_NODE, "1", node))
    for other in (stranger(), ProvenServer(METADATA_NODE, "1", one), ProvenServer(STORAGE_NODE, "1", two), None):
        with pytest.raises(Unproven):
            expect(other)
    assert trust.expect_storage(StorageNodeId(2)) is None


async def test_a_key_is_noted_only_if_the_server_at_the_address_of_the_node_has_it() -> None:
    """Otherwise whoever joins first, with a key of its own, would be the node."""
    trust, _ = await made()
    key = ServerKey.generate()
    options = WireOptions(linger_ms_max=50)
    listener = await listen(Endpoint(ClusterId(1), STORAGE_NODE, "3", options=options, key=key), "127.0.0.1", 0)
    try:
        address = f"127.0.0.1:{listener.port}"
        await trust.check_joining(Node(StorageNodeId(3), address), key.public)
        with pytest.raises(Unproven, match="joins with another key"):
            await trust.check_joining(Node(StorageNodeId(3), address), ServerKey.generate().public)
        with pytest.raises(Unproven, match="joins with another key"):
            await trust.check_joining(Node(StorageNodeId(4), address), key.public)
        with pytest.raises(Unproven, match="added without its address"):
            await trust.check_joining(Node(StorageNodeId(3)), key.public)
    finally:
        await listener.close(timeout_ms=100)
    without = await listen(Endpoint(ClusterId(1), STORAGE_NODE, "3", options=options), "127.0.0.1", 0)
    try:
        with pytest.raises(Unproven, match="does not prove itself"):
            await trust.check_joining(Node(StorageNodeId(3), f"127.0.0.1:{without.port}"), key.public)
    finally:
        await without.close(timeout_ms=100)
