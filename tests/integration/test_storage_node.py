"""Storage nodes over real sockets and real files, ordered by the real order layer: chain, seal, recovery, learning."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from cutwater.core.requests import DeleteTopicRequest, SealRequest, TrimRequest, UnsealRequest
from cutwater.errors import CutwaterError, InvalidArgument, ResourceExhausted, Trimmed, WrongEpoch
from cutwater.protocol import storage_api as api
from cutwater.storagenode import server
from cutwater.types import GLSN, LLSN, Epoch, ReplicaState
from tests.integration.node_cluster import STREAM, Cluster, batch, with_cluster


def test_an_append_is_on_every_replica_when_it_is_acknowledged(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        answers = [await cluster.append(b"record %d" % i) for i in range(20)]
        assert [answer.ack.llsn for answer in answers] == list(range(1, 21))
        glsns = [answer.ack.glsn for answer in answers]
        assert glsns == sorted(set(glsns))
        expected = [(glsn, b"record %d" % i) for i, glsn in enumerate(glsns)]
        await cluster.until_all_run(20)
        await cluster.until_all_run(answers[-1].ack.llsn)
        for node in (1, 2, 3):
            assert await cluster.read(node) == expected

    with_cluster(tmp_path, test)


def test_a_wrong_epoch_and_damaged_bytes_are_refused(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.append(b"x")
        stream = cluster.order.state.streams[STREAM]
        with pytest.raises(WrongEpoch):
            await cluster.append_to(stream.members[0], Epoch(stream.epoch + 5), b"y")
        async with cluster.client(stream.members[0]) as connection:
            arguments = api.AppendArguments(STREAM, stream.epoch, batch(b"right"))
            with pytest.raises(InvalidArgument):
                await connection.call(api.APPEND, arguments, b"wrong", timeout_ms=2_000)
        assert (await cluster.append(b"z")).ack.llsn == 2

    with_cluster(tmp_path, test, nodes=1)


def test_a_node_that_stops_is_left_out_and_learns_when_it_comes_back(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        before = [await cluster.append(b"before %d" % i) for i in range(5)]
        await cluster.until_all_run()
        victim = cluster.order.state.streams[STREAM].members[1]
        await cluster.stop_node(victim)
        during = [await cluster.append(b"during %d" % i) for i in range(5)]
        assert victim not in cluster.order.state.streams[STREAM].members
        await cluster.start_node(victim)
        await cluster.until(lambda: len(cluster.order.state.streams[STREAM].members) == 3, "it joins again")
        after = await cluster.append(b"after")
        await cluster.until_all_run(after.ack.llsn)
        bodies = [b"before %d" % i for i in range(5)] + [b"during %d" % i for i in range(5)] + [b"after"]
        glsns = [answer.ack.glsn for answer in (*before, *during, after)]
        for node in (1, 2, 3):
            assert await cluster.read(node) == list(zip(glsns, bodies, strict=True))

    with_cluster(tmp_path, test)


def test_all_nodes_restart_and_nothing_acknowledged_is_missing(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        answers = [await cluster.append(b"r%d" % i, count=1) for i in range(10)]
        for number in (1, 2, 3):
            await cluster.stop_node(number)
        for number in (1, 2, 3):
            await cluster.start_node(number)
        last = await cluster.append(b"again")
        assert last.ack.llsn == 11
        head = cluster.order.state.streams[STREAM].members[0]
        expected = [(answer.ack.glsn, b"r%d" % i) for i, answer in enumerate(answers)] + [(last.ack.glsn, b"again")]
        assert await cluster.read(head) == expected

    with_cluster(tmp_path, test)


def test_a_sealed_stream_takes_nothing_until_it_is_unsealed_and_what_is_trimmed_is_gone(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        first = await cluster.append(b"one")
        epoch = cluster.order.state.streams[STREAM].epoch
        head = cluster.order.state.streams[STREAM].members[0]
        await cluster.order.ask(SealRequest(STREAM))
        await cluster.until(lambda: cluster.state(head) is ReplicaState.SEALED, "it is sealed")
        with pytest.raises(CutwaterError) as refused:
            await cluster.append_to(head, epoch, b"two")
        assert refused.value.code == "stream_sealed"
        await cluster.order.ask(UnsealRequest(STREAM))
        second = await cluster.append(b"three")
        head = cluster.order.state.streams[STREAM].members[0]
        assert (first.ack.llsn, second.ack.llsn) == (LLSN(1), LLSN(2))
        assert [body for _, body in await cluster.read(head)] == [b"one", b"three"]
        replica = cluster.nodes[head].node.replicas[STREAM].replica
        await cluster.order.ask(TrimRequest("t", GLSN(second.ack.glsn)))
        await cluster.until(lambda: replica.hard_state.trimmed_before == second.ack.glsn, "the trim arrives")
        with pytest.raises(Trimmed) as trimmed:
            await cluster.read(head, first.ack.glsn)
        assert trimmed.value.first_left == second.ack.glsn

    with_cluster(tmp_path, test)


def test_status_and_verify_tell_what_a_node_has(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.append(b"x" * 1000)
        async with cluster.client(1) as connection:
            status = (await connection.call(api.STATUS, None, timeout_ms=2_000)).value
            assert [(r.stream, r.state, r.committed_end) for r in status.replicas] == [(1, ReplicaState.RUNNING, 1)]
            assert (await connection.call(api.VERIFY, STREAM, timeout_ms=5_000)).value == ()

    with_cluster(tmp_path, test, nodes=1)


def test_one_replica_is_verified_at_a_time_and_readers_keep_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "VERIFY_WAIT_SECONDS", 0.05)

    async def test(cluster: Cluster) -> None:
        await cluster.append(b"x")
        node, may_end = cluster.nodes[1], threading.Event()
        storage = node.node.driver(STREAM).storage
        verify = storage.verify

        def slow(check: Any = None) -> Any:
            assert may_end.wait(20)
            return verify(check)

        monkeypatch.setattr(storage, "verify", slow)
        async with cluster.client(1) as connection, cluster.client(1) as other:
            for _ in range(2):
                # Whoever gives up does not end the thread, which is still the one at a time.
                with pytest.raises(CutwaterError) as given_up:
                    await connection.call(api.VERIFY, STREAM, timeout_ms=100)
                assert given_up.value.code in ("deadline_exceeded", "resource_exhausted")
            with pytest.raises(ResourceExhausted, match="verifies one replica at a time"):
                await other.call(api.VERIFY, STREAM, timeout_ms=5_000)
            assert node.memory.bytes == 0
            may_end.set()
            monkeypatch.setattr(server, "VERIFY_WAIT_SECONDS", 5.0)
            assert (await other.call(api.VERIFY, STREAM, timeout_ms=5_000)).value == ()

    with_cluster(tmp_path, test, nodes=1)


def test_the_data_of_a_deleted_topic_is_removed(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.append(b"x")
        assert all(cluster.replica_path(node).exists() for node in cluster.nodes)
        await cluster.order.ask(DeleteTopicRequest("t"))
        await cluster.until(
            lambda: not any(list(cluster.replica_path(node).parent.glob("lsid=*")) for node in cluster.nodes),
            "the files are gone",
        )
        assert all(not server.node.replicas for server in cluster.nodes.values())
        await cluster.stop_node(1)
        await cluster.start_node(1)
        assert (await cluster.status(1)).replicas == ()

    with_cluster(tmp_path, test)
