"""Retention on real processes: what is older, or more, than a topic keeps is trimmed, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cutwater.admin.operations import Admin
from cutwater.client.async_client import AsyncClient
from cutwater.types import SECOND, Retention
from tests.integration.real_cluster import running_cluster, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]


async def test_old_records_go_and_new_ones_stay(tmp_path: Path) -> None:
    flags = ("--retention-every", "0.3")
    async with (
        running_cluster(tmp_path, storage_nodes=1, metadata_flags=flags) as cluster,
        await AsyncClient.connect(cluster.servers) as log,
        Admin(cluster.addresses) as admin,
    ):
        await log.create_topic("brief", retention=Retention(time_us=3 * SECOND))
        await log.create_topic("small", retention=Retention(bytes=1))
        await log.create_topic("for-ever")
        old = [await log.append(topic, b"old") for topic in ("brief", "small", "for-ever")]

        async def is_trimmed() -> bool:
            topics = {topic.name: topic for topic in (await admin.catalog()).topics}
            return topics["brief"].trimmed_before > old[0].glsn

        await until(is_trimmed, "the old record trimmed")
        new = await log.append("brief", b"new")
        await asyncio.sleep(1.0)
        assert (await log.read(new.glsn)).value == b"new", "younger than three seconds"
        topics = {topic.name: topic for topic in (await admin.catalog()).topics}
        assert topics["for-ever"].trimmed_before == 1
        assert (await log.read(old[2].glsn)).value == b"old"
        assert (await log.read(old[1].glsn)).value == b"old", "the newest file always stays"
