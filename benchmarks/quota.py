"""What a quota is worth to others: append latency of one principal next to another one that floods.

The flooder is a process of its own. In one kind of round it sends as fast as it can, and has a quota; in the other it
has none, and holds itself to the same rate: its appends take turns, and each one waits until the bytes before it are
due. The ratio says what it costs others that the servers hold the flooder back, and not the flooder itself. The kinds
of rounds take turns, on the same cluster, and a different one begins each time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from msgspec import Struct

from cutwater.admin import local_cluster
from cutwater.admin.cluster_security import SecuredCluster, secure_local
from cutwater.admin.operations import Admin
from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.credentials import Access
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.core.access.access_decisions import AccessMode
from cutwater.errors import CutwaterError
from cutwater.runtime import processes
from cutwater.runtime.event_loop import run
from cutwater.wire.identity.tls import client_tls

ROUNDS = 6
ROUND_SECONDS = 6.0
SETTLE_SECONDS = 3.5
"""Not measured: the shares of the servers follow the demand."""
QUOTA = 2_000_000
RECORD_BYTES = 10_000
FLOODERS = 64
MEASURED_BYTES = 100
APPEND_SECONDS_MAX = 30.0


class Place(Struct, frozen=True):
    """Where and as whom a process connects."""

    servers: str
    authority: str
    token: str

    async def client(self) -> AsyncClient:
        return await AsyncClient.connect(self.servers, token=self.token, tls=client_tls(Path(self.authority)))


class Round(Struct):
    """Latencies of the other principal, in seconds, and bytes per second that the flooder appended."""

    latencies: list[float]
    flooded: float

    @property
    def p99(self) -> float:
        return sorted(self.latencies)[int(0.99 * len(self.latencies))]


async def flood(place: Place, rate: float | None, until: float) -> int:
    """Append until that time of the monotonic clock. ``rate``: at most so many bytes per second. Returns the bytes."""
    done, began, record = 0, time.monotonic(), b"x" * RECORD_BYTES
    promised, turn = 0, asyncio.Lock()

    async def work(log: AsyncClient) -> None:
        nonlocal done, promised
        while time.monotonic() < until:
            if rate is not None:
                # One at a time, so that waiting takes no processor time from the other principal.
                async with turn:
                    await asyncio.sleep(max(0.0, began + promised / rate - time.monotonic()))
                    promised += RECORD_BYTES
            try:
                await log.append("flooded", record, timeout=APPEND_SECONDS_MAX)
                done += RECORD_BYTES
            except CutwaterError:
                # It is over its quota for longer than it waits.
                continue

    async with await place.client() as log:
        await asyncio.gather(*(work(log) for _ in range(FLOODERS)))
    return done


def _flooder(place: Place, rate: float | None, until: float, told: Connection) -> None:
    told.send(run(flood(place, rate, until)))


async def _measured(place: Place, until: float) -> list[float]:
    latencies = []
    async with await place.client() as log:
        while time.monotonic() < until:
            began = time.monotonic()
            await log.append("measured", b"x" * MEASURED_BYTES)
            latencies.append(time.monotonic() - began)
    return latencies


async def measure_round(flooder: Place, other: Place, rate: float | None) -> Round:
    """``rate``: the flooder holds itself to it; None if it has a quota."""
    begin = time.monotonic() + SETTLE_SECONDS
    until = begin + ROUND_SECONDS
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_flooder, args=(flooder, rate, until, there))
    process.start()
    try:
        await asyncio.sleep(begin - time.monotonic())
        latencies = await _measured(other, until)
        flooded = await asyncio.to_thread(here.recv)
    finally:
        process.join(APPEND_SECONDS_MAX)
        if process.is_alive():
            process.kill()
    return Round(latencies, flooded / (SETTLE_SECONDS + ROUND_SECONDS))


async def measure(secured: SecuredCluster, rounds: int) -> tuple[list[Round], list[Round]]:
    """Return the rounds with the quota, and those without."""
    tls = client_tls(Path(secured.authority))
    access = Access(token=Path(secured.token_file).read_text().strip(), tls=tls)
    with_quota, without = [], []
    owner = await AsyncClient.connect(secured.servers, token=access.token, tls=tls)
    async with owner, Admin(parse_servers(secured.servers), access=access) as admin:
        places: dict[str, Place] = {}
        for name, topic in (("flooder", "flooded"), ("other", "measured")):
            created = await admin.control.create_token(name)
            await admin.control.allow(name, ["append"], f"topic:{topic}")
            await owner.create_topic(topic, streams=2, replication=1)
            places[name] = Place(secured.servers, secured.authority, created.token)
        for at in range(rounds):
            for has_quota in (True, False) if at % 2 == 0 else (False, True):
                if has_quota:
                    await admin.control.set_quota("flooder", bytes_in_per_s=QUOTA)
                    with_quota.append(await measure_round(places["flooder"], places["other"], None))
                    await admin.control.remove_quota("flooder")
                else:
                    without.append(await measure_round(places["flooder"], places["other"], QUOTA))
    return with_quota, without


def lines(rounds: int = ROUNDS) -> list[str]:
    """Return a section of the benchmark report, in Markdown."""
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-", dir=".") as name:
        folder = Path(name).absolute()
        cluster = local_cluster.start(folder, storage_nodes=2, replication=1, has_tls=True)
        try:
            secured = secure_local(folder, mode=AccessMode.ENFORCED)
            with_quota, without = asyncio.run(measure(secured, rounds))
        finally:
            processes.stop([member.pid for member in cluster.processes()], 10.0)
    ratios = [a.p99 / b.p99 for a, b in zip(with_quota, without, strict=True)]
    return [
        "## Quotas: what others notice of a flood",
        "",
        f"Two storage nodes, with access control and TLS. One principal floods with records of {RECORD_BYTES} bytes; "
        f"another one appends {MEASURED_BYTES} bytes at a time. {rounds} rounds of each kind of {ROUND_SECONDS:g} s, "
        "taking turns.",
        "",
        "| the flooder | its MB/s, of its limit | p50 ms of the other | p99 ms of the other |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {what} | {median(one.flooded for one in found) / 1e6:.2f} of {QUOTA / 1e6:.2f} | "
            f"{1e3 * median(median(one.latencies) for one in found):.2f} | "
            f"{1e3 * median(one.p99 for one in found):.2f} |"
            for what, found in (("has a quota", with_quota), ("holds itself to that rate", without))
        ),
        "",
        f"Ratio of p99, quota to own restraint: {median(ratios):.2f} (rounds: {min(ratios):.2f} to {max(ratios):.2f}).",
        "",
    ]


if __name__ == "__main__":
    print("\n".join(lines(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)))
    sys.exit(0)
