"""How long appends pause when something dies: real processes, killed with SIGKILL under load.

A pause is the longest time between two acknowledgements around the kill, over all clients of one topic with two log
streams. No operator intervenes: the cluster notices and continues by itself. After each kill, and after each restart of
the victim, the last acknowledged appends are read from every live replica.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.cluster_load import ClusterLoad, leader_of, now_us
from cutwater.admin import local_cluster
from cutwater.admin.local_cluster import ClusterMember, LocalCluster
from cutwater.admin.local_etcd import find_etcd
from cutwater.client.async_client import AsyncClient
from cutwater.runtime import processes
from cutwater.types import StorageNodeId

LEADER_KILLS = 10
NODE_KILLS = 5
WATCHED_SECONDS = 3.0
APPENDERS = 8
LAST = 200
"""Number of appends that are read from every replica."""
TOPIC = "failover"

Choose = Callable[[LocalCluster], Awaitable[ClusterMember]]


class Found(NamedTuple):
    """Seconds by kill: how long no append was acknowledged, and how long until every live replica had all appends."""

    pauses: list[float]
    readable: list[float]


async def kill_and_watch(folder: Path, cluster: LocalCluster, kills: int, choose: Choose) -> Found:
    """Kill a process, watch the cluster, and start the process again, ``kills`` times."""
    load = ClusterLoad(cluster, TOPIC, 1)
    load.start(APPENDERS)
    found = Found([], [])
    try:
        for _ in range(kills):
            await load.until_acknowledged(20, 30.0)
            victim = await choose(cluster)
            killed = now_us()
            os.kill(victim.pid, signal.SIGKILL)
            found.readable.append(await _everywhere(load, cluster, victim))
            await asyncio.sleep(WATCHED_SECONDS)
            await load.until_acknowledged(20, 30.0)
            times = sorted(op.completed for op in load.record.appends if op.ack is not None)
            found.pauses.append(max(b - a for a, b in pairwise(times) if b > killed) / 1e6)
            await asyncio.to_thread(local_cluster.start_again, folder, cluster, victim)
            found.readable.append(await _everywhere(load, cluster, None))
            await asyncio.sleep(WATCHED_SECONDS)
    finally:
        await load.stop()
    return found


async def _everywhere(load: ClusterLoad, cluster: LocalCluster, dead: ClusterMember | None) -> float:
    """Return the seconds until all replicas but those of the dead node have the last appends."""
    started = time.monotonic()
    await load.until_readable([StorageNodeId(m.id) for m in cluster.storage_nodes if m is not dead], 30.0, LAST)
    return time.monotonic() - started


def measure(metadata: int, kills: int, choose: Choose) -> Found:
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-", dir=".") as name:
        folder = Path(name).absolute()
        cluster = local_cluster.start(folder, metadata=metadata)
        try:
            return asyncio.run(_measure(folder, cluster, kills, choose))
        finally:
            processes.stop([member.pid for member in cluster.processes()], 10.0)


async def _measure(folder: Path, cluster: LocalCluster, kills: int, choose: Choose) -> Found:
    async with await AsyncClient.connect(cluster.servers) as log:
        await log.create_topic(TOPIC, streams=2, replication=3)
    return await kill_and_watch(folder, cluster, kills, choose)


def lines() -> list[str]:
    """Return a section of the benchmark report, in Markdown."""

    async def first_node(cluster: LocalCluster) -> ClusterMember:
        return cluster.storage_nodes[0]

    rows = []
    found = measure(1, NODE_KILLS, first_node)
    rows.append(("a storage node, head of one of two log streams", found))
    if find_etcd() is not None:
        found = measure(3, LEADER_KILLS, leader_of)
        rows.append(("the leader of three metadata nodes on etcd", found))
    return [
        "## How long appends pause when something dies",
        "",
        "Killed with SIGKILL under load; three storage nodes, replication 3. No operator intervenes.",
        "",
        "| what is killed | kills | median s | longest s | readable from every living replica, longest s |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {what} | {len(pauses)} | {median(pauses):.2f} | {max(pauses):.2f} | {max(readable):.2f} |"
            for what, (pauses, readable) in rows
        ),
        "",
        f"*Readable*: how long it takes, from the kill and from the start of what was killed, until the last {LAST} "
        "acknowledged appends were read from each replica that lives; the reads themselves are part of it.",
        "",
    ]


if __name__ == "__main__":
    print("\n".join(lines()))
    sys.exit(0)
