"""The leader looks into its store before it lets a server act by the rules of access control."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from cutwater.access.access_copy import AccessCopy
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_rules import AccessRules
from cutwater.errors import Unavailable
from cutwater.metadata.access_leader import LeaderAccess
from cutwater.metadata.stores.memory_store import MemoryData, MemoryStore
from cutwater.protocol.access import STORAGE_NODE
from cutwater.protocol.access_copy import AccessAsk
from cutwater.types import LeaderEpoch, Revision

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


class LostAnswers(MemoryStore):
    """Its answers take until they are ``lost``."""

    def __init__(self) -> None:
        super().__init__(MemoryData())
        self.asked, self.lost = asyncio.Event(), asyncio.Event()

    async def leader(self, *, timeout_ms: int = 0) -> Any:
        self.asked.set()
        await self.lost.wait()
        raise Unavailable("the answer got lost")


async def test_a_look_that_fails_when_nobody_waits_any_more_is_no_error() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    copy, store = AccessCopy(), LostAnswers()
    copy.take(AccessRules(Revision(1), AccessMode.ENFORCED))
    leader = LeaderAccess(copy, store, lambda: LeaderEpoch(1), 10.0)
    asking = asyncio.create_task(leader.answer(AccessAsk(STORAGE_NODE, 1, Revision(0)), b""))
    await store.asked.wait()
    asking.cancel()
    await asyncio.wait({asking})
    store.lost.set()
    await asyncio.sleep(0.01)
    del leader, asking
    gc.collect()
    assert complaints == []
