"""Clusters of shipped servers and clients keep their promises under virtual time, and every run can be replayed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from itertools import count
from typing import Any

import pytest
from msgspec import structs

from cutwater.client.async_client import AsyncClient
from cutwater.client.subscribe.subscriptions import AsyncSubscription
from cutwater.storage.replica.segment_log import SUFFIX as ENTRIES
from cutwater.testing.fault_files import FaultFile
from cutwater.testing.virtual.operations import TopicChanger
from cutwater.testing.virtual.options import PROFILES, ShippedOptions
from cutwater.testing.virtual.simulation import simulate_shipped
from cutwater.testing.virtual.workload import PLAIN
from cutwater.types import Ack
from tests.soak import rounds

SHIPPED_SEEDS = rounds(12, 1_000)
STORM_SEEDS = rounds(2, 200)


@pytest.mark.parametrize("seed", range(SHIPPED_SEEDS))
def test_random_faults(seed: int) -> None:
    check("random", seed)


@pytest.mark.parametrize("seed", range(STORM_SEEDS))
def test_everything_at_once(seed: int) -> None:
    check("storm", seed)


def check(profile: str, seed: int) -> None:
    result = simulate_shipped(seed, PROFILES[profile](seed))
    assert result.violation is None, f"{result.violation}\nreplay it: make simulate SEED={seed} PROFILE={profile}"


@pytest.mark.parametrize("seed", [10, 11])
def test_a_replica_whose_disk_failed_when_it_was_opened_is_opened_again(seed: int) -> None:
    """It may be the only complete one."""
    options = ShippedOptions(
        storage_nodes=2,
        metadata_nodes=1,
        replication=2,
        seconds=1.0,
        producers=0,
        append_pause=0.02,
        down_seconds_max=0.3,
        reads_every=0.1,
        sync_failure=0.1,
        power_all_every=0.4,
    )
    assert simulate_shipped(seed, options).violation is None


def test_the_last_inspection_waits_for_clients_that_still_change_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new log stream would not be on all of its nodes yet."""
    changed: list[bool] = []

    async def change_late(self: TopicChanger, log: AsyncClient) -> None:
        while not self.world.is_stopping:
            await asyncio.sleep(0.1)
        await asyncio.sleep(20.0)
        await log.change_topic(PLAIN, streams=4)
        changed.append(True)

    monkeypatch.setattr(TopicChanger, "run", change_late)
    assert simulate_shipped(1, ShippedOptions(seconds=0.5, change_topics_every=1.0)).violation is None
    assert changed


def test_a_quiet_cluster_acknowledges_everything() -> None:
    result = simulate_shipped(1, ShippedOptions(seconds=2.0))
    assert result.violation is None
    assert (result.appends["unknown"], result.appends["fail"], result.seals) == (0, 0, 0)
    assert result.appends["ok"] > 100


def test_every_workload_is_counted() -> None:
    """The table of a soak shows which operations met which faults."""
    options = ShippedOptions(
        storage_nodes=4,
        replication=2,
        seconds=3.0,
        typed_topic=True,
        sinks=1,
        scans_every=0.2,
        declare_every=0.1,
        cursors_every=0.1,
        operate_every=0.05,
    )
    result = simulate_shipped(3, options)
    assert result.violation is None
    expected = {"append", "produce", "subscribe", "read", "tail", "cursor", "stage", "publish", "scan", "declare"}
    assert expected | {"watermark", "remove node"} <= result.operations.keys()


def test_all_servers_are_restarted_one_after_the_other() -> None:
    result = simulate_shipped(0, ShippedOptions(seconds=2.0, roll_every=0.5))
    assert result.violation is None
    assert result.struck["restart all"] >= 1
    assert result.appends["ok"] > 10


def test_the_same_seed_gives_the_same_trace() -> None:
    """In fresh processes with different hash seeds for texts, and different addresses of objects."""
    seed = 27
    program = [sys.executable, "-m", "cutwater.testing.simulate", "--profile", "random", "--seed", str(seed)]
    traces = {simulate_shipped(seed, PROFILES["random"](seed)).trace_hash}
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        told = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environment, check=False)
        traces.add(told.stdout.splitlines()[-1])
    assert len(traces) == 1


@pytest.fixture
def lying_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not write entries when it is told to."""
    sync = FaultFile.sync_data
    monkeypatch.setattr(FaultFile, "sync_data", lambda file: None if file.path.suffix == ENTRIES else sync(file))


@pytest.mark.usefixtures("lying_disk")
def test_records_that_were_never_synced_are_missed() -> None:
    options = ShippedOptions(power_all_every=0.7, seconds=3.0, down_seconds_max=0.1)
    assert simulate_shipped(1, options).guarantee in ("14 converge", "15 liveness")


def test_a_subscription_that_skips_a_record_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered = count()
    take = AsyncSubscription.__anext__

    async def take_most(subscription: AsyncSubscription[Any]) -> Any:
        taken = await take(subscription)
        return await take(subscription) if next(delivered) == 30 else taken

    monkeypatch.setattr(AsyncSubscription, "__anext__", take_most)
    result = simulate_shipped(0, ShippedOptions(seconds=1.0))
    assert result.guarantee == "7 subscribe"


def test_an_acknowledgement_of_another_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    append, calls = AsyncClient.append, count()

    async def append_wrongly(*given: Any, **options: Any) -> Ack:
        ack: Ack = await append(*given, **options)
        return structs.replace(ack, glsn=ack.glsn + 1) if next(calls) == 10 else ack

    monkeypatch.setattr(AsyncClient, "append", append_wrongly)
    result = simulate_shipped(0, ShippedOptions(seconds=1.0))
    assert result.guarantee in ("1 unique", "3 durable", "12 one cut sequence")
