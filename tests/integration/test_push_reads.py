"""A storage node pushes what is committed: at once, several commits together, and never more than there is room for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.client.read.records import runs_of
from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.errors import Trimmed, Unavailable
from cutwater.protocol.storage_api import FIND, FOLLOW, FindArguments, ReadAnswerHeader, ReadArguments
from cutwater.types import GLSN, CutTime, LogStreamId
from cutwater.wire.calls.streams import SharedCredit, StreamReceiver
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from tests.integration.log_cluster import CLUSTER, LogCluster, with_log

S1, S2 = LogStreamId(1), LogStreamId(2)
WITHIN_MS = 20_000


async def connected(cluster: LogCluster) -> Connection:
    return await connect(Endpoint(CLUSTER, "test"), "127.0.0.1", cluster.ports[1], timeout_ms=5_000)


async def next_runs(stream: StreamReceiver[ReadAnswerHeader]) -> list[CommittedBatch]:
    """Those of the next message that has any."""
    while True:
        message = await stream.receive(timeout_ms=WITHIN_MS)
        assert message is not None
        if message.body:
            return list(runs_of(message.value, message.body))


def test_commits_are_pushed_and_a_quiet_stream_says_that_it_is_complete(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", streams=2)
        connection = await connected(cluster)
        first = connection.open_stream(FOLLOW, ReadArguments(S1, GLSN(1), 1 << 20))
        second = connection.open_stream(FOLLOW, ReadArguments(S2, GLSN(1), 1 << 20))
        for i in range(5):
            ack = await log.append("t", [b"%d" % i] * 3, stream=S1)
            (run,) = await next_runs(first)
            assert (run.first_glsn, run.first_llsn, run.batch.count, run.stream) == (ack.glsn, ack.llsn, 3, S1)
            through = GLSN(0)
            while through < ack.glsn + 2:
                message = await second.receive(timeout_ms=WITHIN_MS)
                assert message is not None
                assert not message.body
                assert message.value.complete_through > through
                through = message.value.complete_through
        answer = (await connection.call(FIND, FindArguments(S1, CutTime(0)), timeout_ms=5_000)).value
        assert answer.complete_through >= ack.glsn
        assert answer.glsn is not None
        assert answer.glsn < ack.glsn
        first.cancel()
        second.cancel()
        # Nobody is left who would have to be told.
        await cluster.until(lambda: not cluster.nodes[1].node.replicas[S1].watchers, "the follower is gone")
        await connection.close()

    with_log(tmp_path, test)


def test_who_is_behind_gets_much_at_a_time_and_only_what_there_is_room_for(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        acks = [await log.append("t", [b"x" * 1000] * 20) for _ in range(100)]
        connection = await connected(cluster)
        room = SharedCredit(4, 300_000)
        stream = connection.open_stream(FOLLOW, ReadArguments(S1, acks[10].glsn, 100_000), credit=room)
        await asyncio.sleep(0.3)
        items, size = stream.queued
        assert 0 < items <= 4
        assert size <= 300_000
        messages = 0
        found: list[CommittedBatch] = []
        while len(found) < 90:
            found += await next_runs(stream)
            messages += 1
        assert messages < 45
        assert [run.first_glsn for run in found] == [ack.glsn for ack in acks[10:]]
        stream.cancel()
        await connection.close()

    with_log(tmp_path, test)


def test_why_a_stream_cannot_be_followed_is_said(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        acks = [await log.append("t", b"x") for _ in range(3)]
        connection = await connected(cluster)
        with pytest.raises(Unavailable, match="no replica"):
            await connection.open_stream(FOLLOW, ReadArguments(LogStreamId(9), GLSN(1), 1)).receive()
        await log.trim("t", before=acks[2].glsn)
        replica = cluster.nodes[1].node.replicas[S1].replica
        await cluster.until(lambda: replica.hard_state.trimmed_before == acks[2].glsn, "the trim arrives")
        with pytest.raises(Trimmed) as trimmed:
            await connection.open_stream(FOLLOW, ReadArguments(S1, acks[1].glsn, 1)).receive()
        assert trimmed.value.first_left == acks[2].glsn
        stream = connection.open_stream(FOLLOW, ReadArguments(S1, acks[2].glsn, 1))
        assert (await next_runs(stream))[0].first_glsn == acks[2].glsn
        await cluster.stop_node(1)
        with pytest.raises(Unavailable):
            await next_runs(stream)

    with_log(tmp_path, test)


def test_a_trim_that_ends_within_a_batch_leaves_the_rest_of_it(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        ack = await log.append("t", [b"%d" % i for i in range(10)])
        middle = GLSN(ack.glsn + 5)
        await log.trim("t", before=middle)
        replica = cluster.nodes[1].node.replicas[S1].replica
        await cluster.until(lambda: replica.hard_state.trimmed_before == middle, "the trim arrives")
        connection = await connected(cluster)
        stream = connection.open_stream(FOLLOW, ReadArguments(S1, middle, 1 << 20))
        (run,) = await next_runs(stream)
        assert (run.first_glsn, run.batch.count) == (ack.glsn, 10), "batches travel whole"
        stream.cancel()
        with pytest.raises(Trimmed):
            await connection.open_stream(FOLLOW, ReadArguments(S1, GLSN(middle - 1), 1)).receive()
        await connection.close()
        assert [r.value async for r in log.subscribe("t", follow=False)] == [b"%d" % i for i in range(5, 10)]

    with_log(tmp_path, test)
