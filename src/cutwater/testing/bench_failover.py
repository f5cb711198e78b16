"""How long appends pause when something dies: real processes, killed with SIGKILL under load.

A pause is the longest time between two acknowledgements around the kill, over all clients of one topic with two log
streams. Nobody helps: the cluster notices and goes on by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

from cutwater.admin import local_cluster, processes
from cutwater.admin.local_cluster import LocalCluster, Member
from cutwater.admin.local_etcd import find_etcd
from cutwater.admin.operations import Admin
from cutwater.testing.real_run import Load, leader_of, now_us

LEADER_KILLS = 10
NODE_KILLS = 5
WATCHED_SECONDS = 3.0
APPENDERS = 8
TOPIC = "failover"

Choose = Callable[[LocalCluster], Awaitable[Member]]
StartAgain = Callable[[Path, LocalCluster, Member], None]


async def pauses(folder: Path, cluster: LocalCluster, kills: int, choose: Choose, again: StartAgain) -> list[float]:
    """Kill, watch, start again; seconds for which nothing was acknowledged, by kill."""
    load = Load(cluster, TOPIC, 1)
    load.start(APPENDERS)
    found = []
    try:
        for _ in range(kills):
            await load.until_acknowledged(20, 30.0)
            victim = await choose(cluster)
            killed = now_us()
            os.kill(victim.pid, signal.SIGKILL)
            await asyncio.sleep(WATCHED_SECONDS)
            await load.until_acknowledged(20, 30.0)
            times = sorted(op.completed for op in load.record.appends if op.ack is not None)
            found.append(max(b - a for a, b in pairwise(times) if b > killed) / 1e6)
            await asyncio.to_thread(again, folder, cluster, victim)
            await asyncio.sleep(WATCHED_SECONDS)
    finally:
        await load.stop()
    return found


def measure(metadata: int, kills: int, choose: Choose, again: StartAgain) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-", dir=".") as name:
        folder = Path(name).absolute()
        cluster = local_cluster.start(folder, metadata=metadata)
        try:
            return asyncio.run(_measure(folder, cluster, kills, choose, again))
        finally:
            processes.stop([member.pid for member in cluster.processes()], 10.0)


async def _measure(folder: Path, cluster: LocalCluster, kills: int, choose: Choose, again: StartAgain) -> list[float]:
    async with Admin(cluster.addresses) as admin:
        await admin.create_topic(TOPIC, streams=2, replication=3)
    return await pauses(folder, cluster, kills, choose, again)


def lines() -> list[str]:
    """A section of the benchmark report, in Markdown."""

    async def first_node(cluster: LocalCluster) -> Member:
        return cluster.storage_nodes[0]

    rows = []
    found = measure(1, NODE_KILLS, first_node, local_cluster.start_storage_node)
    rows.append(("a storage node, head of one of two log streams", found))
    if find_etcd() is not None:
        found = measure(3, LEADER_KILLS, leader_of, local_cluster.start_metadata)
        rows.append(("the leader of three metadata nodes on etcd", found))
    return [
        "## How long appends pause when something dies",
        "",
        "Killed with SIGKILL under load; three storage nodes, replication 3. Nobody helps.",
        "",
        "| what is killed | kills | median s | longest s |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {what} | {len(found)} | {median(found):.2f} | {max(found):.2f} |" for what, found in rows),
        "",
    ]


if __name__ == "__main__":
    print("\n".join(lines()))
    sys.exit(0)
