"""A cluster of real processes under load while they are killed, stopped and cut off: nothing acknowledged is lost,
nothing failed appears, and appends go on by themselves. The judges are the checkers of the simulator."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from benchmarks.cluster_load import ClusterLoad, leader_of, who_leads
from cutwater.admin.local_cluster import ClusterMember, LocalCluster
from cutwater.admin.operations import Admin
from cutwater.core import requests as r
from cutwater.protocol import storage_api
from cutwater.testing.fault_proxy import FaultProxy, opened_by
from cutwater.types import LogStreamId
from cutwater.wire.addresses import parse_address
from cutwater.wire.client import connect
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint
from tests.integration.real_cluster import (
    RECOVERY_SECONDS,
    TOPIC,
    judge,
    kill,
    loaded,
    restart,
    resume,
    running_cluster,
    stop,
    until,
    until_whole,
)
from tests.soak import rounds

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

SEED = random.SystemRandom().randrange(10**6)
PAUSES_MAX = 8
STOPPED_SECONDS = rounds(12, 30)


@pytest.fixture(autouse=True)
def seed() -> int:
    print(f"seed {SEED}: set SEED in {__file__} to it to get the same load")
    return SEED


async def test_storage_nodes_are_killed_one_after_the_other_and_come_back(tmp_path: Path, seed: int) -> None:
    """With RF 3 any two nodes may be dead, the log still takes appends, and nothing acknowledged is lost."""
    async with running_cluster(tmp_path) as cluster:
        async with loaded(cluster, seed) as load:
            first, second, _ = random.Random(seed).sample(cluster.storage_nodes, 3)
            kill(first)
            await load.until_acknowledged(50, RECOVERY_SECONDS)
            kill(second)
            await load.until_acknowledged(50, RECOVERY_SECONDS)
            await restart(tmp_path, cluster, first, second)
            await until_whole(cluster)
            await load.until_acknowledged(50, RECOVERY_SECONDS)
        await judge(tmp_path, cluster, load)


async def test_everything_is_killed_at_once(tmp_path: Path, seed: int) -> None:
    """Durable. 'All replicas killed between a cut and its application' happens here again and again."""
    async with running_cluster(tmp_path) as cluster:
        async with loaded(cluster, seed) as load:
            rng = random.Random(seed)
            for _ in range(3):
                await load.until_acknowledged(rng.randrange(10, 60), RECOVERY_SECONDS)
                for node in cluster.storage_nodes:
                    kill(node)
                if rng.random() < 0.7:
                    kill(cluster.metadata[0])
                    await restart(tmp_path, cluster, cluster.metadata[0])
                await restart(tmp_path, cluster, *cluster.storage_nodes)
                await load.until_acknowledged(20, 2 * RECOVERY_SECONDS)
        await judge(tmp_path, cluster, load)


async def test_a_storage_node_is_stopped_and_goes_on(tmp_path: Path, seed: int) -> None:
    """A dead node seals only its own log streams, and what it believed before it was stopped does no harm."""
    async with running_cluster(tmp_path) as cluster:
        async with loaded(cluster, seed, streams=3, appenders=2) as load:
            node = random.Random(seed).choice(cluster.storage_nodes)
            stop(node)
            await load.until_acknowledged(50, RECOVERY_SECONDS)
            await asyncio.sleep(STOPPED_SECONDS)
            resume(node)
            await until_whole(cluster)
            await load.until_acknowledged(50, RECOVERY_SECONDS)
        await judge(tmp_path, cluster, load)


@pytest.mark.parametrize("fault", ["refuse", "hold"])
async def test_the_network_to_a_node_is_cut_and_heals(tmp_path: Path, seed: int, fault: str) -> None:
    """If both ends live and only their link is cut, repair leaves one of them out, with back-off. Nobody reaches
    the node, peers and clients alike, but it reaches the metadata repository."""
    async with running_cluster(tmp_path) as cluster:
        node = random.Random(seed).choice(cluster.storage_nodes)
        async with FaultProxy(*parse_address(node.address)) as proxy:
            node.flags = ["--advertise", proxy.address]
            kill(node)
            await restart(tmp_path, cluster, node)
            async with loaded(cluster, seed, streams=3) as load:
                assert proxy.connections > 0
                if fault == "refuse":
                    proxy.refuse()
                else:
                    proxy.hold(to_target=True, from_target=True)
                await load.until_acknowledged(50, RECOVERY_SECONDS)
                await asyncio.sleep(1.0)
                await load.until_acknowledged(50, RECOVERY_SECONDS)
                proxy.heal()
                await until_whole(cluster)
                await load.until_acknowledged(50, RECOVERY_SECONDS)
            await judge(tmp_path, cluster, load)


@pytest.mark.parametrize("fault", ["refuse", "hold"])
async def test_the_link_between_two_storage_nodes_is_cut_and_heals(tmp_path: Path, seed: int, fault: str) -> None:
    """If both ends live and only their link is cut, repair leaves one of them out, with back-off. Both talk to
    the metadata repository, to clients and to the third node all the time."""
    async with running_cluster(tmp_path) as cluster, AsyncExitStack() as stack:
        async with loaded(cluster, seed, streams=3) as load, Admin(cluster.addresses) as admin:
            choice = random.Random(seed)
            chain = choice.choice((await admin.describe()).streams).replicas
            place = choice.randrange(len(chain) - 1)
            nodes = {node.id: node for node in cluster.storage_nodes}
            one, two = (nodes[snid] for snid in chain[place : place + 2])
            proxies = []
            for node, other in ((one, two), (two, one)):
                proxy = await stack.enter_async_context(FaultProxy(*parse_address(node.address)))
                proxy.among = opened_by("storage node", str(other.id))
                proxies.append(proxy)
                node.flags = ["--advertise", proxy.address]
                kill(node)
                await restart(tmp_path, cluster, node)
            await until_whole(cluster)
            for proxy in proxies:
                assert proxy.connections > 0
                proxy.refuse() if fault == "refuse" else proxy.hold(to_target=True, from_target=True)

            async def one_is_left_out() -> bool:
                """A chain that leads over the link goes on without one of its ends, and nobody is left out who can talk
                to all others; for long, that is: on a busy machine the third node may be silent for too long."""
                missing = [set(stream.missing) for stream in (await admin.describe()).streams]
                lone = [left_out for left_out in missing if len(left_out) == 1]
                return bool(lone) and all(left_out <= {one.id, two.id} for left_out in missing)

            await until(one_is_left_out, "one end of the link is left out, and nobody else")
            await load.until_acknowledged(50, RECOVERY_SECONDS)
            await asyncio.sleep(2.0)
            await until(one_is_left_out, "one end of the link is still left out, and nobody else")
            await load.until_acknowledged(50, RECOVERY_SECONDS)
            for proxy in proxies:
                proxy.heal()
            await until_whole(cluster)
            await load.until_acknowledged(50, RECOVERY_SECONDS)
        await judge(tmp_path, cluster, load)


async def test_all_replicas_are_killed_between_a_cut_and_its_application(tmp_path: Path, seed: int) -> None:
    """Discarding them lost data when all replicas stopped between a cut and its application. The cut is stored,
    and not one replica hears of it before all are killed."""
    async with (
        running_cluster(tmp_path) as cluster,
        FaultProxy(*parse_address(cluster.metadata[0].address)) as proxy,
    ):
        cluster.metadata[0].flags = ["--advertise", proxy.address]
        kill(cluster.metadata[0])
        for node in cluster.storage_nodes:
            node.flags = ["--metadata", proxy.address]
            kill(node)
        await restart(tmp_path, cluster, cluster.metadata[0], *cluster.storage_nodes)
        async with loaded(cluster, seed) as load, Admin(cluster.addresses) as admin:
            await until_whole(cluster)
            proxy.hold(from_target=True)
            found = dict[LogStreamId, int]()

            async def is_decided_and_not_applied() -> bool:
                before, applied = await _applied(cluster), await _applied(cluster, after_seconds=0.2)
                decided = {s.stream: s.committed_end for s in (await admin.describe()).streams}
                found.update({s: end for s, end in decided.items() if applied == before and end > applied[s]})
                return bool(found)

            await until(is_decided_and_not_applied, "a cut that nobody has applied")
            acknowledged = load.acknowledged
            for node in cluster.storage_nodes:
                kill(node)
            assert load.acknowledged == acknowledged
            proxy.heal()
            await restart(tmp_path, cluster, *cluster.storage_nodes)
            await until_whole(cluster)
            applied = await _applied(cluster)
            assert all(applied[stream] >= end for stream, end in found.items()), (applied, found)
            await load.until_acknowledged(20, RECOVERY_SECONDS)
        await judge(tmp_path, cluster, load)


async def _applied(cluster: LocalCluster, after_seconds: float = 0.0) -> dict[LogStreamId, int]:
    """How far the replica that is furthest has come with each log stream."""
    await asyncio.sleep(after_seconds)
    ends = dict[LogStreamId, int]()
    for node in cluster.storage_nodes:
        # Not where it is advertised: past all proxies.
        connection = await connect(Endpoint(ANY_CLUSTER, "test"), *parse_address(node.address), timeout_ms=5_000)
        try:
            status = (await connection.call(storage_api.STATUS, None, timeout_ms=5_000)).value
        finally:
            connection.abort()
        for replica in status.replicas:
            ends[replica.stream] = max(replica.committed_end, ends.get(replica.stream, 0))
    return ends


async def test_the_metadata_repository_alone_is_killed(tmp_path: Path, seed: int) -> None:
    async with running_cluster(tmp_path) as cluster:
        async with loaded(cluster, seed) as load:
            for _ in range(3):
                kill(cluster.metadata[0])
                await asyncio.sleep(0.2)
                await restart(tmp_path, cluster, cluster.metadata[0])
                await load.until_acknowledged(30, RECOVERY_SECONDS)
        await judge(tmp_path, cluster, load)


async def test_leaders_and_etcd_members_are_killed_and_stopped(tmp_path: Path, seed: int) -> None:
    """Leader death; fencing 'verified by pausing a leader, letting another take over, and resuming it'."""
    async with running_cluster(tmp_path, metadata=3) as cluster:
        async with loaded(cluster, seed) as load:
            leader = await leader_of(cluster)
            kill(leader)
            await load.until_acknowledged(30, RECOVERY_SECONDS)
            await restart(tmp_path, cluster, leader)
            await _stop_and_resume_a_leader(cluster, load)
            kill(cluster.etcd[0])
            await load.until_acknowledged(50, RECOVERY_SECONDS)
        await judge(tmp_path, cluster, load)


async def _stop_and_resume_a_leader(cluster: LocalCluster, load: ClusterLoad) -> None:
    paused = await leader_of(cluster)
    stop(paused)

    others = LocalCluster("", [m for m in cluster.metadata if m is not paused], [])
    await until(lambda: _leads_without(others, paused), "another leader")
    await load.until_acknowledged(30, RECOVERY_SECONDS)
    resume(paused)
    await load.until_acknowledged(50, RECOVERY_SECONDS)

    await until(lambda: _leads_without(cluster, paused), "who was replaced follows")


async def test_what_a_paused_leader_writes_when_it_goes_on_is_refused(tmp_path: Path, seed: int) -> None:
    """Each decision is 'fenced by the leader's epoch'. The leader hangs with all its connections open; another one
    takes over, by missed heartbeats alone; the first write of the old one afterwards is refused by etcd. It comes to
    that write before it hears of its successor, because its connections to etcd, and with them its watch, are gone."""
    async with running_cluster(tmp_path, metadata=3) as cluster, AsyncExitStack() as stack:
        proxies = {}
        for node, etcd in zip(cluster.metadata, cluster.etcd, strict=True):
            proxy = proxies[node.id] = await stack.enter_async_context(FaultProxy(*parse_address(etcd.address)))
            node.flags = ["--store", f"etcd://{proxy.address}/cutwater"]
            kill(node)
            await restart(tmp_path, cluster, node)
        async with loaded(cluster, seed) as load:
            for _ in range(PAUSES_MAX):
                paused = await leader_of(cluster)
                if await _is_refused(tmp_path, cluster, paused, proxies[paused.id], load):
                    break
            else:
                raise AssertionError(f"of {PAUSES_MAX} leaders that were paused, none wrote before it heard of another")
            await load.until_acknowledged(50, RECOVERY_SECONDS)
            await until(lambda: _leads_without(cluster, paused), "who was replaced follows")
        # Among what the checkers look at is that all decisions follow from each other, so none is the old leader's.
        await judge(tmp_path, cluster, load)


async def _is_refused(
    directory: Path, cluster: LocalCluster, paused: ClusterMember, proxy: FaultProxy, load: ClusterLoad
) -> bool:
    """Whether the leader, when it goes on, comes to a write; it may hear of its successor before. It leads no more in
    both cases."""
    log = directory / f"mr{paused.id}.log"
    begun = log.stat().st_size
    stop(paused)
    others = LocalCluster("", [m for m in cluster.metadata if m is not paused], [])
    await until(lambda: _leads_without(others, paused), "another leader")
    await load.until_acknowledged(30, RECOVERY_SECONDS)
    proxy.break_off()
    resume(paused)

    # It does not say so if it had not come as far as to lead, or had been replaced just before it was paused.
    await until(lambda: _follows(paused), "the old leader knows of the new one")
    return "the store refuses decision" in log.read_bytes()[begun:].decode()


async def _follows(member: ClusterMember) -> bool:
    told = await who_leads(member)
    return told is not None and told.leader not in (0, member.id)


async def _leads_without(cluster: LocalCluster, paused: ClusterMember) -> bool:
    return (await leader_of(cluster)).id != paused.id


async def test_sealed_with_a_tail_then_unsealed_then_all_is_killed(tmp_path: Path, seed: int) -> None:
    """'After seal nothing beyond L ever commits in that epoch, on any replica, after any restart.'"""
    async with running_cluster(tmp_path) as cluster:
        async with loaded(cluster, seed, appenders=12) as load, Admin(cluster.addresses) as admin:
            for _ in range(3):
                stream = (await admin.describe()).streams[0].stream
                sealed = await admin.seal(stream)
                await load.until_acknowledged(20, RECOVERY_SECONDS)
                assert (await admin.stream(stream)).committed_end == sealed.llsn
                await admin.unseal(stream)
                await load.until_acknowledged(20, RECOVERY_SECONDS)
            for node in cluster.storage_nodes:
                kill(node)
            await restart(tmp_path, cluster, *cluster.storage_nodes)
            await load.until_acknowledged(20, 2 * RECOVERY_SECONDS)
        await judge(tmp_path, cluster, load)


async def test_streams_come_and_go_in_a_busy_and_in_an_idle_cluster(tmp_path: Path, seed: int) -> None:
    async with running_cluster(tmp_path) as cluster:
        async with Admin(cluster.addresses, timeout_ms=20_000) as admin:
            async with loaded(cluster, seed) as load:
                stream = await admin.add_stream(TOPIC)
                await until(lambda: _has_records(admin, stream), "appends in a stream added to a busy cluster")
                await admin.seal(stream)
                await load.until_acknowledged(300, RECOVERY_SECONDS)
                behind = await admin.stream(stream)
                assert behind.last_glsn + 300 < (await admin.describe()).high_watermark
                await admin.unseal(stream)
                await until(lambda: _has_more(admin, stream, behind), "appends in a stream that was far behind")
                finished = (await admin.describe()).streams[0].stream
                await admin.finalize(finished)
                await load.until_acknowledged(50, RECOVERY_SECONDS)
            idle = await admin.add_stream(TOPIC)
            assert (await admin.stream(idle)).is_open
            await until(lambda: _has_short_history(admin), "cut history at its minimum")
        await judge(tmp_path, cluster, load)


async def _has_records(admin: Admin, stream: LogStreamId) -> bool:
    return (await admin.stream(stream)).committed_end > 0


async def _has_more(admin: Admin, stream: LogStreamId, before: r.StreamDescription) -> bool:
    return (await admin.stream(stream)).committed_end > before.committed_end


async def _has_short_history(admin: Admin) -> bool:
    """When nothing is appended, every replica has everything on disk, and no commit need be kept."""
    return all(stream.history == 0 for stream in (await admin.describe()).streams)


async def test_a_dead_node_is_replaced_while_the_stream_runs(tmp_path: Path, seed: int) -> None:
    """Re-replicates with a learner while the stream runs; never two replicas on one node."""
    flags = ("--replace-node-after", "3")
    async with running_cluster(tmp_path, storage_nodes=4, metadata_flags=flags) as cluster:
        async with loaded(cluster, seed, streams=1, replication=3) as load, Admin(cluster.addresses) as admin:
            members = (await admin.describe()).streams[0].members
            dead = next(member for member in cluster.storage_nodes if member.id == members[1])
            kill(dead)
            await load.until_acknowledged(20, RECOVERY_SECONDS)

            async def is_healed() -> bool:
                stream = (await admin.describe()).streams[0]
                return dead.id not in stream.replicas and len(stream.members) == 3 and stream.is_open

            await until(is_healed, "three copies again", 3 * RECOVERY_SECONDS)
            events = await admin.events()
            assert any("is dead for long" in event.reason for event in events.events)
            await load.until_acknowledged(20, RECOVERY_SECONDS)
        await judge(tmp_path, cluster, load)
