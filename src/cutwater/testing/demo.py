"""``make demo``: a cluster of real processes takes a city's bike rides, loses a storage node meanwhile, and loses
nothing else.

Three storage nodes and one metadata repository run on this machine and store on disk. Producers append rides and fares
to two topics; a subscriber follows both in one order. Then a storage node is killed. The summary shows what was
appended, what was read back, and how long appends paused. At the end a pipeline runs on the cluster, if Spark is there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random

from cutwater.admin import local_cluster
from cutwater.admin.local_cluster import LocalCluster
from cutwater.client.async_client import AsyncClient
from cutwater.client.produce.producer import AsyncProducer
from cutwater.client.read.records import Record
from cutwater.runtime import processes
from cutwater.types import Ack

SEED = 2026
SECONDS_BEFORE = 3.0
SECONDS_DEAD = 3.0
SECONDS_AFTER = 4.0
CATCH_UP_SECONDS = 30.0
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "fraud.py"
EXAMPLE_SECONDS = 300.0
DOCKS = ("Albert Quay", "Brick Lane", "Castle Hill", "Dry Dock", "East Gate", "Fish Market", "Granary", "Harbour")
TOPICS = ("rides", "fares")


class City:
    """Generates rides: a bike is taken at one dock, returned at another, and paid for."""

    def __init__(self, number: int) -> None:
        self._rng = Random(SEED + number)
        self._number, self._rides = number, 0

    def next_ride(self) -> tuple[bytes, bytes, bytes]:
        """Return a bike, its ride, and the payment."""
        self._rides += 1
        rng = self._rng
        bike = f"bike-{rng.randrange(400):03}"
        minutes = max(2, int(rng.expovariate(1 / 14)))
        start, end = rng.sample(DOCKS, 2)
        ride = f"{self._number}-{self._rides}"
        text = f'{{"ride":"{ride}","bike":"{bike}","from":"{start}","to":"{end}","minutes":{minutes}}}'
        paid = f'{{"ride":"{ride}","cents":{100 + 15 * minutes}}}'
        return bike.encode(), text.encode(), paid.encode()


class Riders:
    """One producer per topic. Notes what was sent, and when it was acknowledged."""

    def __init__(self, number: int, rides: AsyncProducer, fares: AsyncProducer) -> None:
        self._city = City(number)
        self._producers = {"rides": rides, "fares": fares}
        self.sent: dict[tuple[str, bytes], int] = {}
        """Topic and value → GLSN, 0 until it is known."""
        self.acknowledged_at: list[float] = []

    async def ride(self, until: float) -> None:
        while time.monotonic() < until:
            bike, ride, payment = self._city.next_ride()
            await self._send("rides", ride, bike)
            await self._send("fares", payment, bike)
            await asyncio.sleep(0.002)
        for producer in self._producers.values():
            await producer.flush()

    async def _send(self, topic: str, value: bytes, key: bytes) -> None:
        self.sent[topic, value] = 0
        future = await self._producers[topic].send(value, key=key)
        future.add_done_callback(lambda done: self._acknowledged(topic, value, done))

    def _acknowledged(self, topic: str, value: bytes, done: asyncio.Future[Ack]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.sent[topic, value] = done.result().glsn
            self.acknowledged_at.append(time.monotonic())


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--riders", type=int, default=4, help="how many producers per topic (default: 4)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cutwater-demo-") as folder:
        directory = Path(folder)
        say("Starting three storage nodes and a metadata repository ...")
        cluster = local_cluster.start(directory, storage_nodes=3)
        try:
            say(f"They run, at {cluster.servers}.\n")
            failed = asyncio.run(show(directory, cluster, options.riders))
            failed = failed or run_example(cluster.servers)
            if not failed:
                say("\nYour turn: README.md, 'Five minutes'.")
            return failed
        finally:
            processes.stop([member.pid for member in cluster.processes()], 5.0)


def run_example(servers: str) -> int:
    """Run a pipeline on Spark over the same cluster, if Spark is installed and the examples are there."""
    if find_spec("pyspark") is None or not EXAMPLE.exists():
        say("With 'pip install cutwater[spark]', and from a checkout, a pipeline on Spark would follow here.")
        return 0
    say("\nNow a pipeline on Spark over the same cluster: examples/fraud.py looks for stolen cards ...")
    command = [sys.executable, str(EXAMPLE), "--log", servers]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=EXAMPLE_SECONDS)
    say(done.stdout.rstrip() if done.returncode == 0 else done.stderr[-4_000:])
    if done.returncode == 0:
        say("\nWhere to look: examples/, and docs/pipelines.md for what a pipeline means.")
    return done.returncode


async def show(directory: Path, cluster: LocalCluster, riders: int) -> int:
    async with await AsyncClient.connect(cluster.servers) as log:
        for topic in TOPICS:
            await log.create_topic(topic, streams=2, replication=3)
        say("Two topics, 'rides' and 'fares', of two log streams each; every record on three disks.")
        people = [
            Riders(
                i,
                await log.producer("rides", id=f"dock-{i}"),
                await log.producer("fares", id=f"till-{i}"),
            )
            for i in range(riders)
        ]
        seen: list[Record] = []
        subscriber = asyncio.create_task(_follow(log, seen))
        killed_at = await _ride_and_kill(directory, cluster, people)
        expected = sum(len(person.sent) for person in people)
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while len(seen) < expected and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        subscriber.cancel()
        await asyncio.gather(subscriber, return_exceptions=True)
        _show_order(seen)
        return _summarise(people, seen, killed_at)


async def _follow(log: AsyncClient, seen: list[Record]) -> None:
    async for record in log.subscribe(TOPICS, start="earliest"):
        seen.append(record)


async def _ride_and_kill(directory: Path, cluster: LocalCluster, people: list[Riders]) -> float:
    """Let all producers run, kill a storage node meanwhile, and start it again."""
    begun = time.monotonic()
    end = begun + SECONDS_BEFORE + SECONDS_DEAD + SECONDS_AFTER
    riding = [asyncio.create_task(person.ride(end)) for person in people]
    say("Rides begin.")
    await asyncio.sleep(SECONDS_BEFORE)
    victim = cluster.storage_nodes[0]
    killed_at = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    say(f"{SECONDS_BEFORE:.0f} s later: storage node {victim.id} is killed (SIGKILL, in the middle of everything).")
    await asyncio.sleep(SECONDS_DEAD)
    await asyncio.to_thread(local_cluster.start_again, directory, cluster, victim)
    say(f"{SECONDS_DEAD:.0f} s later: it is started again, and learns what it missed.\n")
    await asyncio.gather(*riding)
    return killed_at


def _show_order(seen: list[Record], rows: int = 6) -> None:
    say("One order over both topics and all log streams, as the subscriber got it:\n")
    say(f"  {'GLSN':>7}  {'topic':<9} {'stream':>6}  value")
    middle = len(seen) // 2
    for record in seen[middle : middle + rows]:
        value = (record.value or b"").decode()
        say(f"  {record.glsn:>7}  {record.topic:<9} {record.stream:>6}  {value[:78]}")
    say("")


def _summarise(people: list[Riders], seen: list[Record], killed_at: float) -> int:
    sent: dict[tuple[str, bytes], int] = {}
    for person in people:
        sent.update(person.sent)
    got = {(record.topic, record.value or b""): record.glsn for record in seen}
    in_order = all(a.glsn < b.glsn for a, b in pairwise(seen))
    faults = {
        "records acknowledged that were not read back": sum(1 for what in sent if what not in got),
        "records read more than once": len(seen) - len(got),
        "records at another place than acknowledged": sum(
            1 for what, glsn in sent.items() if got.get(what, glsn) != glsn
        ),
        "records out of order": 0 if in_order else 1,
    }
    times = sorted(at for person in people for at in person.acknowledged_at)
    pause = max((b - a for a, b in pairwise(times) if b > killed_at), default=0.0)
    say(f"  appended and acknowledged   {sum(1 for glsn in sent.values() if glsn)} of {len(sent)} records")
    say(f"  read back, in one order     {len(seen)} records, GLSN {seen[0].glsn} to {seen[-1].glsn}" if seen else "")
    say("                              (the other positions are ticks of time and the openings of producers)")
    say(f"  longest pause of appends    {pause * 1_000:.0f} ms, after the kill")
    for what, count in faults.items():
        say(f"  {what:<45} {count}")
    if any(faults.values()) or not seen:
        say("\nThis must not happen: something was lost or duplicated.")
        return 1
    say("\nA storage node died and nothing was lost.")
    return 0


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
