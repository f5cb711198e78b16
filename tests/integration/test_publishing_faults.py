"""Real processes are killed while batches are published: each is in the log once and as a whole, by the work of the
leader alone, and nobody ever sees a part of one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.cluster_load import leader_of
from cutwater.admin.local_cluster import ClusterMember, LocalCluster
from cutwater.admin.operations import Admin
from cutwater.admin.publish_audit import verify_published
from cutwater.admin.verification import verify
from cutwater.client.async_client import AsyncClient
from cutwater.client.publish.runs import Run
from cutwater.core.requests import RunDescription, StreamInfo
from cutwater.errors import CutwaterError
from cutwater.types import Part
from tests.integration.real_cluster import (
    RECOVERY_SECONDS,
    kill,
    restart,
    resume,
    running_cluster,
    stop,
    until,
    until_whole,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

SCHEMA = pa.schema({"n": pa.int64(), "text": pa.string()})
BATCH = 1_000_000
LARGE, SMALL = 40_000, 3_000
"""How many rows each batch has for one topic and the other."""
INSIDE_BYTES = 4 * 1024 * 1024
PATIENT = ("--node-dead-after", "5")
"""So that whoever is stopped to hold things up is not left out before the others are killed."""


def rows(numbers: list[int], width: int) -> pa.Table:
    return pa.table({"n": numbers, "text": pa.repeat("x" * width, len(numbers))}, schema=SCHEMA)


async def stage(log: AsyncClient, run: Run, batch: int) -> list[Part | None]:
    """Large parts for one topic, ordered ones for the other."""
    base = batch * BATCH
    parts = []
    for i in range(2):
        large = [base + n for n in range(LARGE) if n // (LARGE // 2) == i]
        parts.append(await log.stage(run, batch, "large", rows(large, 1_000)))
        small = [base + n for n in range(SMALL) if n % 2 == i]
        positions = [n.to_bytes(8, "big") for n in small]
        parts.append(await log.stage(run, batch, "small", rows(small, 10), positions=positions))
    return parts


async def check(log: AsyncClient, topic: str, count: int) -> int:
    """Whatever can be read consists of whole batches, each once and in order; how many those are."""
    table = await log.table(topic, columns=["glsn", "n"])
    numbers, glsns = table["n"].to_pylist(), table["glsn"].to_pylist()
    assert len(numbers) % count == 0, f"{topic}: part of a batch can be seen"
    for batch in range(len(numbers) // count):
        some = slice(batch * count, (batch + 1) * count)
        assert numbers[some] == [batch * BATCH + n for n in range(count)]
        assert glsns[some] == list(range(glsns[some.start], glsns[some.start] + count))
    return len(numbers) // count


@asynccontextmanager
async def watched(cluster: LocalCluster) -> AsyncIterator[None]:
    """Somebody reads all the time and must never see part of a batch."""

    async def watch() -> None:
        async with await AsyncClient.connect(cluster.servers, timeout=5) as log:
            while True:
                try:
                    await check(log, "large", LARGE)
                    await check(log, "small", SMALL)
                except CutwaterError:
                    pass
                await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        outcome = (await asyncio.gather(watching, return_exceptions=True))[0]
    if not isinstance(outcome, asyncio.CancelledError):
        raise outcome if isinstance(outcome, BaseException) else AssertionError(outcome)


async def run_of(cluster: LocalCluster, run: Run) -> RunDescription:
    async with Admin(cluster.addresses) as admin:
        return next(found for found in (await admin.describe()).runs if found.run == run.run)


async def chain_of(cluster: LocalCluster, topic: str) -> tuple[StreamInfo, list[ClusterMember]]:
    async with Admin(cluster.addresses) as admin:
        catalog = await admin.catalog()
    number = next(found.topic for found in catalog.topics if found.name == topic)
    info = next(found for found in catalog.streams if found.topic == number)
    members = {member.id: member for member in cluster.storage_nodes}
    return info, [members[node] for node in info.chain]


def stored_bytes(directory: Path, node: ClusterMember, info: StreamInfo) -> int:
    files = directory.glob(f"sn{node.id}/*/*/lsid={info.stream}/*.entries")
    return sum(path.stat().st_blocks * 512 for path in files)


async def reach(
    moment: str, directory: Path, cluster: LocalCluster, log: AsyncClient, run: Run, batch: int
) -> ClusterMember:
    """Publish a batch up to the given moment and leave it there: one process is stopped, which is returned."""

    async def is_decided() -> bool:
        return (await run_of(cluster, run)).last_batch == batch

    parts = await stage(log, run, batch)
    info, (head, *_) = await chain_of(cluster, "large")
    before = stored_bytes(directory, head, info)
    if moment == "before":
        stop(head)
    asking = asyncio.create_task(log.publish(run, batch, parts))
    try:
        if moment == "inside":
            async with asyncio.timeout(RECOVERY_SECONDS):
                while stored_bytes(directory, head, info) - before < INSIDE_BYTES:
                    await asyncio.sleep(0.001)
            stop(head)
        await until(is_decided, "the batch is decided")
    finally:
        # The driver of the query dies too.
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    groups = (await run_of(cluster, run)).unpublished
    assert "large" in [group.topic for group in groups], "the moment has passed"
    return head


async def test_whoever_is_killed_batches_are_published_once_and_as_a_whole(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}: the order of the faults")
    cases = [(moment, victim) for moment in ("before", "inside") for victim in ("head", "leader", "all")]
    random.Random(seed).shuffle(cases)
    async with (
        running_cluster(tmp_path, metadata_flags=PATIENT) as cluster,
        await AsyncClient.connect(cluster.servers) as log,
    ):
        for topic in ("large", "small"):
            await log.create_topic(topic, schema=SCHEMA)
        run = await log.open_run("totals", "a checkpoint")
        async with watched(cluster):
            for batch, (moment, victim) in enumerate(cases):
                print(f"batch {batch}: {victim} killed {moment}")
                halted = await reach(moment, tmp_path, cluster, log, run, batch)
                _, chain = await chain_of(cluster, "large")
                victims = {
                    "head": chain[:1],
                    "leader": cluster.metadata,
                    "all": [*cluster.metadata, *cluster.storage_nodes],
                }[victim]
                for member in victims:
                    kill(member)
                if halted not in victims:
                    resume(halted)
                await restart(tmp_path, cluster, *victims)

                async def is_published() -> bool:
                    return not (await run_of(cluster, run)).unpublished

                await until(is_published, f"batch {batch} is published by itself", 3 * RECOVERY_SECONDS)
                # Spark asks again, with other rows: the first decision stands.
                again = await log.open_run("totals", "a checkpoint")
                other = [await log.stage(again, batch, "small", rows([666], 1))]
                published = await log.publish(again, batch, other)
                assert [(group.topic, group.count) for group in published] == [("large", LARGE), ("small", SMALL)]
        assert await check(log, "large", LARGE) == len(cases)
        assert await check(log, "small", SMALL) == len(cases)
        await until_whole(cluster)
        async with Admin(cluster.addresses) as admin:
            verified = await verify(await admin.describe(), timeout_ms=60_000)
            ranges = await admin.ranges()
            try:
                groups = await verify_published(ranges, admin.describe, timeout=60)
            finally:
                await ranges.close()
        assert (verified.replicas, verified.findings) == (6, ())
        assert groups == (2 * len(cases), ())


async def test_the_leader_of_three_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    """Outcomes reach a leader by way of followers, whoever leads."""
    async with (
        running_cluster(tmp_path, storage_nodes=2, metadata=3) as cluster,
        await AsyncClient.connect(cluster.servers) as log,
    ):
        for topic in ("large", "small"):
            await log.create_topic(topic, schema=SCHEMA)
        run = await log.open_run("totals", "a checkpoint")
        async with watched(cluster):
            for batch in range(4):
                parts = await stage(log, run, batch)
                asking = asyncio.create_task(log.publish(run, batch, parts, timeout=60))
                if batch in (1, 2):
                    await asyncio.sleep(random.random() * 0.2)
                    leader = await leader_of(cluster)
                    kill(leader)
                published = await asking
                assert [(group.topic, group.count) for group in published] == [("large", LARGE), ("small", SMALL)]
                if batch in (1, 2):
                    await restart(tmp_path, cluster, leader)
        assert await check(log, "large", LARGE) == await check(log, "small", SMALL) == 4


def memory_of(member: ClusterMember) -> int:
    """The most that the process has ever had in memory, in bytes."""
    status = Path(f"/proc/{member.pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_group_of_200_mb_is_published_in_little_memory(tmp_path: Path, ordered: bool) -> None:
    count, parts, width = 200_000, 4, 1_000
    async with (
        running_cluster(tmp_path, storage_nodes=2) as cluster,
        await AsyncClient.connect(cluster.servers, timeout=120) as log,
    ):
        await log.create_topic("t", schema=SCHEMA)
        run = await log.open_run("", "a key")
        first = await log.stage(run, 0, "t", rows([0], 1), positions=[b""] if ordered else None)
        await log.publish(run, 0, [first])
        before = [memory_of(member) for member in cluster.storage_nodes]
        staged = []
        for i in range(parts):
            numbers = list(range(i, count, parts))
            async with await log.stager(run, 1, "t", ordered=ordered) as stager:
                for at in range(0, len(numbers), 5_000):
                    some = numbers[at : at + 5_000]
                    positions = [n.to_bytes(8, "big") for n in some] if ordered else None
                    await stager.write(rows(some, width), positions=positions)
                staged.append(await stager.finish())
        assert sum(part.bytes for part in staged if part) > 200_000_000
        (published,) = await log.publish(run, 1, staged)
        after = [memory_of(member) for member in cluster.storage_nodes]
        print("memory before and after, in MB:", [round(m / 1e6) for m in before], [round(m / 1e6) for m in after])
        table = await log.table("t", start=published.glsn, columns=["n"])
        expected = list(range(count)) if ordered else [n for i in range(parts) for n in range(i, count, parts)]
        assert table["n"].to_pylist() == expected
        assert all(now - then < 150_000_000 for now, then in zip(after, before, strict=True))
