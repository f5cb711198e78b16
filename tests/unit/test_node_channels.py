"""What may wait is told to a storage node a little later, in its order, and never lies about for long. A storage node
is in contact through a follower only while the follower relays its reports."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cutwater.core.messages import CommitMessage, LeaderMessage, SealReplica
from cutwater.metadata.node_channels import SILENT_SECONDS_MAX, WAITING_MAX, Ways
from cutwater.protocol.storage_api import LEADER_SAYS
from cutwater.types import GLSN, LLSN, Epoch, LeaderEpoch, LogStreamId, Revision, StorageNodeId
from cutwater.wire.connection import Connection

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

NODE, OTHER = StorageNodeId(1), StorageNodeId(2)
WITHIN_SECONDS = 20.0


class Told:
    """The end of a connection that only remembers what it was told."""

    def __init__(self) -> None:
        self.messages: list[LeaderMessage] = []

    def notify(self, notice: Any, argument: Any, *, is_alone: bool = False) -> None:
        if notice is LEADER_SAYS:
            self.messages.append(argument)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WITHIN_SECONDS):
            while len(self.messages) < count:
                await asyncio.sleep(0.001)


def commit(glsn: int) -> CommitMessage:
    return CommitMessage(GLSN(glsn - 1), GLSN(glsn), Revision(1), (), ())


def made() -> tuple[Ways, Told, Told]:
    ways, one, other = Ways(asyncio.get_running_loop()), Told(), Told()
    for node, connection in ((NODE, one), (OTHER, other)):
        ways.hear(node, cast(Connection, connection), is_relay=False)
    return ways, one, other


async def test_what_may_wait_is_told_soon_and_the_rest_at_once() -> None:
    ways, one, other = made()
    ways.send(NODE, commit(1))
    ways.send(OTHER, commit(1), may_wait=True)
    assert (one.messages, other.messages) == ([commit(1)], [])
    await other.until(1)
    ways.send(OTHER, commit(2), may_wait=True)
    await other.until(2)
    assert other.messages == [commit(1), commit(2)]


async def test_what_waits_is_told_before_what_comes_after_it() -> None:
    ways, one, other = made()
    seal = SealReplica(LogStreamId(1), LeaderEpoch(1), Epoch(1), LLSN(1))
    ways.send(NODE, commit(1), may_wait=True)
    ways.send(OTHER, commit(1), may_wait=True)
    ways.send(NODE, seal)
    assert one.messages == [commit(1), seal]
    assert other.messages == [], "who was told nothing urgent still waits"
    await other.until(1)
    ways.send(NODE, commit(2))
    assert one.messages[2:] == [commit(2)], "nothing is told twice"


async def test_only_so_much_waits() -> None:
    ways, one, _ = made()
    messages = [commit(i) for i in range(1, WAITING_MAX + 1)]
    for message in messages:
        assert one.messages == []
        ways.send(NODE, message, may_wait=True)
    assert one.messages == messages


class Clock:
    """The time of an event loop, which a test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def time(self) -> float:
        return self.now


async def test_a_node_that_a_follower_relayed_long_ago_is_not_in_contact() -> None:
    """The connection to the follower stays open whatever becomes of the storage node."""
    clock, own, follower = Clock(), cast(Connection, Told()), cast(Connection, Told())
    ways = Ways(cast(asyncio.AbstractEventLoop, clock))
    ways.hear(NODE, follower, is_relay=True)
    ways.hear(OTHER, own, is_relay=False)
    ways.hear(OTHER, follower, is_relay=True)
    clock.now += SILENT_SECONDS_MAX / 2
    assert ways.heard == [NODE, OTHER]
    clock.now += SILENT_SECONDS_MAX
    assert ways.heard == [OTHER], "a connection of its own tells by itself when it is lost"
    ways.hear(NODE, follower, is_relay=True)
    assert ways.heard == [NODE, OTHER]
    ways.lose(own)
    assert ways.heard == [NODE]
    ways.lose(follower)
    assert ways.heard == []
