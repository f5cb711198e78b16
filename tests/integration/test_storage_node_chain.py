"""What a chain does when a batch goes astray: it is refused, the replica seals itself, and nobody is told too early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs

from cutwater.core.messages import Replicate
from cutwater.core.order import decisions as d
from cutwater.errors import Refused, StreamSealed
from cutwater.protocol import storage_api as api
from cutwater.types import LLSN, Entry, ReplicaState, StorageNodeId
from cutwater.wire.calls.handlers import Methods
from tests.integration.node_cluster import STREAM, Cluster, batch, with_cluster


async def send_astray(cluster: Cluster, node: int, llsn: int) -> api.EntryRefused:
    """Play the replica before ``node`` in the chain, and give it a batch that does not follow; what it answers."""
    refused: asyncio.Future[api.EntryRefused] = asyncio.get_running_loop().create_future()
    methods = Methods()
    methods.hears(api.ENTRY_REFUSED)(lambda notification: refused.set_result(notification.argument))
    epoch = cluster.order.state.streams[STREAM].epoch
    async with cluster.peer(node, methods) as connection:
        connection.notify(api.REPLICATE, Replicate(STREAM, Entry(LLSN(llsn), epoch, batch(b"astray"))), b"astray")
        async with asyncio.timeout(10):
            return await refused


@pytest.mark.parametrize("gap", [1, 1_000])
def test_a_backup_refuses_what_does_not_follow_and_seals_itself(tmp_path: Path, gap: int) -> None:
    async def test(cluster: Cluster) -> None:
        for i in range(3):
            await cluster.append(b"record %d" % i)
        await cluster.until_all_run(3)
        backup = cluster.order.state.streams[STREAM].members[1]
        cluster.order.is_store_held = True
        refused = await send_astray(cluster, backup, 4 + gap)
        assert (refused.stream, refused.node) == (STREAM, backup)
        assert refused.reason == f"expected LLSN 4, got {4 + gap}"
        assert cluster.state(backup) is ReplicaState.SEALING
        assert cluster.nodes[backup].node.replicas[STREAM].replica.written_end == 3, "nothing was taken"
        cluster.order.release_store()
        answer = await cluster.append(b"after")
        assert answer.ack.llsn == 4
        await cluster.until_all_run(4)
        for node in cluster.nodes:
            assert [body for _, body in await cluster.read(node)] == [b"record 0", b"record 1", b"record 2", b"after"]

    with_cluster(tmp_path, test)


def test_a_storage_node_that_is_not_before_it_in_the_chain_gives_a_replica_nothing(tmp_path: Path) -> None:
    """It proves which node it is, and belongs to the cluster; that is not enough."""

    async def test(cluster: Cluster) -> None:
        await cluster.append(b"record 0")
        await cluster.until_all_run(1)
        first, _, last = cluster.order.state.streams[STREAM].members
        forged = batch(body := b"a record that never existed")
        entry = Entry(LLSN(2), cluster.order.state.streams[STREAM].epoch, forged)
        refused: asyncio.Future[api.EntryRefused] = asyncio.get_running_loop().create_future()
        methods = Methods()
        methods.hears(api.ENTRY_REFUSED)(lambda notification: refused.set_result(notification.argument))
        async with cluster.peer(last, methods, sender=first) as connection:
            connection.notify(api.REPLICATE, Replicate(STREAM, entry, sender=StorageNodeId(2)), body)
            async with asyncio.timeout(10):
                assert f"storage node {first} is not before storage node {last}" in (await refused).reason
            keep_up = api.KeepUpArguments(STREAM, entry.epoch)
            with pytest.raises(Refused, match="is not before"):
                await connection.call(api.KEEP_UP, keep_up, timeout_ms=2_000)
        async with cluster.peer(first, Methods(), sender=last) as connection:
            connection.notify(api.ENTRY_REFUSED, api.EntryRefused(STREAM, entry.epoch, last, "because"))
            await connection.call(api.STATUS, None, timeout_ms=2_000)
        assert {cluster.state(node) for node in cluster.nodes} == {ReplicaState.RUNNING}
        await cluster.append(b"record 1")
        await cluster.until_all_run(2)
        assert cluster.order.state.streams[STREAM].epoch == entry.epoch
        for node in cluster.nodes:
            assert [body for _, body in await cluster.read(node)] == [b"record 0", b"record 1"]

    with_cluster(tmp_path, test)


def test_a_wrong_llsn_that_is_there_already_with_other_bytes_is_refused_too(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        # The head learns the topic's schema with the first append, which takes an order layer that answers.
        await cluster.append(b"committed")
        await cluster.until_all_run(1)
        decided = len(cluster.order.decisions)
        cluster.order.is_store_held = True
        stream = cluster.order.state.streams[STREAM]
        head, backup = stream.members[0], stream.members[1]
        waiting = asyncio.create_task(cluster.append_to(head, stream.epoch, b"uncommitted"))
        await cluster.until(
            lambda: any(isinstance(one, d.Cut) and one.commits for one in cluster.order.decisions[decided:]),
            "all members have it on disk, and a cut that is not stored yet has it",
        )
        refused = await send_astray(cluster, backup, 2)
        assert refused.reason == "expected LLSN 3, got 2"
        assert cluster.state(backup) is ReplicaState.SEALING
        cluster.order.release_store()
        assert (await waiting).ack.llsn == 2
        await cluster.until_all_run(2)
        for node in cluster.nodes:
            assert [body for _, body in await cluster.read(node)] == [b"committed", b"uncommitted"]

    with_cluster(tmp_path, test)


def test_waiters_of_the_head_get_a_definite_answer_when_the_sealed_position_is_stored_and_not_before(
    tmp_path: Path,
) -> None:
    async def test(cluster: Cluster) -> None:
        order = cluster.order
        await cluster.append(b"committed")
        await cluster.until_all_run(1)
        stream = structs.replace(order.state.streams[STREAM])  # As it is now, not as it becomes.
        head, backup = stream.members[0], stream.members[1]
        order.is_store_held = True
        # The backup misses a batch, from here on it takes nothing; then the head gets an append for it.
        await send_astray(cluster, backup, 99)
        waiting = asyncio.create_task(cluster.append_to(head, stream.epoch, b"lost"))
        await cluster.until(lambda: cluster.state(head) is ReplicaState.SEALING, "the head hears that it was refused")
        assert cluster.nodes[head].node.replicas[STREAM].replica.durable_end >= 1
        await cluster.until(lambda: bool(sealed(cluster, stream.epoch)), "the leader decides to seal")
        assert sealed(cluster, stream.epoch) == [d.Seal]
        assert order.held, "it is decided, but not stored"
        for node in (head, backup):
            # Everything that the leader might have said too early has arrived before this answer.
            await cluster.status(node)
        assert not waiting.done(), "told before the sealed position was stored"
        order.release_store()
        with pytest.raises(StreamSealed, match="was sealed before this append was committed"):
            await waiting
        assert (await cluster.append(b"next")).ack.llsn == 2
        await cluster.until_all_run(2)
        for node in cluster.nodes:
            assert [body for _, body in await cluster.read(node)] == [b"committed", b"next"]

    def sealed(cluster: Cluster, epoch: int) -> list[type]:
        return [type(one) for one in cluster.order.decisions if isinstance(one, d.Seal) and one.epoch == epoch]

    with_cluster(tmp_path, test)


def test_entries_leave_before_they_are_written_the_first_at_once_and_the_others_together(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.until_all_run()
        stream = cluster.order.state.streams[STREAM]
        head = cluster.nodes[stream.members[0]]
        await cluster.until(lambda: not head.node.replicas[STREAM].is_busy, "its hard state is stored")
        forward = head.replicate
        writer = head.node.replicas[STREAM].writer
        left: list[tuple[LLSN, bool]] = []
        waiting: list[int] = []

        def replicate(peer: StorageNodeId, message: Replicate, *, is_first: bool) -> None:
            left.append((message.entry.first_llsn, is_first))
            forward(peer, message, is_first=is_first)

        def before(write: Callable[..., None]) -> Callable[..., None]:
            def noting(*args: Any) -> None:
                waiting.append(head.peers.require(stream.members[1]).snapshot().send_bytes)
                write(*args)

            return noting

        head.replicate = replicate  # type: ignore[method-assign]
        writer.hand_over = before(writer.hand_over)  # type: ignore[method-assign]
        writer.write_here = before(writer.write_here)  # type: ignore[method-assign]
        asker = Mock()
        for body in (b"a", b"b", b"c"):
            whole = structs.replace(batch(body), body=body)
            head.node.append(api.AppendArguments(STREAM, stream.epoch, batch(body)), whole, asker)
        assert left == [(1, True), (2, False), (3, False)]
        assert head.peers.require(stream.members[1]).snapshot().send_bytes > 0
        assert waiting == []
        await cluster.until(lambda: asker.answer.call_count == 3, "all are acknowledged")
        assert [call.args[0].ack.llsn for call in asker.answer.call_args_list] == [1, 2, 3]
        assert waiting
        assert not any(waiting), "what is sent to the next replica waits for the disk"
        await cluster.append(b"d")
        assert left[3:] == [(4, True)]
        asker.fail.assert_not_called()

    with_cluster(tmp_path, test)
