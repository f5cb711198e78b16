"""Quotas over real connections: what is accepted in ten seconds, what is refused, and how servers get their shares."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from cutwater.access.quota_meter import WAITING_MAX
from cutwater.admin.free_ports import free_addresses
from cutwater.client.append.batcher import QUOTA_DIVISOR
from cutwater.client.async_client import AsyncClient
from cutwater.client.produce.producer import AsyncProducer
from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.quotas import QuotaLimits
from cutwater.errors import CutwaterError, QuotaExceeded
from cutwater.protocol import storage_api
from cutwater.protocol.metadata_api import ASK
from cutwater.runtime import system
from cutwater.types import GLSN, LogStreamId
from cutwater.wire.connection import Connection
from tests.integration.access_cluster import AccessCluster, access_cluster, until

pytestmark = pytest.mark.asyncio

ON = AccessMode.ENFORCED
SECONDS = 10.0
WITHIN = 0.10
ATTEMPTS = 3
"""The upper bound must hold each time. The lower one, which a busy machine may miss, once in so many times."""
RIGHTS = "append,read,describe"


async def make_topic(cluster: AccessCluster, name: str, streams: int = 1) -> list[LogStreamId]:
    """Create a topic; return its log streams, in the order of the nodes that hold them."""
    await cluster.admin(r.CreateTopicRequest(name, streams, 1))
    catalog: r.Catalog = await cluster.admin(r.CatalogRequest())
    number = next(info.topic for info in catalog.topics if info.name == name)
    own = [info for info in catalog.streams if info.topic == number]
    return [info.stream for info in sorted(own, key=lambda info: info.chain)]


async def until_true(holds: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not await holds():
            await asyncio.sleep(0.05)


async def limit(cluster: AccessCluster, subject: str, **limits: int) -> None:
    changed = await cluster.admin(q.SetQuotaRequest(subject, QuotaLimits(**limits)))
    assert changed.unconfirmed == ()


async def flood(
    log: AsyncClient, append: Callable[[AsyncClient], Awaitable[object]], workers: int, seconds: float
) -> None:
    """Append as fast as it goes."""
    end = asyncio.get_running_loop().time() + seconds

    async def work() -> None:
        while asyncio.get_running_loop().time() < end:
            await append(log)

    await asyncio.gather(*(work() for _ in range(workers)))


def accepted(cluster: AccessCluster) -> int:
    """Return the bytes of all batches that heads have taken."""
    return accepted_at(cluster, cluster.nodes.keys())


def accepted_at(cluster: AccessCluster, nodes: Iterable[int]) -> int:
    return sum(cluster.nodes[node].node.counters.append_bytes for node in nodes)


async def heads_of(cluster: AccessCluster) -> dict[str, set[int]]:
    """Return the nodes that are heads of log streams of each topic."""
    catalog: r.Catalog = await cluster.admin(r.CatalogRequest())
    return {
        topic.name: {int(one.chain[0]) for one in catalog.streams if one.topic == topic.topic}
        for topic in catalog.topics
    }


async def test_a_quota_holds_over_ten_seconds_with_skewed_traffic(tmp_path: Path) -> None:
    quota, record = 200_000, b"x" * 2_000
    async with access_cluster(tmp_path, nodes=2, mode=ON) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"))
        busy, quiet = await make_topic(cluster, "orders", 2)
        await limit(cluster, "ann", bytes_in_per_s=quota)
        rates = []
        async with cluster.client(ann) as one, cluster.client(ann) as two:

            async def to_busy(log: AsyncClient) -> None:
                await log.append("orders", record, stream=busy)

            async def to_quiet(log: AsyncClient) -> None:
                await log.append("orders", record, stream=quiet)
                # A tenth of the quota.
                await asyncio.sleep(len(record) / (quota * WITHIN))

            floods = [
                asyncio.create_task(flood(one, to_busy, 8, 600)),
                asyncio.create_task(flood(two, to_quiet, 1, 600)),
            ]
            try:
                # The shares follow the demand within a few seconds.
                await asyncio.sleep(4.0)
                for _ in range(ATTEMPTS):
                    before, began = accepted(cluster), system.monotonic()
                    await asyncio.sleep(SECONDS)
                    took = accepted(cluster) - before
                    rates.append(took / (system.monotonic() - began) / quota)
                    assert took <= (1 + WITHIN) * quota * (system.monotonic() - began), rates
                    if rates[-1] >= 1 - WITHIN:
                        break
                told: q.QuotaList = await cluster.admin(q.ListQuotasRequest("ann", with_use=True))
            finally:
                for task in floods:
                    task.cancel()
                await asyncio.gather(*floods, return_exceptions=True)
        assert max(rates) >= 1 - WITHIN, rates
        (use,) = told.used
        assert use.subject == "ann"
        assert use.used.bytes_in_per_s == pytest.approx(quota, rel=0.3), "averages of both nodes together"
        assert use.used.requests_per_s is None, "that has no limit"
        counts = [node.access.control.quotas.counters for node in cluster.nodes.values()]
        assert sum(count.delayed["bytes_in_per_s"] for count in counts) > 0


async def test_named_producers_of_large_batches_use_their_quota(tmp_path: Path) -> None:
    """One principal has a producer on one node. Another one has two, of which one brings a tenth of its quota, in
    batches seconds apart: its node must not hold a larger share than it needs, nor lack one when a batch comes."""
    quota, batch = 4_000_000, [b"x" * 500_000] * 2
    size = sum(map(len, batch))
    async with access_cluster(tmp_path, nodes=3, mode=ON) as cluster:
        rights = (RIGHTS, "topic:*"), ("produce-as", "producer:*")
        tokens = {name: await cluster.principal(name, *rights) for name in ("ann", "bob")}
        await make_topic(cluster, "ann", 1)
        await make_topic(cluster, "bob", 2)
        for name in tokens:
            await limit(cluster, name, bytes_in_per_s=quota)
        async with cluster.client(tokens["ann"]) as ann, cluster.client(tokens["bob"]) as bob:
            alone = await ann.producer("ann", id="alone")
            busy, quiet = await bob.producer("bob", id="busy"), await bob.producer("bob", id="quiet")

            async def steady(producer: AsyncProducer, seconds: float) -> None:
                while True:
                    sent = await producer.send(batch, timeout=60)
                    if seconds:
                        await sent
                        await asyncio.sleep(seconds)

            slow = size / (quota * WITHIN)
            floods = [asyncio.create_task(steady(*one)) for one in ((alone, 0.0), (busy, 0.0), (quiet, slow))]
            heads = await heads_of(cluster)
            assert len(heads["ann"] | heads["bob"]) == 3, "each producer has a node of its own"
            rates: dict[str, list[float]] = {name: [] for name in tokens}
            try:
                await asyncio.sleep(4.0)
                for _ in range(ATTEMPTS):
                    before, began = {name: accepted_at(cluster, heads[name]) for name in tokens}, system.monotonic()
                    await asyncio.sleep(SECONDS)
                    for name, rate in rates.items():
                        took = accepted_at(cluster, heads[name]) - before[name]
                        rate.append(took / (system.monotonic() - began) / quota)
                        assert rate[-1] <= 1 + WITHIN, rates
                    if all(rate[-1] >= 1 - WITHIN for rate in rates.values()):
                        break
            finally:
                for task in floods:
                    task.cancel()
                await asyncio.gather(*floods, return_exceptions=True)
                for producer in (alone, busy, quiet):
                    with suppress(CutwaterError):
                        await producer.close(timeout=0.1)
        assert all(max(rate) >= 1 - WITHIN for rate in rates.values()), rates


async def test_a_client_over_its_quota_makes_small_batches(tmp_path: Path) -> None:
    """A node lets a batch begin as a whole, so a large one would delay others."""
    quota, record, workers = 2_000_000, b"x" * 10_000, 64
    async with access_cluster(tmp_path, nodes=1, mode=ON) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"))
        await make_topic(cluster, "orders")
        await limit(cluster, "ann", bytes_in_per_s=quota)
        counters = cluster.nodes[1].node.counters
        refused = cluster.nodes[1].access.control.quotas.counters.refused
        async with cluster.client(ann) as log:
            flooding = asyncio.create_task(flood(log, lambda log: log.append("orders", record), workers, 600))
            try:
                await until(lambda: refused["bytes_in_per_s"] > 0, "the quota refuses a batch")
                before = counters.appends
                await until(lambda: counters.appends > before + 40, "those that were made before are in the log")
                taken, size = counters.appends, counters.append_bytes
                await until(lambda: counters.appends >= taken + 20, "more batches are in the log")
                mean = (counters.append_bytes - size) / (counters.appends - taken)
            finally:
                flooding.cancel()
                await asyncio.gather(flooding, return_exceptions=True)
        assert len(record) <= mean <= quota / QUOTA_DIVISOR * 1.1


async def test_many_small_requests_on_many_connections(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=ON) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"), ("describe", "cluster"))
        await limit(cluster, "ann", requests_per_s=40)
        done = 0
        errors: list[QuotaExceeded] = []
        loop = asyncio.get_running_loop()
        end = loop.time() + 5.0

        async def ask() -> None:
            nonlocal done
            connection = await cluster.connection(cluster.node_addresses[1], ann)
            try:
                while loop.time() < end:
                    try:
                        await connection.call(storage_api.DESCRIBE, None, timeout_ms=5_000)
                        done += 1
                    except QuotaExceeded as error:
                        errors.append(error)
            finally:
                connection.abort()

        await asyncio.gather(*(ask() for _ in range(20)))
        assert errors
        for error in errors:
            assert (error.subject, error.limit, error.quota) == ("ann", "requests_per_s", 40)
            assert 0 < error.retry_after <= 30
            assert "ask an administrator for more" in error.message
        assert done <= 40 * (1 + WITHIN) * 5 + 40 * 0.5
        assert done >= 40
        meters = cluster.nodes[1].access.control.quotas._meters
        assert all(len(lane._queue) <= WAITING_MAX for meter in meters.values() for lane in meter._lanes)


async def test_a_request_larger_than_the_quota_per_second_passes_slowly(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=ON) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"))
        await make_topic(cluster, "orders")
        await limit(cluster, "ann", bytes_in_per_s=50_000)
        async with cluster.client(ann) as log:
            began = asyncio.get_running_loop().time()
            for _ in range(2):
                await log.append("orders", b"x" * 100_000, timeout=30)
            await log.append("orders", b"small", timeout=30)
            assert asyncio.get_running_loop().time() - began >= 3.5, "the second one and the third wait for two seconds"
            await log.append("orders", b"x" * 100_000, timeout=30)
            with pytest.raises(QuotaExceeded):
                await log.append("orders", b"small", timeout=0.5)


async def test_a_producer_keeps_its_order_under_a_quota(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=ON) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"), ("produce-as", "producer:*"))
        await make_topic(cluster, "orders")
        async with cluster.client(ann) as log, await log.producer("orders", id="p") as producer:
            await limit(cluster, "ann", bytes_in_per_s=60_000)
            began, futures = asyncio.get_running_loop().time(), []
            for i in range(60):
                futures.append(await producer.send(bytes([i]) * 3_000))
                await asyncio.sleep(0.01)
            await producer.flush(timeout=60)
            assert asyncio.get_running_loop().time() - began >= 1.5, "it has been held back"
            acks = [await future for future in futures]
            assert [ack.glsn for ack in acks] == sorted(ack.glsn for ack in acks)
            assert len({ack.glsn for ack in acks}) == 60


async def test_metadata_nodes_enforce_requests(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, metadata=2, mode=ON) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"))
        await limit(cluster, "ann", requests_per_s=20)
        connections = [await cluster.connection(at, ann) for at in cluster.addresses]
        loop = asyncio.get_running_loop()
        end, done = loop.time() + 4.0, 0

        async def ask(connection: object) -> None:
            nonlocal done
            while loop.time() < end:
                try:
                    await connection.call(ASK, r.ClockRequest(GLSN(0)), timeout_ms=5_000)  # type: ignore[attr-defined]
                    done += 1
                except QuotaExceeded as error:
                    await asyncio.sleep(error.retry_after)

        await asyncio.gather(*(ask(connection) for connection in connections for _ in range(3)))
        assert 20 <= done <= 20 * (1 + WITHIN) * 4 + 12
        # The administrator is under no quota, and the quota goes away like a rule.
        await cluster.admin(q.RemoveQuotaRequest("ann"))
        for _ in range(100):
            await connections[0].call(ASK, r.ClockRequest(GLSN(0)), timeout_ms=5_000)
        for connection in connections:
            connection.abort()


async def test_connections_and_subscriptions_of_a_group(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=ON) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"), ("describe", "cluster"))
        bob = await cluster.principal("bob", (RIGHTS, "topic:*"), ("describe", "cluster"))
        (stream,) = await make_topic(cluster, "orders")
        await cluster.admin(q.CreateGroupRequest("readers", ("ann", "bob")))
        await limit(cluster, "group:readers", connections=3, subscriptions=2)
        place = cluster.node_addresses[1]

        async def usable(token: str) -> object:
            connection = await cluster.connection(place, token)
            await connection.call(storage_api.DESCRIBE, None, timeout_ms=5_000)
            return connection

        opened = [await usable(token) for token in (ann, bob, ann)]
        with pytest.raises(CutwaterError, match="the quota of group:readers is used up"):
            await usable(bob)
        opened.pop().abort()  # type: ignore[attr-defined]
        quotas = cluster.nodes[1].access.control.quotas
        await until(lambda: sum(len(meter.connections) for meter in quotas._meters.values()) == 2, "it is gone")
        opened.append(await usable(bob))
        arguments = storage_api.ReadArguments(stream, GLSN(1), 1_000)
        follow = [one.open_stream(storage_api.FOLLOW, arguments) for one in opened]  # type: ignore[attr-defined]
        await until(lambda: sum(c.streams_sent for m in quotas._meters.values() for c in m.connections) == 2, "two")
        errors = []
        for one in follow:
            try:
                await one.receive(timeout_ms=1_000)
            except QuotaExceeded as error:
                errors.append(error)
            except CutwaterError:
                continue
        assert [error.limit for error in errors] == ["subscriptions"]
        told = q.ListQuotasRequest("group:readers", with_use=True)
        held = QuotaLimits(connections=3, subscriptions=2)

        async def is_told() -> bool:
            found: q.QuotaList = await cluster.admin(told)
            return [use.used for use in found.used] == [held]

        await until_true(is_told)
        await cluster.admin(q.SetAccessModeRequest(AccessMode.PERMISSIVE))
        assert (await cluster.admin(told)).used == (), "quotas do not hold"
        for connection in opened:
            connection.abort()  # type: ignore[attr-defined]


async def test_a_subscription_gets_no_more_than_its_quota(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=ON) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"))
        await make_topic(cluster, "orders")
        async with cluster.client(ann) as log:
            for _ in range(20):
                await log.append("orders", [b"x" * 1_000 for _ in range(20)])
            await limit(cluster, "ann", bytes_out_per_s=100_000)
            began, size = asyncio.get_running_loop().time(), 0
            async with log.subscribe("orders", start="earliest") as records:
                async for record in records:
                    size += len(record.value)
                    if size == 400_000:
                        break
            assert asyncio.get_running_loop().time() - began >= 400_000 / (100_000 * (1 + WITHIN)) - 0.5


async def test_a_leader_that_dies_and_a_node_that_joins(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, metadata=2, mode=ON, lease_seconds=3.0) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"))
        await make_topic(cluster, "orders")
        await limit(cluster, "ann", bytes_in_per_s=200_000)
        async with cluster.client(ann) as log:

            async def append(log: AsyncClient) -> None:
                await log.append("orders", b"x" * 2_000, timeout=20)

            await flood(log, append, 4, 2.0)
            before, began = accepted(cluster), system.monotonic()
            dies = cluster.leader
            flooding = asyncio.create_task(flood(log, append, 4, 8.0))
            await dies.stop(timeout_ms=100)
            cluster.metadata.remove(dies)
            await until(lambda: any(server.leads for server in cluster.metadata), "another one leads")
            await flooding
            rate = (accepted(cluster) - before) / (system.monotonic() - began)
            assert rate <= 200_000 * (1 + WITHIN)
            assert rate >= 20_000, "shares are kept for the lease, and divided again after it"
            # A node that joins gets a share of its own.
            cluster.node_addresses[2] = free_addresses(1)[0]
            await cluster.add_node(2)
            await cluster.start_node(2)
            _, new = await make_topic(cluster, "later", 2)
            flooding = asyncio.create_task(flood(log, append, 4, 6.0))
            began = asyncio.get_running_loop().time()
            for _ in range(5):
                await log.append("later", b"x" * 2_000, stream=new, timeout=20)
            assert asyncio.get_running_loop().time() - began < 5.0
            await flooding


async def test_a_client_without_a_place_gets_the_error_and_nothing_is_unknown(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=ON) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"))
        await make_topic(cluster, "orders")
        # Each client needs a connection to the metadata repository, and one to the storage node.
        await limit(cluster, "ann", connections=3)
        async with cluster.client(ann) as one:
            await one.append("orders", b"1")
            async with cluster.client(ann) as two:
                with pytest.raises(QuotaExceeded, match="connections 3 for the whole cluster"):
                    await two.append("orders", b"2", timeout=2)
                await one.close()
                ack = await two.append("orders", b"3", timeout=20)
                assert ack.llsn == 2, "what was refused is not in the log"


async def test_staged_bytes_are_charged_when_they_are_staged(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=ON) as cluster:
        ann = await cluster.principal("ann", (RIGHTS, "topic:*"), ("publish,describe", "run:*"))
        await make_topic(cluster, "orders")
        await limit(cluster, "ann", staged_bytes=1_000_000)
        rows = [bytes([i % 251]) * 1_000 for i in range(600)]
        store = cluster.nodes[1].staging
        async with cluster.client(ann) as log:
            run = await log.open_run("r", "a-key")
            part = await log.stage(run, 1, "orders", rows)
            assert store.staged_by == {"ann": part.bytes}
            with pytest.raises(QuotaExceeded, match="staged_bytes 1000000"):
                await log.stage(run, 1, "orders", rows, timeout=2)
            # What is decided is published whatever the quota is, and counts until its part is dropped.
            await limit(cluster, "ann", staged_bytes=1_000, bytes_in_per_s=1_000_000)
            await log.publish(run, 1, [part])
            await until(lambda: cluster.nodes[1].node.counters.groups_published == 1, "it is published")
            ask = cluster.nodes[1]._metadata.ask
            await store.tidy(lambda request: ask(request, r.StagedAnswer, timeout_ms=5_000))
            assert store.staged_by == {}
        await cluster.stop_node(1)
        await cluster.start_node(1)
        assert cluster.nodes[1].staging.staged_by == {}


async def until_passed(connection: Connection) -> None:
    """Return when the server has a share, with which one call has passed, and the next one may pass soon."""
    async with asyncio.timeout(20):
        while True:
            with suppress(QuotaExceeded):
                await connection.call(storage_api.DESCRIBE, None, timeout_ms=5_000)
                break
            await asyncio.sleep(0.2)
    await asyncio.sleep(1)


async def test_what_waits_is_bounded_and_refused_before_its_deadline(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, nodes=1, mode=ON) as cluster:
        ann = await cluster.principal("ann", ("describe", "cluster"))
        await limit(cluster, "ann", requests_per_s=2)
        quotas = cluster.nodes[1].access.control.quotas
        connections = [await cluster.connection(cluster.node_addresses[1], ann) for _ in range(3)]
        await until_passed(connections[0])
        calls = [
            asyncio.create_task(connection.call(storage_api.DESCRIBE, None, timeout_ms=5_000))
            for _ in range(900)
            for connection in connections
        ]
        longest = 0
        while not all(call.done() for call in calls):
            lanes = [lane for meter in quotas._meters.values() for lane in meter._lanes]
            longest = max(longest, *(len(lane._queue) for lane in lanes))
            await asyncio.sleep(0.02)
        outcomes = [call.exception() for call in calls]
        refused = [error for error in outcomes if error is not None]
        assert all(isinstance(error, QuotaExceeded) for error in refused)
        assert longest <= WAITING_MAX
        assert 1 <= len(outcomes) - len(refused) <= 6
        # A caller that gives up while its call waits leaves nothing behind.
        call = asyncio.create_task(connections[0].call(storage_api.DESCRIBE, None, timeout_ms=5_000))
        await asyncio.sleep(0.05)
        call.cancel()
        for connection in connections:
            connection.abort()
        await until(lambda: not quotas._meters, "the meter goes with the last connection")
