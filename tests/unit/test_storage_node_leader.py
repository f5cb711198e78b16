"""What a storage node makes of the words of leaders: those of a deposed one come too late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from cutwater.core.messages import ExcludeReplica, LeaderHello
from cutwater.storagenode.node import StorageNode
from cutwater.types import Epoch, Incarnation, LeaderEpoch, LogStreamId, StorageNodeId

STREAM = LogStreamId(1)


@pytest.mark.parametrize(("leader_epoch", "is_left"), [(4, False), (5, True), (6, True)])
def test_only_a_leader_that_is_not_deposed_can_say_that_others_hold_a_stream(leader_epoch: int, is_left: bool) -> None:
    async def test() -> None:
        outside = SimpleNamespace(
            tell_metadata=lambda notice, argument: False, may_wait_for_disk=lambda: False, flush_peers=lambda: None
        )
        node = StorageNode(StorageNodeId(1), Incarnation(1), outside, SimpleNamespace())  # type: ignore[arg-type]
        node.leader_says(LeaderHello(LeaderEpoch(5)))
        node.leader_says(ExcludeReplica(STREAM, LeaderEpoch(leader_epoch), Epoch(3), replaced=True))
        assert (STREAM in node.leftovers) is is_left

    asyncio.run(test())
