"""Measures how fast a cluster, or an embedded log, takes and delivers records, as one client sees it.

Every measurement is bounded in time and in bytes. ``measure`` works in a topic of its own, which is deleted afterwards
in any case.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from math import inf

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.client.async_client import AsyncClient
from cutwater.errors import CutwaterError, NotFound, PermissionDenied

VALUE_BYTES = 100
DELETE_SECONDS_MAX = 10.0
LOOK_EVERY_RECORDS = 1_000


class AppendLoad(Struct, frozen=True):
    """Appends of ``rows`` records each, as an Arrow batch; of one plain value if ``rows`` is 0."""

    topic: str
    rows: int
    in_flight: int
    value_bytes: int = VALUE_BYTES

    def made(self) -> bytes | pa.RecordBatch:
        if not self.rows:
            return os.urandom(self.value_bytes)
        data = os.urandom(self.rows * self.value_bytes)
        size = self.value_bytes
        values = pa.array([data[i * size : (i + 1) * size] for i in range(self.rows)], pa.binary())
        return pa.record_batch({"value": values})


class Figures(Struct, frozen=True):
    """Results of a measurement. ``latencies`` in seconds, of appends that were waited for one by one."""

    records: int
    begun: float
    ended: float
    latencies: list[float]


async def append_for(log: AsyncClient, load: AppendLoad, seconds: float, records_max: int | None = None) -> Figures:
    """Append the same records repeatedly with ``load.in_flight`` tasks, each one append after the other, for
    ``seconds`` or until ``records_max`` records."""
    records, topic, most = load.made(), load.topic, inf if records_max is None else records_max
    begun, count, latencies = time.monotonic(), 0, list[float]()
    end = begun + seconds

    async def one_after_the_other() -> None:
        nonlocal count
        now = time.monotonic()
        while now < end and count < most:
            ack, sent = await log.append(topic, records), now
            count += ack.count
            now = time.monotonic()
            latencies.append(now - sent)

    async with asyncio.TaskGroup() as appenders:
        for _ in range(load.in_flight):
            appenders.create_task(one_after_the_other())
    return Figures(count, begun, time.monotonic(), latencies)


async def read_for(log: AsyncClient, topic: str, as_batches: bool, seconds: float) -> Figures:
    """Read from the beginning, to the end or for ``seconds``."""
    begun, count = time.monotonic(), 0
    if as_batches:
        async with log.batches(topic, follow=False) as batches:
            async for batch in batches:
                count += batch.num_rows
                if time.monotonic() > begun + seconds:
                    break
        return Figures(count, begun, time.monotonic(), [])
    async with log.subscribe(topic, follow=False) as records:
        async for _ in records:
            count += 1
            if not count % LOOK_EVERY_RECORDS and time.monotonic() > begun + seconds:
                break
    return Figures(count, begun, time.monotonic(), [])


class LoadPlan(Struct, frozen=True, kw_only=True):
    """Limits of a load test. ``seconds`` applies to each part; ``bytes_max`` to the values of all parts together, in
    one copy."""

    seconds: float = 3.0
    bytes_max: int = 256 * 1024 * 1024
    value_bytes: int = VALUE_BYTES
    batch_records: int = 1_000
    concurrent: int = 96
    streams: int = 1
    replication: int | None = None


class LoadMeasurement(Struct, frozen=True):
    """One measurement. Latencies are those of appends, in milliseconds."""

    what: str
    records: int
    seconds: float
    records_per_second: float
    mb_per_second: float
    median_ms: float | None
    p99_ms: float | None


BATCHES_IN_FLIGHT = 4


async def measure(log: AsyncClient, topic: str, plan: LoadPlan) -> AsyncIterator[LoadMeasurement]:
    """Yield each part when it is done. ``topic`` must be empty; ``own_topic`` creates and deletes it."""
    size, left = plan.value_bytes, plan.bytes_max // plan.value_bytes
    loads = [
        (
            f"append batches of {plan.batch_records} records, {BATCHES_IN_FLIGHT} in flight",
            AppendLoad(topic, plan.batch_records, BATCHES_IN_FLIGHT, size),
        ),
        (f"append single records, {plan.concurrent} in flight", AppendLoad(topic, 0, plan.concurrent, size)),
        ("append single records, one at a time", AppendLoad(topic, 0, 1, size)),
    ]
    await log.append(topic, loads[0][1].made())
    for at, (what, load) in enumerate(loads):
        # The first part is the fastest and gets most of the bytes, but leaves some for the others.
        share = max(1, left // 2 if at < len(loads) - 1 else left)
        figures = await append_for(log, load, plan.seconds, share)
        left -= figures.records
        yield _part(what, figures, size)
    for what, as_batches in (("subscribe, as Arrow batches", True), ("subscribe, as records", False)):
        yield _part(what, await read_for(log, topic, as_batches, plan.seconds), size)


def _part(what: str, figures: Figures, value_bytes: int) -> LoadMeasurement:
    seconds = max(figures.ended - figures.begun, 1e-9)
    rate = figures.records / seconds
    latencies = sorted(figures.latencies)
    median = statistics.median(latencies) * 1_000 if latencies else None
    p99 = latencies[int(len(latencies) * 0.99)] * 1_000 if latencies else None
    return LoadMeasurement(what, figures.records, seconds, rate, rate * value_bytes / 1e6, median, p99)


@asynccontextmanager
async def own_topic(log: AsyncClient, plan: LoadPlan) -> AsyncIterator[str]:
    """Create a topic and yield its name; delete it in any case. If that fails, the error says what is left."""
    name = f"cutwater-bench-{os.urandom(6).hex()}"
    try:
        await log.create_topic(name, streams=plan.streams, replication=plan.replication)
    except PermissionDenied:
        # Nothing was made, and what is to be told is this.
        raise
    except BaseException:
        await asyncio.shield(asyncio.ensure_future(_delete(log, name)))
        raise
    try:
        yield name
    finally:
        # Even a cancelled caller waits for the deletion: otherwise an unknown topic would stay for ever.
        await asyncio.shield(asyncio.ensure_future(_delete(log, name)))


async def _delete(log: AsyncClient, name: str) -> None:
    try:
        with suppress(NotFound):
            await log.delete_topic(name, timeout=DELETE_SECONDS_MAX)
    except CutwaterError as error:
        error.message += f"; topic {name!r} may be left: delete it with `cutwater topic delete {name}`"
        raise
