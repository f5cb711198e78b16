"""The notes that a traced cluster takes are those that the benchmark looks for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.cluster import STEPS, TOPIC, Notes, one_by_one, steps, traced_cluster
from cutwater.admin.local_cluster import LocalCluster
from cutwater.client.async_client import AsyncClient

APPENDS = 30


async def append(cluster: LocalCluster) -> list[tuple[int, int]]:
    async with await AsyncClient.connect(cluster.servers) as log:
        await log.create_topic(TOPIC, streams=1, replication=3)
        return await one_by_one(log, APPENDS)


def test_every_step_of_an_append_is_noted(tmp_path: Path) -> None:
    with traced_cluster(tmp_path, 1) as (cluster, folder):
        times = asyncio.run(append(cluster))
        heads = {cluster.storage_nodes[0].pid}
    notes = Notes(folder, heads)
    found = [steps(notes, sent, answered) for sent, answered in times]
    whole = [step for step in found if step is not None]
    assert len(whole) > APPENDS // 2, f"of {APPENDS} appends, only {len(whole)} left all notes: {notes.of.keys()}"
    assert all(len(step) == len(STEPS) for step in whole)
