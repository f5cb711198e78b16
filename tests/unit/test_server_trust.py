"""Strangers that prove unknown keys make a metadata node read its store, but not more often than once in a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cutwater.errors import Unavailable
from cutwater.metadata import server_trust
from cutwater.metadata.server_trust import ServerTrust
from cutwater.metadata.stores.memory_store import MemoryData, MemoryStore
from cutwater.protocol.access import METADATA_NODE
from cutwater.types import ClusterId, MetadataNodeId
from cutwater.wire.identity.server_keys import ProvenServer, ServerKey

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
