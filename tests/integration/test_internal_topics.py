"""Internal topics, reserved names and changes of replication on real servers, files and sockets."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from cutwater.admin.cluster_security import check_names
from cutwater.admin.local_cluster import LocalCluster, health, reserved_names
from cutwater.admin.operations import Admin
from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster import topics as client_topics
from cutwater.client.cluster.credentials import ANYONE
from cutwater.core.internal_topics import AUDIT, PROGRAMS
from cutwater.core.order import request_handling
from cutwater.core.requests import DescribeRequest, Description, InternalTopics, MakeInternalTopicsRequest
from cutwater.errors import CutwaterError, InvalidArgument, Refused
from tests.integration.log_cluster import LogCluster, with_log
from tests.integration.real_cluster import (
    RECOVERY_SECONDS,
    TOPIC,
    judge,
    kill,
    loaded,
    restart,
    running_cluster,
    until,
)

pytestmark = pytest.mark.timeout(300)

BOTH = MakeInternalTopicsRequest((AUDIT, PROGRAMS))


async def cutwater(cluster: LogCluster, *arguments: str) -> str:
    """Run a command, which must succeed, against the servers of this process."""
    command = [sys.executable, "-m", "cutwater.cli", *arguments, "--servers", cluster.servers]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    try:
        told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, told.decode()
    return told.decode()


async def until_copies(cluster: LocalCluster, wanted: int) -> None:
    """Each log stream is open and complete on so many storage nodes, and no other belongs to it."""

    async def holds() -> bool:
        async with Admin(cluster.addresses) as admin:
            streams = (await admin.describe()).streams
        return all(s.is_open and len(s.members) == len(s.replicas) == s.wanted == wanted for s in streams)

    await until(holds, f"{wanted} copies of each log stream", 3 * RECOVERY_SECONDS)


async def grow_and_shrink(directory: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}: set it in grow_and_shrink to get the same load")
    rng = random.Random(seed)
    async with running_cluster(directory) as cluster:
        async with loaded(cluster, seed, streams=2, replication=1) as load:
            async with await AsyncClient.connect(cluster.servers) as log:
                changed = await log.change_topic(TOPIC, replication=3)
            assert changed.replication == 3
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            node = rng.choice(cluster.storage_nodes)
            kill(node)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            await restart(directory, cluster, node)
            await until_copies(cluster, 3)
            await load.until_acknowledged(50, RECOVERY_SECONDS)
            async with Admin(cluster.addresses) as admin:
                await admin.change_replication(TOPIC, 2)
            await until_copies(cluster, 2)
            await load.until_acknowledged(50, RECOVERY_SECONDS)
        await judge(directory, cluster, load)


def test_copies_are_added_and_removed_under_load_while_a_node_dies(tmp_path: Path) -> None:
    """Nothing that was acknowledged is lost, and all copies hold the same bytes."""
    asyncio.run(grow_and_shrink(tmp_path))


async def make(cluster: LogCluster) -> object:
    """What only the leader does."""
    assert cluster.metadata is not None
    await cluster.until(lambda: cluster.metadata is not None and cluster.metadata.term is not None, "a leader")
    assert cluster.metadata.term is not None
    return await cluster.metadata.term.decide(BOTH)


async def copies(cluster: LogCluster, topic: str) -> int:
    description: Description = await cluster.ask(DescribeRequest())
    (stream,) = (s for s in description.streams if s.topic == topic)
    return len(stream.members) if stream.is_open else 0


def test_the_leader_makes_internal_topics_and_they_grow_with_the_cluster(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        with pytest.raises(CutwaterError, match="MakeInternalTopicsRequest"):
            await cluster.ask(BOTH)
        made = await make(cluster)
        assert isinstance(made, InternalTopics)
        await cluster.stop_metadata()
        await cluster.start_metadata()
        assert await make(cluster) == made, "another leader makes none again"
        assert [topic.name for topic in await log.topics()] == []
        assert [topic.name for topic in await log.topics(internal=True)] == ["_audit", "_programs"]
        assert json.loads(await cutwater(cluster, "topic", "list", "-o", "json")) == []
        listed = json.loads(await cutwater(cluster, "topic", "list", "--all", "-o", "json"))
        assert [(topic["name"], topic["internal"]) for topic in listed] == [("_audit", True), ("_programs", True)]
        await log.append("_audit", b"first")
        for number in (2, 3):
            await cluster.add_node(number)
            await cluster.start_node(number)
            await log.append("_audit", b"more")

        async def is_grown() -> bool:
            return await copies(cluster, "_audit") == 3 and await copies(cluster, "_programs") == 3

        await cluster.until(is_grown, "three copies of internal topics")
        found = [record.value async for record in log.subscribe("_audit", follow=False)]
        assert found == [b"first", b"more", b"more"]
        with pytest.raises(Refused, match="internal"):
            await log.delete_topic("_audit")

    with_log(tmp_path, test)


def test_patterns_match_no_internal_topic(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await make(cluster)
        await log.create_topic("t")
        for topic in ("t", "_audit"):
            await log.append(topic, topic.encode())
        for pattern in (".*", "_.*", "_audit", "t|_audit"):
            subscribed = log.subscribe(re.compile(pattern), follow=False)
            found = [record.topic async for record in subscribed]
            assert found == (["t"] if re.fullmatch(pattern, "t") else []), pattern
        assert [r.topic async for r in log.subscribe(["t", "_audit"], follow=False)] == ["t", "_audit"]

    with_log(tmp_path, test)


def test_users_make_no_reserved_topics_and_keep_those_that_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        with pytest.raises(InvalidArgument, match=r"'_audit' .* reserved .* choose a name"):
            await log.create_topic("_audit")
        with monkeypatch.context() as earlier:
            # As earlier versions did.
            earlier.setattr(client_topics, "check_not_reserved", lambda name: None)
            earlier.setattr(request_handling, "check_not_reserved", lambda name: None)
            await log.create_topic("_audit")
        assert (await log.create_topic("_audit", exist_ok=True)).name == "_audit"
        first = await log.append("_audit", b"old")
        second = await log.append("_audit", b"new")
        await log.trim("_audit", before=second.glsn)
        assert first.glsn < second.glsn
        assert [r.value async for r in log.subscribe("_audit", follow=False)] == [b"new"]
        assert [topic.name for topic in await log.topics()] == ["_audit"], "it is the user's"
        described = LocalCluster(cluster.servers, [], [])
        ((name, way_out),) = await reserved_names(described)
        assert name == "_audit"
        assert "cutwater subscribe _audit" in way_out
        assert "cutwater topic delete _audit" in way_out
        assert await health(described) == [], "nothing is wrong with it"
        noted = await cutwater(cluster, "cluster", "health")
        assert "all is well\nnote: the name of topic '_audit' is reserved now" in noted
        checks = json.loads(await cutwater(cluster, "doctor", str(tmp_path), "-o", "json"))
        (warned,) = (check for check in checks if check["name"] == "topic _audit")
        assert (warned["verdict"], warned["advice"]) == ("warning", way_out)
        with pytest.raises(Refused, match="Nothing was changed"):
            await make(cluster)
        with pytest.raises(Refused, match=r"Nothing was changed\. topic '_audit': copy its records, then delete it"):
            await check_names(cluster.servers, ANYONE)
        assert [topic.name for topic in await log.topics(internal=True)] == ["_audit"]
        await log.delete_topic("_audit")
        assert isinstance(await make(cluster), InternalTopics)

    with_log(tmp_path, test)
